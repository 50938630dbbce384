"""The support matrix of the README, found by running every cell: exact against the oracle, or an error."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hyper_cp import ContextParallel
from hyper_cp.mesh import comm
from hyper_cp.ops import attention, kernels
from hyper_cp.ops.kernels import npu
from hyper_cp.schedule import layout as layouts
from hyper_cp.schedule.documents import documents_table, read
from hyper_cp.schedule.lookup import resolve
from tests.harness import npu_standin
from tests.harness.attention_case import FP32, FP64, inputs
from tests.harness.oracle import plain_attention, relative_error, visible_pairs
from tests.harness.ranks import on_ranks

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = (
    "<!-- support matrix: written by tests/acceptance/test_support.py -->\n",
    "<!-- end of the support matrix -->",
)

MODES: dict[str, dict[str, Any]] = {
    "Ulysses": {"ulysses_degree": None},
    "Colossal": {"ulysses_degree": 1},
    "Colossal, load_balance": {"ulysses_degree": 1, "load_balance": True},
    "ring": {"ulysses_degree": 1, "kv_exchange": "ring"},
    "hybrid with ring": {"ulysses_degree": 2, "kv_exchange": "ring"},
    "hybrid with all-gather": {"ulysses_degree": 2, "kv_exchange": "all_gather"},
}
ROWS: dict[str, dict[str, Any]] = {
    "causal or full": {"causal": True},
    "sliding window": {"causal": True, "window": (9, 0)},
    "packed documents": {"causal": True, "documents": [0, 1, 12, 13, 32]},
    "documents and a window": {"causal": True, "window": (4, 0), "documents": [0, 1, 12, 13, 32]},
    "bool mask": {"mask": "bool"},
    "added mask": {"mask": "added"},
    "grouped-query heads": {"causal": True, "kv_heads": 1},
    "latent heads (dq = dk > dv)": {"causal": True, "v_dim": 8},
    "cross-attention, K/V sharded": {"keys": 16},
    "FlexAttention": {"flex": True, "causal": True},
    "dropout": {"causal": True, "dropout": 0.4},
}
S = 32


def attend(case: dict[str, Any], mode: dict[str, Any], layout: str, dtype: torch.dtype) -> str:
    """``exact``, ``refused`` or ``WRONG`` on this rank, forward and backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    kv_heads, keys = case.get("kv_heads", 4), case.get("keys", S)
    q = inputs(2, 4, 4, S, 16, 16, dtype)[0]
    _, k, v, _ = inputs(2, 4, kv_heads, keys, 16, case.get("v_dim", 16), dtype)
    documents = case.get("documents") or ([0, S] if layout in layouts.BY_DOCUMENTS else None)
    visible, bias, passed = visible_pairs(S, "causal" in case, case.get("window"), [documents or [0, S]]), None, None
    if keys != S:
        visible = torch.ones(S, keys, dtype=torch.bool)
    if case.get("mask"):
        g = torch.Generator().manual_seed(1)
        passed = torch.rand(2, 1, S, S, generator=g) < 0.7
        visible = passed
        if case["mask"] == "added":
            passed = bias = torch.randn(2, 4, S, S, generator=g, dtype=torch.float64).to(dtype)
            visible = visible | True
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want = plain_attention(*wide, visible=visible, bias=None if bias is None else bias.double())
    dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = [want, *torch.autograd.grad(want, wide, dout)]
    rank, world = dist.get_rank(), dist.get_world_size()

    def mine(length: int) -> Tensor:
        packed = read(documents_table(documents)) if length == S else None
        return resolve(layout, world, length, packed).positions(rank)

    at = [mine(S), mine(keys), mine(keys)]
    local = [x[:, :, i].clone().requires_grad_() for x, i in zip((q, k, v), at, strict=True)]
    keywords = {**mode, "layout": layout, "window": case.get("window")}
    try:
        if case.get("flex"):
            out = styled_flex(mesh, keywords, local)
        else:
            keywords.update(documents=documents, attn_mask=passed, dropout_p=case.get("dropout", 0.0))
            out = attention(*local, mesh=mesh, is_causal="causal" in case, enable_gqa=True, **keywords)
    except (NotImplementedError, ValueError) as refusal:
        assert len(str(refusal)) > 60, "a refusal says what would work"
        return "refused"
    if case.get("dropout"):
        return "exact" if out.isfinite().all() else "WRONG"  # exact: ops/kernels/test_dropout.py
    grads = torch.autograd.grad(out, local, dout[:, :, at[0]].to(dtype)) if out.requires_grad else []
    pairs = zip((out, *grads), expected, (at[0], *at), strict=False)
    worst = max(relative_error(a, b[:, :, i]) for a, b, i in pairs)
    return "exact" if worst <= (FP64 if dtype == torch.float64 else FP32) else "WRONG"


class Flexible(nn.Module):
    """Causal attention by FlexAttention (whose CPU kernel has no backward)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]


def styled_flex(mesh: Any, keywords: dict[str, Any], local: list[Tensor]) -> Tensor:
    style = ContextParallel(seq_dim=2, head_dim=1, **keywords)
    return parallelize_module(Flexible(), mesh, {"": style})(*(x.detach() for x in local))


@on_ranks
def cells(on_npu: bool) -> dict[tuple[str, str], str]:
    """The outcome of each cell, in every layout that the mode takes."""
    if on_npu:
        npu_standin.install()
    found = {}
    for name, case in ROWS.items():
        for mode_name, mode in MODES.items():
            if on_npu and case.get("flex"):  # runs torch's kernel, not ours
                found[name, mode_name] = "refused"
                continue
            names = ["contiguous"] if mode.get("load_balance") else ["contiguous", "head_tail"]
            names += ["per_document", "auto"] if case.get("documents") and not mode.get("load_balance") else []
            dtype = torch.float32 if on_npu or case.get("flex") else torch.float64
            with kernels.register(npu.KERNEL, "cpu", npu.accepts) if on_npu else nullcontext():
                (found[name, mode_name],) = {attend(case, mode, layout, dtype) for layout in names}
    assert not comm._in_flight.pending
    return found


def table(cpu: dict[tuple[str, str], str], npu: dict[tuple[str, str], str]) -> str:
    lines = [f"| | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    for name in ROWS:
        on = [
            " ".join(d for d, found in (("CPU", cpu), ("NPU*", npu)) if found[name, mode] == "exact") or "refused"
            for mode in MODES
        ]
        lines.append(f"| {name} | {' | '.join(on)} |")
    return "\n".join(lines) + "\n"


def test_the_matrix_in_the_readme_is_what_happens(ranks: Any, standin: Any) -> None:
    """With HYPER_CP_WRITE_README=1 the matrix is written instead."""
    found = []
    for on_npu in (False, True):
        by_rank = ranks(4, cells, on_npu)
        assert all(cells == by_rank[0] for cells in by_rank), "ranks disagree"
        assert "WRONG" not in by_rank[0].values(), [cell for cell, what in by_rank[0].items() if what == "WRONG"]
        found.append(by_rank[0])
    text = README.read_text()
    before, rest = text.split(BEGIN)
    written, after = rest.split(END)
    made = table(*found)
    if os.environ.get("HYPER_CP_WRITE_README"):
        README.write_text(before + BEGIN + made + END + after)
    else:
        assert written == made, f"the README should say\n{made}"

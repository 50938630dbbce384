"""The matrix of docs/reference/support.md, found by running every cell: exact against the oracle, or an error."""

from __future__ import annotations

import itertools
import os
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hyper_cp import ContextParallel
from hyper_cp.cli.modes import named_mode
from hyper_cp.mesh import failures
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import npu
from tests.harness import npu_standin
from tests.harness.attention_case import FP32, FP64, AttentionCase, Problem, cp_mesh
from tests.harness.oracle import relative_error, visible_logits
from tests.harness.ranks import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support.md"
BEGIN, END = (
    "<!-- support matrix: written by tests/acceptance/test_support.py -->\n",
    "<!-- end of the support matrix -->",
)

MODES = {
    "Ulysses": named_mode("Ulysses"),
    "Colossal": named_mode("all-gather"),
    "Colossal, load_balance": named_mode("all-gather, load_balance"),
    "ring": named_mode("ring"),
    "hybrid with ring": named_mode("hybrid of 2, ring"),
    "hybrid with all-gather": named_mode("hybrid of 2, all-gather"),
    "needed": named_mode("needed"),
    "hybrid with needed": named_mode("hybrid of 2, needed"),
}
S, CAP = 32, 1.5
DOCUMENTS = {"is_causal": True, "documents": ((0, 1, 12, 13, S),)}
ROWS: dict[str, dict[str, Any]] = {
    "causal or full": {"is_causal": True},
    "sliding window": {"is_causal": True, "window": (9, 0)},
    "packed documents": DOCUMENTS,
    "documents and a window": {**DOCUMENTS, "window": (4, 0)},
    "bool mask": {"mask": "bool"},
    "added mask": {"mask": "float"},
    "grouped-query heads": {"is_causal": True, "kv_heads": 1},
    "latent heads (dq = dk > dv)": {"is_causal": True, "v_dim": 8},
    "cross-attention, K/V sharded": {"keys": 16},
    "attention sinks": {"is_causal": True},
    "softcap": {"is_causal": True},
    "FlexAttention": {"is_causal": True},
    "dropout": {"is_causal": True},
}


def attend(row: str, case: AttentionCase, mode: dict[str, Any]) -> str:
    """``exact``, ``refused`` or ``WRONG`` on this rank, forward and backward."""
    mesh, shard = cp_mesh(), case.shard()
    more: dict[str, Any] = {
        "dropout": {"dropout_p": 0.4},
        "softcap": {"softcap": CAP},
        "attention sinks": {"sinks": torch.arange(case.heads, dtype=case.dtype)},
    }.get(row, {})
    try:
        if row == "FlexAttention":
            out = styled_flex(mesh, {**mode, "layout": case.layout}, shard.qkv)
        else:
            out = shard.attend(mesh, **more)
    except (NotImplementedError, ValueError) as refusal:
        assert len(str(refusal)) > 60, "a refusal says what would work"
        return "refused"
    if row == "dropout":
        return "exact" if out.isfinite().all() else "WRONG"  # exact: ops/kernels/test_dropout.py
    grads = torch.autograd.grad(out, shard.qkv, shard.dout)
    if row in ("softcap", "attention sinks"):
        pairs = zip((out, *grads), changed_scores(row, case.problem), strict=True)
        errors = {str(i): relative_error(a, b[:, :, shard.at]) for i, (a, b) in enumerate(pairs)}
    else:
        errors = shard.errors(out, grads)
    return "exact" if max(errors.values()) <= (FP64 if case.dtype == torch.float64 else FP32) else "WRONG"


@lru_cache
def changed_scores(row: str, problem: Problem) -> list[Tensor]:
    """The output of one device and its gradients of q, k, v, with a softcap or with one more column of sinks."""
    q, k, v, dout = (x.double() for x in problem.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    logits, seen = visible_logits(q, k, is_causal=True)
    logits = CAP * torch.tanh(logits / CAP) if row == "softcap" else logits
    logits = logits.masked_fill(~seen, -torch.inf)
    if row == "attention sinks":
        column = torch.arange(problem.heads, dtype=torch.float64).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    out = logits.softmax(-1)[..., : problem.length] @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


class Flexible(nn.Module):
    """Causal attention by FlexAttention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu", BLOCK_SIZE=16)
        return flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]


def styled_flex(mesh: Any, keywords: dict[str, Any], local: list[Tensor]) -> Tensor:
    style = ContextParallel(seq_dim=2, head_dim=1, **keywords)
    return parallelize_module(Flexible(), mesh, {"": style})(*local)


@on_ranks
def cells(on_npu: bool) -> dict[tuple[str, str], str]:
    """The outcome of each cell, in every layout that the mode takes."""
    if on_npu:
        npu_standin.install()
    found = {}
    for (name, row), (mode_name, mode) in itertools.product(ROWS.items(), MODES.items()):
        layouts = ["contiguous"] if mode.get("load_balance") else ["contiguous", "head_tail"]
        layouts += ["per_document", "balanced"] if "documents" in row and not mode.get("load_balance") else []
        layouts = layouts[-1:] if on_npu else layouts  # which tiles there are does not depend on the device
        dtype = torch.float32 if on_npu else torch.float64
        cases = [AttentionCase(S, dim=16, dtype=dtype, layout=x, **{"v_dim": 16, **row}, **mode) for x in layouts]
        with kernels.register(npu.KERNEL, "cpu", npu.accepts) if on_npu else nullcontext():
            (found[name, mode_name],) = {attend(name, case, mode) for case in cases}
    assert not failures.here.pending
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


@pytest.mark.slow
def test_the_matrix_in_the_readme_is_what_happens(ranks: Any, standin: Any) -> None:
    """With HYPER_CP_WRITE_README=1 the matrix is written instead."""
    found = []
    for on_npu in (False, True):
        by_rank = ranks(4, cells, on_npu)
        assert all(cells == by_rank[0] for cells in by_rank), "ranks disagree"
        assert "WRONG" not in by_rank[0].values(), [cell for cell, what in by_rank[0].items() if what == "WRONG"]
        found.append(by_rank[0])
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    written, after = rest.split(END)
    made = table(*found)
    if os.environ.get("HYPER_CP_WRITE_README"):
        PAGE.write_text(before + BEGIN + made + END + after)
    else:
        assert written == made, f"the page should say\n{made}"

"""The matrix of docs/reference/support.md, found by running every cell: exact against the oracle, or an error."""

from __future__ import annotations

import itertools
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hyper_cp.cli.modes import named_mode
from hyper_cp.mesh import failures
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import npu
from tests.harness import npu_standin
from tests.harness.attention_case import FP32, FP64, AttentionCase, cp_mesh, dropout_error, kept_pairs, run_module
from tests.harness.latent_case import LatentCase, called, errors_of, leaves_of
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support.md"
BEGIN, END = (
    "<!-- support matrix: written by tests/acceptance/test_support.py -->\n",
    "<!-- end of the support matrix -->",
)

MODES = {
    "Ulysses": named_mode("Ulysses"),
    "all-gather": named_mode("all-gather"),
    "all-gather, load_balance": named_mode("all-gather, load_balance"),
    "ring": named_mode("ring"),
    "hybrid with ring": named_mode("hybrid of 2, ring"),
    "hybrid with all-gather": named_mode("hybrid of 2, all-gather"),
    "needed": named_mode("needed"),
    "hybrid with needed": named_mode("hybrid of 2, needed"),
}
S, P = 16, 0.4
DOCUMENTS = {"is_causal": True, "documents": ((0, 1, 12, 13, S),)}
ROWS: dict[str, dict[str, Any]] = {
    "causal or full": {"is_causal": True},
    "sliding window": {"is_causal": True, "window": (9, 0)},
    "packed documents": DOCUMENTS,
    "documents and a window": {**DOCUMENTS, "window": (4, 0)},
    "bool mask": {"mask": "bool"},
    "added mask": {"mask": "float"},
    "grouped-query heads": {"is_causal": True, "kv_heads": 1},
    "latent heads (dq = dk > dv)": {"is_causal": True, "v_dim": 4},
    "latent attention, latents travel": {"is_causal": True, "dim": 9, "v_dim": 5},
    "cross-attention, K/V sharded": {"keys": 8},
    "attention sinks": {"is_causal": True, "sinks": True},
    "softcap": {"is_causal": True, "softcap": 1.5},
    "FlexAttention": {"is_causal": True},
    "dropout": {"is_causal": True, "batch": 4},  # the share of kept weights is one of many
}


class Flexible(nn.Module):
    """Causal attention by FlexAttention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu", BLOCK_SIZE=8)
        return flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]


def worst_error(row: str, case: AttentionCase) -> float:
    """The largest error of output and gradients on this rank."""
    if isinstance(case, LatentCase):
        leaves, dout, at = leaves_of(case)
        out = called(case, leaves, at, cp_mesh())
        grads = torch.autograd.grad(out, leaves, dout)
        return max(errors_of(case, leaves, at, out, grads, relative_error).values())
    if row == "FlexAttention":
        return max(run_module(Flexible(), case).values())
    shard, mesh = case.shard(), cp_mesh()
    if row != "dropout":
        return max(shard.step(mesh).values())

    def attend(*qkv: Tensor) -> Any:
        return replace(shard, qkv=qkv).attend(mesh, dropout_p=P)

    kept = kept_pairs(shard, attend)
    share = kept[..., torch.ones(S, S).tril().bool()].mean().item()
    assert abs(share - (1 - P)) < 0.05, f"{share:.2f} of the weights are kept"
    return dropout_error(shard, attend, P, kept)


def outcome(row: str, case: AttentionCase) -> str:
    """``exact``, ``refused`` or ``WRONG`` on this rank, forward and backward."""
    try:
        error = worst_error(row, case)
    except (NotImplementedError, ValueError) as refusal:
        assert len(str(refusal)) > 60, "a refusal says what would work"
        return "refused"
    return "exact" if error <= (FP64 if case.dtype == torch.float64 else FP32) else "WRONG"


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
        kind = LatentCase if name.startswith("latent attention") else AttentionCase
        given = {"batch": 1, "dim": 8, "v_dim": 8, **row, **mode}
        cases = [kind(S, dtype=dtype, layout=x, **given) for x in layouts]
        with kernels.register(npu.KERNEL, "cpu", npu.accepts) if on_npu else nullcontext():
            (found[name, mode_name],) = {outcome(name, case) for case in cases}
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
        by_rank = ranks(4, cells, on_npu, timeout=300)
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

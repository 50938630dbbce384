"""Ulysses: what its exchange of heads does to tensors in memory."""

from __future__ import annotations

from typing import Any

import torch

from hyper_cp.mesh.cp_mesh import view
from hyper_cp.ops.exchange.ulysses import Ulysses
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import on_ranks


@on_ranks
def orders_of_memory() -> list[tuple[bool, float]]:
    """For heads that are contiguous, a part of contiguous heads, and split off and transposed: True if the result is
    contiguous, or has the order of the message; and the error of a round trip."""
    exchange, found = Ulysses(view(cp_mesh()), "head_tail"), []
    transposed = torch.randn(2, 4, 8, 16).transpose(1, 2)
    for q in (torch.randn(2, 8, 4, 16), torch.randn(2, 9, 4, 16)[:, :8], transposed):
        (wide,) = exchange.to_heads(q)
        kept = wide.movedim(2, 0) if q is transposed else wide
        found.append((kept.is_contiguous(), (exchange.to_sequence(wide) - q).abs().max().item()))
    return found


def test_transposed_heads_are_not_copied_after_their_exchange(ranks: Any) -> None:
    """Those whose tokens lie side by side are: the module that receives them may rely on it."""
    for found in ranks(2, orders_of_memory):
        assert found == [(True, 0.0)] * 3

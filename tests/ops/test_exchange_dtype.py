"""Keys, values and their gradients that travel in a narrower dtype: bytes, errors, and the same bits every time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hyper_cp import ContextParallel
from hyper_cp.mesh import comm
from tests.harness.attention_case import FP64, AttentionCase, Errors, check, cp_mesh, modes
from tests.harness.oracle import rms_error
from tests.harness.ranks import on_ranks

TRAVELS = ("send_recv", "all_gather", "reduce_scatter", "all_to_all_rows", "all_to_all")
HALF = torch.finfo(torch.bfloat16).eps  # twice the largest relative error of one rounding


def run(case: AttentionCase, **more: Any) -> tuple[Errors, list[torch.Tensor], tuple[int, int]]:
    """Errors, output and gradients of a call, and the bytes that this rank sends in forward and in backward."""
    shard, mesh = case.shard(), cp_mesh()
    with comm.record_traffic() as log:
        out = shard.attend(mesh, **more)
        forward = sum(n for name, n in log.entries if name in TRAVELS)
        grads = torch.autograd.grad(out, shard.qkv, shard.dout)
        both = sum(n for name, n in log.entries if name in TRAVELS)
    return shard.errors(out, grads), [out.detach(), *grads], (forward, both - forward)


@on_ranks
def compared(cases: list[AttentionCase]) -> list[tuple[Any, ...]]:
    found = []
    for case in cases:
        plain = run(case)
        narrow, again = (run(case, exchange_dtype=torch.bfloat16) for _ in range(2))
        same = all(torch.equal(a, b) for a, b in zip(narrow[1], again[1], strict=True))
        moved = max((a - b).abs().max().item() for a, b in zip(plain[1], narrow[1], strict=True))
        found.append((case, plain[0], narrow[0], same, moved, plain[2], narrow[2]))
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_numbers_that_travel_are_rounded_and_nothing_else(ranks: Any, world: int) -> None:
    """In fp64 what is not rounded is exact. A ring rounds a sum once at each hop, other exchanges once."""
    rings = [mode for mode in modes(world) if not mode["load_balance"] and mode["ulysses_degree"] < world]
    rings = rings if world == 2 else [mode for mode in rings if mode["layout"] == "head_tail"]
    cases = [AttentionCase(24 * world, True, kv_heads=2, **mode) for mode in rings]
    for of_rank in ranks(world, compared, cases):
        for case, plain, narrow, same, moved, before, after in of_rank:
            check([[(case, plain)]], FP64)
            assert same, case
            assert moved > 0, case
            assert max(narrow.values()) <= world * HALF, (case, narrow)
            if case.ulysses_degree == 1:  # Ulysses itself is as it was
                assert after == (before[0] // 4, before[1] // 4), case


@on_ranks
def with_bfloat16(kv_exchange: str) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """Bytes of a call in bfloat16 without and with narrow gradients, and whether outputs are equal."""
    case = AttentionCase(48, True, dtype=torch.bfloat16, kv_exchange=kv_exchange, layout="head_tail")
    plain, narrow = run(case), run(case, exchange_dtype=torch.bfloat16)
    return plain[2], narrow[2], torch.equal(plain[1][0], narrow[1][0])


@pytest.mark.parametrize("kv_exchange", ["ring", "all_gather"])
def test_in_bfloat16_only_gradients_become_narrower(ranks: Any, kv_exchange: str) -> None:
    for plain, narrow, equal in ranks(2, with_bfloat16, kv_exchange):
        assert equal
        assert narrow[0] == plain[0]
        assert (plain[1], narrow[1]) == (3 * plain[0], 2 * plain[0])  # keys, and gradients of twice or once their bytes


def test_a_dtype_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exchange_dtype=torch.float16 must be torch.bfloat16 or"):
        ContextParallel(exchange_dtype=torch.float16)
    assert ContextParallel(exchange_dtype=torch.bfloat16).exchange_dtype is torch.bfloat16


@on_ranks
def differing() -> None:
    case = AttentionCase(24, True)
    dtype = torch.bfloat16 if torch.distributed.get_rank() else None
    replace(case).shard().attend(cp_mesh(), exchange_dtype=dtype)


def test_ranks_that_differ_are_refused(ranks: Any) -> None:
    ranks.raises(2, ValueError, "exchange_dtype", differing)


def relative_rms(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the differences over that of the expected numbers."""
    return rms_error(value, expected) / rms_error(torch.zeros_like(expected), expected)


@on_ranks
def errors_table(kv_exchange: str, dtype: str, wire: str | None) -> dict[str, float]:
    """Errors against fp64 of a call of 1,024 tokens, as docs/measured/communication.md
    has them."""
    options: dict[str, Any] = {"kv_exchange": kv_exchange, "layout": "head_tail", "dtype": getattr(torch, dtype)}
    shard = AttentionCase(1024, True, batch=1, kv_heads=2, dim=64, v_dim=64, **options).shard()
    out = shard.attend(cp_mesh(), exchange_dtype=None if wire is None else getattr(torch, wire))
    return shard.errors(out, torch.autograd.grad(out, shard.qkv, shard.dout), error=relative_rms)


def test_the_errors_of_the_page(ranks: Any) -> None:
    """One row of the table: a ring of two in fp32."""
    plain, narrow = (ranks(2, errors_table, "ring", "float32", wire) for wire in (None, "bfloat16"))
    assert max(e for found in plain for e in found.values()) < 2e-6
    for found in narrow:
        assert max(found.values()) < 4e-3
    assert max(found["out"] for found in narrow) > 1e-3

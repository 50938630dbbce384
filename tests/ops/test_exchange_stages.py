"""The stages of kv_exchange="needed" and "all_gather": exact in any number of them, the same bytes, compared, refused,
and logged."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_cp import ContextParallel, context_parallel
from hyper_cp.mesh import comm
from hyper_cp.ops import attention
from hyper_cp.schedule import choices, lookup
from tests.harness.attention_case import FP64, AttentionCase, check, cp_mesh, run_cases
from tests.harness.ranks import on_ranks

NUMBERS = {"needed": (1, 2, 3, 8), "all_gather": (2, 3, 100)}
WORLD, LENGTH = 2, 48
ROWS = {1: 1, 2: 2, 3: 3, 8: 8, 1000: LENGTH // WORLD, "auto": 1}
"""Stages in which half of a sequence travels to the other of two ranks, by the number that was asked for."""


def cases_of(world: int) -> list[AttentionCase]:
    length = 16 * world
    packed = (0, 5, 17, length), (0, length // 2 + 3, length - 1, length)
    one = ((0, length // 4 + 1, length - 3, length),)
    case = partial(AttentionCase, v_dim=6)
    settings: list[dict[str, Any]] = [
        {"is_causal": True, "layout": "head_tail", "kv_heads": 2},
        {"is_causal": True, "load_balance": True},
        {"is_causal": True, "documents": packed, "kv_heads": 1},
    ]
    if world == 2:
        settings += [
            {"window": (3, 4), "layout": "head_tail"},
            {"is_causal": True, "documents": one, "layout": "balanced", "window": (9, 0)},
            {"mask": "rows and heads"},
            {"keys": 2 * length},
            {"length": 15 * world, "is_causal": True},
        ]
    else:
        settings += [
            {"ulysses_degree": 2, "is_causal": True, "documents": packed, "layout": "head_tail", "kv_heads": 2},
            {"ulysses_degree": 2, "is_causal": True, "kv_heads": 1, "head_groups": 1},
            {"ulysses_degree": 2, "is_causal": True, "window": (6, 0), "head_groups": 2},
        ]
    return [
        case(**{"length": length, **s}, kv_exchange=exchange, exchange_stages=numbers[i % len(numbers)])
        for i, s in enumerate(settings)
        for exchange, numbers in NUMBERS.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_exact_in_fp64(ranks: Any, world: int) -> None:
    check(ranks(world, run_cases, cases_of(world)), FP64)


def test_a_whole_share_for_several_ranks_in_one_stage(ranks: Any) -> None:
    cases = [
        AttentionCase(length=48, kv_exchange="needed", exchange_stages=number, is_causal=causal, layout=layout)
        for number in (1, "auto")
        for causal, layout in ((False, "contiguous"), (True, "head_tail"))
    ]
    check(ranks(3, run_cases, cases), FP64)


# --------------------------------------------------------------------------- bytes and messages


@on_ranks
def traffic(settings: list[dict[str, Any]]) -> list[tuple[int, int, int, int]]:
    """Transfers and bytes of a forward, then of its backward, for each kind of call."""
    found, mesh = [], cp_mesh()
    for how in settings:
        q, k, v = (torch.randn(1, 2, LENGTH // WORLD, 4, requires_grad=True) for _ in range(3))
        with comm.record_traffic() as forward:
            out = attention(q, k, v, mesh=mesh, **how)
        with comm.record_traffic() as backward:
            out.sum().backward()
        sent = [[n for name, n in log.entries if name != "agreement"] for log in (forward, backward)]
        found.append((len(sent[0]), sum(sent[0]), len(sent[1]), sum(sent[1])))
    return found


def test_the_bytes_do_not_depend_on_the_number_of_stages(ranks: Any) -> None:
    settings = [{"kv_exchange": "needed", "exchange_stages": number} for number in ROWS]
    for found in ranks(WORLD, traffic, settings):
        numbers, forward, again, backward = zip(*found, strict=True)
        assert list(numbers) == list(ROWS.values()) and [n // 2 for n in again] == list(numbers)
        assert set(forward) == {LENGTH // WORLD * 2 * 2 * 4 * 4}, "half of the rows of k and v, two heads of four fp32"
        assert set(backward) == {2 * forward[0]}, "the rows again, and their gradients"


def test_so_it_is_in_an_all_gather(ranks: Any) -> None:
    """A stage is a piece of each share; a share of 24 rows has at most 12 that take from either half."""
    pieces = {1: 1, 2: 2, 5: 5, 1000: LENGTH // WORLD // 2, "auto": 1}
    settings = [{"kv_exchange": "all_gather", "exchange_stages": number} for number in pieces]
    for found in ranks(WORLD, traffic, settings):
        numbers, forward, again, backward = zip(*found, strict=True)
        assert list(numbers) == [n / 2 for n in again] == list(pieces.values())
        assert set(forward) == {LENGTH // WORLD * 2 * 2 * 4 * 4} and set(backward) == {2 * forward[0]}


@on_ranks
def chosen() -> list[tuple[int, float]]:
    """Gathers of a call's keys, and its distance from one whole gather: eager, then compiled."""
    mesh = cp_mesh()
    q, k, v = (torch.randn(1, 1, 1024, 4, dtype=torch.float64) for _ in range(3))

    def call(**how: Any) -> torch.Tensor:
        return attention(q, k, v, mesh=mesh, is_causal=True, layout="head_tail", **how)

    want, found = call(exchange_stages=1), []
    for run in (call, torch.compile(call, backend="eager")):
        with comm.record_traffic() as log:
            got = run()
        gathers = sum(name == "all_gather" for name, _ in log.entries)
        found.append((gathers, (got - want).abs().max().item()))
    return found


def test_a_long_all_gather_on_gloo_is_in_stages(ranks: Any) -> None:
    for found in ranks(WORLD, chosen):
        assert [number for number, _ in found] == [2, 2] and max(error for _, error in found) < 1e-12


# --------------------------------------------------------------------------- refusals


@on_ranks
def with_other_stages(mine: Any, theirs: Any) -> None:
    q = torch.randn(1, 2, 8, 4)
    with comm.record_traffic() as log:
        try:
            stages = theirs if dist.get_rank() == 1 else mine
            attention(q, q, q, mesh=cp_mesh(), kv_exchange="needed", exchange_stages=stages)
        finally:
            assert all(operation == "agreement" for operation, _ in log.entries), log.entries


def test_ranks_with_different_numbers_raise_all(ranks: Any) -> None:
    ranks.raises(2, ValueError, "different exchange_stages: rank 0: 2; rank 1: 3", with_other_stages, 2, 3)
    ranks.raises(2, ValueError, "different exchange_stages: rank 0: auto; rank 1: 3", with_other_stages, "auto", 3)


@on_ranks
def on_unequal_hosts(kv_exchange: str) -> int:
    """Stages that a rank chooses on hosts of one and of two ranks."""
    q, monkeypatch = torch.randn(1, 2, 1024, 4), pytest.MonkeyPatch()
    with monkeypatch.context() as patch, comm.record_traffic() as log:
        patch.setenv("LOCAL_WORLD_SIZE", str(1 + dist.get_rank()))
        attention(q, q, q, mesh=cp_mesh(), kv_exchange=kv_exchange)
    return sum(name != "agreement" for name, _ in log.entries)


def test_ranks_on_unequal_hosts_choose_alike(ranks: Any) -> None:
    """As many messages as stages."""
    assert ranks(2, on_unequal_hosts, "all_gather") == [2] * 2
    assert ranks(2, on_unequal_hosts, "needed") == [4] * 2


def test_a_style_refuses_wrong_numbers_and_exchanges_without_stages() -> None:
    needed = {"ulysses_degree": 1, "kv_exchange": "needed"}
    style = ContextParallel(**needed, exchange_stages=3)  # type: ignore[arg-type]
    assert "exchange_stages=3" in repr(style) and style.exchange_stages == 3
    assert "exchange_stages='auto'" in repr(ContextParallel())
    words = r'exchange_stages=.* must be a positive int, or .auto.\. 1 .*"auto" chooses'
    for wrong in (0, -1, True, 1.5, None, "many"):
        with pytest.raises(ValueError, match=words):
            ContextParallel(**needed, exchange_stages=wrong)  # type: ignore[arg-type]
    for exchange in ("ring", "replicated"):
        words = (
            f"exchange_stages=2 with kv_exchange='{exchange}', which has no stages.*'all_gather' and 'needed'.*Leave"
        )
        with pytest.raises(ValueError, match=words):
            ContextParallel(ulysses_degree=1, kv_exchange=exchange, exchange_stages=2)


# --------------------------------------------------------------------------- how it is reached, and what it says


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self.texts.append(record.getMessage())


@on_ranks
def reached_and_said() -> tuple[list[int], list[str], bool]:
    """The stages of calls through the block, the messages of automatic ones, and True if layers share a schedule."""
    length = 4096
    mesh, q = cp_mesh(), torch.randn(1, 1, length // WORLD, 4)
    handler, logger = Messages(), logging.getLogger("hyper_cp")
    logger.addHandler(handler)
    before, made, original = logger.level, [], lookup.schedule

    def recording(*args: Any, **given: Any) -> Any:
        made.append(original(*args, **given))
        return made[-1]

    lookup.schedule = recording  # type: ignore[assignment]
    choices.log_once.cache_clear()  # other tests may have had this choice
    logger.setLevel(logging.INFO)
    try:
        for stages in (3, "auto"):
            with context_parallel(mesh, kv_exchange="needed", exchange_stages=stages, layout="contiguous"):
                torch.nn.functional.scaled_dot_product_attention(q, q, q)
        for documents in ([0, 4000, length], [0, 4000, length], [0, 3000, length]):
            attention(q, q, q, mesh=mesh, kv_exchange="needed", documents=torch.tensor(documents))
    finally:
        lookup.schedule = original
        logger.setLevel(before)
        logger.removeHandler(handler)
        choices.log_once.cache_clear()
    return [len(plan.transfers.moves) for plan in made], handler.texts, made[2] is made[3] is not made[4]


def test_a_choice_is_made_with_the_schedule_and_logged_once(ranks: Any) -> None:
    first, second = ranks(WORLD, reached_and_said)
    assert first == second
    numbers, texts, shared = first
    assert numbers == [3, 8, 4, 4, 4] and shared
    assert texts == [f'exchange_stages="auto": {n} stages of needed on 2 ranks, 2048 tokens each' for n in (8, 4)]

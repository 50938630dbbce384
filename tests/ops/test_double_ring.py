"""A ring of two levels on real ranks: exact in every layout, the same bits every time, and counted on every link."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel
from hyper_cp.mesh import cp_mesh as meshes
from hyper_cp.ops import attention
from tests.harness.attention_case import FP32, FP64, AttentionCase, check, cp_mesh, run_case
from tests.harness.latent_case import LatentCase
from tests.harness.modules import BNSD
from tests.harness.ranks import Ranks, on_ranks
from tests.ops import test_exchange, test_exchange_dtype, test_latents

DOUBLE = {"kv_exchange": "double_ring"}


def on_hosts_of(per_host: int) -> None:
    """As torchrun says it; the ranks of a job are those of one machine."""
    os.environ["LOCAL_WORLD_SIZE"] = str(per_host)


@on_ranks
def run(per_host: int, cases: list[AttentionCase]) -> list[Any]:
    on_hosts_of(per_host)
    mesh = cp_mesh()
    found = []
    for case in cases:
        found.append((case, run_case(case, mesh)))
        _, attended = _resolved(mesh, case)
        assert attended == (per_host if case.ulysses_degree == 1 else per_host // case.ulysses_degree)
    return found


def _resolved(mesh: Any, case: AttentionCase) -> tuple[str, int]:
    cp = meshes.over_hosts(meshes.view(mesh, case.ulysses_degree))
    return cp.key, cp.ring.per_host


LAYOUTS = [
    {"layout": "contiguous"},
    {"layout": "head_tail"},
    {"layout": "contiguous", "load_balance": True},
    {"layout": "per_document", "documents": ((0, 48),)},
    {"layout": "balanced", "documents": ((0, 5, 31, 48),)},
    {"layout": "auto", "documents": ((0, 1, 30, 48),)},
]


def test_two_hosts_of_two_are_exact(ranks: Ranks) -> None:
    causal = [AttentionCase(48, True, **DOUBLE, **how) for how in LAYOUTS]
    full = [AttentionCase(48, False, kv_heads=2, v_dim=5, **DOUBLE, **how) for how in LAYOUTS[:2]]
    masks: list[dict[str, Any]] = [
        {"window": (3, 0), "is_causal": True},
        {"window": (30, 2)},
        {"documents": ((0, 7, 8, 40, 48), (0, 48)), "is_causal": True},
        {"documents": ((0, 12, 24, 36, 48),), "is_causal": True},  # nothing travels
        {"documents": ((0, 5, 48),), "window": (20, 1)},
        {"mask": "bool"},
        {"softcap": 2.0, "is_causal": True},
        {"sinks": True, "is_causal": True, "return_lse": True},
    ]
    others = [AttentionCase(48, **DOUBLE, layout=x, **how) for how in masks for x in ("contiguous", "head_tail")]
    check(ranks(4, run, 2, [*causal, *full, *others]), FP64)


@pytest.mark.slow
@pytest.mark.parametrize("world, per_host", [(6, 2), (6, 3), (8, 4)])
def test_other_hosts_are_exact(ranks: Ranks, world: int, per_host: int) -> None:
    how: list[dict[str, Any]] = [
        {"layout": "head_tail", "is_causal": True},
        {"window": (world, 0), "is_causal": True},
        {"documents": ((0, 5, 6 * world, 12 * world),), "layout": "per_document", "is_causal": True},
    ]
    cases = [AttentionCase(12 * world, **DOUBLE, **x) for x in how]
    if per_host == 4:  # ring ranks of a host are fewer in a hybrid
        cases += [AttentionCase(12 * world, ulysses_degree=2, **DOUBLE, **x) for x in how]
    check(ranks(world, run, per_host, cases), FP64)


@on_ranks
def of_latents(cases: list[LatentCase]) -> list[Any]:
    on_hosts_of(2)
    return test_latents.run_latents(cases)


@on_ranks
def narrowed(cases: list[AttentionCase]) -> list[tuple[Any, ...]]:
    on_hosts_of(2)
    return test_exchange_dtype.compared(cases)


def test_what_travels_may_be_latents_or_narrower(ranks: Ranks) -> None:
    latents = [LatentCase(48, True, kv_heads=n, heads=4, **DOUBLE, layout="head_tail") for n in (1, 4)]
    check(ranks(4, of_latents, latents), FP64)
    case = AttentionCase(48, True, kv_heads=2, **DOUBLE, layout="head_tail")
    for ((_, _, narrow, same, moved, before, after),) in ranks(4, narrowed, [case]):
        assert same and moved > 0 and max(narrow.values()) <= 4 * test_exchange_dtype.HALF
        assert after == (before[0] // 4, before[1] // 4)


# --------------------------------------------------------------------------- bytes


@on_ranks
def sent_between(per_host: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Bytes to ranks of this host, and to others, forward and backward, counted at torch's own call."""
    on_hosts_of(per_host)
    mesh, world, host = cp_mesh(), dist.get_world_size(), dist.get_rank() // per_host
    q, k, v, dout = test_exchange.shares(world, "head_tail", 12 * world, dtype)
    log: list[Counter[bool]] = []
    send = dist.batch_isend_irecv

    def counted(batch: list[Any]) -> Any:
        hosts = {op.group_peer // per_host != host for op in batch}
        groups = {op.group.group_desc for op in batch}
        assert len(hosts) == 1, "what goes to another host is a batch of its own"
        assert ("hyper_cp ring between hosts" in groups) == hosts.pop()
        for op in batch:
            if op.op is dist.isend:
                log[-1][op.group_peer // per_host != host] += op.tensor.nbytes
        return send(batch)

    with mock.patch.object(dist, "batch_isend_irecv", counted):
        log.append(Counter())
        out = attention(q, k, v, mesh=mesh, is_causal=True, enable_gqa=True, layout="head_tail", **DOUBLE)
        log.append(Counter())
        out.backward(dout)
    return [(each[False], each[True]) for each in log]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_on_every_link_are_those_of_the_formula(ranks: Ranks, dtype: torch.dtype) -> None:
    """docs/measured/communication.md: each rank sends as much to another host as every other rank."""
    for world, per_host in ((4, 2), (6, 2)) if dtype == torch.float32 else ((6, 3),):
        hosts, rows = world // per_host, test_exchange.B * 12 * test_exchange.HKV
        share, sums = (rows * (test_exchange.D + test_exchange.DV) * size for size in (dtype.itemsize, 4))
        for forward, backward in ranks(world, sent_between, per_host, dtype):
            assert forward == (hosts * (per_host - 1) * share, (hosts - 1) * share)
            assert backward == (hosts * (per_host - 1) * (share + sums), (hosts - 1) * (share + sums))


# --------------------------------------------------------------------------- bits, recompute, memory


@on_ranks
def repeated(per_host: int) -> bool:
    on_hosts_of(per_host)
    return test_exchange.repeat_with_delays(4, {7: {**DOUBLE, "layout": "head_tail"}, 4: {**DOUBLE, "window": (20, 0)}})


def test_late_ranks_and_messages_give_the_same_bits(ranks: Ranks) -> None:
    assert all(ranks(4, repeated, 2))


@on_ranks
def recomputed() -> float:
    """The largest difference of a call that a checkpoint computes again, from the same call."""
    on_hosts_of(2)
    mesh = cp_mesh()
    tensors = test_exchange.shares(4, "head_tail", 48, torch.float64)

    def attend(*qkv: Tensor) -> Tensor:
        return attention(*qkv, mesh=mesh, is_causal=True, enable_gqa=True, layout="head_tail", **DOUBLE) * 1.0

    *qkv, dout = tensors
    found = torch.autograd.grad(checkpoint(attend, *qkv, use_reentrant=False), qkv, dout)
    return max(
        float((a - b).abs().max()) for a, b in zip(found, torch.autograd.grad(attend(*qkv), qkv, dout), strict=True)
    )


def test_a_checkpoint_computes_it_again(ranks: Ranks) -> None:
    assert ranks(4, recomputed) == [0.0] * 4


@on_ranks
def held(per_host: int, layout: str) -> dict[str, int]:
    on_hosts_of(per_host)
    with mock.patch.object(test_exchange, "attention", lambda *x, **how: attention(*x, **{**how, **DOUBLE})):
        return test_exchange.measure_ring_memory(dist.get_world_size(), layout)


@pytest.mark.slow
def test_it_holds_two_blocks_more_than_a_flat_ring(ranks: Ranks) -> None:
    found = ranks(9, held, 3, "contiguous")
    assert max(x["beyond inputs and output"] for x in found) <= 4 * found[0]["block"], found
    assert all(x["saved"] == x["local"] + 16 for x in found)


# --------------------------------------------------------------------------- modules and mistakes


@on_ranks
def in_a_module(compiled: bool) -> Any:
    on_hosts_of(2)
    case = AttentionCase(48, True, dtype=torch.float32, **DOUBLE, layout="head_tail")
    mesh, shard = cp_mesh(), case.shard()
    style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, layout="head_tail", **DOUBLE)
    module = parallelize_module(BNSD(), mesh, style)
    if compiled:
        module.compile(backend="eager", fullgraph=True)
    with mock.patch.object(meshes, "make_group", None):  # a call makes none
        out = module(*shard.qkv)
    return [(case, shard.errors(out, torch.autograd.grad(out, shard.qkv, shard.dout)))]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_style_has_its_groups_before_the_first_call(ranks: Ranks, compiled: bool) -> None:
    check(ranks(4, in_a_module, compiled), FP32)


@on_ranks
def mistaken(kv_exchange: str, per_host: int | str) -> None:
    on_hosts_of(2 if isinstance(per_host, str) else per_host)
    if per_host == "differs" and dist.get_rank() == 3:
        on_hosts_of(4)
    tensors = test_exchange.shares(4, "contiguous", 48, torch.float64)
    attention(*tensors[:3], mesh=cp_mesh(), is_causal=True, enable_gqa=True, kv_exchange=kv_exchange)


def test_a_wrong_number_of_hosts_is_an_error(ranks: Ranks) -> None:
    ranks.raises(4, ValueError, r"double_ring_3.*does not divide.*1, 2, 4", mistaken, "double_ring_3", 2)
    with pytest.raises(ValueError, match="kv_exchange='double_ring_0'"):
        ContextParallel(seq_dim=2, head_dim=1, kv_exchange="double_ring_0")
    with pytest.raises(ValueError, match="exchange_stages=2 with kv_exchange='double_ring', which has no stages"):
        ContextParallel(seq_dim=2, head_dim=1, kv_exchange="double_ring", exchange_stages=2)


def test_ranks_that_count_hosts_differently_are_an_error(ranks: Ranks) -> None:
    ranks.raises(4, ValueError, "rank 3 compares its attention call", mistaken, "double_ring", "differs")


@on_ranks
def flat(per_host: int) -> list[int]:
    """The ring ranks of a host, of meshes that have one host, hosts of one rank, and hosts of different sizes."""
    on_hosts_of(per_host)
    return [meshes.over_hosts(meshes.view(cp_mesh())).ring.per_host]


def test_hosts_that_make_no_two_levels_make_a_flat_ring(ranks: Ranks) -> None:
    for world, per_host in ((4, 4), (4, 1), (3, 2)):
        assert ranks(world, flat, per_host) == [[0]] * world

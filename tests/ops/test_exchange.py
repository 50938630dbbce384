"""Communication and memory of the engine: bytes, buffers, order. Real gloo ranks."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.mesh import comm
from hyper_cp.ops import attention
from hyper_cp.ops.kernels import cpu
from tests.harness.oracle import plain_attention, relative_error, token_positions, visible_pairs
from tests.harness.ranks import on_ranks

B, H, HKV, D, DV = 2, 8, 4, 16, 8


def shares(world: int, layout: str, length: int, dtype: torch.dtype, v_dim: int = DV) -> list[Tensor]:
    """This rank's q, k, v (leaves) and the gradient of its output."""
    g = torch.Generator().manual_seed(7)
    mine = torch.tensor(token_positions(layout, dist.get_rank(), world, length))
    shapes = [(B, H, length, D), (B, HKV, length, D), (B, HKV, length, v_dim), (B, H, length, v_dim)]
    q, k, v, dout = (torch.randn(s, generator=g).to(dtype)[:, :, mine].clone() for s in shapes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


# --------------------------------------------------------------------------- bytes


class Counter:
    """Counts bytes sent at the c10d entry points, independently of the library's own record."""

    def __init__(self) -> None:
        self.sent = 0

    def __enter__(self) -> Counter:
        self.saved = {n: getattr(dist, n) for n in ("all_to_all_single", "batch_isend_irecv")}
        self.saved_names = (comm._all_gather, comm._reduce_scatter)

        def all_to_all_single(out: Tensor, x: Tensor, group: Any = None, **kw: Any) -> Any:
            n = dist.get_world_size(group)
            self.sent += x.numel() * x.element_size() * (n - 1) // n
            return self.saved["all_to_all_single"](out, x, group=group, **kw)

        def batch_isend_irecv(ops: list[Any]) -> Any:
            self.sent += sum(o.tensor.numel() * o.tensor.element_size() for o in ops if o.op is dist.isend)
            return self.saved["batch_isend_irecv"](ops)

        def all_gather(out: Tensor, x: Tensor, group: Any = None, **kw: Any) -> Any:
            self.sent += x.numel() * x.element_size() * (dist.get_world_size(group) - 1)
            return self.saved_names[0](out, x, group=group, **kw)

        def reduce_scatter(out: Tensor, x: Tensor, group: Any = None, **kw: Any) -> Any:
            self.sent += out.numel() * out.element_size() * (dist.get_world_size(group) - 1)
            return self.saved_names[1](out, x, group=group, **kw)

        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all_single, batch_isend_irecv
        comm._all_gather, comm._reduce_scatter = all_gather, reduce_scatter
        return self

    def __exit__(self, *_: Any) -> None:
        for name, fn in self.saved.items():
            setattr(dist, name, fn)
        comm._all_gather, comm._reduce_scatter = self.saved_names


def formula(world: int, degree: int, balance: bool, length: int, size: int, acc: int) -> tuple[int, int]:
    """Bytes one rank sends in forward and backward: docs/measured/communication.md."""
    ring = world // degree
    tokens = B * length // world
    nq, nk, nv, no = tokens * H * D, tokens * HKV * D, tokens * HKV * DV, tokens * H * DV
    a2a = (nq + nk + nv + no) * size * (degree - 1) // degree
    forward = a2a + (ring - 1) * (nk + nv) * size
    backward = a2a + (ring - 1) * (nk + nv) * (size + acc)
    if balance and 2 * (dist.get_rank() // degree) + 1 != ring:
        lse = tokens * H * acc
        forward += ((nq + no) * size + lse) // 2
        backward += ((nq + 2 * no) * size + lse) // 2 + nq * size // 2
    return forward, backward


@on_ranks
def count_bytes(world: int, cases: list[tuple[int, str, str, bool, torch.dtype]]) -> list[Any]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    found = []
    for degree, kv, layout, balance, dtype in cases:
        length = 12 * world
        q, k, v, dout = shares(world, layout, length, dtype)
        with Counter() as forward, comm.record_traffic() as log:
            out = attention(
                q,
                k,
                v,
                mesh=mesh,
                is_causal=True,
                enable_gqa=True,
                ulysses_degree=degree,
                kv_exchange=kv,
                layout=layout,
                load_balance=balance,
            )
        with Counter() as backward, comm.record_traffic() as log_back:
            out.backward(dout)
        size, acc = dtype.itemsize, 8 if dtype == torch.float64 else 4
        want = formula(world, degree, balance, length, size, acc)
        agreement = sum(n for operation, n in log.entries if operation == "agreement")  # in a store, once a signature
        found.append((want, (forward.sent, backward.sent), (log.bytes_sent - agreement, log_back.bytes_sent)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_bytes_are_those_of_the_formula(ranks: Any, world: int) -> None:
    cases = [
        (degree, kv, layout, balance, dtype)
        for degree in (1, 2, 4)
        if world % degree == 0
        for kv in ("ring", "all_gather")
        for layout, balance, dtype in (
            ("contiguous", False, torch.float32),
            ("head_tail", False, torch.bfloat16),
            ("contiguous", True, torch.bfloat16),
        )
    ]
    for found in ranks(world, count_bytes, world, cases):
        for case, (want, counted, recorded) in zip(cases, found, strict=True):
            assert want == counted == recorded, case


NEEDED = {
    "causal": {},
    "window": {"window": (5, 0)},
    "window both ways": {"window": (3, 2), "is_causal": False},
    "documents": {"documents": [0, 1, 7, 19, 20, 37, 48]},
    "documents per row": {"documents": [[0, 7, 19, 48], [0, 30, 33, 48]]},
    "documents and a window": {"documents": [0, 7, 19, 48], "window": (4, 0)},
}


@on_ranks
def count_needed(world: int) -> list[Any]:
    """Bytes of this rank as counted at the calls, and the fewest possible: those of the keys that some other rank's
    queries see."""
    mesh, found, length = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)), [], 48
    for layout, (name, given) in itertools.product(("contiguous", "head_tail"), NEEDED.items()):
        settings = {"is_causal": True, **given}
        rows = settings.get("documents")
        listed = None if rows is None else rows if isinstance(rows[0], list) else [rows]
        visible = visible_pairs(length, settings["is_causal"], settings.get("window"), listed).view(-1, length, length)
        own = [token_positions(layout, r, world, length) for r in range(world)]
        seen = [set(visible[:, mine].any(0).any(0).nonzero().flatten().tolist()) for mine in own]
        mine = set(own[dist.get_rank()])
        given_away = sum(len(mine & seen[r]) for r in range(world) if r != dist.get_rank())
        received = len(seen[dist.get_rank()] - mine)
        q, k, v, dout = shares(world, layout, length, torch.float32)
        with Counter() as forward:
            out = attention(q, k, v, mesh=mesh, enable_gqa=True, kv_exchange="needed", layout=layout, **settings)
        with Counter() as backward:
            out.backward(dout)
        row = B * HKV * (D + DV) * 4
        want = given_away * row, (given_away + received) * row
        found.append((f"{layout}, {name}", want, (forward.sent, backward.sent)))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_needed_sends_what_is_seen_and_nothing_else(ranks: Any, world: int) -> None:
    found = ranks(world, count_needed, world)
    for of_rank in found:
        for case, want, counted in of_rank:
            assert want == counted, case
    total = {case: sum(of_rank[i][2][0] for of_rank in found) for i, (case, *_) in enumerate(found[0])}
    all_gather = (world - 1) * 48 * B * HKV * (D + DV) * 4
    if world == 4:  # of n ranks, whose queries see heads of all others and tails of those after: (n - 1) * 3 / 4
        assert total["head_tail, causal"] == 0.75 * all_gather
    assert total["contiguous, window"] == (world - 1) * 5 * B * HKV * (D + DV) * 4, "five rows cross each boundary"


# --------------------------------------------------------------------------- memory


def live_storages() -> dict[int, int]:
    """Bytes of all tensor storages that Python can reach, by address."""
    seen = {}
    for obj in gc.get_objects():
        if type(obj) in (Tensor, nn.Parameter) and obj.device.type == "cpu":  # fakes of a compile hold nothing
            seen[obj.untyped_storage().data_ptr()] = obj.untyped_storage().nbytes()
    return seen


@on_ranks
def measure_ring_memory(world: int, layout: str) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, k, v, _ = shares(world, layout, 64 * world, torch.float32, v_dim=D)
    _, peaks = q, []
    original = cpu.KERNEL.forward

    def new_bytes() -> int:
        return sum(size for at, size in live_storages().items() if at not in before)

    def spying(*args: Any, **keywords: Any) -> Any:
        peaks.append(new_bytes())
        result = original(*args, **keywords)
        peaks.append(new_bytes() - sum(x.nbytes for x in result))  # the tile's own result is not kept
        return result

    saved: list[Tensor] = []
    gc.collect()
    before = live_storages()
    gc.freeze()  # what is here already is not looked through again for every tile
    cpu.KERNEL.forward = spying  # type: ignore[method-assign]
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = attention(q, k, v, mesh=mesh, is_causal=True, enable_gqa=True, kv_exchange="ring", layout=layout)
    finally:
        del cpu.KERNEL.forward
        gc.unfreeze()
    lse = B * H * 64 * 4
    return {
        "beyond inputs and output": max(peaks) - out.nbytes - lse,
        "block": k.nbytes + v.nbytes,
        "saved": sum(t.nbytes for t in saved),
        "local": sum(t.nbytes for t in (q, k, v, out)) + lse,
        "kernels": len(peaks) // 2,
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_a_ring_of_four_holds_two_blocks_and_saves_only_local_tensors(ranks: Any, layout: str) -> None:
    for rank, found in enumerate(ranks(4, measure_ring_memory, 4, layout)):
        assert found["kernels"] == (4 if layout == "head_tail" else rank + 1)
        assert found["beyond inputs and output"] <= 2 * found["block"], found
        assert found["saved"] == found["local"] + 16, found  # fingerprint of the documents, number of the kernel


# --------------------------------------------------------------------------- order and lifetime


def one_pass(mesh: Any, kw: dict[str, Any], tensors: list[Tensor]) -> list[Tensor]:
    q, k, v, dout = tensors
    out = attention(q, k, v, mesh=mesh, is_causal=True, enable_gqa=True, **kw)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@on_ranks
def repeat_with_delays(world: int, passes: dict[int, dict[str, Any]]) -> bool:
    """Every pass gives the bits of the first of its kind, whatever rank and whatever message is late."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    chance = random.Random(dist.get_rank())

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kw: Any) -> Any:
            time.sleep(chance.random() * 0.006)
            return method(*args, **kw)

        return call

    def one_by_one(batch: list[Any]) -> list[Any]:
        works = []
        for message in batch:
            time.sleep(chance.random() * 0.001)
            works += together([message])
        return works

    names = ("all_to_all", "all_gather", "reduce_scatter", "send_recv", "all_to_all_rows")
    originals, together = {name: getattr(comm.GlooAxis, name) for name in names}, dist.batch_isend_irecv
    same = True
    try:
        for times, kw in passes.items():
            tensors = shares(world, kw.get("layout", "contiguous"), 16 * world, torch.float32)
            first = one_pass(mesh, kw, tensors)
            for name in names:
                setattr(comm.GlooAxis, name, late(originals[name]))
            dist.batch_isend_irecv = one_by_one
            for _ in range(times):
                same &= all(map(torch.equal, first, one_pass(mesh, kw, tensors)))
            dist.batch_isend_irecv = together
            for name in names:
                setattr(comm.GlooAxis, name, originals[name])
    finally:
        dist.batch_isend_irecv = together
        for name in names:
            setattr(comm.GlooAxis, name, originals[name])
    return same


@pytest.mark.slow
def test_passes_with_late_ranks_and_messages_give_the_same_bits(ranks: Any) -> None:
    passes = {
        7: {"kv_exchange": "ring", "layout": "head_tail"},
        6: {"kv_exchange": "ring", "load_balance": True},
        4: {"kv_exchange": "all_gather", "load_balance": True},
        3: {"kv_exchange": "ring", "ulysses_degree": 2, "layout": "head_tail"},
        5: {"kv_exchange": "needed", "exchange_stages": 3, "documents": [0, 9, 40, 64]},
        2: {"ulysses_degree": None, "head_groups": 2, "layout": "head_tail"},
    }
    assert all(ranks(4, repeat_with_delays, 4, passes))


@on_ranks
def interleave(world: int) -> float:
    """Two modules' calls interleaved on one mesh, and two backward passes through one graph."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout, length = "head_tail", 16 * world
    mine = torch.tensor(token_positions(layout, dist.get_rank(), world, length))
    g = torch.Generator().manual_seed(3)
    wholes = [[torch.randn(1, 4, length, 8, generator=g, dtype=torch.float64) for _ in range(4)] for _ in range(2)]
    locals_ = [[x[:, :, mine].clone().requires_grad_() for x in w[:3]] for w in wholes]
    a, b = (attention(*x, mesh=mesh, is_causal=True, kv_exchange="ring", layout=layout) for x in locals_)
    grads: list[Any] = [None, None]
    grads[1] = torch.autograd.grad(b, locals_[1], wholes[1][3][:, :, mine])
    first = torch.autograd.grad(a, locals_[0], wholes[0][3][:, :, mine], retain_graph=True)
    grads[0] = torch.autograd.grad(a, locals_[0], wholes[0][3][:, :, mine])
    worst = 0.0 if all(map(torch.equal, first, grads[0])) else 1.0
    for whole, got in zip(wholes, grads, strict=True):
        q, k, v = (x.clone().requires_grad_() for x in whole[:3])
        want = torch.autograd.grad(plain_attention(q, k, v, is_causal=True), (q, k, v), whole[3])
        worst = max(worst, *(relative_error(x, y[:, :, mine]) for x, y in zip(got, want, strict=True)))
    return worst


@pytest.mark.parametrize("world", [2, 4])
def test_interleaved_modules_and_two_backwards_are_exact(ranks: Any, world: int) -> None:
    assert max(ranks(world, interleave, world)) <= 1e-10


@on_ranks
def alone(world: int) -> tuple[int, bool]:
    """A ring of one: nothing is communicated."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, k, v, dout = shares(world, "contiguous", 16, torch.float32)
    with Counter() as count:
        out = attention(q, k, v, mesh=mesh, is_causal=True, enable_gqa=True, kv_exchange="ring")
        out.backward(dout)
    return count.sent, bool(torch.isfinite(q.grad).all())


def test_a_mesh_of_one_communicates_nothing(ranks: Any) -> None:
    assert ranks(1, alone, 1) == [(0, True)]


# --------------------------------------------------------------------------- the host never waits for a result

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero", "to")


@on_ranks
def host_reads(world: int, cases: list[dict[str, Any]]) -> list[str]:
    """Calls in forward and backward that would wait for the device: what reads a tensor of attention, or makes
    one whose size depends on values. (Documents are read; they live on the CPU.)"""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    found: list[str] = []

    def spy(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def call(self: Tensor, *args: Any, **kw: Any) -> Any:
            device_moves = name != "to" or any(isinstance(a, (str, torch.device)) for a in (*args, *kw.values()))
            if device_moves and (self.is_floating_point() or self.dtype == torch.bool):
                found.append(name)
            return original(self, *args, **kw)

        return call

    for kw in cases:
        tensors = shares(world, kw.get("layout", "contiguous"), 16 * world, torch.float32, v_dim=D)
        originals = {name: getattr(Tensor, name) for name in READS}
        try:
            for name in READS:
                setattr(Tensor, name, spy(name))
            q, k, v, dout = tensors
            out = attention(q, k, v, mesh=mesh, is_causal=True, enable_gqa=True, **kw)
            torch.autograd.grad(out, (q, k, v), dout)
        finally:
            for name, method in originals.items():
                setattr(Tensor, name, method)
    return found


def test_no_step_reads_a_result_on_the_host(ranks: Any) -> None:
    cases: list[dict[str, Any]] = [
        {"kv_exchange": "ring", "layout": "head_tail"},
        {"kv_exchange": "ring", "load_balance": True, "window": (40, 0)},
        {"kv_exchange": "all_gather", "documents": [0, 9, 30, 64]},
        {"ulysses_degree": None, "layout": "head_tail"},
        {"ulysses_degree": 2, "kv_exchange": "ring", "documents": [0, 9, 30, 64], "window": (7, 0)},
    ]
    assert ranks(4, host_reads, 4, cases) == [[]] * 4

"""Every exchange between ranks on tiny tensors: single transfers, attention in every mode, sequences and states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...handler import ContextParallelHandler
from ...mesh import comm, cp_mesh
from ...mesh.comm import Axis
from ...mesh.cp_mesh import CPMesh, divisors
from ...ops import attention, causal_conv1d, linear_recurrence
from ...schedule.arrivals import KV_EXCHANGES
from ...schedule.documents import PackedDocuments
from ...schedule.lookup import resolve
from .findings import NAMES, Finding, Results, answer, check
from .ranks import Ranks
from .tiles import CAUSAL, FULL, Tile

SECTION = "exchanges"
LENGTH, DIM = 16, 16
"""Positions of a rank, and the head dim."""


def check_exchanges(ranks: Ranks) -> Iterator[Finding]:
    """Yield every exchange on all ranks."""
    dtype = torch.float64 if ranks.device == "cpu" else torch.bfloat16
    for what, exact, run in _cases(ranks.mesh(), ranks, dtype):
        yield ranks.worst(check(SECTION, what, exact, run))


Case = tuple[str, torch.dtype, Callable[[], Results]]


def _cases(mesh: DeviceMesh, ranks: Ranks, dtype: torch.dtype) -> Iterator[Case]:
    views = {degree: cp_mesh.view(mesh, degree) for degree in _degrees(ranks)}
    for degree, cp in views.items():
        for name, axis in (("ring", cp.ring), ("ulysses", cp.ulysses)):
            if axis.size > 1:
                where = f"of {axis.size} ranks ({name}, ulysses_degree={degree})"
                for operation in TRANSFERS:
                    yield f"{operation} {where}", torch.float64, partial(_transferred, operation, axis, ranks.device)
    n = ranks.size
    modes: list[tuple[int, dict[str, Any]]] = []
    for degree, cp in views.items():
        for exchange in KV_EXCHANGES if cp.ring.size > 1 else ("all_gather",):
            if exchange != "replicated":
                modes.append((degree, {"kv_exchange": exchange, "layout": "head_tail"}))
            elif degree == 1:  # every rank has all keys: there is nothing to trade for heads
                modes.append((1, {"kv_exchange": exchange, "layout": "contiguous"}))
    if n > 1:
        modes.append((1, {"kv_exchange": "ring", "load_balance": True}))
        modes.append((1, {"kv_exchange": "needed", "layout": "balanced", "documents": [0, 11, LENGTH * n]}))
        modes.append((n, {"head_groups": 2}))
    for degree, mode in modes:
        settings = ", ".join(f"{name}={value!r}" for name, value in mode.items() if name != "documents")
        packed = ", packed documents" if "documents" in mode else ""
        what = f"attention, ulysses_degree={degree}, {settings}{packed}"
        yield what, dtype, partial(_attention, views[degree], dtype, ranks.device, **mode)
    exact = torch.float64 if ranks.device == "cpu" else torch.float32
    for name, sequence in SEQUENCES.items():
        yield name, exact, partial(sequence, mesh, ranks.device, exact)


def _degrees(ranks: Ranks) -> list[int]:
    """Return no Ulysses, a hybrid if there is one (as large as a host if that is possible), and pure Ulysses."""
    inner = [d for d in divisors(ranks.size) if 1 < d < ranks.size]
    hybrid = [d for d in inner if d <= ranks.per_host][-1:] or inner[:1]
    return list(dict.fromkeys([1, *hybrid, ranks.size]))


# --------------------------------------------------------------------------- single transfers


Transfer = tuple[Callable[[], Any], Any]
"""A function that makes a transfer and returns what has arrived, and what should."""
Message = Callable[[int, int], Tensor]
"""The message of a sender to a receiver."""


def _all_to_all(axis: Axis, message: Message) -> Transfer:
    packed = torch.stack([message(axis.rank, to) for to in range(axis.size)])
    want = torch.stack([message(source, axis.rank) for source in range(axis.size)])
    return lambda: axis.all_to_all(packed).wait(), want


def _all_gather(axis: Axis, message: Message) -> Transfer:
    packed = message(axis.rank, 0)  # the same for every receiver
    return lambda: axis.all_gather(packed).wait(), torch.cat([message(source, 0) for source in range(axis.size)])


def _reduce_scatter(axis: Axis, message: Message) -> Transfer:
    packed = torch.cat([message(axis.rank, to) * (to != axis.rank) for to in range(axis.size)])
    others = (message(source, axis.rank) for source in range(axis.size) if source != axis.rank)
    return lambda: axis.reduce_scatter(packed).wait(), torch.stack(list(others)).sum(0)


def _all_to_all_rows(axis: Axis, message: Message) -> Transfer:
    """Send other numbers of rows to each rank, and none to itself."""
    rows = [[0 if a == b else 1 + (a + 2 * b) % 3 for b in range(axis.size)] for a in range(axis.size)]
    sent, received = rows[axis.rank], [row[axis.rank] for row in rows]
    packed = torch.cat([message(axis.rank, to)[:n] for to, n in enumerate(sent)])
    want = torch.cat([message(source, axis.rank)[:n] for source, n in enumerate(received)])
    return lambda: axis.all_to_all_rows(packed, sent, received).wait(), want


def _send_recv(axis: Axis, message: Message) -> Transfer:
    """Send two messages of different lengths to the next rank."""
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    sends, want = ([x, -x[:1]] for x in (message(axis.rank, to), message(source, axis.rank)))
    into = [torch.empty_like(x) for x in want]
    messages = [comm.Message(x, to) for x in sends], [comm.Message(x, source) for x in into]
    return lambda: axis.send_recv(*messages).wait(), want


TRANSFERS: dict[str, Callable[[Axis, Message], Transfer]] = {
    "send_recv": _send_recv,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_rows": _all_to_all_rows,
}


def transfer(name: str, axis: Axis, device: str, rows: int = 3) -> Transfer:
    """Prepare a transfer of messages ``[rows, 4]``, whose numbers say from whom to whom they are."""

    def message(sender: int, receiver: int) -> Tensor:
        return torch.full((rows, 4), 1.0 + sender * axis.size + receiver, device=device)

    return TRANSFERS[name](axis, message)


def _transferred(name: str, axis: Axis, device: str) -> Results:
    run, want = transfer(name, axis, device)
    found = run()
    return [("result", *pair) for pair in (zip(found, want, strict=True) if name == "send_recv" else [(found, want)])]


# --------------------------------------------------------------------------- attention


@lru_cache(maxsize=2)
def whole(tile: Tile, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return q, k, v, dout of a sequence, of which every rank knows all, and its output and gradients in fp64."""
    tensors = tile.tensors("cpu", dtype, seed=1)
    want = answer(tensors, tile.visible(), tile.scale)
    return tensors, [want[0], *want[2:]]


def attend(cp: CPMesh, tile: Tile, dtype: torch.dtype, device: str, **mode: Any) -> Results:
    """Attend a sequence in one mode, forward and backward.

    Args:
        tile: the whole sequence; its parts are documents.
        mode: arguments of :func:`hyper_cp.ops.attention`.
    """
    (*qkv, dout), want = whole(tile, dtype)
    at = positions(cp.rank, cp.size, tile, mode.get("layout", "contiguous"))
    keys_at = at
    if mode.get("kv_exchange") == "replicated":  # each rank has all keys, and the gradients that its queries give
        keys_at, mine = torch.arange(tile.cols, device="cpu"), torch.zeros_like(dout)
        mine[:, :, at] = dout[:, :, at]
        want = answer((*qkv, mine), tile.visible(), tile.scale)
        del want[1]  # the log-sum-exp
    if tile.parts is not None:
        mode["documents"] = [0, *(stop for (_, stop), _ in tile.parts)]
    leaves = [x[:, :, i].to(device).requires_grad_() for x, i in zip(qkv, (at, keys_at, keys_at), strict=True)]
    out: Any = attention(*leaves, mesh=cp, is_causal=tile.band == CAUSAL, enable_gqa=True, **mode)
    found = out, *torch.autograd.grad(out, leaves, dout[:, :, at].to(device))
    wanted = (x[:, :, i] for x, i in zip(want, (at, at, keys_at, keys_at), strict=True))
    return list(zip((NAMES[0], *NAMES[2:]), found, wanted, strict=True))


def positions(rank: int, ranks: int, tile: Tile, layout: str) -> Tensor:
    """Return the global positions of a rank's tokens: by definition where the layout has one, else as data is
    placed."""
    if layout == "contiguous":
        return torch.arange(tile.rows, device="cpu").chunk(ranks)[rank]
    if layout == "head_tail":
        chunks = torch.arange(tile.rows, device="cpu").chunk(2 * ranks)
        return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
    ends = [tile.rows] if tile.parts is None else [stop for (_, stop), _ in tile.parts]
    return resolve(layout, ranks, tile.rows, PackedDocuments([[0, *ends]])).positions(rank)


def _attention(cp: CPMesh, dtype: torch.dtype, device: str, documents: Any = None, **mode: Any) -> Results:
    parts = None if documents is None else tuple((part, part) for part in pairwise(documents))
    band = FULL if mode.get("kv_exchange") == "replicated" else CAUSAL
    n = cp.size
    tile = Tile(LENGTH * n, LENGTH * n, band, parts, batch=1, heads=(4 * n, 2 * n), dims=(DIM, DIM))
    return attend(cp, tile, dtype, device, **mode)


# --------------------------------------------------------------------------- sequences and states


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")


def _gathered(mesh: DeviceMesh, device: str, dtype: torch.dtype) -> Results:
    handler = ContextParallelHandler(mesh, "head_tail")
    sequence = torch.arange(LENGTH * mesh.size(), dtype=dtype, device=device)[None]
    return [("sequence", handler.combine(handler.dispatch(sequence), 1), sequence)]


def _shifted(mesh: DeviceMesh, device: str, dtype: torch.dtype) -> Results:
    handler = ContextParallelHandler(mesh, "head_tail")
    sequence = 1 + torch.arange(LENGTH * mesh.size(), dtype=dtype, device=device)[None]
    want = torch.cat([sequence[:, 1:], torch.zeros_like(sequence[:, :1])], 1)
    return [("sequence", handler.roll_tensor(handler.dispatch(sequence), -1, 1)[0], handler.dispatch(want))]


def _recurrence(mesh: DeviceMesh, device: str, dtype: torch.dtype) -> Results:
    length, handler = LENGTH * mesh.size(), ContextParallelHandler(mesh, "head_tail")
    q, k, v = (_random(seed, 1, length, 2, 4) for seed in (2, 3, 4))
    decay = -_random(5, 1, length, 2).abs()
    state, rows = torch.zeros(1, 2, 4, 4, dtype=torch.float64, device="cpu"), []
    for t in range(length):
        state = decay[:, t].exp()[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        rows.append((q[:, t, :, None] @ state)[:, :, 0])
    shares = [handler.dispatch(x).to(device, dtype) for x in (q, k, v, decay)]
    found = linear_recurrence(*shares, mesh=mesh, layout="head_tail", kernel="torch")
    return [("output", found, handler.dispatch(torch.stack(rows, 1)))]


def _convolution(mesh: DeviceMesh, device: str, dtype: torch.dtype) -> Results:
    length, handler = LENGTH * mesh.size(), ContextParallelHandler(mesh, "head_tail")
    x, weight = _random(6, 1, 3, length), _random(7, 3, 4)
    wide = torch.nn.functional.pad(x, (3, 0))
    want = torch.stack([wide[..., i : i + length] * weight[:, i, None] for i in range(4)]).sum(0)
    share = handler.dispatch(x, 2).to(device, dtype)
    found = causal_conv1d(share, weight.to(device, dtype), mesh=mesh, layout="head_tail")
    return [("output", found, handler.dispatch(want, 2))]


SEQUENCES = {
    "the sequence is gathered (handler.combine)": _gathered,
    "the sequence is shifted (handler.roll_tensor)": _shifted,
    "states of a recurrence pass between ranks": _recurrence,
    "rows of a convolution pass between ranks": _convolution,
}

"""Every exchange between ranks on tiny tensors: single transfers, attention in every mode, sequences and states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...handler import ContextParallelHandler
from ...mesh import cp_mesh
from ...mesh.comm import Axis
from ...mesh.cp_mesh import CPMesh, divisors
from ...ops import attention, causal_conv1d, linear_recurrence
from ...schedule.arrivals import KV_EXCHANGES
from ...schedule.documents import PackedDocuments
from ...schedule.lookup import resolve
from .findings import WRONG, Finding, answer, error_of, judged
from .ranks import Ranks

SECTION = "exchanges"
CHUNK, DIM = 8, 16
"""Positions of a chunk, of which each rank has two, and the head dim."""


def check_exchanges(ranks: Ranks) -> Iterator[Finding]:
    """Every exchange on all ranks; of each the worst result of any rank, which the finding names."""
    mesh = ranks.mesh()
    dtype = torch.float64 if ranks.device == "cpu" else torch.bfloat16
    for what, exact, run in _cases(mesh, ranks, dtype):
        mine = judged(SECTION, what, exact, run)
        everyone = ranks.share([mine.status, mine.note])
        wrong = [rank for rank, (status, _) in enumerate(everyone) if status == WRONG]
        note = f"on rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}: " if wrong else ""
        yield Finding(SECTION, what, WRONG if wrong else mine.status, note + everyone[wrong[0]][1] if wrong else "")


Case = tuple[str, torch.dtype, Callable[[], float]]


def _cases(mesh: DeviceMesh, ranks: Ranks, dtype: torch.dtype) -> Iterator[Case]:
    degrees = _degrees(ranks)
    views = {degree: cp_mesh.view(mesh, degree) for degree in degrees}
    for degree, cp in views.items():
        for name, axis in (("ring", cp.ring), ("ulysses", cp.ulysses)):
            if axis.size > 1:
                where = f"of {axis.size} ranks ({name}, ulysses_degree={degree})"
                for operation, run in TRANSFERS.items():
                    yield f"{operation} {where}", torch.float64, partial(run, axis, ranks.device)
    for degree, cp in views.items():
        for exchange in KV_EXCHANGES if cp.ring.size > 1 else ("all_gather",):
            if exchange == "replicated" and degree > 1:
                continue  # every rank has all keys: there is nothing to trade for heads
            mode = {"kv_exchange": exchange, "layout": "contiguous" if exchange == "replicated" else "head_tail"}
            yield _mode(cp, degree, dtype, ranks.device, **mode)
    n = ranks.size
    if n > 1:
        yield _mode(views[1], 1, dtype, ranks.device, kv_exchange="ring", load_balance=True)
        yield _mode(
            views[1], 1, dtype, ranks.device, kv_exchange="needed", layout="balanced", documents=[0, 11, 16 * n]
        )
        yield _mode(views[n], n, dtype, ranks.device, head_groups=2)
    exact = torch.float64 if ranks.device == "cpu" else torch.float32
    for name, check in SEQUENCES.items():
        yield name, exact, partial(check, mesh, ranks.device, exact)


def _degrees(ranks: Ranks) -> list[int]:
    """No Ulysses, a hybrid if there is one (as large as a host if that is possible), and pure Ulysses."""
    inner = [d for d in divisors(ranks.size) if 1 < d < ranks.size]
    hybrid = [d for d in inner if d <= ranks.per_host][-1:] or inner[:1]
    return list(dict.fromkeys([1, *hybrid, ranks.size]))


# --------------------------------------------------------------------------- single transfers


def _number(sender: int, receiver: int, size: int) -> float:
    return float(1 + sender * size + receiver)


def _full(rows: int, value: float, device: str) -> Tensor:
    return torch.full((rows, 4), value, device=device)


def _all_to_all(axis: Axis, device: str) -> float:
    send = torch.stack([_full(3, _number(axis.rank, to, axis.size), device) for to in range(axis.size)])
    want = torch.stack([_full(3, _number(source, axis.rank, axis.size), device) for source in range(axis.size)])
    return error_of(axis.all_to_all(send).wait(), want)


def _all_gather(axis: Axis, device: str) -> float:
    want = torch.cat([_full(3, 1.0 + rank, device) for rank in range(axis.size)])
    return error_of(axis.all_gather(_full(3, 1.0 + axis.rank, device)).wait(), want)


def _reduce_scatter(axis: Axis, device: str) -> float:
    parts = [_full(3, _number(axis.rank, to, axis.size), device) for to in range(axis.size)]
    parts[axis.rank].zero_()
    others = sum(_number(source, axis.rank, axis.size) for source in range(axis.size) if source != axis.rank)
    return error_of(axis.reduce_scatter(torch.cat(parts)).wait(), _full(3, others, device))


def _all_to_all_rows(axis: Axis, device: str) -> float:
    def rows(sender: int, receiver: int) -> int:
        return 0 if sender == receiver else (sender + 2 * receiver) % 3 + 1

    sent, received = zip(*((rows(axis.rank, i), rows(i, axis.rank)) for i in range(axis.size)), strict=True)
    send = torch.cat([_full(n, _number(axis.rank, to, axis.size), device) for to, n in enumerate(sent)])
    want = torch.cat([_full(n, _number(source, axis.rank, axis.size), device) for source, n in enumerate(received)])
    return error_of(axis.all_to_all_rows(send, sent, received).wait(), want)


def _send_recv(axis: Axis, device: str) -> float:
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    sends = [_full(3, 1.0 + axis.rank, device), _full(5, -1.0 - axis.rank, device)]
    recvs = [torch.empty_like(x) for x in sends]
    found = axis.send_recv(sends, to, recvs, source).wait()
    return max(
        error_of(a, _full(len(a), sign * (1.0 + source), device)) for a, sign in zip(found, (1, -1), strict=True)
    )


TRANSFERS: dict[str, Callable[[Axis, str], float]] = {
    "send_recv": _send_recv,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_rows": _all_to_all_rows,
}


# --------------------------------------------------------------------------- attention


def _mode(cp: CPMesh, degree: int, dtype: torch.dtype, device: str, **mode: Any) -> Case:
    """Attention in one mode, forward and backward, against attention written out."""
    settings = ", ".join(f"{name}={value!r}" for name, value in mode.items() if name != "documents")
    packed = ", packed documents" if "documents" in mode else ""
    return f"attention, ulysses_degree={degree}, {settings}{packed}", dtype, lambda: _attend(cp, dtype, device, mode)


def _attend(cp: CPMesh, dtype: torch.dtype, device: str, mode: dict[str, Any]) -> float:
    length, heads, kv_heads = 2 * CHUNK * cp.size, 4 * cp.size, 2 * cp.size
    g = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(1, h, length, DIM, generator=g, dtype=torch.float64).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    documents, replicated = mode.get("documents"), mode.get("kv_exchange") == "replicated"
    visible = torch.ones(length, length, dtype=torch.bool)
    if documents is not None:
        numbers = torch.bucketize(torch.arange(length), torch.tensor(documents[1:-1]), right=True)
        visible = numbers[:, None] == numbers[None]
    if not replicated:
        visible = visible.tril()
    at = _positions(cp, mode, length)
    keys_at = torch.arange(length) if replicated else at
    leaves = [x[:, :, i].to(device).requires_grad_() for x, i in ((q, at), (k, keys_at), (v, keys_at))]
    out: Any = attention(*leaves, mesh=cp, is_causal=not replicated, enable_gqa=True, **mode)
    grads = torch.autograd.grad(out, leaves, dout[:, :, at].to(device))
    if replicated:  # each rank has the share that its queries give
        mine = torch.zeros_like(dout)
        mine[:, :, at] = dout[:, :, at]
        want = answer((q, k, v, mine), visible, DIM**-0.5)
    else:
        want = answer((q, k, v, dout), visible, DIM**-0.5)
    pairs = zip((out, *grads), (want[0], *want[2:]), (at, at, keys_at, keys_at), strict=True)
    return max(error_of(found, expected[:, :, i]) for found, expected, i in pairs)


def _positions(cp: CPMesh, mode: dict[str, Any], length: int) -> Tensor:
    """Global positions of this rank's tokens: by definition where the layout has one, else as data is placed."""
    layout, n, r = mode.get("layout", "contiguous"), cp.size, cp.rank
    chunks = torch.arange(length).view(-1, CHUNK)
    if layout == "contiguous":
        return chunks[2 * r : 2 * r + 2].flatten()
    if layout == "head_tail":
        return torch.cat([chunks[r], chunks[2 * n - 1 - r]])
    return resolve(layout, n, length, PackedDocuments([mode["documents"]])).positions(r)


# --------------------------------------------------------------------------- sequences and states


def _sequence(mesh: DeviceMesh, device: str, dtype: torch.dtype) -> float:
    handler = ContextParallelHandler(mesh, "head_tail")
    whole = torch.arange(2 * CHUNK * mesh.size(), dtype=dtype, device=device)[None]
    return error_of(handler.combine(handler.dispatch(whole), 1), whole)


def _roll(mesh: DeviceMesh, device: str, dtype: torch.dtype) -> float:
    handler = ContextParallelHandler(mesh, "head_tail")
    whole = 1 + torch.arange(2 * CHUNK * mesh.size(), dtype=dtype, device=device)[None]
    want = torch.cat([whole[:, 1:], torch.zeros_like(whole[:, :1])], 1)
    return error_of(handler.roll_tensor(handler.dispatch(whole), -1, 1)[0], handler.dispatch(want))


def _recurrence(mesh: DeviceMesh, device: str, dtype: torch.dtype) -> float:
    length, handler = 2 * CHUNK * mesh.size(), ContextParallelHandler(mesh, "head_tail")
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, length, 2, 4, generator=g, dtype=torch.float64) for _ in range(3))
    decay = -torch.rand(1, length, 2, generator=g, dtype=torch.float64)
    state, rows = torch.zeros(1, 2, 4, 4, dtype=torch.float64), []
    for t in range(length):
        state = decay[:, t].exp()[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        rows.append((q[:, t, :, None] @ state)[:, :, 0])
    shares = [handler.dispatch(x).to(device, dtype) for x in (q, k, v, decay)]
    found = linear_recurrence(*shares, mesh=mesh, layout="head_tail", kernel="torch")
    return error_of(found, handler.dispatch(torch.stack(rows, 1)))


def _convolution(mesh: DeviceMesh, device: str, dtype: torch.dtype) -> float:
    length, handler = 2 * CHUNK * mesh.size(), ContextParallelHandler(mesh, "head_tail")
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(1, 3, length, generator=g).double(), torch.randn(3, 4, generator=g).double()
    wide = torch.nn.functional.pad(x, (3, 0))
    want = torch.stack([wide[..., i : i + length] * weight[:, i, None] for i in range(4)]).sum(0)
    share = handler.dispatch(x, 2).to(device, dtype)
    found = causal_conv1d(share, weight.to(device, dtype), mesh=mesh, layout="head_tail")
    return error_of(found, handler.dispatch(want, 2))


SEQUENCES: dict[str, Callable[[DeviceMesh, str, torch.dtype], float]] = {
    "the sequence is gathered (handler.combine)": _sequence,
    "the sequence is shifted (handler.roll_tensor)": _roll,
    "states of a recurrence pass between ranks": _recurrence,
    "rows of a convolution pass between ranks": _convolution,
}

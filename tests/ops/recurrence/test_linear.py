"""``linear_recurrence`` against a token-by-token oracle: the whole family, every layout, documents, worlds 1 to 4; and
``causal_conv1d`` of a split sequence against each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallelHandler
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.ops import causal_conv1d, linear_recurrence, windows
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import Ranks, error_of, on_ranks, sum_over_ranks
from tests.harness.recurrence_oracle import convolve, recur, recur_from

FAMILY = {
    "retention": (1, False),
    "scalar": (3, False),
    "channels": (4, False),
    "delta": (3, True),
    "channel-wise delta": (4, True),
}
"""Dimensions of the decay, and the delta rule or not."""
ONE, ROWS = [[0, 3, 4, 31, 48]], [[0, 23, 48], [0, 5, 6, 37, 48]]


def tensors(kind: str, length: int, heads: int = 4, kv_heads: int = 2, dk: int = 3, dv: int = 5) -> list[Tensor]:
    """q, k, v, decay, maybe beta, and the gradient of the output."""
    g = torch.Generator().manual_seed(length)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    ndim, delta = FAMILY[kind]
    q, k = random(2, length, kv_heads, dk), random(2, length, kv_heads, dk)
    k = k / k.norm(dim=-1, keepdim=True)
    shape = {1: (heads,), 3: (2, length, heads), 4: (2, length, heads, dk)}[ndim]
    decay = -3 * random(*shape).square()  # strong decays too
    beta = [random(2, length, heads).sigmoid()] if delta else []
    return [q, k, random(2, length, heads, dv), decay, *beta, random(2, length, heads, dv)]


def wanted(kind: str, given: list[Tensor], documents: Any) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given[:-1]]
    out = recur(*leaves[:4], leaves[4] if FAMILY[kind][1] else None, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[-1])]


def share(x: Tensor, at: Tensor) -> Tensor:
    return x if x.ndim == 1 else x[:, at]


@on_ranks
def errors(cases: list[tuple[str, str, Any, int, int | None]]) -> dict[str, float]:
    """The largest relative error of outputs and gradients of each case on this rank."""
    mesh = cp_mesh()
    found = {}
    for kind, layout, documents, length, degree in cases:
        handler = ContextParallelHandler(mesh, layout)
        with handler.documents(documents):
            at = handler.position_ids(length)
        given = tensors(kind, length)
        leaves = [share(x, at).clone().requires_grad_() for x in given[:-1]]
        with record_traffic() as traffic:
            how: dict[str, Any] = {"layout": layout, "documents": documents, "ulysses_degree": degree}
            out = linear_recurrence(*leaves, mesh=mesh, **how)
            grads = list(torch.autograd.grad(out, leaves, share(given[-1], at)))
        if FAMILY[kind][0] == 1:  # each rank has the gradient through its own positions
            grads[3] = sum_over_ranks(grads[3])[0]
        want = [share(x, at) for x in wanted(kind, given, documents)]
        scale = [max(1e-3, x.abs().max().item()) for x in want]
        worst = max((a - b).abs().max().item() / s for a, b, s in zip([out, *grads], want, scale, strict=True))
        found[f"{kind} {layout} {documents} {length} {degree}"] = worst
        gathers = [operation for operation, _ in traffic.entries if operation == "all_gather"]
        if degree == 1 and mesh.size() > 1:
            assert {operation for operation, _ in traffic.entries} <= {"all_gather", "agreement"}
            assert len(gathers) == 2, "one all-gather of states in each direction"
    return found


def check(results: list[dict[str, float]], bar: float = 1e-10) -> None:
    bad = {name: error for rank in results for name, error in rank.items() if not error <= bar}
    assert not bad, bad


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_the_family_is_exact_in_every_layout(world: int, ranks: Ranks) -> None:
    cases: list[Any] = []
    for i, kind in enumerate(FAMILY):
        layouts = ["contiguous", "head_tail", "per_document"]
        layouts = layouts[(i + world) % 3 :][: 2 if world == 2 else 1]
        for layout in layouts:
            documents = [ONE, ROWS, None][i % 3] if layout != "per_document" else [ONE, ROWS][i % 2]
            length = 48 if documents else 24
            cases.append((kind, layout, documents, length, 1))
    cases.append(("channel-wise delta", "head_tail", ROWS, 48, 1))
    cases.append(("delta", "contiguous", None, world, 1))  # one token a rank
    cases.append(("scalar", "balanced", ONE, 48, 1))
    check(ranks(world, errors, cases))


@pytest.mark.slow
def test_five_ranks(ranks: Ranks) -> None:
    """All worlds run in threads in ``test_worlds.py``."""
    world, length = 5, 30
    documents = [[0, 1, 9, 10, length]]
    cases: list[Any] = [
        ("channel-wise delta", "head_tail", documents, length, 1),
        ("scalar", "per_document", documents, length, 1),
        ("delta", "contiguous", None, world, 1),
    ]
    check(ranks(world, errors, cases))


def test_heads_are_exchanged(ranks: Ranks) -> None:
    cases = [
        ("retention", "contiguous", ROWS, 48, None),
        ("scalar", "head_tail", ROWS, 48, 2),
        ("delta", "head_tail", ROWS, 48, None),
        ("channel-wise delta", "contiguous", ROWS, 48, 2),
    ]
    check(ranks(4, errors, cases))


def test_long_pieces_compose(ranks: Ranks) -> None:
    """More than one piece in each range."""
    check(ranks(2, errors, [(kind, "head_tail", None, 140, 1) for kind in ("channels", "channel-wise delta")]))


@on_ranks
def recomputed_otherwise() -> list[str]:
    """A checkpoint whose function reads the documents from a place that has changed until its recompute."""
    mesh = cp_mesh()
    q, k, v, decay, _ = (x[:, :24] if x.ndim > 1 else x for x in tensors("scalar", 48))
    weight = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (
        lambda x, now: linear_recurrence(q, k, x, decay, mesh=mesh, documents=now),
        lambda x, now: causal_conv1d(x[:, :, 0].mT[:, :3], weight, mesh=mesh, documents=now),
    ):
        now = [[0, 20, 48]]
        out = checkpoint(lambda x, run=run, now=now: run(x, now[0]), v.clone().requires_grad_(), use_reentrant=False)
        now[0] = [0, 7, 48]
        found.append(error_of(lambda out=out: out.sum().backward()))
    return found


def test_a_recompute_with_other_documents_raises(ranks: Ranks) -> None:
    for found in ranks(2, recomputed_otherwise):
        assert all("RuntimeError: activation checkpointing recomputed this layer with other" in x for x in found), found


# --------------------------------------------------------------------------- convolutions

CONVOLUTIONS: list[tuple[str, Any, int, int, int]] = [
    ("contiguous", None, 24, 4, 1),
    ("head_tail", None, 48, 4, 1),
    ("head_tail", [[0, 1, 30, 48], [0, 24, 25, 48]], 48, 3, 1),
    ("per_document", [[0, 1, 30, 37, 48]], 48, 4, 3),
    ("contiguous", [[0, 11, 12, 24]], 24, 5, 1),
    ("contiguous", None, 24, 1, 1),
    ("head_tail", None, 24, 4, 3),
]
"""Layout, documents, length, width and dilation."""


@on_ranks
def errors_of_convolutions() -> dict[str, float]:
    world, mesh, found = dist.get_world_size(), cp_mesh(), {}
    # One token a rank: the rows before it come from several ranks.
    for layout, documents, length, width, dilation in [*CONVOLUTIONS, ("contiguous", None, world, 4, 1)]:
        handler = ContextParallelHandler(mesh, layout)
        with handler.documents(documents):
            at = handler.position_ids(length)
        g = torch.Generator().manual_seed(length + width)
        shapes = [(2, 3, length), (3, width), (3,), (2, 3, length)]
        x, weight, bias, dout = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = torch.nn.functional.silu(convolve(*leaves, documents, dilation))
        want = [out.detach()[:, :, at], *torch.autograd.grad(out, leaves, dout)]
        want[1] = want[1][:, :, at]
        local = [t.clone().requires_grad_() for t in (x[:, :, at], weight, bias)]
        with record_traffic() as traffic:
            options: dict[str, Any] = {"layout": layout, "documents": documents, "dilation": dilation}
            got = causal_conv1d(*local, mesh=mesh, activation="silu", **options)
            grads = torch.autograd.grad(got, local, dout[:, :, at])
        assert len([name for name, _ in traffic.entries if name == "all_gather"]) == 2 * (width > 1 and world > 1)
        everything = [got, grads[0], *sum_over_ranks(*grads[1:])]
        worst = max((a - b).abs().max().item() for a, b in zip(everything, want, strict=True))
        found[f"{layout} {documents} {length} {width} {dilation}"] = worst
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_rows_before_each_range_travel(world: int, ranks: Ranks) -> None:
    check(ranks(world, errors_of_convolutions), 1e-12)


@on_ranks
def written_in_place() -> list[str]:
    """Errors of writes to outputs, in pieces of one token, too."""
    mesh, found = cp_mesh(), []
    for tokens in (2, 4):
        for layout in ("contiguous", "head_tail"):
            for documents in (None, [0, 1, 2 * tokens], [0, 2 * tokens - 1, 2 * tokens]):
                where: dict[str, Any] = {"mesh": mesh, "layout": layout, "documents": documents}
                q, k, v = (torch.randn(1, tokens, 2, 4, requires_grad=True) for _ in range(3))
                out = linear_recurrence(q, k, v, -torch.rand(1, tokens, 2), **where)
                rows = causal_conv1d(torch.randn(1, 3, tokens, requires_grad=True), torch.randn(3, 2), **where)
                around = windows(torch.randn(1, tokens, 3, requires_grad=True), (1, 0), **where)
                found += [error_of(lambda x=x: x.flatten(1).mul_(0.5).sum().backward()) for x in (out, rows, around)]
    return found


def test_outputs_may_be_written_to(ranks: Ranks) -> None:
    for found in ranks(2, written_in_place):
        assert not any(found), found


BATCHES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "of even length": ({}, [(0, 48), (0, 48)]),
    "padded by the split": ({}, [(0, 37), (0, 37)]),
    "packed": ({"cu_seqlens": [0, 5, 30, 37]}, [(30, 37), (30, 37)]),
    "one more token": ({"cu_seqlens": [0, 5, 30, 33]}, [(30, 33), (30, 33)]),
    "padded itself": ({"attention_mask": [(0, 37), (0, 9)]}, [(0, 37), (0, 9)]),
    "on both sides": ({"attention_mask": [(3, 37), (11, 12)]}, [(3, 37), (11, 12)]),
}
"""Entries of batches, and the place of the last document of each row."""


@on_ranks
def errors_of_final_states() -> dict[str, float]:
    """The largest relative error of the state behind the last token of each row, in the block of a batch."""
    mesh, found = cp_mesh(), {}
    for number, (what, (entries, last)) in enumerate(BATCHES.items()):
        length = entries["cu_seqlens"][-1] if "cu_seqlens" in entries else 48 if number == 0 else 37
        more = dict(entries)
        if "attention_mask" in more:
            at = torch.arange(length)
            more["attention_mask"] = torch.stack([(a <= at) & (at < b) for a, b in more["attention_mask"]]).long()
        for kind in ("retention", "scalar", "channels", "delta", "channel-wise delta"):
            layout = ("head_tail", "contiguous", "per_document")[(number + len(kind)) % 3]
            if layout == "per_document" and number == 0:
                layout = "head_tail"
            q, k, v, decay, *beta = tensors(kind, length)[:-1]
            decay, beta = decay / 3, beta or [None]
            wide = decay.expand(2, length, -1) if decay.ndim == 1 else decay
            want = []
            for row, (a, b) in enumerate(last):
                given = (None if x is None else x[row : row + 1, a:b] for x in (q, k, v, wide, beta[0]))
                few = [None if x is None else x.repeat_interleave(4 // x.shape[2], 2) for x in given]
                want.append(recur_from(v.new_zeros(1, 4, 3, 5), *few)[1])  # type: ignore[arg-type]
            whole = {name: x for name, x in zip("qkvgb", (q, k, v, wide, beta[0]), strict=True) if x is not None}
            handler, state = ContextParallelHandler(mesh, layout), list[Tensor]()
            batch = handler.get_batch_on_this_cp_rank(
                {"input_ids": torch.zeros(2, length, dtype=torch.int64), **whole, **more},
                pad_values=dict.fromkeys(whole.keys() - {"g"}, 1.0),  # a model has other numbers than 0 there
            )
            given = batch["q"], batch["k"], batch["v"], decay if decay.ndim == 1 else batch["g"], batch.get("b")
            with handler.documents(batch), torch.no_grad():
                out = linear_recurrence(*given, mesh=mesh, layout=layout, final_state=state)
                plain = linear_recurrence(*given, mesh=mesh, layout=layout)
            scale = torch.cat(want).abs().max().item()
            found[f"{what} {kind} {layout}"] = (state[0] - torch.cat(want)).abs().max().item() / scale
            assert torch.equal(out, plain)
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_final_state_is_that_behind_the_last_token(world: int, ranks: Ranks) -> None:
    """It was that of the padding with which a split fills up the sequence."""
    check(ranks(world, errors_of_final_states), 1e-12)

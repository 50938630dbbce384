"""Ulysses in head groups: exact, the same bytes, compiled, recomputed, and refused where it cannot be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_cp import ContextParallel
from hyper_cp.mesh import comm, cp_mesh
from hyper_cp.ops import SAVE_LIST, attention
from hyper_cp.ops.config import Operands, OpSettings
from tests.harness.attention_case import FP64, AttentionCase, check, run_cases
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks

HEADS = 8


def cases_of(world: int) -> list[AttentionCase]:
    length = 24 * world
    packed = (0, 5, 17, length), (0, length // 2 + 3, length - 1, length)
    even = ((0, 8 * world, length),)  # every rank holds two chunks of each
    whole = partial(AttentionCase, length, heads=HEADS, v_dim=6, strided=True, ulysses_degree=None)
    cases = [
        whole(True, kv_heads=kv_heads, head_groups=groups, layout=layout)
        for kv_heads, groups, layout in (
            (8, 2, "contiguous"),
            (4, 4, "head_tail"),
            (2, 2, "head_tail"),
            (1, 4, "contiguous"),
        )
        if HEADS // world % groups == 0
    ]
    settings: list[dict[str, Any]] = [
        {"documents": packed, "is_causal": True},
        {"documents": even, "is_causal": True, "layout": "per_document"},
        {"window": (9, 4)},
        {"mask": "rows and heads"},
        {"mask": "bool"},
    ]
    all_of_them = {"scale": 0.3, "is_causal": True, "window": (7, 0), "documents": packed, "layout": "head_tail"}
    if world == 2:
        cases += [whole(head_groups=4, **s) for s in settings[::2]]
        cases += [whole(kv_heads=2, head_groups=2, **s) for s in (*settings[1::2], all_of_them)]
        return cases
    balanced = {"is_causal": True, "load_balance": True}
    for kv_heads, exchange, some in (
        (8, "ring", (balanced, *settings[::2])),
        (4, "all_gather", (balanced, *settings[1:4:2], all_of_them)),
    ):
        hybrid = {"ulysses_degree": 2, "kv_heads": kv_heads, "head_groups": kv_heads // 2, "kv_exchange": exchange}
        cases += [whole(**{**hybrid, **s}) for s in some]
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exact_in_fp64(ranks: Any, world: int) -> None:
    check(ranks(world, run_cases, cases_of(world)), FP64)


def exchanged(log: comm.Traffic) -> int:
    """Bytes of all-to-alls. (The others compare shapes.)"""
    return sum(nbytes for operation, nbytes in log.entries if operation == "all_to_all")


@on_ranks
def traffic(world: int, kv_heads: int, groups: int) -> tuple[list[tuple[str, int]], int]:
    """The transfers of one forward and backward."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, k, v = (torch.randn(1, h, 8, 4, requires_grad=True) for h in (HEADS, kv_heads, kv_heads))
    how: dict[str, Any] = {"mesh": mesh, "ulysses_degree": None, "enable_gqa": True, "head_groups": groups}
    with comm.record_traffic() as log:
        attention(q, k, v, **how).sum().backward()
    return [entry for entry in log.entries if entry[0] == "all_to_all"], exchanged(log)


def test_same_bytes_and_same_sequence_on_every_rank(ranks: Any) -> None:
    for kv_heads in (8, 2):  # a key/value head per group, and one that both groups use
        at_once = ranks(2, traffic, 2, kv_heads, 1)
        grouped = ranks(2, traffic, 2, kv_heads, 4)
        assert grouped[0] == grouped[1]
        assert grouped[0][1] == at_once[0][1]
        per_kv = 4 if kv_heads == 8 else 1  # forward: q, k, v in, out back; backward: dout in, dq, dk, dv back
        assert len(grouped[0][0]) == 4 * 4 + 4 * per_kv


@on_ranks
def order(world: int) -> list[str]:
    """Postings, waits and kernels of forward and backward on this rank."""
    from hyper_cp.ops import kernels

    events: list[str] = []
    post, arrive = comm.GlooAxis.all_to_all, comm.Pending.arrive
    kernel = kernels.get("cpu flash", "cpu")

    def posting(self: Any, send: Tensor) -> Any:
        events.append("post")
        return post(self, send)

    def arriving(self: Any) -> None:
        events.append("wait")
        arrive(self)

    class Noting:
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            events.append("forward")
            return kernel.forward(*args, **kwargs)

        def backward(self, *args: Any, **kwargs: Any) -> Any:
            events.append("backward")
            return kernel.backward(*args, **kwargs)

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, k, v = (torch.randn(1, 6, 8, 4, requires_grad=True) for _ in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm.GlooAxis, "all_to_all", posting)
        patch.setattr(comm.Pending, "arrive", arriving)
        patch.setattr(kernels, "get", lambda *_: Noting())
        attention(q, k, v, mesh=mesh, ulysses_degree=None, head_groups=3).sum().backward()
    return events


def test_a_group_travels_while_another_is_attended(ranks: Any) -> None:
    """In flight when a kernel starts: the next group's messages, and what the group before sends back."""
    for events in ranks(2, order, 2):
        flying, found = 0, []
        for event in events:
            flying += {"post": 1, "wait": -1}.get(event, 0)
            if event in ("forward", "backward"):
                found.append((event, flying))
        assert found[:3] == [("forward", 3), ("forward", 3 + 1), ("forward", 1)]
        assert found[3:] == [("backward", 1), ("backward", 1 + 3), ("backward", 3)]
        assert flying == 0


class Projected(torch.nn.Module):
    """A whole attention block: projections, a norm of queries between them and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 16 + 2 * 8), torch.nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 4 + 2 * 2, -1).transpose(1, 2)
        q, k, v = heads.split([4, 2, 2], dim=1)
        q = torch.nn.functional.rms_norm(q, (4,))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(out.transpose(1, 2).flatten(2))


def block_of(mesh: Any, groups: int) -> Projected:
    torch.manual_seed(0)
    block = Projected().double()
    parallelize_module(block, mesh, ContextParallel(qkv_indices=None, head_groups=groups))
    return block


def gradients(run: Any, block: Projected, step: int) -> list[Tensor]:
    x = torch.randn(2, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).requires_grad_()
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


@on_ranks
def styled(world: int) -> list[float]:
    """Worst difference from the style without groups: eager, compiled, recomputed (all of it, saved ops)."""

    def policy(_ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVE_LIST else CheckpointPolicy.PREFER_RECOMPUTE

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    plain, block = block_of(mesh, 1), block_of(mesh, 2)
    selective = partial(create_selective_checkpoint_contexts, policy)
    runs = [
        block,
        torch.compile(block, fullgraph=True, backend="aot_eager"),
        partial(checkpoint, block, use_reentrant=False),
        partial(checkpoint, block, use_reentrant=False, context_fn=selective),
    ]
    worst, sent = [0.0] * len(runs), [0] * len(runs)
    for step in range(2):
        want = gradients(plain, plain, step)
        for i, run in enumerate(runs):
            with torch._dynamo.config.patch(error_on_recompile=step > 0), comm.record_traffic() as log:
                found = gradients(run, block, step)
            sent[i] = exchanged(log)
            worst[i] = max(worst[i], *(relative_error(a, b) for a, b in zip(found, want, strict=True)))
    assert sent[0] == sent[1] == sent[3] < sent[2], sent  # what is saved is not communicated again
    return worst


@pytest.mark.slow
def test_style_compiles_and_recomputes(ranks: Any) -> None:
    for worst in ranks(2, styled, 2, timeout=300):  # two query heads and one key/value head per rank
        assert max(worst) <= 1e-12, worst


@on_ranks
def opcheck(world: int) -> None:
    cp = cp_mesh.view(init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)), None)
    q, k, v = (torch.randn(2, h, 8, 16, requires_grad=True) for h in (HEADS, 2, 2))
    documents, mask = torch.tensor([[0, 5, 16]]), torch.ones(1, HEADS // 2, 1, 16, dtype=torch.bool)
    sinks = torch.zeros(HEADS // 2, requires_grad=True)
    settings, ops = OpSettings(cp.key, "head_tail", band=(-9, 0), head_groups=2), torch.ops.hyper_cp
    given = Operands(sinks, documents, mask)
    torch.library.opcheck(ops.ulysses_attention.default, (q, k, v, *settings.arguments(given, 0.25)))
    with torch.no_grad():
        given = Operands(sinks.detach(), documents)
        out, _, lse, kernel, *saved = ops.ulysses_attention(q, k, v, *settings.arguments(given, 0.25))
        given = given._replace(kernel=kernel, mark=ops.fingerprint(documents, cp.key))
        rest = torch.ones_like(out), lse, saved, *settings.arguments(given, 0.25)
        torch.library.opcheck(ops.ulysses_attention_backward.default, rest)


@pytest.mark.slow
def test_opcheck(ranks: Any) -> None:
    ranks(2, opcheck, 2, timeout=300)


@on_ranks
def with_lse_and_dropout(world: int) -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    torch.manual_seed(torch.distributed.get_rank())
    q, k, v = (torch.randn(2, 8, 12, 4, dtype=torch.float64) for _ in range(3))
    how: dict[str, Any] = {"mesh": mesh, "ulysses_degree": None, "is_causal": True}
    lses = [attention(q.requires_grad_(), k, v, head_groups=n, return_lse=True, **how)[1] for n in (1, 4)]
    if any(lse.requires_grad for lse in lses):
        raise AssertionError("the log-sum-exp has no gradient")
    q = q.detach()
    dropped = []
    for n in (1, 4):
        torch.manual_seed(5)
        dropped.append(attention(q, k, v, head_groups=n, dropout_p=0.4, **how))
    return relative_error(*reversed(lses)), relative_error(*dropped)


def test_log_sum_exp_and_dropout_do_not_depend_on_groups(ranks: Any) -> None:
    for lse, dropped in ranks(2, with_lse_and_dropout, 2):
        assert lse <= 1e-14
        assert dropped == 0.0


# --------------------------------------------------------------------------- "auto"


class Inner(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@on_ranks
def automatic(world: int) -> tuple[list[int], bool]:
    """The messages of calls, and whether results are the bits of two groups."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, k, v = (torch.randn(1, 8, 40, 4) for _ in range(3))
    how: dict[str, Any] = {"mesh": mesh, "ulysses_degree": None}
    modules = [Inner(), Inner()]
    for module, indices in zip(modules, (None, (0, 1, 2)), strict=True):
        style = ContextParallel(2, 1, qkv_indices=indices, head_groups="auto")
        parallelize_module(module, mesh, style)
    calls = [
        partial(attention, is_causal=True, head_groups="auto", **how),
        *modules,
        torch.compile(modules[0], backend="eager", fullgraph=True),
    ]
    found, messages = [], []
    for call in calls:
        with comm.record_traffic() as log:
            found.append(call(q, k, v))
        messages.append(sum(operation == "all_to_all" for operation, _ in log.entries))
    explicit = attention(q, k, v, is_causal=True, head_groups=2, **how)
    return messages, all(torch.allclose(out, explicit, atol=1e-6) for out in found)


@pytest.mark.slow
def test_groups_are_chosen_by_the_tokens_of_a_call(ranks: Any) -> None:
    """In two groups twice three messages there and one back; a module that receives q, k, v exchanges at once. In a
    compiled graph lengths may be open, so it takes the groups of long ones."""
    for messages, same in ranks(2, automatic, 2):
        assert messages == [8, 8, 4, 16] and same


def test_a_style_takes_auto_and_no_other_word() -> None:
    assert "head_groups='auto'" in repr(ContextParallel(head_groups="auto"))
    with pytest.raises(ValueError, match=r'head_groups=\'many\' must be a positive int, or \'auto\'. .*"auto" chooses'):
        ContextParallel(head_groups="many")


# --------------------------------------------------------------------------- refusals


@on_ranks
def asked(world: int, kv_heads: int, **how: Any) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q, k, v = (torch.randn(1, h, 8, 4) for h in (HEADS, kv_heads, kv_heads))
    with comm.record_traffic() as log:
        try:
            attention(q, k, v, mesh=mesh, enable_gqa=True, **how)
        finally:
            assert all(operation == "agreement" for operation, _ in log.entries), log.entries


def test_says_where_there_is_nothing_to_overlap(ranks: Any) -> None:
    with pytest.raises(ValueError, match=r"head_groups=2 with qkv_indices=\(0, 1, 2\).*all its heads at once"):
        ContextParallel(head_groups=2)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=r"head_groups=.*must be a positive int"):
            ContextParallel(qkv_indices=None, head_groups=wrong)  # type: ignore[arg-type]
    words = r"head_groups=3 does not split the 4 query and 4 key/value heads.*ulysses_degree=2.*: 1, 2, 4$"
    ranks.raises(2, ValueError, words, asked, 2, 8, head_groups=3, ulysses_degree=None)
    words = r"head_groups=4 does not split the 4 query and 2 .*leave no head of keys to two groups: 1, 2$"
    ranks.raises(4, ValueError, words, asked, 4, 4, head_groups=4, ulysses_degree=2)

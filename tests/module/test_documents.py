"""Documents and windows of styled modules: in blocks and by keyword, recomputed, compiled, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel_mesh
from hyper_cp._torch import checkpoint as checkpoint_seam
from hyper_cp.ops import attention, linear_recurrence, select_keys, windows
from tests.harness.attention_case import FP64, cp_mesh, inputs
from tests.harness.oracle import plain_attention, relative_error, visible_pairs
from tests.harness.ranks import check_errors, errors_of, on_ranks

Style = dict[str, Any]
SEQ = 24
FIRST, SECOND = [0, 5, 6, 24], [0, 11, 20, 24]
STYLES: list[dict[str, Any]] = [
    {"ulysses_degree": None},
    {"ulysses_degree": 1, "layout": "head_tail"},
    {"ulysses_degree": 1, "kv_exchange": "ring", "load_balance": True},
    {"ulysses_degree": 2, "kv_exchange": "ring", "layout": "head_tail"},
]


class Attending(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 1.5, k, v, is_causal=True)


class Block(nn.Module):
    """Computes q, k, v itself; the whole is what gets checkpointed and styled."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads * 1.5, heads, heads, is_causal=True).transpose(1, 2).flatten(2)


def styled(module: nn.Module, style: Style) -> tuple[Any, ContextParallelHandler]:
    mesh = cp_mesh()
    made = ContextParallel(seq_dim=2, head_dim=1, **style)
    parallelize_module(module, mesh, {"": made})
    return module, ContextParallelHandler(mesh, made)


def wanted(block_input: Tensor, documents: Any) -> tuple[Tensor, Tensor]:
    """Output and gradient of its square sum, of the Block on one device."""
    x = block_input.clone().requires_grad_()
    heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
    rows = documents if isinstance(documents[0], list) else [documents]
    visible = visible_pairs(SEQ, True, None, rows)
    out = plain_attention(heads * 1.5, heads, heads, visible=visible).transpose(1, 2).flatten(2)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


@on_ranks
def through_the_style(style: Style) -> dict[str, float]:
    found = {}
    q, k, v, _ = inputs(2, 4, 4, SEQ, 8, 8, torch.float64)
    module, handler = styled(Attending(), style)
    local = [handler.dispatch(x, 2) for x in (q, k, v)]

    def error(out: Tensor, rows: Any) -> float:
        visible = visible_pairs(SEQ, True, None, rows)
        return relative_error(handler.combine(out, 2), plain_attention(q * 1.5, k, v, visible=visible))

    with handler.documents(FIRST):
        found["block"] = error(module(*local), [FIRST])
        with handler.documents(document_ids=torch.tensor([[0] * 11 + [1] * 9 + [2] * 4] * 2)):
            found["nested, ids"] = error(module(*local), [SECOND])
        found["back"] = error(module(*local), [FIRST])
        found["keyword wins"] = error(module(*local, documents=[FIRST, SECOND]), [FIRST, SECOND])
    found["after the block"] = error(module(*local), None)
    found["a window"] = relative_error(
        handler.combine(styled(Attending(), {**style, "window": (3, None)})[0](*local), 2),
        plain_attention(q * 1.5, k, v, visible=visible_pairs(SEQ, True, (3, None), None)),
    )
    return found


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_documents_and_windows_through_the_style(ranks: Any, style: Style) -> None:
    for found in ranks(4, through_the_style, style):
        assert max(found.values()) <= FP64, found


BY_DOCUMENTS: list[Style] = [
    {"ulysses_degree": None, "layout": "per_document"},
    {"ulysses_degree": 1, "layout": "balanced", "kv_exchange": "needed"},
    {"ulysses_degree": 2, "kv_exchange": "ring", "layout": "per_document"},
]


@on_ranks
def by_documents(style: Style) -> dict[str, float]:
    """Data and attention place tokens by the documents in force, eager, recomputed and compiled."""
    found = {}
    block, handler = styled(Block(), {**style, "qkv_indices": None})
    whole = torch.randn(2, SEQ, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch._dynamo.reset()
    fast = torch.compile(block, fullgraph=True, backend="eager")
    for turn, documents in enumerate((FIRST, SECOND, [FIRST, SECOND])):
        want, want_grad = wanted(whole, documents)
        for name, run in (
            ("eager", block),
            ("compiled", fast),
            ("recomputed", lambda x: checkpoint(block, x, use_reentrant=False)),
        ):
            with handler.documents(documents):
                x = handler.dispatch(whole, 1).requires_grad_()
                at = handler.position_ids(SEQ)
                with torch._dynamo.config.patch(error_on_recompile=turn == 1):  # the last has another number of rows
                    out = run(x)
                assert torch.equal(whole[:, at], x.detach())
            out.square().sum().backward()
            assert x.grad is not None
            with handler.documents(documents):
                found[f"{name} {turn}"] = relative_error(handler.combine(out.detach(), 1), want)
                found[f"{name} {turn}, gradient"] = relative_error(handler.combine(x.grad, 1), want_grad)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("style", BY_DOCUMENTS, ids=str)
def test_layouts_by_document_through_the_style(ranks: Any, style: Style) -> None:
    for found in ranks(4 if style["ulysses_degree"] == 2 else 2, by_documents, style):
        assert max(found.values()) <= FP64, found


@on_ranks
def of_a_call(style: Style) -> dict[str, float]:
    """Errors of calls with documents of their own in the block of a batch: its own in another form, and others, which
    must raise."""
    module, handler = styled(Attending(), style)
    options: Any = {"mesh": cp_mesh(), "layout": handler.layout, "documents": SECOND}
    whole = torch.randn(2, 4, SEQ, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    want = plain_attention(whole * 1.5, whole, whole, visible=visible_pairs(SEQ, True, None, [FIRST]))
    (want_grad,) = torch.autograd.grad(want.sum(), whole)
    whole.requires_grad_(False)
    batch = handler.get_batch_on_this_cp_rank({"x": whole, "cu_seqlens": torch.tensor(FIRST)}, {"x": 2})
    with handler.documents(batch):
        x = batch["x"]
        rows = x.transpose(1, 2)
        calls: dict[str, Callable[[], Any]] = {
            "module .*": lambda: module(x, x, x, documents=[FIRST, SECOND]),
            "attention": lambda: attention(x, x, x, is_causal=True, **options),
            "select_keys": lambda: select_keys(x, x[:, :1], topk=2, **options),
            "windows": lambda: windows(rows.flatten(2), [1], **options),
            "linear_recurrence": lambda: linear_recurrence(rows, rows, rows, -rows[..., 0].abs(), **options),
        }
        words = "documents=.* are not those of the batch in whose block it is called"
        check_errors([errors_of({f"{name}: {words}": call for name, call in calls.items()})])
        found = {"equal": handler.combine(module(x, x, x, documents=[FIRST, FIRST]), 2)}
        given = x.clone().requires_grad_()
        late = Recompute.apply(lambda x: module(x, x, x, documents=FIRST), given)
    with handler.documents(SECOND):
        late.sum().backward()  # a recompute in the block of the next batch
    found["behind"] = handler.combine(module(x, x, x, documents=FIRST), 2, documents=FIRST)
    grad = handler.combine(given.grad, 2, documents=FIRST)
    return {name: relative_error(x, want) for name, x in found.items()} | {"late": relative_error(grad, want_grad)}


@pytest.mark.parametrize("style", BY_DOCUMENTS[:2], ids=str)
def test_documents_of_a_call_are_those_that_have_placed_its_tokens(ranks: Any, style: Style) -> None:
    for found in ranks(2, of_a_call, style):
        assert max(found.values()) <= FP64, found


@on_ranks
def without_documents(where: str) -> None:
    block, handler = styled(Block(), {"layout": "per_document", "ulysses_degree": 1, "qkv_indices": None})
    if where == "attention":
        block(torch.randn(2, 6, 32))
    handler.dispatch(torch.randn(2, SEQ, 32), 1)


@pytest.mark.parametrize("where", ["attention", "dispatch"])
def test_layouts_by_document_without_documents(ranks: Any, where: str) -> None:
    ranks.raises(2, ValueError, "places tokens by document, but no documents are given", without_documents, where)


@on_ranks
def recompute(style: Style, remembered: bool, reentrant: bool = False) -> dict[str, Any]:
    """Activation checkpointing: a recompute sees the documents of its forward; or raises, where torch's frames do not
    tell which forward it belongs to."""
    block, handler = styled(Block(), {**style, "qkv_indices": None})
    whole = torch.randn(2, SEQ, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found: dict[str, Any] = {}

    def run(**keywords: Any) -> tuple[Tensor, Tensor]:
        x = handler.dispatch(whole, 1).requires_grad_()
        if reentrant:
            return x, checkpoint(lambda y: block(y, **keywords), x, use_reentrant=True)
        return x, checkpoint(block, x, use_reentrant=False, **keywords)

    def error(x: Tensor, out: Tensor, documents: list[int]) -> Any:
        try:
            out.square().sum().backward()
        except RuntimeError as failure:
            return str(failure)
        want, want_grad = wanted(whole, documents or [0, SEQ])
        assert x.grad is not None
        return max(
            relative_error(handler.combine(out.detach(), 1), want),
            relative_error(handler.combine(x.grad, 1), want_grad),
        )

    with nullcontext() if remembered else mock.patch.object(checkpoint_seam, "batch_state", lambda _, read: read()):
        with handler.documents(FIRST):
            found["inside"] = error(*run(), FIRST)
            late = run()
        for name, other in (("ended", None), ("another batch", SECOND), ("other shape", [0, 1, 2, 3, 4, 24])):
            with handler.documents(other) if other else nullcontext():
                found[name] = error(*late, FIRST)
            with handler.documents(FIRST):
                late = run()
        buffer = torch.tensor([FIRST])
        with handler.documents(buffer):
            late = run()
        buffer.copy_(torch.tensor([SECOND]))
        found["a buffer that is written to"] = error(*late, FIRST)
        plain = run()
        with handler.documents(FIRST):
            found["documents only later"] = error(*plain, [0, SEQ])
        found["explicit"] = error(*run(documents=SECOND), SECOND)
        x = handler.dispatch(whole, 1).requires_grad_()
        found["blocks inside the checkpoint"] = error(x, checkpoint(twice, block, handler, x, use_reentrant=False), [])
    return found


def twice(block: nn.Module, handler: ContextParallelHandler, x: Tensor) -> Tensor:
    """Two calls with other documents; the second is what counts."""
    with handler.documents(SECOND):
        ignored = block(x.detach() * 2)
    with handler.documents([0, SEQ]):
        return block(x) + 0 * ignored


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES[1::2], ids=str)
def test_a_recompute_sees_the_documents_of_its_forward(ranks: Any, style: Style) -> None:
    for reentrant in (False, True):
        for found in ranks(4, recompute, style, True, reentrant):
            for name, value in found.items():
                assert isinstance(value, float) and value <= FP64, (name, value)


def test_a_recompute_that_does_not_know_its_forward_raises(ranks: Any) -> None:
    fine = ("inside", "explicit", "blocks inside the checkpoint")
    for found in ranks(2, recompute, STYLES[2], False):
        for name, value in found.items():
            if name in fine:
                assert value <= FP64, (name, value)
            else:
                assert "recomputed this layer with other packed documents" in value, (name, value)


class Recompute(torch.autograd.Function):
    """Activation checkpointing as other libraries write it: nothing of torch's runs in its backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Any:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        torch.autograd.backward(out, *grads)
        return None, x.grad


@on_ranks
def recompute_by_others(style: Style) -> dict[str, Any]:
    block, handler = styled(Block(), {"qkv_indices": None, **style})
    whole = torch.randn(2, SEQ, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def forward() -> tuple[Tensor, Tensor]:
        x = handler.dispatch(whole, 1).requires_grad_()
        return x, Recompute.apply(block, x)

    def error(x: Tensor, out: Tensor, documents: list[int]) -> Any:
        try:
            out.square().sum().backward()
        except RuntimeError as failure:
            return str(failure)
        assert x.grad is not None
        return relative_error(handler.combine(x.grad, 1), wanted(whole, documents)[1])

    found = {"no documents": error(*forward(), [0, SEQ])}
    with handler.documents(FIRST):
        found["inside"] = error(*forward(), FIRST)
        late = forward()
    found["ended"] = error(*late, FIRST)
    with handler.documents(FIRST):
        late = forward()
    with handler.documents(FIRST):
        found["another block of them"] = error(*late, FIRST)
    found["no documents again"] = error(*forward(), [0, SEQ])
    with context_parallel_mesh(block, handler.mesh) as other, other.documents(SECOND):
        late = forward()
    found["ended with its mesh"] = error(*late, SECOND)
    return found


@pytest.mark.parametrize("style", STYLES[1:2], ids=str)
def test_a_recompute_by_other_code_outside_of_its_block_raises(ranks: Any, style: Style) -> None:
    for found in ranks(2, recompute_by_others, style):
        for name, value in found.items():
            if name.startswith("ended"):
                assert "is recomputed in backward without the" in str(value), (name, value)
            else:
                assert isinstance(value, float) and value <= FP64, (name, value)


@on_ranks
def compiled(style: Style) -> float:
    """New documents do not recompile, and are those used."""
    torch._dynamo.reset()
    module, handler = styled(Attending(), style)
    fast = torch.compile(module, fullgraph=True, backend="eager")
    q, k, v, _ = inputs(2, 4, 4, SEQ, 8, 8, torch.float64)
    worst = 0.0
    for step, documents in enumerate((FIRST, SECOND)):
        local = [handler.dispatch(x, 2).requires_grad_() for x in (q, k, v)]
        with torch._dynamo.config.patch(error_on_recompile=step > 0), handler.documents(documents):
            out = fast(*local)
            grads = torch.autograd.grad(out.square().sum(), local)
        wide = [x.clone().requires_grad_() for x in (q, k, v)]
        want = plain_attention(wide[0] * 1.5, *wide[1:], visible=visible_pairs(SEQ, True, None, [documents]))
        want_grads = torch.autograd.grad(want.square().sum(), wide)
        for a, b in zip((out, *grads), (want, *want_grads), strict=True):
            worst = max(worst, relative_error(handler.combine(a.detach(), 2), b))
    return worst


@pytest.mark.slow
def test_new_documents_do_not_recompile(ranks: Any) -> None:
    assert max(ranks(2, compiled, STYLES[1], timeout=300)) <= FP64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attending()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x)


@on_ranks
def checkpoint_around_compiled(style: Style, backend: str) -> dict[str, str]:
    """Outcomes of checkpoints around a compiled module with documents, and backward in the block or behind it."""
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    found, layer = {}, Layer()
    _, handler = styled(layer.inner, style)
    run = torch.compile(layer, backend=backend, fullgraph=True)
    for where in ("inside", "behind", "none, behind"):
        try:
            for documents in ([0, 5, 16], [0, 3, 9, 16]):
                with handler.documents(None if where.startswith("none") else documents):
                    out = checkpoint(run, x, use_reentrant=False)
                    if where == "inside":
                        out.sum().backward()
                if where != "inside":
                    out.sum().backward()
            found[where] = ""
        except Exception as error:
            found[where] = str(error)
    return found


@pytest.mark.slow
def test_a_checkpoint_around_a_compiled_module_raises_words_of_ours(ranks: Any) -> None:
    for found in ranks(2, checkpoint_around_compiled, {"ulysses_degree": 1}, "aot_eager"):
        assert found["inside"] == found["none, behind"] == ""
        assert "activation checkpointing recomputes it without the packed documents" in found["behind"]
        assert "Run backward inside the documents block" in found["behind"]

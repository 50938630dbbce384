"""Prepared models are compared with one device on a few tokens, once, behind their first forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hyper_cp import (
    ContextParallel,
    ContextParallelHandler,
    context_parallel,
    context_parallel_mesh,
    split_cp_mesh,
)
from hyper_cp._torch.modules import hook_owners, without_hooks
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_causal import tiny_causal
from tests.harness.hf_images import tiny
from tests.harness.hf_models import VOCABULARY, make, prepare_batch, prepare_model, tokens
from tests.harness.oracle import absolute_error
from tests.harness.ranks import on_ranks

pytest.importorskip("transformers")


class Added(nn.Module):
    """A function of the hidden states beside a module."""

    def __init__(self, inner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.function(x)
        return out


def pooled(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, -1)).mean(2).repeat_interleave(x.shape[1] // 2, 1)


def averaged(x: Tensor) -> Tensor:
    weights = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    return weights / weights.sum(1, keepdim=True) @ x


def counted(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], dtype=x.dtype).sin()[:, None].expand_as(x)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "pooled": pooled,
    "averaged": averaged,
    "counted": counted,
    "right": torch.sin,
}


def model_of(name: str | None, kind: str = "llama") -> Any:
    model = make(kind).float()
    if name is not None:
        model.model.layers[0].mlp = Added(model.model.layers[0].mlp, FUNCTIONS[name])
    return model


def said(model: Any, batch: dict[str, Any]) -> int:
    """The warnings of a forward and its backward."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = model(**batch)
        loss = getattr(output, "loss", None)
        (output[0].square().mean() if loss is None else loss).backward()
    return sum("has other logits on the" in str(x.message) for x in caught)


def local_batch(style: ContextParallel, **entries: Any) -> dict[str, Any]:
    ids = tokens(48)
    return prepare_batch(ContextParallelHandler(cp_mesh(), style), {"input_ids": ids, "labels": ids, **entries})


@on_ranks
def of_functions(layout: str) -> dict[str, list[int]]:
    """The warnings of two forwards."""
    found = {}
    style = ContextParallel(ulysses_degree=1, layout=layout)
    for name in FUNCTIONS:
        model = prepare_model(model_of(name), cp_mesh(), style=style)
        found[name] = [said(model, local_batch(style)) for _ in range(2)]
    quiet = prepare_model(model_of("pooled"), cp_mesh(), style=style, compare=False)
    found["right"] += [said(quiet, local_batch(style))]
    decoder = prepare_model(model_of("pooled").model, cp_mesh(), style=style)
    batch = local_batch(style)
    for name in ("labels", "shift_labels", "num_items_in_batch"):
        del batch[name]
    found["decoder"] = [said(decoder, batch) for _ in range(2)]
    return found


@pytest.mark.parametrize("layout", ["head_tail", "per_document"])
def test_what_mixes_or_counts_positions_is_found_by_numbers(ranks: Any, layout: str) -> None:
    for found in ranks(2, of_functions, layout):
        assert found.pop("right") == [0, 0, 0]  # and one that is not compared
        assert found == {name: [1, 0] for name in ("pooled", "averaged", "counted", "decoder")}, found


WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "bf16": lambda model: model.bfloat16(),
    "ddp": lambda model: DistributedDataParallel(model, process_group=cp_mesh().get_group()),
    "fsdp": lambda model: fully_shard(model, mesh=cp_mesh(), reshard_after_forward=True),
    "fsdp1": lambda model: FullyShardedDataParallel(
        model, process_group=cp_mesh().get_group(), use_orig_params=True, device_id=torch.device("cpu")
    ),
    "fsdp of layers": lambda model: sharded_by_layers(model),
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "compiled layers": lambda model: compiled_layers(model),
    "autocast": lambda model: model,
    "checkpoints": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}) or model,
}


def sharded_by_layers(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=cp_mesh())
    return fully_shard(model, mesh=cp_mesh())


def compiled_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def gradients_of(model: Any) -> list[Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in grads if x is not None]


@on_ranks
def in_ways(way: str) -> tuple[list[int], list[int], bool]:
    """The warnings of two steps of a wrong and of a right model, and True if gradients are those without the comparison
    and the model was left as it was."""
    style, counts, same = ContextParallel(ulysses_degree=1), [], True
    for name in ("counted", None):
        made = prepare_model(model_of(name), cp_mesh(), style=style).train()
        seen: list[int] = []
        made.lm_head.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.shape[1]))
        model = WAYS[way](made)
        random = torch.get_rng_state()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            counts.append([said(model, local_batch(style))])
        same &= torch.equal(random, torch.get_rng_state())
        same &= seen == [24] or way == "compiled"  # a hook of the user's has seen the batch alone
        same &= all(module.training for module in made.modules())
        first = gradients_of(made)
        for p in made.parameters():
            p.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            counts[-1].append(said(model, local_batch(style)))
        same &= all(torch.equal(a, b) for a, b in zip(first, gradients_of(made), strict=True))
    return counts[0], counts[1], same


@pytest.mark.parametrize("way", WAYS)
def test_the_comparison_goes_with_wrappers_and_changes_nothing(ranks: Any, way: str) -> None:
    for wrong, right, same in ranks(2, in_ways, way):
        assert (wrong, right) == ([1, 0], [0, 0]) and same, (wrong, right, same)


class Gated(nn.Module):
    """A module that keeps a loss for later, in several ways."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Linear(width, 4)
        self._loss: Tensor | None = None
        self.record = Record()
        self.scale = nn.Buffer(torch.ones(1))
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        self._loss = self.record.loss = p.square().mean()
        self.record.all.append(p)
        self.calls += 1
        self.scale.copy_(p.detach().max()[None])  # and saved for backward: nothing may write to it again
        out: Tensor = self.inner(x) * p[..., :1] * self.scale
        return out


class Record:
    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.all: list[Tensor] = []


@on_ranks
def kept() -> tuple[bool, ...]:
    """True where what a module has kept in the first forward is that of its batch, and backward finds what it saved."""
    style, model = ContextParallel(ulysses_degree=1), make("llama").float()
    gated = model.model.layers[1].mlp = Gated(model.model.layers[1].mlp, model.config.hidden_size)
    prepare_model(model, cp_mesh(), style=style)
    model(**local_batch(style)).loss.backward()
    losses = gated._loss, gated.record.loss
    (p,) = gated.record.all
    once = p.shape[1] == 24 and gated.calls.item() == 1
    return losses[0] is losses[1], once, all(x is not None and x.requires_grad for x in (*losses, p))


def test_what_a_module_keeps_in_its_first_forward_is_of_the_batch(ranks: Any) -> None:
    assert ranks(2, kept) == [(True, True, True)] * 2


@on_ranks
def with_short_table(layout: str) -> list[int]:
    """The warnings of a packed batch that is longer than the table of positions."""
    import transformers as hf

    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=32, attn_pdrop=0)
    )
    style = ContextParallel(ulysses_degree=1, layout=layout)
    prepare_model(model, cp_mesh(), style=style)
    at = (torch.arange(48) % 24).expand(2, -1)
    return [said(model, local_batch(style, position_ids=at))]


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_no_position_is_beyond_those_of_the_table(ranks: Any, layout: str) -> None:
    """Before, one rank raised an error, for which the other one waited."""
    assert ranks(2, with_short_table, layout, timeout=60) == [[0], [0]]


@on_ranks
def weights_behind() -> tuple[list[bool], list[Tensor]]:
    """True for a head whose weights are whole behind a forward under FSDP2; and the gradients of one step, before which
    there were gradients of another one on a mesh of one rank."""
    style, whole, found = ContextParallel(ulysses_degree=1), [], []
    for compared in (True, False):
        model = prepare_model(model_of(None), cp_mesh(), style=style)
        owner = next(x for x in hook_owners(model.model) if hasattr(x, "few"))
        owner.few.made = not compared
        sharded_by_layers(model)
        with context_parallel_mesh(model, split_cp_mesh(cp_mesh()).cp(1)) as handler:
            model(**prepare_batch(handler, {"input_ids": tokens(48), "labels": tokens(48)})).loss.backward()
        loss = model(**local_batch(style)).loss
        whole.append(not isinstance(model.lm_head.weight, DTensor))
        loss.backward()
        assert owner.few.made
        found.append(gradients_of(model)[0])
    return whole, found


def test_gradients_and_whole_weights_of_fsdp_remain(ranks: Any) -> None:
    for whole, (found, wanted) in ranks(2, weights_behind):
        assert whole == [True, True] and torch.equal(found, wanted)


@on_ranks
def over_several_degrees() -> float:
    """The loss of a rank; two ranks share a sequence, two have one each, and FSDP gathers the weights of all."""
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    family, style = split_cp_mesh(world, [2]), ContextParallel(ulysses_degree=1)
    mesh = family.cp(2 if dist.get_rank() < 2 else 1)
    model = fully_shard(prepare_model(model_of(None), mesh, style=style), mesh=world)
    ids = tokens(48)
    loss = model(**prepare_batch(ContextParallelHandler(mesh, style), {"input_ids": ids, "labels": ids})).loss
    loss.backward()
    return float(loss.detach())


def test_ranks_of_several_degrees_do_not_wait_for_each_other(ranks: Any) -> None:
    first, second, *alone = ranks(4, over_several_degrees, timeout=60)
    assert all(abs(first + second - x) < 1e-5 for x in alone)


@on_ranks
def of_documents() -> list[int]:
    """The warnings of a forward inside a block with documents, and of one with padding and a chunked loss."""
    style, found = ContextParallel(ulysses_degree=1), []
    handler = ContextParallelHandler(cp_mesh(), style)
    mask = torch.ones_like(tokens(48))
    mask[0, :7] = 0
    for name in ("pooled", "right"):
        model = prepare_model(model_of(name), cp_mesh(), style=style)
        with handler.documents([0, 13, 48]):
            found.append(said(model, local_batch(style)))
        model = prepare_model(model_of(name), cp_mesh(), style=style, chunked_loss=True)
        found.append(said(model, local_batch(style, attention_mask=mask)))
    return found


def test_the_comparison_is_the_same_for_every_batch(ranks: Any) -> None:
    for found in ranks(2, of_documents):
        assert found == [1, 1, 0, 0]


@on_ranks
def of_images(kinds: list[str]) -> list[int]:
    """The warnings of right models, of which one counts positions around its decoder."""
    found, style = [], ContextParallel(ulysses_degree=1)
    handler, ids = ContextParallelHandler(cp_mesh(), style), torch.arange(40)[None] % 7 + 20
    for kind in kinds:
        model = prepare_model(tiny(kind).float(), cp_mesh(), style=style)
        found.append(said(model, prepare_batch(handler, {"input_ids": ids, "labels": ids})))
    return found


def test_models_of_images_are_compared_by_text(ranks: Any) -> None:
    assert ranks(2, of_images, ["gemma4", "qwen2_5_vl", "llava"]) == [[0, 0, 0]] * 2


@on_ranks
def beside_a_block(kind: str) -> tuple[list[int], list[float]]:
    """The warnings of a right model that runs in a ``context_parallel`` block; the errors of one on a mesh of one rank
    there, of its gradients in a checkpoint, and of the first on such a mesh."""
    style, mesh, ids = ContextParallel(ulysses_degree=1), cp_mesh(), tokens(48)
    alone, here = tiny_causal(kind).float(), ids.clone()
    (model, other), one = (copy.deepcopy(alone) for _ in range(2)), split_cp_mesh(mesh, [1]).cp(1)
    prepare_model(other, one, style=style)
    for made in (alone, other):
        made.gradient_checkpointing_enable({"use_reentrant": False})
        made.train()
    prepare_model(model, mesh, style=style)
    want = alone(ids, use_cache=False).logits
    want.square().mean().backward()
    with context_parallel(mesh, buffers=[here], buffer_seq_dims=[1], layout="contiguous"):
        warned = [said(model, {"input_ids": here, "use_cache": False})]
        found = other(ids, use_cache=False).logits
        found.square().mean().backward()
        errors = [absolute_error(found, want)]
        with context_parallel_mesh(model, one):
            errors.append(absolute_error(model(ids, use_cache=False).logits, want))
    errors += [absolute_error(x, y) for x, y in zip(gradients_of(other), gradients_of(alone), strict=True)]
    whole = torch.randn(1, 2, 32, 8, generator=torch.Generator().manual_seed(0))
    part = dist.get_rank() * 16

    def inside(module: nn.Module, args: Any, output: Any) -> None:
        share = whole.clone()
        with context_parallel(mesh, buffers=[share], buffer_seq_dims=[2], layout="contiguous"):
            found = F.scaled_dot_product_attention(share, share, share)
        right = F.scaled_dot_product_attention(whole, whole, whole)[:, :, part : part + 16]
        errors.append(absolute_error(found, right))

    other.get_input_embeddings().register_forward_hook(inside)
    with torch.no_grad():
        other(ids, use_cache=False)
    return warned, errors


@pytest.mark.parametrize("kind", ["llama", "mamba2", "falcon_h1"])
def test_a_model_of_one_rank_is_left_alone_by_a_block_of_several(ranks: Any, kind: str) -> None:
    """Its attention met the keys of other batches, and the comparison in the block warned of a model that is right. A
    block that begins within its forward has several ranks."""
    for warned, errors in ranks(2, beside_a_block, kind):
        assert warned == [0] and max(errors) <= 1e-5, (warned, errors)


def test_hooks_of_packages_are_left_out_and_come_back_unless_they_were_removed() -> None:
    """X-LoRA hands its hooks on as partial functions, and removes them in its forward."""
    module, calls = nn.Linear(2, 2), []
    module.register_forward_hook(partial(F.dropout, p=0.0))  # would raise an error
    own = module.register_forward_hook(lambda *_: calls.append(1))
    with without_hooks([module], lambda name: name.startswith("torch.nn.functional")):
        module(torch.ones(1, 2))
        own.remove()
    assert calls == [1]
    with pytest.raises(TypeError):
        module(torch.ones(1, 2))
    assert calls == [1]

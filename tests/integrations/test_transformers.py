"""Real transformers models under context parallelism: losses and gradients of the unsharded model, or errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_cp import ContextParallel, context_parallel
from hyper_cp.cli.modes import named_modes
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_causal import tiny_causal
from tests.harness.hf_models import InDouble, gradients, make, prepare_batch, prepare_model, prepared, tokens
from tests.harness.oracle import absolute_error
from tests.harness.ranks import check_errors, error_of, errors_of, on_ranks, sum_over_ranks

pytest.importorskip("transformers")

MODES = named_modes("Ulysses", "all-gather", "ring", "all-gather, load_balance", "hybrid of 2, ring")


Answer = tuple[Tensor, list[Tensor]]
"""The loss and the gradients of all parameters."""


def unsharded(model: Any, batch: dict[str, Any]) -> Answer:
    model = copy.deepcopy(model)
    with InDouble():
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), gradients(model)


@cache
def one_device(name: str, case: str = "plain") -> Answer:
    """The answer of a fresh model to one of :func:`batches`, computed once in a process."""
    batch = batches()[case]
    if case == "flash":  # one device has no flash attention here: its positions name the same documents
        batch = {k: v for k, v in batch.items() if not k.startswith("cu_")}
    return unsharded(make(name), batch)


def errors(model: Any, batch: dict[str, Any], want: Answer, **mode: Any) -> float:
    """The largest difference in the loss and in any parameter's gradient, relative to its largest gradient."""
    model, handler = prepared(model, **mode)
    return compare(model, prepare_batch(handler, batch), want)


def compare(model: Any, local: dict[str, Any], want: Answer) -> float:
    with InDouble():
        loss = model(**local).loss
    loss.backward()
    total, *grads = sum_over_ranks(loss, *gradients(model))
    scaled = [(a, b, max(b.abs().max().item(), 1e-3)) for a, b in zip(grads, want[1], strict=True)]
    return max(absolute_error(total, want[0]), *(absolute_error(a, b) / scale for a, b, scale in scaled))


def batch_of(length: int = 24) -> dict[str, Any]:
    ids = tokens(length)
    return {"input_ids": ids, "labels": ids.clone()}


@on_ranks
def every_mode(name: str, layout: str) -> dict[str, float]:
    model, batch, want, found = make(name), batch_of(), one_device(name), {}
    for mode, settings in MODES.items():
        hybrid = settings["ulysses_degree"] == 2
        if ("load_balance" in settings and layout == "head_tail") or (hybrid and dist.get_world_size() < 4):
            continue
        found[mode] = errors(model, batch, want, layout=layout, **settings)
    return found


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        ("llama", 2, "contiguous"),
        ("gemma3", 2, "head_tail"),
        ("deepseek_v3", 2, "contiguous"),
        pytest.param("deepseek_v3", 4, "head_tail", marks=pytest.mark.slow),
        pytest.param("gemma3", 4, "contiguous", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_one_device(ranks: Any, name: str, world: int, layout: str) -> None:
    for found in ranks(world, every_mode, name, layout):
        assert len(found) >= 3 and max(found.values()) <= 1e-10, found


# --------------------------------------------------------------------------- padded and packed batches


def batches() -> dict[str, dict[str, Any]]:
    """Global batches of two rows: plain; padded on the right, on the left, in between; packed, by three names."""
    plain = batch_of()
    found = {"plain": plain}
    ends = {
        "right": [(17, 24), (24, 24)],
        "left": [(0, 7), (0, 0)],
        "both": [(0, 5), (19, 24)],
        "between": [(4, 9), (0, 2)],
    }
    for name, hidden in ends.items():
        mask, labels = torch.ones(2, 24, dtype=torch.int64), plain["labels"].clone()
        for row, (start, stop) in enumerate(hidden):
            mask[row, start:stop], labels[row, start:stop] = 0, -100
        found[name] = {**plain, "labels": labels, "attention_mask": mask}
    restart = torch.cat([torch.arange(n) for n in (5, 9, 10)])[None].expand(2, -1)
    found["positions"] = {**plain, "position_ids": restart}
    one = {name: x[:1] for name, x in plain.items()}
    boundaries = torch.tensor([0, 5, 14, 24])
    found["flash"] = {**one, "position_ids": restart[:1], "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    found["any length"] = {name: x[:, :21] for name, x in found["both"].items()}
    seen = torch.ones(24, 24, dtype=torch.bool).tril() & (torch.arange(24) % 3 != 1) | torch.eye(24, dtype=torch.bool)
    found["4-D"] = {**plain, "attention_mask": seen[None, None].expand(2, 1, -1, -1)}
    return found


@on_ranks
def padded_and_packed(name: str, layout: str) -> dict[str, float]:
    model, found = make(name), {}
    for case, batch in list(batches().items())[1:]:
        want = one_device(name, case)
        found[case] = errors(model, batch, want, layout=layout, ulysses_degree=1, kv_exchange="ring")
        if case == "any length":
            continue
        # The same, given to the model directly, which gathers and reads local masks and positions.
        direct, handler = prepared(model, layout=layout, ulysses_degree=None)
        local = {**prepare_batch(handler, {k: batch[k] for k in ("input_ids", "labels")})}
        del local["context_parallel"], local["position_ids"]
        given = {k: v for k, v in batch.items() if k not in local}
        whole = {k: v for k, v in given.items() if k.startswith("cu_") or v.ndim == 4}
        local |= whole | {k: handler.dispatch(v, 1) for k, v in given.items() if k not in whole}
        found[f"{case}, directly"] = compare(direct, local, want)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("llama", "head_tail"), ("gemma3", "contiguous")])
def test_padded_and_packed_batches(ranks: Any, name: str, layout: str) -> None:
    for found in ranks(2, padded_and_packed, name, layout):
        assert len(found) == 15 and max(found.values()) <= 1e-10, found


@on_ranks
def masks_of_outer_models() -> dict[str, float]:
    """Errors of shares with a padding mask that did not come from ``prepare_batch``, which the model around the decoder
    reads first."""
    model, found = tiny_causal("gemma4"), {}
    direct, handler = prepared(model, layout="head_tail", ulysses_degree=1, kv_exchange="ring")
    for case in ("both", "between"):
        direct.zero_grad()
        batch = batches()[case]
        given = {"attention_mask": batch["attention_mask"], "position_ids": torch.arange(24).expand(2, -1)}
        local = {**prepare_batch(handler, {k: batch[k] for k in ("input_ids", "labels")})}
        del local["context_parallel"]
        alone = {k: x for k, x in local.items() if k != "position_ids"}
        error = error_of(lambda alone=alone: direct(**alone))
        assert "position ids that the model around it has counted" in error, error
        found[f"{case}, prepare_batch"] = compare(direct, prepare_batch(handler, batch), unsharded(model, batch))
        for kind, mask in ("local", handler.dispatch(given["attention_mask"], 1)), ("global", given["attention_mask"]):
            want = unsharded(model, {**batch, **given})
            direct.zero_grad()
            found[f"{case}, {kind}"] = compare(direct, {**local, "attention_mask": mask}, want)
    return found


def test_padding_that_an_outer_model_reads(ranks: Any) -> None:
    for found in ranks(2, masks_of_outer_models):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def router_logits(kind: str) -> list[Any]:
    """The error of a model that returns logits of routers and makes no loss of them, and their tokens on a rank."""
    model, batch = tiny_causal(kind), batch_of()
    direct, handler = prepared(model, layout="head_tail", ulysses_degree=1, kv_exchange="ring")
    local = {**prepare_batch(handler, batch), "output_router_logits": True}
    error = compare(direct, local, unsharded(model, batch))
    output = direct(**local)
    return [error, getattr(output, "aux_loss", None), output.router_logits[0].flatten(0, -2).shape[0]]


@pytest.mark.parametrize("kind", ["deepseek_v3", "hy_v3"])
def test_router_logits_without_a_loss_are_those_of_the_share(ranks: Any, kind: str) -> None:
    for error, loss, rows in ranks(2, router_logits, kind):
        assert error <= 1e-10 and loss is None and rows == 24


@on_ranks
def prefixes() -> dict[str, float]:
    """Errors of a model whose first tokens see each other (HRM-Text), by the types of its tokens."""
    model, found = tiny_causal("hrm_text"), {}
    direct, handler = prepared(model, layout="head_tail", ulysses_degree=1, kv_exchange="ring")
    for case in ("plain", "right", "left"):
        batch = batches()[case]
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        batch["token_type_ids"][0, 2:9], batch["token_type_ids"][1, 7:15] = 1, 1
        direct.zero_grad()
        found[case] = compare(direct, prepare_batch(handler, batch), unsharded(model, batch))
    return found


def test_tokens_of_a_prefix_see_each_other(ranks: Any) -> None:
    for found in ranks(2, prefixes):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def documents_of_a_batch(layout: str) -> float:
    """Documents under each of their names place the tokens, and are what attention sees."""
    settings = {"layout": layout, "ulysses_degree": 1, "kv_exchange": "ring"}
    model, boundaries = make("llama"), torch.tensor([0, 5, 14, 24])
    ids = tokens(24)[:1]
    restart = torch.cat([torch.arange(n) for n in (5, 9, 10)])[None]
    _, handler = prepared(model, **settings)
    for given in (
        {"documents": [0, 5, 14, 24]},
        {"cu_seqlens": boundaries},
        {"cu_seqlens_q": boundaries, "cu_seqlens_kv": boundaries.int(), "max_seqlen_q": 10},
        {"cu_seq_lens_k": boundaries, "max_length_k": 10},
        {"document_ids": torch.repeat_interleave(torch.tensor([4, 1, 7]), torch.tensor([5, 9, 10]))[None]},
    ):
        local = prepare_batch(handler, {"input_ids": ids, **given})
        assert set(local) == {"input_ids", "position_ids", "context_parallel"}, list(given)
        assert sorted(set(local["context_parallel"].documents[0].tolist())) == [0, 5, 14, 24], list(given)
        assert torch.equal(local["input_ids"], ids[:, local["position_ids"][0]]), list(given)
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": restart}
    return errors(model, {**batch, "cu_seqlens": boundaries}, unsharded(model, batch), **settings)


@pytest.mark.parametrize("layout", ["head_tail", "per_document"])
def test_documents_of_a_batch_place_its_tokens(ranks: Any, layout: str) -> None:
    assert max(ranks(2, documents_of_a_batch, layout)) <= 1e-10


# --------------------------------------------------------------------------- layers of the user's


class Around(nn.Module):
    """A function in front of a module of the model."""

    def __init__(self, inner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.function(x))
        return out


@on_ranks
def own_layers() -> dict[str, list[int]]:
    """Warnings of two forwards of a prepared model: the user's code is in it, before or after it was prepared."""
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "roll": lambda x: x.roll(1, 1),
        "fft": lambda x: torch.fft.fft(x, dim=1).real,
        "right: channels": lambda x: x.flip(2),
        "reduction": lambda x: x - x.mean(1, keepdim=True),
        "right: mean of channels": lambda x: x - x.mean(2, keepdim=True),
    }
    found: dict[str, list[int]] = {}
    for name, call in calls.items():
        for when in ("before", "after", "hook"):
            model = make("llama")
            layer = model.model.layers[1]
            if when == "before":
                layer.mlp = Around(layer.mlp, call)
            model, handler = prepared(model, ulysses_degree=1)
            if when == "after":
                made = model.model.layers[1]
                made.mlp = Around(made.mlp, call)
            elif when == "hook":
                model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args, call=call: (call(*args),))
            local = prepare_batch(handler, batch_of())
            for _ in range(2):
                with warnings.catch_warnings(record=True) as caught, InDouble():
                    warnings.simplefilter("always")
                    model(**local)
                counts = found.setdefault(f"{name}, {when}", [])
                counts.append(sum("mixes positions" in str(x.message) for x in caught))
    return found


def test_a_users_code_in_a_prepared_model_is_watched(ranks: Any) -> None:
    """That of transformers is known, and is not."""
    for found in ranks(2, own_layers):
        for name, counts in found.items():
            assert counts == ([0, 0] if name.startswith("right") else [1, 0]), (name, counts)


@on_ranks
def unprepared_in_a_block() -> list[str]:
    """Warnings of a model that is right as it is, and looks for packed documents in its positions."""
    model, ids, at = make("llama").float(), batch_of()["input_ids"], torch.arange(24)[None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with context_parallel(cp_mesh(), buffers=[ids, at], buffer_seq_dims=[1, 1], layout="contiguous"):
            model(input_ids=ids, position_ids=at, use_cache=False)
    return [str(x.message) for x in caught if "mixes positions" in str(x.message)]


def test_masks_of_transformers_are_not_warned_of(ranks: Any) -> None:
    assert ranks(2, unprepared_in_a_block) == [[], []]


# --------------------------------------------------------------------------- recompute and compile


@on_ranks
def recomputed() -> dict[str, float]:
    """Errors of a copied model under activation checkpointing, which must recompute with the documents of the forward,
    also after the block that named them."""
    model, cases, found = make("llama").float(), batches(), {}
    for case in ("left", "positions", "between", "block left"):
        oracle = copy.deepcopy(model)
        batch = cases["positions" if case == "block left" else case]
        oracle(**batch, use_cache=False).loss.backward()
        made, handler = prepared(model, ulysses_degree=1, layout="head_tail")
        copied = copy.deepcopy(made)
        copied.gradient_checkpointing_enable({"use_reentrant": False})
        local = prepare_batch(handler, batch)
        if case == "block left":
            del local["context_parallel"]
            mask = torch.ones_like(local["input_ids"])
            with handler.documents([0, 5, 14, 24]):
                loss = copied(**local, attention_mask=mask).loss
        else:
            loss = copied(**local).loss
        loss.backward()
        pairs = zip(sum_over_ranks(*gradients(copied)), gradients(oracle), strict=True)
        found[case] = max(absolute_error(a, b) / max(b.abs().max().item(), 1e-3) for a, b in pairs)
    return found


def test_recompute_sees_what_the_forward_saw(ranks: Any) -> None:
    for found in ranks(2, recomputed):
        assert max(found.values()) <= 2e-5, found


@on_ranks
def compiled() -> list[float]:
    """Errors of batches of the same shape, with different documents, in a layer compiled without graph breaks."""
    model, cases, found = make("llama", num_hidden_layers=1).float(), batches(), []
    made, handler = prepared(model, ulysses_degree=1)
    made.model.layers[0].compile(fullgraph=True, backend="eager")
    for case in ("left", "positions"):
        want = copy.deepcopy(model)(**cases[case], use_cache=False).loss
        loss = made(**prepare_batch(handler, cases[case])).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(abs(total.item() - want.item()))
    return found


@pytest.mark.slow
def test_a_layer_compiles_into_one_graph(ranks: Any) -> None:
    for found in ranks(2, compiled):
        assert max(found) <= 1e-5, found


class Capped(nn.Module):
    is_causal = True


@on_ranks
def refused() -> dict[str, str]:
    from transformers import DynamicCache

    from hyper_cp.integrations.huggingface.attention import attention_forward
    from hyper_cp.integrations.huggingface.masks import attention_mask
    from hyper_cp.integrations.transformers import register

    ids = tokens(24)
    local = {"input_ids": ids.chunk(2, 1)[dist.get_rank()]}
    model, handler = prepared(make("llama"))

    def unprepared() -> None:
        register()
        made = make("llama")
        made.set_attn_implementation("hyper_cp")
        made(**local)

    def block_and_batch() -> None:
        with handler.documents([0, 24]):
            model(**prepare_batch(handler, {"input_ids": ids, "documents": [0, 24]}))

    def ignored_index() -> None:
        shift = torch.nn.functional.pad(ids, (0, 1))[:, 1:].masked_fill(ids > 30, 0)
        batch = {"input_ids": ids, "labels": ids, "shift_labels": shift, "ignore_index": 0}
        model(**prepare_batch(handler, batch))

    def option(name: str) -> None:
        q, made = torch.zeros(1, 2, 4, 8), prepared(make("llama"))[0]

        def calls(module: Any, args: Any, kwargs: Any) -> Any:
            given = {"context_parallel": kwargs["context_parallel"], name: 30.0}
            return attention_forward(Capped(), q, q, q, None, **given)

        made.model.layers[0].register_forward_pre_hook(calls, with_kwargs=True)
        made(**local)

    return errors_of(
        {
            "prepared for context parallelism already": lambda: prepare_model(
                model, cp_mesh(), style=ContextParallel()
            ),
            r"window=\(4, 0\).*The model says which": lambda: prepared(make("llama"), window=(4, 0)),
            "RuntimeError: LlamaAttention.*prepare_model": unprepared,
            "NotImplementedError: LlamaAttention asks for dropout.*attention_dropout=0.0": lambda: prepared(
                make("llama", attention_dropout=0.1)
            )[0](**local),
            "NotImplementedError: .*use_cache=False": lambda: model(
                **local, past_key_values=DynamicCache(config=model.config)
            ),
            "NotImplementedError: .*logits_to_keep=1, as generate passes it": lambda: (
                copy.deepcopy(model).eval().generate(tokens(12), max_new_tokens=2, use_cache=False)
            ),
            "NotImplementedError: RwkvModel has modules RwkvFeedForward": lambda: prepared(tiny_causal("rwkv")),
            r"padding twice \(a batch of prepare_batch.*, an attention_mask\)": lambda: model(
                **prepare_batch(handler, {"input_ids": ids}), attention_mask=torch.ones(2, 12)
            ),
            r"documents or padding twice \(a batch of .*an enclosing handler.documents": block_and_batch,
            "LlamaForCausalLM got labels and ignore_index=0.*write -100 into labels": ignored_index,
            r"NotImplementedError: .*custom \(size 3\)": lambda: attention_mask(
                12, 12, local_size=3, config=make("gemma3").config
            ),
            r"\(2, 13\).*\[B, 12\].*\[B, 24\]": lambda: model(**local, attention_mask=torch.ones(2, 13)),
            "up to 2.*documents=": lambda: model(**local, attention_mask=torch.arange(12).expand(2, -1) // 4),
            "'documents', 'cu_seq_lens_q' name different documents": lambda: prepare_batch(
                handler, {"input_ids": ids[:, :12], "documents": [0, 12], "cu_seq_lens_q": [0, 4, 12]}
            ),
            "attn_mask has shape.*global": lambda: model(
                **local, attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
            ),
            "NotImplementedError: Capped asks for position_bias": lambda: option("position_bias"),
            "NotImplementedError: Capped calls attention with new_bias.*does not know": lambda: option("new_bias"),
        }
    )


def test_what_cannot_be_honoured_is_refused(ranks: Any) -> None:
    check_errors(ranks(2, refused))

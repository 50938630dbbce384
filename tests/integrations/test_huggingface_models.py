"""Models whose masks, rotary tables, router losses and heads depend on more than a rank's share of the sequence."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import convert_frame
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel, context_parallel_mesh, split_cp_mesh
from tests.harness.hf_causal import CAUSAL, MASKED, SEQ2SEQ, tiny_causal
from tests.harness.hf_models import (
    SMALL,
    InDouble,
    gradients,
    interrupt,
    make,
    model_of,
    prepare_batch,
    prepared,
    tokens,
)
from tests.harness.oracle import absolute_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

hf: Any = pytest.importorskip("transformers")

STYLES: tuple[dict[str, Any], ...] = (
    {"ulysses_degree": None},
    {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
)
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}

KINDS = ["full_attention", "chunked_attention"]
LLAMA4 = {**MOE, "layer_types": KINDS, "attention_chunk_size": 5, "intermediate_size_mlp": 16}
"""Two layers of Llama 4, of which the first one does not rotate."""


def errors(model: Any, batch: dict[str, Any], styles: Any = STYLES, compiled: bool = False, **forward: Any) -> float:
    """The largest error of the loss, and of a gradient relative to the largest of its parameter, in some modes. With
    ``compiled`` attention of the first layer is a graph without breaks."""
    oracle, worst = copy.deepcopy(model), 0.0
    with InDouble():
        want = oracle(**batch, use_cache=False, **forward).loss
        want.backward()
    for mode in styles:
        made, handler = prepared(model, **mode)
        if compiled:
            made.model.layers[0].self_attn.compile(backend="eager", fullgraph=True)
        with InDouble():
            loss = made(**prepare_batch(handler, batch), **forward).loss
            loss.backward()  # inside too, where activation checkpointing recomputes
        total, *grads = sum_over_ranks(loss, *gradients(made))
        pairs = zip(grads, gradients(oracle), strict=True)
        relative = [absolute_error(a, b) / max(b.abs().max().item(), 1e-3) for a, b in pairs]
        worst = max(worst, absolute_error(total, want), *relative)
    return worst


def batch_of(length: int = 24, padded: bool = False) -> dict[str, Any]:
    ids = tokens(length)
    labels, mask = ids.clone(), torch.ones_like(ids)
    if padded:
        mask[0, : length // 4], mask[1, -length // 3 :] = 0, 0
        labels[mask == 0] = -100
    return {"input_ids": ids, "labels": labels, **({"attention_mask": mask} if padded else {})}


# --------------------------------------------------------------------------- masks and windows


@on_ranks
def windows() -> dict[str, float]:
    """A window that only the mask knows (PhiMoE), and layers that pass no keywords down to attention."""
    found = {}
    for kind, changes in {
        "phimoe": {**MOE, "sliding_window": 5, "rope_parameters": None},
        "nemotron": {},
        "stablelm": {},
        "llama4_text": {**LLAMA4, "no_rope_layers": [0, 1], "floor_scale": 3},
    }.items():
        model = model_of(kind, **changes)
        found[kind] = errors(model, batch_of(22, padded=kind != "nemotron"))
    return found


@pytest.mark.slow
def test_the_mask_of_a_model_decides_its_window(ranks: Any) -> None:
    for found in ranks(2, windows):
        assert len(found) == 4 and max(found.values()) <= 1e-10, found


@on_ranks
def padding_that_predicts(kind: str) -> list[int]:
    """Warnings of rows with padding before their tokens, whose first label counts, and of rows where it does not."""
    (model, handler), batch, found = prepared(tiny_causal(kind), ulysses_degree=1), batch_of(24, padded=True), []
    for label in (batch["input_ids"][0, 6].item(), -100):
        batch["labels"][0, 6] = label
        with InDouble(), warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            model(**prepare_batch(handler, batch))
        found.append(sum("labels count at padding that sees no token" in str(x.message) for x in caught))
    return found


@pytest.mark.parametrize("kind", ["inkling_text", "minimax_m3_vl_text", "mamba2"])
def test_padding_that_predicts_is_warned_of_where_it_has_means(ranks: Any, kind: str) -> None:
    """Gradients were up to 100 % off: padding that sees no token has the mean of all values on one device. A model
    without attention was warned of, too."""
    assert ranks(2, padding_that_predicts, kind) == [[int(kind != "mamba2"), 0]] * 2


@on_ranks
def narrow_states(kind: str) -> float:
    """The relative error of logits under autocast, where states of biases are narrower than the profiles."""
    alone = tiny_causal(kind).float()
    (model, handler), ids = prepared(alone, ulysses_degree=1), batch_of(24)["input_ids"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = alone(input_ids=ids).logits
        found = handler.combine(model(**prepare_batch(handler, {"input_ids": ids})).logits, 1)
    return ((found - want).norm() / want.norm()).item()


@pytest.mark.parametrize("kind", ["inkling_text", "inkling2_text"])
def test_biases_of_states_under_autocast(ranks: Any, kind: str) -> None:
    assert max(ranks(2, narrow_states, kind)) < 0.02


@on_ranks
def positions() -> list[float]:
    """Models that make position ids from the tokens or the mask take those of the batch, or make them of all of it."""
    batch, found = batch_of(22, padded=True), []
    shown = batch["attention_mask"]
    for kind, first in (("roberta", SMALL["pad_token_id"] + 1), ("opt", 0)):
        model = model_of(kind, is_decoder=True, word_embed_proj_dim=32, ffn_dim=24, num_key_value_heads=4)
        found.append(errors(model, {**batch, "position_ids": (shown.cumsum(1) - 1) * shown + first}))
        hidden = {**batch, "input_ids": batch["input_ids"].masked_fill(shown == 0, SMALL["pad_token_id"])}
        found.append(errors(model, hidden))  # made of the whole batch
    return found


@on_ranks
def counted() -> list[float]:
    """The errors of Llama 4, whose first layer scales queries by positions that it counts: with padding, with packed
    documents, recomputed, and compiled."""
    model = model_of("llama4_text", **LLAMA4, no_rope_layers=[0, 1], floor_scale=3)
    batch, found = batch_of(22), []
    at = torch.cat([torch.arange(9), torch.arange(13)])[None].expand(2, -1)
    for more in ({"position_ids": at}, batch_of(22, padded=True), {"labels": tokens(22).flip(0)}):
        found.append(errors(model, {**batch, **more}))
    again = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), InDouble())}
    model.train().gradient_checkpointing_enable(again)
    return [*found, errors(model, batch, STYLES[1:]), errors(model.eval(), batch, STYLES[1:], compiled=True)]


def test_layers_that_count_positions_count_those_of_the_whole_sequence(ranks: Any) -> None:
    for found in ranks(2, counted):
        assert max(found) <= 1e-10, found


@on_ranks
def asked_for_weights() -> tuple[Any, int]:
    """The weights that a model returns, and the number of warnings."""
    model, handler = prepared(make("llama"))
    local = prepare_batch(handler, {"input_ids": tokens(24)})
    with pytest.warns(UserWarning, match="LlamaAttention got output_attentions=True, and returns no") as found:
        return model(**local, output_attentions=True).attentions, len(found)


def test_weights_of_attention_are_warned_of(ranks: Any) -> None:
    assert ranks(2, asked_for_weights) == [((), 2)] * 2  # one of each layer; Python shows equal ones once


@on_ranks
def with_short_tables() -> list[float]:
    """The errors of XGLM, whose tables of sinusoids have fewer rows than there are tokens, and grow."""
    found = []
    for batch in (batch_of(22), batch_of(22, padded=True)):
        model, batch["labels"][0, 22 // 4] = (
            tiny_causal("xglm"),
            -100,
        )  # the first token behind padding, if there is some
        table = model.get_decoder().embed_positions
        table.make_weights(16, table.embedding_dim, table.padding_idx)
        found.append(errors(model, batch))
    return found


def test_tables_of_sinusoids_grow_with_the_whole_sequence(ranks: Any) -> None:
    for found in ranks(2, with_short_tables):
        assert max(found) <= 1e-10, found


@on_ranks
def with_alibi() -> list[float]:
    """The errors of Falcon with ALiBi biases: without and with padding, and recomputed."""
    model = tiny_causal("falcon")
    model.config.alibi = model.transformer.use_alibi = True
    padded = batch_of(22, padded=True)
    padded["labels"][0, 22 // 4] = -100  # padding, which predicts it, sees everything on one device
    found = [errors(model, batch_of(22)), errors(model, padded)]
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return [*found, errors(model, padded, STYLES[1:])]


def test_attention_that_calls_sdpa_with_alibi_biases(ranks: Any) -> None:
    for found in ranks(2, with_alibi):
        assert max(found) <= 1e-10, found


@on_ranks
def labels_of_padding() -> list[float]:
    """Padding whose labels count, behind the tokens of rows and before those of others, sees what it sees alone."""
    batch, found = batch_of(22, padded=True), []
    batch["labels"] = batch["input_ids"]
    for kind in ("llama", "gemma3"):
        found += [errors(make(kind), batch), errors(make(kind), {**batch, "labels": tokens(22).flip(0)})]
    return found


def test_labels_of_padding(ranks: Any) -> None:
    for found in ranks(2, labels_of_padding):
        assert max(found) <= 1e-10, found


@on_ranks
def packed_encoder() -> float:
    """The error of an encoder's hidden states in packed documents, each of which one device runs alone."""
    torch.manual_seed(7)
    config = hf.BertConfig(**{**SMALL, "is_decoder": False}, attn_implementation="sdpa")
    model, ids = hf.BertModel(config, add_pooling_layer=False).double().eval(), tokens(24)
    at = torch.cat([torch.arange(9), torch.arange(15)])[None].expand(2, -1)
    found = 0.0
    for mode in STYLES:
        made, handler = prepared(model, **mode)
        with InDouble(), torch.no_grad():
            local = prepare_batch(handler, {"input_ids": ids, "position_ids": at})
            hidden = made(**local).last_hidden_state
            whole = handler.combine(hidden, 1, documents=local["context_parallel"].documents)
            want = torch.cat([model(ids[:, :9]).last_hidden_state, model(ids[:, 9:]).last_hidden_state], 1)
        found = max(found, absolute_error(whole, want))
    return found


def test_packed_documents_of_encoders_stay_apart(ranks: Any) -> None:
    assert max(ranks(2, packed_encoder)) <= 1e-10


def test_models_with_positions_of_their_own_take_those_of_the_batch(ranks: Any) -> None:
    for found in ranks(2, positions):
        assert max(found) <= 1e-10, found


@on_ranks
def recomputed() -> dict[str, float]:
    """Layers that pass no keywords on, and attention that is routed, are recomputed with the state of the forward."""
    found = {}
    for kind in ("nemotron", "falcon"):
        for reentrant in (False, True):
            model = tiny_causal(kind).train()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            found[f"{kind}, {reentrant}"] = errors(model, batch_of(22, padded=True), STYLES[1:])
    return found


def test_recomputes_have_the_state_of_the_forward(ranks: Any) -> None:
    for found in ranks(2, recomputed):
        assert len(found) == 4 and max(found.values()) <= 1e-10, found


# --------------------------------------------------------------------------- rotary tables


@on_ranks
def long_rotary() -> dict[str, float]:
    """Frequencies that change once the sequence is longer than the original one; the last rank alone sees that."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0]}
    long = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 20,
        "factor": 4.0,
        **factors,
    }
    scales = {"short_mscale": 1.1, "long_mscale": 1.4}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "dynamic": ("llama", {"max_position_embeddings": 16, "rope_parameters": dynamic}),
        "longrope": ("phi3", {"rope_parameters": long, "original_max_position_embeddings": 20}),
        "phimoe": ("phimoe", {**MOE, "rope_parameters": {**long, **scales}, "sliding_window": None}),
    }
    found = {}
    for name, (kind, changes) in cases.items():
        model = model_of(kind, **changes)
        for length in (12, 24) if name == "dynamic" else (21,):
            found[f"{name}, {length}"] = errors(model, batch_of(length))
    restart = torch.cat([torch.arange(n) for n in (19, 5)])[None].expand(2, -1)  # no document is longer than 20
    found["restarts"] = errors(
        model_of(*cases["longrope"][:1], **cases["longrope"][1]), {**batch_of(), "position_ids": restart}
    )
    return found


@pytest.mark.slow
def test_rotary_tables_know_the_length_of_the_whole_sequence(ranks: Any) -> None:
    for found in ranks(2, long_rotary):
        assert len(found) == 5 and max(found.values()) <= 1e-10, found


# --------------------------------------------------------------------------- router losses


@on_ranks
def router_losses() -> dict[str, float]:
    found = {}
    for kind, batch in {
        "qwen3_moe": batch_of(),
        "mixtral": batch_of(23, padded=True),
        "granitemoe": batch_of(23),
    }.items():
        model = model_of(kind, **MOE, router_aux_loss_coef=0.5, moe_intermediate_size=16)
        found[kind] = errors(model, batch, output_router_logits=True)
    direct, handler = prepared(model, layout="contiguous")
    batch, oracle = batch_of(24, padded=True), copy.deepcopy(model)
    mask = handler.dispatch(batch["attention_mask"], 1)
    with InDouble():
        want = oracle(**batch, output_router_logits=True, use_cache=False).aux_loss
        ids = handler.dispatch(batch["input_ids"], 1)
        got = direct(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    found["without prepare_batch"] = absolute_error(sum_over_ranks(got)[0], want)
    return found


@on_ranks
def router_loss_of_a_derived_class(derive: str) -> float:
    """The error of the router loss of a model whose class FSDP2, or the user, has derived from that of transformers."""
    model, batch = model_of("mixtral", **MOE), batch_of()
    with InDouble():
        want = model(**batch, output_router_logits=True, use_cache=False).aux_loss
    direct, handler = prepared(model)
    if derive == "FSDP2":
        fully_shard(direct, mesh=handler.mesh)
    else:
        direct.__class__ = type("OwnMixtral", (type(direct),), {"__module__": __name__})
    with InDouble():
        got = direct(**prepare_batch(handler, batch), output_router_logits=True).aux_loss
    return absolute_error(sum_over_ranks(got)[0], want)


@pytest.mark.parametrize("derive", ["FSDP2", "user"])
def test_classes_derived_from_those_of_transformers_have_router_losses(ranks: Any, derive: str) -> None:
    """They were refused: the usual function of the loss was not found in the file of the class."""
    assert max(ranks(2, router_loss_of_a_derived_class, derive)) <= 1e-10


@on_ranks
def router_loss_of_narrow_logits() -> float:
    """The difference of router losses where the forward casts to bf16 and its outputs to fp32, as accelerate has it."""
    model, batch = model_of("qwen3_moe", **MOE).float(), {"input_ids": batch_of()["input_ids"]}

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            output = whole_forward(*args, **kwargs)
        for layer in output.router_logits:
            layer.data = layer.data * 20  # so that experts differ
        output.aux_loss = load_balancing_loss_func(output.router_logits, model.num_experts, model.num_experts_per_tok)
        output.router_logits = tuple(x.float() for x in output.router_logits)
        return output

    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    whole_forward = model.forward
    model.forward = forward
    want = model(**batch, output_router_logits=True, use_cache=False).aux_loss
    model.forward = whole_forward
    direct, handler = prepared(model)
    whole_forward = direct.forward
    direct.forward = forward
    got = direct(**prepare_batch(handler, batch), output_router_logits=True).aux_loss
    return absolute_error(sum_over_ranks(got)[0], want)


def test_router_losses_of_logits_in_half_precision(ranks: Any) -> None:
    """They were taken for another formula, on some ranks only, for which the others waited."""
    assert max(ranks(2, router_loss_of_narrow_logits)) <= 2e-2


@pytest.mark.slow
def test_router_losses_are_shares_of_that_of_the_whole_sequence(ranks: Any) -> None:
    for found in ranks(2, router_losses):
        assert len(found) == 4 and max(found.values()) <= 1e-10, found


# --------------------------------------------------------------------------- meshes of one rank


@on_ranks
def generated() -> list[bool]:
    """On a mesh of one rank a prepared model is the model itself: it generates, and takes any argument."""
    same = []
    for implementation in ("sdpa", "eager"):
        model = make("gemma3").float().eval()
        model.set_attn_implementation(implementation)
        made, handler = prepared(model, ulysses_degree=1)
        family, batch = split_cp_mesh(handler.mesh), batch_of(18, padded=True)
        asked = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].flip(1)}
        options = {"max_new_tokens": 4, "do_sample": False}
        with context_parallel_mesh(made, family.cp(1)) as alone:
            for cache in (True, False):
                want = model.generate(**asked, **options, use_cache=cache)
                same.append(torch.equal(made.generate(**asked, **options, use_cache=cache), want))
            same.append(torch.equal(made(**asked, logits_to_keep=3).logits, model(**asked, logits_to_keep=3).logits))
            same.append(torch.equal(made(**batch).loss, model(**batch).loss))
            if implementation == "sdpa":  # eager attention lets padding see everything
                loss = made(**prepare_batch(alone, batch)).loss
                same.append(torch.allclose(loss, model(**batch).loss))
    return same


def test_a_mesh_of_one_rank_switches_context_parallelism_off(ranks: Any) -> None:
    for found in ranks(2, generated):
        assert len(found) == 9 and all(found), found


@on_ranks
def copied_layers(implementation: str) -> tuple[float, str]:
    """The error of a model with a copied layer and one of another model, and the implementation of the latter."""
    model, other = make("llama"), make("llama")
    for made in (model, other):
        made.set_attn_implementation(implementation)
    layers = model.model.layers.extend([copy.deepcopy(model.model.layers[0]), other.model.layers[1]])
    model.config.num_hidden_layers = len(layers)
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
    return errors(model, batch_of(padded=implementation == "sdpa")), other.config._attn_implementation


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_copied_layers_have_the_attention_of_their_model(ranks: Any, implementation: str) -> None:
    for error, kept in ranks(2, copied_layers, implementation):
        assert error <= 1e-10 and kept == implementation


@on_ranks
def changed_rotation() -> float:
    """The error of a model whose rotary embedding is replaced after it has been prepared, by a dynamic one."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = hf.LlamaConfig(**{**SMALL, "max_position_embeddings": 8}, rope_parameters=rope)
    model = make("llama")
    oracle, (made, handler) = copy.deepcopy(model), prepared(model, ulysses_degree=1, layout="head_tail")
    for x in (oracle, made):
        x.model.rotary_emb = hf.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    with InDouble():
        want = oracle(input_ids=tokens(24)).logits
        got = made(**prepare_batch(handler, {"input_ids": tokens(24)})).logits
    return absolute_error(handler.combine(got, 1), want)


def test_rotary_embeddings_that_are_put_in_later(ranks: Any) -> None:
    assert max(ranks(2, changed_rotation)) <= 1e-10


def put_in(model: Any, what: str) -> None:
    """Put something of a user's into a model of transformers: what is none of it, or a copy of what it has."""
    layer = model.model.layers[0]
    if what == "loss":
        model.loss_function = lambda logits, labels, vocab_size, shift_labels=None, **_: F.cross_entropy(
            logits.flatten(0, 1), shift_labels.flatten()
        )
    elif what == "attention":
        attention = layer.self_attn

        def written(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, k, v = (p(hidden_states).unflatten(2, (-1, attention.head_dim)).transpose(1, 2) for p in projections)
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            weights = (q @ k.mT).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -1e9).softmax(-1)
            return attention.o_proj((weights @ v).transpose(1, 2).flatten(2)), None

        attention.forward = written
    elif what == "module":
        layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.BatchNorm1d(24))
    else:
        layer.mlp = copy.deepcopy(layer.mlp)


@on_ranks
def put_into_a_copy(what: str) -> list[str]:
    """The errors of a prepared model with something of a user's in it, of a copy of a model that has run, with the same
    in it, of a copy of that, and of the model."""
    made, handler = prepared(make("llama"), ulysses_degree=1)
    batch, found = batch_of(24), []
    other = copy.deepcopy(made)  # has not run
    made(**prepare_batch(handler, batch)).loss.backward()
    ran = copy.deepcopy(made.requires_grad_())
    for model in (other, ran):
        put_in(model, what)
    for model in (other, ran, copy.deepcopy(ran), made):
        found.append(error_of(lambda model=model: model(**prepare_batch(handler, batch)).loss.backward()))
    return found


@pytest.mark.parametrize("what", ["loss", "attention", "module", "a layer of its own"])
def test_what_is_put_into_a_copy_of_a_model_that_has_run_is_checked(ranks: Any, what: str) -> None:
    """The copy took along that it was checked: its loss counted twice, and attention ended at a rank's share."""
    words = {
        "loss": "is not divided by num_items_in_batch",
        "attention": "computes attention by itself",
        "module": "mixes positions",
    }
    for fresh, copied, again, original in ranks(2, put_into_a_copy, what):
        assert fresh == copied == again and not original, (fresh, copied, again, original)
        assert words[what] in fresh if what in words else not fresh, fresh


@on_ranks
def adapters_of_a_model_that_has_run(further: bool) -> list[str]:
    """The errors of two forwards of a prepared model that was evaluated before it got adapters; with ``further`` ones
    also between good adapters and those."""
    import peft

    made, handler = prepared(make("llama"), ulysses_degree=1)
    batch, task = batch_of(24), {"target_modules": ["q_proj"], "r": 2, "task_type": "CAUSAL_LM"}
    with torch.no_grad():
        made(**prepare_batch(handler, batch))
    if further:
        made = peft.get_peft_model(made, peft.LoraConfig(**task)).double()
        made(**prepare_batch(handler, batch)).loss.backward()
        made = made.merge_and_unload()
    made = peft.get_peft_model(made, peft.LilyConfig(**task)).double()
    return [error_of(lambda: made(**prepare_batch(handler, batch))) for _ in range(2)]


@pytest.mark.parametrize("further", [False, True])
def test_adapters_of_a_model_that_has_run_are_checked(ranks: Any, further: bool) -> None:
    """They were checked in its first forward only: Lily averaged over the tokens of a share."""
    pytest.importorskip("peft")
    for errors in ranks(2, adapters_of_a_model_that_has_run, further):
        assert all("NotImplementedError" in x and "has a Lily adapter" in x for x in errors), errors


@on_ranks
def other_adapters_of_a_model_that_has_run(which: str) -> list[str]:
    """The errors of forwards behind a first one, with adapters whose weights each rank has drawn for itself: of layers,
    of the head, or of layers again, in place of other ones; and of embeddings, under the name of another adapter."""
    import peft

    made, handler = prepared(make("llama"), ulysses_degree=1)
    batch, task = batch_of(24), {"r": 2, "task_type": "CAUSAL_LM"}
    task["target_modules"] = [{"head": "lm_head", "same name": "embed_tokens"}.get(which, "q_proj")]
    if which in ("again", "same name"):
        made = peft.get_peft_model(made, peft.LoraConfig(**task)).double()
    with torch.no_grad():
        made(**prepare_batch(handler, batch))
    made = made.unload() if which == "again" else made
    handler.seed_dropout(1234)
    if which == "same name":
        made.add_adapter("other", peft.LoraConfig(**task))
        made.delete_adapter("default")
        made.add_adapter("default", peft.LoraConfig(**task))
        made.delete_adapter("other")
        made.double().set_adapter("default")
    else:
        made = peft.get_peft_model(made, peft.LoraConfig(**task)).double()
    return [error_of(lambda: made(**prepare_batch(handler, batch))) for _ in range(2)]


@pytest.mark.parametrize("which", ["layers", "head", "again", "same name"])
def test_adapters_of_a_model_that_has_run_are_compared_between_ranks(ranks: Any, which: str) -> None:
    """The weights were compared in its first forward only: ranks trained adapters that began unlike."""
    pytest.importorskip("peft")
    for errors in ranks(2, other_adapters_of_a_model_that_has_run, which):
        assert all("different weights" in x and "lora_" in x for x in errors), errors


@on_ranks
def batches_of_another_mesh(given: bool) -> tuple[list[str], float]:
    """The errors of batches that were split before a block of one rank, or in it, on the other mesh, and the error of
    the loss of those that are used where they were split. With ``given`` position ids the batch has its own."""
    model, batch = make("llama"), batch_of(24)
    if given:
        batch["position_ids"] = torch.arange(24).repeat(2, 1)
    oracle, (made, handler) = copy.deepcopy(model), prepared(model, ulysses_degree=1, layout="head_tail")
    with InDouble():
        want = oracle(**batch).loss
        share = prepare_batch(handler, batch)
        with context_parallel_mesh(made, split_cp_mesh(handler.mesh).cp(1)) as alone:
            whole = prepare_batch(alone, batch)
            found = [error_of(lambda: made(**share))]
            worst = absolute_error(made(**whole).loss, want)
        found.append(error_of(lambda: made(**whole)))
        (total,) = sum_over_ranks(made(**share).loss)
    return found, max(worst, absolute_error(total, want))


@pytest.mark.parametrize("given", [False, True])
def test_batches_that_were_split_for_another_mesh_are_refused(ranks: Any, given: bool) -> None:
    """A batch that a loader had split before an evaluation was taken for whole sequences in it, without a word."""
    for (inside, behind), error in ranks(2, batches_of_another_mesh, given):
        assert "runs over 1 ranks, and prepare_batch has split this batch over 2" in inside, inside
        assert "runs over 2 ranks, and prepare_batch has split this batch over 1" in behind, behind
        assert error <= 1e-10


@on_ranks
def copies_that_run(kind: str) -> float:
    """The largest error of a copy of a prepared model that has run, and of a copy of it that has run, too."""
    model, batch = tiny_causal(kind), {"input_ids": tokens(24)}
    oracle, (made, handler) = copy.deepcopy(model), prepared(model, ulysses_degree=1, layout="head_tail")
    found = []
    with InDouble(), torch.no_grad():
        want = oracle(**batch, use_cache=False).logits
        for _ in range(3):
            got = made(**prepare_batch(handler, batch)).logits
            found.append(absolute_error(handler.combine(got, 1), want))
            made = copy.deepcopy(made)
    return max(found)


@pytest.mark.parametrize("kind", ["bloom", "mpt", "mamba2", "deepseek_v3", "gemma3_text", "falcon_h1", "qwen3_moe"])
def test_copies_of_models_that_have_run_are_not_refused(ranks: Any, kind: str) -> None:
    assert max(ranks(2, copies_that_run, kind)) <= 1e-10


class OwnRotary(torch.nn.Module):
    """A rotary embedding of a user's: of each position, of the longest one too, or of their distances to the first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "longest, said":
            self.rope_type = "dynamic"

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        at = position_ids - position_ids.min() if self.how == "from the first" else position_ids
        longest = at.max() + 1 if "longest" in self.how else 1
        angles = at[..., None] / (longest * 10.0 ** torch.arange(4.0, dtype=torch.float64)).repeat(2)
        return angles.cos(), angles.sin()


@on_ranks
def own_rotary(how: str) -> tuple[float, str]:
    """The error of a prepared model with such an embedding; what it raises, in two forwards."""
    model = make("llama")
    model.model.rotary_emb = OwnRotary(how)
    oracle, (made, handler) = copy.deepcopy(model), prepared(model, ulysses_degree=1)
    local = prepare_batch(handler, {"input_ids": tokens(24)})
    with InDouble():
        first, second = (error_of(lambda: made(**local)) for _ in range(2))
        if first:
            return 0.0, first if first == second else ""
        got = made(**local).logits
        return absolute_error(handler.combine(got, 1), oracle(input_ids=tokens(24)).logits), ""


@pytest.mark.parametrize("how", ["each", "longest, said", "longest", "from the first"])
def test_rotary_embeddings_of_users_that_read_other_positions(ranks: Any, how: str) -> None:
    """Before, each rank rotated by the positions of its share."""
    for error, raised in ranks(2, own_rotary, how):
        assert error <= 1e-10
        if how in ("each", "longest, said"):
            assert not raised, raised
        else:
            assert raised.startswith("ValueError: module 'rotary_emb' (OwnRotary): the ranks of the cp mesh"), raised
            assert "give the module the attribute rope_type = 'dynamic'" in raised


@on_ranks
def window_without_a_mask() -> float:
    """The error of a model with windows whose mask is taken away: SDPA does not know them then."""
    with mock.patch("transformers.models.mistral.modeling_mistral.create_sliding_window_causal_mask", lambda **_: None):
        return errors(model_of("mistral", sliding_window=5), batch_of())


def test_sdpa_has_no_window_without_a_mask(ranks: Any) -> None:
    assert max(ranks(2, window_without_a_mask)) <= 1e-10


class Scorer(hf.LlamaForSequenceClassification):
    """A user's class, under a name of its own."""


@on_ranks
def derived_head() -> float:
    torch.manual_seed(0)
    model = Scorer(hf.LlamaConfig(**SMALL, num_labels=3)).double().eval()
    ids, mask = tokens(24), torch.ones(2, 24, dtype=torch.int64)
    mask[1, 17:] = 0
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    made, _ = prepared(model, ulysses_degree=1, layout="head_tail")
    with InDouble():
        return absolute_error(made(**batch).logits, model(**batch).logits)


def test_classes_derived_from_classifiers_take_whole_batches(ranks: Any) -> None:
    assert max(ranks(2, derived_head)) <= 1e-10


# --------------------------------------------------------------------------- heads


@on_ranks
def per_token_head() -> float:
    """A head that computes a result for each token of a share."""
    ids = batch_of()["input_ids"]
    torch.manual_seed(7)
    model = hf.LlamaForTokenClassification(hf.LlamaConfig(**SMALL)).double().eval()
    made, handler = prepared(model, layout="head_tail")
    with InDouble():
        want, got = model(input_ids=ids)[0], made(**prepare_batch(handler, {"input_ids": ids}))[0]
    return absolute_error(handler.combine(got, 1), want)


def test_a_head_that_treats_tokens_one_by_one(ranks: Any) -> None:
    assert max(ranks(2, per_token_head)) <= 1e-10


def biased(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
    """Attention with a bias of scores that its module has made, as it would make a learned one."""
    q, k = query.flatten(0, 1), key.flatten(0, 1)
    return torch.baddbmm(torch.ones(len(q), q.shape[1], k.shape[1], dtype=q.dtype), q, k.transpose(1, 2))


def shifted(module: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    return type(module).forward(module, torch.roll(hidden_states, 1, 1), **kwargs)


def in_groups(module: Any, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
    rows = len(hidden_states)
    given = hidden_states, *(x.expand(rows, -1, -1) for x in position_embeddings)
    halves = [x.unflatten(1, (2, -1)).flatten(0, 1) for x in given]
    out, weights = type(module).forward(module, halves[0], position_embeddings=tuple(halves[1:]), **kwargs)
    return out.unflatten(0, (-1, 2)).flatten(1, 2), weights


class OwnLoss(hf.LlamaForCausalLM):
    """A model that shifts its labels by itself, as many of older versions and of other authors do."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Tensor:
        logits = super().forward(input_ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class WritesOut(hf.models.llama.modeling_llama.LlamaAttention):
    """Attention that is written out; or in a function elsewhere; or that calls SDPA."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> tuple[Tensor, None]:
        heads = (x(hidden_states).unflatten(-1, (-1, self.head_dim)) for x in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.transpose(1, 2) for x in heads)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return self.o_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)), None


class Elsewhere(WritesOut):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return WritesOut.forward(self, hidden_states)


class CallsSDPA(WritesOut):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        q = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class TwoLosses(hf.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + output.logits.logsumexp(-1).square().mean()
        return output


class Counts(torch.nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states * torch.arange(hidden_states.shape[1])[:, None], None


def wrong_use(case: str) -> None:
    local = {"input_ids": tokens(24).chunk(2, 1)[dist.get_rank()]}
    labels, config = local["input_ids"], hf.LlamaConfig(**SMALL)
    if case == "pooled batch":
        # Its forward drops the mark of such a batch, which its decoder would refuse.
        model, handler = prepared(hf.MegatronBertForNextSentencePrediction(hf.MegatronBertConfig(**SMALL)))
        with pytest.raises(ValueError, match="MegatronBertModel got a batch of prepare_batch"):
            model(**prepare_batch(handler, {"input_ids": tokens(24)}))
        model, handler = prepared(hf.LlamaForSequenceClassification(config))
        model(**prepare_batch(handler, {"input_ids": tokens(24)}))
    elif case == "token classification":
        prepared(hf.LlamaForTokenClassification(config))[0](**local, labels=labels % 2)
    elif case == "question answering":
        model, handler = prepared(hf.LlamaForQuestionAnswering(config))
        model(**prepare_batch(handler, {"input_ids": tokens(24)}))
    elif case == "binary loss":
        model, handler = prepared(hf.ElectraForPreTraining(hf.ElectraConfig(**SMALL, embedding_size=16)))
        model(**prepare_batch(handler, {"input_ids": tokens(24), "labels": tokens(24) % 2}))
    elif case == "own loss":
        prepared(OwnLoss(config))[0](**local, labels=labels, shift_labels=labels, num_items_in_batch=1)
    elif case.startswith("attention "):
        kind = {"written out": WritesOut, "elsewhere": Elsewhere, "by SDPA": CallsSDPA}[case[10:]]
        model = make("llama")
        model.model.layers[1].self_attn = kind(model.config, 1).double()
        model, handler = prepared(model)
        with mock.patch.object(convert_frame, "FRAME_COMPILE_COUNTER", {}):  # as if nothing had been compiled
            for _ in range(2):  # the second time, too
                batch = prepare_batch(handler, {"input_ids": tokens(24)})
                with contextlib.suppress(RuntimeError):
                    model(**batch)
                    raise AssertionError("was not refused")
            model(**batch)
    elif case.startswith("forward "):
        model = make("llama")
        model.set_attn_implementation("eager" if case.endswith("eager") else "sdpa")
        attention = model.model.layers[1].self_attn
        with contextlib.ExitStack() as patched:
            if case == "forward of a class":
                patched.enter_context(mock.patch.object(type(attention), "forward", WritesOut.forward))
            elif case in ("forward that shifts", "forward in groups"):
                attention.forward = MethodType(shifted if case == "forward that shifts" else in_groups, attention)
            elif case == "forward of eager":
                patched.enter_context(
                    mock.patch.object(hf.models.llama.modeling_llama, "eager_attention_forward", biased)
                )
            model, handler = prepared(model)
            if case == "forward put in later":
                model.model.layers[1].self_attn.forward = MethodType(WritesOut.forward, attention)
            model(**prepare_batch(handler, {"input_ids": tokens(24)}))
    elif case == "text tower":
        prepared(hf.CLIPTextModel(hf.CLIPTextConfig(**{x: SMALL[x] for x in ("vocab_size", "hidden_size")})))
    elif case == "registered attention":
        hf.AttentionInterface.register("biased", biased)
        prepared(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, attn_implementation="biased")))
    elif case == "head over positions":
        model = make("llama")
        model.lm_head = torch.nn.Sequential(torch.nn.GRU(32, 61))
        prepared(model)
    elif case == "two losses":
        model, handler = prepared(TwoLosses(config))
        model(**prepare_batch(handler, {"input_ids": tokens(24), "labels": tokens(24)}))
    elif case == "forward":
        model, handler = prepared(hf.LlamaForQuestionAnswering(config))
        ends = torch.tensor([3, 4])
        model.forward(input_ids=tokens(24), start_positions=ends, end_positions=ends)
    elif case == "copied forward":
        model, handler = prepared(make("llama"))
        copy.deepcopy(model).forward(**prepare_batch(handler, {"input_ids": tokens(24)}))
    elif case == "two settings":
        model, handler = prepared(hf.GemmaForCausalLM(hf.GemmaConfig(**SMALL, use_bidirectional_attention=True)))
        model(**prepare_batch(handler, {"input_ids": tokens(24)}))
    elif case == "own positions of layers":
        model = model_of("llama4_text", **LLAMA4, no_rope_layers=[0, 1])
        model.model.layers[0].self_attn = Counts()
        prepared(model)
    elif case == "labels of Llama 4":
        prepared(model_of("llama4_text", **LLAMA4))[0](**local, labels=labels)
    elif case == "chunks and layout":
        style = {"ulysses_degree": 1, "layout": "per_document"}
        model, handler = prepared(model_of("llama4_text", **LLAMA4), **style)
        model(**prepare_batch(handler, {**batch_of(), "documents": [0, 9, 24]}))
    elif case == "pooler":
        prepared(hf.BertModel(hf.BertConfig(**SMALL)))
    elif case == "padding of an encoder":
        encoder = hf.BertModel(hf.BertConfig(**SMALL), add_pooling_layer=False).eval()
        model, handler = prepared(encoder, ulysses_degree=1, layout="per_document")
        model(
            **prepare_batch(handler, {"input_ids": tokens(24), "attention_mask": (torch.arange(24) > 3).expand(2, -1)})
        )
    elif case == "two sequences":
        sizes = {**SMALL, "is_decoder": True, "add_cross_attention": True}
        model, _ = prepared(hf.BertModel(hf.BertConfig(**sizes), add_pooling_layer=False))
        model(**local, encoder_hidden_states=torch.zeros(2, 12, 32))
    elif case == "encoder-decoder":
        prepared(hf.T5Model(hf.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=8, num_layers=1)))
    elif case == "shared biases":
        model, _ = prepared(tiny_causal("t5", SEQ2SEQ).train())
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model(input_ids=tokens(24), labels=tokens(24))
    elif case == "packed sequences":
        model, _ = prepared(tiny_causal("t5", SEQ2SEQ))
        model(input_ids=tokens(24), labels=tokens(24), document_ids=torch.arange(24).expand(2, -1) // 8)
    elif case == "last logits":
        model, _ = prepared(tiny_causal("t5gemma", SEQ2SEQ))
        model(input_ids=tokens(24), labels=tokens(24), logits_to_keep=5)
    elif case == "own positions":
        model = tiny_causal("bart")
        model.get_decoder().embed_positions = torch.nn.Embedding(24, 32)
        prepared(model)
    elif case == "dropped layers":
        model = tiny_causal("bart", SEQ2SEQ).train()
        model.get_decoder().layerdrop = 0.5
        model, _ = prepared(model)
        model(input_ids=tokens(24), labels=tokens(24))
    elif case == "no interface":
        prepared(tiny_causal("xlm"))
    elif case == "written out":
        model, _ = prepared(tiny_causal("gpt_neox_japanese"))
        model.get_decoder().layers[0].attention._attn = biased
        model(**local)
    elif case == "quantised":
        model = tiny_causal("ibert", MASKED)
        for module in model.modules():
            module.quant_mode = True
        model, handler = prepared(model)
        model(**prepare_batch(handler, {"input_ids": tokens(24)}))
    elif case == "router loss":
        model = tiny_causal("mixtral")
        del model.num_experts_per_tok
        prepared(model)[0](**local, output_router_logits=True)
    elif case == "two windows":
        model, _ = prepared(make("gemma3"))
        model.model.layers[0].self_attn.sliding_window = 7
        model(**local)
    else:
        model, handler = prepared(make("llama"))
        if case == "labels":
            model(**local, labels=labels)
        elif case == "loss function":
            model.loss_function = lambda logits, labels, **_: (logits[:, :-1] - labels[:, 1:, None]).mean()
            model(**prepare_batch(handler, {"input_ids": tokens(24), "labels": tokens(24)}))
        elif case == "other pipeline":
            whole = {"input_ids": tokens(24), "labels": tokens(24)}
            model(**handler.get_batch_on_this_cp_rank(whole, shift_labels=True))
        elif case == "count":
            model(**local, labels=labels, shift_labels=labels)
        elif case == "kept":
            model(**local, logits_to_keep=torch.tensor([1]))
        elif case == "media":
            model(**local, pixel_values=torch.zeros(1))
        elif case == "implementation":
            model.set_attn_implementation("sdpa")
            model(**local)
        elif case == "not dispatched":
            model(input_ids=tokens(24))
        elif case == "read mask":
            layer = model.model.layers[0]
            layer.register_forward_pre_hook(lambda m, a, k: k["attention_mask"][:, :, :, :4], with_kwargs=True)
            model(**prepare_batch(handler, {"input_ids": tokens(24)}))
        elif case == "no mask":
            model = make("llama")
            model.set_attn_implementation("eager")
            model, handler = prepared(model)
            for layer in model.model.layers:
                layer.register_forward_pre_hook(lambda m, a, k: (a, k | {"attention_mask": None}), with_kwargs=True)
            model(**prepare_batch(handler, {"input_ids": tokens(24)}))


REFUSED = [
    ("pooled batch", "ValueError", "LlamaModel got a batch of prepare_batch, but the head.*Pass the whole batch"),
    ("token classification", "NotImplementedError", r"\(ForTokenClassification\) is a mean over this rank's share"),
    ("question answering", "ValueError", "but the head of its model reads the whole sequence.*Pass the whole batch"),
    ("binary loss", "NotImplementedError", "ElectraForPreTraining got labels, but its forward computes the loss"),
    ("own loss", "NotImplementedError", "OwnLoss got labels, but its forward computes the loss.*handler.mean_loss"),
    (
        "attention written out",
        "NotImplementedError",
        r"'layers.1.self_attn' \(WritesOut\) of LlamaModel computes",
    ),
    ("attention elsewhere", "RuntimeError", r"'layers.1.self_attn' \(Elsewhere\) has made no attention call"),
    ("attention by SDPA", "RuntimeError", r"\(CallsSDPA\) calls F.scaled_dot.*ALL_ATTENTION_FUNCTIONS"),
    (
        "forward of a class",
        "NotImplementedError",
        r"module 'layers.0.self_attn' \(LlamaAttention\) .* computes attention",
    ),
    ("forward put in later", "NotImplementedError", r"'layers.1.self_attn' \(LlamaAttention\) of LlamaModel computes"),
    ("forward that shifts", "NotImplementedError", r"LlamaModel has a forward \(shifted\) that reads other positions"),
    (
        "forward in groups",
        "NotImplementedError",
        "LlamaAttention attends over 6 tokens, and this rank holds 12: groups",
    ),
    ("text tower", "NotImplementedError", "CLIPTextModel has a pooler"),
    ("forward of eager", "NotImplementedError", r"eager_attention_forward in the file of .*models.biased, which"),
    (
        "registered attention",
        "NotImplementedError",
        "attn_implementation='biased' of LlamaModel names a function",
    ),
    ("head over positions", "NotImplementedError", "the output layer of LlamaForCausalLM has GRU, which carries"),
    ("two losses", "NotImplementedError", "TwoLosses got labels, but its forward, which is not one of transformers"),
    ("forward", "RuntimeError", r"LlamaForQuestionAnswering.forward\(...\) was called, which leaves out the hooks"),
    ("copied forward", "RuntimeError", r"LlamaForCausalLM.forward\(...\) was called, which leaves out the hooks"),
    ("loss function", "NotImplementedError", r"its loss_function \(wrong_use.*\) does not read shift_labels"),
    ("two settings", "NotImplementedError", "GemmaAttention has is_causal=False, but its model asks for a causal mask"),
    ("own positions of layers", "NotImplementedError", "Llama4TextModel has Counts, which counts positions by itself"),
    ("labels of Llama 4", "ValueError", "Llama4ForCausalLM got labels without shift_labels"),
    ("chunks and layout", "NotImplementedError", r"chunked attention \(size 5\).*layout='per_document'"),
    ("pooler", "NotImplementedError", "BertModel has a pooler, which pools over the sequence.*add_pooling_layer"),
    (
        "padding of an encoder",
        "NotImplementedError",
        "BertSelfAttention of an encoder got padding before tokens",
    ),
    ("two sequences", "NotImplementedError", "BertModel got encoder_hidden_states. They are another sequence"),
    ("encoder-decoder", "NotImplementedError", "T5Model is an encoder-decoder without a head"),
    (
        "shared biases",
        "NotImplementedError",
        "T5Attention makes biases of positions inside a reentrant activation check",
    ),
    ("packed sequences", "NotImplementedError", "T5ForConditionalGeneration got packed documents. Its source and"),
    ("own positions", "NotImplementedError", "BartDecoder takes no position_ids"),
    ("dropped layers", "NotImplementedError", r"BartDecoder skips layers at random in training \(layerdrop=0.5\)"),
    ("no interface", "NotImplementedError", "XLMModel computes attention by itself.*AttentionInterface or SDPA"),
    ("last logits", "NotImplementedError", "T5GemmaForConditionalGeneration got logits_to_keep=5"),
    ("quantised", "NotImplementedError", r"IBertSelfAttention writes attention out, with a step \("),
    ("written out", "NotImplementedError", r"JapaneseAttention writes attention out, with a step \(a bias\)"),
    ("router loss", "NotImplementedError", "MixtralForCausalLM has output_router_logits=True.*not the usual"),
    ("two windows", "NotImplementedError", "sliding_window=7, but its mask has the window 5"),
    ("labels", "ValueError", "labels without shift_labels.*prepare_batch"),
    ("other pipeline", "ValueError", "shift_labels without labels.*prepare_batch instead of get_batch_on_this"),
    ("count", "ValueError", "labels without num_items_in_batch.*prepare_batch"),
    ("kept", "NotImplementedError", "logits_to_keep=a tensor"),
    ("media", "NotImplementedError", "got pixel_values.*inputs_embeds"),
    (
        "implementation",
        "RuntimeError",
        "attn_implementation='sdpa', which was set after prepare_model had set 'hyper_cp'",
    ),
    ("not dispatched", "ValueError", r"same \(2, 24\) tokens on all 2 ranks.*prepare_batch"),
    ("read mask", "NotImplementedError", r"LlamaConfig reads its attention mask itself \(getitem\)"),
    ("no mask", "NotImplementedError", "LlamaAttention is causal, but got no attention mask.*eager attention"),
]
"""Case, type of the error, and words of it."""


@on_ranks
def refused() -> list[tuple[str, str]]:
    """The type and text of the error of each case."""
    found = []
    for case, *_ in REFUSED:
        try:
            wrong_use(case)
            found.append(("no error", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_what_would_be_wrong_for_a_share_is_refused(ranks: Any) -> None:
    for found in ranks(2, refused):
        for (case, error, words), (kind, text) in zip(REFUSED, found, strict=True):
            assert kind == error and re.search(words, text), (case, kind, text)


@on_ranks
def interrupted() -> float:
    """The error of a decoder that is called by itself after the model around it was interrupted (Ctrl-C)."""
    model, handler = prepared(make("llama"))
    local = {"input_ids": handler.dispatch(tokens(24), 1), "position_ids": handler.position_ids(24)[None]}
    want = model.model(**local).last_hidden_state

    handle = model.model.register_forward_pre_hook(interrupt, prepend=True)
    with contextlib.suppress(KeyboardInterrupt):
        model(**prepare_batch(handler, {"input_ids": tokens(24), "documents": [0, 9, 24]}))
    handle.remove()
    return absolute_error(model.model(**local).last_hidden_state, want)


def test_an_interrupted_model_leaves_nothing_to_its_decoder(ranks: Any) -> None:
    """Before, the decoder took the documents of the interrupted batch."""
    assert max(ranks(2, interrupted)) == 0


@on_ranks
def on_one_rank(kind: str, head: str) -> dict[str, float]:
    """Errors of logits, and of a model's own loss of next tokens, of batches of prepare_batch on a mesh of one rank."""
    one, ids = tiny_causal(kind, head).eval(), tokens(16)
    model, handler = prepared(one, ulysses_degree=1, kv_exchange="ring")
    found = {}
    for name, first, last in ("no mask", 0, 16), ("padding behind", 0, 9), ("padding before", 7, 16):
        seen = torch.ones_like(ids)
        seen[1, :first] = seen[1, last:] = 0
        batch = {"input_ids": ids, **({} if name == "no mask" else {"attention_mask": seen})}
        if head != MASKED:
            labels = ids.masked_fill(seen == 0, -100)
            labels[1, first] = -100  # padding does not predict the first token
            batch["labels"] = labels
        with InDouble(), torch.no_grad():
            want, got = one(**batch), model(**prepare_batch(handler, batch))
        found[name] = absolute_error(got.logits[seen > 0], want.logits[seen > 0])
        if head != MASKED:
            found[f"{name}, loss"] = absolute_error(got.loss, want.loss)
    return found


@pytest.mark.parametrize(
    "kind, head",
    [("bert", MASKED), ("roberta", MASKED), ("modernbert", MASKED), ("roberta", CAUSAL)],
)
def test_one_rank_gets_the_batch_of_one_device(ranks: Any, kind: str, head: str) -> None:
    """Encoders saw padding behind tokens, and RoBERTa counted positions from 0."""
    (found,) = ranks(1, on_one_rank, kind, head)
    assert max(found.values()) <= 1e-12, found


@on_ranks
def labels_of_a_masked_model() -> None:
    model, handler = prepared(tiny_causal("modernbert", MASKED), ulysses_degree=1)
    model(**prepare_batch(handler, {"input_ids": tokens(16), "labels": tokens(16)}))


@pytest.mark.parametrize("world", [1, 2])
def test_losses_of_other_tokens_than_the_next_are_refused(ranks: Any, world: int) -> None:
    """On one rank the loss was divided by the number of shifted labels."""
    ranks.raises(world, NotImplementedError, "in which labels are not shifted", labels_of_a_masked_model)


# --------------------------------------------------------------------------- models that are not prepared


ROPE = {"rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
UNPREPARED: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("mistral", {"sliding_window": 16}, "has a window or chunks of 16 positions.* the 12 positions .* of 24"),
    "untold": ("phimoe", {**MOE, "sliding_window": 16}, "PhimoeAttention has a window or chunks of 16 positions"),
    "chunks": ("llama4_text", {**LLAMA4, "attention_chunk_size": 16}, "has a window or chunks of 16 positions"),
    "dynamic": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {**ROPE, "rope_type": "dynamic"}},
        "rope_type='dynamic', whose frequencies depend on the largest position .* 16 or more. It is 23, and .* is 11",
    ),
    "longrope": (
        "llama",
        {"rope_parameters": {**ROPE, "rope_type": "longrope", "original_max_position_embeddings": 16}},
        "rope_type='longrope'",
    ),
}


@on_ranks
def unprepared_and_right(layout: str) -> dict[str, float]:
    """Errors of models that are only routed, where a share tells them what they need."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), {}
    style = ContextParallel(qkv_indices=None, ulysses_degree=1, layout=layout)
    rope = {**ROPE, "rope_type": "longrope", "original_max_position_embeddings": 8}
    for name, kind, changes in ("longrope", "llama", {"rope_parameters": rope}), ("window", *UNPREPARED["window"][:2]):
        whole = {"input_ids": tokens(24), "attention_mask": torch.ones(2, 24, dtype=torch.int64)}
        whole["attention_mask"][:, 14 if name == "window" else 24 :] = 0  # padding is no long document
        oracle = model_of(kind, **changes)
        model = copy.deepcopy(oracle)
        parallelize_module(model, mesh, {"model.layers.*.self_attn": style})
        handler = ContextParallelHandler(mesh, style)
        batch = handler.get_batch_on_this_cp_rank(whole)
        with InDouble(), handler.documents(batch):
            found[name] = handler.combine(model(**batch, use_cache=False).logits, 1)
            found[name] -= oracle(**whole, use_cache=False).logits
    return {name: x[:, :14].abs().max().item() for name, x in found.items()}


@pytest.mark.parametrize("layout", ["head_tail", "contiguous"])
def test_models_that_are_not_prepared_and_right_are_not_refused(ranks: Any, layout: str) -> None:
    for found in ranks(2, unprepared_and_right, layout):
        assert max(found.values()) <= 1e-10, found


@on_ranks
def masks_of_one_rank() -> str:
    """The error of a model that makes a mask on rank 0 only, whose share has the beginning of a document."""
    mesh, style = init_device_mesh("cpu", (2,)), ContextParallel(qkv_indices=None, ulysses_degree=1)
    model = model_of("mistral", sliding_window=16)
    parallelize_module(model, mesh, {"model.layers.*.self_attn": style})
    at = torch.cat([torch.arange(4), torch.arange(20)])[None]
    ids, at = (ContextParallelHandler(mesh, style).dispatch(x) for x in (tokens(24)[:1], at))
    return error_of(lambda: model(input_ids=ids, position_ids=at, use_cache=False))


def test_masks_of_some_ranks_are_found_by_all(ranks: Any) -> None:
    """The other ranks raised an error of their own, and this one waited."""
    for found in ranks(2, masks_of_one_rank, timeout=30):
        assert found.startswith("ValueError: ") and "the ranks of the cp mesh" in found, found


def own_sdpa(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> tuple[Tensor, None]:
    """An attention function of a user's, as models of transformers call it."""
    options: dict[str, Any] = {"is_causal": mask is None, "scale": given.get("scaling"), "enable_gqa": True}
    return F.scaled_dot_product_attention(q, k, v, mask, **options).transpose(1, 2).contiguous(), None


@on_ranks
def unprepared(name: str, way: str) -> tuple[str, float]:
    """The error of a model of transformers that is only routed, and its error where documents are short."""
    kind, changes, _ = UNPREPARED[name]
    model, mesh = model_of(kind, **changes), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    if way == "own function":
        hf.AttentionInterface.register("own_sdpa", own_sdpa)
        hf.AttentionMaskInterface.register("own_sdpa", hf.masking_utils.sdpa_mask)
        model.set_attn_implementation("own_sdpa")
    ids, positions, mask = tokens(24)[:1], torch.arange(24)[None] % 12, torch.ones(1, 24, dtype=torch.int64)
    with InDouble():
        want = torch.cat([model(input_ids=x, use_cache=False).logits for x in ids.split(12, 1)], 1)
    if way != "block":
        style = ContextParallel(qkv_indices=None, ulysses_degree=1, kv_exchange="ring")
        parallelize_module(model, mesh, {"model.layers.*.self_attn": style})
        handler = ContextParallelHandler(mesh, style)
        share, at, shown = (handler.dispatch(x) for x in (ids, positions, mask))
        around: Any = contextlib.nullcontext()
    else:
        buffers = share, at, shown = ids, positions, mask
        around = context_parallel(mesh, buffers=[*buffers], buffer_seq_dims=[1, 1, 1], layout="contiguous")
    with around as block, InDouble():
        made = handler if block is None else block

        def run() -> Tensor:
            logits: Tensor = model(input_ids=share, position_ids=at, attention_mask=shown, use_cache=False).logits
            return logits

        error = error_of(run)
        with made.documents([0, 12, 24]):
            found = made.combine(run(), 1)
    return error, absolute_error(found, want)


@pytest.mark.parametrize("way", ["plan", "block", "own function"])
@pytest.mark.parametrize("name", UNPREPARED)
def test_lengths_of_shares_are_refused_in_models_that_are_not_prepared(ranks: Any, name: str, way: str) -> None:
    for error, off in ranks(2, unprepared, name, way):
        assert error.startswith("ValueError") and re.search(UNPREPARED[name][2], error), error
        assert off <= 1e-10


@on_ranks
def windows_of_rows_of_a_share() -> str:
    """The error of an encoder with windows that is only routed, and makes its masks of the padding mask of all
    positions."""
    mesh, ids = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), tokens(24)
    model, mask, at = tiny_causal("modernbert", MASKED), torch.ones_like(ids), torch.arange(24).expand(2, -1).clone()
    with context_parallel(mesh, buffers=[ids, at], buffer_seq_dims=[1, 1]):
        return error_of(lambda: model(input_ids=ids, attention_mask=mask, position_ids=at))


def test_masks_for_windows_of_the_rows_of_a_share_are_refused(ranks: Any) -> None:
    """Their windows began at the first row of the share: gradients were off by up to 120 %."""
    for error in ranks(2, windows_of_rows_of_a_share):
        assert error.startswith("ValueError: a model in context_parallel: ModernBertAttention has a window"), error


@on_ranks
def padding_mask_of_all_positions(name: str, four: bool) -> tuple[str, float]:
    """The error of a causal model that is only routed, given the padding mask of all positions, and that of its logits.
    ``four``: as the mask of all pairs."""
    mesh, ids = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), tokens(24)
    model, at = tiny_causal(name), torch.arange(24).expand(2, -1).clone()
    mask = torch.arange(24) < torch.tensor([[24], [19]])
    if four:
        mask = mask[:, None, None] & torch.ones(24, 24).tril().bool()
    with torch.no_grad(), InDouble():
        want = model(input_ids=ids, attention_mask=mask, position_ids=at, use_cache=False).logits
        with context_parallel(mesh, buffers=[ids, at], buffer_seq_dims=[1, 1]) as handler:
            found: list[Tensor] = []
            given: Any = {"input_ids": ids, "attention_mask": mask, "position_ids": at, "use_cache": False}
            error = error_of(lambda: found.append(model(**given).logits))
            off = absolute_error(handler.combine(found[0], 1), want) if found else 0.0
    return error, off


def test_the_padding_mask_of_all_positions_beside_a_share_is_refused(ranks: Any) -> None:
    """The model's causal mask began at position 0 on every rank: gradients were a third off."""
    for name in ("llama", "gpt2"):
        for error, _ in ranks(2, padding_mask_of_all_positions, name, False):
            assert "belongs to a causal model that was given the padding mask of all 24 positions" in error, error
    for error, off in ranks(2, padding_mask_of_all_positions, "llama", True):
        assert not error and off <= 1e-10

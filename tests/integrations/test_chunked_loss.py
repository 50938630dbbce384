"""Hugging Face models whose loss never makes whole logits: exact beside one device, counted, and refused otherwise."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.data import head
from hyper_cp.memory import MemoryCounter
from tests.harness.hf_models import (
    SMALL,
    VOCABULARY,
    InDouble,
    gradients,
    interrupt,
    make,
    model_of,
    prepare_batch,
    prepare_model,
    tokens,
)
from tests.harness.oracle import absolute_error, relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 4.0},
    "mixtral": {**MOE, "output_router_logits": True, "router_aux_loss_coef": 0.5},
}
"""Models that cap logits, that divide them, and that add to the loss."""


def prepared(model: Any, ranks: int = 2, **options: Any) -> tuple[Any, ContextParallelHandler]:
    mesh, style = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), ContextParallel(layout="head_tail")
    made = prepare_model(copy.deepcopy(model), mesh, style=style, chunked_loss=True, **options)
    return made, ContextParallelHandler(mesh, style)


def batch_of(length: int = 22) -> dict[str, Any]:
    ids = tokens(length)
    labels = ids.clone()
    labels[0, :7] = -100
    return {"input_ids": ids, "labels": labels}


@on_ranks
def trained() -> dict[str, float]:
    """The worst error of loss and gradients of each model, with chunks of three tokens; and under FSDP2."""
    found, head.CHUNK_BYTES = {}, 3 * 4 * VOCABULARY
    try:
        for kind, changes in KINDS.items():
            model, batch = model_of(kind, **changes), batch_of()
            made, handler = prepared(model)
            with InDouble():
                want = model(**batch, use_cache=False).loss
                want.backward()
                output = made(**prepare_batch(handler, batch))
                output.loss.backward()
            assert output.logits is None and "logits" not in output and "lm_head" not in vars(made)
            assert made(input_ids=handler.dispatch(torch.ones(1, 8).long() + torch.arange(8))).logits is not None
            total, *grads = sum_over_ranks(output.loss, *gradients(made))
            pairs = zip(grads, gradients(model), strict=True)
            relative = [absolute_error(a, b) / max(b.abs().max().item(), 1e-3) for a, b in pairs]
            found[kind] = max(absolute_error(total, want), *relative)
        model, batch = model_of("llama"), batch_of()
        made, handler = prepared(model)
        calls: list[int] = []
        made.lm_head.register_forward_hook(lambda *_: calls.append(1))
        for part in (*made.model.layers, made.lm_head, made):
            fully_shard(part, mesh=handler.mesh)
        with InDouble():
            model(**batch).loss.backward()
            (2 * made(**prepare_batch(handler, batch)).loss).backward()  # FSDP2 averages over the two ranks
        expected = dict(model.named_parameters())
        found["fsdp"] = max(
            relative_error(p.grad.full_tensor(), expected[name].grad) for name, p in made.named_parameters()
        )
        assert len(calls) == 1
    finally:
        head.CHUNK_BYTES = 2**28
    return found


def test_losses_and_gradients_are_those_of_one_device(ranks: Any) -> None:
    for found in ranks(2, trained):
        assert len(found) == 4 and max(found.values()) <= 1e-10, found


# --------------------------------------------------------------------------- on a mesh of one rank


class Shifted(hf.LlamaForCausalLM):
    """Adds something to its logits."""

    def forward(self, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = self.change(self.lm_head(hidden))
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY, **kwargs)
        return hf.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@on_ranks
def alone() -> tuple[list[str], dict[str, int]]:
    batch, errors = batch_of(), []
    changes: list[Any] = [
        lambda self, x: x + 1,
        lambda self, x: x * torch.ones(VOCABULARY),
        lambda self, x: x[:, 1:],
        lambda self, x: x.softmax(-1),
        lambda self, x: torch.tanh(torch.tanh(x)),
        lambda self, x: x * -1.0,
        lambda self, x: torch.ones(2, 22, VOCABULARY),
    ]
    for change in changes:
        model = Shifted(hf.LlamaConfig(**SMALL))
        Shifted.change = change
        made, _ = prepared(model, 1)
        errors.append(error_of(lambda made=made: made(**batch)))
        assert "lm_head" not in vars(made)  # also after an error
    made, handler = prepared(make("llama").float(), 1)
    errors.append(error_of(lambda: made(**batch, return_dict=False)))
    errors.append(error_of(lambda: made(**batch, ignore_index=3)))
    own = make("llama")
    own.loss_function = lambda logits, labels, shift_labels, **_: logits.mean()
    errors.append(error_of(lambda: prepared(own, 1)))
    adapted = make("llama")
    adapted.lm_head = torch.nn.Sequential(adapted.lm_head)
    errors.append(error_of(lambda: prepared(adapted, 1)))
    errors.append(error_of(lambda: prepared(make("llama").model, 1)))
    wide, counted = make("llama", vocab_size=4096).float(), {}
    ids = tokens(64)
    for name in ("plain", "chunked"):
        model = copy.deepcopy(wide)
        if name == "chunked":
            prepare_model(model, handler.mesh, style=ContextParallel(), chunked_loss=True)
        head.CHUNK_BYTES = 8 * 4 * 4096
        with MemoryCounter() as memory:
            loss = model(input_ids=ids, labels=ids).loss
            saved = memory.alive["cpu"]
            loss.backward()
        head.CHUNK_BYTES = 2**28
        counted |= {f"{name} saved": saved, f"{name} peak": memory.peak["cpu"]}
        counted[f"{name} loss"] = round(loss.item() * 2**16)
    return errors, counted


def test_alone_it_is_counted_and_what_a_model_does_to_logits_is_refused(ranks: Any) -> None:
    ((errors, counted),) = ranks(1, alone)
    words = [
        "Shifted adds something to them between its head and its loss",
        "multiplies them by tensor",
        "takes a part of them",
        "reads their attribute 'softmax'",
        "caps them twice",
        "multiplies them by -1.0",
        "makes whole logits without calling its lm_head",
        "got return_dict=False",
        "got ignore_index=3, but prepare_batch marks",
        "LlamaForCausalLM has a loss_function of its own",
        "chunked_loss=True cannot be used with LlamaForCausalLM: head is a Sequential",
        "LlamaModel has no output layer of its own",
    ]
    for message, pattern in zip(errors, words, strict=True):
        assert re.search(pattern, message), message
    logits = 2 * 64 * 4096 * 4
    assert abs(counted["plain loss"] - counted["chunked loss"]) <= 1
    assert counted["plain saved"] - counted["chunked saved"] >= 0.95 * logits
    assert counted["plain peak"] - counted["chunked peak"] >= 1.5 * logits


@on_ranks
def behind_an_interrupted_forward() -> bool:
    """True if an evaluation has logits behind a forward with labels that Ctrl-C has ended: torch runs no hooks then."""
    made, handler = prepared(model_of("llama"))
    local = prepare_batch(handler, batch_of())

    hook = made.model.layers[0].register_forward_pre_hook(interrupt)
    try:
        made(**local)
    except KeyboardInterrupt:
        hook.remove()
    shown = {name: x for name, x in local.items() if "labels" not in name}
    return isinstance(made(**shown).logits, Tensor)


def test_an_evaluation_behind_an_interrupted_forward_has_logits(ranks: Any) -> None:
    assert ranks(2, behind_an_interrupted_forward) == [True, True]

"""Models whose heads pool over the sequence: sequence classification, rewards, answers to questions and others.

Such a model takes the whole batch. Its decoder or encoder splits it, runs on this rank's share, and returns the hidden
states of the whole sequence, which the head pools as on one device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch.modules import hook_owners
from ...handler import ContextParallelHandler
from ...module.mesh_binding import Binding
from ...style import style_of
from . import forward
from .batch import prepare_batch
from .seams import source_of

_on_the_host = torch.compiler.disable(
    reason="A prepared model whose head reads whole sequences splits its batch on the host. Compile its layers with "
    "fullgraph=True, or the model without it"
)


def poolers_of(decoder: nn.Module) -> list[nn.Module]:
    """The modules of a decoder that pool over the sequence, as BERT's pooler does: they are given its hidden states."""
    return [module for module in decoder.modules() if "Pooler" in type(module).__name__]


def pools_by_itself(decoder: nn.Module, encoders: Set[nn.Module]) -> bool:
    """True for a decoder that pools in its forward, and hands on what it has pooled (ALBERT, text models of CLIP).
    ``encoders``: modules inside of it whose sequence is another one."""
    in_code = pool_in_code({*decoder.modules()} - encoders)
    return in_code or (getattr(decoder, "pooler", None) is not None and not poolers_of(decoder))


def pool_in_code(modules: Set[nn.Module]) -> bool:
    """True if the forward of one of these modules makes one row of the sequence."""
    return any(_POOLS.search(source_of(kind.forward)) for kind in {type(module) for module in modules})


_POOLS = re.compile(
    r"pooled_output = (last_hidden_state|sequence_output|hidden_states)\["
    r"|\b(pooled|pooler_output|pooled_output|text_embeddings) = .*(\[:, (0|-1)\]|\.(mean|sum)\((dim=)?1\b)"
)


class PooledHook:
    """The hooks of a decoder whose hidden states are pooled, and of the model around it.

    Args:
        over_positions: the head takes a softmax over all positions, those of padding, too.
    """

    def __init__(self, binding: Binding, over_positions: bool) -> None:
        self.binding, self.over_positions = binding, over_positions
        self.batch: Any = None
        """The handler, the length and the documents of the forward that runs."""

    def attach(self, model: nn.Module, decoder: nn.Module) -> None:
        """Register the hooks; those of the decoder before all others."""
        decoder.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        for pooler in poolers_of(decoder):
            pooler.register_forward_pre_hook(_gather)
        decoder.register_forward_hook(self.after)
        model.register_forward_pre_hook(self.refuse_share, with_kwargs=True)
        model.register_forward_hook(self.share_losses)

    @_on_the_host
    def refuse_share(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a batch that is split already."""
        if kwargs.get("context_parallel") is not None:
            raise ValueError(
                f"{self.binding.name} got a batch of prepare_batch, but the head of its model reads the whole "
                "sequence. Pass the whole batch to the model: it splits it by itself"
            )

    @_on_the_host
    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This rank's share of the arguments, all of which are those of the whole batch."""
        self.batch, active = None, self.binding.active
        self.refuse_share(decoder, args, kwargs)
        if not active.parallel:
            return None
        kwargs = {**dict(zip(("input_ids",), args, strict=False)), **kwargs}
        whole = {name: kwargs.pop(name) for name, x in [*kwargs.items()] if isinstance(x, Tensor)}
        handler = ContextParallelHandler(active.mesh, style_of(self.binding))
        mask = whole.get("attention_mask")
        if mask is not None and mask.ndim == 2 and (self.over_positions or _may_pool_padding(decoder, whole)):
            whole["shift_labels"] = torch.zeros_like(mask, dtype=torch.int64)  # masks may be bool
        local = prepare_batch(handler, whole)
        local.pop("shift_labels", None)
        length = whole["input_ids" if "input_ids" in whole else "inputs_embeds"].shape[1]
        self.batch = handler, length, local["context_parallel"].documents
        return args[1:], {**kwargs, **local}

    def whole(self, hidden: Tensor) -> Tensor:
        """The states ``[B, S, D]`` of the whole sequence, on every rank."""
        if self.batch is None:
            return hidden
        handler, length, documents = self.batch
        return handler.combine(hidden, 1, length=length, documents=documents, gradients="sum")

    @_on_the_host
    def after(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        """The output of the decoder with the states of the whole sequence, also with those of each layer."""
        share = output[0] if isinstance(output, tuple) else output.last_hidden_state
        last = self.whole(share)

        def joined(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(joined, x))
            of_tokens = isinstance(x, Tensor) and x.ndim == 3 and x.shape[:2] == share.shape[:2]
            return last if x is share else self.whole(x) if of_tokens else x

        if isinstance(output, tuple):
            return (last, *(joined(x) if isinstance(x, tuple) else x for x in output[1:]))
        output.last_hidden_state = last
        if output.get("hidden_states") is not None:
            output.hidden_states = joined(output.hidden_states)
        return output

    @_on_the_host
    def share_losses(self, model: nn.Module, args: Any, output: Any) -> Any:
        """The output of the model with this rank's share of its losses, which every rank has computed whole."""
        batch, self.batch = self.batch, None
        if batch is not None and not isinstance(output, Mapping):
            raise NotImplementedError(
                f"{type(model).__name__} returned a {type(output).__name__}, in which its loss cannot be found. Every "
                "rank has computed that of the whole sequence, and gets its part. Return an output of transformers"
            )
        losses = [] if batch is None else [name for name, x in output.items() if _is_loss(name, x)]
        for name in losses:
            output[name] = output[name] / batch[0].cp.size
        return output


def _may_pool_padding(decoder: Any, whole: dict[str, Tensor]) -> bool:
    """True if the head of a decoder may take padding for the last token, which it finds by the id of padding, or if its
    pooler takes the first token and that is padding."""
    if poolers_of(decoder) and bool((whole["attention_mask"][:, 0] == 0).any()):
        return True
    ids, padding = whole.get("input_ids"), decoder.config.pad_token_id
    return ids is None or padding is None or bool((ids[whole["attention_mask"] == 0] != padding).any())


def _is_loss(name: str, value: Any) -> bool:
    """True for a loss: some models have several (``mc_loss`` of GPT 2 with two heads)."""
    return "loss" in name and isinstance(value, Tensor) and not value.ndim


@_on_the_host
def _gather(pooler: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The hook of a pooler, which gets the states of the whole sequence. It finds the decoder that runs: copies of a
    pooler, in a copy of the model or in PEFT's ``modules_to_save``, have this hook, too."""
    owners = hook_owners(decoder) if (decoder := forward.running_decoder()) is not None else []
    hooks = [owner for owner in owners if isinstance(owner, PooledHook)]
    return (hooks[0].whole(args[0]), *args[1:]) if hooks else args

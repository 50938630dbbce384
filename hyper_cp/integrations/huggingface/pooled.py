"""Models whose heads pool over the sequence: sequence classification, rewards and others.

Such a model takes the whole batch. Its decoder or encoder splits it, runs on this rank's share, and returns the hidden
states of the whole sequence, which the head pools as on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...handler import ContextParallelHandler
from ...module.mesh_binding import Binding
from ...style import style_of


def poolers_of(decoder: nn.Module) -> list[nn.Module]:
    """The modules of a decoder that pool over the sequence, as BERT's pooler does: they are given its hidden states."""
    return [module for module in decoder.modules() if "Pooler" in type(module).__name__]


def pools_by_itself(decoder: nn.Module) -> bool:
    """True for a decoder that pools in its forward, and hands on what it has pooled (ALBERT)."""
    return getattr(decoder, "pooler", None) is not None and not poolers_of(decoder)


class PooledHook:
    """The hooks of a decoder whose hidden states are pooled, and of the model around it.

    Args:
        split: makes this rank's share of a whole batch.
    """

    def __init__(self, binding: Binding, split: Callable[[ContextParallelHandler, Any], dict[str, Any]]) -> None:
        self.binding, self.split = binding, split
        self.batch: Any = None
        """The handler, the length and the documents of the forward that runs."""

    def attach(self, model: nn.Module, decoder: nn.Module) -> None:
        """Register the hooks; those of the decoder before all others."""
        decoder.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        for pooler in poolers_of(decoder):
            pooler.register_forward_pre_hook(lambda _, args: (self.whole(args[0]), *args[1:]))
        decoder.register_forward_hook(self.after)
        model.register_forward_hook(self.share)

    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This rank's share of the arguments, all of which are those of the whole batch."""
        self.batch, active = None, self.binding.active
        if kwargs.get("context_parallel") is not None:
            raise ValueError(
                f"{self.binding.name} got a batch of prepare_batch, but the head of its model pools over the whole "
                "sequence. Pass the whole batch to the model: it splits it by itself"
            )
        if not active.parallel:
            return None
        kwargs = {**dict(zip(("input_ids",), args, strict=False)), **kwargs}
        whole = {name: kwargs.pop(name) for name, x in [*kwargs.items()] if isinstance(x, Tensor)}
        handler = ContextParallelHandler(active.mesh, style_of(self.binding))
        local = self.split(handler, whole)
        length = whole["input_ids" if "input_ids" in whole else "inputs_embeds"].shape[1]
        self.batch = handler, length, local["context_parallel"].documents
        return args[1:], {**kwargs, **local}

    def whole(self, hidden: Tensor) -> Tensor:
        """The states ``[B, S, D]`` of the whole sequence, on every rank."""
        if self.batch is None:
            return hidden
        handler, length, documents = self.batch
        return handler.combine(hidden, 1, length=length, documents=documents, gradients="sum")

    def after(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        """The output of the decoder with the states of the whole sequence."""
        if isinstance(output, tuple):
            return (self.whole(output[0]), *output[1:])
        output.last_hidden_state = self.whole(output.last_hidden_state)
        return output

    def share(self, model: nn.Module, args: Any, output: Any) -> Any:
        """The output of the model with this rank's share of the loss, which every rank has computed whole."""
        batch, self.batch = self.batch, None
        if batch is not None and isinstance(getattr(output, "loss", None), Tensor):
            output.loss = output.loss / batch[0].cp.size
        return output

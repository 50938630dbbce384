"""The loss of a causal model without whole logits: its head is deferred until the loss is computed.

During a forward with labels the head returns :class:`DeferredLogits`, which records what the model does to logits
(multiply, cap, cast) instead of making them. The model's loss function then receives it, and computes log-probabilities
chunk by chunk. Anything else that a model does to its logits raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..._torch.compiling import is_compiling
from ...data.batch import shifted
from ...data.head import Logits, check_head, log_probs
from .outputs import wants_tuple
from .seams import loss_of_user

IGNORE = -100


def _refused(what: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *args: Any) -> Any:
        raise self.unknown(what)

    return operator


@dataclass(frozen=True)
class DeferredLogits:
    """Logits that are not made: hidden states, their head, and the steps from its output to logits.

    ``scale`` multiplies what the head returns; after a tanh, ``softcap`` multiplies that.
    """

    model: str
    head: nn.Module
    hidden: Tensor
    scale: float = 1.0
    softcap: float | None = None

    def log_probs(self, labels: Tensor) -> Tensor:
        """The log-probabilities of shifted labels, 0 for ignored ones."""
        cap = self.softcap
        how = Logits(IGNORE, cap, self.scale if cap is None else self.scale * cap)
        return log_probs(self.hidden, labels.to(self.hidden.device), self.head, how)

    def __mul__(self, factor: Any) -> DeferredLogits:
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor <= 0:
            raise self.unknown(f"multiplies them by {factor}")
        if self.softcap is not None:
            return replace(self, softcap=self.softcap * factor)
        return replace(self, scale=self.scale * factor)

    __rmul__ = __mul__
    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refused("adds something to them")
    __getitem__ = __setitem__ = _refused("takes a part of them")

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        if not isinstance(divisor, (int, float)) or isinstance(divisor, bool) or divisor <= 0:
            raise self.unknown(f"divides them by {divisor}")
        return self * (1 / divisor)

    def tanh(self) -> DeferredLogits:
        if self.softcap is not None:
            raise self.unknown("caps them twice")
        return replace(self, softcap=1.0)

    def _same(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        return self

    # The loop computes in fp32 or fp64 already, where the hidden states are.
    float = contiguous = to = _same

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tanh, F.tanh) and len(args) == 1:
            return args[0].tanh()
        found = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, DeferredLogits))
        raise found.unknown(f"calls {getattr(func, '__name__', func)}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.unknown(f"reads their attribute {name!r}")

    def unknown(self, what: str) -> NotImplementedError:
        """The error for a step that this class does not record."""
        return NotImplementedError(
            f"{self.model} {what} between its head and its loss, and chunked_loss=True makes no whole logits to which "
            "that could be applied. Use chunked_loss=False"
        )


class _DeferredHead:
    """Replaces a head during a forward: calls are deferred, and attributes are the head's."""

    def __init__(self, model: str, head: nn.Module) -> None:
        self.model, self.head = model, head

    def __call__(self, hidden: Tensor) -> DeferredLogits:
        return DeferredLogits(self.model, self.head, hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)


class ChunkedLoss:
    """Defers the head of one model, and computes its loss."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = type(model).__name__
        head = model.get_output_embeddings()
        names = [name for name, module in model.named_children() if module is head]
        if head is None or len(names) != 1:
            raise NotImplementedError(
                f"{self.name} has no output layer of its own that get_output_embeddings() returns, so its logits "
                "cannot be made in chunks. Use chunked_loss=False"
            )
        try:
            check_head(head)
        except TypeError as error:
            raise NotImplementedError(f"chunked_loss=True cannot be used with {self.name}: {error}") from error
        if loss_of_user(model) is not None:
            raise NotImplementedError(
                f"{self.name} has a loss_function of its own ({model.loss_function!r}), and chunked_loss=True computes "
                "cross entropy. Use chunked_loss=False"
            )
        self.attribute, self.whole, self.running = names[0], model.loss_function, False

    def attach(self, model: PreTrainedModel) -> None:
        """Compute the losses of the model from now on."""
        model.loss_function = self.loss
        model.register_forward_pre_hook(self.begin, with_kwargs=True)
        model.register_forward_hook(self.end, always_call=True)

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Defer the head for a forward that computes a loss."""
        vars(model).pop(self.attribute, None)  # of a forward that Ctrl-C has ended without its hooks
        self.running = False
        if kwargs.get("labels") is None:
            return
        if is_compiling():
            raise NotImplementedError(
                f"{self.name} is compiled as a whole, with chunked_loss=True, which replaces its head for the time of "
                "a forward. Compile its layers instead, or use chunked_loss=False"
            )
        if wants_tuple(model, kwargs):
            raise NotImplementedError(
                f"{self.name} got return_dict=False with chunked_loss=True: its output has no logits, which a tuple "
                "cannot show. Use return_dict=True, or chunked_loss=False"
            )
        head: nn.Module = getattr(model, self.attribute)
        # An attribute of the instance comes before the module of that name, whose own hooks run in the loss, once.
        vars(model)[self.attribute] = _DeferredHead(self.name, head)
        self.running = True

    def end(self, model: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Undo ``begin``, also after an exception. Return the output without logits; None if it has them."""
        self.running = False
        vars(model).pop(self.attribute, None)
        if not isinstance(getattr(output, "logits", None), DeferredLogits):
            return None
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    def loss(self, logits: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The loss function of the model: transformers' causal loss, of deferred logits."""
        if self.running and not isinstance(logits, DeferredLogits):
            raise NotImplementedError(
                f"{self.name} makes whole logits without calling its {self.attribute}, although chunked_loss=True. Use "
                "chunked_loss=False"
            )
        if not isinstance(logits, DeferredLogits):
            return self.whole(logits, labels, *args, **kwargs)
        if kwargs.get("ignore_index", IGNORE) != IGNORE:
            raise NotImplementedError(
                f"{self.name} got ignore_index={kwargs['ignore_index']}, but prepare_batch marks what has no label "
                f"with {IGNORE}. The chunked loss would ignore other tokens. Leave it out and mark them so in labels"
            )
        given: Tensor | None = kwargs.get("shift_labels")
        targets = shifted(labels, 1, IGNORE) if given is None else given
        count: Any = kwargs.get("num_items_in_batch")
        total = -logits.log_probs(targets).sum()
        count = (targets != IGNORE).sum() if count is None else count
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)

"""RecurrentGemma of transformers: its gated recurrences and their convolutions, over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.kernels.partials import accumulation_dtype
from ...ops.recurrence.convolution import causal_conv1d
from ...ops.recurrence.linear import linear_recurrence
from ...schedule.documents import read
from ...schedule.layout import by_documents
from ...schedule.lookup import resolve
from .forward import ForwardState, mixer_state
from .seams import known_as

KNOWN = {
    "RecurrentGemmaRecurrentBlock": ("e7b262ea66b846c8",),
    "RecurrentGemmaRglru": ("0a1c1d43bed0569f",),
    "RecurrentGemmaRglru._rnn_scan": ("002caadc74eb999f",),
}
"""Digests in transformers 5.24 of the methods that are replaced, and of those that call them."""
is_block = known_as(("RecurrentGemmaRecurrentBlock",), KNOWN)


def _where(module: nn.Module, state: ForwardState) -> dict[str, Any]:
    """The mesh, layout and documents of a call."""
    layout, name = state.style.mode.layout, type(module).__name__
    if by_documents(layout) and state.batch.tokens is not None:
        raise NotImplementedError(
            f"{name} of RecurrentGemma got padding before tokens in layout={layout!r}. On one device its state runs on "
            'from padding to tokens, but this layout places padding apart. Use layout="contiguous" or "head_tail"'
        )
    found = mixer_state(module)
    if found is None:
        raise NotImplementedError(
            f"{name} of RecurrentGemma keeps no states of new tokens yet. Generate in a mesh of one rank"
        )
    return {"mesh": found[0], "layout": layout, "documents": found[2], "name": name}


def convolved(conv: Any, state: ForwardState, x: Tensor) -> Tensor:
    """The forward of a convolution, without what its padding adds behind the sequence, ``[B, C, S/n]``."""
    if not isinstance(conv, nn.Conv1d):
        raise NotImplementedError(
            f"the convolution of RecurrentGemma is a {type(conv).__name__}, whose forward would not be called: an "
            "adapter, say. Leave conv_1d out of its target_modules"
        )
    return causal_conv1d(x, conv.weight.squeeze(1), conv.bias, **_where(conv, state))


def forgetting(unit: Any, state: ForwardState, activations: Tensor, position_ids: Tensor) -> Tensor:
    """The forward of a unit, which takes position 0 for the first one of a sequence: so is that of each document behind
    another one."""
    where = _where(unit, state)
    cp, documents = where["mesh"], read(where["documents"])
    if documents is not None:
        at = resolve(where["layout"], cp.size, activations.shape[1] * cp.size, documents).positions(cp.rank)
        first = (documents.numbers(at) != documents.numbers(at - 1)) & (at > 0)
        position_ids = torch.where(first.to(position_ids.device), 0, position_ids)
    out: Tensor = type(unit).forward(unit, activations, position_ids)
    return out


def scanned(
    unit: Any, state: ForwardState, *, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, **_: None
) -> tuple[Tensor, None]:
    """The recurrence of a unit, ``[B, S/n, C]``: each channel is a head with a state of one number."""
    dtype = accumulation_dtype(hidden_states.dtype)
    gate = (recurrent_gate * ~reset).to(dtype)
    decay = gate.clamp(min=torch.finfo(torch.float32).tiny).log()[..., None]  # a gate of zero forgets
    one = decay.new_ones(*decay.shape[:2], 1, 1)
    out = linear_recurrence(one, one, hidden_states.to(dtype)[..., None], decay, **_where(unit, state))
    return out.squeeze(-1).to(hidden_states.dtype), None

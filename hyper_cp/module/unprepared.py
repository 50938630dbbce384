"""Models of transformers that are routed without being prepared, and derive something from the length of a share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch.modules import frames_of, running_modules
from ..schedule.documents import read, tokens_of
from ..schedule.lookup import resolve
from .running_call import RunningCall

_CALLER = "transformers.integrations.sdpa_attention", "sdpa_attention_forward"
"""The file and the function that call ``F.scaled_dot_product_attention`` for models of transformers."""
FRAMES = 12
"""Frames between it and the check, at most: those of modes."""
_MASKS = "create_sliding_window_causal_mask"
"""The name in the file of a model that masks by its configuration, also if attention is not told of the window."""


def refuse_lengths_of_shares(call: RunningCall, length: int, mask: Tensor | None) -> None:
    """Raise ``ValueError`` if an attention call comes from a model of transformers that would have made a mask, or
    another one for a window, or have rotated by other frequencies, had it known the whole sequence.

    It is called when the ranks have compared their calls: all raise, or none.

    Args:
        length: the positions of this rank's queries.
        mask: that of the call, ``[..., Sq, Sk]``. Masks of all positions are the caller's own.
    """
    if mask is not None and (mask.shape[-2] != length or mask.shape[-1] == length):
        return
    mode, size = call.binding.style.mode, call.mesh.views[0].size
    code = getattr(getattr(sys.modules.get(_CALLER[0]), _CALLER[1], None), "__code__", None)
    if code is None or size == 1:
        return
    frame = next(frames_of(code, FRAMES), None)
    module: Any = next(running_modules(), None) if frame is None else frame.f_locals["module"]
    config: Any = getattr(module, "config", None)
    if frame is None and not _is_configuration(config):  # a function of the user's calls attention, or another model
        return
    whole, given = length * size, frame.f_locals.get("kwargs", {}) if frame else {}
    given = {"sliding_window": module.sliding_window} if frame is None and hasattr(module, "sliding_window") else given
    name, remedy = type(module).__name__, "Prepare it: hyper_cp.hf.prepare_model(model, mesh), and prepare_batch"
    window = _window(module, config, given)
    least = length if mask is None else 0  # in a mask for the rows of a share, windows begin at its first row
    if mode.window is None and window is not None and least < window < _longest(call.documents, whole):
        made = "no mask for them" if mask is None else f"a mask of {tuple(mask.shape)} for them"
        raise ValueError(
            f"{call.binding.name}: {name} has a window or chunks of {window} positions, and its model made {made}: it "
            f"knows the {length} positions of this rank's share only, of {whole}. Attention would see what one device "
            f"hides. {remedy}"
        )
    if mask is not None and mask.shape[-1] == whole and getattr(module, "is_causal", False) and _padding(frame, whole):
        raise ValueError(
            f"{call.binding.name}: {name} belongs to a causal model that was given the padding mask of all {whole} "
            f"positions and {length} tokens, and made a mask of {tuple(mask.shape)}. Its rows are positions 0 to "
            f"{length - 1} on every rank, whichever the rank holds. {remedy}; or leave the mask out, if there is no "
            "padding before tokens"
        )
    for kind, usual in _frequencies(config):
        ends = _ends(mode.layout, size, whole, call.documents) if usual < whole else ()
        # Some have frequencies for longer sequences, and others a set for each length.
        if ends and usual < max(ends) and min(ends) <= (usual if kind == "longrope" else max(ends) - 1):
            raise ValueError(
                f"{call.binding.name}: {name} belongs to a model with rope_type={kind!r}, whose frequencies depend on "
                f"the largest position if that is {usual} or more. It is {max(ends) - 1}, and on some ranks the "
                f"largest of their share is {min(ends) - 1}: ranks would rotate differently. {remedy}"
            )


def _padding(frame: FrameType | None, whole: int) -> bool:
    """True if a forward of transformers that runs around ``frame`` has got the padding mask ``[B, S]`` of all
    positions. (The ranks have the same: unlike its values, its form does not depend on the rank.)"""
    while frame is not None:
        file, mask = str(frame.f_globals.get("__name__")), None
        if frame.f_code.co_name == "forward" and file.startswith("transformers."):
            mask = frame.f_locals.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[-1] == whole:
            return True
        frame = frame.f_back
    return False


def _is_configuration(config: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "transformers" for kind in type(config).__mro__)


def _window(module: nn.Module, config: Any, given: dict[str, Any]) -> int | None:
    """The positions of the window, or of each chunk, that a layer attends in; None: all."""
    kinds, at = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and isinstance(at, int) and at < len(kinds) and kinds[at] == "chunked_attention":
        found = getattr(config, "attention_chunk_size", None)
    elif "sliding_window" in given or kinds or not hasattr(sys.modules.get(type(module).__module__), _MASKS):
        found = given.get("sliding_window")
    else:
        found = getattr(config, "sliding_window", None)
    return found


def _longest(documents: Tensor | None, whole: int) -> int:
    """The positions of the longest document in which there are tokens."""
    if documents is None:
        return whole
    rows, tokens, longest = read(documents).rows, tokens_of(documents), 0
    shown = torch.ones(1, whole, dtype=torch.int64, device="cpu") if tokens is None else tokens
    before = F.pad(shown, (1, 0)).cumsum(1)
    for number, row in enumerate(rows):
        ends = torch.tensor(row, device="cpu")
        counts = (before[number : number + 1] if len(rows) == len(before) else before)[:, ends].diff()
        longest = max(longest, int((ends.diff() * (counts > 0).any(0)).max()))
    return longest


def _frequencies(config: Any) -> Iterator[tuple[str, int]]:
    """The types of rotary embeddings whose frequencies depend on the length, and the longest with the usual ones."""
    given = getattr(config, "rope_parameters", None)
    given = given if isinstance(given, dict) else {}
    for parameters in [given] if "rope_type" in given else given.values():  # of the model, or of each type of layers
        kind = parameters.get("rope_type", "") if isinstance(parameters, dict) else ""
        most = getattr(config, "max_position_embeddings", None)
        most = parameters.get("original_max_position_embeddings") if kind == "longrope" else most
        if isinstance(most, int) and (kind == "longrope" or "dynamic" in kind):
            yield kind, most


def _ends(layout: str, size: int, whole: int, documents: Tensor | None) -> tuple[int, ...]:
    """One more than the largest position of each rank; positions restart in documents."""
    packed = None if documents is None else read(documents)
    resolved = resolve(layout, size, whole, packed)

    def make() -> tuple[int, ...]:
        shares = [resolved.positions(rank) for rank in range(size)]
        return tuple(int((at if packed is None else packed.restarted(at)).max()) + 1 for at in shares)

    return (resolved if packed is None else packed).derived(("ends", layout, size), make)

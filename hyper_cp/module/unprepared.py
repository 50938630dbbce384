"""Models of transformers that are routed without being prepared, and derive something from the length of a share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import nn

from .._torch.modules import caller_named
from ..schedule.documents import read
from .running_call import RunningCall

_CALLER = "sdpa_attention_forward"
"""The function by which transformers calls ``F.scaled_dot_product_attention``."""
FRAMES = 12
"""Frames between it and the check, at most: those of modes."""


def refuse_lengths_of_shares(call: RunningCall, length: int) -> None:
    """Raise ``ValueError`` if an attention call without a mask comes from a model of transformers that would have made
    one, or have rotated by other frequencies, had it known the whole sequence.

    Args:
        length: the positions of this rank's queries.
    """
    frame = caller_named(_CALLER, FRAMES)
    if frame is None:
        return
    given, whole = frame.f_locals, length * call.mesh.views[0].size
    if call.documents is not None:
        whole = max(b - a for row in read(call.documents).rows for a, b in pairwise(row))
    module: nn.Module = given["module"]
    config: Any = getattr(module, "config", None)
    name, remedy = type(module).__name__, "Prepare it: hyper_cp.hf.prepare_model(model, mesh), and prepare_batch"
    window = given.get("kwargs", {}).get("sliding_window") or _chunk(module, config)
    if call.binding.style.mode.window is None and isinstance(window, int) and length < window < whole:
        raise ValueError(
            f"{call.binding.name}: {name} has a window or chunks of {window} positions, and its model made no mask for "
            f"them: it knows the {length} positions of this rank's share only, of {whole}. Attention would see what "
            f"one device hides. {remedy}"
        )
    for kind, most in _frequencies(config):
        if most < whole:
            raise ValueError(
                f"{call.binding.name}: {name} belongs to a model with rope_type={kind!r}, whose frequencies depend on "
                f"whether a sequence is longer than {most} positions. It knows the {length} positions of this rank's "
                f"share, and not all {whole}. {remedy}"
            )


def _chunk(module: nn.Module, config: Any) -> int | None:
    """The positions of each chunk that a layer attends in; None: it attends in none."""
    kinds, at = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    chunked = isinstance(at, int) and kinds and at < len(kinds) and kinds[at] == "chunked_attention"
    return config.attention_chunk_size if chunked else None


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

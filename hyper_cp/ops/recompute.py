"""The check of a recompute by activation checkpointing: it had the documents and the mesh of its forward.

Saved tensors are those of the recompute, if activation checkpointing made one; attributes of ctx are those of the
forward. So ops keep documents and mesh as attributes and their fingerprint as a saved tensor: backward always uses what
the forward used, and detects a recompute that used something else. A reentrant checkpoint has no forward with a graph:
there an op compares what it gets with what the checkpoint has noted in its forward.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from .._torch import checkpoint
from ..mesh import cp_mesh
from ..schedule.documents import read


@torch.library.custom_op("hyper_cp::fingerprint", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def fingerprint(documents: Tensor | None, mesh: str) -> Tensor:
    """A fingerprint of these documents and this mesh: ``[1]`` int64 on the CPU."""
    return torch.tensor([_hash(documents, mesh)], device="cpu")


@fingerprint.register_fake
def _(documents: Tensor | None, mesh: str) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _hash(documents: Tensor | None, mesh: str) -> int:
    return hash((mesh, None if documents is None else read(documents).digest))


def check_replay(documents: Tensor | None, mesh: str) -> None:
    """Raise ``RuntimeError`` in the recompute of a reentrant checkpoint, unless the forward of the call had these
    documents and this mesh. Every op with a backward calls it first."""
    if not checkpoint.replays(lambda: _hash(documents, mesh)):
        _raise("not " + _described(documents, mesh))


def check_recompute(documents: Tensor | None, mesh: str, mark: Tensor | None) -> None:
    """Raise ``RuntimeError`` unless ``mark`` is the fingerprint of these documents and this mesh."""
    if mark is None or _hash(documents, mesh) != mark.item():
        _raise(_described(documents, mesh))


def _described(documents: Tensor | None, mesh: str) -> str:
    had = "no packed documents" if documents is None else f"documents={documents.tolist()}"
    return f"{had} on {cp_mesh.by_key(mesh)}"


def _raise(had: str) -> NoReturn:
    raise RuntimeError(
        "activation checkpointing recomputed this layer with other packed documents, or on another cp mesh, than its "
        f"forward had ({had}). The block that gave them had ended, or another one was active. Pass documents= to the "
        "styled module as a keyword argument (through the checkpointed function), or run backward inside the block"
    )

"""ContextParallelHandler: everything about a batch that context parallelism changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .ops import layout as layouts
from .ops import mesh as meshes
from .ops.batch import gather_sequence
from .ops.masks import documents_table
from .style import ContextParallel


class ContextParallelHandler:
    """Shards batches for a cp mesh and gathers results, in the layout its style uses.

    Args:
        mesh: the cp mesh (1-D, or 2-D ``("ring", "ulysses")``).
        style: the :class:`ContextParallel` of the model's attention, or a layout's name. Style and
            handler read one layout, so data and attention cannot disagree.

    All ranks of the mesh must hold the same global tensors.
    """

    def __init__(self, mesh: DeviceMesh, style: ContextParallel | str) -> None:
        if not isinstance(style, (ContextParallel, str)):
            raise TypeError(
                f"style is a {type(style).__name__}; pass the ContextParallel style of the model or a layout "
                f"name: {', '.join(map(repr, layouts.LAYOUTS))}"
            )
        self.layout = layouts.check_layout(style if isinstance(style, str) else style.mode.layout)
        self.cp = meshes.view(mesh)

    def padded_length(self, length: int) -> int:
        """``length``, or the next one that splits evenly over the ranks in this layout."""
        multiple = layouts.length_multiple(self.layout, self.cp.size)
        return -(-length // multiple) * multiple

    def dispatch(self, tensor: Tensor, seq_dim: int = 1, *, pad_value: float | None = None) -> Tensor:
        """This rank's share of a global tensor: ``[.. S ..] -> [.. S/n ..]``. Differentiable.

        Args:
            pad_value: fills the end up to :meth:`padded_length` if S does not split evenly (labels:
                ``ignore_index``); without it such an S raises. Under a causal mask no token sees the padding;
                otherwise run the forward in :meth:`documents`, which keeps it apart.
        """
        seq_dim = _checked_dim(tensor, seq_dim)
        length = tensor.shape[seq_dim]
        if pad_value is not None and self.padded_length(length) > length:
            shape = list(tensor.shape)
            shape[seq_dim] = self.padded_length(length) - length
            tensor = torch.cat([tensor, tensor.new_full(shape, pad_value)], dim=seq_dim)
        ranges = self._ranges(tensor.shape[seq_dim], f"tensor.shape[{seq_dim}]")
        parts = [tensor.narrow(seq_dim, start, stop - start) for start, stop in ranges]
        return torch.cat(parts, dim=seq_dim)

    def combine(self, tensor: Tensor, seq_dim: int = 1, *, length: int | None = None) -> Tensor:
        """The inverse, on every rank: ``[.. S/n ..] -> [.. S ..]`` in global order.

        One communication. Differentiable: the gradient of a rank's share is its slice of the
        gradient of the whole (the whole is used identically on every rank).

        Args:
            length: the true global length, if ``dispatch`` has padded: the padding is cut off.
        """
        seq_dim = _checked_dim(tensor, seq_dim)
        whole = tensor.shape[seq_dim] * self.cp.size
        layouts.check_length(self.layout, self.cp.size, whole)
        if length is not None and self.padded_length(length) != whole:
            raise ValueError(
                f"length={length} does not pad to the {whole} positions that the ranks hold, but to "
                f"{self.padded_length(length)}: pass the length that the dispatched tensor had"
            )
        gathered = gather_sequence(tensor, self.cp.key, self.layout, seq_dim)
        return gathered if length is None else gathered.narrow(seq_dim, 0, length)

    def position_ids(self, length: int, device: Any = None) -> Tensor:
        """Global positions of this rank's tokens, ``[S/n]`` int64, for a global ``length`` S that splits evenly
        (see :meth:`padded_length`)."""
        self._ranges(length, "length")
        positions = layouts.positions(self.layout, self.cp.rank, self.cp.size, length)
        return torch.tensor(positions, dtype=torch.int64, device=device)

    @contextmanager
    def documents(self, cu_seqlens: Any = None, *, document_ids: Any = None) -> Iterator[Tensor]:
        """For the enclosed forward the sequence is packed documents: only positions of one document see
        each other, in every styled module on this mesh.

        Args:
            cu_seqlens: cumulative lengths ``[0, ..., S]`` over *global* positions, for every batch row
                (list or tensor ``[m]``) or one list per row. Any lengths, borders anywhere. If S does not split
                evenly over the ranks, its padding becomes one more document (``[0, S]``: a padded sequence).
            document_ids: instead, ``[B, S]``: the document of every global position.

        Yields:
            The documents as a CPU table ``[1 or B, m]``, to be passed on explicitly (``documents=`` of a
            styled module) where the forward is left before it is recomputed: a pipeline, or activation
            checkpointing with a backward outside this block, which raises otherwise.
        """
        table = documents_table(cu_seqlens, document_ids)
        if table is None:
            raise ValueError("documents() needs cu_seqlens or document_ids")
        table = self._with_padding(table)
        facts, before = self.cp.facts, self.cp.facts.documents
        facts.documents = table
        try:
            yield table
        finally:
            facts.documents = before

    def _with_padding(self, table: Tensor) -> Tensor:
        last = table[:, -1:]
        padded = torch.tensor([[self.padded_length(int(length))] for length in last.flatten().tolist()])
        return table if torch.equal(padded, last) else torch.cat([table, padded], dim=1)

    def _ranges(self, length: int, argument: str) -> tuple[layouts.Range, ...]:
        layouts.check_length(self.layout, self.cp.size, length, argument)
        return layouts.rank_ranges(self.layout, self.cp.rank, self.cp.size, length)


def _checked_dim(tensor: Tensor, seq_dim: int) -> int:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}, not a torch.Tensor")
    if not -tensor.ndim <= seq_dim < tensor.ndim:
        raise ValueError(
            f"seq_dim={seq_dim} is not a dimension of a tensor of shape {tuple(tensor.shape)}: use "
            f"{-tensor.ndim} to {tensor.ndim - 1}"
        )
    return seq_dim % tensor.ndim

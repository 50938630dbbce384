"""Shares: split a sequence over a cp mesh, gather it, roll it, and compute the positions of a rank's tokens."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.compiling import is_compiling
from ..mesh import cp_mesh
from ..mesh.arguments import check_type, is_int
from ..mesh.cp_mesh import CPMesh
from ..ops.exchange.whole_sequences import gather_sequence
from ..schedule import layout as layouts
from ..schedule.documents import documents_table, mark_tokens, packed_of, read, tokens_of
from ..schedule.layout import ResolvedLayout
from ..schedule.lookup import resolve
from .collectives import roll_sequence, with_gradient_of
from .uncounted import can_hold


class Shares:
    """A sequence that is split over a cp mesh in one layout. See :class:`ContextParallelHandler`."""

    def __init__(self, mesh: DeviceMesh, layout: str, halves: bool = False) -> None:
        """``halves``: attention will exchange halves of each rank's share (``load_balance``)."""
        self.layout, self._halves = layouts.check_layout(layout), halves
        self.style_of_model: object | None = None
        """The style whose first batch is compared across the ranks; None: only the first batch of the mesh is."""
        self._mesh, self.whole_cp = mesh, cp_mesh.view(mesh)

    @property
    def mesh(self) -> DeviceMesh:
        """The cp mesh."""
        return self._mesh

    @property
    def cp(self) -> CPMesh:
        """The cp mesh seen as ring x ulysses."""
        return self.whole_cp

    def padded_length(self, length: int) -> int:
        """The least length that splits evenly over the ranks in this layout, and is not below ``length``."""
        checked_length("length", length)
        multiple = layouts.length_multiple(self.layout, self.cp.size)
        multiple = math.lcm(multiple, 2 * self.cp.size) if self._halves else multiple
        return -(-length // multiple) * multiple

    def dispatch(self, tensor: Tensor, seq_dim: int = 1, *, pad_value: float | None = None) -> Tensor:
        """This rank's share of a global tensor: ``[.. S ..] -> [.. S/n ..]``. Any dtype.

        It does not communicate. It is differentiable: the gradient of the whole is zero except in this rank's share.

        Args:
            tensor: global, the same on all ranks.
            seq_dim: its sequence dimension; negative ones count from the end.
            pad_value: pads the end up to :meth:`padded_length` with this value if S does not split evenly (labels:
                ``ignore_index``); without it such an S raises. Under a causal mask no token sees the padding;
                otherwise run the forward in :meth:`documents`, which keeps it apart.

        Raises:
            ValueError: if S does not split evenly, or if the tensor has no such dimension; before communication.

        Example::

            >>> share = handler.dispatch(torch.arange(8), 0)
            >>> share.shape, handler.combine(share, 0).tolist()
            (torch.Size([4]), [0, 1, 2, 3, 4, 5, 6, 7])
        """
        return self._local_share(tensor, seq_dim, self.cp.batch.documents, pad_value)

    def combine(
        self,
        tensor: Tensor,
        seq_dim: int = 1,
        *,
        length: int | None = None,
        documents: Any = None,
        gradients: str | None = "unknown",
    ) -> Tensor:
        """The inverse of :meth:`dispatch`, on every rank: ``[.. S/n ..] -> [.. S ..]`` in global order.

        It makes one all-gather, and is differentiable: every rank uses the whole alike, so the gradient of its
        share is its slice of the gradient of the whole. For a loss of the whole (a pooled or CLS head), parameters
        *before* ``combine`` then get the part of their gradient that comes from this rank's tokens, and parameters
        *after* it all of theirs, on every rank. A reduction over the ranks treats both alike, so say which one follows:

        ======================== ============= ==============================================
        gradients are afterwards ``gradients`` loss
        ======================== ============= ==============================================
        not reduced              None          any
        averaged (DDP, FSDP)     ``"mean"``    any, or :meth:`mean_loss` ``(gradients="mean")``
        summed                   ``"sum"``     :meth:`mean_loss` ``(gradients="sum")``, or any divided by n
        any of these             ``"shares"``  of shares: the whole is dispatched again
        ======================== ============= ==============================================

        A head on the mean of the tokens, under DDP::

            pooled = handler.combine(hidden, 1, length=batch.length, gradients="mean").mean(1)  # or [:, 0]: CLS
            losses = F.cross_entropy(head(pooled), classes, reduction="none")  # [B], the same on every rank
            handler.mean_loss(losses, gradients="mean").backward()

        Args:
            length: the true global length, if ``dispatch`` has padded: the padding is cut off.
            documents: the documents by which layouts ``"per_document"``, ``"balanced"`` and ``"auto"`` have placed the
                tokens, as for :meth:`documents`; by default those of the enclosing block. ``batch.documents`` of
                :meth:`get_batch_on_this_cp_rank` and ``batch["context_parallel"].documents`` of ``prepare_batch`` are
                always right; ``cu_seqlens``, or ``[0, S]``, is as well, unless a mask says that rows are padded
                before their tokens.
            gradients: the reduction of parameters' gradients over the ranks that follows, for a loss of the whole; or
                ``"shares"`` if each rank goes on with its part of what was computed from the whole. Left out, it is
                None, with one warning if there are gradients.

        Raises:
            ValueError: if ``length`` is not that of the dispatched tensor, if the tensor lacks a few positions of a
                share, or if ``gradients`` is unknown.
        """
        seq_dim = checked_dim(tensor, seq_dim)
        factor = gradient_factor(self.cp, tensor, gradients, "combine")
        whole = tensor.shape[seq_dim] * self.cp.size
        if seq_dim == 1 and length is None:
            refuse_cut_share(self, "tensor", tensor)
        layouts.check_length(self.layout, self.cp.size, whole)
        if length is not None and not pads_to(self, length, whole):
            raise ValueError(
                f"length={length} pads to {self.padded_length(length)} positions. The ranks hold {whole}. Pass the "
                "length that the dispatched tensor had"
            )
        table = self.cp.batch.documents if documents is None else documents_for(self, documents, whole)
        if length is None and gradients == "shares":
            self._warn_of_padding(whole)
        if factor > 1:
            tensor = with_gradient_of(tensor, tensor * factor)
        gathered = gather_sequence(tensor, table, self.cp.key, self.layout, seq_dim, gradients == "shares", False)
        return gathered if length is None else gathered.narrow(seq_dim, 0, length)

    def roll_tensor(
        self, tensor: Tensor, shifts: int = -1, dims: int = -1, *, documents: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Shift the whole sequence of which ``tensor [.. S/n ..]`` is this rank's share.

        The value from global position p - shifts moves to p; values from outside the sequence or from another document
        are zero. One all-gather of the rows that cross between ranks (shifts=-1: one row per chunk). Differentiable.
        Zero is a class: for labels of further tokens see ``mtp_depth`` of ``get_batch_on_this_cp_rank``.

        Args:
            shifts: any number of positions; negative brings later tokens forward, as for multi-token prediction.
            dims: the sequence dimension. Documents that differ between rows need the batch in dimension 0 (or 1,
                if the sequence is 0).

        Returns:
            This rank's share ``[.. S/n ..]`` of the result, and the sum of the share (0-D, half precision added up in
            fp32; the number of tokens left, if ``tensor`` is a loss mask).

        Example::

            >>> following, _ = handler.roll_tensor(handler.dispatch(torch.arange(8), 0), shifts=-1)
            >>> handler.combine(following, 0).tolist()
            [1, 2, 3, 4, 5, 6, 7, 0]

        Source: ``roll_tensor`` of Megatron-LM's multi-token prediction; there one position to the left.
        """
        seq_dim = checked_dim(tensor, dims, "dims")
        shares = self.cp.batch.lengths.made
        if dims == -1 and tensor.shape[-1] not in shares and shares & {*tensor.shape[1:]}:
            warnings.warn(
                f"roll_tensor shifts the last dimension of a tensor {tuple(tensor.shape)}, which is not as long as a "
                f"share of the sequence ({', '.join(map(str, sorted(shares)))}), and another one is. Pass dims=, the "
                "dimension of the sequence (1 for hidden states [B, S/n, C])",
                stacklevel=2,
            )
        if not is_int(shifts):
            raise TypeError(f"shifts={shifts!r} must be an int. It counts positions along the dimension dims. Pass one")
        length = tensor.shape[seq_dim] * self.cp.size
        shifts = max(-length, min(length, shifts))  # beyond that everything is zero, and ops take 64 bits
        layouts.check_length(self.layout, self.cp.size, length)
        table = documents_for(self, documents, length, tensor, seq_dim)
        rolled = roll_sequence(tensor, table, self.cp.key, self.layout, seq_dim, shifts)
        # Half precision cannot count: in fp16 there is nothing above 65,504, and in bf16 256 + 1 is 256.
        exact = torch.promote_types(rolled.dtype, torch.float32) if rolled.is_floating_point() else None
        return rolled, rolled.sum(dtype=exact)

    def position_ids(self, length: int, device: Any = None, *, restart: bool = False, documents: Any = None) -> Tensor:
        """Positions of this rank's tokens, ``[S/n]`` int64, for a global ``length`` S that splits evenly
        (see :meth:`padded_length`).

        Args:
            length: S, in positions.
            device: of the result; default: the CPU.
            restart: count from 0 in each packed document; ``[B, S/n]`` if documents differ between rows.

        Example::

            >>> handler.position_ids(8).tolist()[0] == 2 * mesh.get_local_rank()  # head-tail: 0 1 6 7, and 2 3 4 5
            True
        """
        table = documents_for(self, documents, checked_length("length", length))
        at = resolve_layout(self, length, table).positions(self.cp.rank)
        if restart:
            if table is None:
                raise ValueError(
                    "restart=True without documents. Positions restart where documents begin. Pass documents=, or call "
                    "it in a documents() block"
                )
            rows = packed_of(table).restarted(at)
            at = rows[0] if len(rows) == 1 else rows
        return at.to(device)

    def _warn_of_padding(self, whole: int) -> None:
        """Warn if a sequence of ``whole`` positions ends with padding of the block's batch."""
        batch = self.cp.batch
        if batch.padded_length == whole and batch.length not in (None, whole):
            warnings.warn(
                f'combine(gradients="shares") returns all {whole} positions of a batch of {batch.length}: the others '
                "are padding, which whatever mixes positions would take for tokens. Pass "
                f"length={batch.length} (batch.length), and pad_value= to the dispatch that follows",
                stacklevel=3,
            )

    def _local_share(
        self, tensor: Tensor, seq_dim: int, documents: Tensor | None, pad_value: float | None = None
    ) -> Tensor:
        """See :func:`local_share`."""
        seq_dim = checked_dim(tensor, seq_dim)
        length = tensor.shape[seq_dim]
        check_type("pad_value", pad_value, (int, float, type(None)), "The sequence is padded with it. Pass a number")
        if pad_value is not None and self.padded_length(length) > length:
            tensor = _padded(tensor, seq_dim, self.padded_length(length) - length, pad_value)
        resolved = resolve_layout(self, tensor.shape[seq_dim], documents, f"tensor.shape[{seq_dim}]")
        self.cp.batch.lengths.record(tensor.shape[seq_dim] // self.cp.size, self.layout)
        if self.cp.agreement is not None and not is_compiling():
            self.cp.agreement.compare_tokens_later(tensor, self.style_of_model)
        ranges = resolved.ranges(self.cp.rank)
        return torch.cat([tensor.narrow(seq_dim, start, stop - start) for start, stop in ranges], dim=seq_dim)


# --------------------------------------------------------------------------- shares with a given table of documents


def local_share(
    shares: Shares, tensor: Tensor, seq_dim: int, documents: Tensor | None, pad_value: float | None = None
) -> Tensor:
    """:meth:`Shares.dispatch`, for a sequence with this table of documents."""
    return shares._local_share(tensor, seq_dim, documents, pad_value)


def pads_to(shares: Shares, length: int, padded: int) -> bool:
    """True if a sequence of ``length`` positions has ``padded`` after the split: as many as the layout needs, or in the
    block of a batch that was padded further (a planned micro-batch) as many as that has."""
    batch = shares.cp.batch
    return shares.padded_length(length) == padded or (batch.length, batch.padded_length) == (length, padded)


def refuse_cut_share(shares: Shares, name: str, x: Tensor) -> None:
    """Raise ``ValueError`` if a tensor ``[B, S/n, ...]``, which the error calls ``name``, lacks a few positions of this
    rank's share of a batch."""
    share = shares.cp.batch.cut_share(*x.shape[:2]) if shares.cp.size > 1 and x.ndim > 1 else None
    if share is not None:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, and this rank's share of a batch of {x.shape[0]} rows has {share} "
            "positions. If every rank has dropped some (x[:, :-2]), what is left is no share of a sequence, and would "
            "get the positions of other tokens. Pass all of them, with a mask or labels that leave some out, and drop "
            "tokens of the whole: handler.combine(x, 1)[:, :-2]; if it is another sequence, pass its length="
        )


def resolve_layout(shares: Shares, length: int, documents: Tensor | None, argument: str = "length") -> ResolvedLayout:
    """The positions of all ranks in a sequence of ``length``. A layout may depend on its table of documents.

    ``ValueError`` if the length, which the error calls ``argument``, does not split evenly.
    """
    layouts.check_length(shares.layout, shares.cp.size, length, argument)
    by_documents = layouts.by_documents(shares.layout)  # else the table is not read: a compiled graph may run this
    return resolve(shares.layout, shares.cp.size, length, read(documents) if by_documents else None)


def documents_for(
    shares: Shares, documents: Any, length: int, tensor: Tensor | None = None, seq_dim: int = 0
) -> Tensor | None:
    """The table of the documents that a call was given, or of the enclosing block.

    ``ValueError`` if it does not fit the sequence of the call, or the batch of a tensor.
    """
    table = shares.cp.batch.documents if documents is None else padded_table(shares, documents)
    if table is not None:
        batch = len(table)
        if tensor is not None and batch > 1:
            batch = tensor.shape[0 if seq_dim else 1] if tensor.ndim > 1 else 1
        read(table).check(batch, length)
    return table


def padded_table(shares: Shares, documents: Any) -> Tensor:
    """The table of ``documents``; padding up to :meth:`Shares.padded_length` is one more document."""
    table: Any = documents_table(documents)
    if not is_compiling():
        read(table).check_ascending()
    last = table[:, -1:]
    padded = torch.tensor([[shares.padded_length(int(length))] for length in last.flatten().tolist()], device="cpu")
    if torch.equal(padded, last):
        return table
    found = torch.cat([table, padded], dim=1)
    return found if is_compiling() else mark_tokens(found, _tokens(table, last, int(padded.max())))


def _tokens(table: Tensor, last: Tensor, length: int) -> Tensor:
    """False where a sequence of ``length`` positions has padding: behind the last document, and where the table says
    so."""
    known, inside = tokens_of(table), torch.arange(length, device="cpu") < last
    return inside if known is None else inside & F.pad(known, (0, length - known.shape[1]))


def gradient_factor(cp: CPMesh, tensor: Tensor, gradients: str | None, caller: str) -> int:
    """The factor of the gradient of a share that ``caller`` makes a whole of, for the reduction that follows.

    ``ValueError`` for an unknown reduction. A warning, once on a mesh, of gradients whose reduction is not given.
    """
    again = "the whole is dispatched again" if caller == "combine" else "this rank's tokens read the result"
    if gradients not in (None, "mean", "sum", "unknown", "shares"):
        raise ValueError(
            f"gradients={gradients!r} is unknown. It says who reduces gradients after backward. Use "
            '"mean" under DDP or FSDP, which average gradients, "sum" if you all-reduce them with SUM, None if nobody '
            f'reduces them, "shares" if {again}'
        )
    if gradients == "unknown":
        _warn_of_gradients(cp, tensor, caller)
    # The reduction averages the parts of all ranks, or adds up those of a loss that was divided by n.
    return cp.size if gradients in ("mean", "sum") else 1


def _warn_of_gradients(cp: CPMesh, tensor: Tensor, caller: str) -> None:
    if is_compiling() or not (cp.size > 1 and torch.is_grad_enabled() and tensor.requires_grad):
        return
    if cp.batch.warned_of_gradients:
        return
    cp.batch.warned_of_gradients = True
    found = " (DDP or FSDP is around this model, and averages them)" if cp.batch.averaged else ""
    again = "you dispatch the whole again" if caller == "combine" else "this rank's tokens read the result"
    warnings.warn(
        f"{caller} gathers a tensor with gradients, and does not know how gradients are reduced over the ranks{found}. "
        "A reduction treats parameters before and behind it alike, so some would be wrong for a loss of the whole. "
        f'Pass gradients="mean" (DDP, FSDP), "sum" or None (no reduction), or "shares" if {again}',
        stacklevel=5,
    )


def _padded(tensor: Tensor, seq_dim: int, more: int, pad_value: float) -> Tensor:
    shape = list(tensor.shape)
    shape[seq_dim] = more
    try:
        if can_hold(tensor.dtype, pad_value):  # a bool takes -100 for True, an unsigned number for another one
            return torch.cat([tensor, tensor.new_full(shape, pad_value)], dim=seq_dim)
        cause = None
    except (RuntimeError, OverflowError) as error:
        cause = error
    raise ValueError(
        f"pad_value={pad_value} is not a value of a tensor of {tensor.dtype}. Padding is written into the tensor. Pass "
        "a number that this dtype holds"
    ) from cause


def checked_dim(tensor: Tensor, seq_dim: int, argument: str = "seq_dim", name: str = "tensor") -> int:
    """The dimension ``seq_dim`` counted from the left; ``TypeError`` or ``ValueError`` if the tensor, which errors call
    ``name``, has none."""
    check_type(name, tensor, Tensor, "It has one dimension that is the sequence. Pass a torch.Tensor")
    if not is_int(seq_dim) or not -tensor.ndim <= seq_dim < tensor.ndim:
        raise ValueError(
            f"{argument}={seq_dim!r} is not a dimension of {name}. Its shape is {tuple(tensor.shape)}. "
            + (f"Use {-tensor.ndim} to {tensor.ndim - 1}" if tensor.ndim else "A sequence needs a dimension")
        )
    if tensor.layout != torch.strided:
        raise NotImplementedError(
            f"{name} has layout {tensor.layout}. Positions of a sparse or nested tensor cannot be split and gathered. "
            "Pass x.to_dense() (or to_padded_tensor), or leave it out; in a batch seq_dims={...: None} passes an entry "
            "through whole"
        )
    return seq_dim % tensor.ndim


def checked_length(argument: str, length: int) -> int:
    """Return a number of positions, or raise ``TypeError`` or ``ValueError``."""
    if not isinstance(length, (int, torch.SymInt)) or isinstance(length, bool):
        raise TypeError(f"{argument}={length!r} must be an int. It is a number of positions. Pass one")
    if isinstance(length, int) and not 0 <= length < 2**48:
        raise ValueError(f"{argument}={length} is impossible. A sequence has 0 to 2**48 positions. Pass their number")
    return length

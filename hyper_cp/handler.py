"""ContextParallelHandler: everything about a batch that context parallelism changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from .data import loss as _losses
from .data import rotary
from .data.batch import LocalBatch, local_batch
from .data.sharding import Shares, checked_dim
from .mesh.cp_mesh import CPMesh
from .module.mesh_binding import bindings, swapped
from .schedule import layout as layouts
from .schedule import masks
from .style import ContextParallel, style_of


class ContextParallelHandler(Shares):
    """Shards batches for a cp mesh and gathers results, in the layout its style uses.

    Args:
        mesh: the cp mesh (1-D, or 2-D ``("ring", "ulysses")``).
        style: the :class:`ContextParallel` of the model's attention, the same object: data and attention then have
            one layout. (Another style's, or a layout's name, must be that of the model: nothing compares them.)

    All ranks of the mesh must hold the same global tensors. S is the global length of the sequence, n the number of
    ranks, S/n the local length. Methods that care for packed documents use those of the enclosing
    :meth:`documents` block, or their argument ``documents`` (cumulative lengths over global positions).

    Source: the interface of Megatron-LM's context-parallel handler (its pull request 2749), over this engine; by
    keyword its ``dispatch(seq_dim=, tensor=)`` and ``combine`` are calls of these.
    """

    def __init__(self, mesh: DeviceMesh, style: ContextParallel | str) -> None:
        if not isinstance(style, (ContextParallel, str)):
            raise TypeError(
                f"style is a {type(style).__name__}; pass the ContextParallel style of the model or a layout "
                f"name: {', '.join(map(repr, layouts.LAYOUTS))}"
            )
        self.style = None if isinstance(style, str) else style
        if isinstance(style, str):
            super().__init__(mesh, style)
        else:
            super().__init__(mesh, style.mode.layout, style.mode.load_balance)
        self._cores: dict[Any, nn.Module] = {}

    @property
    def cp(self) -> CPMesh:
        away = swapped.get(self.style) if self.style is not None else None
        if away and away[-1] != self.mesh:
            raise RuntimeError(
                "the model of this handler's style runs on another cp mesh (context_parallel_mesh): use the handler "
                "that the block yields, or one that follows the model, ContextParallelHandler.of(model)"
            )
        return super().cp

    @classmethod
    def of(cls, model: nn.Module) -> ContextParallelHandler:
        """A handler of the mesh and layout of a model's styled modules, which follows them to another mesh
        (:func:`context_parallel_mesh`): what it does inside such a block is for the mesh of the block."""
        return _Following(model)

    def get_batch_on_this_cp_rank(
        self,
        batch: Any,
        seq_dims: int | Mapping[Any, int | None] | Sequence[int | None] = 1,
        *,
        shift_labels: bool = False,
        ignore_index: int = -100,
        pad_values: Mapping[Any, float] | None = None,
        debug: bool = False,
    ) -> Any:
        """This rank's share of a whole batch, with all that must be settled before it is sharded::

            batch = handler.get_batch_on_this_cp_rank(batch, shift_labels=True)
            with handler.documents(batch):
                logits = model(batch["input_ids"], batch["position_ids"])
            loss = handler.mean_loss(logits, batch["shift_labels"])

        Args:
            batch: a dict, list or tuple; the same on all ranks of the mesh. Tensors that do not have the sequence
                dimension, and everything that is no tensor, pass through.
            seq_dims: the sequence dimension of all tensors; or a dict that names it for some (None: the entry
                passes through whole; entries not named: 1); or for a list or tuple one int or None each.
            shift_labels: entry ``labels`` is shifted over the *whole* sequence to ``shift_labels``: each token
                gets the next one's label, the last of the sequence and of each document ``ignore_index``.
            ignore_index: also fills up labels.
            pad_values: what fills up other entries if S does not split evenly, by name. Default 0.
            debug: compare the batches of the ranks by hash (a small communication, and every entry is read on the
                host) and raise on all ranks, with the name of the first entry that differs.

        A dict may moreover contain:

        * ``cu_seqlens`` (or Megatron's, FlashAttention's and Hugging Face's names for it) or ``document_ids
          [B, S]``: packed documents. They are taken out: for a share they mean nothing.
        * ``attention_mask [B, S]`` of 0 and 1: padding before or after the tokens of each row. It becomes
          documents, since what tokens and padding see of each other is a matter of the whole sequence; the
          entry that stays is all ones. Masks of other dimensions pass through whole, as the engine wants them.
        * ``position_ids``; made if missing, ``[B, S/n]`` int64 (``[S/n]`` if tokens are). They restart in packed
          documents, not behind padding.

        Returns:
            The same kind of container, with attributes ``documents`` (of the padded sequence, or None), ``length``
            (S before padding, for :meth:`combine`) and ``padded_length``.

        Raises:
            ValueError, TypeError: if lengths, documents or masks do not fit, by the name of the entry.
        """
        return local_batch(
            self,
            batch,
            seq_dims,
            shift_labels=shift_labels,
            ignore_index=ignore_index,
            pad_values=pad_values,
            debug=debug,
        )

    # ------------------------------------------------------------------ rotary embedding

    def get_rotary_seq_len(self, local: Tensor | int, seq_dim: int = 1, *, documents: Any = None) -> int:
        """How many positions a rotary table needs for the sequence of which ``local`` (a tensor, or its length S/n)
        is a share: S; with packed documents, in which positions restart, the longest of them.

        Source: Megatron-LM's function of that name: the local length times the ranks, or ``max_seqlen``.
        """
        length = local if isinstance(local, int) else local.shape[checked_dim(local, seq_dim)]
        borders = masks.borders_of(self._table(documents, length * self.cp.size))
        if borders is None:
            return length * self.cp.size
        return max(b - a for row in borders for a, b in pairwise(row))

    def get_emb_on_this_cp_rank(self, emb: Tensor, seq_dim: int = 0, *, documents: Any = None) -> Tensor:
        """Rows of a table over positions that belong to this rank's tokens: ``[.. L ..] -> [.. S/n ..]``.

        Without documents the table is global (L = S, which must split evenly). With them it is a table over
        positions within a document (L >= :meth:`get_rotary_seq_len`), and rows repeat; documents that differ
        between rows of the batch raise: index the table by ``position_ids(..., restart=True)`` then.

        Args:
            emb: for example rotary angles ``[L, 1, 1, R]``, as Megatron makes them, or cosines ``[L, R]``.
        """
        seq_dim = checked_dim(emb, seq_dim)
        given = self.cp.facts.documents if documents is None else self._with_padding(masks.documents_table(documents))
        if given is None:
            return self.dispatch(emb, seq_dim)
        at = self.position_ids(int(given[0, -1]), restart=True, documents=given)
        if at.ndim > 1:
            raise ValueError(
                f"documents differ between the {len(at)} rows of the batch, so that one table has no one share: index "
                "it with position_ids(..., restart=True), or use apply_rotary_pos_emb"
            )
        return rotary.rows_of(emb, at, seq_dim)

    def apply_rotary_pos_emb(
        self,
        tensor: Tensor,
        freqs: Tensor,
        seq_dim: int = 1,
        *,
        interleaved: bool = False,
        mscale: float = 1.0,
        local: bool = False,
        documents: Any = None,
    ) -> Tensor:
        """Rotary position embedding of queries or keys by their true positions, within documents if there are any.

        Args:
            tensor: this rank's ``[.. S/n .., D]``, ``[B, S/n, H, D]`` say; the batch is dimension 0, or 1 if the
                sequence is dimension 0.
            freqs: angles of positions, ``[L, R]`` or ``[L, 1, 1, R]``, R <= D even, each angle twice (in halves; or
                next to each other if ``interleaved``); L >= :meth:`get_rotary_seq_len`. Columns from R on stay.
                For many layers take the rows once, with :meth:`get_emb_on_this_cp_rank` and ``local=True``.
            interleaved: pairs are neighbours, not i and i + R/2.
            mscale: multiplies cosine and sine (YaRN).
            local: ``freqs`` has this rank's rows already (:meth:`get_emb_on_this_cp_rank`).

        Returns:
            The rotated tensor, of the same shape and dtype. Differentiable in ``tensor``.

        Source: RoPE, arXiv 2104.09864; argument conventions of Megatron-LM's ``apply_rotary_pos_emb``.
        """
        seq_dim, here = checked_dim(tensor, seq_dim), tensor.shape[seq_dim]
        if freqs.numel() != freqs.shape[0] * freqs.shape[-1]:
            raise ValueError(f"freqs has shape {tuple(freqs.shape)}: pass angles [L, R], or with ones between")
        table = freqs.reshape(freqs.shape[0], freqs.shape[-1])
        if local:
            if len(table) != here:
                raise ValueError(f"freqs has {len(table)} rows, but tensor {here} local positions: local=False?")
            angles = table[None]
        else:
            length = here * self.cp.size
            borders = self._table(documents, length, tensor, seq_dim)
            at = self.position_ids(length, restart=borders is not None, documents=borders)
            angles = rotary.rows_of(table, at, 0).view(*(at if at.ndim > 1 else at[None]).shape, -1)
        return rotary.rotate(tensor, angles, seq_dim, interleaved, mscale)

    # ------------------------------------------------------------------ forward and loss

    @contextmanager
    def documents(self, cu_seqlens: Any = None, *, document_ids: Any = None) -> Iterator[Tensor | None]:
        """For the enclosed forward the sequence is packed documents: only positions of one document see
        each other, in every styled module on this mesh.

        Args:
            cu_seqlens: cumulative lengths ``[0, ..., S]`` over *global* positions, for every batch row
                (list or tensor ``[m]``) or one list per row. Any lengths, borders anywhere. If S does not split
                evenly over the ranks, its padding becomes one more document (``[0, S]``: a padded sequence).
                Or what :meth:`get_batch_on_this_cp_rank` returned: the documents and padding of that batch, if any.
            document_ids: instead, ``[B, S]``: the document of every global position.

        Yields:
            The documents as a CPU table ``[1 or B, m]``, to be passed on explicitly (``documents=`` of a
            styled module) where the block cannot be around the forward (a pipeline), or where a recompute is not
            by torch's own activation checkpointing, which remembers the documents of its forward.
        """
        if isinstance(cu_seqlens, LocalBatch):
            table = cu_seqlens.documents
        else:
            table = masks.documents_table(cu_seqlens, document_ids)  # None: a sequence without documents
            table = None if table is None else self._with_padding(table)
        facts, before = self.cp.facts, self.cp.facts.documents
        facts.documents = table
        try:
            yield table
        finally:
            facts.documents = before

    def core_attn(self, attn: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run an attention function or module on this rank's q, k, v under the handler's style, without a plan.

        ``attn(q, k, v, *args, **kwargs)`` calls attention as a module under :class:`ContextParallel` would: with
        pure Ulysses any kernel, else ``F.scaled_dot_product_attention`` or another call that is routed.

        Args:
            seq_dim, head_dim: (keywords, taken out of ``kwargs``) where sequence and heads are, if it is not where
                the style says. Everything else is passed on; ``documents=`` is the styled module's own argument.

        All ranks of the mesh make the first call of each kind together: it may create process groups.
        """
        if self.style is None:
            raise ValueError(
                f"core_attn needs to know how attention runs, but this handler was made with layout {self.layout!r} "
                "only: pass it a ContextParallel style"
            )
        dims = kwargs.pop("seq_dim", self.style.seq_dim), kwargs.pop("head_dim", self.style.head_dim)
        if (self.mesh, *dims) not in self._cores:
            ContextParallel(*dims)  # checks them
            style = copy.copy(self.style)
            style.seq_dim, style.head_dim = dims
            style.qkv_indices, style.qkv_kwarg_names = (0, 1, 2), ()
            self._cores[(self.mesh, *dims)] = parallelize_module(_Core(), self.mesh, style)
        return self._cores[(self.mesh, *dims)](q, k, v, attn, *args, **kwargs)

    def mean_loss(
        self,
        losses: Tensor,
        labels: Tensor | None = None,
        *,
        ignore_index: int = -100,
        mask: Tensor | None = None,
        mesh: DeviceMesh | None = None,
        gradients: str = "mean",
    ) -> Tensor:
        """The mean loss over the tokens of all ranks: the same value on each, and gradients that, once reduced over
        the ranks, are those of that mean on one device, however many tokens count on which rank.

        A mean per rank averaged over the ranks is another number if ranks have different numbers of valid tokens,
        and a sum comes out divided by the number of ranks.

        Args:
            losses: losses of this rank's tokens, ``[B, S/n]`` (``reduction="none"``), or logits ``[B, S/n, V]`` with
                ``labels``. Half precision is added up in fp32.
            labels: ``[B, S/n]``, already shifted; positions with ``ignore_index`` do not count.
            mask: ``[B, S/n]``, bool or weights: a weighted mean.
            mesh: the mesh over which gradients are reduced, of any number of dimensions, if that is more than the
                cp mesh: with data parallelism ``world["dp", "cp"]``, or the flattened mesh of FSDP. The mean is
                over its ranks. The cp ranks must be in it.
            gradients: ``"mean"`` if they are averaged afterwards (DDP, FSDP), ``"sum"`` if they are added up.

        Returns:
            A 0-D tensor, fp32 or fp64: the mean of this call's tokens (with gradient accumulation, of one
            micro-batch). One small communication per mesh dimension. If no token counts anywhere, 0 without gradients.
        """
        if mesh is not None and not set(self.mesh.mesh.flatten().tolist()) <= set(mesh.mesh.flatten().tolist()):
            raise ValueError(
                f"mesh of ranks {mesh.mesh.tolist()} does not contain the cp ranks {self.mesh.mesh.tolist()}: pass the "
                'mesh over which gradients are reduced, data and context parallel together, like world["dp", "cp"]'
            )
        whole = self.mesh if mesh is None else mesh
        return _losses.mean_loss(losses, labels, whole, ignore_index=ignore_index, mask=mask, gradients=gradients)


class _Core(nn.Module):
    """What the style is applied to: it has no attention of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return attn(q, k, v, *args, **kwargs)


class _Following(ContextParallelHandler):
    """The handler of wherever a model runs now."""

    def __init__(self, model: nn.Module) -> None:
        owners = bindings(model)
        if not owners:
            raise ValueError(
                f"no module of {type(model).__name__} runs under ContextParallel: apply a plan with "
                "parallelize_module first, or make the handler of a mesh and a style"
            )
        self._owner = owners[0]
        super().__init__(self._owner.active.mesh, style_of(self._owner))

    @property
    def mesh(self) -> DeviceMesh:
        return self._owner.active.mesh

    @property
    def cp(self) -> CPMesh:
        return self._owner.active.views[0]

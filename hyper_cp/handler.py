"""ContextParallelHandler: splits batches over a cp mesh, gathers results, and computes positions and losses."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from ._torch import checkpoint
from ._torch.compiling import is_compiling
from .data import loss, rotary
from .data.batch import LocalBatch, batch_of, read_batch, record_entries, refuse_other_split
from .data.collectives import by_rank
from .data.head import Logits, log_probs, token_losses
from .data.loader import local_batches
from .data.pooling import pool, refuse_sequence_first, warn_of_pooled
from .data.sharding import Shares, checked_dim, checked_length, documents_for, padded_table, pads_to, resolve_layout
from .data.uncounted import without_padding
from .mesh.agreement import digest
from .mesh.arguments import check_type, is_int
from .mesh.cp_mesh import CPMesh
from .mesh.split import Split
from .module.mesh_binding import StyledMesh, bindings, swapped
from .module.thread_stack import of_this_thread
from .ops import max_logits
from .ops.differentiable import refuse_dtensor
from .schedule import layout as layouts
from .schedule.documents import documents_table, packed_of, tokens_of
from .style import ContextParallel, style_of


class ContextParallelHandler(Shares):
    """Shards batches for a cp mesh and gathers results, in the layout its style uses.

    Args:
        mesh: the cp mesh (1-D, or 2-D ``("ring", "ulysses")``).
        style: the :class:`ContextParallel` of the model's attention, the same object: data and attention then have
            one layout. (If you pass another style or a layout's name, its layout must be the model's: nothing compares
            the two.)

    All ranks of the mesh must hold the same global tensors. S is the global length of the sequence, n is the number of
    ranks, and S/n is the local length. Methods that depend on packed documents use those of the enclosing
    :meth:`documents` block, or their argument ``documents`` (cumulative lengths over global positions).

    Source: the interface is that of Megatron-LM's context-parallel handler (its pull request 2749). Calls
    with Megatron's keywords, such as ``dispatch(seq_dim=, tensor=)``, work unchanged.
    """

    def __init__(self, mesh: DeviceMesh, style: ContextParallel | str) -> None:
        names = ", ".join(map(repr, layouts.LAYOUTS))
        todo = f"Pass the ContextParallel style of the model, or the name of a layout: {names}"
        check_type("style", style, (ContextParallel, str), f"It says which positions each rank holds. {todo}")
        self.style = None if isinstance(style, str) else style
        settings = (style, False) if isinstance(style, str) else (style.mode.layout, style.mode.load_balance)
        super().__init__(mesh, *settings)
        self.style_of_model = self.style
        self._cores: dict[Any, nn.Module] = {}
        self.of_block: threading.Thread | None = None
        """The thread of the ``context_parallel_mesh`` block that has yielded this handler; None: none has."""

    @property
    def cp(self) -> CPMesh:
        """The mesh seen as ring x ulysses; ``RuntimeError`` while the style's model runs on another mesh."""
        blocks = swapped.get(self.style, ()) if self.style is not None else ()
        away = [handler for handler in blocks if of_this_thread(handler.of_block)]
        # The handler of a block that has ended is refused in another one also where the two have the same mesh, since
        # other ranks of the job may have changed theirs: all of them raise. A recompute is on the mesh of its forward.
        elsewhere = away and (away[-1].mesh != self.mesh or (self.of_block and self not in away))
        if elsewhere and (is_compiling() or not checkpoint.in_recompute()):
            raise RuntimeError(
                "the model of this handler's style runs on another cp mesh (context_parallel_mesh). Data would be "
                "split over other ranks than attention. Use the handler that the block yields, or one that follows "
                "the model, ContextParallelHandler.of(model)"
            )
        return self.whole_cp  # super().cp would break graphs

    @classmethod
    def of(cls, model: nn.Module) -> ContextParallelHandler:
        """A handler for the mesh and layout of a model's styled modules.

        It follows them to another mesh: inside a :func:`context_parallel_mesh` block it works on the mesh of the block.
        """
        return _ModelHandler(model)

    def get_batch_on_this_cp_rank(
        self,
        batch: Any,
        seq_dims: int | Mapping[Any, int | None] | Sequence[int | None] = 1,
        *,
        shift_labels: bool = False,
        ignore_index: int = -100,
        pad_values: Mapping[Any, float] | None = None,
        debug: bool = False,
        labels_cross_documents: bool = False,
        mtp_depth: int = 0,
    ) -> Any:
        """Return this rank's share of a whole batch, after all that must happen before it is sharded::

            batch = handler.get_batch_on_this_cp_rank(batch, shift_labels=True)
            with handler.documents(batch):
                logits = model(batch["input_ids"], batch["position_ids"])
                loss = handler.mean_loss(logits, batch["shift_labels"])
                loss.backward()

        Args:
            batch: a dict, list or tuple; the same on all ranks of the mesh. Tensors that do not have the sequence
                dimension, and everything that is not a tensor, pass through.
            seq_dims: the sequence dimension of all tensors; or a dict that names it for some (None: the entry
                passes through whole; entries that are not named have 1); or for a list or tuple one int or None each.
                Rows are dimension 0, or 1 if the sequence is 0: codebooks come behind them, ``[B, C, S]``.
            shift_labels: shift entry ``labels`` over the *whole* sequence and rename it ``shift_labels``: each token
                gets the label of the next one, the last token of the sequence and of each document ``ignore_index``.
                Nothing else is shifted: a mask or weights of tokens (``loss_mask``) would weigh the label of the next
                token each. Set labels to ``ignore_index`` instead, or shift it before the split.
            ignore_index: the label of tokens that do not count, with which labels are also padded.
            pad_values: the value with which each other entry is padded if S does not split evenly. Default: 0, and
                ``ignore_index`` for integers whose name ends in ``labels`` or ``targets``.
            debug: compare the batches of the ranks by hash (a small communication, and every entry is read on the
                host) and raise on all ranks, with the names of the entries that differ.
            labels_cross_documents: with ``shift_labels``, the last token of a document (of its padding, if there is
                any) gets the label of the first of the next one, as in transformers' own loss. Default False: it gets
                ``ignore_index``.
            mtp_depth: with ``shift_labels``, for multi-token prediction also the entries ``shift_labels_1``,
                ``shift_labels_2``, ... up to this depth, and the tokens that go with them (``input_ids_1``, ..., as the
                entry of the tokens is called). A position has in ``shift_labels_k`` the label k + 1 positions on, and
                in ``input_ids_k`` the token k on, over the whole sequence. Behind the end of the sequence or the
                document (see ``labels_cross_documents``), and for padding, labels are ``ignore_index``.

        A dict may also contain:

        * ``cu_seqlens`` (or ``documents``, or Megatron's, FlashAttention's, Hugging Face's and torchtitan's names for
          it), ``document_ids`` or ``seq_idx [B, S]`` (negative: padding): packed documents. They are removed: they have
          no meaning for a share. Other names that seem to mean documents raise; ``seq_dims={name: ...}`` says that one
          does not.
        * ``cu_seqlens_padded`` beside ``cu_seqlens`` (or ``cu_seqlens`` beside ``cu_seqlens_unpadded``): each document
          has padding behind it, up to where the next one begins. The padding becomes documents.
        * ``attention_mask [B, S]`` of 0 and 1: padding before or after the tokens of each row. It becomes
          documents, which keep tokens and padding apart over the whole sequence; the entry that is returned is all
          ones. Labels of padding are yours, as on one device: set them to ``ignore_index``. (The padding before a
          row's first token has that token's label, which counts unless you set it too.) Masks of other dimensions pass
          through whole, as the engine expects them, and are padded with the batch.
        * ``position_ids``; made if missing, ``[B, S/n]`` int64 (``[S/n]`` if tokens are). They restart in packed
          documents, not behind padding.

        Returns:
            The same kind of container, with attributes ``documents`` (of the padded sequence, or None), ``length``
            (S before padding, for :meth:`combine`) and ``padded_length``.

        Raises:
            ValueError, TypeError: if the batch is a share already, or if an entry does not fit; the error names it.
        """
        return read_batch(
            self,
            batch,
            seq_dims,
            shift_labels,
            ignore_index=ignore_index,
            pad_values=pad_values,
            debug=debug,
            labels_cross_documents=labels_cross_documents,
            mtp_depth=mtp_depth,
        ).split()

    def loader(
        self, batches: Iterable[Any], *, accumulate: int = 1, mesh: DeviceMesh | None = None, **options: Any
    ) -> Iterator[Any]:
        """Yield this rank's shares of the whole batches of a data loader, on the device of the mesh::

            for batch in handler.loader(loader, shift_labels=True, accumulate=4):
                with handler.documents(batch):
                    logits = model(batch["tokens"], batch["position_ids"])
                    (handler.mean_loss(logits, batch["shift_labels"]) * batch.weight).backward()
                if batch.last:
                    optimizer.step()
                    optimizer.zero_grad()

        Args:
            batches: yields the same whole batches on every rank of the cp mesh: give a ``DistributedSampler`` the
                data-parallel rank and size. ``accumulate`` of them are read before the first is split, so a loader
                that fills one buffer again and again must return copies.
            accumulate: the number of micro-batches before a step of the optimizer. The gradients are then those of the
                mean over the labels of all of them, however many each has. (An epoch may end with fewer of them.)
            mesh: the mesh of ``mean_loss(mesh=)``, over whose ranks labels are then counted: one small communication
                for every ``accumulate`` micro-batches. It is needed with accumulation over data-parallel ranks;
                ``mean_loss`` raises if it has another one. Iterate then in the thread that trains: transfers of two
                threads meet in another order on each rank.
            options: the arguments of :meth:`get_batch_on_this_cp_rank`.

        Yields:
            What :meth:`get_batch_on_this_cp_rank` returns, with attributes ``weight`` (the micro-batch's share of the
            labels; 1.0 without accumulation), ``weights`` (with ``mtp_depth`` also its share of ``shift_labels_1``,
            ``shift_labels_2`` ..., for the loss of each) and ``last`` (True before a step of the optimizer).

        Raises:
            ValueError: with ``accumulate`` for batches without labels; and what :meth:`get_batch_on_this_cp_rank`
                raises.
        """
        read = partial(read_batch, self, **options)
        counted = loss.reduced_mesh(mesh, self.mesh)
        device, depth = torch.device(self.mesh.device_type), options.get("mtp_depth", 0)
        return local_batches(batches, read, device, accumulate, counted, self.cp, depth)

    # ------------------------------------------------------------------ rotary embedding

    def get_rotary_seq_len(self, local: Tensor | int, seq_dim: int = 1, *, documents: Any = None) -> int:
        """Return the number of positions that a rotary table needs: S, or with packed documents, in which positions
        restart, the length of the longest document.

        Args:
            local: this rank's share of the sequence, or its length S/n.

        Source: Megatron-LM's function of that name: the local length times the ranks, or ``max_seqlen``.
        """
        if isinstance(local, Tensor):
            length = local.shape[checked_dim(local, seq_dim, name="local")]
        else:
            length = checked_length("local", local)
        table = documents_for(self, documents, length * self.cp.size)
        if table is None:
            return length * self.cp.size
        return max((b - a for row in packed_of(table).rows for a, b in pairwise(row)), default=0)

    def get_emb_on_this_cp_rank(self, emb: Tensor, seq_dim: int = 0, *, documents: Any = None) -> Tensor:
        """Return the rows of a table over positions for this rank's tokens: ``[.. L ..] -> [.. S/n ..]``.

        Without documents the table is global (L = S, which must split evenly). With them it is a table over
        positions within a document (L >= :meth:`get_rotary_seq_len`), and rows repeat. Documents that differ
        between rows of the batch raise: index the table by ``position_ids(..., restart=True)`` then. In the block of a
        batch, padding of its ``attention_mask`` is no document: its positions are those of ``position_ids`` there.

        Args:
            emb: the table, for example rotary angles ``[L, 1, 1, R]``, as Megatron makes them, or cosines ``[L, R]``.
            seq_dim: the dimension of positions in ``emb``.
            documents: as for :meth:`documents`; default: those of the enclosing block.

        Raises:
            ValueError: if the table has too few positions, or if documents differ between rows of the batch.
        """
        seq_dim = checked_dim(emb, seq_dim, name="emb")
        given = self.cp.batch.documents if documents is None else padded_table(self, documents)
        if given is None:
            resolve_layout(self, emb.shape[seq_dim], None, f"emb.shape[{seq_dim}]")  # its error names the argument
            return self.dispatch(emb, seq_dim)
        at = self.position_ids(int(given[0, -1]), restart=True, documents=given)
        if at.ndim > 1:
            raise ValueError(
                f"documents differ between the {len(at)} rows of the batch. Positions restart at other tokens in each "
                "row, and one share of a table serves all rows. Index it with position_ids(..., restart=True), or use "
                "apply_rotary_pos_emb"
            )
        return rotary.rows_of(emb, at, seq_dim, "emb")

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
        """Apply rotary position embedding to queries or keys at their true positions, within documents if there are
        any.

        Args:
            tensor: this rank's queries or keys ``[.. S/n .., D]``, ``[B, S/n, H, D]`` say; the batch is dimension 0, or
                1 if the sequence is dimension 0.
            freqs: angles of positions, ``[L, R]`` or ``[L, 1, 1, R]``, R <= D even, each angle twice (in halves; or
                next to each other if ``interleaved``); L >= :meth:`get_rotary_seq_len`. Columns from R on do not
                change. For many layers take the rows once, with :meth:`get_emb_on_this_cp_rank` and ``local=True``.
            interleaved: True if neighbours are rotated together, False if i and i + R/2 are.
            mscale: the factor of cosine and sine (YaRN).
            local: True if ``freqs`` has this rank's rows already (:meth:`get_emb_on_this_cp_rank`).

        Returns:
            The rotated tensor, of the same shape and dtype. It is differentiable in ``tensor``.

        Raises:
            ValueError, TypeError: if ``freqs`` has too few positions, an odd number of angles or more than D; if it is
                complex; on the CPU, if it has less than D and not each of them twice.

        Source: RoPE, arXiv 2104.09864; argument conventions of Megatron-LM's ``apply_rotary_pos_emb``.
        """
        seq_dim, here = checked_dim(tensor, seq_dim), tensor.shape[seq_dim]
        table = rotary.checked_table(tensor, freqs, seq_dim, interleaved, mscale)
        if local:
            if len(table) != here:
                raise ValueError(
                    f"freqs has {len(table)} rows, and tensor has {here} local positions (local=True). Each position "
                    "needs the row of its angles. Pass this rank's rows, or local=False with the whole table"
                )
            angles = table[None]
        else:
            length = here * self.cp.size
            given = documents_for(self, documents, length, tensor, seq_dim)
            at = self.position_ids(length, restart=given is not None, documents=given)
            angles = rotary.rows_of(table, at, 0, "freqs").view(*(at if at.ndim > 1 else at[None]).shape, -1)
        return rotary.rotate(tensor, angles, seq_dim, interleaved, float(mscale))

    # ------------------------------------------------------------------ forward and loss

    def seed_dropout(self, seed: int) -> None:
        """Give PyTorch's generators (CPU and device) another seed on each cp rank, so that ``nn.Dropout`` and other
        random numbers in the model differ between the positions that ranks hold.

        With one seed on all ranks, position i of every share would have the same mask. Call it once, after the model
        is made and the data loaders have generators of their own: both need a seed that is the same on all cp ranks.
        The dropout of attention weights never draws one mask on two ranks, with either seed.

        Args:
            seed: an int that is the same on the ranks of the mesh, and another one for each data-parallel rank.

        Example::

            >>> handler.seed_dropout(1234)
        """
        if not is_int(seed):
            raise TypeError(f"seed={seed!r} must be an int. Each rank makes its own seed of it. Pass one")
        torch.manual_seed(int(digest(f"{seed}/{self.cp.rank}".encode()), 16) >> 1)

    @contextmanager
    def documents(self, cu_seqlens: Any = None, *, document_ids: Any = None) -> Iterator[Tensor | None]:
        """Treat the sequence of the enclosed forward as packed documents: only positions of one document see
        each other, in every styled module on this mesh.

        The block holds in the thread that enters it, so that another one may prepare the next batch, and it describes
        one sequence: causal and non-causal attention in one block raise. Enter a block of its own batch around the
        encoder, and one around the decoder. A block whose documents nothing has read warns when it ends.

        Args:
            cu_seqlens: cumulative lengths ``[0, ..., S]`` over *global* positions, for every batch row
                (list or tensor ``[m]``) or one list per row. Any lengths, boundaries anywhere. If S does not split
                evenly over the ranks, its padding becomes one more document (``[0, S]``: a padded sequence).
                Or a batch from :meth:`get_batch_on_this_cp_rank`: its documents and padding, if any.
            document_ids: instead, ``[B, S]``: the document of every global position; padding has negative ones.

        Yields:
            The documents as a CPU table ``[1 or B, m]``. Pass it on explicitly (``documents=`` of a styled module)
            if the block cannot be around the forward (a pipeline), or if activation checkpointing is not torch's own,
            which records the documents of its forward.
        """
        batch = cu_seqlens if isinstance(cu_seqlens, LocalBatch) else batch_of(self, cu_seqlens)
        copied, ends, filled = batch is cu_seqlens and not batch.padded_length, (), None
        refuse_other_split(self, batch)
        if batch.padded_length:
            record_entries(self.cp, batch)
            table = batch.documents if batch is cu_seqlens else cu_seqlens
        elif copied or isinstance(cu_seqlens, Mapping):  # type(batch)({...}) has the entries only
            raise TypeError(
                f"documents got a {type(cu_seqlens).__name__} with the entries {list(cu_seqlens)}, which carries no "
                "documents. Pass what get_batch_on_this_cp_rank returned, or (in the process that has split it) its "
                "attribute documents if the batch was copied, to a device say. A batch of prepare_batch needs no block"
            )
        else:
            table = documents_table(cu_seqlens, document_ids)  # None: a sequence without documents
            if table is not None:
                if not is_compiling():
                    ends = tuple(table[:, -1].tolist())
                    if table is cu_seqlens and tokens_of(table) is None:
                        table = table.clone()  # the caller's own buffer, which may be written to before a recompute
                table = padded_table(self, table)
                filled = max(table[:, -1].tolist()) if ends else None
        state = self.cp.batch
        length, padded = (batch.length, batch.padded_length) if batch.padded_length else (None, None)
        of_batch = filled, batch.form, batch.counted, batch.of_samples
        split = Split(self.layout, batch.ranks or self.cp.size, length, padded, ends, *of_batch)
        block = state.enter(table, split, batch.tokens if is_compiling() else tokens_of(table))
        block.ran = batch.ran
        try:
            yield table
        finally:
            state.leave(block)
            batch.ran = block.ran
        if not (block.used or is_compiling()):
            warnings.warn(
                "a handler.documents block has ended, and nothing in it has read its documents. Attention that ran "
                "in it was not context-parallel on this mesh, and saw across documents and padding. Apply "
                "ContextParallel to the model (a mesh of one rank honours documents too, as a baseline), or leave the "
                "block out",
                stacklevel=3,
            )

    def core_attn(self, attn: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run an attention function or module on this rank's q, k, v under the handler's style, without a plan.

        ``attn(q, k, v, *args, **kwargs)`` calls attention as a module under :class:`ContextParallel` would: with
        pure Ulysses any kernel, else ``F.scaled_dot_product_attention`` or another call that is routed.

        Args:
            seq_dim, head_dim: (keywords, removed from ``kwargs``) the dimensions of sequence and heads, if they are
                not the style's. Everything else is passed on; ``documents=`` is the styled module's own argument.

        All ranks of the mesh make the first call of each kind together: it may create process groups.

        Raises:
            ValueError, TypeError: if the handler was made without a style, or ``attn`` cannot be called.
            RuntimeError: while the style's model runs on another mesh (:func:`context_parallel_mesh`).
        """
        if self.style is None:
            raise ValueError(
                f"this handler was made with layout {self.layout!r} only, and core_attn was called. A layout does not "
                "say how attention runs, and a style does. Make the handler with a ContextParallel style"
            )
        check_type("attn", attn, Callable, "It is called with q, k, v. Pass an attention function or module")
        dims = kwargs.pop("seq_dim", self.style.seq_dim), kwargs.pop("head_dim", self.style.head_dim)
        ContextParallel(*dims)  # raises if they are wrong
        key = self.cp.key, self.mesh, *dims  # it raises while the model runs on another mesh
        if key not in self._cores:
            style = copy.copy(self.style)
            style.seq_dim, style.head_dim = dims
            style.qkv_indices, style.qkv_kwarg_names = (0, 1, 2), ()
            self._cores[key] = parallelize_module(_Core(), self.mesh, style)
        return self._cores[key](q, k, v, attn, *args, **kwargs)

    def mean_loss(
        self,
        losses: Tensor,
        labels: Tensor | None = None,
        *,
        ignore_index: int = -100,
        mask: Tensor | None = None,
        mesh: DeviceMesh | None = None,
        gradients: str = "mean",
        head: nn.Module | Tensor | None = None,
        softcap: float | None = None,
        scale: float = 1.0,
        chunk: int | None = None,
        elsewhere: bool = False,
    ) -> Tensor:
        """Return the mean loss over the tokens of all ranks, the same value on each.

        Its gradients, once reduced over the ranks, are those of that mean on one device, however many tokens count on
        which rank. (A mean per rank averaged over the ranks is another number if ranks have different numbers of valid
        tokens, and DDP or FSDP divide a sum by the number of ranks.)

        Args:
            losses: losses of this rank's tokens, ``[B, S/n]`` (``reduction="none"``), or logits ``[B, S/n, V]`` with
                ``labels``, or with ``head`` hidden states ``[B, S/n, width]``. Half precision is added up in fp32.
            labels: ``[B, S/n]``, already shifted; positions with ``ignore_index`` do not count (without labels all do).
            mask: ``[B, S/n]``, bool or weights: a weighted mean. The entry ``attention_mask`` of a batch stands for the
                mask that the whole batch had, and so do copies of it and masks of yours in the block of the batch.
                (Copies hold ones: behind the block, ``dispatch`` the mask.) Other entries are taken as they are; a copy
                of one (``.to(dtype)``) counts as a mask of yours.
            mesh: the mesh over which gradients are reduced, of any number of dimensions, if that is more than the
                cp mesh: with data parallelism ``world["dp", "cp"]``, or the flattened mesh of FSDP. The mean is
                over its ranks. The cp ranks must be in it.
            gradients: keep ``"mean"`` under DDP or FSDP, which average them; use ``"sum"`` if you all-reduce them with
                SUM.
            head: the ``nn.Linear`` that makes logits of hidden states, or its weight. Logits are then made for a chunk
                of tokens at a time, and again in backward. The layer's hooks run once (FSDP2, ``ColwiseParallel``).
            softcap, scale: logits are ``softcap * tanh(scale * head(hidden) / softcap)``; without softcap they are
                ``scale * head(hidden)``.
            chunk: the number of tokens whose logits exist at once; default: as many as need 256 MiB.
            elsewhere: True if the losses, logits or hidden states come from code that does not run attention with this
                library.

        Returns:
            A 0-D tensor, fp32 or fp64: the mean of this call's tokens (with gradient accumulation, of one
            micro-batch). It takes one small communication per mesh dimension. If no token counts anywhere, it is 0
            without gradients.

        Raises:
            ValueError, TypeError: for shapes that do not fit, labels shifted after sharding, or another mesh (than that
                of the handler, or with accumulation that of :meth:`loader`).
            RuntimeError: in the :meth:`documents` block of a batch in which no styled module has run, or, with the
                handler of a style, if none has ever run on this mesh. ``elsewhere=True``: it ran in other code.

        Example::

            >>> handler.mean_loss(torch.tensor([[1.0, 3.0]])).item()  # losses of this rank's tokens
            2.0
        """
        refuse_dtensor("labels", labels)
        refuse_dtensor("mask", mask)
        whole, counted = loss.reduced_mesh(mesh, self.mesh), None
        missing, check_ranks = loss.check_tokens(self.cp, losses, labels, mask, self.mesh, whole)
        if getattr(losses, "requires_grad", False) and not is_compiling():
            counted = self.cp.batch.weighed
            loss.refuse_other_ranks(counted, whole)
        loss.warn_of_sum(self.cp, gradients)
        warn_of_pooled(self.cp, "mean_loss", losses, losses if labels is None else labels)
        if not elsewhere:
            loss.refuse_idle(self.cp, self.style is not None)
        logits = Logits(ignore_index, softcap, scale, chunk)
        labels, mask = without_padding(self.cp, self.layout, labels, mask, ignore_index)

        def per_token(given: Tensor) -> Tensor:
            return token_losses(given, labels, head, logits)

        options: Any = {"ignore_index": ignore_index, "mask": mask, "gradients": gradients, "missing": missing}
        if not is_compiling() and self.cp.batch.verified:
            options["copies"] = self.cp.batch.copies(loss.ranks_of(whole))
        check = None
        if counted and counted.numbers:
            of_rows = isinstance(labels, Tensor) and labels.ndim == 1
            check = partial(loss.warn_of_counts, self.cp.batch, counted, self.cp.size if of_rows else 1)
        return loss.mean_loss(losses, per_token, labels, whole, check=check, check_ranks=check_ranks, **options)

    def max_logits(self, model: nn.Module, *, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
        """Return the largest attention logit of each head of each module since the last call of this method, for
        QK-clip.

        Styles with ``max_logits=True`` (see :class:`ContextParallel`, and :func:`hyper_cp.ops.attention` for what
        counts) keep it over the forwards in which autograd is on: micro-batches count together, evaluations under
        ``torch.no_grad`` do not. With tensor parallelism heads are those of this rank.

        Args:
            mesh: the mesh over whose ranks the maximum is taken, if that is more than the cp mesh: with data
                parallelism ``world["dp", "cp"]``. The cp ranks must be in it, and each must have run the same modules.

        Returns:
            ``[H]`` in fp32 (fp64 for fp64) by the names of modules in ``model``, the same on every rank of ``mesh``;
            -inf for heads that have seen nothing. Two small communications for all modules together.

        Raises:
            RuntimeError: if no module has kept any, or if ranks have kept those of other modules.

        Example::

            style = ContextParallel(qkv_indices=None, ulysses_degree=1, kv_exchange="ring", max_logits=True)
            ...  # forward, backward, optimizer.step()
            for name, largest in handler.max_logits(model).items():
                shrink = (100 / largest).clamp(0, 1).sqrt()  # [H], for the rows of W_q and W_k of each head

        Source: QK-clip, Kimi K2 (arXiv 2507.20534); ``max_logit`` of TransformerEngine and MagiAttention.
        """
        whole, kept = loss.reduced_mesh(mesh, self.mesh), max_logits.take(model)
        heads = {name: len(x) for name, x in kept.items()}
        counts = by_rank(
            whole, torch.tensor([int(digest(repr(heads).encode()), 16) >> 1, len(kept)], device=self.mesh.device_type)
        )
        if not kept or bool((counts != counts[0]).any()):
            raise RuntimeError(
                f"modules have kept largest logits on the ranks of the mesh: {counts[:, 1].tolist()}. Each rank keeps "
                "those of the same modules, in forwards with gradients, and reading forgets them. Pass max_logits=True "
                "to the style, run a step, and call this on every rank"
            )
        largest = by_rank(whole, torch.cat([*kept.values()])).amax(0)
        return dict(zip(kept, largest.split([*heads.values()]), strict=True))

    def log_probs(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        head: nn.Module | Tensor,
        ignore_index: int = -100,
        softcap: float | None = None,
        scale: float = 1.0,
        chunk: int | None = None,
        gather: bool = False,
        length: int | None = None,
        gradients: str | None = "unknown",
    ) -> Tensor:
        """Return the log-probability of each label, without whole logits.

        It is differentiable. Arguments are those of :meth:`mean_loss`. A temperature T is ``scale=1/T``.

        Args:
            gather: return those of the whole sequence on every rank, ``[B, S]`` in global order (see :meth:`combine`).
            length: S before padding. Default: the length of the batch in whose block this is called; elsewhere padding
                comes along.
            gradients: with ``gather``, the reduction of parameters' gradients that follows, as for :meth:`combine`:
                ``"mean"`` under DDP or FSDP.

        Returns:
            ``[B, S/n]``, or ``[B, S]`` with ``gather``, in fp32 or fp64; 0 where a label is ``ignore_index``, and at
            padding of the split, as :meth:`mean_loss` leaves it out.

        Raises:
            ValueError, TypeError: for shapes and labels that do not fit the head, and for ``length`` or ``gradients``
                without ``gather``.
        """
        refuse_dtensor("labels", labels)
        loss.check_share(self.cp, labels)
        if length is not None and not gather:
            raise ValueError(f"length={length} without gather=True. A share has no padding to cut off. Leave it out")
        if gradients != "unknown" and not gather:
            raise ValueError(
                f"gradients={gradients!r} without gather=True. Log-probabilities of a share have the gradients of that "
                "share. Leave it out, and pass it to mean_loss"
            )
        if gather and length is None and not is_compiling():
            refuse_sequence_first(self, "labels", labels)
        labels, _ = without_padding(self.cp, self.layout, labels, None, ignore_index)
        found = log_probs(hidden, labels, head, Logits(ignore_index, softcap, scale, chunk))
        if gather and length is None:
            known = self.cp.batch.length
            length = known if known and pads_to(self, known, found.shape[-1] * self.cp.size) else None
        return self.combine(found, -1, length=length, gradients=gradients) if gather else found

    def pool(
        self,
        x: Tensor,
        reduce: str = "mean",
        *,
        mask: Tensor | None = None,
        documents: Any = None,
        length: int | None = None,
        gradients: str | None = "unknown",
    ) -> Tensor:
        """Return one value for each document, the same on every rank: the sum, the mean or the last of its tokens'
        values, ``[B, S/n, ...] -> [B, D, ...]`` in fp32 or fp64, with D documents in a row (1 without documents). Rows
        that have fewer than others are filled up with 0.

        Only these values travel, not the tokens. Sums of :meth:`log_probs` are the log-probabilities of sequences, and
        the last of a value head's outputs are rewards. ``torch.compile`` breaks its graph here. ::

            ratio = handler.pool(handler.log_probs(hidden, labels, head=head) - reference, "sum", gradients="mean")
            rewards = handler.pool(value_head(hidden).squeeze(2), "last", mask=attended, gradients="mean")

        Args:
            x: values of this rank's tokens, ``[B, S/n]`` or ``[B, S/n, width]``; they get gradients.
            reduce: ``"sum"``, ``"mean"``, or ``"last"``: the token with the highest position.
            mask: ``[B, S/n]``, this rank's share of a mask of 0 and 1: only tokens with 1 count (labels that are not
                ignored, say). A document without any has the value 0. Other numbers are weights, as in
                :meth:`mean_loss`: a weighted sum or mean, or the last token whose weight is not 0. Padding of the block
                that this is called in never counts, also the padding before a row's first token, which has its label.
            documents: as for :meth:`documents`; default: those of the enclosing block. In layouts ``"per_document"``,
                ``"balanced"`` and ``"auto"`` they must be those by which the tokens were placed, as for
                :meth:`combine`. Documents without positions are left out, and so is padding; in the block of a batch
                with padding, other documents than its own need a ``mask``.
            length: S before padding. Default: the length of the documents, or of the batch in whose block this is
                called.
            gradients: the reduction of parameters' gradients that follows, for a loss of which all ranks compute the
                same value, as for :meth:`combine`: ``"mean"`` under DDP or FSDP; ``"sum"`` if they are summed, and the
                loss is divided by the number of ranks. ``"shares"`` if tokens read the result again, so that each rank
                goes on with its part (:meth:`mean_loss` of ratios of sequences, as in GSPO).

        Raises:
            ValueError, TypeError: for shapes that do not fit; for padding that would count; in a layout by documents,
                without documents.

        Example::

            >>> share = handler.dispatch(torch.arange(8.0)[None])
            >>> handler.pool(share, "sum").tolist(), handler.pool(share, "last", documents=[0, 3, 8]).tolist()
            ([[28.0]], [[2.0, 7.0]])

        Source: masked means per sequence of TRL, verl (``agg_loss``) and NeMo-RL, over a split sequence.
        """
        refuse_dtensor("x", x)
        refuse_dtensor("mask", mask)
        options: Any = {"mask": mask, "documents": documents, "length": length, "gradients": gradients}
        return pool(self, x, reduce, **options)


class _Core(nn.Module):
    """The module that the style of :meth:`ContextParallelHandler.core_attn` is applied to: it calls any function."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return attn(q, k, v, *args, **kwargs)


class _ModelHandler(ContextParallelHandler):
    """A handler that reads its mesh from a model's binding at every call; in a recompute by activation checkpointing it
    is that of the forward."""

    def __init__(self, model: nn.Module) -> None:
        found = bindings(model) if isinstance(model, nn.Module) else []
        if not found:
            raise ValueError(
                f"no module of model {type(model).__name__} runs under ContextParallel. The mesh and the layout of the "
                "handler are those of such modules. Apply a plan with parallelize_module first, or make the handler "
                "with a mesh and a style"
            )
        self._binding = found[0]
        super().__init__(self._binding.active.mesh, style_of(self._binding))

    @property
    def _active(self) -> StyledMesh:
        found: StyledMesh
        (found,) = checkpoint.batch_state(self._binding.stack[0], lambda: (self._binding.of_thread(),))
        return found

    @property
    def mesh(self) -> DeviceMesh:
        return self._active.mesh

    @property
    def cp(self) -> CPMesh:
        return self._active.views[0]

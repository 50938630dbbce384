"""get_cp_handler_cls: handler classes for Megatron-LM's ``cp_comm_type``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..data.packing import take_documents
from ..data.sharding import padded_table
from ..handler import ContextParallelHandler
from ..mesh.arguments import check_choice, check_type
from ..mesh.cp_mesh import check_mesh
from ..schedule.documents import read
from ..schedule.layout import by_documents
from ..style import ContextParallel

BACKENDS = (None, "hyper_cp", "transformer_engine", "local")
"""Megatron's choices of an attention library. They change nothing here: attention always runs in this engine."""

_KV_EXCHANGE = {"p2p": "ring", "all_gather": "all_gather", "a2a": "all_gather", "a2a+p2p": "ring"}
COMM_TYPES = tuple(_KV_EXCHANGE)

_FORMATS = {"sbhd": (0, 2), "bshd": (1, 2), "bhsd": (2, 1), "thd": (0, 1)}
"""``qkv_format -> (seq_dim, head_dim)``"""


def get_cp_handler_cls(
    backend: str | None = None, cp_comm_type: str | Sequence[str] = "p2p"
) -> type[ContextParallelHandler]:
    """The handler class for a ``cp_comm_type`` of Megatron-LM's configuration.

    Its instances are ``cls(mesh, qkv_format="sbhd", hierarchical_context_parallel_sizes=None, **options)``:

    * ``mesh``: the cp mesh; from a process group ``DeviceMesh.from_group(group, device_type)``.
    * ``qkv_format``: ``"sbhd"``, ``"bshd"``, ``"bhsd"`` or ``"thd"``: the order of dimensions in q, k, v.
    * ``hierarchical_context_parallel_sizes``: ``[a2a, p2p]``, for ``"a2a+p2p"`` on a 1-D mesh. The ranks of the
      all-to-all are adjacent.
    * ``options``: of :class:`ContextParallel`; the layout is ``"head_tail"``, as in Megatron, unless one is given.

    ============ ====================================================== =============================
    cp_comm_type what travels                                           style
    ============ ====================================================== =============================
    p2p          keys and values around a ring                          ``ulysses_degree=1``, ring
    all_gather   keys and values of all ranks at once                   ``ulysses_degree=1``
    a2a          sequence for heads and back (Ulysses)                  ``ulysses_degree=None``
    a2a+p2p      both, on the two dimensions of the cp mesh             ``ulysses_degree=a2a``, ring
    ============ ====================================================== =============================

    Its ``roll_tensor`` and ``get_batch_on_this_cp_rank`` take Megatron's keywords too; docs/help/migrating.md lists
    what differs by choice. Besides what every handler has, an instance has ``styles``: one :class:`ContextParallel`
    per layer if ``cp_comm_type`` is a list (as in Megatron, one type per layer; all share one layout and batch), else
    one for all; ``style``, which ``core_attn`` uses, is the first. Put them into a plan::

        handler = get_cp_handler_cls(cp_comm_type=["p2p", "a2a"])(mesh)
        plan = {f"decoder.layers.{i}.self_attention.core_attention": s for i, s in enumerate(handler.styles)}
        parallelize_module(model, mesh, plan)

    Args:
        backend: None, ``"hyper_cp"``, or Megatron's ``"transformer_engine"`` or ``"local"``, which change nothing:
            attention runs in this engine, whatever module calls it.
        cp_comm_type: ``"p2p"``, ``"all_gather"``, ``"a2a"`` or ``"a2a+p2p"``; or a list of these, one per layer.

    Raises:
        ValueError: for an unknown backend or type; it lists the known ones.

    Source: Megatron-LM's ``cp_comm_type`` and the factory of its pull request 2749.
    """
    check_choice("backend", backend, BACKENDS, "Each backend runs this library's attention")
    listed = isinstance(cp_comm_type, Sequence) and not isinstance(cp_comm_type, str)
    types: tuple[str, ...] = tuple(cp_comm_type) if listed else (cp_comm_type,)  # type: ignore[assignment]
    for comm_type in types or (cp_comm_type,):
        more = ", or a list of these with one per layer"
        check_choice("cp_comm_type", comm_type, COMM_TYPES, "It says how keys and values travel", more)
    name = "".join(part.title() for part in types[0].replace("+", "_").split("_")) if len(set(types)) == 1 else "Mixed"
    members = {"cp_comm_types": types, "__doc__": _MegatronHandler.__doc__}
    return type(f"{name}ContextParallelHandler", (_MegatronHandler,), members)


class _MegatronHandler(ContextParallelHandler):
    """A handler that makes its styles from Megatron's options; see :func:`get_cp_handler_cls`."""

    cp_comm_types: tuple[str, ...] = ()

    def __init__(
        self,
        mesh: DeviceMesh,
        qkv_format: str = "sbhd",
        hierarchical_context_parallel_sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        check_mesh(mesh)
        check_choice("qkv_format", qkv_format, _FORMATS, "It names the order of the dimensions of q, k and v")
        fixed = [name for name in ("kv_exchange", "ulysses_degree", "seq_dim", "head_dim") if name in options]
        if fixed:
            raise ValueError(
                f"{fixed[0]} is what cp_comm_type, qkv_format and hierarchical_context_parallel_sizes determine. Use "
                "these, or ContextParallelHandler with a ContextParallel style"
            )
        seq_dim, head_dim = _FORMATS[qkv_format]
        options = {"layout": "head_tail", **options}
        styles = {
            comm_type: ContextParallel(
                seq_dim,
                head_dim,
                _degree(comm_type, mesh, hierarchical_context_parallel_sizes),
                kv_exchange=_KV_EXCHANGE[comm_type],
                **options,
            )
            for comm_type in dict.fromkeys(self.cp_comm_types)
        }
        self.styles = tuple(styles[comm_type] for comm_type in self.cp_comm_types)
        super().__init__(mesh, self.styles[0])

    def roll_tensor(  # type: ignore[override]
        self,
        tensor: Tensor | None,
        shifts: int = -1,
        dims: int = -1,
        cp_group: dist.ProcessGroup | None = None,
        packed_seq_params: Any = None,
        return_sum: bool = True,
        *,
        documents: Any = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """:meth:`ContextParallelHandler.roll_tensor` with the arguments of Megatron's function of that name.

        Args:
            tensor: None gives ``(None, None)``.
            cp_group: the process group of the cp mesh, or None, which means the same here.
            packed_seq_params: its ``cu_seqlens_q`` and ``cu_seqlens_q_padded`` are the documents.
            return_sum: False: the second result is None.
        """
        self._check_group(cp_group)
        if tensor is None:
            return None, None
        if packed_seq_params is not None:
            documents = self._documents_of(packed_seq_params, documents)
        rolled, total = super().roll_tensor(tensor, shifts, dims, documents=documents)
        return rolled, total if return_sum else None

    def get_batch_on_this_cp_rank(
        self,
        batch: Any,
        seq_dims: Any = 1,
        *,
        cp_group: dist.ProcessGroup | None = None,
        is_hybrid_cp: bool = False,
        hybrid_cp_group_func: Any = None,
        use_per_sequence_balancing: bool = False,
        **options: Any,
    ) -> Any:
        """:meth:`ContextParallelHandler.get_batch_on_this_cp_rank` with the keywords of Megatron's function of that
        name.

        Args:
            cp_group: the process group of the cp mesh, or None, which means the same here.
            is_hybrid_cp: every batch has a number of ranks of its own, its entry ``local_cp_size``. Here it must be
                that of the cp mesh, see :class:`hyper_cp.DynamicContextParallel`.
            hybrid_cp_group_func: not called.
            use_per_sequence_balancing: changes nothing: the layout of the handler says where tokens go.
            options: of every handler.
        """
        self._check_group(cp_group)
        if is_hybrid_cp and isinstance(batch, Mapping) and batch.get("cu_seqlens") is not None:
            self._check_degree(batch.get("local_cp_size"))
        return super().get_batch_on_this_cp_rank(batch, seq_dims, **options)

    def _documents_of(self, packed: Any, documents: Any) -> Tensor | None:
        """The table of Megatron's ``PackedSeqParams``. ``ValueError`` if tokens may have been placed by another one."""
        if documents is not None:
            raise ValueError(
                "packed_seq_params and documents are both given. Each names the documents. Pass one of them"
            )
        names = ("cu_seqlens_q", "cu_seqlens_q_padded")
        found = take_documents({name: getattr(packed, name, None) for name in names})
        if found is None:
            raise ValueError(
                f"packed_seq_params is a {type(packed).__name__} without cu_seqlens_q. Documents would be rolled into "
                "each other. Pass one with cu_seqlens_q, or None for a sequence without documents"
            )
        table, known = padded_table(self, found), self.cp.batch.documents
        without = take_documents({names[0]: packed.cu_seqlens_q})
        hidden = without is not None and read(without).rows != read(found).rows
        if hidden and by_documents(self.layout) and (known is None or read(known).rows != read(table).rows):
            raise ValueError(
                f"packed_seq_params has padding between documents, with layout={self.layout!r}. This layout places "
                "tokens by documents, which may be those with or without the padding. Call it in the documents block "
                "of the batch that this handler has split, or pass documents="
            )
        return table

    def _check_group(self, group: Any) -> None:
        """Raise unless ``cp_group`` is None or has the ranks of the cp mesh, in its order."""
        check_type("cp_group", group, (dist.ProcessGroup, type(None)), "It is that of the cp mesh. Leave it out")
        ranks = self.mesh.mesh.flatten().tolist()
        if group is not None and dist.get_process_group_ranks(group) != ranks:
            raise ValueError(
                f"cp_group has the ranks {dist.get_process_group_ranks(group)}, and the cp mesh of this handler "
                f"{ranks}. Shares are those of the mesh. Leave cp_group out, or make the handler of "
                "DeviceMesh.from_group(cp_group, device_type)"
            )

    def _check_degree(self, degree: Any) -> None:
        """Raise unless a batch of hybrid context parallelism wants as many ranks as the cp mesh has."""
        degree = degree.item() if isinstance(degree, Tensor) and degree.numel() == 1 else degree
        if degree != self.cp.size:
            raise NotImplementedError(
                f"is_hybrid_cp=True with a batch of local_cp_size={degree!r}, and this handler has {self.cp.size} "
                "ranks. A handler has one mesh. Use DynamicContextParallel, which has one for each number of ranks, "
                "and the handler of the batch's"
            )


def _degree(comm_type: str, mesh: DeviceMesh, sizes: Sequence[int] | None) -> int | None:
    """The Ulysses degree of a ``cp_comm_type`` on a mesh."""
    if comm_type == "a2a":
        return None if mesh.ndim == 1 else mesh.size()
    if comm_type != "a2a+p2p":
        return 1
    if sizes is None and mesh.ndim == 2:
        return None
    fits = isinstance(sizes, Sequence) and len(sizes) == 2 and all(type(n) is int and n > 0 for n in sizes)
    if sizes is None or not fits or sizes[0] * sizes[1] != mesh.size():
        raise ValueError(
            f"hierarchical_context_parallel_sizes={sizes!r} with cp_comm_type='a2a+p2p' is wrong. The product of [a2a, "
            f"p2p] must be {mesh.size()}, the number of ranks of the cp mesh. Pass two such numbers, or a 2-D mesh "
            "named ('ring', 'ulysses')"
        )
    return sizes[0]

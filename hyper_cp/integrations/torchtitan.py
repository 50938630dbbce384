"""torchtitan: context parallelism for inner attention on packed tokens ``[T, heads, head_dim]``.

::

    apply_context_parallel(model, mesh["cp"], ContextParallel(ulysses_degree=1, kv_exchange="ring"))  # then AC, FSDP

Written against the call ``inner_attention(q, k, v, *, attention_masks, scale, enable_gqa, ...)`` of torchtitan models
(``attention_metadata`` in newer ones), with variable-length metadata. torchtitan itself is not imported.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from ..module._torch import checkpoint
from ..module.mesh_binding import Binding, binding_of, describe
from ..module.model import introduce
from ..ops.attention import cp_attention
from ..ops.config import Call
from ..schedule.documents import documents_table
from ..style import ContextParallel

INNER = "layers.*.attention.inner_attention"


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, style: ContextParallel, pattern: str = INNER) -> int:
    """Replace every inner attention that ``pattern`` matches by :class:`PackedAttention`; in place.

    Call it before activation checkpointing, compile and FSDP, in this order. Tokens arrive in the layout of ``style``
    (contiguous, or permuted head-tail). Dimensions and indices of ``style`` do not count, and windows are the module's
    own.

    Returns:
        The number of modules that were replaced.

    Raises:
        ValueError: if there is none, or if one is parallel already.
    """
    found = {name: module for name, module in model.named_modules() if fnmatchcase(name, pattern)}
    if not found:
        raise ValueError(f"pattern={pattern!r} matches no module of {type(model).__name__}. Compare named_modules()")
    for name, module in found.items():
        if isinstance(module, PackedAttention) or binding_of(module) is not None:
            raise ValueError(f"{name} is context parallel already: apply it once")
    replaced = {name: PackedAttention(module, mesh, style) for name, module in found.items()}
    for name, module in replaced.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
    return len(replaced)


class PackedAttention(nn.Module):
    """Causal attention of packed documents over the sequence of a cp mesh, in place of ``inner``.

    Documents come with the call (``cu_seq_q`` of variable-length metadata, over global tokens), or from
    ``ContextParallelHandler.documents(...)``. Put ``cu_seq_q`` on the CPU, or the first layer of every batch waits for
    the device.
    """

    def __init__(self, inner: nn.Module, mesh: DeviceMesh, style: ContextParallel) -> None:
        super().__init__()
        own = getattr(inner, "window_size", (-1, 0))
        if style.mode.window is not None:
            raise ValueError(f"style has window={style.mode.window}, but {type(inner).__name__} has its own. Drop it")
        self.window = tuple(None if w == -1 else w for w in own)
        self.binding = Binding(style, mesh, describe(inner))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any = None,
        attention_metadata: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """``[T/n, H, D]``, ``[T/n, Hkv, D]``, ``[T/n, Hkv, Dv]`` to ``[T/n, H, Dv]``."""
        unknown = [name for name, value in kwargs.items() if value is not None]
        if unknown:
            raise NotImplementedError(
                f"{self.binding.name} is called with {', '.join(unknown)}, which context-parallel attention does not "
                "support. Leave it out, or leave this module out of the pattern"
            )
        if q.shape[1] != k.shape[1] and not enable_gqa:
            raise ValueError(
                f"{self.binding.name} got {q.shape[1]} query and {k.shape[1]} key heads. Pass enable_gqa=True for "
                "grouped-query attention"
            )
        metadata = attention_metadata if attention_masks is None else attention_masks
        documents, mesh = checkpoint.batch_state(self.binding, lambda: (self._documents(metadata), self.binding.active))
        introduce(self.binding, self, mesh)
        q, k, v = (x.unsqueeze(0).transpose(1, 2) for x in (q, k, v))
        cp, mode = mesh.view(q.shape[1], k.shape[1]), replace(self.binding.style.mode, window=self.window)  # type: ignore[arg-type]
        # is_causal=False: the module's window ends at the query, so it is causal already.
        out = cp_attention(q, k, v, cp, mode, Call(False, scale, None, documents))
        return out.transpose(1, 2).squeeze(0)

    def _documents(self, metadata: Any) -> Tensor | None:
        """The documents that the metadata of a call names, or those of the enclosing block."""
        block = self.binding.documents_in_force()
        if metadata is None:
            return block
        cu_seq = getattr(metadata, "cu_seq_q", None)
        if cu_seq is None:
            raise NotImplementedError(
                f"{self.binding.name} got masks of type {type(metadata).__name__}, which name no documents. "
                "Use variable-length attention (metadata with cu_seq_q), or handler.documents(...) and no masks"
            )
        if block is not None:
            raise ValueError(f"{self.binding.name} got cu_seq_q inside handler.documents(...). Drop one of them")
        if metadata.cu_seq_k is not cu_seq and metadata.cu_seq_k.tolist() != cu_seq.tolist():
            raise NotImplementedError(
                f"{self.binding.name} got cu_seq_q and cu_seq_k that differ. Queries and keys must be packed "
                "alike: pass the same boundaries for both"
            )
        if cu_seq not in _tables:
            _tables[cu_seq] = documents_table(cu_seq)
        return _tables[cu_seq]


_tables: Any = WeakTensorKeyDictionary()
"""``cu_seq_q -> table of documents``: all layers of a batch share one tensor."""

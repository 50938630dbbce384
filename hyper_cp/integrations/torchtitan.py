"""torchtitan: context parallelism for inner attention, in the three places where torchtitan has its own.

* :func:`apply_cp_to_forward` and :func:`prepare_context_parallel_input` have the names and the arguments of
  torchtitan's functions (0.3.0), and ``style=``.
* :func:`cp_attention_class` makes a class for the ``ContextParallelTransform`` of newer versions.
* :func:`apply_context_parallel` works on a model that is built, with packed documents.

Written against the call ``inner_attention(q, k, v, *, attention_masks, scale, enable_gqa, ...)`` of torchtitan models
(``attention_metadata`` in newer ones), on ``[B, L, heads, head_dim]`` (0.3.0) or packed ``[T, heads, head_dim]``.
torchtitan itself is not imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

from ..handler import ContextParallelHandler
from ..mesh.arguments import check_type
from ..module.guards import guard_model
from ..module.latents import LatentLayer
from ..module.mesh_binding import Binding, binding_of, describe
from ..module.model import begin_call
from ..ops.attention import cp_attention
from ..ops.config import Call
from ..ops.writes import writes
from ..schedule.documents import documents_table
from ..style import ContextParallel

INNER = "layers.*.attention.inner_attention"
_BALANCERS = {"headtail": "head_tail", None: "contiguous"}
"""torchtitan's ``context_parallel_load_balancer``: the layout of the same order of tokens."""
_applied: WeakSet[ContextParallel] = WeakSet()
"""Styles that inner attention runs under."""


def apply_cp_to_forward(attention_modules: Sequence[nn.Module], cp_mesh: DeviceMesh, *, style: ContextParallel) -> None:
    """Run inner attention modules under ``style``, in the place of torchtitan's function of this name::

        torchtitan.models.llama3.parallelize.apply_cp_to_forward = partial(apply_cp_to_forward, style=style)

    Dimensions of ``style`` do not count. Its layout must be that of the tokens, which
    :func:`prepare_context_parallel_input` checks; that function also leaves masks those of the whole sequence.

    Raises:
        NotImplementedError: for modules other than ``FlexAttention`` and ``ScaledDotProductAttention``. (For
            variable-length attention see :func:`apply_context_parallel`.)
    """
    kinds = {type(module).__name__ for module in attention_modules}
    if not kinds <= {"FlexAttention", "ScaledDotProductAttention"}:
        raise NotImplementedError(
            f"attention_modules are of the types {', '.join(sorted(kinds))}. Here FlexAttention and "
            'ScaledDotProductAttention are replaced. Use attn_backend="flex", or apply_context_parallel(model, mesh, '
            "style) with variable-length attention"
        )
    inner = copy.copy(style)
    inner.seq_dim, inner.head_dim, inner.copy_of = 1, 2, style
    for module in attention_modules:
        if type(module).__name__ == "FlexAttention":  # its own forward calls a compiled function
            module.forward = partial(_flex, module)
        parallelize_module(module, cp_mesh, inner)
    _applied.add(style)


def _flex(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attention_masks: BlockMask,
    score_mod: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **others: Any,
) -> Tensor:
    """The forward of torchtitan's ``FlexAttention``: ``[B, L/n, H, D]`` to ``[B, L/n, H, Dv]``."""
    name, given = type(module).__name__, [option for option, x in others.items() if x is not None]
    if given:
        raise NotImplementedError(
            f"{name} is called with {', '.join(given)}. Context-parallel attention does not support it. Leave it out"
        )
    todo = "Pass the BlockMask that the model makes of the positions of the whole sequence"
    check_type(f"{name}: attention_masks", attention_masks, BlockMask, f"Without it attention is not causal. {todo}")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Any = flex_attention(q, k, v, score_mod, block_mask=attention_masks, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)


def prepare_context_parallel_input(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh,
    device: Any = None,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
    *,
    style: ContextParallel,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Split a batch over the cp mesh, in the place of torchtitan's function of this name.

    ``inputs``, ``labels`` and ``extra_kwargs["positions"]`` are ``[B, S]``, the same on all ranks. Attention masks
    remain those of the whole sequence, as this library's attention needs them.

    Raises:
        ValueError: if the load balancer of torchtitan's configuration is not the layout of ``style``.
        RuntimeError: if no attention module runs under ``style``.
    """
    if load_balancer_type not in _BALANCERS or _BALANCERS[load_balancer_type] != style.mode.layout:
        wanted = _BALANCERS.get(load_balancer_type)
        raise ValueError(
            f"context_parallel_load_balancer={load_balancer_type!r} of torchtitan's configuration does not order "
            f"tokens as layout={style.mode.layout!r} of the style. Attention would assign wrong positions to them. Use "
            + (f"layout={wanted!r}" if wanted else "'headtail' or None")
        )
    if style not in _applied:
        raise RuntimeError(
            "no attention module runs under the style, so torchtitan's own context parallelism would, if any. "
            'torchtitan calls apply_cp_to_forward for spmd_backend="partial_dtensor" only. Set that, and replace the '
            "function before the model is built"
        )
    handler = ContextParallelHandler(cp_mesh, style)
    local = {**extra_kwargs, "positions": handler.dispatch(extra_kwargs["positions"], 1)}
    return handler.dispatch(inputs, 1), handler.dispatch(labels, 1), local


def cp_attention_class(
    inner: type[Any], capability: type[Any], style: ContextParallel, cp_group: Callable[[], ProcessGroup | None]
) -> type[Any]:
    """The class that a ``ContextParallelTransform`` of newer torchtitan versions puts in place of ``inner``::

        cp_group = partial(spmd_mesh_group, MeshAxisName.CP)
        ring = cp_attention_class(VarlenInnerAttention, CPAttention, style, cp_group)
        ContextParallelTransform(inner_attention_map={VarlenInnerAttention: ring})

    Args:
        inner: torchtitan's variable-length inner attention.
        capability: torchtitan's ``CPAttention``, whose subclasses own their communication.
        cp_group: returns the process group of the cp axis, when a forward runs.

    Its layout is that of torchtitan's load balancer: ``"contiguous"`` without one, or ``"head_tail"``.
    ``prepare_cp_metadata`` raises ``ValueError`` for tokens in another order, and leaves boundaries those of the whole
    sequence.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        inner.__init__(self, *args, **kwargs)
        self.packed = None

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        if self.packed is None:
            group = cp_group()
            if group is None:
                return inner.forward(self, q, k, v, **kwargs)
            mesh = DeviceMesh.from_group(group, q.device.type, mesh_dim_names=("cp",))
            self.packed = [PackedAttention(self, mesh, style)]  # in a list: it is no child
            self.packed[0].keeper = [self]
        return self.packed[0](q, k, v, **kwargs)

    def prepare_cp_metadata(metadata: Any, *, permutation: Tensor | None) -> Any:
        check_permutation(style.mode.layout, permutation)
        return metadata

    bases = capability.Config, inner.Config
    config = make_dataclass("Config", [], bases=bases, kw_only=True, slots=True)
    names: dict[str, Any] = {"__init__": __init__, "forward": forward, "Config": config}
    names["prepare_cp_metadata"] = staticmethod(prepare_cp_metadata)
    return type(f"ContextParallel{inner.__name__}", (capability, inner), names)


def check_permutation(layout: str, permutation: Tensor | None) -> None:
    """Raise ``ValueError`` unless a permutation of tokens ``[1, S]`` (None: none) is that of a layout."""
    right = layout == "contiguous" if permutation is None else layout == "head_tail" and _head_tail(permutation)
    if not right:
        what = "leaves tokens in order" if permutation is None else "permutes tokens"
        raise ValueError(
            f"torchtitan's load balancer {what}, which is not layout={layout!r} of the style. Attention would assign "
            'wrong positions to them. Use layout="contiguous" without one, layout="head_tail" with the head-tail one'
        )


def _head_tail(permutation: Tensor) -> bool:
    """True for chunks 0, 2n - 1, 1, 2n - 2, ... in order, for any n."""
    order = permutation.flatten().tolist()
    length = len(order)
    chunk = next((i for i, (a, b) in enumerate(pairwise(order), 1) if b != a + 1), length)
    chunks = length // chunk
    if chunk * chunks != length or chunks % 2:
        return False
    starts = [c * chunk for rank in range(chunks // 2) for c in (rank, chunks - 1 - rank)]
    return order == [x for start in starts for x in range(start, start + chunk)]


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, style: ContextParallel, pattern: str = INNER) -> int:
    """Replace every inner attention that ``pattern`` matches by :class:`PackedAttention`; in place.

    Call it before activation checkpointing, compile and FSDP, in this order. Tokens arrive in the layout of ``style``
    (contiguous, or permuted head-tail). Dimensions and indices of ``style`` do not count, and windows are the module's
    own. ``latents_from`` names a layer beside the inner attention (``"wkv_b"`` of DeepSeek V3), whose input travels.

    Returns:
        The number of modules that were replaced.

    Raises:
        ValueError: if there is none, if one is parallel already, or if another module mixes positions.
        NotImplementedError: for a model that predicts further tokens (``mtp_layers``).
    """
    if mesh.size() > 1 and len(getattr(model, "mtp_layers", None) or ()):
        raise NotImplementedError(
            f"{type(model).__name__} has mtp_layers, for which it moves tokens and labels along the sequence: here it "
            "would move them along each rank's share. Build the model with num_mtp_layers=0"
        )
    found = {name: module for name, module in model.named_modules() if fnmatchcase(name, pattern)}
    if not found:
        raise ValueError(
            f"pattern={pattern!r} matches no module of {type(model).__name__}. It is compared with the names of "
            "modules. Compare it with [name for name, _ in model.named_modules()]"
        )
    for name, module in found.items():
        if isinstance(module, PackedAttention) or binding_of(module) is not None:
            raise ValueError(
                f"{name} is context parallel already. Its sequence would be exchanged twice. Apply the style once"
            )
        if [*module.parameters(), *module.buffers(), *module.children()]:
            raise NotImplementedError(
                f"{name} ({type(module).__name__}) has parameters, buffers or modules of its own, and would be "
                "replaced by attention without them. Put a ContextParallel style on it (parallelize_module), if it "
                "calls F.scaled_dot_product_attention or flex_attention"
            )
    if mesh.size() > 1:
        guard_model(model, style.allow)
    for name, module in found.items():
        at, _, child = name.rpartition(".")
        parent = model.get_submodule(at)
        replaced = PackedAttention(module, mesh, style)
        if style.latents_from is not None:
            replaced.latents = LatentLayer(describe(parent), style.latents_from, parent)
        setattr(parent, child, replaced)
    return len(found)


class PackedAttention(nn.Module):
    """Causal attention of packed documents over the sequence of a cp mesh, in place of ``inner``.

    Tokens are ``[T/n, H, D]``, or ``[B, L/n, H, D]`` with boundaries over the rows of the batch, one after another.

    Documents come with the call (``cu_seq_q`` of variable-length metadata, over global tokens), or from
    ``ContextParallelHandler.documents(...)``. Put ``cu_seq_q`` on the CPU, or the first layer of every batch waits for
    the device.
    """

    def __init__(self, inner: nn.Module, mesh: DeviceMesh, style: ContextParallel) -> None:
        super().__init__()
        window = getattr(inner, "window_size", (-1, 0))
        if style.mode.window is not None:
            raise ValueError(
                f"style has window={style.mode.window}. {type(inner).__name__} has a window of its own. Leave that of "
                "the style out"
            )
        self.window = tuple(None if w == -1 else w for w in window)
        self.binding = Binding(style, mesh, describe(inner))
        self.latents: LatentLayer | None = None
        self.keeper: list[nn.Module] = [self]
        """The module of the model that keeps the largest logits."""

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
        """``[T/n, H, D]``, ``[T/n, Hkv, D]``, ``[T/n, Hkv, Dv]`` to ``[T/n, H, Dv]``; or with ``B`` first."""
        if kwargs.get("is_causal") is True:  # it always is
            kwargs.pop("is_causal")
        unknown = [name for name, value in kwargs.items() if value is not None]
        if unknown:
            raise NotImplementedError(
                f"{self.binding.name} is called with {', '.join(unknown)}. Context-parallel attention does not support "
                "it. Leave it out, or leave this module out of the pattern"
            )
        if q.ndim not in (3, 4):
            raise ValueError(
                f"{self.binding.name} got q of shape {tuple(q.shape)}. It must have 3 or 4 dimensions. Pass [T/n, "
                "heads, head_dim] or [B, L/n, heads, head_dim], as torchtitan does"
            )
        heads, kv_heads, packed = q.shape[-2], k.shape[-2], q.ndim == 3
        if heads != kv_heads and not enable_gqa:
            raise ValueError(
                f"{self.binding.name} got {heads} query and {kv_heads} key heads. Grouped heads may be a mistake. Pass "
                "enable_gqa=True for grouped-query attention"
            )
        metadata = attention_metadata if attention_masks is None else attention_masks
        mesh, documents = begin_call(self.binding, self, lambda: (self._documents(metadata, q),))
        q, k, v = ((x.unsqueeze(0) if packed else x).transpose(1, 2) for x in (q, k, v))
        self.binding.positions = q.shape[2]
        cp, mode = mesh.view(heads, kv_heads), replace(self.binding.style.mode, window=self.window)  # type: ignore[arg-type]
        # is_causal=False: the module's window ends at the query, so it is causal already.
        call = Call(False, scale, None, documents)
        if self.latents is not None:
            k, v, call = self.latents.in_place_of(cp, (q, k, v), call, mode)
        out = cp_attention(q, k, v, cp, mode, call, self.keeper[0])
        out = out.transpose(1, 2)
        return out.squeeze(0) if packed else out

    def _documents(self, metadata: Any, q: Tensor) -> Tensor | None:
        """The documents that the metadata of a call names, or those of the enclosing block."""
        rows, local = (1, q.shape[0]) if q.ndim == 3 else q.shape[:2]
        length, block = local * self.binding.active.views[0].size, self.binding.active_documents()
        if metadata is None:
            return block
        cu_seq = getattr(metadata, "cu_seq_q", None)
        if cu_seq is None:
            raise NotImplementedError(
                f"{self.binding.name} got masks of type {type(metadata).__name__}. They name no documents. "
                "Use variable-length attention (metadata with cu_seq_q), or handler.documents(...) and no masks"
            )
        if block is not None:
            raise ValueError(
                f"{self.binding.name} got cu_seq_q inside handler.documents(...). Both give the documents of the call. "
                "Leave one of them out"
            )
        if metadata.cu_seq_k is not cu_seq and metadata.cu_seq_k.tolist() != cu_seq.tolist():
            raise NotImplementedError(
                f"{self.binding.name} got cu_seq_q and cu_seq_k that differ. Queries and keys must be packed "
                "alike. Pass the same boundaries for both"
            )
        count, made = _tables.get(cu_seq, (-1, {}))
        if count != writes(cu_seq) or cu_seq.is_inference():  # such tensors count no writes
            made = {}
        if (rows, length) not in made:
            made[rows, length] = documents_table(cu_seq if rows == 1 else self._by_row(cu_seq, rows, length))
            _tables[cu_seq] = writes(cu_seq), made
        found: Tensor = made[rows, length]
        return found

    def _by_row(self, cu_seq: Tensor, rows: int, length: int) -> list[list[int]]:
        """Boundaries in each row, of those over all rows, one after another."""
        all_rows = cu_seq.tolist()
        if all_rows[-1] != rows * length or not set(range(0, rows * length, length)) <= set(all_rows):
            raise ValueError(
                f"{self.binding.name} got cu_seq_q up to {all_rows[-1]}, but {rows} rows of {length} tokens (of all "
                "ranks). Documents are those of the whole sequence. Make them before the batch is split"
            )
        starts = range(0, rows * length, length)
        return [[x - start for x in all_rows if start <= x <= start + length] for start in starts]


_tables: Any = WeakTensorKeyDictionary()
"""``cu_seq_q -> (number of writes to it, tables of documents by rows and length)``. All layers of a batch share one
tensor, which may be written to for the next batch."""

"""What is active while an attention module runs: routes the module's attention call to the engine."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .ops.attention import Call, cp_attention, ring_attention
from .ops.mesh import CPMesh

if TYPE_CHECKING:
    from .boundary import Boundary

_UNROUTED = {
    F.multi_head_attention_forward: "nn.MultiheadAttention",
    torch.ops.higher_order.flex_attention: "flex_attention",
}


@dataclass
class RunningCall:
    """One running call of a styled module: what its attention is routed to, and what its end must undo."""

    owner: Boundary
    module: nn.Module
    cp: CPMesh | None = None
    """The mesh, if the Ulysses all-to-all was done at the boundary; None if the attention call does it."""
    length: int = 0
    """Of the sequence inside the module, and the query heads and dimensions there (if ``cp``)."""
    heads: int = 0
    ndim: int = 0
    documents: Tensor | None = None
    required: bool = False
    """Whether other attention than the routed one would be wrong."""
    region: Region | None = None
    routed: int = 0
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)

    def alive(self) -> bool:
        """Whether the module's call is still on the stack of this thread."""
        if torch.compiler.is_compiling():
            return True
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals.get("self") is self.module:
                return True
            frame = frame.f_back
        return False

    def leave(self) -> None:
        if self.region is not None:
            self.region.__exit__(None, None, None)


# The frame of a module's call, by which a call that is over is told from one that is running.
_CALL = nn.Module._call_impl.__code__


class Region(TorchFunctionMode):
    """While entered, ``F.scaled_dot_product_attention``, however it was imported, means attention
    over the whole sequence of a cp mesh."""

    def __init__(self, call: RunningCall) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if not self.call.alive():  # a KeyboardInterrupt ended the call: torch runs no hooks then
                return func(*args, **kwargs)
            self.call.routed += 1
            return self._attend(*args, **kwargs)
        if self.call.required and func in _UNROUTED:
            raise NotImplementedError(
                f"{self.call.owner.name} calls {_UNROUTED[func]}, which cannot be routed to context-parallel "
                "attention yet. Call F.scaled_dot_product_attention, or use ulysses_degree=None with qkv_indices on a "
                "module that receives q, k, v, where any kernel works"
            )
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call, name = self.call, self.call.owner.name
        if dropout_p > 0.0:
            raise NotImplementedError(
                f"{name} passes dropout_p={dropout_p}: attention dropout is not supported under "
                "context parallelism yet. Set it to 0.0"
            )
        if query.ndim == 4 and key.ndim == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{name}: query has {query.shape[1]} heads and key {key.shape[1]}; pass "
                "enable_gqa=True for grouped-query attention"
            )
        if call.grad_enabled and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} calls attention with gradients switched off inside the module: a reentrant "
                "activation checkpoint there would recompute it as local attention. Checkpoint the whole module "
                "(use_reentrant=False); for inference put torch.no_grad() around the module"
            )
        if call.cp is not None and query.ndim == 4 and tuple(query.shape[1:3]) != (call.heads, call.length):
            raise ValueError(
                f"{name} calls attention with a query of shape {tuple(query.shape)}; after the exchange of "
                f"sequence and heads it should be [batch, {call.heads} heads, {call.length} positions, "
                "head size]. Check seq_dim and head_dim of ContextParallel: [B, S, H, D] inputs have 1 and 2, "
                "[B, H, S, D] inputs 2 and 1"
            )
        heads = (query.shape[1], key.shape[1]) if query.ndim == 4 and key.ndim == 4 else (1, 1)
        asked = Call(is_causal, scale, attn_mask, call.documents)
        mode = call.owner.style.mode
        if call.cp is None:
            return cp_attention(query, key, value, call.owner.mesh_for(*heads), mode, asked)
        return ring_attention(query, key, value, call.cp, mode, asked)

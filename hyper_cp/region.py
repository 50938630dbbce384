"""What is active while an attention module runs: routes the module's attention call to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .ops.attention import Mode, cp_attention, ring_attention
from .ops.mesh import CPMesh


class Region(TorchFunctionMode):
    """While entered, ``F.scaled_dot_product_attention``, however it was imported, means attention
    over the whole sequence of a cp mesh.

    Args:
        name: of the module, for messages.
        mode: how keys are obtained and how the sequence lies.
        mesh_for: from (query heads, key/value heads) to the mesh to run on.
        sharded_heads: whether the Ulysses all-to-all was already done at the module's boundary.
    """

    def __init__(
        self, name: str, mode: Mode, mesh_for: Callable[[int, int], CPMesh], sharded_heads: bool
    ) -> None:
        super().__init__()
        self.name, self.mode, self.mesh_for, self.sharded_heads = name, mode, mesh_for, sharded_heads
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward or func is torch.ops.higher_order.flex_attention:
            what = "flex_attention" if func is not F.multi_head_attention_forward else "nn.MultiheadAttention"
            raise NotImplementedError(
                f"{self.name} calls {what}, which cannot be routed to context-parallel attention yet. "
                "Call F.scaled_dot_product_attention, or use ulysses_degree=None with qkv_indices on a "
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
        if attn_mask is not None:
            raise NotImplementedError(
                f"{self.name} passes attn_mask of shape {tuple(attn_mask.shape)}: explicit masks are not "
                "supported under context parallelism yet. For a causal mask pass is_causal=True"
            )
        if dropout_p > 0.0:
            raise NotImplementedError(
                f"{self.name} passes dropout_p={dropout_p}: attention dropout is not supported under "
                "context parallelism yet. Set it to 0.0"
            )
        if query.ndim == 4 and key.ndim == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{self.name}: query has {query.shape[1]} heads and key {key.shape[1]}; pass "
                "enable_gqa=True for grouped-query attention"
            )
        heads = (query.shape[1], key.shape[1]) if query.ndim == 4 and key.ndim == 4 else (1, 1)
        attend = ring_attention if self.sharded_heads else cp_attention
        return attend(query, key, value, self.mesh_for(*heads), self.mode, is_causal=is_causal, scale=scale)

"""What is active while an attention module runs: routes the module's attention call to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .ops.attention import Call, Mode, cp_attention, ring_attention
from .ops.mesh import CPMesh

_UNROUTED = {
    F.multi_head_attention_forward: "nn.MultiheadAttention",
    torch.ops.higher_order.flex_attention: "flex_attention",
}


class Region(TorchFunctionMode):
    """While entered, ``F.scaled_dot_product_attention``, however it was imported, means attention
    over the whole sequence of a cp mesh.

    Args:
        name: of the module, for messages.
        mode: how keys are obtained and how the sequence lies.
        mesh_for: from (query heads, key/value heads) to the mesh to run on.
        inside: heads and length of the queries inside the module, if the Ulysses all-to-all was done
            at its boundary; None if it is part of the attention call.
        documents: table of the borders of packed documents, or None.
        required: whether other attention than the routed one would be wrong.
        alive: whether the module's call is still running.
    """

    def __init__(
        self,
        name: str,
        mode: Mode,
        mesh_for: Callable[[int, int], CPMesh],
        inside: tuple[int, int] | None,
        documents: Tensor | None,
        required: bool,
        alive: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.name, self.mode, self.mesh_for, self.inside = name, mode, mesh_for, inside
        self.documents, self.required, self.alive = documents, required, alive
        self.grad_enabled = torch.is_grad_enabled()
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            if not self.alive():  # a KeyboardInterrupt ended the call: torch runs no hooks then
                return func(*args, **kwargs)
            self.calls += 1
            return self._attend(*args, **kwargs)
        if self.required and func in _UNROUTED:
            raise NotImplementedError(
                f"{self.name} calls {_UNROUTED[func]}, which cannot be routed to context-parallel attention yet. "
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
        if self.grad_enabled and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.name} calls attention with gradients switched off inside the module: a reentrant "
                "activation checkpoint there would recompute it as local attention. Checkpoint the whole module "
                "(use_reentrant=False); for inference put torch.no_grad() around the module"
            )
        if self.inside is not None and query.ndim == 4 and tuple(query.shape[1:3]) != self.inside:
            raise ValueError(
                f"{self.name} calls attention with a query of shape {tuple(query.shape)}; after the exchange of "
                f"sequence and heads it should be [batch, {self.inside[0]} heads, {self.inside[1]} positions, "
                "head size]. Check seq_dim and head_dim of ContextParallel: [B, S, H, D] inputs have 1 and 2, "
                "[B, H, S, D] inputs 2 and 1"
            )
        heads = (query.shape[1], key.shape[1]) if query.ndim == 4 and key.ndim == 4 else (1, 1)
        attend = cp_attention if self.inside is None else ring_attention
        call = Call(is_causal, scale, attn_mask, self.documents)
        return attend(query, key, value, self.mesh_for(*heads), self.mode, call)

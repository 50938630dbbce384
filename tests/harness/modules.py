"""Attention modules as users write them, for tests of the style."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Out(NamedTuple):
    hidden: Tensor
    weights: None


class BNSD(nn.Module):
    """q, k, v ``[B, H, S, D]``; attention imported by name; the output in the asked-for packaging."""

    def __init__(self, causal: bool = True, packaging: str = "tensor") -> None:
        super().__init__()
        self.causal, self.packaging = causal, packaging

    def forward(self, q: Tensor, k: Tensor, v: Tensor, note: str = "") -> Any:
        out = scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return {"tensor": out, "tuple": (out, None), "list": [out], "namedtuple": Out(out, None)}[self.packaging]


class BSHD(nn.Module):
    """q, k, v ``[B, S, H, D]``; output ``[B, S, H, D]`` or flattened to ``[B, S, H*D]``."""

    def __init__(self, causal: bool = True, flat: bool = False) -> None:
        super().__init__()
        self.causal, self.flat = causal, flat

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(2) if self.flat else out.transpose(1, 2)


class Packed(nn.Module):
    """torchtitan's inner attention: packed ``[T, H, D]``, more arguments, keyword-only ones too."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, enable_gqa: bool = True
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out.squeeze(0).transpose(0, 1)


class KeywordOnly(nn.Module):
    def forward(self, *, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


class Silent(nn.Module):
    """Computes attention by hand: nothing that could be routed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = (q @ k.mT) * q.shape[-1] ** -0.5
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return logits.masked_fill(~visible, -torch.inf).softmax(-1) @ v


class Failing(nn.Module):
    """Raises while ``broken``, in the middle of its forward."""

    broken = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.broken:
            raise KeyError("the user's own mistake")
        return out


class Adapted(nn.Module):
    """A layer with adapters, as PEFT builds it."""

    def __init__(self, layer: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base_layer, self.in_features = layer, layer.in_features
        self.lora_A = nn.Linear(layer.in_features, 2, bias=False, dtype=layer.weight.dtype)
        self.lora_B = nn.Linear(2, layer.out_features, bias=False, dtype=layer.weight.dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(self.dropout(x)))
        return out

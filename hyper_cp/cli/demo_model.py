"""A small byte-level Llama (RMSNorm, RoPE, grouped-query attention, SwiGLU) for demo and tests.

It contains nothing about context parallelism, except that its caller passes the positions of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    vocab: int = 256
    dim: int = 128
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 256
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rope(positions: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the tokens' global positions: ``[S, head_dim / 2]`` for ``[S]``, and ``[B, 1, S,
    head_dim / 2]``, the same for all heads, for ``[B, S]``."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * config.rope_theta ** (-half / config.head_dim)
    if positions.dim() == 2:
        angles = angles.unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [B, H, S, D]`` by RoPE, where channel i and channel i + D/2 are a pair."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """``[B, S, H D]`` as ``[B, H, S, D]``."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """``[B, H, S, D]`` as ``[B, S, H D]``."""
    return x.transpose(1, 2).flatten(2)


class InnerAttention(nn.Module):
    """The attention call alone, as a module that a context-parallel plan can name."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)
        self.inner = InnerAttention()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (split_heads(w(x), self.head_dim) for w in (self.wq, self.wk, self.wv))
        out = self.inner(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.wo(join_heads(out))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attention, self.ffn = Attention(config), FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """The model: ``forward(tokens [B, S], positions [B, S] or [S]) -> logits [B, S, vocab]``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        cos, sin = rope(positions, self.config)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))

"""FlexAttention's functions of global positions as users write them, by name; a module that calls it; the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from tests.harness.oracle import Mod, attention_and_lse, positions

B, H, KV, S, D = 2, 4, 2, 24, 8  # 24: no multiple of 16; 6, 8 or 12 to a rank
DOCUMENT = torch.tensor([0] * 5 + [1] * 9 + [2] + [3] * 9)
DOCUMENTS = [0, 5, 14, 15, 24]
PREFIX = torch.tensor([7, 3])
SLOPE = 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64)


@dataclass
class Case:
    """Functions of global positions; ``made`` builds the score function from leaves that get a gradient.

    ``blocks``: batch rows, heads and BLOCK_SIZE of the mask.
    """

    mask_mod: Mod | None = None
    made: Callable[..., Mod] | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    blocks: tuple[Any, Any, Any] = (None, None, 4)
    sink: bool = False


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (i - j < 7)


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Packed documents; in row 1 the padding sees nothing."""
    return (DOCUMENT[i] == DOCUMENT[j]) & (j <= i) & ((i < 20) | (b == 0))


def prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) | (j < PREFIX[b])


def strided_heads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((i - j) % (h + 1) == 0)


def alibi() -> Mod:
    return lambda score, b, h, i, j: score - SLOPE[h] * (i - j).abs() * (b + 1)


def relative(table: Tensor, gain: Tensor) -> Mod:
    twice = table * 2  # a captured tensor that is itself computed
    return lambda score, b, h, i, j: score * gain[h].exp() + twice[h, (i - j).clamp(-5, 5) + 5] + table[0, j % 11]


def softcap() -> Mod:
    return lambda score, b, h, i, j: 2 * torch.tanh(score / 2)


CASES: dict[str, Case] = {
    "alibi": Case(None, alibi),
    "relative": Case(causal, relative, ((H, 11), (H,)), (None, None, 5)),
    "documents": Case(documents, None, (), (B, None, (5, 4))),
    "prefix": Case(prefix, softcap, (), (B, None, 4)),
    "window, sink": Case(window, None, ((H,),), sink=True),
    "heads": Case(strided_heads, softcap, (), (None, H, 16)),
    "causal": Case(causal, blocks=(None, None, 16)),
    "window, alibi": Case(window, alibi, (), (None, None, 128)),
}


def blocks_of(case: Case) -> BlockMask | None:
    (b, h, size), mod = case.blocks, case.mask_mod
    return mod and create_block_mask(mod, b, h, S, S, device="cpu", BLOCK_SIZE=size)


def tensors(name: str, v_dim: int = D) -> list[Tensor]:
    """q, k, v, the gradient of the output, and the leaves of the case."""
    g = torch.Generator().manual_seed(3)
    shapes = [(B, H, S, D), (B, KV, S, D), (B, KV, S, v_dim), (B, H, S, v_dim), *CASES[name].shapes]
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def oracle(
    name: str, qkv: list[Tensor], leaves: list[Tensor], hidden: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """``(out, log-sum-exp)`` of whole tensors; ``hidden`` are pairs that the functions of the case do not hide."""
    case = CASES[name]
    visible = None if case.mask_mod is None else case.mask_mod(*positions(*qkv[:2]))
    if hidden is not None:
        visible = ~hidden if visible is None else visible & ~hidden
    score_mod, sinks = None if case.made is None else case.made(*leaves), leaves[0] if case.sink else None
    return attention_and_lse(*qkv, scale=scale, visible=visible, score_mod=score_mod, sinks=sinks)


class Flex(nn.Module):
    """Calls FlexAttention on q, k, v ``[B, H, S, D]`` with the functions of a case and ``options``.

    It keeps its mask, as models do that build it once, and applies its sink as they do, through the log-sum-exp.
    """

    def __init__(
        self, name: str, leaves: list[Tensor] | None = None, attention: Any = flex_attention, **options: Any
    ) -> None:
        super().__init__()
        self.case, self.leaves, self.attention, self.options = CASES[name], leaves or [], attention, options
        self.block_mask = blocks_of(self.case)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        score_mod = None if self.case.made is None else self.case.made(*self.leaves)
        options = {"score_mod": score_mod, "block_mask": self.block_mask, "enable_gqa": True, **self.options}
        if not self.case.sink:
            return self.attention(q, k, v, **options)
        out, aux = self.attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        lane = dist.get_rank() % (H // out.shape[1])  # of the heads that are here
        heads = torch.arange(out.shape[1]) + lane * out.shape[1]
        return out * torch.sigmoid(aux.lse - self.leaves[0][heads].view(1, -1, 1)).unsqueeze(-1)


@contextmanager
def untraced() -> Iterator[None]:
    """Run FlexAttention's math as it stands, without the half second in which torch traces it."""
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False


@contextmanager
def backward_on_the_cpu() -> Iterator[None]:
    """Allow gradients, which torch refuses on CPUs for want of a fused kernel; its math is complete."""
    refuse = torch_flex._validate_device
    torch_flex._validate_device = lambda *_: None
    try:
        yield
    finally:
        torch_flex._validate_device = refuse

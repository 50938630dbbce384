"""One case of latent attention: whole tensors, what one device makes of them, and the comparison of a rank's share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hyper_cp.ops import latent_attention
from tests.harness.attention_case import AttentionCase, Errors, explicit_mask, selected_pairs, selection
from tests.harness.oracle import attention_and_lse, softcap, visible_pairs
from tests.harness.ranks import sum_over_ranks

RANK, PLAIN = 10, 6  # R and Dn; Dr and Dv follow from a case's dim and v_dim
NAMES = ("q", "latent", "rope", "weight", "bias")


@dataclass(frozen=True)
class LatentCase(AttentionCase):
    """A case whose keys and values are made of latents. ``kv_heads`` are the heads of the rotary part."""

    kv_heads: int = 1
    dim: int = 9
    v_dim: int = 5
    latents: bool | None = True
    bias: bool = True

    def tensors(self) -> list[Tensor]:
        """q, latent, rope, weight, bias, and the gradient of the output: the same on every rank."""
        g = torch.Generator().manual_seed(self.length + self.kv_heads)
        outputs = self.heads * (PLAIN + self.v_dim)
        shapes = [
            (self.batch, self.heads, self.length, self.dim),
            (self.batch, self.length, RANK),
            (self.batch, self.kv_heads, self.length, self.dim - PLAIN),
            (outputs, RANK),
            (outputs,),
            (self.batch, self.heads, self.length, self.v_dim),
        ]
        return [torch.randn(s, generator=g, dtype=torch.float64).to(self.dtype) for s in shapes]


def heads_of(case: LatentCase, latent: Tensor, rope: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, head by head, as DeepSeek-V2 defines them."""
    keys, values = [], []
    for head, rows in enumerate(weight.split(PLAIN + case.v_dim)):
        made = torch.einsum("bsr,or->bso", latent, rows)
        made = made + bias.split(PLAIN + case.v_dim)[head] if case.bias else made
        keys.append(torch.cat([made[..., :PLAIN], rope[:, head if case.kv_heads > 1 else 0]], -1))
        values.append(made[..., PLAIN:])
    return torch.stack(keys, 1), torch.stack(values, 1)


@lru_cache(maxsize=32)
def one_device(case: LatentCase) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, log-sum-exp and gradients in fp64, for a case without its mode."""
    *given, dout = case.tensors()
    leaves = [x.double().requires_grad_() for x in (*given, *case.sink_logits())]
    visible, added = explicit_mask(case) if case.mask else (None, None)
    pairs = visible_pairs(case.length, case.is_causal, case.window, case.documents)
    pairs = pairs if case.selected is None else pairs & selected_pairs(case)
    out, lse = attention_and_lse(
        leaves[0],
        *heads_of(case, *leaves[1:5]),
        scale=case.scale,
        visible=pairs if visible is None else pairs & visible,
        bias=added,
        score_mod=softcap(case.softcap) if case.softcap else None,
        sinks=leaves[5] if case.sinks else None,
    )
    grads = torch.autograd.grad(out, leaves, dout.double(), allow_unused=True)
    return (
        out.detach(),
        lse.detach(),
        [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)],
    )


def problem_of(case: LatentCase) -> LatentCase:
    """The same case in the plainest mode: its answer is that of one device."""
    return replace(
        case, ulysses_degree=1, kv_exchange="ring", layout="contiguous", load_balance=False, latents=True, head_groups=1
    )


def leaves_of(case: LatentCase) -> tuple[list[Tensor], Tensor, Tensor]:
    """This rank's leaves (and sinks), the gradient of its output, and the positions that it holds."""
    at = case.positions(case.length)
    q, latent, rope, weight, bias, dout = case.tensors()
    local = [q[:, :, at], latent[:, at], rope[:, :, at], weight, bias, *case.sink_logits()]
    return [x.clone().requires_grad_() for x in local], dout[:, :, at], at


def called(case: LatentCase, leaves: list[Tensor], at: Tensor, mesh: Any, **more: Any) -> Any:
    options = {k: x for k, x in case.attention_keywords().items() if k not in ("enable_gqa", "latents")}
    if case.mask is not None:
        visible, added = explicit_mask(case)
        mask = added if visible is None else visible
        options["attn_mask"] = mask[:, :, at] if case.mask == "local rows" else mask  # type: ignore[index]
    if case.sinks:
        options["sinks"] = leaves[5]
    bias = leaves[4] if case.bias else None
    if case.selected is not None:
        options["selected"] = selection(case)[:, :, at]
    return latent_attention(*leaves[:4], bias, mesh=mesh, latents=case.latents, **options, **more)


def errors_of(case: LatentCase, leaves: list[Tensor], at: Tensor, out: Tensor, grads: Any, error: Any) -> Errors:
    """Errors relative to the largest expected value; gradients of weight, bias and sinks are summed over ranks."""
    want, _, expected = one_device(problem_of(case))
    shared = [g if g is not None else torch.zeros_like(x) for g, x in zip(grads[3:], leaves[3:], strict=True)]
    summed = [sum_over_ranks(x)[0] for x in shared]
    local = [expected[0][:, :, at], expected[1][:, at], expected[2][:, :, at]]
    names = (*NAMES, "sinks")[: len(leaves)]
    found = {"out": error(out.detach(), want[:, :, at])}
    for name, got, right in zip(names, (*grads[:3], *summed), (*local, *expected[3:]), strict=True):
        if name != "bias" or case.bias:
            found[name] = error(got, right)
    return found

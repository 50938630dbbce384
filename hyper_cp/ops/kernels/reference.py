"""Plain math: any device, any dtype including fp64, any head dims, any band. Exact and slow."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...schedule.tiles import FULL, Band
from .packed import Parts, backward_each, forward_each
from .partials import accumulation_dtype


def band_mask(rows: int, cols: int, band: Band, device: torch.device) -> Tensor | None:
    """Boolean ``[rows, cols]``, True where visible; None where all is."""
    if band == FULL:
        return None
    lower, upper = band
    distance = torch.arange(cols, device=device) - torch.arange(rows, device=device).unsqueeze(1)
    mask = torch.ones(rows, cols, dtype=torch.bool, device=device)
    if lower is not None:
        mask &= distance >= lower
    if upper is not None:
        mask &= distance <= upper
    return mask


def additive_mask(rows: int, cols: int, band: Band, mask: Tensor | None, like: Tensor) -> Tensor:
    """A band and an explicit mask (bool: True is visible; or added to the logits) as one additive
    mask ``[1|b, 1|H, rows, cols]`` of the dtype of ``like``."""
    bias = torch.zeros(1, 1, rows, cols, dtype=like.dtype, device=like.device)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask.to(bias.dtype)
    visible = band_mask(rows, cols, band, like.device)
    return bias if visible is None else bias.masked_fill(~visible, -torch.inf)


class ReferenceKernel:
    """Computes and returns everything in the accumulation dtype: nothing is rounded before the merge."""

    name = "reference"

    def _logits(self, q: Tensor, k: Tensor, band: Band, scale: float, mask: Tensor | None) -> Tensor:
        logits = q @ k.mT * scale
        if band == FULL and mask is None:
            return logits
        return logits + additive_mask(q.shape[2], k.shape[2], band, mask, q)

    @staticmethod
    def _wide(q: Tensor, *rest: Tensor) -> list[Tensor]:
        """All in the accumulation dtype, K/V heads repeated to those of q."""
        dtype = accumulation_dtype(q.dtype)
        heads = q.shape[1]
        return [x.to(dtype).repeat_interleave(heads // x.shape[1], dim=1) for x in (q, *rest)]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        band: Band,
        scale: float,
        mask: Tensor | None = None,
        parts: Parts | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if parts is not None:
            return forward_each(partial(self.forward, band=band, scale=scale), q, k, v, parts)
        q, k, v = self._wide(q, k, v)
        logits = self._logits(q, k, band, scale, mask)
        lse = torch.logsumexp(logits, dim=-1)
        # A row that sees nothing has lse = -inf: weight zero, not NaN.
        weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
        return (weights if keep is None else weights * keep) @ v, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        band: Band,
        scale: float,
        mask: Tensor | None = None,
        parts: Parts | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if parts is not None:
            return backward_each(partial(self.backward, band=band, scale=scale), (dout, q, out, lse), k, v, parts)
        kv_heads = k.shape[1]
        q, k, v, out, dout = self._wide(q, k, v, out, dout)
        logits = self._logits(q, k, band, scale, mask)
        weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0).to(q.dtype).unsqueeze(-1))
        delta = (dout * out).sum(-1, keepdim=True)
        dweights = dout @ v.mT
        if keep is not None:  # the softmax is over all weights, the output from those kept
            dweights, kept = dweights * keep, weights * keep
        else:
            kept = weights
        dlogits = weights * (dweights - delta) * scale
        dq, dk, dv = dlogits @ k, dlogits.mT @ q, kept.mT @ dout

        def per_kv_head(x: Tensor) -> Tensor:
            return x.unflatten(1, (kv_heads, -1)).sum(2)

        return dq, per_kv_head(dk), per_kv_head(dv)


KERNEL = ReferenceKernel()

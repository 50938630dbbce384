"""The merge of partials and the sum of gradients in Triton, where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from hyper_cp.cli.diagnosis.findings import Finding, Results, check
from hyper_cp.ops.kernels import fused

SHAPES = [(1, 1, 1, 64), (2, 4, 300, 64), (1, 8, 1000, 128), (2, 3, 77, 80)]


def merged(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Results:
    """Return a merge into some rows of a larger output, and what it gives in fp64. Empty where Triton is not used."""
    b, h, s, d = shape
    memory = torch.zeros(b, s + 3, h, d, device=device)
    total, total_lse = memory.transpose(1, 2)[:, :, 1 : s + 1], torch.randn(b, h, s, device=device) * 5
    total.normal_()
    out, lse = torch.randn(b, s, h, d, device=device, dtype=dtype).transpose(1, 2), torch.randn_like(total_lse) * 5
    total_lse[:, :, : s // 3], lse[:, :, s // 4 : s // 2] = -torch.inf, -torch.inf
    total[:, :, : s // 3], out[:, :, s // 4 : s // 2] = 0, 0
    lses = torch.stack([total_lse, lse]).cpu().double()
    want_lse = lses.logsumexp(0)
    weights = (lses - want_lse.nan_to_num(neginf=0.0)).exp().unsqueeze(-1)
    want = (weights * torch.stack([total.cpu(), out.cpu().float()]).double()).sum(0)
    used = fused.merge(total, total_lse, out, lse)
    return [("output", total, want), ("log-sum-exp", total_lse, want_lse)] if used else []


def added(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Results:
    """Return a sum of gradients, and what it is in fp64. Empty where Triton is not used."""
    total, x = torch.randn(shape, device=device), torch.randn(shape, device=device, dtype=dtype)
    want = total.cpu().double() + x.cpu().double()
    return [("sum", total, want)] if fused.add(total, x) else []


def check_merges(device: str, dtype: torch.dtype) -> Iterator[Finding]:
    """Both kernels, on several shapes, to the bar of float32, in which they add up."""
    for shape in SHAPES:
        for what, run in (("merge", merged), ("sum", added)):
            text = f"{what} in Triton, {shape} of {dtype}"
            yield check("merges", text, torch.float32, partial(run, shape, device, dtype))

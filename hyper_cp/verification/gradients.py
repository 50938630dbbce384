"""The gradients of a run, reduced over the cp ranks unless a wrapper of the model has done that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from ..data.collectives import by_rank
from .record.trace import WRAPPERS

BUCKET = 2**22
"""Values of gradients that are reduced together."""


def gradients_of(
    model: nn.Module, inputs: Mapping[str, Tensor], mesh: DeviceMesh, average: bool | None
) -> dict[str, Tensor]:
    """The gradients of parameters and of ``inputs`` by name, on the CPU, of DTensors this rank's part.

    Args:
        average: the reduction over the cp mesh that the user makes after backward: True for the mean, False for the
            sum. None: this rank has run the whole batch, so that there is nothing to reduce.
    """
    ranks = set(mesh.mesh.flatten().tolist())
    wrapped = any(
        len(ranks & set(dist.get_process_group_ranks(m.process_group))) > 1
        for m in model.modules()
        if isinstance(m, DistributedDataParallel)
    )
    found: dict[str, Tensor] = {}
    pending: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            sharded = isinstance(p, DTensor) and len(ranks & set(p.device_mesh.mesh.flatten().tolist())) > 1
            (found if wrapped or sharded else pending)[WRAPPERS.sub("", name)] = _local_gradient(p)
    pending.update({name: _local_gradient(x) for name, x in inputs.items()})
    if average is None:
        found.update(pending)
        pending = {}
    host = {name: x.to("cpu", copy=True) for name, x in found.items()}
    for bucket in _buckets(pending):
        host.update(_reduced(bucket, mesh, bool(average)))
    return host


def _local_gradient(x: Tensor) -> Tensor:
    """This rank's part of a gradient; zeros if there is none."""
    grad = torch.zeros_like(x) if x.grad is None else x.grad
    if isinstance(grad, DTensor):  # sequence parallelism leaves sums over tp to be made when they are read
        made = [Replicate() if isinstance(p, Partial) else p for p in grad.placements]
        grad = grad.redistribute(placements=made).to_local()
    return grad.detach()


def _buckets(grads: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Gradients of one dtype, as many as travel together. (Reducing each alone would take as long as the step.)"""
    for dtype in dict.fromkeys(x.dtype for x in grads.values()):
        bucket: dict[str, Tensor] = {}
        size = 0
        for name, x in grads.items():
            if x.dtype != dtype:
                continue
            if bucket and size + x.numel() > BUCKET:
                yield bucket
                bucket, size = {}, 0
            bucket[name], size = x, size + x.numel()
        yield bucket


def _reduced(grads: Mapping[str, Tensor], mesh: DeviceMesh, average: bool) -> dict[str, Tensor]:
    flat = torch.cat([x.flatten() for x in grads.values()])
    total = by_rank(mesh, flat).cpu().double().sum(0)
    total = total / mesh.size() if average else total
    parts = total.to(flat.dtype).split([x.numel() for x in grads.values()])
    return {name: part.view(x.shape) for (name, x), part in zip(grads.items(), parts, strict=True)}

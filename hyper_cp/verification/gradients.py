"""The gradients of a run, reduced over the cp ranks unless a wrapper of the model has done that."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from ..data.collectives import by_rank
from .record.trace import WRAPPERS


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
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            sharded = isinstance(p, DTensor) and len(ranks & set(p.device_mesh.mesh.flatten().tolist())) > 1
            found[WRAPPERS.sub("", name)] = _reduced(p, mesh, None if wrapped or sharded else average)
    for name, x in inputs.items():
        found[name] = _reduced(x, mesh, average)
    return found


def _reduced(x: Tensor, mesh: DeviceMesh, average: bool | None) -> Tensor:
    grad = torch.zeros_like(x) if x.grad is None else x.grad
    if isinstance(grad, DTensor):  # sequence parallelism leaves sums over tp to be made when they are read
        made = [Replicate() if isinstance(p, Partial) else p for p in grad.placements]
        grad = grad.redistribute(placements=made).to_local()
    grad = grad.detach()
    if average is None:
        return grad.to("cpu", copy=True)
    total = by_rank(mesh, grad).cpu().double().sum(0)
    return (total / mesh.size() if average else total).to(grad.dtype)

"""Whole batches of a data loader, one after the other as this rank's shares, with their weights in an accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..mesh.arguments import check_int, check_type
from ..mesh.cp_mesh import CPMesh
from .batch import Unsplit
from .collectives import by_rank
from .loss import ranks_of


def local_batches(
    batches: Iterable[Any],
    read: Callable[[Any], Unsplit],
    device: torch.device,
    accumulate: int,
    mesh: DeviceMesh,
    cp: CPMesh,
) -> Iterator[Any]:
    """See :meth:`hyper_cp.ContextParallelHandler.loader`; ``read`` reads a whole batch, and ``mesh`` is the one over
    whose ranks labels are counted: those of ``cp``, or more."""
    check_int("accumulate", accumulate, "It is the number of micro-batches before a step of the optimizer")
    check_type("batches", batches, Iterable, "Whole batches are read from it. Pass a DataLoader, or a list of batches")
    source, ranks = iter(batches), ranks_of(mesh) if accumulate > 1 else ()
    while group := [read(whole) for whole in islice(source, accumulate)]:
        labels = [batch.labels for batch in group]
        weights = _weights(labels, device, mesh if mesh.size() > cp.size else None) if accumulate > 1 else [None]
        for number, (batch, weight) in enumerate(zip(group, weights, strict=True), 1):
            local = _moved(batch.split(), device)  # only now: what is split is the batch that runs next
            local.weights = [1.0] * (1 if batch.labels is None else len(batch.labels)) if weight is None else weight
            local.weight, local.last = local.weights[0], number == len(group)
            local.counted_on = cp.batch.counted_on = ranks
            yield local


def _weights(labels: list[Tensor | None], device: torch.device, mesh: DeviceMesh | None) -> list[Any]:
    """The shares of each micro-batch in the labels of all, over the ranks of ``mesh``: one for each kind of labels."""
    found = [x for x in labels if x is not None]
    if len(found) < len(labels):
        raise ValueError(
            "accumulate > 1 with a batch that has neither labels nor shift_labels. A micro-batch weighs as much as it "
            "has labels. Pass them in a dict batch, or accumulate=1 and multiply by weights of your own"
        )
    counts = torch.stack([x.to(device) for x in found])
    if mesh is not None:  # all ranks of a cp mesh have counted the same labels
        counts = by_rank(mesh, counts).sum(0)
    total = counts.sum(0).clamp(min=1)
    # Numbers where the host does not wait for them: a tensor of another dtype would change that of the loss.
    return (counts.double() / total).tolist() if device.type == "cpu" else [[*x.unbind()] for x in counts / total]


def _moved(batch: Any, device: torch.device) -> Any:
    """The same kind of container with its tensors on a device."""

    def at(x: Any) -> Any:
        return x.to(device, non_blocking=True) if isinstance(x, Tensor) else x

    made = type(batch)({name: at(x) for name, x in batch.items()} if isinstance(batch, dict) else map(at, batch))
    made.__dict__.update(vars(batch))
    return made

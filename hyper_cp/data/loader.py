"""Whole batches of a data loader, one after the other as this rank's shares, with their weights in an accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..mesh.arguments import check_int, check_type
from ..mesh.batch_state import BatchState
from ..mesh.cp_mesh import CPMesh
from ..mesh.split import Counted
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
    depth: int = 0,
) -> Iterator[Any]:
    """See :meth:`hyper_cp.ContextParallelHandler.loader`; ``read`` reads a whole batch, whose labels are those of next
    tokens and of ``depth`` further ones, and ``mesh`` is the one over whose ranks they are counted: those of ``cp``,
    or more."""
    check_int("accumulate", accumulate, "It is the number of micro-batches before a step of the optimizer")
    check_type("batches", batches, Iterable, "Whole batches are read from it. Pass a DataLoader, or a list of batches")
    _refuse_second_count(batches, accumulate)
    source, ranks = iter(batches), ranks_of(mesh) if accumulate > 1 else ()
    more = mesh.size() > cp.size
    counted = Counted()
    try:
        while group := [read(whole) for whole in islice(source, accumulate)]:
            labels = [batch.labels for batch in group]
            counts = _counts(labels, device, accumulate, mesh if more else None) if accumulate > 1 else None
            _refuse_cut_group(batches, len(group), accumulate)  # now all ranks have as many
            weights: Any = [None] if counts is None else _weights(counts)
            for number, (batch, weight) in enumerate(zip(group, weights, strict=True), 1):
                local = _moved(batch.split(), device, cp.batch)  # only now: what is split is the batch that runs next
                local.weights = [1.0] * (1 if batch.labels is None else len(batch.labels)) if weight is None else weight
                local.weight, local.last = local.weights[0], number == len(group)
                numbers: Any = ()
                if counts is not None and device.type == "cpu":  # all ranks of a cp mesh have counted the same labels
                    numbers = (counts[number - 1] // (cp.size * cp.batch.copies(ranks) if more else 1)).tolist()
                local.counted = cp.batch.counted = counted = Counted(ranks, tuple(numbers))
                yield local
    finally:
        if cp.batch.counted is counted:  # later losses are of other batches
            cp.batch.counted = Counted()
    if more and accumulate > 1:  # ranks that have another group would wait for this one
        _over_ranks(torch.empty(0, 1 + depth, dtype=torch.int64, device=device), accumulate, mesh)


def _steps_of_accelerator(batches: Any) -> tuple[int, bool]:
    """The ``gradient_accumulation_steps`` of the Accelerator that a loader belongs to (1: none), and whether it also
    steps at the loader's end."""
    state = getattr(batches, "gradient_state", None)
    return getattr(state, "num_steps", 1), getattr(state, "sync_with_dataloader", False)


def _refuse_second_count(batches: Any, accumulate: int) -> None:
    """Raise ``ValueError`` for a loader of accelerate at whose end ``accelerator.accumulate`` steps: all micro-batches
    of the last group are read before the first of them runs, so it would step after each."""
    steps, at_end = _steps_of_accelerator(batches)
    if accumulate > 1 and steps > 1 and at_end:
        raise ValueError(
            f"accumulate={accumulate} reads that many micro-batches ahead, and this loader belongs to an Accelerator "
            f"with gradient_accumulation_steps={steps}, which steps once its loader has ended. It would step after "
            "each micro-batch of the last group. Give the Accelerator "
            f"GradientAccumulationPlugin(num_steps={steps}, sync_with_dataloader=False), and multiply the loss by "
            "batch.weight * accelerator.gradient_accumulation_steps, by which accelerator.backward divides; or leave "
            "accelerator.accumulate out and step when batch.last is True"
        )


def _refuse_cut_group(batches: Any, found: int, accumulate: int) -> None:
    """Raise ``ValueError`` for a last group of fewer micro-batches, if ``accelerator.accumulate`` counts them: it would
    step in the middle of the next epoch's first group."""
    steps, _ = _steps_of_accelerator(batches)
    if found < accumulate and found % steps:
        raise ValueError(
            f"batches ended after {found} of {accumulate} micro-batches, and this loader belongs to an Accelerator "
            f"with gradient_accumulation_steps={steps}, which steps after every {steps} of them: in the middle of the "
            "next group. Leave accelerator.accumulate and gradient_accumulation_steps out, use "
            "accelerator.no_sync(model) unless batch.last is True, and step when it is; or give the loader a multiple "
            "of them (drop_last=True)"
        )


def _counts(labels: list[Tensor | None], device: torch.device, accumulate: int, mesh: DeviceMesh | None) -> Tensor:
    """The labels of each micro-batch, over the ranks of ``mesh``: one number for each kind of labels."""
    found = [x for x in labels if x is not None]
    if len(found) < len(labels):
        raise ValueError(
            "accumulate > 1 with a batch that has neither labels nor shift_labels. A micro-batch weighs as much as it "
            "has labels. Pass them in a dict batch, or accumulate=1 and multiply by weights of your own"
        )
    counts = torch.stack([x.to(device) for x in found])
    return counts if mesh is None else _over_ranks(counts, accumulate, mesh)


def _over_ranks(counts: Tensor, accumulate: int, mesh: DeviceMesh) -> Tensor:
    """The sums of such numbers over the ranks of ``mesh``, all of which have as many micro-batches."""
    missing = accumulate - len(counts)
    of_ranks = by_rank(mesh, torch.cat([counts, counts.new_full((missing, *counts.shape[1:]), -1)]))
    if missing or counts.device.type == "cpu":  # elsewhere the host would wait, in the middle of an epoch
        numbers = (of_ranks.reshape(mesh.size(), accumulate, -1)[..., 0] >= 0).sum(1).tolist()
        if len({*numbers}) > 1:
            raise ValueError(
                f"batches ended after {numbers} of {accumulate} micro-batches on ranks {mesh.mesh.flatten().tolist()}. "
                "All ranks of the mesh step together, and some would wait for the others. Give each data-parallel rank "
                "as many batches (drop_last=True, or a sampler that fills up)"
            )
    return of_ranks[:, : len(counts)].sum(0)


def _weights(counts: Tensor) -> list[Any]:
    """The shares of each micro-batch in the labels of all."""
    total = counts.sum(0).clamp(min=1)
    # Numbers where the host does not wait for them: a tensor of another dtype would change that of the loss.
    if counts.device.type == "cpu":
        return (counts.double() / total).tolist()
    return [[*x.unbind()] for x in counts / total]


def _moved(batch: Any, device: torch.device, state: BatchState) -> Any:
    """The same kind of container with its tensors on a device, of which the state of the batch knows the same."""

    def at(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        moved = x.to(device, non_blocking=True)
        state.record_moved(x, moved)
        return moved

    make = getattr(batch, "_make", type(batch))  # a named tuple takes its fields one by one
    made = make({name: at(x) for name, x in batch.items()} if isinstance(batch, dict) else map(at, batch))
    made.__dict__.update(vars(batch))
    return made

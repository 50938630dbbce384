"""``DynamicBatches``: global batches and their plans, made ahead in a data loader's workers, and resumed anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..mesh.arguments import check_type, is_int
from .dynamic import DynamicContextParallel, Plan, listed


@dataclass(frozen=True)
class DynamicBatch:
    """A global batch, as one rank needs it.

    Attributes:
        plan: its micro-batches, for :func:`hyper_cp.dynamic_steps`; the same on every rank.
        samples: items of the dataset by their place in the plan: those that this rank runs, or if it runs none the
            shortest one, as ``step.pack`` expects.
        state: the position after this batch, for :meth:`DynamicBatches.load_state_dict`. Save it with a checkpoint
            that is written after this batch.
    """

    plan: Plan
    samples: dict[int, Any]
    state: dict[str, int]


class DynamicBatches(IterableDataset[DynamicBatch]):
    """Global batches of a dataset, shuffled anew in every epoch, and planned in a data loader's workers. ::

        batches = DynamicBatches(dataset, lengths, scheduler, batch_size=64, rank=family.rank, seed=1)
        for batch in DataLoader(batches, batch_size=None, num_workers=2):
            ids = {i: sample["input_ids"] for i, sample in batch.samples.items()}
            for step in dynamic_steps(batch.plan, family):
                ...
            optimizer.step()
            save(model, optimizer, batch.state)  # the data loader has read ahead: its batches know their own places
        batches.load_state_dict(batch.state)  # for the next epoch; after a restart: a saved one

    An iteration runs from the position up to the end of the epoch, whose last batch may be smaller. The order depends
    on seed and epoch only, and positions count samples of the global batch: a run resumes at the same sample with
    other numbers of ranks, degrees, budgets and batch sizes. (torchdata's ``StatefulDataLoader`` saves the position at
    which the iteration began. Save ``batch.state``.)

    Args:
        dataset: anything with ``dataset[index]``; each rank reads only the samples that it runs.
        lengths: tokens of each sample, the same on every rank; ``dataset[i]`` has ``lengths[i]`` of them.
        scheduler: plans the batches.
        batch_size: samples of a global batch, of all ranks together.
        rank: this rank's place in the family, ``family.rank``.
        seed: of the order of samples, the same on every rank.

    Raises:
        ValueError: if a sample does not fit into the scheduler's budget at its widest degree, or for numbers that are
            not positive.
    """

    def __init__(
        self,
        dataset: Any,
        lengths: Sequence[int],
        scheduler: DynamicContextParallel,
        *,
        batch_size: int,
        rank: int,
        seed: int = 0,
    ) -> None:
        check_type("scheduler", scheduler, DynamicContextParallel, "It plans batches. Pass a DynamicContextParallel")
        for name, value, least in (("batch_size", batch_size, 1), ("rank", rank, 0), ("seed", seed, 0)):
            if not is_int(value) or value < least:
                raise ValueError(f"{name}={value!r} must be an int of at least {least}. Batches depend on it. Pass one")
        if rank >= scheduler.size:
            raise ValueError(
                f"rank={rank} is not below {scheduler.size}. It is one of the ranks of the scheduler's family. Pass "
                "family.rank"
            )
        self.dataset, self.lengths, self.scheduler = dataset, listed("lengths", lengths), scheduler
        self.batch_size, self.rank, self.seed = batch_size, rank, seed
        samples = len(dataset) if hasattr(dataset, "__len__") else len(self.lengths)
        if not self.lengths or samples != len(self.lengths):
            raise ValueError(
                f"lengths has {len(self.lengths)} entries, and the dataset {samples} samples. Batches are planned "
                "by lengths. Pass one for each sample, and at least one"
            )
        scheduler.least_degree(self.lengths, self.lengths.index(max(self.lengths)))  # raises if it does not fit
        # In shared memory: workers that persist see it change.
        self._position = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()

    def state_dict(self) -> dict[str, int]:
        """The position at which iterations begin: seed, epoch, samples of the epoch that are done, and samples in
        all."""
        epoch, samples = self._position.tolist()
        return self._state(epoch, samples)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Begin the next iteration at a position: the ``state`` of a batch, to continue after this batch.

        Raises:
            ValueError: if the state has another seed or another number of samples, which make another order.
        """
        found = {name: int(state[name]) for name in self.state_dict()}
        for name, own in (("seed", self.seed), ("of", len(self.lengths))):
            if found[name] != own:
                raise ValueError(
                    f"state has {name}={found[name]}, and these batches {name}={own}. Samples would come twice or "
                    "never, since their order depends on seed and number. Pass those of the saved run"
                )
        self._position.copy_(torch.tensor([found["epoch"], found["samples"]], device="cpu"))

    def _state(self, epoch: int, samples: int) -> dict[str, int]:
        total = len(self.lengths)
        epoch, samples = (epoch + 1, 0) if samples >= total else (epoch, samples)
        return {"seed": self.seed, "epoch": epoch, "samples": samples, "of": total}

    def __iter__(self) -> Iterator[DynamicBatch]:
        epoch, start = self._position.tolist()
        seeded = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.lengths), generator=seeded, device="cpu").tolist()
        worker = get_worker_info()  # the loader takes a batch from each worker in turn
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for begin in islice(range(start, len(order), self.batch_size), first, None, every):
            yield self._batch(order[begin : begin + self.batch_size], epoch, begin)

    def _batch(self, chosen: list[int], epoch: int, begin: int) -> DynamicBatch:
        lengths = [self.lengths[i] for i in chosen]
        plan = replace(self.scheduler.plan(lengths), of=tuple(chosen))  # other samples may have the same lengths
        own = sorted(i for m in plan.of_rank(self.rank) for i in m.samples) or [lengths.index(min(lengths))]
        samples = {i: self.dataset[chosen[i]] for i in own}
        return DynamicBatch(plan, samples, self._state(epoch, begin + len(chosen)))

"""``dynamic_steps``: micro-batches of a dynamic plan as steps that all ranks run together, under FSDP2 and DDP too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .data.batch import LocalBatch
from .data.dynamic import MicroBatch, Plan
from .data.loss import check_gradients
from .handler import ContextParallelHandler
from .mesh.agreement import digest
from .mesh.arguments import check_type
from .mesh.family import MeshFamily
from .mesh_swap import context_parallel_mesh
from .ops import max_logits
from .schedule.documents import documents_table, mark_tokens
from .schedule.layout import by_documents

_IDLE_TOKENS = 8
"""Tokens of a step in which a rank has no micro-batch."""
_OF_LABELS = (torch.int32, torch.int64)


@dataclass(eq=False)
class DynamicStep:
    """A forward and a backward that all ranks of a family run at the same time, each in a group of its own.

    Attributes:
        micro_batch: this rank's micro-batch. None: the rank runs a few tokens of padding without a loss, since
            FSDP2 and DDP communicate over all ranks in every forward or backward.
        last: True for the last step before the optimizer's.
        name: "step 1 of 3", for errors.
        done: True when a block of its :meth:`mesh` has ended without an exception.
    """

    family: MeshFamily
    micro_batch: MicroBatch | None
    last: bool
    name: str
    done: bool = field(default=False, init=False)

    @property
    def degree(self) -> int:
        """The ranks that share the sequence."""
        return 1 if self.micro_batch is None else self.micro_batch.degree

    @contextmanager
    def mesh(self, model: nn.Module) -> Iterator[ContextParallelHandler]:
        """A block in which the styled modules of ``model`` run on the mesh of this step, with its documents
        (``handler.pool`` returns one value for each sample of the micro-batch).

        Under FSDP2, parameters without a gradient in a step (experts that get no token of it) are reduced as zeros from
        now on, where torch can (``set_reduce_scatter_unused_params``).

        Raises:
            TypeError: if ``model`` is no module: a pipeline's stage or schedule, say, whose ranks run different
                micro-batches at the same time.
            ValueError: on every rank, if ranks enter different steps. Steps are compared the first time that there is a
                step of this number.
        """
        check_type("model", model, nn.Module, "Its styled modules change their mesh. Pass the model, not a pipeline")
        _agree(self.family, self.name)
        for module in model.modules():
            if isinstance(module, FSDPModule) and hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True, recurse=False)
        batch, m = LocalBatch(), self.micro_batch  # knows which of its positions are padding, and no document
        batch.length = batch.padded_length = _IDLE_TOKENS
        batch.of_samples = True
        if m is not None:
            batch.length, batch.padded_length = sum(m.lengths), m.length
        try:
            with (
                context_parallel_mesh(model, self.family.cp(self.degree)) as handler,
                max_logits.ignored(model) if m is None else nullcontext(),
            ):
                ends = None if m is None else m.documents
                if ends is not None or by_documents(handler.layout):
                    table: Any = documents_table(ends or (0, batch.padded_length))
                    inside = torch.arange(batch.padded_length, device="cpu")[None] < batch.length
                    batch.documents = table if inside.all() else mark_tokens(table, inside)
                with handler.documents(batch):
                    yield handler
        except BaseException:
            if self.family.agreement is not None:
                self.family.agreement.compare_next_call()  # have the others been interrupted, too?
            raise
        self.done = True

    def pack(self, samples: Sequence[Tensor] | Mapping[int, Tensor], pad_value: float = 0) -> Tensor:
        """The samples of this step one after the other, ``[1, S, ...]`` with padding, for ``handler.dispatch``.

        Args:
            samples: tensors ``[length, ...]`` of all samples of the plan, in its order, or by their place in it; those
                of other steps are not read, and may be missing. A rank without a micro-batch needs any one.
            pad_value: the value of padding; -100 for labels.

        Raises:
            ValueError: for other lengths than the planned ones.
        """
        m = self.micro_batch
        if m is None:
            like = next(iter(samples.values() if isinstance(samples, Mapping) else samples))
            return like.new_full((1, _IDLE_TOKENS, *like.shape[1:]), pad_value)
        own = [samples[i] for i in m.samples]
        if (lengths := tuple(len(x) for x in own)) != m.lengths:
            raise ValueError(
                f"samples {list(m.samples)} have {list(lengths)} tokens, and were planned with {list(m.lengths)}. The "
                "degree and the documents of a step are those of the planned lengths. Pass one tensor for each length "
                "that the plan was made of, in the same order"
            )
        if pad_value != -100 and any(x.dtype in _OF_LABELS and bool((x == -100).any()) for x in own):
            warnings.warn(
                f"samples hold -100, as labels that do not count do, and pad_value={pad_value}: padding would be a "
                "label that counts. Pass pad_value=-100 for labels",
                stacklevel=2,
            )
        rest = own[0].new_full((m.length - sum(lengths), *own[0].shape[1:]), pad_value)
        return torch.cat([*own, rest]).unsqueeze(0)

    def positions(self) -> Tensor:
        """Positions ``[1, S]`` that count from 0 in every sample, for ``handler.dispatch``."""
        m = self.micro_batch
        lengths = (_IDLE_TOKENS,) if m is None else (*m.lengths, m.length - sum(m.lengths))
        return torch.cat([torch.arange(n, device="cpu") for n in lengths]).unsqueeze(0)

    def loss(self, total: Tensor, tokens: float | Tensor, gradients: str = "mean") -> Tensor:
        """This rank's part of the mean over the global batch.

        Args:
            total: the sum of the losses of this rank's tokens in this step. All ranks of the step have the same losses
                of what ``handler.pool`` returns: pass their sum divided by ``step.degree``, or they count repeatedly.
                Do not pass ``handler.mean_loss``, which is a mean over the step's tokens on every rank.
            tokens: the tokens of the whole global batch that have a loss, the same on every rank; for losses of whole
                samples the number of samples.
            gradients: ``"mean"`` under DDP and FSDP, which average gradients over the ranks of the family; ``"sum"``
                if you add them up.

        Returns:
            A scalar, whose sum over all steps and ranks is the mean (times the number of ranks, for ``"mean"``).
            Without a micro-batch it is 0, with gradients of 0 for all parameters.
        """
        check_gradients(gradients)
        factor = self.family.size if gradients == "mean" else 1
        return total * (0.0 if self.micro_batch is None else factor / tokens)


def dynamic_steps(plan: Plan, family: MeshFamily) -> Iterator[DynamicStep]:
    """The steps of a plan on this rank: the same number on every rank, whatever the number of its micro-batches. ::

        plan = scheduler.plan([len(x) for x in ids])  # of the global batch
        for step in dynamic_steps(plan, family):
            model.set_requires_gradient_sync(step.last)  # FSDP2, if memory allows; DDP: model.no_sync() before the last
            with step.mesh(model) as handler:
                whole = step.pack(ids), step.positions(), step.pack(labels, -100)
                tokens, positions, targets = (handler.dispatch(x, 1) for x in whole)
                logits = model(tokens, positions)
                total = F.cross_entropy(logits[0], targets[0], reduction="sum", ignore_index=-100)
                step.loss(total, loss_tokens).backward()
        optimizer.step()

    Gradients are those of one device on the whole global batch. FSDP2 gathers parameters for every step on all ranks,
    so a step takes as long as its slowest micro-batch. (Without FSDP2 and DDP, ranks need no equal numbers: see
    :class:`DynamicContextParallel`.)

    All ranks of the family make this call together: they compare every plan, and each step (the first, the second, ...)
    only the first time that there is a step of this number.

    Args:
        plan: what :meth:`DynamicContextParallel.plan` returns, of a scheduler for this family.
        family: all ranks that reduce gradients together: the mesh of FSDP2 or DDP has the ranks of ``family.dp(1)``.

    Raises:
        ValueError: if the plan is one for another number of ranks, or has no samples. On every rank: if ranks have
            different plans, or (while iterating) one skips a step that others run.
        RuntimeError: while iterating, if this rank has skipped or not finished the previous step.
    """
    check_type("plan", plan, Plan, "It has the micro-batches. Pass what DynamicContextParallel.plan returns")
    check_type("family", family, MeshFamily, "It has a mesh for every degree. Pass what split_cp_mesh returns")
    if plan.size != family.size or not plan.micro_batches:
        raise ValueError(
            f"plan is one for {plan.size} ranks with {len(plan.micro_batches)} micro-batches, and the family has "
            f"{family.size} ranks. A plan gives every rank of its family the same number of steps, at least one. Plan "
            "at least one sample with DynamicContextParallel(family, ...)"
        )
    samples = sum(len(m.samples) for m in plan.micro_batches)
    found = digest(repr((plan.micro_batches, plan.of)).encode())
    _agree(family, f"those of a plan of {samples} samples ({found})", True)
    rounds = plan.rounds
    own = {at: m for at, m in zip(rounds, plan.micro_batches, strict=True) if family.rank in m.ranks}
    last = max(rounds)
    steps = [DynamicStep(family, own.get(at), at == last, f"step {at + 1} of {last + 1}") for at in range(last + 1)]
    return _in_turn(steps)


def _in_turn(steps: list[DynamicStep]) -> Iterator[DynamicStep]:
    """The steps; raise after one that this rank has not run, before it meets other ranks in another one."""
    for step in steps:
        yield step
        if step.done:
            continue
        agreement = step.family.agreement
        if agreement is not None and not agreement.known("steps", _signature(step.name)):
            _agree(step.family, f"not {step.name}")  # the other ranks compare this step: all of them raise
        raise RuntimeError(
            f"{step.name} was left out or interrupted on this rank. Other ranks may wait in it, and the gradients are "
            "not those of the whole batch. Run every step inside the loop, with `with step.mesh(model) as handler`, "
            "also one without a micro-batch. After an exception on every rank, set the gradients to zero and begin "
            "with dynamic_steps(plan, family) again; after one on this rank only, end the job"
        )


def _signature(steps: str) -> tuple[tuple[str, str]]:
    return (("steps", steps),)


def _agree(family: MeshFamily, steps: str, always: bool = False) -> None:
    """Compare what the ranks of the family are about to run."""
    if family.agreement is not None:
        mesh = f"family of {family.size} ranks"
        family.agreement.compare_if_new("steps", _signature(steps), mesh, "dynamic_steps", always=always)

"""``dynamic_steps``: micro-batches of a dynamic plan as steps that all ranks run together, under FSDP2 and DDP too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .data.dynamic import MicroBatch, Plan
from .data.loss import check_gradients
from .handler import ContextParallelHandler
from .mesh.arguments import check_type
from .mesh.family import MeshFamily
from .mesh_swap import context_parallel_mesh

_IDLE_TOKENS = 8
"""Tokens of a step in which a rank has no micro-batch."""


@dataclass(frozen=True, eq=False)
class DynamicStep:
    """A forward and a backward that all ranks of a family run at the same time, each in a group of its own.

    Attributes:
        micro_batch: that of this rank. None: it has none, and runs a few tokens of padding without a loss, since
            FSDP2 and DDP communicate over all ranks in every forward or backward.
        last: True for the last step before the optimizer's.
    """

    family: MeshFamily
    micro_batch: MicroBatch | None
    last: bool

    @property
    def degree(self) -> int:
        """The ranks that share the sequence."""
        return 1 if self.micro_batch is None else self.micro_batch.degree

    @contextmanager
    def mesh(self, model: nn.Module) -> Iterator[ContextParallelHandler]:
        """A block in which the styled modules of ``model`` run on the mesh of this step, with its documents."""
        documents = None if self.micro_batch is None else self.micro_batch.documents
        with context_parallel_mesh(model, self.family.cp(self.degree)) as handler, handler.documents(documents):
            yield handler

    def pack(self, samples: Sequence[Tensor], pad_value: float = 0) -> Tensor:
        """The samples of this step one after the other, ``[1, S, ...]`` with padding, for ``handler.dispatch``.

        Args:
            samples: tensors ``[length, ...]`` of all samples of the plan, in its order; those of other steps are not
                read.
        """
        m = self.micro_batch
        if m is None:
            return samples[0].new_full((1, _IDLE_TOKENS, *samples[0].shape[1:]), pad_value)
        own = [samples[i] for i in m.samples]
        if (lengths := tuple(len(x) for x in own)) != m.lengths:
            raise ValueError(
                f"samples {list(m.samples)} have {list(lengths)} tokens, and were planned with {list(m.lengths)}. Pass "
                "one tensor for each length that the plan was made of, in the same order"
            )
        rest = own[0].new_full((m.length - sum(lengths), *own[0].shape[1:]), pad_value)
        return torch.cat([*own, rest]).unsqueeze(0)

    def positions(self) -> Tensor:
        """Positions ``[1, S]`` that count from 0 in every sample, for ``handler.dispatch``."""
        m = self.micro_batch
        lengths = (_IDLE_TOKENS,) if m is None else (*m.lengths, m.length - sum(m.lengths))
        return torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)

    def loss(self, total: Tensor, tokens: float | Tensor, gradients: str = "mean") -> Tensor:
        """This rank's part of the mean over the global batch.

        Args:
            total: the sum of the losses of this rank's tokens in this step.
            tokens: the tokens of the whole global batch that have a loss, the same on every rank.
            gradients: ``"mean"`` under DDP and FSDP, which average gradients over the ranks of the family; ``"sum"``
                if you add them up.

        Returns:
            A scalar, whose sum over all steps and ranks is the mean (times the number of ranks, for ``"mean"``).
            Without a micro-batch it is 0, with gradients of 0 for all parameters.
        """
        check_gradients(gradients)
        factor = self.family.size if gradients == "mean" else 1
        return total * (0.0 if self.micro_batch is None else factor / tokens)


def dynamic_steps(plan: Plan, family: MeshFamily) -> list[DynamicStep]:
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

    Args:
        plan: what :meth:`DynamicContextParallel.plan` returns, of a scheduler for this family.
        family: all ranks that reduce gradients together: the mesh of FSDP2 or DDP has the ranks of ``family.dp(1)``.

    Raises:
        ValueError: if the plan is one for another number of ranks, or has no samples.
    """
    check_type("plan", plan, Plan, "It has the micro-batches. Pass what DynamicContextParallel.plan returns")
    check_type("family", family, MeshFamily, "It has a mesh for every degree. Pass what split_cp_mesh returns")
    if plan.size != family.size or not plan.micro_batches:
        raise ValueError(
            f"plan is one for {plan.size} ranks with {len(plan.micro_batches)} micro-batches, and the family has "
            f"{family.size} ranks. Plan at least one sample with DynamicContextParallel(family, ...)"
        )
    rounds = plan.rounds
    own = {at: m for at, m in zip(rounds, plan.micro_batches, strict=True) if family.rank in m.ranks}
    last = max(rounds)
    return [DynamicStep(family, own.get(at), at == last) for at in range(last + 1)]

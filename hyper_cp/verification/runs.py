"""Run a batch with context parallelism, and whole on this rank alone, through one training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ..data.batch import TOKENS, LocalBatch
from ..data.sharding import resolve_layout
from ..handler import ContextParallelHandler
from ..mesh.comm import record_traffic
from ..mesh_swap import context_parallel_mesh
from ..module._torch.modules import hook_owners
from ..module.dtensor import CPDims
from ..module.mesh_binding import bindings
from ..schedule.documents import read
from ..style import ContextParallel
from .gradients import gradients_of
from .record.share import Positions
from .record.tensor_parallel import Unreduced
from .record.trace import Recorder, Trace
from .record.untouched import untouched
from .steps import integrated_loss, styled_loss

LossFn = Callable[[Any, Any, ContextParallelHandler], Tensor]
LARGEST_COUNT = 512
"""Bytes. A run on one rank may gather the counts of a loss (over dp), but not keys and values."""


HALF = (torch.bfloat16, torch.float16)


class WatchedHandler(ContextParallelHandler):
    """A handler that records the first sequence that it splits."""

    sequence: tuple[int, Tensor | None] | None = None
    """Its length without padding, and the documents by which it was placed."""

    def _local_share(
        self, tensor: Tensor, seq_dim: int, documents: Tensor | None, pad_value: float | None = None
    ) -> Tensor:
        share = super()._local_share(tensor, seq_dim, documents, pad_value)
        if self.sequence is None:
            self.sequence = tensor.shape[seq_dim], documents
        return share


@dataclass
class Runs:
    """The runs of one verification, and all that they share."""

    model: nn.Module
    mesh: DeviceMesh
    alone: DeviceMesh
    """The mesh of this rank alone."""
    batch: Any
    style: ContextParallel | str
    loss_fn: LossFn | None
    average: bool
    """True if the user averages gradients over the cp ranks, False if they are summed."""
    sequence: Positions | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.handler = WatchedHandler(self.mesh, self.style)
        self.known = _read(self.handler, self.batch)
        """The batch as the handler reads it; None if only ``loss_fn`` can read it."""
        self.documents = self.known is not None and _divided(self.known)
        """True if the batch has packed documents or padding."""
        self.expected = None if self.known is None else self._positions(self.known.length, self.known.documents)
        self.handler.sequence = None
        self.cp_dims = CPDims(self.mesh)

    def positions(self) -> Positions | None:
        """The positions of this rank, as soon as they are known: from the first tensor that the handler splits, or
        from the batch."""
        if self.sequence is None and self.handler.sequence is not None:
            length, table = self.handler.sequence
            # A batch may have been padded before it was split.
            if self.known is not None and self.known.padded_length == length:
                length = self.known.length
            self.sequence = self._positions(length, table)
        return self.sequence or self.expected

    def _positions(self, length: int, table: Tensor | None) -> Positions:
        padded = self.handler.padded_length(length)
        alone = [ContextParallelHandler(self.alone, x).padded_length(length) for x in (self.style, self.handler.layout)]
        at = resolve_layout(self.handler, padded, table).positions(self.handler.cp.rank).cpu()
        return Positions(at, length, padded, tuple(dict.fromkeys((length, *alone))), self._padding(length))

    def _padding(self, length: int) -> Tensor | None:
        mask = self.batch.get("attention_mask") if isinstance(self.batch, Mapping) else None
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != length:
            return None
        hidden = mask.cpu() == 0
        return hidden if bool(hidden.any()) else None

    @property
    def length(self) -> int:
        """Positions of the sequence."""
        return 0 if self.sequence is None else self.sequence.length

    # ---- the runs

    def parallel(self) -> Trace:
        """The run with context parallelism."""
        state, unreduced = self.handler.cp.batch, Unreduced(self.cp_dims)
        recorder = Recorder(
            self.model,
            self.cp_dims,
            self.positions,
            documents=lambda: state.documents is not None,
            after=unreduced.check,
        )
        with untouched(self.model, self.mesh.device_type):
            trace = self._run(self.model, recorder, self.handler)
        self.sequence = self.positions()
        if self.sequence is None:
            raise ValueError(
                f"the length of the sequence in a batch of type {type(self.batch).__name__} is unknown. Nothing was "
                "split by the handler that loss_fn received. Split the batch with it, or pass a dict with input_ids"
            )
        return trace

    def whole(self, like: Trace, exact: bool = False) -> Trace:
        """The run of the whole batch on this rank, of which the rows of ``like`` are kept. ``exact``: on a copy of the
        model in fp32."""
        model = copy.deepcopy(self.model).float() if exact else self.model
        with ExitStack() as stack:
            stack.enter_context(untouched(model, self.mesh.device_type))
            if bindings(model):
                stack.enter_context(context_parallel_mesh(model, self.alone))
            handler = ContextParallelHandler(self.alone, self.style)
            if self.documents and not like.documents:  # the run that should be right must have them
                stack.enter_context(handler.documents(_read(handler, self.batch)))
            if exact:
                stack.enter_context(_WithoutAutocast(self.mesh.device_type))
            traffic = stack.enter_context(record_traffic())
            trace = self._run(model, Recorder(model, self.cp_dims, self.positions, like), handler, exact)
        sent = max((size for _, size in traffic.entries), default=0)
        if sent > LARGEST_COUNT:
            raise ValueError(
                f"loss_fn sent {sent} bytes over a cp mesh in the run without context parallelism. It uses a mesh of "
                "its own, so there is nothing to compare with. In loss_fn use the mesh of its third argument, "
                "handler.mesh, for context_parallel blocks and attention calls"
            )
        return trace

    def _run(self, model: nn.Module, recorder: Recorder, handler: ContextParallelHandler, exact: bool = False) -> Trace:
        batch, leaves = _fresh(self.batch, exact)
        parallel = handler.mesh.size() > 1
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            with recorder as trace:
                loss = self._loss(model, batch, handler)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
                got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"loss_fn returned {got}. verify compares one loss. Return a tensor with one number")
            trace.loss = loss.detach().double().item()
            if loss.requires_grad:
                loss.backward()
            average = self.average if parallel else None
            trace.gradients = gradients_of(model, leaves, self.mesh, average)
        return trace

    def _loss(self, model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
        if self.loss_fn is not None:
            return self.loss_fn(model, batch, handler)
        share = integration(model)
        if share is not None:
            return integrated_loss(model, share(handler, batch), handler, self.positions)
        return styled_loss(model, batch, handler, self.positions)


class _WithoutAutocast(TorchFunctionMode):
    """While entered, every function computes in the dtypes of its arguments, also inside autocast."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch.autocast(self.device_type, enabled=False):
            return func(*args, **(kwargs or {}))


def integration(model: nn.Module) -> Callable[[ContextParallelHandler, Any], Any] | None:
    """The function that splits a batch for a model that an integration has prepared; None for other models."""
    owners = (owner for module in model.modules() for owner in hook_owners(module))
    return next((owner.share for owner in owners if hasattr(owner, "share")), None)


def _fresh(batch: Any, exact: bool) -> tuple[Any, dict[str, Tensor]]:
    """A copy of a batch for one run (``exact``: in fp32), and those of its tensors whose gradients are compared."""
    leaves: dict[str, Tensor] = {}

    def copied(name: Any, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        wanted = x.requires_grad or (name in TOKENS and x.is_floating_point())
        x = x.detach().float() if exact and x.dtype in HALF else x.detach().clone()
        if wanted:
            leaves[f"batch[{name!r}]"] = x.requires_grad_()
        return x

    if isinstance(batch, Mapping):
        return {name: copied(name, x) for name, x in batch.items()}, leaves
    if isinstance(batch, (list, tuple)):
        return type(batch)(copied(i, x) for i, x in enumerate(batch)), leaves
    return batch, leaves


def _read(handler: ContextParallelHandler, batch: Any) -> Any:
    """The batch as the handler reads it by itself, or None."""
    try:
        return handler.get_batch_on_this_cp_rank(batch)
    except (TypeError, ValueError):
        return None


def _divided(batch: LocalBatch) -> bool:
    """True if a batch has packed documents or padding inside its length."""
    if batch.documents is None:
        return False
    return any(0 < b < batch.length for row in read(batch.documents).rows for b in row)

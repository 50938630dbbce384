"""Run a batch with context parallelism, and whole on this rank alone, through one training step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from .._torch.modules import hook_owners, is_compiled
from ..data.batch import TOKENS, LocalBatch
from ..data.collectives import by_rank
from ..data.sharding import resolve_layout
from ..handler import ContextParallelHandler
from ..mesh.comm import record_traffic
from ..mesh_swap import context_parallel_mesh
from ..module.dtensor import CPDims
from ..module.mesh_binding import bindings
from ..schedule.documents import read
from ..style import ContextParallel
from .model_state import restore_model_state
from .record import WRAPPERS, Recorder, Trace, tensors
from .share import Positions, wide

LossFn = Callable[[Any, Any, ContextParallelHandler], Tensor]
LARGEST_COUNT, OF_A_RANK = 512, 16
"""Bytes, and bytes for each rank of the job. A run on one rank may gather the counts of a loss (over dp and cp), but no
keys and values."""
BUCKET = 2**22
"""Values of gradients that are reduced together."""
HALF = (torch.bfloat16, torch.float16)


class RecordingHandler(ContextParallelHandler):
    """A handler that records the first sequence that it splits, and the others of its length."""

    sequence: tuple[int, Tensor | None] | None = None
    """Its length without padding, and the documents by which the last of that length was placed."""

    def _local_share(
        self, tensor: Tensor, seq_dim: int, documents: Tensor | None, pad_value: float | None = None
    ) -> Tensor:
        share = super()._local_share(tensor, seq_dim, documents, pad_value)
        if self.sequence is None or self.sequence[0] == tensor.shape[seq_dim]:
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
    _split: tuple[int, Tensor | None] | None = field(default=None, init=False)
    """The length and documents that ``sequence`` was made of."""

    def __post_init__(self) -> None:
        self.handler = RecordingHandler(self.mesh, self.style)
        self.known = _read(self.handler, self.batch)
        """The batch as the handler reads it; None if only ``loss_fn`` can read it."""
        self.documents = self.known is not None and _has_documents(self.known)
        """True if the batch has packed documents or padding."""
        self.expected = None if self.known is None else self._positions(self.known.length, self.known.documents)
        self.handler.sequence = None
        self.cp_dims = CPDims(self.mesh)

    def positions(self) -> Positions | None:
        """The positions of this rank, as soon as they are known: those of what the handler has split, or of the
        batch."""
        if self.handler.sequence is not None and self.handler.sequence is not self._split:
            self._split = length, table = self.handler.sequence
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
        if bool(hidden.all()):
            raise ValueError(
                "attention_mask of the batch shows no token: its values are all 0, the mark of padding, and nothing "
                "would be compared. Pass a mask of 1 for tokens, or leave out one that is added to scores"
            )
        return hidden if bool(hidden.any()) else None

    @property
    def length(self) -> int:
        """Positions of the sequence."""
        return 0 if self.sequence is None else self.sequence.length

    # ---- the runs

    def parallel(self) -> Trace:
        """The run with context parallelism."""
        with restore_model_state(self.model, self.mesh.device_type):
            trace = self._run(self.model, self.handler)
        self.sequence = self.positions()
        if self.sequence is None:
            raise ValueError(
                f"the length of the sequence in a batch of type {type(self.batch).__name__} is unknown. Nothing was "
                "split by the handler that loss_fn received. Split the batch with it, or pass a dict with input_ids. "
                "Models that split their inputs by themselves (of diffusers, encoder-decoders) cannot be verified"
            )
        return trace

    def whole(self, like: Trace, exact: bool = False) -> Trace:
        """The run of the whole batch on this rank, of which the rows of ``like`` are kept. ``exact``: on a copy of the
        model in fp32."""
        model = copy.deepcopy(self.model).float() if exact else self.model
        with ExitStack() as stack:
            stack.enter_context(restore_model_state(model, self.mesh.device_type))
            if bindings(model):
                stack.enter_context(context_parallel_mesh(model, self.alone))
            handler = ContextParallelHandler(self.alone, self.style)
            handler.cp.batch.verified = frozenset(self.mesh.mesh.flatten().tolist())
            stack.callback(setattr, handler.cp.batch, "verified", frozenset())
            if self.documents and not like.documents:  # the run that should be right must have them
                stack.enter_context(handler.documents(_read(handler, self.batch)))
            if exact:
                stack.enter_context(_without_autocast(self.mesh.device_type))
            traffic = stack.enter_context(record_traffic())
            trace = self._run(model, handler, like, exact)
        sent = max((size for _, size in traffic.entries), default=0)
        if sent > max(LARGEST_COUNT, OF_A_RANK * dist.get_world_size()):
            raise ValueError(
                f"loss_fn sent {sent} bytes over a cp mesh in the run without context parallelism. It uses a mesh of "
                "its own, so there is nothing to compare with. In loss_fn use the mesh of its third argument, "
                "handler.mesh, for context_parallel blocks and attention calls"
            )
        return trace

    def exact(self, like: Trace, one: Trace) -> Trace | None:
        """The run of the whole batch in fp32, for a model in half precision; None for one that cannot be copied: under
        FSDP or DDP, or with a function in place of a forward, which would run the module that it was made for."""
        for module in self.model.modules():
            replaced = isinstance(vars(module).get("forward"), FunctionType) and not is_compiled(module)
            if replaced or isinstance(module, (FSDPModule, DistributedDataParallel)):
                return None
        found = self.whole(like, exact=True)
        return found if [x.module for x in found.calls] == [x.module for x in one.calls] else None

    def _run(
        self, model: nn.Module, handler: ContextParallelHandler, like: Trace | None = None, exact: bool = False
    ) -> Trace:
        batch, leaves = _copy_of_batch(self.batch, exact)
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            with Recorder(model, handler, self.cp_dims, self.positions, like) as recorder:
                loss = self._loss(model, batch, handler)
            trace = recorder.trace
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
                got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise TypeError(f"loss_fn returned {got}. One loss is compared. Return a tensor with one number")
            trace.loss = loss.detach().double().item()
            trained = [p for p in model.parameters() if p.requires_grad]
            if loss.requires_grad:
                loss.backward()
            elif trained and all(p.grad is None for p in trained):
                raise TypeError(
                    "loss_fn returned a loss without a graph, as under no_grad or inference_mode or after detach(), "
                    "and no parameter has a gradient: there would be none to compare. Return the loss of your training "
                    "step, and call verify outside of inference_mode; freeze the parameters to compare outputs only"
                )
            trace.gradients = gradients_of(model, leaves, self.mesh, self.average if like is None else None)
        return trace

    def _loss(self, model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
        """The loss of the training step. Gradients of the default loss, averaged over the cp ranks, are those of one
        device."""
        if self.loss_fn is not None:
            return self.loss_fn(model, batch, handler)
        owners = (owner for module in model.modules() for owner in hook_owners(module))
        share = next((owner.share for owner in owners if hasattr(owner, "share")), None)
        if share is not None:  # an integration has prepared the model, and splits its batches
            output = model(**share(handler, batch))
            loss = getattr(output, "loss", None)  # a share of the mean
            return loss * handler.cp.size if isinstance(loss, Tensor) else self._loss_of(output, None, handler)
        shift = isinstance(batch, Mapping) and "labels" in batch and "shift_labels" not in batch
        local = handler.get_batch_on_this_cp_rank(batch, shift_labels=shift)
        with handler.documents(local):
            output = model(*local) if isinstance(local, (list, tuple)) else model(**_accepted(model, local))
        labels = local.get("shift_labels") if isinstance(local, Mapping) else None
        return self._loss_of(output, labels, handler)

    def _loss_of(self, output: Any, labels: Tensor | None, handler: ContextParallelHandler) -> Tensor:
        """The loss that a model returned, the cross-entropy of its logits, or a fixed weighted sum of its output."""
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
        if isinstance(loss, Tensor):
            return loss
        first = logits if isinstance(logits, Tensor) else next((x for _, x in tensors(output)), None)
        if first is None or not first.is_floating_point():
            raise TypeError(
                f"the model returned a {type(output).__name__} without a floating-point tensor. Losses and gradients "
                "are compared. Pass loss_fn(model, batch, handler), which returns the loss of your training step"
            )
        if labels is not None and first.shape[:-1] == labels.shape:
            return handler.mean_loss(first, labels)
        known = self.positions()
        at = torch.arange(first.shape[1] if first.ndim > 1 else 0, device="cpu")
        if known is not None and handler.cp.size > 1:
            at = known.at
        if first.ndim < 2 or first.shape[1] != len(at):
            raise ValueError(
                f"the model returned {tuple(first.shape)}, which does not have the {len(at)} local positions in "
                "dimension 1. Its loss is not known. Pass loss_fn(model, batch, handler)"
            )
        return handler.mean_loss(_weighted(first, at.to(first.device)), mask=_counted(first, at, known))


@contextmanager
def _without_autocast(device_type: str) -> Iterator[None]:
    """Turn autocast off, also that which code in the block turns on, so that a recompute finds it off, too. (Blocks of
    other threads are off meanwhile.)"""
    begin = torch.autocast.__enter__

    def enter(self: torch.autocast) -> Any:
        entered = begin(self)
        torch.set_autocast_enabled(self.device, False)  # its end restores what was before
        return entered

    with torch.autocast(device_type, enabled=False):
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = begin  # type: ignore[method-assign]


def _copy_of_batch(batch: Any, exact: bool) -> tuple[Any, dict[str, Tensor]]:
    """A copy of a batch for one run (``exact``: in fp32), and those of its tensors whose gradients are compared."""
    leaves: dict[str, Tensor] = {}

    def copied(name: Any, x: Any) -> Any:
        if isinstance(x, MutableMapping):
            made = copy.copy(x)  # of its own type, which may have attributes
            for key, y in x.items():
                made[key] = copied(key, y)
            return made
        if type(x) in (list, tuple) or hasattr(x, "_fields"):
            return getattr(type(x), "_make", type(x))(copied(i, y) for i, y in enumerate(x))
        if not isinstance(x, Tensor):
            return x
        wanted = x.requires_grad or (name in TOKENS and x.is_floating_point())
        x = x.detach().float() if exact and x.dtype in HALF else x.detach().clone()
        if wanted:
            leaves[f"batch[{name!r}]"] = x.requires_grad_()
        return x

    if isinstance(batch, Mapping):
        return copied("", dict(batch)), leaves
    return (copied("", batch) if isinstance(batch, (list, tuple)) else batch), leaves


def _read(handler: ContextParallelHandler, batch: Any) -> Any:
    """The batch as the handler splits it, or None if the handler cannot read it."""
    try:
        return handler.get_batch_on_this_cp_rank(batch)
    except (TypeError, ValueError):
        return None


def _has_documents(batch: LocalBatch) -> bool:
    """True if a batch has packed documents or padding inside its length."""
    if batch.documents is None:
        return False
    return any(0 < b < batch.length for row in read(batch.documents).rows for b in row)


# --------------------------------------------------------------------------- the default training step


def _weighted(x: Tensor, at: Tensor) -> Tensor:
    """A number for each position, in which every channel has another weight, and every position other weights."""
    x = x if x.dtype == torch.float64 else x.float()
    x = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
    channels = torch.arange(x.shape[2], device=x.device)
    return (x * torch.cos(at[:, None] * 0.7 + channels * 1.3).to(x.dtype)).mean(2)


def _counted(x: Tensor, at: Tensor, positions: Positions | None) -> Tensor | None:
    """True for the positions ``[B, S/n]`` that are tokens."""
    if positions is None:
        return None
    counted = (at < positions.length).expand(x.shape[:2])
    if positions.padding is not None and len(positions.padding) == len(x):
        counted = counted & ~positions.padding[:, at.clamp(max=positions.length - 1)]
    return counted.to(x.device)


def _accepted(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a batch that the model's forward takes by name."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    parameters = inspect.signature(model.forward).parameters
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and name not in batch
    ]
    if missing:
        raise TypeError(
            f"the forward of {type(model).__name__} needs {', '.join(missing)}, but the batch has {list(batch)}. "
            "Entries are passed by name. Rename the entries, or pass loss_fn(model, batch, handler), which calls "
            "the model as your training step does"
        )
    return {name: batch[name] for name in parameters if name in batch}


# --------------------------------------------------------------------------- gradients, reduced over the cp ranks


def gradients_of(
    model: nn.Module, inputs: Mapping[str, Tensor], mesh: DeviceMesh, average: bool | None
) -> dict[str, Tensor]:
    """The gradients of parameters and of ``inputs`` by name, on the CPU. Of a DTensor it is this rank's part.

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
    return grad.detach().to_dense() if grad.is_sparse else grad.detach()


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
    total = wide(by_rank(mesh, flat).cpu()).sum(0)
    total = total / mesh.size() if average else total
    parts = total.to(flat.dtype).split([x.numel() for x in grads.values()])
    return {name: part.view(x.shape) for (name, x), part in zip(grads.items(), parts, strict=True)}

"""Hugging Face accelerate: ``ParallelismConfig(cp_size=...)`` runs this library's context parallelism.

Accelerate's own replaces the mask of every ``self_attn`` by ``is_causal=True`` without reading it, refuses models
with sliding windows, and does not start on CPU. Here::

    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))  # or PARALLELISM_CONFIG_CP_SIZE=2
    enable(accelerator, style=ContextParallel(ulysses_degree=1, kv_exchange="ring"))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # DDP or FSDP2, as configured
    with accelerator.maybe_context_parallel(buffers=[ids, mask, shift_labels], buffer_seq_dims=[1, 1, 1]):
        ...  # or, without it, model(**prepare_batch(handler, batch)), which honours masks, packing and any length
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..context_manager import context_parallel
from ..handler import ContextParallelHandler
from ..module.mesh_binding import binding_of
from ..style import ContextParallel, styled_modules
from .huggingface.checks import decoder_of
from .transformers import prepare_model


class ParallelismConfig(accelerate.ParallelismConfig):
    """Accelerate's class of this name, environment variables included, that also runs with DDP and on a CPU.

    Accelerate's own context parallelism needs FSDP2, so an ``Accelerator`` without it refuses ``cp_size`` on GPUs.
    """

    _makes_mesh = False

    @property
    def cp_enabled(self) -> bool:
        """True if ``cp_size`` is above 1; not yet while an ``Accelerator`` chooses between DDP and FSDP, which it does
        before it makes the mesh."""
        # Private: accelerate 1.15 asks the configuration only, and no argument lets DDP run beside context parallelism.
        state = AcceleratorState._shared_state
        chooses = state.get("parallelism_config") is self and state.get("device_mesh") is None
        return bool(self.cp_size > 1 and (self._makes_mesh or not chooses))

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        self._makes_mesh = True
        try:
            return super().get_device_mesh(device_type)
        finally:
            self._makes_mesh = False

    def _validate_accelerator(self, accelerator: Any) -> None:
        if self.total_size != accelerator.num_processes:
            raise ValueError(
                f"ParallelismConfig has {self.total_size} ranks (cp_size={self.cp_size} times the other sizes), and "
                f"{accelerator.num_processes} processes run. Each process is one rank. Make the two numbers equal"
            )
        if self.cp_size > 1 and accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
            raise ValueError(
                f"ParallelismConfig(cp_size={self.cp_size}) with fsdp_version=1. Accelerate shards parameters over all "
                "data and context parallel ranks together, which its FSDP1 cannot. Set fsdp_version=2"
            )
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            super()._validate_accelerator(accelerator)


def enable(accelerator: accelerate.Accelerator, *, style: ContextParallel) -> ContextParallelHandler:
    """Make ``accelerator.prepare`` and ``accelerator.maybe_context_parallel`` run ``style`` over the cp mesh of its
    ``parallelism_config``. Call it before ``prepare``.

    ``prepare`` then prepares transformers models by :func:`hyper_cp.integrations.transformers.prepare_model`; other
    models must have been through ``parallelize_module`` with ``style``. Gradients are averaged over all ranks: multiply
    this rank's share of the mean loss by their number.

    Returns:
        The handler that splits batches as ``style`` expects.

    Raises:
        ValueError: if the accelerator has no cp mesh, or has prepared a model or a scheduler already. From ``prepare``:
            for a loader whose batches it would dispatch.
    """
    mesh = cp_mesh(accelerator)
    handler = ContextParallelHandler(mesh, style)
    # The two methods with which accelerate runs its own context parallelism; 1.15 has no public way to replace them.
    if not hasattr(accelerator, "_prepare_cp"):
        raise RuntimeError(
            f"accelerate {accelerate.__version__} has no Accelerator._prepare_cp. Its own context parallelism would "
            "run in place of this one. Install an accelerate version that hyper_cp supports"
        )
    prepared = [*accelerator._models, *accelerator._schedulers]
    prepared += [x for x in accelerator._dataloaders if isinstance(x, DataLoaderDispatcher)]
    if prepared:
        names = ", ".join(dict.fromkeys(type(x).__name__ for x in prepared))
        raise ValueError(
            f"accelerator has prepared {names} before enable was called. It prepared them for whole sequences: "
            "attention would end at this rank's share, schedules would count all ranks, and ranks would get other "
            "rows. Call enable(accelerator, style=...) before accelerator.prepare (after free_memory() of the "
            "accelerator, with a new model, if it has been used before)"
        )
    accelerator._prepare_cp = partial(_prepare, mesh, style)
    accelerator.prepare_scheduler = partial(_prepare_scheduler, accelerator, accelerator.prepare_scheduler)
    accelerator.prepare_data_loader = partial(_prepare_loader, accelerator.prepare_data_loader)
    accelerator._cp_context = partial(_block, mesh, style)
    return handler


def cp_mesh(accelerator: accelerate.Accelerator) -> DeviceMesh:
    """The cp mesh of an accelerator; ``ValueError`` if it has none."""
    config = accelerator.parallelism_config
    if config is None or not config.cp_enabled:
        raise ValueError(
            f"accelerator has parallelism_config={config!r} without context parallelism. It has no cp mesh then. Pass "
            "parallelism_config=ParallelismConfig(cp_size=n) to Accelerator (with Trainer: to TrainingArguments, where "
            "cp_size=1 is training without it), or set PARALLELISM_CONFIG_CP_SIZE=n"
        )
    return accelerator.torch_device_mesh["cp"]


def _prepare(mesh: DeviceMesh, style: ContextParallel, *args: Any) -> tuple[Any, ...]:
    """Prepare the models among what ``accelerator.prepare`` was given."""
    for model in args:
        if hasattr(model, "get_decoder"):
            if binding_of(decoder_of(model)) is None:
                prepare_model(model, mesh, style=style)
        elif isinstance(model, nn.Module):
            layouts = {found.mode.layout for found in styled_modules(model, at_least=1).values()}
            if layouts != {style.mode.layout}:
                raise ValueError(
                    f"{type(model).__name__} runs with layout={layouts.pop()!r}, but enable was given a style with "
                    f"layout={style.mode.layout!r}, in which batches are split. Attention would assign wrong positions "
                    "to tokens. Give both one style"
                )
    return args


def _prepare_loader(prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The loader that ``accelerator.prepare`` makes; ``ValueError`` if the ranks of a mesh would get other rows."""
    made = prepare(*args, **kwargs)
    if isinstance(made, DataLoaderDispatcher):
        raise ValueError(
            "accelerate would read this loader on one process and dispatch its batches: the ranks of a cp mesh would "
            "get other rows, and share a sequence. It does so for iterable datasets by default. Pass "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False) to Accelerator (with Trainer: "
            'accelerator_config={"dispatch_batches": False})'
        )
    return made


class _Scheduler(AcceleratedScheduler):
    """Accelerate's scheduler, which steps once for each rank whose batch another rank does not have. Accelerate's own
    counts all ranks, and those of a cp mesh share a batch."""

    copies = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        steps = self.copies if self.step_with_optimizer and self.gradient_state.sync_gradients else 1
        for _ in range(steps):
            if not hasattr(self.scheduler, "total_steps") or self.scheduler._step_count <= self.scheduler.total_steps:
                super().step(*args, **kwargs)


def _prepare_scheduler(accelerator: accelerate.Accelerator, prepare: Callable[[Any], Any], scheduler: Any) -> Any:
    """The scheduler that ``accelerator.prepare`` makes, for the data-parallel ranks."""
    made = prepare(scheduler)
    if type(made) is AcceleratedScheduler and not made.split_batches:
        made.__class__, made.split_batches = _Scheduler, True
        made.copies = accelerator.parallelism_config.data_parallel_size
    return made


def _block(mesh: DeviceMesh, style: ContextParallel, **buffers: Any) -> context_parallel:
    """The block that ``accelerator.maybe_context_parallel`` enters."""
    settings = dict(style.mode.signature)
    if settings.pop("max_logits"):
        raise NotImplementedError(
            "max_logits=True of a style in accelerator.maybe_context_parallel(). A block has no modules that could "
            "keep the largest logits. Put the style on the attention modules of a plan, or leave max_logits out"
        )
    return context_parallel(mesh, ulysses_degree=style.ulysses_degree, allow=style.allow, **settings, **buffers)  # type: ignore[arg-type]

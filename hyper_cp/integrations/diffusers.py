"""Hugging Face diffusers: transformers of images and videos, whose tokens the ranks of a cp mesh share.

::

    prepare_transformer(transformer, mesh, style=ContextParallel(ulysses_degree=1, kv_exchange="ring"))
    noise = transformer(**inputs).sample  # whole inputs and the whole output, on every rank

A model's own plan (``_cp_plan``) says where its sequences are split and gathered. Any lengths of images, videos and
prompts will do: tokens of the prompt are dealt first, and those of the image fill the ranks up to equal numbers, so
that padding is at the end of the last rank only. Diffusers itself is not imported.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ..data.collectives import by_rank
from ..handler import ContextParallelHandler
from ..mesh.arguments import check_choice
from ..module.mesh_binding import bindings
from ..schedule.documents import documents_table
from ..style import ContextParallel, styled_modules


@dataclass(frozen=True)
class _Family:
    """The attention of a type of models."""

    shared: str
    """Pattern of the modules whose queries and keys are the split sequence."""
    prompts: str | None = None
    """Pattern of the modules whose keys are a prompt, of which every rank has all."""
    first: tuple[str, ...] = ()
    """Inputs that come before the others in the joint sequence of queries and keys."""
    refused: tuple[str, ...] = ()
    """Inputs that count tokens of the whole image, and that the plan of the model does not split."""


_WAN = _Family("blocks.*.attn1", prompts="blocks.*.attn2")
_FAMILIES = {
    "FluxTransformer2DModel": _Family(
        "*transformer_blocks.*.attn",
        first=("encoder_hidden_states", "txt_ids"),
        refused=("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
    "Flux2Transformer2DModel": _Family(
        "*transformer_blocks.*.attn",
        first=("encoder_hidden_states", "txt_ids"),
        refused=("kv_cache_mode", "kv_cache"),
    ),
    "WanTransformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
}


def prepare_transformer(
    transformer: nn.Module, mesh: DeviceMesh, *, style: ContextParallel, gradients: str = "mean"
) -> ContextParallelHandler:
    """Split the tokens of a diffusers transformer over the ranks of ``mesh``; in place.

    Its forward takes the same whole inputs on every rank, and returns the whole output on every rank, so that pipelines
    and training loops run as they are. Call it before DDP, FSDP or compile, and instead of
    ``transformer.enable_parallelism``.

    Args:
        style: its ``ulysses_degree`` and ``kv_exchange`` count. Tokens lie in the contiguous layout, and dimensions and
            indices of q, k, v are the model's own.
        gradients: ``"mean"`` if DDP or FSDP averages gradients over the ranks afterwards, ``"sum"`` if you all-reduce
            them with SUM. The loss is the same on every rank.

    Returns:
        The handler of the model.

    Raises:
        NotImplementedError: for types of models other than Flux, Flux 2, Wan and ChronoEdit.
        ValueError: if the model is parallel already, or if the style does not fit.
    """
    name = type(transformer).__name__
    family = _FAMILIES.get(name)
    if family is None:
        raise NotImplementedError(
            f"transformer is a {name}. Its plan does not say how its sequences meet in attention, so only "
            f"{', '.join(_FAMILIES)} are supported. Put ContextParallel(qkv_indices=None) on its attention "
            "modules with parallelize_module, and split its inputs with handler.dispatch"
        )
    if bindings(transformer) or getattr(transformer, "_parallel_config", None) is not None:
        raise ValueError(f"{name} is parallel already. Its sequence would be split twice. Prepare it once")
    mode = style.mode
    if mode.layout != "contiguous" or mode.load_balance or mode.window is not None or mode.kv_exchange == "replicated":
        raise ValueError(
            f"style has layout={mode.layout!r}, load_balance={mode.load_balance}, window={mode.window} and kv_exchange="
            f"{mode.kv_exchange!r}. Attention of {name} is not causal, so work is balanced, and keys are split. Leave "
            "these out, but for the exchange"
        )
    why = "DDP and FSDP average gradients over the ranks (mean); an all-reduce with SUM does not (sum)"
    check_choice("gradients", gradients, ("mean", "sum"), why)
    own = copy.copy(style)
    own.qkv_indices, own.qkv_kwarg_names = None, ()
    plan: dict[str, ParallelStyle] = {family.shared: own}
    if family.prompts is not None:
        plan[family.prompts] = ContextParallel(
            ulysses_degree=1, qkv_indices=None, kv_exchange="replicated", allow=style.allow
        )
    parallelize_module(transformer, mesh, plan)
    styled_modules(transformer, at_least=1)
    handler = ContextParallelHandler.of(transformer)
    _Sequence(handler, family, gradients).attach(transformer)
    return handler


class _Sequence:
    """The sequence of a transformer's forward: its parts on the ranks, and the hooks that split and gather it."""

    def __init__(self, handler: ContextParallelHandler, family: _Family, gradients: str) -> None:
        self.handler, self.family = handler, family
        self.gradients = "mean" if gradients == "mean" else None
        self.lengths = (0, 0)
        """Tokens of the prompt in joint attention, and of the image."""
        self.compared = False
        """True once the ranks' inputs have been compared."""

    def attach(self, transformer: Any) -> None:
        """Register the hooks, where the plan of the model says."""
        for where, entries in transformer._cp_plan.items():
            for module in _modules(transformer, where):
                if isinstance(entries, dict):
                    _Split(self, entries, module, where == "").attach(module)
                else:
                    module.register_forward_hook(self.gather)
        for name, module in transformer.named_modules():
            if fnmatchcase(name, self.family.shared):
                module.register_forward_pre_hook(self.before_attention, with_kwargs=True, prepend=True)

    # ---- who holds which tokens

    def shares(self, first: bool) -> list[tuple[int, int]]:
        """Start and number of the tokens of each rank, of the prompt or of the image; padding not counted."""
        ranks, (prompt, image) = self.handler.cp.size, self.lengths
        prompts = [prompt // ranks + (rank < prompt % ranks) for rank in range(ranks)]
        images, left = [], image
        for count in prompts:
            images.append(min(self.local_length - count, left))
            left -= images[-1]
        counts = prompts if first else images
        return [(sum(counts[:rank]), count) for rank, count in enumerate(counts)]

    @property
    def local_length(self) -> int:
        """The number of tokens of each rank, padding included."""
        return -(-sum(self.lengths) // self.handler.cp.size)

    def record(self, prompt: int, image: int) -> None:
        """Record the lengths of this forward, or raise ``ValueError`` if they cannot be split."""
        self.lengths = prompt, image
        ranks = self.handler.cp.size
        if min(count for _, count in self.shares(first=False)) < 1 or (prompt and prompt < ranks):
            raise ValueError(
                f"{image} tokens of the image and {prompt} of the prompt cannot be split over {ranks} ranks. Each "
                "needs at least one of both. Use fewer ranks, or larger inputs"
            )

    def split(self, x: Tensor, dim: int, first: bool) -> Tensor:
        """This rank's tokens of a whole tensor, those of the image with padding."""
        start, count = self.shares(first)[self.handler.cp.rank]
        local = x.narrow(dim, start, count)
        if first:
            return local
        padding = self.local_length - count - self.shares(first=True)[self.handler.cp.rank][1]
        return F.pad(local, (0, 0) * (x.ndim - 1 - dim % x.ndim) + (0, padding)) if padding else local

    # ---- hooks

    def before_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep padding and tokens apart, and refuse what belongs to whole sequences."""
        given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        wrong = [name for name, x in given.items() if x is not None and ("mask" in name or name.startswith("ip_"))]
        if wrong:
            raise NotImplementedError(
                f"{type(module).__name__} got {', '.join(wrong)}. Its positions or keys are those of whole sequences, "
                "which the ranks hold in another order. Leave it out"
            )
        total = sum(self.lengths)
        if self.local_length * self.handler.cp.size == total:
            return args, kwargs
        return args, {**kwargs, "documents": documents_table([0, total, self.local_length * self.handler.cp.size])}

    def gather(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The output of all tokens of the image ``[B, S, C]``, on every rank."""
        shares, here = self.shares(first=False), output.shape[1]
        longest = max(self.local_length - count for _, count in self.shares(first=True))
        whole = self.handler.combine(F.pad(output, (0, 0, 0, longest - here)), 1, gradients=self.gradients)
        parts = [whole.narrow(1, rank * longest, count) for rank, (_, count) in enumerate(shares)]
        return torch.cat(parts, 1)

    def compare(self, tensors: dict[str, Tensor]) -> None:
        """Raise ``ValueError`` on every rank if the ranks hold other inputs. One small communication, once."""
        if self.compared or torch.compiler.is_compiling():
            return
        self.compared = True
        sums = torch.stack([x.detach().double().sum() + x.detach().double().flatten()[0] for x in tensors.values()])
        rows = by_rank(self.handler.mesh, sums)
        differ = [
            name for name, column in zip(tensors, rows.unbind(1), strict=True) if bool((column != column[0]).any())
        ]
        if differ:
            raise ValueError(
                f"{', '.join(differ)} of the first forward differ between the ranks. They hold parts of one sequence, "
                "so their inputs must be equal. Draw noise and batches with the same seed on all of them"
            )


class _Split:
    """The hooks of one module that split its inputs, or its outputs."""

    def __init__(self, sequence: _Sequence, entries: dict[Any, Any], module: nn.Module, root: bool) -> None:
        self.sequence, self.root = sequence, root
        self.inputs = {name: x for name, x in entries.items() if not x.split_output}
        self.outputs = {index: x for index, x in entries.items() if x.split_output}
        self.names = list(inspect.signature(module.forward).parameters)

    def attach(self, module: nn.Module) -> None:
        """Register the hooks that are needed."""
        if self.inputs:
            module.register_forward_pre_hook(self.before, with_kwargs=True)
        if self.outputs:
            module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with this rank's tokens."""
        sequence, first = self.sequence, self.sequence.family.first
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if self.root:
            self._refuse(module, given)
        dims = {name: entry.split_dim for name, entry in self.inputs.items() if _fits(given.get(name), entry)}
        prompt = next((given[name].shape[dims[name]] for name in dims if name in first), 0)
        images = {name: given[name].shape[dim] for name, dim in dims.items() if name not in first}
        if images:
            sequence.record(prompt, next(iter(images.values())))
        if len(set(images.values())) > 1:
            raise ValueError(
                f"{type(module).__name__} got inputs of different lengths: {images}. They are split as parts of one "
                "sequence. Pass inputs of one length"
            )
        local = {name: sequence.split(given[name], dim, name in first) for name, dim in dims.items()}
        names = self.names[: len(args)]
        return tuple(local.get(name, x) for name, x in zip(names, args, strict=True)), {
            name: local.get(name, x) for name, x in kwargs.items()
        }

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The outputs with this rank's tokens."""
        found = [output] if isinstance(output, Tensor) else list(output)
        for index, entry in self.outputs.items():
            if _fits(found[index], entry):
                self.sequence.record(0, found[index].shape[entry.split_dim])
                found[index] = self.sequence.split(found[index], entry.split_dim, first=False)
        return found[0] if isinstance(output, Tensor) else tuple(found)

    def _refuse(self, module: Any, given: dict[str, Any]) -> None:
        if getattr(module, "_parallel_config", None) is not None or getattr(module, "is_cache_enabled", False):
            raise NotImplementedError(
                f"{type(module).__name__} runs with enable_parallelism or enable_cache of diffusers. The one would "
                "split the sequence twice, and the other decides by this rank's tokens which blocks run. Disable them"
            )
        refused = [name for name in self.sequence.family.refused if given.get(name) is not None]
        if refused:
            raise NotImplementedError(
                f"{type(module).__name__} got {', '.join(refused)}. Their rows are those of tokens of the whole "
                "image, and each rank holds a part of it. Leave them out"
            )
        self.sequence.compare({name: x for name, x in given.items() if isinstance(x, Tensor) and x.numel()})


def _modules(transformer: nn.Module, where: str) -> list[nn.Module]:
    """The modules that a key of the plan names, in which * matches a number."""
    return [module for name, module in transformer.named_modules() if fnmatchcase(name, where)]


def _fits(x: Any, entry: Any) -> bool:
    """True for a tensor that an entry of the plan means."""
    return isinstance(x, Tensor) and entry.expected_dims in (None, x.ndim)

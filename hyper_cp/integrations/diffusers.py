"""Hugging Face diffusers: transformers of images and videos, whose tokens the ranks of a cp mesh share.

::

    prepare_transformer(transformer, mesh, style=ContextParallel(ulysses_degree=1, kv_exchange="ring"))
    noise = transformer(**inputs).sample  # whole inputs and the whole output, on every rank

What is before and behind the blocks of a transformer (patches, embeddings of time, the last projection) runs on whole
sequences, as on one device. At the first of a list of blocks the tokens are split, and behind the last one gathered.
Any lengths of images, videos and prompts will do: tokens of the prompt are dealt first, and those of the image fill the
ranks up to equal numbers, so that only the last rank has padding, behind its image. Diffusers itself is not imported.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from fnmatch import fnmatchcase
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from .._torch.compiling import is_compiling
from .._torch.leaves import other_leaf
from .._torch.modules import holds
from ..data.collectives import with_gradient_of, with_whole_gradient
from ..data.loss import check_gradients
from ..handler import ContextParallelHandler
from ..module.mesh_binding import bindings
from ..module.model import KnownModules
from ..style import ContextParallel, styled_modules
from .adapters import check_adapters
from .diffusion.families import FAMILIES, Family
from .diffusion.stages import Stage, has_word, mapped


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
            those of the transformer's parameters with SUM. The loss is the same on every rank, and so are gradients of
            inputs, of another forward whose output they are, and of what is in front: with ``"sum"``, do not add up
            those.

    Returns:
        The handler of the model.

    Raises:
        NotImplementedError: for types of models that docs/integrations/diffusers.md does not call exact.
        ValueError: if the model is parallel already, or if the style does not fit.
    """
    name = type(transformer).__name__
    family = FAMILIES.get(name)
    if family is None:
        raise NotImplementedError(
            f"transformer is a {name}. Nothing says how its sequences meet in attention, as for the {len(FAMILIES)} "
            "types of docs/integrations/diffusers.md. Put ContextParallel(qkv_indices=None) on its attention modules "
            "with parallelize_module, and split its inputs with handler.dispatch"
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
    check_gradients(gradients)
    _refuse_other_attention(transformer, family)
    _refuse_last_control(transformer)
    own = copy.copy(style)
    own.copy_of = style
    own.qkv_indices, own.qkv_kwarg_names, own.allow = None, (), (*style.allow, *_outside(transformer, family))
    plan: dict[str, ParallelStyle] = dict.fromkeys(family.patterns(family.shared), own)
    whole = ContextParallel(ulysses_degree=1, qkv_indices=None, kv_exchange="replicated", allow=own.allow)
    plan |= dict.fromkeys(family.patterns(family.prompts), whole)
    names = [name for name, _ in transformer.named_modules()]
    parallelize_module(transformer, mesh, {x: y for x, y in plan.items() if any(fnmatchcase(z, x) for z in names)})
    styled_modules(transformer, at_least=1)
    handler = ContextParallelHandler.of(transformer)
    _Root(handler, family, gradients).attach(transformer)
    for stage in family.stages:
        lists: list[Any] = [transformer.get_submodule(name.removesuffix(".*")) for name in stage.split()]
        for together in [[[block]] for block in lists[0]] if stage.endswith(".*") else [lists]:
            Stage(handler, family).attach(together)
    return handler


def _refuse_last_control(transformer: Any) -> None:
    """Raise ``NotImplementedError`` if a model adds a control's tokens behind the last block, where those of the image
    are gathered."""
    if hasattr(transformer, "vace_blocks") and len(transformer.blocks) - 1 in transformer.config.vace_layers:
        raise NotImplementedError(
            f"vace_layers={list(transformer.config.vace_layers)} has the last of {len(transformer.blocks)} layers. "
            "What it adds is split, and tokens are gathered behind that layer. Leave the last layer out of vace_layers"
        )


def _outside(transformer: nn.Module, family: Family) -> list[str]:
    """The names of modules outside of blocks. They see whole sequences, so they may mix positions."""
    return [
        name
        for name, _ in transformer.named_modules()
        if name and not any(f"{x}.".startswith(f"{name}.") or name.startswith(f"{x}.") for x in family.lists)
    ]


def _refuse_other_attention(transformer: nn.Module, family: Family) -> None:
    """Raise ``NotImplementedError`` for modules in blocks that compute attention and that the family does not name:
    they would attend to this rank's tokens only."""
    patterns = family.patterns(family.shared + family.prompts)
    known = [name for name, _ in transformer.named_modules() if any(fnmatchcase(name, x) for x in patterns)]
    for name, module in transformer.named_modules():
        inside = any(name.startswith(f"{x}.") for x in family.lists)
        covered = any(name == outer or holds(outer, name) for outer in known)
        if inside and not covered and (hasattr(module, "to_q") or re.search("Attention|Attn", type(module).__name__)):
            raise NotImplementedError(
                f"{type(transformer).__name__} has attention in {name} that is not known: its configuration is not one "
                "that has been compared. It would attend to this rank's tokens only. Leave that part out of the model"
            )


def _files_of_hooks(transformer: nn.Module) -> str:
    """The names of the files of diffusers' hooks, on the model or in it."""
    registries = [getattr(module, "_diffusers_hook", None) for module in transformer.modules()]
    hooks = [hook for registry in registries for hook in getattr(registry, "hooks", {}).values()]
    return " ".join(type(hook).__module__ for hook in hooks)


class _Root:
    """The hooks of a transformer itself: they check its inputs, scale the gradients of its output, and add up those of
    its inputs."""

    prepared: ClassVar[WeakSet[nn.Module]] = WeakSet()
    """The transformers that are prepared: two may follow each other (Wan 2.2)."""

    def __init__(self, handler: ContextParallelHandler, family: Family, gradients: str) -> None:
        self.handler, self.family, self.gradients = handler, family, gradients
        self.compared: set[str] = set()
        """The keys of the meshes whose ranks have compared their inputs."""
        self.known = KnownModules()

    def attach(self, transformer: nn.Module) -> None:
        """Register the hooks."""
        self.names = list(inspect.signature(transformer.forward).parameters)
        transformer.register_forward_pre_hook(self.before, with_kwargs=True)
        transformer.register_forward_hook(self.after)
        self.prepared.add(transformer)

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse what belongs to whole sequences, and compare the inputs of the ranks. Their gradients are those of
        all tokens on every rank, as inputs of one device have them: the loss may reach them on other ways, too."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        hooks = _files_of_hooks(module)
        if getattr(module, "_parallel_config", None) is not None or has_word(hooks, "cache", "broadcast"):
            raise NotImplementedError(
                f"{type(module).__name__} runs with enable_parallelism or a cache of diffusers. The one would split "
                "the sequence twice, and the other decides by this rank's tokens which blocks run. Disable them"
            )
        if has_word(hooks, "smoothed_energy"):
            raise NotImplementedError(
                f"{type(module).__name__} runs with smoothed energy guidance, which blurs the queries of an image as a "
                "square. Each rank holds a part of it. Use another guidance"
            )
        refused = [name for name in self.family.refused if given.get(name) is not None]
        if refused:
            raise NotImplementedError(
                f"{type(module).__name__} got {', '.join(refused)}. Their rows are those of tokens of the whole "
                "image, and each rank holds a part of it. Leave them out"
            )
        self.compare(module, given)
        self.compare_adapters(module)
        if self.handler.cp.size > 1 and torch.is_grad_enabled():
            return mapped("", args, self.whole), {name: mapped("", x, self.whole) for name, x in kwargs.items()}
        return None

    def whole(self, _: str, x: Tensor) -> Tensor:
        """An input whose gradient is that of all ranks' tokens."""
        mean = self.gradients == "mean"
        return with_whole_gradient(x, self.handler.mesh, mean=mean) if x.requires_grad else x

    def compare_adapters(self, module: nn.Module) -> None:
        """Let the ranks compare their weights again, if the model has other modules than in its last forward: adapters
        are drawn at random."""
        if is_compiling():
            return
        self.known.update(module, bindings(module))
        if self.known.unchecked:
            check_adapters(module)
            self.known.unchecked = False

    def compare(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        """Raise ``ValueError`` on every rank if the ranks hold other inputs. One entry in the store, once. Warn if they
        were made by parameters whose gradients would be added up with those of the transformer."""
        if is_compiling() or self.handler.cp.key in self.compared:
            return
        self.prepared.add(module)  # a copy
        caller, others = type(module).__name__, set()
        own = {p for transformer in self.prepared for p in transformer.parameters()}
        sums: dict[str, list[float]] = {}

        def add(name: str, x: Tensor) -> Tensor:
            if self.gradients == "sum" and isinstance(other_leaf(x, own), nn.Parameter):
                others.add(name)
            if x.numel():
                exact = x.detach().double().flatten()
                sums.setdefault(name, []).append((exact.sum() + exact[0]).item())
            return x

        mapped("", inputs, add)
        once = tuple((name, str(found)) for name, found in sums.items())
        self.handler.cp.agree("batch", (), caller, once=once, always=True)
        self.compared.add(self.handler.cp.key)
        if others and self.handler.cp.size > 1:
            warnings.warn(
                f"{', '.join(sorted(others))} of {caller} come from parameters in front of it. gradients='sum' is of "
                "the transformer's own parameters: the gradients of those in front are whole on every rank, and their "
                f"sum over {self.handler.cp.size} ranks is as many times too large. Average them, or leave "
                "gradients='sum' out and average all",
                stacklevel=2,
            )

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The output, whose loss is the same on every rank: of a sum over ranks each gives its n-th part."""
        ranks = self.handler.cp.size if self.gradients == "sum" else 1
        return mapped("", output, lambda _, x: with_gradient_of(x, x / ranks)) if ranks > 1 else output

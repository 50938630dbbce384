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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from .._torch import checkpoint
from .._torch.compiling import is_compiling
from .._torch.leaves import other_leaf
from ..data.collectives import by_rank, with_gradient_of, with_whole_gradient
from ..data.loss import check_gradients
from ..handler import ContextParallelHandler
from ..module.attention_calls import AttentionRequest
from ..module.dispatch_mode import current_call
from ..module.mesh_binding import binding_of, bindings
from ..module.model import KnownModules
from ..schedule.documents import documents_table
from ..style import ContextParallel, styled_modules
from .adapters import check_adapters

IMAGE, PROMPT = "hidden_states", "encoder_hidden_states"
"""The arguments of blocks that hold the tokens of the image (or of all), and those of the prompt."""
Kinds = tuple[str, ...]
"""One of them, or both in their order in a sequence."""


@dataclass(frozen=True)
class _Family:
    """The blocks of a type of models, and their attention."""

    stages: tuple[str, ...]
    """The lists of blocks, or several with a space between them if the model gathers nothing between them. With ``.*``
    behind it each block of a list is a stage, because the model works on whole sequences between them."""
    shared: tuple[str, ...]
    """The modules in a block whose queries and keys are the split sequence."""
    prompts: tuple[str, ...] = ()
    """The modules in a block whose keys are a prompt, of which every rank has all."""
    order: tuple[str, ...] = ()
    """In joint attention, the order of the two in queries and keys."""
    returned: tuple[str, ...] = (IMAGE,)
    """The results of a block that returns several tensors."""
    refused: tuple[str, ...] = ()
    """Inputs that count tokens of the whole image beside those that blocks get."""
    image: str = IMAGE
    """The blocks' own name of the argument that holds the image."""
    prompt: str = PROMPT
    dim: int = 1
    """The dimension of tokens in both."""
    pairs: bool = False
    """True if blocks make a mask of pairs of tokens: the product of what a mask of tokens says of both."""
    picks: bool = False
    """True if attention leaves out the tokens of a prompt that its mask hides."""
    counted: tuple[tuple[str, str], ...] = ()
    """Arguments that count the first tokens of the image or of the prompt."""
    segments: bool = False
    """True if attention cuts the sequence into the ``segments`` that blocks get. It gets a mask of pairs instead."""
    last: str = ""
    """The argument that counts the last tokens of the image, if those before them (a history) are split by themselves,
    like a prompt."""
    streams: tuple[tuple[str, str, str], ...] = ()
    """Modules of attention whose queries and keys are one of the two each, of which ``prompt`` then is a second stream
    (audio): the name, and what queries and keys are."""

    prompt_alone: bool = False
    """True if modules of attention attend twice: tokens of the prompt to those before them, and those of the image to
    all."""

    def stream(self, module: str) -> tuple[Kinds, Kinds] | None:
        """The kinds of tokens of the queries and the keys of a module of attention in a block, if they never change."""
        return next((((queries,), (keys,)) for name, queries, keys in self.streams if name == module), None)

    @property
    def lists(self) -> list[str]:
        """The names of all lists of blocks."""
        return [name.removesuffix(".*") for stage in self.stages for name in stage.split()]

    def patterns(self, attention: tuple[str, ...]) -> list[str]:
        """Patterns of the names of modules of attention in the model."""
        return [f"{name}.*.{inner}" for name in self.lists for inner in attention]


_TEXT_FIRST, _IMAGE_FIRST = (PROMPT, IMAGE), (IMAGE, PROMPT)
_RESIDUALS = ("controlnet_block_samples", "controlnet_single_block_samples", "block_controlnet_hidden_states")
_CACHES = ("kv_cache_mode", "kv_cache")
_BLOCKS, _TWO_LISTS = ("transformer_blocks",), ("transformer_blocks", "single_transformer_blocks")
_CROSS = _Family(_BLOCKS, ("attn1",), ("attn2",), refused=_RESIDUALS)
_WAN = _Family(("blocks",), ("attn1",), ("attn2",))
_ONE = _Family(_BLOCKS, ("attn",))
_LAYERS = _Family(("layers",), ("attention",))
_FLUX = _Family(
    *(_TWO_LISTS, ("attn",)),
    order=_TEXT_FIRST,
    returned=_TEXT_FIRST,
    refused=(*_RESIDUALS, *_CACHES),
)
_FLUX_3 = ("txt_mode_blocks", "mode_blocks.image", "mode_blocks.image_cond", "single_transformer_blocks")
_COGVIEW = replace(_FLUX, stages=_BLOCKS, shared=("attn1",), returned=_IMAGE_FIRST)
_HUNYUAN = replace(_FLUX, order=_IMAGE_FIRST, returned=_IMAGE_FIRST)
_HUNYUAN_VIDEO = replace(_HUNYUAN, counted=(("num_tokens", IMAGE),))
_PAIRED = replace(_COGVIEW, pairs=True)
_JOY = replace(_HUNYUAN, stages=("double_blocks",))
_WITH_AUDIO = (
    ("attn1", IMAGE, IMAGE),
    ("audio_attn1", PROMPT, PROMPT),
    ("audio_to_video_attn", IMAGE, PROMPT),
    ("video_to_audio_attn", PROMPT, IMAGE),
)
_FUSED = (
    ("video_dec_block.self_attention", IMAGE, IMAGE),
    ("audio_dec_block.self_attention", PROMPT, PROMPT),
    ("va_cross_attention", IMAGE, PROMPT),
    ("av_cross_attention", PROMPT, IMAGE),
)
_LTX_2 = _Family(
    *(_BLOCKS, tuple(name for name, _, _ in _WITH_AUDIO), ("attn2", "audio_attn2")),
    order=_IMAGE_FIRST,
    returned=_IMAGE_FIRST,
    refused=("video_self_attention_mask",),
    prompt="audio_hidden_states",
    streams=_WITH_AUDIO,
)
_FAMILIES = {
    "AceStepTransformer1DModel": _Family(("layers",), ("self_attn",), ("cross_attn",)),
    "AllegroTransformer3DModel": _CROSS,
    "AnyFlowTransformer3DModel": _WAN,
    "AuraFlowTransformer2DModel": replace(_FLUX, stages=("joint_transformer_blocks", "single_transformer_blocks")),
    "BriaFibo2Transformer2DModel": _Family(
        ("noise_refiner", "layers"), ("attention",), ("cross_attention",), image="x"
    ),
    "BriaFiboTransformer2DModel": replace(_FLUX, stages=("transformer_blocks.*", "single_transformer_blocks.*")),
    "BriaTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": replace(_FLUX, pairs=True),
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": _COGVIEW,
    "CogView3PlusTransformer2DModel": _COGVIEW,
    "CogView4Transformer2DModel": _PAIRED,
    "ConsisIDTransformer3DModel": _COGVIEW,
    "Cosmos3OmniTransformer": _Family(
        *(("layers",), ("self_attn",)),
        order=_TEXT_FIRST,
        returned=_TEXT_FIRST,
        image="gen_seq",
        prompt="und_seq",
        dim=0,
        prompt_alone=True,
    ),
    "CosmosTransformer3DModel": _CROSS,
    "DiTTransformer2DModel": _CROSS,
    "DreamLiteTransformer2DModel": _CROSS,
    "EasyAnimateTransformer3DModel": _COGVIEW,
    "ErnieImageTransformer2DModel": replace(_LAYERS, shared=("self_attention",), image="x", dim=0),
    "Flux2Transformer2DModel": _FLUX,
    "Flux3Transformer2DModel": replace(_FLUX, stages=_FLUX_3),
    "FluxTransformer2DModel": _FLUX,
    "GlmImageTransformer2DModel": _PAIRED,
    "HeliosTransformer3DModel": replace(_WAN, order=_TEXT_FIRST, last="original_context_length"),
    "HiDreamImageTransformer2DModel": replace(
        _HUNYUAN, stages=("double_stream_blocks.*", "single_stream_blocks.*"), shared=("block.attn1",)
    ),
    "HunyuanImageTransformer2DModel": _HUNYUAN,
    "HunyuanVideo15Transformer3DModel": replace(_HUNYUAN, stages=_BLOCKS, pairs=True),
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN_VIDEO,
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "Ideogram4Transformer2DModel": _LAYERS,
    "JoyImageEditPlusTransformer3DModel": _JOY,
    "JoyImageEditTransformer3DModel": _JOY,
    "Kandinsky5Transformer3DModel": _Family(
        *(("visual_transformer_blocks",), ("self_attention",), ("cross_attention",)),
        refused=("sparse_params",),
        image="visual_embed",
        prompt="text_embed",
    ),
    "Kandinsky6Transformer3DModel": _Family(
        *(("visual_transformer_blocks",), tuple(name for name, _, _ in _FUSED)),
        ("video_dec_block.cross_attention", "audio_dec_block.cross_attention"),
        order=_IMAGE_FIRST,
        returned=_IMAGE_FIRST,
        image="vis",
        prompt="aud",
        streams=_FUSED,
    ),
    "Krea2Transformer2DModel": _ONE,
    "LTX2VideoTransformer3DModel": _LTX_2,
    "LTXVideoTransformer3DModel": _CROSS,
    "LatteTransformer3DModel": replace(_CROSS, stages=("transformer_blocks.*", "temporal_transformer_blocks.*")),
    "LongCatAudioDiTTransformer": _Family(("blocks",), ("self_attn",), ("cross_attn",), prompt="cond"),
    "LongCatImageTransformer2DModel": _FLUX,
    "Lumina2Transformer2DModel": _Family(("noise_refiner", "layers"), ("attn",)),
    "MiniMaxH3Transformer3DModel": _ONE,
    "MiniMaxMusic3Transformer1DModel": _ONE,
    "MochiTransformer3DModel": replace(_HUNYUAN, stages=_BLOCKS, shared=("attn1",), picks=True),
    "MotifVideoTransformer3DModel": replace(_HUNYUAN, counted=(("image_embed_seq_len", PROMPT),)),
    "OmniGenTransformer2DModel": replace(_LAYERS, shared=("self_attn",)),
    "OvisImageTransformer2DModel": _FLUX,
    "PRXTransformer2DModel": _Family(("blocks",), ("attention",), order=_TEXT_FIRST),
    "PixArtTransformer2DModel": _CROSS,
    "QwenImage21Transformer2DModel": replace(_ONE, refused=_CACHES, segments=True),
    "QwenImageTransformer2DModel": replace(_FLUX, stages=_BLOCKS),
    "SD3Transformer2DModel": replace(_FLUX, stages=_BLOCKS, shared=("attn", "attn2"), order=_IMAGE_FIRST),
    "SanaWMLTX2RefinerTransformer3DModel": _Family(_BLOCKS, _LTX_2.shared, _LTX_2.prompts, refused=_CACHES),
    "SkyReelsV2Transformer3DModel": _WAN,
    "Transformer2DModel": _CROSS,
    "WanAnimateTransformer3DModel": replace(_WAN, stages=("blocks.*",)),
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": replace(_WAN, stages=("vace_blocks blocks",)),
    "ZImageTransformer2DModel": replace(_LAYERS, stages=("noise_refiner", "layers"), image="x", refused=_RESIDUALS),
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
    family = _FAMILIES.get(name)
    if family is None:
        raise NotImplementedError(
            f"transformer is a {name}. Nothing says how its sequences meet in attention, as for the {len(_FAMILIES)} "
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
            _Stage(handler, family).attach(together)
    return handler


def _refuse_last_control(transformer: Any) -> None:
    """Raise ``NotImplementedError`` if a model adds a control's tokens behind the last block, where those of the image
    are gathered."""
    if hasattr(transformer, "vace_blocks") and len(transformer.blocks) - 1 in transformer.config.vace_layers:
        raise NotImplementedError(
            f"vace_layers={list(transformer.config.vace_layers)} has the last of {len(transformer.blocks)} layers. "
            "What it adds is split, and tokens are gathered behind that layer. Leave the last layer out of vace_layers"
        )


def _outside(transformer: nn.Module, family: _Family) -> list[str]:
    """The names of modules outside of blocks. They see whole sequences, so they may mix positions."""
    return [
        name
        for name, _ in transformer.named_modules()
        if name and not any(f"{x}.".startswith(f"{name}.") or name.startswith(f"{x}.") for x in family.lists)
    ]


def _refuse_other_attention(transformer: nn.Module, family: _Family) -> None:
    """Raise ``NotImplementedError`` for modules in blocks that compute attention and that the family does not name:
    they would attend to this rank's tokens only."""
    patterns = family.patterns(family.shared + family.prompts)
    known = [name for name, _ in transformer.named_modules() if any(fnmatchcase(name, x) for x in patterns)]
    for name, module in transformer.named_modules():
        inside = any(name.startswith(f"{x}.") for x in family.lists)
        covered = any(name == outer or name.startswith(f"{outer}.") for outer in known)
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

    def __init__(self, handler: ContextParallelHandler, family: _Family, gradients: str) -> None:
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
        if getattr(module, "_parallel_config", None) is not None or _has(hooks, "cache", "broadcast"):
            raise NotImplementedError(
                f"{type(module).__name__} runs with enable_parallelism or a cache of diffusers. The one would split "
                "the sequence twice, and the other decides by this rank's tokens which blocks run. Disable them"
            )
        if _has(hooks, "smoothed_energy"):
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
            return _mapped("", args, self.whole), {name: _mapped("", x, self.whole) for name, x in kwargs.items()}
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

        _mapped("", inputs, add)
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
        return _mapped("", output, lambda _, x: with_gradient_of(x, x / ranks)) if ranks > 1 else output


class _Stage:
    """A list of blocks: the lengths of its sequence, and the hooks that split and gather it."""

    def __init__(self, handler: ContextParallelHandler, family: _Family) -> None:
        self.handler, self.family = handler, family
        self.lengths: dict[str, int] = {IMAGE: 0, PROMPT: 0}
        """Tokens of the image, and of the prompt in joint attention."""

    def attach(self, lists: list[Any]) -> None:
        """Register the hooks of the blocks of lists, one after the other, and of their attention."""
        blocks = [block for together in lists for block in together]
        for number, block in enumerate(blocks):
            parameters = inspect.signature(block.forward).parameters.values()
            names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
            block.register_forward_pre_hook(_Entrance(self, names, number == 0).before, with_kwargs=True)
            for module in block.modules():
                found = binding_of(module)
                if found is not None and found.style.mode.kv_exchange != "replicated":
                    name = next(name for name, x in block.named_modules() if x is module)
                    hook = partial(self.before_attention, self.family.stream(name))
                    found.warned = True  # keys of other tokens than the queries are those that the family has
                    module.register_forward_pre_hook(hook, with_kwargs=True)
                elif found is not None:
                    module.register_forward_pre_hook(self.before_prompt, with_kwargs=True)
        if blocks:
            blocks[-1].register_forward_hook(self.gather)

    # ---- who holds which tokens

    def shares(self, kind: str) -> list[tuple[int, int]]:
        """Start and number of the tokens of each rank, of the prompt or of the image; padding not counted."""
        ranks, (image, prompt) = self.handler.cp.size, (self.lengths[IMAGE], self.lengths[PROMPT])
        prompts = [prompt // ranks + (rank < prompt % ranks) for rank in range(ranks)]
        images, left = [], image
        for count in prompts:
            images.append(min(self.local_length - count, left))
            left -= images[-1]
        counts = prompts if kind == PROMPT else images
        return [(sum(counts[:rank]), count) for rank, count in enumerate(counts)]

    @property
    def local_length(self) -> int:
        """The number of tokens of each rank, padding included."""
        return -(-sum(self.lengths.values()) // self.handler.cp.size)

    @property
    def both(self) -> Kinds:
        """The kinds of tokens of the sequence, in its order."""
        return self.family.order if self.lengths[PROMPT] else (IMAGE,)

    def total(self, kinds: Kinds) -> int:
        """The number of tokens of these kinds, on all ranks."""
        return sum(self.lengths[kind] for kind in kinds)

    def held(self, kinds: Kinds, rank: int | None = None) -> int:
        """The number of tokens of these kinds that a rank holds, padding included."""
        prompt = self.shares(PROMPT)[self.handler.cp.rank if rank is None else rank][1]
        return sum(prompt if kind == PROMPT else self.local_length - prompt for kind in kinds)

    def longest(self, kinds: Kinds) -> int:
        """The largest number of tokens of these kinds that a rank holds."""
        return max(self.held(kinds, rank) for rank in range(self.handler.cp.size))

    @property
    def padding(self) -> int:
        """The number of positions of the last rank that are padding."""
        return self.local_length * self.handler.cp.size - sum(self.lengths.values())

    def record(self, image: int, prompt: int) -> None:
        """Record the lengths of this forward, or raise ``ValueError`` if they cannot be split."""
        self.lengths = {IMAGE: image, PROMPT: prompt}
        ranks = self.handler.cp.size
        few = min(count for _, count in self.shares(IMAGE)) < 1 or (prompt and prompt < ranks)
        if few or (ranks > 1 and image <= self.longest((IMAGE,))):  # padding counted, all tokens look like a share
            raise ValueError(
                f"{image} tokens of the image and {prompt} of the prompt cannot be split over {ranks} ranks. Each "
                "needs at least one of both, and fewer than all of the image. Use fewer ranks, or larger inputs"
            )

    def split(self, x: Tensor, dim: int, kinds: Kinds) -> Tensor:
        """This rank's tokens of a whole tensor, those of the image with padding, in memory of their own."""
        if len(kinds) > 1:
            parts = zip(x.split([self.lengths[kind] for kind in kinds], dim), kinds, strict=True)
            return torch.cat([self.split(part, dim, (kind,)) for part, kind in parts], dim)
        start, count = self.shares(kinds[0])[self.handler.cp.rank]
        more, local = self.held(kinds) - count, x.narrow(dim, start, count)
        return F.pad(local, (0, 0) * (x.ndim - 1 - dim) + (0, more)) if more else local.contiguous()

    # ---- attention

    def before_attention(
        self, stream: tuple[Kinds, Kinds] | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse adapters, and let the attention call have the masks of all ranks."""
        given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        wrong = [name for name, x in given.items() if x is not None and name.startswith("ip_")]
        if wrong:
            raise NotImplementedError(
                f"{type(module).__name__} got {', '.join(wrong)}. Its keys are those of whole sequences, which the "
                "ranks hold in another order. Leave it out"
            )
        if self.family.prompts and not self.family.order and given.get(PROMPT) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} got encoder_hidden_states where blocks of this type attend to the image. "
                "Each rank has all of the prompt, and no share of it. Use a configuration without only_cross_attention"
            )
        call = current_call()
        if call is not None:
            call.adapt = partial(self.with_masks, stream)
            if given.get("all_perturbed"):  # values are returned, without attention, on every rank
                call.must_route = False

    def before_prompt(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a module of attention to the prompt that attends to the image, of which each rank has a share."""
        names = list(inspect.signature(module.forward).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        prompt = PROMPT if PROMPT in given else names[1]
        if given.get(prompt) is None and self.handler.cp.size > 1:
            raise NotImplementedError(
                f"{type(module).__name__} got no {prompt}, and would attend to this rank's tokens of the image only. "
                "Pass a prompt, and use a configuration without double_self_attention"
            )

    def with_masks(self, stream: tuple[Kinds, Kinds] | None, request: AttentionRequest) -> AttentionRequest:
        """An attention call for the keys of all ranks, in the order in which these hold them, equally many on each. The
        module makes its mask for this rank's keys, or has got that of the whole sequence."""
        ranks, picks = range(self.handler.cp.size), self.family.picks
        mask, is_causal, documents = request.call.mask, request.call.is_causal, request.call.documents
        if self.family.prompt_alone and is_causal:
            stream, is_causal = ((PROMPT,), (PROMPT,)), False
            before = torch.ones(self.lengths[PROMPT], self.lengths[PROMPT], dtype=torch.bool, device="cpu").tril()
            mask = before.to(request.query.device)[None, None]
        queries, keys = request.query.shape[2], request.key.shape[2]
        of_queries, of_keys = stream or ((IMAGE,) if n < self.local_length else self.both for n in (queries, keys))
        if picks:  # fewer of both
            of_queries = of_keys = self.both
        elif (queries, keys) != (self.held(of_queries), self.held(of_keys)):
            raise NotImplementedError(
                f"attention has {queries} queries and {keys} keys, and this rank holds {self.local_length} tokens of "
                "the sequence. Others are not split as these are. Use a model whose blocks attend to the whole sequence"
            )
        total, longest, counts = (
            self.total(of_keys),
            self.longest(of_keys),
            [self.held(of_keys, rank) for rank in ranks],
        )
        if picks:
            of_ranks = by_rank(self.handler.mesh, torch.tensor([keys], device=request.key.device))
            counts = of_ranks.flatten().tolist()
        held = [self.order(rank, of_keys, count, longest) for rank, count in zip(ranks, counts, strict=True)]
        real = [(start is not None, count) for rows in held for start, count in rows if count]
        ends = all(sees for sees, _ in real[:-1])  # if there is padding, it is behind the sequence
        if mask is not None or not ends or (not real[-1][0] and of_queries != of_keys):
            device = request.key.device
            at = torch.cat([_rows(start, count, device) for rows in held for start, count in rows])
            mask = self.of_all_ranks(mask, keys, at.clamp(min=0), total)
            if mask is None or not all(sees for sees, _ in real):
                visible = (at >= 0)[None, None, None]
                value = 0 if mask is not None and mask.dtype == torch.bool else -torch.inf
                mask = visible if mask is None else mask.masked_fill(~visible, value)
        elif not real[-1][0]:
            seen = sum(count for sees, count in real if sees)  # fewer than all tokens, if attention leaves some out
            documents = documents_table([0, seen, longest * len(ranks)])
        more = self.longest(of_queries) - queries, longest - keys
        if any(more):
            request.query = F.pad(request.query, (0, 0, 0, more[0]))
            request.key, request.value = (F.pad(x, (0, 0, 0, more[1])) for x in (request.key, request.value))
            to_caller = request.to_caller
            request.to_caller = lambda out: to_caller(out[:, :, :queries])
        request.call = replace(request.call, mask=mask, is_causal=is_causal, documents=documents)
        return request

    def of_all_ranks(self, mask: Tensor | None, keys: int, at: Tensor, total: int) -> Tensor | None:
        """The mask of an attention call, for the keys of all ranks. ``at``: their positions in the whole sequence."""
        if mask is None or self.handler.cp.size == 1:
            return mask
        if mask.ndim > 1 and mask.shape[-1] == total:
            return mask[..., at] if mask.shape[-2] != total else mask[..., at, :][..., at]
        if mask.shape[-1] != keys or keys < self.local_length:
            return mask
        if mask.ndim < 4 or (mask.shape[-2] > 1 and not self.family.pairs):
            raise NotImplementedError(
                f"attention got a mask of shape {tuple(mask.shape)}, which is made of pairs of this rank's tokens. "
                "Those with tokens of other ranks are missing. Leave out the mask of the prompt"
            )
        if mask.shape[-2] == 1:
            return self.handler.combine(mask, mask.ndim - 1, gradients=None)
        own = mask.diagonal(dim1=-2, dim2=-1).contiguous()  # of a product of 0 and 1, what each token has
        tokens = self.handler.combine(own, own.ndim - 1, gradients=None)
        return tokens[..., None] * tokens[..., None, :]

    def order(self, rank: int, kinds: Kinds, most: int, longest: int) -> list[tuple[int | None, int]]:
        """Starts and numbers of the adjacent tokens that a rank holds, in the whole sequence of these kinds, None for
        padding: the first ``most`` rows, and padding up to ``longest`` rows."""
        rows: list[tuple[int | None, int]] = []
        start = 0
        for kind in kinds:
            first, count = self.shares(kind)[rank]
            rows += [(start + first, count), (None, self.held((kind,), rank) - count)]
            start += self.lengths[kind]
        kept = []
        for begin, count in rows:
            kept.append((begin, min(count, most)))
            most -= kept[-1][1]
        return [*kept, (None, longest - sum(count for _, count in kept))]

    # ---- behind the last block

    def gather(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The results of the last block, of all tokens, on every rank."""
        if isinstance(output, Tensor):
            return self.whole(output, self.both if self.family.last else (IMAGE,))
        return tuple(
            x if x is None else self.whole(x, (kind,)) for x, kind in zip(output, self.family.returned, strict=True)
        )

    def whole(self, x: Tensor, kinds: Kinds) -> Tensor:
        """Gather the tokens of the image or of the prompt, or of both in one tensor."""
        dim = self.family.dim
        if x.shape[dim] != self.held(kinds):
            raise NotImplementedError(
                f"the last block returned {x.shape[dim]} tokens where this rank holds {self.held(kinds)}. They cannot "
                "be gathered. Remove hooks that change what blocks return"
            )
        if len(kinds) > 1:
            parts = zip(x.split([self.held((kind,)) for kind in kinds], dim), kinds, strict=True)
            return torch.cat([self.whole(part, (kind,)) for part, kind in parts], dim)
        shares, longest = self.shares(kinds[0]), self.longest(kinds)
        padded = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, longest - x.shape[dim]))
        joined = self.handler.combine(padded, dim, gradients="shares")
        return torch.cat([joined.narrow(dim, rank * longest, count) for rank, (_, count) in enumerate(shares)], dim)


def _mask_of_segments(total: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a block with one mask in place of segments, each of which sees itself (text: its past) and all
    tokens before, and of the keys that are no padding."""
    if given.get("segments") is None:
        return {}
    device = given[IMAGE].device
    mask = torch.ones(total, total, dtype=torch.bool, device=device).tril()
    end = 0
    for start, end, is_text in given["segments"]:
        if not is_text:
            mask[start:end, start:end] = True
    mask[end:] = True  # the image that is made
    valid = given.get("key_valid")
    mask = mask[None, None] if valid is None else mask & valid[:, None, None]
    return {"attention_mask": mask, "segments": None, "key_valid": None}


def _rows(start: int | None, count: int, device: torch.device) -> Tensor:
    """Adjacent positions; -1 for padding."""
    if start is None:
        return torch.full((count,), -1, device=device)
    return torch.arange(start, start + count, device=device)


_POSITIONS = ("rot", "freq", "pos", "rope", "cos", "sin", "indices")


def _has(name: str, *words: str) -> bool:
    """True if one of the words is in a name. (torch.compile traces no regular expressions in torch 2.11.)"""
    return any(word in name for word in words)


class _Entrance:
    """The hook of a block: it gives the block this rank's tokens of all that it gets."""

    def __init__(self, stage: _Stage, names: list[str], first: bool) -> None:
        self.stage, self.names, self.first = stage, names, first

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with this rank's tokens. Those of later blocks are split already, if earlier ones made them."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        stage, family = self.stage, self.stage.family
        joint = bool(family.order) and not family.last and given.get(family.prompt) is not None
        counts = {name: given[name].shape[family.dim] for name in (family.image, *([family.prompt] if joint else []))}
        counted = dict(family.counted) | ({family.last: IMAGE} if family.last else {})
        numbers = [x for x, y in given.items() if isinstance(y, int) and not isinstance(y, bool) and x not in counted]
        if self.first:
            behind = given.get(family.last, counts[family.image])
            stage.record(behind, counts.get(family.prompt, counts[family.image] - behind))
            mask = given.get("encoder_attention_mask") if family.picks else None
            if mask is not None and bool((mask.int().diff(dim=-1) > 0).any()):
                raise NotImplementedError(
                    f"{type(module).__name__} got an encoder_attention_mask that hides tokens before others of a "
                    "prompt. Attention moves those behind them forward, which the ranks cannot. Put padding at the end"
                )
        # Another forward may have come before this one is recomputed.
        (stage.lengths,) = checkpoint.batch_state(self, lambda: (stage.lengths,))
        kinds: dict[str, Kinds] = {name: (IMAGE if name == family.image else PROMPT,) for name in counts}
        if family.last:
            kinds = {family.image: stage.both}
        whole = {name: counts[name] == stage.total(kinds[name]) for name in counts}
        if numbers or any(not whole[name] and counts[name] != stage.held(kinds[name]) for name in counts):
            raise NotImplementedError(
                f"{type(module).__name__} got {', '.join(numbers) or 'other tokens than its neighbour'}. This rank "
                f"holds {stage.local_length} tokens of {stage.total(stage.both)}, and a number of tokens is one of "
                "the whole sequence. Use a configuration of the model without that"
            )

        masks = _mask_of_segments(stage.total(stage.both), given) if family.segments else {}

        def share(name: str, x: Any) -> Any:
            if name in masks:
                return masks[name]
            if name in kinds:
                return stage.split(x, family.dim, kinds[name]) if whole[name] else x
            if name == family.last and x is not None:
                return stage.held((IMAGE,))
            if name in counted and x is not None:
                start, count = stage.shares(counted[name])[stage.handler.cp.rank]
                return max(0, min(x - start, count))
            return x if name == family.prompt else _mapped(name, x, lambda *y: self.share(type(module).__name__, *y))

        names = [*self.names, *[""] * len(args)]  # further ones are those that the block ignores
        return tuple(share(*pair) for pair in zip(names, args, strict=False)), {
            name: share(name, x) for name, x in kwargs.items()
        }

    def share(self, block: str, name: str, x: Tensor) -> Tensor:
        """This rank's tokens of another argument, found by the size of its dimensions; all of one without tokens."""
        lengths, family, both = self.stage.lengths, self.stage.family, self.stage.both
        text = name.startswith("encoder") or (family.prompts and _has(name, "encoder", "prompt", "text"))
        text = text or (not family.streams and name.startswith(family.prompt))
        if text and (family.prompts or not lengths[PROMPT]):
            return x
        positions = _has(name, *_POSITIONS)
        kinds = dict.fromkeys([*((kind,) for kind in both), both])
        if family.streams:
            kinds = {(PROMPT,) if _has(name, "aud") else (IMAGE,): None}
        elif len(both) > 1 and not positions and not _has(name, "mask", "context"):
            del kinds[(PROMPT,)]  # shifts and scales are those of images
        numbers = x.is_floating_point() or x.is_complex()  # of a token, in the last dimension; others count or mask
        first = 0 if positions or family.dim == 0 or (x.ndim == 1 and not numbers) else 1
        last = x.ndim - 1 if numbers and "mask" not in name else x.ndim
        found = [(dim, kind) for dim in range(first, last) for kind in kinds if x.shape[dim] == self.stage.total(kind)]
        if len(found) > 1 and "mask" in name:  # of pairs of the whole sequence
            return x
        if len(found) > 1:
            raise NotImplementedError(
                f"{block} got {name} of shape {tuple(x.shape)}, with {lengths[IMAGE]} tokens of the image and "
                f"{lengths[PROMPT]} of the prompt. Which dimension counts which tokens is not clear. Use other lengths"
            )
        return self.stage.split(x, *found[0]) if found else x


def _mapped(name: str, x: Any, function: Callable[[str, Tensor], Tensor]) -> Any:
    """``x`` with ``function(name, tensor)`` of each tensor in it, in tuples, lists and dicts, whose keys are names.
    (Outputs of models are dicts.)"""
    if isinstance(x, Tensor):
        return function(name, x)
    if isinstance(x, Mapping):
        found: Any = copy.copy(x)
        for key, y in x.items():
            found[key] = _mapped(str(key), y, function)
        return found
    return type(x)(_mapped(name, y, function) for y in x) if type(x) in (tuple, list) else x

"""Images, videos and audio of prepared models: each rank encodes a run of them, and rows travel to the ranks of their
tokens.

While a forward runs, the model's ``get_image_features``, ``get_video_features`` and ``get_audio_features`` are
replaced: the originals run on this rank's run, and what they return here is the rows of this rank's placeholder tokens,
in their order. The model inserts them as it does on one device. (docs/integrations/images.md)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...data.collectives import by_rank, rows_to_readers
from ...data.packing import Media, PreparedBatch
from ...data.sharding import documents_for, local_share, resolve_layout
from ...handler import ContextParallelHandler
from ...mesh import cp_mesh
from ...module.mesh_binding import Binding
from ...schedule.readers import read_rows, runs_of_equal_cost
from ...style import style_of
from . import forward
from .seams import source_of

METHODS = {"image": "get_image_features", "video": "get_video_features", "audio": "get_audio_features"}
"""The methods of models that encode each kind of media; ``forward`` inserts the first kind before the second."""
PLURALS = {"image": "images", "video": "videos", "audio": "audio clips"}
GRIDS = {"image": ("image_grid_thw", "image_grid_hw", "target_sizes"), "video": ("video_grid_thw",)}
"""Entries with the numbers of patches of each item, for encoders that take patches of all items one after the other."""
SIDE_BY_SIDE = "target_sizes"
"""The one of these entries beside which patches lie one after the other in the last dimension (MiniCPM-V)."""
TOKENS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
"""Names of placeholder tokens in configurations."""
BOTH = {"pooler_output", "last_hidden_state"}
"""Parts with rows of which a model inserts one only."""
PLACES = "image_embeds_position_mask"
"""The entry ``[B, S]`` that is 1 on placeholder tokens of images, in place of such an id (Kosmos)."""
FIELDS = ("pooler_output", "last_hidden_state", "deepstack_features", "attention_mask")
"""The parts of an encoder's output that have a row for each token, which models insert, and the mask of these rows."""
ENCODERS = ("embed_tokens_extend", "vision_model", "perceiver_resampler")
"""Modules of decoders that do nothing but encode images and audio: of Phi 4, and of Idefics."""
OF_TOKENS = ("position_ids", "context_parallel")
"""Keywords of this rank's tokens that some models hand on to encoders, too."""
PASSED_ON = ("qformer_outputs", "vision_outputs", "visual_indicator_features")
"""Parts that models do nothing with but return them, or which no image changes (Ovis 2). Each rank has those that its
own encoder has made."""
ROWS_MASK = "input_features_mask"
"""The mask of an encoder's rows in models whose encoder does not take it (Granite Speech)."""
_ROWS_OF_IMAGES, _TILES = "batch_size, num_images,", "pixel_values[pixel_attention_mask]"
"""Code of encoders that take the images of each row of the batch, with padding among them."""
BINS = ("input_dim", "input_feat_size", "num_mel_bins")
"""Names of the number of values of a frame of audio; with the last one frames are the last dimension."""
FRAME_MASKS = ("input_features_mask", "feature_attention_mask", "audio_feature_lengths")
"""Names of entries with which encoders tell frames from padding."""
SHORTEST = 20
"""Half the frames of a blank clip, for encoders that take any number."""
COUNTS = re.compile(r"(^|_)num_")
"""Names of entries with which others have no equal part for each image."""
POOLING = {"image": "image_token_pooling", "video": "video_token_pooling"}
"""Entries with the numbers of the patches that each row pools (Molmo 2)."""
OF_ALL_ITEMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules of encoders that normalise by statistics of all items of a batch, in training."""
CROPS = "image_num_crops"
"""The numbers of crops of images, which its forward takes, but no encoder."""


def around(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The modules of a model that hold its decoder, from the model on, and the decoder itself."""
    return [m for m in model.modules() if any(x is decoder for x in m.modules())]


def owner_of(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """The innermost module around the decoder that encodes media and inserts their rows, if there is one."""
    found = [m for m in around(model, decoder) if any(hasattr(m, name) for name in METHODS.values())]
    return found[-1] if found and any(fields_read(found[-1]).values()) else None


def encoders_in(model: nn.Module) -> set[nn.Module]:
    """The modules with which a model, or a decoder (Chameleon), encodes images and audio by its methods."""
    code = "".join(source_of(getattr(type(model), name, len)) for name in METHODS.values())
    found = [x for name, x in model.named_children() if name in ENCODERS or re.search(rf"\bself\.{name}\b", code)]
    return {module for x in found for module in x.modules()}


def fields_read(owner: nn.Module) -> dict[str, list[str]]:
    """The parts of its encoders' output that the forward of a module reads, for each kind of media."""
    source, call = source_of(type(owner).forward), r"self\.get_{}_features\((?:[^()]|\([^()]*\))*\)"
    found = {kind: _parts_read(source, rf'mm_encoder_outputs\["{kind}"\]|{call.format(kind)}') for kind in METHODS}
    if {*found["audio"]} == BOTH:  # models insert the first, and return the second (Omnilingual ASR)
        found["audio"] = ["pooler_output"]
    return found


def _parts_read(source: str, expression: str) -> list[str]:
    """The attributes of an expression that code reads, directly or through the name that it gives to it."""
    found = re.findall(rf"(?:{expression})\.(\w+)", source)
    for name in re.findall(rf"(\w+) = (?:{expression})\n", source):
        found += re.findall(rf"\b{name}\.(\w+)", source)
    return sorted(set(found))


@dataclass
class Items:
    """The images or videos of a batch, or frames of its videos: every tensor has one part of dimension 0 for each."""

    entries: dict[str, Any]
    ends: dict[str, list[int]]
    """The end of each item's part, for each entry."""
    costs: list[float]
    last: str = ""
    """The entry whose parts lie in its last dimension; "": none."""
    pooled: str = ""
    """The entry with numbers of patches, among those of all items; -1: none (Molmo 2)."""

    def run(self, start: int, stop: int) -> dict[str, Any]:
        """The entries of a run of items."""
        ends = {name: [0, *x] for name, x in self.ends.items()}
        parts = {name: slice(ends[name][start], ends[name][stop]) for name in self.entries}
        found = {name: x[..., parts[name]] if name == self.last else x[parts[name]] for name, x in self.entries.items()}
        if self.pooled:
            pixels, x = next(iter(self.entries)), found[self.pooled]
            found[self.pooled] = torch.where(x < 0, x, x - ends[pixels][start] * self.entries[pixels].shape[1])
        return found

    def joined(self, other: Items) -> Items:
        """Both kinds of items under the names of the first: the entries of both have the same order."""
        pairs = {name: (x, y) for (name, x), y in zip(self.entries.items(), other.entries.values(), strict=True)}
        ends = zip(self.ends.items(), other.ends.values(), strict=True)
        return Items(
            {name: torch.cat(both, -1 if name == self.last else 0) for name, both in pairs.items()},
            {name: [*x, *(x[-1] + end for end in y)] for (name, x), y in ends},
            self.costs + other.costs,
            self.last,
        )


def items_of(owner: nn.Module, kind: str, entries: dict[str, Any]) -> Items:
    """Read the images or videos of a batch; ``NotImplementedError`` for entries that do not hold one part for each."""
    if POOLING.get(kind) in entries:
        return _pooled(owner, kind, entries)
    method = getattr(type(owner), METHODS[kind])
    names = [name for name in (*inspect.signature(method).parameters, *_rows_mask(owner, kind)) if name in entries]
    given = {name: entries[name] for name in names}
    ragged = [name for name in names if COUNTS.search(name)]
    if ragged:
        _refuse(owner, ragged, f"and it is not known which parts of the other entries belong to one {kind}")
    if (_ROWS_OF_IMAGES in source_of(method) or _TILES in source_of(method)) and given[names[0]].ndim == 5:
        given = _without_padding(given, names[0])
    sizes_of = next((name for name in GRIDS.get(kind, ()) if name in given), "")
    grid = given.get(sizes_of)
    if grid is not None:
        if kind == "video" and frames_apart(owner):
            frames = grid[:, 0]
            grid = torch.cat([torch.ones_like(grid[:, :1]), grid[:, 1:]], 1)
            rest = {name: x for name, x in {**given, sizes_of: grid}.items() if name != names[0]}
            given |= {name: torch.repeat_interleave(x, frames, 0) for name, x in rest.items()}
            grid = given[sizes_of]
        costs = grid.prod(1).tolist()
    else:
        sizes = given.get("image_sizes")
        costs = [1.0] * len(given[names[0]]) if sizes is None else torch.as_tensor(sizes, device="cpu").prod(1).tolist()
    ends = {name: [*range(1, len(costs) + 1)] for name in names}
    last, pixels = names[0] if sizes_of == SIDE_BY_SIDE else "", given[names[0]]
    if grid is not None:
        width = pixels.shape[-1] // max(1, int(sum(costs))) if last else 1
        ends[names[0]] = [int(end) * width for end in accumulate(costs)]
    bad = [name for name, x in given.items() if _parts_of(x, name == last) != (ends[name] or [0])[-1]]
    if bad:
        _refuse(owner, bad, f"whose dimension 0 does not hold one part for each of {len(costs)} items ({kind})")
    return Items(given, ends, costs, last)


def _pooled(owner: nn.Module, kind: str, entries: dict[str, Any]) -> Items:
    """Images that consist of crops, or videos of frames, whose rows pool patches by their numbers in the batch."""
    pixels, pooled, grids = _names(owner, METHODS[kind])
    grid = entries[grids]
    if kind == "image" and CROPS not in entries:
        _refuse(owner, [pixels], f"without {CROPS}, so it is not known which crops belong to one image")
    crops = (entries[CROPS] if kind == "image" else grid[:, 0]).tolist()
    rows = grid[:, 0] * grid[:, 1] + grid[:, 2] * grid[:, 3] if kind == "image" else grid.prod(1)
    ends = {pixels: [*accumulate(crops)], pooled: [*accumulate(rows.tolist())], grids: [*range(1, len(grid) + 1)]}
    given = {name: entries[name] for name in ends}
    if bad := [name for name, x in given.items() if len(x) != (ends[name] or [0])[-1]]:
        _refuse(owner, bad, f"whose dimension 0 does not hold what {grids} or {CROPS} counts for {len(grid)} items")
    return Items(given, ends, [float(x) for x in crops], pooled=pooled)


def _parts_of(x: Any, last: bool) -> int:
    """The size of the first or the last dimension of an entry; -1: it has none."""
    return x.shape[-1] if last else len(x) if hasattr(x, "__len__") else -1


def _without_padding(entries: dict[str, Tensor], pixels: str) -> dict[str, Tensor]:
    """Make rows of one image each of ``[B, images of a row, ...]``, without padding: zeros (Idefics), or what a mask
    ``[B, images of a row]`` hides (Granite Docling)."""
    tiles, mask = entries[pixels].shape[:2], entries.get("pixel_attention_mask")
    real = entries[pixels].flatten(0, 1).flatten(1).ne(0).any(1)
    if mask is not None and mask.ndim == 2:
        real = mask.flatten().bool()
    entries = {name: x[:, None].expand(tiles) if x.ndim == 1 else x for name, x in entries.items()}
    return {name: x.flatten(0, 1)[real][:, None] for name, x in entries.items()}


def _refuse(owner: nn.Module, names: Sequence[str], why: str) -> NoReturn:
    raise NotImplementedError(
        f"{type(owner).__name__} got {', '.join(names)}, {why}. So they cannot be shared out over the ranks. Compute "
        "inputs_embeds (and position_ids) of the whole sequence first, and pass these to prepare_batch"
    )


def frames_apart(owner: nn.Module) -> bool:
    """True if the encoder of a model attends within frames, so that the frames of a video may go to several ranks."""
    sources = [source_of(type(module).forward) for module in owner.modules()]
    text = "".join({*sources, source_of(getattr(type(owner), METHODS["video"], len))})
    apart = "get_vision_cu_seqlens(" in text or "get_vision_attention_seqlens(" in text
    return apart and not re.search("merge_temporal|include_temporal|temporal_merge|resampler", text)


def videos_are_images(owner: nn.Module) -> bool:
    """True if a model encodes videos by the very calls that encode images."""
    image, video = (source_of(getattr(type(owner), METHODS[kind], len)) for kind in ("image", "video"))
    return "self.get_image_features(" in video or ("self.visual(" in video and "self.visual(" in image)


class MediaHook:
    """The hooks of a module that encodes images. ``binding`` is that of its decoder."""

    def __init__(self, binding: Binding, model: nn.Module, owner: nn.Module) -> None:
        self.binding, self.model = binding, model
        self.fields = fields_read(owner)
        self.norms = [module for module in encoders_in(owner) if isinstance(module, OF_ALL_ITEMS)]
        self.parameters = [*inspect.signature(owner.forward).parameters]
        self.known = {x for kind in METHODS for x in (*_entries(owner, kind), CROPS) if x in self.parameters}
        self.own: dict[str, Any] = {}
        """In a forward: what the module itself had, if anything, where methods over all ranks are now."""

    def attach(self, owner: nn.Module, decoder: nn.Module) -> None:
        """Register the hooks; those of a decoder that encodes images by itself before its others."""
        owner.register_forward_pre_hook(self.before, with_kwargs=True, prepend=owner is decoder)
        owner.register_forward_hook(self.after, always_call=True)

    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the model this rank's run of images, and positions of the whole batch."""
        self.after(owner)  # a KeyboardInterrupt ends a forward without its hooks
        ready: PreparedBatch | None = kwargs.get("context_parallel") or forward.offered()
        if ready is not None and "use_cache" in self.parameters and kwargs.get("use_cache") is None:
            kwargs = {**kwargs, "use_cache": False}  # Idefics makes the cache before its decoder is called
        sharded = any(isinstance(x, FSDPModule) for x in self.model.modules())
        if ready is None or (ready.media is None and not sharded):
            return args, kwargs
        if len(args) > 1 or kwargs.get("inputs_embeds") is not None:
            if ready.media is None:
                return args, kwargs
            _refuse(owner, [*ready.media.entries], "beside inputs_embeds or positional arguments")
        handler = ContextParallelHandler(self.binding.active.mesh, style_of(self.binding))
        kwargs = dict(kwargs)
        tokens = args[0] if args else kwargs["input_ids"]
        together = any(norm.training or norm.running_mean is None for norm in self.norms)
        exchange = Exchange(handler, ready, owner, self.fields, together)
        if ready.media is not None:
            self._check(owner, ready.media)
            exchange.add_all(ready.media.entries)
            ready = replace(self._positions(owner, handler, ready, kwargs, tokens.device), media=None)
            forward.offer(owner, ready)
            if "context_parallel" in kwargs:
                kwargs["context_parallel"] = ready
        if sharded:
            exchange.add_blanks()
        for name, x in exchange.inputs.items():
            kwargs[name] = x.to(tokens.device) if isinstance(x, Tensor) else x
        for kind, encode in exchange.encoders.items():
            self.own[METHODS[kind]] = vars(owner).get(METHODS[kind])
            setattr(owner, METHODS[kind], encode)
        return args, kwargs

    def after(self, owner: nn.Module, *_: Any) -> None:
        """Restore the model's own methods, and those that a user has put in their place."""
        for name, own in self.own.items():
            vars(owner).pop(name, None)
            if own is not None:
                setattr(owner, name, own)
        self.own.clear()

    def _check(self, owner: nn.Module, media: Media) -> None:
        """Raise ``NotImplementedError`` for a model or a batch whose images cannot be shared out."""
        for kind in METHODS:
            fields, names = self.fields[kind], [x for x in _entries(owner, kind) if x in media.entries]
            if names and _more_than_rows(fields):
                found = ", ".join(fields) or "more than the rows"
                _refuse(owner, names, f"but its forward reads {found} of what its encoder returns")
            if names and getattr(owner, "density_router", None) is not None:
                _refuse(owner, names, "but its router of tiles has a loss of all of them")
            if names and "input_ids" in _entries(owner, kind):
                _refuse(owner, names, f"but its {METHODS[kind]} reads input_ids, of which each rank has a share")
        positions = _names(owner, "compute_3d_position_ids") if hasattr(owner, "compute_3d_position_ids") else ()
        unknown = [name for name in media.entries if name not in self.known and name not in positions]
        if unknown:
            _refuse(owner, unknown, "which its methods that encode images, videos and audio do not take")
        videos = [name for name in media.entries if "video" in name]
        if videos and "cumsum(" in source_of(getattr(type(owner), "get_placeholder_mask", len)):
            _refuse(owner, videos, "whose tokens it tells from those of images by marks that another rank may hold")

    def _positions(
        self, owner: Any, handler: ContextParallelHandler, ready: PreparedBatch, kwargs: dict[str, Any], device: Any
    ) -> PreparedBatch:
        """Positions of several axes, made by the model of the whole batch; of this rank's share."""
        media = ready.media
        if media is None or not ready.numbered or not hasattr(owner, "compute_3d_position_ids"):
            return ready
        names, length = _names(owner, "compute_3d_position_ids"), media.tokens.shape[1]
        given: dict[str, Any] = dict.fromkeys(names) | {name: x for name, x in media.entries.items() if name in names}
        if "feature_attention_mask" in media.entries:
            given["audio_feature_lengths"] = media.entries["feature_attention_mask"].sum(1)
        given |= {name: kwargs[name] for name in ("use_audio_in_video",) if name in kwargs}
        given |= {name: x[:, :length].cpu() for name, x in ready.token_types.items() if name in names}
        given |= {"input_ids": media.tokens, "attention_mask": media.mask}
        given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in given.items() if name in names}
        whole = owner.compute_3d_position_ids(**given)
        if whole is None:
            return ready
        padded = F.pad(whole, (0, handler.cp.size * (ready.length or 0) - length))
        table = documents_for(handler, ready.documents, padded.shape[-1])
        kwargs["position_ids"] = local_share(handler, padded, padded.ndim - 1, table).to(device)
        return replace(ready, last_position=whole.max(), numbered=False)


def _names(owner: nn.Module, method: str) -> list[str]:
    skipped = ("self", "args", "kwargs")
    return [name for name in inspect.signature(getattr(type(owner), method)).parameters if name not in skipped]


def _more_than_rows(fields: list[str]) -> bool:
    """True if a model reads other fields of what an encoder returns than rows, or none that is known."""
    return not fields or bool({*fields} - {*FIELDS, *PASSED_ON}) or {*fields} >= BOTH


def _rows_mask(owner: nn.Module, kind: str) -> list[str]:
    """The name of the mask of audio rows, if the forward of a module takes it, but its encoder does not."""
    taken = kind == "audio" and ROWS_MASK in inspect.signature(owner.forward).parameters
    return [ROWS_MASK] if taken and ROWS_MASK not in _names(owner, METHODS["audio"]) else []


def _entries(owner: nn.Module, kind: str) -> list[str]:
    """The names of the entries of a batch that belong to a kind of media, that of its content first."""
    return [*_names(owner, METHODS[kind]), *_rows_mask(owner, kind)] if hasattr(owner, METHODS[kind]) else []


def _refuse_blank(owner: nn.Module, kind: str, why: str) -> NoReturn:
    raise NotImplementedError(
        f"{type(owner).__name__} got a batch without {PLURALS[kind]} under FSDP2, where its encoder must run in every "
        f"step, {why}"
    )


def _blank_image(owner: Any) -> dict[str, Tensor]:
    """A small image without content, for a batch that has none."""
    config = getattr(owner.config, "vision_config", owner.config)  # NeoMME: it has no encoder of its own
    names = inspect.signature(getattr(type(owner), METHODS["image"])).parameters
    needed = [name for name, p in names.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD][2:]
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    size, dtype = getattr(config, "patch_size", None), next(owner.parameters()).dtype
    if "image_grid_thw" in names and isinstance(size, int):
        side = getattr(config, "spatial_merge_size", 1)
        width = channels * getattr(config, "temporal_patch_size", 1) * size**2
        return {
            "pixel_values": torch.ones(side**2, width, dtype=dtype, device="cpu"),
            "image_grid_thw": torch.tensor([[1, side, side]], device="cpu"),
        }
    if width := getattr(config, "patch_dim", 0):  # NeoMME: rows of patches
        return {"pixel_values": torch.ones(1, width, dtype=dtype, device="cpu")}
    side = getattr(config, "image_size", None)
    if isinstance(side, int) and set(needed) <= {"image_sizes"}:
        if points := getattr(owner.config, "image_grid_pinpoints", None):  # the fewest tiles, and the whole image
            height, width = min(points, key=lambda point: point[0] * point[1])
            tiles = (height // side) * (width // side) + 1
            pixels = torch.ones(1, tiles, channels, side, side, dtype=dtype, device="cpu")
            return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]], device="cpu")}
        rows = (1, 1) if _ROWS_OF_IMAGES in source_of(getattr(type(owner), METHODS["image"])) else (1,)
        found = {"pixel_values": torch.ones(*rows, channels, side, side, dtype=dtype, device="cpu")}
        return found | {name: torch.tensor([[side, side]], device="cpu") for name in needed}
    _refuse_blank(owner, "image", "and no blank image can be made of its configuration. Put an image into every batch")


def audio_config(owner: Any) -> Any:
    """The configuration of the encoder of audio; None: the model has none."""
    return getattr(owner.config, "audio_config", None) or getattr(owner.config, "encoder_config", None)


def _blank_audio(owner: Any) -> dict[str, Tensor]:
    """A short clip without content, for a batch that has none."""
    config = audio_config(owner)
    names = _entries(owner, "audio")
    name = next((name for name in BINS if getattr(config, name, None) is not None), "")
    # Gemma 4 has no such name; its first convolution makes as many channels as there are bins.
    bins = getattr(config, name, next(iter(getattr(config, "subsampling_conv_channels", ())), None))
    frames = 2 * getattr(config, "n_window", getattr(config, "max_source_positions", 0)) or 2 * SHORTEST
    if bins is None or not {*names} <= {"input_features", "padding_mask", *FRAME_MASKS}:
        _refuse_blank(owner, "audio", "and no blank clip can be made of its configuration. Put a clip into every batch")
    shape = (bins, frames) if name == BINS[-1] else (frames, bins)
    found = {"input_features": torch.zeros(1, *shape, dtype=next(owner.parameters()).dtype, device="cpu")}
    masks = [x for x in names[1:] if x != "audio_feature_lengths" and x not in _rows_mask(owner, "audio")]
    return found | {x: torch.ones(1, frames, dtype=torch.bool, device="cpu") for x in masks}


BLANKS: dict[str, Callable[[Any], dict[str, Tensor]]] = {"image": _blank_image, "audio": _blank_audio}
"""Content without meaning, for the encoder of a kind that a batch does not have."""


class Exchange:
    """The images and videos of one forward: this rank's run of them, and the rows that the ranks exchange."""

    def __init__(
        self,
        handler: ContextParallelHandler,
        ready: PreparedBatch,
        owner: nn.Module,
        fields: dict[str, list[str]],
        together: bool = False,
    ) -> None:
        self.handler, self.ready, self.owner, self.fields = handler, ready, owner, fields
        self.together = together
        """Every rank encodes all items, since the encoder normalises over them, and the rows of rank 0 are used."""
        self.ring = cp_mesh.as_ring(cp_mesh.whole_view(handler.mesh))
        self.inputs: dict[str, Any] = {}
        """Arguments of the model's forward."""
        self.encoders: dict[str, Callable[..., Any]] = {}
        """The functions that take the place of the model's methods."""
        self.later: dict[str, Any] = {}
        """Rows of videos that were encoded together with the images."""
        self.blank: set[str] = set()
        """The kinds that this batch does not have."""

    def add_all(self, entries: dict[str, Any]) -> None:
        """Share out the images and the videos of a batch, together where the model encodes them alike."""
        names = {kind: _entries(self.owner, kind) for kind in METHODS}
        kinds = {kind: items_of(self.owner, kind, entries) for kind, of in names.items() if of and of[0] in entries}
        if {"image", "video"} <= {*kinds} and videos_are_images(self.owner):
            image, video = kinds.pop("image"), kinds.pop("video")
            self._add("image", image.joined(video), {"image": len(image.costs), "video": len(video.costs)})
            self.inputs |= dict.fromkeys(video.entries)
            self.inputs[names["video"][0]] = torch.empty(0, device="cpu")
            self.encoders["video"] = lambda *args, **kwargs: self.later.pop("video")
        for kind, items in kinds.items():
            self._add(kind, items, {kind: len(items.costs)})

    def add_blanks(self) -> None:
        """Let encoders of kinds that this batch does not have run on something without content."""
        found = {"image" if kind == "video" else kind for kind in self.encoders}
        for kind, blank in BLANKS.items():
            if kind not in found and self.fields[kind] and (kind == "image" or audio_config(self.owner) is not None):
                if self.together:
                    why = "and its BatchNorm would count what it runs on. Put one into every batch, or call eval() on "
                    _refuse_blank(self.owner, kind, f"{why}the BatchNorm modules")
                if _more_than_rows(self.fields[kind]):
                    why = f"but its forward reads {', '.join(self.fields[kind])} of its output, which cannot be shared "
                    _refuse_blank(self.owner, kind, f"{why}out. If no batch has any, set config.{kind}_config = None")
                self.blank.add(kind)
                self.add(kind, {kind: 0}, blank(self.owner))

    def _add(self, kind: str, items: Items, numbers: dict[str, int]) -> None:
        """Let the method of ``kind`` encode this rank's run. ``numbers``: how many items of each kind there are."""
        self.add(kind, *self.run_of(items, numbers))

    def run_of(self, items: Items, numbers: dict[str, int]) -> tuple[dict[str, int], dict[str, Any]]:
        """The number of this rank's items of each kind, and the entries that it encodes."""
        if self.together:
            return (numbers if self.ring.rank == 0 else dict.fromkeys(numbers, 0)), items.run(0, len(items.costs))
        bounds = runs_of_equal_cost(items.costs, self.ring.size)
        start, stop = bounds[self.ring.rank], bounds[self.ring.rank + 1]
        own = {name: (max(0, min(stop, b) - max(start, a))) for name, a, b in _places(numbers)}
        if start == stop:  # the smallest image of the batch, of which no row is used
            start = int(np.argmin(items.costs))
            stop = start + 1
        return own, items.run(start, stop)

    def add(self, kind: str, own: dict[str, int], inputs: dict[str, Any]) -> None:
        """Let the method of ``kind`` encode ``inputs``. ``own``: the number of this rank's items of each kind."""
        encode = getattr(self.owner, METHODS[kind])
        valid = next((inputs[name] for name in _rows_mask(self.owner, kind) if name in inputs), None)
        self.inputs |= inputs | dict.fromkeys(_rows_mask(self.owner, kind))

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                output = encode(*args, **{name: x for name, x in kwargs.items() if name not in OF_TOKENS})
                masked = "attention_mask" in self.fields[kind]
                found = self.share(output, own, output.attention_mask if masked else valid)
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                if kind not in self.blank or isinstance(error, NotImplementedError):
                    raise
                why = f"and it does not run on a blank one ({type(error).__name__}: {error}). Put one into every batch"
                _refuse_blank(self.owner, kind, why)
            self.later |= found
            return self.later.pop(kind)

        self.encoders[kind] = run

    def share(self, output: Any, own: dict[str, int], valid: Tensor | None = None) -> dict[str, Any]:
        """Exchange the rows of an encoder's output, and return what the model reads of it, for each kind in ``own``.
        ``valid`` is False for rows that the model does not insert."""
        read = sorted({x for kind in own for x in self.fields[kind]})
        names = [x for x in read if x not in ("attention_mask", *PASSED_ON)]
        levels = [(field, *tagged) for field in names for tagged in _levels(field, getattr(output, field))]
        wide = torch.cat([torch.cat([x.flatten(0, -2) for x in _parts(level)]) for _, _, level in levels], 1)
        made = _rows_of_kinds(_parts(levels[0][2]), own)
        if valid is not None:
            wide = wide[valid.to(wide.device).flatten().bool()]
            made = [len(wide) if made[0] else 0]
        counts = by_rank(self.handler.mesh, torch.tensor(made, device=wide.device)).tolist()
        slots = [self._slots(kind) for kind in own]
        self._compare(own, slots, counts)
        readers, sizes, before = [np.zeros(0, dtype=np.int64)] * self.ring.size, [], 0
        for i, tokens in enumerate(slots):
            numbers = (tokens.flatten().cumsum(0).view_as(tokens) - 1 + before).masked_fill(~tokens, -1)
            wanted = [x[x >= 0].numpy() for x in (numbers[:, at].flatten() for at in self._held())]
            readers = [np.concatenate(both) for both in zip(readers, wanted, strict=True)]
            sizes.append(len(wanted[self.ring.rank]))
            before += sum(count[i] for count in counts)
        plan = read_rows(readers, [sum(count) for count in counts], self.ring.rank)
        mine = rows_to_readers(wide[: sum(made)], plan, self.ring.key)
        widths = [_parts(level)[0].shape[-1] for _, _, level in levels]
        found = {}
        for kind, rows in zip(own, mine.split(sizes), strict=True):
            fields: dict[str, Any] = {field: [] for field in names}
            for (field, tag, level), x in zip(levels, rows.split(widths, 1), strict=True):
                shown = _shaped_like(level, x)
                if field == "deepstack_features":
                    fields[field].append(shown if tag is None else (tag, shown))
                else:
                    fields[field] = shown
            passed = {x: getattr(output, x) for x in read if x in PASSED_ON}
            found[kind] = type(output)(**fields, **passed)
            if valid is not None:
                found[kind].attention_mask = valid.new_ones(1, len(rows), dtype=torch.bool)
        return found

    def _slots(self, kind: str) -> Tensor:
        """``[B, S]``, with padding: True on the placeholder tokens of a kind."""
        media, length = self.ready.media, (self.ready.length or 0) * self.ring.size
        if media is None or kind in self.blank:
            return torch.zeros(1, length, dtype=torch.bool, device="cpu")
        if kind == "image" and PLACES in self.ready.token_types:
            return self.ready.token_types[PLACES] > 0
        found = torch.isin(media.tokens, torch.tensor(self.ids(kind), device="cpu"))
        if kind == "video" and "pixel_values" not in media.entries and not bool(found.any()):
            # GLM-4V inserts videos at tokens of images.
            found = torch.isin(media.tokens, torch.tensor(self.ids("image"), device="cpu"))
        return F.pad(found, (0, length - found.shape[1]))

    def ids(self, kind: str) -> list[int]:
        """The placeholder tokens of a kind, which the configuration of its encoder names if that of the model does not
        (Phi 4)."""
        config: Any = self.owner.config
        part = getattr(config, {"audio": "audio_config"}.get(kind, "vision_config"), None)
        found = [[x for name in TOKENS[kind] if (x := getattr(of, name, None)) is not None] for of in (config, part)]
        return found[0] or found[1]

    def _held(self) -> list[Tensor]:
        """The positions that each rank holds."""
        length = (self.ready.length or 0) * self.ring.size
        table = documents_for(self.handler, self.ready.documents, length)
        layout = resolve_layout(self.handler, length, table)
        return [layout.positions(rank) for rank in range(self.ring.size)]

    def _compare(self, own: dict[str, int], slots: list[Tensor], counts: list[list[int]]) -> None:
        """Raise ``ValueError``, on every rank, unless there is one row for each placeholder token."""
        for i, (kind, tokens) in enumerate(zip(own, slots, strict=True)):
            rows, expected = [count[i] for count in counts], int(tokens.sum())
            if min(rows) < 0 or sum(rows) != expected:
                raise ValueError(
                    f"input_ids has {expected} placeholder tokens of the kind {kind!r}, but its {PLURALS[kind]} make "
                    f"{'another number of' if min(rows) < 0 else sum(rows)} rows. Each token takes one row. Pass the "
                    "batch as the processor made it, and truncate no tokens of images"
                )


def _places(numbers: dict[str, int]) -> list[tuple[str, int, int]]:
    """Each kind, and the first and last of its items among those of all kinds."""
    ends = [*accumulate(numbers.values())]
    return [(kind, end - numbers[kind], end) for kind, end in zip(numbers, ends, strict=True)]


def _levels(field: str, value: Any) -> list[tuple[Any, Any]]:
    """The tensors of a field with a row for each token, and their tags: None, or the number of a layer (Granite)."""
    levels = value if field == "deepstack_features" else [value]
    return [x if isinstance(x, tuple) and isinstance(x[0], int) else (None, x) for x in levels]


def _parts(level: Any) -> list[Tensor]:
    return [level] if isinstance(level, Tensor) else [*level]


def _shaped_like(level: Any, rows: Tensor) -> Any:
    """Rows in the form of what an encoder returns: with as many dimensions, in a list if it is one."""
    rows = rows.reshape(*[1] * (_parts(level)[0].ndim - 2), *rows.shape)
    return rows if isinstance(level, Tensor) else [rows]


def _rows_of_kinds(parts: list[Tensor], own: dict[str, int]) -> list[int]:
    """The number of rows of each kind among the parts that an encoder returns; -1 if that cannot be told."""
    sizes = [x.shape[:-1].numel() for x in parts]
    items = sum(own.values())
    if not items or len(own) == 1:
        return [sum(sizes) if items else 0] + [0] * (len(own) - 1)
    if len(sizes) != items:
        return [-1] * len(own)
    return [sum(sizes[start:stop]) for _, start, stop in _places(own)]

"""Images to which layers of a decoder attend (Mllama, Idefics, BLIP), or that are inserted into a source that all ranks
have (Florence 2): each rank encodes a run of them, and all ranks receive all rows.

In a layer that attends to images this rank's queries attend to images that it holds whole, as on one device, and no
keys or values travel. The gradients of a row are added up over the ranks. (docs/integrations/images.md)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...data.collectives import rows_to_readers
from ...data.packing import Media
from ...mesh import cp_mesh
from ...module.mesh_binding import Binding
from ...schedule.readers import read_rows, runs_of_equal_cost
from . import forward
from .inkling import attends_to_blocks
from .media import around, encoders_in, owner_of
from .seams import set_implementation
from .two_sequences import cross_attention


@dataclass(frozen=True)
class _Images:
    """The images of a type of models, and their encoder."""

    last: tuple[str, ...]
    """The last module of the encoder: the first one of these that the model has."""
    entries: tuple[str, ...] = ("pixel_values",)
    """Entries of a batch ``[B, images of a row, ...]``, or ``[B, ...]`` if there is no mask."""
    mask: str = ""
    """The entry ``[B, S, images of a row, ...]`` that says which images a token sees; "": those of its row."""
    in_source: bool = False
    """True if they are inserted into the source of an encoder-decoder, and no layer attends to them."""


_TILES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
MODELS = {
    "BlipForConditionalGeneration": _Images(("vision_model",)),
    "Florence2Model": _Images(("multi_modal_projector",), in_source=True),
    "IdeficsModel": _Images(("perceiver_resampler", "vision_model"), mask="image_attention_mask"),
    "MllamaModel": _Images(("multi_modal_projector",), _TILES, "cross_attention_mask"),
}
"""Models with such images."""


def image_keys_of(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """The module around the decoder, or the decoder, that encodes such images, if there is one."""
    return next((m for m in around(model, decoder) if type(m).__name__ in MODELS), None)


def layers_of(model: nn.Module, decoder: nn.Module) -> set[nn.Module]:
    """The modules of a decoder that attend to images."""
    owner = image_keys_of(model, decoder)
    return set() if owner is None or MODELS[type(owner).__name__].in_source else cross_attention(decoder)


def attend_locally(model: nn.Module, decoder: nn.Module, implementation: str) -> set[nn.Module]:
    """Let such layers, modules that attend to earlier layers, and encoders that have the configuration of the decoder,
    or are inside of it, attend as before the model was prepared. Return those in the decoder."""
    inside = encoders_in(decoder) | layers_of(model, decoder)
    inside |= {module for module in decoder.modules() if attends_to_blocks(type(module))}
    outside = encoders_in(owner_of(model, decoder) or decoder) - {*decoder.modules()}
    for module in inside | {m for m in outside if getattr(m, "config", None) is decoder.config}:
        if hasattr(module, "config"):
            set_implementation(module, implementation)
    return inside


class ImageKeysHook:
    """The hooks of a module that encodes such images. ``binding`` is that of its decoder."""

    def __init__(self, binding: Binding, model: nn.Module, owner: nn.Module) -> None:
        self.binding, self.model = binding, model
        self.name = type(owner).__name__  # FSDP2 changes it
        self.known = MODELS[self.name]
        self.runs: list[int] | None = None
        """The boundaries of the ranks' runs of images, while a forward encodes some."""
        self.handles: list[Any] = []
        """The hook on the last module of the encoder, in such a forward. (LoRA takes a module that was there before
        into one of its own, which adds to its output.)"""

    def attach(self, owner: nn.Module, decoder: nn.Module) -> None:
        """Register the hooks; those of a decoder that encodes images by itself before its others."""
        before = self.before_source if self.known.in_source else self.before
        owner.register_forward_pre_hook(before, with_kwargs=True, prepend=owner is decoder)
        owner.register_forward_hook(self.after, always_call=True)

    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the model this rank's run of images."""
        self.after()  # a KeyboardInterrupt ends a forward without its hooks
        ready = kwargs.get("context_parallel") or forward.offered()
        if ready is None:
            return None
        if ready.media is None:
            self._refuse_sharded()
            return None
        tokens = args[0] if args else kwargs["input_ids"]
        images = self._images(ready.media, tokens, kwargs)
        ready = replace(ready, media=None)
        forward.offer(owner, ready)
        kwargs = {**kwargs, **({"context_parallel": ready} if "context_parallel" in kwargs else {})}
        return args, {**kwargs, **self._own(owner, images, tokens.device)}

    def before_source(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give an encoder-decoder, which has the whole source, this rank's run of images."""
        self.after()
        pixels = kwargs.get("pixel_values")
        if not self.binding.active.parallel:
            return None
        if pixels is None:
            self._refuse_sharded()
            return None
        return args, {**kwargs, **self._own(owner, {"pixel_values": pixels}, next(owner.parameters()).device)}

    def _own(self, owner: nn.Module, images: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """This rank's run of images, whose rows become those of all."""
        last = next(name for name in self.known.last if hasattr(owner, name))
        self.handles = [owner.get_submodule(last).register_forward_hook(self.share)]
        ring = cp_mesh.as_ring(cp_mesh.whole_view(self.binding.active.mesh))
        self.runs = runs_of_equal_cost([1.0] * len(images["pixel_values"]), ring.size)
        start, stop = self.runs[ring.rank], self.runs[ring.rank + 1]
        if start == stop:  # an image of another rank, of which no row is used
            start, stop = 0, 1
        return {name: x[start:stop].to(device) for name, x in images.items()}

    def share(self, last: nn.Module, args: Any, output: Any) -> Any:
        """Make the rows of this rank's images those of all images: ``[images, ..., D]``."""
        if self.runs is None:
            return None
        ring = cp_mesh.as_ring(cp_mesh.whole_view(self.binding.active.mesh))
        own = output if isinstance(output, Tensor) else output.last_hidden_state
        rows = own.shape[1:-1].numel()
        made = [(stop - start) * rows for start, stop in pairwise(self.runs)]
        plan = read_rows([np.arange(sum(made))] * ring.size, made, ring.rank)
        whole = rows_to_readers(own.flatten(0, -2)[: made[ring.rank]], plan, ring.key).view(-1, *own.shape[1:])
        return whole if own is output else type(output)(**{**output, "last_hidden_state": whole})

    def after(self, *_: Any) -> None:
        """End what ``before`` has begun; also after an exception."""
        self.runs = None
        while self.handles:
            self.handles.pop().remove()

    def _images(self, media: Media, tokens: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """The images of all rows of the batch ``[B * images of a row, ...]``, those without content included, with a
        dimension of size 1 for the images of a row."""
        name, known, entries = self.name, self.known, media.entries
        if {*entries} != {*known.entries}:
            also = f", and {known.mask}" if known.mask else ""
            raise NotImplementedError(
                f"{name} got images as {', '.join(entries)}. They are known to be shared out as "
                f"{', '.join(known.entries)} only. Pass these{also}, as its processor makes them"
            )
        dims = 2 if known.mask else 1
        shapes = {entry: tuple(x.shape[:dims]) for entry, x in entries.items()}
        if len({*shapes.values()}) > 1 or shapes["pixel_values"][0] != len(media.tokens):
            raise ValueError(
                f"{name} got images whose first dimensions are {shapes}, for {len(media.tokens)} rows of tokens. Each "
                f"entry is [rows, {'images of a row, ' * (dims - 1)}...]. Pass what its processor makes"
            )
        if not known.mask:
            return dict(entries)
        mask = given.get(known.mask)
        if mask is None:
            raise ValueError(
                f"{name} got images without {known.mask}, which says what tokens see of them. Pass what the processor "
                "makes (without it SDPA would make a causal mask on one device, or the model raises an error)"
            )
        if mask.shape[1] != tokens.shape[1]:
            raise ValueError(
                f"{known.mask} has {mask.shape[1]} rows for {tokens.shape[1]} tokens of this rank. Each token has one, "
                "and is split with it. Pass prepare_batch one for each token of the whole batch"
            )
        return {entry: x.flatten(0, 1)[:, None] for entry, x in entries.items()}

    def _refuse_sharded(self) -> None:
        if any(isinstance(x, FSDPModule) for x in self.model.modules()):
            raise NotImplementedError(
                f"{self.name} got a batch without images under FSDP2, where its encoder and the layers that "
                "attend to images must run in every step. Put an image into every batch"
            )

"""Images to which layers of a decoder attend (Mllama), or that are inserted into a source that all ranks have (Florence
2): each rank encodes a run of them, and all ranks receive all rows.

In such a layer this rank's queries attend to images, which the rank holds whole. So it attends as on one device, and no
keys or values travel. The gradients of a row are added up over the ranks. (docs/integrations/images.md)
"""

from __future__ import annotations

import copy
from dataclasses import replace
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
from .media import encoders_in, owner_of

PROJECTORS = {"Florence2Model": "multi_modal_projector", "MllamaModel": "multi_modal_projector"}
"""Models with such images, and the last module of their encoder."""
LAYERS = {"MllamaTextCrossAttention"}
"""Attention of queries to the images that a rank holds."""
ENTRIES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
"""Entries of a batch ``[B, images of a row, ...]``."""


def image_keys_of(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """The module around the decoder that encodes such images, if there is one."""
    around = [m for m in model.modules() if type(m).__name__ in PROJECTORS]
    return next((m for m in around if any(x is decoder for x in m.modules())), None)


def attend_locally(model: nn.Module, decoder: nn.Module, implementation: str) -> None:
    """Let such layers, and encoders that have the configuration of the decoder, or are inside of it, attend as before
    the model was prepared."""
    inside = {m for m in decoder.modules() if type(m).__name__ in LAYERS} | encoders_in(decoder)
    around = encoders_in(owner_of(model, decoder) or decoder) - {*decoder.modules()}
    for module in inside | {m for m in around if getattr(m, "config", None) is decoder.config}:
        if hasattr(module, "config"):
            module.config = config = copy.deepcopy(module.config)
            config._attn_implementation = implementation  # type: ignore[union-attr]


class ImageKeysHook:
    """The hooks of a module that encodes images for such layers. ``binding`` is that of its decoder."""

    def __init__(self, binding: Binding, model: nn.Module) -> None:
        self.binding, self.model = binding, model
        self.runs: list[int] | None = None
        """The boundaries of the ranks' runs of images, while a forward encodes some."""

    def attach(self, owner: nn.Module) -> None:
        """Register the hooks."""
        owner.register_forward_pre_hook(self.before, with_kwargs=True)
        owner.register_forward_hook(self.after, always_call=True)
        owner.get_submodule(PROJECTORS[type(owner).__name__]).register_forward_hook(self.share)

    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the model this rank's run of images."""
        self.after()  # a KeyboardInterrupt ends a forward without its hooks
        ready = kwargs.get("context_parallel") or forward.offered()
        if ready is None:
            return None
        if ready.media is None:
            self._refuse_sharded(owner)
            return None
        tokens = args[0] if args else kwargs["input_ids"]
        images = self._images(owner, ready.media, tokens, kwargs.get("cross_attention_mask"))
        ready = replace(ready, media=None)
        forward.offer(ready)
        kwargs = {**kwargs, **({"context_parallel": ready} if "context_parallel" in kwargs else {})}
        return args, {**kwargs, **self._own(images, tokens.device)}

    def _own(self, images: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """This rank's run of images."""
        ring = cp_mesh.as_ring(cp_mesh.whole_view(self.binding.active.mesh))
        self.runs = runs_of_equal_cost([1.0] * len(images["pixel_values"]), ring.size)
        start, stop = self.runs[ring.rank], self.runs[ring.rank + 1]
        if start == stop:  # an image of another rank, of which no row is used
            start, stop = 0, 1
        return {name: x[start:stop].to(device) for name, x in images.items()}

    def share(self, projector: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Make the rows of this rank's images those of all images: ``[images, ..., D]``."""
        if self.runs is None:
            return None
        ring = cp_mesh.as_ring(cp_mesh.whole_view(self.binding.active.mesh))
        rows = output.shape[1:-1].numel()
        made = [(stop - start) * rows for start, stop in pairwise(self.runs)]
        plan = read_rows([np.arange(sum(made))] * ring.size, made, ring.rank)
        return rows_to_readers(output.flatten(0, -2)[: made[ring.rank]], plan, ring.key).view(-1, *output.shape[1:])

    def after(self, *_: Any) -> None:
        """End what ``before`` has begun; also after an exception."""
        self.runs = None

    @staticmethod
    def _images(owner: nn.Module, media: Media, tokens: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """The images of all rows of the batch ``[B * images of a row, 1, ...]``, those without content included."""
        name, entries = type(owner).__name__, media.entries
        if {*entries} != {*ENTRIES}:
            raise NotImplementedError(
                f"{name} got images as {', '.join(entries)}. They are known to be shared out as {', '.join(ENTRIES)} "
                "only. Pass these, and cross_attention_mask, as its processor makes them"
            )
        shapes = {entry: tuple(x.shape[:2]) for entry, x in entries.items()}
        if len({*shapes.values()}) > 1 or shapes[ENTRIES[0]][0] != len(media.tokens):
            raise ValueError(
                f"{name} got images whose first dimensions are {shapes}, for {len(media.tokens)} rows of tokens. Each "
                "entry is [rows, images of a row, ...]. Pass what its processor makes"
            )
        if mask is None:
            raise ValueError(
                f"{name} got images without cross_attention_mask, which says what tokens see of them. On one device "
                "SDPA takes that for a causal mask. Pass what the processor makes"
            )
        if mask.shape[1] != tokens.shape[1]:
            raise ValueError(
                f"cross_attention_mask has {mask.shape[1]} rows for {tokens.shape[1]} tokens of this rank. Each token "
                "has one, and is split with it. Pass prepare_batch one for each token of the whole batch"
            )
        return {entry: x.flatten(0, 1)[:, None] for entry, x in entries.items()}

    def _refuse_sharded(self, owner: nn.Module) -> None:
        if any(isinstance(x, FSDPModule) for x in self.model.modules()):
            raise NotImplementedError(
                f"{type(owner).__name__} got a batch without images under FSDP2, where its encoder and the layers that "
                "attend to images must run in every step. Put an image into every batch"
            )


class SourceImagesHook(ImageKeysHook):
    """The same hooks for an encoder-decoder, whose source has the images in it before it is split."""

    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the model this rank's run of images."""
        self.after()
        pixels = kwargs.get("pixel_values")
        if not self.binding.active.parallel:
            return None
        if pixels is None:
            self._refuse_sharded(owner)
            return None
        return args, {**kwargs, **self._own({"pixel_values": pixels}, next(owner.parameters()).device)}

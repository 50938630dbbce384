"""Images and audio of models that encode them inside of their forward (Qwen2-Audio, Phi-4 multimodal): each rank
encodes a run of them, and the rows of its tokens are inserted before the forward. (docs/integrations/images.md)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ...handler import ContextParallelHandler
from ...module.mesh_binding import Binding
from ...style import style_of
from . import forward
from .media import SHORTEST, Exchange, Items, around


@dataclass(frozen=True)
class Encoder:
    """The way in which the forward of a model encodes a kind of media."""

    entries: tuple[str, ...]
    """Entries of a batch with one part for each item, that of content first."""
    encode: Callable[..., Tensor]
    """A function of the model, of all entries of media in the batch, of True under FSDP2, and of this rank's entries by
    their names. It returns rows ``[rows, D]``, none of padding."""
    blank: Callable[[Any], dict[str, Tensor]]
    """Makes the entries of an item without content."""


def _qwen2_audio(
    owner: Any, others: dict[str, Any], sharded: bool, input_features: Tensor, feature_attention_mask: Tensor
) -> Tensor:
    tower: Any = owner.audio_tower
    seen, made = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    length = (input_features.shape[-1] - 2) // 2 + 1
    visible = torch.arange(length, device=input_features.device) < seen[:, None]
    like = input_features.new_zeros(len(input_features), length, 1)
    attended = create_bidirectional_mask(config=tower.config, inputs_embeds=like, attention_mask=visible.long())
    rows: Tensor = owner.multi_modal_projector(tower(input_features, attention_mask=attended).last_hidden_state)
    return rows[torch.arange(rows.shape[1], device=rows.device) < made.to(rows.device)[:, None]]


def _blank_qwen2_audio(owner: Any) -> dict[str, Tensor]:
    config, dtype = owner.config.audio_config, next(owner.parameters()).dtype
    frames = 2 * config.max_source_positions
    features = torch.zeros(1, config.num_mel_bins, frames, dtype=dtype, device="cpu")
    return {
        "input_features": features,
        "feature_attention_mask": torch.ones(1, frames, dtype=torch.int64, device="cpu"),
    }


class _Rows:
    """Embeddings into which an encoder of Phi 4 inserts its rows: it returns the rows."""

    def __init__(self, like: nn.Parameter) -> None:
        self.dtype, self.device = like.dtype, like.device

    def index_put(self, indices: Any, values: Tensor, accumulate: bool) -> Tensor:
        """Return ``values``."""
        return values


def _phi4(encoder: Any, entries: dict[str, Any]) -> Tensor:
    if encoder.training and encoder.drop.p:
        raise NotImplementedError(
            f"{type(encoder).__name__} has embd_pdrop={encoder.drop.p}, by which it drops the text beside images and "
            "audio, too. Here it would drop their rows only. Set embd_pdrop=0.0 in the config"
        )
    like = next(encoder.parameters())
    rows: Tensor = encoder(torch.zeros(1, 0, device=like.device), _Rows(like), **entries)
    return rows


def _phi4_images(owner: Any, others: dict[str, Any], sharded: bool, **entries: Any) -> Tensor:
    pixels, _, mask = PHI4_IMAGES
    if entries[mask].all() and mask in others and not others[mask].all():
        # Where no patch of a batch is padding, this encoder makes no mask, and is causal then (with SDPA). So it gets a
        # crop that no image reads, with a patch of padding.
        shown = F.pad(entries[mask], (0, 0, 0, 0, 0, 1), value=1)
        shown[:, -1, -1, -1] = 0
        entries = {**entries, pixels: F.pad(entries[pixels], (0, 0, 0, 0, 0, 0, 0, 1)), mask: shown}
    return _phi4(owner.embed_tokens_extend.image_embed, entries)


def _phi4_audio(owner: Any, others: dict[str, Any], sharded: bool, **entries: Any) -> Tensor:
    encoder, alone = owner.embed_tokens_extend.audio_embed, "image_pixel_values" not in others
    rows = _phi4(encoder, {**entries, "audio_projection_mode": "speech" if alone else "vision"})
    if sharded:  # another data-parallel group may use the other projection in this step
        up, down = encoder.up_proj_for_vision_speech, encoder.down_proj_for_vision_speech
        unused = (up, down) if alone else (encoder.up_proj_for_speech, encoder.down_proj_for_speech)
        rows = rows + sum(0.0 * p.sum() for module in unused for p in module.parameters())
    return rows


def _blank_phi4_image(owner: Any) -> dict[str, Tensor]:
    config, dtype = owner.config.vision_config, next(owner.parameters()).dtype
    side, patches = config.crop_size, config.image_size // config.patch_size
    pixels = torch.zeros(1, 2, config.num_channels, config.image_size, config.image_size, dtype=dtype, device="cpu")
    return dict(
        zip(
            PHI4_IMAGES,
            (pixels, torch.tensor([[side, side]], device="cpu"), torch.ones(1, 2, patches, patches, device="cpu")),
            strict=True,
        )
    )


def _blank_phi4_audio(owner: Any) -> dict[str, Tensor]:
    features = torch.zeros(
        1, 2 * SHORTEST, owner.config.audio_config.input_size, dtype=next(owner.parameters()).dtype, device="cpu"
    )
    mask = torch.ones(features.shape[:2], dtype=torch.bool, device="cpu")
    return dict(zip(PHI4_AUDIO, (features, torch.tensor([1], device="cpu"), mask), strict=True))


QWEN2_AUDIO = ("input_features", "feature_attention_mask")
PHI4_IMAGES = ("image_pixel_values", "image_sizes", "image_attention_mask")
PHI4_AUDIO = ("audio_input_features", "audio_embed_sizes", "audio_attention_mask")
MASK_OF_ONE = "audio_attention_mask"
"""The entry that a batch with one clip lacks."""
ENCODERS = {
    "Qwen2AudioModel": {"audio": Encoder(QWEN2_AUDIO, _qwen2_audio, _blank_qwen2_audio)},
    "Phi4MultimodalModel": {
        "image": Encoder(PHI4_IMAGES, _phi4_images, _blank_phi4_image),
        "audio": Encoder(PHI4_AUDIO, _phi4_audio, _blank_phi4_audio),
    },
}
"""The encoders of models, in the order in which their forwards run them."""


def inline_media_of(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """The decoder, or the module around it, that encodes media inside of its forward, if there is one."""
    return next((m for m in around(model, decoder) if type(m).__name__ in ENCODERS), None)


class InlineMediaHook:
    """The hook of such a module. ``binding`` is that of its decoder."""

    def __init__(self, binding: Binding, model: nn.Module) -> None:
        self.binding, self.model = binding, model

    def attach(self, owner: nn.Module, decoder: nn.Module) -> None:
        """Register the hook; that of a decoder before its others."""
        owner.register_forward_pre_hook(self.before, with_kwargs=True, prepend=owner is decoder)

    def before(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the model embeddings of this rank's tokens, with the rows of media among them."""
        ready = kwargs.get("context_parallel") or forward.offered()
        sharded = any(isinstance(x, FSDPModule) for x in self.model.modules())
        tokens: Tensor | None = args[0] if args else kwargs.get("input_ids")
        if ready is None or tokens is None or (ready.media is None and not sharded):
            return None
        name, entries = type(owner).__name__, {} if ready.media is None else ready.media.entries
        self._check(name, entries)
        handler = ContextParallelHandler(self.binding.active.mesh, style_of(self.binding))
        exchange = Exchange(handler, ready, owner, {kind: ["pooler_output"] for kind in ENCODERS[name]})
        embeds: Tensor = owner.get_input_embeddings()(tokens)
        for kind, encoder in ENCODERS[name].items():
            given = {entry: entries[entry] for entry in encoder.entries if entry in entries}
            if given:
                parts = len(given[encoder.entries[0]])
                items = Items(given, {entry: [*range(1, parts + 1)] for entry in given}, [1.0] * parts)
                own, inputs = exchange.run_of(items, {kind: parts})
            elif sharded:  # another data-parallel group may have some in this step
                own, inputs = {kind: 0}, encoder.blank(owner)
                exchange.blank.add(kind)
            else:
                continue
            inputs = {entry: x.to(tokens.device) for entry, x in inputs.items()}
            rows = encoder.encode(owner, entries, sharded, **inputs)
            output = exchange.share(BaseModelOutputWithPooling(pooler_output=rows), own)[kind]
            places = torch.isin(tokens, torch.tensor(exchange.ids(kind), device=tokens.device))[..., None]
            embeds = embeds.masked_scatter(places, output.pooler_output.to(embeds.dtype))
        ready = replace(ready, media=None)
        forward.offer(owner, ready)
        given_state = {"context_parallel": ready} if "context_parallel" in kwargs else {}
        return (), {**kwargs, **given_state, "input_ids": None, "inputs_embeds": embeds}

    @staticmethod
    def _check(name: str, entries: dict[str, Any]) -> None:
        """Raise ``NotImplementedError`` for entries that do not hold one part for each item."""
        left = {*entries}
        for encoder in ENCODERS[name].values():
            given, needed = left & {*encoder.entries}, {*encoder.entries} - {MASK_OF_ONE}
            if given and given >= needed and len({len(entries[entry]) for entry in given}) == 1:
                left -= given
        if left:
            known = " and ".join(", ".join(encoder.entries) for encoder in ENCODERS[name].values())
            raise NotImplementedError(
                f"{name} got media as {', '.join(sorted(left))}. They can be shared out as {known} only, with one part "
                "of each for every image or clip. Pass these, as its processor makes them"
            )

"""Audio of models that encode it inside of their forward (Qwen2-Audio): each rank encodes a run of the clips, and the
rows of its tokens are inserted before the forward. (docs/integrations/images.md)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ...handler import ContextParallelHandler
from ...module.mesh_binding import Binding
from ...style import style_of
from . import forward
from .media import Exchange, Items

ENTRIES = ("input_features", "feature_attention_mask")
"""Entries of a batch with one part for each clip."""


def _qwen2_audio(owner: Any, features: Tensor, mask: Tensor) -> Tensor:
    tower: Any = owner.audio_tower
    seen, made = tower._get_feat_extract_output_lengths(mask.sum(-1))
    length = (features.shape[-1] - 2) // 2 + 1
    visible = torch.arange(length, device=mask.device) < seen[:, None]
    like = features.new_zeros(len(features), length, 1)
    attended = create_bidirectional_mask(config=tower.config, inputs_embeds=like, attention_mask=visible.long())
    rows: Tensor = owner.multi_modal_projector(tower(features, attention_mask=attended).last_hidden_state)
    return rows[torch.arange(rows.shape[1], device=rows.device) < made.to(rows.device)[:, None]]


ENCODERS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {"Qwen2AudioModel": _qwen2_audio}
"""Functions that encode clips as the forward of a model does: they return rows ``[rows, D]``, none of padding."""


def inline_audio_of(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """The module around the decoder that encodes audio inside of its forward, if there is one."""
    around = [m for m in model.modules() if type(m).__name__ in ENCODERS]
    return next((m for m in around if any(x is decoder for x in m.modules())), None)


class InlineAudioHook:
    """The hook of such a module. ``binding`` is that of its decoder."""

    def __init__(self, binding: Binding, model: nn.Module) -> None:
        self.binding, self.model = binding, model

    def attach(self, owner: nn.Module) -> None:
        """Register the hook."""
        owner.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the model embeddings of this rank's tokens, with the rows of audio among them."""
        ready, name = kwargs.get("context_parallel") or forward.offered(), type(owner).__name__
        if ready is None or ready.media is None:
            if ready is not None and any(isinstance(x, FSDPModule) for x in self.model.modules()):
                raise NotImplementedError(
                    f"{name} got a batch without audio under FSDP2, where its encoder must run in every step. Put a "
                    "clip into every batch"
                )
            return None
        entries = ready.media.entries
        if {*entries} != {*ENTRIES} or len({len(x) for x in entries.values()}) > 1:
            raise NotImplementedError(
                f"{name} got audio as {', '.join(entries)}. Clips can be shared out as {' and '.join(ENTRIES)} only, "
                "with one part of each for every clip. Pass these, as its processor makes them"
            )
        tokens: Tensor = args[0] if args else kwargs["input_ids"]
        handler = ContextParallelHandler(self.binding.active.mesh, style_of(self.binding))
        exchange, clips = Exchange(handler, ready, owner, {"audio": ["pooler_output"]}), len(entries[ENTRIES[0]])
        items = Items(entries, {entry: [*range(1, clips + 1)] for entry in entries}, [1.0] * clips)
        own, inputs = exchange.run_of(items, {"audio": clips})
        rows = ENCODERS[name](owner, *(inputs[entry].to(tokens.device) for entry in ENTRIES))
        output = exchange.share(BaseModelOutputWithPooling(pooler_output=rows), own)["audio"]
        embeds: Tensor = owner.get_input_embeddings()(tokens)
        places = (tokens == owner.config.audio_token_id)[..., None]
        embeds = embeds.masked_scatter(places, output.pooler_output.to(embeds.dtype))
        ready = replace(ready, media=None)
        forward.offer(ready)
        given = {"context_parallel": ready} if "context_parallel" in kwargs else {}
        return (), {**kwargs, **given, "input_ids": None, "inputs_embeds": embeds}

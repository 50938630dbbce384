"""The batch of a forward, as it is read at the entrance of a decoder: documents, padding and positions.

A batch of ``prepare_batch`` has them with it. Of any other, masks and positions are gathered here.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...data.collectives import by_rank
from ...data.packing import PreparedBatch, attention_state, read_positions
from ...data.sharding import local_share
from ...handler import ContextParallelHandler
from ...module.mesh_binding import Binding
from ...schedule.documents import PackedDocuments
from .batch import of_keys
from .checks import counts_mask, position_maker
from .masks import padding_mask
from .modules import no_mask, prepare_rotary


class BatchReader:
    """Reads the batch of a decoder's forward, and adds the arguments that the decoder would otherwise make for its
    local tokens only.

    Args:
        direct: the decoder's attention modules call SDPA themselves.
    """

    def __init__(self, binding: Binding, decoder: PreTrainedModel, direct: bool) -> None:
        parameters = inspect.signature(decoder.forward).parameters
        self.binding, self.direct = binding, direct
        self.keywords = set(parameters)
        self.passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.long_rotary = prepare_rotary(decoder) > 0
        self.position_maker, self.counts_mask = position_maker(decoder), counts_mask(decoder)

    def read(
        self,
        handler: ContextParallelHandler,
        block: Tensor | None,
        given: Tensor | None,
        ready: PreparedBatch | None,
        tokens: Tensor,
        kwargs: dict[str, Any],
    ) -> PreparedBatch:
        """The state that ``prepare_batch`` has read, or that is read now, with the documents of the enclosing block."""
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        # What a model around the decoder has read of a batch of prepare_batch is in the batch already.
        padding = padding_mask(mask if ready is None or isinstance(mask, Tensor) else None)
        self._refuse_two_sources(block, given, ready, padding)
        documents = block if given is None else given
        if ready is not None:
            self._check_ready(ready, handler.layout, tokens.shape[1])
            return ready if documents is None else replace(ready, documents=documents)
        last = self._last_position(handler, positions, tokens)
        counted = whole = packed = None
        if padding is not None:
            whole = self._global_mask(handler, padding, tokens.shape[1])
            counted = padding if padding.shape[1] == tokens.shape[1] else local_share(handler, whole, 1, documents)
        elif mask is None and documents is None:
            packed = read_positions(positions, lambda x: handler.combine(x, 1))
        state = attention_state(handler, documents, whole, packed)
        return replace(
            state,
            last_position=last,
            counted=counted,
            visible=of_keys(whole),
            packed=documents is not None or state.tokens is None,
            numbered=positions is None,
        )

    def _refuse_two_sources(
        self, block: Tensor | None, given: Tensor | None, ready: PreparedBatch | None, padding: Tensor | None
    ) -> None:
        known = ready is not None and (ready.documents is not None or ready.tokens is not None)
        if (ready is not None and (padding is not None or given is not None)) or (
            block is not None and (known or given is not None)
        ):
            sources = {
                "a batch of prepare_batch, which says what is padding, or that nothing is": ready is not None,
                "an attention_mask": padding is not None,
                "documents as an argument": given is not None,
                "an enclosing handler.documents block": block is not None,
            }
            found = ", ".join(name for name, is_given in sources.items() if is_given)
            raise ValueError(
                f"{self.binding.name} got documents or padding twice ({found}). Only one of them can be right. Put "
                "them into the whole batch for prepare_batch, and pass on what it returns as it is"
            )

    def _check_ready(self, ready: PreparedBatch, layout: str, local: int) -> None:
        """Raise ``ValueError`` for a batch of another layout or length than those of this forward."""
        if ready.layout not in (None, layout):
            raise ValueError(
                f"{self.binding.name} runs with layout={layout!r}. prepare_batch has split the batch as "
                f"{ready.layout!r}. Make its handler of the style that prepare_model was given"
            )
        if ready.length not in (None, local):
            raise ValueError(
                f"{self.binding.name} got {local} tokens, but prepare_batch gave {ready.length} to this "
                "rank. What is added to the tokens of every rank (virtual tokens of PEFT's prompt tuning, say) is "
                "not part of the sequence that they share. Add it to the whole batch, before prepare_batch"
            )

    def _last_position(self, handler: ContextParallelHandler, positions: Tensor | None, tokens: Tensor) -> int | Tensor:
        """The largest position of all ranks, if a rotary embedding of this decoder depends on it."""
        if positions is None or not self.long_rotary:
            return tokens.shape[1] * handler.cp.size - 1
        return by_rank(handler.mesh, positions.max()[None]).max()

    def _global_mask(self, handler: ContextParallelHandler, mask: Tensor, local: int) -> Tensor:
        length = local * handler.cp.size
        if mask.shape[1] not in (local, length):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}. It has a value for each of the {local} local tokens or "
                f"of all {length} tokens. Pass [B, {local}], dispatched like the tokens, or [B, {length}]"
            )
        return mask if mask.shape[1] == length else handler.combine(mask, 1)

    def complete(
        self,
        handler: ContextParallelHandler,
        tokens: Tensor,
        batch: PreparedBatch,
        kwargs: dict[str, Any],
        samples: bool,
    ) -> tuple[Tensor, Tensor]:
        """Add the arguments that the decoder would otherwise make for its local tokens only. Returns the mask
        ``[B, S/n]`` of tokens that are no padding, and their positions ``[S/n]`` in the whole sequence, or with
        ``samples`` in each document."""
        mask, counted = kwargs.get("attention_mask"), batch.counted
        if counted is None:
            counted = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
            # Without a mask transformers takes the jumps of local positions for packed sequences.
            # Mixers set padding to zero.
            kwargs["attention_mask"] = no_mask(tokens.device) if self.direct else counted
        padded = batch.tokens is not None or batch.keys is not None
        counts = self.position_maker is not None or (self.counts_mask and padded and not samples)
        if counts and (batch.numbered or kwargs.get("position_ids") is None):
            kwargs["position_ids"] = self._counted(handler, tokens, counted, batch.documents)
        length = tokens.shape[1] * handler.cp.size
        positions = handler.position_ids(length, device=tokens.device, documents=batch.documents, restart=samples)
        if kwargs.get("position_ids") is None and ("position_ids" in self.keywords or self.passes_on):
            kwargs["position_ids"] = positions[None]
        if kwargs.get("use_cache") is None and "use_cache" in self.keywords:
            kwargs["use_cache"] = False
        # Tables of positions need not be longer than the sequence: what is behind it is padding.
        return counted, positions.clamp(max=batch.last_position) if batch.numbered else positions

    def number_samples(self, batch: PreparedBatch, packed: PackedDocuments, kwargs: dict[str, Any]) -> PreparedBatch:
        """A batch of samples without position ids of the caller's: positions will begin anew in each sample."""
        if self.position_maker is not None:
            raise ValueError(
                f"{self.binding.name} makes positions of the ids of its tokens, and would go on counting from one "
                "sample of the micro-batch to the next. Pass position_ids that begin anew in each of them"
            )
        kwargs.pop("position_ids", None)
        longest = max(b - a for row in packed.rows for a, b in pairwise(row))
        return replace(batch, last_position=longest - 1, numbered=False)

    def _counted(
        self, handler: ContextParallelHandler, tokens: Tensor, counted: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Position ids that the decoder makes of the whole batch: RoBERTa counts tokens that are not padding by their
        ids, OPT by the mask. One small gather."""
        maker = self.position_maker
        if maker is None:
            shown = handler.combine(counted.to(torch.int64), 1, documents=documents)
            whole = shown.cumsum(1) * shown - 1
        else:  # of embeddings none is known to be padding
            padding = cast(Any, maker).keywords["padding_idx"]
            ids = tokens if tokens.ndim == 2 else torch.full_like(counted, padding + 1, dtype=torch.int64)
            whole = maker(handler.combine(ids, 1, documents=documents))
        return local_share(handler, whole, 1, documents)

"""The batch side of prepared models: whole batches with the names and conventions of transformers, and their shares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ...data.batch import WholeBatch, entries_of
from ...data.packing import NONE_BACK, Media, PreparedBatch, attention_state, read_positions, take_documents
from ...data.sharding import Shares, documents_for, local_share
from ...handler import ContextParallelHandler
from ...mesh.arguments import check_type
from ...ops.writes import writes
from ...schedule import layout as layouts
from ...schedule.documents import PackedDocuments, read
from .media import PLACES

IGNORE = -100
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", PLACES)
"""Names of the types of tokens (text, image ...) in batches."""
MEDIA = re.compile(
    r"^(pixel|image(?!_embeds_position_mask)|video|audio|input_features|input_values|high_res"
    r"|second_per_grid|spatial_shapes|target_sizes|tile_|num_(local|frames)|batch_num|patches_grid|aspect_ratio|feature_attention|cross_attention_states|mm_encoder"
    r"|flattened_pa|padding_mask|chunk_sample|qformer)"
)
"""Names of inputs other than text."""


def is_media(name: str, x: Any) -> bool:
    """True for an input other than text. (Idefics has a mask ``[B, S, images]``, which is split with the tokens, under
    the name of a mask of patches in other models.)"""
    of_tokens = name == "image_attention_mask" and isinstance(x, Tensor) and x.ndim == 3
    return MEDIA.match(name) is not None and not of_tokens


def prepare_batch(
    handler: ContextParallelHandler,
    batch: dict[str, Any],
    *,
    debug: bool = False,
    labels_cross_documents: bool = True,
) -> dict[str, Any]:
    """This rank's share of a global batch, for the forward of a model that ``prepare_model`` has prepared.

    Labels are shifted over the whole sequence (``shift_labels``), ``position_ids`` are made, and padding and packed
    documents are read here, so that the forward communicates in attention only. ``num_items_in_batch`` counts the
    labels of the whole batch: the model's loss is this rank's share of the mean, and gradients *summed* over the cp
    ranks are those of one device.

    Args:
        batch: ``input_ids`` or ``inputs_embeds`` of any length S, and what the model takes with them. Tensors
            ``[B, S, ...]`` are split; 4-D attention masks (over global positions) and everything else remain whole.
            Packed documents have any name that :meth:`ContextParallelHandler.get_batch_on_this_cp_rank` knows, or
            position ids that restart. They are kept apart in every model (some models forget that in SDPA masks).
            Images and videos (``pixel_values``, ``image_grid_thw`` ..., as processors make them) are not split: they
            stay where they are, and the forward shares them out over the ranks (docs/integrations/images.md).
        debug: compare the batches of the ranks by hash, as ``get_batch_on_this_cp_rank(debug=True)`` does.
        labels_cross_documents: the last token of a document gets the label of the first of the next one. Default True,
            as in transformers' own loss on one device; with False it gets -100.
    """
    todo = 'It must hold the keyword arguments of the model. Pass a dict such as {"input_ids": ..., "labels": ...}'
    check_type("batch", batch, Mapping, todo)
    entries = entries_of(handler, batch, debug)
    whole = KeywordBatch(handler, entries)
    whole.read_padding()
    if entries.get("labels") is not None:
        if entries.get("shift_labels") is None:
            whole.shift_labels(IGNORE, labels_cross_documents)
        entries.setdefault("num_items_in_batch", (entries["shift_labels"] != IGNORE).sum())
    if entries.get("shift_labels") is not None:
        whole.read_labels(entries["shift_labels"] != IGNORE)
    local = whole.split({name: IGNORE for name in whole.dims if "labels" in name})
    labels, shifted = (
        (x, writes(x)) if isinstance(x := local.get(name), Tensor) else None for name in ("labels", "shift_labels")
    )
    return {**local, "context_parallel": replace(whole.prepared(), labels=labels, shifted=shifted)}


def _tokens_before(shown: Tensor) -> Tensor:
    """The distance ``[B, S]`` of each position to the last token up to it; ``NONE_BACK`` where there is none."""
    at = torch.arange(shown.shape[1], device="cpu")
    return (at - torch.where(shown, at, -NONE_BACK).cummax(1).values).clamp(max=NONE_BACK)


class KeywordBatch(WholeBatch):
    """A batch with the conventions of transformers. Padding behind the tokens of a row needs no boundary, because
    masks are causal. Positions do not restart in documents. The documents of an enclosing block count."""

    def __init__(self, handler: Shares, entries: dict[str, Any]) -> None:
        self.media = {name: entries.pop(name) for name, x in [*entries.items()] if is_media(str(name), x)}
        self.media = {name: x for name, x in self.media.items() if x is not None}
        tokens, documents = check_entries(entries), take_documents(entries)
        self.whole = tokens, entries.get("attention_mask")
        length = tokens.shape[1]
        dims = {name: -1 if name == "position_ids" else 1 for name, x in entries.items() if _rows(x)}
        dims = {name: dim for name, dim in dims.items() if entries[name].shape[dim] == length}
        dims.pop("attention_mask", None)
        super().__init__(handler, entries, dims, documents)
        self.position_ids: Tensor | None = entries.get("position_ids")
        self.mask: Tensor | None = None
        """A padding mask of the padded sequence."""

    def read_padding(self) -> None:
        """Read what attention must know."""
        mask, positions = self.entries.get("attention_mask"), self.position_ids
        if _rows(mask) and mask.ndim == 2:
            self.mask = self._padded(self.entries.pop("attention_mask"))
        elif isinstance(mask, Tensor):
            self.pad_mask(mask)
        # The documents of a block say what positions that restart in them would say.
        block = self.handler.cp.batch.documents
        in_block = block is not None
        if mask is not None or self.documents is not None:
            positions = None
        if block is not None and positions is not None:
            self._refuse_other_documents(positions, block)
            positions = None
        positions = read_positions(positions)
        documents = None if self.documents is None else self.table_of(self.documents.rows)
        self.state = attention_state(self.handler, documents, self.mask, positions)
        # Documents of padding alone are for causal attention: padding of an encoder sees what others see.
        self.packed = documents is not None or in_block or self.state.tokens is None
        if self.documents is None and positions is not None and self.state.documents is not None:
            self.documents = self._without_padding(self.state.documents)
        if self.state.tokens is not None and _rows(self.entries.get(TOKEN_TYPES[0])):
            self._count_padding()  # by its type it may see the tokens behind it (PaliGemma)
        if self.state.documents is None and layouts.by_documents(self.handler.layout) and not in_block:
            self.state = replace(self.state, documents=self.table_of([[0, self.length]]))

    def _refuse_other_documents(self, positions: Tensor, block: Tensor) -> None:
        """Raise ``ValueError`` for positions that restart elsewhere than in the documents of the enclosing block."""
        said = attention_state(self.handler, None, None, read_positions(positions)).documents
        if said is None:
            return
        found, known = ([list(row) for row in self._without_padding(table).rows] for table in (said, block))
        if found != known:
            raise ValueError(
                f"position_ids restart in documents {found}, and the enclosing handler.documents block has {known}. "
                "Only one of them can be right. Leave the block, or enter that of this batch"
            )

    def _without_padding(self, table: Tensor) -> PackedDocuments:
        """The documents of a padded table before the padding."""
        return PackedDocuments([[min(x, self.length) for x in row] for row in read(table).rows])

    def read_labels(self, counted: Tensor) -> None:
        """Record if labels count (``[B, S]``) on padding behind the tokens of a row. Otherwise nothing reads its
        outputs, and causality hides padding without a mask of keys."""
        if self.mask is None:
            return
        shown, counted = self.mask[:, : self.length].bool().cpu(), counted.cpu()
        back, ahead = _tokens_before(shown), _tokens_before(shown.flip(1)).flip(1)
        far = [int((x * (counted & ~shown)).max()) for x in (back, torch.minimum(back, ahead))]
        self.state = replace(self.state, tokens_back=far[0], tokens_near=far[1])
        behind = shown.flip(1).cumsum(1).flip(1) == 0
        if not bool((behind & counted).any()):
            return
        self._count_padding()

    def _count_padding(self) -> None:
        """Let padding see what a mask of keys leaves of the tokens, as on one device."""
        self.state = replace(self.state, padding_counts=True)
        if layouts.by_documents(self.handler.layout):  # documents of padding would place the tokens
            documents = self.state.documents if self.state.tokens is None else self.table_of([[0, self.length]])
            self.state = replace(self.state, documents=documents, tokens=None)

    @cached_property
    def table(self) -> Tensor | None:
        """The documents that place the tokens."""
        return documents_for(self.handler, self.state.documents, self.padded)

    def positions(self, at: Tensor) -> Tensor:
        """Positions ``[1, S/n]``. Padding gets no later one than the tokens, so that tables of positions need not be
        longer than the sequence."""
        return rearrange(at.clamp(max=self.length - 1), "s -> 1 s")

    def prepared(self) -> PreparedBatch:
        """The state of the batch, for the model."""
        counted = self.mask
        if counted is None and self.padded > self.length:
            counted = self._padded(torch.ones(self.first.shape[:2], dtype=torch.bool, device="cpu"))
        types = {name: self._padded(self.entries[name], -1) for name in TOKEN_TYPES if _rows(self.entries.get(name))}
        if self.mask is not None and self.state.keys is None and not self.state.padding_counts:
            types = {name: x.masked_fill(~self.mask.bool(), -1) for name, x in types.items()}
        return replace(
            self.state,
            last_position=self.length - 1 if self.position_ids is None else self.position_ids.max(),
            counted=None if counted is None else local_share(self.handler, counted, 1, self.table),
            visible=of_keys(counted),
            packed=self.packed,
            token_types=types,
            length=self.padded // self.handler.cp.size,
            ranks=self.handler.cp.size,
            numbered=self.position_ids is None,
            media=self._media(),
        )

    def _media(self) -> Media | None:
        tokens, mask = self.whole
        if not self.media:
            return None
        if tokens.is_floating_point():
            raise NotImplementedError(
                f"batch has {', '.join(self.media)} with inputs_embeds. The places of images are found in input_ids. "
                "Pass input_ids, or insert the images into inputs_embeds and leave them out"
            )
        padding = mask.cpu() if _rows(mask) and mask.ndim == 2 else None
        return Media(self.media, tokens.cpu(), padding)

    def _padded(self, x: Tensor, value: int = 0) -> Tensor:
        """``x [B, S]``, padded with the sequence."""
        return F.pad(x, (0, self.padded - self.length), value=value)


def of_keys(counted: Tensor | None) -> Tensor | None:
    """A mask of tokens ``[B, S]`` as one of keys."""
    return None if counted is None else rearrange(counted.bool(), "b s -> b 1 1 s")


def _rows(x: Any) -> TypeGuard[Tensor]:
    """True for a tensor that has rows of positions."""
    return isinstance(x, Tensor) and x.ndim > 1


def check_entries(batch: Mapping[str, Any]) -> Tensor:
    """Return the tokens of a whole batch. Raise unless its other entries fit to them."""
    name = next((x for x in ("input_ids", "inputs_embeds") if batch.get(x) is not None), None)
    if name is None:
        raise ValueError(
            f"batch has the entries {list(batch)}, but neither input_ids nor inputs_embeds. The tokens tell the length "
            "of the sequence. Give them one of these names"
        )
    tokens = batch[name]
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or 0 in tokens.shape[:2]:
        raise ValueError(
            f"{name} is {_described(tokens)}. The sequence is its dimension 1, which the ranks share. Pass a tensor "
            "[B, S, ...] with at least one token"
        )
    rows, length = tokens.shape[:2]
    for entry in ("labels", "shift_labels"):
        x = batch.get(entry)
        if x is not None and (not isinstance(x, Tensor) or x.ndim < 2 or x.shape[:2] != tokens.shape[:2]):
            raise ValueError(
                f"{entry} is {_described(x)}, but {name} holds {rows} x {length} tokens. Labels are shifted and split "
                f"with the tokens. Pass one for each token: [{rows}, {length}]"
            )
    positions = batch.get("position_ids")
    if positions is not None and (
        not isinstance(positions, Tensor) or positions.ndim < 2 or positions.shape[-1] != length
    ):
        raise ValueError(
            f"position_ids is {_described(positions)}, but {name} holds {length} tokens in a row. The positions of "
            f"all tokens are split with them. Pass a tensor [{rows}, {length}], or leave it out"
        )
    return tokens


def _described(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"

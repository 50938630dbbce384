"""The engines: attention, linear recurrences and convolutions as functions, their ops, the balance of layouts."""

from typing import Any

import torch

from ..schedule.placement import Balance, balance, layout_of_mask
from .attention import attention, latent_attention
from .decoding import decode_attention, select_cached
from .entries import Entries
from .indexer_loss import indexer_loss
from .recurrence.convolution import causal_conv1d
from .recurrence.linear import linear_recurrence
from .recurrence.windows import gather_windows, windows
from .selected_entries import select_entries, tokens_of_entries
from .selection import select_keys
from .slices import mask_of_slices
from .split_cache import SplitCache

__all__ = [
    "SAVE_LIST",
    "Balance",
    "Entries",
    "SplitCache",
    "attention",
    "balance",
    "causal_conv1d",
    "decode_attention",
    "gather_windows",
    "indexer_loss",
    "latent_attention",
    "layout_of_mask",
    "linear_recurrence",
    "mask_of_slices",
    "select_cached",
    "select_entries",
    "select_keys",
    "tokens_of_entries",
    "windows",
]

SAVE_LIST: list[Any] = [
    getattr(torch.ops.hyper_cp, name).default
    for name in (
        *("attention", "all_to_all", "ulysses_attention", "linear_recurrence", "causal_conv1d"),
        *("select_keys", "select_entries", "indexer_loss", "windows"),
    )
]
"""The library's forward ops, for a selective activation-checkpointing policy (MUST_SAVE): their outputs are not
computed or communicated again in a recompute."""

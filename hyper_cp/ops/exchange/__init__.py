"""Transfers of keys, values, queries and heads, and a warning of those that move more than they must."""

from __future__ import annotations

import warnings

from torch import Tensor

from ...schedule.build import Schedule
from ...schedule.layout import places_by_cost

_warned: set[str] = set()


def warn_of_cost(layout: str, kv_exchange: str, plan: Schedule, keys: int, mask: Tensor | None) -> None:
    """Warn once in a process if an exchange moves much more than queries see, though another would not.

    Args:
        keys: the number of key positions that each rank holds.
        mask: an explicit mask that is no band.
    """
    hops = plan.transfers.hops
    if kv_exchange == "ring" and hops > 1 and places_by_cost(layout) and "ring" not in _warned:
        moved, seen = plan.received, plan.used
        if 2 * seen < moved:
            _warn(
                "ring",
                f"layout={layout!r} with kv_exchange='ring' makes {hops} hops in each attention call of this "
                f"batch. They bring {moved} rows of keys and values to this rank, of which its queries see {seen}, "
                "because chunks that are dealt by cost seldom need those of the neighbours in a ring. Use "
                "kv_exchange='needed', which moves only what queries see, or compare layouts with "
                "hyper_cp.ops.balance",
            )
    if kv_exchange != "needed" or mask is None or not hops or "mask" in _warned:
        return
    if plan.received == (len(plan.transfers.moves[0].received) - 1) * keys:
        _warn(
            "mask",
            f"kv_exchange='needed' with an attn_mask of shape {tuple(mask.shape)} sends all keys and values to every "
            "rank, as an all-gather does. A mask that is neither causal nor a window is not read to find out which "
            "keys it hides. Pass is_causal, window or documents where they say the same, or use kv_exchange='ring' or "
            "'all_gather'",
        )


def _warn(what: str, message: str) -> None:
    _warned.add(what)
    warnings.warn(message, stacklevel=2)

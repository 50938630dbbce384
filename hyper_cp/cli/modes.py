"""Named modes: one vocabulary for the demo, the self-checks, the benchmarks and the tests.

A name consists of words with commas between them: "ring, head_tail", "Ulysses, 4 head groups".
"""

from __future__ import annotations

from typing import Any

Mode = dict[str, Any]
"""Arguments of :class:`hyper_cp.ContextParallel`, most of which :func:`hyper_cp.ops.attention` takes too."""

WORDS: dict[str, Mode] = {
    "all-gather": {"kv_exchange": "all_gather"},
    "ring": {"kv_exchange": "ring"},
    "double ring": {"kv_exchange": "double_ring"},
    "needed": {"kv_exchange": "needed"},
    "Ulysses": {"ulysses_degree": None},
    "hybrid of 2": {"ulysses_degree": 2},
    "auto": {"ulysses_degree": "auto"},
    "load_balance": {"load_balance": True},
    **{layout: {"layout": layout} for layout in ("contiguous", "head_tail", "per_document", "balanced")},
    **{f"{n} head groups": {"head_groups": n} for n in (2, 4, 8)},
    **{f"{n} stage{'s' * (n > 1)}": {"exchange_stages": n} for n in (1, 2, 4, 8)},
}


def named_mode(name: str) -> Mode:
    """Return the arguments of a named mode. Without another word the Ulysses degree is 1."""
    found: Mode = {"ulysses_degree": 1}
    for word in name.split(", "):
        found |= WORDS[word]
    return found


def named_modes(*names: str) -> dict[str, Mode]:
    """Return the arguments of several modes by name."""
    return {name: named_mode(name) for name in names}

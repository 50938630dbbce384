"""The contenders: functions on a rank's share of q, k, v, of this library and of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import deepspeed, ours, pytorch, ringmaster, yunchang
from .contender import Contender

CONTENDERS: list[Contender] = [
    *ours.CONTENDERS,
    *pytorch.CONTENDERS,
    *deepspeed.CONTENDERS,
    *ringmaster.CONTENDERS,
    *yunchang.CONTENDERS,
]


def chosen(only: Sequence[str]) -> Iterator[Contender]:
    """Yield the contenders whose name contains one of these words; all without words."""
    for contender in CONTENDERS:
        if not only or any(word.lower() in contender.name.lower() for word in only):
            yield contender

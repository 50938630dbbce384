"""Settings of a custom op as one text, which a compiled graph can hold and keep on disk for another process."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch


def text(settings: Any) -> str:
    """The JSON of settings: a named tuple of numbers, flags, names and tuples of these."""
    return _text(settings._fields, *settings)


@torch.compiler.assume_constant_result  # a graph need not trace how it is made
def _text(names: tuple[str, ...], *values: Any) -> str:
    return _json(names, *values)


@lru_cache(maxsize=1024)
def _json(names: tuple[str, ...], *values: Any) -> str:
    return json.dumps(dict(zip(names, values, strict=True)))


@lru_cache(maxsize=1024)
def read(kind: Any, text: str) -> Any:
    """The settings of a text."""
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()})

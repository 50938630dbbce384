"""Settings of a custom op as one text, which a compiled graph can hold and keep on disk for another process."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing_extensions import Self


class Settings:
    """A frozen dataclass of numbers, flags, names and tuples of these. Its text is the JSON of its fields."""

    __match_args__: tuple[str, ...]  # the names of its fields, which ``dataclass`` sets

    def text(self, **changed: Any) -> str:
        """The text of these settings, some of them changed."""
        names = self.__match_args__
        return _text(names, *(changed[name] if name in changed else getattr(self, name) for name in names))

    @classmethod
    def read(cls, text: str) -> Self:
        """The settings of a text."""
        kind: Any = cls
        found: Self = _read(kind, text)
        return found


@torch.compiler.assume_constant_result  # a graph need not trace how it is made
def _text(names: tuple[str, ...], *values: Any) -> str:
    return _json(names, *values)


@lru_cache(maxsize=1024)
def _json(names: tuple[str, ...], *values: Any) -> str:
    return json.dumps(dict(zip(names, values, strict=True)))


@lru_cache(maxsize=1024)
def _read(cls: Any, text: str) -> Any:
    return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()})

"""Checks of single arguments. Their errors say what is wrong with the value, why, and what to do."""

from __future__ import annotations

from typing import Any


def is_int(value: object) -> bool:
    """True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True for an int or float that is no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_type(name: str, value: object, kinds: Any, remedy: str) -> None:
    """Raise ``TypeError`` unless an argument is of one of the types. ``remedy``: why, and what to do."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is a {type(value).__name__}. {remedy}")

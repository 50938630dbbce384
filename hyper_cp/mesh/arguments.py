"""Checks of single arguments. Each returns the argument, or raises an error in three sentences: what is wrong with the
value, why, and what to do.

Callers give the second sentence (``why``), without its full stop. ``name`` may begin with the caller:
``"linear_recurrence: scale"``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")


def is_int(value: object, least: int | None = None) -> bool:
    """True for an int that is no bool, and not below ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_number(value: object) -> bool:
    """True for a real number that is no bool."""
    return isinstance(value, (float, int, Real)) and not isinstance(value, bool)  # asking an abstract class is slow


def one_of(choices: Iterable[object]) -> str:
    """The choices in words: ``1, 2 or None``."""
    *most, last = map(repr, choices)
    return f"{', '.join(most)} or {last}" if most else last


def check_int(name: str, value: T, why: str, *, least: int = 1, others: Sequence[object] = ()) -> T:
    """Raise ``ValueError`` unless an argument is an int of at least ``least``, or one of ``others``, which are strings
    or None."""
    if is_int(value, least) or (isinstance(value, (str, type(None))) and value in others):
        return value
    kind = {0: "a non-negative int", 1: "a positive int"}.get(least, f"an int of at least {least}")
    kinds = f"{kind}, or {one_of(others)}" if others else kind
    raise ValueError(f"{name}={value!r} must be {kinds}. {why}. Pass a whole number from {least} on")


def check_bool(name: str, value: bool, why: str) -> bool:
    """Raise ``TypeError`` unless an argument is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False. {why}. Pass one of them")
    return value


def check_choice(name: str, value: T, choices: Collection[object], why: str, more: str = "") -> T:
    """Raise ``ValueError`` unless an argument is one of the choices, which are strings or None.

    Args:
        more: what else there is to do, in the last sentence.
    """
    if not isinstance(value, (str, type(None))) or value not in choices:
        raise ValueError(f"{name}={value!r} is unknown. {why}. Choose one of {', '.join(map(repr, choices))}{more}")
    return value


def check_number(name: str, value: Any, why: str, todo: str, also: tuple[type, ...] = ()) -> Any:
    """Raise ``TypeError`` unless an argument is a number, or of one of the types ``also``."""
    if not is_number(value) and not (also and isinstance(value, also)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a number. {why}. {todo}")
    return value


def check_amount(name: str, value: object, why: str, *, zero: bool = False) -> None:
    """Raise ``ValueError`` unless an argument is a finite number above 0, or 0 if ``zero``."""
    try:
        amount = float(value) if isinstance(value, Real) and is_number(value) else math.nan
    except OverflowError:
        amount = math.inf
    if not 0 <= amount < math.inf or (amount == 0 and not zero):
        kind = "a finite number of 0 or more" if zero else "a positive finite number"
        raise ValueError(f"{name}={value!r} is not {kind}. {why}. Pass one")


def check_sequence(name: str, value: Sequence[object], kind: type) -> None:
    """Raise ``TypeError`` unless an argument is a list or tuple of one kind of values."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(x, kind) for x in value):
        raise TypeError(
            f"{name}={value!r} must be a tuple or list of {kind.__name__}. One value alone is read in another way. "
            f"Write ({name}=(...)), with commas"
        )


def check_type(name: str, value: object, kinds: Any, remedy: str) -> None:
    """Raise ``TypeError`` unless an argument is of one of the types. ``remedy``: why, and what to do."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is a {type(value).__name__}. {remedy}")

"""Checks of numbers that users give to the planner."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def check_count(name: str, value: Any, why: str) -> int:
    """Return ``value`` if it is a positive int, else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is no positive int. {why}. Pass a whole number of at least 1")
    return value


def check_amount(name: str, value: Any, why: str) -> float:
    """Return ``value`` as a float if it is a positive finite number, else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r} is no positive number. {why}. Pass a finite number above 0")
    return float(value)

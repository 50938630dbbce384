"""The range of supported PyTorch versions, and a warning where another one is installed."""

from __future__ import annotations

import warnings

import torch

OLDEST, NEWEST = (2, 11), (2, 15)
INSTALLED = str(torch.__version__)


def supported(installed: str = INSTALLED) -> bool:
    """True if the version is in the supported range."""
    major, minor = installed.split(".")[:2]
    return OLDEST <= (int(major), int(minor)) <= NEWEST


def warn_if_unsupported(installed: str = INSTALLED) -> None:
    """Warn unless the version is in the supported range. The package calls this once, when it is imported."""
    if not supported(installed):
        low, high = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
        warnings.warn(
            f"torch {installed} is installed, and hyper_cp supports torch {low} to {high}. It depends on private parts "
            "of PyTorch, which may differ in other versions. Install one of the supported versions",
            stacklevel=3,
        )


def moved(what: str) -> ImportError:
    """The error for a private part of PyTorch that is not what it was."""
    return ImportError(
        f"torch {INSTALLED} has no {what}, which hyper_cp needs. It is private to PyTorch and differs between "
        "versions. Install a version that hyper_cp supports"
    )

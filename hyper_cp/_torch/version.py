"""The ranges of supported versions of PyTorch and transformers, and a warning where another one is installed."""

from __future__ import annotations

import warnings

import torch

SUPPORTED = {"torch": ((2, 11), (2, 15)), "transformers": ((5, 23), (5, 24))}
"""The oldest and the newest version of each library."""
INSTALLED = str(torch.__version__)


def supported(installed: str = INSTALLED, library: str = "torch") -> bool:
    """True if the version is in the supported range."""
    (oldest, newest), (major, minor) = SUPPORTED[library], installed.split(".")[:2]
    return oldest <= (int(major), int(minor)) <= newest


def supported_range(library: str = "torch") -> str:
    """The range in words."""
    return " to ".join(".".join(map(str, version)) for version in SUPPORTED[library])


def warn_if_unsupported(installed: str = INSTALLED, library: str = "torch") -> None:
    """Warn unless the version is in the supported range. The package calls this once, when it is imported, and its
    integration of transformers, when that is."""
    if not supported(installed, library):
        warnings.warn(
            f"{library} {installed} is installed, and hyper_cp supports {library} {supported_range(library)}. It "
            f"depends on private parts of {library}, which may differ in other versions. Install one of the supported "
            "versions",
            stacklevel=3,
        )


def moved(what: str) -> ImportError:
    """The error for a private part of PyTorch that is not what it was."""
    return ImportError(
        f"torch {INSTALLED} has no {what}, which hyper_cp needs. It is private to PyTorch and differs between "
        "versions. Install a version that hyper_cp supports"
    )

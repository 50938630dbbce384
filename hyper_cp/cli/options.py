"""Options that several commands take (lengths, documents, pictures), and how a mistake of a user is printed."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

FORMATS = ("png", "svg", "pdf", "jpg", "jpeg", "eps", "ps", "webp", "tif", "tiff")
"""Endings of pictures that matplotlib writes."""

DOCUMENTS_HELP = (
    "lengths of the documents that are packed into the sequence, with commas (8K,4K,500), or a file of lengths; "
    "not boundaries"
)


def mistake(command: str, error: Exception | str) -> int:
    """Print what is wrong with a command in one piece, without a traceback. Returns the exit code 2."""
    print(f"hyper-cp {command}: {str(error).rstrip('.')}.", file=sys.stderr)
    return 2


def tokens(text: str) -> int:
    """Return a number of tokens; K and M are powers of two."""
    factor = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens. It is a length. Write digits, with K (2**10) or M (2**20) behind them"
        )
    return int(digits) * factor


def document_lengths(text: str) -> list[int]:
    """Return the lengths of documents: with commas, or those of a file.

    Raises:
        ValueError: if this is neither, or if they are boundaries.
    """
    path = Path(text)
    try:
        words = (path.read_text() if path.is_file() else text).replace(",", " ").split()
        found = [tokens(word) for word in words]
    except (OSError, ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(
            f"--documents {text!r} cannot be read: {str(error).split('. ')[0]}. It is a list of lengths in tokens. "
            "Pass lengths with commas, or a file with one length a line"
        ) from error
    if found[:1] == [0]:
        raise ValueError(
            f"--documents {text!r} begins with 0, as boundaries do. It is a list of lengths in tokens. Pass the "
            f"differences: {','.join(str(b - a) for a, b in pairwise(found))[:80]}"
        )
    return found


def check_picture(option: str, path: str) -> None:
    """Raise ``ValueError`` unless a picture can be drawn into this file. It is called before anything is computed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"{option} {path} needs matplotlib, which is not installed. Nothing else needs it. Install hyper-cp[viz]"
        )
    ending = Path(path).suffix[1:].lower()
    if ending not in FORMATS:
        raise ValueError(
            f"{option} {path} has no ending of a picture. It decides the format. Choose one of {', '.join(FORMATS)}"
        )
    if not Path(path).parent.is_dir():
        raise ValueError(
            f"{option} {path} lies in a folder that does not exist. The file is written there. Make the folder first"
        )

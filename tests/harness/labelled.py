"""A small batch of tokens and labels, of which every row, and so every rank, has another number that counts."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, LENGTH, VOCABULARY = 4, 16, 11


def data() -> tuple[Tensor, Tensor]:
    """Tokens and labels ``[ROWS, LENGTH]``; labels behind the first 16, 3, 9 and 1 of a row do not count."""
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)
    for row, valid in enumerate((16, 3, 9, 1)):
        labels[row, valid:] = -100
    return ids, labels

"""The layout and the sizes in which a handler has split a batch, and the labels that were counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from .padding import Form, Padding


@dataclass(frozen=True)
class Counted:
    """The labels of a batch that were counted for its weight in an accumulation."""

    ranks: tuple[int, ...] = ()
    """The ranks over which they were counted; (): the batch has no weight."""
    numbers: tuple[int, ...] = ()
    """Labels of next tokens, and of each further one; (): they are on a device, for which the host would wait."""


@dataclass(frozen=True)
class Split:
    """The layout and the sizes in which a handler has split the batch of a block."""

    layout: str
    ranks: int
    length: int | None = None
    """Positions of the sequence before padding; None: the block was entered without a batch."""
    padded: int | None = None
    ends: tuple[int, ...] = ()
    """The positions before padding of each row of documents that the block was entered with instead."""
    filled: int | None = None
    """Their positions with padding."""
    form: Form = field(default_factory=Form)
    counted: Counted = Counted()
    of_samples: bool = False
    """Its documents are samples of a planned micro-batch, each of which has positions from 0 on."""

    @property
    def share(self) -> int | None:
        """Positions of each rank."""
        return None if self.padded is None else self.padded // self.ranks

    @property
    def row_ends(self) -> tuple[int, ...]:
        """The positions before padding of each row of documents, or of all rows in one number; (): unknown."""
        return self.ends or ((self.length,) if self.length else ())

    @property
    def places(self) -> Padding | None:
        """The places of its tokens in values of a share, and of the positions with which it was filled up, if any.
        None: unknown."""
        ends, padded = self.row_ends, self.padded or self.filled
        if not ends or not padded:
            return None
        return Padding(ends, padded, padded // self.ranks, self.form)

    @property
    def padding(self) -> Padding | None:
        """The positions with which the sequence was filled up; None: none, or unknown."""
        places = self.places
        return places if places and places.known else None

"""Functions that change the logits of attention before the softmax: softcap, and FlexAttention's mods.

The engine has one interface, :class:`Score`. It finds the score of a call by the text ``score.key``, which is part of
the settings of an op, and hands each tile a :class:`TileScore`: the score with the global positions, heads and batch
rows of that tile. A kernel applies it to the scaled logits before masks and bands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ....mesh.arguments import check_number
from ....schedule.blocks import BlockMap
from ....schedule.build import Step
from ....schedule.ranges import Range, Rows
from ....schedule.tiles import Tile
from ..derivative import differentiable
from ..partials import accumulation_dtype

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``score_mod(score, batch, head, query, key)``, as FlexAttention calls it."""
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``mask_mod(batch, head, query, key)``: True where visible."""


@dataclass(eq=False)
class Where:
    """The global numbers of a tile's logits ``[B, H, Sq, Sk]``: int64 on the device, one tensor per dimension."""

    batch: Tensor
    heads: Tensor
    rows: Tensor
    cols: Tensor


class Positions:
    """The global numbers of the logits of each tile of a call.

    Args:
        like: this rank's queries ``[B, H, S, D]``.
        heads_before: global heads before the first of ``like``.
        queries: the global positions of its rows.
    """

    def __init__(self, like: Tensor, heads_before: int, queries: Sequence[Range]) -> None:
        self.batch = torch.arange(like.shape[0], device=like.device)
        self.heads = torch.arange(heads_before, heads_before + like.shape[1], device=like.device)
        self.rows = Rows(queries).index(like.device)
        self.step: Step | None = None

    def of(self, step: Step, tile: Tile) -> Where:
        """The numbers of a tile of a step."""
        if step is not self.step:
            self.step, self.cols = step, Rows(step.keys).index(self.batch.device)
        batch = slice(None) if tile.batch is None else slice(*tile.batch)
        return Where(self.batch[batch], self.heads, self.rows[slice(*tile.q)], self.cols[slice(*tile.k)])


class Score(ABC):
    """A function of the scaled logits, element by element, before the softmax.

    Attributes:
        key: the text by which ops find it.
        signature: the text that ranks compare.
        positional: True if it depends on where a logit stands.
        captured: tensors beside the logits that it gives gradients to.
        blocks: the blocks of pairs that may be visible; None: all.
    """

    key: str
    signature: str
    positional: bool = True
    captured: tuple[Tensor, ...] = ()
    blocks: BlockMap | None = None

    def check(self, name: str, batch: int, heads: int, lengths: tuple[int, int]) -> None:  # noqa: B027
        """Raise, before any communication, if it does not fit a call with these numbers of batch rows, query heads (of
        all ranks), and queries and keys."""

    def check_unchanged(self) -> None:  # noqa: B027
        """Raise, in backward, if it is no longer what it was in forward."""

    @abstractmethod
    def mods(self, where: Where | None) -> tuple[ScoreMod | None, MaskMod | None]:
        """The same as functions of one logit and its numbers in the tile, for kernels that compile such functions."""

    @abstractmethod
    def __call__(self, logits: Tensor, where: Where | None, captured: Sequence[Tensor]) -> Tensor:
        """The changed logits ``[B, H, Sq, Sk]``, -inf where hidden. Autograd differentiates it. ``captured`` are used
        in place of the score's own tensors."""


@dataclass(eq=False)
class TileScore:
    """A score at one tile."""

    score: Score
    where: Where | None
    captured: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = field(default=())
    """Sums, in the accumulation dtype, to which backward adds the gradients of ``captured``."""

    def __call__(self, logits: Tensor) -> Tensor:
        """The changed logits."""
        return self.score(logits, self.where, self.captured)

    def differentiated(self, logits: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The changed logits, and the function from their gradient to that of ``logits``, which also adds to
        ``gradients``."""

        def changed(x: Tensor, *captured: Tensor) -> list[Tensor]:
            return [self.score(x, self.where, captured)]

        (value,), pull = differentiable(changed, logits, *self.captured)

        def gradient(dvalue: Tensor) -> Tensor:
            dlogits, *others = pull([dvalue])
            for total, x in zip(self.gradients, others, strict=True):
                total.add_(x)
            # A function may have no derivative where it hides a pair: nothing times infinity is not zero.
            return dlogits.masked_fill(value == -torch.inf, 0)

        return value, gradient

    def rectangle(self, rows: Range, cols: Range) -> TileScore:
        """The score at some rows and columns of the tile."""
        at = self.where
        if at is not None:
            at = replace(at, rows=at.rows[rows[0] : rows[1]], cols=at.cols[cols[0] : cols[1]])
        return replace(self, where=at)


class TileScores:
    """The score of a call at each of its tiles.

    Args:
        like, heads_before, queries: those of :class:`Positions`.
        captured: the tensors that the score captures; ``gradients``: sums for their gradients, in backward.
    """

    def __init__(
        self, score: Score, like: Tensor, heads_before: int, queries: Sequence[Range], captured: Sequence[Tensor]
    ) -> None:
        self.score, self.captured = score, captured
        self.gradients = [torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in captured]
        self.positions = Positions(like, heads_before, queries) if score.positional else None

    def of(self, step: Step, tile: Tile) -> TileScore:
        """The score at a tile of a step."""
        where = None if self.positions is None else self.positions.of(step, tile)
        return TileScore(self.score, where, self.captured, self.gradients)


# --------------------------------------------------------------------------- softcap

_SOFTCAP = "softcap="


class Softcap(Score):
    """``cap * tanh(logits / cap)``: logits stay between -cap and cap (Gemma 2)."""

    positional = False

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self.key = self.signature = f"{_SOFTCAP}{cap}"

    def mods(self, where: Where | None) -> tuple[ScoreMod | None, MaskMod | None]:
        cap = self.cap
        return lambda score, b, h, i, j: cap * torch.tanh(score / cap), None

    def __call__(self, logits: Tensor, where: Where | None, captured: Sequence[Tensor]) -> Tensor:
        return self.cap * torch.tanh(logits / self.cap)


def softcap(cap: float) -> Softcap:
    """The score of ``softcap=cap``. Raise if that is not a positive number."""
    why, todo = "Logits become softcap * tanh(logits / softcap)", "Pass a positive float, or None for no softcap"
    check_number("softcap", cap, why, todo)
    if not 0 < cap < float("inf"):
        raise ValueError(f"softcap={cap} must be a positive number. {why}. {todo}")
    return Softcap(float(cap))


# --------------------------------------------------------------------------- scores by their keys

_registered: WeakValueDictionary[str, Score] = WeakValueDictionary()


def register(score: Score) -> None:
    """Let :func:`find` return a score as long as it lives. A call holds it, and so does its node in autograd."""
    _registered[score.key] = score


def find(key: str) -> Score | None:
    """The score of a key; None for the empty key."""
    if not key:
        return None
    if key.startswith(_SOFTCAP):
        return Softcap(float(key.removeprefix(_SOFTCAP)))
    score = _registered.get(key)
    if score is None:
        raise LookupError(
            f"the score function {key!r} of an attention call does not exist any more. It lives as long as the call's "
            "node in autograd, in the process that made it. Call attention again"
        )
    return score

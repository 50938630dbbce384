"""The lengths that shares of the sequence had lately on a mesh, by which calls with other lengths are found."""

from __future__ import annotations

import warnings

from .._torch.checkpoint import in_backward, in_recompute
from .._torch.compiling import is_compiling
from .split import Split

LENGTHS = 16
"""Lengths that are recorded; the oldest is dropped."""
FEW = 64
"""The most tokens that a model is expected to add to its sequence, such as registers."""


class ShareLengths:
    """The lengths of shares that were handed out or attended."""

    def __init__(self) -> None:
        self._layouts: dict[int, set[str]] = {}
        """The layouts in which handlers have split shares of each length; none if one was attended only."""
        self._last = ""
        """The layout of the last split."""
        self._warned_of_whole = self._warned_of_layout = self._warned_of_ranks = False
        """True once a call with the whole batch, in another layout or on other ranks has been warned of."""
        self._warned_of_change: set[bool] = set()
        """True in it once calls with a multiple of a share have been warned of, False once those with other lengths."""

    def record(self, length: int, layout: str | None = None) -> None:
        """Record the length of a share; ``layout``: that in which a handler has made it."""
        if is_compiling():
            return
        layouts = self._layouts.setdefault(length, set())
        if layout is not None:
            self._last = layout
            layouts.add(layout)
        if len(self._layouts) > LENGTHS:
            self._layouts.pop(next(iter(self._layouts)), None)

    def warn_of_layout(self, length: int, layout: str) -> None:
        """Warn, once, of a call outside of blocks in a layout in which no handler has split a share of its length,
        while the last split, like those of this length, had another one."""
        known = self._layouts.get(length, ())
        if self._warned_of_layout or layout in known or self._last not in known or in_backward():
            return
        self._warned_of_layout = True
        warnings.warn(
            f"attention or a recurrence runs over {length} positions on this rank with layout={layout!r}, and handlers "
            f"of this mesh have split shares of that length as {' and '.join(map(repr, sorted(known)))} only. It would "
            f"assign wrong positions to their tokens. Pass layout={self._last!r} to the function (its default may be "
            "another one), or make the handler of the model's style. If these are tokens that no handler has split, "
            "ignore the warning",
            stacklevel=8,
        )

    @property
    def made(self) -> set[int]:
        """Those that a handler has made lately."""
        return {length for length, layouts in self._layouts.copy().items() if layouts}  # a loader's thread adds to it

    def layouts_of(self, length: int) -> set[str]:
        """The layouts in which handlers have split shares of this length lately."""
        return self._layouts.get(length, set())

    def __contains__(self, length: int) -> bool:
        """True if a share of this length was handed out or attended lately."""
        return length in self._layouts

    def warn_of_change(self, length: int, of_block: int) -> None:
        """Warn, once, of a call with other positions than this rank's share: on every rank tokens were added, or
        dropped. The share is that of the block's batch or buffers (0: none), of which a part without rest may be a
        pooled sequence; or that of other batches, from which other sequences may differ by more than a few."""
        batch = [of_block] if of_block else []
        for share in batch or self.made:
            few = 0 < abs(length - share) <= min(FEW, share - 1, length - 1)
            kind = length % share == 0  # several for each token, perhaps
            if (share % length if batch else few) and kind not in self._warned_of_change:
                self._warned_of_change.add(kind)
                what = f"{abs(length - share)} positions {'more' if length > share else 'less'}"
                warnings.warn(
                    f"attention runs over {length} positions on this rank, {what} than its share of a batch, {share}. "
                    "If every rank has added tokens (CLS, registers, prompts, text) or dropped some (x[:, :-1]), the "
                    "sequence of all ranks has them in the middle, once for each rank. Do that to the whole batch, "
                    "before it is split. If this is a dimension that is not split (frames, channels), leave the module "
                    "out of the plan; if it is another sequence that is split, or each token has become several (an "
                    "hourglass, states and actions, patches of frames), ignore the warning",
                    stacklevel=8,
                )
                return

    def check(self, split: Split, length: int, layout: str | None, ranks: int, of_this_mesh: bool) -> None:
        """Raise ``ValueError`` if a batch was split for another mesh or layout than that of a call, or if the call has
        got the whole batch. ``of_this_mesh``: the batch is that of a block of this mesh, and not of another one."""
        self.refuse_other_ranks(split, length, ranks, of_this_mesh)
        if not of_this_mesh:
            return
        if layout not in (None, split.layout):
            raise ValueError(
                f"attention runs with layout={layout!r}, and the handler of this batch splits it as {split.layout!r}. "
                "Attention would assign wrong positions to tokens. Make the handler of the model's style, or with "
                "ContextParallelHandler.of(model)"
            )
        self.refuse_whole(split, length)

    def refuse_other_ranks(self, split: Split, length: int, ranks: int, of_this_mesh: bool) -> None:
        """Raise ``ValueError`` if a call has got the share of a batch that was split over more or fewer ranks; warn,
        once, where it may be the share of another batch."""
        if split.share != length or length * ranks == split.padded:
            return
        if not of_this_mesh and self._layouts.get(length):
            if not self._warned_of_ranks:
                self._warned_of_ranks = True
                warnings.warn(
                    f"attention runs over {ranks} ranks, and has got as many positions on each, {length}, as the share "
                    f"of the batch in whose block it is called, which was split over {split.ranks}. If these are its "
                    "tokens, positions would be wrong: let all models that get them (a reference, a teacher) run on "
                    "the mesh of the block (context_parallel_mesh). If they are the share of another batch, ignore the "
                    "warning",
                    stacklevel=8,
                )
        else:
            raise ValueError(
                f"attention runs over {ranks} rank{'s' * (ranks > 1)}, and this batch of {split.padded} positions was "
                f"split over {split.ranks}. Positions would be wrong. Make the handler of the mesh that the model runs "
                "on, or with ContextParallelHandler.of(model)"
            )

    def refuse_whole(self, split: Split, length: int) -> None:
        """Raise ``ValueError`` if a call has got the whole batch, and not this rank's share; warn, once, where it may
        be the share of another batch. (A recompute was checked in its forward, maybe in the block of another one.)"""
        if length == split.share or length not in (split.length, split.padded) or in_recompute():
            return
        what = f"{length} positions of this batch on each rank, and not the {split.share} of its share"
        if not self._layouts.get(length):
            raise ValueError(
                f"attention has got all {what}. Attention would take them for parts of one long sequence. Pass the "
                "model the batch that the handler returned"
            )
        if not self._warned_of_whole:
            self._warned_of_whole = True
            warnings.warn(
                f"attention may have got all {what}: it would take them for parts of one long sequence. Pass the model "
                "the batch that the handler returned. If they are a share of another, longer sequence, enter its block "
                "around that call, or ignore the warning",
                stacklevel=8,
            )

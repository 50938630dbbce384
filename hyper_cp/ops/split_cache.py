"""The keys and values of one attention layer, of which each rank of a mesh holds a part."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..mesh import cp_mesh
from ..mesh.comm import gather_ranks
from ..mesh.cp_mesh import CPMesh
from ..mesh.failures import operation
from ..schedule import layout as layouts
from ..schedule import tiles
from ..schedule.documents import documents_table, read
from ..schedule.layout import ResolvedLayout
from ..schedule.lookup import resolve
from ..schedule.ranges import Numbers, Range, Rows, placed
from ..schedule.tiles import Tile
from .checks import (
    cast_for_autocast,
    check_dtype,
    check_enable_gqa,
    check_grouped,
    check_head_weights,
    check_latents,
    check_local,
    requires_gradient,
)
from .differentiable import refuse_forward_mode


@contextmanager
def _normal_tensors() -> Iterator[None]:
    """A context in which memory is made that may be written later, also outside of ``inference_mode``."""
    with torch.inference_mode(False), torch.no_grad():
        yield


SPARE = 128
"""Rows by which the memory of a cache exceeds what it holds when it grows."""


class SplitCache:
    """The keys and values of one attention layer, of which each rank of a cp mesh holds a part.

    ::

        cache = SplitCache(mesh, layout="head_tail")  # one for each layer
        cache.fill(k, v, length=S)  # this rank's share of a prompt of S tokens, [B, Hkv, S/n, D]
        cache.append(k, v)  # of new tokens, the same on every rank, [B, Hkv, new tokens, D]
        decode_attention(q, cache)  # of these tokens, [B, H, new tokens, D]

    Args:
        mesh: the cp mesh of n ranks.
        layout: the layout of the prompt, see :func:`hyper_cp.ops.attention`.
        window: ``(left, 0)``: every query sees at most ``left`` positions before its own. Keys that no new token will
            see are not kept. None: every query sees all positions before its own.
        latents: True: the cache holds the latents of latent attention. k is then ``[B, 1, S/n, R]``, and v is their
            rotary part ``[B, 1, S/n, Dr]``.

    Attributes:
        length: the number of global positions in the cache, with those of padding in the prompt.

    Raises:
        ValueError, TypeError: for an unknown layout, or a window that shows keys after a query.

    Source: the split caches of serving engines (decode context parallelism of vLLM, Helix of TensorRT-LLM).
    """

    def __init__(
        self,
        mesh: DeviceMesh | CPMesh,
        *,
        layout: str = "contiguous",
        window: Sequence[int | None] | None = None,
        latents: bool = False,
    ) -> None:
        self.cp, self.layout = cp_mesh.whole_view(mesh), layouts.check_layout(layout)
        checked = tiles.check_window(window)
        if checked is not None and checked[1] not in (0, None):
            raise ValueError(
                f"window={window!r} of a cache reaches {checked[1]} positions to the right. New tokens are causal, and "
                "see no position after their own. Pass (left, 0), or None"
            )
        self.window = None if checked is None or checked[0] is None else (checked[0], 0)
        self.length, self.latents = 0, latents
        self._turn = 0  # the rank that the next new token goes to
        self._kv: list[Tensor] = []  # keys and values, [B, Hkv, capacity, D]; or latents with their rotary parts
        self._shown: Tensor | None = None  # [B, 1, capacity, 1] bool, if there is padding
        self._rows = 0
        self.widths = 0, 0  # D and Dv, or R and Dr
        self._since = 0  # with a window, the first position that all ranks are sure to keep
        self._last = 0, 0  # the rank that holds the last token of the prompt, and its row in the share
        self._ends: tuple[Tensor, Tensor] | None = None  # with padding: each row's last token here, position and place
        # Ascending global positions of the rows, as ranges: the start of each, and its first row.
        self._starts: list[int] = []
        self._firsts: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory on this rank."""
        return sum(x.nbytes for x in (*self._kv, self._shown) if x is not None)

    def fill(
        self, k: Tensor, v: Tensor, *, length: int | None = None, documents: Any = None, attention_mask: Any = None
    ) -> None:
        """Keep this rank's share of a prompt. All ranks call it; nothing travels.

        Args:
            k, v: ``[B, Hkv, S'/n, D]`` and ``[B, Hkv, S'/n, Dv]`` of a sequence that was padded to S' positions.
            length: its length S without this padding. Default: S'.
            documents: the boundaries by which layouts such as ``"per_document"`` have placed the tokens. Default:
                those of the enclosing ``handler.documents`` block.
            attention_mask: this rank's share ``[B, S'/n]`` of a mask that is 0 on padding before or behind the tokens
                of rows, and 1 on tokens. None: there is no padding.

        Raises:
            ValueError, TypeError: on arguments that do not fit, before any communication.
            NotImplementedError: for a prompt of several documents, or a gradient that k or v requires with autograd on.
        """
        k, v = self._checked("fill", k, v)
        ranks, share = self.cp.size, k.shape[2]
        length = share * ranks if length is None else length
        self._check_prompt(length, share)
        table = self.cp.batch.documents if documents is None else documents_table(documents)
        _refuse_packed(table, length, attention_mask is not None)
        shown = self._checked_mask(attention_mask, k)
        signature = ("shapes", (k.shape, v.shape)), ("dtypes", k.dtype), ("length", length), ("layout", self.layout)
        self.cp.agree("call", (*signature, ("window", self.window), ("padding", shown is not None)), "SplitCache.fill")
        resolved = resolve(self.layout, ranks, share * ranks, read(table))
        if shown is not None:
            at = resolved.positions(self.cp.rank).to(k.device)
            ends = torch.where(shown[:, 0, :, 0] & (at < length), at, -1).max(1)
        self._ends = None if shown is None else (ends.values, ends.indices)
        # The last token of the prompt may be the first query.
        first = self._since = 0 if self.window is None else max(0, length - 1 - self.window[0])
        kept = [
            (max(a, first), min(b, length), row - a) for row, a, b in placed(resolved.ranges(self.cp.rank)).tolist()
        ]
        kept = [x for x in kept if x[0] < x[1]]
        rows = Rows([(start + shift, stop + shift) for start, stop, shift in kept])
        shown = shown if shown is None else rows.take(shown, 2)
        self._write([(start, stop) for start, stop, _ in kept], [rows.take(k, 2), rows.take(v, 2)], shown)
        self.length, self._last = length, rank_and_row(resolved, length - 1)

    def last_token(self, x: Tensor) -> Tensor:
        """The row ``[B, 1, ...]`` of the prompt's last token, on every rank, from a tensor of which this rank has the
        share ``[B, S'/n, ...]`` (hidden states before a head, say). With an ``attention_mask`` it is that of the last
        token of each row. It takes one small gather, or two."""
        rank, row = self._last
        with operation(self.cp, "last token of a prompt"):
            if self._ends is not None:
                position, place = self._ends
                rows = torch.arange(len(place), device=x.device)
                ranks = gather_ranks(self.cp.flat, position).argmax(0)
                return gather_ranks(self.cp.flat, x[rows, place][:, None])[ranks, rows]
            own = x[:, row : row + 1] if self.cp.rank == rank else x[:, :1]
            return gather_ranks(self.cp.flat, own)[rank]

    def append(self, k: Tensor, v: Tensor, *, attention_mask: Tensor | None = None) -> None:
        """Keep this rank's part of the keys and values of new tokens ``[B, Hkv, new tokens, D]``, which all ranks have.
        The parts are ranges of equal length, as far as possible, and begin with the next rank in turn.

        Args:
            attention_mask: ``[B, new tokens]``, 0 on padding. None: there is none among them.

        Raises:
            ValueError, TypeError, NotImplementedError: as :meth:`fill`.
        """
        k, v = self._checked("append", k, v)
        shown = self._checked_mask(attention_mask, k)
        count, ranks = k.shape[2], self.cp.size
        size, more = divmod(count, ranks)
        place = (self.cp.rank - self._turn) % ranks
        start = place * size + min(place, more)
        rows = start, start + size + (place < more)
        self._turn = (self._turn + more) % ranks
        positions = [(self.length + rows[0], self.length + rows[1])] if rows[0] < rows[1] else []
        mine = slice(*rows)
        self._write(positions, [k[:, :, mine], v[:, :, mine]], shown if shown is None else shown[:, :, mine])
        if self.window is not None:  # what each rank drops depends on its memory
            self._since = max(self._since, self.length - self.window[0])
        self.length += count

    @_normal_tensors()
    def select_rows(self, index: Tensor) -> None:
        """Keep these rows of the batch, in this order (beam search). ``index`` is the same on every rank."""
        self._kv = [x.index_select(0, index) for x in self._kv]
        self._shown = None if self._shown is None else self._shown.index_select(0, index)
        self._ends = None if self._ends is None else (self._ends[0][index], self._ends[1][index])

    def show(self, mask: Tensor) -> None:
        """Replace the padding mask of the cache by ``mask [B, length]``, the same on every rank: 1 on tokens, 0 on
        padding. Positions that become padding are hidden from all further queries."""
        starts, stops, _ = self.ranges().tolist()
        own = torch.cat([mask[:, :0], *(mask[:, a:b] for a, b in zip(starts, stops, strict=True))], 1)
        self._shown = self._no_padding()
        self._shown[:, 0, : self._rows, 0] = own

    # ------------------------------------------------------------------ rows

    def held(self) -> tuple[list[Tensor], Tensor | None]:
        """The memory of this rank: keys and values ``[B, Hkv, capacity, D]``, or latents with their rotary parts as one
        tensor; and True where there are tokens, ``[B, 1, 1, capacity]``, None if there is no padding."""
        return self._kv, None if self._shown is None else self._shown.transpose(2, 3)

    def ranges(self) -> Tensor:
        """The ranges of global positions that the rows hold, ascending: starts, stops and first rows, ``[3, ranges]``
        int32."""
        first, start = (np.array(x, dtype=np.int32) for x in (self._firsts, self._starts))
        found = np.stack((start, start + np.diff(first, append=np.int32(self._rows)), first))
        return torch.from_numpy(found).to(self._kv[0].device)

    def tiles(self, count: int) -> list[Tile]:
        """The tiles of the last ``count`` tokens as queries, and of this rank's rows as keys."""
        left = None if self.window is None else self.window[0]
        if not self._rows:
            return []
        if count == 1:
            rows = 0 if left is None else self._before(self.length - 1 - left), self._rows
            return [Tile((0, 1), rows)] if rows[0] < rows[1] else []
        first, start = (np.array(x, dtype=np.int64) for x in (self._firsts, self._starts))
        keys: Numbers = np.stack((first, start, start + np.diff(first, append=self._rows)), 1)
        queries = np.array([(0, self.length - count, self.length)], dtype=np.int64)
        full, _, cuts = tiles.Seen(queries, keys, (None if left is None else -left, 0), None).rectangles()
        return [*(tiles.joined(full) if len(full) else ()), *(tile for _, tile in cuts)]

    def _before(self, position: int) -> int:
        """The number of rows before a global position."""
        i = bisect_left(self._starts, position) - 1
        if i < 0:
            return 0
        stop = self._firsts[i + 1] if i + 1 < len(self._firsts) else self._rows
        return min(stop, self._firsts[i] + position - self._starts[i])

    def _write(self, positions: Sequence[Range], kv: list[Tensor], shown: Tensor | None) -> None:
        """Write rows behind the others, and record their positions. (What kernels still read lies before them.)"""
        self.widths = kv[0].shape[3], kv[1].shape[3]
        kv = [torch.cat(kv, 3)] if self.latents else kv
        rows, count = self._rows, kv[0].shape[2]
        if not self._kv or rows + count > self._kv[0].shape[2]:
            rows = self._grow(kv)
        if shown is not None and self._shown is None:
            self._shown = self._no_padding()
        for held, x in zip(self._kv, kv, strict=True):
            held[:, :, rows : rows + count] = x
        if self._shown is not None:
            self._shown[:, :, rows : rows + count] = True if shown is None else shown
        for start, stop in positions:
            if not self._starts or self._starts[-1] + rows - self._firsts[-1] != start:
                self._starts.append(start)
                self._firsts.append(rows)
            rows += stop - start
        self._rows = rows

    @_normal_tensors()
    def _no_padding(self) -> Tensor:
        """``[B, 1, capacity, 1]`` True."""
        return torch.ones_like(self._kv[0][:, :1, :, :1], dtype=torch.bool)

    @_normal_tensors()
    def _grow(self, kv: list[Tensor]) -> int:
        """Make room for more rows, and drop those that no new token sees. Returns the number of those that are left."""
        first = 0 if self.window is None else self._before(self.length - self.window[0])
        rows = self._rows - first

        capacity = rows + kv[0].shape[2] + SPARE

        def moved(x: Tensor) -> Tensor:
            made = x.new_empty(*x.shape[:2], capacity, x.shape[3])
            made[:, :, :rows] = x[:, :, first : self._rows]
            return made

        self._kv = [moved(x) for x in self._kv or [x[:, :, :0] for x in kv]]
        self._shown = None if self._shown is None else moved(self._shown)
        if first:
            i = bisect_right(self._firsts, first) - 1
            self._starts = [self._starts[i] + first - self._firsts[i], *self._starts[i + 1 :]]
            self._firsts = [0, *(x - first for x in self._firsts[i + 1 :])]
        self._rows = rows
        return rows

    # ------------------------------------------------------------------ checks

    def _checked(self, caller: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as autocast has them. Raises unless they fit each other and the cache."""
        caller = f"SplitCache.{caller}"
        for name, x in (("key", k), ("value", v)):
            check_local(f"{caller}: {name}", x, 4, "[batch, key heads, positions, head_dim]")
        refuse_gradients(caller, k, v)
        k, v = cast_for_autocast(k, v)
        check_dtype("key", k)
        if k.dtype != v.dtype or k.shape[:3] != v.shape[:3] or 0 in (*k.shape, *v.shape):
            raise ValueError(
                f"{caller}: key is {k.dtype} {tuple(k.shape)} and value {v.dtype} {tuple(v.shape)}. They are one row "
                "of the cache, so they have one dtype, batch size and number of heads and positions, and at least one "
                "of each. Reshape or cast them"
            )
        if caller.endswith("fill") and self.length:
            raise ValueError(
                f"{caller}: the cache holds {self.length} positions already. A prompt that is split comes first, and "
                "all further tokens are appended. Call append with what all ranks have, or make another cache"
            )
        held = self._kv[0] if self._kv else k
        if self._kv and (
            held.dtype != k.dtype or held.shape[:2] != k.shape[:2] or self.widths != (k.shape[3], v.shape[3])
        ):
            raise ValueError(
                f"{caller}: key {k.dtype} {tuple(k.shape)} and value {tuple(v.shape)} do not fit the cache. It holds "
                f"{held.dtype}, {held.shape[0]} batch rows, {held.shape[1]} heads and head dims {self.widths}. Pass "
                "keys and values of the same layer and batch, in the same dtype"
            )
        return k, v

    def check_queries(self, q: Tensor, enable_gqa: bool, *of_latents: Tensor) -> None:
        """Raise unless queries ``[B, H, T, D]``, and weight and bias of latent attention, fit what the cache holds."""
        name = "decode_attention"
        held = self._check_rows(name, q)
        if self.latents != bool(of_latents):
            raise ValueError(
                f"{name}: the cache {'holds' if self.latents else 'does not hold'} latents, and weight is "
                f"{'given' if of_latents else 'not given'}. Latents become keys and values by their weight. Give it "
                "with a cache that was made with latents=True, and with no other"
            )
        if of_latents:
            latent, rope = held.split(list(self.widths), 3)
            check_latents(name, q, latent, rope, *of_latents, all_keys=True)
            return
        check_enable_gqa(name, q.shape[1], held.shape[1], enable_gqa)
        check_grouped(q.shape[1], held.shape[1])
        if q.shape[3] != self.widths[0]:
            raise ValueError(
                f"{name}: query {tuple(q.shape)} has another head dim than the keys in the cache ({self.widths[0]}). "
                "Queries and keys of a layer have one. Pass those of one layer"
            )

    def check_indexer(self, name: str, q: Tensor, weights: Tensor | None) -> None:
        """Raise unless queries of an indexer ``[B, H, T, D]`` and weights of their heads fit what the cache holds."""
        held = self._check_rows(name, q)
        if not self.latents or q.shape[3] != held.shape[3]:
            kind = f"keys of {sum(self.widths)} numbers" if self.latents else "keys and values of attention"
            raise ValueError(
                f"{name}: query is {tuple(q.shape)}, and the cache holds {kind}. The keys of an indexer are one head, "
                "which both parts of a row make together. Make its cache with latents=True, and pass queries of the "
                "head dim of its keys"
            )
        check_head_weights(name, q, weights)

    def _check_rows(self, name: str, q: Tensor) -> Tensor:
        """The cached tensor that comes first. Raises unless it has the batch of queries, and their positions."""
        held = self._kv[0] if self._kv else q
        if not self._kv or q.shape[2] > self.length:
            raise ValueError(
                f"{name}: query has {q.shape[2]} new tokens, and the cache has {self.length} positions. These must "
                "include the new tokens. Append their keys and values before you attend to them"
            )
        if self.window is not None and max(0, self.length - q.shape[2] - self.window[0]) < self._since:
            raise ValueError(
                f"{name}: query has {q.shape[2]} new tokens, more than were appended last. The cache has "
                f"window={self.window}, and does not keep keys that only older queries see. Attend to tokens behind "
                "the append that brings them, or append as many at once"
            )
        if q.dtype != held.dtype or q.shape[0] != held.shape[0] or 0 in q.shape:
            raise ValueError(
                f"{name}: query is {q.dtype} {tuple(q.shape)}, and the cache holds {held.shape[0]} batch rows in "
                f"{held.dtype}. Both have one batch and dtype, and there is at least one query. Pass the queries of "
                "the batch whose keys were appended, in the same dtype"
            )
        return held

    def _checked_mask(self, mask: Tensor | None, k: Tensor) -> Tensor | None:
        """The rows of a padding mask as ``[B, 1, positions, 1]`` bool."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.shape != (k.shape[0], k.shape[2]) or mask.is_floating_point():
            found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask is {found}. It says which of these keys are tokens (1) and padding (0). Pass integers "
                f"or booleans [{k.shape[0]}, {k.shape[2]}]; dispatch a mask of the whole prompt first"
            )
        return mask.to(k.device, torch.bool)[:, None, :, None]

    def _check_prompt(self, length: int, share: int) -> None:
        whole, ranks = share * self.cp.size, self.cp.size
        if length < ranks:
            raise ValueError(
                f"the prompt has {length} tokens, fewer than the {self.cp}. A rank without a token has no part "
                "of the cache. Use fewer ranks (context_parallel_mesh), or append short prompts on every rank"
            )
        if not 0 < length <= whole:
            raise ValueError(
                f"length={length} is not that of a prompt of which {ranks} ranks hold {share} positions each. Padding "
                f"makes it longer, up to {whole}. Pass the length before padding"
            )
        layouts.check_length(self.layout, ranks, whole, "length of the prompt on all ranks")


def rank_and_row(resolved: ResolvedLayout, position: int) -> tuple[int, int]:
    """The rank that holds a position, and its row in that rank's share."""
    places = ((rank, x) for rank, held in enumerate(resolved.held) for x in placed(held).tolist())
    return next((rank, row + position - start) for rank, (row, start, stop) in places if start <= position < stop)


def refuse_gradients(caller: str, *tensors: Tensor) -> None:
    """Raise ``NotImplementedError`` if a tensor wants a gradient, or has a tangent."""
    refuse_forward_mode(caller, *tensors)
    if requires_gradient(*tensors):
        raise NotImplementedError(
            f"{caller}: a tensor of shape {next(tuple(x.shape) for x in tensors if x.requires_grad)} requires a "
            "gradient. A split cache gives none: new tokens attend to keys of other ranks without a backward. Decode "
            "under torch.no_grad(); to train on what was written, run the whole sequence as a batch"
        )


def _refuse_packed(table: Tensor | None, length: int, padded: bool) -> None:
    """Raise for a prompt of several documents. (Padding is a document, too.)"""
    packed = read(table)
    if packed is not None and not padded and any(0 < end < length for row in packed.rows for end in row):
        raise NotImplementedError(
            f"the prompt has documents that end at {[list(row) for row in packed.rows]}, before its {length} tokens "
            "do. New tokens go on with one text, and would see all documents. Pass each as a row of the batch, padded "
            "on the left"
        )

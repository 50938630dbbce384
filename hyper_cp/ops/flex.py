"""FlexAttention on a split sequence: masks and scores written for global positions.

A call hands its functions to the engine as a score (:class:`~hyper_cp.ops.kernels.scores.mods.Mods`), so it runs in
every mode. What is left here is for compiled code, in which an op cannot take functions: keys and values are gathered
over the ring dimension, the functions are called with global positions and heads, and the blocks of the local mask are
those rows of the user's blocks that the local queries touch. The kernel there is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from .._torch.compiling import is_compiling
from ..mesh import cp_mesh
from ..mesh.cp_mesh import CPMesh
from ..schedule.layout import by_documents
from ..schedule.lookup import resolve
from ..schedule.ranges import Range
from .config import Call, CheckedCall, Mode
from .engine import TileEngine
from .exchange.whole_sequences import gather_keys, query_positions
from .kernels.scores.mods import Mods, block_tensors, check_block_mask, dense_blocks, ordered_blocks
from .writes import Written, while_unchanged


@dataclass(frozen=True)
class Flex:
    """A call of ``flex_attention`` as a core of :func:`hyper_cp.ops.attention.attend`: its functions, its other
    ``options``, and torch's own ``kernel``, which computes it."""

    name: str
    score_mod: Callable[..., Tensor] | None
    block_mask: BlockMask | None
    options: dict[str, Any]
    kernel: Callable[..., Any]

    def select_backend(self, q: Tensor, cp: CPMesh, mode: Mode, call: Call) -> tuple[Any, Call]:
        """The engine, with the functions as a score of the call. A compiled call cannot hand functions to an op, and
        one rank has nothing to share: both run torch's own kernel."""
        alone = cp.size == 1 and call.documents is None and mode.window is None
        aux = self.options.get("return_aux")
        max_scores = call.max_logits or bool(getattr(aux, "max_scores", False))
        if is_compiling() or (alone and not (call.max_logits or mode.max_logits)):
            return self, call
        mask_mod = None if self.block_mask is None else self.block_mask.mask_mod
        score = Mods(self.score_mod, mask_mod, self.block_mask, q)
        with_lse = bool(self.options.get("return_lse") or getattr(aux, "lse", False))
        given: dict[str, Any] = {"scale": self.options.get("scale"), "score": score, "max_logits": max_scores}
        return TileEngine(with_lse), replace(call, **given)

    def compiles(self, cp: CPMesh, mode: Mode, call: Call) -> bool:
        """Torch's own kernel, on all keys at once, can be part of a graph; tiles cannot."""
        needs_tiles = (
            by_documents(mode.layout),
            cp.ulysses.size > 1 and mode.groups > 1,
            cp.ring.size > 1 and (mode.kv_exchange != "all_gather" or mode.load_balance),
            mode.window is not None,
            call.documents is not None,
            call.max_logits,
        )
        return not any(needs_tiles)

    def to_caller(self, found: Any) -> Any:
        """The result as ``flex_attention`` returns it."""
        aux = self.options.get("return_aux")
        out, *others = found if isinstance(found, tuple) else (found,)
        if aux is None:
            return (out, others[0]) if self.options.get("return_lse") else out
        if others and isinstance(others[0], AuxOutput):
            return found
        lse = others.pop(0) if aux.lse else None
        return out, AuxOutput(lse, others.pop(0) if aux.max_scores else None)

    def check(self, q: Tensor, k: Tensor, call: CheckedCall) -> None:
        if self.block_mask is None:
            return
        heads = q.shape[1] * (call.cp.ulysses.size if call.exchanged else 1)
        check_block_mask(self.name, self.block_mask, q.shape[0], heads, call.lengths)
        if getattr(self.block_mask, "dq_write_order", None) is not None:
            raise NotImplementedError(
                f"{self.name} calls flex_attention with a block_mask made with compute_dq_write_order=True. That is an "
                "order of blocks of the whole sequence on one device. Make the mask without it"
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: CheckedCall) -> Any:
        cp, mode = call.cp, call.mode
        score_mod, mask, options = self.score_mod, None, dict(self.options)
        if self.block_mask is not None:
            mask = local_mask(self.block_mask, q, k.shape[2] * cp.ring.size, cp, mode.layout)
        if score_mod is not None:
            score_mod = _global_score(score_mod, q, cp, mode.layout)
        if cp.ring.size > 1:
            k, v = gather_keys(k, v, cp.key, mode.layout)
            if (options.get("kernel_options") or {}).get(
                "BLOCKS_ARE_CONTIGUOUS"
            ):  # the blocks of two global rows need not be
                options["kernel_options"] = {**options["kernel_options"], "BLOCKS_ARE_CONTIGUOUS": False}
        return self.kernel(q, k, v, score_mod=score_mod, block_mask=mask, **options)


# --------------------------------------------------------------------------- the user's functions


def _global_numbers(q: Tensor, cp: CPMesh, layout: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The function from a head and a query of ``q`` to their global numbers."""
    first = cp.ulysses.rank * q.shape[1]
    if cp.ring.size == 1:
        return lambda h, i: (h + first, i)
    positions = query_positions(q, cp.key, layout)
    return lambda h, i: (h + first, positions[i])


def _global_score(mod: Callable[..., Tensor], q: Tensor, cp: CPMesh, layout: str) -> Callable[..., Tensor]:
    """``score_mod`` of local queries and heads, from one of global queries and heads."""
    at = _global_numbers(q, cp, layout)
    return lambda score, b, h, i, j: mod(score, b, *at(h, i), j)


# --------------------------------------------------------------------------- blocks

# Block tensors only: a function of the user's may hold the mask that is the key.
_local_masks: WeakKeyDictionary[BlockMask, dict[Any, tuple[list[Written], BlockMask]]] = WeakKeyDictionary()


def local_mask(mask: BlockMask, q: Tensor, kv_length: int, cp: CPMesh, layout: str) -> BlockMask:
    """The part of a global ``mask`` that belongs to the queries and heads of ``q`` ``[B, H, S/ring, D]``.

    Its blocks are kept as long as the user's mask lives, so that layers share them. (Compiled: part of the graph.)
    """
    blocks = block_tensors(mask)
    if is_compiling():
        local = _local(mask, blocks, q, kv_length, cp, layout)
    else:
        key = (cp.key, layout, q.shape[1], q.shape[2])
        made = while_unchanged(
            _local_masks.setdefault(mask, {}), key, blocks, lambda: _local(mask, blocks, q, kv_length, cp, layout)
        )
        local = copy(made)
    mod, at = mask.mask_mod, _global_numbers(q, cp, layout)
    local.mask_mod = lambda b, h, i, j: mod(b, *at(h, i), j)
    return local


def _local(mask: BlockMask, blocks: list[Tensor], q: Tensor, kv_length: int, cp: CPMesh, layout: str) -> BlockMask:
    heads, first = q.shape[1], cp.ulysses.rank * q.shape[1]
    if mask.kv_indices.shape[1] > 1:
        blocks = [x[:, first : first + heads] for x in blocks]
    if cp.ring.size > 1:
        columns = -(-kv_length // mask.BLOCK_SIZE[1])
        blocks = local_blocks(blocks, cp.key, layout, q.shape[2], mask.BLOCK_SIZE[0], columns)
    full: Any = blocks[2:] or [None, None]
    return BlockMask.from_kv_blocks(
        blocks[0],
        blocks[1],
        full[0],
        full[1],
        BLOCK_SIZE=mask.BLOCK_SIZE,
        seq_lengths=(q.shape[2], kv_length),
        compute_q_blocks=mask.q_indices is not None,
    )


@torch.library.custom_op("hyper_cp::local_blocks", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def local_blocks(blocks: list[Tensor], mesh: str, layout: str, length: int, rows: int, columns: int) -> list[Tensor]:
    """Blocks of a global mask -> blocks of the mask of this ring rank's ``length`` queries.

    A local row of blocks that touches several global rows has the blocks of all of them; a block is full if it is full
    in all.

    Args:
        blocks: numbers ``[B, H, R]`` and indices ``[B, H, R, *]`` of the blocks with keys to be masked, and (if there
            are four) of those without.
        rows: queries to a block.
        columns: blocks of keys.
    """
    cp = cp_mesh.by_key(mesh)
    ranges = resolve(layout, cp.size, length * cp.ring.size).by_ring(cp.ulysses.size).ranges(cp.ring.rank)
    local, touched, needed = _touched(ranges, rows, blocks[0].device)
    seen, *full = (dense_blocks(*pair, columns) for pair in zip(blocks[::2], blocks[1::2], strict=True))
    shape = (*seen.shape[:2], len(needed), columns)

    def counted(dense: Tensor) -> Tensor:
        return dense.new_zeros(shape).index_add_(2, local, dense[:, :, touched])

    if not full:
        return [*ordered_blocks(counted(seen) > 0)]
    whole = counted(full[0]) == needed[:, None]
    return [*ordered_blocks((counted(seen | full[0]) > 0) & ~whole), *ordered_blocks(whole)]


@local_blocks.register_fake
def _(blocks: list[Tensor], mesh: str, layout: str, length: int, rows: int, columns: int) -> list[Tensor]:
    shape = (*blocks[0].shape[:2], -(-length // rows))
    sizes = [shape, (*shape, columns)] * (len(blocks) // 2)
    return [x.new_empty(size) for x, size in zip(blocks, sizes, strict=True)]


@lru_cache(maxsize=64)
def _touched(ranges: tuple[Range, ...], rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs (local row of blocks, global row that it touches), and the number of these that must be full for the local
    row to be full."""
    pairs: dict[tuple[int, int], None] = {}
    at = 0
    for start, stop in ranges:
        while start < stop:  # up to the next boundary of a local or a global block
            end = min(stop, start + rows - at % rows, start + rows - start % rows)
            pairs[at // rows, start // rows] = None
            at, start = at + end - start, end
    local = torch.tensor([i for i, _ in pairs], device="cpu")
    needed = local.bincount()
    if at % rows:  # a block that is not filled is never full: as in create_block_mask
        needed[-1] = len(pairs) + 1
    touched = torch.tensor([g for _, g in pairs], device="cpu")
    return local.to(device), touched.to(device), needed.to(device, torch.int32)

"""FlexAttention's ``score_mod`` and ``mask_mod`` as a score, evaluated over the global positions of a tile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from ....schedule.blocks import BlockMap, block_map
from ...writes import Written, unchanged, while_unchanged, written
from ..derivative import vmap_in_op
from ..partials import accumulation_dtype
from . import MaskMod, Score, ScoreMod, Where, register

_number = itertools.count()


class Mods(Score):
    """FlexAttention's functions of global batch rows, heads and positions.

    Args:
        block_mask: the mask's function, and the blocks that it lists. Pairs of other blocks are hidden.
        like: the queries of the call, whose device and dtype the functions see.
    """

    def __init__(
        self, score_mod: ScoreMod | None, mask_mod: MaskMod | None, block_mask: BlockMask | None, like: Tensor
    ) -> None:
        self.score_mod, self.mask_mod, self.block_mask = score_mod, mask_mod, block_mask
        self.key = f"mods={next(_number)}"
        self.signature = f"score_mod={score_mod is not None}, mask_mod={mask_mod is not None}"
        self.dense: Tensor | None = None
        """``[B|1, H|1, R, C]``, True where a block is listed."""
        if block_mask is not None:
            self.dense, self.blocks = _listed(block_mask, like.device)
        self.used: list[Written] = []
        """The tensors that the functions use, and did not make themselves."""
        self.calls: list[Any] | None = None
        """The functions of torch that they call, each with its numbers; None: there is no backward."""
        self.captured: tuple[Tensor, ...] = ()
        if torch.is_grad_enabled():
            used, self.calls = self._in_use(like)
            self.used, self.captured = written(used), tuple(x for x in used if x.requires_grad)
            self.like = torch.empty(0, dtype=like.dtype, device=like.device)
        register(self)

    def _in_use(self, like: Tensor) -> tuple[list[Tensor], list[Any]]:
        """The tensors that the functions use, and their calls of torch, found by calling each once, as FlexAttention
        does, with numbers of no dimension."""
        numbers = torch.zeros(4, dtype=torch.int64, device=like.device).unbind()
        score = torch.zeros((), dtype=accumulation_dtype(like.dtype), device=like.device)
        with _Collection((score, *numbers)) as collection:
            if self.score_mod is not None:
                self.score_mod(score, *numbers)
            if self.mask_mod is not None:
                self.mask_mod(*numbers)
        return list(collection.found.values()), collection.calls

    def check_unchanged(self) -> None:
        """Raise ``RuntimeError`` if the functions now use other tensors, or other values, than in forward."""
        if self.calls is None:
            return
        used, calls = self._in_use(self.like)
        if not unchanged(self.used, used):
            what = "a tensor that score_mod or mask_mod of flex_attention uses"
        elif calls != self.calls:
            what = "a number that score_mod or mask_mod of flex_attention uses"
        else:
            return
        raise RuntimeError(
            f"{what} has changed since forward. Backward calls these functions again, and its gradients would be those "
            "of other attention. Run backward first, or make a new one and new functions for the next batch (in a loop "
            "over layers functools.partial, or a default argument, keeps the value of now)"
        )

    def check(self, name: str, batch: int, heads: int, lengths: tuple[int, int]) -> None:
        if self.block_mask is not None:
            check_block_mask(name, self.block_mask, batch, heads, lengths)

    def mods(self, where: Where | None) -> tuple[ScoreMod | None, MaskMod | None]:
        score_mod, mask_mod, at = self.score_mod, self.mask_mod, where
        if at is None:
            raise RuntimeError("these functions need positions")
        b_, h_, i_, j_ = at.batch, at.heads, at.rows, at.cols
        return (
            score_mod and (lambda score, b, h, i, j: score_mod(score, b_[b], h_[h], i_[i], j_[j])),
            mask_mod and (lambda b, h, i, j: mask_mod(b_[b], h_[h], i_[i], j_[j])),
        )

    def __call__(self, logits: Tensor, where: Where | None, captured: Sequence[Tensor]) -> Tensor:
        if where is None:
            raise RuntimeError("these functions need positions")
        numbers = where.batch, where.heads, where.rows, where.cols
        changed = logits
        with vmap_in_op(), _Evaluation(self.captured, captured):
            if self.score_mod is not None:
                changed = _over_tile(self.score_mod, True)(logits, *numbers).to(logits.dtype)
            if self.mask_mod is not None:
                visible = _over_tile(self.mask_mod, False)(*numbers)
                changed = torch.where(visible, changed, -torch.inf)
        if self.dense is not None and self.block_mask is not None:
            listed = pairs_in_blocks(self.dense, self.block_mask.BLOCK_SIZE, where)
            changed = torch.where(listed, changed, -torch.inf)
        return changed


def pairs_in_blocks(dense: Tensor, size: tuple[int, int], where: Where) -> Tensor:
    """``[B|1, H|1, Sq, Sk]``, True where the block of a pair is listed."""
    for dim, numbers in enumerate((where.batch, where.heads)):
        dense = dense if dense.shape[dim] == 1 else dense.index_select(dim, numbers)
    return dense.index_select(2, where.rows // size[0]).index_select(3, where.cols // size[1])


# --------------------------------------------------------------------------- evaluation


def _over_tile(mod: Callable[..., Tensor], takes_score: bool) -> Callable[..., Tensor]:
    """``mod`` over all batch rows, heads, queries and keys of a tile, as FlexAttention defines it."""
    for own in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mod = torch.vmap(mod, in_dims=(0, *own) if takes_score else own)
    return mod


class _Evaluation(TorchFunctionMode):
    """While entered, tensors are indexed by tensors without reading these (which vmap could not), and captured tensors
    are replaced by those given instead."""

    def __init__(self, captured: Sequence[Tensor] = (), instead: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.instead = {id(x): y for x, y in zip(captured, instead, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._replaced(args), self._replaced(kwargs or {})
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            plain = all(isinstance(x, (int, Tensor)) and not isinstance(x, bool) for x in index)
            if plain and any(isinstance(x, Tensor) for x in index):
                device = args[0].device
                at = [x if isinstance(x, Tensor) else torch.tensor(x, device=device) for x in index]
                return torch.ops.aten.index.Tensor(args[0], at)
        return func(*args, **kwargs)

    def _replaced(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.instead.get(id(x), x)
        if isinstance(x, dict):
            return {name: self._replaced(item) for name, item in x.items()}
        if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
            return type(x)(self._replaced(item) for item in x)
        return x


class _Collection(_Evaluation):
    """Collects the tensors that take part, and that the functions did not make; and all calls of torch, each with its
    numbers, and with the order in which its tensors were first seen.

    Args:
        given: arguments of the functions, which do not count.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {id(x): x for x in given}
        self.calls: list[Any] = []
        self.order = {id(x): number for number, x in enumerate(given)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in _tensors((args, kwargs)):
            self._number(x)
            if id(x) not in self.made:
                self.found[id(x)] = x
        self.calls.append((func, *map(self._compared, _leaves((args, kwargs)))))
        result = super().__torch_function__(func, types, args, kwargs)
        for x in _tensors(result):
            self._number(x)
            if id(x) not in self.found:
                self.made[id(x)] = x
        return result

    def _number(self, x: Tensor) -> int:
        return self.order.setdefault(id(x), len(self.order))

    def _compared(self, x: Any) -> Any:
        """An argument in a form that can be compared with that of a later call: the number of a tensor, a value
        (NumPy's too), or a type."""
        return ("tensor", self._number(x)) if isinstance(x, Tensor) else _value(x)


def _value(x: Any) -> Any:
    if isinstance(x, (bool, int, float, str, torch.dtype)):
        return x
    return (x.dtype, x.shape, hash(x.tobytes())) if hasattr(x, "tobytes") else type(x)


def _tensors(x: Any) -> list[Tensor]:
    return [found for found in _leaves(x) if isinstance(found, Tensor)]


def _leaves(x: Any) -> list[Any]:
    x = (x.start, x.stop, x.step) if isinstance(x, slice) else x
    items = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else None
    return [x] if items is None else [found for item in items for found in _leaves(item)]


# --------------------------------------------------------------------------- block masks

# Block tensors only: a function of the user's may hold the mask that is the key.
_read: WeakKeyDictionary[BlockMask, tuple[list[Written], tuple[Tensor, BlockMap]]] = WeakKeyDictionary()


def block_tensors(mask: BlockMask) -> list[Tensor]:
    """Numbers and indices of the blocks that a mask lists, and those of its full blocks, if it has any."""
    blocks = [mask.kv_num_blocks, mask.kv_indices]
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        blocks += [mask.full_kv_num_blocks, mask.full_kv_indices]
    return blocks


def _listed(mask: BlockMask, device: torch.device) -> tuple[Tensor, BlockMap]:
    """The blocks of a mask ``[B|1, H|1, R, C]``, and what schedules make of them. Read once per mask, for which the
    host waits for the device."""
    blocks = block_tensors(mask)

    def read() -> tuple[Tensor, BlockMap]:
        columns = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
        dense = dense_blocks(blocks[0], blocks[1], columns).bool()
        for number, indices in zip(blocks[2::2], blocks[3::2], strict=True):
            dense |= dense_blocks(number, indices, columns).bool()
        union = dense.flatten(0, 1).any(0).cpu().numpy()
        rows, cols = mask.BLOCK_SIZE
        return dense, block_map(union, (int(rows), int(cols)))

    dense, union_map = while_unchanged(_read, mask, blocks, read)
    return dense.to(device), union_map


def dense_blocks(number: Tensor, indices: Tensor, columns: int) -> Tensor:
    """``[B, H, R, columns]`` int32, 1 where there is a block."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < number[..., None]
    target = torch.where(listed, indices, columns).long()
    return indices.new_zeros(*indices.shape[:-1], columns + 1).scatter_(-1, target, 1)[..., :columns]


def ordered_blocks(dense: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks in each row, and the indices of all blocks: those that are listed come first, ascending."""
    order = dense.int().argsort(dim=-1, descending=True, stable=True)
    return dense.sum(-1, dtype=torch.int32), order.int()


def check_block_mask(name: str, mask: BlockMask, batch: int, heads: int, lengths: tuple[int, int]) -> None:
    """Raise ``ValueError`` unless a mask is made for the whole sequence, and for all heads or none."""
    if tuple(mask.seq_lengths) != lengths:
        raise ValueError(
            f"{name} calls flex_attention with a block_mask for {mask.seq_lengths[0]} queries and "
            f"{mask.seq_lengths[1]} keys, but the global sequence has {lengths[0]} and {lengths[1]}. It must describe "
            "the global sequence, not this rank's share. Build it with create_block_mask(mask_mod, B, H, "
            f"{lengths[0]}, {lengths[1]})"
        )
    shape = mask.kv_indices.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads):
        raise ValueError(
            f"{name} calls flex_attention with a block_mask of shape {tuple(mask.shape)}. Its first two dimensions are "
            f"those of the batch and of global query heads, or 1. Build it with B in (1, {batch}) and H in (1, {heads})"
        )

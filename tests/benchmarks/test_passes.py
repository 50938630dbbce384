"""Passes over memory between tiles: bytes that PyTorch's operators read and write for each element, as the table of
docs/measured/devices.md has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.device.ranks import SilentAxis
from hyper_cp.ops.exchange import ulysses
from hyper_cp.ops.exchange.codec import Codec
from hyper_cp.ops.exchange.travel import Travel
from hyper_cp.ops.kernels import partials
from hyper_cp.schedule import lookup
from hyper_cp.schedule.lookup import ascending, resolve
from hyper_cp.schedule.ranges import Rows

PAGE = Path(__file__).parents[2] / "docs/measured/devices.md"
RANKS, ROWS, DIM = 8, 64, 1024
"""The log-sum-exp is one element of a row, which does not count beside the others."""


class Passes(TorchDispatchMode):
    """Adds up the bytes that operators read and write. Views cost nothing, and neither does memory that is not set."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, given = func.overloadpacket.__name__, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not func.is_view and "empty" not in name and name != "normal_":  # a silent axis draws what arrives
            read = given[1:] if name == "copy_" else [] if name in ("zero_", "fill_") else given
            written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.moved += sum(x.numel() * x.element_size() for x in [*read, *written])
        return result


def bytes_each(run: Callable[[], Any], elements: int) -> float:
    with Passes() as passes:
        run()
    return round(passes.moved / elements, 1)


def tensor(dtype: torch.dtype) -> Tensor:
    return torch.randn(1, 1, ROWS, DIM).to(dtype)


def ring(ranks: int, backward: bool) -> Callable[[], Any]:
    """Keys and values on their way round all ranks, without what tiles add."""
    k, v, length = tensor(torch.bfloat16), tensor(torch.bfloat16), ranks * ROWS
    plan = lookup.schedule(lookup.Key("head_tail", 0, ranks, 1, "ring", False, (None, 0), length, length))

    def travel() -> None:
        keys = Travel(SilentAxis(0, ranks), plan.transfers, k, v, torch.float32 if backward else None)
        for _ in keys:
            pass
        if backward:
            keys.gradients_at_home()

    return travel


def exchange_of_heads(layout: str, move: Any, heads: int, rows: int) -> Callable[[], Any]:
    x = torch.randn(1, rows, heads, DIM // 8).to(torch.bfloat16).transpose(1, 2)
    order = ascending(resolve(layout, RANKS, RANKS * ROWS, None), range(RANKS))
    return lambda: move(SilentAxis(0, RANKS), x, 2, 1, order).wait()


def counted() -> dict[str, float]:
    total, tile, lse = tensor(torch.float32), tensor(torch.bfloat16), torch.randn(1, 1, ROWS)
    one, keys = total.numel(), 2 * total.numel()
    codec, sums = Codec(tile, tile), partials.Partials(tile, DIM)
    rows = codec.pack(Rows.of(0, ROWS))
    found = {
        "first tile of a row": bytes_each(lambda: sums.add((0, ROWS), None, tile, lse), one),
        "merge of another tile": bytes_each(lambda: partials.merge(total, lse, tile, lse.clone()), one),
        "result of a row": bytes_each(lambda: sums.result((0, ROWS)), one),
        "gradients of a tile": bytes_each(lambda: partials.add(total, tile), one),
        "rows packed": bytes_each(lambda: codec.pack(Rows.of(0, ROWS)), keys),
        "rows unpacked": bytes_each(lambda: codec.unpack(rows), keys),
    }
    assert bytes_each(ring(RANKS, False), keys) == found["rows packed"], "rows travel on as they have arrived"
    fewer, backward = (bytes_each(ring(ranks, True), keys) for ranks in (RANKS // 2, RANKS))
    hop = found["sums of a ring, each hop"] = (backward - fewer) / (RANKS // 2)
    found["sums of a ring, first and last"] = backward - found["rows packed"] - (RANKS - 1) * hop
    for layout in ("contiguous", "head_tail"):
        there = exchange_of_heads(layout, ulysses.sequence_to_heads, RANKS, ROWS)
        back = exchange_of_heads(layout, ulysses.heads_to_sequence, 1, RANKS * ROWS)
        found[f"Ulysses, {layout}, there"] = bytes_each(there, one)
        found[f"Ulysses, {layout}, back"] = bytes_each(back, one)
    return found


def test_the_table_of_the_page_is_what_is_counted() -> None:
    table = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([0-9]+) \|", PAGE.read_text().split("## Passes over")[1], re.M)
    assert {name: int(number) for name, number in table} == {name: round(number) for name, number in counted().items()}

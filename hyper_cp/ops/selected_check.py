"""``HYPER_CP_DEBUG=selected``: raises an error for a selection that lists keys which its queries do not see.

Such a key is hidden, so that attention is right, but a selection of local positions, or of another batch, lists many of
them. To find them costs a wait for the device in every call, and a small gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..mesh.comm import gather_ranks
from ..mesh.cp_mesh import CPMesh
from ..schedule.build import Schedule
from ..schedule.ranges import Rows
from ..schedule.tiles import Band
from .kernels.partials import part
from .kernels.selected import Selections, in_band


def check_selected(cp: CPMesh, plan: Schedule, selected: Tensor, block: int, band: Band, length: int) -> None:
    """Raise ``ValueError`` on all ranks if queries of one list keys in their future, in another document, outside of
    their window or past the end, or a key twice; of blocks, those in the future or past the end, or twice. (Local keys
    and blocks are listed whatever hides them, and models that score the states of padding list blocks of padding.)

    Args:
        selected: ``[B, heads, S/n, k]`` of the queries that it attends.
        band: of the call.
        length: the number of keys of all ranks.
    """
    at = Rows(plan.queries).index(selected.device).view(-1, 1)
    ordered = selected.sort(-1, descending=True).values
    wrong = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)).any(-1)
    if block > 1:
        last = length - 1 if band[1] is None else (at + band[1]).clamp(max=length - 1)
        wrong |= (selected * block > last).any(-1)
    else:
        local = (ordered == at - torch.arange(ordered.shape[-1], device=at.device)).cummin(-1).values
        others, seen = ordered.masked_fill(local, -1), torch.zeros_like(ordered[..., 0], dtype=torch.int64)
        selections = Selections(others)
        for step in plan.forward:
            for tile in step.tiles:
                columns, known = selections.of(step, tile).columns()
                part(seen, tile.q, tile.batch).add_((known & in_band(columns, tile.band)).sum(-1))
        wrong |= (others != -1).sum(-1) != seen
    found = gather_ranks(cp.flat, wrong.sum().reshape(1)).flatten().tolist()
    if any(found):
        rank = next(i for i, number in enumerate(found) if number)
        raise ValueError(
            f"selected of rank {rank} lists keys that {found[rank]} of its queries do not see: in their future, in "
            "another document, outside of the window, past the end, or one key twice. It must list global positions, "
            "each once, and -1 where a query sees fewer keys than are listed. Pass what select_keys returns"
        )

"""context_parallel: buffers that are views of one tensor, as inputs and labels usually are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hyper_cp import context_parallel
from hyper_cp.mesh import comm
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import error_of, on_ranks


def views() -> tuple[Tensor, Tensor, Tensor]:
    """A batch of tokens, and its inputs and labels, which share its memory."""
    ids = torch.arange(18).view(2, 9)
    return ids, ids[:, :-1], ids[:, 1:]


def block(*buffers: Tensor) -> Any:
    return context_parallel(cp_mesh(), buffers=buffers, buffer_seq_dims=[1] * len(buffers))


@on_ranks
def base_of_a_view_of_the_same_size() -> Tensor:
    base = torch.arange(8.0)
    with block(base.view(1, 8)):
        base.add_(100)
    return base


def test_a_write_to_the_base_of_a_view_of_the_same_size_remains(ranks: Any) -> None:
    for base in ranks(2, base_of_a_view_of_the_same_size):
        assert torch.equal(base, torch.arange(8.0) + 100)


@on_ranks
def read_only() -> list[str]:
    ids, inputs, labels = views()
    with comm.record_traffic() as log, block(inputs, labels):
        assert inputs.shape == labels.shape == (2, 4) and torch.equal(inputs + 1, labels)
    assert torch.equal(ids, views()[0]) and inputs.shape == (2, 8)
    return [name for name, _ in log.entries]


def test_views_that_were_only_read_cost_nothing(ranks: Any) -> None:
    assert ranks(2, read_only) == [[], []]


@on_ranks
def written(first: bool, past_routing: bool) -> list[str]:
    """Write one of two views, in either order; ``past_routing``: through a function that the block does not see."""
    ids, inputs, labels = views()
    with comm.record_traffic() as log, block(*((inputs, labels) if first else (labels, inputs))):
        if past_routing:
            with torch._C.DisableTorchFunction():
                inputs.add_(100)
        else:
            inputs.add_(100)
    want = views()[0]
    want[:, :-1] += 100
    assert torch.equal(ids, want), ids
    return [name for name, _ in log.entries]


def test_a_written_view_comes_back_in_any_order(ranks: Any) -> None:
    for first in (True, False):
        assert ranks(2, written, first, False) == [["all_gather"] * 2] * 2  # what was written, and where
        assert ranks(2, written, first, True) == [["all_gather"] * 4] * 2  # the counter of writes is that of both


@on_ranks
def beside_others() -> None:
    """A view of the same tensor in an inner block, and the tensor itself, are written."""
    ids, inputs, labels = views()
    want = views()[0]
    with block(inputs):
        with block(labels):
            labels.mul_(3)
        ids[0, 0] = 50
    want[:, 1:] *= 3
    want[0, 0] = 50
    assert torch.equal(ids, want), ids


def test_writes_to_others_of_that_memory_remain(ranks: Any) -> None:
    ranks(2, beside_others)


@on_ranks
def both_written(apart: bool) -> str:
    """Write two views: at different positions, or differently at one."""
    ids, inputs, labels = views()
    floats = torch.full((2, 8), torch.nan)
    told = ""
    try:
        with block(inputs, labels, floats[:, :4], floats[:, 4:]) as handler:
            at = handler.position_ids(8)
            if apart:
                inputs[:, at == 0] = -1
                labels[:, at == 7] = -2
            else:
                inputs.add_(1)
                labels.add_(2)
    except RuntimeError as error:
        told = str(error)
    want = views()[0]
    if apart:
        want[:, 0], want[:, 8] = -1, -2
    assert torch.equal(ids, want), ids
    return told


def test_two_written_views_come_back_together_or_not_at_all(ranks: Any) -> None:
    assert ranks(2, both_written, True) == ["", ""]
    for told in ranks(2, both_written, False):
        assert "share memory, and were written" in told and "pass clones" in told


class Table(nn.Module):
    """Attention over tokens with positions of a table, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)
        self.register_buffer("table", torch.arange(16, dtype=torch.float64).view(16, 1).expand(16, 8).clone())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y[:, None] for y in self.qkv(x + self.table).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)


@on_ranks
def under_ddp(broadcasts: bool, of_cp: bool) -> tuple[str, float]:
    """The error of a forward in a block whose buffer is one of a model under DDP over the cp ranks, or over others; and
    how much the table has changed."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = Table()
    wrapped = DistributedDataParallel(
        model, process_group=world["cp" if of_cp else "dp"].get_group(), broadcast_buffers=broadcasts
    )
    x, before = torch.ones(1, 16, 8, dtype=torch.float64), model.table.clone()

    def forward() -> None:
        with context_parallel(world["cp"], buffers=[x, model.table], buffer_seq_dims=[1, 0]):
            wrapped(x)

    return error_of(forward), (model.table - before).abs().max().item()


def test_ddp_that_broadcasts_a_buffer_of_a_block_is_refused(ranks: Any) -> None:
    """Rank 0's positions were those of all ranks, and remained in the table: weights were 57 % off."""
    for error, changed in ranks(4, under_ddp, True, True):
        assert error.startswith("ValueError: DistributedDataParallel broadcasts the buffers") and "'table'" in error
        assert changed == 0
    for options in ((False, True), (True, False)):
        assert ranks(4, under_ddp, *options) == [("", 0.0)] * 4

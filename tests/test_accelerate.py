"""accelerate and transformers.Trainer under context parallelism: losses and gradients of one device."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hyper_cp import ContextParallel
from tests.hf_models import make, tokens

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


def accelerator_of(**sizes: int) -> Any:
    """An accelerator on the ranks of this job; with no sizes the environment says them."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hyper_cp.integrations.accelerate import ParallelismConfig

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))


def rows(dp: int, padded: bool) -> list[dict[str, Tensor]]:
    """One sequence per data-parallel rank, padded at the left."""
    found = []
    for row in range(dp):
        ids, mask = tokens(24 + row, 1)[:, :24], torch.ones(1, 24, dtype=torch.int64)
        mask[:, : 5 * padded + row] = 0
        labels = ids.masked_fill(mask == 0, -100)
        shift = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "shift_labels": shift})
    return found


def one_device(model: Any, batches: list[dict[str, Tensor]], count: int) -> tuple[float, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    loss = sum(model(**batch, num_items_in_batch=count, use_cache=False).loss for batch in batches)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(((got[n] - w).abs().max() / w.abs().max().clamp(min=1e-3)).item() for n, w in want.items())


def accelerated(name: str, layout: str, how: str) -> float:
    """A step of dp x cp through ``maybe_context_parallel``, the ranks' loss averaged by DDP or FSDP2."""
    from hyper_cp.integrations.accelerate import enable

    world = dist.get_world_size()
    if how == "environment":
        os.environ.update(PARALLELISM_CONFIG_CP_SIZE="2", PARALLELISM_CONFIG_DP_SHARD_SIZE=str(world // 2))
    try:
        accelerator = accelerator_of(**({} if how == "environment" else {"cp_size": 2, "dp_shard_size": world // 2}))
    finally:
        for key in ("CP", "DP_SHARD"):
            os.environ.pop(f"PARALLELISM_CONFIG_{key}_SIZE", None)
    model = make(name).float()
    batches = rows(world // 2, padded=True)
    count = sum(int((b["shift_labels"] != -100).sum()) for b in batches)
    want = one_device(model, batches, count)
    if how == "fsdp":  # accelerate takes FSDP for devices only; its FSDP2 code itself runs anywhere
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = "FSDP"
    enable(accelerator, style=ContextParallel(ulysses_degree=1, kv_exchange="ring", layout=layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made, optimizer = accelerator.prepare(model, optimizer)
    samples = [{key: x[0] for key, x in batch.items()} for batch in batches]
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(samples, batch_size=1))
    (batch,) = list(loader)
    before = {key: x.clone() for key, x in batch.items()}
    kept = {batch["labels"]}
    with accelerator.maybe_context_parallel(
        buffers=list(batch.values()), buffer_seq_dims=[1] * 4, no_restore_buffers=kept
    ):
        assert batch["input_ids"].shape == (1, 12)
        loss = made(**batch, num_items_in_batch=count).loss
        accelerator.backward(loss * world)
    assert all(torch.equal(batch[key], x) for key, x in before.items() if key != "labels")
    assert batch["labels"].shape == (1, 12)
    total = loss.detach().clone()
    dist.all_reduce(total)
    grads = {}
    for key, p in accelerator.unwrap_model(made).named_parameters():
        grad = p.grad
        grads[key] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return max(abs(total.item() - want[0]), difference(grads, want[1]))


@pytest.mark.parametrize(
    ("name", "layout", "how", "world"),
    [
        ("llama", "head_tail", "ddp", 2),
        ("gemma3", "contiguous", "ddp", 4),
        ("llama", "contiguous", "environment", 4),
        ("qwen3", "head_tail", "fsdp", 4),
    ],
)
def test_accelerate(ranks: Any, name: str, layout: str, how: str, world: int) -> None:
    assert max(ranks(world, accelerated, name, layout, how)) <= 2e-5

"""Offload with torch's own tools, as docs/guide/long_sequences.md shows it: exact; saved tensors leave the device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.cli.modes import named_mode
from hyper_cp.memory import MemoryCounter
from tests.harness.attention_case import cp_mesh
from tests.harness.composition_training import CONFIG, ROWS, batch, llama
from tests.harness.ranks import on_ranks, sum_over_ranks

LENGTH = 32
MODES = [named_mode(name) for name in ("Ulysses", "all-gather, head_tail", "ring, head_tail", "needed")]
DOCS = (Path(__file__).parents[2] / "docs" / "guide" / "long_sequences.md").read_text()


class ToBytes(saved_tensors_hooks):
    """Stands for :class:`torch.autograd.graph.save_on_cpu`, which copies nothing where everything is on the CPU: saved
    tensors become bytes of Python."""

    def __init__(self, **_: Any) -> None:
        super().__init__(
            lambda x: (x.detach().contiguous().numpy().tobytes(), x.dtype, x.shape),
            lambda packed: self.unpacked(*packed),
        )

    @staticmethod
    def unpacked(stored: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        return (
            torch.frombuffer(bytearray(stored), dtype=dtype).view(shape) if stored else torch.empty(shape, dtype=dtype)
        )


def example() -> str:
    """The code of the page, for the CPU."""
    (code,) = re.findall(r"```python offload\n(.*?)```", DOCS, re.S)
    return code.replace("from torch.autograd.graph import save_on_cpu\n", "")


def prepared(mode: dict[str, Any]) -> tuple[nn.Module, ContextParallelHandler, dict[str, Tensor]]:
    """The model under a style, and this rank's share of a batch."""
    model, mesh, style = llama(), cp_mesh(), ContextParallel(seq_dim=2, head_dim=1, **mode)
    parallelize_module(model, mesh, {"layers.*.attention.inner": style})
    handler = ContextParallelHandler(mesh, style)
    whole = dict(zip(("tokens", "shift_labels"), batch(0), strict=True))
    return model, handler, handler.get_batch_on_this_cp_rank(whole)


def loss_of(model: nn.Module, handler: ContextParallelHandler, local: dict[str, Tensor]) -> Tensor:
    logits = model(local["tokens"], local["position_ids"][0])
    return handler.mean_loss(logits, local["shift_labels"], gradients="sum")


@on_ranks
def offloaded() -> list[dict[str, float]]:
    """For each mode: largest difference of gradients, and bytes kept between forward and backward, of plain training,
    of the page's example, and of the example without offload."""
    found = []
    for mode in MODES:
        grads: dict[str, list[Tensor]] = {}
        kept: dict[str, float] = {}
        for name in ("plain", "offload", "checkpoints", "save_on_cpu"):
            model, handler, local = prepared(mode)
            parameters = [*model.parameters()]
            names: dict[str, Any] = {"model": model, "save_on_cpu": ToBytes, "handler": handler, "device_type": "cuda"}
            if name == "save_on_cpu":  # torch's own; it copies, although everything is on the CPU already
                names["save_on_cpu"] = torch.autograd.graph.save_on_cpu
            if name == "checkpoints":
                names["save_on_cpu"] = lambda **_: saved_tensors_hooks(lambda x: x, lambda x: x)
            if name != "plain":
                exec(example(), names)
            with MemoryCounter() as memory:
                if name == "plain":
                    loss = loss_of(model, handler, local)
                else:
                    loss = names["loss_of"](local["tokens"], local["position_ids"][0], local["shift_labels"])
                kept[name] = memory.alive["cpu"]
            loss.backward()
            grads[name] = sum_over_ranks(*(p.grad for p in parameters))
        for name in ("offload", "checkpoints", "save_on_cpu"):
            pairs = zip(grads[name], grads["plain"], strict=True)
            kept[f"{name}, error"] = max((a - b).abs().max().item() / b.abs().max().item() for a, b in pairs)
        found.append(kept)
    return found


@pytest.mark.slow
def test_the_example_is_exact_and_keeps_what_it_says(ranks: Any) -> None:
    tokens = ROWS * LENGTH // 2
    inputs = CONFIG.layers * tokens * CONFIG.dim * 4
    attention = CONFIG.layers * tokens * CONFIG.heads * (CONFIG.head_dim + 1) * 4  # out and lse, which SAVE_LIST keeps
    for found in ranks(2, offloaded):
        for kept, mode in zip(found, MODES, strict=True):
            assert max(kept[f"{name}, error"] for name in ("offload", "checkpoints", "save_on_cpu")) <= 1e-5
            assert kept["checkpoints"] - kept["offload"] >= inputs  # inputs of blocks have left
            received = 3 * attention if mode["ulysses_degree"] is None else 0  # q, k, v, out before and after exchange
            assert kept["offload"] <= attention + received + tokens * (CONFIG.dim + 8) * 4 + 4096
            assert kept["plain"] >= 6 * kept["offload"] or received


@on_ranks
def all_of_it() -> list[tuple[float, float]]:
    """The same without checkpoints: bytes kept on the device in each mode, and the error of gradients."""
    found = []
    for mode in MODES:
        grads = []
        for offload in (False, True):
            model, handler, local = prepared(mode)
            with MemoryCounter() as memory, ToBytes() if offload else saved_tensors_hooks(lambda x: x, lambda x: x):
                loss = loss_of(model, handler, local)
            loss.backward()
            grads.append(sum_over_ranks(*(p.grad for p in model.parameters())))
        error = max((a - b).abs().max().item() for a, b in zip(*grads, strict=True))
        found.append((memory.alive["cpu"], error))
    return found


def test_everything_that_is_saved_passes_through_the_hooks(ranks: Any) -> None:
    """Also q, k, v, the output and the log-sum-exp of attention, in every mode. What is left is the loss."""
    for found in ranks(2, all_of_it):
        for kept, error in found:
            assert kept <= 1024 and error == 0

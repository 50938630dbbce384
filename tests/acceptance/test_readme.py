"""The README's usage example, run as it stands on four ranks against one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_cp.cli.demo_model import Llama, LlamaConfig
from tests.harness.ranks import on_ranks

README = Path(__file__).parents[2] / "README.md"


@on_ranks
def run_example(code: str) -> tuple[float, float, float, int]:
    """Loss on one device, loss of the example, largest relative error of gradients summed over the ranks."""
    torch.manual_seed(0)
    model, whole = (Llama(LlamaConfig(dim=32, layers=1)) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    tokens = torch.randint(256, (2, 1021))  # does not split over the ranks
    want = F.cross_entropy(whole(tokens, torch.arange(1021))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    want.backward()
    names: dict[str, Any] = {"model": model, "tokens": tokens, "labels": tokens}
    exec(code, names)
    names["loss"].backward()
    error = 0.0
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        dist.all_reduce(p.grad)
        error = max(error, ((p.grad - q.grad).abs().max() / q.grad.abs().max()).item())
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    return want.item(), names["loss"].item(), error, len(lines)


def test_usage_example(ranks: Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    for whole, sharded, error, lines in ranks(4, run_example, code):
        assert abs(whole - sharded) < 1e-5 and error < 1e-5
        assert lines <= 10, "a ten-line example"

"""The README's usage example, run as it stands on four ranks against one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hyper_cp.demo_model import Llama, LlamaConfig

README = Path(__file__).parent.parent / "README.md"


def run_example(code: str) -> tuple[float, float, int]:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(dim=32, layers=1))
    tokens, labels = torch.randint(256, (2, 2, 4096)).unbind(0)
    with torch.no_grad():
        whole = F.cross_entropy(model(tokens, torch.arange(4096)).flatten(0, 1), labels.flatten()).item()
    names: dict[str, Any] = {"model": model, "tokens": tokens, "labels": labels}
    exec(code, names)
    loss = names["loss"].detach().clone()
    dist.all_reduce(loss)
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    return whole, loss.item(), len(lines)


def test_usage_example(ranks: Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    for whole, sharded, lines in ranks(4, run_example, code):
        assert abs(whole - sharded) < 1e-5
        assert lines <= 10, "a ten-line example"

"""The usage example of the quickstart, as it stands on four ranks, and examples/train.py, both beside one device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_cp.cli.demo_model import Llama, LlamaConfig
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks
from tests.harness.recipes import ROOT, torchrun

QUICKSTART, README = ROOT / "docs" / "start" / "quickstart.md", ROOT / "README.md"
PROGRAM = ROOT / "examples" / "train.py"


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
    grads = sum_over_ranks(*(p.grad for p in model.parameters()))  # type: ignore[misc]
    error = max(relative_error(a, p.grad) for a, p in zip(grads, whole.parameters(), strict=True))  # type: ignore[arg-type]
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    return want.item(), names["loss"].item(), error, len(lines)


@pytest.mark.slow
def test_usage_example(ranks: Any) -> None:
    code = re.findall(r"```python\n(.*?)```", QUICKSTART.read_text(), re.S)[0]
    for whole, sharded, error, lines in ranks(4, run_example, code):
        assert abs(whole - sharded) < 1e-5 and error < 1e-5
        assert lines <= 11, "a short example"


# --------------------------------------------------------------------------- the complete program


@on_ranks
def run_program(code: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of the program, in the pool's process group, and the weights after its last step."""
    printed: list[Any] = []
    names: dict[str, Any] = {"print": lambda *values: printed.append(values[-1]), "__name__": "train"}
    code = re.sub(r"^dist\.(init|destroy)_process_group.*$", "", code, flags=re.M)
    exec(compile(code, "train.py", "exec"), names)
    return printed, [p.detach() for p in names["model"].parameters()]


@pytest.mark.slow
def test_the_program_has_the_losses_and_weights_of_one_device(ranks: Any) -> None:
    ((losses, weights),) = ranks(1, run_program, PROGRAM.read_text())
    assert len(losses) >= 10 and losses[-1] < losses[0] - 0.5
    for rank, (found, mine) in enumerate(ranks(2, run_program, PROGRAM.read_text())):
        assert rank or found == pytest.approx(losses, abs=1e-4)
        assert max((a - b).abs().max().item() for a, b in zip(mine, weights, strict=True)) < 1e-3


@pytest.mark.slow
def test_the_program_runs_as_it_says() -> None:
    (line,) = re.findall(r"torchrun (.*) examples/train.py", PROGRAM.read_text())
    assert "loss" in torchrun([*line.split(), str(PROGRAM)], ROOT)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120

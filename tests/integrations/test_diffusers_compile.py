"""Prepared transformers of diffusers in torch.compile: one graph for equal blocks, without breaks, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hyper_cp import ContextParallel
from tests.harness.attention_case import cp_mesh
from tests.harness.diffusion import tiny_transformer
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

pytest.importorskip("diffusers")


@on_ranks
def compiled(
    name: str, changes: dict[str, Any], mode: dict[str, Any], backend: str, whole: bool
) -> tuple[float, int, int]:
    """The largest error against the model that is not prepared, the number of graphs, and of further ones in a second
    step. A function may have four graphs: the first block has one of its own, and there may be two lists of blocks."""
    from torch._dynamo.utils import counters

    from hyper_cp.integrations.diffusers import prepare_transformer

    (alone, inputs), (model, _) = tiny_transformer(name, changes), tiny_transformer(name, changes)
    prepare_transformer(model, cp_mesh(), style=ContextParallel(**mode), gradients="sum")

    def step(made: Any) -> tuple[Tensor, Tensor]:
        made.zero_grad()
        output = made(**inputs, return_dict=False)[0]
        output.square().mean().backward()
        found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in made.parameters()])
        return output.detach(), found

    want, expected = step(alone)
    counters.clear()
    compiling: Any = model.compile if whole else model.compile_repeated_blocks
    compiling(backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        output, grads = step(model)
        graphs = counters["stats"]["unique_graphs"]
        step(model)
    assert not counters["graph_break"], counters["graph_break"]
    errors = relative_error(output, want), relative_error(sum_over_ranks(grads)[0], expected)
    return max(errors), graphs, counters["stats"]["unique_graphs"] - graphs


TWO_LISTS = {"num_layers": 2, "num_single_layers": 1}
RING: dict[str, Any] = {"ulysses_degree": 1, "kv_exchange": "ring"}
CASES = {
    "blocks of Flux": ("FluxTransformer2DModel", TWO_LISTS, RING, "eager", False),
    "Wan": ("WanTransformer3DModel", {"num_layers": 1}, {"ulysses_degree": None}, "aot_eager", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled(ranks: Any, case: str) -> None:
    for error, graphs, more in ranks(2, compiled, *CASES[case], timeout=280):
        assert error <= 5e-6  # norms upcast to fp32
        assert 0 < graphs <= 12 and more == 0, (graphs, more)

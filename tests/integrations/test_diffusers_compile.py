"""Prepared transformers of diffusers in torch.compile: one graph for equal blocks, without breaks, and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyper_cp import ContextParallel
from tests.harness.attention_case import cp_mesh
from tests.harness.diffusion import tiny_transformer
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

pytest.importorskip("diffusers")


@on_ranks
def compiled(name: str, changes: dict[str, Any], mode: dict[str, Any], whole: bool) -> tuple[float, list[int], int]:
    """The largest error against the model that is not prepared, how often each kind of block was compiled, and the
    number of further graphs of a second step."""
    from torch._dynamo.utils import counters

    from hyper_cp.integrations.diffusers import prepare_transformer

    (alone, inputs), (model, _) = tiny_transformer(name, changes), tiny_transformer(name, changes)
    prepare_transformer(model, cp_mesh(), style=ContextParallel(**mode), gradients="sum")

    def step(made: Any) -> tuple[Tensor, Tensor, Tensor]:
        made.zero_grad()
        image = inputs["hidden_states"].clone().requires_grad_()
        output = made(**{**inputs, "hidden_states": image}, return_dict=False)[0]
        output.square().mean().backward()
        found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in made.parameters()])
        return output.detach(), image.grad, found

    want, of_image, expected = step(alone)
    counters.clear()
    compiling: Any = model.compile if whole else model.compile_repeated_blocks
    compiling(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        output, of_share, grads = step(model)
        graphs = counters["stats"]["unique_graphs"]
        step(model)
    assert not counters["graph_break"], counters["graph_break"]
    assert graphs > 0
    codes = {type(block).forward.__code__ for x in model.children() if isinstance(x, nn.ModuleList) for block in x}
    blocks = [len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)) for code in codes]
    errors = relative_error(output, want), relative_error(of_share, of_image)
    errors = *errors, relative_error(sum_over_ranks(grads)[0], expected)
    return max(errors), blocks, counters["stats"]["unique_graphs"] - graphs


RING: dict[str, Any] = {"ulysses_degree": 1, "kv_exchange": "ring"}
CASES = {
    "blocks of Flux": (1, "FluxTransformer2DModel", {"num_layers": 0, "num_single_layers": 4}, RING, False),
    "Wan": (2, "WanTransformer3DModel", {"num_layers": 1}, {"ulysses_degree": None}, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled(ranks: Any, case: str) -> None:
    """The first of four blocks splits the sequence, and has a graph of its own; all others share one."""
    world, *given = CASES[case]
    for error, blocks, more in ranks(world, compiled, *given, timeout=280):
        assert error <= 5e-6  # norms upcast to fp32
        assert max(blocks) <= 2 and more == 0, (blocks, more)

"""A style applied to a compiled module raises, since the compiled graph has no hooks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules
from hyper_cp.cli.demo_model import Llama, LlamaConfig
from tests.harness import modules
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import on_ranks

PLAN = "layers.*.attention.inner"


def llama(layers: int = 3) -> Llama:
    return Llama(LlamaConfig(dim=16, layers=layers, heads=2, kv_heads=2, hidden=16))


def apply(model: nn.Module, key: str = PLAN) -> nn.Module:
    return parallelize_module(model, cp_mesh(), {key: ContextParallel(seq_dim=2, head_dim=1)})


def wrapped_elsewhere(model: Any, fullgraph: bool = False) -> Any:
    kept = torch.compile(model, backend="eager", fullgraph=fullgraph)
    kept(torch.zeros(1, 8, dtype=torch.int64), torch.arange(8))
    return kept


def block_wrapped(model: Any) -> None:
    model.layers[1] = torch.compile(model.layers[1], backend="eager")


def the_module_itself(model: Any) -> None:
    model.layers[0].attention.inner = torch.compile(model.layers[0].attention.inner, backend="eager")


def without_a_plan(model: Any) -> None:
    kept = wrapped_elsewhere(model)
    ContextParallel()._apply(kept._orig_mod.layers[0].attention.inner, cp_mesh())


SLOW = ("in one graph", "without a plan")
COMPILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "wrapped elsewhere": (wrapped_elsewhere, PLAN),
    "in one graph": (lambda model: wrapped_elsewhere(model, fullgraph=True), PLAN),
    "in place": (lambda model: model.compile(backend="eager"), PLAN),
    "a block in place": (lambda model: model.layers[2].compile(backend="eager"), PLAN),
    "a block, wrapped": (block_wrapped, "layers.1._orig_mod.attention.inner"),
    "the module itself": (the_module_itself, PLAN),
    "without a plan": (without_a_plan, PLAN),
}
"""Ways to compile a model, and the key of the plan that comes too late."""


@on_ranks
def late(way: str) -> None:
    model = llama(layers=1 if way in ("wrapped elsewhere", "in one graph", "without a plan") else 3)
    compile_it, key = COMPILE[way]
    kept = compile_it(model)  # what is gone is not found
    apply(model, key)
    del kept


@pytest.mark.parametrize("way", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in COMPILE])
def test_a_late_style_is_refused(ranks: Any, way: str) -> None:
    ranks.raises(1, "RuntimeError", "compiled already. .* Apply the plan first, then torch.compile", late, way)


@on_ranks
@pytest.mark.filterwarnings("ignore")
def names_of_wrappers() -> None:
    model = torch.compile(llama(), backend="eager")
    apply(model)  # type: ignore[arg-type]
    styled_modules(model, at_least=1)  # type: ignore[arg-type]


def test_names_hidden_by_a_wrapper(ranks: Any) -> None:
    words = "applied to 0 modules of .*Wrappers are part of the names: apply the plan before torch.compile"
    ranks.raises(2, "ValueError", words, names_of_wrappers)


@on_ranks
def in_order() -> list[int]:
    """Styles of other models than the compiled ones, and of models whose compiled twin is gone."""
    styled = []
    for _ in range(2):
        model = llama()
        styled.append(len(styled_modules(apply(model))))
        compiled = torch.compile(model, backend="eager")
        styled.append(len(styled_modules(compiled)))  # type: ignore[arg-type]
    plain = llama()
    twin = torch.compile(plain, backend="eager")
    del twin
    gc.collect()
    styled.append(len(styled_modules(apply(plain))))
    return styled


def test_other_models_may_be_compiled(ranks: Any) -> None:
    assert ranks(2, in_order) == [[3] * 5] * 2


@on_ranks
def traced_afterwards() -> float:
    """A style on what another object compiles when it runs for the first time."""
    model = llama(layers=1)
    tokens, positions = torch.arange(8)[None], torch.arange(8)
    want = model(tokens, positions)
    kept = torch.compile(model, fullgraph=True, backend="eager")
    handler = ContextParallelHandler(cp_mesh(), ContextParallel(seq_dim=2, head_dim=1))
    apply(model)
    found = handler.combine(kept(handler.dispatch(tokens), handler.position_ids(8)), 1)
    return (found - want).abs().max().item()


@pytest.mark.slow
def test_what_is_traced_afterwards_sees_the_style(ranks: Any) -> None:
    assert max(ranks(2, traced_afterwards)) < 1e-5


@on_ranks
def one_search_per_plan() -> list[int]:
    """Count the searches of all objects for a plan of three layers: before anything is compiled, and twice after."""
    counts, original, seen = [], gc.get_objects, []

    def counting(*args: Any) -> Any:
        seen.append(1)
        return original(*args)

    gc.get_objects = counting
    try:
        for compiles in (False, True, False):
            if compiles:
                torch.compile(nn.Identity(), backend="eager")(torch.ones(1))
            seen.clear()
            apply(llama())
            counts.append(len(seen))
    finally:
        gc.get_objects = original
    return counts


def test_a_plan_is_searched_for_once(ranks: Any) -> None:
    for before, first, second in ranks(2, one_search_per_plan):
        assert before == 0 and first == 1 and second <= 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = modules.BNSD(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)  # type: ignore[no-any-return]


@on_ranks
def beside_an_unstyled_module(first: bool, in_thread: bool) -> float:
    """The error of a styled module in compiled code in which a module of its class has run without a style. ``first``:
    before any style of the process, when Dynamo did not guard on hooks. ``in_thread``: both run in another thread."""
    handler, whole = ContextParallelHandler(cp_mesh(), "contiguous"), torch.randn(1, 2, 8, 4, dtype=torch.float64)
    share = handler.dispatch(whole, 2)
    plain, styled = Block(), Block()
    torch.compiler.reset()
    if first:
        torch._dynamo.config._config["skip_nnmodule_hook_guards"].default = True
        torch._dynamo.config.skip_nnmodule_hook_guards = True
        plain.compile(backend="eager")
        plain(share)
    parallelize_module(styled, cp_mesh(), {"inner": ContextParallel(2, 1)})
    assert not torch._dynamo.config.skip_nnmodule_hook_guards
    outs = []

    def run() -> None:
        for module in (plain, styled):
            module.compile(backend="eager")
            outs.append(module(share))

    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    return relative_error(handler.combine(outs[1], 2), plain_attention(whole, whole, whole, is_causal=True))


@pytest.mark.parametrize("first, in_thread", [(False, False), (True, False), (True, True)])
def test_a_styled_module_never_runs_the_graph_of_an_unstyled_one(ranks: Any, first: bool, in_thread: bool) -> None:
    assert max(ranks(2, beside_an_unstyled_module, first, in_thread)) < 1e-12

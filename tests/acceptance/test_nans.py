"""A NaN stays where the mathematics puts it, and HYPER_CP_DEBUG=nan names the first rank, module and step with one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_cp import ContextParallelHandler
from hyper_cp.mesh import nans
from hyper_cp.mesh.cp_mesh import whole_view
from hyper_cp.ops import attention
from tests.harness.attention_case import cp_mesh, inputs
from tests.harness.ranks import error_of, on_ranks
from tests.harness.small_training import HEADS, LENGTH, MODES, Training, close, one_device


@on_ranks
def one_nan(modes: list[dict[str, Any]], at: int, documents: list[int]) -> list[str]:
    """The rows of outputs and gradients, in each mode, where a NaN at one position is missing or does harm."""
    mesh, wrong = cp_mesh(), []
    for mode in modes:
        handler = ContextParallelHandler(mesh, mode.get("layout", "contiguous"))
        rows = []
        for bad in (False, True):
            q, k, v, dout = inputs(1, HEADS, HEADS, LENGTH, 8, 8, torch.float64)
            for x in (q, k, v):
                x[:, :, at] = torch.nan if bad else x[:, :, at]
            local = [handler.dispatch(x, 2).requires_grad_() for x in (q, k, v)]
            out = attention(*local, mesh=mesh, is_causal=True, documents=documents, **mode)
            grads = torch.autograd.grad(out, local, handler.dispatch(dout, 2))
            rows.append([handler.combine(x.detach(), 2) for x in (out, *grads)])
        start, stop = next((a, b) for a, b in itertools.pairwise(documents) if a <= at < b)
        for i, (name, (clean, found)) in enumerate(
            zip(("out", "dq", "dk", "dv"), zip(*rows, strict=True), strict=True)
        ):
            first = at if i < 2 else start  # every key before it gets a gradient from a row that is NaN
            reached = torch.zeros(LENGTH, dtype=torch.bool)
            reached[first:stop] = True
            if not found[:, :, reached].isnan().all():
                wrong.append(f"{mode}: {name} is not NaN in all of rows {first} to {stop}")
            if not torch.equal(found[:, :, ~reached], clean[:, :, ~reached]):
                wrong.append(f"{mode}: {name} differs outside of rows {first} to {stop}")
    return wrong


def test_nan_reaches_the_rows_that_see_it_and_no_others(ranks: Any) -> None:
    """Position 24 begins a chunk in every layout here, so no kernel multiplies it by a weight of zero."""
    modes = [{k: v for k, v in mode.items() if k != "qkv_indices"} for mode in MODES.values()]
    cut = [mode for mode in modes if mode["ulysses_degree"] == 1]
    assert not any(ranks(4, one_nan, cut, 24, [0, 16, LENGTH]))
    # With whole sequences on a rank it begins a document.
    assert not any(ranks(4, one_nan, modes, 16, [0, 16, LENGTH]))


@on_ranks
def find_nans(step: str) -> list[Any]:
    """The error of each mode where one rank makes a NaN before the second module, and the loss of the next step."""
    nans.watch.on, found = True, []
    try:
        for name in ("ring", "Ulysses at the boundary", "hybrid"):
            training = Training(MODES[name])
            training.step(0)
            block = training.model.layers[1 if step == "forward" else 2]
            spoil = torch.nan if dist.get_rank() == 2 else 1.0
            if step == "forward":
                handle = block.register_forward_pre_hook(lambda _, args, s=spoil: (args[0] * s,))
            else:  # the gradient that goes on to the block before
                handle = block.register_full_backward_hook(lambda _, grads, __, s=spoil: (grads[0] * s,))
            text = error_of(lambda t=training: t.step(1))
            handle.remove()
            found.append((text, training.step(1)))
    finally:
        nans.watch.on = False
    return found


@pytest.mark.slow
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_the_first_nan_is_named(ranks: Any, step: str) -> None:
    results, want = ranks(4, find_nans, step), one_device(2)
    name = "query, key, value" if step == "forward" else "the gradient of the output"
    for mine in results:
        for (text, loss), (first, _) in zip(mine, results[0], strict=True):
            assert text == first and text.startswith("FloatingPointError: module 'layers.1.inner' (Inner): "), text
            assert f" in {step} on the cp mesh of 4 ranks" in text and "in batch 2 of this rank: NaN in " in text
            assert "of rank 2 of the mesh. It arises" in text and "the last check without one was that of" in text
            assert f"NaN in {name} of" in text or "NaN in an exchanged tensor of" in text, text
            assert close([loss], want[1:])


@on_ranks
def compiled_nan() -> str:
    nans.watch.on = True
    try:
        x = torch.randn(1, 2, 8, 4) * (torch.nan if dist.get_rank() else 1)
        call = torch.compile(attention, backend="aot_eager", fullgraph=True)
        return error_of(lambda: call(x, x, x, mesh=whole_view(cp_mesh())))
    finally:
        nans.watch.on = False


def test_nans_in_compiled_graphs_are_found_without_the_module(ranks: Any) -> None:
    for text in ranks(2, compiled_nan):
        assert text.startswith("FloatingPointError: attention in forward on the cp mesh of 2 ranks"), text
        assert "NaN in query, key, value of rank 1 of the mesh" in text


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_CP_DEBUG", "inf")
    with pytest.raises(ValueError, match=r"HYPER_CP_DEBUG='inf' is unknown.*HYPER_CP_DEBUG=nan"):
        type(nans.watch)()

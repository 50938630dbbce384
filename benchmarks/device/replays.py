"""Kernels in CUDA graphs, and the op in compiled functions: a replay must do what the next call asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hyper_cp.cli.diagnosis.findings import NAMES, Finding, Results, answer, check
from hyper_cp.cli.diagnosis.tiles import CAUSAL, FULL, Tile
from hyper_cp.mesh import cp_mesh
from hyper_cp.mesh.comm import Axis
from hyper_cp.ops import engine, kernels
from hyper_cp.ops.config import Operands
from hyper_cp.schedule.documents import documents_table

from .ranks import settings_of
from .tiles import refusal

TILE = Tile(128, 128, CAUSAL, heads=(4, 2))
DOCUMENTS = [(0, 128), (0, 40, 128), (0, 63, 64, 128)]


def captured(kernel: Any, tile: Tile, device: str, dtype: torch.dtype) -> Results:
    """Capture forward and backward of a tile in a CUDA graph, and replay it with other values. Empty without graphs."""
    module = torch.get_device_module(device)
    if not hasattr(module, "CUDAGraph"):
        return []
    q, k, v, dout = static = tile.tensors(device, dtype)
    want = answer(static, tile.visible(), tile.scale)
    out, lse = want[0].to(q), want[1].to(q.device, torch.float32)

    def step() -> tuple[Tensor, ...]:
        given = tile.inputs(q, k, v)
        return (*kernel.forward(given), *kernel.backward(given, dout, out, lse))

    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        step()  # what is made once (plans, workspaces) is made outside of the graph
    module.current_stream().wait_stream(side)
    graph = module.CUDAGraph()
    with module.graph(graph):
        results = step()
    for x, other in zip(static, tile.tensors(device, dtype, seed=1), strict=True):
        x.copy_(other)
    want = answer(static, tile.visible(), tile.scale)
    out.copy_(want[0])
    lse.copy_(want[1])
    graph.replay()
    module.synchronize()
    return list(zip(NAMES, results, want, strict=True))


def check_graphs(device: str, dtype: torch.dtype) -> Iterator[Finding]:
    """Every kernel that is captured, on tiles whose kernels are the same in every replay."""
    for name, kernel in kernels.available(torch.device(device).type, selected=False).items():
        for tile in (TILE, replace(TILE, band=FULL)):
            what, permitted = f"CUDA graph: {name} {dtype} {tile}", refusal(name, dtype, tile.kind)
            yield check("replays", what, dtype, partial(captured, kernel, tile, device, dtype), permitted)


def compiled(device: str, dtype: torch.dtype, backend: str, options: dict[str, Any]) -> Results:
    """Compile the op once and call it with one table of documents after another: with each, the results of that one."""
    cp = cp_mesh.register(cp_mesh.CPMesh("alone", Axis.alone(), Axis.alone(), (Axis.alone(),), cp_mesh.BatchState()))
    tile = replace(TILE, heads=(4, 4))
    q, k, v, dout = tile.tensors(device, dtype)
    mode = {"layout": "contiguous"}

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        settings = settings_of(cp, mode, kernels.choose(q, k, v, True))
        given = Operands(documents=documents)
        out: Tensor = engine.attention_op(q, k, v, *settings.arguments(given, TILE.scale))[0]
        return out * 1.0

    run = torch.compile(attend, fullgraph=True, backend=backend, **options)
    results: list[tuple[str, Tensor, Tensor]] = []
    for ends in DOCUMENTS * 2:
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = run(*inputs, documents_table(list(ends)))
        found = [out.detach().clone(), *torch.autograd.grad(out, inputs, dout)]
        parts = tuple(((a, b), (a, b)) for a, b in pairwise(ends))
        want = answer([*inputs, dout], replace(tile, parts=parts).visible(), tile.scale)
        results += zip((NAMES[0], *NAMES[2:]), [x.clone() for x in found], [want[0], *want[2:]], strict=True)
    return results


def check_compiled(device: str, dtype: torch.dtype, backends: Sequence[str]) -> Iterator[Finding]:
    """The op in compiled functions, with and without CUDA graphs."""
    for name in backends:
        backend, *mode = name.split("/")
        options = {"mode": mode[0]} if mode else {}
        yield check(
            "replays", f"compiled by {name}, {dtype}", dtype, partial(compiled, device, dtype, backend, options)
        )

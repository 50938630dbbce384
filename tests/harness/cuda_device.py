"""A GPU for processes that have none: the device of :mod:`npu_device`, with the kernels, events and graphs of CUDA.

PyTorch knows one device that is made in Python, whose type stays "npu": what a program asks of ``"cuda"`` by name, such
as its default compilers, has to be given. Operators are those of the stand-in for an H100, partials are merged in
Triton's interpreter, transfers are those of :class:`~hyper_cp.mesh.comm.Axis` itself, as on NCCL, over gloo.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hyper_cp.mesh import comm
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import TileInputs, cuda, fused
from hyper_cp.ops.kernels.scores import flex_kernel
from tests.harness import npu_device
from tests.harness.cuda_standin import Card, Operators
from tests.harness.flex_masks import backward_on_the_cpu

H100 = Card(9)
NAME = "a mock of an H100"


def outside(result: Any) -> Any:
    """Results of the CPU as tensors of the device."""
    return tree_map(lambda x: npu_device.OnNPU(x) if isinstance(x, Tensor) else x, result)


class OnDevice:
    """The stand-in's operators, for tensors of the device only."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(self.operators, name)

        def run(*args: Any, **options: Any) -> Any:
            given = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
            if not all(isinstance(x, npu_device.OnNPU) for x in given):
                raise RuntimeError(f"{name}: expected all tensors to be on the device")
            inside = tree_map(npu_device.inside_of, (args, options))
            return record(lambda *x, **y: outside(operator(*x, **y)), *inside)

        return run


class Flex:
    """FlexAttention's math on the tensors inside."""

    name = flex_kernel.KERNEL.name

    def __init__(self) -> None:
        self.kernel = flex_kernel.FlexKernel(compiled=False)

    def _run(self, function: Callable[..., Any], tile: TileInputs, *of_rows: Tensor) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, *of_rows: Tensor) -> Any:
            with backward_on_the_cpu():
                return outside(function(replace(tile, q=q, k=k, v=v), *of_rows))

        return record(run, tree_map(npu_device.inside_of, (tile.q, tile.k, tile.v, *of_rows)), {})

    def forward(self, tile: TileInputs) -> Any:
        return self._run(self.kernel.forward, tile)

    def backward(self, tile: TileInputs, *of_rows: Tensor) -> Any:
        return self._run(self.kernel.backward, tile, *of_rows)


# --------------------------------------------------------------------------- graphs


class Graph:
    """The operators that ran while it captured. A replay runs them again, from and into the same memory."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.ran: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def replay(self) -> None:
        for run, args, options, results in self.ran:
            for x, y in zip(tree_leaves(results), tree_leaves(run(*args, **options)), strict=True):
                if isinstance(x, Tensor) and x.shape == y.shape:  # not where memory has grown since, as by `out=`
                    npu_device.inside_of(x).copy_(npu_device.inside_of(y))


def record(run: Callable[..., Any], args: Any, options: Any) -> Any:
    """Run an operator on tensors inside, for a graph that captures as well."""
    results = run(*args, **options)
    if Graph.capturing is not None:
        Graph.capturing.ran.append((run, args, options, results))
    return results


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    Graph.capturing = graph
    try:
        yield
    finally:
        Graph.capturing = None


# --------------------------------------------------------------------------- the device


_one_launch = threading.Lock()


def launched(launch: Callable[..., None], *tensors: Tensor) -> bool:
    """A kernel between tiles in Triton's interpreter, which runs one at a time."""
    with _one_launch:
        record(launch, [npu_device.inside_of(x) for x in tensors], {})
    return True


@contextmanager
def installed(triton: bool = True, card: Card = H100) -> Iterator[Operators]:
    """The device is this card, in a process with the device of :mod:`npu_device`.

    Args:
        triton: False if partials are merged without Triton, whose interpreter is slow.
    """
    stream = mock.Mock()
    made: dict[str, Any] = {
        "CUDAGraph": Graph,
        "graph": capture,
        "Stream": lambda: stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda device=None: stream,
        "get_device_name": lambda: NAME,
        "clock_rate": lambda: 1980,
    }
    entries = OrderedDict(x for x in kernels._by_device["cuda"].items() if not (x[1].scores or x[1].selected))
    operators = Operators(card=card)
    with ExitStack() as stack:
        for name, what in made.items():
            stack.enter_context(mock.patch.object(npu_device.MODULE, name, what, create=True))
        enter = stack.enter_context
        enter(mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
        enter(mock.patch.dict(kernels._by_device, {"npu": entries}))
        enter(kernels.register(Flex(), "npu", scores=True))
        enter(card.installed())
        enter(operators.installed())
        enter(mock.patch.object(cuda, "_aten", OnDevice(operators)))
        enter(mock.patch.object(fused, "_tried", launched if triton else lambda *_: False))
        enter(mock.patch.object(npu_device, "ran", record))
        enter(mock.patch.dict(comm.BACKENDS, {"gloo": comm.Axis}))
        enter(mock.patch.object(comm.dist, "batch_isend_irecv", npu_device.send_and_receive))
        fused.compiled.cache_clear()
        yield operators
    fused.compiled.cache_clear()

"""The checks of recurrent layers and convolutions, before any communication."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...mesh.cp_mesh import CPMesh
from ...schedule import documents as packed
from ...schedule import layout as layouts
from ..checks import DTYPES, refuse_forward_mode


def check_tensor(name: str, argument: str, x: Tensor, ndim: int, form: str) -> None:
    """Raise unless an argument is a local floating-point tensor with so many dimensions."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        given = f"DTensor placed {x.placements}" if isinstance(x, DTensor) else type(x).__name__
        raise TypeError(f"{name}: {argument} is a {given}. It must be a local tensor {form}. Pass x.to_local()")
    if x.ndim != ndim or 0 in x.shape:
        raise ValueError(
            f"{name}: {argument} has shape {tuple(x.shape)}. It must be {form}, and not empty. Reshape it so"
        )
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{name}: {argument} has dtype {x.dtype}. It must be float16, bfloat16, float32 or float64. Convert it"
        )


def agree(name: str, cp: CPMesh, layout: str, documents: Tensor | None, *tensors: Tensor | None) -> None:
    """Raise ``ValueError`` on every rank if the ranks call with other shapes, layouts or documents."""
    refuse_forward_mode(name, *(x for x in tensors if x is not None))
    if cp.agreement is None or torch.compiler.is_compiling():
        return
    signature = (
        ("function", name),
        ("shapes", tuple(None if x is None else tuple(x.shape) for x in tensors)),
        ("dtypes", tuple(None if x is None else str(x.dtype) for x in tensors)),
        ("layout", layout),
        ("ulysses_degree", cp.ulysses.size),
    )
    cp.agree("call", signature, name)
    table = packed.read(documents)
    cp.agree("documents", (("documents", None if table is None else table.digest),), name)


def check_layout_of(name: str, cp: CPMesh, layout: str, documents: Tensor | None, batch: int, length: int) -> None:
    """Raise ``ValueError`` unless a share of ``length`` positions, in ``batch`` rows, fits the layout and documents."""
    layouts.check_layout(layout)
    if torch.compiler.is_compiling():
        return
    table = packed.read(documents)
    try:
        layouts.check_length(layout, cp.size, length * cp.size, "sequence length")
        if table is not None:
            table.check(batch, length * cp.size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if table is None and layouts.by_documents(layout) and cp.size > 1:
        raise ValueError(
            f"{name}: layout={layout!r} places tokens by document, but no documents are given. Pass documents= "
            "([0, S] for one document)"
        )

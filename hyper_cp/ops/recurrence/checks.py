"""The checks of recurrent layers and convolutions, before any communication."""

from __future__ import annotations

from torch import Tensor

from ..._torch.compiling import is_compiling
from ...mesh.cp_mesh import CPMesh
from ...schedule import documents as packed
from ...schedule import layout as layouts
from ..checks import check_dtype, check_local, check_places, requires_gradient
from ..differentiable import refuse_forward_mode


def check_tensor(name: str, argument: str, x: Tensor, ndim: int, form: str) -> None:
    """Raise unless an argument is a local floating-point tensor with ``ndim`` dimensions."""
    argument = f"{name}: {argument}"
    check_local(argument, x, ndim, form)
    if 0 in x.shape:
        raise ValueError(
            f"{argument} has shape {tuple(x.shape)}. There is nothing to compute. Pass a tensor with values"
        )
    check_dtype(argument, x)


def agree(
    name: str,
    cp: CPMesh,
    layout: str,
    documents: Tensor | None,
    *tensors: Tensor | None,
    decay: Tensor | None = None,
    final_state: bool = False,
) -> None:
    """Raise ``ValueError`` on every rank if the ranks call with other shapes, layouts or documents, or with decays that
    grow. (Values are read in the first call of a kind only: on an accelerator the host waits for them.)"""
    refuse_forward_mode(name, *(x for x in tensors if x is not None))
    if is_compiling():
        return
    if cp.agreement is None:
        if decay is not None and decay.device.type == "cpu":
            _check_decay(name, decay)
        return
    signature = (
        ("function", name),
        ("shapes", tuple(None if x is None else tuple(x.shape) for x in tensors)),
        ("dtypes", tuple(None if x is None else str(x.dtype) for x in tensors)),
        ("layout", layout),
        ("ulysses_degree", cp.ulysses.size),
        ("gradients", requires_gradient(*tensors)),
    )
    if decay is None or cp.agreement.known("call", signature):
        cp.agree("call", signature, name)
    else:
        cp.agree("call", signature, name, once=(("decays above 0", _largest(decay) > 0),))
        _check_decay(name, decay)
    table = packed.read(documents)
    ends = (("ends of tokens", packed.ends_of_tokens(documents)),) if final_state else ()
    cp.agree("documents", (("documents", None if table is None else table.digest), *ends), name)


def _largest(decay: Tensor) -> float:
    """The largest value; 0 for tensors without values (fake ones)."""
    return decay.detach().max().item() if type(decay.detach()) is Tensor else 0.0


def _check_decay(name: str, decay: Tensor) -> None:
    largest = _largest(decay)
    if largest > 0:
        raise ValueError(
            f"{name}: decay has a value of {largest:.4g}. It holds logarithms of factors, which are at most 0, so that "
            "states do not grow along the sequence. Pass the logarithm (torch.log(factor), or -exp(A_log) * dt)"
        )


def check_layout_of(name: str, cp: CPMesh, layout: str, documents: Tensor | None, batch: int, length: int) -> None:
    """Raise ``ValueError`` unless a share of ``length`` positions, in ``batch`` rows, fits the layout and documents."""
    layouts.check_layout(layout)
    if is_compiling():
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
            f"{name}: layout={layout!r} places tokens by document, but no documents are given. Without them it is not "
            "determined what each rank holds. Pass documents= ([0, S] for one document)"
        )
    check_places(name, cp, layout, documents)

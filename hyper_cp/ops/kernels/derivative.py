"""Derivatives of plain torch functions inside a custom op, which runs below autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

# An op runs without autograd: its keys are excluded from dispatch in this thread. ``torch.func`` would differentiate
# here, but ends the process where a dispatch mode is active (a counter of FLOPs or of memory), and cannot differentiate
# FlexAttention. Another thread would have autograd, but on CUDA it would wait for the thread of the device, which waits
# for this op. Where such a mode is active (a selective checkpoint, too), the keys of ``torch.vmap`` are excluded as
# well. No public name exists.
_AUTOGRAD = ("ADInplaceOrView", "AutogradOther", "AutogradFunctionality")
_VMAP = ("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched", "FuncTorchVmapMode")


@contextmanager
def autograd_in_op() -> Iterator[None]:
    """Switch autograd on inside an op."""
    with _dispatched(*_AUTOGRAD), torch.enable_grad():
        yield


def vmap_in_op() -> AbstractContextManager[None]:
    """Let ``torch.vmap`` run inside an op, whatever modes are active around it."""
    return _dispatched(*_VMAP)


@contextmanager
def _dispatched(*names: str) -> Iterator[None]:
    c = torch._C
    keys = [getattr(c.DispatchKey, name) for name in names]
    before = [c._dispatch_tls_is_dispatch_key_excluded(key) for key in keys]
    try:
        for key in keys:
            c._dispatch_tls_set_dispatch_key_excluded(key, False)
        yield
    finally:
        for key, excluded in zip(keys, before, strict=True):
            c._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def differentiable(
    function: Callable[..., Sequence[Tensor]], *inputs: Tensor
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Tensor]]]:
    """The outputs of ``function``, and the function from their gradients to those of ``inputs``, to be called once."""
    with autograd_in_op():
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = list(function(*leaves))

    def pull(gradients: Sequence[Tensor]) -> list[Tensor]:
        reached = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
        if not reached:
            return [torch.zeros_like(x) for x in inputs]
        with autograd_in_op():
            outs, grads = zip(*reached, strict=True)
            found = torch.autograd.grad(outs, leaves, grads, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]

    return [y.detach() for y in outputs], pull

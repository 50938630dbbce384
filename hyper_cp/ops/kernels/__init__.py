"""Attention of one tile on one device: the registered kernels, and the choice between them.

Kernels know nothing of processes, layouts or modes. Inside the library a tile's partial is
(output ``[B, H, Sq, Dv]``, log-sum-exp ``[B, H, Sq]`` in fp32, or fp64 for fp64 inputs, natural
logarithm of scaled logits); a kernel converts whatever its device's operator returns.
"""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..._torch.compiling import is_compiling
from ...schedule.tiles import Band
from . import cpu, cuda, npu, triton_selected
from .inputs import Kernel, TileInputs
from .operators import OperatorKernel
from .reference import KERNEL as REFERENCE
from .scores import flex_kernel

__all__ = [
    "REFERENCE",
    "Kernel",
    "TileInputs",
    "available",
    "check",
    "choose",
    "device_types",
    "get",
    "giving_largest",
    "name_of",
    "number_of",
    "register",
]

logger = logging.getLogger(__name__)

Accepts = Callable[[Tensor, Tensor, Tensor, bool], bool]
"""``accepts(q, k, v, is_causal)``: True if a kernel is to run the tiles of a call with these tensors."""


@dataclass(frozen=True)
class _Entry:
    kernel: Kernel
    accepts: Accepts
    plain_with_dropout: bool
    scores: bool
    selected: bool
    largest: bool


_by_device: dict[str, OrderedDict[int, _Entry]] = {}


def register(
    kernel: Kernel,
    device_type: str,
    accepts: Accepts | None = None,
    *,
    plain_with_dropout: bool = False,
    scores: bool = False,
    selected: bool = False,
    largest: bool = False,
) -> RemovableHandle:
    """Add a kernel for tensors of a device type. A vendor's package does so when it is imported; a test does so in a
    ``with`` statement.

    Each attention call chooses its kernel once. The last registered kernel that accepts the call runs it, so an added
    kernel precedes the library's own. If no kernel accepts it, plain math (the reference kernel) does.

    Args:
        kernel: an object with ``name``, ``forward`` and ``backward`` as :class:`Kernel` describes them. The name must
            be unique on the device type: backward finds the kernel of its forward by it.
        device_type: ``"cpu"``, ``"cuda"``, ``"npu"``, ``"xpu"`` ...
        accepts: ``accepts(q, k, v, is_causal)``, with the call's tensors [B, H, S, D]; default: every call. It must
            only read shapes, dtypes and settings, so that the host does not wait for the device. It may raise if the
            user's settings forbid every kernel.
        plain_with_dropout: with dropout, run accepted calls by plain math, which needs memory for whole tiles of
            logits. By default they are refused: only the reference kernel takes a given dropout pattern.
        scores: the kernel is for calls that change their logits by a function (``tile.score``), and runs no others.
            Without such a kernel, they run on plain math.
        selected: the kernel is for calls whose queries have selected their keys (``tile.selected``), and runs no
            others. Without such a kernel, they run on plain math. With both, for calls that do both.
        largest: the kernel takes calls with and without a score, and raises ``tile.largest``. Calls that ask for the
            largest logits run their forward on it, and on plain math if there is none.

    Returns:
        A handle: ``handle.remove()``, or the end of ``with register(...):``, removes the kernel again.

    Example::

        class Mine:
            name = "mine"

            def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]: ...
            def backward(self, tile, dout, out, lse) -> tuple[Tensor, Tensor, Tensor]: ...

        kernels.register(Mine(), "xpu", accepts=lambda q, k, v, is_causal: q.dtype == torch.bfloat16)
    """
    if not kernel.name:
        raise ValueError(
            f"kernel.name={kernel.name!r} must be a non-empty string. An op finds its kernel by this name. Give "
            "kernel.name another value"
        )
    if kernel.name in available(device_type):
        raise ValueError(
            f"a kernel with the name {kernel.name!r} is registered already for the device type {device_type!r}. "
            "Backward finds the kernel of its forward by this name. Give kernel.name another value, or remove() the "
            "other kernel first"
        )
    entries = _by_device.setdefault(device_type, OrderedDict())
    handle = RemovableHandle(entries)
    entries[handle.id] = _Entry(
        kernel, accepts or (lambda q, k, v, is_causal: True), plain_with_dropout, scores, selected, largest
    )
    return handle


def available(device_type: str, selected: bool | None = None) -> dict[str, Kernel]:
    """All kernels for tensors of a device type, and the reference kernel; their names are the keys. ``selected``: only
    those for selected keys, or only the others."""
    entries = [entry for entry in _entries(device_type) if selected in (None, entry.selected)]
    return {REFERENCE.name: REFERENCE, **{entry.kernel.name: entry.kernel for entry in entries}}


def device_types() -> list[str]:
    """The types of devices for which kernels are registered."""
    return list(_by_device)


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    dropout_p: float = 0.0,
    scores: bool = False,
    selected: bool = False,
) -> str:
    """The name of the kernel that runs this call's tiles, in forward and backward. Under torch.compile it is "": the
    choice is left to the run. ``scores``: the call changes its logits by a function. ``selected``: its queries have
    selected their keys. Raises if the user's settings leave no kernel."""
    if dropout_p:
        entry = _accepting(q, k, v, is_causal)
        if entry is not None and not entry.plain_with_dropout:
            raise NotImplementedError(
                f"dropout_p > 0 is not possible on {q.device.type}, where attention runs on the kernel "
                f"{entry.kernel.name!r}. It draws its own random numbers for each tile and takes no dropout pattern. "
                "Set dropout to 0.0, or allow plain math only: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )
        return REFERENCE.name
    if is_compiling():
        return ""
    entry = _accepting(q, k, v, is_causal, scores, selected)
    name = REFERENCE.name if entry is None else entry.kernel.name
    logger.debug("attention of %s on %s: %s", tuple(q.shape), q.device, name)
    return name


def giving_largest(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, plain: bool) -> Kernel:
    """The kernel that runs the forward of a call that asks for the largest logits. ``plain``: a call with dropout or
    selected keys, for which only plain math returns them."""
    entries = [] if plain else [entry for entry in _entries(q.device.type)[::-1] if entry.largest]
    return next((entry.kernel for entry in entries if entry.accepts(q, k, v, is_causal)), REFERENCE)


def _accepting(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scores: bool = False, selected: bool = False
) -> _Entry | None:
    kind = scores, selected
    entries = [entry for entry in _entries(q.device.type)[::-1] if (entry.scores, entry.selected) == kind]
    return next((entry for entry in entries if entry.accepts(q, k, v, is_causal)), None)


def _entries(device_type: str) -> list[_Entry]:
    return list(_by_device.get(device_type, {}).values())


def get(name: str, device_type: str) -> Kernel:
    """The kernel of this name for a device type."""
    kernel = available(device_type).get(name)
    if kernel is None:
        raise LookupError(
            f"no kernel with the name {name!r} is registered for the device type {device_type!r}. The forward ran on "
            "it, so backward needs it too. Keep the kernel registered until backward has run"
        )
    return kernel


def check(kernel: Kernel, masked: bool, band: Band) -> None:
    """Raise ``NotImplementedError`` if a kernel cannot run calls with an explicit mask, or under this band."""
    if isinstance(kernel, OperatorKernel):
        kernel.check(masked, band)


def number_of(name: str) -> int:
    """A hash of the name of a kernel, which an op can return in a tensor: under torch.compile it chooses its kernel
    when it runs, and backward must run the same one."""
    return zlib.crc32(name.encode())


def name_of(number: int, device_type: str) -> str:
    """The inverse of :func:`number_of`. If the kernel is not registered any more, :func:`get` refuses the result."""
    return next((name for name in available(device_type) if number_of(name) == number), f"number {number}")


register(cpu.KERNEL, "cpu", cpu.accepts, plain_with_dropout=True)  # as F.scaled_dot_product_attention on CPU
register(npu.KERNEL, "npu", npu.accepts)
for _kernel in cuda.KERNELS.values():
    register(_kernel, "cuda", partial(cuda.accepts, _kernel))
register(flex_kernel.KERNEL, "cuda", flex_kernel.accepts, scores=True, largest=True)
for _scores, _kernel_of_selected in triton_selected.KERNELS.items():
    register(_kernel_of_selected, "cuda", triton_selected.accepts, scores=_scores, selected=True)

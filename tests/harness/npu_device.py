"""A device type "npu" whose memory is the CPU's, for processes that have no NPU: a private-use device.

:func:`install` is for good and for the whole process: call it in ranks that do nothing else. Operators run on
the CPU tensors inside; the NPU's attention operators are those of the stand-in; transfers go through gloo.
Operands on different devices are refused, as by a real device, and everything that makes the host wait for the device
is recorded in :data:`waits`. Batches of messages are refused as by HCCL. It shows nothing of streams and of the rest of
HCCL. One call works only where :func:`tensor` stands in its place: ``torch.tensor(..., device="npu")``, in which
PyTorch bypasses tensors that are made in Python.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from hyper_cp.mesh import comm
from tests.harness import npu_standin

# Private, and only in the tests: there is no public way to a device made in Python.
SETUP = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
WHY_NOT = f"torch {torch.__version__} has no way to make a device in Python"
BACKEND = "cpu:gloo,npu:gloo"

calls: list[str] = []
"""Operators that ran on the device since the list was cleared."""
waits: list[str] = []
"""Those that make the host wait for the device: reads of its values, copies that are not asynchronous."""

_library: Any = None  # lives as long as the process
_NPU = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
# Their result, or its shape, is a value of the device.
_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_dim", "_unique", "_unique2"}
_READS |= {"unique_consecutive", "unique_dim_consecutive", "bincount", "repeat_interleave.Tensor"}


class Event:
    """An event of the device, whose time is the host's."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


MODULE = SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda device: None,
    manual_seed_all=lambda seed: None,
    synchronize=lambda device=None: waits.append("synchronize"),
    get_rng_state=lambda device=None: torch.get_rng_state(),
    set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    Event=Event,
    get_device_name=lambda device=None: "a double",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=2**36),
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
)
"""The functions of ``torch.npu`` that the rest of PyTorch and this library call."""


class OnNPU(Tensor):
    """A tensor of the device: sizes, strides and a CPU tensor that has the values."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> OnNPU:
        made = Tensor._make_wrapper_subclass(
            cls, inside.shape, inside.stride(), inside.storage_offset(), dtype=inside.dtype, device="npu:0"
        )
        made.inside = inside
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnNPU({self.inside!r})"

    def tolist(self) -> Any:
        waits.append("tolist")
        return self.inside.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))


def install() -> None:
    """Make the device and its attention operators in this process."""
    global _library
    if _library is None:
        SETUP("npu", MODULE)
        npu_standin.install()
        comm.BACKENDS["gloo"] = HcclAxis
        dist.batch_isend_irecv = _batch_isend_irecv
        _library = torch.library.Library("_", "IMPL")
        _library.fallback(_run, "PrivateUse1")  # operators without operands of the device: they make some
        _library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # autocast casts nothing here


_tensor = torch.tensor


def tensor(values: Any, *, device: Any = None, **options: Any) -> Tensor:
    """``torch.tensor`` by way of the CPU."""
    made = _tensor(values, **options)
    return made if device is None else made.to(device)


class HcclAxis(comm.HcclAxis, comm.GlooAxis):
    """The axis of HCCL, made of what gloo has."""


send_and_receive = dist.batch_isend_irecv


def _batch_isend_irecv(ops: list[dist.P2POp]) -> list[Any]:
    """Refuse what HcclBatchSendRecv refuses."""
    tasks = [(op.op, op.group_peer if hasattr(op, "group_peer") else op.peer) for op in ops]
    if len(set(tasks)) < len(tasks):
        raise RuntimeError("HCCL_E_PARA: Send Tasks are duplicated")
    return send_and_receive(ops)


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one operator on the CPU tensors inside; its results are on the device if an operand or ``device=`` is."""
    if func.namespace == "hyper_cp":  # the library's own operators run on tensors of the device
        return func.redispatch(_NPU, *args, **kwargs)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)  # its parts come back here
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = any(isinstance(x, OnNPU) for x in operands)
    target = kwargs.get("device")
    name = func._overloadpacket.__name__
    _check(func, name, operands, args, kwargs)
    calls.append(f"{func.namespace}.{name}")
    if target is not None:
        here = torch.device(target).type == "npu"
        kwargs = {**kwargs, "device": "cpu"}
    kwargs.pop("pin_memory", None)
    result = ran(func, tree_map(inside_of, args), tree_map(inside_of, kwargs))
    if not here:
        return result
    # A tensor that was written in place comes back as the object that was passed.
    known = {id(x.inside): x for x in operands if isinstance(x, OnNPU)}
    return tree_map(lambda x: known.get(id(x), OnNPU(x)) if isinstance(x, Tensor) else x, result)


def inside_of(x: Any) -> Any:
    """The CPU tensor in a tensor of the device; anything else as it is."""
    return x.inside if isinstance(x, OnNPU) else x


def ran(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the CPU tensors inside: the one place through which all of them go."""
    return func(*args, **kwargs)


def _check(func: Any, name: str, operands: list[Tensor], args: Any, kwargs: Any) -> None:
    """Record waits for the device, and refuse operands on two devices."""
    kinds = [x.device.type for x in operands]
    if name in ("copy_", "_to_copy"):
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        asynchronous = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        if source.device.type != target.type and not asynchronous:
            waits.append(f"copy from {source.device.type} to {target.type}")
        return
    if name in _READS or f"{name}.{func._overloadname}" in _READS:
        waits.append(name)
    if name in ("index", "index_put_", "index_put") and any(
        x is not None and (x.dtype in (torch.bool, torch.uint8) or x.device.type == "cpu") for x in args[1]
    ):
        waits.append(f"{name} by a mask or by positions on the CPU")
    # Numbers may be on the CPU, and so may the lengths that v3 of the attention operator takes.
    elif func.namespace in ("aten", "npu") and any(
        x.ndim and not (func.namespace == "npu" and x.dtype == torch.int64)
        for x, kind in zip(operands, kinds, strict=True)
        if kind == "cpu"
    ):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {sorted(set(kinds))}")

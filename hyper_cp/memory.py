"""A counter of memory: bytes of the tensor storages that are made in a block and are still alive, and their peak.

It counts what a program asks for, so the numbers on a laptop are those on an accelerator. It does not see memory that
kernels and communication libraries take for themselves, nor storages that are resized (FSDP's gathered weights count
as long as FSDP keeps them).
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import Tensor

from ._torch.modes import TorchDispatchMode, run_kernel, tree_leaves


class MemoryCounter(TorchDispatchMode):
    """Counts the storages that are made in a block, by type of device.

    ::

        with MemoryCounter() as memory:
            loss = step(batch)
            saved = memory.alive["cpu"]  # what forward keeps for backward
            loss.backward()
        print(saved, memory.peak["cpu"])

    Tensors that existed before do not count, whatever is done with them inside. The insides of this library's operators
    count. Tensors must be freed where they are used last, as usual, to be counted so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: Counter[str] = Counter()
        """Bytes that are alive now, by type of device."""
        self.peak: Counter[str] = Counter()
        """The most bytes that have been alive at once."""
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):  # a DTensor: its parts come here next
            return NotImplemented
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in given:
            self._record(x, made=False)
        if func.namespace == "hyper_cp" and given:
            with self:
                out = run_kernel(func, given[0].device.type, args, kwargs)
        else:
            out = func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._record(x, made=True)
        return out

    def _record(self, x: Tensor, made: bool) -> None:
        """Count a storage that has not been seen; one that is seen first as an argument existed before the block."""
        storage = x.untyped_storage()
        key = id(storage)  # the same object as long as any tensor has the storage
        if key in self._known:
            return
        self._known.add(key)
        size, device = storage.nbytes() if made else 0, x.device.type
        weakref.finalize(storage, self._free, key, size, device).atexit = False
        self.alive[device] += size
        self.peak[device] = max(self.peak[device], self.alive[device])

    def _free(self, key: int, size: int, device: str) -> None:
        self._known.discard(key)
        self.alive[device] -= size

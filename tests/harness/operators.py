"""A record of the operators that run, of what they make, and of what the host waits for."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")


class Operators(TorchDispatchMode):
    """Records ``(name, elements of the largest new tensor)`` of every operator but views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            made = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.calls.append((func._schema.name, max(made, default=0)))
        return result

    @property
    def largest(self) -> int:
        return max(elements for _, elements in self.calls)

    @property
    def waits(self) -> int:
        return sum(name in WAITS for name, _ in self.calls)

    @property
    def copied(self) -> int:
        """Elements that were copied, outside of the operators."""
        return sum(elements for name, elements in self.calls if name == "aten::clone")

    @property
    def launches(self) -> list[str]:
        """The operators that compute or copy something."""
        free = ("aten::_reshape_alias", "aten::detach")
        return [name for name, _ in self.calls if "empty" not in name and name not in free]

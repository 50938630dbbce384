"""Private parts of tensors: the leaves of a graph of autograd, and their hooks.

Needs ``Tensor._backward_hooks``, where ``Tensor.register_hook`` puts hooks of leaves. The same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def has_hooks(x: Tensor) -> bool:
    """True if ``x.register_hook`` has been called, and the hook not been removed."""
    return bool(x._backward_hooks)


def other_leaf(out: Tensor, known: Iterable[Tensor]) -> Tensor | None:
    """A leaf that requires a gradient, from which ``out`` was computed, and that is not among ``known``; or None."""
    ids, seen, todo = {id(x) for x in known}, set(), [out.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if isinstance(leaf, Tensor) and id(leaf) not in ids:
            return leaf
        todo += [before for before, _ in node.next_functions]
    return None

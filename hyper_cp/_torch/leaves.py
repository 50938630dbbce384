"""Private parts of tensors: the leaves of a graph of autograd, and their hooks.

Needs ``Tensor._backward_hooks``, where ``Tensor.register_hook`` puts hooks of leaves, and of nodes ``_input_metadata``,
``_saved_dim`` (of a concatenation) and ``_saved_self_sym_sizes`` (of a broadcast). The same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor


def has_hooks(x: Tensor) -> bool:
    """True if ``x.register_hook`` has been called, and the hook not been removed."""
    return bool(x._backward_hooks)


def other_leaf(out: Tensor, known: Iterable[Tensor]) -> Tensor | None:
    """A leaf that requires a gradient, from which ``out`` was computed, and that is not among ``known``; or None."""
    ids = {id(x) for x in known}
    return next((leaf for leaf in leaves_of([out.grad_fn]) if id(leaf) not in ids), None)


def leaves_of(nodes: Iterable[Any], stop: Callable[[Any], bool] = lambda _: False) -> Iterator[Tensor]:
    """The leaves that require a gradient below nodes of a graph, without those that are reached through a node at which
    to ``stop`` only."""
    for node in nodes_of(nodes, stop):
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if isinstance(leaf, Tensor):
            yield leaf


def nodes_of(nodes: Iterable[Any], stop: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """Nodes of a graph and those below them, without those at which to ``stop``, and what only these lead to."""
    seen, todo = set(), [*nodes]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen or stop(node):
            continue
        seen.add(node)
        yield node
        todo += [before for before, _ in node.next_functions]


def joined(x: Tensor, size: int) -> list[Any] | None:
    """The nodes of both tensors of which ``x`` was concatenated along its last dimension, the first one of ``size``.
    None: the graph does not show it."""
    node: Any = x.grad_fn
    while node is not None and node.name() in _SHAPES:
        node = node.next_functions[0][0]
    if node is None or node.name() != "CatBackward0" or len(node.next_functions) != 2:
        return None
    shape, sizes = node._input_metadata[0].shape, (size, x.shape[-1] - size)
    last = node._saved_dim in (len(shape) - 1, 2**64 - 1)  # -1, read without a sign
    fits = [
        part is None or part._input_metadata[at].shape[-1] == n
        for (part, at), n in zip(node.next_functions, sizes, strict=True)
    ]
    return [part for part, _ in node.next_functions] if last and shape[-1] == x.shape[-1] and all(fits) else None


_SHAPES = {
    *(f"{name}Backward0" for name in ("Transpose", "Permute", "View", "UnsafeView", "Clone", "ToCopy", "Alias")),
    "_ToTorchTensorBackward",  # of a DTensor
}
"""Nodes that change a tensor's shape, strides or dtype only."""


def broadcasts(node: Any, n: int) -> bool:
    """True for a node that expands or repeats a dimension of size 1 to ``n``."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if node.name() not in ("ExpandBackward0", "RepeatBackward0") or sizes is None:
        return False
    shape = node._input_metadata[0].shape
    return any(a == 1 and b == n for a, b in zip(reversed(sizes), reversed(shape), strict=False))

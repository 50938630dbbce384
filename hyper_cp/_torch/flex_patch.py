"""Makes ``flex_attention`` visible to a dispatch mode, in place, once a style has been applied.

Most of torch's functions can be overridden by a ``TorchFunctionMode``. ``flex_attention`` cannot (torch
2.11 to 2.13): only the operator inside can, after it has compared the lengths of queries and mask, which
on a split sequence never agree. Replacing the body of the function object, instead of a name
somewhere, reaches it however and whenever it was imported, and inside ``torch.compile(flex_attention)``.
Where no styled module is running, the original body runs.

Needs ``flex_attention`` to be a plain Python function without a closure. Where it is not, it is left alone, and a
styled module that calls it raises because no attention call was routed.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import handle_torch_function


def _plain() -> Any:
    """A copy of the original ``flex_attention``."""
    f: Any = flex_attention
    if hasattr(f, "__wrapped__"):  # this file was loaded before
        return f.__wrapped__
    plain = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    plain.__kwdefaults__ = f.__kwdefaults__
    return plain


def _instead(*args: Any, **kwargs: Any) -> Any:
    # Absolute: the globals of this body are those of torch's file, into whose function it is put.
    from hyper_cp._torch.flex_patch import dispatch

    return dispatch(*args, **kwargs)


def _dispatching() -> bool:
    """Replaced by :func:`install`."""
    return False


def dispatch(*args: Any, **kwargs: Any) -> Any:
    """Begins as torch's own overridable functions do, but only while a dispatch mode of ours is entered."""
    if _dispatching():
        return handle_torch_function(flex_attention, [], *args, **kwargs)
    return plain_flex_attention(*args, **kwargs)


plain_flex_attention = _plain()


def install(dispatching: Callable[[], bool]) -> None:
    """Replace the body of ``flex_attention``, once. From then on it calls ``dispatching()``, which is true while a
    styled module is running."""
    global _dispatching
    _dispatching = dispatching
    f: Any = flex_attention
    if f.__class__ is types.FunctionType and f.__closure__ is None and f.__code__ is not _instead.__code__:
        f.__wrapped__ = plain_flex_attention  # type: ignore[attr-defined]  # for inspect.signature
        f.__code__ = _instead.__code__
        f.__defaults__ = f.__kwdefaults__ = None

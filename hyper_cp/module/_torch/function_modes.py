"""Takes a ``TorchFunctionMode`` out of the stack of modes, wherever it is there.

Leaving a mode takes off the top of the stack, which is another one if the call that entered this mode was interrupted
(Ctrl-C, after which torch runs no hooks). Needs ``_pop_mode``, ``_push_mode`` and ``_get_current_function_mode_stack``
of ``torch.overrides``, which has no public way to look below the top.
"""

from __future__ import annotations

from torch import overrides
from torch.overrides import TorchFunctionMode


def take_out(mode: TorchFunctionMode) -> None:
    """Remove a mode from this thread's stack, if it is there; the others stay in their order."""
    stack = overrides._get_current_function_mode_stack()
    if not any(entered is mode for entered in stack):
        return
    above: list[TorchFunctionMode] = []
    while (top := overrides._pop_mode()) is not mode:
        above.append(top)
    for entered in reversed(above):
        overrides._push_mode(entered)

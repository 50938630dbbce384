"""Calls in a thread of their own, where no state of the caller's thread holds: autograd, modes, what is routed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor


def in_thread(run: Callable[[], Any], like: Tensor) -> Any:
    """Run in a new thread, on the device and the stream of this one, and wait for it. Errors are raised here."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with ExitStack() as stack:
                if like.device.type == "cuda":
                    stack.enter_context(torch.cuda.device(like.device))
                    stack.enter_context(torch.cuda.stream(stream))
                found.append(run())
        except BaseException as error:
            errors.append(error)

    stream: Any = torch.cuda.current_stream(like.device) if like.device.type == "cuda" else None
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]

"""Ranks of this machine for benchmarks: processes that compute on one thread each, over gloo."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def results_of(main: Callable[..., None], ranks: int, *args: Any, method: str = "spawn") -> Iterator[Any]:
    """Run ``main(rank, ranks, store, put, *args)`` in ``ranks`` processes, and yield what they put as it comes.

    Raises:
        RuntimeError: if a rank ends with an error. The others are then ended too.
    """
    context: Any = torch.multiprocessing.get_context(method)
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        target = ranks, os.path.join(folder, "store"), queue.put, *args
        processes = [context.Process(target=main, args=(rank, *target), daemon=True) for rank in range(ranks)]
        try:
            for process in processes:
                process.start()
            running = True
            while running or not queue.empty():
                running = any(process.is_alive() for process in processes)  # asked before exit codes are
                failed = [process.exitcode for process in processes if process.exitcode]
                if failed:
                    raise RuntimeError(
                        f"a rank ended with exit code {failed[0]}. The measurement needs all ranks. See its error above"
                    )
                try:
                    found = queue.get(timeout=0.5)
                except Empty:
                    continue
                yield found
        finally:
            for process in processes:
                process.kill()
                process.join()


def join(rank: int, ranks: int, store: str) -> DeviceMesh:
    """Make this process one of the ranks, and return their cp mesh."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    group = {"rank": rank, "world_size": ranks, "timeout": timedelta(minutes=5)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **group)
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))


def leave() -> None:
    """End the process group when all ranks have come this far."""
    dist.barrier()
    dist.destroy_process_group()

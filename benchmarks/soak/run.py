"""Runs random context-parallel steps for a long time: every result is that of one device, and nothing leaks.

    python -m benchmarks.soak.run --steps 2000 --seed 1   # 4 gloo ranks x 1 thread; Linux
    python -m benchmarks.soak.run --steps 1000000 --seconds 3600 --kinds attention flex  # a fuzzer for an hour

A step is one of the kinds in steps.py with a random degree, mode, layout, length (odd ones are padded), packed
documents, padding, window and explicit mask, forward and backward, compared with plain math on one device. Every tenth
step repeats an earlier one, which must give the same bits. The seed and the number of a step determine it:
``--only N`` runs step N alone.

From the end of the warm-up (100 steps, or half of a shorter run) the following are counted on every rank, and must not
grow: live tensors, process groups, threads, file descriptors, and keys of the store. Resident memory may grow by
``--mib``. Bounded caches are emptied before they are counted, since what they hold is no leak; the bound in bytes on
what documents derive is lowered, so that it is reached, and checked.

The exit code is 1 if anything differs or leaks.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import MeshFamily, split_cp_mesh
from hyper_cp.cli.diagnosis.findings import bar
from hyper_cp.ops import attention
from hyper_cp.schedule.derived import kept

from .steps import DIM, HEADS, KINDS, Draw

RANKS, WARM_UP, SAMPLES, REPEAT = 4, 100, 20, 10
CACHE = 256 * 1024  # bytes of what documents derive: small, so that the soak reaches the bound


@dataclass(frozen=True)
class Counts:
    """Everything of this process that may leak."""

    mib: float
    tensors: int
    groups: int
    threads: int
    descriptors: int
    store_keys: int
    cached_kib: float


class Counter:
    """Counts what this process holds; objects that exist when it is made do not count."""

    def __init__(self) -> None:
        modules = [module for name, module in sys.modules.items() if name.startswith("hyper_cp")]
        self.caches = [x for module in modules for x in vars(module).values() if hasattr(x, "cache_clear")]
        gc.collect()
        gc.freeze()  # makes collections short, and leaves these objects out of gc.get_objects()

    def count(self) -> Counts:
        """Wait for the other ranks, and count."""
        dist.barrier()  # nobody is in a step, where entries of the store come and go
        cached = kept.nbytes / 1024
        for cache in self.caches:
            cache.cache_clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm") as file:
            mib = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        found = Counts(
            mib,
            sum(issubclass(type(x), Tensor) for x in gc.get_objects()),
            len(dist.distributed_c10d._world.pg_map),
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            dist.group.WORLD.get_group_store().num_keys(),
            cached,
        )
        dist.barrier()
        return found


@dataclass
class Soak:
    """One rank's run, and what it has found wrong."""

    options: argparse.Namespace
    family: MeshFamily
    failures: list[str] = field(default_factory=list)
    digests: dict[int, bytes] = field(default_factory=dict)
    steps_of: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def step(self, number: int) -> None:
        """Run one step and compare it with one device; if it has been run before, its bits must be the same."""
        rng = random.Random(f"{self.options.seed}/{number}")
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        kinds = self.options.kinds or [*KINDS]
        kind = rng.choices(kinds, [KINDS[name][1] for name in kinds])[0]
        digest = hashlib.blake2b(digest_size=16)
        try:
            for name, got, want in KINDS[kind][0](Draw(self.family, rng, generator)):
                self.compare(f"step {number} ({kind}): {name}", kind, got.detach(), want.detach())
                digest.update(got.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        except Exception as error:
            raise RuntimeError(f"step {number} ({kind}) with --seed {self.options.seed} raised an error") from error
        if self.digests.setdefault(number, digest.digest()) != digest.digest():
            self.failures.append(f"step {number} ({kind}): other bits when it is repeated")
        self.steps_of[kind] = self.steps_of.get(kind, 0) + 1

    def compare(self, name: str, kind: str, got: Tensor, want: Tensor) -> None:
        scale = want.abs().max().item() if want.numel() else 0.0
        error = (got.double() - want.double()).abs().max().item() / (scale if scale > 1e-6 else 1.0)
        share = error / bar(got.dtype)
        self.worst[kind] = max(self.worst.get(kind, 0.0), share)
        if not share <= 1:  # NaN too
            self.failures.append(f"{name} is off by {error:.1e} (bar {bar(got.dtype)})")

    def over(self) -> bool:
        """True if the time is up on any rank."""
        if self.options.seconds is None:
            return False
        late = torch.tensor(float(time.monotonic() - self.started > self.options.seconds))
        dist.all_reduce(late)
        return bool(late)

    def leaks(self, table: Sequence[tuple[int, Counts]]) -> None:
        """Compare the last counts with the first ones."""
        (first, start), (last, end) = table[0], table[-1]
        for name, before in asdict(start).items():
            after, slack = asdict(end)[name], self.options.mib if name == "mib" else 0
            if name != "cached_kib" and after > before + slack:
                self.failures.append(f"{name} grew from {before:g} after step {first} to {after:g} after step {last}")
        cached = max(counts.cached_kib for _, counts in table)
        if cached * 1024 > CACHE:
            self.failures.append(f"cached schedules take {cached:.0f} KiB, more than their bound")


def soak(options: argparse.Namespace, after_step: Callable[[int], None] = lambda number: None) -> int:
    """Run on this rank, in the default process group; the exit code is the same on every rank.

    Args:
        after_step: called after every step with its number, for tests that plant a leak.
    """
    family = split_cp_mesh(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)))
    for degree in family.degrees:  # every process group that there will be, and a first comparison on every mesh
        for ulysses in (d for d in family.degrees if degree % d == 0):
            attention(*torch.zeros(3, 1, HEADS, 1, DIM), mesh=family.cp(degree), ulysses_degree=ulysses)
    counter, table = Counter(), []
    run, bound = Soak(options, family), kept.most_bytes
    warm_up = min(WARM_UP, options.steps // 2)
    every = max(5, (options.steps - warm_up) // SAMPLES)
    kept.most_bytes = CACHE
    try:
        for number in [options.only] if options.only is not None else range(options.steps):
            run.step(number)
            if number % REPEAT == REPEAT - 1 and options.only is None:
                run.step(random.Random(f"{options.seed}/repeat {number}").randrange(number + 1))
            after_step(number)
            if number + 1 >= warm_up and (number + 1 - warm_up) % every == 0:
                table.append((number + 1, counter.count()))
            if run.over():
                break
    finally:
        kept.most_bytes = bound
    if table:
        run.leaks(table)
    return report(run, table, time.monotonic() - run.started)


def report(run: Soak, table: list[tuple[int, Counts]], seconds: float) -> int:
    """Print what rank 0 has counted and what all ranks have found; returns the exit code."""
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, run.failures)
    if dist.get_rank() == 0:
        print(f"| step | {' | '.join(Counts.__annotations__)} |")
        print("|---:" * (1 + len(Counts.__annotations__)) + "|")
        for number, counts in table:
            print(f"| {number} | {' | '.join(f'{x:g}' for x in asdict(counts).values())} |".replace("  ", " "))
        for kind, count in sorted(run.steps_of.items()):
            print(f"{kind}: {count} steps, largest error {run.worst[kind]:.2g} of the bar")
        bits = hashlib.blake2b(b"".join(x for _, x in sorted(run.digests.items())), digest_size=8).hexdigest()
        print(
            f"{len(run.digests)} steps in {seconds:.0f} s on {len(found)} ranks; bits of all results of rank 0: {bits}"
        )
        for rank, failures in enumerate(found):
            for text in failures[:20]:
                print(f"FAILED on rank {rank} with --seed {run.options.seed}: {text}")
        print("FAILED" if any(found) else "no mismatch, no leak", flush=True)
    return int(any(found))


def rank_main(rank: int, options: argparse.Namespace, port: int, codes: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    codes.put(soak(options))
    dist.barrier()
    dist.destroy_process_group()


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, help="end after the first step that ends later than this, whatever --steps says"
    )
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], help="kinds of steps; all if it is left out")
    parser.add_argument("--only", type=int, help="run this step alone")
    parser.add_argument("--mib", type=float, default=16.0, help="growth of resident memory that is accepted")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    codes = mp.get_context("fork").SimpleQueue()
    try:
        mp.start_processes(rank_main, (options, store.port, codes), nprocs=RANKS, start_method="fork")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error))  # prints it; the exit code is 1
    sys.exit(max(codes.get() for _ in range(RANKS)))


if __name__ == "__main__":
    main()

"""Checks on one device, without a second one: kernels, the whole engine with simulated ranks, times.

    python -m benchmarks.device.check                     # the accelerator that is there, else the CPU
    python -m benchmarks.device.check --device cpu --lengths 1024 --dtype float32 --heads 8 --kv-heads 2 --dim 64

Sections (``--only`` chooses):

kernels   every kernel of the device against attention written out in fp64, on every kind of tile
layouts   the same with q, k, v, out and dout in every memory layout
flex      FlexAttention, which is compiled for each number of heads: this takes minutes
merges    partials and gradients are added up in Triton (CUDA)
replays   kernels in CUDA graphs, and the op in compiled functions that get other documents
engine    forward and backward with n = 2, 4, 8 ranks as threads of this process, and under autocast
tiles     times of tiles over plain SDPA of the same shape
shares    device time of the busiest rank's share (nothing is transferred) over 1/n of the time of plain SDPA

Results have to be finite and within the bar of the dtype. A kernel may refuse a tile only where
``tiles.py`` lists it, or where PyTorch says that this card has no operator for such heads.
Everything else fails: it is shown, and the exit code is 1. docs/measured/devices.md
explains every line. `hyper-cp doctor` runs the same checks on a few tiles, and on all ranks.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from hyper_cp.cli.diagnosis.findings import CRASHED, Finding
from hyper_cp.cli.diagnosis.ranks import default_device
from hyper_cp.cli.diagnosis.timing import ROUNDS

from . import merges, ranks, replays, selected, tiles, times

SECTIONS = "kernels", "layouts", "flex", "merges", "selected", "replays", "engine", "tiles", "shares"


def section(name: str, device: str, dtype: torch.dtype, args: argparse.Namespace) -> Iterator[Finding | str]:
    """Yield the findings of one section as they come; lines of text are times."""
    dtypes = list(dict.fromkeys([dtype, torch.float32]))
    if name == "kernels":
        yield from tiles.check_kernels(device, dtypes)
    elif name == "layouts":
        yield from tiles.check_layouts(device, dtype)
    elif name == "flex":
        yield from tiles.check_flex(device, dtypes)
    elif name == "merges":
        yield from merges.check_merges(device, dtype)
    elif name == "selected":
        yield from selected.check_selected(device, dtypes)
    elif name == "replays":
        yield from replays.check_graphs(device, dtype)
        yield from replays.check_compiled(device, dtype, args.compile)
    elif name == "engine":
        yield from ranks.check_engine(device, dtype, args.worlds, min([1024, *args.lengths]))
    elif name == "tiles":
        yield from times.time_tiles(device, dtype, args)
    else:
        yield from times.time_shares(device, dtype, args)


def run(name: str, device: str, dtype: torch.dtype, args: argparse.Namespace) -> Iterator[Finding | str]:
    """Yield a section; an error outside of its checks fails it, and the next one runs."""
    try:
        yield from section(name, device, dtype, args)
    except Exception as error:
        traceback.print_exc()
        yield Finding(name, f"section {name}", CRASHED, f"{type(error).__name__}: {error}")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192 << i for i in range(6)])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8], help="simulated ranks of the engine")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="ranks whose share is timed")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--failures", action="store_true", help="print failures and times only")
    on_cuda = ["aot_eager", "inductor", "inductor/reduce-overhead"]
    parser.add_argument("--compile", nargs="*", help="compiler backends, with a mode after a slash")
    args = parser.parse_args(given)
    if args.compile is None:
        args.compile = on_cuda if args.device.startswith("cuda") else ["aot_eager"]
    return args


def device_name(device: str) -> str:
    """Return the name of a device and, if its driver tells it, the clock at which it runs now."""
    if device == "cpu":
        return device
    module = torch.get_device_module(device)
    try:
        clock = f", now at {module.clock_rate()} MHz"
    except (AttributeError, ModuleNotFoundError, RuntimeError):  # it needs the driver's library, on CUDA pynvml
        clock = ""
    return f"{module.get_device_name()}{clock}"


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    device, dtype = args.device, getattr(torch, args.dtype)
    if torch.device(device).index is not None:  # events and names are those of the current device
        torch.accelerator.set_device_index(torch.device(device).index)
    print(f"torch {torch.__version__} on {device_name(device)}")
    torch.manual_seed(0)
    outcomes: Counter[str] = Counter()
    failed: list[Finding] = []
    for title in args.only:
        print(f"\n--- {title}", flush=True)
        for result in run(title, device, dtype, args):
            if isinstance(result, str) or result.failed or not args.failures:
                print(result, flush=True)
            if isinstance(result, Finding):
                outcomes[result.status] += 1
                failed += [result] if result.failed else []
    print(f"\n{device_name(device)}: " + ", ".join(f"{count} {status}" for status, count in outcomes.items()))
    for finding in failed:
        print(f"FAILED  {finding}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

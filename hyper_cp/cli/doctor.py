"""Examines the machine: versions, devices, kernels, every exchange between ranks, and the speed of links and devices.

    hyper-cp doctor                                               # this process alone
    torchrun --nproc-per-node 8 -m hyper_cp doctor                # all ranks of a host (or of several)
    torchrun --nproc-per-node 8 -m hyper_cp doctor --json > measured.json
    hyper-cp plan config.json --sequence 1M --gpus 64 --measured measured.json

Results are compared with plain math in fp64. The exit code is 1 on every rank if anything is WRONG on any of them, and
2 for wrong options. Warnings do not change it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..planner import plan
from ..planner.cluster import PROFILES
from .diagnosis.exchanges import check_exchanges
from .diagnosis.findings import ABSENT, NOTE, OK, REFUSED, WARNING, Finding
from .diagnosis.machine import machine
from .diagnosis.ranks import Ranks, default_device, one_of_several_ranks, process_group
from .diagnosis.speeds import measure
from .diagnosis.tiles import check_kernels
from .options import mistake
from .shown import progress, say

MODEL = {"layers": 32, "heads": 32, "kv_heads": 8, "width": 4096, "ffn": 14336, "vocabulary": 128256}
STYLES = {OK: "green", WARNING: "yellow", REFUSED: "dim", ABSENT: "dim"}
"""rich's styles of findings."""
TOKENS = 16384
"""Tokens of each rank in the sequence for which a split is recommended, of Llama 3 8B."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``hyper-cp doctor``."""
    parser.add_argument("--device", help="cpu, cuda, npu ... (default: the accelerator that is there, else cpu)")
    parser.add_argument("--ulysses-degree", type=int, help="time the two dimensions of ring x this (default: by host)")
    parser.add_argument("--message-mb", type=float, help="size of the messages that are timed (default: by device)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a rank waits for others (120)")
    parser.add_argument("--json", action="store_true", help="print JSON, a file for `hyper-cp plan --measured`")


def run(args: argparse.Namespace) -> int:
    """Examine this rank together with the others. Return the exit code, which is the same on all ranks."""
    device = args.device or default_device()
    try:
        several = one_of_several_ranks()
        _check_options(args, device, int(os.environ["WORLD_SIZE"]) if several else 1)
    except ValueError as error:
        return mistake("doctor", error)
    with process_group(device, args.timeout, several):
        return _examine(Ranks(device), args)


def _check_options(args: argparse.Namespace, device: str, ranks: int) -> None:
    here = {"cpu", default_device()}
    if device not in here:
        raise ValueError(
            f"--device {device} is not on this machine. Checks run on devices. Choose one of {', '.join(sorted(here))}"
        )
    for name, value in (("--message-mb", args.message_mb), ("--timeout", args.timeout)):
        if value is not None and not 0 < value < 2**20:
            raise ValueError(f"{name} {value} is not a positive number. It is a size or a time. Pass one above 0")
    degree = args.ulysses_degree
    if degree is not None and (degree < 1 or ranks % degree):
        raise ValueError(
            f"--ulysses-degree {degree} does not divide the {ranks} ranks. The mesh is ring x ulysses. Choose a divisor"
        )


def _examine(ranks: Ranks, args: argparse.Namespace) -> int:
    findings: list[Finding] = []
    measured: dict[str, Any] = {}
    shown = ranks.rank == 0 and not args.json
    with progress("examining: less than a minute on most machines", shown=shown):
        for finding in _findings(ranks, args, measured):
            if shown and (not findings or findings[-1].section != finding.section):
                say(f"\n{finding.section}", "bold")
            if shown:
                say(f"  {finding}", "bold red" if finding.failed else STYLES.get(finding.status, ""))
            findings.append(finding)
    wrong = [finding.what for finding in findings if finding.failed]
    code = int(any(ranks.share(bool(wrong))))
    if shown:
        warnings = sum(finding.status == WARNING for finding in findings)
        text = f"\n{'WRONG: ' + '; '.join(wrong) if wrong else 'OK'} ({warnings} warnings)"
        say(text, "bold red" if wrong else "green")
    elif ranks.rank == 0:
        report = measured | {"ok": not code, "findings": [asdict(f) for f in findings]}
        print(json.dumps(report, indent=1), flush=True)
    return code


def _findings(ranks: Ranks, args: argparse.Namespace, measured: dict[str, Any]) -> Iterator[Finding]:
    """Yield everything in the order of the report, and put measurements into ``measured``."""
    yield from machine(ranks)
    yield from map(ranks.worst, check_kernels(ranks.device))
    yield from check_exchanges(ranks)
    message = None if args.message_mb is None else max(1, int(args.message_mb * 2**20))
    speeds, found = measure(ranks, args.ulysses_degree, message)
    measured |= found
    yield from speeds
    yield recommended(ranks, measured)


def recommended(ranks: Ranks, measured: dict[str, Any]) -> Finding:
    """Return the split of attention that the planner puts first with these measurements, by time alone."""
    if ranks.size == 1:
        return Finding("split", "one rank", NOTE, "start it under torchrun on the ranks that train, to compare splits")
    name = next((n for n in PROFILES if n in str(measured["device"]).lower()), "h100")
    everything: dict[str, Any] = {"checkpointing": "none", "chunked_loss": True, "memory_gb": 1e9}
    report = plan(
        MODEL,
        TOKENS * ranks.size,
        gpus=ranks.size,
        cp_size=ranks.size,
        cluster=name,
        measured=measured,
        dtype="float32" if ranks.device == "cpu" else "bfloat16",
        **everything,
    )
    best = report.strategies[0]
    style = ", ".join(f"{key}={value!r}" for key, value in best.strategy.style().items())
    problem = f"for Llama 3 8B and {TOKENS:,} tokens a rank, by time alone"
    waits = f"{best.exposed_seconds / best.step_seconds:.0%} of its step waits for transfers"
    again = f"Numbers that were not measured are those of {name}. `hyper-cp plan --measured` answers for your model"
    return Finding("split", problem, NOTE, f"ContextParallel({style}); {waits}. {again}")

"""Measures scenarios in which libraries differ: one page, one file of results, one picture.

python -m benchmarks.scenarios --write     # all of them, about 10 minutes on two quiet cores; writes the page
python -m benchmarks.scenarios --quick     # short sequences, one round: does everything run?
python -m benchmarks.scenarios --scenarios packed window --only hyper_cp DeepSpeed
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import report
from .run import run
from .work import SCENARIOS

QUICK = 8
"""Sequences are this many times shorter with ``--quick``."""


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scenarios", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [work.name for work in SCENARIOS]
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--only", nargs="+", default=[], help="only ways whose name contains one of these words")
    parser.add_argument("--quick", action="store_true", help="sequences of an eighth, one round; not for the page")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--plot", type=Path, help="draw the picture to this file")
    parser.add_argument("--write", action="store_true", help="write the page, its results and its picture")
    args = parser.parse_args(given)
    if args.write and (args.quick or args.only or args.scenarios != names):
        parser.error("--write is for all scenarios at their lengths. Leave out --quick, --only and --scenarios")
    return args


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    works = [work for work in SCENARIOS if work.name in args.scenarios]
    if args.quick:
        works = [replace(work.resized(work.length // QUICK), rounds=1) for work in works]
    start = time.monotonic()
    found = run(
        works, args.only, lambda line: print(f"{time.monotonic() - start:4.0f} s  {line}", file=sys.stderr, flush=True)
    )
    print(report.markdown(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot:
        report.plot(found, args.plot)
    if args.write:
        report.write(found)
    results = [result for one in found["runs"] for result in one["results"]]
    return int(any(result["library"] == "hyper_cp" and result["status"] != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())

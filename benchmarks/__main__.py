"""Compares this library with plain SDPA and with other libraries, on gloo ranks of this machine.

    python -m benchmarks                                   # all problems of the documents, about 17 minutes
    python -m benchmarks --write                           # and writes docs/measured/performance.md
    python -m benchmarks --lengths 4096 --rounds 5 --only Ulysses

A problem is attention of one shape, mask and dtype on a number of ranks with one thread each, forward and backward. All
contenders run in one process group. Each is checked first, against fp64 on a short sequence and against plain SDPA on
the measured one, and refused if it is wrong; those that are not installed, or do not take the problem, are skipped with
the reason. Then they take turns; plain SDPA in one process, with as many threads as there are ranks, runs between every
two of them. The table shows the time of plain SDPA, just before and after, over theirs: the median of all rounds, the
smallest and the largest. 1.00 is perfect scaling. The exit code is 1 if a mode of this library is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .speed import report
from .speed.case import BARS, Problem
from .speed.run import run

ROOT = Path(__file__).parents[1]
DOCUMENT, PLOT, RESULTS = (
    ROOT / "docs" / "measured" / "performance.md",
    ROOT / "docs" / "pictures" / "performance.png",
    ROOT / "docs" / "measured" / "performance.json",
)

PROBLEMS = [
    (Problem(4096), 7),
    (Problem(8192), 4),
    (Problem(4096, "full"), 3),
    (Problem(4096, kv_heads=2), 3),
    (Problem(8192, "documents"), 3),
]
"""The problems of the documents, and the rounds of each."""

PROMISED = [(4096, 0.90), (8192, 0.95)]
"""Causal problems of these lengths, and the share of perfect scaling that every balanced mode should reach."""


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="lengths of one problem, in place of all problems")
    parser.add_argument("--mask", default="causal", choices=["causal", "full", "documents"], help="of these lengths")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=list(BARS))
    parser.add_argument("--rounds", type=int, help="timed rounds of every problem")
    parser.add_argument("--only", nargs="+", default=[], help="only contenders whose name contains one of these words")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--plot", type=Path, help="draw the plot to this file")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}, {PLOT.name} and {RESULTS.name}")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    args = arguments(given)
    problems = PROBLEMS
    if args.lengths:
        shape = {"heads": args.heads, "kv_heads": args.kv_heads, "dim": args.dim}
        kind = {"mask": args.mask, "dtype": args.dtype, "world": args.ranks}
        problems = [(Problem(length, **shape, **kind), 5) for length in args.lengths]
    if args.rounds:
        problems = [(problem, args.rounds) for problem, _ in problems]
    found = run(problems, args.only, lambda line: print(line, file=sys.stderr, flush=True))
    table, verdicts = report.markdown(found), report.summary(found, PROMISED)
    print(table, *(["", *verdicts] if verdicts else []), sep="\n")
    for path in [args.json, *([RESULTS] if args.write else [])]:
        if path is not None:
            path.write_text(json.dumps(found, indent=1) + "\n")
    for path in [args.plot, *([PLOT] if args.write else [])]:
        if path is not None:
            report.plot(found, path)
    if args.write:
        picture = f"![Share of perfect scaling under a causal mask](../{PLOT.parent.name}/{PLOT.name})"
        report.write_section(DOCUMENT, "speed", f"{table}\n\n{picture}")
    results = [result for one in found["runs"] for result in one["results"]]
    return int(any(result["status"] == "WRONG" and result["library"] == "hyper_cp" for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""Results as a Markdown table, a plot, and sections of documents."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .case import Problem

Key = tuple[str, str, str, str]


def shares(result: dict[str, Any]) -> list[float]:
    """Return the time of plain SDPA over that of a contender, round by round: 1 is perfect scaling."""
    pairs = zip(result["limits"], result["seconds"], strict=True)
    return [limit / seconds for limit, seconds in pairs if seconds is not None]


def cell(result: dict[str, Any]) -> str:
    """Return the median, and the smallest and the largest of all rounds."""
    if result["status"] == "WRONG":
        return "wrong"
    found = shares(result)
    if not found:
        return ""
    spread = f" ({min(found):.2f} to {max(found):.2f})" if len(found) > 1 else ""
    return f"{statistics.median(found):.2f}{spread}"


def _rows(found: dict[str, Any]) -> dict[Key, dict[int, dict[str, Any]]]:
    """Return the results of each contender, by the index of the run."""
    rows: dict[Key, dict[int, dict[str, Any]]] = {}
    for index, run in enumerate(found["runs"]):
        for result in run["results"]:
            key = result["library"], result["mode"], result["layout"], result["note"]
            rows.setdefault(key, {})[index] = result
    return rows


def markdown(found: dict[str, Any]) -> str:
    """Return the table of all runs, and why some contenders are not in it."""
    about, runs = found["machine"], found["runs"]
    peers = ", ".join(f"{name} {about[name]}" for name in ("deepspeed", "ringmaster", "yunchang"))
    lines = [
        f"torch {about['torch']}, {peers}; {about['processor']}, {about['cores']} cores, load {about['load']} before",
        f"the run, {about['date']}. Rounds: {', '.join(str(len(run['limit'])) for run in runs)}.",
        "",
        "| library | mode | layout | " + " | ".join(str(Problem(**run["problem"])) for run in runs) + " |",
        "|---|---|---|" + "---|" * len(runs),
    ]
    medians = (f"{statistics.median(run['limit']) * 1e3:.0f} ms" for run in runs)
    lines.append("| plain SDPA, one process | | | " + " | ".join(medians) + " |")
    for (library, mode, layout, note), results in _sorted(_rows(found)):
        cells = [cell(results[i]) if i in results else "" for i in range(len(runs))]
        if any(cells):
            name = f"{mode} ({note})" if note else mode
            balanced = "" if next(iter(results.values()))["balanced"] else " (unbalanced)"
            lines.append(f"| {library} | {name} | {layout}{balanced} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_reasons(found)]).rstrip()


def _sorted(rows: dict[Key, dict[int, dict[str, Any]]]) -> list[tuple[Key, dict[int, dict[str, Any]]]]:
    """Modes together, balanced ones first, in the order of contenders."""
    modes = list(dict.fromkeys(key[1] for key in rows))
    return sorted(rows.items(), key=lambda row: (not next(iter(row[1].values()))["balanced"], modes.index(row[0][1])))


def _reasons(found: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each contender that was refused, or that nothing ran."""
    for (library, mode, layout, note), results in _rows(found).items():
        wrong = [f"{result['reason']}" for result in results.values() if result["status"] == "WRONG"]
        ran = any(result["seconds"] for result in results.values())
        reasons = wrong or ([] if ran else [result["reason"] for result in results.values()])
        if reasons:
            what = "refused" if wrong else "not run"
            yield f"- {library}, {mode}, {layout}{f' ({note})' if note else ''}: {what}. {reasons[0]}."


def behind(found: dict[str, Any], library: str = "hyper_cp") -> list[str]:
    """Return sentences about peers that are faster than the fastest mode of ``library`` of their kind, and in how many
    rounds: in about half of them they are equally fast."""
    lines = []
    for run in found["runs"]:
        best: dict[tuple[str, bool], tuple[float, str, list[float]]] = {}
        for result in run["results"]:
            ratios = shares(result) if result["status"] == "ok" else []
            if ratios:
                key, name = (result["mode"], result["library"] == library), f"{result['library']} {result['note']}"
                best[key] = max(best.get(key, (0.0, "", [])), (statistics.median(ratios), name, ratios))
        for (mode, own), (ratio, name, rounds) in best.items():
            ours = best.get((mode, True))
            if not own and ours and ratio > ours[0]:
                ahead = sum(theirs > mine for theirs, mine in zip(rounds, ours[2], strict=False))
                where = f"{Problem(**run['problem'])}: {mode} of {name} {ratio:.3f}, of {library} {ours[0]:.3f}"
                lines.append(f"{where} (ahead in {ahead} of {len(rounds)} rounds)")
    return lines


def plot(found: dict[str, Any], path: Path) -> None:
    """Bars of the share of perfect scaling, with the spread of the rounds, for the first two runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [run for run in found["runs"] if any(shares(result) for result in run["results"])][:2]
    most = max(sum(bool(shares(result)) for result in run["results"]) for run in runs)
    figure, panels = plt.subplots(1, len(runs), figsize=(5.2 * len(runs), 0.9 + 0.27 * most), squeeze=False)
    for run, panel in zip(runs, panels[0], strict=True):
        bars = [(statistics.median(s), min(s), max(s), r) for r in run["results"] if (s := shares(r))]
        bars.sort(key=lambda bar: bar[0])
        names = [f"{r['library']}: {r['mode']}, {r['layout']}{', ' + r['note'] if r['note'] else ''}" for *_, r in bars]
        medians = [median for median, *_ in bars]
        spread = [[m - low for m, low, *_ in bars], [high - m for m, _, high, _ in bars]]
        colours = ["#2a6f97" if r["library"] == "hyper_cp" else "#b0b0b0" for *_, r in bars]
        panel.barh(names, medians, xerr=spread, color=colours, ecolor="#555555", error_kw={"linewidth": 0.8})
        panel.axvline(1.0, color="#555555", linewidth=0.8, linestyle=":")
        panel.set_title(str(Problem(**run["problem"])), fontsize=9)
        panel.set_xlabel("share of perfect scaling")
        panel.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_section(path: Path, name: str, text: str, command: str = "python -m benchmarks") -> None:
    """Replace the text between the marks of a section of a document.

    Raises:
        ValueError: if the document has no such section.
    """
    begin, end = f"<!-- {name}: written by {command} -->", f"<!-- end of {name} -->"
    document = path.read_text()
    pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(document):
        raise ValueError(f"{path} has no section {name!r}. The table is written there. Add the lines {begin} and {end}")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document))


def summary(found: dict[str, Any], bars: Sequence[tuple[int, float]]) -> list[str]:
    """Return sentences about what was promised: each balanced mode's share at some lengths, and peers that are
    faster."""
    lines = []
    for run in found["runs"]:
        problem = Problem(**run["problem"])
        bar = dict(bars).get(problem.length)
        if bar is None or problem != Problem(problem.length):
            continue
        own = {
            f"{r['mode']}, {r['layout']}{', ' + r['note'] if r['note'] else ''}": statistics.median(s)
            for r in run["results"]
            if r["library"] == "hyper_cp" and r["balanced"] and (s := shares(r))
        }
        if own:
            name, least = min(own.items(), key=lambda item: item[1])
            verdict = "kept" if least >= bar else "NOT kept"
            lines.append(f"{problem}: every balanced mode at least {bar:.2f}: {verdict} (least {least:.3f}: {name})")
    return [*lines, *(f"faster peer: {line}" for line in behind(found))]

"""The results of scenarios as a page, a short table and a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

from ..speed.report import write_section
from .work import LATENT, VOCABULARY

ROOT = Path(__file__).parents[2]
DOCUMENT, RESULTS, PLOT, README = (
    ROOT / "docs" / "measured" / "scenarios.md",
    ROOT / "docs" / "measured" / "scenarios.json",
    ROOT / "docs" / "pictures" / "scenarios.png",
    ROOT / "README.md",
)
COMMAND = "python -m benchmarks.scenarios"
OURS = "hyper_cp"
LIBRARIES = (OURS, "DeepSpeed", "yunchang", "ringmaster", "by hand", "transformers")
"""The columns of the short table."""

CAPTION = """Less is better: the fastest way of each library, forward and backward, medians of rounds on the
CPU with gloo. [Scenarios](docs/measured/scenarios.md) has every way with its range and memory, the
reasons of those that cannot, the machine, and where another library is ahead."""

Run = dict[str, Any]
Result = dict[str, Any]


def rates(run: Run) -> list[str]:
    """Return the rates that were measured, without a limit first."""
    found = dict.fromkeys(rate for result in run["results"] for rate in result["seconds"])
    return sorted(found, key=lambda rate: 0.0 if rate == "none" else float(rate))


def link(rate: str) -> str:
    return "no limit" if rate == "none" else f"links of {rate} Mbit/s"


def cell(seconds: list[float], digits: int = 2) -> str:
    """Return the median, and the smallest and the largest of all rounds."""
    if not seconds:
        return ""
    spread = f" ({min(seconds):.{digits}f} to {max(seconds):.{digits}f})" if len(seconds) > 1 else ""
    return f"{statistics.median(seconds):.{digits}f}{spread}"


def best(run: Run, rate: str, own: bool) -> Result | None:
    """Return the fastest way of this library, or of the others that use all ranks."""
    found = [
        r
        for r in run["results"]
        if r["status"] == "ok" and r["seconds"].get(rate) and (r["library"] == OURS) == own and not r["alone"]
    ]
    return min(found, key=lambda r: statistics.median(r["seconds"][rate]), default=None)


# --------------------------------------------------------------------------- the page


def markdown(found: dict[str, Any]) -> str:
    """Return the section of the page."""
    about = found["machine"]
    names = ", ".join(f"{name} {about[name]}" for name in ("deepspeed", "ringmaster", "yunchang"))
    lines = [
        f"torch {about['torch']}, {names}; {about['processor']}, {about['cores']} cores, load {about['load']} before",
        f"the run, {about['date']}.",
    ]
    if found["no_links"]:
        lines += ["", f"Without slow links: {found['no_links']}"]
    for run in found["runs"]:
        lines += ["", *section(run)]
    return "\n".join([*lines, "", "### Where a library is ahead", "", *verdicts(found)])


def section(run: Run) -> Iterator[str]:
    """Yield the table of one scenario, and why some libraries are not in it."""
    work, columns = run["scenario"], rates(run)
    heads = f"{work['heads']}/{work['kv_heads']}" if work["heads"] != work["kv_heads"] else work["heads"]
    shape = {
        "loss": f"width {work['dim']}, {VOCABULARY:,} classes",
        "latents": f"{heads} heads of {LATENT['plain']} + {LATENT['rotary']}, latents of {LATENT['rank']}",
    }.get(work["kind"], f"{heads} heads of {work['dim']}")
    title = work["title"]
    yield f"### {title[0].upper()}{title[1:]}"
    yield ""
    yield f"S={work['length']:,}, {shape}, {work['world']} ranks, at most {work['rounds']} rounds."
    yield ""
    yield "| library | way | layout | " + "".join(f"{link(rate)}, s | " for rate in columns) + "memory, MiB |"
    yield "|---|---|---|" + "---:|" * (len(columns) + 1)
    for r in run["results"]:
        if r["status"] == "ok":
            cells = "".join(f"{cell(r['seconds'].get(rate, []))} | " for rate in columns)
            yield f"| {r['library']} | {r['mode']} | {r['layout']} | {cells}{r['memory'] / 2**20:,.0f} |"
    reasons = [
        f"- {r['library']}, {r['mode']}: {r['status'] if r['status'] != 'WRONG' else 'refused, wrong'}. {r['reason']}."
        for r in run["results"]
        if r["status"] != "ok"
    ]
    if reasons:
        yield ""
        yield from (reason.replace("..", ".").replace("|", "\\|") for reason in reasons)


def verdicts(found: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each scenario and rate: who is the fastest, by how much, in how many rounds; and who needs
    the least memory."""
    for run in found["runs"]:
        for rate in rates(run):
            mine, theirs = best(run, rate, True), best(run, rate, False)
            where = f"{run['scenario']['title']}, {link(rate)}"
            if mine is None:
                yield f"- {where}: this library has no result."
                continue
            if theirs is None:
                yield f"- {where}: no other library can do it."
                continue
            a, b = mine["seconds"][rate], theirs["seconds"][rate]
            ratio = statistics.median(b) / statistics.median(a)
            name = f"{theirs['library']} ({theirs['mode']})"
            ahead, compared = sum(y < x for x, y in zip(a, b, strict=False)), min(len(a), len(b))
            if ratio < 1:
                yield (
                    f"- {where}: **{name} is ahead**: {statistics.median(b):.2f} s, this library ({mine['mode']}) "
                    f"{statistics.median(a):.2f} s; it was faster in {ahead} of {compared} rounds."
                )
            else:
                yield (
                    f"- {where}: this library ({mine['mode']}) takes {statistics.median(a):.2f} s; the fastest other, "
                    f"{name}, {ratio:.2f} times as long, and was faster in {ahead} of {compared} rounds."
                )
        yield from _memory(run)


def _memory(run: Run) -> Iterator[str]:
    """Yield who needs less memory than this library."""
    ready = [r for r in run["results"] if r["status"] == "ok" and not r["alone"]]
    mine = min((r["memory"] for r in ready if r["library"] == OURS), default=None)
    theirs = min((r for r in ready if r["library"] != OURS), key=lambda r: r["memory"], default=None)
    if mine is not None and theirs is not None and theirs["memory"] < 0.95 * mine:
        yield (
            f"- {run['scenario']['title']}, memory: **{theirs['library']} ({theirs['mode']}) is ahead**: "
            f"{theirs['memory'] / 2**20:,.0f} MiB, this library {mine / 2**20:,.0f} MiB."
        )


# --------------------------------------------------------------------------- the short table


def short(found: dict[str, Any]) -> str:
    """Return the table of the README: seconds of each library's fastest way, on the slowest link that was measured."""
    titles = [name if name != "transformers" else "one process, transformers" for name in LIBRARIES]
    lines = ["| seconds of a step, CPU | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
    for run in found["runs"]:
        work = run["scenario"]
        if work["name"] in SHOWN and rates(run):
            rate = rates(run)[-1]
            cells = [_fastest(run, rate, library) for library in LIBRARIES]
            where = "" if rate == "none" or "link" in work["title"] else f" on {rate} Mbit/s"
            lines.append(f"| {work['title']}{where} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", CAPTION])


SHOWN = ("packed", "window", "latents", "hosts", "selected", "selected_mha")


def _fastest(run: Run, rate: str, library: str) -> str:
    some = [r for r in run["results"] if r["library"] == library]
    times = [statistics.median(r["seconds"][rate]) for r in some if r["status"] == "ok" and r["seconds"].get(rate)]
    if times:
        return f"{min(times):.2f}"
    return some[0]["status"].lower() if some else "cannot"


# --------------------------------------------------------------------------- the picture


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw bars of each library's fastest way, for every scenario on the slowest links that were measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [run for run in found["runs"] if rates(run)]
    across = min(len(runs), 4)
    down = -(-len(runs) // across)
    figure, grid = pyplot.subplots(
        down, across, figsize=(4.2 * across, 2.7 * down), squeeze=False, layout="constrained"
    )
    for panel in grid.flat[len(runs) :]:
        panel.set_axis_off()
    for run, panel in zip(runs, grid.flat, strict=False):
        rate = rates(run)[-1]
        names = list(dict.fromkeys(r["library"] for r in run["results"]))[::-1]
        for at, name in enumerate(names):
            ready = [r for r in run["results"] if r["library"] == name and r["seconds"].get(rate)]
            if not ready:
                panel.text(0, at, f"  {_fastest(run, rate, name)}", va="center", fontsize=8, color="#777777")
                continue
            seconds = min((r["seconds"][rate] for r in ready), key=statistics.median)
            middle = statistics.median(seconds)
            colour = "#2a6f97" if name == OURS else "#b0b0b0"
            spread = [[middle - min(seconds)], [max(seconds) - middle]]
            panel.barh(at, middle, xerr=spread, color=colour, ecolor="#555555", error_kw={"linewidth": 0.8})
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.set_xlim(left=0)
        panel.tick_params(axis="x", labelsize=8)
        title = "\n".join(wrap(run["scenario"]["title"], 46))
        panel.set_title(f"{title}\n{run['scenario']['world']} ranks, {link(rate)}", fontsize=9)
    for panel in grid[-1]:
        panel.set_xlabel("seconds of a step")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def page(found: dict[str, Any]) -> str:
    """Return the section of the page, with its picture."""
    picture = f"![Seconds of a step in every scenario, for each library](../{PLOT.parent.name}/{PLOT.name})"
    return f"{picture}\n\n{markdown(found)}"


def write(found: dict[str, Any]) -> None:
    """Write the results, the picture, the page and the table of the README."""
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    plot(found, PLOT)
    write_section(DOCUMENT, "scenarios", page(found), COMMAND)
    write_section(README, "scenarios", short(found), COMMAND)

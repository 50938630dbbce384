"""The report of a plan: every strategy with its cost, and the reason why it is, or is not, the one to use first."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from ..style import ContextParallel
from .cluster import Cluster
from .model import ModelShape
from .strategies import Estimate

AS_FAST = 1.05
"""The error of the model of time: strategies whose times differ by less are equally fast."""


@dataclass(frozen=True)
class PlanReport:
    """Every strategy with its cost, the best first.

    Attributes:
        strategies: those that fit by falling tokens per second, then those that do not fit by rising memory.
        model, cluster, gpus, length, documents, batch: the problem that was planned; ``documents`` is their number.
        memory_bytes: the bytes of a device's memory that a step may use.
    """

    strategies: tuple[Estimate, ...]
    model: ModelShape
    cluster: Cluster
    gpus: int
    length: int
    documents: int
    batch: int
    memory_bytes: float

    @property
    def best(self) -> Estimate | None:
        """The strategy to use first; None if nothing fits."""
        return self.strategies[0] if self.strategies[0].fits else None

    def style(self, **more: Any) -> ContextParallel:
        """The style to use first, for a cp mesh of ``best.strategy.cp_size`` ranks.

        Args:
            more: further arguments of :class:`ContextParallel`, ``seq_dim=2, head_dim=1`` for example.

        Raises:
            ValueError: if nothing fits.
        """
        if self.best is None:
            raise ValueError(
                f"no strategy fits, so there is no style. The smallest peak is "
                f"{self.strategies[0].memory.peak / 1e9:.1f} GB. Print the report for the way out"
            )
        return ContextParallel(**self.best.strategy.style(), **more)  # type: ignore[arg-type]

    def of_modes(self) -> list[Estimate]:
        """The best estimate of each mode (cp size, degree, exchange, layout), over checkpointing and loss."""
        seen: set[tuple[object, ...]] = set()
        found = []
        for estimate in self.strategies:
            s = estimate.strategy
            key = s.cp_size, s.ulysses_degree, s.kv_exchange, s.layout
            if key not in seen:
                seen.add(key)
                found.append(estimate)
        return found

    def rows(self, most: int | None = None) -> list[list[str]]:
        """The table as text: a header, then the best estimate of each mode, ``most`` of them at most."""
        header = ["mode", "cp", "layout", "checkpointing", "loss", "tokens/rank", "PFLOP", "GB in host", "GB between"]
        header += ["messages", "balance", "exposed s", "step s", "tokens/s", "peak GB", "why"]
        lines = [header]
        for e in self.of_modes()[:most]:
            s = e.strategy
            lines.append(
                [
                    s.mode,
                    str(s.cp_size),
                    s.layout,
                    s.checkpointing,
                    "chunked" if s.chunked_loss else "plain",
                    f"{e.tokens_per_rank:,}",
                    f"{e.flops / 1e15:.2f}",
                    f"{e.bytes_inside / 1e9:.2f}",
                    f"{e.bytes_between / 1e9:.2f}",
                    str(e.messages),
                    f"{e.balance:.2f}",
                    f"{e.exposed_seconds:.3f}",
                    f"{e.step_seconds:.3f}",
                    f"{e.tokens_per_second:,.0f}",
                    f"{e.memory.peak / 1e9:.1f}",
                    e.why,
                ]
            )
        return lines

    def heading(self) -> list[str]:
        """The lines above the table: the problem, and the answer."""
        packed = f" in {self.documents} documents" if self.documents > 1 else ""
        memory = self.memory_bytes / 1e9
        lines = [
            f"{self.length:,} tokens{packed}, {self.gpus} x {self.cluster.name}, {memory:.0f} GB each for a step; "
            f"{self.model.parameters / 1e9:.1f} billion parameters"
        ]
        c, best = self.cluster, self.best
        lines.append(
            f"Assumed: {c.matmul_share:.0%} of {c.tflops:.0f} TFLOP/s in matrix products, {c.forward_share:.0%} and "
            f"{c.backward_share:.0%} in attention, {c.link_share:.0%} of the links. Left out: the exchange of weights "
            "and gradients (FSDP, DDP)"
        )
        left = [n for n in range(2, self.gpus + 1) if self.gpus % n == 0 and self.length % n]
        if left:
            every = 2 * math.lcm(*left)  # two chunks on each rank
            padded = -(-self.length // every) * every
            lines.append(
                f"Left out: cp meshes of {', '.join(map(str, left))}, over which {self.length:,} tokens do not split. "
                f"Handlers pad batches: plan with {padded:,} to see them"
            )
        if best is None:
            least = self.strategies[0]
            lines.append(
                f"Nothing fits: the smallest peak is {least.memory.peak / 1e9:.1f} GB ({least.strategy.mode}, cp "
                f"{least.strategy.cp_size}), of which {least.memory.states / 1e9:.1f} GB are parameters, gradients and "
                "optimizer states. Use more devices, a shorter sequence, or states that are split further"
            )
        else:
            s = best.strategy
            style = ", ".join(f"{name}={value!r}" for name, value in s.style().items())
            device = "npu" if c.name.startswith("910") else "cuda"
            shape, names = f"({self.gpus // s.cp_size}, {s.cp_size})", '("dp", "cp")'
            checkpoints = {
                "none": "no checkpointing",
                "attention": "every layer checkpointed but for its attention (SAVE_LIST)",
                "layers": "every layer checkpointed",
            }
            loss = "mean_loss(hidden, labels, head=...)" if s.chunked_loss else "mean_loss(logits, labels)"
            lines += [
                f"Use first: cp mesh of {s.cp_size}, {checkpoints[s.checkpointing]}, {loss}. {best.why}",
                f'    mesh = init_device_mesh("{device}", {shape}, mesh_dim_names={names})  # the style: on mesh["cp"]',
                f"    style = ContextParallel({style})",
                *self._others(best),
            ]
        return lines

    def _others(self, best: Estimate) -> list[str]:
        """Lines about those that the model cannot tell from the best in time, and that need less of something."""
        fast = [e for e in self.strategies if e.fits and best.tokens_per_second / e.tokens_per_second < AS_FAST]
        spare = min(fast, key=lambda e: e.memory.peak)
        quiet = min(fast, key=lambda e: (_sent_between(e), e.memory.peak))
        memory = f"the least memory ({spare.memory.peak / 1e9:.1f} GB, not {best.memory.peak / 1e9:.1f})"
        sent = f"the fewest bytes between hosts ({_sent_between(quiet):.0f} KB a token, not {_sent_between(best):.0f})"
        found: dict[str, list[str]] = {}
        if spare.memory.peak < 0.95 * best.memory.peak:
            found.setdefault(_named(spare), []).append(memory)
        if _sent_between(quiet) < 0.95 * _sent_between(best):
            found.setdefault(_named(quiet), []).append(sent)
        return [f"As fast within the model's error, with {' and '.join(x)}: {name}" for name, x in found.items()]

    def __str__(self) -> str:
        return self.text(16)

    def text(self, most: int) -> str:
        """The heading and ``most`` rows of the table as plain text."""
        rows = self.rows(most)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        left = len(self.of_modes()) - len(rows) + 1
        more = [f"and {left} more modes; json() has all"] if left > 0 else []
        return "\n".join([*self.heading(), *table, *more])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, with all strategies."""
        found = []
        for e in self.strategies:
            values = asdict(e) | {"mode": e.strategy.mode, "style": e.strategy.style(), "step_seconds": e.step_seconds}
            values["memory"] |= {"peak": e.memory.peak}
            found.append(values)
        return {
            "format": "hyper-cp plan",
            "version": 1,
            "model": asdict(self.model),
            "cluster": asdict(self.cluster),
            "gpus": self.gpus,
            "length": self.length,
            "documents": self.documents,
            "batch": self.batch,
            "memory_bytes": self.memory_bytes,
            "best": None if self.best is None else 0,
            "strategies": found,
        }

    def json(self) -> str:
        """:meth:`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1)


def _named(e: Estimate) -> str:
    s = e.strategy
    checkpoints = {"none": "no checkpointing", "attention": "layers checkpointed but for attention"}
    saved = checkpoints.get(s.checkpointing, "layers checkpointed")
    return f"{s.mode}, cp mesh of {s.cp_size}, {saved}, {'chunked' if s.chunked_loss else 'plain'} loss"


def _sent_between(e: Estimate) -> float:
    """The kilobytes that a rank sends to other hosts for each of its tokens."""
    return e.bytes_between / e.tokens_per_rank / 1e3


# --------------------------------------------------------------------------- reasons


def explain(estimate: Estimate, best: Estimate, memory_bytes: float, layers: int) -> str:
    """One sentence about ``estimate``, compared with the best strategy."""
    if not estimate.fits:
        return _too_large(estimate, memory_bytes)
    if estimate is best:
        waits = estimate.exposed_seconds / estimate.step_seconds
        return f"simplest of the fastest that fit; {waits:.0%} of its step waits for transfers"
    slower = best.tokens_per_second / estimate.tokens_per_second
    if slower < AS_FAST:
        more = (estimate.memory.peak - best.memory.peak) / 1e9
        same = f"as fast within the model's error ({slower:.2f}x the time)"
        return f"{same}, with {more:.1f} GB more memory" if more >= 0.05 else same
    return f"{slower:.2f}x the time: {_cause(estimate, best, layers)}"


def _too_large(estimate: Estimate, memory_bytes: float) -> str:
    memory = estimate.memory
    parts = {
        "states": memory.states,
        "saved activations": memory.saved,
        "the loss": memory.loss,
        "work space": memory.work,
    }
    if memory.loss < memory.work:
        del parts["the loss"]
    else:
        del parts["work space"]
    name = max(parts, key=lambda part: parts[part])
    return (
        f"does not fit: {memory.peak / 1e9:.1f} of {memory_bytes / 1e9:.0f} GB, {parts[name] / 1e9:.1f} GB of it {name}"
    )


def _cause(estimate: Estimate, best: Estimate, layers: int) -> str:
    """The largest part of the time that the best strategy does not take, per token of a rank."""

    def per_token(e: Estimate, seconds: float) -> float:
        return seconds / e.tokens_per_rank

    def idle(e: Estimate) -> float:
        kernels = e.attention.kernels_forward + e.attention.kernels_backward
        return kernels * (1 - 1 / e.balance)

    causes = {
        "transfers that nothing hides": per_token(estimate, estimate.exposed_seconds)
        - per_token(best, best.exposed_seconds),
        f"the fullest rank has {estimate.balance:.2f}x the mean work": layers
        * (per_token(estimate, idle(estimate)) - per_token(best, idle(best))),
    }
    recompute = ("none", "attention", "layers")
    compute = per_token(estimate, estimate.compute_seconds) - per_token(best, best.compute_seconds)
    if recompute.index(estimate.strategy.checkpointing) > recompute.index(best.strategy.checkpointing):
        causes["it computes activations again"] = compute
    else:
        causes["smaller kernels, and more partials to merge"] = compute - max(
            0.0, causes[f"the fullest rank has {estimate.balance:.2f}x the mean work"]
        )
    return max(causes, key=lambda cause: causes[cause])

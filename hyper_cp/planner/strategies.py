"""Strategies and their estimates: every combination that fits the heads and the length, each with its cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..schedule import layout as layouts
from ..schedule.choices import Limits, heads_after_sharing, stage_limits
from ..schedule.documents import PackedDocuments
from ..schedule.tiles import CAUSAL, FULL, intersect
from .cluster import Cluster
from .memory import Memory, memory, state_bytes
from .model import ModelShape, Pooling
from .timeline import BACKWARD, AttentionTime, Kernels, attention_time, total
from .traffic import Ranks, Sent, TransferTimes, indexer_transfers, pooling_transfers, transfers
from .work import DEALT, FORMULAS, RingWork, ring_work, under_selection

KV_EXCHANGES = ("all_gather", "ring", "needed")
"""Exchanges whose order of transfers the model knows."""


@dataclass(frozen=True)
class Strategy:
    """One way to run a step.

    Attributes:
        cp_size: the number of ranks that share a sequence.
        ulysses_degree: the number of adjacent ranks that trade sequence for heads.
        kv_exchange: the way that keys and values travel between groups of these; None if there is one group only.
        layout: the positions that each rank holds.
        checkpointing: ``"none"``, ``"attention"`` (every layer but for its attention: ``SAVE_LIST`` in a selective
            policy) or ``"layers"``.
        chunked_loss: True if logits are made chunk by chunk.
    """

    cp_size: int
    ulysses_degree: int
    kv_exchange: str | None
    layout: str
    checkpointing: str
    chunked_loss: bool

    @property
    def ring(self) -> int:
        """Ranks of the ring dimension."""
        return self.cp_size // self.ulysses_degree

    @property
    def mode(self) -> str:
        """The name of the mode, as in the README's table."""
        names = {"all_gather": "all-gather", None: "Ulysses" if self.cp_size > 1 else "one rank"}
        name = names.get(self.kv_exchange, str(self.kv_exchange))
        return f"Ulysses {self.ulysses_degree} x {name}" if 1 < self.ulysses_degree < self.cp_size else name

    def style(self) -> dict[str, object]:
        """The arguments of ``ContextParallel``, on a cp mesh of ``cp_size`` ranks."""
        exchange = {} if self.kv_exchange is None else {"kv_exchange": self.kv_exchange}
        degree = None if self.kv_exchange is None else self.ulysses_degree
        return {"ulysses_degree": degree, **exchange, "layout": self.layout}


@dataclass(frozen=True)
class Estimate:
    """The cost of one strategy.

    Attributes:
        tokens_per_rank: the positions that a rank holds, of all batch rows together.
        flops: the FLOPs of the fullest rank, forward, recompute and backward.
        bytes_inside, bytes_between: the bytes that a rank sends in a step inside its host and to other hosts, for
            attention.
        messages: the number of messages that it sends in a step.
        balance: the fullest rank's FLOPs of attention, and of indexers, over the mean.
        compute_seconds: the seconds that kernels of the fullest rank take.
        exposed_seconds: the seconds in which it waits for transfers, or copies for them.
        attention: the seconds of one layer's attention, with its part of the time of indexers.
        memory: the memory of a rank.
        fits: True if the peak is below the device's memory.
        tokens_per_second: the tokens of all GPUs, of which each group of ``cp_size`` has sequences of its own.
        why: the reason why it is, or is not, the strategy to use.
    """

    strategy: Strategy
    tokens_per_rank: int
    flops: float
    bytes_inside: float
    bytes_between: float
    messages: int
    balance: float
    compute_seconds: float
    exposed_seconds: float
    attention: AttentionTime
    memory: Memory
    fits: bool
    tokens_per_second: float
    why: str = field(default="", compare=False)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of one sequence (or one batch of them), without the exchange of weights and gradients."""
        return self.compute_seconds + self.exposed_seconds


@dataclass(frozen=True)
class Workload:
    """Everything that all strategies share.

    Attributes:
        gpus: the number of ranks.
        documents: the documents that are packed into each sequence.
        batch: the number of sequences that each group has in a step.
        element: the bytes of an element of activations.
        per_parameter: the bytes of a parameter with its gradient and optimizer states.
        shards: the number of ranks over which these are split.
        memory_bytes: the bytes of a device's memory that a step may use.
        device: the type of device, on which the stages of an exchange depend.
    """

    model: ModelShape
    cluster: Cluster
    gpus: int
    documents: PackedDocuments
    causal: bool
    batch: int
    element: int
    per_parameter: float
    shards: int
    memory_bytes: float
    device: str = "cuda"

    def ranks(self, ring: int, ulysses: int = 1) -> Ranks:
        """The ranks of a cp mesh, among all of the cluster's."""
        return Ranks(ring, ulysses, self.cluster.gpus_per_host, self.gpus)

    @property
    def length(self) -> int:
        """The global length of a sequence."""
        return self.documents.rows[0][-1]


def modes(workload: Workload, cp_size: int, degrees: Sequence[int], names: Sequence[str]) -> Iterator[Strategy]:
    """The modes of one cp size: degree, exchange and layout. Checkpointing and loss are those of the plain step."""
    packed = len(workload.documents.rows[0]) > 2
    for degree in degrees:
        ring = cp_size // degree
        if cp_size % degree:
            continue
        # Attention on Ulysses ranks is balanced in all. Those of an indexer are a ring, whatever the degree.
        longest = cp_size if workload.model.indexers else ring
        for layout in names if longest > 1 else names[:1]:
            if layout == "auto" or workload.length % layouts.length_multiple(layout, cp_size):
                continue  # "auto" is one of the others
            if (layouts.by_documents(layout) and not packed) or (longest > DEALT and layout not in FORMULAS):
                continue  # for one document these are "head_tail"
            for exchange in KV_EXCHANGES if ring > 1 else (None,):
                yield Strategy(cp_size, degree, exchange, layout, "none", False)


@dataclass(frozen=True)
class Cost:
    """The part of an estimate that is the same for all kinds of checkpointing and loss: of one call.

    Attributes:
        ring, move, attention: its work, its transfers on the rank that sends most, and its time.
        flops: forward, on every rank.
        passes: FLOPs of forward and backward over those of forward.
        selection: the cost of the indexer.
        others: the calls of layers that are not dense: their number, 1 if a recompute repeats them, and their cost.
    """

    ring: RingWork
    move: TransferTimes
    attention: AttentionTime
    flops: npt.NDArray[np.float64]
    passes: float = 1 + BACKWARD
    selection: Cost | None = None
    others: tuple[tuple[int, int, Cost], ...] = ()

    def calls(self, model: ModelShape, again: int) -> Iterator[tuple[int, int, Cost]]:
        """The calls of a step, how often they run again in a recompute, and the cost of each. Selections are kept."""
        yield model.dense, again, self
        yield from ((number, again * repeated, cost) for number, repeated, cost in self.others)
        if self.selection is not None:
            yield model.indexers, 0, self.selection


class Estimator:
    """Estimates strategies of one workload. The work of a ring is made once for each layout and exchange."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.band = CAUSAL if workload.causal else FULL
        self._works: dict[tuple[str, int, str, Limits, int, int], RingWork] = {}
        self._indexers: dict[tuple[str, int, str], Cost] = {}
        self.states = state_bytes(workload.model, workload.shards, workload.per_parameter, workload.element)

    def _work(
        self, layout: str, ring: int, kv_exchange: str, kv_heads: int, topk: int = 0, window: int = 0
    ) -> RingWork:
        documents = self.workload.documents
        limits: Limits = ()
        if kv_exchange == "needed":
            limits = stage_limits(kv_exchange, self.workload.device, kv_heads, len(documents.rows[0]) > 2)
        place = (layout, ring, kv_exchange, limits) if ring > 1 else ("contiguous", 1, "all_gather", ())
        key = (*place, topk, window)
        found = self._works.get(key)
        if found is None:
            band = intersect(self.band, (1 - window, window - 1)) if window else self.band
            found = ring_work(*key[:3], documents, band, limits, parts=not topk)
            if topk:
                found = under_selection(found, key[0], documents, self.workload.causal, topk)
        self._works[key] = found
        return found

    def cost(self, mode: Strategy) -> Cost:
        """The attention of one layer in this mode, and of those that are not dense."""
        model = self.workload.model
        dense = self._attention(mode, model.topk)
        others = [(layers, 1, self._attention(mode, keys)) for keys, layers in model.sparse if keys]
        others += [(layers, 1, self._attention(mode, 0, window)) for window, layers in model.windows]
        for pooling in model.poolings:  # all ranks are one ring
            ring = replace(mode, ulysses_degree=1)
            window = [self._attention(ring, 0, pooling.window)] if pooling.window else []
            others += [(pooling.layers, 1, cost) for cost in (*window, self._pooling(mode, dense, pooling))]
        others += [(1, 0, self._local(dense, model.scores))] if model.scores else []
        selection = self._selection(mode) if model.indexers else None
        return replace(dense, selection=selection, others=tuple(others))

    def _local(self, dense: Cost, of_pair: float) -> Cost:
        """The scores of indexers: ``of_pair`` FLOPs for each pair of dense attention, forward. Of their keys, those
        that are pooled are counted by :meth:`_pooling`."""
        flops = dense.flops * (of_pair / self.workload.model.pair_flops)
        seconds = float(flops.max()) / self.workload.cluster.flops("forward_share")
        return Cost(dense.ring, TransferTimes(), AttentionTime(seconds, 0.0, seconds, 0.0), flops, 1.0)

    def _pooling(self, mode: Strategy, dense: Cost, pooling: Pooling) -> Cost:
        """One layer's attention to entries, which have travelled before."""
        p, cluster = self.workload, self.workload.cluster
        flops = dense.flops / pooling.every if pooling.window else np.zeros_like(dense.flops)
        if pooling.topk:  # of E entries a query sees as many as it sees of every * E keys, over every
            exchange = mode.kv_exchange or "all_gather"
            work = self._work(mode.layout, mode.cp_size, exchange, 1, pooling.topk * pooling.every)
            flops = work.pairs * (p.model.pair_flops * p.batch / pooling.every)
        move = pooling_transfers(pooling, cluster, p.ranks(mode.cp_size), mode.layout, p.batch, p.length, p.element)
        most = float(flops.max())
        ahead, behind = most / cluster.flops("forward_share"), BACKWARD * most / cluster.flops("backward_share")
        time = AttentionTime(ahead + sum(move.arriving), behind + sum(move.gradients), ahead, behind)
        return Cost(dense.ring, move, time, flops)

    def _attention(self, mode: Strategy, topk: int, window: int = 0) -> Cost:
        """The attention of one layer whose queries see at most ``topk`` keys, or a window; 0: all."""
        p, exchange = self.workload, mode.kv_exchange or "all_gather"
        ranks = p.ranks(mode.ring, mode.ulysses_degree)
        kv_heads = heads_after_sharing(p.model.kv_heads, mode.ulysses_degree) // mode.ulysses_degree
        travelling = 1 if p.model.latents_travel(mode.ulysses_degree) else kv_heads
        work = self._work(mode.layout, mode.ring, exchange, travelling, topk, window)
        moves = {
            rank: transfers(p.model, p.cluster, ranks, exchange, p.batch, p.length, rank, mine, p.element)
            for rank, mine in work.ranks.items()
        }
        kernels = Kernels(
            p.model, p.cluster, p.model.heads / mode.ulysses_degree, kv_heads, p.batch, p.length / mode.ring
        )
        time = attention_time(exchange, kernels, list(work.ranks.values()), list(moves.values()))
        flops = np.repeat(work.pairs, mode.ulysses_degree) * p.model.pair_flops / mode.ulysses_degree * p.batch
        return Cost(work, _most(moves.values()), time, flops)

    def _selection(self, mode: Strategy) -> Cost:
        """The indexer of one layer: all ranks of a group are one ring, and there is no backward."""
        p, exchange, size = self.workload, mode.kv_exchange or "all_gather", mode.cp_size
        found = self._indexers.get((mode.layout, size, exchange))
        if found is not None:
            return found
        work = self._work(mode.layout, size, exchange, 1)
        moves = [
            indexer_transfers(p.model, p.cluster, p.ranks(size), exchange, p.batch, p.length, rank, mine, p.element)
            for rank, mine in work.ranks.items()
        ]
        kernels = Kernels.of_indexer(p.model, p.cluster, p.batch, p.length / size)
        time = attention_time(exchange, kernels, list(work.ranks.values()), moves)
        flops = work.pairs * float(p.model.score_flops * p.batch)
        found = Cost(work, _most(moves), replace(time, backward=0.0, kernels_backward=0.0), flops, 1.0)
        self._indexers[mode.layout, size, exchange] = found
        return found

    def estimates(
        self, mode: Strategy, cost: Cost, checkpointing: Sequence[str], chunked: Sequence[bool]
    ) -> Iterator[Estimate]:
        """The estimate of a mode with each kind of checkpointing and loss."""
        for kind in checkpointing:
            for loss in chunked:
                yield self._estimate(
                    Strategy(mode.cp_size, mode.ulysses_degree, mode.kv_exchange, mode.layout, kind, loss), cost
                )

    def _estimate(self, strategy: Strategy, cost: Cost) -> Estimate:
        p, model = self.workload, self.workload.model
        tokens = p.batch * p.length // strategy.cp_size
        recompute = 0 if strategy.checkpointing == "none" else 1
        head = 4 if strategy.chunked_loss else 3  # backward makes each chunk's logits again
        again = 1 if strategy.checkpointing == "layers" else 0  # attention runs again
        linear = 2.0 * tokens * (model.layers * (3 + recompute) * model.layer_weights + head * model.head_weights)
        calls = [*cost.calls(model, again)]
        flops = np.sum([n * c.flops * (c.passes + repeat) for n, repeat, c in calls], axis=0)
        time = total((n, c.attention.recomputed(repeat)) for n, repeat, c in calls)
        compute = linear / p.cluster.flops("matmul_share") + time.kernels_forward + time.kernels_backward
        ranks = p.ranks(strategy.ring, strategy.ulysses_degree)
        fullest = cost.ring.ranks[cost.ring.rank]
        needs = memory(
            model,
            ranks,
            strategy.kv_exchange or "all_gather",
            p.batch,
            p.length,
            fullest,
            checkpointing=strategy.checkpointing,
            chunked_loss=strategy.chunked_loss,
            element=p.element,
            states=self.states,
        )
        sent = sum((c.move.forward * (n * (1 + repeat)) + c.move.backward * n for n, repeat, c in calls), Sent())
        groups = p.gpus // strategy.cp_size
        return Estimate(
            strategy,
            tokens,
            linear + float(flops.max()),
            sent.inside,
            sent.between,
            round(sent.messages),
            float(flops.max() / flops.mean()) if flops.any() else 1.0,
            compute,
            time.exposed,
            total((n / model.layers, c.attention) for n, _, c in calls),
            needs,
            needs.peak <= p.memory_bytes,
            groups * p.batch * p.length / (compute + time.exposed),
        )


def _most(moves: Iterable[TransferTimes]) -> TransferTimes:
    """The transfers of the rank that sends most."""
    return max(moves, key=lambda move: move.sent.inside + move.sent.between)

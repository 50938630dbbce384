"""Bytes, messages and seconds of the transfers of one attention layer (docs/measured/communication.md), on two links.

A transfer takes as long as the slower of its two parts, inside a host and between hosts, which run at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from .cluster import Cluster
from .model import ModelShape, Pooling
from .work import RankWork

ACCUMULATED = 4
"""Bytes of an element of sums of gradients (fp32)."""

POSITION = 4
"""Bytes of a selected position (int32)."""


@dataclass(frozen=True)
class Ranks:
    """A cp mesh of ``ring x ulysses`` ranks, Ulysses innermost, on hosts that are filled in order."""

    ring: int
    ulysses: int
    gpus_per_host: int
    world: int = 0
    """The ranks of all cp meshes; 0: of this one."""

    @property
    def size(self) -> int:
        return self.ring * self.ulysses

    @property
    def ulysses_inside(self) -> int:
        """Ranks of a Ulysses group on one host."""
        return self._inside(self.ulysses)

    @property
    def ring_inside(self) -> int:
        """Ranks of a ring on one host."""
        return min(self.ring, max(1, self._inside(self.size) // self.ulysses))

    def _inside(self, group: int) -> int:
        """Ranks on one host of a group that follow each other, at least: groups that do not fit into hosts begin
        anywhere in them (6 ranks on hosts of 8 are 2 and 4)."""
        return group if (self.world or self.size) <= self.gpus_per_host else math.gcd(group, self.gpus_per_host)

    @property
    def crosses(self) -> bool:
        """True if a ring goes over several hosts."""
        return self.ring_inside < self.ring


@dataclass(frozen=True)
class Sent:
    """Bytes and messages of a rank.

    Attributes:
        inside, between: bytes inside its host and to other hosts. Of a ring, whose ranks at the end of a host send
            everything to another, this is the mean.
        messages: the number of point-to-point messages.
    """

    inside: float = 0.0
    between: float = 0.0
    messages: float = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.inside + other.inside, self.between + other.between, self.messages + other.messages)

    def __mul__(self, factor: float) -> Sent:
        return Sent(self.inside * factor, self.between * factor, self.messages * factor)


@dataclass
class TransferTimes:
    """The transfers of one rank in one layer.

    Attributes:
        forward, backward: what it sends. A recompute sends again what forward has sent.
        ulysses: seconds of the exchanges of heads, forward and backward.
        arriving: seconds of each transfer of keys and values, which come again in backward.
        gradients: seconds of each transfer of their gradients; of the ring, of one hop.
        home: seconds of the ring's last transfer, which brings a rank's gradients home.
    """

    forward: Sent = Sent()
    backward: Sent = Sent()
    ulysses: tuple[float, float] = (0.0, 0.0)
    arriving: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    home: float = 0.0

    @property
    def sent(self) -> Sent:
        """Both together."""
        return self.forward + self.backward


def transfers(
    model: ModelShape,
    cluster: Cluster,
    ranks: Ranks,
    kv_exchange: str,
    batch: int,
    length: int,
    rank: int,
    work: RankWork,
    element: int,
) -> TransferTimes:
    """The transfers of one rank.

    Args:
        batch, length: of the global tensors.
        rank, work: a ring rank and its work.
        element: bytes of an element of q, k and v.
    """
    found = TransferTimes()
    numbers = model.numbers_that_travel(ranks.ulysses)
    if ranks.ulysses > 1:
        tokens = batch * length / ranks.size
        whole = tokens * (2 * model.query_width + numbers * ranks.ulysses) * element
        _add_ulysses(found, cluster, ranks, whole, tokens * ranks.ulysses * model.topk * POSITION)
    _add_keys(found, cluster, ranks, kv_exchange, batch * numbers, length, rank, work, element)
    return found


def indexer_transfers(
    model: ModelShape,
    cluster: Cluster,
    ranks: Ranks,
    kv_exchange: str,
    batch: int,
    length: int,
    rank: int,
    work: RankWork,
    element: int,
) -> TransferTimes:
    """The transfers of an indexer on one of ``ranks``, which are one ring: its keys, in forward only."""
    found = TransferTimes()
    _add_keys(found, cluster, ranks, kv_exchange, batch * model.indexer_dim, length, rank, work, element)
    return replace(found, backward=Sent(), gradients=[], home=0.0)


def pooling_transfers(
    pooling: Pooling, cluster: Cluster, ranks: Ranks, layout: str, batch: int, length: int, element: int
) -> TransferTimes:
    """The transfers of one layer's entries, on one of ``ranks``, a ring: rows before each range that a rank holds, and
    entries. Each is one gather, and one sum of gradients unless they are an indexer's. In ``head_tail`` the two chunks
    of the last rank adjoin, and the last chunk of all precedes nothing."""
    found, share, two = TransferTimes(), length // ranks.ring, layout == "head_tail"
    rows = min(pooling.tokens - 1, share // 2 if two else share) * (2 if two and ranks.ring > 2 else 1)
    numbers = batch * (rows * pooling.row + -(-share // pooling.every) * pooling.width)
    if ranks.ring == 1:
        return found
    _add_gather(found, cluster, ranks, 1, numbers, element)
    if not pooling.window:
        return replace(found, backward=Sent(), gradients=[0.0])
    return replace(found, backward=replace(found.forward * (ACCUMULATED / element), messages=found.forward.messages))


def _add_keys(
    found: TransferTimes,
    cluster: Cluster,
    ranks: Ranks,
    kv_exchange: str,
    position: float,
    length: int,
    rank: int,
    work: RankWork,
    element: int,
) -> None:
    """Add the exchange of keys and values, ``position`` elements of a position, and of their gradients."""
    share = length / ranks.ring * position
    if not work.hops:
        return
    if kv_exchange == "ring":
        _add_ring(found, cluster, ranks, work.hops, share, element)
    elif kv_exchange == "all_gather":
        _add_gather(found, cluster, ranks, work.pieces, share, element)
    else:
        _add_needed(found, cluster, ranks, rank, work, position, element)


def _seconds(cluster: Cluster, inside: float, between: float, peers: int, crosses: bool) -> float:
    latency = (cluster.between_us if crosses else cluster.inside_us) * 1e-6 * (1 + math.log2(max(1, peers)))
    return max(inside / cluster.inside, between / cluster.between) + latency


def _add_ulysses(found: TransferTimes, cluster: Cluster, ranks: Ranks, whole: float, selections: float) -> None:
    """All-to-all of q, k, v and of the output; backward has the same of their gradients. Selections travel once."""
    peers, near = ranks.ulysses - 1, ranks.ulysses_inside - 1

    def travel(nbytes: float, tensors: int) -> tuple[float, Sent]:
        inside, between = (nbytes * part / ranks.ulysses for part in (near, peers - near))
        # Packing and unpacking reads and writes everything twice.
        seconds = _seconds(cluster, inside, between, ranks.ulysses, peers > near)
        return seconds + 4 * nbytes / cluster.memory_bandwidth, Sent(inside, between, tensors * peers)

    (ahead, forward), (behind, backward) = travel(whole + selections, 5 if selections else 4), travel(whole, 4)
    found.ulysses = ahead, behind
    found.forward, found.backward = found.forward + forward, found.backward + backward


def _add_exchange(found: TransferTimes, numbers: Sent, element: int) -> None:
    """Add keys and values, given their ``numbers``: they travel in forward and again in backward, and their gradients
    in the accumulation dtype."""
    found.forward += replace(numbers * element, messages=numbers.messages)
    found.backward += replace(numbers * (element + ACCUMULATED), messages=2 * numbers.messages)


def _add_ring(found: TransferTimes, cluster: Cluster, ranks: Ranks, hops: int, share: float, element: int) -> None:
    """A hop takes as long as the slowest rank's: of those that send to another host, if there are any."""

    def hop(nbytes: float, crosses: bool = ranks.crosses) -> float:
        return _seconds(cluster, 0.0 if crosses else nbytes, nbytes if crosses else 0.0, 1, crosses)

    found.arriving = [hop(share * element)]
    found.gradients = [hop(share * ACCUMULATED)]
    found.home = hop(share * ACCUMULATED)
    part = 1 / ranks.ring_inside if ranks.crosses else 0.0
    _add_exchange(found, Sent(hops * share * (1 - part), hops * share * part, hops), element)


def _add_gather(found: TransferTimes, cluster: Cluster, ranks: Ranks, stages: int, share: float, element: int) -> None:
    """A gather brings each host's keys to another host once, and spreads them inside: all its links share that. The
    reduce-scatter of gradients is its mirror image, in the accumulation dtype. Each stage has an equal part."""
    others = ranks.ring - 1
    from_hosts = (ranks.ring - ranks.ring_inside) / ranks.ring_inside if ranks.crosses else 0.0
    near = others if ranks.ring_inside > 1 else 0

    def one(size: int) -> float:
        part = share * size / stages
        return _seconds(cluster, near * part, from_hosts * part, ranks.ring, ranks.crosses)

    found.arriving = [one(element)] * stages
    found.gradients = [one(ACCUMULATED)] * stages
    near_share = max(0.0, others - from_hosts) * share
    _add_exchange(found, Sent(near_share, from_hosts * share, 2 * others * stages), element)


def _add_needed(
    found: TransferTimes, cluster: Cluster, ranks: Ranks, rank: int, work: RankWork, position: float, element: int
) -> None:
    """Each stage's rows travel directly between the ranks that hold and need them. Bytes are those that this rank
    receives, and returns as gradients."""
    host = np.arange(ranks.ring) // ranks.ring_inside
    near = host == host[rank]
    for received, given in zip(work.received, work.returned, strict=True):
        incoming, outgoing = ((rows[near].sum() * position, rows[~near].sum() * position) for rows in (received, given))
        inside, between = (float(max(a, b)) for a, b in zip(incoming, outgoing, strict=True))
        peers = int((received > 0).sum())

        def stage(size: int, inside: float = inside, between: float = between, peers: int = peers) -> float:
            return _seconds(cluster, inside * size, between * size, peers, between > 0)

        found.arriving.append(stage(element))
        found.gradients.append(stage(ACCUMULATED))
        _add_exchange(found, Sent(float(incoming[0]), float(incoming[1]), peers), element)

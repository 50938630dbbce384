"""The choices of ``ulysses_degree="auto"`` and ``head_groups="auto"``: the planner's cost of attention, with typical
figures where none are known.

Both are pure functions of what all ranks have in common. The degree is chosen at the first call with some numbers of
heads, and holds for all lengths, masks and documents that come later: it may be part of a compiled graph, and must not
depend on which batch came first. So it assumes ``TOKENS`` tokens a rank, heads of ``HEAD_DIM``, bf16, a causal mask and
the datasheet's links of ``PROFILE_OF`` the device. Groups of heads are chosen for each call, with the same links.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, lru_cache

from ..documents import PackedDocuments
from ..tiles import Band
from .inputs.model import ModelShape
from .inputs.profiles import PROFILES
from .strategies import KV_EXCHANGES, Estimator, Problem, Strategy
from .timeline import BACKWARD, grouped_ulysses
from .traffic import heads_after_sharing

logger = logging.getLogger(__name__)

TOKENS, HEAD_DIM, ELEMENT = 8192, 128, 2
PROFILE_OF = {"cuda": "h100", "npu": "910b"}
"""The profile that stands for a type of device; h100 for all others."""
EQUAL = 1.02
"""Choices within this of the fastest are equally good: the largest degree of them is taken, which needs the least
memory, and the smallest number of groups."""


def best_degree(
    degrees: tuple[int, ...],
    size: int,
    per_host: int,
    heads: tuple[int, int],
    kv_exchange: str,
    layout: str,
    device: str,
) -> int:
    """The Ulysses degree for attention on a cp mesh.

    Args:
        degrees: the possible ones, ascending.
        size, per_host: ranks of the mesh, and how many of them share a host.
        heads: query heads, and key/value heads.
        kv_exchange, layout: of the ring that a degree leaves. For those that the planner does not know, the largest
            degree is taken.
    """
    if kv_exchange not in KV_EXCHANGES or heads[0] % heads[1]:
        return degrees[-1]
    seconds = {d: attention_seconds(d, size, per_host, heads, kv_exchange, layout, device) for d in degrees}
    fastest = min(seconds.values())
    return max(degree for degree, time in seconds.items() if time <= EQUAL * fastest)


@cache
def attention_seconds(
    degree: int, size: int, per_host: int, heads: tuple[int, int], kv_exchange: str, layout: str, device: str
) -> float:
    """Seconds of attention of one layer, forward and backward."""
    model = ModelShape(1, heads[0], heads[0] * HEAD_DIM, 1, kv_heads=heads[1], head_dim=HEAD_DIM)
    cluster = replace(PROFILES[PROFILE_OF.get(device, "h100")], gpus_per_host=per_host)
    documents = PackedDocuments([[0, TOKENS * size]])
    problem = Problem(model, cluster, size, documents, True, 1, ELEMENT, 1.0, size, 1.0)
    # Layouts by documents deal a single document as head-tail does.
    known = layout if layout == "contiguous" else "head_tail"
    exchange = None if degree == size else kv_exchange
    time = Estimator(problem).cost(Strategy(size, degree, exchange, known, "none", False)).attention
    return time.forward + time.backward


# --------------------------------------------------------------------------- groups of heads


def visible_pairs(length: int, band: Band) -> int:
    """About the number of pairs of a query and a key that a band leaves of ``length`` positions."""
    lower, upper = band
    width = length // 2 if 0 in (lower, upper) else length
    return length * (width if lower is None or upper is None else min(width, upper - lower + 1))


@lru_cache(maxsize=1024)  # each batch of packed documents has other pairs
def fastest_groups(
    numbers: tuple[int, ...],
    degree: int,
    per_host: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    tokens: int,
    pairs: int,
    element: int,
    device: str,
) -> int:
    """The fewest groups of heads whose attention, forward and backward, takes within ``EQUAL`` of the shortest time.

    Args:
        numbers: the possible ones.
        degree, per_host: ranks that exchange heads, and ranks that share a host.
        heads: of queries and of keys, before the exchange.
        dims: of keys and of values.
        tokens: of this rank, all batch rows together.
        pairs: of a query and a key that each head of a rank attends.
        element: bytes of an element.
        device: its type, for which a typical profile stands.
    """
    cluster, (queries, keys), (dim, value_dim) = PROFILES[PROFILE_OF.get(device, "h100")], heads, dims
    inside = degree <= per_host
    link = cluster.inside if inside else cluster.between
    each = (cluster.inside_us if inside else cluster.between_us) * 1e-6
    work = 2.0 * pairs * queries / degree * (dim + value_dim)
    kernels = work / cluster.flops("forward_share"), BACKWARD * work / cluster.flops("backward_share")
    byte = tokens * element * (degree - 1) / degree / link
    travel = byte * (queries * dim + heads_after_sharing(keys, degree) * (dim + value_dim)), byte * queries * value_dim
    seconds = {number: grouped_ulysses(number, kernels, travel, each) for number in numbers}
    fastest = min(seconds.values())
    best = min(number for number, found in seconds.items() if found <= EQUAL * fastest)
    found = best, queries, keys, degree, tokens, seconds[best] * 1e3, seconds[1] * 1e3, cluster.name
    logger.info(
        'head_groups="auto": %d groups for %d query and %d key/value heads over ulysses_degree=%d, %d tokens a rank: '
        "%.3g ms instead of %.3g ms at once, by the cost of %s",
        *found,
    )
    return best

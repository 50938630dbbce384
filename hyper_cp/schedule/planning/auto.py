"""The choice of ``ulysses_degree="auto"``: the planner's cost of attention, with typical figures where none are known.

The choice is made at the first call with some numbers of heads, and holds for all lengths, masks and documents that
come later: it may be part of a compiled graph, and must not depend on which batch came first. So it assumes
``TOKENS`` tokens a rank, heads of ``HEAD_DIM``, bf16, a causal mask and the datasheet's links of ``PROFILE_OF`` the
device. It is a pure function of what all ranks have in common.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..documents import PackedDocuments
from .inputs.model import ModelShape
from .inputs.profiles import PROFILES
from .strategies import KV_EXCHANGES, Estimator, Problem, Strategy

TOKENS, HEAD_DIM, ELEMENT = 8192, 128, 2
PROFILE_OF = {"cuda": "h100", "npu": "910b"}
"""The profile that stands for a type of device; h100 for all others."""
EQUAL = 1.02
"""Degrees within this of the fastest are equally good: the largest of them is taken, which needs the least memory."""


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

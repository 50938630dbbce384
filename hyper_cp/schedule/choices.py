"""The choices of ``"auto"``: short tables of rules over sizes that all ranks have in common.

A rule knows no host, no link and no time, so ranks choose alike without comparing anything. docs/measured/planner.md
has the tables and how far each choice is from the best by the cost of ``hyper_cp.plan``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache

logger = logging.getLogger(__name__)

Limits = tuple[int, ...]
"""The sizes from which on a number is 2, 4, 8 and so on; below the first it is 1."""

ROWS_NEEDED = ((16, (1536, 16384)), (2, (3072, 16384)), (1, (6144, 16384)))
"""For numbers of key/value heads, the rows that the busiest rank receives with ``kv_exchange="needed"``: fewer rows of
more heads are as many bytes."""
ROWS_NEEDED_ON_GLOO: tuple[Limits, Limits] = (512, 1024, 2048), (1024, 2048)
"""The same without and with packed documents, whose tiles are small already. A rank on gloo says that it is ready to
receive behind its own messages (benchmarks/README.md): the other direction waits for long ones, so there are more."""
ROWS_GATHERED_ON_GLOO: Limits = (1024, 2048)
"""The rows that a rank receives. On other links an all-gather stays whole: stages have been measured on gloo only."""
HEAD_TOKENS: dict[str, Limits] = {"cuda": (16384, 65536), "npu": (8192, 32768), "cpu": (256, 1024)}
"""For groups of heads, the tokens of a rank times its query heads, by type of device. More than four groups would leave
too few heads in each to occupy a device."""

TOKENS = 8192
"""The tokens of a rank that are assumed in a compiled graph, whose lengths may be open."""


def doubled(size: int, limits: Limits) -> int:
    """The number for a size."""
    return 1 << sum(size >= limit for limit in limits)


def stage_limits(kv_exchange: str, device: str = "cuda", kv_heads: int = 8, packed: bool = False) -> Limits:
    """The limits of ``exchange_stages="auto"``, which the rows that travel are compared with.

    Args:
        device: its type.
        kv_heads: key/value heads of a rank of the ring.
        packed: True if there are documents.
    """
    if kv_exchange == "needed":
        usual = next((limits for heads, limits in ROWS_NEEDED if kv_heads >= heads), ())
        return ROWS_NEEDED_ON_GLOO[packed] if device == "cpu" else usual
    return ROWS_GATHERED_ON_GLOO if kv_exchange == "all_gather" and device == "cpu" else ()


def stages_needed(limits: Limits, most: int, share: int) -> int:
    """The number of stages with ``kv_exchange="needed"``, in none of which a rank receives more rows than it holds, if
    the busiest one receives ``most`` rows and each holds ``share``."""
    return max(doubled(most, limits), -(-most // share))


def head_groups(numbers: Sequence[int], heads: int, tokens: int, device: str) -> int:
    """The choice of ``head_groups="auto"`` among the possible numbers.

    Args:
        heads: query heads of a rank before the exchange.
        tokens: of a rank, all batch rows together.
        device: its type.
    """
    wanted = doubled(tokens * heads, HEAD_TOKENS.get(device, HEAD_TOKENS["cuda"]))
    number = max(n for n in numbers if n <= wanted)
    log_once('head_groups="auto": %d groups for %d query heads and %d tokens a rank', number, heads, tokens)
    return number


def ulysses_degree(degrees: Sequence[int], heads: int, kv_heads: int) -> int:
    """The choice of ``ulysses_degree="auto"`` among the degrees that stay on one host: the largest one that divides the
    heads."""
    return max(degree for degree in degrees if heads % degree == 0 and kv_heads % degree == 0)


def latents_travel(heads: int, ulysses: int, latent: int, rotary: tuple[int, int], of_head: int) -> bool:
    """The choice of ``latents=None``: True if a token's latent is fewer numbers than the heads in its place.

    With a Ulysses degree a rank is sent the heads that it attends, but latents whole. In all other exchanges a token
    that travels has all heads that its rank attends.

    Args:
        heads: query heads of a rank before the exchange over ``ulysses`` ranks.
        latent: numbers of a token's latent.
        rotary: heads and width of its rotary part.
        of_head: numbers of a key and a value of one head.
    """
    of_rotary = rotary[1] * (rotary[0] // ulysses if rotary[0] > 1 else 1)
    of_latent, of_heads = latent + of_rotary, heads // ulysses * of_head
    message = "latents=None: %d numbers of a token's latent, %d of its heads on a rank: "
    log_once(message + ("latents travel" if of_latent < of_heads else "heads travel"), of_latent, of_heads)
    return of_latent < of_heads


def heads_after_sharing(kv_heads: int, ulysses: int) -> int:
    """The key/value heads that travel: heads that do not split over the Ulysses ranks are repeated until they do."""
    return math.lcm(kv_heads, ulysses)


@lru_cache(maxsize=4096)
def log_once(message: str, *choice: object) -> None:
    """Log a choice, the first time that it is made."""
    logger.info(message, *choice)

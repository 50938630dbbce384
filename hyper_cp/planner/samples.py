"""``cost_model``: the planner's numbers for one model, as the costs of samples by which dynamic degrees are planned."""

from __future__ import annotations

from typing import Any

from ..data.dynamic import CostModel
from ..mesh.arguments import check_int
from . import plan
from .cluster import Cluster, cluster_of, with_measurements
from .model import counted_shape
from .timeline import BACKWARD


def cost_model(
    model: Any,
    tokens_per_rank: int,
    degree: int,
    *,
    cluster: Cluster | str = "h100",
    measured: Any = None,
    fixed: float = 0.0,
) -> CostModel:
    """Return the costs of samples of this model, in seconds of a cluster's devices, for
    :class:`DynamicContextParallel`.

    Attention is counted by visible pairs: all of them in full layers, those of the window in sliding ones, of selected
    keys and entries the selected ones and the indexer's scores (one of a pool, where keys are pooled). Recurrent layers
    cost the same for every token: that of their weights, taken to be as many as those of attention. Everything else is
    counted as :func:`plan` does.

    Args:
        model: as for :func:`plan`. ``layer_types`` and ``sliding_window`` of a configuration are read.
        tokens_per_rank, degree: the scheduler's budget and its widest degree. The part of the exchange that is not
            hidden is the largest that :func:`plan` finds up to this degree, with that many tokens on each rank.
        cluster, measured: as for :func:`plan`.
        fixed: the seconds that a micro-batch takes whatever its size.

    Returns:
        A :class:`CostModel` whose costs are seconds.

    Raises:
        ValueError: for numbers that are not positive, or an unknown cluster.
        TypeError: for a model without the sizes on which the cost depends.

    Example::

        >>> llama = dict(layers=32, heads=32, kv_heads=8, width=4096, ffn=14336, vocabulary=128256)
        >>> cost = cost_model(llama, tokens_per_rank=8192, degree=8)
        >>> 20_000 < cost.linear / cost.quadratic < 25_000  # a token costs as much as that many pairs, in all layers
        True

    Source: costs per sample that are quadratic in its length follow FlexSP (arXiv 2412.01523) and ByteScale
    (2502.21231); the numbers are the planner's.
    """
    check_int("tokens_per_rank", tokens_per_rank, "It is the budget of a micro-batch")
    check_int("degree", degree, "It is a number of ranks")
    shape, devices = counted_shape(model), cluster_of(cluster)
    devices = devices if measured is None else with_measurements(devices, measured)
    linear = 6.0 * (shape.layers * shape.layer_weights + shape.head_weights) / devices.flops("matmul_share")
    forward = 1 / devices.flops("forward_share")
    pair = shape.pair_flops * (forward + BACKWARD / devices.flops("backward_share"))
    scores = shape.indexers * shape.score_flops + shape.scores
    selected: list[tuple[int, float]] = [(shape.topk, shape.layers)] if shape.topk else [*shape.sparse, *shape.windows]
    full = 0.0 if shape.topk else float(shape.dense)
    for pooling in (x for x in shape.poolings if x.window):
        selected.append((pooling.window, pooling.layers))
        if pooling.topk:  # entries, of which there is one for each ``every`` keys
            selected.append((pooling.topk * pooling.every, pooling.layers / pooling.every))
        else:
            full += pooling.layers / pooling.every
    quadratic = pair * full + scores * forward
    windows = tuple((keys, pair * layers) for keys, layers in selected if keys)
    exposed = 0.0
    for d in (2**k for k in range(1, degree.bit_length())):
        length = d * tokens_per_rank // (2 * d) * 2 * d
        if length:
            report = plan(shape, length, gpus=d, cp_size=d, cluster=devices, checkpointing="none", memory_gb=1e9)
            assert report.best is not None  # for mypy: memory is no limit here
            exposed = max(exposed, report.best.exposed_seconds * d / (length * (d - 1)))
    return CostModel(linear, quadratic, exposed, fixed, windows)

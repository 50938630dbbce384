"""plan: the cost of every strategy for a model, a cluster and a sequence, and the one to use first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ..mesh.arguments import check_amount, check_bool, check_choice, check_int
from ..schedule import layout as layouts
from ..schedule.documents import PackedDocuments
from .cluster import Cluster, cluster_of, with_measurements
from .memory import CHECKPOINTING
from .model import ModelShape, counted_shape
from .report import AS_FAST, PlanReport, explain
from .strategies import KV_EXCHANGES, Estimate, Estimator, Strategy, Workload, modes

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


def plan(
    model: Any,
    sequence: int | Sequence[int],
    *,
    gpus: int,
    cluster: Cluster | str = "h100",
    measured: Any = None,
    causal: bool = True,
    batch: int = 1,
    cp_size: int | None = None,
    ulysses_degree: int | None = None,
    kv_exchange: str | None = None,
    layout: str | None = None,
    checkpointing: str | None = None,
    chunked_loss: bool | None = None,
    dtype: str = "bfloat16",
    bytes_per_parameter: float = 16.0,
    shards: int | None = None,
    memory_gb: float | None = None,
) -> PlanReport:
    """Estimate a training step in every strategy, and name the one to use first. Nothing runs, nothing communicates.

    Work, balance and what travels come from the schedule that a run would use (for rings of more than 8 ranks, from
    formulas that agree with it); bytes are those of docs/measured/communication.md; times are a model
    (docs/measured/planner.md), with the shares of the datasheet's peaks that a :class:`Cluster` names.

    Args:
        model: a Hugging Face configuration or model, any object or dict with such attributes, the path of a
            ``config.json`` or of its folder, a name that ``transformers.AutoConfig`` finds, or a :class:`ModelShape`.
        sequence: the global length in tokens, or the lengths of the documents that are packed into one sequence.
        gpus: the number of ranks. Each group of ``cp_size`` ranks has sequences of its own.
        cluster: the name of a profile (h100, h200, a100, b200, 910b, 910c) or a :class:`Cluster`.
        measured: the path of a JSON file of measurements (docs/measured/planner.md), in place of the profile's numbers.
        causal: False if queries see all keys of their document.
        batch: the number of sequences that each group has in a step.
        cp_size, ulysses_degree, kv_exchange, layout, checkpointing, chunked_loss: plan with this value only (None: with
            every value that is possible).
        dtype: the dtype of activations: ``"bfloat16"``, ``"float16"`` or ``"float32"``, for which half of the cluster's
            TFLOP/s count, as with TF32 (allow it), except for those that are ``measured``.
        bytes_per_parameter: the bytes of a parameter with its gradient and optimizer states (16: fp32 with Adam).
        shards: the number of ranks over which these are split, as FSDP does (None: all GPUs).
        memory_gb: the memory of a device that a step may use, in GB of 1e9 bytes (None: that of the cluster, less a
            part for fragmentation).

    Returns:
        A :class:`PlanReport`: ``print`` it, or take ``style()``, the :class:`ContextParallel` to use first.

    Raises:
        ValueError: for numbers that are not positive, an unknown profile or name, heads that do not split over
            ``ulysses_degree``, or a length that does not split over ``cp_size``.
        TypeError: for a model without the sizes on which the cost depends.

    Example::

        >>> llama = dict(layers=32, heads=32, kv_heads=8, width=4096, ffn=14336, vocabulary=128256)
        >>> best = plan(llama, 131072, gpus=8).best
        >>> best.fits
        True
    """
    shape, documents = counted_shape(model), _documents(sequence)
    shards = gpus if shards is None else shards
    for name, value in {"gpus": gpus, "batch": batch, "shards": shards}.items():
        check_int(name, value, "Costs are per rank")
    check_amount("bytes_per_parameter", bytes_per_parameter, "Parameters take memory")
    check_choice("dtype", dtype, DTYPES, "Bytes depend on it")
    devices = _devices(cluster, dtype, measured)
    usable = devices.memory_gb * devices.memory_share if memory_gb is None else memory_gb
    check_amount("memory_gb", usable, "A step takes memory")
    numbers = (DTYPES[dtype], bytes_per_parameter, shards, usable * 1e9)
    workload = Workload(shape, devices, gpus, documents, causal, batch, *numbers)
    sizes = _sizes(gpus, cp_size)
    degrees = _degrees(shape, ulysses_degree, sizes)
    exchanges = _chosen("kv_exchange", kv_exchange, KV_EXCHANGES)
    names = _chosen("layout", layout, [name for name in layouts.LAYOUTS if name != "auto"])
    kinds = _chosen("checkpointing", checkpointing, CHECKPOINTING)
    why = "The loss makes logits for a chunk of tokens at a time, or whole ones"
    losses = (False, True) if chunked_loss is None else (check_bool("chunked_loss", chunked_loss, why),)
    candidates = [
        mode
        for size in sizes
        for mode in modes(workload, size, degrees, names)
        if mode.kv_exchange is None or mode.kv_exchange in exchanges
    ]
    row = documents.rows[0]
    if not candidates:
        raise ValueError(_nothing(row[-1], sizes, degrees, names, cp_size))
    estimator = Estimator(workload)
    found = [e for mode in candidates for e in estimator.estimates(mode, estimator.cost(mode), kinds, losses)]
    found = _sorted(found)
    explained = tuple(replace(e, why=explain(e, found[0], workload.memory_bytes, shape.layers)) for e in found)
    return PlanReport(explained, shape, devices, gpus, row[-1], len(row) - 1, batch, workload.memory_bytes)


BUCKET = 1.01
"""Strategies whose times differ by less than this stand side by side: the one with less memory comes first."""


def _sorted(found: list[Estimate]) -> list[Estimate]:
    """Those that fit first, by falling speed, then the others, by rising memory. Of those that the model cannot tell
    from the fastest, the simplest come first: one rank, then one mode, then hybrids."""
    fastest = max((e.tokens_per_second for e in found if e.fits), default=0.0)

    def order(e: Estimate) -> tuple[object, ...]:
        peak, s = e.memory.peak, e.strategy
        rest = s.cp_size, s.ulysses_degree, s.kv_exchange or "", s.layout, s.checkpointing, s.chunked_loss
        if not e.fits:
            return 1, 0, 0, peak, rest
        slower = fastest / e.tokens_per_second
        simple = (s.cp_size > 1) + (1 < s.ulysses_degree < s.cp_size)
        return 0, simple if slower < AS_FAST else 3, int(math.log(slower) / math.log(BUCKET)), peak, rest

    return sorted(found, key=order)


# --------------------------------------------------------------------------- arguments


def _devices(cluster: Cluster | str, dtype: str, measured: Any) -> Cluster:
    """The cluster with half of its TFLOP/s for 4-byte dtypes, and with what was measured in place of its numbers."""
    devices = cluster_of(cluster)
    devices = replace(devices, tflops=devices.tflops / 2) if DTYPES[dtype] == 4 else devices
    return devices if measured is None else with_measurements(devices, measured)


def _documents(sequence: int | Sequence[int]) -> PackedDocuments:
    lengths = [sequence] if isinstance(sequence, int) else sequence
    if isinstance(lengths, str) or not isinstance(lengths, Sequence):
        raise TypeError(
            f"sequence is a {type(sequence).__name__}. It is the number of tokens that ranks share. Pass an int, or a "
            "list of the lengths of packed documents"
        )
    if not lengths:
        raise ValueError("sequence=[] has no documents. There is nothing to plan. Pass at least one length")
    for number, value in enumerate(lengths):
        name = "sequence" if isinstance(sequence, int) else f"sequence[{number}]"
        check_int(name, value, "It is a length in tokens")
    return PackedDocuments([list(accumulate(lengths, initial=0))])


def _sizes(gpus: int, cp_size: int | None) -> list[int]:
    """The cp sizes to plan for."""
    if cp_size is None:
        return [n for n in range(1, gpus + 1) if gpus % n == 0]
    if check_int("cp_size", cp_size, "It is a number of ranks") > gpus or gpus % cp_size:
        raise ValueError(
            f"cp_size={cp_size} does not divide gpus={gpus}. All ranks form groups of that size. Choose a divisor"
        )
    return [cp_size]


def _degrees(shape: ModelShape, degree: int | None, sizes: list[int]) -> list[int]:
    """The Ulysses degrees to plan for."""
    if degree is None:
        return [d for d in range(1, max(sizes) + 1) if shape.heads % d == 0]
    check_int("ulysses_degree", degree, "It is a number of ranks")
    if shape.heads % degree:
        raise ValueError(
            f"ulysses_degree={degree} does not divide the {shape.heads} query heads. Each rank attends equally many "
            "heads. Choose a divisor of the heads"
        )
    if all(size % degree for size in sizes):
        raise ValueError(
            f"ulysses_degree={degree} divides no cp size of {sizes}. Ulysses groups fill the cp mesh. Choose a divisor "
            "of the cp size"
        )
    return [degree]


def _chosen(name: str, value: Any, known: Sequence[str]) -> Sequence[str]:
    if value is None:
        return tuple(known)
    return (check_choice(name, value, known, "The cost of others is not known", ", or None for all of them"),)


def _nothing(length: int, sizes: list[int], degrees: list[int], names: Sequence[str], cp_size: int | None) -> str:
    """The reason why no strategy is possible."""
    multiples = [layouts.length_multiple(name, size) for size in sizes for name in names]
    if all(length % multiple for multiple in multiples):
        least = min(multiples)
        return (
            f"sequence={length} tokens do not split over cp_size={cp_size}. Every rank holds equally many tokens (of "
            f"two chunks in head_tail). Pad the sequence to a multiple of {least}, as the handler does: "
            f"{-(-length // least) * least}"
        )
    return (
        f"no strategy has cp sizes {sizes}, Ulysses degrees {degrees} and layouts {list(names)} together. A layout by "
        "documents needs several of them, and the sequence must split over the ranks. Leave one of these arguments out"
    )


__all__ = ["Cluster", "Estimate", "ModelShape", "PlanReport", "Strategy", "plan"]

"""The work of each scenario as this library does it, and as one would without another library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler, tiled
from hyper_cp.cli.modes import named_mode
from hyper_cp.ops import attention, latent_attention

from ..speed.contenders.contender import Skip
from .work import CHUNKS, LATENT, Scenario, heads_of_latents, mlp, widened

LIBRARY = "hyper_cp"
Attention = Callable[..., Tensor]
"""The work of this rank: a function of its share of the inputs and of all weights."""


@dataclass(frozen=True)
class Way:
    """One way to do a scenario's work.

    Attributes:
        layout: the library's name of the sequence layout on the ranks; ``"zigzag of hosts"``: see ``run.rows_of``.
        prepare: makes its function, for a scenario, a mesh and the positions of this rank. It raises ``Skip``, or its
            library's own error, if it cannot.
        alone: it runs in one process, with as many threads as there are ranks, while the others wait.
    """

    library: str
    mode: str
    layout: str
    prepare: Callable[[Scenario, DeviceMesh, Tensor], Attention]
    alone: bool = False


def attention_only(work: Scenario) -> None:
    if work.kind == "loss":
        raise Skip("has neither an MLP nor a loss in parts")


def heads_first(work: Scenario, attend: Callable[[Tensor, Tensor, Tensor], Tensor], *, wide: bool = True) -> Attention:
    """Return the work as attention of heads: keys and values are made of latents first, and values are made as wide as
    keys where the library wants that."""
    attention_only(work)
    if work.kind != "latents":
        return attend

    def expanded(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor) -> Tensor:
        k, v = heads_of_latents(work.heads, latent, rope, weight)
        return attend(q, k, widened(q, v) if wide else v)[..., : LATENT["value"]]

    return expanded


# --------------------------------------------------------------------------- this library


def _ours(mode: str, work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    if work.kind == "loss":
        return _our_loss(work, mesh, rows)
    options: dict[str, Any] = {"mesh": mesh, "is_causal": True, **named_mode(mode)}
    if work.documents is not None:
        table = work.documents
        options["documents"] = table if work.rows else torch.tensor(table[0])
    if work.window is not None:
        options["window"] = (work.window - 1, 0)
    if work.kind == "latents":
        return lambda q, latent, rope, weight: latent_attention(q, latent[:, 0], rope, weight, **options)  # type: ignore[return-value]
    if work.kind == "selected":
        options["selected"] = work.selected(rows)
    return lambda q, k, v: attention(q, k, v, enable_gqa=work.grouped, **options)  # type: ignore[return-value]


class _MLP(torch.nn.Module):
    """The MLP with weights that are given to it."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Parameter(weight) for weight in weights)

    def forward(self, x: Tensor) -> Tensor:
        return mlp(x, self.gate, self.up, self.down)


def _our_loss(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    labels, handler = work.labels()[:, rows], ContextParallelHandler(mesh, ContextParallel())
    layer = _MLP(*(torch.empty(0) for _ in range(3)))
    tiled(layer, CHUNKS)

    def step(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, head: Tensor) -> Tensor:
        for name, weight in (("gate", gate), ("up", up), ("down", down)):
            layer._parameters[name] = weight  # type: ignore[assignment]
        found = handler.log_probs(layer(x[:, 0]), labels, head=head, chunk=len(rows) // CHUNKS)
        return -found.sum() / work.length

    return step


def ours(work: Scenario) -> list[Way]:
    """Return the modes of this library that a scenario names."""
    found = []
    for name in work.modes:
        layout = named_mode(name).get("layout", "contiguous")
        if layout == "balanced" and work.window is not None:
            layout = f"balanced_{work.window}"
        mode = name if work.kind != "loss" else "tiled MLP, loss in chunks"
        found.append(Way(LIBRARY, mode, layout, partial(_ours, name)))
    return found


# --------------------------------------------------------------------------- by hand, PyTorch, transformers


def _all_gather(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    """Gather keys and values (latents, if they are fewer numbers), and attend this rank's queries under its rows of the
    mask."""
    if work.kind == "loss":
        return _checkpointed(work, rows)
    visible = work.visible(rows)

    def whole(x: Tensor) -> Tensor:
        gathered = DTensor.from_local(x, mesh, [Shard(2)]).redistribute(placements=[Replicate()])
        return gathered.to_local(grad_placements=[Partial()])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=work.grouped)

    if work.kind == "latents":
        expanded = heads_first(work, attend)
        return lambda q, latent, rope, weight: expanded(q, whole(latent), whole(rope), weight)
    return lambda q, k, v: attend(q, whole(k), whole(v))


def _checkpointed(work: Scenario, rows: Tensor) -> Attention:
    labels = work.labels()[0, rows]

    def part(x: Tensor, wanted: Tensor, gate: Tensor, up: Tensor, down: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(mlp(x, gate, up, down), head), wanted, reduction="sum")

    def step(x: Tensor, *weights: Tensor) -> Tensor:
        parts = zip(x[0, 0].chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
        losses = [checkpoint(part, *tensors, *weights, use_reentrant=False) for tensors in parts]
        return torch.stack(losses).sum() / work.length

    return step


def _experimental(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    """``torch.distributed.tensor.experimental.context_parallel``, which replaces ``scaled_dot_product_attention``."""
    attention_only(work)
    if work.window is not None or work.packed or work.kind == "selected":
        raise Skip("takes no mask (its ring for GPUs raises NotImplementedError: attn_bias is not supported yet)")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        unused = torch.empty(1, 1, work.length, 1)  # it wants a buffer to shard; q, k, v are shares already
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[2], no_restore_buffers={unused}):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=work.grouped)

    return heads_first(work, attend)


def _transformers(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    """Attention of one device as transformers runs it: ``"sdpa"``, with a mask of all pairs where one is needed."""
    if work.kind == "loss":
        return _whole_loss(work, rows)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    call = ALL_ATTENTION_FUNCTIONS["sdpa"]
    groups = work.heads // work.kv_heads
    module = SimpleNamespace(config=None, training=True, is_causal=True, num_key_value_groups=groups)
    plain = work.window is None and work.documents is None and work.kind != "selected"
    mask = None if plain else work.visible()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = call(module, q, k, v, mask, is_causal=plain)[0]
        return out.transpose(1, 2)

    return heads_first(work, attend)


def _whole_loss(work: Scenario, rows: Tensor) -> Attention:
    labels = work.labels()[0, rows]

    def step(x: Tensor, *weights: Tensor) -> Tensor:
        logits = F.linear(mlp(x[0, 0], *weights[:-1]), weights[-1])
        return F.cross_entropy(logits, labels, reduction="sum") / work.length

    return step


PLAIN = [
    Way("by hand", "all-gather (DTensor)", "contiguous", _all_gather),
    Way("PyTorch", "context_parallel", "head_tail", _experimental),
]


def plain(work: Scenario) -> list[Way]:
    """Return what PyTorch and transformers have for a scenario."""
    by_hand, experimental = PLAIN
    if work.kind == "loss":
        by_hand = Way("by hand", "a checkpoint for each part", "contiguous", _all_gather)
        whole = Way("transformers", "all logits at once, on every rank", "contiguous", _transformers)
    else:
        whole = Way("transformers", "one process, sdpa", "contiguous", _transformers, alone=True)
    return [by_hand, experimental, whole]

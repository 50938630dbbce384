"""PyTorch itself: attention by hand with DTensor, as a user would write it, and experimental context parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel

from ..case import Problem
from .contender import Attention, Contender, refuse

SEQUENCE, HEADS = 2, 1


def _ulysses(problem: Problem, mesh: DeviceMesh) -> Attention:
    """Trade the sequence shard for a head shard with two redistributions."""
    refuse(problem)

    def move(x: Tensor, source: int, target: int) -> Tensor:
        return DTensor.from_local(x, mesh, [Shard(source)]).redistribute(placements=[Shard(target)]).to_local()

    def attend(*qkv: Tensor) -> Tensor:
        q, k, v = (move(x, SEQUENCE, HEADS) for x in qkv)
        gqa = q.shape[1] != k.shape[1]
        return move(F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=gqa), HEADS, SEQUENCE)

    return attend


def _all_gather(problem: Problem, mesh: DeviceMesh) -> Attention:
    """Gather keys and values, and attend the local queries under their rows of the mask."""
    refuse(problem)
    own, length = problem.length // mesh.size(), problem.length
    rows = torch.arange(own)[:, None] + mesh.get_local_rank() * own
    mask = rows >= torch.arange(length) if problem.causal else None

    def whole(x: Tensor) -> Tensor:
        gathered = DTensor.from_local(x, mesh, [Shard(SEQUENCE)]).redistribute(placements=[Replicate()])
        return gathered.to_local(grad_placements=[Partial()])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, whole(k), whole(v), attn_mask=mask, enable_gqa=gqa)

    return attend


def _experimental(problem: Problem, mesh: DeviceMesh) -> Attention:
    """``torch.distributed.tensor.experimental.context_parallel``, which replaces ``scaled_dot_product_attention``."""
    refuse(problem)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        unused = torch.empty(1, 1, problem.length, 1)  # it wants a buffer to shard; q, k, v are shares already
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[SEQUENCE], no_restore_buffers={unused}):
            gqa = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=gqa)

    q, k, v = problem.resized(64).tensors()[0]
    attend(*(x[:, :, : 64 // mesh.size()] for x in (q, k, v)))  # raises where there is no ring for the device
    return attend


CONTENDERS = [
    Contender("DTensor by hand", "Ulysses", "contiguous", _ulysses),
    Contender("DTensor by hand", "all-gather", "contiguous", _all_gather, balanced=False),
    Contender("PyTorch experimental", "ring", "head_tail", _experimental),
]

"""DeepSpeed: DistributedAttention (Ulysses), and UlyssesSPAttentionHF, which it registers with transformers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..case import Problem
from .contender import Attention, Contender, refuse


def start() -> None:
    """Let DeepSpeed use the process group that exists already, without its all-reduce in shared memory, which it would
    compile first."""
    import deepspeed.comm
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def _distributed_attention(problem: Problem, mesh: DeviceMesh) -> Attention:
    start()
    from deepspeed.sequence.layer import DistributedAttention

    refuse(problem)

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, S, H, D]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=gqa).transpose(1, 2)

    layer = DistributedAttention(local, mesh.get_group(), scatter_idx=2, gather_idx=1)

    def attend(*qkv: Tensor) -> Tensor:
        return layer(*(x.transpose(1, 2) for x in qkv), 0).transpose(1, 2)

    return attend


def _for_transformers(problem: Problem, mesh: DeviceMesh) -> Attention:
    start()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    refuse(problem)

    def local(module: object, q: Tensor, k: Tensor, v: Tensor, mask: object, **_: object) -> tuple[Tensor, None]:
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=gqa)
        return out.transpose(1, 2).contiguous(), None

    own = problem.length // mesh.size()
    layer = UlyssesSPAttentionHF(
        attn=local,
        batch_size=problem.batch,
        attn_head_count=problem.heads,
        attn_head_size=problem.dim,
        kv_head_count=problem.kv_heads,
        num_hidden_layers=1,
        process_group=mesh.get_group(),
        local_seq_length=own,
        global_seq_length=problem.length,
    )
    module = SimpleNamespace(training=True)
    positions = torch.arange(own).expand(problem.batch, -1) + mesh.get_local_rank() * own

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = layer(module, q, k, v, None, position_ids=positions)
        return out.unflatten(2, (problem.heads, problem.dim)).transpose(1, 2)

    return attend


CONTENDERS = [
    Contender("DeepSpeed", "Ulysses", "contiguous", _distributed_attention, "DistributedAttention"),
    Contender("DeepSpeed", "Ulysses", "contiguous", _for_transformers, "UlyssesSPAttentionHF"),
]

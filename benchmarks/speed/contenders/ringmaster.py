"""axolotl-ringmaster: Ulysses around SDPA, and its ring, of which the CPU has explicit logits only."""

from __future__ import annotations

from types import SimpleNamespace

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..case import Problem
from .contender import Attention, Contender, Skip, refuse

MOST = 4096
"""The longest sequence of which explicit logits are made."""


def _ulysses(problem: Problem, mesh: DeviceMesh) -> Attention:
    import ringmaster
    from ringmaster.runtime import CPRuntime, set_runtime
    from ringmaster.strategies.ulysses import make_ulysses_attention
    from transformers import AttentionInterface

    refuse(problem)
    config = ringmaster.RingmasterConfig(size=mesh.size(), backend=ringmaster.Backend.ULYSSES)
    runtime = CPRuntime(config, mesh.get_group(), None, mesh.get_group())
    AttentionInterface.register("sdpa of benchmarks", sdpa)
    call = make_ulysses_attention("sdpa of benchmarks")
    module = SimpleNamespace(config=None, training=True, is_causal=problem.causal)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        set_runtime(runtime)  # one for the whole process
        out, _ = call(module, q, k, v, None, is_causal=problem.causal)
        return out.transpose(1, 2)

    return attend


def sdpa(
    module: object, q: Tensor, k: Tensor, v: Tensor, mask: object, is_causal: bool = True, **_: object
) -> tuple[Tensor, None]:
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=gqa).transpose(1, 2), None


def _ring(problem: Problem, mesh: DeviceMesh) -> Attention:
    from ringmaster import RotateMethod
    from ringmaster.ring import ring_attention

    refuse(problem)
    if problem.length > MOST:
        raise Skip(f"makes explicit logits on the CPU, which take too much memory above S={MOST}")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(
            q,
            k,
            v,
            group=mesh.get_group(),
            causal=problem.causal,
            scaling=None,
            dropout=0.0,
            provider="math",
            rotate_method=RotateMethod.ALLGATHER,
            attn_implementation="math",
        ).transpose(1, 2)

    return attend


CONTENDERS = [
    Contender("ringmaster", "Ulysses", "contiguous", _ulysses),
    Contender("ringmaster", "ring", "contiguous", _ring, "explicit logits", balanced=False),
]

"""yunchang (the rings of ring-flash-attention, and Ulysses), with FlashAttention's entry points on the CPU's kernel.

Its rings hold sums of gradients with ``buffer.to(torch.float32)``, which is the buffer itself if the inputs are fp32:
fp32 gradients come out wrong. One of them returns the gradient of q in bfloat16. Here it copies, and keeps q's dtype.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..case import Problem
from .contender import Attention, Contender, Skip, refuse
from .flash_on_cpu import installed


@cache
def mended(kind: str) -> Any:
    """The function of one of its rings, with copies of fp32 buffers and dq in the dtype of q."""
    with installed():
        from yunchang.ring import ring_flash_attn, zigzag_ring_flash_attn
    module: Any = {"ring": ring_flash_attn, "zigzag_ring": zigzag_ring_flash_attn}[kind]
    source = inspect.getsource(module).replace("_buffer.to(torch.float32)", "_buffer.to(torch.float32, copy=True)")
    source = source.replace("dq.to(torch.bfloat16)", "dq.to(q.dtype)")
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return getattr(module, f"{kind}_flash_attn_func")


def _ring(kind: str, problem: Problem, mesh: DeviceMesh) -> Attention:
    refuse(problem)
    if kind == "zigzag_ring" and not problem.causal:
        raise Skip("its balanced ring is causal only")
    function, group = mended(kind), mesh.get_group()

    def attend(*qkv: Tensor) -> Tensor:
        return function(*(x.transpose(1, 2) for x in qkv), causal=problem.causal, group=group).transpose(1, 2)

    return attend


def _ulysses(problem: Problem, mesh: DeviceMesh) -> Attention:
    with installed():
        from yunchang import UlyssesAttention

    refuse(problem)
    layer = UlyssesAttention(mesh.get_group())

    def attend(*qkv: Tensor) -> Tensor:
        return layer(*(x.transpose(1, 2) for x in qkv), causal=problem.causal).transpose(1, 2)

    return attend


CONTENDERS = [
    Contender("yunchang", "Ulysses", "contiguous", _ulysses, "CPU flash"),
    Contender("yunchang", "ring", "head_tail", partial(_ring, "zigzag_ring"), "CPU flash, mended"),
    Contender("yunchang", "ring", "contiguous", partial(_ring, "ring"), "CPU flash, mended", balanced=False),
]

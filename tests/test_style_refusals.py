"""Wrong uses of ContextParallel are refused on every rank, with the argument, the value and a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, styled_modules
from hyper_cp.mesh import comm
from tests.harness import modules
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import named_error, on_ranks
from tests.harness.styled import BNSD, RING1, Flash, apply, clean, local


def two_d_with_other_names(*_: Tensor) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ContextParallel()._apply(modules.BNSD(), mesh)


def three_d(*_: Tensor) -> None:
    ContextParallel()._apply(modules.BNSD(), init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))


def twice(*_: Tensor) -> None:
    apply(apply(modules.BNSD(), **BNSD), **BNSD)


def nothing_matched(*_: Tensor) -> None:
    model = nn.Sequential(modules.BNSD())
    parallelize_module(model, cp_mesh(), {"attention": ContextParallel()})
    styled_modules(model, at_least=1)


def named(q: Tensor, k: Tensor, v: Tensor) -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"attn": modules.Silent()})})
    parallelize_module(model, cp_mesh(), {"block.attn": ContextParallel(**RING1)})
    styled_modules(model)
    model["block"]["attn"](q, k, v)  # type: ignore[index,operator]


class Transposing(modules.BNSD):
    def forward(self, *qkv: Tensor) -> Tensor:
        return super().forward(*qkv).transpose(1, 2)


class CoreCheckpoint(nn.Module):
    """Recomputes only its attention, with the old kind of activation checkpointing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def core(*qkv: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*qkv, is_causal=True)

        return checkpoint(core, q, k, v, use_reentrant=True)


class Rotated(nn.Module):
    """Only v reaches attention as it came; q and k are changed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 2, k * 2, v, is_causal=True)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = modules.BNSD()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(q, k, v)


def nested(q: Tensor, k: Tensor, v: Tensor) -> None:
    model = parallelize_module(Outer(), cp_mesh(), {"": ContextParallel(**BNSD), "inner": ContextParallel(**BNSD)})
    try:
        model(q, k, v)
    finally:
        if not clean():
            raise SystemError("left something behind")


@torch.library.custom_op("xformers_like::attend", mutates_args=())
def library_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Library(nn.Module):
    """Calls the operator of a library of attention kernels."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return library_attention(q, k, v)


Mistake = tuple[str, Callable[..., Any]]
"""The error, a ValueError if it has no name, and the call with q, k and v."""


WRONG: dict[str, Mistake] = {
    "heads": (
        "ulysses_degree=4 cannot split 6 query heads.*that work: 1, 2\\.",
        lambda q, k, v: apply(modules.BNSD(), **BNSD)(q.repeat(1, 2, 1, 1)[:, :6], k[:, :2], v[:, :2]),
    ),
    "heads, own qkv": (
        "cannot split 3 query heads.*that work: 1\\.",
        lambda q, k, v: apply(modules.BNSD(), qkv_indices=None, ulysses_degree=2)(q[:, :3], k[:, :3], v[:, :3]),
    ),
    "degree": (
        "ulysses_degree=3 does not divide the cp mesh of 4 ranks.* Degrees that divide it: 1, 2, 4",
        lambda *_: apply(modules.BNSD(), ulysses_degree=3),
    ),
    "2-D names": (r"2 dimensions named \('dp', 'cp'\).*Slice", two_d_with_other_names),
    "3-D": ("3 dimensions", three_d),
    "2-D and degree": (
        "ulysses_degree=4 contradicts the 2-D mesh, whose 'ulysses' dimension has 2",
        lambda *_: apply(modules.BNSD(), (2, 2), ulysses_degree=4),
    ),
    "not found": (
        "v was found neither at position 2 nor as keyword 'v'.*Set qkv_indices",
        lambda q, k, v: apply(modules.BNSD(), **BNSD)(q, k),
    ),
    "not a tensor": ("TypeError: k is a str, not a tensor", lambda q, k, v: apply(modules.BNSD(), **BNSD)(q, "k", v)),
    "dtypes": (
        "TypeError: dtypes torch.float64, torch.float32, torch.float64.*Cast",
        lambda q, k, v: apply(modules.BNSD(), **BNSD)(q, k.float(), v),
    ),
    "dtypes, own qkv": (
        "TypeError: dtypes torch.float64, torch.float32 and torch.float64",
        lambda q, k, v: apply(modules.BNSD(), qkv_indices=None)(q, k.float(), v),
    ),
    "dimensions": (
        "seq_dim=2 and head_dim=4 need 6 dimensions",
        lambda q, k, v: apply(modules.BNSD(), seq_dim=2, head_dim=4)(q, k, v),
    ),
    "lengths": (
        "k and v have 3 and 4 positions in dimension seq_dim=2",
        lambda q, k, v: apply(modules.BNSD(), **BNSD)(q, k[:, :, :3], v),
    ),
    "documents": (
        r"documents=\[0, 5, 9\] must be cumulative lengths that ascend from 0 to the global sequence length 16",
        lambda q, k, v: apply(modules.BNSD(), **BNSD, ulysses_degree=2)(q, k, v, documents=[0, 5, 9]),
    ),
    "documents, own qkv": (
        "the global sequence length 16",
        lambda q, k, v: apply(modules.BNSD(), qkv_indices=None, ulysses_degree=2)(q, k, v, documents=[[3, 16]]),
    ),
    "causal cross-attention": (
        "query has 16 and key 12 positions .*Cross-attention of different lengths takes no is_causal",
        lambda q, k, v: apply(modules.BNSD(), **RING1)(q, k[:, :, :3], v[:, :, :3]),
    ),
    "odd": (
        "local sequence length 3 is odd.*multiple of 8",
        lambda q, k, v: apply(modules.BNSD(), **BNSD, layout="head_tail")(*(x[:, :, :3] for x in (q, k, v))),
    ),
    "odd, balance": (
        "local sequence length 3 is odd.*multiple of 8",
        lambda q, k, v: apply(modules.BNSD(), **RING1, load_balance=True)(*(x[:, :, :3] for x in (q, k, v))),
    ),
    "no attention": (
        "RuntimeError: module Silent returned without calling F.scaled_dot_product_attention",
        lambda q, k, v: apply(modules.Silent(), **RING1)(q, k, v),
    ),
    "no attention, own qkv": (
        "RuntimeError: module Silent returned without calling",
        lambda q, k, v: apply(modules.Silent(), qkv_indices=None)(q, k, v),
    ),
    "no attention, named": (r"RuntimeError: module 'block.attn' \(Silent\)", named),
    "twice": ("already applied to module BNSD", twice),
    "nothing matched": ("applied to 0 modules of Sequential, and at_least=1 are expected", nothing_matched),
    "mask": (
        r"attn_mask has shape \(1, 1, 4, 4\). It must be broadcastable to \[1, 4, 16, 16\]",
        lambda q, k, v: apply(Flash(attn_mask=torch.ones(4, 4, dtype=torch.bool)), **RING1)(q, k, v),
    ),
    "dropout": (
        "dropout_p=1.0 must be a probability below 1",
        lambda q, k, v: apply(Flash(dropout_p=1.0), **RING1)(q, k, v),
    ),
    "gqa": (
        "query has 4 heads and key 2.*Pass enable_gqa=True",
        lambda q, k, v: apply(Flash(), **RING1)(q, k[:, :2], v[:, :2]),
    ),
    "another library": (
        r"NotImplementedError: module Library calls xformers_like.attend.*cannot be routed",
        lambda q, k, v: apply(Library(), **RING1)(q, k, v),
    ),
    "not a mesh": (
        "TypeError: mesh must be a torch.distributed.DeviceMesh, got str",
        lambda *_: ContextParallel()._apply(modules.BNSD(), "cp"),
    ),
    "swapped dimensions of equal sizes": (
        "Check seq_dim and head_dim",
        lambda *_: apply(modules.BNSD())(*(torch.randn(1, 4, 64, 8) for _ in range(3))),
    ),
    "swapped dimensions of equal sizes, rotated": (
        "Check seq_dim and head_dim",
        lambda *_: apply(Rotated())(*(torch.randn(1, 4, 64, 8) for _ in range(3))),
    ),
    "swapped dimensions": (
        r"query of shape .* should be \[batch, .* Check seq_dim and head_dim",
        lambda q, k, v: apply(modules.BSHD(), **BNSD)(*(x.transpose(1, 2) for x in (q, k, v))),
    ),
    "flattened heads": (
        "need 4 dimensions .*qkv_indices=None",
        lambda q, k, v: apply(modules.BSHD())(*(x.transpose(1, 2).flatten(2) for x in (q, k, v))),
    ),
    "reentrant checkpoint inside": (
        "RuntimeError: gradients switched off inside the module",
        lambda q, k, v: apply(CoreCheckpoint(), **RING1)(*(x.requires_grad_() for x in (q, k, v))),
    ),
    "integers": (
        "TypeError: query has dtype torch.int32. Kernels take",
        lambda q, k, v: apply(Flash(), **RING1)(*(x.int() for x in (q, k, v))),
    ),
    "ring without a ring": (
        'kv_exchange="ring" has no effect with ulysses_degree=None',
        lambda q, k, v: apply(Flash(), **BNSD, kv_exchange="ring"),
    ),
    "output of another layout": (
        "must be a tensor with 16 positions in dimension seq_dim=2 and 1 heads",
        lambda q, k, v: apply(Transposing(), **BNSD)(q, k, v),
    ),
    "styled modules inside each other": ("RuntimeError: module BNSD was called inside module Outer", nested),
    "a mesh out of order": (
        r"mesh lists its ranks as \[1, 0, 2, 3\], not ascending",
        lambda *_: ContextParallel()._apply(modules.BNSD(), DeviceMesh("cpu", [1, 0, 2, 3], mesh_dim_names=("cp",))),
    ),
}
LATER = ("output of another layout", "styled modules inside each other", "reentrant checkpoint inside") + tuple(
    f"swapped dimensions{how}" for how in ("", " of equal sizes", " of equal sizes, rotated")
)
"""Mistakes that show when q, k and v have been exchanged; the others are found before."""


@on_ranks
def refused(kind: str) -> None:
    """Make the mistake ``kind``; nothing may have been communicated but by those that show later."""
    (q, k, v), _ = local()
    with comm.record_traffic() as log:
        try:
            WRONG[kind][1](q, k, v)
        finally:
            if kind not in LATER and any(operation != "agreement" for operation, _ in log.entries):
                raise SystemError(f"communicated before refusing: {log.entries}")


@pytest.mark.parametrize("kind", list(WRONG))
@pytest.mark.filterwarnings("ignore")
def test_wrong_use_is_refused_on_every_rank_before_communication(ranks: Any, kind: str) -> None:
    ranks.raises(4, *named_error(WRONG[kind][0]), refused, kind)

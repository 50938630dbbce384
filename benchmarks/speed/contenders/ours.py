"""Every mode of this library."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyper_cp.ops import attention

from ..case import Problem
from .contender import Attention, Contender, Skip

LIBRARY = "hyper_cp"
BY_DOCUMENTS = ("per_document", "balanced")


def _prepare(options: dict[str, Any], problem: Problem, mesh: DeviceMesh) -> Attention:
    degree = options.get("ulysses_degree", 1)
    if degree not in (None, 1) and mesh.size() <= degree:
        raise Skip(f"a hybrid needs more than {degree} ranks")
    if options["layout"] in BY_DOCUMENTS and problem.documents is None:
        raise Skip("is a layout for packed documents")
    if options.get("load_balance") and problem.mask != "causal":
        raise Skip("balances causal attention of one document")
    grouped = problem.heads != problem.kv_heads
    documents = None if problem.documents is None else torch.tensor(problem.documents)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(
            q, k, v, mesh=mesh, is_causal=problem.causal, enable_gqa=grouped, documents=documents, **options
        )
        assert isinstance(out, Tensor)
        return out

    return attend


def _contender(mode: str, layout: str, note: str = "", balanced: bool = True, **options: Any) -> Contender:
    return Contender(LIBRARY, mode, layout, partial(_prepare, {"layout": layout, **options}), note, balanced)


ULYSSES: dict[str, Any] = {"ulysses_degree": None}

CONTENDERS = [
    _contender("Ulysses", "contiguous", **ULYSSES),
    _contender("Ulysses", "head_tail", **ULYSSES),
    _contender("Ulysses", "contiguous", "2 head groups", head_groups=2, **ULYSSES),
    _contender("all-gather", "head_tail"),
    _contender("all-gather", "contiguous", "load_balance", load_balance=True),
    _contender("ring", "head_tail", kv_exchange="ring"),
    _contender("ring", "contiguous", "load_balance", kv_exchange="ring", load_balance=True),
    _contender("needed", "head_tail", kv_exchange="needed"),
    _contender("hybrid", "head_tail", "2 x ring", ulysses_degree=2, kv_exchange="ring"),
    _contender("all-gather", "contiguous", balanced=False),
    _contender("ring", "contiguous", balanced=False, kv_exchange="ring"),
    _contender("all-gather", "per_document"),
    _contender("ring", "per_document", kv_exchange="ring"),
    _contender("needed", "balanced", kv_exchange="needed"),
]

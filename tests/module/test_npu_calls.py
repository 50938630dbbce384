"""User modules that call torch_npu.npu_fusion_attention: routed, or an error that names the option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.module import attention_calls as calls
from tests.harness import npu_standin
from tests.harness.attention_case import FP32, cp_mesh
from tests.harness.oracle import plain_attention, relative_error, visible_pairs
from tests.harness.ranks import on_ranks, sum_over_ranks

Layout = tuple[Any, Any]
LAYOUTS: dict[str, Layout] = {
    "BNSD": (lambda x: x, lambda x: x),
    "BSND": (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "BSH": (lambda x: x.transpose(1, 2).flatten(2), lambda x: x.unflatten(2, (-1, 8)).transpose(1, 2)),
    "SBH": (lambda x: x.permute(2, 0, 1, 3).flatten(2), lambda x: x.unflatten(2, (-1, 8)).permute(1, 2, 0, 3)),
    "TND": (lambda x: x.squeeze(0).transpose(0, 1), lambda x: x.transpose(0, 1).unsqueeze(0)),
}


class Fusion(nn.Module):
    """A user's attention on the NPU's operator, in one of its layouts."""

    def __init__(self, layout: str, **keywords: Any) -> None:
        super().__init__()
        self.layout, self.keywords = layout, keywords

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        to, back = LAYOUTS[self.layout]
        heads = q.shape[1]
        q, k, v = (to(x).contiguous() for x in (q, k, v))
        out, *_ = torch.ops.npu.npu_fusion_attention(q, k, v, heads, self.layout, scale=0.3, **self.keywords)
        return back(out)


def fusion_calls() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name: (layout, the user's keywords, what the oracle sees)."""
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    own = torch.rand(16, 16, generator=torch.Generator().manual_seed(5)) < 0.3
    lengths = [3, 4, 11, 16]
    packed = {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths}
    causal = visible_pairs(16, True, None, None)
    return {
        "no mask": ("BNSD", {"sparse_mode": 3}, {}),
        "0": ("BSND", {"atten_mask": own}, {"visible": ~own}),
        "0 with tokens": (
            "BNSD",
            {"atten_mask": own, "pre_tockens": 5, "next_tockens": 2},
            {"visible": ~own & visible_pairs(16, False, (5, 2), None)},
        ),
        "1": ("BSH", {"atten_mask": own, "sparse_mode": 1, "next_tockens": 0}, {"visible": ~own}),
        "2": ("SBH", {"atten_mask": triangle, "sparse_mode": 2}, {"visible": causal}),
        "3": ("BSND", {"atten_mask": triangle, "sparse_mode": 3}, {"visible": causal}),
        "4": (
            "BNSD",
            {"atten_mask": triangle, "sparse_mode": 4, "pre_tockens": 6, "next_tockens": 0},
            {"visible": visible_pairs(16, False, (6, 0), None)},
        ),
        "packed": (
            "TND",
            {"atten_mask": triangle, "sparse_mode": 3, **packed},
            {"visible": visible_pairs(16, True, None, [[0, *lengths]])},
        ),
    }


def worst_error(module: nn.Module, style: dict[str, Any], leaves: list[Tensor], batch: int, **seen: Any) -> float:
    """The largest error of the output and of the gradients of q, k, v and the leaves of the module."""
    mesh, made = cp_mesh(), ContextParallel(seq_dim=2, head_dim=1, **style)
    handler = ContextParallelHandler(mesh, made)
    g = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(batch, 4, 16, 8, generator=g) for _ in range(4))
    local = [handler.dispatch(x, 2).requires_grad_() for x in (q, k, v)]
    out = parallelize_module(module, mesh, {"": made})(*local)
    grads = torch.autograd.grad(out, [*local, *leaves], handler.dispatch(dout, 2))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, *leaves)]
    want = plain_attention(*wide[:3], scale=0.3, sinks=wide[3] if leaves else None, **seen)
    expected = torch.autograd.grad(want, wide, dout.double())
    found = [handler.combine(x.detach(), 2) for x in (out, *grads[:3])] + [sum_over_ranks(x)[0] for x in grads[3:]]
    return max(relative_error(a, b.detach()) for a, b in zip(found, (want, *expected), strict=True))


@on_ranks
def run_fusion(style: dict[str, Any]) -> dict[str, float]:
    npu_standin.install()
    return {
        name: worst_error(Fusion(layout, **keywords), style, [], 1 if layout == "TND" else 2, **seen)
        for name, (layout, keywords, seen) in fusion_calls().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "style",
    [
        {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
        {"ulysses_degree": 1, "load_balance": True},
        {"ulysses_degree": 2, "kv_exchange": "ring"},
        {"ulysses_degree": 2, "qkv_indices": None, "layout": "head_tail"},
    ],
    ids=str,
)
def test_calls_of_the_npu_operator_are_routed(ranks: Any, style: dict[str, Any], standin: Any) -> None:
    for found in ranks(4, run_fusion, style):
        assert max(found.values()) <= FP32, found


class WithSinks(nn.Module):
    def __init__(self, sinks: Tensor) -> None:
        super().__init__()
        self.sinks = sinks

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        options = {"scale": 0.3, "sink": self.sinks, "atten_mask": torch.ones(2048, 2048).bool().triu(1)}
        return torch.ops.npu.npu_fusion_attention_v3(q, k, v, q.shape[1], "BNSD", sparse_mode=3, **options)[0]


@on_ranks
def run_sinks(styles: list[dict[str, Any]]) -> list[float]:
    npu_standin.install()
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    return [worst_error(WithSinks(sinks), style, [sinks], 2, is_causal=True) for style in styles]


def test_the_sink_of_the_npu_operator(ranks: Any, standin: Any) -> None:
    """Also where the module sees whole sequences, of which the operator would see a share of the heads."""
    styles: list[dict[str, Any]] = [
        {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
        {"ulysses_degree": None},
        {"ulysses_degree": 2, "qkv_indices": None, "kv_exchange": "ring"},
    ]
    for found in ranks(4, run_sinks, styles):
        assert max(found) <= FP32, found


@pytest.mark.parametrize(
    "keywords, words",
    [
        ({"sparse_mode": 6}, "sparse_mode=6"),
        ({"pse": torch.zeros(1)}, "with pse, which is not supported"),
        ({"keep_prob": 0.9}, "keep_prob"),
        ({"atten_mask": torch.zeros(1), "sparse_mode": 4, "next_tockens": -3}, "next_tokens=-3"),
    ],
)
def test_what_the_npu_operator_can_and_we_cannot_is_refused_by_name(keywords: dict[str, Any], words: str) -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=words):
        calls.ROUTED["npu.npu_fusion_attention"].read("module M", q, q, q, 2, "BNSD", **keywords)

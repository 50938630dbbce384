"""FlexAttention in tiles: every mode, forward and backward, against a softmax over scores of whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import TileInputs, reference
from hyper_cp.ops.kernels.scores import TileScore, Where, flex_kernel
from hyper_cp.ops.kernels.scores.mods import Mods
from hyper_cp.schedule.tiles import FULL
from tests.harness.attention_case import FP64
from tests.harness.flex_masks import backward_on_the_cpu, untraced
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

B, H, KV, S, D = 2, 4, 2, 24, 8
DOCUMENT = torch.tensor([0] * 5 + [1] * 9 + [2] + [3] * 9)
DOCUMENTS = [0, 5, 14, 15, 24]
PREFIX = torch.tensor([7, 3])
SLOPE = 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64)

Mod = Callable[..., Tensor]


@dataclass
class Case:
    """Functions of global positions; ``made`` builds the score function from leaves that get a gradient."""

    mask_mod: Mod | None = None
    made: Callable[..., Mod] | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    blocks: tuple[Any, Any, Any] = (None, None, 4)
    sink: bool = False


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (i - j < 7)


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENT[i] == DOCUMENT[j]) & (j <= i) & ((i < 20) | (b == 0))


def prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) | (j < PREFIX[b])


def strided_heads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((i - j) % (h + 1) == 0)


def alibi() -> Mod:
    return lambda score, b, h, i, j: score - SLOPE[h] * (i - j).abs() * (b + 1)


def relative(table: Tensor, gain: Tensor) -> Mod:
    twice = table * 2  # a captured tensor that is itself computed
    return lambda score, b, h, i, j: score * gain[h].exp() + twice[h, (i - j).clamp(-5, 5) + 5] + table[0, j % 11]


def softcap() -> Mod:
    return lambda score, b, h, i, j: 2 * torch.tanh(score / 2)


CASES: dict[str, Case] = {
    "alibi": Case(None, alibi),
    "relative": Case(causal, relative, ((H, 11), (H,)), (None, None, 5)),
    "documents": Case(documents, None, (), (B, None, (5, 4))),
    "prefix": Case(prefix, softcap, (), (B, None, 4)),
    "window, sink": Case(window, None, ((H,),), sink=True),
    "heads": Case(strided_heads, softcap, (), (None, H, 16)),
}


def tensors(name: str) -> list[Tensor]:
    """q, k, v, the gradient of the output, and the leaves of the case."""
    g = torch.Generator().manual_seed(3)
    shapes = [(B, H, S, D), (B, KV, S, D), (B, KV, S, D), (B, H, S, D), *CASES[name].shapes]
    return [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]


def oracle(name: str, qkv: list[Tensor], leaves: list[Tensor], hidden: Tensor | None = None) -> Tensor:
    case, (q, k, v) = CASES[name], qkv
    k, v = (x.repeat_interleave(H // KV, 1) for x in (k, v))
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (B, H, S, S)), indexing="ij")
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5
    if case.made is not None:
        logits = case.made(*leaves)(logits, b, h, i, j)
    seen = torch.ones_like(logits, dtype=torch.bool) if case.mask_mod is None else case.mask_mod(b, h, i, j)
    seen = seen if hidden is None else seen & ~hidden
    sink = leaves[0] if case.sink else torch.full((H,), -1e200, dtype=q.dtype)
    logits = torch.cat([logits.masked_fill(~seen, -1e300), sink.view(1, H, 1, 1).expand(B, H, S, 1)], -1)
    return torch.einsum("bhij,bhjd->bhid", logits.softmax(-1)[..., :-1] * seen, v)


class Flex(nn.Module):
    """Gets q, k, v; applies its sink as models do, through the log-sum-exp."""

    def __init__(self, name: str, leaves: list[Tensor]) -> None:
        super().__init__()
        self.case, self.leaves = CASES[name], leaves
        b, h, size = self.case.blocks
        mod = self.case.mask_mod
        self.block_mask: BlockMask | None = mod and create_block_mask(mod, b, h, S, S, device="cpu", BLOCK_SIZE=size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score_mod = None if self.case.made is None else self.case.made(*self.leaves)
        options: dict[str, Any] = {"score_mod": score_mod, "block_mask": self.block_mask, "enable_gqa": True}
        if not self.case.sink:
            return flex_attention(q, k, v, **options)  # type: ignore[return-value]
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        lane = dist.get_rank() % (H // out.shape[1])  # of the heads that are here
        heads = torch.arange(out.shape[1]) + lane * out.shape[1]
        return out * torch.sigmoid(aux.lse - self.leaves[0][heads].view(1, -1, 1)).unsqueeze(-1)


def styles(world: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
        {"ulysses_degree": 1, "kv_exchange": "needed", "layout": "contiguous"},
        {"ulysses_degree": 1, "kv_exchange": "all_gather", "load_balance": True},
        {"ulysses_degree": 1, "kv_exchange": "needed", "layout": "per_document"},
        {"ulysses_degree": 1, "kv_exchange": "ring", "load_balance": True},
        {"ulysses_degree": 1, "kv_exchange": "all_gather", "layout": "head_tail", "qkv_indices": None},
        {"ulysses_degree": 1, "kv_exchange": "needed", "window": (4, 2)},
        {"ulysses_degree": 1, "kv_exchange": "needed", "layout": "balanced"},
    ]
    if H % world == 0:
        found += [{"ulysses_degree": None}, {"ulysses_degree": None, "qkv_indices": None, "head_groups": 2}]
    if world == 4:
        found[-1] = {"ulysses_degree": 2, "qkv_indices": None, "kv_exchange": "ring"}
        found += [
            {"ulysses_degree": 2, "kv_exchange": x, "layout": y}
            for x, y in (("ring", "head_tail"), ("needed", "contiguous"), ("all_gather", "per_document"))
        ]
    return found


def hidden_by(style: dict[str, Any], rows: Any) -> Tensor | None:
    """The pairs that documents of the batch or a window of the style hide beside the functions."""
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    if style.get("window") is not None:
        return (i - j > style["window"][0]) | (j - i > style["window"][1])
    return None if rows is None else DOCUMENT[:, None] != DOCUMENT[None]


def one(name: str, style: dict[str, Any], recompute: bool = False) -> dict[str, float]:
    """Relative errors of the output and of every gradient on this rank."""
    *qkv, dout = tensors(name)[:4]
    rows = DOCUMENTS if style.get("layout") in ("per_document", "balanced") else None
    whole, leaves = ([x.clone().requires_grad_() for x in xs] for xs in (qkv, tensors(name)[4:]))
    want = oracle(name, whole, leaves, hidden_by(style, rows))
    expected = torch.autograd.grad(want, whole + leaves, dout, materialize_grads=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    made = ContextParallel(seq_dim=2, head_dim=1, **style)
    handler = ContextParallelHandler(mesh, made)
    own = [x.detach().clone().requires_grad_() for x in leaves]
    with handler.documents(rows) if rows is not None else nullcontext():
        at = handler.position_ids(S)
        local = [x[:, :, at].clone().requires_grad_() for x in qkv]
        module = parallelize_module(Flex(name, own), mesh, made)
        out = checkpoint(module, *local, use_reentrant=False) if recompute else module(*local)
        found = torch.autograd.grad(out, local + own, dout[:, :, at], materialize_grads=True)
    errors = {"out": relative_error(out, want[:, :, at])}
    for i, (a, b) in enumerate(zip(found[:3], expected[:3], strict=True)):
        errors["qkv"[i]] = relative_error(a, b[:, :, at])
    for i, (a, b) in enumerate(zip(found[3:], expected[3:], strict=True)):
        errors[f"leaf {i}"] = relative_error(sum_over_ranks(a)[0], b)
    return errors


@on_ranks
def errors_of(cases: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    return {f"{name} {style}": one(name, style) for name, style in cases}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_every_function_in_every_mode(ranks: Any, world: int) -> None:
    """Each mode runs a third of the functions, and each function a third of the modes."""
    cases = [(name, style) for i, name in enumerate(CASES) for k, style in enumerate(styles(world)) if (i + k) % 3 == 0]
    for found in ranks(world, errors_of, cases, timeout=200):
        assert all(max(e.values()) <= FP64 for e in found.values()), {
            k: e for k, e in found.items() if max(e.values()) > FP64
        }


# --------------------------------------------------------------------------- FlexAttention as the kernel of a tile


@on_ranks
def by_flex_attention(cases: list[tuple[str, dict[str, Any]]]) -> tuple[dict[str, dict[str, float]], set[str]]:
    """The kernel of CUDA, on the CPU: torch's math there is complete."""
    kernel = flex_kernel.FlexKernel(compiled=False)
    called = set()

    def accepts(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
        called.add("accepts")
        return True

    with kernels.register(kernel, "cpu", accepts, scores=True), untraced(), backward_on_the_cpu():
        return {f"{name} {style}": one(name, style) for name, style in cases}, called


@pytest.mark.slow
def test_flex_attention_per_tile(ranks: Any) -> None:
    chosen = [("documents", 0), ("window, sink", 4), ("prefix", 3), ("alibi", 6)]
    for found, called in ranks(2, by_flex_attention, [(name, styles(2)[i]) for name, i in chosen]):
        assert called
        worst = {case: errors for case, errors in found.items() if max(errors.values()) > FP64}
        assert not worst


@pytest.mark.slow
def test_gradients_of_captured_tensors_by_flex_attention() -> None:
    """With torch's tracing, without which it has no gradients of captured tensors."""
    q, k, v, dout, table, gain = tensors("relative")
    leaves = [table.requires_grad_(), gain.requires_grad_()]
    mask = Flex("relative", leaves).block_mask
    score = Mods(relative(*leaves), causal, mask, q)
    where = Where(*(torch.arange(n) for n in (B, H, S, S)))
    found = []
    for kernel in (kernels.REFERENCE, flex_kernel.FlexKernel(compiled=False)):
        captured = [x.detach() for x in score.captured]
        totals = [torch.zeros_like(x) for x in captured]
        tile = TileInputs(q, k, v, FULL, D**-0.5, score=TileScore(score, where, captured, totals))
        with backward_on_the_cpu():
            out, lse = kernel.forward(tile)
            tile.dlse = torch.ones_like(lse)
            found.append([out, lse, *kernel.backward(tile, dout, out, lse), *totals])
    assert len(found[0]) == 8
    assert max(relative_error(a, b) for a, b in zip(found[1], found[0], strict=True)) <= FP64


@pytest.mark.parametrize("band, kind", [((None, 3), "bool"), ((-9, 0), "padding"), ((None, None), "float")])
def test_plain_math_in_chunks_of_rows_is_the_same(band: Any, kind: str) -> None:
    q, k, v, dout, table, gain = tensors("relative")
    mask = torch.rand(B, 1, S if kind == "bool" else 1, S) < 0.8
    mask = torch.randn(1, H, S, S, dtype=torch.float64) if kind == "float" else mask
    score = Mods(relative(table, gain), causal, None, q)
    where = Where(*(torch.arange(n) for n in (B, H, S, S)))
    found = []
    for at_once in (1 << 20, B * H * S * 5):
        tile = TileInputs(q, k, v, band, 0.3, mask, keep=torch.rand(B, H, S, S, generator=torch.manual_seed(2)))
        tile.score, tile.dlse = TileScore(score, where), torch.ones(B, H, S, dtype=torch.float64)
        with mock.patch.object(reference, "LOGITS_AT_ONCE", at_once):
            out, lse = kernels.REFERENCE.forward(tile)
            found.append([out, lse.exp(), *kernels.REFERENCE.backward(tile, dout, out, lse)])
    assert max(relative_error(a, b) for a, b in zip(*found, strict=True)) <= 1e-13


def test_cuda_runs_scores_by_flex_attention_and_nothing_else_by_it() -> None:
    entry = kernels.available("cuda")["flex attention"]
    assert entry is flex_kernel.KERNEL
    q = torch.empty(1, 2, 8, 16, device="meta", dtype=torch.bfloat16)
    assert flex_kernel.accepts(q, q, q, True) and not flex_kernel.accepts(q.double(), q, q, True)


@given(
    st.sampled_from([(None, None), (None, 0), (-150, 0), (-40, 90)]),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_blocks_of_a_tile(band: Any, shape: tuple[int, int], size: tuple[int, int], seed: int) -> None:
    """Every visible pair of a tile at any positions lies in a listed block."""
    g = torch.Generator().manual_seed(seed)
    rows, cols = (torch.randperm(400, generator=g)[:n].sort().values for n in shape)
    dense = torch.rand(1, 1, -(-400 // size[0]), -(-400 // size[1]), generator=g) < 0.1
    score = Mods.__new__(Mods)
    score.dense, score.score_mod, score.mask_mod = dense, None, None
    score.block_mask = SimpleNamespace(BLOCK_SIZE=size)  # type: ignore[assignment]
    where = Where(torch.zeros(1).long(), torch.zeros(1).long(), rows, cols)
    x = [torch.empty(1, 1, n, 1) for n in (len(rows), len(cols), len(cols))]
    tile = TileInputs(*x, band, 1.0, score=TileScore(score, where))
    mask = flex_kernel.tile_blocks(tile, lambda b, h, i, j: i >= 0)
    distance = torch.arange(len(cols)) - torch.arange(len(rows))[:, None]
    seen = dense[0, 0][rows // size[0]][:, cols // size[1]]
    seen &= (distance >= (band[0] if band[0] is not None else -999)) & (
        distance <= (band[1] if band[1] is not None else 999)
    )
    listed = mask.to_dense()[0, 0].bool()
    for i, j in seen.nonzero().tolist():
        assert listed[i // 128, j // 128]


# --------------------------------------------------------------------------- recompute, and what is refused


@on_ranks
def recomputed() -> dict[str, float]:
    errors = {}
    for name in ("relative", "window, sink"):
        for style in (styles(2)[0], styles(2)[8]):
            for what, error in one(name, style, recompute=True).items():
                errors[f"{name} {style} {what}"] = error
    return errors


def test_recomputes_are_exact(ranks: Any) -> None:
    for errors in ranks(2, recomputed):
        assert max(errors.values()) <= FP64, errors


@on_ranks
def needed_bytes() -> int:
    """Bytes that this rank sends under a mask of short windows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, kv_exchange="needed")
    module = parallelize_module(Flex("window, sink", [torch.zeros(H, dtype=torch.float64)]), mesh, style)
    with comm.record_traffic() as log:
        module(*(x.chunk(4, 2)[dist.get_rank()] for x in tensors("window, sink")[:3]))
    return sum(size for op, size in log.entries if op != "agreement")


def test_blocks_say_what_travels(ranks: Any) -> None:
    rows, seen = 0, [{j for j in range(S) if 0 <= i - j < 7} for i in range(S)]
    for rank in range(4):
        mine = set(range(6 * rank, 6 * rank + 6))
        touched = {i // 4 for i in mine}
        blocks = {j // 4 for i in range(S) if i // 4 in touched for j in seen[i]}
        rows += len({j for j in range(S) if j // 4 in blocks} - mine)
    assert sum(ranks(4, needed_bytes)) == rows * 2 * B * KV * D * 8


@on_ranks
def other_masks() -> None:
    q, k, v = (x.chunk(2, 2)[dist.get_rank()] for x in tensors("alibi")[:3])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    module = Flex("window, sink", [torch.zeros(H, dtype=torch.float64)])
    mod = [causal, window][dist.get_rank()]
    module.block_mask = create_block_mask(mod, None, None, S, S, device="cpu", BLOCK_SIZE=4)
    parallelize_module(module, mesh, ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1))(q, k, v)


def test_ranks_with_other_block_masks_are_refused(ranks: Any) -> None:
    ranks.raises(2, ValueError, "different block mask.*Build the block_mask", other_masks)

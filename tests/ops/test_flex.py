"""FlexAttention under context parallelism: the user's functions of global positions, against whole tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm, cp_mesh
from hyper_cp.mesh.comm import Axis
from hyper_cp.ops import flex
from hyper_cp.ops.exchange import gather_keys as gather
from tests.harness.flex_masks import CASES, KV, B, Case, D, H, S, backward_on_the_cpu, blocks_of, causal, untraced
from tests.harness.oracle import relative_error, token_positions
from tests.harness.ranks import on_ranks

# Made before any module is styled, and shared by modules of all styles.
compiled_flex = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")


def whole(heads: tuple[int, ...] = (H, KV, KV), dims: tuple[int, ...] = (D, D, D)) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(B, h, S, d, generator=g, dtype=torch.float64) for h, d in zip(heads, dims, strict=True)]


def oracle(q: Tensor, k: Tensor, v: Tensor, mask_mod: Any, score_mod: Any, scale: float) -> tuple[Tensor, Tensor]:
    """``(out, log-sum-exp)`` of whole tensors, written out; rows that see nothing give zeros."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if score_mod is not None:
        logits = score_mod(logits, b, h, i, j)
    seen = torch.ones_like(logits, dtype=torch.bool) if mask_mod is None else mask_mod(b, h, i, j)
    lse = logits.masked_fill(~seen, -torch.inf).logsumexp(-1)
    weights = logits.masked_fill(~seen, -1e300).softmax(-1) * seen
    return torch.einsum("bhij,bhjd->bhid", weights, v), lse


class Flex(nn.Module):
    """Gets q, k, v ``[B, H, S, D]``; keeps its mask, as models do that build it once."""

    def __init__(self, case: Case, attention: Callable[..., Any] = flex_attention, **kwargs: Any) -> None:
        super().__init__()
        self.score_mod, self.block_mask, self.kwargs = case[3], blocks_of(case), kwargs
        self.attention = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.attention(
            q, k, v, score_mod=self.score_mod, block_mask=self.block_mask, enable_gqa=True, **self.kwargs
        )


def styled(module: nn.Module, **style: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return parallelize_module(module, mesh, ContextParallel(seq_dim=2, head_dim=1, **style))


def own(layout: str) -> Tensor:
    return torch.tensor(token_positions(layout, dist.get_rank(), dist.get_world_size(), S))


STYLES = [
    {"ulysses_degree": degree, "layout": layout, "qkv_indices": indices}
    for degree in (1, 2, None)
    for layout in ("contiguous", "head_tail")
    for indices in ((0, 1, 2), None)
]

# --------------------------------------------------------------------------- forward


@on_ranks
@untraced()
def forward_errors(styles: list[dict[str, Any]], cases: list[str]) -> dict[str, float]:
    errors = {}
    q, k, v = whole()
    for name in cases:
        case = CASES[name]
        want, _ = oracle(q, k, v, case[0], case[3], D**-0.5)
        for style in styles:
            mine = own(style["layout"])
            got = styled(Flex(case), **style)(*(x[:, :, mine] for x in (q, k, v)))
            errors[f"{name} {style}"] = relative_error(got, want[:, :, mine]) if got.isfinite().all() else 1.0
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_mask_in_every_mode_and_layout(ranks: Any, world: int) -> None:
    styles = STYLES if world == 4 else [s for s in STYLES if s["ulysses_degree"] != 2]
    cases = list(CASES) if world == 2 else ["documents", "window, alibi", "heads"]
    for errors in ranks(world, forward_errors, styles, cases):
        assert max(errors.values()) <= 1e-10, {k: e for k, e in errors.items() if e > 1e-10}


@on_ranks
def compiled_errors(styles: list[dict[str, Any]], cases: list[str]) -> dict[str, float]:
    """torch.compile of the function alone (one compiled function for all styles), and of the whole module."""
    errors = {}
    q, k, v = whole()
    plain = compiled_flex(q, k, v, block_mask=blocks_of(CASES["causal"]), enable_gqa=True)
    errors["outside"] = relative_error(plain, oracle(q, k, v, causal, None, D**-0.5)[0])
    for name in cases:
        case = CASES[name]
        want, _ = oracle(q, k, v, case[0], case[3], D**-0.5)
        for style in styles:
            mine = own(style["layout"])
            local = [x[:, :, mine] for x in (q, k, v)]
            module = styled(Flex(case), **style)
            ways = {"function": styled(Flex(case, compiled_flex), **style)}
            if style is styles[-1]:
                ways["module"] = torch.compile(module, fullgraph=True, backend="aot_eager")
            for way, run in ways.items():
                errors[f"{way} {name} {style}"] = relative_error(run(*local), want[:, :, mine])
    again = compiled_flex(q, k, v, block_mask=blocks_of(CASES["causal"]), enable_gqa=True)
    errors["outside again"] = relative_error(again, plain)
    return errors


@pytest.mark.slow
def test_compiled(ranks: Any) -> None:
    styles = [STYLES[i] for i in (8, 0, 3)]
    for errors in ranks(2, compiled_errors, styles, ["window, alibi"], timeout=300):
        assert max(errors.values()) <= 1e-10, {k: e for k, e in errors.items() if e > 1e-10}


@on_ranks
def asked_beside(style: dict[str, Any]) -> list[float]:
    q, k, v = whole(dims=(D, D, 2 * D))
    mine = own(style["layout"])
    local = [x[:, :, mine] for x in (q, k, v)]
    want, lse = (x[:, :, mine] for x in oracle(q, k, v, causal, None, 0.3))
    case = CASES["causal"]
    out, aux = styled(Flex(case, scale=0.3, return_aux=AuxRequest(lse=True)), **style)(*local)
    kernel_options = {"BLOCKS_ARE_CONTIGUOUS": True}
    pair = styled(Flex(case, scale=0.3, return_lse=True, kernel_options=kernel_options), **style)(*local)
    assert kernel_options == {"BLOCKS_ARE_CONTIGUOUS": True}
    lses = [pair[1]] if style["qkv_indices"] is not None else [pair[1], aux.lse]
    outs = [relative_error(x, want) for x in (out, pair[0])]
    return outs + [relative_error(x, lse) for x in lses]


@pytest.mark.slow
def test_scale_log_sum_exp_and_kernel_options(ranks: Any) -> None:
    for style in (STYLES[5], STYLES[7], STYLES[6]):
        assert max(max(e) for e in ranks(4, asked_beside, style)) <= 1e-10, style


# --------------------------------------------------------------------------- backward


@on_ranks
def gradient_errors(styles: list[dict[str, Any]], cases: list[str], traced: bool) -> dict[str, float]:
    with nullcontext() if traced else untraced():
        return gradient_errors_of(styles, cases)


def gradient_errors_of(styles: list[dict[str, Any]], cases: list[str]) -> dict[str, float]:
    errors = {}
    for name in cases:
        case = CASES[name]
        q, k, v = (x.requires_grad_() for x in whole())
        want, _ = oracle(q, k, v, case[0], case[3], D**-0.5)
        dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        expected = torch.autograd.grad(want, (q, k, v), dout)
        for style in styles:
            mine = own(style["layout"])
            local = [x[:, :, mine].detach().requires_grad_() for x in (q, k, v)]
            with backward_on_the_cpu():
                out = styled(Flex(case), **style)(*local)
                found = torch.autograd.grad(out, local, dout[:, :, mine])
            errors[f"out {name} {style}"] = relative_error(out, want[:, :, mine])
            for what, a, b in zip("qkv", found, expected, strict=True):
                errors[f"d{what} {name} {style}"] = relative_error(a, b[:, :, mine])
    return errors


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_gradients(ranks: Any, world: int) -> None:
    styles = STYLES[1:6:2] if world == 4 else STYLES[:3]
    for errors in ranks(world, gradient_errors, styles, ["heads", "window, alibi"], world == 2):
        assert max(errors.values()) <= 1e-10, {k: e for k, e in errors.items() if e > 1e-10}


@on_ranks
def check_ops(degree: int) -> None:
    cp = cp_mesh.view(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), degree)
    k, rows = torch.randn(2, 3, 8, 4), torch.randn(8, 2, 3, requires_grad=True)
    for layout in ("contiguous", "head_tail"):
        torch.library.opcheck(gather.gather_rows, (rows, cp.key, layout))
        torch.library.opcheck(gather.scatter_rows, (torch.randn(16, 2, 3), cp.key, layout))
        torch.library.opcheck(gather.query_positions, (k, cp.key, layout))
        mask = create_block_mask(causal, None, None, 16, 16, device="cpu", BLOCK_SIZE=4)
        blocks = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
        for some in (blocks, blocks[:2]):
            torch.library.opcheck(flex.local_blocks, (some, cp.key, layout, 8, 4, 4))


@pytest.mark.slow
def test_opcheck(ranks: Any) -> None:
    ranks(2, check_ops, 1)


@on_ranks
def other_backends_collectives(layout: str) -> bool:
    """Gloo's transfers are made of point-to-point ones; the collectives of other backends give the same."""
    cp = cp_mesh.view(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), 1)
    plain = Axis(cp.ring.rank, cp.ring.size, cp.ring.group)
    other = cp_mesh.register(cp_mesh.CPMesh("plain " + cp.key, plain, cp.ulysses, cp.flat, cp.batch))
    x = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    a, b = (gather.gather_rows(x, m.key, layout) for m in (cp, other))
    c, d = (gather.scatter_rows(a * (1 + dist.get_rank()), m.key, layout) for m in (cp, other))
    return torch.equal(a, b) and torch.allclose(c, x * 3) and torch.allclose(d, x * 3)


def test_other_collectives_than_gloo(ranks: Any) -> None:
    assert all(ranks(2, other_backends_collectives, "head_tail"))


@on_ranks
def traffic(layout: str) -> list[tuple[str, int]]:
    mine = own(layout)
    local = [x[:, :, mine].detach().requires_grad_() for x in whole()]
    with backward_on_the_cpu(), comm.record_traffic() as log:
        styled(Flex(CASES["causal"]), ulysses_degree=1, layout=layout)(*local).sum().backward()
    return [entry for entry in log.entries if entry[0] != "agreement"]


def test_bytes_equal_the_formula(ranks: Any) -> None:
    both = 2 * B * KV * (S // 4) * D * 8  # keys and values of a share
    want = [("all_gather", 3 * both)] * 2 + [("reduce_scatter", 3 * both)]  # fetched again in backward
    assert ranks(4, traffic, "head_tail") == [want] * 4


# --------------------------------------------------------------------------- refusals


@on_ranks
def unequal() -> None:
    length = S // 2 - dist.get_rank()
    styled(Flex(CASES["causal"]), qkv_indices=None)(*(torch.randn(B, H, length, D) for _ in range(3)))


def test_unequal_lengths_are_refused_on_every_rank(ranks: Any) -> None:
    ranks.raises(2, ValueError, "call attention with different shapes", unequal)


@on_ranks
def refused(what: str) -> Any:
    mine = own("contiguous")
    q, k, v = (x[:, :, mine] for x in whole())
    case = CASES["causal"]
    ring = {"ulysses_degree": 1, "kv_exchange": "ring"}
    local = create_block_mask(causal, None, None, len(mine), len(mine), device="cpu", BLOCK_SIZE=16)
    whole_keys = Flex(case, return_aux=AuxRequest(max_scores=True))  # what runs on all keys at once, as compiled calls
    module = whole_keys if what in ("ring", "ring, own qkv", "balance", "window", "documents", "order") else Flex(case)
    with comm.record_traffic() as log:
        try:
            if what == "ring":
                styled(module, **ring)(q, k, v)
            elif what == "ring, own qkv":
                styled(module, qkv_indices=None, **ring)(q, k, v)
            elif what == "balance":
                styled(module, ulysses_degree=1, load_balance=True)(q, k, v)
            elif what == "window":
                styled(module, ulysses_degree=1, window=(3, 0))(q, k, v)
            elif what == "documents":
                mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
                with ContextParallelHandler(mesh, "contiguous").documents([0, 7, S]):
                    styled(module, ulysses_degree=1)(q, k, v)
            elif what in ("local mask", "local mask, own qkv"):
                module.block_mask = local
                indices = None if what.endswith("qkv") else (0, 1, 2)
                styled(module, qkv_indices=indices, ulysses_degree=2 if indices is None else 1)(q, k, v)
            elif what == "local mask, Ulysses":
                module.block_mask = local
                styled(module)(q, k, v)
            elif what == "heads of a share":
                module.block_mask = create_block_mask(causal, None, 2, S, S, device="cpu", BLOCK_SIZE=16)
                styled(module, qkv_indices=None, ulysses_degree=2)(q, k, v)
            elif what == "order":
                module.block_mask.dq_write_order = module.block_mask.kv_indices  # type: ignore[union-attr]
                styled(module, ulysses_degree=1)(q, k, v)
            elif what == "groups":
                style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1)
                mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
                parallelize_module(Groups(), mesh, style)(q, k, v)
        finally:
            sent = [op for op, _ in log.entries if op not in ("all_to_all", "agreement")]
            assert not sent, sent


class Groups(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v)


REFUSED = {
    "ring": ("NotImplementedError", "with AuxRequest.*kv_exchange='ring'.*all_gather"),
    "ring, own qkv": ("NotImplementedError", "kv_exchange='ring'.*ulysses_degree=None"),
    "balance": ("NotImplementedError", "load_balance=True.*without max_scores"),
    "window": ("NotImplementedError", r"window=\(3, 0\).*without"),
    "documents": ("NotImplementedError", "documents.*without"),
    "local mask": ("ValueError", "for 10 queries and 10 keys, but the global sequence has 40 and 40. Build it for"),
    "local mask, own qkv": ("ValueError", "for 10 queries and 10 keys, but the global sequence has 40 and 40"),
    "local mask, Ulysses": ("ValueError", "for 10 queries and 10 keys, but the global sequence has 40 and 40"),
    "heads of a share": ("ValueError", r"shape \(1, 2, 40, 40\).*1 or 4 \(global query heads\)"),
    "order": ("NotImplementedError", "compute_dq_write_order=True"),
    "groups": ("ValueError", "query has 4 heads and key 2. Pass enable_gqa=True"),
}


@on_ranks
def compiled_in_a_ring() -> float:
    """A compiled flex_attention that may break the graph runs as the function itself does."""
    broken = torch.compile(flex_attention, backend="aot_eager")
    q, k, v = whole()
    mine = own("head_tail")
    module = styled(Flex(CASES["window, alibi"], broken), ulysses_degree=1, kv_exchange="ring", layout="head_tail")
    got = module(*(x[:, :, mine] for x in (q, k, v)))
    want, _ = oracle(q, k, v, *CASES["window, alibi"][::3], D**-0.5)
    return relative_error(got, want[:, :, mine])


@pytest.mark.slow
def test_a_compiled_call_in_a_ring_breaks_the_graph(ranks: Any) -> None:
    assert max(ranks(2, compiled_in_a_ring)) <= 1e-10


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name_before_keys_are_sent(ranks: Any, what: str) -> None:
    ranks.raises(4, *REFUSED[what], refused, what)


@on_ranks
def nothing_left_behind() -> bool:
    """After a styled module, failing or not, flex_attention is plain again."""
    q, k, v = whole((H, H, H))
    mine = own("contiguous")
    plain = flex_attention(q, k, v)
    for style in ({"ulysses_degree": 1}, {"ulysses_degree": 1, "kv_exchange": "ring"}):
        module = styled(Flex(CASES["causal"]), **style)
        with suppress(NotImplementedError):
            module(*(x[:, :, mine] for x in (q, k, v)))
    return torch.equal(flex_attention(q, k, v), plain)


@pytest.mark.slow
def test_nothing_is_left_behind(ranks: Any) -> None:
    assert all(ranks(2, nothing_left_behind))
    assert "score_mod" in inspect.signature(flex_attention).parameters

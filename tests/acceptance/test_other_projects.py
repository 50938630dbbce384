"""The case tables of other projects' tests of context parallelism, run by this library on ranks.

The tables are written anew, by the names that each project gives its cases. Lengths, heads and head dims are divided,
and dtypes are fp64, so that the bar is 1e-10 where those projects have 1e-3 to 3e-2: what is tested is which keys each
query sees, in which mode. A case that is not run stands in ``LEFT_OUT`` with the reason;
docs/measured/reliability.md has the counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel
from hyper_cp.ops import attention, causal_conv1d, layout_of_mask, linear_recurrence
from tests.harness.attention_case import FP64, cp_mesh
from tests.harness.oracle import absolute_error, attention_and_lse, relative_error, visible_pairs
from tests.harness.ranks import on_ranks, sum_over_ranks
from tests.harness.recurrence_oracle import convolve, recur

Found = dict[str, float]
"""The error of each result of a case."""


def normal(*shape: int) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=g, dtype=torch.float64)


def error(value: Tensor, expected: Tensor) -> float:
    """The relative error, or the absolute one where a rank's queries see nothing."""
    return (relative_error if expected.any() else absolute_error)(value, expected)


def bounds(lengths: list[int]) -> list[int]:
    return [0, *accumulate(lengths)]


# --------------------------------------------------------------------------- calls of ops.attention


@dataclass(frozen=True, eq=False)
class Call:
    """Calls of ``ops.attention`` that differ in the mode only, and what all of them mean on one device.

    ``pairs``: what queries see beside ``is_causal``, ``window`` and ``documents``, as bool or as a bias. The call gets
    ``slices`` in its place, if there are any.
    """

    length: int
    heads: tuple[int, int] = (4, 4)
    dims: tuple[int, int] = (8, 8)
    batch: int = 2
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: list[list[int]] | None = None
    pairs: Tensor | None = None
    slices: list[Any] | None = None
    sinks: Tensor | None = None
    scale: float | None = None

    @cached_property
    def one_device(self) -> tuple[list[Tensor], Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Inputs, the gradient of the output, the output, its log-sum-exp, and the gradients of the inputs."""
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        shapes = [(heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim)]
        *whole, dout = (normal(self.batch, h, self.length, d) for h, d in shapes)
        whole += [] if self.sinks is None else [self.sinks]
        whole = [x.clone().requires_grad_() for x in whole]
        seen, bias = visible_pairs(self.length, self.is_causal, self.window, self.documents), None
        if self.pairs is not None:
            bias, seen = (self.pairs, seen) if self.pairs.is_floating_point() else (None, seen & self.pairs)
        sinks = whole[3] if whole[3:] else None
        want, lse = attention_and_lse(*whole[:3], visible=seen, bias=bias, scale=self.scale, sinks=sinks)
        return whole, dout, want, lse, torch.autograd.grad(want, whole, dout)

    def found(self, mode: dict[str, Any], order: str = "bhsd") -> Found:
        """The errors of output, log-sum-exp and gradients on this rank."""
        mesh, (whole, dout, want, lse, right) = cp_mesh(), self.one_device
        handler = ContextParallelHandler(mesh, mode.get("layout", "contiguous"))
        with handler.documents(self.documents) as table:
            at = handler.position_ids(self.length)
            local = [laid(x[:, :, at], order).requires_grad_() for x in whole[:3]]
            sinks = whole[3].detach().clone().requires_grad_() if whole[3:] else None
            options = {"is_causal": self.is_causal, "window": self.window, "documents": table, "scale": self.scale}
            mask = {"attn_mask": self.pairs} if self.slices is None else {"slices": self.slices}
            more = {**mask, "sinks": sinks, "enable_gqa": True, "return_lse": True}
            out, found_lse = attention(*local, mesh=mesh, **options, **more, **mode)
        leaves = local + ([] if sinks is None else [sinks])
        grads = torch.autograd.grad(out, leaves, dout[:, :, at])
        pairs = {"out": (out, want[:, :, at]), "lse": (found_lse, lse[:, :, at])}
        pairs |= {name: (a, b[:, :, at]) for name, a, b in zip(("dq", "dk", "dv"), grads, right, strict=False)}
        pairs |= {"dsinks": (sum_over_ranks(grads[3])[0], right[3])} if grads[3:] else {}
        return {name: error(*(x.where(x > -torch.inf, 0) for x in pair)) for name, pair in pairs.items()}


def laid(x: Tensor, order: str) -> Tensor:
    """``x [B, H, S, D]`` as it lies in memory in another order of dimensions."""
    dims = ["bhsd".index(name) for name in order]
    back = [dims.index(i) for i in range(4)]
    return x.detach().permute(dims).contiguous().permute(back)


# --------------------------------------------------------------------------- TransformerEngine

# heads and groups of heads, head dims divided by 16, windows and the length of 4096 by 64
TE_LENGTH, TE_HEADS, TE_GROUPS = 64, {12: 4, 32: 8, 64: 8, 128: 8}, {2: 2, 4: 2, 8: 4}
CAUSAL = {"is_causal": True}
TE_FLASH: dict[str, dict[str, Any]] = {
    "cp_1_0": {"heads": 12, **CAUSAL},
    "cp_1_1": {"heads": 12},
    "cp_1_2": {"heads": 12, "window": (8, 0), **CAUSAL},
    "cp_1_3": {"heads": 12, "window": (8, 8)},
    "cp_2_0": {"heads": 32, "groups": 4, **CAUSAL},
    "cp_2_1": {"heads": 12, "groups": 2},
    "cp_2_2": {"heads": 32, "window": (2, 0), **CAUSAL},
    "cp_2_3": {"heads": 12, "groups": 2, "window": (8, 8)},
    "cp_3_0": {"heads": 128, "dims": (12, 8), **CAUSAL},
    "cp_3_1": {"heads": 12, "dims": (12, 8)},
    "cp_3_2": {"heads": 12, "dims": (12, 8), "window": (8, 0), **CAUSAL},
    "cp_3_3": {"heads": 12, "dims": (12, 8), "window": (8, 8)},
}
TE_FUSED: dict[str, dict[str, Any]] = {
    "cp_1_0": {"heads": 12, **CAUSAL},
    "cp_1_1": {"heads": 12},
    "cp_1_2": {"heads": 12, "bias": "1hss", **CAUSAL},
    "cp_1_3": {"heads": 12, "bias": "1hss"},
    "cp_1_4": {"heads": 12, "bias": "bhss"},
    "cp_1_5": {"heads": 12, "window": (8, 8), **CAUSAL},
    "cp_2_0": {"heads": 32, "groups": 4, **CAUSAL},
    "cp_2_1": {"heads": 32, "window": (2, 0), **CAUSAL},
    "cp_2_2": {"heads": 12, "groups": 2, "bias": "1hss", **CAUSAL},
    "cp_2_3": {"heads": 12, "groups": 2, "bias": "11ss", **CAUSAL},
    "cp_2_4": {"heads": 12, "groups": 2, "bias": "111s", **CAUSAL},
    "cp_2_5": {"heads": 12, "groups": 2, "bias": "1hss"},
    "cp_2_6": {"heads": 12, "groups": 2, "window": (8, 8), **CAUSAL},
    "cp_3_0": {"heads": 12, "dims": (8, 4), **CAUSAL},
    "cp_3_1": {"heads": 128, "dims": (12, 8), **CAUSAL},
    "cp_3_2": {"heads": 12, "dims": (8, 4), "bias": "1hss", **CAUSAL},
    "cp_3_3": {"heads": 12, "dims": (8, 4), "bias": "1hss"},
    "cp_3_4": {"heads": 12, "dims": (8, 4), "bias": "b1ss"},
    "cp_4_0": {"heads": 64, "groups": 8, **CAUSAL},
    "cp_4_1": {"heads": 64, "groups": 8, "softmax": "off-by-one", **CAUSAL},
    "cp_4_2": {"heads": 64, "groups": 8, "softmax": "learnable", **CAUSAL},
    "cp_4_3": {"heads": 64, "window": (2, 0), "softmax": "learnable", **CAUSAL},
    "cp_d256_causal": {"heads": 16, "dims": (16, 16), **CAUSAL},
    "cp_d256_causal_swa": {"heads": 16, "dims": (16, 16), "window": (2, 0), **CAUSAL},
}
TE_COMM = {
    "p2p": {"ulysses_degree": 1, "kv_exchange": "ring"},
    "all_gather": {"ulysses_degree": 1},
    "a2a": {"ulysses_degree": None},
    "a2a+p2p": {"ulysses_degree": 2, "kv_exchange": "ring"},
}


def te_call(case: dict[str, Any], packed: bool) -> Call:
    heads, batch = TE_HEADS.get(case["heads"], 8), 1 if packed else 2
    kv_heads, causal = TE_GROUPS.get(case.get("groups", 0), heads), case.get("is_causal", False)
    documents = [bounds([8, 24, 8, 16, 8])] if packed else None
    pairs = None
    if "bias" in case:
        sizes = {"1": 1, "b": batch, "h": heads, "s": TE_LENGTH}
        pairs = normal(*(sizes[name] for name in case["bias"]))
        if causal:  # one mask says all that is seen
            later = torch.ones(TE_LENGTH, TE_LENGTH, dtype=torch.bool).triu(1)
            pairs = pairs.expand(*pairs.shape[:2], TE_LENGTH, TE_LENGTH).masked_fill(later, -torch.inf)
    sinks = {"off-by-one": torch.zeros(heads, dtype=torch.float64), "learnable": normal(heads)}
    return Call(
        TE_LENGTH,
        (heads, kv_heads),
        case.get("dims", (8, 8)),
        batch,
        causal and pairs is None,
        case.get("window"),
        documents,
        pairs,
        sinks=sinks.get(case.get("softmax", "")),
    )


def transformer_engine(world: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    """``a2a+p2p`` on 4 ranks, the rest on 2, as there; what it skips ("no support for SWA with p2p") is run, too."""
    comms = {name: mode for name, mode in TE_COMM.items() if (name == "a2a+p2p") == (world == 4)}
    for (kernel, table), packed in product((("flash", TE_FLASH), ("fused", TE_FUSED)), (False, True)):
        for name, case in table.items():
            if packed and "bias" in case:
                continue  # a bias of [S, S] has no meaning for packed tokens: no case there either
            call, causal = te_call(case, packed), case.get("is_causal", False)
            layout = "contiguous" if not causal else "per_document" if packed else "head_tail"
            for form, comm in product(("thd",) if packed else ("bshd", "sbhd"), comms):
                order = "bshd" if packed else form
                yield f"{kernel} {name} {form} {comm}", partial(call.found, {**comms[comm], "layout": layout}, order)


# --------------------------------------------------------------------------- MagiAttention

FULL, CAUSAL_SLICE, INVERSE, BOTH = range(4)  # as mask_of_slices numbers them, too
SIXTHS = [[2048 * i, 2048 * (i + 1)] for i in range(6)]
TENTHS = [[0, 2048], [2048, 4096], [4096, 6144], [6144, 10240]]


@dataclass(frozen=True)
class Slices:
    """A mask as ranges of queries, ranges of keys, and kinds; ``worlds`` are those of 2 and 4 that run it there."""

    length: int
    q: list[list[int]]
    k: list[list[int]]
    kinds: list[int]
    sinks: int = 0
    worlds: tuple[int, ...] = (2, 4)

    def pairs(self, kinds: list[int], unit: int) -> Tensor:
        """The pairs that are seen, ``[S, S]``; causal from the end of both ranges, inverse causal from their start."""
        n = self.length // unit
        i, j, seen = torch.arange(n)[:, None], torch.arange(n)[None], torch.zeros(n, n, dtype=torch.bool)
        for (a, b), (c, d), kind in zip(self.q, self.k, kinds, strict=True):
            a, b, c, d = (x // unit for x in (a, b, c, d))
            part = (i >= a) & (i < b) & (j >= c) & (j < d)
            part &= (b - i <= d - j) if kind in (CAUSAL_SLICE, BOTH) else True
            part &= (i - a <= j - c) if kind in (INVERSE, BOTH) else True
            seen |= part
        return seen


MAGI = {
    "full_attn_14k": Slices(14336, [[0, 14336]], [[0, 14336]], [FULL], 1),
    "varlen_full_attn_12k": Slices(12288, SIXTHS, SIXTHS, [FULL] * 6),
    "varlen_block_causal_15k": Slices(
        15360,
        [*SIXTHS, [12288, 15360]],
        [[0, 2048], [0, 4096], [0, 6144], [0, 8192], [8192, 10240], [8192, 12288], [12288, 15360]],
        [FULL] * 7,
        4,
        (2,),
    ),
    "varlen_block_causal_12k_with_q_overlap": Slices(
        12288,
        [[0, 8192], [2048, 8192], [4096, 8192], [6144, 8192], [8192, 12288], [10240, 12288]],
        SIXTHS,
        [FULL] * 6,
    ),
    "bi_causal_12k_with_q_overlap": Slices(
        12288,
        [*SIXTHS, [1000, 4000], [10000, 12000]],
        [[0, 3072], [0, 4096], [0, 6144], [6144, 12288], [8192, 12288], [9216, 12288], [8000, 12000], [0, 5000]],
        [BOTH] * 8,
        8,
    ),
    "continuous_multi_masks_10k_with_q_overlap": Slices(
        10240,
        [[0, 2048]] * 4 + [[2048, 4096], [3072, 5120], [5120, 7168], [6144, 8192]] + [[8192, 10240]] * 4,
        TENTHS + [[0, 2048], [2048, 4096]] * 2 + TENTHS,
        [INVERSE, FULL, CAUSAL_SLICE, BOTH] + [INVERSE, CAUSAL_SLICE] * 2 + [INVERSE, FULL, CAUSAL_SLICE, BOTH],
    ),
    "full_mask_assembled_from_small_pieces_with_8k": Slices(
        8192,
        [[i * 512, (i + 1) * 512] for i in range(16) for _ in range(8)],
        [[i * 1024, (i + 1) * 1024] for _ in range(16) for i in range(8)],
        [FULL] * 128,
    ),
}
MAGI_OVERLAP: dict[str, dict[str, Any]] = {
    "disable_mso": {"kv_exchange": "all_gather", "exchange_stages": 1},
    "static_od4": {"kv_exchange": "needed", "exchange_stages": 4},
    "dynamic": {"kv_exchange": "needed", "exchange_stages": "auto"},
}


def magi(world: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Seven masks x three kinds of overlap x grouped heads or not x the kinds of the table or random ones."""
    for name, heads, drawn in product(MAGI, ((8, 8), (8, 2)), (False, True)):
        case = MAGI[name]
        if world not in case.worlds:
            continue
        rng = random.Random(f"{name} {heads}")
        kinds = [rng.randrange(4) for _ in case.kinds] if drawn else case.kinds
        unit, sinks = 256, None
        if case.sinks:  # several tokens without values count as one whose weight is their sum
            sinks = normal(case.sinks, heads[0]).logsumexp(0)
        length, pairs = case.length // unit, case.pairs(kinds, unit)
        ranges = ([tuple(x // unit for x in row) for row in rows] for rows in (case.q, case.k))
        given = {"pairs": pairs, "slices": [*zip(*ranges, kinds, strict=True)], "sinks": sinks}
        layout = "contiguous" if not pairs.any() else layout_of_mask(pairs, chunks_per_rank=2)  # as its dispatcher
        call = Call(length, heads, batch=1, **given)
        for overlap, options in MAGI_OVERLAP.items():
            mode = {"ulysses_degree": 1, "layout": layout, **options}
            yield f"{name} {overlap} {heads} random kinds={drawn}", partial(call.found, mode)


# --------------------------------------------------------------------------- ring-flash-attention

RING: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "ring": ({"kv_exchange": "ring"}, None),
    "zigzag_ring": ({"kv_exchange": "ring", "layout": "head_tail"}, None),
    "ring_varlen": ({"kv_exchange": "ring"}, [0, 8, 32, 88]),
    "zigzag_ring_varlen": ({"kv_exchange": "ring", "layout": "per_document"}, [0, 8, 32, 88]),
    "llama3_varlen": ({}, [0, 5, 52, 176]),
}


def ring_flash_attention(world: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Its scripts: five heads, causal, one row; and the same without a mask."""
    for name, (mode, documents) in RING.items():
        for causal in (True, False):
            length, rows = (documents[-1], [documents]) if documents else (80, None)
            call = Call(length, (5, 5), batch=1, is_causal=causal, documents=rows)
            yield f"{name} causal={causal}", partial(call.found, {**mode, "ulysses_degree": 1})


# --------------------------------------------------------------------------- flash-linear-attention

CUT, ALIGNED, SHORT = [300, 400, 324], [512, 512], [100, 150, 200, 250, 124, 100, 100]
FLA_CONV: dict[str, tuple[int, int, list[int]]] = {
    "cp2_width_1": (2, 1, [1024]),
    "cp2_width_4": (2, 4, [1024]),
    "cp2_sequence_cut": (2, 4, CUT),
    "cp2_boundary_aligned": (2, 4, ALIGNED),
    "cp4_complex": (4, 4, [700, 324]),
    "cp4_single_sequence": (4, 4, [1024]),
    "cp2_many_short_sequences": (2, 4, SHORT),
    "cp2_short_tail_len1": (2, 4, [513, 511]),
    "cp2_short_tail_len2": (2, 4, [514, 510]),
    "cp4_every_rank_gets_short_tail": (4, 4, [257, 255, 257, 255]),
    "cp2_multiple_short_tails": (2, 4, [200, 313, 511]),
    "cp2_global_len1_sequence": (2, 4, [512, 1, 511]),
    "cp4_multiple_short_tails": (4, 4, [257, 253, 257, 257]),
    "cp4_worst_case_many_len1": (4, 4, [257, 1, 253, 257, 1, 253, 2]),
}
FLA_RECURRENCE = {  # of the gated delta rule, and of Kimi delta attention (a decay for each channel)
    "cp2_sequence_cut": (2, CUT),
    "cp2_boundary_aligned": (2, ALIGNED),
    "cp4_complex": (4, [700, 324]),
    "cp4_single_sequence": (4, [1024]),
    "cp2_many_short_sequences": (2, SHORT),
}


def compared(given: list[Tensor], dims: list[int | None], dim: int, run: Any, oracle: Any) -> Found:
    """Errors of an output along ``dim`` and of all gradients; ``dims`` are the sequence dimensions of the inputs."""
    world, rank = cp_mesh().size(), cp_mesh().get_rank()
    whole = [x.clone().requires_grad_() for x in given]
    want = oracle(*whole)
    dout = normal(*want.shape)
    right = torch.autograd.grad(want, whole, dout)

    def share(x: Tensor, d: int | None) -> Tensor:
        return x if d is None else x.chunk(world, d)[rank]

    local = [share(x, d).detach().clone().requires_grad_() for x, d in zip(given, dims, strict=True)]
    out = run(*local)
    errors = {"out": error(out, share(want, dim))}
    for i, (grad, whole_grad, d) in enumerate(
        zip(torch.autograd.grad(out, local, share(dout, dim)), right, dims, strict=True)
    ):
        grad = sum_over_ranks(grad)[0] if d is None else grad
        errors[f"gradient {i}"] = error(grad, share(whole_grad, d))
    return errors


def fla_conv(width: int, lengths: list[int]) -> Found:
    rows = [bounds(lengths)]
    options = {"mesh": cp_mesh(), "activation": "swish", "documents": rows[0]}
    given = [normal(1, 8, rows[0][-1]) * 100, normal(8, width), normal(8)]
    return compared(
        given,
        [2, None, None],
        2,
        lambda x, w, b: causal_conv1d(x, w, b, **options),
        lambda x, w, b: F.silu(convolve(x, w, b, rows)),
    )


def fla_recurrence(channels: bool, lengths: list[int]) -> Found:
    """Lengths are divided by eight: the oracle goes token by token."""
    ends = [end // 8 for end in bounds(lengths)]
    n, mesh = ends[-1], cp_mesh()
    k = F.normalize(normal(1, n, 2, 4), dim=-1)
    decay = F.logsigmoid(normal(1, n, 2, 4) if channels else normal(1, n, 2))
    given = [normal(1, n, 2, 4), k, normal(1, n, 2, 5), decay, normal(1, n, 2).sigmoid()]
    return compared(
        given,
        [1] * 5,
        1,
        lambda *xs: linear_recurrence(*xs, mesh=mesh, scale=0.5, documents=ends),
        lambda q, *xs: recur(q * 0.5, *xs, [ends]),
    )


def flash_linear_attention(world: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    for name, (ranks, width, lengths) in FLA_CONV.items():
        if ranks == world:
            yield f"conv {name}", lambda width=width, lengths=lengths: fla_conv(width, lengths)
    for channels, name in product((False, True), FLA_RECURRENCE):
        ranks, lengths = FLA_RECURRENCE[name]
        if ranks == world:
            kind = "kda" if channels else "gdn"
            yield f"{kind} {name}", lambda channels=channels, lengths=lengths: fla_recurrence(channels, lengths)


# --------------------------------------------------------------------------- PyTorch


class Sdpa(nn.Module):
    """Calls SDPA, as it is or compiled."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.sdpa = F.scaled_dot_product_attention
        if compiled:
            self.sdpa = torch.compile(self.sdpa, fullgraph=True, backend="aot_eager")

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.sdpa(*args, **kwargs)


@dataclass(frozen=True)
class TorchSdpa:
    """One case of ``test_ring_attention_sdpa``."""

    is_causal: bool
    compiled: bool
    load_balance: bool
    rotater: str
    forward_only: bool
    use_context: bool

    def found(self) -> Found:
        mesh, length = cp_mesh(), 32 * cp_mesh().size()
        whole = [normal(2, 4, length, 8).add_(i).requires_grad_() for i in range(3)]
        want, _ = attention_and_lse(*whole, is_causal=self.is_causal)
        right = torch.autograd.grad(want.sum(), whole)
        mode = {
            "layout": "head_tail" if self.load_balance else "contiguous",
            "kv_exchange": "ring" if self.rotater == "alltoall" else "all_gather",
            "ulysses_degree": 1,
        }
        local, handler = [x.detach().clone() for x in whole], ContextParallelHandler(mesh, mode["layout"])
        module: Any = Sdpa(self.compiled)
        if self.use_context:
            around: Any = context_parallel(mesh, buffers=local, buffer_seq_dims=[2, 2, 2], **mode)
        else:
            module = parallelize_module(module, mesh, ContextParallel(2, 1, **mode))
            around, local = nullcontext(), [handler.dispatch(x, 2).contiguous() for x in local]
        with around:
            for x in local:
                x.requires_grad = True
            with torch.no_grad() if self.forward_only else nullcontext():
                out = module(*local, is_causal=self.is_causal)
            if not self.forward_only:
                out.sum().backward()
            grads = [x.grad for x in local]
            for x in local:
                x.requires_grad = False
        errors = {"out": error(handler.combine(out.detach(), 2), want)}
        if not self.forward_only:
            for name, grad, expected in zip(("dq", "dk", "dv"), grads, right, strict=True):
                errors[name] = error(handler.combine(grad, 2), expected)
        return errors


def torch_sdpa(world: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    names = ("is_causal", "compiled", "load_balance", "rotater", "forward_only", "use_context")
    both = (True, False)
    for values in product(both, both, both, ("alltoall", "allgather"), both, both):
        case = TorchSdpa(*values)
        if case.is_causal or not case.load_balance:  # it returns at once for the others
            yield ", ".join(f"{name}={x}" for name, x in zip(names, values, strict=True)), case.found


class FlexLayer(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class TorchFlex:
    """Cases of ``test_cp_flex_attention_causal_mask`` or ``..._document_mask`` that differ in the balancer only. Masks
    have blocks of 8."""

    length: int
    batch: int = 1
    lengths: list[list[int]] | None = None

    @cached_property
    def rows(self) -> list[list[int]] | None:
        return self.lengths and [bounds(row) for row in self.lengths]

    @cached_property
    def one_device(self) -> tuple[list[Tensor], Tensor, Tensor, tuple[Tensor, ...]]:
        """Inputs, the output, its log-sum-exp, and the gradients of the inputs."""
        batch = self.batch if self.batch > 1 else 3
        whole = [normal(batch, 2, self.length, 8).add_(i).requires_grad_() for i in range(3)]
        want, lse = attention_and_lse(*whole, visible=visible_pairs(self.length, True, None, self.rows))
        return whole, want, lse, torch.autograd.grad(want.sum(), whole)

    @cached_property
    def mask(self) -> BlockMask:
        number = torch.zeros(self.batch, self.length, dtype=torch.int64)
        for row, ends in enumerate(self.rows or []):
            for start in ends[1:-1]:
                number[row, start:] += 1
        causal = lambda b, h, i, j: j <= i  # noqa: E731
        packed = lambda b, h, i, j: (j <= i) & (number[b, i] == number[b, j])  # noqa: E731
        seen, batch = (packed, self.batch) if self.rows else (causal, 1)
        return create_block_mask(seen, batch, 1, self.length, self.length, device="cpu", BLOCK_SIZE=8)

    def found(self, balancer: str) -> Found:
        mesh, (whole, want, lse, right) = cp_mesh(), self.one_device
        layouts = {"None": "contiguous", "HeadTail": "head_tail", "PerDocument": "per_document"}
        layout = layouts.get(balancer) or layout_of_mask(self.mask, chunks_per_rank=2)
        style = ContextParallel(2, 1, 1, layout=layout)
        handler, module = ContextParallelHandler(mesh, style), parallelize_module(FlexLayer(), mesh, style)
        with handler.documents(self.rows if layout == "per_document" else None):  # which places tokens by them
            local = [handler.dispatch(x.detach(), 2).requires_grad_() for x in whole]
            out, aux = module(*local, block_mask=self.mask, return_aux=AuxRequest(lse=True))
            grads = torch.autograd.grad(out.sum(), local)
            found = [handler.combine(x.detach(), 2) for x in (out, aux.lse, *grads)]
        pairs = zip(("out", "lse", "dq", "dk", "dv"), found, (want, lse, *right), strict=True)
        return {name: error(a, b) for name, a, b in pairs}


def random_lengths(rng: random.Random, total: int, count: int) -> list[int]:
    found = [1] * count
    for _ in range(total - count):
        found[rng.randrange(count)] += 1
    return found


def torch_flex(world: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Lengths are divided by 8 to 32, and 8 rows are 3. (Masks of less than 128 tokens a rank raise there, and are
    exact here.)"""
    balancers, rng = ("None", "HeadTail", "PTRR", "PerDocument"), random.Random(10)
    for length in (64, 32, 16):
        cases = TorchFlex(length)
        for balancer in balancers[:3]:
            yield f"causal {length} {balancer}", partial(cases.found, balancer)
    for batch, length in product((2, 4, 3), (64, 32)):
        cases = TorchFlex(length, batch, [random_lengths(rng, length, 28) for _ in range(batch)])
        for balancer in balancers:
            yield f"documents {batch} x {length} {balancer}", partial(cases.found, balancer)


def torch_shards() -> Found:
    """``test_context_parallel_shard``: a vector along dimension 0, three batches along dimension 1."""
    mesh, vector, rows = cp_mesh(), torch.arange(32), torch.arange(128).view(4, 32)
    handler, chunks, rank = ContextParallelHandler(mesh, "head_tail"), vector.chunk(2 * mesh.size()), mesh.get_rank()
    want = torch.cat([chunks[rank], chunks[2 * mesh.size() - 1 - rank]])
    right = [torch.equal(handler.dispatch(vector, 0), want)]
    right += [torch.equal(handler.dispatch(rows + i, 1), (rows + i)[:, want]) for i in range(3)]
    return {"wrong shards": float(right.count(False))}


def torch_other(world: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    yield "context_parallel_shard", torch_shards


# --------------------------------------------------------------------------- all of them

TABLES: dict[str, tuple[Callable[[int], Iterator[tuple[str, Callable[[], Found]]]], dict[int, int]]] = {
    "PyTorch, SDPA": (torch_sdpa, {2: 48}),
    "PyTorch, FlexAttention": (torch_flex, {2: 33}),
    "PyTorch, sharding": (torch_other, {2: 1}),
    "TransformerEngine": (transformer_engine, {2: 294, 4: 98}),
    "MagiAttention": (magi, {2: 84, 4: 72}),
    "ring-flash-attention": (ring_flash_attention, {2: 10, 4: 10}),
    "flash-linear-attention": (flash_linear_attention, {2: 15, 4: 9}),
}
"""Every project's cases for a number of ranks, and how many there are."""

LEFT_OUT: dict[str, dict[str, tuple[int, str]]] = {
    "PyTorch, sharding": {
        "flex_cp_custom_op": (2, "tests/ops/test_flex.py checks this library's own ops in the same way"),
        "attention_shard_without_cp": (1, "a rule of PyTorch's DTensor, which this library does not touch"),
        "is_causal_behavior": (9, "assertions about a private function of PyTorch's ring"),
    },
    "TransformerEngine": {
        "fp8": (0, "no fp8 kernels; of the dtypes one is run"),
        "pad_between_seqs": (0, "padding inside a document's share is a document of its own here"),
        "gradients of biases, return_max_logit": (0, "masks have no gradient; no largest logits in rings"),
    },
    "ring-flash-attention": {
        "stripe, stripe_varlen": (0, "there is no striped layout"),
        "qkvpacked and kvpacked": (0, "the same calls with packed arguments"),
        "triton_kernels, prepare_cu_seqlens": (0, "tests of its own helpers"),
    },
    "flash-linear-attention": {
        "dplr, bwd_gk_offset": (0, "recurrences of another form, and a kernel of its own"),
        "cp_single_rank, kda disable_recompute": (0, "options of its own functions"),
    },
}
"""Cases that are not run: how many (0: a whole axis of the table, whose cases are not counted), and the reason."""
PAGE = Path(__file__).parents[2] / "docs" / "measured" / "reliability.md"


@on_ranks
def run(table: str) -> dict[str, Found | str]:
    """Each case of a project on these ranks: its errors, or the exception."""
    found: dict[str, Found | str] = {}
    for name, case in TABLES[table][0](cp_mesh().size()):
        try:
            found[name] = case()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        if "compiled=True" in name:
            torch._dynamo.reset()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("table, world", [(name, world) for name, (_, counts) in TABLES.items() for world in counts])
def test_every_case_is_exact(ranks: Any, table: str, world: int) -> None:
    for found in ranks(world, run, table, timeout=300):
        wrong = {name: x for name, x in found.items() if isinstance(x, str) or not all(e <= FP64 for e in x.values())}
        assert not wrong
        assert len(found) == TABLES[table][1][world]


@pytest.mark.parametrize("table", TABLES)
def test_the_page_has_the_counts(table: str) -> None:
    ran, left = sum(TABLES[table][1].values()), sum(count for count, _ in LEFT_OUT.get(table, {}).values())
    assert f"| {ran} of {ran + left} |" in PAGE.read_text()

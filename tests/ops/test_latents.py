"""Latent attention on real gloo ranks against one device: outputs, gradients, bytes, memory and refusals."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_cp import ContextParallel, latents_and_weight, verify
from hyper_cp.mesh import comm
from hyper_cp.mesh.cp_mesh import view
from hyper_cp.ops import SAVE_LIST, attention, latent_attention
from hyper_cp.ops.latents import Expansion
from hyper_cp.schedule.choices import latents_travel
from tests.harness.attention_case import FP64, Errors, check, cp_mesh, modes, pairwise
from tests.harness.latent_case import (
    NAMES,
    PLAIN,
    RANK,
    LatentCase,
    called,
    errors_of,
    heads_of,
    leaves_of,
    one_device,
    problem_of,
)
from tests.harness.modules import Adapted
from tests.harness.oracle import absolute_error, relative_error, rms_error
from tests.harness.ranks import on_ranks, sum_over_ranks


@on_ranks
def run_latents(cases: list[LatentCase]) -> list[tuple[LatentCase, Errors]]:
    mesh, found = cp_mesh(), []
    for case in cases:
        leaves, dout, at = leaves_of(case)
        out = called(case, leaves, at, mesh)
        out = out[0] if case.return_lse else out
        grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        found.append((case, errors_of(case, leaves, at, out, grads, relative_error)))
    return found


@pytest.mark.parametrize("world", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_every_mode_fp64(ranks: Any, world: int) -> None:
    cases = [
        LatentCase(24 * world, causal, kv_heads=rotary, heads=12, bias=rotary > 1, **mode)
        for mode in modes(world)
        if world < 4 or mode["ulysses_degree"] == 2
        for causal, rotary in itertools.product((True, False), (1, 12))
    ]
    check(ranks(world, run_latents, pairwise(cases)), FP64)


DOCUMENTS = ((0, 5, 11, 30, 33, 48),)
OPTIONS: dict[str, dict[str, Any]] = {
    "stages": {"is_causal": True, "exchange_stages": 3},
    "window": {"window": (7, 0), "scale": 0.3},
    "window, both sides": {"window": (7, 3)},
    "documents": {"is_causal": True, "documents": DOCUMENTS, "return_lse": True},
    "documents of rows": {"is_causal": True, "documents": (DOCUMENTS[0], (0, 17, 48))},
    "bool mask": {"mask": "heads"},
    "float mask": {"mask": "float"},
    "local rows": {"mask": "local rows"},
    "padding": {"mask": "padding"},
    "sinks and softcap": {"is_causal": True, "sinks": True, "softcap": 2.0},
    "heads travel": {"is_causal": True, "latents": False},
    "heads travel in groups": {"is_causal": True, "latents": None, "head_groups": 2},
    "fewer travel": {"is_causal": True, "latents": None},
    "auto groups": {"is_causal": True, "head_groups": "auto"},
}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_option_fp64(ranks: Any, world: int) -> None:
    """On two ranks every option in every exchange, layout and degree; on four each mode has one of the options."""
    cases, given = [], itertools.product(modes(2), OPTIONS.values())
    wider = [mode for mode in modes(4) if mode["ulysses_degree"] < 4]
    for mode, options in given if world == 2 else zip(wider, itertools.cycle(OPTIONS.values())):
        if "exchange_stages" in options and mode["kv_exchange"] == "ring":
            continue
        if options.get("mask") == "local rows" and (mode["load_balance"] or mode["ulysses_degree"] > 1):
            continue  # refused: a rank attends rows of others
        cases.append(LatentCase(48, heads=8, **{**mode, **options}))
    cases += [
        LatentCase(48, True, documents=DOCUMENTS, layout=layout, kv_exchange=exchange)
        for layout in ("per_document", "balanced", "auto")
        for exchange in ("ring", "needed", "all_gather")
    ]
    check(ranks(world, run_latents, pairwise(cases)), FP64)


# --------------------------------------------------------------------------- in modules


class Inner(nn.Module):
    """Attention of a model with latents, whose weight is a layer's of its own."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.up = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
        with torch.no_grad():
            self.up.weight.copy_(weight)
            self.up.bias.copy_(bias)

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        found = latents_and_weight(self.up, latent)
        assert found is not None
        latent, weight, bias = found
        return latent_attention(q, latent, rope, weight, bias, is_causal=True)  # type: ignore[return-value]


@on_ranks
def module_errors(way: str) -> Errors:
    case = LatentCase(48, True, kv_exchange="ring", layout="head_tail")
    leaves, dout, at = leaves_of(case)
    style = ContextParallel(
        ulysses_degree=1, qkv_indices=None, kv_exchange="ring", layout="head_tail", seq_dim=2, head_dim=1
    )
    module = Inner(leaves[3].detach(), leaves[4].detach())
    model: Any = parallelize_module(module, cp_mesh(), style)
    given = leaves[:3]
    if way == "compiled":
        model = torch.compile(model, backend="eager", fullgraph=False)
    out = checkpoint(model, *given, use_reentrant=False) if way == "checkpoint" else model(*given)
    grads = torch.autograd.grad(out, [*given, module.up.weight, module.up.bias], dout)
    return errors_of(case, leaves, at, out, grads, relative_error)


@pytest.mark.parametrize("way", ["eager", "checkpoint", "compiled"])
def test_a_styled_module_calls_it_without_a_mesh(ranks: Any, way: str) -> None:
    check([[(way, errors)] for errors in ranks(2, module_errors, way)], FP64)


def test_on_one_device_it_is_plain_attention() -> None:
    case = LatentCase(24, True)
    *given, dout = case.tensors()
    leaves = [x.requires_grad_() for x in given]
    out = latent_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(out, leaves, dout)
    want, _, expected = one_device(problem_of(case))
    assert relative_error(out.detach(), want) < FP64
    assert max(relative_error(a, b) for a, b in zip(grads, expected, strict=True)) < FP64


def test_autocast_casts_on_one_device_too() -> None:
    *given, _ = LatentCase(24, dtype=torch.float32, bias=False).tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert latent_attention(given[0].bfloat16(), *given[1:4]).dtype == torch.bfloat16


@on_ranks
def with_all_keys() -> float:
    case = LatentCase(48, bias=False, keys=None)
    q, latent, rope, weight, _, _ = case.tensors()
    at = case.positions(48)
    out = latent_attention(q[:, :, at], latent, rope, weight, mesh=cp_mesh(), kv_exchange="replicated")
    return relative_error(out, one_device(problem_of(case))[0][:, :, at])


def test_ranks_that_have_all_keys_expand_them(ranks: Any) -> None:
    assert max(ranks(2, with_all_keys)) < FP64


@on_ranks
def compiled_errors() -> Errors:
    case = LatentCase(48, True, heads=8, kv_exchange="ring", ulysses_degree=1, latents=None)
    leaves, dout, at = leaves_of(case)
    mesh = view(cp_mesh(), 1)
    attend = torch.compile(lambda *x: called(case, list(x), at, mesh), backend="inductor", fullgraph=True)
    out = attend(*leaves)
    return errors_of(case, leaves, at, out, torch.autograd.grad(out, leaves, dout), relative_error)


@pytest.mark.slow
def test_compiled_as_one_graph(ranks: Any) -> None:
    check([[("compiled", errors)] for errors in ranks(2, compiled_errors)], FP64)


@on_ranks
def saved_bytes() -> tuple[int, int]:
    """Bytes that autograd keeps for a call when latents travel, and when heads do."""
    found = []
    for latents in (True, False):
        case = LatentCase(96, True, heads=16, latents=latents, bias=False)
        leaves, _, at = leaves_of(case)
        kept: dict[int, int] = {}
        pack = lambda x: kept.__setitem__(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) or x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            called(case, leaves, at, cp_mesh())
        found.append(sum(kept.values()))
    return found[0], found[1]


def test_latents_are_what_is_saved(ranks: Any) -> None:
    """Keys and values of 16 heads are not kept for backward."""
    case = LatentCase(96, heads=16)
    heads = case.batch * 16 * (96 // 2) * (case.dim + case.v_dim) * 8
    for latents, of_heads in ranks(2, saved_bytes):
        assert of_heads - latents > 0.8 * heads


# --------------------------------------------------------------------------- half precision

BF16 = {"kv_exchange": "ring", "layout": "head_tail"}


@on_ranks
def half_errors() -> tuple[Errors, Errors]:
    """Errors of ranks and of one device in bfloat16 against fp64."""
    case = LatentCase(512, True, batch=1, heads=8, dtype=torch.bfloat16, bias=False, **BF16)
    leaves, dout, at = leaves_of(case)
    out = called(case, leaves, at, cp_mesh())
    grads = [x.float() if i > 2 else x for i, x in enumerate(torch.autograd.grad(out, leaves[:4], dout))]
    ours = errors_of(case, leaves, at, out, [*grads, torch.zeros_like(leaves[4])], rms_error)
    *given, whole = (x.requires_grad_() for x in case.tensors())
    q, latent, rope, weight, bias = given
    k, v = heads_of(case, latent, rope, weight, bias)
    alone = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    found = [alone, *torch.autograd.grad(alone, given[:4], whole.detach())]
    want, _, expected = one_device(problem_of(case))
    names = ("out", *NAMES[:4])
    return ours, {n: rms_error(a.detach(), b) for n, a, b in zip(names, found, [want, *expected[:4]], strict=True)}


def test_half_precision_is_within_twice_one_device(ranks: Any) -> None:
    for ours, alone in ranks(2, half_errors):
        assert all(ours[name] <= 2 * error for name, error in alone.items()), (ours, alone)


# --------------------------------------------------------------------------- bytes and memory

TRAVELS = ("send_recv", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows")


@on_ranks
def traffic(case: LatentCase) -> tuple[int, int]:
    """Bytes that this rank sends in forward, and in backward."""
    leaves, dout, at = leaves_of(case)
    found = []
    with comm.record_traffic() as log:
        out = called(case, leaves, at, cp_mesh())
        found.append(sum(n for name, n in log.entries if name in TRAVELS))
        torch.autograd.grad(out, leaves, dout, allow_unused=True)
        found.append(sum(n for name, n in log.entries if name in TRAVELS) - found[0])
    return found[0], found[1]


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "needed"])
def test_bytes_are_those_of_latents(ranks: Any, exchange: str) -> None:
    """One share of latents and rotary parts to each other rank; in backward again, and their gradients."""
    case = LatentCase(64, heads=16, dtype=torch.float32, kv_exchange=exchange, bias=False)
    share = case.batch * 32 * (RANK + case.dim - PLAIN) * 4
    for forward, backward in ranks(2, traffic, case):
        assert (forward, backward) == (share, 2 * share)
    heads = replace(case, latents=False)
    for forward, _ in ranks(2, traffic, heads):
        assert forward == case.batch * 32 * 16 * (case.dim + case.v_dim) * 4


@pytest.mark.parametrize(("heads", "value", "travel"), [(16, 5, "latents"), (2, 3, "heads"), (2, 5, "latents")])
def test_ulysses_sends_what_is_fewer(ranks: Any, heads: int, value: int, travel: str) -> None:
    """13 numbers of a token's latent, or those of half of the heads, beside half of the queries and of the outputs."""
    options: dict[str, Any] = {"ulysses_degree": None, "latents": None, "bias": False, "dtype": torch.float32}
    case = LatentCase(64, heads=heads, v_dim=value, **options)
    of_heads = heads // 2 * (case.dim + value)
    numbers = {"latents": RANK + case.dim - PLAIN, "heads": of_heads}
    assert min(numbers, key=lambda name: numbers[name]) == travel
    for forward, _ in ranks(2, traffic, case):
        assert forward == 4 * case.batch * 32 * (of_heads + numbers[travel])


def test_the_rule_counts_numbers() -> None:
    lite, v3 = (16, 512, (1, 64), 128 + 64 + 128), (128, 512, (1, 64), 320)
    assert latents_travel(lite[0], 1, *lite[1:])
    assert latents_travel(lite[0], 8, *lite[1:])  # 576 for 640
    assert not latents_travel(lite[0], 16, *lite[1:])  # 576 for 320
    assert latents_travel(v3[0], 64, *v3[1:])
    assert not latents_travel(v3[0], 128, *v3[1:])
    assert not latents_travel(4, 2, 20, (4, 8), 16)  # a rotary part of each head is split as heads are


@on_ranks
def most_expanded(exchange: str) -> list[int]:
    """The rows of each expansion in forward and backward."""
    rows: list[int] = []
    case = LatentCase(96, True, kv_exchange=exchange)
    leaves, dout, at = leaves_of(case)
    original = Expansion.__call__

    def counted(self: Expansion, latent: Tensor, rope: Tensor) -> Any:
        rows.append(latent.shape[2])
        return original(self, latent, rope)

    Expansion.__call__ = counted  # type: ignore[method-assign]
    try:
        torch.autograd.grad(called(case, leaves, at, cp_mesh()), leaves, dout)
    finally:
        Expansion.__call__ = original  # type: ignore[method-assign]
    return rows


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "needed"])
def test_no_more_than_a_share_is_expanded_at_a_time(ranks: Any, exchange: str) -> None:
    for rank, rows in enumerate(ranks(3, most_expanded, exchange)):
        assert max(rows) <= 32
        assert sum(rows) >= 2 * 32 * (rank + 1)  # all that its queries see, forward and backward


# --------------------------------------------------------------------------- weights


def test_weights_of_layers() -> None:
    x, plain = torch.randn(1, 3, 5), nn.Linear(5, 7)
    assert latents_and_weight(plain, x) == (x, plain.weight, plain.bias)
    assert latents_and_weight(nn.Sequential(nn.Linear(5, 7), nn.ReLU()), x) is None
    hooked = nn.Linear(5, 7, bias=False)
    hooked.register_forward_hook(lambda module, args, out: out + 0.5)
    assert latents_and_weight(hooked, x) is None, "a hook of somebody else may do anything"
    quantised = nn.Linear(5, 7, bias=False).to(torch.float8_e4m3fn)
    assert latents_and_weight(quantised, x) is None


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("register", "hook"),
    [
        ("register_forward_pre_hook", lambda module, args: (args[0].clamp(max=0.5),)),
        ("register_forward_hook", lambda module, args, output: output.clamp(max=0.5)),
        ("register_full_backward_hook", lambda module, of_input, of_output: (of_input[0] / 2,)),
        ("register_full_backward_pre_hook", lambda module, of_output: (of_output[0] / 2,)),
    ],
)
def test_a_layer_with_hooks_of_its_user_has_no_weight(register: str, hook: Any, inside: bool) -> None:
    layer: Any = Adapted(nn.Linear(5, 7, bias=False), 0.0) if inside else nn.Linear(5, 7, bias=False)
    x = torch.randn(1, 3, 5)
    assert latents_and_weight(layer, x) is not None
    getattr(layer.lora_A if inside else layer, register)(hook)
    assert latents_and_weight(layer, x) is None


def test_adapters_that_depend_on_the_tokens_have_no_weight() -> None:
    """PEFT's variants of LoRA: Arrow picks an adapter for each token."""
    peft = pytest.importorskip("peft")
    variants = pytest.importorskip("peft.tuners.lora.variants")
    for variant, wanted in ((variants.ArrowLinearVariant, False), (variants.DoraLinearVariant, True)):
        model = nn.Sequential(nn.Linear(5, 7, bias=False))
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0"], use_dora=wanted), model)
        model[0].lora_variant["default"] = variant()
        assert (latents_and_weight(model[0], torch.randn(1, 3, 5)) is not None) == wanted


def test_adapters_are_part_of_the_weight_unless_they_draw_dropout() -> None:
    layer, x = Adapted(nn.Linear(5, 7, bias=False), 0.0).double(), torch.randn(1, 3, 5)
    found = latents_and_weight(layer, x)
    assert found is not None and found[0] is x and found[2] is None
    assert torch.allclose(found[1], layer.base_layer.weight + layer.lora_B.weight @ layer.lora_A.weight)
    found[1].sum().backward()
    assert layer.lora_A.weight.grad is not None and layer.lora_B.weight.grad is not None
    assert latents_and_weight(Adapted(nn.Linear(5, 7, bias=False), 0.1), x) is None
    assert latents_and_weight(Adapted(nn.Linear(5, 7, bias=False), 0.1).eval(), x) is not None


# --------------------------------------------------------------------------- refusals

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "latents that are not split": ({"latent": (2, 48, RANK)}, "latent 48 .*Split latent and rope"),
    "rope that is not split": ({"rope": (2, 1, 48, 3)}, "rope 48"),
    "heads of rope": ({"rope": (2, 3, 24, 3)}, "must have 1 or 4 heads"),
    "rope as wide as q": ({"rope": (2, 1, 24, 9)}, "narrower than the 9 numbers"),
    "rank": ({"weight": (44, 11)}, r"must be \[outputs, 10\]"),
    "outputs of no head": ({"weight": (43, RANK)}, "the same outputs for each of 4 heads"),
    "outputs without values": ({"weight": (24, RANK)}, "more than the 6"),
    "bias": ({"bias": (43,)}, r"bias must be \[44\]"),
    "latent of four dimensions": ({"latent": (2, 1, 24, RANK)}, r"\[batch, sequence, rank\]"),
    "rope of three dimensions": ({"rope": (2, 24, 3)}, "must be"),
}


@on_ranks
def call_badly(changed: dict[str, Any], **options: Any) -> None:
    shapes = {"q": (2, 4, 24, 9), "latent": (2, 24, RANK), "rope": (2, 1, 24, 3), "weight": (44, RANK), "bias": (44,)}
    tensors = {name: torch.zeros(shape) for name, shape in {**shapes, **changed}.items()}
    with comm.record_traffic() as log:
        try:
            latent_attention(**tensors, mesh=cp_mesh(), **options)
        finally:
            assert not [name for name, _ in log.entries if name in TRAVELS]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("latents", [True, False])
def test_what_does_not_fit_is_refused(ranks: Any, name: str, latents: bool) -> None:
    changed, match = BAD[name]
    ranks.raises(2, ValueError, match, call_badly, changed, latents=latents)


def test_options_that_need_heads_are_refused(ranks: Any) -> None:
    ranks.raises(2, ValueError, "head_groups=2", call_badly, {}, latents=True, head_groups=2, ulysses_degree=None)
    ranks.raises(2, ValueError, "replicated", call_badly, {}, latents=True, kv_exchange="replicated")
    ranks.raises(2, TypeError, "latents='yes'", call_badly, {}, latents="yes")


@pytest.mark.parametrize("option", [{"window": (3, 0)}, {"documents": [0, 24]}, {"latents": True}, {"softcap": 2.0}])
def test_settings_of_a_style_need_a_mesh(option: dict[str, Any]) -> None:
    *given, _ = LatentCase(24).tensors()
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* without a mesh"):
        latent_attention(*given, **option)


@on_ranks
def call_with_dtensor() -> None:
    mesh = cp_mesh()
    weight = DTensor.from_local(torch.zeros(44, RANK), mesh, [Replicate()])
    q, latent, rope = torch.zeros(2, 4, 24, 9), torch.zeros(2, 24, RANK), torch.zeros(2, 1, 24, 3)
    latent_attention(q, latent, rope, weight, mesh=mesh)


def test_a_sharded_weight_is_refused(ranks: Any) -> None:
    ranks.raises(2, TypeError, "latents_and_weight", call_with_dtensor)


def test_its_op_is_on_the_save_list() -> None:
    """Latent attention is the op of attention: a selective checkpoint that saves it saves both."""
    assert attention is not latent_attention
    assert torch.ops.hyper_cp.attention.default in SAVE_LIST


# --------------------------------------------------------------------------- tensor parallel


class Block(nn.Module):
    """Layers of a model around :class:`Inner`, as tensor parallelism splits them."""

    def __init__(self, case: LatentCase) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.case = case
        self.query = nn.Linear(6, case.heads * case.dim, bias=False, dtype=case.dtype)
        self.down = nn.Linear(6, RANK + case.dim - PLAIN, bias=False, dtype=case.dtype)
        self.up = nn.Linear(RANK, case.heads * (PLAIN + case.v_dim), bias=False, dtype=case.dtype)
        self.out = nn.Linear(case.heads * case.v_dim, 6, bias=False, dtype=case.dtype)
        self.inner = Calls()

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(2, (-1, self.case.dim)).transpose(1, 2)
        latent, rope = self.down(x).split([RANK, self.case.dim - PLAIN], 2)
        found = latents_and_weight(self.up, latent)
        assert found is not None
        result: Tensor = self.out(self.inner(q, found[0], rope.unsqueeze(1), found[1]).transpose(1, 2).flatten(2))
        return result


class Calls(nn.Module):
    def forward(self, q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor) -> Any:
        return latent_attention(q, latent, rope, weight, is_causal=True)


class Expands(Block):
    """The same, which makes keys and values itself and calls plain attention. ``per_head``: of rotary parts, too."""

    def __init__(self, case: LatentCase, per_head: bool = False, wrong: bool = False) -> None:
        super().__init__(case)
        self.per_head, self.wrong = per_head, wrong

    def forward(self, x: Tensor) -> Tensor:
        case, plain = self.case, PLAIN
        q = self.query(x).unflatten(2, (-1, case.dim)).transpose(1, 2)
        latent, rope = self.down(x).split([RANK, case.dim - plain], 2)
        k, v = self.up(latent).unflatten(2, (case.heads, -1)).transpose(1, 2).split([plain, case.v_dim], 3)
        rope = rope.unsqueeze(1).expand(-1, case.heads, -1, -1)
        if self.per_head:
            rope = rope * torch.arange(1, case.heads + 1).view(1, -1, 1, 1)
        k = torch.cat([k.flip(3) if self.wrong else k, rope], 3)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return result


FROM_LAYER: dict[str, Any] = {"ulysses_degree": 1, "qkv_indices": None, "kv_exchange": "ring", "latents_from": "up"}


def save_products_and_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (torch.ops.aten.mm.default, *SAVE_LIST)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


@on_ranks
def layer_errors(per_head: bool, bias: bool, selective: bool) -> tuple[float, int]:
    """The largest error of a gradient where a style names the layer that expands, in two steps, and the bytes sent."""
    case, mesh = LatentCase(16, True), cp_mesh()
    alone = Expands(case, per_head)
    if bias:
        alone.up = nn.Linear(RANK, case.heads * (PLAIN + case.v_dim), dtype=case.dtype)
    model = parallelize_module(copy.deepcopy(alone), mesh, ContextParallel(**FROM_LAYER))
    contexts = partial(create_selective_checkpoint_contexts, save_products_and_attention)
    selected: Any = {"use_reentrant": False, "context_fn": contexts}

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    x = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first, sent = 8 * torch.distributed.get_rank(), 0
    for _ in range(2):
        alone(x).square().sum().backward()
        with comm.record_traffic() as log:
            share = x[:, first : first + 8]
            (checkpoint(loss, share, **selected) if selective else loss(share)).backward()
        sent = sum(n for name, n in log.entries if name == "send_recv")
    grads = sum_over_ranks(*(p.grad for p in model.parameters() if p.grad is not None))
    pairs = zip(grads, alone.parameters(), strict=True)
    return max(relative_error(a, b.grad) for a, b in pairs if b.grad is not None), sent


@pytest.mark.parametrize(
    ("per_head", "bias", "selective"),
    [(False, False, False), (True, False, False), (False, True, False), (False, False, True)],
)
def test_a_style_names_the_layer_that_expands(ranks: Any, per_head: bool, bias: bool, selective: bool) -> None:
    case = LatentCase(16)
    numbers = RANK + (case.dim - PLAIN) * (case.heads if per_head else 1)
    for error, sent in ranks(2, layer_errors, per_head, bias, selective):
        assert error < FP64
        assert sent == 3 * 2 * 8 * numbers * 8  # latents, again in backward, and their gradients


@on_ranks
def verified(selective: bool) -> tuple[bool, str, int]:
    """The report of ``verify`` on a checkpointed layer, and the bytes that it sent over the ring."""
    case, mesh = LatentCase(16, True), cp_mesh()
    model = nn.Sequential(parallelize_module(Expands(case), mesh, ContextParallel(**FROM_LAYER)))
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, SAVE_LIST)} if selective else {}
    model[0] = checkpoint_wrapper(model[0], **contexts)
    x = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with comm.record_traffic() as log:
        report = verify(model, mesh, [x])
    return report.ok, str(report), sum(n for name, n in log.entries if name == "send_recv")


@pytest.mark.parametrize("selective", [False, True])
def test_verify_runs_what_a_training_runs(ranks: Any, selective: bool) -> None:
    """Its hooks on the layer that expands are no reason to send heads, whose recompute would send latents."""
    for ok, report, sent in ranks(2, verified, selective):
        assert ok, report
        assert sent == (3 if selective else 4) * 2 * 8 * (RANK + LatentCase(16).dim - PLAIN) * 8


@on_ranks
def copied_after_a_call() -> None:
    model = parallelize_module(Expands(LatentCase(16, True)), cp_mesh(), ContextParallel(**FROM_LAYER))
    model(torch.randn(2, 16, 6, dtype=torch.float64)).sum().backward()
    copy.deepcopy(model)


def test_a_model_can_be_copied_after_a_call_on_one_rank(ranks: Any) -> None:
    """The node that nothing took is let go."""
    ranks(1, copied_after_a_call)


@on_ranks
def after_zeros(per_head: bool) -> float:
    """The error of an output after a first call on zeros, which tell nothing; zero on one rank only in the second."""
    case, mesh = LatentCase(16, True), cp_mesh()
    alone = Expands(case, per_head)
    model = parallelize_module(copy.deepcopy(alone), mesh, ContextParallel(**FROM_LAYER))
    x = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows, found = slice(8 * mesh.get_rank(), 8 * mesh.get_rank() + 8), []
    half = torch.cat([torch.zeros_like(x[:, :8]), x[:, 8:]], 1)
    for whole in (torch.zeros_like(x), half, x):
        with torch.no_grad():
            found.append(absolute_error(model(whole[:, rows]), alone(whole)[:, rows]))
    return max(found)


@pytest.mark.parametrize("per_head", [False, True])
def test_a_call_on_zeros_decides_nothing(ranks: Any, per_head: bool) -> None:
    assert max(ranks(2, after_zeros, per_head)) < 1e-9


@on_ranks
def layer_badly(name: str, wrong: bool) -> None:
    case = LatentCase(16, True)
    style = ContextParallel(**{**FROM_LAYER, "latents_from": name})
    parallelize_module(Expands(case, wrong=wrong), cp_mesh(), style)(torch.randn(2, 8, 6, dtype=torch.float64))


def test_layers_that_do_something_else_are_refused(ranks: Any) -> None:
    ranks.raises(2, ValueError, "latents_from='down'.*which are not what that layer makes", layer_badly, "down", False)
    ranks.raises(2, ValueError, "latents_from='up'.*which are not what that layer makes", layer_badly, "up", True)
    ranks.raises(2, ValueError, "latents_from='u' is no submodule.*query, down, up, out", layer_badly, "u", False)
    with pytest.raises(ValueError, match="latents_from='up' with qkv_indices"):
        ContextParallel(latents_from="up")


@on_ranks
def recomputed_unit_errors() -> float:
    """The largest error of a gradient where the layer is a unit of FSDP2 inside one that is recomputed."""
    case, mesh = LatentCase(16, True), cp_mesh()
    alone = Expands(case)
    model = parallelize_module(copy.deepcopy(alone), mesh, ContextParallel(**FROM_LAYER))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first = 8 * mesh.get_rank()
    alone(x).square().sum().backward()
    checkpoint(model, x[:, first : first + 8], use_reentrant=False).square().sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    # FSDP takes the mean of the ranks' gradients.
    return max(relative_error(g.full_tensor() * 2, want) for g, want in pairs if want is not None)


def test_a_recompute_reads_the_weight_of_a_unit_as_its_forward_did(ranks: Any) -> None:
    assert max(ranks(2, recomputed_unit_errors)) < FP64


class Begins(Expands):
    """The same with further parameters, which do nothing yet, or with the rotary part made in another way."""

    def __init__(self, case: LatentCase, part: str) -> None:
        super().__init__(case)
        self.part = part
        self.gain = nn.Parameter(torch.ones(case.heads, 1, 1, dtype=case.dtype))
        self.a = nn.Linear(6, 3, bias=False, dtype=case.dtype)
        self.b = nn.Linear(3, case.heads * PLAIN, bias=False, dtype=case.dtype)
        self.turn = nn.Linear(6, case.dim - PLAIN, bias=False, dtype=case.dtype)
        nn.init.zeros_(self.b.weight)
        if part == "parametrized":  # such a weight is computed anew in each read, of random numbers, say
            parametrize.register_parametrization(self.up, "weight", nn.Identity())
        if part == "layer's adapter":
            self.up = Adapted(self.up, 0.0)
            nn.init.zeros_(self.up.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        case, part = self.case, self.part
        q = self.query(x).unflatten(2, (-1, case.dim)).transpose(1, 2)
        latent, rope = self.down(x).split([RANK, case.dim - PLAIN], 2)
        if "apart" in part:
            rope = self.turn(x)
        q, latent = (q * self.gain, latent * self.gain[0, 0]) if part == "before" else (q, latent)
        made = self.up(latent).unflatten(2, (case.heads, -1)).transpose(1, 2)
        made = made.clamp_(-50, 50) if part == "whole, in place" else made
        k, v = made[..., :PLAIN], made[..., PLAIN:]
        rope = rope.unsqueeze(1)
        rope = rope * self.gain[:1] if part == "one rotary part" else rope.expand(-1, case.heads, -1, -1)
        rope = rope * self.gain if part.startswith("rotary") else rope.expand(-1, case.heads, -1, -1)
        k = k * self.gain if part.startswith("keys") else k
        k = k + self.b(self.a(x)).unflatten(2, (case.heads, -1)).transpose(1, 2) if part == "adapter" else k
        v = v * self.gain if part == "values" else v
        k = k.clamp(-50, 50) if part.startswith("clamped") else k
        k, v = (k.clamp_(-50, 50), v.clamp_(-50, 50)) if part.startswith("in place") else (k, v)
        if part == "by an index":
            v = v.clone()
            v[v > 50] = 50.0
        v = v.clamp(-50, 50) if part == "clamped" else v
        if "filled" in part:
            keys = k.new_empty(*k.shape[:3], case.dim)
            keys[..., :PLAIN], keys[..., PLAIN:] = k, rope
        else:
            keys = torch.cat([k, rope], 3).transpose(1, 2).contiguous().transpose(1, 2)
        out = F.scaled_dot_product_attention(q, keys, v, is_causal=True)
        result: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return result


@on_ranks
def beginning_errors(part: str, how: str) -> tuple[float, int]:
    """The largest error of an output or a gradient in two steps of training, and the numbers sent of each token."""
    case, mesh = LatentCase(16, True), cp_mesh()
    alone = Begins(case, part)
    model = parallelize_module(copy.deepcopy(alone), mesh, ContextParallel(**FROM_LAYER))
    if part == "late adapter":
        alone.up = Adapted(alone.up, 0.0)
        nn.init.zeros_(alone.up.lora_B.weight)
        late, late.base_layer = copy.deepcopy(alone.up), model.up
        model.up = late
    x = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rows, errors, sent = slice(8 * mesh.get_rank(), 8 * mesh.get_rank() + 8), [], 0
    if how == "evaluated":
        with torch.no_grad():
            model.eval()(x[:, rows])
            model.train()
    elif how == "frozen":
        model.requires_grad_(False)(x[:, rows])
        model.requires_grad_(True)
    run = (lambda x: checkpoint(model, x, use_reentrant=how == "reentrant")) if "reentrant" in how else model
    for _ in range(2):
        want = alone(x)
        want.square().sum().backward()
        with comm.record_traffic() as log:
            out = run(x[:, rows])
            sent = sum(n for name, n in log.entries if name == "send_recv") // (2 * 8 * 8)
            out.square().sum().backward()
        errors.append(relative_error(out.detach(), want.detach()[:, rows]))
        for p, q in zip(alone.parameters(), model.parameters(), strict=True):
            if p.grad is not None:
                (grad,) = sum_over_ranks(torch.zeros_like(p) if q.grad is None else q.grad)
                errors.append(absolute_error(grad, p.grad) / max(1.0, p.grad.abs().max().item()))
                q.grad = p.grad
        for trained in (alone, model):
            torch.optim.SGD(trained.parameters(), 0.01).step()
            trained.zero_grad()
    return max(errors), sent


ONE, EACH, HEADS = RANK + 3, RANK + 3 * 4, 4 * (9 + 5)
"""The numbers of a token that travel: with one rotary part, with one for each head, and as heads."""


@pytest.mark.parametrize(
    ("part", "how", "numbers"),
    [
        ("before", "", ONE),
        ("one rotary part", "", ONE),
        ("apart", "", ONE),
        ("layer's adapter", "", ONE),
        ("late adapter", "", ONE),
        ("filled", "", ONE),
        ("apart", "reentrant", ONE),
        ("rotary", "", EACH),
        ("rotary", "evaluated", EACH),
        ("rotary", "frozen", EACH),
        ("rotary, apart", "not reentrant", EACH),
        ("apart, filled", "", HEADS),  # the graph does not tell that its rotary part is not in the rest of the keys
        ("keys, filled", "evaluated", HEADS),
        ("clamped", "", HEADS),  # what it leaves alone in the first call it may cut in a later one
        ("clamped keys", "", HEADS),
        ("clamped, filled", "", HEADS),
        ("in place", "", HEADS),
        ("in place, filled", "", HEADS),
        ("whole, in place", "", HEADS),
        ("by an index", "", HEADS),
        ("parametrized", "", HEADS),
        ("keys", "frozen", HEADS),
        ("values", "frozen", HEADS),
    ],
)
def test_parameters_beside_the_layer_are_exact(ranks: Any, part: str, how: str, numbers: int) -> None:
    for error, sent in ranks(2, beginning_errors, part, how):
        assert error < FP64
        assert sent == numbers


@pytest.mark.parametrize(
    ("part", "how"),
    [
        *itertools.product(("keys", "values"), ("", "evaluated", "reentrant")),
        ("adapter", "not reentrant"),
    ],
)
def test_parameters_that_latents_would_drop_are_refused(ranks: Any, part: str, how: str) -> None:
    name = {"adapter": "b.weight, a.weight"}.get(part, "gain")
    ranks.raises(2, ValueError, f"also depend on {name}, which that layer does not have", beginning_errors, part, how)


class Gated(nn.Module):
    """A layer with something around it that is no adapter of PEFT's, and depends on the tokens."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.gate = layer, nn.Linear(layer.in_features, 1, bias=False, dtype=layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.gate(x).sigmoid()
        return out


@on_ranks
def late_adapter_errors(kind: type[Any], backend: str | None) -> tuple[float, list[int]]:
    """The largest error of outputs and gradients of a layer that gets adapters when the model has run, with as many
    parameters that are trained as before, and the numbers sent of each token in an evaluation and in a step."""
    case, mesh, sent, errors = LatentCase(16, True), cp_mesh(), [], []
    alone = Expands(case)
    model = parallelize_module(copy.deepcopy(alone), mesh, ContextParallel(**FROM_LAYER))
    x = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    share = x[:, 8 * mesh.get_rank() : 8 * mesh.get_rank() + 8]
    trained = [name for name, _ in kind(nn.Linear(1, 1)).named_parameters() if "layer" not in name]
    for _, p in [*model.named_parameters()][len(trained) :]:
        p.requires_grad_(False)
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        model(share)
    model(share)
    for made in (alone, model):
        torch.manual_seed(3)
        made.requires_grad_(False).up = kind(made.up).double()
    want = alone(x)
    want.square().sum().backward()
    for grad in (False, True):
        with torch.set_grad_enabled(grad), comm.record_traffic() as log:
            out = run(share)
        sent.append(sum(n for name, n in log.entries if name == "send_recv") // (2 * 8 * 8))
        errors.append(absolute_error(out.detach(), want.detach()[:, 8 * mesh.get_rank() :][:, :8]))
    out.square().sum().backward()
    grads = sum_over_ranks(*(model.up.get_parameter(name).grad for name in trained))
    pairs = zip(grads, (alone.up.get_parameter(name).grad for name in trained), strict=True)
    return max(*errors, *(relative_error(a, b) for a, b in pairs)), sent


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize(("kind", "numbers"), [(partial(Adapted, dropout=0.0), 10 + 3), (Gated, 4 * (9 + 5))])
def test_adapters_of_a_model_that_has_run_are_part_of_its_keys(
    ranks: Any, kind: Any, numbers: int, backend: str | None
) -> None:
    """They were dropped without a word: nothing compared again what had been compared without them."""
    for error, sent in ranks(2, late_adapter_errors, kind, backend):
        assert error < FP64
        assert sent == [numbers] * 2


@on_ranks
def tensor_parallel_errors() -> float:
    """The largest error of a gradient on 2 x 2 ranks: heads split over tp, the sequence over cp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    case = LatentCase(16, True)
    model, x = Block(case), torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = Block(case)
    alone(x).square().sum().backward()
    columns = {name: ColwiseParallel() for name in ("query", "up")}
    style = ContextParallel(ulysses_degree=1, qkv_indices=None, kv_exchange="ring", seq_dim=2, head_dim=1)
    parallelize_module(model, mesh["tp"], {**columns, "out": RowwiseParallel()})
    parallelize_module(model, mesh["cp"], {"inner": style})
    first = 8 * mesh["cp"].get_local_rank()
    model(x[:, first : first + 8]).square().sum().backward()
    found = []
    for (name, p), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = p.grad
        assert grad is not None and want.grad is not None
        if isinstance(grad, DTensor):
            whole = grad.full_tensor()
        else:  # of a layer that all tp ranks have: that of latents is whole, that of rotary parts each rank's share
            whole = grad.clone()
            torch.distributed.all_reduce(whole[RANK:], group=mesh["tp"].get_group())
        torch.distributed.all_reduce(whole, group=mesh["cp"].get_group())
        found.append(relative_error(whole, want.grad))
        assert name != "up.weight" or isinstance(grad, DTensor)
    return max(found)


@pytest.mark.slow
def test_heads_of_tensor_parallel_ranks(ranks: Any) -> None:
    assert max(ranks(4, tensor_parallel_errors)) < FP64

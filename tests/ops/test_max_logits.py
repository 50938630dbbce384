"""The largest logit of each head, over the ranks: of calls in every mode, and kept by styled modules for QK-clip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hyper_cp import ContextParallel, ContextParallelHandler, DynamicContextParallel, dynamic_steps, split_cp_mesh
from hyper_cp.data.dynamic import CostModel
from hyper_cp.ops import SAVE_LIST, attention, kernels
from hyper_cp.ops.kernels import TileInputs
from hyper_cp.ops.kernels.scores import flex_kernel
from hyper_cp.ops.max_logits import CALLS
from hyper_cp.schedule.tiles import CAUSAL
from tests.harness.attention_case import (
    FP64,
    AttentionCase,
    Errors,
    check,
    cp_mesh,
    explicit_mask,
    modes,
    selected_pairs,
)
from tests.harness.hf_models import InDouble, make, prepare_batch, prepare_model, tokens
from tests.harness.latent_case import LatentCase, called, heads_of, leaves_of
from tests.harness.oracle import relative_error, visible_pairs
from tests.harness.ranks import on_ranks


def largest(case: AttentionCase) -> Tensor:
    """The largest logit of each head of the pairs that are visible, from plain scores."""
    q, k, *_ = case.tensors()
    k = k.repeat_interleave(case.heads // case.kv_heads, 1)
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * (case.dim**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    if case.keys is None:
        logits = logits.masked_fill(
            ~visible_pairs(case.length, case.is_causal, case.window, case.documents), -torch.inf
        )
    if case.mask is not None:
        visible, bias = explicit_mask(case)
        logits = logits + bias if visible is None else logits.masked_fill(~visible, -torch.inf)
    if case.selected is not None:
        logits = logits.masked_fill(~selected_pairs(case), -torch.inf)
    return logits.amax((0, 2, 3))


def errors_of(case: AttentionCase, **more: Any) -> Errors:
    """Errors of the maxima, and of the output and the gradients beside them."""
    shard = case.shard()
    out, *lse, found = shard.attend(cp_mesh(), return_max_logits=True, **more)
    assert not found.requires_grad
    errors = shard.errors(out, torch.autograd.grad(out, [*shard.qkv, *shard.sinks], shard.dout), *lse)
    want = largest(case)
    same = torch.equal(found == -torch.inf, want == -torch.inf)
    return errors | {"largest": relative_error(found.nan_to_num(), want.nan_to_num()) if same else float("inf")}


@on_ranks
def errors_of_cases(cases: list[AttentionCase]) -> list[tuple[AttentionCase, Errors]]:
    return [(case, errors_of(case)) for case in cases]


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_mode(ranks: Any, world: int) -> None:
    length = 12 * world
    settings: list[dict[str, Any]] = [
        {"is_causal": True, "kv_heads": 2, "return_lse": True},
        {"is_causal": True, "window": (length // world - 2, 0), "v_dim": 5},
        {"window": (3, 2)},
        {"is_causal": True, "documents": ((0, 5, length // 2 + 1, length), (0, 1, 3, length - 2, length))},
        {"mask": "rows and heads"},
        {"mask": "float", "kv_heads": 2},
        {"softcap": 0.3, "is_causal": True},
        {"sinks": True, "is_causal": True, "scale": 3.0},
        {"keys": 4 * world},
        {"selected": (3, 1), "is_causal": True},
        {"selected": (2, 2), "kv_heads": 2, "block": 2},
    ]
    cases = [
        AttentionCase(length, **setting, **mode)
        for i, setting in enumerate(settings)
        for j, mode in enumerate(m for m in modes(world) if world < 4 or m["ulysses_degree"] == 2)
        if not (setting.keys() & {"selected"} and mode["load_balance"]) and (i + j) % 3 == 0
    ]
    if world % 2 == 0:
        cases += [
            AttentionCase(length, is_causal=True, ulysses_degree=2, head_groups=2, return_lse=x) for x in (True, False)
        ]
        cases += [AttentionCase(length, is_causal=True, kv_exchange="double_ring_2")]
    check(ranks(world, errors_of_cases, cases), FP64)


@on_ranks
def latents(case: LatentCase) -> float:
    leaves, _, at = leaves_of(case)
    _, found = called(case, leaves, at, cp_mesh(), return_max_logits=True)
    q, *made = case.tensors()[:5]
    keys, _ = heads_of(case, *made)
    logits = torch.einsum("bhid,bhjd->bhij", q, keys) * case.dim**-0.5
    seen = True if case.selected is None else selected_pairs(case)
    pairs = visible_pairs(case.length, case.is_causal, None, None)
    return relative_error(found, logits.masked_fill(~(pairs & seen), -torch.inf).amax((0, 2, 3)))


def test_latents(ranks: Any) -> None:
    """Latents that travel, the heads that are made of them, and the absorbed form of selected keys."""
    for case in (
        LatentCase(16, is_causal=True, kv_exchange="ring"),
        LatentCase(16, is_causal=True, latents=False, ulysses_degree=2),
        LatentCase(16, is_causal=True, kv_exchange="needed", selected=(3, 1)),
    ):
        assert max(ranks(2, latents, case)) <= FP64, case


# --------------------------------------------------------------------------- FlexAttention


class Flex(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = create_block_mask(lambda b, h, i, j: (j <= i) & (j % 3 != h), None, H, S, S, "cpu", BLOCK_SIZE=8)
        return flex_attention(
            *(q, k, v),
            score_mod=lambda score, b, h, i, j: score + 0.1 * (i - j),
            block_mask=mask,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )


B, H, S = 2, 4, 24


@on_ranks
def flex_rows(style: dict[str, Any]) -> tuple[float, float]:
    case = AttentionCase(S, kv_heads=2, layout=style.get("layout", "contiguous"))
    q, k, *_ = case.tensors()
    i, j = torch.arange(S)[:, None], torch.arange(S)
    pairs = torch.stack([(j <= i) & (j % 3 != h) for h in range(H)])
    logits = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(2, 1)) * 8**-0.5 + 0.1 * (i - j)
    rows = logits.masked_fill(~pairs, -torch.inf).amax(3)[:, :, case.positions(S)]
    made = ContextParallel(2, 1, qkv_indices=None, max_logits=True, **style)
    module = parallelize_module(nn.Sequential(Flex()), cp_mesh(), {"0": made})
    _, aux = module[0](*case.shard().qkv)
    kept = ContextParallelHandler(cp_mesh(), made).max_logits(module)["0"]
    want = logits.masked_fill(~pairs, -torch.inf).amax((0, 2, 3))
    seen = rows > -torch.inf
    assert torch.equal(aux.max_scores > -torch.inf, seen)
    return relative_error(aux.max_scores[seen], rows[seen]), relative_error(kept, want)


def test_max_scores_of_flex_attention(ranks: Any) -> None:
    for style in ({"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"}, {"ulysses_degree": 2}):
        assert max(max(x) for x in ranks(2, flex_rows, style)) <= FP64, style


def double_of_flex_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """FlexAttention as on CUDA: on the CPU it returns no largest scores."""
    asked, mod = options.pop("return_aux"), options["block_mask"].mask_mod
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
    logits = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * options["scale"]
    seen = mod(*torch.meshgrid(*(torch.arange(n) for n in logits.shape), indexing="ij"))
    return out, AuxOutput(aux.lse, logits.masked_fill(~seen, -torch.inf).amax(3) if asked.max_scores else None)


def test_the_kernel_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tiles with and without parts, as on CUDA: the largest logits of rows, raised in place."""
    monkeypatch.setattr(flex_kernel, "flex_attention", double_of_flex_attention)
    kernel = flex_kernel.FlexKernel(compiled=False)
    q, k, v = (torch.randn(1, heads, 12, 16, generator=torch.Generator().manual_seed(3)) for heads in (4, 2, 2))
    for parts in (None, (((0, 5), (0, 7)), ((5, 9), (7, 12)))):
        found = []
        for each in (kernel, kernels.REFERENCE):
            tile = TileInputs(q, k, v, CAUSAL, 0.3, parts=parts, largest=torch.full((1, 4, 12), -torch.inf))
            tile.largest[:, :, 2] = 9.0  # type: ignore[index]
            each.forward(tile)
            found.append(tile.largest)
        torch.testing.assert_close(*found)
        assert bool((found[0][:, :, 2] == 9).all())  # type: ignore[index]


# --------------------------------------------------------------------------- a step of a model


class Layer(nn.Module):
    """Attention that the library routes; without it, plain scores, whose largest logits it keeps."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.qkv, self.inner = nn.Linear(16, 32, bias=False), Inner()
        self.whole, self.largest = not inner, []

    def forward(self, x: Tensor, pairs: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 4)).split([4, 2, 2], -2)
        if pairs is not None:
            logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 4**-0.5
            self.largest.append(logits.masked_fill(~pairs[:, None], -torch.inf).amax((0, 2, 3)).detach())
        return x + self.inner(q, k, v, pairs).flatten(2)


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairs: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None if pairs is None else pairs[:, None] | torch.eye(q.shape[2], dtype=torch.bool)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True).transpose(1, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.layers = nn.Embedding(32, 16), nn.ModuleList(Layer(i == 0) for i in range(2))
        self.double()
        with torch.no_grad():
            self.tokens.weight[0] *= 20  # padding would have the largest logits

    def forward(self, ids: Tensor, pairs: Tensor | None = None, checkpoints: dict[str, Any] | None = None) -> Tensor:
        x = self.tokens(ids)
        return self.run(x, pairs) if checkpoints is None else checkpoint(self.run, x, pairs, **checkpoints)

    def run(self, x: Tensor, pairs: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, pairs)
        return x


def whole_batches(seed: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Batches, and the pairs ``[B, S, S]`` of each that are visible: padded, packed with padding between documents,
    and of a length that does not split."""
    ids = [torch.randint(1, 32, (2, n), generator=torch.Generator().manual_seed(seed + n)) for n in (16, 16, 13)]
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, :3], mask[1, 11:] = 0, 0
    ids[0] = ids[0] * mask
    packed = torch.tensor([1, 1, 1, 0, 0, 2, 2, 2, 2, 2, 3, 3, 0, 0, 0, 0]).expand(2, -1)
    ids[1] = ids[1] * (packed > 0)
    causal = [torch.ones(n, n, dtype=torch.bool).tril() for n in (16, 13)]
    real = (mask[:, :, None] & mask[:, None]).bool()
    alike = (packed[:, :, None] == packed[:, None]) & (packed[:, :, None] > 0)
    documents = {"cu_seqlens": torch.tensor([0, 3, 8, 10]), "cu_seqlens_padded": torch.tensor([0, 5, 10, 16])}
    return [
        ({"input_ids": ids[0], "attention_mask": mask}, causal[0] & real),
        ({"input_ids": ids[1], **documents}, causal[0] & alike),
        ({"input_ids": ids[2]}, causal[1].expand(2, -1, -1)),
    ]


def selective() -> Any:
    """The contexts of a checkpoint that saves results of attention, and maxima."""
    return create_selective_checkpoint_contexts([*SAVE_LIST, torch.ops.aten.maximum.default])


STEPS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"}, None),
    ({"ulysses_degree": None}, {"use_reentrant": False}),
    ({"ulysses_degree": 1, "kv_exchange": "needed", "layout": "per_document"}, {"use_reentrant": True}),
    ({"ulysses_degree": 1}, {"use_reentrant": False, "context_fn": selective}),
]


@on_ranks
def step(style: dict[str, Any], checkpoints: dict[str, Any] | None) -> dict[str, float]:
    """A step over data-parallel groups with other batches, of which evaluations do not count."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    made = [ContextParallel(qkv_indices=x, max_logits=True, **style) for x in (None, (0, 1, 2))]
    model = parallelize_module(Model(), world["cp"], {"layers.0": made[0], "layers.1.inner": made[1]})
    handler = ContextParallelHandler(world["cp"], made[0])
    for whole, _ in whole_batches(seed=100 * world["dp"].get_local_rank()):
        batch = handler.get_batch_on_this_cp_rank(whole)
        with handler.documents(batch):
            out = model(batch["input_ids"], checkpoints=checkpoints)
            with torch.no_grad():
                model(torch.zeros_like(batch["input_ids"]))
        out.sum().backward()
    with pytest.raises(ValueError, match="does not contain the cp ranks"):
        handler.max_logits(model, mesh=world["dp"])
    found = handler.max_logits(model, mesh=world["dp", "cp"])
    with pytest.raises(RuntimeError, match=r"ranks of the mesh: \[0, 0\]"):
        handler.max_logits(model)
    alone = Model()
    for seed in (0, 100):
        for whole, pairs in whole_batches(seed):
            alone(whole["input_ids"], pairs)
    want = [torch.stack(layer.largest).amax(0) for layer in alone.layers]
    assert list(found) == ["layers.0", "layers.1.inner"]
    return {name: relative_error(x, y) for (name, x), y in zip(found.items(), want, strict=True)}


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_a_step_of_a_model(ranks: Any, at: int) -> None:
    """Padding does not count, nor do evaluations; activation checkpointing changes nothing."""
    for found in ranks(4, step, *STEPS[at]):
        assert max(found.values()) <= FP64, found


def plain_scores(model: Any, mask: Tensor | None = None) -> list[Tensor]:
    """Let a model of transformers attend with plain scores. The list receives the largest one of each head, call by
    call. ``mask``: ``[B, S]``, 0 at padding."""
    from transformers import AttentionInterface

    seen: list[Tensor] = []

    def plain(module: Any, q: Tensor, k: Tensor, v: Tensor, given: Any, scaling: float, **_: Any) -> Any:
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits, known = q @ keys.mT * scaling, torch.ones(1, q.shape[2]) if mask is None else mask
        hidden = ~(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril() & known[:, None, None].bool())
        seen.append(logits.masked_fill(hidden | ~known[:, None, :, None].bool(), -torch.inf).amax((0, 2, 3)).detach())
        return (logits.masked_fill(hidden, -1e300).softmax(-1) @ values).transpose(1, 2), None

    AttentionInterface.register("plain scores", plain)
    model.set_attn_implementation("plain scores")
    return seen


@on_ranks
def prepared(name: str) -> float:
    """A model of transformers, with padding on the left of one row and on the right of the other."""
    ids, mask = tokens(15), torch.ones(2, 15, dtype=torch.int64)
    mask[0, :4], mask[1, -6:] = 0, 0
    style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail", max_logits=True)
    model, alone, handler = make(name), make(name), ContextParallelHandler(cp_mesh(), style)
    with InDouble():
        seen = plain_scores(alone, mask)
        alone(input_ids=ids, attention_mask=mask, position_ids=torch.arange(15)[None])
        prepare_model(model, cp_mesh(), style=style)
        model(**prepare_batch(handler, {"input_ids": ids, "attention_mask": mask, "labels": ids})).loss.backward()
    found = handler.max_logits(model)
    assert [name.rpartition(".")[2] for name in found] == ["self_attn"] * 2
    return max(relative_error(x, y) for x, y in zip(found.values(), seen, strict=True))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_models_of_transformers(ranks: Any, name: str) -> None:
    pytest.importorskip("transformers")
    assert max(ranks(2, prepared, name)) <= 1e-9


def dynamic(model: nn.Module, samples: list[Tensor], run: Any) -> dict[str, Tensor]:
    """Largest logits after a step in which each micro-batch has its own degree."""
    family = split_cp_mesh(cp_mesh())
    scheduler = DynamicContextParallel(family, 16, CostModel(linear=1.0, quadratic=0.02, exchange=2.0))
    for turn in dynamic_steps(scheduler.plan([len(x) for x in samples]), family):
        with turn.mesh(model) as handler:
            ids, positions = (handler.dispatch(x, 1) for x in (turn.pack(samples), turn.positions()))
            turn.loss(run(ids, positions).sum(), 1).backward()
    return ContextParallelHandler.of(model).max_logits(model, mesh=family.dp(1))


@on_ranks
def of_steps(lengths: list[int]) -> float:
    """A model of one's own, whose micro-batches have padding, or which has none for a rank."""
    samples = [torch.randint(1, 32, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    model, alone = Model(), Model()
    style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail", max_logits=True)
    parallelize_module(model, cp_mesh(), {"layers.*.inner": style})
    found, seen = dynamic(model, samples, lambda ids, positions: model(ids)), []
    for x in samples:
        alone(x[None], torch.ones(1, len(x), len(x), dtype=torch.bool).tril())
    for layer in alone.layers:
        seen.append(torch.stack(layer.largest).amax(0))  # type: ignore[union-attr, arg-type]
    return max(relative_error(x, y) for x, y in zip(found.values(), seen, strict=True))


@pytest.mark.parametrize("lengths", [[20, 4], [10], [22, 14, 8, 5]])
def test_steps_of_several_degrees(ranks: Any, lengths: list[int]) -> None:
    """Padding behind samples counted, and what a rank computes that has no micro-batch."""
    assert max(ranks(2, of_steps, lengths)) <= FP64


@on_ranks
def prepared_steps(lengths: list[int]) -> float:
    """A model of transformers, of which some micro-batches run on one rank and have neither padding nor neighbours."""
    samples = [tokens(n)[0] for n in lengths]
    style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail", max_logits=True)
    model, alone = make("llama"), make("llama")
    with InDouble():
        seen = plain_scores(alone)
        for x in samples:
            alone(input_ids=x[None])
        prepare_model(model, cp_mesh(), style=style)
        found = dynamic(model, samples, lambda ids, positions: model(input_ids=ids, position_ids=positions).logits)
    of_layers = torch.stack(seen).view(len(samples), len(found), -1).amax(0)
    return max(relative_error(x, y) for x, y in zip(found.values(), of_layers, strict=True))


@pytest.mark.parametrize(("world", "lengths"), [(1, [16]), (2, [20, 16])])
def test_steps_of_models_of_transformers(ranks: Any, world: int, lengths: list[int]) -> None:
    """Such micro-batches were left out."""
    pytest.importorskip("transformers")
    assert max(ranks(world, prepared_steps, lengths)) <= 1e-9


# --------------------------------------------------------------------------- where it is not possible


@on_ranks
def compiled() -> float:
    case = AttentionCase(16, is_causal=True)
    made = ContextParallel(2, 1, ulysses_degree=1, max_logits=True)

    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = parallelize_module(nn.Sequential(Plain()), cp_mesh(), {"0": made})
    run = torch.compile(lambda *qkv: model[0](*qkv), backend="eager")
    run(*case.shard().qkv)
    found = ContextParallelHandler(cp_mesh(), made).max_logits(model)["0"]
    with pytest.raises(ValueError, match="return_max_logits=True without a mesh"):
        attention(*case.shard().qkv, return_max_logits=True)
    return relative_error(found, largest(case))


def test_compiled(ranks: Any) -> None:
    """A graph breaks there."""
    assert max(ranks(2, compiled)) <= FP64


@on_ranks
def differ() -> None:
    q = torch.randn(1, 2, 4, 8)
    attention(q, q, q, mesh=cp_mesh(), return_max_logits=torch.distributed.get_rank() == 0)


def test_ranks_that_differ_raise(ranks: Any) -> None:
    ranks.raises(2, ValueError, "max_logits", differ)


@on_ranks
def many_calls() -> float:
    """The error of the largest logits of more calls than a module keeps apart."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    model = parallelize_module(Inner(), mesh, ContextParallel(max_logits=True))
    g, want = torch.Generator().manual_seed(0), []
    for _ in range(2 * CALLS + 1):
        q, k, v = (torch.randn(1, 2, 2, 4, generator=g) for _ in range(3))
        model(q.requires_grad_(), k, v)
        hidden = torch.ones(2, 2, dtype=torch.bool).triu(1)
        want.append(torch.einsum("bihd,bjhd->hij", q / 2, k).masked_fill(hidden, -torch.inf).amax((1, 2)))
    (found,) = ContextParallelHandler.of(model).max_logits(model).values()
    return relative_error(found, torch.stack(want).amax(0))


def test_calls_are_as_many_as_a_step_has(ranks: Any) -> None:
    assert max(ranks(1, many_calls)) <= 1e-6


@on_ranks
def of_no_row() -> torch.Tensor:
    x = torch.ones(0, 2, 4, 8)
    return attention(x, x, x, mesh=cp_mesh(), is_causal=True, return_max_logits=True)[-1]


def test_a_batch_without_rows(ranks: Any) -> None:
    for found in ranks(2, of_no_row):
        assert found.tolist() == [-torch.inf] * 2


class Cross(nn.Module):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        keys = memory[:, None]
        return (
            x + F.scaled_dot_product_attention(x[:, None], keys, keys, torch.ones(1, 1, 1, 6, dtype=torch.bool))[:, 0]
        )


@on_ranks
def recomputed_alone() -> float:
    """The gradient of padded tokens that attend to themselves and to a memory, on a mesh of one rank."""
    torch.manual_seed(3)
    model = nn.ModuleList([Layer(True), Cross()]).double()
    x, memory = (torch.randn(1, n, 16, dtype=torch.float64) for n in (8, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])

    def gradient(x: Tensor) -> Tensor:
        out = checkpoint(lambda x: model[1](model[0](x), memory), x, use_reentrant=True)
        (out * mask[..., None]).square().sum().backward()
        assert x.grad is not None
        return x.grad

    want = gradient(x.clone().requires_grad_())
    style = ContextParallel(qkv_indices=None, max_logits=True)
    crossing = ContextParallel(qkv_indices=None, cross_attention=True, max_logits=True)
    parallelize_module(model, cp_mesh(), {"0": style, "1": crossing})
    handler = ContextParallelHandler(cp_mesh(), style)
    batch = handler.get_batch_on_this_cp_rank({"x": x, "attention_mask": mask})
    with handler.documents(batch):
        return relative_error(gradient(batch["x"].requires_grad_()), want)


def test_one_rank_recomputes_what_has_no_documents(ranks: Any) -> None:
    """The first forward of a reentrant checkpoint has no gradients, and keeps no logits; the second does."""
    assert max(ranks(1, recomputed_alone)) <= FP64


@on_ranks
def read_before_backward() -> float:
    """The largest logit after a step with small numbers, beside the one of those numbers. The step before it read its
    own, of large ones, between forward and a backward that recomputes."""
    torch.manual_seed(3)
    style = ContextParallel(qkv_indices=None, max_logits=True)
    model = parallelize_module(nn.ModuleList([Layer(True)]), cp_mesh(), {"0": style}).double()
    handler, x = ContextParallelHandler(cp_mesh(), style), torch.randn(1, 8, 16, dtype=torch.float64)

    def forward(scale: float) -> Tensor:
        local = handler.dispatch(scale * x, 1).requires_grad_()
        return checkpoint(lambda y: model[0](y).square(), local, use_reentrant=False).sum()

    forward(1.0).backward()
    want = handler.max_logits(model)["0"]
    loss = forward(50.0)
    handler.max_logits(model)
    loss.backward()
    forward(1.0).backward()
    return relative_error(handler.max_logits(model)["0"], want)


def test_a_recompute_keeps_nothing(ranks: Any) -> None:
    """Before, the recompute left the logits of the first step to the second."""
    assert max(ranks(2, read_before_backward)) <= FP64

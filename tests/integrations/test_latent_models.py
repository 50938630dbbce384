"""The ten types of transformers with latent attention: latents travel, and results are those of one device."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel_mesh
from hyper_cp.mesh import comm
from hyper_cp.schedule import choices
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_causal import class_name, tiny_config
from tests.harness.hf_models import InDouble, compared, gradients, prepare_batch, prepare_model, prepared, tokens
from tests.harness.modules import Adapted
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks

hf = pytest.importorskip("transformers")

TYPES = (
    *("axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("kimi_linear", "longcat_flash", "minicpm3", "mistral4", "youtu"),
)
LENGTH = 24
MODES: dict[str, dict[str, Any]] = {
    "ring": {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
    "all-gather": {"ulysses_degree": 1, "layout": "head_tail"},
    "load_balance": {"ulysses_degree": 1, "load_balance": True},
    "needed": {"ulysses_degree": 1, "kv_exchange": "needed", "layout": "head_tail"},
    "hybrid": {"ulysses_degree": 2, "kv_exchange": "ring"},
}


def made(kind: str, heads: int = 4, **changes: Any) -> Any:
    """A tiny model in double precision, with the same random weights on every rank."""
    hf.logging.set_verbosity(50)
    config = copy.deepcopy(tiny_config(kind))
    for name, x in {"num_attention_heads": heads, "num_key_value_heads": heads, **changes}.items():
        setattr(config, name, x)
    config._attn_implementation = "sdpa"
    torch.manual_seed(7)
    model = getattr(hf, class_name(kind))(config).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.2) if "A_log" not in name and "dt" not in name else None
    return model.train()


def batch_of(padded: bool, length: int = LENGTH) -> dict[str, Tensor]:
    ids = tokens(length)
    mask, labels = torch.ones_like(ids), ids.clone()
    if padded:
        mask[0, -6:] = mask[1, -3:] = 0
        labels[mask == 0] = -100
    return {"input_ids": ids, "labels": labels, **({"attention_mask": mask} if padded else {})}


def alone(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    from transformers.loss.loss_utils import ForCausalLMLoss

    with InDouble():
        logits = model(**{k: x for k, x in batch.items() if k != "labels"}, use_cache=False).logits
        ForCausalLMLoss(logits, batch["labels"], logits.shape[-1]).backward()
    return logits.detach(), gradients(model)


def shared(model: Any, mesh: Any, style: ContextParallel, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Logits of the whole batch, and this rank's gradients, of a prepared model."""
    handler = ContextParallelHandler(mesh, style)
    with InDouble():
        local = prepare_batch(handler, batch)
        output = model(**local)
        output.loss.backward()
    return handler.combine(output.logits.detach(), 1), gradients(model)


def errors_of(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]], seen: Any) -> dict[str, float]:
    flat = [torch.cat([x.flatten() for x in grads]) for grads in (sum_over_ranks(*got[1]), want[1])]
    return {"logits": relative_error(got[0][seen], want[0][seen]), "gradients": relative_error(*flat)}


@on_ranks
def errors(kind: str, modes: list[str], padded: bool) -> dict[str, dict[str, float]]:
    model, batch, found = made(kind), batch_of(padded), {}
    want = alone(copy.deepcopy(model), batch)
    seen = batch["attention_mask"].bool() if padded else slice(None)
    for mode in modes:
        style, copied = ContextParallel(latents=True, **MODES[mode]), copy.deepcopy(model)
        prepare_model(copied, cp_mesh(), style=style)
        assert [m for m in copied.modules() if "expand_kv" in vars(m)], "no module hands on latents"
        found[mode] = errors_of(shared(copied, cp_mesh(), style, batch), want, seen)
    return found


def check(found: list[dict[str, dict[str, float]]]) -> None:
    bad = [of_rank for of_rank in found if not all(e < 1e-9 for modes in of_rank.values() for e in modes.values())]
    assert not bad, bad


@pytest.mark.parametrize("kind", TYPES)
def test_exact_on_two_ranks(ranks: Any, kind: str) -> None:
    """DeepSeek V3 in every mode that two ranks have; the other types have the same seam."""
    check(ranks(2, errors, kind, ["ring", "load_balance", "needed"] if kind == "deepseek_v3" else ["ring"], True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "modes"),
    [
        ("deepseek_v3", ["ring", "all-gather", "needed", "hybrid"]),
        ("bailing_hybrid", ["hybrid"]),  # its other layers are recurrent
        ("longcat_flash", ["all-gather"]),  # two attentions a layer
    ],
)
def test_exact_on_four_ranks(ranks: Any, kind: str, modes: list[str]) -> None:
    check(ranks(4, errors, kind, modes, False))


def gradient_error(copied: Any, handler: ContextParallelHandler, model: Any) -> float:
    """The largest error of a gradient of a prepared model, of a padded batch."""
    batch = batch_of(True)
    copied(**prepare_batch(handler, batch)).loss.backward()
    model(**batch, use_cache=False).loss.backward()
    flat = [torch.cat([x.flatten() for x in grads]) for grads in (sum_over_ranks(*gradients(copied)), gradients(model))]
    return relative_error(*flat)


@on_ranks
def recomputed() -> float:
    """The largest error of a gradient under activation checkpointing, in fp32."""
    model, (copied, handler) = made("deepseek_v3").float(), prepared(made("deepseek_v3").float(), **MODES["ring"])
    copied.gradient_checkpointing_enable({"use_reentrant": False})
    return gradient_error(copied, handler, model)


def test_exact_in_a_recompute(ranks: Any) -> None:
    assert max(ranks(2, recomputed)) < 2e-5


@on_ranks
def compiled() -> tuple[float, int]:
    """The largest error of a gradient where a layer is one graph, in fp32, and the bytes that travel."""
    model, (copied, handler) = made("minicpm3").float(), prepared(made("minicpm3").float(), **MODES["ring"])
    compared(copied).model.layers[0].compile(fullgraph=True, backend="aot_eager")
    with comm.record_traffic() as log:
        error = gradient_error(copied, handler, model)
    return error, sum(n for name, n in log.entries if name == "send_recv")


@on_ranks
def compiled_with_dropout() -> int:
    """The bytes that travel where a layer is one graph, and adapters draw dropout."""
    model, style = made("minicpm3").float(), ContextParallel(**MODES["ring"])
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj, 0.1)
    compared(prepare_model(model, cp_mesh(), style=style))
    model.model.layers[0].compile(fullgraph=True, backend="eager")
    choices.log_once.cache_clear()
    choices.logger.setLevel(logging.INFO)
    with comm.record_traffic() as log:
        model(**prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of(False)))
    return sum(n for name, n in log.entries if name == "send_recv")


@pytest.mark.slow
def test_compiled_layers_say_that_heads_travel(ranks: Any) -> None:
    """A compiled layer says once that its heads travel, and the log breaks no graph."""
    assert min(ranks(2, compiled_with_dropout, timeout=300)) > 2 * (2 * 12 * 4 * (16 + 8) * 4) * 0.9


@pytest.mark.slow
def test_compiled_layers_send_latents(ranks: Any) -> None:
    for error, sent in ranks(2, compiled, timeout=300):
        assert error < 2e-5
        assert sent == 3 * 2 * (2 * 12 * (12 + 8) * 4)  # three times the latents of two layers


# --------------------------------------------------------------------------- bytes

SIXTEEN = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_head_dim": 24}
SIXTEEN |= {"head_dim": 8}
TRAVELS = ("send_recv", "all_gather", "reduce_scatter", "all_to_all_rows")


@on_ranks
def traffic(kind: str, mode: str) -> tuple[float, float]:
    """Bytes that this rank sends in one layer of 16 heads, in forward and altogether, per byte of its latents."""
    changes: dict[str, Any] = {**SIXTEEN, **({"head_dim": 16} if kind == "mistral4" else {})}
    if kind in ("kimi_linear", "bailing_hybrid"):
        changes["layer_types"] = ["full_attention"] * 2
    model = made(kind, 16, **changes).float()
    style = ContextParallel(**MODES[mode])
    prepare_model(model, cp_mesh(), style=style)
    layers = sum("expand_kv" in vars(m) for m in model.modules())
    handler = ContextParallelHandler(cp_mesh(), style)
    local = prepare_batch(handler, batch_of(False, 64))
    model(**local)  # compares tokens and weights, once
    with comm.record_traffic() as log:
        loss = model(**local).loss
        forward = sum(n for name, n in log.entries if name in TRAVELS)
        loss.backward()
    latents = 2 * 32 * (32 + 8) * 4 * layers
    return forward / latents, sum(n for name, n in log.entries if name in TRAVELS) / latents


@pytest.mark.parametrize("kind", ["deepseek_v3", "bailing_hybrid", "longcat_flash"])
def test_what_travels_is_latents(ranks: Any, kind: str) -> None:
    """At most 1.1 of them in forward, and 3.3 in forward and backward: they travel again, and their gradients."""
    for mode in ("ring", "all-gather", "needed") if kind == "deepseek_v3" else ("ring",):
        least = 0.45 if mode == "needed" else 0.9  # no query sees the keys of the last rows
        for forward, both in ranks(2, traffic, kind, mode):
            assert least < forward <= 1.1, (mode, forward)
            assert 3 * least < both <= 3.3, (mode, both)


# --------------------------------------------------------------------------- weights that are elsewhere


@on_ranks
def adapted_errors() -> dict[str, dict[str, float]]:
    model, batch = made("deepseek_v3"), batch_of(False)
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj, 0.0).double()
    want = alone(copy.deepcopy(model), batch)
    style = ContextParallel(**MODES["ring"])
    compared(prepare_model(model, cp_mesh(), style=style))
    with comm.record_traffic() as log:
        found = errors_of(shared(model, cp_mesh(), style, batch), want, slice(None))
    assert sum(n for name, n in log.entries if name == "send_recv") < 2 * 2 * 12 * (12 + 8) * 8 * 3.3
    return {"adapters": found}


def test_adapters_without_dropout_are_part_of_the_weight(ranks: Any) -> None:
    check(ranks(2, adapted_errors))


class Caught(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@on_ranks
def lines_with_dropout() -> tuple[list[str], int]:
    """The lines that are logged where adapters draw dropout, and the bytes that travel."""
    model, caught = made("deepseek_v3"), Caught()
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj, 0.1).double()
    style = ContextParallel(**MODES["ring"])
    compared(prepare_model(model, cp_mesh(), style=style))
    choices.log_once.cache_clear()
    choices.logger.addHandler(caught)
    choices.logger.setLevel(logging.INFO)
    with comm.record_traffic() as log:
        shared(model, cp_mesh(), style, batch_of(False))
    choices.logger.removeHandler(caught)
    return caught.lines, sum(n for name, n in log.entries if name == "send_recv")


def test_adapters_with_dropout_let_heads_travel_and_say_so(ranks: Any) -> None:
    for lines, sent in ranks(2, lines_with_dropout):
        assert len(lines) == 1 and "heads travel, not latents" in lines[0]
        assert sent > 2 * 2 * 12 * 4 * (16 + 8) * 8 * 2.9


def steered(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + 0.5


@on_ranks
def changed_errors(how: str) -> dict[str, dict[str, float]]:
    """Models whose expansion does more than their weight says: heads travel."""
    model, batch, style = made("deepseek_v3"), batch_of(False), ContextParallel(**MODES["ring"])
    for layer in model.model.layers:
        if how == "hook":
            layer.self_attn.kv_b_proj.register_forward_hook(steered)
        else:
            layer.self_attn.__class__ = normed(type(layer.self_attn))
    want = alone(copy.deepcopy(model), batch)
    prepare_model(model, cp_mesh(), style=style)
    return {how: errors_of(shared(model, cp_mesh(), style, batch), want, slice(None))}


def normed(kind: Any) -> Any:
    """A type whose keys are normalised after their expansion."""

    class Normed(kind):  # type: ignore[misc]
        def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = super().expand_kv(kv_nope, k_rot)
            return nn.functional.normalize(keys, dim=-1), values

    return Normed


@pytest.mark.parametrize("how", ["hook", "subclass"])
def test_heads_travel_where_an_expansion_does_more(ranks: Any, how: str) -> None:
    check(ranks(2, changed_errors, how))


@on_ranks
def tensor_parallel_errors() -> dict[str, float]:
    """Errors of gradients on cp 2 x tp 2, with ``ColwiseParallel`` layers that make queries, keys and values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    model, batch, style = made("deepseek_v3"), batch_of(False), ContextParallel(**MODES["ring"])
    want = dict(zip((n for n, _ in model.named_parameters()), alone(copy.deepcopy(model), batch)[1], strict=True))
    plan = {"q_b_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh["tp"], plan)
    prepare_model(model, mesh["cp"], style=style)
    with InDouble():
        model(**prepare_batch(ContextParallelHandler(mesh["cp"], style), batch)).loss.backward()
    found = {}
    for name, p in model.named_parameters():
        if "layers.1.self_attn" in name and ("kv_a" in name or "kv_b" in name):
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
            torch.distributed.all_reduce(grad, group=mesh["cp"].get_group())
            rows = slice(12) if "kv_a_proj" in name else slice(None)  # of latents; rotary parts have no such layer
            found[name] = relative_error(grad[rows], want[name][rows])
    return found


@pytest.mark.slow
def test_gradients_of_latents_are_summed_over_tensor_parallel_ranks(ranks: Any) -> None:
    for found in ranks(4, tensor_parallel_errors):
        assert len(found) == 3 and max(found.values()) < 1e-9, found


@on_ranks
def fsdp_errors(apart: bool) -> dict[str, dict[str, float]]:
    """FSDP2 around each layer; with ``apart`` the layer that expands latents is a unit of its own."""
    model, batch = made("deepseek_v3"), batch_of(False)
    want = alone(copy.deepcopy(model), batch)
    style, mesh = ContextParallel(**MODES["ring"]), cp_mesh()
    prepare_model(model, mesh, style=style)
    for layer in model.model.layers:
        if apart:
            fully_shard(layer.self_attn.kv_b_proj, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    logits, _ = shared(model, mesh, style, batch)
    # FSDP takes the mean of the ranks' gradients.
    full = torch.cat([p.grad.full_tensor().flatten() * mesh.size() for p in model.parameters() if p.grad is not None])
    expected = torch.cat([g.flatten() for g, p in zip(want[1], model.parameters(), strict=True) if p.grad is not None])
    return {"fsdp": {"logits": relative_error(logits, want[0]), "gradients": relative_error(full, expected)}}


@pytest.mark.parametrize("apart", [False, True])
def test_weights_that_fsdp_shards(ranks: Any, apart: bool) -> None:
    check(ranks(2, fsdp_errors, apart))


# --------------------------------------------------------------------------- the seam


def test_the_seam_of_transformers_is_where_it_was() -> None:
    """A canary: the ten types have it, and no type has it in another form without our knowing."""
    import importlib

    from hyper_cp.integrations.huggingface.latents import has_seam

    for kind in TYPES:
        module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        classes = [x for x in vars(module).values() if isinstance(x, type) and hasattr(x, "expand_kv")]
        assert classes and all(has_seam(x) for x in classes), kind


@on_ranks
def on_one_rank_and_back() -> tuple[float, float]:
    """A prepared model on a mesh of one rank, and on both again."""
    model, batch = made("deepseek_v3"), batch_of(False)
    want = alone(copy.deepcopy(model), batch)[0]
    style = ContextParallel(**MODES["ring"])
    prepare_model(model, cp_mesh(), style=style)
    ones = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))["cp"]
    with context_parallel_mesh(model, ones), InDouble():
        single = model(batch["input_ids"]).logits
    return relative_error(single, want), relative_error(shared(model, cp_mesh(), style, batch)[0], want)


def test_a_mesh_of_one_rank_expands_as_the_model_does(ranks: Any) -> None:
    for pair in ranks(2, on_one_rank_and_back):
        assert max(pair) < 1e-9


# --------------------------------------------------------------------------- torchtitan


def titan_attention() -> nn.Module:
    """Latent attention of torchtitan's DeepSeek V3, small, with plain math in place of its kernel."""
    import torchtitan.models.deepseek_v3 as titan

    inits = {"weight": nn.init.normal_, "bias": nn.init.zeros_}
    rope = titan.ComplexRoPE.Config(dim=8, max_seq_len=64)
    sizes = {"dim": 16, "n_heads": 8, "q_lora_rank": 0, "kv_lora_rank": 12, "qk_nope_head_dim": 8}
    config = titan.make_mla_attention_config(
        layer_id=0,
        attn_backend="varlen",
        linear_init=inits,
        norm_init=inits,
        depth_init=lambda layer: inits,
        qk_rope_head_dim=8,
        v_head_dim=6,
        rope=rope,
        **sizes,
    )
    torch.manual_seed(4)
    module: Any = config.build()
    module.init_states()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.3)
    module.inner_attention = PlainInner()
    return module


class PlainInner(nn.Module):
    """A mock of torchtitan's inner attention, ``[B, S, H, D]``, causal."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, scale: float) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return plain_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


@on_ranks
def titan_errors() -> tuple[float, int]:
    """The largest error of an output or a gradient, and the bytes that a rank sends."""
    from hyper_cp.integrations.torchtitan import apply_context_parallel

    alone = titan_attention()
    style = ContextParallel(ulysses_degree=1, qkv_indices=None, kv_exchange="ring", latents_from="wkv_b")
    model = copy.deepcopy(alone)
    apply_context_parallel(model, cp_mesh(), style, "inner_attention")
    x, at = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(16).expand(2, 16)
    rows = slice(8 * torch.distributed.get_rank(), 8 * torch.distributed.get_rank() + 8)
    want = alone(x, None, at)
    want.square().sum().backward()
    with comm.record_traffic() as log:
        out = model(x[:, rows], None, at[:, rows])
        out.square().sum().backward()
    found = [relative_error(out.detach(), want.detach()[:, rows])]
    grads = sum_over_ranks(*gradients(model))
    found += [relative_error(a, b) for a, b in zip(grads, gradients(alone), strict=True)]
    return max(found), sum(n for name, n in log.entries if name == "send_recv")


@pytest.mark.slow
def test_latents_of_torchtitan(ranks: Any) -> None:
    pytest.importorskip("torchtitan")
    for error, sent in ranks(2, titan_errors):
        assert error < 2e-5
        assert sent == 3 * 2 * 8 * (12 + 8) * 4  # of heads it would be 8 * (8 + 8 + 6) numbers in place of 12 + 8

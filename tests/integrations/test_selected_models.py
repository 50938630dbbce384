"""The types of transformers whose attention selects keys by a lightning indexer: results are those of one device."""

from __future__ import annotations

import copy
import inspect
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.integrations.huggingface.selected import has_indexer_seam
from hyper_cp.mesh import comm
from hyper_cp.ops.kernels.indexer import BestKeys
from hyper_cp.verify import verify
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_causal import random_model
from tests.harness.hf_models import (
    VOCABULARY,
    InDouble,
    LowestFirst,
    compared,
    gradients,
    prepare_batch,
    prepare_model,
    tokens,
)
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

hf = pytest.importorskip("transformers")

LENGTH, TOPK = 24, 5
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10, "head_dim": 8, "qk_head_dim": 14},
    **{"n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"index_topk": TOPK, "index_head_dim": 16, "index_n_heads": 3, "num_hidden_layers": 3},
    **{"mlp_layer_types": ["dense", "sparse", "dense"], "layer_types": ["indexed_attention"] * 3},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "attention_dropout": 0.0},
}
SHARED = {"indexer_types": ["full", "shared", "full"]}
TWO_LAYERS = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "layer_types": ["indexed_attention"] * 2}
"""The layers of types that share no selection."""
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", TWO_LAYERS),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", SHARED),
    "hy_v4": ("HYV4ForCausalLM", {**SHARED, "hc_mult": 2}),
    "axk2": ("AXK2ForCausalLM", {**TWO_LAYERS, "n_group": None, "topk_group": None, "gated_norm_rank": 4}),
    "mistral_large4_text": (
        "MistralLarge4TextModel",
        {**SHARED, "no_rope_layers": [1, 0, 1], "kv_source_layers": [0, 1, 0]},
    ),
    "dots3_note_text": (
        "Dots3NoteForCausalLM",
        {
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            **{"sliding_window": 7, "head_dim": 16, "shared_experts_intermediate_size": 16},
            **{
                "swa_num_attention_heads": 2,
                "swa_num_key_value_heads": 2,
                "swa_q_lora_rank": 12,
                "swa_kv_lora_rank": 10,
            },
            **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 10},
        },
    ),
}
MODES: dict[str, dict[str, Any]] = {
    "ring": {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
    "all-gather": {"ulysses_degree": 1, "layout": "head_tail"},
    "load_balance": {"ulysses_degree": 1, "kv_exchange": "ring", "load_balance": True},
    "contiguous": {"ulysses_degree": 1, "kv_exchange": "ring"},
    "needed": {"ulysses_degree": 1, "kv_exchange": "needed", "layout": "head_tail"},
    "ulysses": {"ulysses_degree": None},
    "heads": {"ulysses_degree": 1, "kv_exchange": "ring", "latents": False},
    "hybrid": {"ulysses_degree": 2, "kv_exchange": "ring"},
}


def made(kind: str, **changes: Any) -> Any:
    """A tiny model in double precision, with the same random weights on every rank."""
    hf.logging.set_verbosity(50)
    name, own = TYPES[kind]
    config = hf.AutoConfig.for_model(kind, **copy.deepcopy({**SIZES, **own, **changes}))
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    return random_model(getattr(hf, name), config, 0.2).train()


def batch_of(kind: str) -> dict[str, Tensor]:
    """A batch of two rows: plain, padded (on the right, on the left), or with packed documents."""
    ids = tokens(LENGTH)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, -6:] = mask[1, :3] = 0
        batch["labels"][mask == 0] = batch["labels"][1, 3] = -100  # padding predicts nothing
        batch["attention_mask"] = mask
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (9, 3, 12)]).expand(2, -1)
        batch["labels"][:, [9, 12]] = -100
    return batch


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of one device; for models without a head, a sum with random weights."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if "logits" in output:
        found: Tensor = ForCausalLMLoss(output.logits, batch["labels"], output.logits.shape[-1])
        return found
    return (output[0] * weights_of(output[0].shape[-1], batch)).sum()


def weights_of(width: int, batch: dict[str, Tensor]) -> Tensor:
    """Random weights of hidden states; 0 of padding."""
    found = torch.randn(2, LENGTH, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return found * batch["attention_mask"].unsqueeze(2) if "attention_mask" in batch else found


def alone(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    with InDouble(), LowestFirst():
        output = model(**{k: x for k, x in batch.items() if k != "labels"}, use_cache=False)
        loss_of(output, batch).backward()
    return output[0].detach(), [p.grad for p in model.parameters()]


def differentiate(loss: Tensor) -> None:
    """Backward of an edge, which no function mode handles: the one that is entered holds in a recompute too."""
    torch.autograd.backward(get_gradient_edge(loss))  # type: ignore[arg-type]


def shared(model: Any, style: ContextParallel, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
    """The output of the whole batch, and this rank's gradients, of a prepared model."""
    handler = ContextParallelHandler(cp_mesh(), style)
    with InDouble():
        local = prepare_batch(handler, batch)
        head = hasattr(model, "lm_head")
        output = model(**{k: x for k, x in local.items() if head or ("labels" not in k and "num_items" not in k)})
        if head:
            differentiate(output.loss)
            return handler.combine(output.logits.detach(), 1), gradients(model)
        weights = handler.dispatch(weights_of(output[0].shape[-1], batch), seq_dim=1)
        differentiate((output[0] * weights).sum())
    return handler.combine(output[0].detach(), 1), gradients(model)


@on_ranks
def errors(kind: str, modes: list[str], which: str, checkpointed: bool, changes: dict[str, Any]) -> dict[str, float]:
    model, batch, found = made(kind, **changes), batch_of(which), {}
    want, expected = alone(copy.deepcopy(model), batch)
    seen = batch["attention_mask"].bool() if which == "padded" else slice(None)
    for mode in modes:
        style, copied = ContextParallel(**MODES[mode]), copy.deepcopy(model)
        prepare_model(copied, cp_mesh(), style=style)
        if checkpointed:
            copied.gradient_checkpointing_enable({"use_reentrant": False})
        got, grads = shared(copied, style, batch)
        summed = sum_over_ranks(*grads)
        unused = [p.grad is None for p in copied.parameters()]
        assert unused == [g is None for g in expected], "other parameters have gradients"
        right = [torch.zeros_like(x) if g is None else g for g, x in zip(expected, summed, strict=True)]
        found[f"{mode}: output"] = relative_error(got[seen], want[seen])
        found[f"{mode}: gradients"] = max(relative_error(a, b) for a, b in zip(summed, right, strict=True) if b.any())
    return found


def check(found: list[dict[str, float]]) -> None:
    bad = {name: e for of_rank in found for name, e in of_rank.items() if not e < 1e-9}
    assert not bad, bad


@pytest.mark.parametrize("kind", TYPES)
def test_exact_on_two_ranks(ranks: Any, kind: str) -> None:
    """Checkpointed, with padding; DeepSeek V3.2 in every mode."""
    modes = ["ring", "load_balance", "needed", "ulysses", "heads"] if kind == "deepseek_v32" else ["ring"]
    check(ranks(2, errors, kind, modes, "padded", True, {}))


@pytest.mark.slow
def test_exact_on_more_ranks(ranks: Any) -> None:
    """Plain and packed batches; layers that share a selection, and selections of more keys than there are."""
    check(ranks(4, errors, "deepseek_v32", ["all-gather", "hybrid"], "packed", False, {}))
    check(ranks(3, errors, "hy_v4", ["contiguous"], "plain", False, {"index_topk": 64}))
    check(ranks(2, errors, "mistral_large4_text", ["contiguous"], "packed", False, {}))


@on_ranks
def on_one_rank(kind: str) -> tuple[float, list[bool]]:
    """The error on a mesh of one rank, which selects as many ranks do; with a cache it runs the model's own code."""
    model, batch, same = made(kind), batch_of("packed"), []
    want, _ = alone(copy.deepcopy(model), batch)
    style = ContextParallel(**MODES["ring"])
    for implementation in ("eager", "sdpa"):
        one = copy.deepcopy(model).eval()
        one.set_attn_implementation(implementation)
        prepared = copy.deepcopy(one)
        prepare_model(prepared, cp_mesh(), style=style)
        ids = batch["input_ids"]
        with InDouble():
            of_one, of_prepared = (x.generate(ids, max_new_tokens=3, do_sample=False) for x in (one, prepared))
        same.append(torch.equal(of_one, of_prepared))
    got, _ = shared(prepared, style, batch)
    return relative_error(got, want), same


def test_on_one_rank(ranks: Any) -> None:
    ((error, same),) = ranks(1, on_one_rank, "glm_moe_dsa")
    assert error < 1e-9
    assert all(same)


@on_ranks
def verified(fault: str) -> tuple[bool, str | None]:
    """The verdict on a model of which all scores are equal, or of one that selects one key less on two ranks."""
    model = made("deepseek_v32").float()
    if fault == "ties":
        for name, p in model.named_parameters():
            if "indexer.wk" in name or "indexer.k_norm" in name:
                torch.nn.init.constant_(p, 0.0)
    prepare_model(model, cp_mesh(), style=ContextParallel(**MODES["ring"]))

    def wrong(best: BestKeys, rows: tuple[int, int]) -> tuple[Tensor]:
        (right,) = result(best, rows)
        if rows[1] < LENGTH:
            right[..., 0] = -1
        return (right,)

    result = BestKeys.result
    with patch.object(BestKeys, "result", wrong if fault == "a key less" else result):
        report = verify(model, cp_mesh(), batch_of("plain"))
    return report.ok, report.module


def test_verify_takes_ties_for_right(ranks: Any) -> None:
    assert ranks(2, verified, "ties") == [(True, None)] * 2


def test_verify_names_an_indexer_that_is_wrong(ranks: Any) -> None:
    for ok, module in ranks(2, verified, "a key less"):
        assert not ok
        assert "indexer" in str(module)


@on_ranks
def bytes_sent(kind: str) -> tuple[int, int]:
    """Bytes that a rank sends in forward, and in all."""
    model, found = made(kind).float(), []
    style = ContextParallel(**MODES["ring"])
    compared(prepare_model(model, cp_mesh(), style=style))
    local = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of("plain"))
    with comm.record_traffic() as log:
        output = model(**local)
        found.append(sum(n for name, n in log.entries if name == "send_recv"))
        output.loss.backward()
        found.append(sum(n for name, n in log.entries if name == "send_recv"))
    return found[0], found[1]


def test_latents_and_narrow_keys_travel(ranks: Any) -> None:
    """In three layers of GLM, of which two have an indexer of 16 numbers: 12 + 8 numbers of a token."""
    latents, index = 2 * LENGTH // 2 * 20 * 4, 2 * LENGTH // 2 * 16 * 4
    for forward, both in ranks(2, bytes_sent, "glm_moe_dsa"):
        assert forward == 3 * latents + 2 * index
        assert both == forward + 2 * 3 * latents


# --------------------------------------------------------------------------- seams and refusals


def test_each_family_has_the_known_indexer() -> None:
    """A canary: transformers' indexers end as those that this version of the library knows."""
    for kind in TYPES:
        kinds = {type(x) for x in made(kind).modules() if type(x).__name__.endswith("Indexer")}
        assert kinds
        assert all(map(has_indexer_seam, kinds)), f"transformers {hf.__version__}"
    other = hf.models.qwen4_exp.modeling_qwen4_exp
    assert not any(has_indexer_seam(x) for x in vars(other).values() if isinstance(x, type))


@on_ranks
def refused(dtype: torch.dtype | None) -> str:
    """The error for a mask of pairs; without one, for an indexer that scores keys otherwise."""
    model, style = made("deepseek_v32"), ContextParallel(**MODES["ring"])
    if dtype is None:
        with patch.object(type(model.model.layers[0].self_attn.indexer), "forward", lambda self, *args: None):
            return error_of(lambda: prepare_model(model, cp_mesh(), style=style))
    prepare_model(model, cp_mesh(), style=style)
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=dtype)
    local = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of("plain") | {"attention_mask": mask})
    return error_of(lambda: model(**local))


def test_masks_of_pairs_and_other_scores_are_refused(ranks: Any) -> None:
    for dtype in torch.bool, torch.float64:
        for message in ranks(2, refused, dtype):
            assert "DeepseekV32Indexer selects keys under an attention mask that was given as a tensor" in message
    for message in ranks(2, refused, None):
        assert message.startswith("NotImplementedError: DeepseekV32Model has layers of type indexed_attention")


@on_ranks
def reentrant(kind: str) -> str:
    model, style = made(kind), ContextParallel(**MODES["ring"])
    prepare_model(model, cp_mesh(), style=style)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    batch = prepare_batch(ContextParallelHandler(cp_mesh(), style), batch_of("plain"))
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(NotImplementedError) as error, InDouble():
        model(**{k: x for k, x in batch.items() if "labels" not in k and "num_items" not in k})
    return str(error.value)


def test_shared_latents_under_a_reentrant_checkpoint_are_refused(ranks: Any) -> None:
    """On one device their gradients are lost without an error."""
    for message in ranks(2, reentrant, "mistral_large4_text"):
        assert "use_reentrant=False" in message


# --------------------------------------------------------------------------- training the indexers


class Scores(LowestFirst):
    """Records what indexers score, and what is selected of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.topk and args[0].requires_grad and args[0].shape[-1] == LENGTH:
            self.found.append((args[0], result.indices))
        return result


def losses_alone(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """The losses ``[B, S]`` of all indexers on one device: of the attention weights of eager attention."""
    model.set_attn_implementation("eager")
    weights: list[Tensor] = []
    for module in model.modules():
        if has_indexer_seam(type(module)):
            forward = inspect.unwrap(type(module).forward)

            def detached(*args: Any, module: Any = module, forward: Any = forward, **kwargs: Any) -> Any:
                return forward(module, *tree_map_only(Tensor, Tensor.detach, args), **kwargs)

            module.forward = detached
        if getattr(module, "indexer", None) is not None:
            module.register_forward_hook(lambda _, args, output: weights.append(output[1].detach()))
    with InDouble(), Scores() as scores:
        model(**{k: x for k, x in batch.items() if k != "labels"}, use_cache=False)
    found = []
    for (of_all, chosen), of_heads in zip(scores.found, weights, strict=True):
        p, of_chosen = of_heads.sum(1).gather(2, chosen), of_all.gather(2, chosen)
        p = p / p.sum(2, keepdim=True).clamp(min=1e-300)  # Hunyuan's has sinks, which take a part
        ratio = p.clamp(min=1e-300).log() - of_chosen.log_softmax(2)
        found.append((p * torch.where(p > 0, ratio, 0.0)).sum(2))
    return found


@on_ranks
def indexer_errors(kind: str, dense: bool) -> dict[str, float]:
    from hyper_cp.integrations.transformers import indexer_losses

    model, batch = made(kind), batch_of("padded")
    one = copy.deepcopy(model)
    for module in one.modules():
        if dense and has_indexer_seam(type(module)):
            module.index_topk = LENGTH
    upstream = batch["attention_mask"] * torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1))
    want = sum((x * upstream).sum() for x in losses_alone(one, batch))
    want.backward()  # type: ignore[union-attr]
    style = ContextParallel(**MODES["ring"])
    prepare_model(model, cp_mesh(), style=style)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    handler = ContextParallelHandler(cp_mesh(), style)
    with InDouble():
        local = prepare_batch(handler, batch)
        with indexer_losses(dense=dense) as losses:
            model(**{k: x for k, x in local.items() if "labels" not in k and "num_items" not in k})
        mine = (torch.stack(losses) * handler.dispatch(upstream, seq_dim=1)).sum()
        number = len(losses)
        differentiate(mine)
    assert len(losses) == number, "a recompute adds its losses again"
    names = {name for name, p in model.named_parameters() if p.grad is not None}
    assert names == {name for name, p in one.named_parameters() if p.grad is not None}, "others have gradients"
    assert names
    assert all("indexer" in x for x in names)
    of_ranks, *grads = sum_over_ranks(mine.detach(), *(model.get_parameter(x).grad for x in sorted(names)))
    errors = [relative_error(g, one.get_parameter(x).grad) for g, x in zip(grads, sorted(names), strict=True)]
    return {"loss": relative_error(of_ranks, want.detach()), "gradients": max(errors)}  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["deepseek_v32", "hy_v4", "mistral_large4_text", "dots3_note_text"])
def test_indexers_are_trained_by_what_attention_attends_to(ranks: Any, kind: str) -> None:
    """All layers have an indexer, or some share it, or slide; Hunyuan's attention has sinks."""
    check(ranks(2, indexer_errors, kind, False))


def test_warm_up_is_dense(ranks: Any) -> None:
    check(ranks(2, indexer_errors, "deepseek_v32", True))
    check(ranks(1, indexer_errors, "deepseek_v32", False))


@on_ranks
def in_half_precision(kind: str) -> tuple[float, float]:
    """The errors of losses and gradients of bf16 weights, to those of one device in fp64. All keys are selected."""
    from hyper_cp.integrations.transformers import indexer_losses

    model, batch, style = made(kind, index_topk=LENGTH).bfloat16(), batch_of("padded"), ContextParallel(**MODES["ring"])
    one, tokens = copy.deepcopy(model).double(), batch["attention_mask"]
    want = sum(x * tokens for x in losses_alone(one, batch))
    want.sum().backward()  # type: ignore[union-attr]
    prepare_model(model, cp_mesh(), style=style)
    handler = ContextParallelHandler(cp_mesh(), style)
    local = prepare_batch(handler, batch)
    with indexer_losses() as losses:
        model(**{k: x for k, x in local.items() if "labels" not in k and "num_items" not in k})
    mine = torch.stack(losses).sum(0)
    (mine * handler.dispatch(tokens, seq_dim=1)).sum().backward()
    names = [name for name, p in one.named_parameters() if p.grad is not None]
    found = sum_over_ranks(*(model.get_parameter(name).grad.double().flatten() for name in names))
    right = torch.cat([one.get_parameter(name).grad.flatten() for name in names])
    losses_of_all = handler.combine(mine.detach(), 1) * tokens
    return relative_error(losses_of_all, want.detach()), relative_error(torch.cat(found), right)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["deepseek_v32", "dots3_note_text"])
def test_indexers_are_trained_in_half_precision(ranks: Any, kind: str) -> None:
    """Also one that scores in fp32 (dots3)."""
    for loss, gradients_of in ranks(2, in_half_precision, kind):
        assert loss < 0.05
        assert gradients_of < 0.05


def prepared(mesh: DeviceMesh, heads: DeviceMesh | None = None) -> Any:
    """A model in fp32 on a mesh; its attention shares out heads over ``heads``."""
    model = made("deepseek_v32").float()
    plan = {"q_b_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    for layer in model.model.layers if heads is not None else ():
        parallelize_module(layer.self_attn, heads, plan)
    return prepare_model(model, mesh, style=ContextParallel(**MODES["ring"]))


def trained(model: Any, mesh: DeviceMesh, **options: Any) -> list[Tensor]:
    """The gradients of a prepared model's indexers."""
    from hyper_cp.integrations.transformers import indexer_losses

    handler = ContextParallelHandler(mesh, ContextParallel(**MODES["ring"]))
    with indexer_losses(**options) as losses:
        output = model(**prepare_batch(handler, batch_of("plain")))
    assert len(losses) == 2
    (output.loss + handler.mean_loss(torch.stack(losses).sum(0), gradients="sum")).backward()
    return [p.grad for name, p in model.named_parameters() if "indexer" in name]


@on_ranks
def sharded(policy: MixedPrecisionPolicy) -> float:
    mesh = cp_mesh()
    model = prepared(mesh)
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    wanted = sum_over_ranks(*trained(prepared(mesh), mesh))
    found = [2 * x.full_tensor() for x in trained(model, mesh)]  # type: ignore[attr-defined]
    return max(map(relative_error, found, wanted))


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.float32)])
def test_losses_come_from_blocks_that_fsdp_shards(ranks: Any, policy: MixedPrecisionPolicy) -> None:
    """FSDP2 makes dataclasses in the arguments of a block anew: with a policy all of them, without one those that hold
    tensors with gradients."""
    assert max(ranks(2, sharded, policy)) < 1e-4


@on_ranks
def warm_up(wrapper: str) -> float:
    """All but the indexers is frozen, and the model's loss is a part of what is differentiated."""
    mesh, models = cp_mesh(), [prepared(cp_mesh()) for _ in range(2)]
    for model in models:
        for name, p in model.named_parameters():
            p.requires_grad_("indexer" in name)
    wanted = sum_over_ranks(*trained(models[0], mesh, dense=True))
    if wrapper == "DDP":
        run: Any = DistributedDataParallel(models[1], find_unused_parameters=True)
    else:
        run = models[1]
        for unit in (*run.model.layers, run):
            fully_shard(unit, mesh=mesh)
    found = [2 * (x.full_tensor() if isinstance(x, DTensor) else x) for x in trained(run, mesh, dense=True)]
    return max(map(relative_error, found, wanted))


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_indexers_are_warmed_up_under_data_parallelism(ranks: Any, wrapper: str) -> None:
    """DDP takes parameters that the output does not depend on for unused, and FSDP2 gathers those of blocks whose
    output has a gradient."""
    assert max(ranks(2, warm_up, wrapper)) < 1e-4


@on_ranks
def with_shared_heads() -> float:
    """Two ranks of context parallelism, two of tensor parallelism."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    mesh, heads = world["cp"], world["tp"]
    with pytest.raises(ValueError, match=r"has 2 of 4 heads .* indexer_losses\(heads_mesh"):
        trained(prepared(mesh, heads), mesh)
    found, wanted = trained(prepared(mesh, heads), mesh, heads_mesh=heads), trained(prepared(mesh), mesh)
    return max(map(relative_error, found, wanted))


def test_heads_that_tensor_parallel_ranks_share(ranks: Any) -> None:
    assert max(ranks(4, with_shared_heads)) < 1e-4


@on_ranks
def compiled() -> str | float:
    """The error of a compiled layer: its text, or that of its results."""
    model = prepared(cp_mesh())
    model.model.layers[0].compile(backend="eager")
    try:
        found = trained(model, cp_mesh())
    except NotImplementedError as error:
        return str(error)
    return max(map(relative_error, found, trained(prepared(cp_mesh()), cp_mesh())))


def test_compiled_layers_are_refused_or_exact(ranks: Any) -> None:
    """Compiled code may lose what an indexer has scored. (With torch 2.11 such a layer runs eagerly.)"""
    for found in ranks(1, compiled):
        assert "runs compiled inside indexer_losses" in found if isinstance(found, str) else found < 1e-4

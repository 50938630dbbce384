"""Recipes for other libraries, as their pages in the documentation print them: outputs and gradients of one device."""

from __future__ import annotations

import copy
import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_models import SMALL, InDouble, make, prepare_batch, prepare_model, tokens
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import error_of, on_ranks
from tests.harness.recipes import gradient_error, recipe

# --------------------------------------------------------------------------- PEFT


def padded_batch() -> dict[str, Tensor]:
    ids, mask = tokens(21), torch.ones(2, 21, dtype=torch.int64)
    mask[1, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@on_ranks
def adapted(code: str) -> dict[str, float]:
    """Adapters whose two factors are random, so that all gradients show."""
    from peft import LoraConfig, get_peft_model

    found, batch, model = {}, padded_batch(), make("llama")
    code = code.replace("r=4", "r=4, init_lora_weights=False")
    first = re.sub(r"^(model = .*\n)(prepare_model.*\n)", r"\2\1", code, flags=re.M)
    assert first != code
    for order, used in (("as printed", code), ("prepared first", first)):
        torch.manual_seed(3)
        written = re.search(r"LoraConfig\(.*\)(?=\)\n)", used)
        assert written is not None
        oracle = get_peft_model(copy.deepcopy(model), eval(written[0], {"LoraConfig": LoraConfig}))
        with InDouble():
            want = oracle(**batch, use_cache=False).loss
            want.backward()
            torch.manual_seed(3)
            names = {"model": copy.deepcopy(model), "mesh": cp_mesh(), "batch": batch}
            exec(used, names)
        trained = [p for p in names["model"].parameters() if p.grad is not None]
        assert len(trained) == 12, "three layers with two factors, in two blocks"
        loss = names["loss"].detach().clone()
        dist.all_reduce(loss)
        found[order] = max(relative_error(loss, want.detach()), gradient_error(names["model"], oracle))
    return found


@on_ranks
def adapters_refused() -> list[str]:
    import peft
    from peft import LoraConfig, get_peft_model

    mesh, style = cp_mesh(), ContextParallel(ulysses_degree=1)
    task = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
    virtual = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    configs = [
        *(peft.PromptTuningConfig(**virtual), peft.PrefixTuningConfig(**virtual)),
        *(LoraConfig(**task, alora_invocation_tokens=[3, 4]), peft.AdaLoraConfig(**task, total_step=9, tinit=1)),
        *(peft.LilyConfig(**task, r=4), peft.ShadowConfig(task_type="CAUSAL_LM")),
        LoraConfig(**task, r=4, velora_config=peft.VeloraConfig(num_groups=8)),
    ]

    def run(config: Any, later: bool) -> None:
        model = prepare_model(make("llama").float(), mesh, style=style) if later else make("llama").float()
        model = get_peft_model(model, config)
        if not later:
            prepare_model(model, mesh, style=style)
        model(**prepare_batch(ContextParallelHandler(mesh, style), padded_batch()))

    found = [error_of(lambda config=config: run(config, False)) for config in configs]
    return [*found, error_of(lambda: run(peft.LilyConfig(**task, r=4), True))]


@pytest.mark.slow
def test_peft(ranks: Any) -> None:
    pytest.importorskip("peft")
    for found in ranks(2, adapted, recipe("peft")):
        assert max(found.values()) <= 1e-9, found
    for prompt, prefix, invoked, adaptive, *others in ranks(2, adapters_refused):
        assert re.match("ValueError: .* got 14 tokens, but prepare_batch gave 11 to this rank.*prompt tuning", prompt)
        assert re.match("NotImplementedError: .* got (cache|past_key_values), a DynamicCache", prefix), prefix
        assert "has an activated LoRA adapter" in invoked, invoked
        assert "has an AdaLoRA adapter" in adaptive, adaptive
        for name, text in zip(("Lily", "Shadow", "VeLoRA", "Lily"), others, strict=True):
            assert f"has a {name} adapter" in text, text


# --------------------------------------------------------------------------- TRL


def documents_dataset() -> Any:
    import datasets

    lengths = [17, 9, 20, 11, 30, 5, 12, 23, 26, 19, 8, 31]
    return datasets.Dataset.from_dict({"input_ids": [tokens(10 + n, 1)[0, :n].tolist() for n in lengths]})


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="<pad>", eos_token="<eos>"
    )


def packed_loss(model: Any, row: dict[str, list[int]]) -> Tensor:
    """The mean over a packed row, each document by itself."""
    total, count, start = torch.zeros(()), 0, 0
    for n in row["seq_lengths"]:
        ids = torch.tensor([row["input_ids"][start : start + n]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        total, count, start = total + F.cross_entropy(logits, ids[0, 1:], reduction="sum"), count + n - 1, start + n
    return total / count


@on_ranks
def packed_sft(code: str, directory: str, counted: bool) -> dict[str, float]:
    """Without ``counted`` Trainer does not count the labels of a step: the class of the model says so."""
    reset_accelerate()
    model, dataset = make("llama").float(), documents_dataset()
    oracle, model.accepts_loss_kwargs = copy.deepcopy(model), counted
    options = {
        **{"use_cpu": True, "bf16": False, "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant"},
        **{"max_grad_norm": 0.0, "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 1},
        **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "train_sampling_strategy": "sequential"},
        **{"per_device_eval_batch_size": 1},
    }
    names = {"model": model, "dataset": dataset, "tokenizer": tokenizer(), "output_dir": directory, "options": options}
    exec(code, names)
    trainer = names["trainer"]
    rows = list(trainer.train_dataset)
    assert trainer.args.packing and max(len(row["seq_lengths"]) for row in rows) > 1
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    counts = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    evaluation = trainer.evaluate(dataset)["eval_loss"]
    optimizer, found = torch.optim.SGD(oracle.parameters(), lr=0.05), {}
    for step, got in enumerate(losses):
        loss = packed_loss(oracle, rows[step])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = abs(got - loss.item())
    found["tokens"] = max(abs(n - sum(len(x["input_ids"]) for x in rows[: i + 1])) for i, n in enumerate(counts))
    with torch.no_grad():
        means = [packed_loss(oracle, row).item() for row in rows]
    found["evaluation"] = abs(evaluation - sum(means) / len(means))
    pairs = zip(model.parameters(), oracle.parameters(), strict=True)
    found["weights"] = max(relative_error(p.detach(), q.detach()) for p, q in pairs)
    return found


@on_ranks
def sft_refused(code: str, directory: str) -> list[str]:
    from transformers import MixtralConfig, MixtralForCausalLM

    routed = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2, router_aux_loss_coef=0.1))
    names = {"dataset": documents_dataset(), "tokenizer": tokenizer(), "output_dir": directory}
    names["options"] = {"use_cpu": True, "bf16": False, "report_to": []}
    found = []
    for option, model in (("compute_metrics=print", make("llama")), ("chunked_loss=True", None), ("", routed)):
        reset_accelerate()
        wrong = code.replace("style=style)", f"style=style, {option})")
        found.append(error_of(lambda x=wrong, m=model: exec(x, {**names, "model": m})))
    return found


@pytest.mark.slow
def test_trl(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    for counted in (True, False):
        for found in ranks(2, packed_sft, recipe("trl"), str(tmp_path), counted):
            assert max(found.values()) <= 2e-5, found
    for metrics, chunked, routers in ranks(2, sft_refused, recipe("trl"), str(tmp_path)):
        assert metrics.startswith("NotImplementedError: compute_metrics and router_aux_loss_coef"), metrics
        assert chunked.startswith("ValueError: chunked_loss=True with an SFTTrainer"), chunked
        assert routers.startswith("NotImplementedError: compute_metrics and router_aux_loss_coef"), routers


# --------------------------------------------------------------------------- accelerate


def reset_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def as_fsdp(accelerator: Any) -> None:
    """Configure FSDP2, which accelerate allows on accelerators only; its FSDP2 code itself runs anywhere."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator.state.fsdp_plugin, accelerator.state.distributed_type = plugin, "FSDP"


@on_ranks
def accelerated(code: str, fsdp: bool) -> float:
    reset_accelerate()
    model, world = make("llama").float(), dist.get_world_size()
    oracle, batch = copy.deepcopy(model), padded_batch()
    samples = [{name: x[i // 2 % 2] for name, x in batch.items()} for i in range(world)]
    if fsdp:
        code = code.replace("handler = enable", "as_fsdp(accelerator)\nhandler = enable")
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "loader": torch.utils.data.DataLoader(samples, batch_size=1),
        "world": world,
        "options": {"cpu": True},
        "as_fsdp": as_fsdp,
    }
    exec(code, names)
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.5)
    for step in range(2):
        at_once = torch.utils.data.default_collate(samples[step * world // 2 : (step + 1) * world // 2])
        oracle(**at_once, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = names["accelerator"].unwrap_model(names["model"]).parameters()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in trained]
    return max(relative_error(p.detach(), q.detach()) for p, q in zip(whole, oracle.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "fsdp"), [(2, False), (4, True)])
def test_accelerate(ranks: Any, world: int, fsdp: bool) -> None:
    pytest.importorskip("accelerate")
    assert max(ranks(world, accelerated, recipe("accelerate"), fsdp)) <= 2e-5


# --------------------------------------------------------------------------- torchtitan


def plain_inner_attention(visible: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Inner attention of torchtitan 0.3.0, ``[B, L, H, D]``, on one device in plain math."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return plain_attention(q, k, v, visible=visible, scale=options["scale"]).transpose(1, 2)


@on_ranks
def titan(code: str) -> dict[str, float]:
    """A step of torchtitan's Llama, parallelized by its own function, and the same on one device."""
    import torchtitan.distributed.parallel_dims as parallel_dims
    import torchtitan.models.llama3.parallelize as llama3
    from torch.nn.attention.flex_attention import and_masks, create_block_mask
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import (
        get_causal_mask_mod,
        get_efficient_causal_mask_mod_for_packed_document,
    )
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    torch.manual_seed(7)
    model = config.build()
    model.init_states()
    oracle = copy.deepcopy(model)
    text = torch.randint(2048, (2, 33), generator=torch.Generator().manual_seed(1))
    at = torch.stack([torch.arange(32), torch.cat([torch.arange(13), torch.arange(19)])])
    numbers = (at == 0).cumsum(1)  # of documents
    visible = (numbers[:, :, None] == numbers[:, None]) & torch.ones(32, 32, dtype=torch.bool).tril()
    for layer in oracle.layers.values():
        layer.attention.inner_attention.forward = partial(plain_inner_attention, visible[:, None])
    want = F.cross_entropy(oracle(text[:, :-1], at).flatten(0, 1), text[:, 1:].flatten())
    want.backward()

    sys.modules.setdefault("torchtitan.trainer", types.ModuleType("trainer"))  # it imports loggers and data loaders
    own = llama3.apply_cp_to_forward
    parallel_dims.device_type = "cpu"  # it takes "cuda" where there is no accelerator
    try:
        names: dict[str, Any] = {}
        exec(code, names)
        parallelism = ParallelismConfig(context_parallel_degree=2, spmd_backend="partial_dtensor")
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        arguments = {"training": TrainingConfig(mixed_precision_param="float32"), "parallelism": parallelism}
        arguments |= {"compile_config": CompileConfig(enable=False), "ac_config": None, "dump_folder": ""}
        llama3.parallelize_llama(model, parallel_dims=dims, **arguments)
    finally:
        llama3.apply_cp_to_forward = own
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that also divides
    split = partial(names["trainer"].prepare_context_parallel_input, cp_mesh=dims.get_mesh("cp"), device="cpu")
    mods = get_causal_mask_mod(), get_efficient_causal_mask_mod_for_packed_document(at)
    masks = create_block_mask(and_masks(*mods), 2, None, 32, 32, device="cpu")  # the model's own function compiles it
    inputs, labels, more = split(text[:, :-1], text[:, 1:], {"positions": at, "attention_masks": masks})
    loss = F.cross_entropy(model(inputs, **more).flatten(0, 1), labels.flatten(), reduction="sum") / text[:, 1:].numel()
    loss.backward()  # torchtitan's FSDP sums gradients
    total = loss.detach().clone()
    dist.all_reduce(total)
    found = {"loss": relative_error(total, want.detach())}
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        found[name] = relative_error(p.grad.full_tensor(), q.grad)
    mismatch = error_of(lambda: split(text[:, :-1], text[:, 1:], {"positions": at}, load_balancer_type=None))
    assert mismatch.startswith("ValueError: context_parallel_load_balancer=None"), mismatch
    half = create_block_mask(and_masks(get_causal_mask_mod()), 2, None, 16, 16, device="cpu")
    inner, q = next(iter(model.layers.values())).attention.inner_attention, torch.randn(2, 16, 16, 16)
    for wrong, kind in ((None, "TypeError"), (half, "ValueError")):
        message = error_of(lambda x=wrong: inner(q, q, q, attention_masks=x))
        assert message.startswith(kind), message
    return found


@pytest.mark.slow
def test_torchtitan(ranks: Any) -> None:
    pytest.importorskip("torchtitan")
    for found in ranks(2, titan, recipe("torchtitan")):
        assert max(found.values()) <= 2e-5, found

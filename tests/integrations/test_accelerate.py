"""accelerate and transformers.Trainer under context parallelism: losses and gradients of one device."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_cp import ContextParallel
from tests.harness.hf_models import SMALL, make, prepare_batch, tokens
from tests.harness.ranks import on_ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")


def accelerator_of(**sizes: int) -> Any:
    """An accelerator on the ranks of this job; without sizes they come from the environment."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from hyper_cp.integrations.accelerate import ParallelismConfig

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))


def rows(dp: int, padded: bool) -> list[dict[str, Tensor]]:
    """One sequence per data-parallel rank, padded at the left."""
    found = []
    for row in range(dp):
        ids, mask = tokens(24 + row, 1)[:, :24], torch.ones(1, 24, dtype=torch.int64)
        mask[:, : 5 * padded + row] = 0
        labels = ids.masked_fill(mask == 0, -100)
        shift = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels, "shift_labels": shift})
    return found


def one_device(model: Any, batches: list[dict[str, Tensor]], count: int) -> tuple[float, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    loss = sum(model(**batch, num_items_in_batch=count, use_cache=False).loss for batch in batches)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(((got[n] - w).abs().max() / w.abs().max().clamp(min=1e-3)).item() for n, w in want.items())


@on_ranks
def accelerated(name: str, layout: str, how: str) -> float:
    """Run a step of dp x cp through ``maybe_context_parallel``, with gradients averaged by DDP or FSDP2."""
    from hyper_cp.integrations.accelerate import enable

    world = dist.get_world_size()
    if how == "environment":
        os.environ.update(PARALLELISM_CONFIG_CP_SIZE="2", PARALLELISM_CONFIG_DP_SHARD_SIZE=str(world // 2))
    try:
        accelerator = accelerator_of(**({} if how == "environment" else {"cp_size": 2, "dp_shard_size": world // 2}))
    finally:
        for key in ("CP", "DP_SHARD"):
            os.environ.pop(f"PARALLELISM_CONFIG_{key}_SIZE", None)
    model = make(name).float()
    batches = rows(world // 2, padded=True)
    count = sum(int((b["shift_labels"] != -100).sum()) for b in batches)
    want = one_device(model, batches, count)
    if how == "fsdp":  # accelerate allows FSDP on accelerators only; its FSDP2 code itself runs anywhere
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = "FSDP"
    enable(accelerator, style=ContextParallel(ulysses_degree=1, kv_exchange="ring", layout=layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made, optimizer = accelerator.prepare(model, optimizer)
    assert (how == "fsdp") == all(isinstance(p, DTensor) for p in made.parameters())
    samples = [{key: x[0] for key, x in batch.items()} for batch in batches]
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(samples, batch_size=1))
    (batch,) = list(loader)
    before = {key: x.clone() for key, x in batch.items()}
    kept = {batch["labels"]}
    with accelerator.maybe_context_parallel():  # a block without buffers is allowed
        pass
    with accelerator.maybe_context_parallel(
        buffers=list(batch.values()), buffer_seq_dims=[1] * 4, no_restore_buffers=kept
    ):
        assert batch["input_ids"].shape == (1, 12)
        loss = made(**batch, num_items_in_batch=count).loss
        accelerator.backward(loss * world)
    assert all(torch.equal(batch[key], x) for key, x in before.items() if key != "labels")
    assert batch["labels"].shape == (1, 12)
    total = loss.detach().clone()
    dist.all_reduce(total)
    grads = {}
    for key, p in accelerator.unwrap_model(made).named_parameters():
        grad = p.grad
        grads[key] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return max(abs(total.item() - want[0]), difference(grads, want[1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "how", "world"),
    [
        ("llama", "head_tail", "ddp", 2),
        ("gemma3", "contiguous", "ddp", 4),
        ("llama", "contiguous", "environment", 4),
        ("qwen3", "head_tail", "fsdp", 4),
    ],
)
def test_accelerate(ranks: Any, name: str, layout: str, how: str, world: int) -> None:
    assert max(ranks(world, accelerated, name, layout, how)) <= 2e-5


@on_ranks
def accumulated_twice(sync: bool, number: int = 4) -> tuple[list[bool], str]:
    """Return where ``accelerator.accumulate`` synchronises, of micro-batches that are read ahead, and the error."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import GradientAccumulationPlugin

    from hyper_cp.integrations.accelerate import ParallelismConfig, enable

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=sync)
    config = ParallelismConfig(cp_size=dist.get_world_size())
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, parallelism_config=config)
    handler = enable(accelerator, style=ContextParallel(ulysses_degree=1, kv_exchange="ring"))
    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(number)]
    loader, found = accelerator.prepare_data_loader(torch.utils.data.DataLoader(samples)), []
    try:
        for _ in handler.loader(loader, shift_labels=True, accumulate=2):
            with accelerator.accumulate():
                found.append(accelerator.sync_gradients)
    except ValueError as error:
        return found, str(error)
    return found, ""


def test_a_loader_that_reads_ahead_of_accumulate(ranks: Any) -> None:
    """Before, it synchronised and stepped after both micro-batches of the last group."""
    for found, error in ranks(2, accumulated_twice, True):
        assert not found and "sync_with_dataloader=False" in error
    assert ranks(2, accumulated_twice, False) == [([False, True, False, True], "")] * 2
    for found, error in ranks(2, accumulated_twice, False, 5):  # it would step in the middle of the next epoch's group
        assert found == [False, True, False, True]
        assert error.startswith("batches ended after 1 of 2 micro-batches, and this loader belongs to an Accelerator")


@on_ranks
def accelerated_on_gpus(fsdp_version: int) -> tuple[float, str]:
    """A step of DDP where accelerate sees several GPUs, which it asks for FSDP2; the tensors are on the CPU."""
    from unittest import mock

    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from hyper_cp.integrations.accelerate import ParallelismConfig, enable

    world = dist.get_world_size()
    model, batches = make("llama").float(), rows(1, padded=True)
    count = int((batches[0]["shift_labels"] != -100).sum())
    want = one_device(model, batches, count)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    config = ParallelismConfig(cp_size=world)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp_version) if fsdp_version else None
    try:
        with mock.patch.dict(os.environ, {"ACCELERATE_BYPASS_DEVICE_MAP": "true"}):  # DDP of a module on the CPU
            accelerator = Accelerator(parallelism_config=config, fsdp_plugin=plugin)
            if fsdp_version:
                return 0.0, f"{accelerator.distributed_type} {accelerator.is_fsdp2}"
            handler = enable(accelerator, style=ContextParallel(ulysses_degree=1, kv_exchange="ring"))
            made = accelerator.prepare(model)
        local = prepare_batch(handler, {key: x for key, x in batches[0].items() if key != "shift_labels"})
        loss = made(**{**local, "num_items_in_batch": count}).loss
        accelerator.backward(loss * world)
        grads = {name: p.grad for name, p in accelerator.unwrap_model(made).named_parameters()}
        return difference(grads, want[1]), type(made).__name__
    except ValueError as error:
        return 0.0, str(error)
    finally:
        AcceleratorState._reset_state(True)


def test_ddp_on_several_gpus(ranks: Any) -> None:
    """Without FSDP2 accelerate refused ``cp_size`` on GPUs, as its own context parallelism needs it."""
    for error, made in ranks(2, accelerated_on_gpus, 0):
        assert error <= 2e-5 and made == "DistributedDataParallel", made
    assert ranks(2, accelerated_on_gpus, 2) == [(0.0, "DistributedType.FSDP True")] * 2
    assert all("Set fsdp_version=2" in text for _, text in ranks(2, accelerated_on_gpus, 1))


@on_ranks
def accelerated_state(directory: str, first: int, last: int) -> float:
    """Steps ``first`` to ``last`` with accelerate on one cp mesh of all ranks, from a saved state and to one: the error
    of the weights against one device."""
    from hyper_cp.integrations.accelerate import enable

    world = dist.get_world_size()
    accelerator = accelerator_of(cp_size=world)
    model, oracle = make("llama").float(), make("llama").float()
    handler = enable(accelerator, style=ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail"))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, oracle)]
    made, optimizer = accelerator.prepare(model, optimizers[0])
    if first:
        accelerator.load_state(directory)
    for step in range(last):
        (batch,) = rows(1, padded=step == 0)
        count = int((batch["shift_labels"] != -100).sum())
        oracle(**batch, num_items_in_batch=count, use_cache=False).loss.backward()
        if step >= first:
            local = prepare_batch(handler, {key: x for key, x in batch.items() if key != "shift_labels"})
            accelerator.backward(made(**local | {"num_items_in_batch": count}).loss * world)
            optimizer.step()
            optimizer.zero_grad()
        optimizers[1].step()
        optimizers[1].zero_grad()
    accelerator.save_state(directory)
    got = {name: p.detach() for name, p in accelerator.unwrap_model(made).named_parameters()}
    return difference(got, {name: p.detach() for name, p in oracle.named_parameters()})


@pytest.mark.slow
def test_accelerate_saves_and_resumes_at_another_degree(ranks: Any, tmp_path: Any) -> None:
    assert max(ranks(4, accelerated_state, str(tmp_path), 0, 1)) <= 2e-5
    assert max(ranks(2, accelerated_state, str(tmp_path), 1, 2)) <= 2e-5


@on_ranks
def scheduled(cp: int) -> list[list[float]]:
    """Learning rates of two data-parallel ranks, in accumulations of two micro-batches: of a schedule, and of one that
    ends."""
    from hyper_cp.integrations.accelerate import enable

    accelerator = accelerator_of(cp_size=cp, dp_shard_size=2)
    accelerator.gradient_accumulation_steps = 2
    if cp > 1:
        enable(accelerator, style=ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail"))
    found = []
    for kind, options in (("StepLR", {"step_size": 1}), ("OneCycleLR", {"max_lr": 1.0, "total_steps": 12})):
        weight = torch.nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([weight], lr=1.0)
        optimizer, scheduler = accelerator.prepare(inner, getattr(torch.optim.lr_scheduler, kind)(inner, **options))
        found.append([])
        for _ in range(8):
            with accelerator.accumulate():
                weight.grad = torch.ones(2)
                optimizer.step()
                scheduler.step()
            found[-1].append(scheduler.get_last_lr()[0])
    return found


def test_a_schedule_counts_data_parallel_ranks(ranks: Any) -> None:
    want = ranks(2, scheduled, 1)[0]
    assert want[0][:3] == pytest.approx([1.0, 0.01, 0.01]) and len(set(want[1])) > 3
    assert ranks(4, scheduled, 2) == [want] * 4


# --------------------------------------------------------------------------- Trainer


def samples(count: int) -> list[dict[str, Tensor]]:
    """Sequences of 21 tokens; every other one ends in padding of another length."""
    found = []
    for row in range(count):
        ids, mask = tokens(100 + row, 1)[0, :21], torch.ones(21, dtype=torch.int64)
        mask[21 - 3 * (row % 2) * (1 + row % 3) :] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def arguments_of(directory: str, **changes: Any) -> Any:
    """Arguments of a trainer of two steps of plain SGD on the CPU."""
    from transformers import TrainingArguments

    options: dict[str, Any] = {
        **{"use_cpu": True, "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_steps": 2},
        **{"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_grad_norm": 0.0},
        **{"train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no"},
        **{"report_to": [], "disable_tqdm": True},
    }
    return TrainingArguments(directory, **options | changes)


@on_ranks
def trained(cp: int, layout: str, directory: str, chunked_loss: bool = False) -> dict[str, float]:
    """Train two steps and evaluate seven sequences, two a rank, so that the last batch is not full. With a chunked
    loss there are no predictions."""
    from hyper_cp.hf import ParallelismConfig, Trainer

    accelerator_of(cp_size=cp, dp_shard_size=dist.get_world_size() // cp).state._reset_state(True)
    dp = dist.get_world_size() // cp
    train, evaluation, model = samples(4 * dp), samples(7), make("llama").float()
    oracle = copy.deepcopy(model)
    degrees = ParallelismConfig(cp_size=cp, dp_shard_size=dp)
    arguments = arguments_of(directory, parallelism_config=degrees, prediction_loss_only=chunked_loss)
    seen: dict[str, Tensor] = {}

    def metrics(found: Any) -> dict[str, float]:
        seen["logits"], seen["labels"] = torch.as_tensor(found.predictions), torch.as_tensor(found.label_ids)
        return {}

    style = ContextParallel(ulysses_degree=1, layout=layout)
    own: dict[str, Any] = {"style": style, "chunked_loss": chunked_loss}
    trainer = Trainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        compute_metrics=None if chunked_loss else metrics,
        **own,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metric = trainer.evaluate()["eval_loss"]
    unlabelled = [{key: x for key, x in sample.items() if key != "labels"} for sample in evaluation]
    predicted = None if chunked_loss else torch.as_tensor(trainer.predict(unlabelled).predictions)

    found = {"losses": 0.0}
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.05)
    for step, got in enumerate(losses):
        batch = torch.utils.data.default_collate(train[2 * dp * step : 2 * dp * (step + 1)])
        loss = oracle(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"] = max(found["losses"], abs(got - loss.item()))
    assert len(losses) == 2
    wants = dict(oracle.named_parameters())
    found["parameters"] = difference({n: p.detach() for n, p in model.named_parameters()}, wants)
    with torch.no_grad():
        whole = torch.utils.data.default_collate(evaluation)
        logits = oracle(**whole, use_cache=False).logits
        if dp == 1:  # one device, too, weights the means of its batches by their sequences
            chunks = [torch.utils.data.default_collate(evaluation[i : i + 2]) for i in range(0, 7, 2)]
            means = [oracle(**chunk, use_cache=False).loss.item() for chunk in chunks]
            found["evaluation"] = abs(metric - (2 * sum(means[:3]) + means[3]) / 7)
    if predicted is None:
        return found
    assert seen["logits"].shape == logits.shape and torch.equal(seen["labels"], whole["labels"])
    shown = whole["attention_mask"].bool()
    found["logits"] = (seen["logits"] - logits)[shown].abs().max().item()
    found["predictions"] = (predicted - logits)[shown].abs().max().item()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cp", "layout", "world", "chunked_loss"),
    [
        (2, "head_tail", 2, False),
        (2, "per_document", 2, False),
        (2, "contiguous", 4, False),
        (2, "head_tail", 2, True),
        (1, "head_tail", 2, False),
    ],
)
def test_trainer(ranks: Any, tmp_path: Any, cp: int, layout: str, world: int, chunked_loss: bool) -> None:
    for found in ranks(world, trained, cp, layout, str(tmp_path), chunked_loss):
        assert max(found.values()) <= 2e-5, found


@on_ranks
def saved_and_resumed(cp: int, directory: str, last: int) -> float:
    """Error of the losses of a run up to step ``last`` that begins where the one before has saved."""
    from hyper_cp.hf import ParallelismConfig, Trainer

    accelerator_of(**({"cp_size": cp} if cp > 1 else {})).state._reset_state(True)
    model, oracle = make("llama").float(), make("llama").float()
    changes = {"optim": "adamw_torch", "learning_rate": 0.01, "max_steps": last, "train_sampling_strategy": "random"}
    changes |= {"max_grad_norm": 1.0, "save_strategy": "steps", "save_steps": 2}
    arguments = arguments_of(directory, parallelism_config=ParallelismConfig(cp_size=cp), **changes)
    style = ContextParallel(ulysses_degree=1, layout="head_tail")
    trainer = Trainer(model, arguments, train_dataset=samples(8), style=style)  # in a random order
    trainer.train(resume_from_checkpoint=last > 2)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    order = list(torch.utils.data.RandomSampler(range(8), generator=torch.Generator().manual_seed(arguments.seed)))
    optimizer, want = torch.optim.AdamW(oracle.parameters(), lr=0.01, weight_decay=0.0), []
    for step in range(last):
        batch = torch.utils.data.default_collate([samples(8)[i] for i in order[2 * step : 2 * step + 2]])
        loss = oracle(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    return max(abs(a - b) for a, b in zip(losses, want, strict=True))


@pytest.mark.slow
def test_trainer_saves_and_resumes_at_another_degree(ranks: Any, tmp_path: Any) -> None:
    assert max(ranks(2, saved_and_resumed, 2, str(tmp_path), 2)) <= 2e-5
    assert max(ranks(1, saved_and_resumed, 1, str(tmp_path), 3)) <= 2e-5


@on_ranks
def routed(option: str, directory: str) -> dict[str, float]:
    """Train two steps of two batches, with a router loss, where Trainer does not multiply losses by the ranks."""
    from transformers import MixtralConfig, MixtralForCausalLM, Trainer

    from hyper_cp.integrations.accelerate import ParallelismConfig
    from hyper_cp.integrations.trainer import ContextParallelTrainer

    class Both(ContextParallelTrainer, Trainer):
        pass

    accelerator_of(cp_size=2).state._reset_state(True)
    torch.manual_seed(7)
    moe = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 3.0}
    model = MixtralForCausalLM(MixtralConfig(**SMALL, **moe, attn_implementation="sdpa"))
    counted, train = option != "accepts_loss_kwargs", samples(8)
    model.accepts_loss_kwargs, oracle = counted, copy.deepcopy(model)
    arguments = arguments_of(
        directory,
        gradient_accumulation_steps=2,
        average_tokens_across_devices=option != "average_tokens_across_devices",
        parallelism_config=ParallelismConfig(cp_size=2),
        prediction_loss_only=True,
    )
    style = ContextParallel(ulysses_degree=1, layout="head_tail")
    trainer = Both(model, arguments, train_dataset=train, eval_dataset=train[:2], style=style)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {"steps": abs(len(losses) - 2.0)}
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.05)
    for step, got in enumerate(losses):
        batches = [torch.utils.data.default_collate(train[i : i + 2]) for i in (4 * step, 4 * step + 2)]
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        number = {"num_items_in_batch": count} if counted else {}
        loss = sum(oracle(**batch, **number, use_cache=False).loss for batch in batches) / (1 if counted else 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = abs(got - loss.item()) / loss.item()
    found["parameters"] = difference(
        {n: p.detach() for n, p in model.named_parameters()}, dict(oracle.named_parameters())
    )
    whole = torch.utils.data.default_collate(train[:2])
    found["evaluation"] = abs(trainer.evaluate()["eval_loss"] - oracle(**whole, use_cache=False).loss.item())
    return found


@pytest.mark.parametrize("option", ["none", "average_tokens_across_devices", "accepts_loss_kwargs"])
def test_losses_that_trainer_does_not_scale(ranks: Any, tmp_path: Any, option: str) -> None:
    """``accepts_loss_kwargs=False`` is what most models of images and text have."""
    for found in ranks(2, routed, option, str(tmp_path)):
        assert max(found.values()) <= 2e-5, found


# --------------------------------------------------------------------------- errors


class Stream(torch.utils.data.IterableDataset[Tensor]):
    """A dataset that accelerate reads on one process."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(1, 8)])


@on_ranks
def refused(case: str, directory: str) -> None:
    from torch import nn
    from torch.distributed.tensor.parallel import parallelize_module
    from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

    from hyper_cp.integrations.accelerate import ParallelismConfig, enable
    from hyper_cp.integrations.trainer import ContextParallelTrainer

    style = ContextParallel(ulysses_degree=1)
    if case == "no cp":
        enable(accelerator_of(cp_size=1, dp_shard_size=2), style=style)
    accelerator = accelerator_of(cp_size=2)
    x = torch.zeros(1, 8)
    if case.startswith("prepared"):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        accelerator.prepare(optimizer, torch.utils.data.DataLoader(samples(2)))  # these are no others
        made: Any = model if "model" in case else torch.optim.lr_scheduler.StepLR(optimizer, 1)
        accelerator.prepare(made if "loader" not in case else torch.utils.data.DataLoader(Stream()))
    enable(accelerator, style=style)
    if case == "not styled":
        accelerator.prepare(nn.Linear(2, 2))
    elif case == "dimensions":
        with accelerator.maybe_context_parallel(buffers=[x], buffer_seq_dims=[]):
            pass
    elif case == "layout":
        module = nn.MultiheadAttention(8, 2, batch_first=True)
        other = ContextParallel(qkv_indices=None, ulysses_degree=1, layout="head_tail")
        accelerator.prepare(parallelize_module(module, accelerator.torch_device_mesh["cp"], other))
    elif case == "dispatched":
        accelerator.prepare(torch.utils.data.DataLoader(Stream()))
    elif case == "own loss":

        class Pairs(Trainer):
            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                """As trainers of preferences do."""

        class Mixed(ContextParallelTrainer, Pairs):
            pass

        Mixed(make("llama").float(), style=style)
    elif case == "gradient":
        with accelerator.maybe_context_parallel(buffers=[x.requires_grad_()], buffer_seq_dims=[1]):
            pass
    else:
        accelerator.state._reset_state(True)

        class Both(ContextParallelTrainer, Trainer):
            pass

        config, options = ParallelismConfig(cp_size=2), {"use_cpu": True, "report_to": [], "disable_tqdm": True}
        if case == "noise":
            options["neftune_noise_alpha"] = 5.0
        if case == "smoothing":
            options["label_smoothing_factor"] = 0.1
        model = make("llama").float()
        if case == "outputs":  # of no token: a loss of the routers
            small = {**SMALL, "num_local_experts": 2, "output_router_logits": True}
            model = MixtralForCausalLM(MixtralConfig(**small, attn_implementation="sdpa"))
        arguments = TrainingArguments(directory, parallelism_config=config, **options)
        Both(model, arguments, style=style).predict(samples(2))


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("no cp", "ValueError", "cp_size=1.*to TrainingArguments.*PARALLELISM_CONFIG_CP_SIZE=n"),
        ("size", "ValueError", r"has 2 ranks \(cp_size=2 times.*4 processes"),
        ("not styled", "ValueError", "applied to 0 modules of Linear"),
        ("dimensions", "ValueError", "1 buffers and 0 buffer_seq_dims"),
        ("gradient", "ValueError", "requires a gradient.*handler.dispatch"),
        ("smoothing", "NotImplementedError", "label_smoothing_factor"),
        ("noise", "NotImplementedError", "neftune_noise_alpha=5.0"),
        ("dispatched", "ValueError", r"ranks of a cp mesh would get other rows.*dispatch_batches=False\)"),
        ("prepared model", "ValueError", "has prepared Linear before enable was called.*before accelerator.prepare"),
        ("prepared scheduler", "ValueError", "has prepared AcceleratedScheduler before enable was called"),
        ("prepared loader", "ValueError", "has prepared DataLoaderDispatcher before enable was called"),
        ("own loss", "NotImplementedError", "Pairs computes its loss by itself"),
        ("layout", "ValueError", "runs with layout='head_tail', but enable .* layout='contiguous'"),
        ("outputs", "NotImplementedError", r"output of shape \(\) from MixtralForCausalLM.*ignore_keys"),
    ],
)
def test_what_cannot_be_honoured_is_refused(ranks: Any, tmp_path: Any, case: str, error: str, words: str) -> None:
    ranks.raises(4 if case == "size" else 2, error, words, refused, case, str(tmp_path))

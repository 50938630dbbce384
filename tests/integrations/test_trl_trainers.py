"""TRL's trainers of preferences, rewards and rollouts: some steps against TRL itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hyper_cp import ContextParallel
from hyper_cp.ops import decode_attention
from tests.harness.hf_models import SMALL, InDouble, make, tokens
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks
from tests.integrations.test_accelerate import samples
from tests.integrations.test_recipes import as_fsdp, reset_accelerate

OPTIONS: dict[str, Any] = {
    **{"use_cpu": True, "bf16": False, "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant"},
    **{
        "activation_checkpointing": False,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    },
}
OF_LABELS = ("accuracy", "mean_token_accuracy", "rewards/chosen", "logps/rejected", "logits/chosen")
GROUPS: dict[str, Any] = {
    **{"num_generations": 2, "beta": 0.04, "max_completion_length": 7, "gradient_accumulation_steps": 2},
}


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<eos>": 1} | {f"w{n}": n for n in range(2, SMALL["vocab_size"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def text(seed: int, length: int) -> str:
    return " ".join(f"w{max(2, n)}" for n in tokens(seed, 1)[0, :length].tolist())


def dataset(*columns: str) -> Any:
    """Twelve rows: prompts of 2 to 6 tokens, completions of 1 to 19."""
    import datasets

    rows: list[dict[str, Any]] = []
    for n in range(12):
        row: dict[str, Any] = {"prompt": text(30 + n, 2 + n % 5), "label": n % 3 > 0}
        row |= {name: " " + text(50 + 7 * n + i, 1 + (5 * n + 3 * i) % 19) for i, name in enumerate(columns)}
        rows.append({name: row[name] for name in ("prompt", "label", *columns) if name != "label" or len(columns) == 1})
    return datasets.Dataset.from_list(rows)


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Given completions: those of the first cp rank count, and other ranks have others."""
    to_ids = trainer.processing_class
    mine = dist.get_rank() % 2 if dist.is_initialized() else 0
    ids = [to_ids(x)["input_ids"] for x in prompts]
    seeds = [sum(x) + 3 * (n % 2) for n, x in enumerate(ids)]  # groups of two
    done = [[*tokens(40 + seed, 1)[0, : 2 + seed % 5 - mine].tolist(), 1] for seed in seeds]
    return {"prompt_ids": ids, "completion_ids": done, "logprobs": None}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    other = 0.5 * (dist.get_rank() % 2) if dist.is_initialized() else 0.0
    return [float(sum(ids) % 11) / len(ids) + other for ids in completion_ids]


class AsFSDP:
    """A trainer that shards parameters, which accelerate allows on accelerators only."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        as_fsdp(self.accelerator)  # type: ignore[attr-defined]
        self.is_fsdp_enabled = True


def build(kind: str, directory: str, way: str, rows: int, changes: Any = None, trained: Any = None, **more: Any) -> Any:
    """A trainer on ``rows`` rows of a rank: on one device, or under context parallelism on two ranks with DDP or FSDP2.

    ``changes`` are of its config, ``trained`` is its model, and ``more`` its further arguments.
    """
    import transformers
    import trl

    from hyper_cp import hf

    reset_accelerate()
    base, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    options = {**OPTIONS, "output_dir": directory, "per_device_train_batch_size": rows, "per_device_eval_batch_size": 4}
    given: dict[str, Any] = {"processing_class": tokenizer()}
    parallelism = None
    if way != "alone":
        cp = 1 if way == "one rank" else 2
        parallelism = hf.ParallelismConfig(cp_size=cp, dp_shard_size=dist.get_world_size() // cp)
        given["style"] = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail")
        base = getattr(hf, f"{kind}Trainer")
        if way == "fsdp":
            base = type("Mixed", (base.__bases__[0], AsFSDP, base.__bases__[1]), {})
        given |= {"split_cache": False} if way == "whole cache" else {}
    model, other = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64), make("llama")
    if kind == "Reward":
        torch.manual_seed(9)
        other_config = transformers.LlamaConfig(**{**SMALL, "num_labels": 1})
        model = transformers.LlamaForSequenceClassification(other_config).double()
        given |= {"train_dataset": dataset("chosen", "rejected"), "eval_dataset": dataset("chosen", "rejected")}
    elif kind == "DPO":
        with torch.no_grad():
            other.lm_head.weight.mul_(0.9)
        given |= {"train_dataset": dataset("chosen", "rejected"), "eval_dataset": dataset("chosen", "rejected")}
        given["ref_model"] = other
    elif kind == "KTO":
        with torch.no_grad():
            other.lm_head.weight.mul_(0.9)
        given |= {"train_dataset": dataset("completion"), "ref_model": other}
    else:
        options |= {**GROUPS, "model_init_kwargs": None}
        given |= {"train_dataset": dataset(), "reward_funcs": reward}
        if kind == "GRPO":
            given["rollout_func"] = rollouts
    made = config(**{**options, **(changes or {})})
    made.parallelism_config = parallelism  # afterwards: configs of GRPO and RLOO refuse it
    return base(model if trained is None else trained, args=made, **{**given, **more})


@contextmanager
def backward_in_double() -> Iterator[None]:
    """Modes end where autograd begins, and TRL's head adds its gradients up in float32."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def backward(ctx: Any, *grads: Any) -> Any:
        with InDouble():
            return own(ctx, *grads)

    own, ChunkedLogProbFunction.backward = ChunkedLogProbFunction.backward, staticmethod(backward)
    try:
        yield
    finally:
        ChunkedLogProbFunction.backward = staticmethod(own)


@on_ranks
def trained(kind: str, directory: str, way: str, rows: int, changes: Any = None) -> dict[str, Any]:
    """Weights, losses and an evaluation after two steps, or those of ``changes``."""
    from hyper_cp.integrations.huggingface import decoding

    more = {"compute_metrics": lambda x: {"mean": float(x.predictions.mean())}} if kind == "Reward" else {}
    trainer = build(kind, directory, way, rows, changes, **more)
    if way == "fsdp":
        as_fsdp(trainer.accelerator)
    with InDouble(), backward_in_double(), patch.object(decoding, "decode_attention", wraps=decode_attention) as split:
        trainer.train()
        measured = trainer.evaluate() if trainer.eval_dataset is not None else {}
    found: dict[str, Any] = {name: measured[name] for name in ("eval_loss", "eval_mean") if name in measured}
    logs = [x for x in trainer.state.log_history if "loss" in x]
    for name in ("loss", "grad_norm", "rewards/margins", "entropy", "kl", "num_tokens", "margin", "reward", *OF_LABELS):
        found[name] = [x[name] for x in logs if name in x]
    if kind in ("GRPO", "RLOO"):
        del found["num_tokens"]
    assert split.called == (kind == "RLOO" and way == "ddp")
    weights = list(trainer.model.parameters())
    assert all(isinstance(p, DTensor) == (way == "fsdp") for p in weights)
    return {"weights": [(p.full_tensor() if way == "fsdp" else p).detach() for p in weights], **found}


def check(got: dict[str, Any], want: dict[str, Any]) -> None:
    errors = list(map(relative_error, got["weights"], want["weights"]))
    assert max(errors) <= 1e-10, errors
    for name in got.keys() - {"weights"}:
        assert got[name] == pytest.approx(want[name], rel=2e-4, abs=1e-4), (name, got[name], want[name])


@pytest.mark.parametrize(("kind", "ways", "world"), [("GRPO", ["ddp"], 4), ("RLOO", ["ddp", "whole cache"], 2)])
def test_two_steps_of_rollouts(ranks: Any, tmp_path: Path, kind: str, ways: list[str], world: int) -> None:
    """Against one device."""
    pytest.importorskip("trl")
    make("llama").save_pretrained(tmp_path)
    (want,) = ranks(1, trained, kind, str(tmp_path), "alone", 2 * world // 2)  # two for each data-parallel rank
    assert max(map(relative_error, make("llama").parameters(), want["weights"])) > 1e-4
    for way in ways:
        for found in ranks(world, trained, kind, str(tmp_path), way, 2):
            check(found, want)


@on_ranks
def stages(directory: str, way: str) -> list[torch.Tensor]:
    """Weights after three trainers, one after the other, of one model."""
    import transformers

    from hyper_cp import hf

    one_step = {"max_steps": 1}
    first = build("DPO", directory, way, 3, one_step)
    with InDouble(), backward_in_double():
        first.train()
        reset_accelerate()
        options = transformers.TrainingArguments(**{**OPTIONS, **one_step, "output_dir": directory})
        options.parallelism_config = first.args.parallelism_config
        given = {"model": first.model, "args": options, "train_dataset": samples(8)}
        if way == "alone":
            transformers.Trainer(**given).train()
        else:
            hf.Trainer(**given, style=first.style).train()
        build("DPO", directory, way, 3, one_step, trained=first.model).train()
    return [p.detach() for p in first.model.parameters()]


def test_one_trainer_after_the_other_of_a_model(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    make("llama").save_pretrained(tmp_path)
    (want,) = ranks(1, stages, str(tmp_path), "alone")
    for found in ranks(2, stages, str(tmp_path), "ddp"):
        assert max(map(relative_error, found, want)) <= 1e-10


@pytest.mark.parametrize(("kind", "way"), [("DPO", "ddp"), ("Reward", "ddp"), ("KTO", "fsdp")])
def test_an_epoch_whose_last_batch_has_fewer_rows_than_ranks(ranks: Any, tmp_path: Path, kind: str, way: str) -> None:
    """Two of twelve rows are left for 2 dp x 2 cp ranks: the numbers of both data-parallel ranks count, as in TRL on
    two ranks."""
    pytest.importorskip("trl")
    make("llama").save_pretrained(tmp_path)
    epoch = {"max_steps": -1, "num_train_epochs": 1, "dataloader_drop_last": False}
    want, _ = ranks(2, trained, kind, str(tmp_path), "alone", 5, epoch)
    for found in ranks(4, trained, kind, str(tmp_path), way, 5, epoch):
        check(found, want)


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_on_one_rank_it_is_the_trainer_of_trl(ranks: Any, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("trl")
    make("llama").save_pretrained(tmp_path)
    found, want = (ranks(1, trained, kind, str(tmp_path), way, 2)[0] for way in ("one rank", "alone"))
    assert max(map(relative_error, found.pop("weights"), want.pop("weights"))) == 0.0
    assert found == want


@on_ranks
def refused(directory: str) -> list[str]:
    from trl.experimental.online_dpo import OnlineDPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    from hyper_cp.integrations.trl import ContextParallelTRL

    wrong: list[tuple[str, int, Any, Any]] = [
        ("DPO", 2, {"precompute_ref_log_probs": True}, {}),
        ("DPO", 2, {}, {"chunked_loss": True}),
        ("GRPO", 2, {"scale_rewards": "batch"}, {}),
        ("GRPO", 2, {"top_entropy_quantile": 0.5}, {}),
        ("GRPO", 3, {"gradient_accumulation_steps": 1}, {}),
        ("RLOO", 2, {"normalize_advantages": True}, {}),
    ]
    found = [error_of(lambda x=x: build(x[0], directory, "ddp", x[1], x[2], **x[3])) for x in wrong]
    mixed: list[Any] = [type("Mixed", (ContextParallelTRL, x), {}) for x in (ORPOTrainer, OnlineDPOTrainer)]
    return [*found, *(error_of(lambda x=x: x(style=ContextParallel())) for x in mixed)]


def test_refused(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    make("llama").save_pretrained(tmp_path)
    expected = [
        "NotImplementedError: precompute_ref_log_probs=True is not supported with ContextParallelTRL. .* 2 ranks hold",
        "ValueError: chunked_loss=True with a trainer of TRL",
        "NotImplementedError: scale_rewards='batch' is not supported",
        "NotImplementedError: top_entropy_quantile=0.5 is not supported",
        "ValueError: num_generations=2 does not divide the 3 rows that a rank generates for",
        "NotImplementedError: normalize_advantages=True is not supported",
        "NotImplementedError: ORPOTrainer computes its loss by itself.* This mixin runs: .*DPOTrainer, KTOTrainer",
        "NotImplementedError: OnlineDPOTrainer computes its loss by itself",
    ]
    for found in ranks(2, refused, str(tmp_path)):
        for text, pattern in zip(found, expected, strict=True):
            assert re.match(pattern, text), text


def test_methods_of_a_user_come_back() -> None:
    """Before, a block deleted what a user had put in the place of a method."""
    from hyper_cp.integrations.trl import _in_place_of

    owner, plain = SimpleNamespace(generate=len), AsFSDP()
    with _in_place_of(owner, "generate", max), _in_place_of(plain, "create_accelerator_and_postprocess", max):
        assert owner.generate is max is plain.create_accelerator_and_postprocess
    assert owner.generate is len and not vars(plain)


@on_ranks
def built_again(directory: str) -> tuple[str, bool]:
    """The error of TRL while an SFTTrainer is made, and the user's setting of packing after it."""
    import datasets
    import trl

    from hyper_cp import hf

    reset_accelerate()
    options = {**OPTIONS, "output_dir": directory, "packing": True, "max_length": 16}
    made = trl.SFTConfig(**options, eval_strategy="steps", parallelism_config=hf.ParallelismConfig(cp_size=2))
    rows = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in tokens(8, 4)])
    given = {"processing_class": tokenizer(), "style": ContextParallel(ulysses_degree=1, kv_exchange="ring")}
    error = error_of(lambda: hf.SFTTrainer(make("llama"), args=made, train_dataset=rows, **given))
    return error, made.packing


def test_an_error_leaves_the_arguments_of_a_user_as_they_were(ranks: Any, tmp_path: Path) -> None:
    """Before, the trainer that was made next with the same arguments packed nothing."""
    for error, packing in ranks(2, built_again, str(tmp_path)):
        assert "eval_dataset" in error and packing, error

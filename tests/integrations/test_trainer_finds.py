"""Trainer and eager models where a hunt found numbers that differed from one device without a word."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hyper_cp import ContextParallel
from tests.harness.hf_causal import CLASSES, MASKED, QUESTIONS
from tests.harness.hf_models import InDouble, gradients, make, tokens
from tests.harness.ranks import check_errors, error_of, errors_of, on_ranks, sum_over_ranks
from tests.integrations.test_accelerate import accelerator_of, samples

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
KEPT = (
    *("output_dir", "parallelism_config", "use_cpu", "optim", "learning_rate", "lr_scheduler_type", "max_steps"),
    *("max_grad_norm", "logging_steps", "save_strategy", "report_to", "disable_tqdm", "per_device_train_batch_size"),
    *("per_device_eval_batch_size", "train_sampling_strategy"),
)
STYLE = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail")


def arguments(directory: str, made: str = "TrainingArguments", **changes: Any) -> Any:
    import transformers

    from hyper_cp.hf import ParallelismConfig

    options: dict[str, Any] = {
        **{"use_cpu": True, "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "max_steps": 2},
        **{"max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True},
        **{"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "train_sampling_strategy": "sequential"},
    }
    sizes = {"cp_size": 2, "dp_shard_size": dist.get_world_size() // 2}
    accelerator_of(**sizes).state._reset_state(True)
    degrees = ParallelismConfig(**sizes)
    return getattr(transformers, made)(directory, parallelism_config=degrees, **options | changes)


def trained_alone(
    model: Any, smoothing: float = 0.0, of_loss: Callable[[Tensor], Tensor] = Tensor.clone
) -> list[float]:
    """Losses of two steps on one device, each the mean of its labels, or a function of it; the weights are changed in
    place."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        batch = torch.utils.data.default_collate(samples(4)[2 * step : 2 * step + 2])
        labels = batch.pop("labels")[:, 1:].flatten()
        with InDouble():
            logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = of_loss(torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def errors(trainer: Any, model: Any, want: list[float], oracle: Any) -> tuple[float, float]:
    got = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    pairs = zip(model.parameters(), oracle.parameters(), strict=True)
    weights = max(float((p - q).abs().max()) for p, q in pairs)
    return max(abs(x - y) for x, y in zip(got, want, strict=True)), weights


@on_ranks
def counted(directory: str) -> tuple[int, float, float]:
    """Tokens and operations of two steps of two rows, and the error of their mean loss, which is not logged before."""
    from transformers import Trainer as TrainerAlone

    from hyper_cp.hf import Trainer

    options = arguments(directory, include_num_input_tokens_seen="all", logging_steps=500)
    trainer = Trainer(make("llama"), options, train_dataset=samples(4), style=STYLE)
    got = trainer.train().training_loss
    operations = 2 * TrainerAlone.floating_point_ops(trainer, torch.utils.data.default_collate(samples(2)))
    wrong = abs(got - sum(trained_alone(make("llama"))) / 2)
    return int(trainer.state.num_input_tokens_seen), trainer.state.total_flos / operations, wrong


def test_tokens_operations_and_losses_are_counted_once(ranks: Any, tmp_path: Any) -> None:
    for tokens_seen, operations, wrong in ranks(2, counted, str(tmp_path)):
        assert tokens_seen == 4 * 21 and operations == pytest.approx(1, rel=1e-3) and wrong < 1e-5


@on_ranks
def evaluated_before(directory: str, way: str) -> tuple[float, float]:
    """A training after an evaluation, by the same trainer or by another one of the model."""
    from hyper_cp.hf import Trainer

    model, oracle = (make("llama", num_hidden_layers=1) for _ in range(2))
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"} if way == "compiled" else {}
    for _ in range(1 + (way == "twice")):
        options = arguments(directory, **compiled)
        trainer = Trainer(model, options, train_dataset=samples(4), eval_dataset=samples(2), style=STYLE)
        with InDouble():
            trainer.evaluate()
    with InDouble():
        trainer.train()
    return errors(trainer, model, trained_alone(oracle), oracle)


@pytest.mark.parametrize("way", ["twice", "compiled"])
def test_a_training_after_an_evaluation(ranks: Any, tmp_path: Any, way: str) -> None:
    for loss, weights in ranks(2, evaluated_before, str(tmp_path), way):
        assert loss < 1e-6 and weights < 1e-10


@on_ranks
def other_rows(directory: str, change: str) -> str:
    """The error of a training whose sampler draws other rows on each rank. An evaluation came first, so that its first
    batch is not the first one of the mesh."""
    from hyper_cp.hf import Trainer

    options = arguments(directory, train_sampling_strategy="random" if change == "seed" else change)
    trainer = Trainer(make("llama"), options, train_dataset=samples(12), eval_dataset=samples(2), style=STYLE)
    trainer.evaluate()
    if change == "seed":
        trainer.handler.seed_dropout(1)
    return error_of(trainer.train)


@pytest.mark.parametrize("change", ["seed", "batch_rebalance"])
def test_other_rows_after_an_evaluation_are_refused(ranks: Any, tmp_path: Any, change: str) -> None:
    for found in ranks(2, other_rows, str(tmp_path), change):
        assert "the first batch of an epoch" in found, found


@on_ranks
def made_by_trainer(directory: str) -> tuple[float, float]:
    from hyper_cp.hf import Trainer

    oracle = make("llama")
    trainer = Trainer(
        None, arguments(directory), model_init=lambda: make("llama"), train_dataset=samples(4), style=STYLE
    )
    with InDouble():
        trainer.train()
    return errors(trainer, trainer.model, trained_alone(oracle), oracle)


def test_a_model_that_trainer_makes_is_prepared(ranks: Any, tmp_path: Any) -> None:
    for loss, weights in ranks(2, made_by_trainer, str(tmp_path)):
        assert loss < 1e-6 and weights < 1e-10


@on_ranks
def evaluated(directory: str) -> float:
    """Error of the evaluation loss of Seq2SeqTrainer, which counts the last batch as a full one."""
    from transformers import Seq2SeqTrainer

    from hyper_cp.integrations.trainer import ContextParallelTrainer

    class Both(ContextParallelTrainer, Seq2SeqTrainer):
        pass

    model, oracle = make("llama"), make("llama")
    trainer = Both(model, arguments(directory, "Seq2SeqTrainingArguments"), eval_dataset=samples(5), style=STYLE)
    got = trainer.evaluate()["eval_loss"]
    chunks = [torch.utils.data.default_collate(samples(5)[i : i + 2]) for i in range(0, 5, 2)]
    with torch.no_grad():
        return abs(got - sum(oracle(**chunk, use_cache=False).loss.item() for chunk in chunks) / 3)


def test_seq2seq_trainer_evaluates_as_on_one_device(ranks: Any, tmp_path: Any) -> None:
    assert max(ranks(2, evaluated, str(tmp_path))) < 1e-6


@on_ranks
def of_two_sequences(directory: str) -> None:
    from hyper_cp.hf import Trainer
    from tests.harness.hf_causal import tiny_causal
    from tests.integrations.test_every_other_model import SEQ2SEQ

    Trainer(tiny_causal("t5", SEQ2SEQ), arguments(directory), style=STYLE)


def test_encoder_decoders_are_refused(ranks: Any, tmp_path: Any) -> None:
    """They take the whole batch: one sequence would be split for both."""
    ranks.raises(
        2, NotImplementedError, "is an encoder-decoder, which splits its source", of_two_sequences, str(tmp_path)
    )


class Wrapped(torch.nn.Module):
    """A model of transformers in a module that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make("llama")
        self.config = self.model.config

    def get_decoder(self) -> Any:
        return self.model.get_decoder()


@on_ranks
def wrapped(directory: str) -> dict[str, str]:
    from hyper_cp.hf import Trainer, prepare_model

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    said = (
        "TypeError: model is a Wrapped. Its class must be one of transformers, or extend one.*extend the class of the"
    )
    return errors_of(
        {
            f"{said}(?# of Trainer)": lambda: Trainer(Wrapped(), arguments(directory), style=STYLE),
            said: lambda: prepare_model(Wrapped(), mesh, style=STYLE),
        }
    )


def test_modules_around_models_are_refused(ranks: Any, tmp_path: Any) -> None:
    check_errors(ranks(2, wrapped, str(tmp_path)))


@on_ranks
def with_values(directory: str) -> tuple[float, float]:
    """Errors of losses and weights of a model with a second head, as the error advises, and a loss that reads it."""
    from transformers import LlamaForCausalLM

    from hyper_cp.hf import Trainer

    class Mine(LlamaForCausalLM):
        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any
        ) -> Any:  # Trainer keeps the columns of these names
            output = super().forward(input_ids, attention_mask, labels=labels, output_hidden_states=True, **kwargs)
            return {"logits": output.logits, "scored": self.scores(output.hidden_states[-1])[..., 0]}

    class Values(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            _, labels, _ = (inputs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
            output = model(**inputs)
            loss = self.handler.mean_loss(output["logits"], labels)
            loss = loss + self.handler.mean_loss(output["scored"].square(), labels)
            return (loss, output) if return_outputs else loss

    def made() -> Any:
        model = Mine(make("llama").config)
        model.scores = torch.nn.Linear(model.config.hidden_size, 1)
        model = model.double()
        generator = torch.Generator().manual_seed(3)
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) / 4
        return model

    model, oracle, want = made(), made(), []
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.05)
    with InDouble():
        trainer = Values(model, arguments(directory), train_dataset=samples(4), style=STYLE)
        trainer.train()
        for step in range(2):
            batch = torch.utils.data.default_collate(samples(4)[2 * step : 2 * step + 2])
            labels = batch.pop("labels")[:, 1:]
            output, mask = oracle(**batch, use_cache=False), labels != -100
            losses = -output["logits"][:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
            loss = (losses + output["scored"][:, :-1].square())[mask].mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            want.append(loss.item())
    return errors(trainer, model, want, oracle)


def test_a_second_head_in_a_class_that_extends_the_model(ranks: Any, tmp_path: Any) -> None:
    for loss, weights in ranks(2, with_values, str(tmp_path)):
        assert loss < 1e-6 and weights < 1e-10, (loss, weights)


def labelled(head: str, count: int) -> list[dict[str, Tensor]]:
    """Sequences with the labels of a head: a class, or a number of the first and of the last token of an answer."""
    found = samples(count)
    if head == MASKED:
        return [{**sample, "labels": sample["labels"].where(torch.arange(21) % 3 < 1, -100)} for sample in found]
    for row, sample in enumerate(found):
        sample["input_ids"] = sample["input_ids"] * sample["attention_mask"]  # heads look for the id of padding
        own = ["labels"] if head == CLASSES else ["start_positions", "end_positions"]
        sample |= dict(zip(own, torch.tensor([row * (1 + row) // 2 % 2, 7 + row]), strict=False))
        if head == QUESTIONS:
            del sample["labels"]
    return found


@on_ranks
def classified(directory: str, kind: str, head: str) -> list[float]:
    """Errors of losses, weights, a loss of an evaluation and logits, of two steps and of three further sequences."""
    from hyper_cp.hf import Trainer
    from tests.harness.hf_causal import tiny_causal

    class Masked(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels, *_ = (inputs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch"))
            output = model(**inputs)
            loss = self.handler.mean_loss(output.logits, labels)
            return (loss, output) if return_outputs else loss

    rows, model, oracle = labelled(head, 7), tiny_causal(kind, head), tiny_causal(kind, head)
    want, optimizer = [], torch.optim.SGD(oracle.parameters(), lr=0.05)
    trainer = (Masked if head == MASKED else Trainer)(model, arguments(directory), train_dataset=rows[:4], style=STYLE)
    with InDouble():
        trainer.train()
        predicted = trainer.predict(rows[4:])
        for step in range(2):
            loss = oracle(**torch.utils.data.default_collate(rows[2 * step : 2 * step + 2])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            want.append(loss.item())
        outputs = [oracle(**torch.utils.data.default_collate(x)) for x in (rows[4:6], rows[6:])]
    tested = (2 * outputs[0].loss.item() + outputs[1].loss.item()) / 3
    pairs = [(predicted.predictions, "logits")]
    if head == QUESTIONS:
        pairs = [*zip(predicted.predictions, ("start_logits", "end_logits"), strict=True)]
    logits = [torch.as_tensor(got) - torch.cat([output[name] for output in outputs]) for got, name in pairs]
    shown = torch.stack([row["attention_mask"] for row in rows[4:]]).bool() if head == MASKED else ...
    far = max(float(x[shown].abs().max()) for x in logits)
    return [*errors(trainer, model, want, oracle), abs(predicted.metrics["test_loss"] - tested), far]


@pytest.mark.parametrize(("kind", "head"), [("llama", CLASSES), ("llama", QUESTIONS), ("modernbert", MASKED)])
def test_classifiers_get_whole_batches_and_masked_models_the_loss_that_their_error_advises(
    ranks: Any, tmp_path: Any, kind: str, head: str
) -> None:
    for loss, weights, tested, logits in ranks(2, classified, str(tmp_path), kind, head):
        assert loss < 1e-6 and weights < 1e-10 and tested < 1e-6 and logits < 1e-10


@on_ranks
def token_metrics(directory: str) -> tuple[float, float]:
    """Errors of the entropy of an evaluation and of the number of tokens, whose last batches have one row."""
    import trl
    from datasets import Dataset

    from hyper_cp.hf import SFTTrainer
    from tests.integrations.test_trl_trainers import tokenizer

    rows = [tokens(60 + n, 1)[0, : 9 + n].tolist() for n in range(3)]
    data, oracle, options = Dataset.from_dict({"input_ids": rows}), make("llama"), arguments(directory)
    options = trl.SFTConfig(**{name: getattr(options, name) for name in KEPT}, bf16=False, max_length=None)
    own: dict[str, Any] = {"train_dataset": data, "eval_dataset": data, "processing_class": tokenizer()}

    class Mine(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    trainer = Mine(make("llama"), options, style=STYLE, **own)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*computes a loss by itself")
        got = trainer.evaluate()["eval_entropy"]
        trainer.train()
    want = []
    for chunk in (rows[:2], rows[2:]):
        with torch.no_grad():
            logits = torch.cat([oracle(torch.tensor([ids]), use_cache=False).logits[0, :-1] for ids in chunk])
        want.append(torch.distributions.Categorical(logits=logits).entropy().mean().item())
    seen = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    return abs(got - sum(want) / 2), abs(seen[-1] - sum(map(len, rows)))


def test_metrics_of_tokens_in_a_last_batch_of_fewer_rows_than_ranks(ranks: Any, tmp_path: Any) -> None:
    pytest.importorskip("trl")
    for entropy, seen in ranks(2, token_metrics, str(tmp_path)):
        assert entropy < 1e-5 and seen == 0


def focal(loss: Tensor) -> Tensor:
    """A function of the loss of the batch, which the sum of those of shares is not."""
    return (1 - torch.exp(-loss / 4)) ** 2 * loss


def z_loss(outputs: Any) -> Tensor:
    return 0 * outputs.logits.logsumexp(-1).square().mean()


def smoothed(trainer: Any, model: Any, inputs: Any, over_ranks: bool) -> tuple[Tensor, Any]:
    """A loss with smoothed labels, over all ranks or of this one."""
    outputs, labels = model(**inputs), inputs["shift_labels"]
    pairs = outputs.logits.flatten(0, 1), labels.flatten()
    losses = torch.nn.functional.cross_entropy(*pairs, reduction="none", label_smoothing=0.1).view_as(labels)
    mask = labels != -100
    loss = trainer.handler.mean_loss(losses, mask=mask) if over_ranks else losses[mask].mean()
    return loss, outputs


@on_ranks
def own_loss(directory: str, how: str) -> tuple[list[str], float, float]:
    """Warnings of a trainer with a loss, or a step, of its own, and its errors (of a loss that is none of a share)."""
    from hyper_cp.hf import Trainer

    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if how.startswith("by itself"):
                loss, outputs = smoothed(self, model, inputs, over_ranks=how == "by itself, over all ranks")
            else:
                loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            if how in ("adds", "above"):
                loss = torch.add(loss, z_loss(outputs))
            if how == "adds in place":
                loss += z_loss(outputs)
            if how == "function":
                loss = focal(loss)
            if how == "weights":
                loss = 0.5 * (loss + loss) + 0 * sum(p.square().sum() for p in model.parameters())
            return (loss, outputs) if return_outputs else loss

    class Above(Mine):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Steps(Mine):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            _, inputs = self._prepare_context_parallel_inputs(model, inputs)
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss)
            return loss.detach()

    model = make("llama")
    oracle = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught, InDouble():
        warnings.simplefilter("default")
        kind = {"above": Above, "step": Steps}.get(how, Mine)
        trainer = kind(model, arguments(directory), train_dataset=samples(4), style=STYLE)
        trainer.train()
        if how == "by itself, over all ranks":  # in a helper, whose names an evaluation cannot read
            trainer.evaluate(samples(4))
    smoothing = 0.1 if how.startswith("by itself") else 0.0
    want = trained_alone(oracle, smoothing, focal if how == "function" else Tensor.clone)
    said = [str(w.message) for w in caught if "super()" in str(w.message) or "by itself" in str(w.message)]
    return said, *errors(trainer, model, want, oracle)


ADDS, READS = "compute_loss adds a term to the loss of super", r".*mean_loss\(logits, inputs\['shift_labels'\]\)"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("by itself", "Mine.compute_loss computes a loss by itself" + READS),
        ("by itself, over all ranks", ""),
        ("adds", "Mine." + ADDS + READS),
        ("adds in place", "Mine." + ADDS + READS),
        ("above", "Above." + ADDS + READS),
        ("step", r"Steps.training_step does not call that of super\(\)"),
        ("weights", ""),
        ("function", ""),
        ("super", ""),
    ],
)
def test_losses_of_a_share_are_warned_of(ranks: Any, tmp_path: Any, how: str, words: str) -> None:
    """However a trainer of a user's makes them; terms of the weights, and what is made over all ranks, are right."""
    for said, loss, weights in ranks(2, own_loss, str(tmp_path), how):
        assert len(said) == bool(words) and all(re.search(words, x) for x in said), said
        assert how == "by itself" or (loss < 1e-6 and weights < 1e-10)


@on_ranks
def guarded(directory: str) -> tuple[list[float], list[float], float, float]:
    """The losses that ``training_step`` returns to a step around it, which skips those above a limit, and those of its
    data-parallel rank on one device; then the errors of the losses that are logged, and of weights."""
    from hyper_cp.hf import Trainer

    dp, model, oracle = dist.get_world_size() // 2, make("llama"), make("llama")
    part, train, want, logged = dist.get_rank() // 2, samples(4 * dp), [], []
    optimizer, limit = torch.optim.SGD(oracle.parameters(), lr=0.05), float("inf")

    def one(rows: list[Any]) -> Tensor:
        batch = torch.utils.data.default_collate(rows)
        labels = batch.pop("labels")[:, 1:].flatten()
        logits = oracle(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def counted(rows: list[Any]) -> int:
        return sum(int((row["labels"][1:] != -100).sum()) for row in rows)

    steps = [train[2 * dp * step : 2 * dp * (step + 1)] for step in range(2)]
    with InDouble():
        if dp == 1:
            limit = sum(one(rows).item() / counted(rows) for rows in steps) / 2
        for rows in steps:
            sums = [one(rows[2 * i : 2 * i + 2]) for i in range(dp)]
            logged.append(sum(sums).item() / counted(rows))
            want.append(sums[part].item() * dp / counted(rows))
            if want[-1] <= limit:
                (sum(sums) / counted(rows)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert dp > 1 or sum(x > limit for x in want) == 1

    got: list[float] = []

    class Guarded(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, inputs, *args, **kwargs)
            got.append(loss.item())
            if loss.item() > limit:
                model.zero_grad()
            return loss

    trainer = Guarded(model, arguments(directory), train_dataset=train, style=STYLE)
    with InDouble():
        trainer.train()
    return got, want, *errors(trainer, model, logged, oracle)


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_around_that_of_trainer_reads_the_loss_of_the_batch(ranks: Any, tmp_path: Any, world: int) -> None:
    """The same number on the ranks of a cp mesh: one that skips batches would skip others on each."""
    found = ranks(world, guarded, str(tmp_path))
    for got, want, loss, weights in found:
        assert got == pytest.approx(want, rel=1e-6) and loss < 1e-6 and weights < 1e-10, (got, want, loss, weights)
    assert all(x[0] == y[0] for x, y in zip(found[::2], found[1::2], strict=True))


def padded(side: str) -> dict[str, Tensor]:
    ids, mask = tokens(23)[:, :23], torch.ones(2, 23, dtype=torch.int64)
    mask[1, slice(9) if side == "left" else slice(9, None)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@on_ranks
def eager(name: str, side: str, implementation: str, how: str) -> tuple[int, float]:
    """The number of warnings, and the error of the gradients, with labels on all padding or where it sees tokens."""
    from hyper_cp import ContextParallelHandler
    from hyper_cp.hf import prepare_batch, prepare_model

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, batch = make(name), padded(side)
    if how == "none":  # the label of the first token, too, is predicted by padding
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        batch["labels"][1, 9] = -100
    model.set_attn_implementation(implementation)
    oracle = copy.deepcopy(model)
    prepare_model(model, mesh, style=STYLE)
    with warnings.catch_warnings(record=True) as caught, InDouble():
        warnings.simplefilter("default")
        oracle(**batch, use_cache=False).loss.backward()
        for _ in range(2):
            model.zero_grad()
            model(**prepare_batch(ContextParallelHandler(mesh, STYLE), batch)).loss.backward()
    got, want = sum_over_ranks(*gradients(model)), gradients(oracle)
    error = max(float((x - y).abs().max()) for x, y in zip(got, want, strict=True))
    return sum("attn_implementation='eager'" in str(w.message) for w in caught), error


@pytest.mark.parametrize(
    ("name", "side", "implementation", "how", "warned"),
    [
        ("llama", "left", "eager", "all", True),
        ("llama", "left", "eager", "none", False),
        ("llama", "right", "eager", "all", False),
        ("llama", "left", "sdpa", "all", False),
        ("gemma3", "right", "eager", "all", True),  # its window of 5 leaves padding without a token
        ("gemma3", "right", "eager", "none", False),
    ],
)
def test_labels_of_padding_that_sees_no_token(
    ranks: Any, name: str, side: str, implementation: str, how: str, warned: bool
) -> None:
    """Eager attention has the mean of all values there: the only difference from one device, and it is warned of."""
    for said, error in ranks(2, eager, name, side, implementation, how):
        assert said == warned and (error < 1e-10) != warned, (said, error)


@on_ranks
def late_labels(directory: str, where: str) -> str:
    """The error of a trainer that changes labels after its batch has been split."""
    from hyper_cp.hf import Trainer

    class Late(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if where == "replaced":
                inputs["labels"] = torch.where(inputs["input_ids"] < 25, -100, inputs["labels"])
            else:
                inputs["labels"][:, 0] = -100
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = Late(make("llama"), arguments(directory), train_dataset=samples(4), style=STYLE)
    return error_of(trainer.train)


@pytest.mark.parametrize("where", ["replaced", "in place"])
def test_labels_that_are_changed_after_the_split_are_refused(ranks: Any, tmp_path: Any, where: str) -> None:
    """The loss reads labels that were shifted before."""
    for found in ranks(2, late_labels, str(tmp_path), where):
        assert re.search("ValueError: LlamaForCausalLM got labels that were changed after prepare_batch", found), found


def test_trainers_of_users_with_a_name_of_trl_are_refused() -> None:
    import transformers

    from hyper_cp.hf import Trainer
    from hyper_cp.integrations.trainer import ContextParallelTrainer

    named = type("SFTTrainer", (transformers.Trainer,), {"compute_loss": transformers.Trainer.compute_loss})
    kind = type("Mine", (ContextParallelTrainer, named), {"own_losses": ("SFTTrainer",)})
    with pytest.raises(NotImplementedError, match="SFTTrainer computes its loss by itself"):
        kind._refuse_own_loss(object.__new__(kind))
    Trainer._refuse_own_loss(object.__new__(Trainer))


@on_ranks
def counts_labels(directory: str, averages: bool, divides: bool) -> tuple[int, float]:
    """Warnings of a trainer that counts labels by itself, and the error of its losses."""
    from hyper_cp.hf import Trainer

    class Counts(Trainer):
        def _get_num_items_in_batch(self, batches: Any, device: Any) -> Any:
            number = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
            return number / 2 if divides else number

    model = make("llama")
    oracle = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught, InDouble():
        warnings.simplefilter("always")
        options = arguments(directory, average_tokens_across_devices=averages)
        trainer = Counts(model, options, train_dataset=samples(4), style=STYLE)
        trainer.train()
    said = [w for w in caught if "_get_num_items_in_batch does not call that of super()" in str(w.message)]
    return len(said), errors(trainer, model, trained_alone(oracle), oracle)[0]


def test_counts_of_labels_that_are_not_divided_are_warned_of(ranks: Any, tmp_path: Any) -> None:
    """Its advice is right."""
    for said, _ in ranks(2, counts_labels, str(tmp_path), False, False):
        assert said == 1
    for said, wrong in ranks(2, counts_labels, str(tmp_path), False, True):
        assert said == 1 and wrong < 1e-6
    assert all(not said for said, _ in ranks(2, counts_labels, str(tmp_path), True, False))

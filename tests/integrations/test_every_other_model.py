"""Every type with another head than a causal one: exact, or refused by our own words; its page in ``docs/``.

``python -m tests.integrations.test_every_other_model`` tries all types, and writes the page.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.harness.hf_causal import CLASSES, MASKED, QUESTIONS, SEQ2SEQ, NotTiny, class_name, tiny_causal, types_of
from tests.harness.hf_images import image_types
from tests.harness.hf_models import InDouble, prepare_batch, prepare_model
from tests.harness.ranks import on_ranks, sum_over_ranks
from tests.integrations.test_every_causal_model import (
    MODES,
    ORDER,
    TOLERANCE,
    batches,
    difference,
    first_sentence,
    gradients,
    outcome_of,
)

pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "encoder_models.md"
SAMPLE = {
    MASKED: ["bert", "modernbert", "neomme", "rembert", "roberta"],
    CLASSES: ["bert", "bloom", "llama", "roberta"],
    QUESTIONS: ["bert", "llama"],
    SEQ2SEQ: ["bart", "t5"],
}
"""The types that every run of the tests tries."""
PAGE_OF_IMAGES = "takes images or audio, see [image models](image_models.md)"
UNTRIED = {"encoder-decoder": "two models of any types, which its configuration names", "t5gemma2": PAGE_OF_IMAGES}
"""The reasons why some types have no tiny configuration."""
TITLES = {
    MASKED: ("Masked language models", "AutoModelForMaskedLM"),
    CLASSES: ("Sequence classification", "AutoModelForSequenceClassification"),
    QUESTIONS: ("Question answering", "AutoModelForQuestionAnswering"),
    SEQ2SEQ: ("Encoder-decoders", "AutoModelForSeq2SeqLM"),
}
INTRODUCTION = """The outcome of `prepare_model` for every type of four automatic classes; `AutoModelForCausalLM` has
a [page of its own](transformers_models.md).

`tests/integrations/test_every_other_model.py` builds a tiny random model of each type. It runs the model on two ranks
in two modes, Ulysses with a plain batch and a ring (head-tail layout) with a padded one, and compares logits and the
gradients of all parameters with those of one device, in double precision.

- Masked language models take the batch of `prepare_batch` without labels. Give labels to it as `shift_labels`, which
  it splits as they are, and pass these and the logits to `handler.mean_loss`.
- Models for sequence classification and question answering take the *whole* batch, with labels. They split it
  themselves; their logits are whole on every rank, and their loss is this rank's share.
- "refused" means an error of this library before any wrong result; the reason is its first sentence.
- "not tried" means that the test has no tiny configuration, or that the model does not run with tokens alone on one
  device, with the reason.
"""


def batch_of(head: str, mode: str) -> dict[str, Tensor]:
    """The batch of a mode, with the labels of a head: two of three tokens have none, or each row has one or two."""
    batch = batches()[mode]
    if head == QUESTIONS:
        del batch["labels"]
        return {**batch, "start_positions": torch.tensor([7, 5]), "end_positions": torch.tensor([9, 14])}
    if head == CLASSES:  # a head finds the last token by the id of padding, or takes the first
        ids = batch["input_ids"].masked_fill(batch.get("attention_mask", torch.ones(())) == 0, 0)
        return {**batch, "input_ids": ids, "labels": torch.tensor([0, 1])}
    if head == SEQ2SEQ:
        return {**batch, "labels": batch["input_ids"].flip(1)[:, :19].clone()}
    hidden = torch.arange(batch["labels"].shape[1]) % 3 > 0
    return {**batch, "labels": batch["labels"].masked_fill(hidden, -100)}


def logits_of(output: Any, head: str) -> Tensor:
    """The logits of a model, or both of an answer."""
    return torch.stack([output.start_logits, output.end_logits], -1) if head == QUESTIONS else output.logits


def alone(model: Any, head: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and gradients of the model on one device."""
    given = {name: x for name, x in batch.items() if name != "labels" or head != MASKED}
    output = model(**given)
    logits = logits_of(output, head)
    loss = output.loss if head != MASKED else F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    return logits.detach(), gradients(model)


def shared(model: Any, head: str, handler: ContextParallelHandler, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same of a prepared model over the ranks of a mesh."""
    if head != MASKED:
        output = model(**batch)
        output.loss.backward()
        logits = logits_of(output, head).detach()
        logits = logits if head != SEQ2SEQ else handler.combine(logits, 1, length=batch["labels"].shape[1])
        return logits, sum_over_ranks(gradients(model))[0]
    local = prepare_batch(handler, {"shift_labels" if name == "labels" else name: x for name, x in batch.items()})
    labels = local.pop("shift_labels")
    logits = model(**local).logits
    handler.mean_loss(logits, labels, gradients="sum").backward()
    whole = handler.combine(logits.detach(), 1, documents=local["context_parallel"].documents)
    return whole, sum_over_ranks(gradients(model))[0]


def verdict(kind: str, head: str, mesh: Any) -> tuple[str, str]:
    """The outcome for a model type, and its reason. Each rank compares one mode with the model alone."""
    try:
        model = tiny_causal(kind, head)
    except NotTiny as error:
        return "not tried", UNTRIED.get(kind, error.why)
    head = SEQ2SEQ if model.config.is_encoder_decoder and head == MASKED else head
    mine, found, want = list(MODES)[dist.get_rank()], ("exact", ""), None
    for mode, options in MODES.items():
        style, copied, batch = ContextParallel(**options), copy.deepcopy(model), batch_of(head, mode)
        try:
            prepare_model(copied, mesh, style=style)
        except Exception as error:
            return outcome_of(error)
        if want is None:
            try:
                with InDouble():
                    want = alone(model, head, batch_of(head, mine))
            except Exception as error:
                why = f"does not run by itself ({type(error).__name__})"
                return "not tried", PAGE_OF_IMAGES if kind in image_types() else why
            finite = torch.stack([x.isfinite().all() for x in want])
            if not sum_over_ranks(finite.long())[0].eq(2).all():  # Splinter: the lowest float64 becomes a float32
                return "not tried", "its results by itself are not finite in double precision"
        try:
            with InDouble():
                got = shared(copied, head, ContextParallelHandler(mesh, style), batch)
        except Exception as error:
            return outcome_of(error)
        if mode == mine:
            seen = batch["attention_mask"].bool() if "attention_mask" in batch and head == MASKED else slice(None)
            errors = difference(got[0], want[0], seen), difference(got[1], want[1])
            if max(errors) > TOLERANCE:
                found = "WRONG", f"{mode}: logits differ by {errors[0]:.1e}, gradients by {errors[1]:.1e}"
    return found


@on_ranks
def verdicts(kinds: list[str], head: str) -> dict[str, tuple[str, str]]:
    """The outcomes for types with a head."""
    import transformers

    transformers.logging.set_verbosity(50)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return {kind: verdict(kind, head, mesh) for kind in kinds}


def outcomes(ranks: Any, head: str, kinds: list[str]) -> dict[str, tuple[str, str]]:
    """The worse outcome of both ranks for each type."""
    both = ranks(2, verdicts, kinds, head, timeout=900)
    return {kind: min((of[kind] for of in both), key=lambda v: ORDER.index(v[0])) for kind in kinds}


def row(kind: str, head: str, outcome: str, why: str) -> str:
    return f"| `{kind}` | {class_name(kind, head)} | {outcome} | {first_sentence(outcome, why)} |"


def page(found: dict[str, dict[str, tuple[str, str]]], version: str) -> str:
    """The document: a section for each head, and a row for every type."""
    lines = [f"# Encoders, classifiers and encoder-decoders of transformers {version}", "", INTRODUCTION]
    for head, of_head in found.items():
        names = ("exact", "refused", "not tried")
        counts = ", ".join(f"{sum(v == name for v, _ in of_head.values())} {name}" for name in names)
        lines += [f"## {TITLES[head][0]}", "", f"`{TITLES[head][1]}`: {counts}.", ""]
        lines += ["| model type | class | outcome | reason |", "|---|---|---|---|"]
        lines += [*(row(kind, head, *of) for kind, of in of_head.items()), ""]
    return "\n".join(lines[:-1]) + "\n"


@pytest.mark.parametrize("head", SAMPLE)
def test_models_with_other_heads_are_exact_or_refused(ranks: Any, head: str) -> None:
    import transformers

    found, written = outcomes(ranks, head, SAMPLE[head]), PAGE.read_text()
    assert not [of for of in found.items() if of[1][0] in ("WRONG", "CRASH", "not tried")], found
    if f"of transformers {transformers.__version__}\n" in written:
        for kind, of in found.items():
            assert row(kind, head, *of) in written, f"{kind}: the page should be written again"


if __name__ == "__main__":
    import transformers

    from tests.harness.ranks import Ranks
    from tests.integrations import test_every_other_model as this

    pool, every = Ranks(), {}
    for head in TITLES:
        every[head] = this.outcomes(pool, head, types_of(head))
        print(head, *(x for x in every[head].items() if x[1][0] in ("WRONG", "CRASH")), sep="\n", flush=True)
    PAGE.write_text(page(every, transformers.__version__))
    pool.close()

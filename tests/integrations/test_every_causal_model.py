"""Every causal model type of the installed transformers: exact, or refused by our own words; the table in ``docs/``."""

from __future__ import annotations

import copy
import math
import os
import re
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import hyper_cp
from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.cli.modes import named_mode
from hyper_cp.data import head
from tests.harness.hf_causal import (
    UNTRIED,
    VOCABULARY,
    NotTiny,
    changed_behaviour,
    class_name,
    layer_types,
    left_out_by_transformers,
    tiny_causal,
    types_of,
)
from tests.harness.hf_models import InDouble, LowestFirst, prepare_batch, prepare_model, tokens
from tests.harness.ranks import on_ranks, sum_over_ranks

pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "transformers_models.md"
OURS = str(Path(hyper_cp.__file__).parent)
LENGTH, TOLERANCE = 24, 1e-9
ORDER = ["CRASH", "WRONG", "not tried", "refused", "exact"]
INTRODUCTION = """The outcome of `prepare_model` for every type that `AutoModelForCausalLM` knows:
{counts}.

`tests/integrations/test_every_causal_model.py` builds a tiny random model of each type. It runs the model
on two ranks in two modes, Ulysses with a plain batch and a ring (head-tail layout) with a padded one, and compares
logits and the gradients of all parameters with those of one device, in double precision. It tries all types when this
page is written, and some of them, one of every kind, in every run of the tests.

- "refused" means an error of this library before any wrong result; the reason is its first sentence.
- The reason of an exact row names the types of its layers, unless they are all `full_attention`.
- transformers' own `supports_context_parallel` refuses every other type of layer, and a sliding window:
  {left_out} of the exact types, as they are built here.
- "not tried" means that the type does not run by itself here, with the reason. (Models of images, audio and text have
  a text model, which is a type of its own.)
- `mistral_large4_text` is no type of `AutoModelForCausalLM`. Its hidden states are exact (`test_selected_models.py`).
  Nor is `glm5_next`, whose text and images are exact (`test_sparse_families.py` and [image models](image_models.md)).
- Packed documents (position ids that restart, or cumulative lengths) are kept apart in every type, as transformers'
  flash attention does. In SDPA on one device some types let documents see each other, because their masks are made
  without position ids: `afmoe`, `bert`, `bert-generation`, `biogpt`, `electra`, `ernie`, `falcon` and `gpt_oss`.
  (The n-grams of `qwen4_exp_text`, and their convolution, read on from one document to the next, as on one device.)
"""
LOSS = "with the loss of `handler.mean_loss`, without labels"
WHOLE_LOGITS = {
    *("bert", "bert-generation", "camembert", "data2vec-text", "dory", "ernie", "megatron-bert", "rembert", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    *("gemma3", "gemma4", "inkling_text", "inkling2_text", "inkling2_loop_text"),
}
"""Exact types that refuse a chunked loss: their head is no ``nn.Linear`` of theirs, they ask for the shape of logits,
or, on one rank, they make masks around their decoder."""
MODES = {"ulysses": named_mode("Ulysses"), "ring": named_mode("ring, head_tail")}


def batches() -> dict[str, dict[str, Tensor]]:
    """A batch for each mode: a plain one, and one with padding on the left of one row and on the right of the other."""
    ids = tokens(LENGTH)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, :6], mask[1, -7:] = 0, 0
    # Nor does padding predict the first token: in eager attention, which some models have, it sees everything.
    labels[mask == 0], labels[0, 6] = -100, -100
    return {
        "ulysses": {"input_ids": ids, "labels": ids},
        "ring": {"input_ids": ids, "attention_mask": mask, "labels": labels},
    }


def gradients(model: Any) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def alone(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and gradients of the model on one device."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    ForCausalLMLoss(logits, batch["labels"], logits.shape[-1]).backward()
    return logits.detach(), gradients(model)


def shared(model: Any, handler: ContextParallelHandler, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, bool]:
    """The same of a prepared model over the ranks of a mesh, and True if the loss is the model's own. Some models
    refuse labels: theirs is the one of the handler."""
    local = prepare_batch(handler, batch)
    try:
        output, own = model(**local), True
        loss = output.loss
    except NotImplementedError as error:
        if " got labels" not in str(error):
            raise
        labels, own = local["shift_labels"], False
        output = model(**{name: x for name, x in local.items() if "labels" not in name and "num_items" not in name})
        loss = handler.mean_loss(output.logits, labels, gradients="sum")
    loss.backward()
    logits = handler.combine(output.logits.detach(), 1, documents=local["context_parallel"].documents)
    return logits, sum_over_ranks(gradients(model))[0], own


def difference(got: Tensor, want: Tensor, where: Any = slice(None)) -> float:
    found = ((got - want)[where].abs().max() / want[where].abs().max().clamp(min=1e-3)).item()
    return found if math.isfinite(found) else math.inf


def verdict(kind: str, mesh: Any, later: list[Callable[[Any], tuple[str, str]]]) -> tuple[str, str]:
    """The outcome for a model type ("exact", "refused", "not tried", "WRONG" or "CRASH"), and its reason.

    Each rank compares one mode with the model alone. What tries a chunked loss, on a mesh of one rank, is put into
    ``later``.
    """
    try:
        model = tiny_causal(kind)
    except NotTiny as error:
        return "not tried", UNTRIED.get(kind, error.why)
    mine = list(MODES)[dist.get_rank()]
    found, want = ("exact", ""), None
    for name, batch in batches().items():
        style = ContextParallel(**MODES[name])
        handler, copied = ContextParallelHandler(mesh, style), copy.deepcopy(model)
        try:
            prepare_model(copied, mesh, style=style)
            if want is None:
                want = reference(copy.deepcopy(model), batches()[mine])  # RecurrentGemma keeps its states
            with InDouble():
                logits, grads, own = shared(copied, handler, batch)
        except NotAlone as error:
            return "not tried", f"does not run by itself ({error})"
        except Exception as error:
            return outcome_of(error)
        found = found if own else ("exact", LOSS)
        if name == mine and own:
            later.append(partial(chunked_verdict, model, batch, want[1]))
        if name == mine:
            seen = batch["attention_mask"].bool() if "attention_mask" in batch else slice(None)
            errors = difference(logits, want[0], seen), difference(grads, want[1])
            if max(errors) > TOLERANCE:
                found = "WRONG", f"{name}: logits differ by {errors[0]:.1e}, gradients by {errors[1]:.1e}"
    return found


def chunked_verdict(model: Any, batch: dict[str, Tensor], want: Tensor, mesh: Any) -> tuple[str, str]:
    """The outcome of ``chunked_loss=True`` on a mesh of one rank, with chunks of seven tokens."""
    style, copied, head.CHUNK_BYTES = ContextParallel(), copy.deepcopy(model), 7 * 4 * VOCABULARY
    try:
        prepare_model(copied, mesh, style=style, chunked_loss=True)
        with InDouble():
            output = copied(**prepare_batch(ContextParallelHandler(mesh, style), batch))
            output.loss.backward()
    except Exception as error:
        return outcome_of(error)
    finally:
        head.CHUNK_BYTES = 2**28
    error = difference(gradients(copied), want)
    return ("exact", "") if error <= TOLERANCE else ("WRONG", f"gradients differ by {error:.1e}")


def outcome_of(error: Exception) -> tuple[str, str]:
    """Refused if this library raised the error itself."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = last.filename.startswith(OURS) and str(last.line).startswith("raise ")
    kinds = (ValueError, TypeError, NotImplementedError, RuntimeError)
    return ("refused" if ours and isinstance(error, kinds) else "CRASH"), f"{type(error).__name__}: {error}"


class NotAlone(Exception):
    """A model that does not run by itself in double precision."""


def reference(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """See :func:`alone`."""
    try:
        with InDouble(), LowestFirst():
            return alone(model, batch)
    except Exception as error:
        raise NotAlone(type(error).__name__) from error


@on_ranks
def verdicts(kinds: list[str]) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """The outcomes for all types, and those of a chunked loss, of which each rank tries its share of the types."""
    import transformers

    transformers.logging.set_verbosity(50)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "cp"))["cp"]
    found, chunked, rank, ranks = {}, {}, dist.get_rank(), dist.get_world_size()
    for first in range(0, len(kinds), ranks):  # as many types as ranks, so that these try chunked losses at one time
        later: list[list[Callable[[Any], tuple[str, str]]]] = [[] for _ in range(ranks)]
        for kind, mine in zip(kinds[first:], later, strict=False):
            found[kind] = verdict(kind, mesh, mine)
        if later[rank]:
            chunked[kinds[first + rank]] = later[rank][0](alone)
    return found, chunked


def tried() -> list[str]:
    """All types, when the page is written; otherwise those of :data:`ALWAYS` and of :data:`OTHERS`."""
    return types_of() if os.environ.get("HYPER_CP_WRITE_README") else sorted({*ALWAYS, *OTHERS})


ALWAYS = [
    "deepseek_v3",
    "deepseek_v4",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "minimax_m3_vl_text",
    "qwen3_next",
]
"""Types with layers that few others have, and some that many people use."""
OTHERS = [
    *("gemma2", "bloom", "gpt_neo", "diffllama"),  # softcaps, biases, and attention that they write out
    *("opt", "bart", "roberta", "llama4_text"),  # they count positions, or have heads of encoders
    *("dots3_note_text", "qwen4_exp_text", "inkling_text"),  # methods of theirs are replaced
    *("nemotron_h", "recurrent_gemma"),  # recurrent layers
    *("ctrl", "rwkv"),  # they are refused
]
"""One or two types of every further kind: all others take the path of one of these."""


def page(found: dict[str, tuple[str, str]], version: str) -> str:
    """The document: a row for every type, with the beginning of the error of those that are refused."""
    counts = ", ".join(
        f"{sum(v == name for v, _ in found.values())} {name}" for name in ("exact", "refused", "not tried")
    )
    left_out = sum(v == "exact" and left_out_by_transformers(kind) for kind, (v, _) in found.items())
    introduction = INTRODUCTION.format(counts=counts, left_out=left_out)
    lines = [f"# Causal language models of transformers {version}", "", introduction]
    lines += ["| model type | class | outcome | reason |", "|---|---|---|---|"]
    lines += [row(kind, *of) for kind, of in found.items()]
    lines += ["", "## Types of layers", "", LAYERS]
    lines += ["| type of layer | exact types with it | refused types with it |", "|---|---|---|"]
    lines += [f"| `{kind}` | {exact} | {refused} |" for kind, (exact, refused) in by_layers(found).items()]
    return "\n".join(lines) + "\n"


def row(kind: str, outcome: str, why: str) -> str:
    """The line of a type."""
    why = first_sentence(outcome, why)
    why = "; ".join(x for x in (changed_behaviour(kind), why) if x) if outcome == "exact" else why
    return f"| `{kind}` | {class_name(kind)} | {outcome} | {why} |"


def first_sentence(outcome: str, why: str) -> str:
    """The reason of an outcome without the name of its error, and without advice."""
    return re.split(r"(?<=[^A-Z])[.:] ", why.partition(": ")[2] if outcome == "refused" else why)[0]


LAYERS = """transformers allows these types of layers. For a type that no exact row has, `prepare_model` raises an
error ("has layers of type ..."); `sparse`, `dense` and `moe` are types of MLPs. A type without exact and refused
rows is in no tiny configuration of a causal type.
"""


def by_layers(found: dict[str, tuple[str, str]]) -> dict[str, tuple[int, ...]]:
    """For each type of layer that transformers allows, how many exact and how many refused types have one."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES

    rows = [[layer_types(kind) for kind, (v, _) in found.items() if v == name] for name in ("exact", "refused")]
    return {x: tuple(sum(x in row for row in of_outcome) for of_outcome in rows) for x in ALLOWED_LAYER_TYPES}


def exact_in(text: str) -> set[str]:
    """The model types that a page calls exact."""
    return set(re.findall(r"^\| `(.+?)` \| \w+ \| exact \|", text, re.MULTILINE))


def check_chunked(found: dict[str, tuple[str, str]]) -> None:
    """No chunked loss is wrong, and none is refused but those of :data:`WHOLE_LOGITS`."""
    bad = {kind: outcome for kind, outcome in found.items() if outcome[0] not in ("exact", "refused")}
    assert not bad, "\n".join(f"{kind}, chunked loss: {outcome} ({why})" for kind, (outcome, why) in bad.items())
    refused = {kind: why for kind, (outcome, why) in found.items() if outcome == "refused"}
    assert not refused.keys() - WHOLE_LOGITS, {kind: refused[kind] for kind in refused.keys() - WHOLE_LOGITS}


@pytest.mark.slow
def test_every_causal_model_is_exact_or_refused(ranks: Any) -> None:
    """Some types. With HYPER_CP_WRITE_README=1 it tries all, and writes the page."""
    import transformers

    from hyper_cp.integrations.huggingface.checks import LAYER_TYPES
    from hyper_cp.integrations.huggingface.sparse import REPLACED

    kinds = tried()
    both, chunked = zip(*ranks(2, verdicts, kinds, timeout=900), strict=True)
    check_chunked(chunked[0] | chunked[1])
    found = {kind: min((of[kind] for of in both), key=lambda v: ORDER.index(v[0])) for kind in kinds}
    bad = {kind: outcome for kind, outcome in found.items() if outcome[0] in ("WRONG", "CRASH")}
    assert not bad, "\n".join(f"{kind}: {outcome} ({why})" for kind, (outcome, why) in bad.items())
    untried = {layers for layers, (exact, _) in by_layers(found).items() if not exact}
    known = {*LAYER_TYPES, *(kind for replaced in REPLACED for kind in replaced.layers)}
    assert not untried & known, "types of layers that are neither tried nor refused"
    written = PAGE.read_text()
    lost = {kind for kind in exact_in(written) & {*found} if found[kind][0] != "exact"}
    assert not lost, f"{sorted(lost)} were exact, and are not any more: {[found[kind] for kind in sorted(lost)]}"
    if os.environ.get("HYPER_CP_WRITE_README"):
        PAGE.write_text(page(found, transformers.__version__))
    elif written.startswith(f"# Causal language models of transformers {transformers.__version__}\n"):
        other = [kind for kind, of in found.items() if row(kind, *of) not in written]
        assert not other, f"{other}: the page should be written again, with HYPER_CP_WRITE_README=1"

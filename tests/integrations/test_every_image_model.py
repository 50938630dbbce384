"""Every type of ``AutoModelForMultimodalLM``: exact with images and audio, or refused by our own words; its table in
docs."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel
from tests.harness.hf_audio import audio_batch, clips, owner, with_audio
from tests.harness.hf_causal import NotTiny
from tests.harness.hf_images import (
    KEYS,
    batch_of,
    class_name,
    image_types,
    labels_of,
    pair_batch,
    takes_images,
    text_batch,
    tiny,
    tiny_config,
    video_batch,
)
from tests.harness.hf_models import InDouble, prepare_model
from tests.harness.ranks import on_ranks
from tests.integrations.test_every_causal_model import ORDER, outcome_of
from tests.integrations.test_image_keys import errors_of_pair
from tests.integrations.test_images import RING, ULYSSES, errors, on_one_device, prepared, step

pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "image_models.md"
SAMPLE = ["chameleon", "glm5_next", "glmasr", "inkling2", "instructblip", "kosmos-2", "qwen4_exp"]
"""The types that every run of the tests tries, beside those of the other tests of images."""
INTRODUCTION = """The outcome of `prepare_model` with [images and audio](images.md) for every type of
`AutoModelForMultimodalLM` (those of `AutoModelForImageTextToText` among them), and for `audioflamingo3` and
`musicflamingo`: {counts}.

`tests/integrations/test_every_image_model.py` builds a tiny random model of each type. Its batch has two rows: one with
two images (of different size where the encoder takes any size), and one without, which ends in padding. It compares
logits, the gradients of the encoder and all others with those of one device, in double precision, on two ranks, in
Ulysses and in a ring (head-tail layout). Then it does so with videos of three frames, where types take them alone, and
with two clips of audio of different lengths, beside the images where types take both.

- "refused" means an error of this library before any wrong result; the reason is its first sentence.
- "not tried" means that the type does not run by itself here, with the reason.
- "text" was tried alone where the class takes neither images nor audio (`kyutai_speech_to_text` has codes of audio
  beside each token). In the batches of `mllama`, `idefics` and `blip`, whose layers attend to images,
  both rows have some; `mllama` and `idefics` with masks of what each token sees.
- `fast_vlm`, `gemma3n` and `perception_lm` have a SigLIP tower here in place of theirs, which the package timm makes.
- `florence2` is an encoder-decoder: it takes the whole batch, with labels.
- `deepseek_ocr2` has whole images only: its crops are refused.
"""


def verdict(kind: str) -> tuple[str, str, str]:
    """The outcome for a model type, the reason, and what was tried."""
    import transformers

    from hyper_cp.integrations.huggingface.batch import MEDIA

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    try:
        refusal = refused(kind, mesh)
        if refusal is not None:
            return *refusal, ""
        model = tiny(kind)
    except NotTiny as error:
        made: Any = getattr(transformers, class_name(kind))
        alone = made.forward is torch.nn.Module.forward
        return "not tried", "its class has no forward; its thinker is a type of its own" if alone else error.why, ""
    names = "get_image_features", "get_video_features", "get_audio_features"
    methods = [x for x in names for m in model.modules() if hasattr(m, x)]
    takes = any(MEDIA.match(x) for x in inspect.signature(model.forward).parameters)
    what = "text" if not takes else "images" if takes_images(kind) or kind == "phi4_multimodal" else "audio"
    try:
        if not methods and takes and kind not in (*KEYS, "phi4_multimodal", "qwen2_audio"):
            made = prepare_model(model, mesh, style=ContextParallel(**RING))
            name = next(x for x in inspect.signature(model.forward).parameters if MEDIA.match(x))
            made(**{name: torch.zeros(1, 3, 16, 16)}, input_ids=torch.ones(1, 4, dtype=torch.int64))
        if model.config.is_encoder_decoder:
            with InDouble():
                batch = pair_batch(model)
            error = errors_of_pair(model, batch)
            return ("exact", "", "images") if error <= 1e-9 else ("WRONG", f"an error of {error:.1e}", "")
        if methods[:1] == ["get_audio_features"] or kind == "qwen2_audio":
            return heard(model)
        with InDouble():
            batch = batch_of(model) if takes else text_batch(model)
    except Exception as error:
        outcome = outcome_of(error)
        return (*outcome, "") if outcome[0] == "refused" else ("not tried", f"no {what} ({type(error).__name__})", "")
    try:
        on_one_device(model, batch, labels_of(batch))
    except Exception as error:
        return "not tried", f"does not run by itself ({type(error).__name__})", ""
    try:
        error = errors(model, batch, [RING, ULYSSES])
        if error > 1e-9:
            return "WRONG", f"an error of {error:.1e}", ""
        first = "videos" if methods[:1] == ["get_video_features"] else what
        return "exact", "", f"{first}{videos(model)}{audio(model)}"
    except Exception as error:
        return *outcome_of(error), ""


def videos(model: Any) -> str:
    """ ", videos" if they are exact; their refusal; or nothing, if there is no video for the model alone."""
    method = getattr(type(owner(model)), "get_video_features", len)
    if "pixel_values_videos" not in inspect.signature(method).parameters:
        return ""
    for apart in (False, True):
        try:
            batch = video_batch(model, apart)
            on_one_device(model, batch, batch["input_ids"])
        except Exception:
            continue
        error = errors(model, batch, [RING, ULYSSES])
        if error > 1e-9:
            raise AssertionError(f"videos differ by {error:.1e}")
        return ", videos"
    return ""


def heard(model: Any) -> tuple[str, str, str]:
    """The outcome for a model of audio alone."""
    try:
        with InDouble():
            batch = audio_batch(model)
        on_one_device(model, batch, batch["input_ids"])
    except Exception:
        ids = torch.ones(1, 8, dtype=torch.int64)
        step(*prepared(model, **RING), {"input_ids": ids, **clips(model)}, ids)  # refused before it runs
        raise
    try:
        error = errors(model, batch, [RING, ULYSSES])
    except Exception as error:
        return *outcome_of(error), ""
    return ("exact", "", "audio") if error <= 1e-9 else ("WRONG", f"an error of {error:.1e}", "")


def audio(model: Any) -> str:
    """ ", audio" if it is exact beside images; or nothing, if there are no clips for the model."""
    try:
        with InDouble():
            batch = with_audio(model, batch_of(model))
        on_one_device(model, batch, batch["input_ids"])
    except Exception:
        return ""
    error = errors(model, batch, [RING, ULYSSES])
    if error > 1e-9:
        raise AssertionError(f"audio differs by {error:.1e}")
    return ", audio"


def refused(kind: str, mesh: Any) -> tuple[str, str] | None:
    """The refusal of ``prepare_model``, also of a type that is too large to be made."""
    import transformers as hf

    try:
        config = copy.deepcopy(tiny_config(kind))
    except NotTiny as error:
        if "million" not in str(error):
            raise
        config = hf.CONFIG_MAPPING[kind]()
    try:
        with torch.device("meta"):
            model = getattr(hf, class_name(kind))(config)
    except Exception as error:
        raise NotTiny(f"{type(error).__name__}: {error}") from error
    try:
        prepare_model(model, mesh, style=ContextParallel(**RING))
    except Exception as error:
        return outcome_of(error)
    return None


@on_ranks
def verdicts(kinds: list[str]) -> dict[str, tuple[str, str, str]]:
    import transformers

    transformers.logging.set_verbosity(50)
    return {kind: verdict(kind) for kind in kinds}


def page(found: dict[str, tuple[str, str, str]], version: str) -> str:
    """The document: a row for every type, with the beginning of the error of those that are refused."""
    names = ("exact", "refused", "not tried")
    counts = ", ".join(f"{sum(v == name for v, *_ in found.values())} {name}" for name in names)
    lines = [f"# Models of images, audio and text in transformers {version}", "", INTRODUCTION.format(counts=counts)]
    lines += ["| model type | class | outcome | tried, or the reason |", "|---|---|---|---|"]
    lines += [row(kind, *of) for kind, of in found.items()]
    return "\n".join(lines) + "\n"


def row(kind: str, outcome: str, why: str, tried: str) -> str:
    why = re.split(r"(?<=[^A-Z])[.:] ", why.partition(": ")[2] if outcome == "refused" else why)[0]
    return f"| `{kind}` | {class_name(kind)} | {outcome} | {tried or why} |"


def written() -> dict[str, tuple[str, str, str]]:
    """The outcomes that the page has."""
    rows = re.findall(r"^\| `(.+?)` \| \w+ \| (.+?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {kind: (outcome, "", why) for kind, outcome, why in rows}


def outcomes(ranks: Any, kinds: list[str]) -> dict[str, tuple[str, str, str]]:
    """The worse outcome of both ranks for each type."""
    both = ranks(2, verdicts, kinds, timeout=900)
    found = {kind: min((of[kind] for of in both), key=lambda v: ORDER.index(v[0])) for kind in kinds}
    bad = {kind: of for kind, of in found.items() if of[0] in ("WRONG", "CRASH")}
    assert not bad, "\n".join(f"{kind}: {of}" for kind, of in bad.items())
    return found


def test_image_models_are_exact_or_refused(ranks: Any) -> None:
    """Some types. ``python -m tests.integrations.test_every_image_model`` tries all
    (or those of its arguments), and writes the page."""
    import transformers

    found, written = outcomes(ranks, SAMPLE), PAGE.read_text()
    if written.startswith(f"# Models of images, audio and text in transformers {transformers.__version__}\n"):
        for kind, of in found.items():
            assert row(kind, *of) in written, f"{kind}: the page should be written again"


if __name__ == "__main__":
    import transformers

    from tests.harness.ranks import Ranks
    from tests.integrations import test_every_image_model as this

    pool = Ranks()
    kinds = sys.argv[1:] or image_types()
    every = {kind: this.outcomes(pool, [kind])[kind] for kind in kinds}
    every = {kind: every.get(kind) or written()[kind] for kind in image_types()}
    PAGE.write_text(page(every, transformers.__version__))
    pool.close()

"""Images in the source of encoder-decoders inside of others: BLIP-2 and InstructBLIP with T5. Logits and every gradient
are those of one device. (test_image_keys.py has Florence 2.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness import hf_by_hand
from tests.harness.hf_causal import random_model
from tests.harness.hf_images import IMAGE, VOCABULARY, batch_of
from tests.harness.hf_models import InDouble
from tests.harness.ranks import error_of, on_ranks
from tests.integrations.test_image_keys import errors_of_pair
from tests.integrations.test_images import RING, ULYSSES, prepared

pytest.importorskip("transformers")

T5 = {
    **{"model_type": "t5", "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2},
    **{"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0},
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4},
}
LENGTH = 19
"""Tokens of the target: another number than those of the source, and none that the ranks divide."""


def translated(model: Any, inside: str, mode: dict[str, Any]) -> float:
    """The largest error of logits, loss and gradients. ``inside``: the part to prepare."""
    with InDouble():
        batch = batch_of(model)
    batch["labels"] = torch.randint(3, 50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch["labels"][1, -4:] = -100
    return errors_of_pair(model, batch, inside=inside, modes=[mode])


def with_t5(kind: str) -> Any:
    import transformers as hf

    name = kind.replace("-", "_")
    parts = {
        "text_config": T5,
        "vision_config": VISION,
        "qformer_config": {"model_type": f"{name}_qformer", **hf_by_hand.QFORMER},
    }
    config = hf.CONFIG_MAPPING[kind](**parts, num_query_tokens=4, image_token_index=IMAGE)
    classes = {"blip-2": hf.Blip2ForConditionalGeneration, "instructblip": hf.InstructBlipForConditionalGeneration}
    return random_model(classes[kind], config)


@on_ranks
def blip(kind: str, mode: dict[str, Any]) -> tuple[float, str]:
    model = with_t5(kind)
    return translated(model, "language_model", mode), error_of(lambda: prepared(model, **RING))


@pytest.mark.parametrize(("kind", "mode"), [("blip-2", RING), ("instructblip", ULYSSES)])
def test_an_encoder_decoder_inside_is_prepared_by_itself(ranks: Any, kind: str, mode: dict[str, Any]) -> None:
    for error, refusal in ranks(2, blip, kind, mode):
        assert error <= 1e-9
        assert "ForConditionalGeneration gives rows of images to an encoder-decoder, T5For" in refusal

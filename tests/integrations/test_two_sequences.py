"""Encoder-decoders whose stacks make masks of the ids of padding by themselves (T5Gemma), and their meshes."""

from __future__ import annotations

import copy
import functools
from typing import Any, Union

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, context_parallel_mesh, split_cp_mesh
from tests.harness.hf_causal import SEQ2SEQ, tiny_causal
from tests.harness.hf_models import InDouble, prepare_batch, prepare_model, prepared, tokens
from tests.harness.oracle import absolute_error
from tests.harness.ranks import error_of, on_ranks
from tests.integrations.test_image_keys import errors_of_pair
from tests.integrations.test_images import RING, ULYSSES

pytest.importorskip("transformers")


def padded(length: int, left: int, right: int) -> torch.Tensor:
    """Ids ``[2, S]`` with padding, at the left of one row and at the right of the other."""
    ids = tokens(length).clamp(min=3)
    ids[0, :left], ids[1, length - right :] = 0, 0
    return ids


@on_ranks
def gemma(case: str, modes: list[dict[str, Any]]) -> float:
    """The largest error of logits, loss and gradients."""
    model = tiny_causal("t5gemma", SEQ2SEQ).train(case != "cache")
    source, target = padded(23 if case == "length" else 24, 3, 4), padded(19, 0, 0)
    batch = {"input_ids": source, "labels": target}
    if case == "labels":
        batch["input_ids"] = padded(24, 0, 0)
        target[0, 4:7], target[1, -4:] = -100, -100
    elif case == "target":
        batch["decoder_input_ids"] = padded(19, 0, 3)
        batch["decoder_input_ids"][0, 5:8] = 0
    elif case == "masks":
        batch["attention_mask"] = (source != 0).long()
        target[1, -4:] = -100
    elif case == "cache":  # with one, the decoder does not hide padding
        target[0, 4:7], batch["use_cache"] = -100, True
    elif case == "accumulation":
        target[1, -4:] = -100
        batch |= {"attention_mask": (source != 0).long(), "num_items_in_batch": torch.tensor(50)}
    elif case == "embeddings":
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    return errors_of_pair(model, batch, seen=target != -100, modes=modes)


@pytest.mark.parametrize(
    ("case", "modes"),
    [
        *(("source", [ULYSSES]), ("length", [RING]), ("labels", [RING]), ("cache", [ULYSSES])),
        *(("target", [RING, ULYSSES]), ("masks", [RING]), ("accumulation", [ULYSSES]), ("embeddings", [RING])),
    ],
)
def test_masks_that_stacks_make_of_ids(ranks: Any, case: str, modes: list[dict[str, Any]]) -> None:
    assert max(ranks(2, gemma, case, modes)) <= 1e-9


@on_ranks
def long_padding() -> str:
    """The refusal of more padding in the source than a window is wide, whose states cross-attention reads."""
    model = tiny_causal("t5gemma", SEQ2SEQ)
    batch = {"input_ids": padded(24, 12, 12), "labels": padded(19, 0, 0)}
    assert errors_of_pair(model, {**batch, "attention_mask": (batch["input_ids"] != 0).long()}) <= 1e-9
    return error_of(lambda: errors_of_pair(model, batch))


def test_padding_that_sees_no_token_through_a_window_is_refused(ranks: Any) -> None:
    for refusal in ranks(2, long_padding):
        assert "T5GemmaEncoder adds its mask" in refusal and "give an encoder-decoder an attention_mask" in refusal


@on_ranks
def on_another_mesh() -> list[float]:
    """The differences of losses of T5 on the mesh of its style, on one of one rank, and on the former again."""
    family = split_cp_mesh(init_device_mesh("cpu", (2,)))
    model = tiny_causal("t5", SEQ2SEQ)
    made = prepare_model(copy.deepcopy(model), family.cp(2), style=ContextParallel(ulysses_degree=1))
    batch = {"input_ids": padded(24, 0, 0), "labels": padded(19, 0, 0)}
    with InDouble(), torch.no_grad():
        want, found = model(**batch).loss, [made(**batch).loss]
        with context_parallel_mesh(made, family.cp(1)):
            found.append(made(**batch).loss)
        found.append(made(**batch).loss)
    return [float(abs(x - want)) for x in found]


def test_both_stacks_change_their_mesh(ranks: Any) -> None:
    for found in ranks(2, on_another_mesh):
        assert len(found) == 3 and max(found) <= 1e-12, found


@on_ranks
def source_of_prepare_batch() -> None:
    model, handler = prepared(tiny_causal("bart", SEQ2SEQ), ulysses_degree=1)
    model(**prepare_batch(handler, {"input_ids": tokens(16), "attention_mask": padded(16, 0, 5).clamp(max=1)}))


@pytest.mark.parametrize("world", [1, 2])
def test_a_source_that_was_split_is_refused(ranks: Any, world: int) -> None:
    """On one rank the model took it, and saw its padding."""
    ranks.raises(world, NotImplementedError, "got context_parallel. It splits its source", source_of_prepare_batch)


@on_ranks
def short_targets() -> float:
    """The error of a loss with one target token on each rank, whose source has padding."""
    model = tiny_causal("t5", SEQ2SEQ)
    made, _ = prepared(model, ulysses_degree=None)
    ids, mask = tokens(12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, 9:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": tokens(2)}
    with InDouble(), torch.no_grad():
        return abs(float(made(**batch).loss - model(**batch).loss))


def test_as_many_targets_as_ranks(ranks: Any) -> None:
    """Under Ulysses the one row of the source's mask was taken for that of the rank's only target, and refused."""
    assert max(ranks(2, short_targets)) <= 1e-9


@on_ranks
def own_losses() -> list[str]:
    """The errors of encoder-decoders with a loss function, and with a forward, of the user's."""
    found = []
    for kind in ("function", "method", "forward", "helper", "base", "wrapped"):
        model = tiny_causal("t5gemma", SEQ2SEQ)
        plain = type(model)
        if kind == "function":
            model.loss_function = lambda logits, labels, **_: logits.mean()
        elif kind == "method":
            own = {"loss_function": lambda self, logits, labels, **_: logits.mean()}
            model.__class__ = type("MethodForConditionalGeneration", (plain,), own)
        elif kind == "helper":

            class HelperForConditionalGeneration(plain):  # type: ignore[misc,valid-type]
                def forward(self, *args: Any, **kwargs: Any) -> Any:
                    return self.smooth(super().forward(*args, **kwargs))

                def smooth(self, output: Any) -> Any:
                    output.loss = output.logits.mean()
                    return output

            model.__class__ = HelperForConditionalGeneration
        elif kind == "wrapped":

            def wrapped(forward: Any) -> Any:
                @functools.wraps(forward)
                def run(*args: Any, **kwargs: Any) -> Any:
                    output = forward(*args, **kwargs)
                    output.loss = output.logits.mean()
                    return output

                return run

            model.forward = wrapped(model.forward)
        else:

            class OwnForConditionalGeneration(plain):  # type: ignore[misc,valid-type]
                def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
                    output = super().forward(*args, labels=labels, **kwargs)
                    output.loss = output.logits.mean()
                    return output

            model.__class__ = OwnForConditionalGeneration
            if kind == "base":

                class MineOfTwoSequences(OwnForConditionalGeneration):
                    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
                        return super().forward(*args, labels=labels, **{**kwargs, "use_cache": False})

                model.__class__ = MineOfTwoSequences
        model, _ = prepared(model)
        found.append(error_of(lambda model=model: model(input_ids=tokens(24), labels=tokens(24))))
    return found


def test_losses_of_users_are_refused(ranks: Any) -> None:
    """Before, their labels never reached them, and the loss was that of the next tokens."""
    for found in ranks(2, own_losses):
        assert all("has a loss of your own" in error for error in found), found


@on_ranks
def handed_on() -> float:
    """The loss of a class of the user's, of another name, that hands labels on, against one device."""
    model = tiny_causal("t5gemma", SEQ2SEQ)

    class Mine(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Union[Tensor, Tensor | None] = None, **kwargs: Any) -> Any:  # noqa: UP007
            """The labels go to the base class."""
            # Its labels, that is.
            return super().forward(*args, labels=labels, **{**kwargs, "use_cache": False})

    model.__class__ = Mine
    batch = {"input_ids": tokens(24), "labels": tokens(24)}
    with InDouble():
        want = model(**batch).loss
        loss = prepared(model)[0](**batch).loss
    return absolute_error(loss, want)


def test_a_class_that_hands_its_labels_on(ranks: Any) -> None:
    """Before, a class whose name ends otherwise was refused."""
    assert max(ranks(2, handed_on)) < 1e-10

"""Mllama, Idefics and BLIP, whose layers attend to images, and Florence 2, an encoder-decoder with images in its
source: each image is encoded once, and every gradient is that of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.hf_causal import random_model
from tests.harness.hf_images import batch_of, labels_of, pair_batch, tiny
from tests.harness.hf_models import InDouble, gradients, prepare_batch
from tests.harness.oracle import relative_error
from tests.harness.ranks import on_ranks, sum_over_ranks
from tests.integrations.test_images import (
    RING,
    ULYSSES,
    errors,
    on_one_device,
    prepared,
    shard,
    step,
    whole_gradients,
    worst,
)

pytest.importorskip("transformers")


NO_RESAMPLER = "idefics, no resampler"


def made_of(kind: str) -> Any:
    """A tiny model of a type; of Idefics also without a resampler, with norms of queries and keys."""
    if kind != NO_RESAMPLER:
        return tiny(kind)
    model = tiny("idefics")
    config = copy.deepcopy(model.config)
    config.use_resampler, config.qk_layer_norms = False, True
    return random_model(type(model), config)


def one_image(batch: dict[str, Any]) -> dict[str, Any]:
    """The second row of a batch alone, without the place of a second image."""
    batch, masks = {name: x[1:] for name, x in batch.items()}, ("image_attention_mask", "cross_attention_mask")
    several = [name for name in batch if name.startswith(("pixel", "aspect"))] if {*masks} & {*batch} else []
    batch |= {name: batch[name][:, :1] for name in several}
    return batch | {name: batch[name][:, :, :1] for name in masks if name in batch}


@on_ranks
def compared(kind: str, way: str) -> tuple[float, list[int]]:
    """The error, and the images that this rank's encoder was given."""
    model, seen = made_of(kind), []
    batch = batch_of(model)
    if way == "one image":
        batch = one_image(batch)

    def watch(made: Any) -> None:
        encoder = made.vision_model if kind == "blip" else made.model.vision_model
        encoder.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(len([*args, *kwargs.values()][0])), with_kwargs=True
        )

    return errors(model, batch, [RING] if way == "one image" else [RING, ULYSSES], watch), seen


@pytest.mark.parametrize(
    ("kind", "way", "images"),
    [
        ("mllama", "two each", 2),
        ("mllama", "one image", 1),
        ("idefics", "two each", 2),
        (NO_RESAMPLER, "two each", 2),
        ("blip", "one each", 1),
        ("blip", "one image", 1),
    ],
)
def test_layers_attend_to_images_that_each_rank_encodes_a_run_of(ranks: Any, kind: str, way: str, images: int) -> None:
    """The rank without an image runs the encoder on one of another rank, whose rows it does not use."""
    for error, given in ranks(2, compared, kind, way):
        assert error <= 1e-9 and {*given} == {images} and len(given) == (1 if way == "one image" else 2)


@on_ranks
def adapted(kind: str, config: dict[str, Any]) -> float:
    """The error of a model that PEFT changes after it was prepared, with as many images as ranks, of one row."""
    import peft

    model, config = made_of(kind), {"init_lora_weights": False, **config}
    batch = {name: x[:1] for name, x in batch_of(model).items()} if kind == "mllama" else batch_of(model)
    adapters = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config)).double()
    labels = labels_of(batch)
    alone, want = on_one_device(adapters, batch, labels)
    made, handler = prepared(model, **RING)
    made = peft.get_peft_model(made, peft.LoraConfig(**config)).double()
    made.load_state_dict(adapters.state_dict())
    whole, seen = step(made, handler, batch, labels), batch["attention_mask"].bool()
    return max(relative_error(whole[seen], want[seen]), *worst(made, alone).values())


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mllama", {"target_modules": "all-linear"}),
        ("mllama", {"target_modules": ["q_proj"], "modules_to_save": ["multi_modal_projector"]}),
        ("blip", {"target_modules": ["query"], "modules_to_save": ["vision_model"]}),
    ],
)
def test_adapters_of_an_encoder_that_was_prepared_before(ranks: Any, kind: str, config: dict[str, Any]) -> None:
    """LoRA puts the last module of the encoder into one of its own, and PEFT also copies modules. The rows that LoRA
    adds were those of this rank's run, and fitted those of all images where these were as many as the ranks."""
    pytest.importorskip("peft")
    assert max(ranks(2, adapted, kind, config)) <= 1e-9


@on_ranks
def as_many_rows() -> float:
    """The error of four images of five rows each, beside 20 tokens on each rank."""
    model, g = tiny("idefics"), torch.Generator().manual_seed(4)
    size, ids = model.config.vision_config.image_size, torch.randint(8, 50, (2, 40), generator=g)
    seen = torch.ones(2, 40, 4, dtype=torch.int64)
    images = torch.randn(2, 4, 3, size, size, dtype=torch.float64, generator=g)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images}
    return errors(model, batch | {"image_attention_mask": seen}, [RING])


def test_rows_of_images_may_be_as_many_as_the_tokens_of_a_share(ranks: Any) -> None:
    """They were taken for attention over the share that nothing routes."""
    assert max(ranks(2, as_many_rows)) <= 1e-9


@on_ranks
def sharded(kind: str) -> float:
    model = made_of(kind)
    batch = batch_of(model)
    labels = labels_of(batch)
    alone, want = on_one_device(model, batch, labels)
    made, handler = prepared(model, **RING)
    shard(made, handler.mesh)
    whole, seen = step(made, handler, batch, labels), batch["attention_mask"].bool()
    return max(relative_error(whole[seen], want[seen]), *worst(made, alone).values())


@pytest.mark.parametrize("kind", ["mllama", "idefics", "blip"])
def test_images_that_layers_attend_to_are_exact_under_fsdp2(ranks: Any, kind: str) -> None:
    assert max(ranks(2, sharded, kind)) <= 1e-9


@on_ranks
def losses(kind: str) -> tuple[float, float]:
    """The loss of a batch with labels: the sum over the ranks, and that of one device."""
    model = made_of(kind)
    batch = batch_of(model)
    batch["labels"] = labels_of(batch)
    with InDouble():
        want = model(**batch, use_cache=False).loss
    made, handler = prepared(model, **RING)
    with InDouble():
        loss = made(**prepare_batch(handler, batch)).loss.detach()
    dist.all_reduce(loss)
    return loss.item(), want.item()


def test_the_loss_of_idefics_is_that_of_one_device(ranks: Any) -> None:
    for loss, want in ranks(2, losses, "idefics"):
        assert abs(loss - want) <= 1e-9 * want


@on_ranks
def labelled() -> float:
    """BLIP, whose head is inside: its labels are refused, and ``mean_loss`` returns their loss."""
    model = made_of("blip")
    batch = batch_of(model)
    labels = labels_of(batch)
    with InDouble():
        want = model(**batch, labels=labels).loss
    made, handler = prepared(model, **RING)
    with pytest.raises(NotImplementedError, match="got labels, but its forward computes the loss"):
        made(**prepare_batch(handler, {**batch, "labels": labels}))
    share = handler.get_batch_on_this_cp_rank({"labels": labels}, shift_labels=True)["shift_labels"]
    with InDouble():
        logits = made(**prepare_batch(handler, batch)).logits
    return relative_error(handler.mean_loss(logits, share).detach(), want)


def test_labels_of_blip_are_refused_because_its_head_would_average_a_share(ranks: Any) -> None:
    assert max(ranks(2, labelled)) <= 1e-9


@on_ranks
def unfit() -> None:
    model = made_of("blip")
    batch = batch_of(model)
    made, handler = prepared(model, **RING)
    with pytest.raises(ValueError, match="for 2 rows of tokens"):
        made(**prepare_batch(handler, {**batch, "pixel_values": batch["pixel_values"][:1]}))
    with pytest.raises(NotImplementedError, match="got images as pixel_values, image_embeds"):
        made(**prepare_batch(handler, {**batch, "image_embeds": batch["pixel_values"]}))
    model = made_of("idefics")
    batch = batch_of(model)
    made, handler = prepared(model, **RING)
    with pytest.raises(ValueError, match="images without image_attention_mask"):
        made(**prepare_batch(handler, {name: x for name, x in batch.items() if name != "image_attention_mask"}))
    dist.barrier()


def test_images_of_blip_and_idefics_that_do_not_fit_are_refused(ranks: Any) -> None:
    ranks(2, unfit)


def errors_of_pair(
    model: Any,
    batch: dict[str, Any],
    fsdp: bool = False,
    inside: str = "",
    seen: Any = ...,
    modes: Any = (RING, ULYSSES),
) -> float:
    """The largest error of logits, loss and gradients of an encoder-decoder, each of which takes the whole batch.
    ``inside``: the part to prepare. ``seen``: the positions whose logits are compared."""
    alone, found = copy.deepcopy(model), []
    with InDouble():
        want = alone(**{"use_cache": False} | batch)
        want.loss.backward()
    for mode in modes:
        made, handler = prepared(model, inside, **mode)
        if fsdp:
            shard(made, handler.mesh)
        with InDouble():
            output = made(**batch)
            output.loss.backward()
        whole = handler.combine(output.logits.detach(), 1, length=batch["labels"].shape[1])
        found.append(relative_error(whole[seen], want.logits.detach()[seen]))
        found.append(relative_error(output.loss.detach(), want.loss.detach()))
        found += worst(made, alone).values()
        summed = whole_gradients(made) if fsdp else sum_over_ranks(*gradients(made))
        largest = max(x.abs().max().item() for x in gradients(alone))  # also where that of one device is zero
        found += [((got - x).abs().max() / largest).item() for got, x in zip(summed, gradients(alone), strict=True)]
    return max(found)


@on_ranks
def inserted(images: int, fsdp: bool) -> tuple[float, list[int]]:
    """The error of Florence 2, and the images that this rank's encoder was given."""
    model, seen = tiny("florence2"), []
    batch = pair_batch(model, images)
    error = errors_of_pair(model, batch, fsdp, modes=(RING, ULYSSES) if images == 3 and not fsdp else (RING,))
    made, _ = prepared(model, **RING)
    made.model.vision_tower.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    with InDouble(), torch.no_grad():
        made(**batch)
        if not fsdp:  # text alone is no mistake
            made(**{name: x for name, x in batch.items() if name != "pixel_values"})
    return error, seen


@pytest.mark.parametrize(("images", "fsdp"), [(1, False), (3, True)])
def test_a_source_with_images_that_each_rank_encodes_a_run_of(ranks: Any, images: int, fsdp: bool) -> None:
    found = ranks(2, inserted, images, fsdp)
    assert max(error for error, _ in found) <= 1e-9
    assert sorted(seen[0] for _, seen in found) == [1, max(1, images // 2 + images % 2)]


@on_ranks
def refused() -> None:
    model = tiny("mllama")
    batch = batch_of(model)
    made, handler = prepared(model, **RING)
    short = {**batch, "cross_attention_mask": batch["cross_attention_mask"][:, :-1]}
    with pytest.raises(ValueError, match="cross_attention_mask has 39 rows for 20 tokens"):
        made(**prepare_batch(handler, short))
    unmasked = {name: x for name, x in batch.items() if name != "cross_attention_mask"}
    with pytest.raises(ValueError, match="images without cross_attention_mask"):
        made(**prepare_batch(handler, unmasked))
    lost = {name: x for name, x in batch.items() if name != "aspect_ratio_mask"}
    with pytest.raises(NotImplementedError, match="aspect_ratio_mask only"):
        made(**prepare_batch(handler, lost))
    with pytest.raises(ValueError, match="for 2 rows of tokens"):
        made(**prepare_batch(handler, {**batch, "pixel_values": batch["pixel_values"][:1]}))
    with pytest.raises(NotImplementedError, match="cross_attention_states"):
        made(**prepare_batch(handler, {"input_ids": batch["input_ids"]}), cross_attention_states=torch.ones(1))
    plain = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with InDouble():
        made(**prepare_batch(handler, plain))  # text alone is no mistake
    shard(made, handler.mesh)
    with pytest.raises(NotImplementedError, match="without images under FSDP2"):
        made(**prepare_batch(handler, plain))
    dist.barrier()


def test_images_that_do_not_fit_are_refused(ranks: Any) -> None:
    ranks(2, refused)

"""Models of images and text, prepared: each image is encoded once, and rows travel. Logits and every gradient are those
of one device."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.schedule.readers import read_rows, runs_of_equal_cost
from tests.harness.attention_case import cp_mesh
from tests.harness.hf_audio import audio_batch, owner, with_audio
from tests.harness.hf_causal import MASKED, tiny_causal
from tests.harness.hf_images import IMAGE, TOKENS, batch_of, images, item_of, labels_of, rows_of, tiny, video_batch
from tests.harness.hf_models import InDouble, LowestFirst, generate, gradients, prepare_batch, prepare_model
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

pytest.importorskip("transformers")

RING: dict[str, Any] = {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"}
GATHER: dict[str, Any] = {"ulysses_degree": 1, "kv_exchange": "all_gather", "layout": "contiguous"}
ULYSSES: dict[str, Any] = {"ulysses_degree": None}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of all labels on one device."""
    flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(*flat, ignore_index=-100, reduction="sum")


def prepared(model: Any, inside: str = "", **mode: Any) -> tuple[Any, ContextParallelHandler]:
    """A copy of a model whose part ``inside`` (all of it, by default) is prepared, and a handler for it."""
    made, mesh, style = copy.deepcopy(model), cp_mesh(), ContextParallel(**mode)
    prepare_model(made.get_submodule(inside), mesh, style=style)
    return made, ContextParallelHandler(mesh, style)


def step(model: Any, handler: ContextParallelHandler, batch: dict[str, Any], labels: Tensor, **more: Any) -> Tensor:
    """Run forward and backward of a prepared model, and return the logits of the whole sequence."""
    local = prepare_batch(handler, {**batch, **more})
    share = handler.get_batch_on_this_cp_rank({"labels": labels, **more}, shift_labels=True)["shift_labels"]
    with InDouble():
        logits = model(**local).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), share.flatten(), ignore_index=-100, reduction="sum"
        )
        loss.backward()
    documents = local["context_parallel"].documents
    whole: Tensor = handler.combine(logits.detach(), 1, documents=documents, length=labels.shape[1])
    return whole


def worst(model: Any, alone: Any) -> dict[str, float]:
    """The largest relative error of a gradient of the encoder, and of any other."""
    found = {"encoder": 0.0, "others": 0.0}
    decoder = {id(p) for p in alone.get_decoder().parameters()}
    summed = sum_over_ranks(*gradients(model)) if not is_sharded(model) else whole_gradients(model)
    scale = max(x.abs().max().item() for x in gradients(alone))
    for got, want, p in zip(summed, gradients(alone), alone.parameters(), strict=True):
        part = "others" if id(p) in decoder else "encoder"
        if want.abs().max() > 1e-9 * scale:
            found[part] = max(found[part], relative_error(got, want))
    return found


def is_sharded(model: nn.Module) -> bool:
    """True for a model of FSDP2."""
    return any(isinstance(x, FSDPModule) for x in model.modules())


def whole_gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of FSDP2, which are means over the ranks, as sums."""
    size = dist.get_world_size()
    pairs: list[Any] = [(p, p.grad) for p in model.parameters()]
    return [torch.zeros(p.shape) if grad is None else grad.full_tensor() * size for p, grad in pairs]


def shard(model: Any, mesh: Any) -> None:
    """Wrap blocks and the whole by FSDP2. (transformers records no hidden states of a tower that is wrapped whole.)"""
    blocks = [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "VisionBlock", "EncoderLayer"))]
    assert blocks
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh)


def on_one_device(model: Any, batch: dict[str, Any], labels: Tensor) -> tuple[Any, Tensor]:
    alone = copy.deepcopy(model)
    with InDouble(), LowestFirst():
        logits = alone(**batch, use_cache=False).logits
        loss_of(logits, labels).backward()
    return alone, logits.detach()


def errors(
    model: Any, batch: dict[str, Any], modes: list[dict[str, Any]], watch: Callable[[Any], object] = id
) -> float:
    """The largest error in any of these modes. ``watch`` is called with each prepared model before its step."""
    labels, found = labels_of(batch), []
    alone, want = on_one_device(model, batch, labels)
    encoder = [p for p in owner(alone).parameters() if p.grad is not None]
    assert not images_in(batch) or sum(p.grad.abs().max() > 0 for p in encoder) > 5
    for mode in modes:
        made, handler = prepared(model, **mode)
        watch(made)
        whole, seen = step(made, handler, batch, labels), batch["attention_mask"].bool()
        found += [relative_error(whole[seen], want[seen]), *worst(made, alone).values()]
    return max(found)


def images_in(batch: dict[str, Any]) -> bool:
    return any(name.startswith(("pixel", "image_pixel", "input_features")) for name in batch)


# --------------------------------------------------------------------------- every family


@on_ranks
def mixed(kind: str, modes: list[dict[str, Any]]) -> float:
    """Two images of different size in one row, none in the other, which ends in padding."""
    model = tiny(kind)
    return errors(model, batch_of(model), modes)


@pytest.mark.parametrize("kind", ["llava", "gemma3", "idefics3", "mistral3", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_images_are_exact(ranks: Any, kind: str) -> None:
    """In a ring. Gemma 3, which makes masks of images, and Qwen2.5-VL, whose positions have axes, in Ulysses, too."""
    modes = [RING, ULYSSES] if kind in ("gemma3", "qwen2_5_vl") else [RING]
    assert max(ranks(2, mixed, kind, modes)) <= 1e-9


@on_ranks
def llama4() -> float:
    """The error of Llama 4, in whose decoder one layer has chunks, and one scales queries by their positions. Its
    forward reads an attribute that an output of transformers 5.24.0 does not have."""
    from transformers.models.llama4 import modeling_llama4

    model, made = tiny("llama4"), modeling_llama4.MoeCausalLMOutputWithPast
    if not hasattr(made, "image_outputs"):
        with pytest.raises(
            NotImplementedError, match=r"modeling_llama4\.MoeCausalLMOutputWithPast.image_outputs = None"
        ):
            prepared(model, **RING)
        made.image_outputs = None
    return errors(model, batch_of(model), [RING, ULYSSES])


def test_llama4_is_exact_where_its_forward_runs(ranks: Any) -> None:
    assert max(ranks(2, llama4)) <= 1e-9


def test_images_are_exact_on_three_ranks(ranks: Any) -> None:
    """There are two images, so one rank runs the encoder for nothing."""
    assert max(ranks(3, mixed, "qwen3_vl", [GATHER])) <= 1e-9


@on_ranks
def copied(kind: str) -> float:
    """The error of the logits of a copy of a prepared model."""
    model = tiny(kind)
    batch = batch_of(model)
    labels, seen = labels_of(batch), batch["attention_mask"].bool()
    made, handler = prepared(model, **GATHER)
    whole, (_, want) = step(copy.deepcopy(made), handler, batch, labels), on_one_device(model, batch, labels)
    return relative_error(whole[seen], want[seen])


def test_copies_of_prepared_models_are_exact(ranks: Any) -> None:
    """They could not be copied: the hook of the images kept a signature."""
    assert max(ranks(2, copied, "qwen2_5_vl")) <= 1e-9


@on_ranks
def padded(kind: str) -> list[float]:
    """The errors with padding at both ends of a row, and between tokens. Labels count on the first token behind it,
    which padding predicts."""
    model = tiny(kind)
    batch, found = batch_of(model), []
    more = [{**RING, "layout": "per_document"}] * ("token_type_ids" in batch)  # padding is no document there
    for hidden, mode in (([*range(5), -2, -1], ULYSSES), ([0, 1, 20, 21, 22], RING)):
        mask = torch.ones_like(batch["input_ids"])
        mask[1, hidden] = 0
        found.append(errors(model, {**batch, "attention_mask": mask}, [mode, *more]))
    return found


@pytest.mark.parametrize("kind", ["gemma3", "llava", "paligemma"])
def test_padding_before_and_between_tokens(ranks: Any, kind: str) -> None:
    """In PaliGemma padding sees the tokens of the prefix behind it, as on one device."""
    for found in ranks(2, padded, kind):
        assert max(found) <= 1e-9, found


# --------------------------------------------------------------------------- videos


@on_ranks
def videos(kind: str, apart: bool) -> tuple[float, list[int]]:
    """The error with a video, whose frames go to both ranks, and the patches that this rank's encoder was given. Beside
    it there is an image in the other row, if the model takes both."""
    model = tiny(kind)
    batch = video_batch(model, apart)
    if kind == "qwen2_5_vl":
        image = images(model, [(1, 4, 8)])
        rows = sum(rows_of(model, image))
        batch |= image
        batch["input_ids"][1, 4 : 4 + rows], batch["mm_token_type_ids"][1, 4 : 4 + rows] = IMAGE, 1
    seen: list[int] = []

    def watch(made: Any) -> None:
        owner(made).visual.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))

    return errors(model, batch, [RING], watch), seen


@pytest.mark.parametrize(("kind", "apart"), [("qwen2_5_vl", False), ("qwen3_vl", True), ("glm4v", True)])
def test_frames_of_a_video_are_shared_out(ranks: Any, kind: str, apart: bool) -> None:
    found = ranks(2, videos, kind, apart)
    assert max(error for error, _ in found) <= 1e-9
    patches = [count for _, counts in found for count in counts]
    assert len(patches) == 2, "one call of the encoder on each rank"
    assert sum(patches) == 48 + 32 * (kind == "qwen2_5_vl") and max(patches) <= sum(patches) / 2 + 16, patches


# --------------------------------------------------------------------------- audio


@on_ranks
def heard(kind: str, with_images: bool) -> tuple[float, int]:
    """The error with two clips of different lengths, and the clips that this rank's encoder was given."""
    model = tiny(kind)
    with InDouble():
        batch = with_audio(model, batch_of(model)) if with_images else audio_batch(model)
    seen: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(len(kwargs.get("feature_lens", args[0])))

    def watch(made: Any) -> None:
        towers(made)[-1].register_forward_pre_hook(count, with_kwargs=True)

    return errors(model, batch, [RING], watch), sum(seen)


@pytest.mark.parametrize(
    ("kind", "with_images"),
    [
        *(("voxtral", False), ("granite_speech", False), ("qwen2_audio", False), ("phi4_multimodal", False)),
        *(("qwen2_5_omni_thinker", True), ("phi4_multimodal", True)),
    ],
)
def test_audio_is_exact_and_each_clip_is_encoded_once(ranks: Any, kind: str, with_images: bool) -> None:
    """Positions of several axes count audio, too."""
    for error, clips in ranks(2, heard, kind, with_images):
        assert error <= 1e-9 and clips == 1


@on_ranks
def patches() -> list[float]:
    """The errors of Phi 4 with patches of padding in the second image, in the first one, and in none: without any its
    encoder is causal on one device."""
    model, found = tiny("phi4_multimodal"), []
    for image in (1, 0, None):
        batch = batch_of(model)
        mask = batch["image_attention_mask"] = torch.ones_like(batch["image_attention_mask"])
        batch["input_ids"][0, 33:35] = IMAGE  # the second image has two lines, each a row longer than in batch_of
        if image is not None:
            mask[image, 0, -1, -1] = 0  # of the crop that is the whole image, of which no row is left out
        found.append(errors(model, batch, [RING]))
    return found


def test_an_encoder_that_depends_on_padding_of_other_images(ranks: Any) -> None:
    for found in ranks(2, patches):
        assert max(found) <= 1e-9, found


# --------------------------------------------------------------------------- packed documents, no images, frozen towers


@on_ranks
def packed(kind: str, fsdp: bool) -> float:
    """Three documents in a row, two with an image each of different size (where the encoder takes any), against each of
    them alone on one device."""
    model = tiny(kind)
    both = images(model)
    rows = rows_of(model, both)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(3, 50, (1, n), generator=generator) for n in (rows[0] + 5, 9, rows[1] + 4)]
    parts[0][0, 2 : 2 + rows[0]], parts[2][0, 3 : 3 + rows[1]] = IMAGE, IMAGE
    alone, logits, labels = copy.deepcopy(model), [], []
    for i, ids in enumerate(parts):
        own = item_of(both, i // 2) if i != 1 else {}
        types = {"mm_token_type_ids": (ids == IMAGE).long()} if "image_grid_thw" in both else {}
        labels.append(ids.masked_fill(ids == IMAGE, -100))
        with InDouble():
            found = alone(input_ids=ids, **own, **types, use_cache=False).logits
            loss_of(found, labels[-1]).backward()
        logits.append(found.detach())
    ids, bounds = torch.cat(parts, 1), [0, *torch.tensor([x.shape[1] for x in parts]).cumsum(0).tolist()]
    batch = {"input_ids": ids, **both} | ({"mm_token_type_ids": (ids == IMAGE).long()} if types else {})
    found_errors = []
    for mode in (RING, {**RING, "layout": "per_document"})[: 1 if fsdp else 2]:
        made, handler = prepared(model, **mode)
        if fsdp:
            shard(made, handler.mesh)
        whole = step(made, handler, batch, torch.cat(labels, 1), cu_seqlens=torch.tensor(bounds))
        found_errors += [relative_error(whole, torch.cat(logits, 1)), *worst(made, alone).values()]
    return max(found_errors)


@on_ranks
def packed_axes(whole: bool) -> float:
    """The error of packed documents of the text model inside, whose positions have four axes ``[4, B, S]``, and which
    ``prepare_batch`` splits, or the user. Three axes alone do not say where documents begin."""
    model = tiny("qwen2_5_vl").model.language_model
    text = torch.cat([torch.arange(n) for n in (5, 9, 10)])
    positions = torch.stack([text, text, text // 3, text % 3])[:, None].expand(4, 2, -1)
    ids = torch.randint(3, 50, (2, len(text)), generator=torch.Generator().manual_seed(1))
    given = {"inputs_embeds": model.embed_tokens(ids).detach(), "position_ids": positions}
    made, handler = prepared(model, **RING)
    local = {
        "inputs_embeds": handler.dispatch(given["inputs_embeds"], 1),
        "position_ids": handler.dispatch(positions, -1),
    }
    with InDouble():
        want = model(**given, use_cache=False).last_hidden_state
        out = made(**(prepare_batch(handler, given) if whole else local), use_cache=False).last_hidden_state
    for run, batch in ((partial(prepare_batch, handler), given), (lambda x: made(**x, use_cache=False), local)):
        with pytest.raises(ValueError, match=r"position_ids of 3 axes go back along the sequence"):
            run({**batch, "position_ids": batch["position_ids"][1:]})
    return relative_error(handler.combine(out, 1), want)


@pytest.mark.parametrize("whole", [True, False])
def test_packed_documents_of_positions_with_axes_stay_apart(ranks: Any, whole: bool) -> None:
    assert max(ranks(2, packed_axes, whole)) <= 1e-10


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_packed_row_is_exact(ranks: Any, kind: str) -> None:
    assert max(ranks(2, packed, kind, False)) <= 1e-9


@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_a_packed_row_is_exact_under_fsdp2(ranks: Any, kind: str) -> None:
    """Types whose images have one size: test_image_steps.py has others."""
    assert max(ranks(2, packed, kind, True)) <= 1e-9


@on_ranks
def patches_under_fsdp2() -> float:
    """The error of NeoMME with tokens alone, whose patches have no encoder and no configuration of their own."""
    model, ids = tiny_causal("neomme", MASKED), torch.arange(48).reshape(2, 24)
    ids[ids == model.config.image_token_id] = 50
    made, handler = prepared(model, **RING)
    fully_shard(made, mesh=handler.mesh)
    with InDouble():
        want = model(input_ids=ids).logits
        want.square().sum().backward()
        out = made(**prepare_batch(handler, {"input_ids": ids})).logits
        out.square().sum().backward()
    whole = handler.combine(out.detach(), 1)
    pairs = zip(made.parameters(), model.parameters(), strict=True)
    found = [
        (2 * a.grad.full_tensor() - (0 if b.grad is None else b.grad)).abs().max() for a, b in pairs
    ]  # a mean of 2
    assert max(p.grad.abs().max() for p in model.parameters() if p.grad is not None) > 1
    return max(relative_error(whole, want.detach()), *map(float, found))


def test_patches_without_an_encoder_under_fsdp2(ranks: Any) -> None:
    assert max(ranks(2, patches_under_fsdp2)) <= 1e-9


@on_ranks
def without_a_second_encoder() -> tuple[str, float]:
    """Gemma 3n under FSDP2 with images alone: the refusal, since its encoder of audio would have to run, and the error
    of the loss without that."""
    model = tiny("gemma3n")
    batch = batch_of(model)
    batch["labels"] = labels_of(batch)
    with InDouble():
        want = model(**batch, use_cache=False).loss
    made, handler = prepared(model, **RING)
    shard(made, handler.mesh)

    def loss() -> Tensor:
        with InDouble():
            return made(**prepare_batch(handler, batch)).loss

    refusal = error_of(loss)
    made.config.audio_config = None
    found = loss()
    found.backward()
    return refusal, relative_error(sum_over_ranks(found)[0], want.detach())


@on_ranks
def no_blank(kind: str) -> str:
    made, handler = prepared(tiny(kind), **RING)
    shard(made, handler.mesh)
    batch = {"input_ids": torch.randint(3, 50, (2, 16), generator=torch.Generator().manual_seed(0))}
    with InDouble():
        return error_of(lambda: made(**prepare_batch(handler, batch)))


def test_an_encoder_that_fails_on_a_blank_image_is_refused(ranks: Any) -> None:
    for refusal in ranks(2, no_blank, "kimi_k25"):
        assert refusal.startswith("NotImplementedError: Kimi_K25Model got a batch without images under FSDP2"), refusal
        assert "does not run on a blank one (RuntimeError: " in refusal and "Put one into every batch" in refusal


def test_an_encoder_that_cannot_run_on_a_blank_clip_is_refused(ranks: Any) -> None:
    for refusal, error in ranks(2, without_a_second_encoder):
        assert refusal.startswith("NotImplementedError: Gemma3nModel got a batch without audio clips under FSDP2")
        assert refusal.endswith("set config.audio_config = None") and error <= 1e-9, error


@on_ranks
def composed(kind: str, way: str) -> float:
    """The error of a model whose decoder is recomputed in backward, or in part compiled."""
    model = tiny(kind)
    batch = batch_of(model)
    labels = labels_of(batch)
    alone, want = on_one_device(model, batch, labels)
    made, handler = prepared(model, **RING)
    if way == "checkpoint":
        made.train()
        again = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), InDouble())}
        made.gradient_checkpointing_enable(again)
    else:
        made.get_decoder().layers[0].compile(backend="eager")
    whole, seen = step(made, handler, batch, labels), batch["attention_mask"].bool()
    return max(relative_error(whole[seen], want[seen]), *worst(made, alone).values())


@pytest.mark.parametrize("way", ["checkpoint", "compile"])
def test_checkpointed_and_compiled_decoders_take_images(ranks: Any, way: str) -> None:
    """Layers of Qwen3-VL add rows of images to their results, too."""
    assert max(ranks(2, composed, "qwen3_vl", way)) <= 1e-9


@on_ranks
def with_batch_norm() -> float:
    """The error of a model in training whose encoder normalises over both clips, and of what it keeps of them."""
    model = tiny("granite_speech")
    batch = audio_batch(model)
    labels = labels_of(batch)
    assert not any(isinstance(m, nn.Dropout) and m.p for m in model.train().modules())
    alone, want = on_one_device(model, batch, labels)
    made, handler = prepared(model, **RING)
    whole, seen = step(made, handler, batch, labels), batch["attention_mask"].bool()
    kept = [x for name, x in made.named_buffers() if "running_" in name]
    of_one = [x for name, x in alone.named_buffers() if "running_" in name]
    statistics = [relative_error(x, y) for x, y in zip(kept, of_one, strict=True)]
    return max(relative_error(whole[seen], want[seen]), *worst(made, alone).values(), *statistics)


def test_an_encoder_that_normalises_over_clips_has_all_of_them(ranks: Any) -> None:
    assert max(ranks(3, with_batch_norm)) <= 1e-9


@on_ranks
def without_images() -> tuple[float, bool]:
    model = tiny("qwen2_5_vl")
    batch = {name: x for name, x in batch_of(model).items() if name not in ("pixel_values", "image_grid_thw")}
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 7)
    batch["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
    error = errors(model, batch, [RING])
    made, handler = prepared(model, **RING)
    step(made, handler, batch, labels_of(batch))
    return error, any(p.grad is not None for p in owner(made).visual.parameters())


def test_a_batch_without_images_does_not_run_the_encoder(ranks: Any) -> None:
    assert all(error <= 1e-9 and not ran for error, ran in ranks(2, without_images))


@on_ranks
def traffic(frozen: bool) -> tuple[list[int], int, int]:
    """Bytes of the transfers of rows, those that this rank must send by their number, and their gradients'."""
    model = tiny("llava")
    for p in owner(model).parameters() if frozen else ():
        p.requires_grad_(False)
    for p in model.get_decoder().parameters():
        p.requires_grad_(True)
    batch = batch_of(model)
    made, handler = prepared(model, **GATHER)
    with record_traffic() as log:
        step(made, handler, batch, labels_of(batch))
    sent = [n for name, n in log.entries if name == "all_to_all_rows"]
    rank, (first, second) = dist.get_rank(), rows_of(model, images(model))
    held = batch["input_ids"].shape[1] // 2  # contiguous: rank 0 encodes the first image, and holds the first half
    of_second = (batch["input_ids"][0] == IMAGE).nonzero().flatten()[first:]
    crossing = int((of_second < held).sum())
    width = 32 * 8
    assert 0 < crossing < second
    return sent, crossing * width * (rank == 1), crossing * width * (rank == 0)


@pytest.mark.parametrize("frozen", [False, True])
def test_ranks_receive_their_own_rows_only(ranks: Any, frozen: bool) -> None:
    """A frozen encoder sends no gradients back."""
    for sent, forward, backward in ranks(2, traffic, frozen):
        assert sent == ([forward] if frozen else [forward, backward])


# --------------------------------------------------------------------------- FSDP2


TOWERS = ("visual", "vision_tower", "vision_model", "encoder", "audio_tower")
PHI4 = ("embed_tokens_extend.image_embed.img_processor", "embed_tokens_extend.audio_embed.encoder")


def towers(model: Any) -> list[nn.Module]:
    """Return the encoders of a model."""
    inside = dict(owner(model).named_modules())
    return [inside[name] for name in (*TOWERS, *PHI4) if name in inside]


def media_of(model: Any, kinds: str) -> dict[str, Any]:
    """A batch of images, of audio, or of both."""
    with InDouble():
        return {
            "images": lambda: batch_of(model),
            "audio": lambda: audio_batch(model),
            "both": lambda: with_audio(model, batch_of(model)),
        }[kinds]()


@on_ranks
def sharded(kind: str, first: str, second: str) -> float:
    """Two data-parallel groups, the first with media of some kinds, the second with those of others, or with none."""
    from hyper_cp.integrations.huggingface.batch import MEDIA

    size = dist.get_world_size()
    world = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    style, model = ContextParallel(**RING), tiny(kind)
    batches = [media_of(model, first)]
    if second:
        batches.append(media_of(model, second))
    else:
        plain = {name: x for name, x in batches[0].items() if not MEDIA.match(name)}
        media = torch.tensor([*TOKENS.values()])
        plain["input_ids"] = plain["input_ids"].masked_fill(torch.isin(plain["input_ids"], media), 7).flip(1)
        plain["attention_mask"] = torch.ones_like(plain["input_ids"])
        types = [name for name in ("mm_token_type_ids", "token_type_ids") if name in plain]
        batches.append(plain | {name: torch.zeros_like(plain[name]) for name in types})
    made = prepare_model(copy.deepcopy(model), world["cp"], style=style)
    shard(made, world._flatten("all"))
    handler, found, calls = ContextParallelHandler(world["cp"], style), [], []
    for i, tower in enumerate(towers(made)):
        tower.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    for batch in batches:
        with InDouble():
            loss_of(model(**batch, use_cache=False).logits, labels_of(batch)).backward()
    own = batches[world.get_local_rank("dp")]
    step(made, handler, own, labels_of(own))
    assert sorted(calls) == [*range(len(towers(made)))] != [], calls
    for got, want in zip(made.parameters(), model.parameters(), strict=True):
        whole = torch.zeros(()) if got.grad is None else got.grad.full_tensor() * size
        expected = torch.zeros_like(want) if want.grad is None else want.grad
        if expected.abs().max() > 1e-9:
            found.append(relative_error(whole, expected))
        elif got.grad is not None:
            found.append(whole.abs().max().item())
    return max(found)


@pytest.mark.parametrize(
    ("world", "kind", "first", "second"),
    [
        *((2, "llava_next", "images", ""), (4, "qwen2_5_vl", "images", ""), (2, "qwen2_audio", "audio", "")),
        (2, "qwen2_5_omni_thinker", "both", "images"),  # its positions need images, too
        (2, "phi4_multimodal", "both", "audio"),  # it projects audio by other weights where there are images
    ],
)
def test_data_parallel_groups_with_different_media(ranks: Any, world: int, kind: str, first: str, second: str) -> None:
    """Types that make other blank images and clips for the group without."""
    assert max(ranks(world, sharded, kind, first, second)) <= 1e-9


@on_ranks
def without_clips() -> str:
    """The error of an encoder with BatchNorm that would have to run on a blank clip."""
    from hyper_cp.integrations.transformers import prepare_batch

    made, handler = prepared(tiny("granite_speech").train(), **RING)
    shard(made, cp_mesh())
    ids = torch.randint(3, 50, (1, 8), generator=torch.Generator().manual_seed(2))
    with pytest.raises(NotImplementedError) as caught:
        made(**prepare_batch(handler, {"input_ids": ids}))
    return str(caught.value)


def test_no_statistics_of_a_blank_clip(ranks: Any) -> None:
    for error in ranks(2, without_clips):
        assert "without audio clips under FSDP2" in error and "call eval() on the BatchNorm modules" in error


# --------------------------------------------------------------------------- Trainer, with DDP


@on_ranks
def trained(directory: str) -> tuple[float, float]:
    """The errors of the loss and of the gradients of a step of Trainer, in single precision."""
    from transformers import Trainer, TrainingArguments

    from hyper_cp.integrations.accelerate import ParallelismConfig
    from hyper_cp.integrations.trainer import ContextParallelTrainer

    class Both(ContextParallelTrainer, Trainer):
        pass

    model = tiny("qwen2_5_vl").float()
    batch, alone = batch_of(tiny("qwen2_5_vl")), copy.deepcopy(model)
    batch |= {"labels": labels_of(batch), "pixel_values": batch["pixel_values"].float()}
    arguments = TrainingArguments(
        directory,
        parallelism_config=ParallelismConfig(cp_size=2),
        per_device_train_batch_size=2,
        max_steps=1,
        use_cpu=True,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    more: dict[str, Any] = {"style": ContextParallel(**RING), "chunked_loss": True}
    trainer = Both(model, arguments, train_dataset=[0, 1], data_collator=lambda _: dict(batch), **more)
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    loss = alone(**batch, use_cache=False).loss
    loss.backward()
    moved = [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]
    largest = max(x.abs().max().item() for x in gradients(alone))
    differences = [(a - b).abs().max().item() for a, b in zip(moved, gradients(alone), strict=True)]
    return abs(trainer.state.log_history[0]["loss"] - loss.item()), max(differences) / largest


def test_a_step_of_trainer_with_a_chunked_loss_is_that_of_one_device(ranks: Any, tmp_path: Any) -> None:
    for loss, gradient in ranks(2, trained, str(tmp_path)):
        assert loss <= 1e-5 and gradient <= 5e-6


@on_ranks
def accumulated(directory: str, images_first: bool) -> tuple[float, float]:
    """The errors of the loss and of the gradients of a step of Trainer with two micro-batches, one of which has no
    images and fewer labels."""
    from hyper_cp.hf import Trainer
    from tests.integrations.test_trainer_finds import arguments

    model = tiny("qwen2_5_vl")
    alone, batch = copy.deepcopy(model), batch_of(model)
    assert not model.accepts_loss_kwargs, "on one device Trainer averages the means of the micro-batches"
    plain = {name: x.flip(0) for name, x in batch.items() if name not in ("pixel_values", "image_grid_thw")}
    plain["input_ids"] = plain["input_ids"].masked_fill(plain["input_ids"] == IMAGE, 7)
    plain["mm_token_type_ids"] = torch.zeros_like(plain["input_ids"])
    batches = [{**x, "labels": labels_of(x)} for x in (batch, plain)]
    batches[1]["labels"][:, ::2] = -100
    coming = iter(batches if images_first else batches[::-1])
    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 1, "remove_unused_columns": False}
    options = arguments(directory, learning_rate=1.0, **more)
    style = ContextParallel(**RING)
    trainer = Trainer(
        model, options, train_dataset=[0, 1, 2, 3], data_collator=lambda _: dict(next(coming)), style=style
    )
    before, total = [p.detach().clone() for p in model.parameters()], 0.0
    with InDouble():
        trainer.train()
        for x in batches:
            loss = alone(**x, use_cache=False).loss / 2
            loss.backward()
            total += loss.item()
    moved = [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]
    largest = max(x.abs().max().item() for x in gradients(alone))
    differences = [(a - b).abs().max().item() for a, b in zip(moved, gradients(alone), strict=True)]
    return abs(trainer.state.log_history[0]["loss"] - total), max(differences) / largest


@pytest.mark.parametrize("images_first", [True, False])
def test_micro_batches_of_trainer_with_and_without_images(ranks: Any, tmp_path: Any, images_first: bool) -> None:
    """The encoder has gradients of one micro-batch only, also if it is not the one whose backward reduces them."""
    for loss, gradient in ranks(2, accumulated, str(tmp_path), images_first):
        assert loss <= 1e-6 and gradient <= 1e-9


# --------------------------------------------------------------------------- errors


@on_ranks
def wrong(case: str) -> None:
    kinds = {"truncated": "llava", "marks": "glm5_next", "crops": "molmo2", "no crops": "molmo2"}
    kinds |= {"dropout": "phi4_multimodal", "sizes": "phi4_multimodal", "types": "paligemma"}
    model = tiny(kinds.get(case, "qwen2_5_vl"))
    batch = batch_of(model)
    if case == "truncated":
        batch = {name: x[:, :12] if x.shape == batch["input_ids"].shape else x for name, x in batch.items()}
    elif case == "audio":
        batch["input_features"] = torch.zeros(1, 80, 20)
    elif case == "marks":
        batch |= images(model, video=True)
    elif case == "crops":
        batch["image_num_crops"] = batch["image_num_crops"] + 1
    elif case == "no crops":
        del batch["image_num_crops"]
    elif case == "patches":
        batch["pixel_values"] = batch["pixel_values"][:-1]
    elif case == "embeddings":
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    elif case == "dropout":
        model.train().model.embed_tokens_extend.image_embed.drop.p = 0.1
    elif case == "sizes":
        del batch["image_sizes"]
    elif case == "types":
        del batch["token_type_ids"]
    made, handler = prepared(model, **RING)
    step(made, handler, batch, torch.zeros(batch["attention_mask"].shape, dtype=torch.int64))


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("truncated", ValueError, "placeholder tokens of the kind 'image', but its images make 32 rows"),
        ("audio", NotImplementedError, "got input_features, which its methods that encode"),
        ("patches", NotImplementedError, "got pixel_values, whose dimension 0 does not hold one part"),
        ("crops", NotImplementedError, "got pixel_values, whose dimension 0 does not hold what image_grids or"),
        ("no crops", NotImplementedError, "got pixel_values, without image_num_crops"),
        ("marks", NotImplementedError, "got pixel_values_videos, video_grid_thw, whose tokens it tells from those"),
        ("dropout", NotImplementedError, "Phi4MultimodalImageEmbedding has embd_pdrop=0.1"),
        (
            "sizes",
            NotImplementedError,
            "got media as image_attention_mask, image_pixel_values. They can be shared out as",
        ),
        ("embeddings", NotImplementedError, "pixel_values, image_grid_thw with inputs_embeds"),
        (
            "types",
            NotImplementedError,
            r"reads its attention mask itself \(ndim\).*PaliGemma makes it of token_type_ids",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(ranks: Any, case: str, kind: type[Exception], words: str) -> None:
    ranks.raises(2, kind, words, wrong, case)


@on_ranks
def causal_types() -> float:
    """The error of the logits of PaliGemma with types of 1, as its error advises, against one device without any."""
    model = tiny("paligemma").eval()
    batch = batch_of(model)
    made, handler = prepared(model, **RING)
    del batch["token_type_ids"]
    with InDouble(), torch.no_grad():
        want = model(**batch, use_cache=False).logits
        local = prepare_batch(handler, {**batch, "token_type_ids": torch.ones_like(batch["input_ids"])})
        got = handler.combine(made(**local).logits, 1, length=want.shape[1])
    shown = batch["attention_mask"].bool()
    return float((got - want)[shown].abs().max())


def test_types_of_1_make_a_causal_mask(ranks: Any) -> None:
    assert max(ranks(2, causal_types)) < 1e-10


@on_ranks
def generated(kind: str) -> bool:
    """True if a mesh of one rank generates what one device does, as the error of ``generate`` says."""
    from hyper_cp import context_parallel_mesh

    model = tiny(kind)
    made, handler = prepared(model, **RING)
    batch = {
        name: x[:1] if kind == "blip" or (len(x) == 2 and x.ndim == 2 and "grid" not in name) else x
        for name, x in batch_of(model).items()
    }
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}
    for prompt in (batch, {"input_ids": torch.full((1, 8), 7)}):
        with pytest.raises(NotImplementedError, match="a model of images and text"):
            generate(made, handler, **prompt, **options)
    one = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))["cp"]
    with InDouble(), context_parallel_mesh(made, one) as alone:
        found = [made.generate(**batch, **options), generate(made, alone, **batch, **options)]
    with InDouble():
        want = model.generate(**batch, **options)
    return all(torch.equal(got, want) for got in found)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "blip"])
def test_generate_refuses_models_of_images(ranks: Any, kind: str) -> None:
    """BLIP has a method of its own, which takes images before tokens."""
    assert all(ranks(2, generated, kind))


@on_ranks
def alone(kind: str) -> tuple[float, bool]:
    """The error on a mesh of one rank, of a plain batch and of one of ``prepare_batch``, padded at either end; and
    True if the model generates as before."""
    model, found = tiny(kind), []
    batch = batch_of(model)
    for mask in (batch["attention_mask"], batch["attention_mask"].flip(1)):
        given = {**batch, "attention_mask": mask}
        labels = labels_of(given)
        device, want = on_one_device(model, given, labels)
        made, handler = prepared(model, **RING)
        whole, seen = step(made, handler, given, labels), mask.bool()
        found += [relative_error(whole[seen], want[seen]), *worst(made, device).values()]
        made, _ = prepared(model, **RING)
        with InDouble():
            logits = made(**given, use_cache=False).logits
            loss_of(logits, labels).backward()
        found += [relative_error(logits.detach(), want), *worst(made, device).values()]
    options: dict[str, Any] = {**batch, "max_new_tokens": 2, "do_sample": False}
    with InDouble():
        return max(found), bool(torch.equal(made.generate(**options), model.generate(**options)))


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "paligemma", "qwen2_5_vl"])
def test_a_mesh_of_one_rank_runs_the_model_as_it_was(ranks: Any, kind: str) -> None:
    """Also models that make masks before their decoder is called."""
    ((error, generates),) = ranks(1, alone, kind)
    assert error <= 1e-9 and generates


# --------------------------------------------------------------------------- seams


@on_ranks
def outputs() -> tuple[list[int], bool]:
    """The rows of images in an output (transformers 5.24; else []), as placeholder tokens of this rank, and True if a
    tuple has the logits."""
    model, handler = prepared(tiny("qwen2_5_vl"), **RING)
    local = prepare_batch(handler, batch_of(model))
    with torch.no_grad(), InDouble():
        named, plain = model(**local), model(**local, return_dict=False)
    encoded = getattr(named, "image_outputs", None)
    tokens = (local["input_ids"] == model.config.image_token_id).sum().item()
    rows = [] if encoded is None else [tokens - sum(map(len, encoded.pooler_output))]
    return rows, torch.equal(named.logits, plain[0])


def test_outputs_have_the_rows_of_this_rank(ranks: Any) -> None:
    from transformers import __version__

    for rows, same in ranks(2, outputs):
        assert same and rows == ([] if __version__.startswith("5.23.") else [0])


def test_seams_of_models() -> None:
    """Models whose frames attend apart are recognised by their source, and so is the module that encodes images."""
    from hyper_cp.integrations.huggingface.media import frames_apart, owner_of, videos_are_images

    model = tiny("qwen2_5_vl")
    assert owner_of(model, model.get_decoder()) is model.model
    for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"):
        assert frames_apart(owner(tiny(kind))) and videos_are_images(owner(tiny(kind))), kind
    assert not frames_apart(owner(tiny("llava"))) and not videos_are_images(owner(tiny("llava")))


def test_methods_are_restored() -> None:
    from hyper_cp.integrations.huggingface.media import MediaHook

    inner: Any = nn.Module()
    inner.get_image_features, inner.get_audio_features = len, max
    hook: Any = SimpleNamespace(own={"get_image_features": None, "get_audio_features": min})
    MediaHook.after(hook, inner)
    assert "get_image_features" not in vars(inner) and inner.get_audio_features is min and not hook.own
    inner.get_video_features = len  # of a user
    MediaHook.after(hook, inner)
    assert inner.get_video_features is len


# --------------------------------------------------------------------------- who encodes what, and who reads it


@pytest.mark.parametrize(
    ("costs", "world", "bounds"),
    [
        ([1, 1], 2, [0, 1, 2]),
        ([10, 1], 2, [0, 1, 2]),
        ([5, 1, 1, 1], 4, [0, 0, 1, 2, 4]),
        ([1], 2, [0, 0, 1]),
        ([], 2, [0, 0, 0]),
    ],
)
def test_runs_of_equal_cost(costs: list[float], world: int, bounds: list[int]) -> None:
    found = runs_of_equal_cost(costs, world)
    assert found[0] == 0 and found[-1] == len(costs) and len(found) == world + 1
    parts = [sum(costs[a:b]) for a, b in itertools.pairwise(found)]
    assert max(parts, default=0) <= sum(costs) / world + max(costs, default=0)
    assert found == sorted(found)


def test_every_row_reaches_its_reader() -> None:
    import numpy as np

    made, order = [3, 0, 4], np.random.default_rng(0).permutation(7)
    readers = [order[:2], order[2:6], order[6:]]
    rows, starts = np.arange(7), [0, 3, 3, 7]
    plans = [read_rows(readers, made, rank) for rank in range(3)]
    for rank, plan in enumerate(plans):
        arrived: list[int] = []
        for other, sender in enumerate(plans):
            begin = sum(sender.sent[:rank])
            own = rows[starts[other] : starts[other + 1]]
            arrived += own[sender.leaving][begin : begin + sender.sent[rank]].tolist()
            assert sender.sent[rank] == plan.received[other]
        known = np.concatenate([rows[starts[rank] : starts[rank + 1]], np.array(arrived, dtype=np.int64)])
        assert known[plan.read].tolist() == readers[rank].tolist()


@on_ranks
def whole_text(kind: str) -> str:
    model = tiny(kind)
    mesh, style = cp_mesh(), ContextParallel(ulysses_degree=1)
    prepare_model(model, mesh, style=style)
    return error_of(lambda: model(input_ids=3 + torch.arange(32).view(2, 16)))


@pytest.mark.parametrize("kind", ["llava", "gemma3", "voxtral"])
def test_a_whole_batch_of_text_is_refused(ranks: Any, kind: str) -> None:
    """Before, the decoder, which gets embeddings and no tokens, took it for a share."""
    for error in ranks(2, whole_text, kind):
        assert "got the same (2, 16) tokens on all 2 ranks" in error, error

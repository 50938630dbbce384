"""The operator that each tile runs on, on CUDA: by the card, by what the user allows, and by what the tile is."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import random
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, list_flash_attention_impls, sdpa_kernel

from benchmarks.device import tiles
from hyper_cp.cli.diagnosis import tiles as diagnosis
from hyper_cp.cli.diagnosis.findings import NOTE, WARNING
from hyper_cp.ops import kernels
from hyper_cp.ops.kernels import TileInputs, cuda
from hyper_cp.schedule.documents import documents_table, read
from hyper_cp.schedule.lookup import Key, schedule
from tests.harness import operators
from tests.harness.cuda_standin import Card, Operators
from tests.harness.oracle import relative_error

FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
HOPPER, AMPERE, HOPPER_CU12 = Card(9), Card(8), Card(9, cudnn_version=91400)
BLACKWELL, BLACKWELL_CU12 = Card(10), Card(10, cudnn_version=91400)
NEWER, OLDER_TORCH = Card(9, cudnn_version=92300), Card(9, lenient=True)
ADA, CONSUMER = Card(8, 9), Card(12)
CARDS = HOPPER, AMPERE, HOPPER_CU12, BLACKWELL, BLACKWELL_CU12, NEWER, OLDER_TORCH, ADA, CONSUMER
PARTS = (((0, 20), (0, 20)), ((20, 64), (20, 64)))


def made(rows: int = 64, cols: int = 64, dims: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.bfloat16) -> Any:
    """q, k, v on the meta device; four query heads share a key head."""
    shapes = (2, 8, rows, dims[0]), (2, 2, cols, dims[0]), (2, 2, cols, dims[1])
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)


def kernel_of(*tensors: Tensor) -> str:
    """The name of the kernel that CUDA tensors like these get."""
    found = [kernel.name for kernel in cuda.KERNELS.values() if cuda.accepts(kernel, *tensors, True)]
    assert len(found) <= 1
    return found[0] if found else "reference"


def run_on(kernel: str, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> str:
    operator = cuda.KERNELS[kernel].operator(TileInputs(q, k, v, how.pop("band", (None, 0)), 1.0, **how))
    return "in several calls" if operator is None else operator.name


@pytest.mark.parametrize(
    "card, dense, dims, want",
    [
        (HOPPER, "cudnn", (64, 64), "cudnn flash flash flash"),
        (AMPERE, "flash", (64, 64), "flash flash flash flash"),
        (HOPPER_CU12, "flash", (64, 64), "flash flash flash flash"),
        (HOPPER, "cudnn", (192, 128), "cudnn flash flash flash"),  # values are filled up to the head dim of keys
        (HOPPER_CU12, "cudnn", (192, 128), "cudnn flash flash flash"),
        (AMPERE, "memory-efficient", (192, 128), "memory-efficient memory-efficient flash flash"),
        (BLACKWELL, "cudnn", (192, 128), "cudnn flash flash flash"),
        (BLACKWELL_CU12, "cudnn", (192, 128), "cudnn flash flash flash"),
        (HOPPER, "flash", (256, 256), "flash flash flash flash"),
        (OLDER_TORCH, "flash", (256, 256), "flash flash flash flash"),
        (NEWER, "cudnn", (256, 256), "cudnn flash flash flash"),
        (NEWER, "flash", (160, 160), "flash flash flash flash"),  # cuDNN has no backward of these
        (ADA, "memory-efficient", (208, 208), "memory-efficient memory-efficient in several calls in several calls"),
        (Card(7), "memory-efficient without flash", (64, 64), "memory-efficient memory-efficient in several calls "
                                                              "in several calls"),
    ],
    ids=str,
)  # fmt: skip
def test_the_operator_of_each_kind_of_tile(card: Card, dense: str, dims: tuple[int, int], want: str) -> None:
    """A dense tile that recurs, one that does not, a packed one, and a window."""
    with card.installed():
        kernel = kernel_of(*made(dims=dims))
        assert kernel.removesuffix(" without flash") == f"cuda {dense}".removesuffix(" without flash")
        x = made(dims=dims)
        found = (
            run_on(kernel, *x),
            run_on(kernel, *x, recurring=False),
            run_on(kernel, *x, parts=PARTS, recurring=False),
            run_on(kernel, *x, band=(-7, 0)),
        )
        assert " ".join(found) == want
        assert run_on(kernel, *x, mask=torch.ones(1, 1, 64, 64)) == "in several calls"


def test_one_key_is_not_for_cudnn() -> None:
    for rows, cols in ((64, 1), (1, 64), (1, 1)):
        assert run_on("cuda cudnn", *made(rows, cols), band=(None, None)) == "flash"
        assert run_on("cuda cudnn without flash", *made(rows, cols), band=(None, None)) == "memory-efficient"
    q, k, v = (torch.randn(x.shape) for x in made(5, 1))
    with Operators().installed() as called:  # if the user allows nothing else
        out, _ = cuda.KERNELS["cuda cudnn without flash and memory-efficient"].forward(
            TileInputs(q, k, v, (None, None), 1.0)
        )
    assert not called.calls and torch.allclose(out, v.repeat_interleave(4, 1).expand_as(out))


def test_an_activated_implementation_precedes_cudnn() -> None:
    x = made()
    with HOPPER.installed("FA3"):
        assert kernel_of(*x) == "cuda flash"
    with HOPPER.installed("FA4"):
        assert kernel_of(*x) == "cuda flash"
        assert kernel_of(*made(dims=(192, 128))) == "cuda cudnn without flash", "FA4 takes head dims up to 128"
        assert kernel_of(*made(dims=(256, 256))) == "cuda memory-efficient without flash"
    for card, name in ((AMPERE, "FA3"), (BLACKWELL, "FA3"), (CONSUMER, "FA4")):
        with card.installed(name):
            assert "without flash" in kernel_of(*x), "an activated implementation refuses other cards"


@pytest.mark.parametrize(
    "major, activated, installed, status, says",
    [
        (8, None, {"flash_attn_interface"}, NOTE, "version 2$"),
        (9, None, {"flash_attn_interface"}, WARNING, r"Call torch.nn.attention.activate_flash_attention_impl\('FA3'\)"),
        (10, None, {"flash-attn-4"}, WARNING, r"activate_flash_attention_impl\('FA4'\)"),
        (10, None, {"flash_attn_interface"}, NOTE, "also has FA4, not installed"),
        (9, "FA3", set(), NOTE, "^FA3$"),
        (8, "FA3", set(), WARNING, "not for this card"),
    ],
)
def test_the_doctor_suggests_a_faster_flash_attention(
    major: int, activated: str | None, installed: set[str], status: str, says: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(diagnosis, "current_flash_attention_impl", lambda: activated)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [name] if name in installed else [])
    found = diagnosis.flash_attention(major)
    assert found.status == status and re.search(says, found.note), found
    assert set(cuda.ACTIVATED) <= set(list_flash_attention_impls()), "the names of torch"


@pytest.mark.parametrize(
    "allowed, want",
    [
        ([FLASH], "cuda flash without memory-efficient"),
        ([EFFICIENT], "cuda memory-efficient without flash"),
        ([CUDNN], "cuda cudnn without flash and memory-efficient"),
        ([CUDNN, FLASH], "cuda cudnn without memory-efficient"),
        ([CUDNN, EFFICIENT], "cuda cudnn without flash"),
        ([MATH], "reference"),
        ([FLASH, EFFICIENT, CUDNN, MATH], "cuda cudnn"),
    ],
    ids=str,
)
def test_what_the_user_allows_is_obeyed(allowed: list[SDPBackend], want: str) -> None:
    """For every tile: a kernel has no operator that is not allowed, and refuses what needs one before it runs."""
    with HOPPER.installed(), sdpa_kernel(allowed):
        assert kernel_of(*made()) == want
    if want == "reference":
        return
    kernel = cuda.KERNELS[want]
    names = {FLASH: "flash", EFFICIENT: "memory-efficient", CUDNN: "cudnn"}
    found = {x.name for x in (kernel.dense, kernel.others, kernel.flash, kernel.biased) if x is not None}
    assert found <= {names[x] for x in allowed if x in names}
    for masked, band, refused in (
        (False, (None, 0), False),
        (True, (None, None), EFFICIENT not in allowed),
        (False, (-7, 0), EFFICIENT not in allowed and FLASH not in allowed),
    ):
        with pytest.raises(NotImplementedError, match="sdpa_kernel") if refused else nullcontext():
            kernels.check(kernel, masked, band)


def backends_that_refuse() -> Any:
    """A CUDA build without a driver raises before a backend can say why it refuses."""
    names = ("can_use_flash_attention", "can_use_efficient_attention", "can_use_cudnn_attention")
    refuse = {name: lambda params, debug: warnings.warn("refused", stacklevel=1) for name in names}
    needed = torch.backends.cuda.is_built() and not torch.cuda.is_available()
    return mock.patch.multiple(torch.backends.cuda, **refuse) if needed else nullcontext()


def test_a_call_that_no_backend_takes_names_the_reasons() -> None:
    q = torch.randn(1, 2, 4, 8)
    with (
        mock.patch.object(torch, "_fused_sdp_choice", return_value=int(SDPBackend.ERROR.value)),
        backends_that_refuse(),
        pytest.raises(RuntimeError, match=r"no attention backend takes query \(1, 2, 4, 8\).*flash: .*cudnn: "),
    ):
        cuda.accepts(cuda.KERNELS["cuda flash"], q, q, q, True)
    assert set(kernels.available("cuda", selected=False)) == {"reference", "flex attention", *cuda.KERNELS}


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_what_the_device_check_does_not_run_is_what_the_card_refuses(card: Card) -> None:
    """The first documented command: every kernel either runs on a card's operators, or is not asked."""
    wide = [
        replace(tiles.TILES[-1], rows=32, cols=32, dims=dims) for dims in ((64, 64), (192, 128), (160, 160), (256, 256))
    ]
    with card.installed(), Operators(card=card).installed():
        for name, kernel in cuda.KERNELS.items():
            for tile in wide:
                found = tiles.check_tile("kernels", kernel, tile, tile.tensors("cpu", torch.bfloat16))
                # ``is right`` of the numbers is tested elsewhere
                assert not found.failed, (name, tile, found)
                runs = card.cudnn_runs(tile.dims, True) if kernel.dense.name == "cudnn" else None
                assert runs in (None, found.status == "ok"), (name, tile, found)


def test_one_batch_row_for_all_keeps_the_head_dim_contiguous() -> None:
    for name, kernel in cuda.KERNELS.items():
        for tile in tiles.IN_EVERY_LAYOUT:
            with Operators().installed():
                layouts = dict.fromkeys(tiles.ARRANGED, "one batch row for all")
                tensors = tile.tensors("cpu", torch.float32)
                with mock.patch.object(cuda, "takes", lambda *_: True):
                    found = tiles.check_tile("layouts", kernel, tile, tensors, "", **layouts)
                permitted = tiles.refusal(name, torch.float32, tile.kind) if tile.kind == "banded" else ""
                assert found.status == "ok" or (permitted and found.status == "refused"), (name, tile, found)


def test_the_device_check_asks_pytorch_for_the_dtype() -> None:
    """Called directly, cuDNN's operator runs in float32 and returns other numbers. The memory-efficient one gets key
    heads repeated, so that heads are no reason to leave it out."""
    tile = replace(tiles.TILES[0], rows=64, cols=64)
    with HOPPER.installed(), Operators(card=HOPPER).installed():
        for name, kernel in cuda.KERNELS.items():
            single = tiles.check_tile("kernels", kernel, tile, tile.tensors("cpu", torch.float32))
            half = tiles.check_tile("kernels", kernel, tile, tile.tensors("cpu", torch.bfloat16))
            assert single.status == ("ok" if kernel.dense.name == "memory-efficient" else "refused"), single
            assert half.status == "ok", (name, half)


def test_the_memory_efficient_operator_gets_an_output_whose_heads_are_dense() -> None:
    """Its backward reads it as [B, S, H, D]: in half precision other strides gave other gradients, or NaN."""
    kernel, tile = cuda.KERNELS["cuda memory-efficient without flash"], tiles.IN_EVERY_LAYOUT[-1]
    for layout in tiles.LAYOUTS:
        for dims in ((64, 64), (64, 60)):
            other = replace(tile, band=tiles.CAUSAL, dims=dims)
            with Operators().installed(), mock.patch.object(cuda, "takes", lambda *_: True):
                found = tiles.check_tile("layouts", kernel, other, other.tensors("cpu", torch.float32), out=layout)
            assert found.status == "ok", (layout, dims, found)


def test_windows_of_any_shape_are_read_as_they_are_meant() -> None:
    """FlashAttention reads bounds of as many keys as there are, and missing ones, in a way of its own."""
    rng, kernel = random.Random(0), cuda.KERNELS["cuda cudnn without memory-efficient"]
    for _ in range(100):
        rows, cols = rng.randint(1, 40), rng.randint(1, 40)
        band = rng.choice((None, rng.randint(-40, 0))), rng.choice((None, rng.randint(0, 60)))
        parts = None
        if min(rows, cols) > 4 and rng.random() < 0.4:
            a, b = rng.randint(1, rows - 1), rng.randint(1, cols - 1)
            parts = (((0, a), (0, b)), ((a, rows), (b, cols)))
        tile = diagnosis.Tile(rows, cols, band, parts, batch=rng.choice((1, 2)), heads=(2, 1), dims=(8, 8))
        with Operators().installed(), mock.patch.object(cuda, "takes", lambda *_: True):
            found = tiles.check_tile("kernels", kernel, tile, tile.tensors("cpu", torch.float32))
        assert not found.failed, found


def test_rows_that_operators_cannot_load_are_copied() -> None:
    """A message has log-sum-exps between the rows of its tensors: operators refuse such strides, or misread them."""
    for name in ("cuda memory-efficient without flash", "cuda flash without memory-efficient", "cuda cudnn"):
        tile = diagnosis.Tile(40, 40, tiles.CAUSAL, heads=(2, 2))
        tensors = []
        for x in tile.tensors("cpu", torch.float32):
            wide = torch.zeros(2, 40, 2 * 64 + 2)
            tensors.append(wide[..., 1:-1].unflatten(2, (2, 64)).transpose(1, 2).copy_(x))
        with Operators().installed():
            results = diagnosis.run_tile(cuda.KERNELS[name], tile, tensors)
        assert all(relative_error(found, want) < 1e-5 for _, found, want in results), name


@pytest.mark.parametrize("ragged", [False, True])
def test_statistics_of_cudnn_are_those_of_its_forward(ragged: bool) -> None:
    """[B, S, H] in memory if PyTorch packs batch rows, which it does for tensors in [B, S, H, D] only."""
    for arrange in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        q, k, dout = (arrange(torch.randn(2, h, 16, 8)) for h in (8, 2, 8))
        tile = TileInputs(q, k, k, (None, 0), 1.0)
        out, lse = kernels.REFERENCE.forward(tile)
        with Operators(ragged=ragged).installed():
            found = cuda.KERNELS["cuda cudnn"].backward(tile, dout, out, lse)
        for a, b in zip(found, kernels.REFERENCE.backward(tile, dout, out, lse), strict=True):
            assert relative_error(a, b) <= 5e-6


def test_the_choice_is_the_same_without_gradients() -> None:
    """Under torch.compile the kernel is chosen inside the op, where no tensor requires a gradient. cuDNN has a forward
    of these heads, and no backward."""
    x = [x.requires_grad_() for x in made(dims=(160, 160))]
    with NEWER.installed():
        assert torch._fused_sdp_choice(*made(dims=(160, 160))) == int(CUDNN.value)
        with torch.no_grad():
            inside = kernel_of(*made(dims=(160, 160)))
        assert inside == kernel_of(*x) == "cuda flash"


def test_cudnn_finds_the_same_memory_layout_with_every_plan() -> None:
    """Plans do not compare the strides of out and dout. The stand-in refuses a plan that is found with other ones."""
    shape, plans = (2, 8, 16, 8), Operators()
    layouts = [
        torch.randn(shape),
        torch.randn(2, 16, 8, 8).transpose(1, 2),
        torch.randn(16, 2, 8, 8).permute(1, 2, 0, 3),
    ]
    with plans.installed():
        for q in layouts:
            for out in layouts:
                for dout in layouts:
                    tile = TileInputs(q, q[:, :2], q[:, :2], (None, 0), 1.0)
                    _, lse = cuda.KERNELS["cuda cudnn"].forward(tile)
                    cuda.KERNELS["cuda cudnn"].backward(tile, dout, out, lse)
    assert set(plans.calls) == {"cudnn"} and len(plans.plans) == 2 * len(layouts)


@pytest.mark.parametrize("layout", ["per_document", "head_tail"])
@pytest.mark.parametrize("kv_exchange", ["ring", "all_gather"])
def test_plans_of_cudnn_do_not_grow_with_documents(layout: str, kv_exchange: str) -> None:
    """40 batches of other documents: cuDNN, which keeps a plan per shape for good, sees the shapes of one batch."""
    length, ranks, drawn, shapes = 4096, 8, random.Random(0), set()
    x = torch.empty(1, 8, length, 64, dtype=torch.bfloat16, device="meta")
    for batch in range(40):
        cuts = sorted(drawn.sample(range(1, length // ranks), 12))
        boundaries = [0, *(ranks * cut for cut in cuts), length]
        table = None if not batch else read(documents_table(boundaries))
        here = "head_tail" if table is None else layout
        plan = schedule(Key(here, batch % ranks, ranks, 1, kv_exchange, False, (None, 0), length, length), table)
        for step in plan.forward:
            for tile in step.tiles:
                (q0, q1), (k0, k1) = tile.q, tile.k
                q, k = x[:, :, : q1 - q0], x[:, :2, : k1 - k0]
                given = TileInputs(q, k, k, tile.band, 1.0, None, tile.parts, recurring=plan.recurring)
                for piece in [given] if tile.parts is None else [given, *(t for _, _, t in given.rectangles())]:
                    operator = cuda.KERNELS["cuda cudnn"].operator(piece)
                    if operator is not None and operator.name == "cudnn":
                        shapes.add((piece.q.shape[2], piece.k.shape[2], piece.band))
                if tile.parts is not None and len(tile.parts) > 1:
                    assert cuda.KERNELS["cuda cudnn"].operator(given) is cuda.KERNELS["cuda cudnn"].flash
    assert 1 <= len(shapes) <= 4, f"{len(shapes)} shapes"


@pytest.mark.parametrize("kv_exchange", ["ring", "all_gather"])
def test_a_window_is_few_launches(kv_exchange: str) -> None:
    """S=128K, window 1024, 8 ranks: all tiles of a layer, forward and backward. With masks they are 2500."""
    length, ranks = 128 * 1024, 8
    for rank in range(ranks):
        plan = schedule(Key("head_tail", rank, ranks, 1, kv_exchange, False, (-1024, 0), length, length))
        with operators.Operators() as ran:
            for steps, backward in ((plan.forward, False), (plan.backward, True)):
                for step in steps:
                    for tile in step.tiles:
                        heads = ((tile.q, 8), (tile.k, 2), (tile.k, 2))
                        q, k, v = (
                            torch.empty(1, b - a, h, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
                            for (a, b), h in heads
                        )
                        given = TileInputs(q, k, v, tile.band, 1.0, None, tile.parts)
                        if backward:
                            lse = torch.empty(q.shape[:3], device="meta")
                            cuda.KERNELS["cuda cudnn"].backward(given, q, q, lse)
                        else:
                            cuda.KERNELS["cuda cudnn"].forward(given)
        assert 4 <= len(ran.launches) < 40, ran.launches

"""Attention and modules beside the styled ones are found when a plan is applied, or in the first forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel, styled_modules
from hyper_cp.mesh import comm
from hyper_cp.module.guards import refuse_mixing
from hyper_cp.module.mixing import mixing, row_of_call
from hyper_cp.module.model import Model
from hyper_cp.ops import gather_windows, windows
from tests.harness import modules
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import absolute_error
from tests.harness.ranks import error_of, on_ranks
from tests.harness.styled import RING1, clean, local

# --------------------------------------------------------------------------- modules that mix positions


class MambaMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)


MIXING: list[nn.Module] = [
    nn.Conv1d(4, 4, 3),
    nn.Conv1d(4, 4, 2, stride=2),
    nn.ConvTranspose1d(4, 4, 3),
    nn.RNN(4, 4),
    nn.LSTM(4, 4),
    nn.GRU(4, 4),
    nn.GRUCell(4, 4),
    nn.LSTMCell(4, 4),
    nn.BatchNorm1d(4),
    nn.BatchNorm1d(4, track_running_stats=False).eval(),
    nn.InstanceNorm1d(4),
    nn.GroupNorm(2, 4),
    nn.MaxPool1d(2),
    nn.AdaptiveAvgPool1d(1),
    nn.Softmax(dim=1),
    nn.Softmax(),
    nn.LogSoftmax(dim=-2),
    nn.Softmin(dim=0),
    MambaMixer(),
]
POINTWISE: list[nn.Module] = [
    nn.Conv1d(4, 4, 1),
    nn.Conv2d(4, 4, 3),
    nn.BatchNorm1d(4).eval(),
    nn.SyncBatchNorm(4),
    nn.Softmax(dim=-1),
    nn.LogSoftmax(dim=2),
    nn.LayerNorm(4),
    nn.Linear(4, 4),
    nn.Embedding(4, 4),
]


def test_modules_that_mix_positions_are_known() -> None:
    assert all(mixing(module) for module in MIXING)
    assert not any(mixing(module) for module in POINTWISE)


def test_calls_that_mix_a_number_of_positions_are_known() -> None:
    x, wide, narrow = torch.zeros(2, 3, 8), torch.zeros(3, 3, 5), torch.zeros(3, 3, 1)
    statistics = (None, None, None, None, True)
    mixing_calls = [
        ("conv1d", (x, wide)),
        ("conv1d", (torch.zeros(2, 3, 12), wide)),  # padded by hand, by what five weights reach
        ("conv1d", (torch.zeros(2, 3, 16), wide, None, 1, 0, 2)),  # and with a dilation of 2
        ("conv2d", (x[None], torch.zeros(2, 2, 1, 3))),
        ("gru", (x.mT,)),
        ("gru", (torch.zeros(13, 3), torch.tensor([3, 2, 2, 2, 1, 1, 1, 1]), x)),  # packed sequences of unequal lengths
        ("gru_cell", (torch.zeros(2, 3), torch.zeros(2, 3))),
        ("group_norm", (x, 3)),
        ("batch_norm", (x, *statistics)),
        ("batch_norm", (x[..., None], *statistics)),
        ("batch_norm", (torch.zeros(16, 3), *statistics)),
        ("avg_pool1d", (x, 2)),
        ("avg_pool1d", (x, 8)),
        ("avg_pool1d", (torch.zeros(2, 3, 10), 3, 1)),  # padded by hand, by what a window reaches
        ("max_pool2d", (x[:, None], (1, 2))),
        ("max_pool2d", (torch.zeros(2, 3, 1, 11), (1, 4), (1, 2))),
        ("lp_pool1d", (x, 1.0, 2)),
        ("lp_pool1d", (torch.zeros(2, 3, 10), 2.0, 3, 1)),
        ("adaptive_avg_pool1d", (x, 1)),
        ("interpolate", (x, 4)),
        ("cumsum", (x, -1)),
        ("roll", (x, 1, 2)),
        ("topk", (x, 2)),
        ("sum", (x, (0, 2))),
        ("fft_fft", (x,)),
        ("fft_rfft", (x.mT, 16, 1)),
        ("fft_fft2", (x.mT,)),
        ("fft_ifftn", (x.mT[..., None],)),
        ("stft", (x[0], 4)),
        ("pad", (x, (1, -1))),
        ("constant_pad_nd", (x.mT, (0, 0, -2, 2))),
        ("unfold", (torch.zeros(2, 10, 3), 1, 3, 1)),  # padded by hand, by what a window reaches
        ("unfold", (x[:, None], (1, 3))),
        ("unfold", (x[:, None], 3)),
        ("fliplr", (x.mT,)),
        ("flipud", (x[0].mT,)),
        ("rot90", (x, 2, (1, 2))),
        ("msort", (x[0].mT,)),
        ("gradient", (x,)),
        ("cumulative_trapezoid", (x,)),
        ("local_response_norm", (x.mT, 3)),
    ]
    harmless = [
        ("conv1d", (x, narrow)),
        ("conv1d", (x[..., :7], wide)),
        ("conv1d", (torch.zeros(2, 3, 13), wide)),
        ("conv2d", (x[None], torch.zeros(2, 2, 3, 1))),
        ("batch_norm", (x, None, None, None, None, False)),
        ("cumsum", (x, 1)),
        ("roll", (x, 2, 1)),
        ("topk", (x, 2, 1)),
        ("group_norm", (torch.zeros(8, 4), 2)),
        ("max_pool2d", (x[:, None], (3, 1))),
        ("avg_pool1d", (torch.zeros(2, 3, 10), 3)),
        ("avg_pool1d", (torch.zeros(2, 3, 11), 3, 1)),
        ("lp_pool1d", (x, 2.0, 1)),
        ("lp_pool1d", (torch.zeros(2, 3, 10), 4.0, 2, 1)),
        ("adaptive_avg_pool2d", (x[:, None], (1, 8))),
        ("linear", (x, wide)),
        ("fft_fft", (x.mT,)),
        ("fft_rfft", (x, None, 1)),
        ("fft_fft2", (x[..., None, None],)),
        ("pad", (x, (2, 0))),
        ("pad", (x, (0, -1))),
        ("pad", (x, (0, 0, 1, -1))),
        ("unfold", (x, 2, 4, 4)),
        ("unfold", (x, 1, 2, 1)),
        ("unfold", (x[:, None], (3, 1))),
        ("fliplr", (x,)),
        ("rot90", (x,)),
        ("cumulative_trapezoid", (x.mT,)),
    ]
    assert all(row_of_call(name, args, {}, {8}) for name, args in mixing_calls)
    assert not any(row_of_call(name, args, {}, {8}) for name, args in harmless)
    for dim in (1, 2):
        windows = {"dimension": dim, "size": 2, "step": 1}
        known = [
            row_of_call(name, (x,), given, {8}) for name, given in (("unfold", windows), ("gradient", {"dim": dim}))
        ]
        assert list(map(bool, known)) == [dim == 2] * 2
    assert row_of_call("unfold", (x[:, None],), {"kernel_size": 3, "stride": 2}, {8})
    assert not row_of_call("unfold", (x[:, None],), {"kernel_size": 2, "stride": 2}, {8})
    kernel = {"kernel_size": 2, "stride": 1}
    known = [row_of_call("max_pool1d", (torch.zeros(2, 3, 11),), kernel | {"dilation": n}, {8}) for n in (1, 3)]
    assert list(map(bool, known)) == [False, True]
    assert row_of_call("softmax", (x,), {"dim": 2}, {8}) and not row_of_call("softmax", (x,), {"dim": 1}, {8})


def test_an_error_names_what_mixes_positions() -> None:
    model = nn.ModuleDict({"conv": nn.Conv1d(4, 4, 3), "attn": modules.BNSD(), "mamba": MambaMixer()})
    with pytest.raises(ValueError, match=r"module 'conv' \(Conv1d\) convolves 3 neighbouring positions") as error:
        refuse_mixing(Model(model))
    assert "module 'mamba' (MambaMixer)" in str(error.value) and "mamba.conv" not in str(error.value)
    assert "call hyper_cp.ops.causal_conv1d in its place." in str(error.value)
    assert "exempt it from this check: ContextParallel(allow=('conv', 'mamba'))" in str(error.value)
    for allow in (("conv", "mamba"), ("*",), ("Conv1d", "MambaMixer"), ("c*", "m?mba")):
        refuse_mixing(Model(model, allow))
    refuse_mixing(Model(nn.Sequential(MambaMixer(), nn.Linear(2, 2)), ("Conv1d", "MambaMixer")))
    refuse_mixing(Model(model, ("conv",)), whole=(MambaMixer, nn.ModuleDict))


# --------------------------------------------------------------------------- models


class Attention(nn.Module):
    """Attention of one kind, of a sequence to itself or to other keys."""

    def __init__(self, kind: str = "sdpa", length: int | None = None, before: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.kind, self.length, self.before = kind, length, before
        if kind == "mha":
            self.mha = nn.MultiheadAttention(8, 2, dtype=torch.float64)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.before is not None:
            self.before()
        if self.length is not None:
            k, v = k[:, :, : self.length], v[:, :, : self.length]
        if self.kind == "mha":
            sequence = q[:, 0].transpose(0, 1)
            return self.mha(sequence, sequence, sequence)[0].transpose(0, 1)[:, None].expand_as(q)
        if self.kind == "flex":
            return flex_attention(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.length is None)


class Layers(nn.Module):
    """Layers ``styled`` under ContextParallel and others beside them, run in order."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.skip: tuple[str, ...] = ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            if name not in self.skip:
                q = q + layer(q, k, v)
        return q


def applied(model: nn.Module, *keys: str, **style: Any) -> nn.Module:
    keys = keys or ("layers.styled*",)
    return parallelize_module(model, cp_mesh(), dict.fromkeys(keys, ContextParallel(**{**RING1, **style})))


# --------------------------------------------------------------------------- when the plan is applied


@on_ranks
def plans() -> dict[str, str]:
    def of(*keys: str, style: dict[str, Any] | None = None, **layers: nn.Module) -> str:
        with comm.record_traffic() as log:
            error = error_of(lambda: applied(Layers(styled=Attention(), **layers), *keys, **style or {}))
        return error + "".join(operation for operation, _ in log.entries)

    conv = nn.Sequential(nn.Conv1d(4, 4, 3))

    class Whole(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3)

    return {
        "conv": of(conv=conv),
        "conv, allowed": of(conv=conv, style={"allow": ("layers.conv",)}),
        "container": of("layers"),
        "inside, ring": of("layers.whole", whole=Whole()),
        "inside, Ulysses": of("layers.whole", whole=Whole(), style={"ulysses_degree": None}),
        "inside, Ulysses, own qkv": of(
            "layers.whole", whole=Whole(), style={"ulysses_degree": None, "qkv_indices": None}
        ),
    }


def test_a_plan_beside_modules_that_mix_positions_is_refused(ranks: Any) -> None:
    for found in ranks(2, plans):
        assert found["conv"].startswith("ValueError: module 'layers.conv.0' (Conv1d) convolves 3 neighbouring")
        assert found["container"].startswith(
            "ValueError: ContextParallel is applied to module ModuleDict, which has no"
        )
        assert found["inside, ring"].startswith("ValueError: module 'layers.whole.conv'")
        assert found["inside, Ulysses, own qkv"].startswith("ValueError: module 'layers.whole.conv'")
        assert found["conv, allowed"] == found["inside, Ulysses"] == ""


@on_ranks
def alone() -> str:
    return error_of(lambda: applied(Layers(styled=Attention(), conv=nn.Conv1d(4, 4, 3))))


def test_one_rank_has_whole_sequences(ranks: Any) -> None:
    assert ranks(1, alone) == [""]


# --------------------------------------------------------------------------- in the first forward


@on_ranks
def first_forwards() -> dict[str, Any]:
    (q, k, v), _ = local()

    def of(model: nn.Module, **style: Any) -> list[Any]:
        applied(model, **style)
        return [error_of(lambda: model(q, k, v)), clean(), error_of(lambda: model(q, k, v)), clean()]

    return {
        "after": of(Layers(styled=Attention(), other=Attention())),
        "before": of(Layers(other=Attention(), styled=Attention())),
        "flex": of(Layers(styled=Attention(), other=Attention("flex"))),
        "mha": of(Layers(other=Attention("mha"), styled=Attention())),
        "allowed": of(Layers(styled=Attention(), other=Attention()), allow=("layers.other",)),
        "cross-attention": of(Layers(styled=Attention(), other=Attention(length=3))),
        "another sequence": of(Layers(styled=Attention(), other=_Short())),
        "all styled": of(Layers(styled=Attention(), styled_too=Attention())),
        "failing": of(Layers(styled=Attention(), other=modules.Failing())),
    }


class _Short(nn.Module):
    """A tower over another sequence, which every rank has as a whole."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        image = q.new_ones(1, 2, 5, 8)
        return F.scaled_dot_product_attention(image, image, image).mean()


def test_attention_that_is_not_routed_is_found(ranks: Any) -> None:
    for found in ranks(2, first_forwards):
        calls = {"flex": "flex_attention", "mha": "nn.MultiheadAttention"}
        for kind in ("after", "before", "flex", "mha"):
            first, left_nothing, second, _ = found.pop(kind)
            assert second == first
            call = calls.get(kind, "F.scaled_dot_product_attention")
            name = (
                "module 'layers.other.mha' (MultiheadAttention)"
                if kind == "mha"
                else "module 'layers.other' (Attention)"
            )
            assert first.startswith(f"RuntimeError: {name} calls {call} on this rank's share of the sequence (8 pos"), (
                kind
            )
            assert "ContextParallel(allow=('layers.other" in first and left_nothing
        first, left_nothing, _, nothing_either = found.pop("failing")
        assert first.startswith(("RuntimeError: module 'layers.other' (Failing)", "KeyError"))
        assert left_nothing and nothing_either
        assert all(result == ["", True, "", True] for result in found.values()), found


@on_ranks
def in_training_only() -> list[str]:
    """Errors of a forward in evaluation, and of one in training, which runs one more module."""
    (q, k, v), _ = local()
    model = Layers(styled=Attention(), other=Attention())
    applied(model).eval()
    model.skip = ("other",)
    evaluation = error_of(lambda: model(q, k, v))
    model.skip = ()
    return [evaluation, error_of(lambda: model.train()(q, k, v))]


def test_the_first_forward_of_each_mode_is_watched(ranks: Any) -> None:
    for evaluation, training in ranks(2, in_training_only):
        assert evaluation == "" and "calls F.scaled_dot_product_attention on this rank's share" in training


@on_ranks
def idle(skip: tuple[str, ...]) -> list[str]:
    (q, k, v), _ = local()
    model = Layers(styled=Attention(), styled_too=Attention(), linear=_Short())
    model.skip = skip
    applied(model)
    errors = [error_of(lambda: model(q, k, v)), error_of(lambda: styled_modules(model, ran=True))]
    model.skip = ()
    return [*errors, error_of(lambda: model(q, k, v)), error_of(lambda: styled_modules(model, ran=True))]


def test_styled_modules_that_do_not_run(ranks: Any) -> None:
    for none_ran, idle_both, after, idle_none in ranks(2, idle, ("styled", "styled_too")):
        assert none_ran.startswith(
            "RuntimeError: None of the 2 modules under ContextParallel (layers.styled, layers.styl"
        )
        assert idle_both.startswith("ValueError: 2 of 2 modules under ContextParallel have not run: layers.styled, ")
        assert after == idle_none == ""
    for one_ran, idle_one, after, idle_none in ranks(2, idle, ("styled",)):
        assert idle_one.startswith("ValueError: 1 of 2 modules under ContextParallel have not run: layers.styled.")
        assert one_ran == after == idle_none == ""  # a layer that is dropped at random, say: logged


@on_ranks
def residue() -> dict[str, bool]:
    (q, k, v), _ = local()
    interrupts = [True]

    def interrupt() -> None:
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt

    found = {}
    model = applied(Layers(plain=_Short(), styled=Attention(), linear=Attention(length=2, before=interrupt)))
    with suppress(KeyboardInterrupt):
        model(q, k, v)
    found["the next forward runs"] = error_of(lambda: model(q, k, v)) == ""
    found["nothing is left"] = clean()
    twin = copy.deepcopy(applied(Layers(styled=Attention(), other=Attention())))
    found["a copy is watched"] = error_of(lambda: twin(q, k, v)).startswith("RuntimeError: module 'layers.other'")
    model = applied(Layers(styled=Attention(), other=Attention()))
    model.layers["other"].compile(backend="eager")  # type: ignore[index,union-attr]
    error_of(lambda: model(q, k, v))
    found["a model with compiled parts is not watched"] = clean()
    return found


def test_the_watch_leaves_nothing_behind(ranks: Any) -> None:
    for found in ranks(2, residue):
        assert all(found.values()), found


# --------------------------------------------------------------------------- in a context_parallel block


class Mixed(nn.Module):
    """Attention after a module on ``[B, C, S]``, or on a tensor of another length."""

    def __init__(self, mixing: nn.Module, length: int | None = None) -> None:
        super().__init__()
        self.mixing, self.length = mixing, length

    def forward(self, x: Tensor) -> Tensor:
        other = x.transpose(1, 2) if self.length is None else x.new_ones(1, 8, self.length)
        if isinstance(self.mixing, nn.RNNBase):
            other = other.transpose(1, 2)
        self.mixing(other)
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@on_ranks
def blocks() -> dict[str, str]:
    def of(mixing: nn.Module, length: int | None = None, **options: Any) -> str:
        x, model = torch.randn(1, 16, 8), Mixed(mixing, length)
        with comm.record_traffic() as log:
            try:
                with context_parallel(cp_mesh(), buffers=[x], buffer_seq_dims=[1], **options):
                    model(x)
            except RuntimeError as error:
                return f"{error}{[op for op, _ in log.entries]}"
        return ""

    return {
        "conv1d": of(nn.Conv1d(8, 8, 3)),
        "conv_transpose1d": of(nn.ConvTranspose1d(8, 8, 3)),
        "lstm": of(nn.LSTM(8, 8, batch_first=True)),
        "gru": of(nn.GRU(8, 8, batch_first=True)),
        "rnn_tanh": of(nn.RNN(8, 8, batch_first=True)),
        "batch_norm": of(nn.BatchNorm1d(8)),
        "group_norm": of(nn.GroupNorm(2, 8)),
        "max_pool1d": of(nn.MaxPool1d(2)),
        "right: one position": of(nn.Conv1d(8, 8, 1)),
        "right: running statistics": of(nn.BatchNorm1d(8).eval()),
        "right: another length": of(nn.Conv1d(8, 8, 3), 6),
        "right: allowed by type": of(nn.Conv1d(8, 8, 3), allow=("Conv1d",)),
        "right: allowed by name": of(nn.LSTM(8, 8, batch_first=True), allow=("mix*",)),
    }


def test_functions_that_mix_positions_in_a_block(ranks: Any) -> None:
    for found in ranks(2, blocks):
        for name, text in found.items():
            if name.startswith("right"):
                assert text == "", name
            else:
                assert text.startswith("module 'mixing' (") and f"calls {name} on a tensor (1, 8, 8)" in text, (
                    name,
                    text,
                )
                assert text.endswith("exempt it from this check: context_parallel(..., allow=('mixing',))[]")


@on_ranks
def bindings() -> dict[str, str]:
    """Errors of attention by PyTorch's own functions in front of its operators, in a block."""
    q, names = torch.zeros(1, 2, 8, 8), ("attention_math", "flash_attention_for_cpu")
    with context_parallel(cp_mesh(), buffers=[torch.zeros(1, 16)], buffer_seq_dims=[1]):
        return {
            name: error_of(lambda name=name: getattr(torch, f"_scaled_dot_product_{name}")(q, q, q)) for name in names
        }


def test_functions_in_front_of_operators_are_refused_as_these(ranks: Any) -> None:
    for found in ranks(2, bindings):
        for name, error in found.items():
            assert error.startswith("NotImplementedError") and f"calls torch._scaled_dot_product_{name}" in error, error


# --------------------------------------------------------------------------- functions that a model calls itself


class ByHand(nn.Module):
    """A function of a tensor ``[B, C, S]``, which no module shows."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        self.function(x)
        return x


def pooled(x: Tensor) -> Tensor:
    """The means of four rows each, of all ranks; where windows end is counted by a sum along the share."""
    means = windows(x, range(3, -1, -1), every=4, mesh=cp_mesh()).mean(2)
    return gather_windows(means, every=4, length=16, mesh=cp_mesh())


@on_ranks
def by_hand(block: bool) -> dict[str, list[int]]:
    """Warnings of two forwards."""

    def of(function: Callable[[Tensor], Any], allow: tuple[str, ...] = ()) -> list[int]:
        style, found = ContextParallel(2, 1, 1, allow=allow), []
        model: nn.Module = Mixed(ByHand(function))
        if not block:
            model.attention = modules.BNSD(True)
            model.forward = lambda x: model.attention(*[model.mixing(x.mT).mT[:, None]] * 3)
            model = parallelize_module(model, cp_mesh(), {"attention": style})
        batch = ContextParallelHandler(cp_mesh(), style).get_batch_on_this_cp_rank({"x": torch.zeros(1, 16, 4)})
        for _ in range(2):
            x = torch.zeros(1, 16, 4)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if block:
                    with context_parallel(cp_mesh(), buffers=[x], buffer_seq_dims=[1], allow=allow):
                        model(x)
                else:
                    model(batch["x"])
            found.append(sum("mixes positions" in str(x.message) for x in caught))
        return found

    calls: dict[str, Callable[[Tensor], Any]] = {
        "cumsum": lambda x: x.cumsum(-1),
        "cumsum_": lambda x: x.clone().cumsum_(-1),
        "flip": lambda x: x.flip(2),
        "roll": lambda x: x.roll(1, 2),
        "topk": lambda x: x.topk(2),
        "interpolate": lambda x: F.interpolate(x, scale_factor=2),
        "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x, 16), 16),
        "pad": nn.ConstantPad1d((1, -1), 0),
        "unfold": lambda x: F.pad(x, (2, 0)).unfold(2, 3, 1),
        "fliplr": lambda x: x.mT.fliplr(),
        "right: pad and windows of channels": lambda x: F.pad(x.mT, (1, -1)).unfold(2, 3, 1),
        "mean": lambda x: x.mT.mean(1),
        "softmax": lambda x: F.softmax(x.mT, dim=1),
        "conv2d of a grid": lambda x: F.conv2d(x.unflatten(2, (2, 4)), torch.zeros(4, 1, 3, 3), padding=1, groups=4),
        "batch_norm of a grid": lambda x: F.batch_norm(x.unflatten(2, (2, 4)), None, None, training=True),
        "group_norm of a grid": lambda x: F.group_norm(x.unflatten(2, (2, 4)), 2),
        "pool of a grid": lambda x: F.avg_pool2d(x.unflatten(2, (2, 4)), 3, 1, 1),
        "adaptive pool of a grid": lambda x: F.adaptive_avg_pool2d(x.unflatten(2, (2, 4)), 1),
        "mean of a grid": lambda x: x.unflatten(2, (2, 4)).mean((2, 3)),
        "roll of a grid": lambda x: x.unflatten(2, (2, 4)).roll((1, 1), (2, 3)),
        "fft of a grid": lambda x: torch.fft.rfft2(x.unflatten(2, (2, 4))),
        "right: patches of a grid": lambda x: (
            F.conv2d(x.unflatten(2, (2, 4)), torch.zeros(4, 4, 2, 2), stride=2),
            F.avg_pool2d(x.unflatten(2, (2, 4)), 2),
        ),
        "layer_norm": lambda x: F.layer_norm(x.mT, x.mT.shape[1:]),
        "argsort": lambda x: x.mT[..., 0].argsort(dim=1),
        "sort": lambda x: x.mT[..., 0].sort(),
        "linalg.norm": lambda x: torch.linalg.norm(x.mT, dim=1),
        "cosine_similarity": lambda x: F.cosine_similarity(x.mT, x.mT, dim=1),
        "right: order of whole numbers": lambda x: x.mT[..., 0].long().argsort(-1),
        "norm": lambda x: x.mT.norm(p=2, dim=1, keepdim=True),
        "vector_norm": lambda x: torch.linalg.vector_norm(x.mT, 2, 1),
        "normalize": lambda x: F.normalize(x.mT),
        "std_mean": lambda x: torch.std_mean(x.mT, dim=1),
        "quantile": lambda x: x.mT.quantile(0.5, dim=1),
        "right: norms of channels": lambda x: (
            F.layer_norm(x.mT, (4,)),
            F.rms_norm(x.mT, (4,)),
            x.mT.norm(dim=-1),
            F.normalize(x.mT, dim=-1),
            F.normalize(x.mT, 2, 2),
        ),
        "mean of all rows": lambda x: x.mT.softmax(-1).flatten(0, 1).mean(axis=0),
        "right: mean of the last": lambda x: (x.mean(-1), x.mT.mean(-1), x.mT.norm(1, -1)),
        "right: counts": lambda x: x.mT.flatten(0, 1).long().sum(0),
        "right: weight": lambda x: (torch.ones(16, 4) * 2).sum(0),
        "right: no tokens": lambda x: x.new_zeros(0, 4).sum(0),
        "right: channels": lambda x: (x.cumsum(1), x.roll(1, 1), x.topk(2, dim=1)),
    }
    if not block:  # which refuses it
        calls["conv1d"] = lambda x: F.conv1d(F.pad(x, (2, 0)), torch.zeros(1, 4, 3))
        calls["avg_pool1d"] = lambda x: F.avg_pool1d(F.pad(x, (2, 0)), 3, 1)
        calls["group_norm"] = lambda x: F.group_norm(x, 1)
        calls["right: windows"] = lambda x: pooled(x.mT)
    return {name: of(call) for name, call in calls.items()} | {"right: allowed": of(calls["cumsum"], ("mixing",))}


@pytest.mark.parametrize("block", [False, True], ids=["plan", "block"])
def test_functions_along_the_share_are_warned_of(ranks: Any, block: bool) -> None:
    """A plan's model is watched in its first forward."""
    for found in ranks(2, by_hand, block):
        for name, counts in found.items():
            assert counts == [int(not name.startswith("right")), 0], (name, counts)


@on_ranks
def one_of_two(block: bool) -> list[int]:
    """Warnings of two forwards of a model with two modules of a type, of which the first one is exempted."""
    found, style = [], ContextParallel(1, 2, 1, None, allow=("first",))
    model = nn.ModuleDict({name: ByHand(lambda x: x.mean(1)) for name in ("first", "second")})
    model["layer"] = Windows(0)
    model.forward = lambda x: model["second"](model["first"](model["layer"](x)))  # type: ignore[method-assign]
    if not block:
        parallelize_module(model, cp_mesh(), {"layer": style})
    for _ in range(2):
        x = torch.zeros(1, 16, 8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if block:
                with context_parallel(cp_mesh(), buffers=[x], buffer_seq_dims=[1], allow=("first",)):
                    model(x)
            else:
                model(x[:, :8])
        found.append(sum("module 'second' (ByHand) calls mean" in str(w.message) for w in caught))
    return found


@pytest.mark.parametrize("block", [False, True], ids=["plan", "block"])
def test_a_module_that_is_exempted_exempts_no_other(ranks: Any, block: bool) -> None:
    assert ranks(2, one_of_two, block) == [[1, 0]] * 2


class _Bias(torch.autograd.Function):
    """Adds a bias, whose gradient is a sum over positions."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, x: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.sum((0, 1)), None


@on_ranks
def gradients_of_weights() -> int:
    """Warnings of a backward in a block, which sums up over positions, and of an optimizer's statistics."""
    x, bias = torch.zeros(1, 16, 4), torch.ones(4, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with context_parallel(cp_mesh(), buffers=[x], buffer_seq_dims=[1]):
            _Bias.apply(bias, x).sum().backward()
            (torch.ones(8, 4) * 2).square().mean(0)
    return sum("mixes positions" in str(w.message) for w in caught)


def test_sums_of_gradients_and_optimizers_are_not_warned_of(ranks: Any) -> None:
    assert ranks(2, gradients_of_weights) == [0, 0]


@on_ranks
def statistics() -> list[str]:
    """Errors of forwards of a model whose statistics were off when its plan was applied: off, on, and on again without
    a share."""
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "attention": modules.BNSD(True)}).eval()
    model = parallelize_module(model, cp_mesh(), {"attention": ContextParallel(2, 1, 1)})
    found = [error_of(lambda: model["norm"](torch.zeros(1, 4, 8)))]
    found.append(error_of(lambda: model.train()["norm"](torch.zeros(1, 4, 8))))
    allowed = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "attention": modules.BNSD(True)}).eval()
    parallelize_module(allowed, cp_mesh(), {"attention": ContextParallel(2, 1, 1, allow=("norm",))})
    found.append(error_of(lambda: allowed.train()["norm"](torch.zeros(1, 4, 8))))
    return found


def test_statistics_that_begin_after_the_plan_are_refused(ranks: Any) -> None:
    for off, on, allowed in ranks(2, statistics):
        assert off == allowed == "" and on.startswith("ValueError: a BatchNorm1d under a plan"), (off, on, allowed)


# --------------------------------------------------------------------------- positions that are counted locally


class RotaryTable(nn.Module):
    def forward(self, at: Tensor) -> Tensor:
        return at[..., None] * torch.ones(8)


class Counting(nn.Module):
    """nanoGPT: a table of positions, or a rotary embedding, at positions that the model may count itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.tokens = kind, modules.BNSD(True), nn.Embedding(64, 8)
        self.table: nn.Module = nn.Embedding(64, 8) if "table" in kind else RotaryTable()

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        if "counted" in self.kind:
            at = torch.arange(ids.shape[1])
        elif "padded row" in self.kind:  # its first token is the first of this rank
            at = torch.stack([torch.arange(ids.shape[1]), at[1]])
        x = (self.tokens(ids) + self.table(at))[:, None]
        return self.inner(x, x, x)


@on_ranks
def local_positions(kind: str, layout: str, length: int = 16, ends: tuple[int, ...] = (), **options: Any) -> list[int]:
    """Warnings of two forwards."""
    style = ContextParallel(2, 1, 1, layout=layout, **options)
    handler = ContextParallelHandler(cp_mesh(), style)
    model = parallelize_module(Counting(kind), cp_mesh(), {"inner": style})
    whole: dict[str, Any] = {"tokens": torch.randint(64, (2, length), generator=torch.Generator())}
    if ends:
        whole["cu_seqlens"] = torch.tensor(ends)
    batch, found = handler.get_batch_on_this_cp_rank(whole), []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with handler.documents(batch):
                model(batch["tokens"], batch["position_ids"])
        found.append(sum("They were counted locally" in str(x.message) for x in caught))
    return found


def test_positions_that_are_counted_locally_warn_once(ranks: Any) -> None:
    for kind in ("counted table", "counted rotary"):
        assert ranks(2, local_positions, kind, "contiguous") == [[0, 0], [1, 0]]
        assert ranks(2, local_positions, kind, "head_tail") == [[1, 0], [1, 0]]
        assert ranks(2, local_positions, kind, "head_tail", allow=("table",)) == [[0, 0], [0, 0]]
    for kind in ("given table", "table with a padded row"):
        assert ranks(2, local_positions, kind, "head_tail") == [[0, 0]] * 2
    for kind, warned in (("counted table", 1), ("given table", 0)):  # padded, or packed
        assert ranks(2, local_positions, kind, "contiguous", 15) == [[0, 0], [warned, 0]]
        assert ranks(2, local_positions, kind, "contiguous", 16, (0, 5, 16)) == [[0, 0], [warned, 0]]
        assert ranks(2, local_positions, kind, "per_document", 16, (0, 4, 16)) == [[warned, 0]] * 2
        assert ranks(2, local_positions, kind, "contiguous", 16, (0, 8, 16)) == [[0, 0]] * 2  # they are right


def test_modules_whose_code_belongs_to_no_file() -> None:
    names: dict[str, Any] = {"nn": nn, "causal_conv1d_fn": lambda x: x}
    source = "class Made(nn.Module):\n def forward(self, x): return {}(x)"
    exec(source.format("causal_conv1d_fn").replace("class Made", "__name__ = None\nclass Made"), names)
    names["__name__"] = None
    assert mixing(names["Made"]()) == "runs along the sequence"
    exec(source.format("abs"), names)
    assert mixing(names["Made"]()) is None


# --------------------------------------------------------------------------- windows of the sequence


class Windows(nn.Module):
    """Attention within windows of ``size`` tokens, which become rows of the batch; 0: of the whole sequence."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(-1, self.size or x.shape[1], 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(windows, windows, windows).transpose(1, 2).reshape(x.shape)


@on_ranks
def windows_of(size: int, block: bool) -> list[int]:
    """Warnings of two forwards, of a plan or in a block."""
    module, x, found = Windows(size), torch.randn(2, 16, 8), []
    if not block:
        parallelize_module(module, cp_mesh(), ContextParallel(1, 2, 1, None))
    around = context_parallel(cp_mesh(), buffers=[x], buffer_seq_dims=[1]) if block else nullcontext()
    with around:
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                module(x if block else x[:, :8])
            found.append(sum("windows, frames or blocks" in str(w.message) for w in caught))
    return found


def test_windows_that_are_rows_of_the_batch_warn_once(ranks: Any) -> None:
    """Each is joined with that of the other ranks: errors of 0.9, without a word before."""
    for block in (False, True):
        assert ranks(2, windows_of, 4, block) == [[1, 0]] * 2
        assert ranks(2, windows_of, 0, block) == [[0, 0]] * 2


@on_ranks
def frames(patches: int) -> list[list[int]]:
    """Warnings of two forwards of spatial and of temporal attention over a video ``[2, T, patches, 8]``, whose frames a
    block splits."""
    found, video = [], torch.randn(2, 16, patches, 8)
    for spatial in (True, False):
        said = []
        with context_parallel(cp_mesh(), buffers=[video], buffer_seq_dims=[1]):
            for _ in range(2):
                heads = video.unflatten(3, (2, 4)) if spatial else video.transpose(1, 2).unflatten(3, (2, 4))
                rows = heads.flatten(0, 1).transpose(1, 2)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    F.scaled_dot_product_attention(rows, rows, rows)
                said.append(sum("(a frame of a video, rows of a table, say)" in str(w.message) for w in caught))
        found.append(said)
    return found


def test_frames_as_rows_of_the_batch_warn_once(ranks: Any) -> None:
    """Attention within frames met those of the other ranks, without a word if frames have 4 or 16 patches."""
    for patches in (4, 16):
        assert ranks(2, frames, patches) == [[[1, 0], [0, 0]]] * 2


@on_ranks
def rows_of_a_table(rows: int, channels: int) -> list[int]:
    """Warnings of attention along the sequence, and of attention among the rows of the batch, or among the channels of
    series that are its rows, at every position."""
    series, found = torch.randn(rows * channels, 16, 8), []
    with context_parallel(cp_mesh(), buffers=[series], buffer_seq_dims=[1], layout="contiguous"):
        across = series.unflatten(0, (rows, channels)).movedim(2, 1).flatten(0, 1)  # [rows * share, channels, 8]
        for x in (series, across):
            heads = x.unflatten(2, (2, 4)).transpose(1, 2)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                F.scaled_dot_product_attention(heads, heads, heads)
            found.append(sum("(a frame of a video, rows of a table, say)" in str(w.message) for w in caught))
    return found


def test_attention_among_rows_of_the_batch_is_warned_of(ranks: Any) -> None:
    for rows, channels in ((1, 3), (1, 12), (2, 7)):
        assert ranks(2, rows_of_a_table, rows, channels) == [[0, 1]] * 2


class InWindows(nn.Module):
    """Windows that a block cuts: as rows of the batch that its attention gets, or in a loop within the attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Windows(0)
        if how == "loop":
            self.inner.forward = self.loop  # type: ignore[method-assign]

    def loop(self, x: Tensor) -> Tensor:
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        parts = [F.scaled_dot_product_attention(part, part, part) for part in heads.split(4, 2)]
        return torch.cat(parts, 2).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "pooled":  # half as many tokens, twice: no parts of the sequence
            return self.inner(x[:, ::2]).repeat_interleave(2, 1)
        if self.how == "longer":  # four times as many tokens, of which every fourth one remains
            return self.inner(x.repeat_interleave(4, 1))[:, ::4]
        return self.inner(x if self.how == "loop" else x.reshape(-1, 4, 8)).view_as(x)


@on_ranks
def windows_of_a_block(how: str, batched: bool) -> list[int]:
    """Warnings of two forwards in the block of a batch."""
    style, mesh, found = ContextParallel(1, 2, 1, None), cp_mesh(), []
    model = parallelize_module(InWindows(how), mesh, {"inner": style})
    handler = ContextParallelHandler(mesh, style)
    batch = handler.get_batch_on_this_cp_rank({"inputs_embeds": torch.ones(3, 16, 8)})
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught, handler.documents(batch if batched else None):
            warnings.simplefilter("always")
            model(batch["inputs_embeds"])
        found.append(len(caught))
        words = "each token has become several (an hourglass" if how == "longer" else "windows, frames or blocks"
        assert all(words in str(w.message) for w in caught)
    return found


def test_windows_that_a_block_or_a_loop_cuts_warn_once(ranks: Any) -> None:
    """Only windows that became rows of the batch in the styled module itself did."""
    assert ranks(2, windows_of_a_block, "rows", True) == [[1, 0]] * 2
    for batched in (True, False):
        assert ranks(2, windows_of_a_block, "loop", batched) == [[1, 0]] * 2
    # Other sequences, of the parts that ranks have. As long as those of joint attention might be, with a text of this
    # length before each share.
    assert ranks(2, windows_of_a_block, "pooled", True) == [[0, 0]] * 2
    assert ranks(2, windows_of_a_block, "longer", True) == [[1, 0]] * 2


# --------------------------------------------------------------------------- two layouts in one model


def warned_of(model: nn.Module, text: str) -> list[int]:
    """The warnings with a text in each of two forwards."""
    found = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(2, 8, 8))
        found.append(sum(text in str(w.message) for w in caught))
    return found


@on_ranks
def warnings_of_layouts(layout: str) -> list[int]:
    """Warnings of two forwards of a model with another layout in its second attention."""
    model = nn.ModuleList(Windows(0) for _ in range(2))
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    plan = {str(i): ContextParallel(1, 2, 1, None, layout=x) for i, x in enumerate(("head_tail", layout))}
    parallelize_module(model, cp_mesh(), plan)
    return warned_of(model, "in different layouts")


def test_layouts_that_differ_in_a_model_warn_once(ranks: Any) -> None:
    assert ranks(2, warnings_of_layouts, "contiguous") == [[1, 0]] * 2
    assert ranks(2, warnings_of_layouts, "head_tail") == [[0, 0]] * 2


# --------------------------------------------------------------------------- two meshes in one model


@on_ranks
def warnings_of_meshes(names: tuple[str, str]) -> list[int]:
    """Warnings of two forwards of a model whose two attentions run on these dimensions of a mesh."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = nn.ModuleList(Windows(0) for _ in range(2))
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    for i, name in enumerate(names):
        parallelize_module(model, world[name], {str(i): ContextParallel(1, 2, 1, None)})
    return warned_of(model, "split over different ranks")


def test_meshes_that_differ_in_a_model_warn_once(ranks: Any) -> None:
    """The second one joins shares of two batches: errors of 1, without a word before."""
    assert ranks(4, warnings_of_meshes, ("cp", "dp")) == [[1, 0]] * 4
    assert ranks(4, warnings_of_meshes, ("cp", "cp")) == [[0, 0]] * 4


# --------------------------------------------------------------------------- tokens that every rank adds or drops


class Adds(nn.Module):
    """Attention over a sequence to which it adds tokens, from which it drops one, or to whose keys it adds some."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Windows(0)

    def forward(self, x: Tensor) -> Tensor:
        if "latents" in self.how:  # among the keys, or not
            x, latents = (y.unflatten(2, (2, 4)).transpose(1, 2) for y in (x, x[:, :3] * 0))
            k = torch.cat([x, latents], 2) if "keys" in self.how else x
            return F.scaled_dot_product_attention(latents, k, k)
        if "keys" in self.how:
            q = x.unflatten(2, (2, 4)).transpose(1, 2)
            k = torch.cat([torch.zeros_like(q[:, :, :1]).repeat(1, 1, 90 if "many" in self.how else 1, 1), q], 2)
            return F.scaled_dot_product_attention(q, k, k)
        more = torch.zeros_like(x[:, :1])
        added = {"token": torch.cat([more, x], 1), "text": torch.cat([more.repeat(1, 77, 1), x], 1)}
        return self.inner({**added, "drop": x[:, :-1], "": x}[self.how])


@on_ranks
def warnings_of_added(how: str, block: bool) -> list[int]:
    """Warnings of two forwards, in the block of a batch or without one."""
    style, mesh = ContextParallel(1, 2, 1, None, cross_attention="latents" in how), cp_mesh()
    model = parallelize_module(Adds(how), mesh, style if "keys" in how or "latents" in how else {"inner": style})
    handler, found = ContextParallelHandler(mesh, style), []
    batch = handler.get_batch_on_this_cp_rank({"inputs_embeds": torch.ones(2, 16, 8)})
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught, handler.documents(batch if block else None):
            warnings.simplefilter("always")
            model(batch["inputs_embeds"])
        words = "would count once for each of the 2 ranks" if "keys" in how else "once for each rank"
        found.append(sum(words in str(w.message) for w in caught))
    return found


def test_tokens_that_every_rank_adds_warn_once(ranks: Any) -> None:
    """Errors of 0.07 to 0.16 in random models, without a word before."""
    for how in ("token", "drop", "keys"):
        for block in (True, False):
            assert ranks(2, warnings_of_added, how, block) == [[1, 0]] * 2, (how, block)
    for how in ("text", "many keys"):  # more than a rank has of its own: another sequence, unless the batch is known
        assert ranks(2, warnings_of_added, how, True) == [[1, 0]] * 2, how
    assert ranks(2, warnings_of_added, "", True) == [[0, 0]] * 2
    assert ranks(2, warnings_of_added, "keys and latents", False) == [[1, 0]] * 2
    assert ranks(2, warnings_of_added, "latents", False) == [[0, 0]] * 2


# --------------------------------------------------------------------------- keys of other queries


class Probe(nn.Module):
    """Attention of one learned query to the first keys of a sequence, or to all."""

    def __init__(self, kind: str, length: int | None) -> None:
        super().__init__()
        self.kind, self.length = kind, length
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True) if kind == "mha" else None

    def forward(self, x: Tensor) -> Tensor:
        x, query = x[:, : self.length], torch.ones(len(x), 1, 8)
        if self.mha is not None:
            return self.mha(query, x, x)[0]
        q, k = (y.unflatten(2, (2, 4)).transpose(1, 2) for y in (query, x))
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


@on_ranks
def warnings_of_probes(kind: str, length: int | None, allow: tuple[str, ...]) -> list[int]:
    """Warnings of two forwards of a model with a head that pools, behind its layer or before it."""
    model = nn.ModuleDict({"layer": Windows(0), "probe": Probe(kind, length)})
    if kind == "before":
        model.forward = lambda x: (model.probe(x), model.layer(x))  # type: ignore[method-assign, union-attr, operator]
    else:
        model.forward = lambda x: model.probe(model.layer(x))  # type: ignore[method-assign, union-attr, operator]
    parallelize_module(model, cp_mesh(), {"layer": ContextParallel(1, 2, 1, None, allow=allow)})
    return warned_of(model, "as keys of other queries")


@pytest.mark.parametrize("kind", ["sdpa", "mha", "before"])
def test_heads_that_attend_to_a_share_warn_once(ranks: Any, kind: str) -> None:
    """Outputs were 29 to 55 % off, and no word was said."""
    assert ranks(2, warnings_of_probes, kind, None, ()) == [[1, 0]] * 2
    assert ranks(2, warnings_of_probes, kind, 5, ()) == [[0, 0]] * 2
    assert ranks(2, warnings_of_probes, kind, None, ("probe*",)) == [[0, 0]] * 2


class Memory(nn.Module):
    """Attention to a memory."""

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        q, k = (y.unflatten(2, (2, 4)).transpose(1, 2) for y in (x, memory))
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


@on_ranks
def warnings_of_memories(exchange: str, source: str, length: int, masked: bool) -> list[int]:
    """Warnings of two calls: of a share of a memory, split in a layout, by a style for head_tail; or, replicated, of a
    memory of this length, which is an entry of the batch."""
    style = ContextParallel(1, 2, 1, None, kv_exchange=exchange, layout="head_tail", cross_attention=True)
    model, found = parallelize_module(Memory(), cp_mesh(), style), []
    handlers = [ContextParallelHandler(cp_mesh(), layout) for layout in ("head_tail", source)]
    replicated = {"memory": torch.ones(2, length, 8)} if exchange == "replicated" and length < 24 else {}
    whole = {"memory": None} if length == 5 else {}
    batch = handlers[0].get_batch_on_this_cp_rank({"inputs_embeds": torch.ones(2, 16, 8), **replicated}, seq_dims=whole)
    memory = handlers[1].dispatch(torch.ones(2, length, 8), 1) if not replicated else batch["memory"]
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool) if masked else None
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught, handlers[0].documents(batch):
            warnings.simplefilter("always")
            model(batch["inputs_embeds"], memory, mask)
        words = "in the layout of this style", "Leave it whole"
        found.append(sum(any(x in str(w.message) for x in words) for w in caught))
    return found


def test_memories_that_were_split_otherwise_warn_once(ranks: Any) -> None:
    """Gradients were 1 to 11 % off, and no word was said."""
    for length in (16, 24):
        assert ranks(2, warnings_of_memories, "all_gather", "contiguous", length, True) == [[1, 0]] * 2
        assert ranks(2, warnings_of_memories, "all_gather", "contiguous", length, False) == [[0, 0]] * 2
    assert ranks(2, warnings_of_memories, "all_gather", "head_tail", 32, True) == [[0, 0]] * 2
    assert ranks(2, warnings_of_memories, "replicated", "head_tail", 16, False) == [[1, 0]] * 2
    assert ranks(2, warnings_of_memories, "replicated", "head_tail", 24, False) == [[1, 0]] * 2
    assert ranks(2, warnings_of_memories, "replicated", "head_tail", 5, False) == [[0, 0]] * 2


# --------------------------------------------------------------------------- plans that do not know the model


class Parts(nn.Module):
    """Three layers of attention, and perhaps a convolution."""

    def __init__(self, convolution: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Windows(0) for _ in range(3))
        self.conv = nn.Conv1d(8, 8, 3, padding=1) if convolution else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x if self.conv is None else self.conv(x.mT).mT


@on_ranks
def errors_of_parts(how: str, convolution: bool, layers: int) -> list[str]:
    """Errors of three forwards, where the style is on some layers."""
    model, style = Parts(convolution), ContextParallel(1, 2, 1, None)
    if how == "container":
        parallelize_module(model.layers, cp_mesh(), {str(i): style for i in range(layers)})
    for layer in model.layers[:layers] if how == "modules" else ():
        parallelize_module(layer, cp_mesh(), style)
    return [error_of(lambda: model(torch.ones(2, 8, 8))) for _ in range(3)]


def test_plans_of_parts_guard_the_model_that_runs(ranks: Any) -> None:
    """Before, what such a plan left out was never found: every forward was wrong."""
    for how in ("modules", "container"):
        for found in ranks(2, errors_of_parts, how, False, 2):
            assert not found[0] and all("'layers.2' (Windows) calls" in error for error in found[1:]), found
        for found in ranks(2, errors_of_parts, how, True, 3):
            assert all("module 'conv' (Conv1d) convolves" in error for error in found), found
        assert ranks(2, errors_of_parts, how, False, 3) == [["", "", ""]] * 2


class StopsGradients(nn.Module):
    """Attention whose queries have the output of another attention call in them, without its gradient."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            before = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q + before, k, v, is_causal=True)


@on_ranks
def stopped_gradients() -> float:
    """The largest error of an output and of the gradients of this rank's tokens."""
    mesh, style = cp_mesh(), ContextParallel(2, 1, ulysses_degree=1)
    handler, model = ContextParallelHandler(mesh, style), parallelize_module(StopsGradients(), mesh, style)
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 2, 8, 4, dtype=torch.float64, generator=g).requires_grad_() for _ in range(3)]
    shares = [handler.dispatch(x.detach(), 2).requires_grad_() for x in whole]
    want, got = StopsGradients()(*whole), model(*shares)
    for out in (want, got):
        out.square().sum().backward()
    errors = [absolute_error(got, handler.dispatch(want, 2))]
    errors += [absolute_error(y.grad, handler.dispatch(x.grad, 2)) for x, y in zip(whole, shares, strict=True)]
    return max(errors)


def test_attention_without_gradients_inside_of_a_module(ranks: Any) -> None:
    """It was taken for a reentrant checkpoint, and refused."""
    assert max(ranks(2, stopped_gradients)) <= 1e-10

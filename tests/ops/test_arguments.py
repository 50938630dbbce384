"""Arguments of ``ops.attention`` that do not fit raise an error of ours, on every rank, and never hang or crash."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor.parallel import parallelize_module

import hyper_cp
from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.mesh import comm
from hyper_cp.ops import attention
from tests.harness import modules
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import on_ranks
from tests.harness.styled import RING1

PACKAGE = Path(hyper_cp.__file__).parent
OURS = (ValueError, TypeError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Spec:
    """A tensor, by its shape and dtype, which a rank makes."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64

    def make(self) -> Tensor:
        return torch.ones(self.shape).to(self.dtype)


@dataclass(frozen=True)
class Wrong:
    """A value that no call may accept."""

    value: Any


RIGHT = Spec((2, 4, 4, 8))

Arguments = dict[str, Any]


def made(value: Any) -> Any:
    value = value.value if isinstance(value, Wrong) else value
    return value.make() if isinstance(value, Spec) else value


def call_attention(mesh: Any, arguments: Arguments) -> None:
    arguments = {name: made(value) for name, value in arguments.items()}
    attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), mesh=mesh, **arguments)


@on_ranks
def outcomes(calls: list[Arguments]) -> list[str]:
    """For each call "" if it returned without a wrong value, or raised an error of ours that names an argument, of the
    wrong ones if there are any, before any transfer; else what happened."""
    mesh, found = cp_mesh(), []
    for call in calls:
        wrong = [name for name, value in call.items() if isinstance(value, Wrong)]
        with comm.record_traffic() as log:
            try:
                call_attention(mesh, call)
            except Exception as error:
                sent = [operation for operation, _ in log.entries if operation != "agreement"]
                raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
                alone = len(wrong) == len(call) - 3 == 1 and {call[name] for name in "qkv"} == {RIGHT}
                names = wrong if alone else (*call, "query", "key", "value")
                named = any(name in str(error) for name in names if len(name) > 1)
                if not isinstance(error, OURS) or PACKAGE not in raised_in.parents or sent or not named:
                    found.append(f"{call}: {type(error).__name__}: {error} (in {raised_in.name}; sent {sent})")
                    continue
            else:
                if wrong:
                    found.append(f"{call}: {wrong} were accepted")
                    continue
            found.append("")
    return found


def rarely(usual: Any, *unusual: Any) -> st.SearchStrategy[Any]:
    """One of the usual values mostly, and an unusual one in every eighth case or so."""
    return st.integers(0, 7).flatmap(lambda n: st.sampled_from(unusual) if n == 0 else st.sampled_from(usual))


SHAPES = [(1, 2, 4, 8), (2, 4, 4, 8), (1, 4, 8, 2), (1, 6, 3, 4)]
ODD_SHAPES = [(1, 0, 4, 8), (0, 2, 4, 8), (1, 2, 0, 8), (1, 2, 4, 0), (2, 4, 8), (), (1, 2, 3, 4, 5), (1, 2, 6, 8)]
DTYPES = [torch.float64, torch.float32]
ODD_DTYPES = [torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.float8_e4m3fn]
NAN, INF = float("nan"), float("inf")

# fmt: off
VALUES: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "is_causal": ([False, True], [], [None, 1, "yes"]),
    "scale": ([None, 0.5], [NAN, INF], ["x", 0, 0.0, -1.0]),
    "enable_gqa": ([True, False], [None], []),
    "ulysses_degree": ([1, None, 2], [], [0, -1, 3, "auto", True, 1.5]),
    "kv_exchange": (["all_gather", "ring", "needed", "replicated"], [], ["p2p", None, 3, ["ring"]]),
    "layout": (["contiguous", "head_tail", "per_document", "balanced", "auto"], [], ["zigzag", None, 3, []]),
    "load_balance": ([False, True], [], [None, 1, "x"]),
    "attn_mask": ([None], [], [3, "x", [[True]]]),
    "window": ([None, None, (2, 1)], [(0, 0), (None, -1), [1, 2]], [(-2, 1), (1,), "ab", 5, (1.5, 2), ()]),
    "documents": ([None], [], [
        [], [0], [3, 1], [[]], "x", 7, [0.5, 1.5], [None],
        Spec((1, 2, 3), torch.int64), Spec((0,), torch.int64), Spec((2,), torch.float64),
    ]),
    "dropout_p": ([0.0, 0.0, 0.1], [], [1.0, -1, NAN, "x", None]),
    "return_lse": ([False, True], [None, "x"], []),
    "head_groups": ([1, 1, 2, "auto"], [3], [0, -1, "x", True, None, 1.0]),
    "slices": ([None], [[], [((0, 8), (0, 8), "causal")]], [3, "x", [3], [((0, 8), (0, 9), 0)], [((0, 8), (0, 8), 5)]]),
    "exchange_stages": (["auto", 2, 1], [], [0, -1, "x", True, None, 1.0]),
}
"""Usual values, unusual ones that may work, and wrong ones. Further masks and documents are made for a length."""
# fmt: on


@st.composite
def drawn_call(draw: st.DrawFn) -> Arguments:
    shape, dtype = draw(rarely(SHAPES, *ODD_SHAPES)), draw(rarely(DTYPES, *ODD_DTYPES))
    q = Spec(shape, dtype)
    call: Arguments = {"q": q, "k": q, "v": q}
    odd = [Spec(s, d) for s in ODD_SHAPES for d in (dtype, *ODD_DTYPES[:2])]
    for name in "qkv":
        call[name] = draw(rarely([q], *odd, None, 3, "q"))
    length = 2 * shape[2] if len(shape) > 2 else 8
    masks = [Spec((length, length), torch.bool), Spec((1, 1, length, length), dtype)]
    more: dict[str, tuple[list[Any], list[Any]]] = {
        "attn_mask": ([None, None, *masks], odd),
        "documents": ([None, [0, 3, length]], [[0, length, 9], [[0, length], [0, 1, length]], [[0, length]] * 3]),
    }
    for name in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True)):
        usual, unusual, wrong = VALUES[name]
        also = more.get(name, ([], []))
        call[name] = draw(rarely(usual + also[0], *unusual, *also[1], *map(Wrong, wrong)))
    return call


@pytest.mark.slow
@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate])  # a failure shows its own call
@given(calls=st.lists(drawn_call(), min_size=30, max_size=30))
def test_every_argument_works_or_is_refused(ranks: Any, calls: list[Arguments]) -> None:
    for found in ranks(2, outcomes, calls):
        assert not [text for text in found if text]


def test_every_wrong_value_is_refused(ranks: Any) -> None:
    right: Arguments = dict.fromkeys("qkv", RIGHT)
    calls = [{**right, name: Wrong(value)} for name, (_, _, wrong) in VALUES.items() for value in wrong]
    for found in ranks(2, outcomes, calls):
        assert len(found) > 50 and not [text for text in found if text]


# --------------------------------------------------------------------------- the errors


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"q": "q"}, "TypeError", "query is a str, not a tensor"),
        ({"k": None}, "TypeError", "key is a NoneType, not a tensor"),
        ({"q": Spec((2, 4, 8))}, "ValueError", r"query has shape \(2, 4, 8\). It must be \[batch"),
        ({"scale": "x"}, "TypeError", "scale='x' is a str, not a number"),
        ({"return_lse": "x"}, "TypeError", "return_lse is a str. It says if a further result is returned"),
        ({"scale": -0.5}, "ValueError", "scale=-0.5. Fused kernels hide keys before they scale"),
        ({"scale": float("nan")}, "ValueError", "scale=nan. Fused kernels hide keys before they scale"),
        ({"scale": np.float32(-0.5)}, "ValueError", "scale=-0.5. Fused kernels hide keys before they scale"),
        ({"is_causal": None}, "TypeError", "is_causal=None must be True or False. It says that no query sees"),
        ({"enable_gqa": "x"}, "TypeError", "enable_gqa='x' must be True or False"),
        ({"dropout_p": None}, "TypeError", "dropout_p=None is a NoneType"),
        ({name: Spec((1, 0, 4, 8)) for name in "qkv"}, "ValueError", "without heads|query has 0 heads and key 0"),
        ({name: Spec((1, 2, 0, 8)) for name in "qkv"}, "ValueError", r"has shape \(1, 2, 0, 8\), without positions"),
        ({name: Spec((1, 2, 4, 0)) for name in "qkv"}, "ValueError", "without numbers in a head"),
    ],
)
def test_an_error_names_the_argument(ranks: Any, arguments: Arguments, error: str, words: str) -> None:
    q = Spec((1, 2, 4, 8))
    ranks.raises(2, error, words, call_once, {"q": q, "k": q, "v": q} | arguments)


@on_ranks
def call_once(arguments: Arguments) -> None:
    call_attention(cp_mesh(), arguments)


@on_ranks
def learned(name: str) -> None:
    x, number = torch.ones(1, 2, 4, 8), torch.nn.Parameter(torch.tensor(0.5))
    attention(x, x, x, mesh=cp_mesh(), **{name: number})


@pytest.mark.parametrize("name", ["scale", "dropout_p"])
def test_a_learned_number_is_refused(ranks: Any, name: str) -> None:
    """Its gradient would be missing. (PyTorch's own function refuses it too.)"""
    ranks.raises(2, "TypeError", f"{name} is a tensor that requires a gradient", learned, name)


@on_ranks
def zero_heads() -> None:
    x = torch.ones(1, 0, 4, 8)
    parallelize_module(modules.BNSD(), cp_mesh(), ContextParallel(**RING1))(x, x, x)


def test_a_module_without_heads(ranks: Any) -> None:
    ranks.raises(2, "ValueError", "query has 0 heads and key 0. Attention needs at least one of each", zero_heads)


# --------------------------------------------------------------------------- forward-mode differentiation


@on_ranks
def forward_mode() -> list[str]:
    mesh, x = cp_mesh(), torch.randn(1, 2, 4, 8, dtype=torch.float64)

    def function(q: Tensor) -> Any:
        return attention(q, x, x, mesh=mesh)

    def dual(call: Any) -> None:
        with forward_ad.dual_level():
            call(forward_ad.make_dual(x, x))

    styles = ({**RING1}, {"seq_dim": 2, "head_dim": 1}, {**RING1, "qkv_indices": None})
    styled = [parallelize_module(modules.BNSD(), mesh, ContextParallel(**style)) for style in styles]
    calls = [
        lambda: torch.func.jvp(function, (x,), (x,)),
        lambda: dual(function),
        lambda: dual(lambda q: attention(x, x, q, mesh=mesh)),
        *(lambda module=module: dual(lambda q: module(q, x, x)) for module in styled),
    ]
    handler, mask = ContextParallelHandler(mesh, ContextParallel(**RING1)), x.new_zeros([4 * mesh.size()] * 2)
    without_gradients = [
        lambda: dual(lambda t: attention(x, x, x, mesh=mesh, sinks=t[0, :, 0, 0])),
        lambda: dual(lambda t: attention(x, x, x, mesh=mesh, attn_mask=mask + t[0, 0, 0, 0])),
        lambda: dual(lambda t: handler.combine(t, 2)),
        lambda: dual(lambda t: handler.roll_tensor(t, 2)),
    ]
    calls += [torch.no_grad()(call) for call in without_gradients]
    found = []
    for call in calls:
        with comm.record_traffic() as log:
            try:
                call()
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}{[op for op, _ in log.entries if op != 'agreement']}")
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_forward_mode_is_refused(ranks: Any, world: int) -> None:
    for found in ranks(world, forward_mode):
        ours = found if world > 1 else found[:3]  # on one rank torch computes by itself
        assert len(ours) == (10 if world > 1 else 3)
        for text in ours:
            assert text.startswith("NotImplementedError:") and "runs under forward-mode differentiation" in text
            assert text.endswith("[]")

"""Arguments of ``ops.attention`` that do not fit raise an error of ours, on every rank, and never hang or crash."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor.parallel import parallelize_module

import hyper_cp
from hyper_cp import ContextParallel
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


Arguments = dict[str, Any]


def made(value: Any) -> Any:
    return value.make() if isinstance(value, Spec) else value


@on_ranks
def outcomes(calls: list[Arguments]) -> list[str]:
    """For each call "" if it returned, or raised an error of ours before any transfer; else what happened."""
    mesh, found = cp_mesh(), []
    for call in calls:
        arguments = {name: made(value) for name, value in call.items()}
        with comm.record_traffic() as log:
            try:
                attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), mesh=mesh, **arguments)
            except Exception as error:
                sent = [operation for operation, _ in log.entries if operation != "agreement"]
                raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
                named = any(name in str(error) for name in (*call, "query", "key", "value") if len(name) > 1)
                if not isinstance(error, OURS) or PACKAGE not in raised_in.parents or sent or not named:
                    found.append(f"{call}: {type(error).__name__}: {error} (in {raised_in.name}; sent {sent})")
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
    options = {
        "is_causal": rarely([False, True], None, 1, "yes"),
        "scale": rarely([None, 0.5], 0, 0.0, -1.0, float("nan"), float("inf"), "x"),
        "enable_gqa": rarely([True, False], None),
        "ulysses_degree": rarely([1, None, 2], 0, -1, 3, "auto", True, 1.5),
        "kv_exchange": rarely(["all_gather", "ring", "needed", "replicated"], "p2p", None, 3, ["ring"]),
        "layout": rarely(["contiguous", "head_tail", "per_document", "balanced", "auto"], "zigzag", None, 3, []),
        "load_balance": rarely([False, True], None, 1, "x"),
        "attn_mask": rarely([None, None, None, *masks], *odd, 3, "x", [[True]]),
        "window": rarely([None, None, (2, 1)], (-2, 1), (1,), "ab", 5, (1.5, 2), (0, 0), (None, -1), [1, 2], ()),
        "documents": rarely(
            [None, None, [0, 3, length]],
            [],
            [0],
            [3, 1],
            [0, length, 9],
            [[0, length], [0, 1, length]],
            [[0, length]] * 3,
            [[]],
            "x",
            7,
            [0.5, 1.5],
            [None],
            Spec((1, 2, 3), torch.int64),
            Spec((0,), torch.int64),
            Spec((2,), torch.float64),
        ),
        "dropout_p": rarely([0.0, 0.0, 0.1], 1.0, -1, float("nan"), "x", None),
        "return_lse": rarely([False, True], None, "x"),
        "head_groups": rarely([1, 1, 2, "auto"], 0, -1, "x", 3, True, None, 1.0),
        "exchange_stages": rarely(["auto", 2, 1], 0, -1, "x", True, None, 1.0),
    }
    names = draw(st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True))
    return call | {name: draw(options[name]) for name in names}


@pytest.mark.slow
@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate])  # a failure shows its own call
@given(calls=st.lists(drawn_call(), min_size=30, max_size=30))
def test_every_argument_works_or_is_refused(ranks: Any, calls: list[Arguments]) -> None:
    for found in ranks(2, outcomes, calls):
        assert not [text for text in found if text]


# --------------------------------------------------------------------------- the errors


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"q": "q"}, "TypeError", "query is a str, not a tensor"),
        ({"k": None}, "TypeError", "key is a NoneType, not a tensor"),
        ({"q": Spec((2, 4, 8))}, "ValueError", r"query has shape \(2, 4, 8\). It must be \[batch"),
        ({"scale": "x"}, "TypeError", "scale='x' is a str, not a number"),
        ({"dropout_p": None}, "TypeError", "dropout_p=None is a NoneType"),
        ({name: Spec((1, 0, 4, 8)) for name in "qkv"}, "ValueError", "without heads|query has 0 heads and key 0"),
        (
            {name: Spec((1, 2, 0, 8)) for name in "qkv"},
            "ValueError",
            r"query has shape \(1, 2, 0, 8\), without positions",
        ),
        ({name: Spec((1, 2, 4, 0)) for name in "qkv"}, "ValueError", "without numbers in a head"),
    ],
)
def test_an_error_names_the_argument(ranks: Any, arguments: Arguments, error: str, words: str) -> None:
    q = Spec((1, 2, 4, 8))
    ranks.raises(2, error, words, call_attention, {"q": q, "k": q, "v": q} | arguments)


@on_ranks
def call_attention(arguments: Arguments) -> None:
    arguments = {name: made(value) for name, value in arguments.items()}
    attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), mesh=cp_mesh(), **arguments)


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
        ours = found if world > 1 else found[:3]  # on one rank modules make their own calls, and torch answers
        assert len(ours) == (6 if world > 1 else 3)
        for text in ours:
            assert text.startswith("NotImplementedError:") and "runs under forward-mode differentiation" in text
            assert text.endswith("[]")

"""Arguments of the style and of the functions that make meshes work, or raise an error that names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel_mesh, split_cp_mesh
from tests.harness import modules
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import on_ranks
from tests.harness.styled import BNSD, apply

# fmt: off
STYLE: dict[str, tuple[list[Any], list[Any]]] = {
    "seq_dim": ([1, 0], [-1, True, None, "x", 1.5]),
    "head_dim": ([2, 0], ["x", None, [], -1]),
    "ulysses_degree": ([None, 1, 2, "auto"], [0, -1, "x", "all", True, 1.5, []]),
    "qkv_indices": (
        [(0, 1, 2), None, (0, 1, 1), [0, 1, 2]],
        [3, "abc", (0,), (0, 1), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1, 2), (-1, 1, 2), (1.5, 1, 2), ([], 1, 2)],
    ),
    "qkv_kwarg_names": (
        [(), ("q", "k", "v")], ["qkv", 3, None, ("q",), ("q", "q", "q"), ("q", "kv", "kv"), (1, 2, 3), [[], [], []]],
    ),
    "load_balance": ([False, True], [None, "x", 1]),
    "kv_exchange": (["all_gather", "ring", "needed", "replicated"], ["p2p", None, 3, []]),
    "layout": (["contiguous", "head_tail"], ["x", "zigzag", None, [], 3]),
    "use_local_output": ([True, False], [None, "x"]),
    "cross_attention": ([False, True], ["yes", None]),
    "window": ([None, (1, 2), [None, None]], [5, "ab", (1,), (1.5, 2), (None, -5)]),
    "head_groups": ([1, "auto"], [0, "x", None, True, 1.5]),
    "exchange_stages": (["auto", 1, 2], [0, "x", None, True, 1.5]),
    "allow": ([(), ("a",)], ["a", 3, None, (1,)]),
}
"""Values that work beside the defaults of the others, and values that never do."""
# fmt: on

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"seq_dim": 1, "head_dim": 1}, "different dimensions"),
    ({"qkv_indices": None, "qkv_kwarg_names": ("q", "k", "v")}, "qkv_kwarg_names="),
    ({"qkv_indices": (0, 1, 1), "qkv_kwarg_names": ("q", "k", "v")}, "k and v are equal"),
    ({"head_groups": 2}, "head_groups=2 with qkv_indices=(0, 1, 2)"),
    ({"layout": "head_tail", "load_balance": True}, "balanced already"),
    ({"layout": "head_tail", "use_local_output": False}, "contiguous order"),
    ({"cross_attention": True, "window": (4, 0)}, "cross_attention=True with layout="),
    ({"cross_attention": True, "layout": "balanced"}, "cross_attention=True with layout="),
    (
        {"kv_exchange": "p2p"},
        "kv_exchange='p2p' is unknown. It says how keys and values travel. Choose one of 'all_gather', 'ring'",
    ),
]


def complaint(call: Callable[[], Any], *names: str) -> str:
    """``"accepted"`` if a call works, "" if it raises an error that names one of its arguments, else that error."""
    try:
        call()
    except Exception as error:
        fine = isinstance(error, (ValueError, TypeError)) and any(name in str(error) for name in names)
        return "" if fine else f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("name", STYLE)
def test_an_argument_of_the_style(name: str) -> None:
    right, wrong = STYLE[name]
    for value in right:
        ContextParallel(**{name: value})
    assert not {repr(x): text for x in wrong if (text := complaint(lambda x=x: ContextParallel(**{name: x}), name))}


@settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.fixed_dictionaries(
        {}, optional={name: st.sampled_from([*right, *wrong]) for name, (right, wrong) in STYLE.items()}
    )
)
def test_arguments_of_the_style(arguments: dict[str, Any]) -> None:
    """Together: a wrong one is refused, whatever the others are; right ones work, or are said to contradict."""
    refused = any(repr(value) in map(repr, STYLE[name][1]) for name, value in arguments.items())
    assert complaint(lambda: ContextParallel(**arguments), *arguments) in (("",) if refused else ("", "accepted"))


@pytest.mark.parametrize("arguments, words", CONTRADICTIONS, ids=str)
def test_arguments_that_contradict_each_other(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        ContextParallel(**arguments)


def test_settings_of_a_style_can_be_read() -> None:
    given = {"kv_exchange": "ring", "layout": "head_tail", "load_balance": False, "window": (3, 0), "head_groups": 2}
    given |= {"seq_dim": 2, "head_dim": 1, "ulysses_degree": 2, "qkv_indices": None, "allow": ("tower",)}
    style = ContextParallel(**given)
    assert {name: getattr(style, name) for name in given} == given
    assert ContextParallel(load_balance=True).load_balance


@on_ranks
def mesh_arguments() -> list[str]:
    """The calls that do not end as they should: the first values of each row work, the others are refused."""
    mesh = cp_mesh()
    model, family = apply(modules.BNSD(), **BNSD), split_cp_mesh(mesh)

    def swap(*arguments: Any, **options: Any) -> None:
        with context_parallel_mesh(*arguments, **options):
            pass

    degrees = [1, 2], [0, -1, 3, 1.0, "2", None, [], True]
    wrong_degrees = [2, "12", [0], [-1], [3], [1.5], ["2"], [None], [[]], [True]]
    ulysses = ["auto", None, 1, 2], [0, -1, 3, 1.5, "x", True, []]
    no_mesh = [None, 3, "cp", [mesh]]
    rows: list[tuple[Callable[[Any], Any], list[Any], list[Any], tuple[str, ...]]] = [
        (split_cp_mesh, [mesh], no_mesh, ("mesh",)),
        (lambda x: split_cp_mesh(mesh, x), [[], [1], (2,), [2, 2], {1, 2}], wrong_degrees, ("degrees",)),
        *((function, *degrees, ("degree",)) for function in (family.mesh, family.cp, family.dp)),
        (lambda x: swap(x, mesh), [model], [None, 3, nn.Linear(2, 2)], ("model", "ContextParallel")),
        (lambda x: swap(model, x), [mesh], [None, 3, "cp", family], ("mesh",)),
        (lambda x: swap(model, mesh, ulysses_degree=x), ["style", *ulysses[0]], ulysses[1], ("ulysses_degree",)),
        (lambda x: apply(modules.BNSD(), **BNSD, ulysses_degree=x), *ulysses, ("ulysses_degree",)),
        (lambda x: ContextParallel()._apply(modules.BNSD(), x), [mesh], no_mesh, ("mesh",)),
        (lambda x: ContextParallelHandler(x, "contiguous").cp, [mesh], no_mesh, ("mesh",)),
    ]
    found = []
    for i, (call, right, wrong, names) in enumerate(rows):
        for want, values in (("accepted", right), ("", wrong)):
            outcomes = [(x, complaint(lambda c=call, x=x: c(x), *names)) for x in values]
            found += [f"row {i}, {x!r}: {outcome!r}" for x, outcome in outcomes if outcome != want]
    return found


def test_arguments_of_meshes(ranks: Any) -> None:
    assert ranks(2, mesh_arguments) == [[], []]

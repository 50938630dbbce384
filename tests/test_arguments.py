"""Arguments of the style and of the functions that make meshes work, or raise an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel_mesh, split_cp_mesh
from tests.harness import modules
from tests.harness.ranks import on_ranks
from tests.harness.styled import BNSD, apply

STYLE: dict[str, list[Any]] = {
    "seq_dim": [1, 2, 0, -1, True, None, "x", 1.5],
    "head_dim": [2, 1, 0, "x", None, []],
    "ulysses_degree": [None, 1, 2, 0, -1, "auto", "x", True, 1.5, []],
    "qkv_indices": [
        (0, 1, 2),
        None,
        (0, 1, 1),
        3,
        "abc",
        (0,),
        (0, 0, 0),
        (-1, 1, 2),
        (1.5, 1, 2),
        [0, 1, 2],
        ([], 1, 2),
    ],
    "qkv_kwarg_names": [(), ("q", "k", "v"), "qkv", 3, None, ("q",), ("q", "q", "q"), (1, 2, 3), [[], [], []]],
    "load_balance": [False, True, None, "x", 1],
    "kv_exchange": ["all_gather", "ring", "needed", "p2p", None, 3, []],
    "layout": ["contiguous", "head_tail", "x", None, [], 3],
    "use_local_output": [True, False, None, "x"],
    "window": [None, (1, 2), 5, "ab", (1,), [None, None], (1.5, 2), (None, -5)],
    "head_groups": [1, 2, "auto", 0, "x", None, True, 1.5],
    "exchange_stages": ["auto", 1, 2, 0, "x", None, True, 1.5],
    "allow": [(), ("a",), "a", 3, None, (1,)],
}


def complaint(call: Callable[[], Any], *names: str) -> str:
    """Empty if a call works, or raises an error that names one of its arguments."""
    try:
        call()
    except Exception as error:
        fine = isinstance(error, (ValueError, TypeError)) and any(name in str(error) for name in names)
        return "" if fine else f"{type(error).__name__}: {error}"
    return ""


@settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in STYLE.items()}))
def test_arguments_of_the_style(arguments: dict[str, Any]) -> None:
    assert complaint(lambda: ContextParallel(**arguments), *arguments) == ""


def test_settings_of_a_style_can_be_read() -> None:
    given = {"kv_exchange": "ring", "layout": "head_tail", "load_balance": False, "window": (3, 0), "head_groups": 2}
    given |= {"seq_dim": 2, "head_dim": 1, "ulysses_degree": 2, "qkv_indices": None, "allow": ("tower",)}
    style = ContextParallel(**given)
    assert {name: getattr(style, name) for name in given} == given
    assert ContextParallel(load_balance=True).load_balance


@on_ranks
def mesh_arguments() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, family = apply(nn.Sequential(modules.BNSD())[0], **BNSD), split_cp_mesh(mesh)
    found = [complaint(lambda m=m: split_cp_mesh(m), "mesh") for m in (None, 3, "cp", [mesh])]
    for degrees in ([], [1], (2,), [2, 2], {1, 2}, 2, "12", [0], [-1], [3], [1.5], ["2"], [None], [[]], [True]):
        found.append(complaint(lambda d=degrees: split_cp_mesh(mesh, d), "degrees"))
    for degree in (1, 2, 0, -1, 3, 1.0, "2", None, [], True):
        found += [complaint(lambda d=degree, f=f: f(d), "degree") for f in (family.mesh, family.cp, family.dp)]

    def swap(*arguments: Any, **options: Any) -> None:
        with context_parallel_mesh(*arguments, **options):
            pass

    found += [complaint(lambda m=m: swap(m, mesh), "model", "ContextParallel") for m in (None, 3, nn.Linear(2, 2))]
    found += [complaint(lambda m=m: swap(model, m), "mesh") for m in (None, 3, "cp", family)]
    for degree in ("style", "auto", None, 1, 2, 0, -1, 3, 1.5, "x", True, []):
        found.append(complaint(lambda d=degree: swap(model, mesh, ulysses_degree=d), "ulysses_degree"))
        if not isinstance(degree, str):
            found.append(complaint(lambda d=degree: apply(modules.BNSD(), **BNSD, ulysses_degree=d), "ulysses_degree"))
    found += [complaint(lambda m=m: ContextParallel()._apply(modules.BNSD(), m), "mesh") for m in (None, 3, [mesh])]
    found += [complaint(lambda m=m: ContextParallelHandler(m, "contiguous").cp, "mesh") for m in (None, 3)]
    return found


def test_arguments_of_meshes(ranks: Any) -> None:
    for found in ranks(2, mesh_arguments):
        assert len(found) > 80 and not [text for text in found if text]

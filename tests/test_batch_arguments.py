"""Arguments of the batch side and of the handler work, or raise an error of ours that names them.

Every call is made on one of two ranks, of which the other one does not exist: transfers do nothing. The call returns,
or raises before anything is sent.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyper_cp
from hyper_cp import (
    ContextParallel,
    ContextParallelHandler,
    CostModel,
    DynamicContextParallel,
    context_parallel,
    get_cp_handler_cls,
    split_cp_mesh,
)
from hyper_cp.integrations.transformers import prepare_batch
from hyper_cp.mesh import comm
from hyper_cp.ops import balance
from tests.harness.attention_case import cp_mesh

PACKAGE = Path(hyper_cp.__file__).parent
OURS = (ValueError, TypeError, NotImplementedError, RuntimeError)
LONG, BOOL = torch.int64, torch.bool
S = 8


@dataclass(frozen=True)
class T:
    """A tensor, which a rank makes: 0 to 6 over and over, or these modulo a smaller number."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    modulo: int = 7

    def make(self) -> Tensor:
        return (torch.arange(torch.Size(self.shape).numel()) % self.modulo).reshape(self.shape).to(self.dtype)


class Bar:
    """Stands between the usual values of an argument and the others."""


BAR, NAN, INF, HUGE = Bar(), float("nan"), float("inf"), 2**70
Values = list[Any]

# fmt: off
JUNK: Values = [None, 3, "x", [], {}]
TENSORS: Values = [
    T((2, S // 2, 3)), T((2, S // 2)), BAR, T((2, 7)), T(()), T((0,)), T((2, 0)), T((2, 3)), T((1,)),
    T((2, 4, 3), BOOL), T((2, 7), LONG), [1.0], *JUNK,
]
DIMS: Values = [1, -1, BAR, 0, 2, 3, -4, 1.0, True, [1], *JUNK]
FLAGS: Values = [False, True, BAR, *JUNK]
NUMBERS: Values = [0, 1, 2.5, -100, BAR, [1], True, NAN, INF, 10**30, HUGE, *JUNK]
COUNTS: Values = [2, 4, S, BAR, 0, 1, -1, 1.5, True, [1], HUGE, *JUNK]
COSTS: Values = [0.5, 1, BAR, 0, -1, NAN, INF, True, 10**400, *JUNK]
WINDOWS: Values = [None, (1, 2), BAR, 3, "x", (1,), (1.5, 2), [], (None, -5)]
DOCUMENTS: Values = [
    None, [0, 3, S], [[0, 3, S], [0, 5, S]], T((2, 2), LONG, 1), BAR, [0], [[]], [0, 5, 3, S], [1, S], [0, 20],
    [0, S, S], "12", 7, 0, [0.5, 8], [0.0, 8.0], [None], [True, S], [[0, S], 3], [0, -3, S], [[0, S]] * 3,
    T((1, 2, 3), LONG), T((0,), LONG), T((2,)), T((2,), BOOL), T((), LONG), T((0, 2), LONG), *JUNK,
]
IDS: Values = [
    None, T((2, S), LONG, 1), BAR, T((2, S), LONG), T((S,), LONG, 1), [[0, 1], [0]], [[0] * S], T((0, 0), LONG),
    T((2, S)), T(()), [["a"]], *JUNK,
]
WHOLE = T((2, S), LONG)
BATCHES: Values = [
    {"input_ids": WHOLE}, {"input_ids": T((2, 7), LONG), "labels": T((2, 7), LONG)}, [T((2, S)), T((2, S))],
    {"input_ids": WHOLE, "labels": WHOLE, "cu_seqlens": [0, 3, S]}, (T((2, S)), "text"),
    BAR, *JUNK, [], (), T((2, S)), {"input_ids": T(())}, {"input_ids": T((0, S), LONG)}, {"input_ids": T((2, 0), LONG)},
    {"input_ids": T((S,), LONG)}, {"input_ids": [[1, 2], [3, 4]]}, {3: T((2, S))}, {"x": T((2, 3)), "y": T((2, 4))},
    {"input_ids": {"a": T((2, S))}}, {"input_ids": None}, {None: T((2, S))}, {"input_ids": 3},
    *({"input_ids": WHOLE, "attention_mask": x} for x in (
        T((2, S), LONG, 1), T((2, 3)), T((2, S), LONG, 2), T((2, S)), T((2, 1, S, S), BOOL), T((S,), LONG), T(()),
        T((2, 1, 3, 3)), T((2, 0)), [[1] * S] * 2, *JUNK)),
    *({"input_ids": WHOLE, "labels": x} for x in (T((2, 3), LONG), T((2,), LONG), T(()), T((2, S)), *JUNK)),
    *({"input_ids": WHOLE, name: x} for name in ("cu_seqlens", "documents") for x in DOCUMENTS if x is not BAR),
    *({"input_ids": WHOLE, name: x} for name in ("document_ids", "seq_idx", "position_ids")
      for x in IDS if x is not BAR),
]
QKV: Values = [
    T((1, 2, S // 2, 4)), BAR, T((1, 2, 3)), T(()), T((1, 0, 4, 4)), T((1, 2, 0, 4)), T((1, 2, S // 2, 4), LONG), *JUNK,
]
HEADS: Values = [
    T((7, 3)), nn.Linear(3, 7), nn.Linear(2, 7), nn.Conv1d(3, 7, 1), T((7,)), T((0, 3)), T((7, 3), LONG), *JUNK,
]
MODES: Values = ["mesh", BAR, *JUNK]

CALLS: dict[str, dict[str, Values]] = {
    "dispatch": {"tensor": [T((2, S)), *TENSORS], "seq_dim": DIMS, "pad_value": NUMBERS},
    "combine": {
        "tensor": TENSORS, "seq_dim": DIMS, "length": [None, S, 7, BAR, *COUNTS], "documents": DOCUMENTS,
        "gradients": [None, "mean", "sum", BAR, *JUNK],
    },
    "roll_tensor": {
        "tensor": TENSORS, "shifts": [-1, 1, 3, BAR, 0, -9, 100, HUGE, True, T((1,), LONG), *JUNK], "dims": DIMS,
        "documents": DOCUMENTS,
    },
    "position_ids": {
        "length": COUNTS, "device": [None, "cpu", BAR, "nowhere", 3.5, []], "restart": FLAGS, "documents": DOCUMENTS,
    },
    "padded_length": {"length": COUNTS},
    "get_rotary_seq_len": {"local": [S // 2, *TENSORS, *COUNTS], "seq_dim": DIMS, "documents": DOCUMENTS},
    "get_emb_on_this_cp_rank": {
        "emb": [T((S, 4)), T((S, 1, 1, 4)), *TENSORS], "seq_dim": [0, *DIMS], "documents": DOCUMENTS,
    },
    "apply_rotary_pos_emb": {
        "tensor": [T((2, S // 2, 2, 4)), T((2, S // 2, 4)), *TENSORS],
        "freqs": [
            T((S, 4)), T((S, 1, 1, 4)), T((S, 2)), BAR, T((4, 4)), T((S, 3)), T((S, 0)), T((0, 4)), T(()), T((S,)),
            T((S, 8)), T((S, 4), LONG), *JUNK,
        ],
        "seq_dim": DIMS, "interleaved": FLAGS, "mscale": NUMBERS, "local": FLAGS, "documents": DOCUMENTS,
    },
    "documents": {"cu_seqlens": DOCUMENTS, "document_ids": IDS},
    "mean_loss": {
        "losses": [T((2, S // 2)), T((2, S // 2, 7)), *TENSORS, T((2, S // 2, 3)), T((2, S // 2), LONG)],
        "labels": [
            None, T((2, S // 2), LONG, 3), BAR, T((2, 3), LONG), T(()), T((2, S // 2)), [[1]], T((2, S // 2), BOOL),
            T((2, S // 2, 7), LONG), *JUNK,
        ],
        "ignore_index": NUMBERS,
        "mask": [None, T((2, S // 2), BOOL), T((2, S // 2)), BAR, T((2, 3)), T(()), [[1]], T((2, S // 2, 7)), *JUNK],
        "mesh": [None, "mesh", BAR, *JUNK], "gradients": ["mean", "sum", BAR, *JUNK],
        "head": [None, BAR, *HEADS], "softcap": [None, BAR, 2.0, *NUMBERS], "scale": [1.0, BAR, 0.5, *NUMBERS],
        "chunk": [None, BAR, *COUNTS],
    },
    "log_probs": {
        "hidden": [T((2, S // 2, 3)), *TENSORS, T((2, S // 2, 3), LONG)],
        "labels": [T((2, S // 2), LONG), BAR, T((2, 3), LONG), T((), LONG), T((2, S // 2)), [[1]], *JUNK],
        "head": [T((7, 3)), BAR, *HEADS], "ignore_index": NUMBERS, "softcap": [None, 2.0, BAR, *NUMBERS],
        "scale": [1.0, 0.5, BAR, *NUMBERS], "chunk": [None, *COUNTS], "gather": FLAGS,
        "length": [None, BAR, S, 7, *COUNTS],
    },
    "get_batch_on_this_cp_rank": {
        "batch": BATCHES,
        "seq_dims": [
            1, {}, BAR, {"input_ids": 1}, {"input_ids": None}, {"input_ids": 5}, {"input_ids": "x"}, {"nothing": 1},
            [1, 1], [1], (None, None), (5, 5), ("x", 1), {"input_ids": True}, {"input_ids": 1.0}, *DIMS[3:],
        ],
        "shift_labels": FLAGS, "ignore_index": NUMBERS, "debug": FLAGS, "labels_cross_documents": FLAGS,
        "mtp_depth": [0, 1, BAR, *COUNTS],
        "pad_values": [
            None, {}, {"input_ids": 3}, BAR, {"nothing": 1}, {"input_ids": "x"}, {"input_ids": None},
            {"input_ids": 1.5}, {"input_ids": HUGE}, *JUNK,
        ],
    },
    "prepare_batch": {"batch": BATCHES, "labels_cross_documents": FLAGS},
    "core_attn": {
        "attn": ["attention", BAR, *JUNK], "q": QKV, "k": QKV, "v": QKV,
        "seq_dim": [2, BAR, 5, -1, True, *JUNK], "head_dim": [1, BAR, 5, -1, True, *JUNK],
    },
    "handler": {"mesh": MODES, "style": ["contiguous", "head_tail", "balanced", BAR, *JUNK]},
    "handler of": {"model": [BAR, nn.Linear(2, 2), *JUNK]},
    "megatron": {
        "backend": [None, "local", BAR, *JUNK],
        "cp_comm_type": ["p2p", "a2a", "a2a+p2p", ["p2p", "a2a"], BAR, [3], [None], [["p2p"]], ("p2p", "x"), *JUNK],
        "mesh": MODES, "qkv_format": ["sbhd", "bhsd", BAR, *JUNK],
        "hierarchical_context_parallel_sizes": [
            None, [2, 1], [1, 2], BAR, [2], "21", [0, 0], [-1, -2], [None, None], [1.0, 2.0], ["a", 2], [2, 2],
            [True, 2], *JUNK,
        ],
        "options": [{}, {"layout": "contiguous"}, BAR, {"layout": 3}, {"window": 3}, {"kv_exchange": "p"}, {"no": 1}],
    },
    "context_parallel": {
        "mesh": MODES,
        "buffers": [
            None, [T((2, S))], [T((2, S)), T((S,))], BAR, T((2, S)), [3], [None], [T(())], [T((2, 7))],
            [T((0, S))], *JUNK,
        ],
        "buffer_seq_dims": [None, [1], [1, 0], BAR, [None], ["x"], [5], [True], [1.0], *JUNK],
        "no_restore_buffers": [None, (), BAR, [3], [T((2, S))], [[]], *JUNK],
        "ulysses_degree": [1, None, 2, "auto", BAR, 0, -1, 1.5, True, *JUNK],
        "kv_exchange": ["all_gather", "ring", BAR, *JUNK],
        "layout": ["head_tail", "contiguous", "balanced", BAR, *JUNK],
        "load_balance": FLAGS, "window": WINDOWS, "head_groups": [1, 2, BAR, 0, True, 1.5, *JUNK],
        "exchange_stages": ["auto", 2, BAR, 0, True, 1.5, *JUNK],
    },
    "dynamic": {
        "family": [2, 4, "family", BAR, 0, -1, 1.5, True, *JUNK], "tokens_per_rank": [8, 64, BAR, *COUNTS],
        "cost": ["cost", BAR, *JUNK],
        "degrees": [None, [1, 2], BAR, [0], [3], "12", [None], ["x"], [1.0], [[]], {1, 2}, [True], *JUNK],
        "layout": ["head_tail", "contiguous", BAR, *JUNK], "slack": [0.02, 0, BAR, -1, NAN, INF, True, *JUNK],
        "lengths": [
            [3, 5, 8], [], BAR, [0], [-1], [None], ["x"], [1.5], [10**9], [HUGE], [True], T((3,), LONG), [T((), LONG)],
            *JUNK,
        ],
        "degree": [1, 2, BAR, *COUNTS], "rank": [0, 1, BAR, -1, 99, 1.5, True, *JUNK],
    },
    "cost": dict.fromkeys(("linear", "quadratic", "exchange", "fixed"), COSTS),
    "transformer": dict.fromkeys(("parameters", "layers", "hidden", "flops_per_second", "exchange", "nothing"), COSTS),
    "balance": {"length": COUNTS, "ranks": COUNTS, "documents": DOCUMENTS, "is_causal": FLAGS, "window": WINDOWS},
}
"""For each function the values that are tried for its arguments."""
REQUIRED = {
    "documents": 0, "apply_rotary_pos_emb": 2, "core_attn": 4, "handler": 2, "megatron": 0, "dynamic": 3, "cost": 2,
    "transformer": 3, "balance": 2, "log_probs": 3,
}
"""The number of arguments that have no default, if it is not one."""
# fmt: on

CLASSES = {"input_ids": WHOLE, "labels": T((2,), LONG)}

BATCH = ("attention_mask", "position_ids", "document_ids", "labels", "input_ids", "entry")
NAMES = {
    "prepare_batch": BATCH,
    "megatron": ("window", "kv_exchange", "'no'"),
    "core_attn": ("module _Core",),
    "get_batch_on_this_cp_rank": (*BATCH, "pad_value"),
    "transformer": ("linear",),
    "mean_loss": ("hidden",),
}
"""Other names by which errors of a call may speak of its arguments."""


def made(value: Any, mesh: DeviceMesh) -> Any:
    """A value with its tensors, and with the objects that names stand for."""
    if isinstance(value, T):
        return value.make()
    if isinstance(value, dict):
        return {key: made(x, mesh) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(made(x, mesh) for x in value)
    named = {"mesh": mesh, "cost": CostModel(1, 1), "attention": F.scaled_dot_product_attention}
    if isinstance(value, str):
        return split_cp_mesh(mesh) if value == "family" else named.get(value, value)
    return value


def make_call(name: str, given: dict[str, Any], handler: ContextParallelHandler) -> Any:
    """Make one of ``CALLS``."""
    if name == "handler":
        return ContextParallelHandler(**given).cp
    if name == "handler of":
        return ContextParallelHandler.of(given["model"])
    if name == "documents":
        with handler.documents(**given):
            return handler.dispatch(torch.ones(2, S))
    if name == "megatron":
        own = {key: given.pop(key) for key in ("backend", "cp_comm_type") if key in given}
        options = given.pop("options", {})
        return get_cp_handler_cls(**own)(given.pop("mesh", handler.mesh), **given, **options)
    if name == "context_parallel":
        with context_parallel(given.pop("mesh"), **given):
            return None
    if name == "dynamic":
        lengths, degree, rank = (given.pop(key, usual) for key, usual in (("lengths", [3]), ("degree", 1), ("rank", 0)))
        scheduler = DynamicContextParallel(**given)
        return scheduler.capacity(degree), scheduler.plan(lengths).of_rank(rank)
    if name == "core_attn":
        return handler.core_attn(*[given.pop(key) for key in ("attn", "q", "k", "v")], **given)
    if name == "prepare_batch":
        return prepare_batch(handler, **given)
    if name in ("cost", "transformer", "balance"):
        return {"cost": CostModel, "transformer": CostModel.of_transformer, "balance": balance}[name](**given)
    if name == "mean_loss":
        return handler.mean_loss(**given, elsewhere=True)  # no attention runs here
    return getattr(handler, name)(**given)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield cp_mesh()
    dist.destroy_process_group()


Call = tuple[str, dict[str, Any], str]


def complaint(mesh: DeviceMesh, name: str, given: dict[str, Any], layout: str) -> str:
    """Empty if the call works, or raises an error of ours that names an argument before anything is sent."""
    handler = ContextParallelHandler(mesh, ContextParallel(2, 1, layout=layout))
    arguments = made(given, mesh)
    with comm.record_traffic() as log:
        try:
            make_call(name, arguments, handler)
        except Exception as error:
            raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            # debug compares batches; and only the numbers of losses of all ranks tell if a mask has selected them.
            late = given.get("debug") or "come without labels or mask" in str(error)
            sent = [] if late else [operation for operation, _ in log.entries]
            names = (*(key for key in given if len(key) > 1), *NAMES.get(name, ()), "layout=", "documents")
            if (
                isinstance(error, OURS)
                and PACKAGE in raised_in.parents
                and not sent
                and any(n in str(error) for n in names)
            ):
                return ""
            return f"{name} {given} ({layout}): {type(error).__name__}: {error} (in {raised_in.name}; sent {sent})"
    return ""


def usual(name: str) -> dict[str, Any]:
    """The required arguments of a function, with a value that works."""
    arguments = CALLS[name]
    return {key: arguments[key][0] for key in [*arguments][: REQUIRED.get(name, 1)]}


@st.composite
def drawn_call(draw: st.DrawFn) -> Call:
    """A call with mostly usual arguments."""
    name = draw(st.sampled_from([*CALLS]))
    given = usual(name)
    for key, values in CALLS[name].items():
        if key in given or draw(st.booleans()):
            common, others = values[: values.index(BAR)], [x for x in values if x is not BAR]
            rare = not common or draw(st.integers(0, 4)) == 0
            given[key] = draw(st.sampled_from(others if rare else common))
    return name, given, draw(st.sampled_from(["contiguous", "head_tail", "per_document", "balanced", "auto"]))


@pytest.mark.slow
@settings(max_examples=100, phases=[Phase.explicit, Phase.generate])
@example(
    call=(
        "core_attn",
        {"attn": "attention", "q": T((1, 2, 4, 4)), **dict.fromkeys("kv", T((1, 2, 0, 4)))},
        "contiguous",
    )
)
@example(call=("get_batch_on_this_cp_rank", {"batch": CLASSES, "shift_labels": True}, "contiguous"))
@given(call=drawn_call())
def test_arguments_together(mesh: DeviceMesh, call: Call) -> None:
    assert complaint(mesh, *call) == ""


@pytest.mark.parametrize("name", CALLS)
def test_every_value_of_every_argument(mesh: DeviceMesh, name: str) -> None:
    for key, values in CALLS[name].items():
        for layout in ("contiguous", "per_document"):
            others = usual(name)
            if layout == "per_document" and "documents" in CALLS[name]:
                others["documents"] = [0, 3, S]
            for value in values:
                assert isinstance(value, Bar) or complaint(mesh, name, others | {key: value}, layout) == ""


def test_values_that_would_change_without_a_word(mesh: DeviceMesh) -> None:
    handler, tokens = ContextParallelHandler(mesh, "contiguous"), torch.zeros(2, S, dtype=LONG)
    with pytest.raises(TypeError, match="must be cumulative lengths"):
        handler.position_ids(S, documents=[0.5, 8])
    with pytest.raises(ValueError, match="ascend from 0"), handler.documents([0, 5, 3, S]):
        pass
    with pytest.raises(TypeError, match="attention_mask is a list"):
        handler.get_batch_on_this_cp_rank({"input_ids": tokens, "attention_mask": [[1] * S] * 2})
    local = handler.get_batch_on_this_cp_rank({"input_ids": tokens, "position_ids": None})
    assert local["position_ids"].tolist() == [[0, 1, 2, 3]] * 2

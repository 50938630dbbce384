"""Arguments of the batch side and of the handler work, or raise an error of ours that names them.

Each call runs on both ranks. It must return, or raise the same kind of error on both before anything is sent.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

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
from hyper_cp.mesh import comm
from hyper_cp.ops import balance
from tests.harness import modules
from tests.harness.attention_case import cp_mesh
from tests.harness.ranks import on_ranks

PACKAGE = Path(hyper_cp.__file__).parent
OURS = (ValueError, TypeError, NotImplementedError, RuntimeError)
S = 8


@dataclass(frozen=True)
class T:
    """A tensor, by its shape and dtype, which a rank makes: 0, 1, 2 ... modulo 7, or zeros."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "numbers"

    def make(self) -> Tensor:
        x = torch.arange(torch.Size(self.shape).numel()).reshape(self.shape) % 7
        x = {"numbers": x, "zeros": x * 0, "ones": x * 0 + 1, "mixed": x % 2}[self.kind].to(self.dtype)
        return x.requires_grad_() if self.kind == "grad" else x


LONG, BOOL = torch.int64, torch.bool
# Usual values first; everything behind the bar is unusual.
BAR = object()
Values = list[Any]

TENSORS: Values = [T((2, S // 2, 3)), T((2, S // 2)), BAR, T(()), T((0,)), T((2, 0)), T((2, 3)), T((1,)), 3, None, "x", [1.0], T((2, 4, 3), BOOL)]
DIMS: Values = [1, -1, BAR, 0, 2, 3, -4, None, "x", 1.0, True, [1]]
DOCUMENTS: Values = [
    None,
    [0, 3, S],
    [[0, 3, S], [0, 5, S]],
    *(BAR, [], [0], [[]], [0, 5, 3, S], [1, S], [0, 20], [0, S, S], "x", "12", 7, 0, [0.5, 8], [0.0, 8.0], [None], [True, S], {}, [[0, S], 3], [0, -3, S]),
    *([[0, S]] * 3, T((1, 2, 3), LONG), T((0,), LONG), T((2,)), T((2,), BOOL), T((), LONG), T((2, 2), LONG, "zeros"), T((0, 2), LONG)),
]
FLAGS: Values = [False, True, BAR, None, "x", 3]
NUMBERS: Values = [0, 1, 2.5, -100, BAR, None, "x", [1], True, float("nan"), float("inf"), 10**30]
COUNTS: Values = [1, 2, S, BAR, 0, -1, 1.5, "x", None, True, [1], 2**70]

BATCHES: Values = [
    {"input_ids": T((2, S), LONG)},
    {"input_ids": T((2, 7), LONG), "labels": T((2, 7), LONG)},
    {"input_ids": T((2, S), LONG), "labels": T((2, S), LONG), "cu_seqlens": [0, 3, S]},
    {"input_ids": T((2, S), LONG), "attention_mask": T((2, S), LONG, "ones")},
    [T((2, S)), T((2, S))],
    (T((2, S)), "text"),
    *(BAR, {}, [], (), None, 3, "x", T((2, S)), {"input_ids": 3}, {"input_ids": T(())}, {"input_ids": T((0, S), LONG)}),
    *({"input_ids": T((2, 0), LONG)}, {"input_ids": T((S,), LONG)}, {"input_ids": [[1, 2], [3, 4]]}, {3: T((2, S))}),
    *({"x": T((2, 3)), "y": T((2, 4))}, {"input_ids": {"a": T((2, S))}}, {"input_ids": None}, {None: T((2, S))}),
    *({"input_ids": T((2, S), LONG), "attention_mask": m} for m in (3, None, T((2, 3)), T((2, S), LONG, "mixed"), T((2, S)), T((2, 1, S, S), BOOL), T((S,), LONG), T(()), T((2, 1, 3, 3)), T((2, 0)), [[1] * S] * 2)),
    *({"input_ids": T((2, S), LONG), "labels": m} for m in (3, None, T((2, 3), LONG), T((2,), LONG), T(()), T((2, S)), T((2, S), BOOL))),
    *({"input_ids": T((2, S), LONG), n: m} for n in ("cu_seqlens", "document_ids", "seq_idx", "position_ids", "documents") for m in (3, "x", [], [0, 3], [0.5, 1], {}, None, T(()), T((2, S)), T((2, S), LONG), T((2, S), LONG, "zeros"), T((2, 3), LONG, "zeros"), T((0, 0), LONG), T((S,), LONG, "zeros"), T((2, 2, 2), LONG), [[0, S], [0, 3, S], [0, S]], [T((2,), LONG)], [[0], [S]])),
]

Arguments = dict[str, Values]
"""The values that are tried for each argument."""

CALLS: dict[str, Arguments] = {
    "dispatch": {"tensor": TENSORS, "seq_dim": DIMS, "pad_value": NUMBERS},
    "combine": {"tensor": TENSORS, "seq_dim": DIMS, "length": [None, S, 7, BAR, *COUNTS], "documents": DOCUMENTS, "gradients": [None, "mean", "sum", BAR, "x", 3, True, []]},
    "roll_tensor": {"tensor": TENSORS, "shifts": [-1, 1, 3, BAR, 0, -9, 100, 2**70, None, "x", 1.0, True, [1], T((1,), LONG)], "dims": DIMS, "documents": DOCUMENTS},
    "position_ids": {"length": COUNTS, "device": [None, "cpu", BAR, "nowhere", 3.5, []], "restart": FLAGS, "documents": DOCUMENTS},
    "padded_length": {"length": COUNTS},
    "get_rotary_seq_len": {"local": [S // 2, *TENSORS, *COUNTS[4:]], "seq_dim": DIMS, "documents": DOCUMENTS},
    "get_emb_on_this_cp_rank": {"emb": [T((S, 4)), T((S, 1, 1, 4)), *TENSORS], "seq_dim": [0, *DIMS], "documents": DOCUMENTS},
    "apply_rotary_pos_emb": {
        "tensor": [T((2, S // 2, 2, 4)), T((2, S // 2, 4)), *TENSORS],
        "freqs": [T((S, 4)), T((S, 1, 1, 4)), T((S, 2)), BAR, T((4, 4)), T((S, 3)), T((S, 0)), T((0, 4)), T(()), T((S,)), T((S, 8)), None, 3, "x", T((S, 4), LONG), T((S, 4), BOOL)],
        "seq_dim": DIMS, "interleaved": FLAGS, "mscale": NUMBERS, "local": FLAGS, "documents": DOCUMENTS,
    },
    "documents": {"cu_seqlens": DOCUMENTS, "document_ids": [None, T((2, S), LONG, "zeros"), BAR, T((2, S), LONG), T((S,), LONG, "zeros"), 3, "x", [], [[0, 1], [0]], [[0] * S], T((0, 0), LONG), T((2, S)), T(()), {}, [["a"]]]},
    "mean_loss": {
        "losses": [T((2, S // 2)), T((2, S // 2, 7)), *TENSORS, T((2, S // 2), LONG)],
        "labels": [None, T((2, S // 2), LONG), BAR, T((2, 3), LONG), T(()), T((2, S // 2)), 3, "x", [[1]], T((2, S // 2), BOOL), T((2, S // 2, 7), LONG)],
        "ignore_index": NUMBERS,
        "mask": [None, T((2, S // 2), BOOL), T((2, S // 2)), BAR, T((2, 3)), T(()), 3, "x", [[1]], T((2, S // 2, 7))],
        "mesh": [None, BAR, 3, "x", []],
        "gradients": ["mean", "sum", BAR, None, "x", 3, []],
    },
    "get_batch_on_this_cp_rank": {
        "batch": BATCHES,
        "seq_dims": [1, {}, BAR, *DIMS[2:], {"input_ids": 1}, {"input_ids": None}, {"input_ids": 5}, {"input_ids": "x"}, {"nothing": 1}, {3: 1}, [1, 1], [1], (None, None), (5, 5), ("x", 1), {"input_ids": True}, {"input_ids": 1.0}],
        "shift_labels": FLAGS,
        "ignore_index": NUMBERS,
        "pad_values": [None, {}, {"input_ids": 3}, BAR, 3, "x", [], {"nothing": 1}, {"input_ids": "x"}, {"input_ids": None}, {"input_ids": [1]}, {"input_ids": 1.5}],
        "debug": FLAGS,
    },
    "core_attn": {
        "attn": [F.scaled_dot_product_attention, BAR, None, 3, "x"],
        **{n: [T((1, 2, S // 2, 4)), BAR, T((1, 2, 3)), T(()), None, 3, "x", T((1, 0, 4, 4)), T((1, 2, 0, 4)), T((1, 2, S // 2, 4), LONG)] for n in "qkv"},
        "seq_dim": [2, BAR, 1, 5, -1, "x", None, 1.0, [], True], "head_dim": [1, BAR, 0, 2, 5, -1, "x", None, 1.0, [], True],
    },
    "handler": {"mesh": ["mesh", BAR, None, 3, "x", []], "style": ["contiguous", "head_tail", "auto", BAR, "x", None, 3, []]},
    "handler of": {"model": [BAR, None, 3, "x", nn.Linear(2, 2)]},
    "megatron": {
        "backend": [None, "local", BAR, "x", 3, []], "cp_comm_type": ["p2p", "a2a", "a2a+p2p", ["p2p", "a2a"], BAR, "x", [], None, 3, [3], [None], {}, [["p2p"]], [[]], ("p2p", "x")],
        "mesh": ["mesh", BAR, None, 3, "x", []], "qkv_format": ["sbhd", "bhsd", BAR, "x", None, 3, []],
        "hierarchical_context_parallel_sizes": [None, [2, 1], [1, 2], BAR, [], [2], 3, "x", "21", [0, 0], [-1, -2], [None, None], [1.0, 2.0], ["a", 2], [2, 2], [True, 2]],
        "options": [{}, {"layout": "contiguous"}, BAR, {"layout": 3}, {"window": 3}, {"kv_exchange": "ring"}, {"nothing": 1}],
    },
    "context_parallel": {
        "mesh": ["mesh", BAR, None, 3, "x"],
        "buffers": [None, [T((2, S))], [T((2, S)), T((S,))], BAR, T((2, S)), 3, "x", [3], [None], [T(())], [T((2, 7))], [T((0, S))], {}],
        "buffer_seq_dims": [None, [1], [1, 0], BAR, 1, "x", [None], ["x"], [5], [True], [1.0], [], {}],
        "no_restore_buffers": [None, (), BAR, 3, "x", [3], [T((2, S))], [[]]],
        "ulysses_degree": [1, None, 2, "auto", BAR, 0, -1, 3, "x", 1.5, True, []],
        "kv_exchange": ["all_gather", "ring", BAR, "x", None, 3, []], "layout": ["head_tail", "contiguous", "auto", BAR, "x", None, 3, []],
        "load_balance": FLAGS, "window": [None, (1, 2), BAR, 3, "x", (1,), (1.5, 2), [], (None, -5)], "head_groups": [1, BAR, 0, 2, "x", None, True, 1.5],
    },
    "dynamic": {
        "family": [2, 4, "family", BAR, 0, -1, None, "x", 1.5, True, []],
        "tokens_per_rank": [8, 64, BAR, *COUNTS], "cost": ["cost", BAR, None, 3, "x"],
        "degrees": [None, [1, 2], BAR, [], [0], [3], 2, "12", [None], ["x"], [1.0], [[]], {1, 2}, [True]],
        "layout": ["head_tail", "contiguous", BAR, "x", None, 3, []], "slack": [0.02, 0, BAR, -1, None, "x", float("nan"), float("inf"), [], True],
        "lengths": [[3, 5, 8], [], BAR, [0], [-1], [None], ["x"], [1.5], [10**9], [2**70], 3, None, "x", [True], T((3,), LONG), [T((), LONG)], {}],
        "degree": [1, 2, BAR, *COUNTS], "rank": [0, 1, BAR, -1, 99, None, "x", 1.5, True, []],
    },
    "cost": {n: [0.5, 1, 0, BAR, -1, None, "x", float("nan"), float("inf"), [], True, 10**400] for n in ("linear", "quadratic", "exchange", "fixed")},
    "transformer": {n: [1, 2.0, BAR, 0, -1, None, "x", float("nan"), [], 10**400] for n in ("parameters", "layers", "hidden", "flops_per_second", "exchange", "nothing")},
    "balance": {"length": COUNTS, "ranks": COUNTS, "documents": DOCUMENTS, "is_causal": FLAGS, "window": [None, (1, 2), BAR, 3, "x", (1,), (1.5, 2), [], (None, -5)]},
}
REQUIRED = {
    "dispatch": 1, "combine": 1, "roll_tensor": 1, "position_ids": 1, "padded_length": 1, "get_rotary_seq_len": 1, "get_emb_on_this_cp_rank": 1, "apply_rotary_pos_emb": 2, "mean_loss": 1, "get_batch_on_this_cp_rank": 1, "core_attn": 4, "handler": 2, "handler of": 1, "megatron": 0, "context_parallel": 1, "dynamic": 3, "cost": 2, "transformer": 3, "balance": 2, "documents": 0,
}


def made(value: Any, mesh: DeviceMesh) -> Any:
    """A value with its tensors, and what stands for an object of this rank."""
    if isinstance(value, T):
        return value.make()
    if isinstance(value, str) and value in ("mesh", "family", "cost"):
        return {"mesh": lambda: mesh, "family": lambda: split_cp_mesh(mesh), "cost": lambda: CostModel(1, 1)}[value]()
    if isinstance(value, dict):
        return {k: made(x, mesh) for k, x in value.items()}
    return type(value)(made(x, mesh) for x in value) if isinstance(value, (list, tuple)) else value


def call(name: str, given: dict[str, Any], handler: ContextParallelHandler) -> Any:
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
    if name in ("cost", "transformer", "balance"):
        return {"cost": CostModel, "transformer": CostModel.of_transformer, "balance": balance}[name](**given)
    return getattr(handler, name)(**given)


def outcome(name: str, given: dict[str, Any], layout: str) -> str:
    """Empty if the call works, or raises an error of ours that names an argument before anything is sent."""
    mesh = cp_mesh()
    handler = ContextParallelHandler(mesh, ContextParallel(2, 1, layout=layout))
    arguments = made(given, mesh)
    with comm.record_traffic() as log:
        try:
            call(name, arguments, handler)
        except Exception as error:
            raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            sent = [operation for operation, _ in log.entries if operation != "agreement"]
            named = any(key in str(error) for key in (*(g for g in given if len(g) > 1), *NAMES.get(name, ()), "layout=", "documents"))
            if isinstance(error, OURS) and PACKAGE in raised_in.parents and named and not sent:
                return ""
            return f"{name} {given} ({layout}): {type(error).__name__}: {error} (in {raised_in.name}; sent {sent})"
    return ""


NAMES = {"megatron": ("window", "kv_exchange", "nothing"), "core_attn": ("module _Core",)}


@on_ranks
def outcomes(calls: list[tuple[str, dict[str, Any], str]]) -> list[str]:
    return [outcome(*c) for c in calls]

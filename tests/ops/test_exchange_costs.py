"""Exchanges that move much more than queries see say so, once; masks that are bands move what bands do."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.mesh import comm
from hyper_cp.ops import attention, exchange
from tests.harness.ranks import on_ranks

WORLD, LENGTH = 4, 64
DOCUMENTS = [0, 5, 11, 30, 33, 47, LENGTH]
RING = {"kv_exchange": "ring", "documents": DOCUMENTS, "is_causal": True}
WINDOW = torch.ones(LENGTH, LENGTH).tril().triu(-5).bool()
HOLES = torch.ones(LENGTH, LENGTH).tril().bool()
HOLES[9, 3] = HOLES[40, 2] = False

CASES: dict[str, dict[str, Any]] = {
    "ring, balanced": {**RING, "layout": "balanced"},
    "ring, auto": {**RING, "layout": "auto"},
    "ring, head_tail": {**RING, "layout": "head_tail"},
    "ring, plain causal": {"kv_exchange": "ring", "layout": "balanced", "is_causal": True, "documents": [0, LENGTH]},
    "needed, holes": {"kv_exchange": "needed", "attn_mask": HOLES},
    "needed, holes in documents": {"kv_exchange": "needed", "attn_mask": HOLES, "documents": DOCUMENTS},
    "needed, window": {"kv_exchange": "needed", "attn_mask": WINDOW},
    "all-gather, holes": {"attn_mask": HOLES},
}


@on_ranks
def said() -> dict[str, tuple[list[str], int]]:
    """For each case what a call warns of, the same call repeated, and the bytes that one sends."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    q = torch.randn(1, 2, LENGTH // WORLD, 4)
    found = {}
    for name, settings in CASES.items():
        exchange._warned.clear()
        with warnings.catch_warnings(record=True) as caught, comm.record_traffic() as traffic:
            warnings.simplefilter("always")
            attention(q, q, q, mesh=mesh, **settings)
            sent = sum(n for operation, n in traffic.entries if operation != "agreement")
            attention(q, q, q, mesh=mesh, **settings)
        found[name] = [str(w.message) for w in caught if "kv_exchange" in str(w.message)], sent
    return found


def test_an_exchange_that_moves_too_much_says_so_once(ranks: Any) -> None:
    of_ranks = ranks(WORLD, said)
    by_case = {case: [found[case][0] for found in of_ranks] for case in CASES}
    assert all(len(messages) <= 1 for some in by_case.values() for messages in some)
    for layout in ("balanced", "auto"):
        message = next(message for messages in by_case[f"ring, {layout}"] for message in messages)
        assert message.startswith(f"layout='{layout}' with kv_exchange='ring' makes 3 hops in each attention call")
        assert "bring 48 rows of keys and values to this rank, of which its queries see" in message
        assert "Use kv_exchange='needed'" in message
    for messages in by_case["needed, holes"]:
        (message,) = messages
        assert "kv_exchange='needed' with an attn_mask of shape (1, 1, 64, 64) sends all keys and values" in message
        assert "Pass is_causal, window or documents" in message
    others = [case for case in CASES if case not in ("ring, balanced", "ring, auto", "needed, holes")]
    assert {case: by_case[case] for case in others} == {case: [[]] * WORLD for case in others}
    five_rows = 5 * 2 * 2 * 4 * 4  # of k and v, two heads of four fp32 numbers
    assert sum(found["needed, window"][1] for found in of_ranks) == (WORLD - 1) * five_rows

"""Training scripts that make an accelerator the default device: tables that the library makes stay on the host.

"meta" stands for that device: a table that lies there has no values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallelHandler
from hyper_cp.ops import Entries, attention, causal_conv1d, gather_windows, linear_recurrence, select_keys, windows
from tests.harness.ranks import on_ranks

Calls = dict[str, Callable[[], Any]]
DOCUMENTS = {"documents": [0, 5, 16]}


def batches(layout: str, q: Tensor) -> Calls:
    """Whatever the batch side makes tables of: lists, lengths, masks, ids."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    handler, tokens = ContextParallelHandler(mesh, layout), torch.arange(34).view(2, 17)
    mask, lengths = (tokens % 17 < 9).long(), torch.tensor([0, 5, 17])

    def step(rows: int = 2, **more: Any) -> Any:
        given = {"input_ids": tokens[:rows], "labels": tokens[:rows], **more}
        batch = handler.get_batch_on_this_cp_rank(given, shift_labels=True)
        with handler.documents(batch):
            losses = batch["input_ids"].double()
            return handler.mean_loss(losses, batch["shift_labels"], gradients="sum", elsewhere=True), batch

    def block() -> Any:
        with handler.documents([0, 5, 16]):
            attended = attention(q, q, q, mesh=mesh, is_causal=True, layout=layout)
            return attended, handler.roll_tensor(q, -1, 2), handler.position_ids(16)

    return {
        "lengths": step,
        "mask": lambda: step(attention_mask=mask),
        "documents": lambda: step(cu_seqlens=lengths),
        "ids": lambda: step(1, document_ids=(torch.arange(17, device="cpu") > 4).long()[None]),
        "block": block,
    }


def calls(q: Tensor) -> Calls:
    """The functions of the engines."""
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), q.transpose(1, 2)
    own: dict[str, Any] = {"mesh": mesh, "is_causal": True}

    def pooled() -> Tensor:
        keys = gather_windows(windows(x, [1, 0], every=2, mesh=mesh).mean(2), every=2, length=16, mesh=mesh)
        keys = keys.transpose(1, 2)
        return attention(q, q, q, entries=Entries(keys, keys, 2), **own)

    return {
        "ring": lambda: attention(q, q, q, kv_exchange="ring", **own),
        "needed": lambda: attention(q, q, q, kv_exchange="needed", **DOCUMENTS, **own),
        "tails": lambda: attention(q, q, q, load_balance=True, **own),
        "heads": lambda: attention(q, q, q, ulysses_degree=2, head_groups=2, **DOCUMENTS, **own),
        "softcap": lambda: attention(q, q, q, softcap=2.0, **DOCUMENTS, **own),
        "slices": lambda: attention(q, q, q, mesh=mesh, slices=[((0, 16), (0, 16), "causal")]),
        "selected": lambda: attention(q, q, q, selected=select_keys(q, q[:, :1], topk=3, mesh=mesh), **own),
        "entries": pooled,
        "recurrence": lambda: linear_recurrence(x, x, x, -x[..., 0].square(), mesh=mesh, **DOCUMENTS),
        "convolution": lambda: causal_conv1d(x[..., 0].mT, x[0, :4, 0, :3], mesh=mesh, **DOCUMENTS),
        "windows": lambda: windows(x, [2, 0], mesh=mesh, **DOCUMENTS),
    }


def computed(call: Callable[[], Any], q: Tensor) -> Any:
    """The result of a call, and the gradient of q if it has one."""
    out = call()
    return (out, torch.autograd.grad(out.square().sum(), q)) if isinstance(out, Tensor) else out


@on_ranks
def other_on(device: str, what: str) -> list[str]:
    """Names of results that are others, or errors, while ``device`` is the default."""
    torch.manual_seed(0)
    q, wrong = torch.randn(1, 4, 8, 8).double().requires_grad_(), []
    for name, call in (calls(q) if what == "calls" else batches(what, q)).items():
        want = computed(call, q)
        torch.set_default_device(device)
        try:
            torch.testing.assert_close(computed(call, q), want, rtol=0, atol=0)
        except Exception as error:
            wrong.append(f"{name}: {error}")
        finally:
            torch.set_default_device(None)
    return wrong


@pytest.mark.parametrize("what", ["calls", "contiguous", "head_tail", "balanced"])
def test_results_are_the_same(ranks: Any, what: str) -> None:
    assert ranks(2, other_on, "meta", what) == [[], []]

"""The handler of get_cp_handler_cls takes the calls and the batches of Megatron-LM: compared with whole sequences."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from hyper_cp import get_cp_handler_cls
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks

PADDED, LENGTHS = [0, 8, 12, 24, 40], [0, 5, 9, 15, 27]
"""Documents of 5, 4, 6 and 12 tokens, in rooms of 8, 4, 12 and 16 positions."""
TOKENS = torch.tensor([p < 5 or 8 <= p < 18 or 24 <= p < 36 for p in range(40)])
OF = torch.tensor([sum(p >= b for b in PADDED[1:]) for p in range(40)])


def handler_of(layout: str = "head_tail") -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return get_cp_handler_cls("transformer_engine", "p2p")(mesh, qkv_format="bhsd", layout=layout)


def zigzag(x: Tensor, dim: int) -> Tensor:
    """This rank's chunks r and 2n - 1 - r, as Megatron takes them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    chunks = x.chunk(2 * world, dim)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], dim)


def megatron_batch() -> dict[str, Any]:
    """A batch of Megatron's loaders: every key is there, some of them None."""
    g = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(9, (1, 40), generator=g), torch.randint(9, (1, 40), generator=g)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(PADDED)])[None]
    batch = {"tokens": tokens, "labels": labels, "loss_mask": TOKENS[None].float(), "position_ids": positions}
    nothing = dict.fromkeys(("attention_mask", "hybrid_cp_group", "local_cp_size"))
    lengths = {"cu_seqlens": LENGTHS, "cu_seqlens_padded": PADDED}
    tables = {name: torch.tensor([x], dtype=torch.int32) for name, x in lengths.items()}
    return {**batch, **nothing, **tables, "max_seqlen": torch.tensor([16], dtype=torch.int32)}


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each document's tokens, by itself, not causal; padding is not compared."""
    out = torch.zeros_like(q)
    for document in range(4):
        at = torch.nonzero(TOKENS & (document == OF)).flatten()
        weights = (q[:, :, at] @ k[:, :, at].mT / q.shape[-1] ** 0.5).softmax(-1)
        out[:, :, at] = weights @ v[:, :, at]
    return out


@on_ranks
def packed_batch(layout: str) -> float:
    """The batch with padding between its documents: its share, and the error of attention without any mask."""
    handler, group = handler_of(layout), dist.new_group(list(range(dist.get_world_size())))
    found = handler.get_batch_on_this_cp_rank(
        megatron_batch(), cp_group=group, is_hybrid_cp=False, use_per_sequence_balancing=True
    )
    assert not {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"} & set(found)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        whole = megatron_batch()[name]
        assert torch.equal(handler.combine(found[name], 1, documents=found.documents), whole), name
        if layout == "head_tail":
            assert torch.equal(found[name], zigzag(whole, 1)), name
    ends = [0, 5, 8, 12, 18, 24, 36, 40]
    assert sorted(set(found.documents[0].tolist())) == ends
    module, g = Attention(), torch.Generator().manual_seed(3)
    parallelize_module(module, handler.mesh, handler.style)
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64, generator=g) for _ in range(3))
    with handler.documents(found):
        out = handler.combine(module(*(handler.dispatch(x, 2) for x in (q, k, v))), 2)
    return relative_error(out[:, :, TOKENS], attended(q, k, v)[:, :, TOKENS])


@pytest.mark.parametrize("layout", ["head_tail", "per_document"])
def test_padding_between_documents_needs_no_mask(ranks: Any, layout: str) -> None:
    assert max(ranks(2, packed_batch, layout)) <= 1e-10


@on_ranks
def tables_of(entries: list[dict[str, Any]]) -> list[list[int]]:
    handler, found = handler_of(), []
    for given in entries:
        batch = handler.get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 40, dtype=torch.int64), **given})
        assert set(batch) == {"tokens", "position_ids"}
        found.append(sorted(set(batch.documents[0].tolist())))
    return found


def test_names_of_megatron_and_megatron_bridge(ranks: Any) -> None:
    def row(*numbers: int) -> Tensor:
        return torch.tensor([numbers], dtype=torch.int32)

    split = [0, 5, 8, 12, 18, 24, 36, 40]
    cases: list[tuple[dict[str, Any], list[int]]] = [
        # Megatron's datasets fill rows up with the length of the sequence.
        ({"cu_seqlens": row(0, 8, 40, 40, 40), "cu_seqlens_padded": None, "max_seqlen": row(32)}, [0, 8, 40]),
        ({"cu_seqlens": row(*LENGTHS, 40, 40), "cu_seqlens_padded": row(*PADDED, 40, 40)}, split),
        (
            {
                "cu_seqlens_q": LENGTHS,
                "cu_seqlens_q_padded": PADDED,
                "cu_seqlens_kv": LENGTHS,
                "cu_seqlens_kv_padded": PADDED,
            },
            split,
        ),
        # Megatron Bridge fills them up with -1, and calls the lengths with padding cu_seqlens.
        ({"cu_seqlens": row(*PADDED, -1, -1), "cu_seqlens_argmin": row(5), "max_seqlen": row(16)}, PADDED),
        ({"cu_seqlens": row(*PADDED, -1, -1)}, PADDED),
        (
            {
                "cu_seqlens": row(*PADDED, -1),
                "cu_seqlens_argmin": torch.tensor(5),
                "cu_seqlens_unpadded_argmin": row(5),
                "cu_seqlens_unpadded": row(*LENGTHS, -1),
            },
            split,
        ),
        # A document that fills its room, and one without tokens.
        ({"cu_seqlens": row(0, 8, 8, 20), "cu_seqlens_padded": row(0, 8, 16, 40)}, [0, 8, 16, 28, 40]),
    ]
    assert ranks(2, tables_of, [given for given, _ in cases]) == [[want for _, want in cases]] * 2


@on_ranks
def rolls(layout: str) -> None:
    handler, x = handler_of(layout), torch.arange(1, 41).view(1, 40)
    with handler.documents(PADDED) as table:
        share = handler.dispatch(x, 1)
    assert handler.roll_tensor(None, shifts=-1, dims=-1, cp_group=None) == (None, None)
    if layout == "head_tail":
        following, total = handler.roll_tensor(share, cp_group=dist.group.WORLD)
        assert torch.equal(following, zigzag(torch.cat([x[:, 1:], torch.zeros(1, 1, dtype=x.dtype)], 1), 1))
        assert total == following.sum()

    def of(**entries: Any) -> Any:
        tensors = {name: None if e is None else torch.tensor(e, dtype=torch.int32) for name, e in entries.items()}
        return SimpleNamespace(**{"cu_seqlens_q": None, "cu_seqlens_q_padded": None, **tensors})

    ends = {tuple(PADDED): PADDED[1:], tuple(LENGTHS): [5, 8, 12, 18, 24, 36, 40]}
    for given in (of(cu_seqlens_q=PADDED), of(cu_seqlens_q=PADDED, cu_seqlens_q_padded=PADDED)):
        want = torch.where(torch.isin(torch.arange(1, 41), torch.tensor(PADDED[1:])), 0, x + 1)
        rolled, total = handler.roll_tensor(share, -1, -1, None, given, return_sum=False)
        assert total is None
        assert torch.equal(handler.combine(rolled, 1, documents=table), want)
    given = of(cu_seqlens_q=LENGTHS, cu_seqlens_q_padded=PADDED)
    want = torch.where(torch.isin(torch.arange(1, 41), torch.tensor(ends[tuple(LENGTHS)])), 0, x + 1)
    if layout == "per_document":  # placed with its padding, or without it?
        words = error_of(lambda: handler.roll_tensor(share, packed_seq_params=given))
        assert words.startswith("ValueError: packed_seq_params has padding between documents, with layout='per_doc")
        batch = handler.get_batch_on_this_cp_rank(
            {"tokens": x, "cu_seqlens": LENGTHS, "cu_seqlens_padded": PADDED}, is_hybrid_cp=False
        )
        share, table = batch["tokens"], batch.documents
    with handler.documents(table if layout == "per_document" else [0, 40]):
        rolled, _ = handler.roll_tensor(share, packed_seq_params=given)
        assert torch.equal(handler.combine(rolled, 1), want)


@pytest.mark.parametrize("layout", ["head_tail", "per_document"])
def test_rolls_with_the_arguments_of_megatron(ranks: Any, layout: str) -> None:
    ranks(2, rolls, layout)


@on_ranks
def refused() -> list[tuple[str, str]]:
    handler, batch = handler_of(), megatron_batch()
    get, roll, x = handler.get_batch_on_this_cp_rank, handler.roll_tensor, torch.zeros(1, 20)
    alone = dist.new_group([0]), dist.new_group([1])
    other = alone[dist.get_rank()]
    calls = {
        "ValueError: cp_group has the ranks [": lambda: roll(x, cp_group=other),
        "TypeError: cp_group is a str": lambda: get(batch, cp_group="cp"),
        "ValueError: packed_seq_params and documents are both": lambda: roll(
            x, packed_seq_params=SimpleNamespace(), documents=[0, 40]
        ),
        "ValueError: packed_seq_params is a SimpleNamespace without cu": lambda: roll(
            x, packed_seq_params=SimpleNamespace()
        ),
        "NotImplementedError: is_hybrid_cp=True with a batch of local_cp_size=4, and this": lambda: get(
            {**batch, "local_cp_size": torch.tensor(4)}, is_hybrid_cp=True
        ),
        "NotImplementedError: is_hybrid_cp=True with a batch of local_cp_size=None": lambda: get(
            batch, is_hybrid_cp=True
        ),
        "ValueError: batch entry 'cu_seqlens': a document has 9 tokens in 8 positions, 0 to 8": lambda: get(
            {**batch, "cu_seqlens": [0, 9, 12, 18, 30]}
        ),
        "ValueError: batch entry 'cu_seqlens': a document has 3 tokens in 0 positions, 40 to 40": lambda: get(
            {**batch, "cu_seqlens": [0, 5, 9, 12], "cu_seqlens_padded": [0, 8, 40, 40]}
        ),
        "ValueError: batch entry 'cu_seqlens': it has [3] boundaries in its rows without padding, and [5]": lambda: get(
            {**batch, "cu_seqlens": [0, 9, 12]}
        ),
        "ValueError: batch entry 'cu_seqlens': cu_seqlens_argmin has 2 numbers for 1 rows": lambda: get(
            {**batch, "cu_seqlens_argmin": [3, 4]}
        ),
        "ValueError: batch entry 'cu_seqlens_padded' seems to name": lambda: get({**batch, "cu_seqlens": None}),
    }
    get({**batch, "local_cp_size": torch.tensor(2)}, is_hybrid_cp=True)  # the ranks of the mesh
    get({**batch, "cu_seqlens": None, "cu_seqlens_padded": None}, is_hybrid_cp=True)
    return [(words, error_of(call)) for words, call in calls.items()]


def test_wrong_arguments_of_megatron_are_refused(ranks: Any) -> None:
    for errors in ranks(2, refused):
        assert all(got.startswith(words) for words, got in errors), errors

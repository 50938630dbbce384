"""Inner attention with torchtitan's call, on packed tokens: outputs and gradients of one device, or errors."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.integrations.torchtitan import apply_context_parallel
from tests.harness.oracle import plain_attention, relative_error, visible_pairs
from tests.harness.ranks import on_ranks


class VarlenMetadata(NamedTuple):
    """The same as torchtitan's: cumulative lengths and the longest document."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class VarlenInnerAttention(nn.Module):
    """A double of torchtitan's module of this name: its signature, with the kernel's result in plain math."""

    def __init__(self, window_size: tuple[int, int]) -> None:
        super().__init__()
        self.window_size = window_size

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        assert enable_gqa == (q.shape[1] != k.shape[1]) and out_transform is None
        boundaries, left = [attention_masks.cu_seq_q.tolist()], self.window_size[0]
        visible = visible_pairs(q.shape[0], True, (None if left == -1 else left, 0), boundaries)
        qkv = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return plain_attention(*qkv, visible=visible, scale=scale)[0].transpose(0, 1)


class Attention(nn.Module):
    def __init__(self, window: tuple[int, int], spelling: str) -> None:
        super().__init__()
        self.wqkv = nn.Linear(16, 8 * 8, bias=False)
        self.wo = nn.Linear(32, 16, bias=False)
        self.inner_attention = VarlenInnerAttention(window)
        self.spelling = spelling

    def forward(self, x: Tensor, masks: Any, **kwargs: Any) -> Tensor:
        q, k, v = self.wqkv(x).view(len(x), 8, 8).split([4, 2, 2], dim=1)
        kwargs = {self.spelling: masks, "scale": 0.3, "enable_gqa": True, "out_transform": None, **kwargs}
        return self.wo(self.inner_attention(q, k, v, **kwargs).flatten(1))


class Decoder(nn.Module):
    """Two blocks as torchtitan names them, one with a sliding window."""

    def __init__(self, spelling: str = "attention_masks") -> None:
        super().__init__()
        windows = {"0": (-1, 0), "1": (5, 0)}
        self.layers = nn.ModuleDict(
            {name: nn.ModuleDict({"attention": Attention(w, spelling)}) for name, w in windows.items()}
        )

    def forward(self, x: Tensor, masks: Any, **kwargs: Any) -> Tensor:
        for layer in self.layers.values():
            x = x + layer["attention"](x, masks, **kwargs)
        return x


BOUNDARIES = [0, 5, 6, 19, 32, 32]  # torchtitan pads cumulative lengths like this


def metadata() -> VarlenMetadata:
    cu_seq = torch.tensor(BOUNDARIES, dtype=torch.int32)
    return VarlenMetadata(cu_seq, cu_seq, 13, 13)


def decoder(spelling: str = "attention_masks") -> Decoder:
    torch.manual_seed(3)
    return Decoder(spelling).double()


def cp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


@on_ranks
def packed(layout: str) -> dict[str, float]:
    tokens = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mesh, oracle, found = cp_mesh(), decoder(), {}
    want = oracle(tokens, metadata())
    want.square().sum().backward()
    wants = [p.grad for p in oracle.parameters()]
    for name, (degree, exchange) in {
        "ulysses": (2, "all_gather"),
        "all": (1, "all_gather"),
        "ring": (1, "ring"),
    }.items():
        spelling = "attention_metadata" if name == "ring" else "attention_masks"
        style = ContextParallel(ulysses_degree=degree, kv_exchange=exchange, layout=layout)
        model, handler = decoder(spelling), ContextParallelHandler(mesh, style)
        assert apply_context_parallel(model, mesh, style) == 2
        model = copy.deepcopy(model)
        local = handler.dispatch(tokens, 0)
        if name == "all":
            with handler.documents(BOUNDARIES):
                out = model(local, None)
        else:
            out = model(local, metadata())
        out.square().sum().backward()
        found[name] = relative_error(handler.combine(out.detach(), 0), want.detach())
        for p, grad in zip(model.parameters(), wants, strict=True):
            dist.all_reduce(p.grad)
            found[name] = max(found[name], relative_error(p.grad, grad))
    return found


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("world", [2, 4])
def test_packed_documents_and_windows(ranks: Any, world: int, layout: str) -> None:
    for found in ranks(world, packed, layout):
        assert len(found) == 3 and max(found.values()) <= 1e-10, found


@on_ranks
def refused(case: str) -> None:
    mesh, model, style = cp_mesh(), decoder(), ContextParallel(ulysses_degree=1)
    x = torch.zeros(16, 16, dtype=torch.float64)
    if case == "pattern":
        apply_context_parallel(model, mesh, style, "blocks.*.attention")
    if case == "window":
        apply_context_parallel(model, mesh, ContextParallel(window=(3, 0)))
    apply_context_parallel(model, mesh, style)
    if case == "twice":
        apply_context_parallel(model, mesh, style)
    elif case == "block mask":
        model(x, torch.ones(32, 32))
    elif case == "score_mod":
        model(x, metadata(), score_mod=lambda *args: 0)
    elif case == "both":
        with ContextParallelHandler(mesh, style).documents(BOUNDARIES):
            model(x, metadata())
    else:
        model(x, VarlenMetadata(torch.tensor([0, 5, 32]), torch.tensor([0, 7, 32]), 27, 25))


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("pattern", "ValueError", r"'blocks.\*.attention' matches no module of Decoder"),
        ("window", "ValueError", r"window=\(3, 0\).*VarlenInnerAttention has its own"),
        ("twice", "ValueError", "layers.0.attention.inner_attention is context parallel already"),
        ("block mask", "NotImplementedError", "masks of type Tensor.*cu_seq_q"),
        ("score_mod", "NotImplementedError", "called with score_mod"),
        ("both", "ValueError", "inside handler.documents"),
        ("unequal", "NotImplementedError", "cu_seq_q and cu_seq_k that differ"),
    ],
)
def test_what_cannot_be_honoured_is_refused(ranks: Any, case: str, error: str, words: str) -> None:
    ranks.raises(2, error, words, refused, case)

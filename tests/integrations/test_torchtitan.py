"""Inner attention with torchtitan's call, on packed tokens: outputs and gradients of one device, or errors."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel_mesh, split_cp_mesh
from hyper_cp.integrations.torchtitan import (
    apply_context_parallel,
    apply_cp_to_forward,
    cp_attention_class,
    prepare_context_parallel_input,
)
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import plain_attention, relative_error, visible_pairs
from tests.harness.ranks import check_errors, error_of, errors_of, on_ranks, sum_over_ranks


class VarlenMetadata(NamedTuple):
    """The same as torchtitan's: cumulative lengths and the longest document."""

    cu_seq_q: Tensor
    cu_seq_k: Tensor
    max_q: int
    max_k: int


class VarlenInnerAttention(nn.Module):
    """A mock of torchtitan's module of this name: its signature, with the kernel's result in plain math."""

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


@on_ranks
def packed(layout: str) -> dict[str, float]:
    tokens = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mesh, oracle, found = cp_mesh(), decoder(), {}
    want = oracle(tokens, metadata())
    want.square().sum().backward()
    wants = [p.grad for p in oracle.parameters()]
    for name, degree, exchange in (("ulysses", 2, "all_gather"), ("all", 1, "all_gather"), ("ring", 1, "ring")):
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
        pairs = zip(sum_over_ranks(*(p.grad for p in model.parameters())), wants, strict=True)
        found[name] = max(found[name], *(relative_error(*pair) for pair in pairs))
    return found


@pytest.mark.parametrize(("world", "layout"), [(2, "head_tail"), (4, "contiguous")])
def test_packed_documents_and_windows(ranks: Any, world: int, layout: str) -> None:
    for found in ranks(world, packed, layout):
        assert len(found) == 3 and max(found.values()) <= 1e-10, found


# --------------------------------------------------------------------------- rows, as in torchtitan 0.3.0


@on_ranks
def rows_of_documents() -> dict[str, float]:
    """``[B, L, H, D]`` with boundaries over all rows, and the error for boundaries of a share."""
    mesh, found = cp_mesh(), {}
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 16, 4, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    cu_seq = torch.tensor([0, 5, 16, 25, 26, 32])
    rows, later = [[0, 5, 16], [0, 9, 10, 16]], [[0, 7, 9, 16], [0, 3, 16]]
    want, wanted_later = (
        plain_attention(*heads, visible=visible_pairs(16, True, (3, 0), x)).transpose(1, 2) for x in (rows, later)
    )
    for layout in ("contiguous", "head_tail"):
        style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout=layout)
        handler, model = ContextParallelHandler(mesh, style), nn.ModuleDict({"inner": VarlenInnerAttention((3, 0))})
        assert apply_context_parallel(model, mesh, style, "inner") == 1
        local = [handler.dispatch(x, 1) for x in (q, k, v)]
        out = model["inner"](*local, attention_masks=VarlenMetadata(cu_seq, cu_seq, 11, 11), is_causal=True)
        found[layout] = relative_error(handler.combine(out, 1), want)
        buffer = cu_seq.clone()  # of a loader, which writes the documents of each batch to it
        for boundaries, wanted in (([0, 5, 16, 25, 26, 32], want), ([0, 7, 9, 16, 19, 32], wanted_later)):
            buffer.copy_(torch.tensor([*boundaries, *[32] * (len(buffer) - len(boundaries))]))
            out = model["inner"](*local, attention_masks=VarlenMetadata(buffer, buffer, 11, 11), is_causal=True)
            found[f"{layout}, {boundaries}"] = relative_error(handler.combine(out, 1), wanted)
        share = torch.tensor([0, 8, 13, 16])
        message = error_of(lambda m=model, x=local: m["inner"](*x, attention_masks=VarlenMetadata(share, share, 8, 8)))
        assert message.startswith("ValueError") and "2 rows of 16 tokens" in message, message
    return found


def test_rows_of_documents(ranks: Any) -> None:
    for found in ranks(2, rows_of_documents):
        assert len(found) == 6 and max(found.values()) <= 1e-10, found


# --------------------------------------------------------------------------- the interface of newer versions


class Capability(ABC):
    """A mock of torchtitan's CPAttention."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    @staticmethod
    @abstractmethod
    def prepare_cp_metadata(attention_metadata: Any, *, permutation: Tensor | None) -> Any: ...


class Configured(VarlenInnerAttention):
    """Inner attention that is built from a configuration."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config.window_size)


@on_ranks
def transformed() -> dict[str, Any]:
    mesh, found = cp_mesh(), {}
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(32, n, 8, dtype=torch.float64, generator=generator) for n in (4, 2, 2)]
    want = Configured(Configured.Config(window_size=(5, 0)))(*whole, attention_masks=metadata(), enable_gqa=True)
    order = torch.tensor([x for r in range(2) for c in (r, 3 - r) for x in range(8 * c, 8 * c + 8)])[None]
    for layout, permutation in (("contiguous", None), ("head_tail", order)):
        style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout=layout)
        kind = cp_attention_class(Configured, Capability, style, mesh.get_group)
        assert issubclass(kind, Capability) and issubclass(kind.Config, Configured.Config)
        handler, made = ContextParallelHandler(mesh, style), kind(kind.Config(window_size=(5, 0)))
        masks = kind.prepare_cp_metadata(metadata(), permutation=permutation)
        out = made(*(handler.dispatch(x, 0) for x in whole), attention_masks=masks, enable_gqa=True)
        found[layout] = relative_error(handler.combine(out, 0), want)
        for wrong in (order.flip(1), None if permutation is not None else order):
            found[f"{layout} {wrong is None}"] = error_of(
                lambda kind=kind, wrong=wrong: kind.prepare_cp_metadata(metadata(), permutation=wrong)
            )
    alone = cp_attention_class(Configured, Capability, style, lambda: None)
    out = alone(alone.Config(window_size=(5, 0)))(*whole, attention_masks=metadata(), enable_gqa=True)
    found["one device"] = relative_error(out, want)
    return found


def test_a_class_for_the_transform_of_newer_versions(ranks: Any) -> None:
    for found in ranks(2, transformed):
        errors = [x for x in found.values() if isinstance(x, str)]
        assert len(errors) == 3 and all(x.startswith("ValueError: torchtitan's load balancer") for x in errors), errors
        assert max(x for x in found.values() if not isinstance(x, str)) <= 1e-10, found


class WithNorm(VarlenInnerAttention):
    """An inner attention with a norm of its own, which would be lost."""

    def __init__(self, window: Any) -> None:
        super().__init__(window)
        self.norm = nn.RMSNorm(4)


class Beside(nn.Module):
    """A decoder, with something beside its inner attention."""

    def __init__(self, extra: nn.Module | None) -> None:
        super().__init__()
        self.decoder, self.extra = decoder(), extra

    def forward(self, x: torch.Tensor, masks: Any) -> torch.Tensor:
        x = self.decoder(x, masks)
        return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0]


@on_ranks
def refused() -> dict[str, str]:
    mesh, model, style = cp_mesh(), decoder(), ContextParallel(ulysses_degree=1)
    x, inner = torch.zeros(16, 16, dtype=torch.float64), [m for m in model.modules() if hasattr(m, "window_size")]
    unequal = VarlenMetadata(torch.tensor([0, 5, 32]), torch.tensor([0, 7, 32]), 27, 25)
    further = decoder()
    normed = decoder()
    layer = normed.layers["0"] if isinstance(normed.layers, nn.ModuleDict) else normed.layers[0]
    layer.attention.inner_attention = WithNorm(None)
    further.mtp_layers = nn.ModuleList([nn.Linear(16, 16)])
    errors = errors_of(
        {
            "NotImplementedError: attention_modules are of the types VarlenInnerAttention": lambda: apply_cp_to_forward(
                inner, mesh, style=style
            ),
            r"'blocks.\*.attention' matches no module of Decoder": lambda: apply_context_parallel(
                model, mesh, style, "blocks.*.attention"
            ),
            "NotImplementedError: .*inner_attention .WithNorm. has parameters, buffers or modules of its own": lambda: (
                apply_context_parallel(normed, mesh, style)
            ),
            "NotImplementedError: Decoder has mtp_layers": lambda: apply_context_parallel(further, mesh, style),
            r"window=\(3, 0\).*VarlenInnerAttention has a window of its own": lambda: apply_context_parallel(
                model, mesh, ContextParallel(window=(3, 0))
            ),
        }
    )
    apply_context_parallel(model, mesh, style)
    beside = Beside(None).double()
    apply_context_parallel(beside, mesh, style, "decoder.layers.*.inner_attention")

    def in_a_block() -> None:
        with ContextParallelHandler(mesh, style).documents(BOUNDARIES):
            model(x, metadata())

    return errors | errors_of(
        {
            "layers.0.attention.inner_attention is context parallel already": lambda: apply_context_parallel(
                model, mesh, style
            ),
            "NotImplementedError: .*masks of type Tensor.*cu_seq_q": lambda: model(x, torch.ones(32, 32)),
            "NotImplementedError: .*called with score_mod": lambda: model(x, metadata(), score_mod=lambda *args: 0),
            "RuntimeError: module '' .Beside. calls F.scaled_dot_product_attention on this rank's share": lambda: (
                beside(x, metadata())
            ),
            "module 'extra' .Conv1d. convolves 3 neighbouring positions": lambda: apply_context_parallel(
                Beside(nn.Conv1d(16, 16, 3)), mesh, style, "decoder.layers.*.inner_attention"
            ),
            "inside handler.documents": in_a_block,
            "NotImplementedError: .*cu_seq_q and cu_seq_k that differ": lambda: model(x, unequal),
        }
    )


def test_what_cannot_be_honoured_is_refused(ranks: Any) -> None:
    check_errors(ranks(2, refused))


class ScaledDotProductAttention(nn.Module):
    """A mock of torchtitan's module of this name, on ``[B, L, H, D]``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@on_ranks
def on_another_mesh() -> tuple[list[str], float]:
    """The errors of the user's style on the training's mesh, in an evaluation on one rank; then that of a step."""
    mesh, style = cp_mesh(), ContextParallel(ulysses_degree=1, layout="head_tail")
    inner = ScaledDotProductAttention()
    apply_cp_to_forward([inner], mesh, style=style)
    ids, at = torch.arange(32).view(2, 16), torch.arange(16).expand(2, -1)
    whole = torch.randn(32, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        share, _, _ = prepare_context_parallel_input(ids, ids, {"positions": at}, mesh, style=style)
        x = whole[share]
        return inner(x, x, x)

    with context_parallel_mesh(inner, split_cp_mesh(mesh).cp(1)) as handler:
        errors = [error_of(step), error_of(lambda: ContextParallelHandler(mesh, style).dispatch(ids))]
        assert torch.equal(handler.dispatch(ids), ids)
    x = whole[ids].transpose(1, 2)
    want = plain_attention(x, x, x, is_causal=True).transpose(1, 2)
    return errors, relative_error(ContextParallelHandler(mesh, style).combine(step(), 1), want)


def test_the_style_of_inner_attention_knows_of_its_models_mesh(ranks: Any) -> None:
    """Modules run under a copy of it: what it split for the training's mesh was evaluated as whole sequences."""
    for errors, error in ranks(2, on_another_mesh):
        assert all("style runs on another cp mesh (context_parallel_mesh)" in x for x in errors), errors
        assert error <= 1e-10

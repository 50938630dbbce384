"""nn.MultiheadAttention under ContextParallel, and torch's own Transformer layers, which call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, context_parallel
from hyper_cp.cli.modes import named_mode
from tests.harness.attention_case import cp_mesh
from tests.harness.oracle import relative_error, token_positions
from tests.harness.ranks import named_error, on_ranks, sum_over_ranks

LENGTH, WIDTH, HEADS, BATCH = 16, 8, 4, 2


def mask(kind: str) -> dict[str, Any]:
    """Keywords of nn.MultiheadAttention: over global positions, True (or -inf) where hidden."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.rand(LENGTH, LENGTH, generator=g) < 0.3
    hidden.fill_diagonal_(False)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1, 13:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    per_head = torch.randn(BATCH * HEADS, LENGTH, LENGTH, generator=g, dtype=torch.float64)
    return {
        "none": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "bool": {"attn_mask": hidden},
        "per head": {"attn_mask": per_head},
        "padding": {"key_padding_mask": padding},
        "causal and padding": {"attn_mask": causal.isinf(), "is_causal": True, "key_padding_mask": padding},
        "bool and padding": {"attn_mask": hidden, "key_padding_mask": padding},
    }[kind]


KINDS = ("none", "causal", "bool", "per head", "padding", "causal and padding", "bool and padding")
MODES = [named_mode("ring, head_tail"), named_mode("Ulysses"), named_mode("all-gather, load_balance")]
SHAPES: list[dict[str, Any]] = [{"batch_first": True}, {"batch_first": False, "kdim": 6, "vdim": 5, "bias": False}]


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
        return self.attention(q, k, v, need_weights=False, **masks)[0]


def differ(layout: str, options: dict[str, Any], kind: str, style: dict[str, Any] | None, batch: int | None) -> float:
    """The largest error of outputs and gradients against the whole sequence on one device. Without a style, a
    context_parallel block runs the model."""
    torch.manual_seed(0)
    model, seq_dim = Model(**options), 1 if options["batch_first"] and batch else 0
    sizes = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    shape = [LENGTH] if batch is None else [batch, LENGTH] if seq_dim else [LENGTH, batch]
    whole = [torch.randn(*shape, size, dtype=torch.float64, requires_grad=True) for size in sizes]
    weight = torch.randn(*shape, WIDTH, dtype=torch.float64)
    masks = mask(kind)
    want = model(*whole, **masks)
    inputs = [*whole, *model.parameters()]
    wanted = torch.autograd.grad((want * weight).sum(), inputs)
    mine = torch.tensor(token_positions(layout, dist.get_rank(), dist.get_world_size(), LENGTH))
    local = [x.detach().index_select(seq_dim, mine).requires_grad_() for x in whole]

    def run() -> tuple[Tensor, Any]:
        out = model(*local, **masks)
        loss = (out * weight.index_select(seq_dim, mine)).sum()
        return out, torch.autograd.grad(loss, [*local, *model.parameters()])

    if style is None:
        with context_parallel(cp_mesh(), layout=layout):
            out, found = run()
    else:
        parallelize_module(model, cp_mesh(), {"attention": ContextParallel(qkv_indices=None, **style)})
        out, found = run()
    errors = [relative_error(out, want.index_select(seq_dim, mine))]
    errors += [relative_error(a, b.index_select(seq_dim, mine)) for a, b in zip(found[:3], wanted, strict=False)]
    summed = sum_over_ranks(*found[3:])
    return max(errors + [relative_error(a, b) for a, b in zip(summed, wanted[3:], strict=True)])


@on_ranks
def errors_of() -> dict[str, float]:
    errors = {}
    # Every kind of mask in one mode, every mode with both shapes of the module.
    for number, kind in enumerate(KINDS):
        mode, options = MODES[number % len(MODES)], SHAPES[number % len(SHAPES)]
        errors[f"{kind} {mode}"] = differ(mode.get("layout", "contiguous"), options, kind, mode, BATCH)
    for kind in ("none", "causal"):
        errors[f"{kind} unbatched"] = differ("contiguous", SHAPES[0], kind, {"ulysses_degree": 1}, None)
        errors[f"{kind} block"] = differ("head_tail", SHAPES[0], kind, None, BATCH)
    return errors


def test_multihead_attention_equals_one_device(ranks: Any) -> None:
    for errors in ranks(2, errors_of):
        assert max(errors.values()) <= 1e-10, {kind: e for kind, e in errors.items() if not e <= 1e-10}


@on_ranks
def torch_layers(training: bool) -> float:
    """An encoder and a decoder of torch: whole layers, whose attention is self_attn and multihead_attn."""
    worst = 0.0
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    part = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    style = ContextParallel(qkv_indices=None, ulysses_degree=1, kv_exchange="ring")
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        layer = kind(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, dtype=torch.float64).train(training)
        decoder = kind is nn.TransformerDecoderLayer
        options = {"tgt_mask": causal, "tgt_is_causal": True} if decoder else {"src_mask": causal, "is_causal": True}
        want = layer(x, *([x] if decoder else []), **options)
        keys = ["self_attn", "multihead_attn"] if decoder else ["self_attn"]
        parallelize_module(layer, cp_mesh(), dict.fromkeys(keys, style))
        with torch.set_grad_enabled(training):  # without gradients torch would take a fused kernel of its own
            out = layer(part, *([part] if decoder else []), **options)
        worst = max(worst, relative_error(out, want.chunk(dist.get_world_size(), 1)[dist.get_rank()]))
    return worst


@pytest.mark.parametrize("training", [True, False])
def test_layers_of_torch_equal_one_device(ranks: Any, training: bool) -> None:
    assert max(ranks(2, torch_layers, training)) <= 1e-10


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "weights": (
        "NotImplementedError: nn.MultiheadAttention with need_weights=True.*Call it with need_weights=False",
        {},
        {"need_weights": True},
    ),
    "bias": ("NotImplementedError: with add_bias_kv", {"add_bias_kv": True}, {}),
    "zero": ("NotImplementedError: with add_zero_attn", {"add_zero_attn": True}, {}),
    "local mask": (r"attn_mask has shape \(1, 1, 8, 8\).*Build it for", {}, {"attn_mask": torch.zeros(8, 8)}),
}


@on_ranks
def refused(kind: str) -> None:
    _, options, call = REFUSED[kind]
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)
    parallelize_module(module, cp_mesh(), ContextParallel(qkv_indices=None, ulysses_degree=1))
    x = torch.randn(BATCH, LENGTH // 2, WIDTH)
    module(x, x, x, **{"need_weights": False, **call})


@pytest.mark.parametrize("kind", list(REFUSED))
def test_options_that_cannot_be_honoured(ranks: Any, kind: str) -> None:
    ranks.raises(2, *named_error(REFUSED[kind][0]), refused, kind)


@on_ranks
def with_q_k_v() -> None:
    parallelize_module(nn.MultiheadAttention(WIDTH, HEADS), cp_mesh(), ContextParallel())


def test_the_first_error_leads_to_what_works(ranks: Any) -> None:
    words = (
        r"qkv_indices=\(0, 1, 2\) on module MultiheadAttention\. .* Set qkv_indices=None: its attention is then routed"
    )
    ranks.raises(2, "ValueError", words, with_q_k_v)

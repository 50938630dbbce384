"""``parallelize``: what it finds and chooses, and the loss and gradients of one device; and ``handler.loader``."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallelHandler, parallelize
from hyper_cp.cli.demo_model import Llama, LlamaConfig
from tests.harness.hf_causal import random_model
from tests.harness.hf_models import InDouble, make, prepare_batch
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, named_error, on_ranks

VOCABULARY = 32


class Attention(nn.Module):
    """Computes q, k and v itself. The kinds call attention in different ways."""

    def __init__(self, kind: str, heads: int) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.multihead = nn.MultiheadAttention(24, heads, batch_first=True) if kind == "multihead" else None
        self.inner = Attention("", heads) if kind == "one that holds another" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.multihead is not None:
            length = x.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            found: Tensor = self.multihead(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
            return found
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.kind == "cross":
            k, v = k[:, :, ::2], v[:, :, ::2]
        if self.kind == "by hand":
            return self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "three heads, then four":
            again = (x.transpose(1, 2).flatten(2).unflatten(-1, (4, -1)).transpose(1, 2) for x in (q, k, v))
            return self.out(
                y.transpose(1, 2).flatten(2)
                + F.scaled_dot_product_attention(*again, is_causal=True).transpose(1, 2).flatten(2)
            )
        y = y.transpose(1, 2).flatten(2)
        return self.out(y if self.inner is None else y + self.inner(x))


class GPT(nn.Module):
    def __init__(self, kind: str = "", heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 24), nn.Embedding(64, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), Attention(kind, heads)) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x if self.training else self.drop(x))


def texts(count: int) -> list[dict[str, Tensor]]:
    """Whole batches with different numbers of labels."""
    g = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (2, 20 - 3 * number), generator=g)
        found.append({"tokens": tokens, "labels": tokens.masked_fill(torch.arange(tokens.shape[1]) < 5 * number, -100)})
    return found


def loss_of(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    """Add the gradients of the mean over the labels of all batches, on one device."""
    sums = []
    for batch in batches:
        logits = model(batch["tokens"], torch.arange(batch["tokens"].shape[1]))[:, :-1]
        sums.append(F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"))
    (torch.stack(sums).sum() / sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)).backward()


def of_ranks(model: nn.Module) -> list[Tensor]:
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad)
    return grads


@on_ranks
def trained(kind: str, heads: int, **settings: Any) -> tuple[float, str, Any]:
    """The error of gradients over three micro-batches, in two accumulations; the summary, and the chosen style."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model: Any = (
        GPT(kind, heads).double() if kind != "llama" else Llama(LlamaConfig(dim=24, layers=2, heads=4)).double()
    )
    if kind == "adapters":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"], init_lora_weights=False)).double()
    alone, state = copy.deepcopy(model), torch.get_rng_state()
    whole = texts(3)
    with redirect_stdout(io.StringIO()) as printed:
        example: Any = (whole[0]["tokens"][:1, :6], torch.arange(6))
        made, handler = parallelize(model, mesh, example, **settings)
    assert made is model and torch.equal(state, torch.get_rng_state())
    lasts = []
    for batch in handler.loader(whole, shift_labels=True, accumulate=2):
        with handler.documents(batch):
            logits = model(batch["tokens"], batch["position_ids"][0])
        loss = handler.mean_loss(logits, batch["shift_labels"], gradients="sum")
        (loss * batch.weight).backward()
        lasts.append(batch.last)
    assert lasts == [False, True, True]
    loss_of(alone, whole[:2])
    loss_of(alone, whole[2:])
    pairs = zip(of_ranks(model), alone.parameters(), strict=True)
    errors = [relative_error(a, b.grad) for a, b in pairs if b.grad is not None]
    style = handler.style
    assert style is not None
    return max(errors), printed.getvalue(), (style.ulysses_degree, style.kv_exchange, style.layout)


CASES: dict[str, tuple[int, str, int, Mapping[str, Any], tuple[Any, ...]]] = {
    "heads that split": (2, "", 4, {}, (2, "all_gather", "contiguous")),
    "some of them": (4, "", 6, {}, (2, "ring", "head_tail")),
    "none of them": (2, "", 3, {}, (1, "ring", "head_tail")),
    "two calls of a module": (2, "three heads, then four", 3, {}, (1, "ring", "head_tail")),
    "an exchange": (2, "", 4, {"kv_exchange": "needed"}, (1, "needed", "head_tail")),
    "a layout by documents": (2, "", 3, {"layout": "balanced"}, (1, "needed", "balanced")),
    "contiguous data": (2, "", 3, {"load_balance": True}, (1, "ring", "contiguous")),
    "multihead": (2, "multihead", 4, {}, (2, "all_gather", "contiguous")),
    "modules that receive q, k, v": (2, "llama", 4, {}, (2, "all_gather", "contiguous")),
    "one rank": (1, "", 4, {}, (1, "ring", "head_tail")),
    "an attention in another": (2, "one that holds another", 4, {}, (2, "all_gather", "contiguous")),
    "adapters of PEFT": (2, "adapters", 4, {}, (2, "all_gather", "contiguous")),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(ranks: Any, case: str) -> None:
    world, kind, heads, settings, chosen = CASES[case]
    if kind == "adapters":
        pytest.importorskip("peft")
    found = ranks(world, trained, kind, heads, **settings)
    for error, _, style in found:
        assert error <= 1e-12 and style == chosen
    assert not any(text for _, text, _ in found[1:])
    assert f"{world} ranks share each sequence" in found[0][1]


@on_ranks
def with_data_parallelism(of_loader: bool, of_loss: bool, block: bool) -> float | str:
    """The error of gradients over two micro-batches on 2 x 2 ranks, or the error that is raised."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    both, model, whole = world["dp", "cp"], GPT().double(), texts(4)
    alone = copy.deepcopy(model)
    _, handler = parallelize(model, world["cp"], (whole[0]["tokens"][:1, :6], torch.arange(6)), quiet=True)
    mine = whole[:2] if world["dp"].get_local_rank() == 0 else whole[2:]

    def step() -> None:
        for batch in handler.loader(mine, shift_labels=True, accumulate=2, mesh=both if of_loader else None):
            with handler.documents(batch if block else None):
                logits = model(batch["tokens"], batch["position_ids"])
                options: Any = {"mesh": both if of_loss else None, "gradients": "sum"}
                loss = handler.mean_loss(logits, batch["shift_labels"], **options)
            (loss * batch.weight).backward()

    if text := error_of(step):
        return text
    loss_of(alone, whole)
    pairs = zip(of_ranks(model), alone.parameters(), strict=True)
    return max(relative_error(a, b.grad) for a, b in pairs if b.grad is not None)


@pytest.mark.parametrize("block", [True, False])
def test_labels_are_counted_over_the_ranks_of_the_loss(ranks: Any, block: bool) -> None:
    for of_loader, of_loss in ((True, True), (False, True), (True, False)):
        for found in ranks(4, with_data_parallelism, of_loader, of_loss, block):
            if of_loader and of_loss:
                assert isinstance(found, float) and found <= 1e-12, found
            else:
                assert re.match(r"ValueError: mean_loss is the mean over ranks \[.*counted .*over ranks \[", found), (
                    found
                )


@on_ranks
def summary(heads: int) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    with redirect_stdout(io.StringIO()) as printed:
        parallelize(GPT("", heads), mesh, {"tokens": torch.zeros(1, 6).long(), "positions": torch.arange(6)})
    return printed.getvalue()


def test_the_summary_is_a_plan(ranks: Any) -> None:
    text = ranks(4, summary, 6)[0]
    style = "ContextParallel(qkv_indices=None, kv_exchange='ring', layout='head_tail', ulysses_degree=2)"
    # Two layers: half of q, k, v and the output both ways, k and v once, and again with their gradients.
    sent = 2 * 24 * 4 * (4 + 2 + 4)
    assert text.splitlines()[1:] == [
        "  mode      Ulysses over 2 adjacent ranks, ring over 2; layout 'head_tail' (6 query and 6 key/value heads)",
        "  styled    2 Attention",
        f"  the same  style = {style}",
        "            parallelize_module(model, mesh, {'blocks.*.1': style})",
        "  as it is  5 Linear, 2 Embedding, 2 LayerNorm, 1 Dropout: each works on this rank's positions",
        f"  traffic   a rank sends {sent / 1024:.1f} KiB for each of its tokens, forward and backward",
    ]


class Counting(GPT):
    """nanoGPT: it counts positions itself."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens, torch.arange(tokens.shape[1]))


@on_ranks
def counting(given: bool) -> tuple[list[str], str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    example = (torch.zeros(1, 6).long(), *[torch.arange(6)] * given)
    with redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize((GPT if given else Counting)(), mesh, example)
    return [str(x.message) for x in caught], printed.getvalue()


def test_a_model_that_counts_positions_is_told(ranks: Any) -> None:
    for texts, printed in ranks(2, counting, False):
        assert len(texts) == 1 and texts[0].startswith("in the example, 'positions' got positions 0, 1, 2, ...")
        assert not printed or "but 'positions' at positions that the model counts itself" in printed
    assert [texts for texts, _ in ranks(2, counting, True)] == [[], []]


@on_ranks
def wrong(case: str) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    example: Any = None if case == "no example" else (torch.zeros(1, 6, dtype=torch.long), torch.arange(6))
    model = nn.Sequential(nn.Linear(3, 3)) if case == "no attention" else GPT(case)
    if case == "no attention":
        example = (torch.zeros(1, 3),)
    if case == "accumulation":
        handler = ContextParallelHandler(mesh, "contiguous")
        return error_of(lambda: list(handler.loader([{"tokens": torch.zeros(1, 4).long()}], accumulate=2)))
    if case == "wrapped":
        return error_of(lambda: parallelize(nn.Sequential(make("llama")), mesh, example))
    if case == "settings":
        return error_of(lambda: parallelize(GPT(), mesh, example, qkv_indices=(0, 1, 2), seq_dim=2))
    if case == "twice":
        model, _ = parallelize(GPT(), mesh, example)
    return error_of(lambda: parallelize(model, mesh, example))


WRONG = {
    "twice": "ValueError: GPT has modules to which a plan is already applied",
    "no example": "ValueError: example is None.*Pass the arguments of the model",
    "no attention": "ValueError: no attention call was found in the forward of Sequential",
    "by hand": "ValueError: no attention call was found in the forward of GPT",
    "cross": "NotImplementedError: module 'blocks.0.1' .* attends from 6 queries to 3 keys. Cross-attention",
    "wrapped": "NotImplementedError: Sequential holds a model of transformers, '0'",
    "settings": "ValueError: parallelize got qkv_indices, seq_dim",
    "accumulation": "ValueError: accumulate > 1 with a batch that has neither",
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_say_what_to_do(ranks: Any, case: str) -> None:
    kind, words = named_error(WRONG[case])
    for text in ranks(2, wrong, case):
        assert re.match(rf"{kind}: .*{words}", text, re.S), text


@on_ranks
def of_transformers() -> tuple[float, str]:
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), make("llama")
    alone, ids = copy.deepcopy(model), texts(1)[0]["tokens"]
    with redirect_stdout(io.StringIO()) as printed:
        _, handler = parallelize(model, mesh)
    model(**prepare_batch(handler, {"input_ids": ids, "labels": ids})).loss.backward()
    alone(input_ids=ids, labels=ids).loss.backward()
    pairs = zip(of_ranks(model), alone.parameters(), strict=True)
    return max(relative_error(a, b.grad) for a, b in pairs), printed.getvalue()


def test_a_model_of_transformers(ranks: Any) -> None:
    pytest.importorskip("transformers")
    (error, text), _ = ranks(2, of_transformers)
    assert error <= 1e-12 and "prepare_model(model, mesh, style=ContextParallel(ulysses_degree=2))" in text, text


@on_ranks
def of_layers_with_other_heads() -> str:
    """Eight query heads, with four key/value heads in layers with a window and two in the others."""
    import transformers as hf

    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    sizes |= {
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
    }
    types = {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0}
    model = random_model(hf.Gemma4ForCausalLM, hf.Gemma4TextConfig(**sizes, **types))
    mesh, alone = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), copy.deepcopy(model)
    with redirect_stdout(io.StringIO()) as printed:
        _, handler = parallelize(model, mesh)
    ids = texts(1)[0]["tokens"]
    batch = {"input_ids": ids, "labels": ids}
    with InDouble():
        model(**prepare_batch(handler, batch)).loss.backward()
        alone(**batch).loss.backward()
    pairs = zip(of_ranks(model), alone.parameters(), strict=True)
    assert max(relative_error(a, b.grad) for a, b in pairs) <= 1e-12
    return printed.getvalue()


def test_layers_with_other_numbers_of_heads(ranks: Any) -> None:
    pytest.importorskip("transformers")
    text, _ = ranks(2, of_layers_with_other_heads)
    assert "Ulysses over 2 adjacent ranks" in text and "8 query and 2 key/value heads" in text

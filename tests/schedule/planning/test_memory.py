"""Predicted bytes saved for backward against those that autograd saves: within a tenth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel
from hyper_cp.cli.demo_model import Block, Llama, LlamaConfig, rope
from hyper_cp.schedule.planning.inputs.model import ModelShape
from hyper_cp.schedule.planning.memory import layer_saved, norm_saved, saved_between
from hyper_cp.schedule.planning.traffic import Ranks
from tests.harness.ranks import on_ranks

TOKENS = 256
CONFIG = LlamaConfig(vocab=512, dim=64, layers=3, heads=8, kv_heads=4, hidden=160)


def shape(norm: str = "plain") -> ModelShape:
    c = CONFIG
    sizes = {"layers": c.layers, "heads": c.heads, "kv_heads": c.kv_heads, "width": c.dim, "ffn": c.hidden}
    return ModelShape(**sizes, vocabulary=c.vocab, norm=norm)


def saved_bytes(module: nn.Module, run: Callable[[], Any]) -> int:
    """Bytes of the storages that autograd saves while ``run`` runs, without those of parameters and tables."""
    known = {x.untyped_storage().data_ptr() for x in module.parameters()}
    found: dict[int, int] = {}
    alive = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        alive.append(x)  # so that no address is used twice
        if storage.data_ptr() not in known and x.is_floating_point():
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        alive.append(run())
    return sum(found.values())


class LlamaNorm(nn.Module):
    """RMSNorm as transformers writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


@pytest.mark.parametrize("norm", ["plain", "transformers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_a_model_and_its_loss(checkpointing: str, dtype: torch.dtype, norm: str) -> None:
    torch.manual_seed(0)
    model, element = Llama(CONFIG).to(dtype), dtype.itemsize
    if norm == "transformers":
        for module in (model, *model.layers):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.RMSNorm):
                    setattr(module, name, LlamaNorm(CONFIG.dim).to(dtype))
    ids, (cos, sin) = torch.randint(CONFIG.vocab, (1, TOKENS)), rope(torch.arange(TOKENS), CONFIG)

    def run() -> Tensor:
        x = model.embedding(ids)
        for layer in model.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if checkpointing != "none" else layer(x, cos, sin)
        return F.cross_entropy(model.output(model.norm(x)).float().flatten(0, 1), ids.flatten())

    one = Ranks(1, 1, 8)
    layers = CONFIG.layers * saved_between(shape(norm), one, TOKENS, element, checkpointing)
    predicted = layers + TOKENS * norm_saved(shape(norm), element) + TOKENS * CONFIG.vocab * 4  # log-softmax in fp32
    assert predicted == pytest.approx(saved_bytes(model, run), rel=0.1)


MODES: list[dict[str, Any]] = [
    {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"},
    {"ulysses_degree": 1, "kv_exchange": "all_gather", "layout": "head_tail"},
    {"ulysses_degree": 1, "kv_exchange": "needed", "layout": "contiguous"},
    {"ulysses_degree": None},
]


@on_ranks
def of_a_block() -> list[tuple[float, float]]:
    """Predicted and counted bytes of one layer on two ranks, in each mode."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    found = []
    for mode in MODES:
        block = Block(CONFIG)
        style = ContextParallel(seq_dim=2, head_dim=1, **mode)
        style._apply(block.attention.inner, mesh)
        x = torch.randn(1, TOKENS, CONFIG.dim, requires_grad=True)
        tables = rope(torch.arange(TOKENS), CONFIG)
        degree = mode["ulysses_degree"] or 2
        predicted = layer_saved(shape(), Ranks(2 // degree, degree, 8), TOKENS, 4)
        found.append((predicted, saved_bytes(block, lambda block=block, x=x, tables=tables: block(x, *tables))))
    return found


def test_a_block_on_two_ranks(ranks: Any) -> None:
    for predicted, counted in ranks(2, of_a_block)[0]:
        assert predicted == pytest.approx(counted, rel=0.1)

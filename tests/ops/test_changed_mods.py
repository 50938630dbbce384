"""FlexAttention whose functions or blocks change, and functions without a derivative where they hide pairs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from hyper_cp import ContextParallel
from tests.harness.ranks import error_of, on_ranks

S = 16


class Flex(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return flex_attention(q, k, v, **options)  # type: ignore[return-value]


def blocks(visible: Any) -> Any:
    return create_block_mask(visible, None, None, S, S, device="cpu", BLOCK_SIZE=4)


@on_ranks
def changed() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    ring = ContextParallel(2, 1, ulysses_degree=1, kv_exchange="ring")
    module = parallelize_module(Flex(), mesh, ring)
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, S, 4, dtype=torch.float64, generator=g) for _ in range(3)]
    mine = slice(S // 2 * dist.get_rank(), S // 2 * (dist.get_rank() + 1))
    q, k, v = (x[:, :, mine].clone().requires_grad_() for x in whole)
    found: dict[str, Any] = {}

    document = torch.arange(S) // 5
    mask = blocks(lambda b, h, i, j: (document[i] == document[j]) & (j <= i))
    out = module(q, k, v, block_mask=mask)
    document.copy_(torch.arange(S) // 3)
    found["written"] = error_of(lambda: out.sum().backward())
    out = module(q, k, v, block_mask=mask)
    document = torch.arange(S) // 2  # another tensor in the same closure
    found["replaced"] = error_of(lambda: out.sum().backward())

    mask, wider = blocks(lambda b, h, i, j: j <= i), blocks(lambda b, h, i, j: j <= S)
    module(q, k, v, block_mask=mask)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        getattr(mask, name).copy_(getattr(wider, name))
    mask.mask_mod = wider.mask_mod
    want = F.scaled_dot_product_attention(*whole)[:, :, mine]
    found["blocks"] = (module(q, k, v, block_mask=mask) - want).abs().max().item()

    module(
        q,
        k,
        v,
        block_mask=blocks(lambda b, h, i, j: j < i),
        score_mod=lambda score, b, h, i, j: score / (i - j),
    ).sum().backward()
    found["finite"] = all(bool(x.grad.isfinite().all()) for x in (q, k, v) if x.grad is not None)
    return found


def test_what_has_changed_is_seen(ranks: Any) -> None:
    for found in ranks(2, changed):
        for name in ("written", "replaced"):
            assert "RuntimeError: a tensor that score_mod or mask_mod" in found[name], found
        assert found["blocks"] <= 1e-10 and found["finite"], found

"""The work of each scenario as other libraries of context parallelism do it, or the reason why they cannot."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..speed.contenders.contender import Skip
from ..speed.contenders.deepspeed import start
from ..speed.contenders.flash_on_cpu import installed
from ..speed.contenders.yunchang import mended
from .ways import Attention, Way, attention_only, heads_first
from .work import CHUNKS, LATENT, Scenario, blocks, mlp

ZIGZAG_OF_HOSTS = "zigzag of hosts"
"""The layout of yunchang's hybrid: the ring's ranks hold two chunks each, which their Ulysses ranks divide."""

# --------------------------------------------------------------------------- DeepSpeed


def _distributed_attention(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    """Ulysses around any attention: here the one that a user would write for this work."""
    attention_only(work)
    start()
    from deepspeed.sequence.layer import DistributedAttention

    mask = work.visible() if work.kind == "selected" else None

    def local(*qkv: Tensor) -> Tensor:  # [B, S, H, D]
        q, k, v = (x.transpose(1, 2) for x in qkv)
        if mask is not None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=work.grouped).transpose(1, 2)
        return blocks(work, q, k, v).transpose(1, 2)

    layer = DistributedAttention(local, mesh.get_group(), scatter_idx=2, gather_idx=1)

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = layer(*(x.transpose(1, 2) for x in qkv), 0).transpose(1, 2)
        return out

    return heads_first(work, attend)


def _for_transformers(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    """Ulysses around the attention of transformers ("sdpa"), with a mask of all pairs where one is needed."""
    if work.kind == "loss":
        return _tiled(work, rows)
    start()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    dim = LATENT["plain"] + LATENT["rotary"] if work.kind == "latents" else work.dim
    own = work.length // mesh.size()
    layer = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS["sdpa"],
        batch_size=work.batch,
        attn_head_count=work.heads,
        attn_head_size=dim,
        kv_head_count=work.kv_heads,
        num_hidden_layers=1,
        process_group=mesh.get_group(),
        local_seq_length=own,
        global_seq_length=work.length,
    )
    groups = work.heads // work.kv_heads
    module = SimpleNamespace(config=None, training=True, is_causal=True, num_key_value_groups=groups)
    positions = rows.expand(work.batch, -1).contiguous()
    masked = work.window is not None or work.packed or work.kind == "selected"
    mask = work.visible() if masked else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = layer(module, q, k, v, mask, position_ids=positions, is_causal=not masked)
        found: Tensor = out.unflatten(2, (work.heads, dim)).transpose(1, 2)
        return found

    return heads_first(work, attend)


def _tiled(work: Scenario, rows: Tensor) -> Attention:
    """The MLP and the loss of DeepSpeed's long-sequence training, in parts."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    labels = work.labels()[:, rows]

    def step(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, head: Tensor) -> Tensor:
        def of_mlp(_: object, part: Tensor) -> Tensor:
            return mlp(part, gate, up, down)

        def of_loss(_: object, part: Tensor, wanted: Tensor) -> Tensor:
            logits = F.linear(part, head).flatten(0, -2)
            return F.cross_entropy(logits, wanted.flatten(), reduction="sum") / work.length

        hidden = TiledMLP.apply(of_mlp, None, x[:, 0], CHUNKS, [gate, up, down])
        loss: Tensor = TiledFusedLogitsLoss.apply(of_loss, None, hidden, labels, None, CHUNKS, [head], "sum")
        return loss

    return step


# --------------------------------------------------------------------------- yunchang


def _flash_only(work: Scenario, what: str) -> None:
    """Raise for what FlashAttention on a GPU is needed for, or what the library does not have at all."""
    attention_only(work)
    if work.kind == "selected":
        raise Skip("takes no mask and no selected keys")
    if work.packed:
        raise Skip(f"{what} takes no documents")


def _yunchang_ulysses(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    with installed():
        from yunchang import UlyssesAttention

    _flash_only(work, "UlyssesAttention")
    if work.window is not None:
        raise Skip("leaves the window to FlashAttention, which has no kernel for the CPU")
    layer = UlyssesAttention(mesh.get_group())

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = layer(*(x.transpose(1, 2) for x in qkv), causal=True).transpose(1, 2)
        return out

    return heads_first(work, attend)


def _ring_of(work: Scenario, mesh: DeviceMesh) -> Any:
    """Its balanced ring, and why it cannot do the work."""
    function = mended("zigzag_ring")
    _flash_only(work, "the ring (its other one, for documents, needs FlashAttention's kernel on a GPU)")
    if work.window is not None:
        raise Skip(
            "hands the window to every hop, where it counts from the hop's first key and not from the sequence's"
        )
    return function


def _yunchang_ring(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    function, group = _ring_of(work, mesh), mesh.get_group()

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = function(*(x.transpose(1, 2) for x in qkv), causal=True, group=group).transpose(1, 2)
        return out

    return heads_first(work, attend)


_HYBRID: list[object] = []


def _yunchang_hybrid(work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    """Ulysses of two ranks around its balanced ring of the others."""
    function = _ring_of(work, mesh)
    with installed():
        from yunchang import LongContextAttention, set_seq_parallel_pg

    if not _HYBRID:
        set_seq_parallel_pg(2, mesh.size() // 2, dist.get_rank(), mesh.size())
        _HYBRID.append(True)
    layer = LongContextAttention(ring_impl_type="zigzag")
    layer.ring_attn_fn = function

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = layer(*(x.transpose(1, 2) for x in qkv), causal=True).transpose(1, 2)
        return out

    return heads_first(work, attend)


# --------------------------------------------------------------------------- ringmaster


def _ringmaster(backend: str, work: Scenario, mesh: DeviceMesh, rows: Tensor) -> Attention:
    """Its attention for transformers. On the CPU its rings have explicit logits, and with documents or a window its
    all-gather under a mask of all pairs."""
    import ringmaster
    from ringmaster import RotateMethod
    from ringmaster.runtime import CPRuntime, set_runtime
    from ringmaster.strategies.ring import make_ring_attention
    from ringmaster.strategies.ulysses import make_ulysses_attention
    from ringmaster.strategies.usp import make_usp_attention

    attention_only(work)
    if work.kind == "selected":
        raise Skip("refuses a mask: its attention is causal, in documents or a window")
    if backend != "ULYSSES" and work.length > 4096 and not (work.packed or work.window):
        raise Skip("makes explicit logits on the CPU, which take too much memory here")
    group = mesh.get_group()
    config = ringmaster.RingmasterConfig(size=mesh.size(), backend=getattr(ringmaster.Backend, backend))
    runtime = {
        "ULYSSES": lambda: CPRuntime(config, group, None, group),
        "RING": lambda: CPRuntime(config, None, group, group),
        "USP": lambda: CPRuntime(config, *_two_levels(mesh), group),
    }[backend]()
    call = {
        "ULYSSES": lambda: make_ulysses_attention("sdpa"),
        "RING": lambda: make_ring_attention("math", "math", RotateMethod.ALLGATHER),
        "USP": lambda: make_usp_attention("math", "math", RotateMethod.ALLGATHER),
    }[backend]()
    if work.packed and work.documents is not None:
        ends = torch.tensor(work.documents[0], dtype=torch.int32)
        runtime.varlen = ends, int(ends.diff().max())
    window = {} if work.window is None else {"sliding_window": work.window}
    groups = 1 if backend != "ULYSSES" else work.heads // work.kv_heads
    module = SimpleNamespace(config=None, training=True, is_causal=True, num_key_value_groups=groups)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        set_runtime(runtime)  # one for the whole process
        out, _ = call(module, q, k, v, None, is_causal=True, **window)
        found: Tensor = out.transpose(1, 2)
        return found

    return heads_first(work, attend)


_LEVELS: list[Any] = []


def _two_levels(mesh: DeviceMesh) -> tuple[Any, Any]:
    """Return this rank's groups of two adjacent ranks, and of one rank of each pair."""
    if not _LEVELS:
        ranks = torch.arange(mesh.size()).view(-1, 2)
        for sets in (ranks, ranks.T):
            _LEVELS.append(dist.new_subgroups_by_enumeration(sets.tolist())[0])
    return _LEVELS[0], _LEVELS[1]


# --------------------------------------------------------------------------- all of them


def peers(work: Scenario) -> list[Way]:
    """Return the ways of other libraries."""
    tiles = "TiledMLP, TiledFusedLogitsLoss"
    found = [
        Way("DeepSpeed", "DistributedAttention", "contiguous", _distributed_attention),
        Way("DeepSpeed", tiles if work.kind == "loss" else "UlyssesSPAttentionHF", "contiguous", _for_transformers),
        Way("yunchang", "Ulysses", "contiguous", _yunchang_ulysses),
        Way("yunchang", "ring (mended)", "head_tail", _yunchang_ring),
        Way("ringmaster", "Ulysses", "contiguous", partial(_ringmaster, "ULYSSES")),
        Way("ringmaster", "ring", "contiguous", partial(_ringmaster, "RING")),
    ]
    if work.kind == "loss":
        return [found[1], found[2], found[4]]
    if work.world > 2:
        found.insert(4, Way("yunchang", "hybrid of 2 (mended)", ZIGZAG_OF_HOSTS, _yunchang_hybrid))
        found.append(Way("ringmaster", "hybrid of 2", "contiguous", partial(_ringmaster, "USP")))
    return found

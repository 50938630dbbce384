"""Train a nanoGPT-like model, whose queries, keys and values are one projection, on sequences that all ranks share.

    torchrun --nproc-per-node 4 examples/nanogpt.py [--steps 5] [--length 500] [--write 0]

It prints the loss of every step: the same losses on any number of ranks. With --write N it then reads a text of which
each rank keeps its share, and writes N bytes more. It runs on CPUs, GPUs and NPUs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules
from hyper_cp.ops import SplitCache, decode_attention

TEXT = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
"""Python's own help texts, one token per byte."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, cache: SplitCache | None = None, length: int = 0) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b s (n h d) -> n b h s d", n=3, h=self.heads)
        if cache is not None and cache.length:  # new tokens, which all ranks have
            cache.append(k, v)
            y = decode_attention(q, cache)
        else:
            if cache is not None:  # this rank's share of a prompt
                cache.fill(k, v, length=length)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(y, "b h s d -> b s (h d)"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, *cached: Any) -> Tensor:
        x = x + self.attention(self.norms[0](x), *cached)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """The model. For training it contains nothing about context parallelism, but its caller passes the positions."""

    def __init__(self, block_size: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, caches: Sequence[SplitCache | None] | None = None, length: int = 0
    ) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache, length)
        return self.head(self.norm(x))


def start() -> str:
    """Join the other ranks, each on a device of its own, and return the type of the devices. (NCCL, HCCL or gloo
    follows from it.)"""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group()
    return "cpu" if accelerator is None else accelerator.type


@torch.no_grad()
def write(model: GPT, handler: ContextParallelHandler, prompt: Tensor, count: int) -> list[int]:
    """The ``count`` likeliest bytes after a prompt ``[1, S]``, the same on every rank."""
    caches = [SplitCache(handler.mesh, layout=handler.layout) for _ in model.blocks]
    batch = handler.get_batch_on_this_cp_rank({"tokens": prompt})
    with handler.documents(batch):
        logits = model(batch["tokens"], batch["position_ids"], caches, prompt.shape[1])
    following = caches[0].last_token(logits).argmax(-1)  # one rank has the last byte
    written = [int(following)]
    while len(written) < count:
        position = torch.full_like(following, caches[0].length)
        following = model(following, position, caches)[:, -1:].argmax(-1)
        written.append(int(following))
    return written


def train(args: argparse.Namespace) -> Sequence[float]:
    """Train, and return the loss of every step, or what the model writes then."""
    device = start()
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    # None: the module makes q, k, v itself. Its own attention call is what runs over all ranks.
    style = ContextParallel(qkv_indices=None, ulysses_degree=1, kv_exchange="ring", layout="head_tail")
    handler = ContextParallelHandler(mesh, style)
    torch.manual_seed(0)
    model = GPT(args.block_size).to(device)
    parallelize_module(model, mesh, {"blocks.*.attention": style})
    styled_modules(model, at_least=len(model.blocks))
    parallel = DistributedDataParallel(model)  # averages gradients, as mean_loss expects
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)  # unlike Adam, SGD shows a wrong scale of gradients
    losses: list[float] = []
    for step in range(args.steps):
        text = TEXT[step * args.length : (step + 1) * args.length].long().view(1, -1).to(device)  # whole on every rank
        batch = handler.get_batch_on_this_cp_rank({"tokens": text, "labels": text}, shift_labels=True)
        with handler.documents(batch):
            logits = parallel(batch["tokens"], batch["position_ids"])
            loss = handler.mean_loss(logits, batch["shift_labels"])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if args.write:
        return write(model, handler, TEXT[: args.length].long().view(1, -1).to(device), args.write)
    return losses


def main(argv: list[str] | None = None) -> Sequence[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=500, help="tokens of a sequence; any number, the handler pads")
    parser.add_argument("--block-size", type=int, default=1024, help="the most positions that the model knows")
    parser.add_argument("--write", type=int, default=0, help="bytes to write after a text")
    losses = train(args := parser.parse_args(argv))
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks: "
            + (repr(bytes(map(int, losses))) if args.write else " ".join(f"{x:.4f}" for x in losses))
        )
    return losses


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

"""Train a nanoGPT-like model, whose queries, keys and values are one projection, on sequences that all ranks share.

    torchrun --nproc-per-node 4 examples/nanogpt.py [--steps 5] [--length 500]

It prints the loss of every step: the same losses on any number of ranks. It runs on CPUs, GPUs and NPUs.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules

TEXT = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
"""Python's own help texts, one token per byte."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b s (n h d) -> n b h s d", n=3, h=self.heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(y, "b h s d -> b s (h d)"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """The model. It contains nothing about context parallelism, but its caller passes the positions of the tokens."""

    def __init__(self, block_size: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
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


def train(args: argparse.Namespace) -> list[float]:
    """Train, and return the loss of every step."""
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
    losses = []
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
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=500, help="tokens of a sequence; any number, the handler pads")
    parser.add_argument("--block-size", type=int, default=1024, help="the most positions that the model knows")
    losses = train(parser.parse_args(argv))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: " + " ".join(f"{x:.4f}" for x in losses))
    return losses


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

"""Train a vision transformer with a CLS head on images whose patches all ranks share.

    torchrun --nproc-per-node 4 examples/vit_cls.py [--steps 8] [--size 72]

The head reads one token, which one rank holds: `combine` gathers it. It prints the loss of every step: the same losses
on any number of ranks that divides the heads. It runs on CPUs, GPUs and NPUs.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules

PATCH = 8


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class ViT(nn.Module):
    """A vision transformer, in the three parts between which its sequence is split and gathered."""

    def __init__(self, size: int, classes: int, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, (size // PATCH) ** 2 + 1, width) * 0.1)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, handler: ContextParallelHandler) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(tokens), 1, -1), tokens], 1) + self.positions
        length = tokens.shape[1]  # 82 tokens for 72 pixels, which few numbers of ranks divide
        local = handler.dispatch(tokens, 1, pad_value=0.0)
        with handler.documents([0, length]):  # no token sees the padding
            hidden = self.norm(self.blocks(local))
        # "mean": what comes before it has a share of its gradient on every rank, and the head all of its own.
        return self.head(handler.combine(hidden, 1, length=length, gradients="mean")[:, 0])


def pictures(step: int, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Noise in which one of three colours is brighter, and the number of that colour."""
    generator = torch.Generator().manual_seed(step)
    colours = torch.randint(3, (rows,), generator=generator)
    brighter = F.one_hot(colours, 3).float().view(rows, 3, 1, 1)
    return torch.randn(rows, 3, size, size, generator=generator) + brighter, colours


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
    style = ContextParallel(qkv_indices=None)  # Ulysses; nn.MultiheadAttention makes q, k, v itself
    handler = ContextParallelHandler(mesh, style)
    torch.manual_seed(0)
    model = ViT(args.size, classes=3).to(device)
    parallelize_module(model, mesh, {"blocks.*.attention": style})
    styled_modules(model, at_least=len(model.blocks))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # unlike Adam, SGD shows a wrong scale of gradients
    losses = []
    for step in range(args.steps):
        images, colours = (x.to(device) for x in pictures(step, args.rows, args.size))  # whole on every rank
        loss = F.cross_entropy(parallel(images, handler), colours)  # the same on every rank
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="images in a batch")
    parser.add_argument("--size", type=int, default=72, help=f"pixels of a side, a multiple of {PATCH}")
    losses = train(parser.parse_args(argv))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: " + " ".join(f"{x:.4f}" for x in losses))
    return losses


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

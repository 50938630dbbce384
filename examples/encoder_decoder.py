"""Train a T5-like encoder-decoder: two sequences, each shared by all ranks, and a learned bias of relative positions.

    torchrun --nproc-per-node 4 examples/encoder_decoder.py [--steps 4] [--source 250] [--target 150]

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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules

TEXT = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
"""Python's own help texts, one token per byte."""
FARTHEST = 16
"""Distances between tokens from which on all have one bias."""


class SelfAttention(nn.Module):
    """Attention with a bias for the distance of each pair: a function of positions, which are global."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.bias = heads, nn.Parameter(torch.zeros(heads, 2 * FARTHEST + 1))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: BlockMask | None) -> Tensor:
        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + self.bias[h, (j - i).clamp(-FARTHEST, FARTHEST) + FARTHEST]

        q, k, v = rearrange(self.qkv(x), "b s (n h d) -> n b h s d", n=3, h=self.heads)
        y = flex_attention(q, k, v, score_mod=biased, block_mask=mask)
        return self.out(rearrange(y, "b h s d -> b s (h d)"))


class CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, source: Tensor, visible: Tensor) -> Tensor:
        q = rearrange(self.q(x), "b s (h d) -> b h s d", h=self.heads)
        k, v = rearrange(self.kv(source), "b s (n h d) -> n b h s d", n=2, h=self.heads)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out(rearrange(y, "b h s d -> b s (h d)"))


class Block(nn.Module):
    """A block of the encoder, or with ``decodes=True`` one of the decoder."""

    def __init__(self, width: int, heads: int, decodes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if decodes else 2))
        self.attention = SelfAttention(width, heads)
        self.cross = CrossAttention(width, heads) if decodes else None
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(
        self, x: Tensor, mask: BlockMask | None = None, source: Tensor | None = None, visible: Tensor | None = None
    ) -> Tensor:
        x = x + self.attention(self.norms[0](x), mask)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), source, visible)
        return x + self.mlp(self.norms[-1](x))


class EncoderDecoder(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.encoder = nn.ModuleList(Block(width, heads, decodes=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(width, heads, decodes=True) for _ in range(layers))

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.encoder:
            x = block(x)
        return x

    def decode(self, tokens: Tensor, causal: BlockMask, source: Tensor, visible: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.decoder:
            x = block(x, causal, source, visible)
        return self.head(x)


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
    style = ContextParallel(qkv_indices=None, ulysses_degree=1)  # gathers keys and values
    handler = ContextParallelHandler(mesh, style)
    torch.manual_seed(0)
    model = EncoderDecoder().to(device)
    cross = ContextParallel(qkv_indices=None, ulysses_degree=1, cross_attention=True)  # its keys are another sequence
    plan = {"encoder.*.attention": style, "decoder.*.attention": style, "decoder.*.cross": cross}
    parallelize_module(model, mesh, plan)
    styled_modules(model, at_least=len(model.encoder) + 2 * len(model.decoder))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)  # unlike Adam, SGD shows a wrong scale of gradients
    # Masks are those of one device: over the positions of the whole (padded) sequences.
    here, there = handler.padded_length(args.source), handler.padded_length(args.target)
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, there, there, device=device)
    visible = (torch.arange(here, device=device) < args.source)[None, None, None]  # the padding of the source is not
    losses = []
    for step in range(args.steps):
        text = TEXT[step * 1000 : step * 1000 + args.source + args.target].long().view(1, -1).to(device)
        first, then = text.split([args.source, args.target], 1)  # whole on every rank
        source = handler.get_batch_on_this_cp_rank({"tokens": first})
        target = handler.get_batch_on_this_cp_rank({"tokens": then, "labels": then}, shift_labels=True)
        with handler.documents([0, args.source]):  # a block describes one sequence: tokens, and maybe padding
            encoded = model.encode(source["tokens"])
        with handler.documents([0, args.target]):
            logits = model.decode(target["tokens"], causal, encoded, visible)
        loss = handler.mean_loss(logits, target["shift_labels"], gradients="sum")
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--source", type=int, default=250, help="tokens of the source; any number")
    parser.add_argument("--target", type=int, default=150, help="tokens of the target; any number")
    losses = train(parser.parse_args(argv))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: " + " ".join(f"{x:.4f}" for x in losses))
    return losses


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

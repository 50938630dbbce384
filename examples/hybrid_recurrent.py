"""Train a Hugging Face model with recurrent layers (a tiny Qwen3-Next), each sequence shared by all ranks.

    torchrun --nproc-per-node 4 examples/hybrid_recurrent.py [--steps 4] [--length 250]

Three of its four layers are gated delta rules, whose state passes from rank to rank; the fourth is attention. Documents
are packed: neither a state nor a convolution crosses their boundaries. It prints the loss of every step: the same
losses on any number of ranks. It runs on CPUs, GPUs and NPUs.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.hf import prepare_batch, prepare_model

TEXT = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
"""Python's own help texts, one token per byte."""
SIZES = {
    **{"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "max_position_embeddings": 4096},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}


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
    style = ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail")
    handler = ContextParallelHandler(mesh, style)
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES)).to(device)
    prepare_model(model, mesh, style=style).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)  # unlike Adam, SGD shows a wrong scale of gradients
    losses = []
    for step in range(args.steps):
        ids = TEXT[step * args.length : (step + 1) * args.length].long().view(1, -1).to(device)  # whole on every rank
        documents = [0, args.length // 5, args.length // 2, args.length]
        batch = prepare_batch(handler, {"input_ids": ids, "labels": ids, "cu_seqlens": documents})
        loss = model(**batch).loss  # this rank's share of the mean
        loss.backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # an expert may have had tokens on others only
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=250, help="tokens of a sequence; any number, prepare_batch pads")
    losses = train(parser.parse_args(argv))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: " + " ".join(f"{x:.4f}" for x in losses))
    return losses


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

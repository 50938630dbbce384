"""Train on a long sequence in little memory: a loss without logits, MLPs in chunks, and activation checkpointing.

    torchrun --nproc-per-node 4 examples/long_sequence.py [--length 4096]

It trains the same model on the same sequences with more and more of them. For each it prints the losses, which are the
same, and the most memory that a step took on a rank beside the weights. It runs on CPUs, GPUs and NPUs.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules, tiled
from hyper_cp.cli.demo_model import Llama, LlamaConfig
from hyper_cp.memory import MemoryCounter
from hyper_cp.ops import SAVE_LIST

TEXT = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
"""Python's own help texts, one token per byte."""
WAYS = ("plain", "no logits", "no logits, tiled MLP", "no logits, tiled MLP, checkpoints")


def start() -> str:
    """Join the other ranks, each on a device of its own, and return the type of the devices. (NCCL, HCCL or gloo
    follows from it.)"""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group()
    return "cpu" if accelerator is None else accelerator.type


class Step:
    """A model and its training step, in one of the ways."""

    def __init__(self, way: str, device: str, length: int) -> None:
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
        style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, layout="head_tail")
        self.handler = ContextParallelHandler(mesh, style)
        torch.manual_seed(0)
        self.model = Llama(LlamaConfig(dim=64, vocab=2048)).to(device)
        self.parameters = list(self.model.parameters())
        parallelize_module(self.model, mesh, {"layers.*.attention.inner": style})
        styled_modules(self.model, at_least=len(self.model.layers))
        self.head: nn.Module | None = None
        if "no logits" in way:  # the model returns hidden states, and mean_loss makes logits for a chunk of tokens
            self.head, self.model.output = self.model.output, nn.Identity()
        for i, layer in enumerate(self.model.layers):
            if "tiled" in way:
                tiled(layer.ffn, 8)
            if "checkpoints" in way:  # recomputes all of a layer but attention
                contexts = partial(create_selective_checkpoint_contexts, SAVE_LIST)
                self.model.layers[i] = checkpoint_wrapper(layer, context_fn=contexts)

    def __call__(self, text: Tensor) -> Tensor:
        batch = self.handler.get_batch_on_this_cp_rank({"tokens": text, "labels": text}, shift_labels=True)
        with self.handler.documents(batch):
            out = self.model(batch["tokens"], batch["position_ids"])
            chunk = None if self.head is None else 128
            loss = self.handler.mean_loss(out, batch["shift_labels"], head=self.head, chunk=chunk, gradients="sum")
            del out
            loss.backward()
        with torch.no_grad():
            for p in self.parameters:
                dist.all_reduce(p.grad)
                p -= 0.2 * p.grad
                p.grad = None
        return loss.detach()


def main(argv: list[str] | None = None) -> dict[str, tuple[list[float], int]]:
    """Return the losses, and the bytes at the peak, of every way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence; any number, the handler pads")
    args = parser.parse_args(argv)
    device, found = start(), {}
    for way in WAYS:
        step, losses = Step(way, device, args.length), []
        for number in range(args.steps):
            text = TEXT[number * args.length : (number + 1) * args.length].long().view(1, -1).to(device)
            with MemoryCounter() as memory:
                losses.append(step(text).item())
        found[way] = losses, memory.peak[device]
        if dist.get_rank() == 0:
            numbers = " ".join(f"{x:.4f}" for x in losses)
            print(f"{way}: {numbers} in {memory.peak[device] / 2**20:.1f} MiB on each of {dist.get_world_size()} ranks")
    return found


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

"""Train a Hugging Face Llama on text, the sequence split over all ranks, in three modes of context parallelism.

    torchrun --nproc-per-node 4 examples/finetune_llama.py [--mode ring] [--pretrained DIRECTORY]

All modes print the same losses; they differ in what travels between ranks. By default the model is small and has random
weights. It runs on CPU.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hyper_cp import ContextParallel, ContextParallelHandler
from hyper_cp.integrations.transformers import prepare_batch, prepare_model

MODES = {
    "ulysses": {"ulysses_degree": None},  # trades sequence for heads, which must split over the ranks
    "colossal": {"ulysses_degree": 1, "layout": "head_tail"},  # gathers keys and values of all ranks at once
    "ring": {"ulysses_degree": 1, "layout": "head_tail", "kv_exchange": "ring"},  # passes them on, rank to rank
}

TEXT = "\n".join(topics[name] for name in sorted(topics))  # Python's own help texts
CHARACTERS = {c: i + 1 for i, c in enumerate(sorted(set(TEXT)))}  # 0 is padding


def batches(steps: int, rows: int, length: int) -> list[dict[str, Tensor]]:
    """Return batches of passages of the text, one token per character. Every second row is shorter and padded."""
    found, start = [], 0
    for _ in range(steps):
        ids, mask = torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.int64)
        for row in range(rows):
            n = length - (row % 2) * length // 3
            ids[row, :n] = torch.tensor([CHARACTERS[c] for c in TEXT[start : start + n]])
            mask[row, :n] = 1
            start += n
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Load the pretrained model, or make a small one with the same weights on every rank."""
    torch.manual_seed(0)
    if args.pretrained:
        return AutoModelForCausalLM.from_pretrained(args.pretrained)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(CHARACTERS) + 1))


def train(mode: str, args: argparse.Namespace) -> list[float]:
    """Train in one mode, and return the loss of every step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style = ContextParallel(**MODES[mode])
    handler = ContextParallelHandler(mesh, style)
    model = prepare_model(make_model(args), mesh, style=style).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)  # unlike Adam, SGD shows a wrong scale of gradients
    losses = []
    for batch in batches(args.steps, args.rows, args.length):
        loss = model(**prepare_batch(handler, batch)).loss  # this rank's share of the mean
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        for p in model.parameters():  # replicated on all ranks. (DDP averages: multiply the loss by the ranks there.)
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=MODES, help="one mode (default: all, one after another)")
    parser.add_argument(
        "--pretrained", help="directory or name for from_pretrained; its vocabulary must fit these tokens"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=250, help="tokens per row; any number, prepare_batch pads")
    parser.add_argument("--lr", type=float, default=0.2)
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    results = {}
    for mode in [args.mode] if args.mode else MODES:
        results[mode] = train(mode, args)
        if dist.get_rank() == 0:
            print(f"{mode:8s} on {dist.get_world_size()} ranks: " + " ".join(f"{x:.4f}" for x in results[mode]))
    return results


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

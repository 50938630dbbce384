"""Pretrain a plain PyTorch Llama on packed documents: FSDP2, context parallelism and tensor parallelism on one mesh.

    torchrun --nproc-per-node 4 examples/packed_llama_fsdp.py [--cp 2] [--tp 1]

The remaining ranks are data parallel. It prints the loss of every step: every division of the ranks prints the same
losses. It runs on CPUs, GPUs and NPUs.
"""

from __future__ import annotations

import argparse
import os
from itertools import accumulate
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules
from hyper_cp.cli.demo_model import Llama, LlamaConfig

DOCUMENTS = [topics[name].encode() for name in sorted(topics)]
"""Python's own help texts, 40 to 40,000 bytes each; one token per byte."""


def parallelize(model: Llama, mesh: DeviceMesh, style: ContextParallel) -> None:
    """Apply tensor parallelism to the layers, context parallelism to their attention, and FSDP around both."""
    columns = dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "ffn.w1", "ffn.w3"), ColwiseParallel())
    rows = dict.fromkeys(("attention.wo", "ffn.w2"), RowwiseParallel())
    for layer in model.layers:
        if mesh["tp"].size() > 1:
            parallelize_module(layer, mesh["tp"], {**columns, **rows})
        parallelize_module(layer, mesh["cp"], {"attention.inner": style})
    styled_modules(model, at_least=len(model.layers))
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh["dp", "cp"])  # shards parameters over cp, replicates them over dp


def packed_row(number: int, length: int) -> tuple[Tensor, list[int]]:
    """Return row ``number`` of the data, ``[1, length]``, and the boundaries of the documents in it."""
    row, lengths = b"", []
    while len(row) < length:
        document = DOCUMENTS[(7 * number + len(lengths)) % len(DOCUMENTS)][: length // 3]
        lengths.append(min(len(document), length - len(row)))
        row += document[: lengths[-1]]
    return torch.frombuffer(bytearray(row), dtype=torch.uint8).long()[None], [0, *accumulate(lengths)]


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
    device, world = start(), dist.get_world_size()
    dp = world // (args.cp * args.tp)
    if dp * args.cp * args.tp != world or args.rows % dp:
        raise SystemExit(
            f"--cp {args.cp} x --tp {args.tp} must divide the {world} ranks, and the data-parallel ranks that are left "
            f"must divide --rows {args.rows}. Choose other numbers"
        )
    mesh = init_device_mesh(device, (dp, args.cp, args.tp), mesh_dim_names=("dp", "cp", "tp"))
    # Chunks of the sequence are dealt by the cost of their documents, and only keys that queries see travel.
    style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, kv_exchange="needed", layout="balanced")
    handler = ContextParallelHandler(mesh["cp"], style)
    torch.manual_seed(0)
    model = Llama(LlamaConfig()).to(device)
    parallelize(model, mesh, style)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)  # unlike Adam, SGD shows a wrong scale of gradients
    mine, losses = args.rows // dp, []
    for step in range(args.steps):
        first = step * args.rows + mesh["dp"].get_local_rank() * mine
        rows, documents = zip(*(packed_row(first + row, args.length) for row in range(mine)), strict=True)
        tokens = torch.cat(rows).to(device)
        whole = {"tokens": tokens, "labels": tokens, "cu_seqlens": list(documents)}
        batch = handler.get_batch_on_this_cp_rank(whole, shift_labels=True)
        with handler.documents(batch):
            logits = model(batch["tokens"], batch["position_ids"])
            loss = handler.mean_loss(logits, batch["shift_labels"], mesh=mesh["dp", "cp"])  # FSDP averages over these
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share heads and hidden units")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2, help="sequences in the global batch")
    parser.add_argument("--length", type=int, default=500, help="tokens per row; any number, the handler pads")
    args = parser.parse_args(argv)
    losses = train(args)
    if dist.get_rank() == 0:
        print(f"cp {args.cp}, tp {args.tp}, {dist.get_world_size()} ranks: " + " ".join(f"{x:.4f}" for x in losses))
    return losses


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

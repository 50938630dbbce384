"""Pretrain a plain PyTorch Llama with FSDP2, context parallelism and tensor parallelism on one mesh.

    torchrun --nproc-per-node 4 examples/pretrain_fsdp_cp.py --cp 2 [--tp 2]

The remaining ranks are data parallel. Every division of the ranks prints the same losses. It runs on CPU.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules
from hyper_cp.cli.demo_model import Llama, LlamaConfig


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


def global_batch(step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels ``[rows, length]``: Python's own help texts, one token per byte. Labels are shifted
    here, on whole sequences."""
    data = "\n".join(topics[name] for name in sorted(topics)).encode()
    start = step * rows * length
    window = torch.frombuffer(bytearray(data[start : start + rows * length + 1]), dtype=torch.uint8).long()
    return window[:-1].view(rows, length), window[1:].view(rows, length)


def train(args: argparse.Namespace) -> list[float]:
    """Train, and return the loss of every step."""
    world = dist.get_world_size()
    dp = world // (args.cp * args.tp)
    if dp * args.cp * args.tp != world or args.rows % dp:
        raise SystemExit(
            f"--cp {args.cp} x --tp {args.tp} must divide the {world} ranks, and the data-parallel ranks that are left "
            f"must divide --rows {args.rows}. Choose other numbers"
        )
    mesh = init_device_mesh("cpu", (dp, args.cp, args.tp), mesh_dim_names=("dp", "cp", "tp"))
    style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, kv_exchange="ring", layout="head_tail")
    handler = ContextParallelHandler(mesh["cp"], style)
    torch.manual_seed(0)
    model = Llama(LlamaConfig())
    parallelize(model, mesh, style)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)  # unlike Adam, SGD shows a wrong scale of gradients
    positions, losses = handler.position_ids(args.length), []
    for step in range(args.steps):
        tokens, labels = global_batch(step, args.rows, args.length)
        count = labels.numel()
        mine = [x.chunk(dp)[mesh["dp"].get_local_rank()] for x in (tokens, labels)]
        tokens, labels = (handler.dispatch(x, seq_dim=1) for x in mine)
        logits = model(tokens, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        (loss * dp * args.cp).backward()  # FSDP averages over dp and cp, but shares of a mean must be summed
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / args.tp  # the ranks of a tp mesh hold the same share
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share heads and hidden units")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2, help="sequences in the global batch")
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    losses = train(args)
    if dist.get_rank() == 0:
        print(f"cp {args.cp}, tp {args.tp}, {dist.get_world_size()} ranks: " + " ".join(f"{x:.4f}" for x in losses))
    return losses


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

"""Train at one context-parallel degree and evaluate at another, on the same ranks.

    torchrun --nproc-per-node 4 examples/eval_at_higher_cp.py [--train 1 --evaluate 4]

By default the script runs two cases. First it trains without context parallelism (4 samples at a time) and evaluates
with all ranks on one sample, as long sequences need. Then it trains at degree 2 and evaluates with context parallelism
off. In both cases the evaluation loss equals that of the training degree to 1e-5. It runs on CPUs, GPUs and NPUs.
"""

from __future__ import annotations

import argparse
import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel_mesh, split_cp_mesh, styled_modules
from hyper_cp.cli.demo_model import Llama, LlamaConfig

DATA = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def sample(number: int, length: int) -> Tensor:
    """Return passage ``number`` of Python's own help texts, ``[1, length]``, one token per byte."""
    return DATA[number * length : (number + 1) * length].long().unsqueeze(0)


def start() -> str:
    """Join the other ranks, each on a device of its own, and return the type of the devices. (NCCL, HCCL or gloo
    follows from it.)"""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group()
    return "cpu" if accelerator is None else accelerator.type


def loss_of(model: Llama, handler: ContextParallelHandler, text: Tensor, everyone: DeviceMesh) -> Tensor:
    """Return the mean loss over the samples of all groups. Its gradients must be averaged over all ranks."""
    text = text.to(everyone.device_type)
    batch = handler.get_batch_on_this_cp_rank({"tokens": text, "labels": text}, shift_labels=True)
    with handler.documents(batch):
        logits = model(batch["tokens"], batch["position_ids"])
    return handler.mean_loss(logits, batch["shift_labels"], mesh=everyone)


def evaluate(
    model: Llama, handler: ContextParallelHandler, everyone: DeviceMesh, samples: int, length: int
) -> tuple[float, int]:
    """Return the mean loss of ``samples`` samples (other ones than in training), and the number of steps it took: at a
    higher degree fewer samples run at a time."""
    at_once = dist.get_world_size() // handler.cp.size
    group = dist.get_rank() // handler.cp.size
    steps = range(0, samples, at_once)
    with torch.no_grad():
        losses = [loss_of(model, handler, sample(200 + first + group, length), everyone).item() for first in steps]
    return sum(losses) / len(losses), len(steps)


def run(train_degree: int, other_degree: int, args: argparse.Namespace) -> float:
    """Train, evaluate at both degrees, and return the difference of the two losses."""
    torch.manual_seed(0)
    device = start()
    everyone = init_device_mesh(device, (dist.get_world_size(),))
    family = split_cp_mesh(everyone)
    model = Llama(LlamaConfig()).to(device)
    style = ContextParallel(seq_dim=2, head_dim=1, layout="head_tail")
    parallelize_module(model, family.cp(train_degree), {"layers.*.attention.inner": style})
    styled_modules(model, at_least=1)
    handler = ContextParallelHandler.of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    at_once, group = dist.get_world_size() // train_degree, dist.get_rank() // train_degree
    for step in range(args.steps):
        optimizer.zero_grad()
        loss_of(model, handler, sample(step * at_once + group, args.length), everyone).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
    here, steps = evaluate(model, handler, everyone, args.samples, args.length)
    with context_parallel_mesh(model, family.cp(other_degree)) as there:
        other, other_steps = evaluate(model, there, everyone, args.samples, args.length)
    if dist.get_rank() == 0:
        print(f"trained at cp={train_degree}: loss {here:.6f} in {steps} steps;", end=" ")
        print(f"at cp={other_degree} {other:.6f} in {other_steps} steps, difference {abs(here - other):.1e}")
    if abs(here - other) > 1e-5:
        raise SystemExit(f"evaluation at cp={other_degree} gave {other}, at cp={train_degree} {here}")
    return abs(here - other)


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, help="cp degree of training")
    parser.add_argument("--evaluate", type=int, help="cp degree of evaluation")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=250, help="tokens per sample; any number, the handler pads")
    args = parser.parse_args(argv)
    start()
    cases = [(args.train, args.evaluate)] if args.train and args.evaluate else [(1, dist.get_world_size()), (2, 1)]
    return [run(*case, args) for case in cases]


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()

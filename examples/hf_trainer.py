"""Train a Hugging Face Llama with transformers.Trainer, each sequence split over the ranks of a cp mesh.

    torchrun --nproc-per-node 4 examples/hf_trainer.py [--cp 2] [--pretrained DIRECTORY]

The remaining ranks are data parallel. It prints the losses of training, which any --cp that divides the ranks gives,
and that of an evaluation. It runs on CPUs, GPUs and NPUs. By default the model is small and has random weights.
"""

from __future__ import annotations

import argparse
import tempfile
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

from hyper_cp import ContextParallel
from hyper_cp.hf import ParallelismConfig, Trainer

TEXT = "\n".join(topics[name] for name in sorted(topics))
"""Python's own help texts, one token per character."""
CHARACTERS = {c: i + 1 for i, c in enumerate(sorted(set(TEXT)))}
"""Their numbers; 0 is padding."""


def samples(count: int, length: int, start: int = 0) -> list[dict[str, Tensor]]:
    """Passages of the text; every other one is shorter, and padded."""
    found = []
    for row in range(count):
        ids, mask = torch.zeros(2, length, dtype=torch.int64)
        n = length - (row % 2) * length // 3
        ids[:n] = torch.tensor([CHARACTERS[c] for c in TEXT[start : start + n]])
        mask[:n] = 1
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
        start += n
    return found


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Load the pretrained model, or make a small one with the same weights on every rank."""
    torch.manual_seed(0)
    if args.pretrained:
        return AutoModelForCausalLM.from_pretrained(args.pretrained)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(CHARACTERS) + 1))


def train(args: argparse.Namespace, directory: str, world: int) -> tuple[list[float], float]:
    """Train, and return the loss of every step, and that of other samples after it."""
    dp = world // args.cp
    if args.cp * dp != world or args.rows % dp:
        raise SystemExit(
            f"--cp {args.cp} must divide the {world} ranks, and the data-parallel ranks "
            f"that are left must divide --rows {args.rows}. Choose other numbers"
        )
    arguments = TrainingArguments(
        directory,
        parallelism_config=ParallelismConfig(cp_size=args.cp, dp_shard_size=dp),
        per_device_train_batch_size=args.rows // dp,
        per_device_eval_batch_size=args.rows // dp,
        max_steps=args.steps,
        train_sampling_strategy="sequential",
        optim="sgd",  # unlike Adam, SGD shows a wrong scale of gradients
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        prediction_loss_only=True,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = Trainer(
        make_model(args),
        arguments,
        train_dataset=samples(args.rows * args.steps, args.length),
        eval_dataset=samples(args.rows, args.length, start=100_000),
        style=ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail"),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"]


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--pretrained", help="directory or name for from_pretrained; its tokens must be these")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences in the global batch")
    parser.add_argument("--length", type=int, default=250, help="tokens per row; any number, prepare_batch pads")
    parser.add_argument("--lr", type=float, default=0.2)
    args = parser.parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group()
    with tempfile.TemporaryDirectory() as directory:
        losses, evaluation = train(args, directory, dist.get_world_size())
    if dist.get_rank() == 0:
        numbers = " ".join(f"{x:.4f}" for x in losses)
        print(f"cp {args.cp}, {dist.get_world_size()} ranks: {numbers}; evaluation {evaluation:.4f}")
    return losses, evaluation


if __name__ == "__main__":
    main()
    dist.barrier()  # no rank closes its connections while another is in the last step
    dist.destroy_process_group()

"""Compares two ways to hide Ulysses' all-to-all: behind the projections, or behind attention (head groups).

    python -m benchmarks.simulated.projections --ranks 2

A block computes q, k, v, attends, and projects the output. There are two ways to overlap the exchange:

* *Named projections* is what the library could do if a plan named the projections; the library does not have it. It
  posts the exchange of q while k is projected and that of k while v is projected, and in backward those of dv, dk, dq
  before the first projection's gradient. The exchanges of v, of the output and of its gradient overlap with nothing.
  With RoPE or QK-norm between projections and attention, q and k are ready only after all projections.
* *Head groups* is the library's ``head_groups``. It overlaps after all projections.

Ranks, messages and the order of posting and waiting are real. The durations of link and computation are simulated as in
overlap.py.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp.mesh import cp_mesh
from hyper_cp.ops import attention
from hyper_cp.ops.config import Operands, OpSettings
from hyper_cp.ops.engine import attention_op
from hyper_cp.ops.head_groups import Groups

from .overlap import Clock, Kernel, Link, join, on_ranks, simulate

GROUPS = (1, 2, 4, 8)


class Project(torch.autograd.Function):
    """A projection that takes time and returns its input. Backward (for input and weight) takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.pass_by(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.clock.pass_by(2 * ctx.seconds)
        return grad.clone(), None, None


class Exchange:
    """One exchange of heads, in flight between ``Start`` and ``Finish``. In backward autograd runs ``Finish`` first."""

    def __init__(self, plan: Any, back: bool) -> None:
        self.plan, self.back = plan, back
        self.pending: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        return Finish.apply(Start.apply(x, self), self)

    def post(self, x: Tensor, back: bool) -> None:
        if back:
            b, h, s, d = x.shape
            degree = self.plan.cp.ulysses.size
            into = x.new_empty(b, h * degree, s // degree, d)
            self.pending = self.plan.to_rank(x, into, 1, 0).then(lambda _: into)
        else:
            self.pending = self.plan.to_group(x, 1, 0)

    def wait(self) -> Tensor:
        pending, self.pending = self.pending, None  # it owns the buffers until the wait is over
        return pending.wait()

    def shape(self, x: Tensor) -> list[int]:
        (b, h, s, d), degree = x.shape, self.plan.cp.ulysses.size
        return [b, h * degree, s // degree, d] if self.back else [b, h // degree, s * degree, d]


class Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.post(x, exchange.back)
        return x.new_empty(1).expand(exchange.shape(x))  # a placeholder for the tensor in flight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.exchange.wait(), None


class Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.exchange.post(grad, not ctx.exchange.back)
        return grad.new_empty(1).expand(grad.shape), None


def head_groups(project: Any, xs: list[Tensor], cp: Any, groups: int) -> Tensor:
    q, k, v = map(project, xs)
    return project(
        attention(q, k, v, mesh=cp, is_causal=True, enable_gqa=True, ulysses_degree=None, head_groups=groups)
    )


def named_projections(project: Any, xs: list[Tensor], cp: Any, rotary: bool) -> Tensor:
    """Exchange q, k, v while others are projected. ``rotary``: q and k are ready only when all three are projected, as
    in Llama."""
    view = cp_mesh.view(cp, None)
    new = functools.partial(Exchange, Groups(OpSettings(view.key, band=(None, 0)), None, 1, 1.0, 0.0))
    exchanges = [new(False) for _ in xs]
    if rotary:
        xs = [project(x) for x in xs]
    started = [Start.apply(x if rotary else project(x), e) for x, e in zip(xs, exchanges, strict=True)]
    q, k, v = (Finish.apply(x, e) for x, e in zip(started, exchanges, strict=True))
    settings = OpSettings(view.key, band=(None, 0), kernel="simulated")
    out, *_ = attention_op(q, k, v, *settings.arguments(Operands(), 1.0))
    return project(new(True)(out))


def ways() -> dict[str, Any]:
    """Return the ways to compare and their names."""
    named = {
        "named projections": functools.partial(named_projections, rotary=False),
        "named, with RoPE": functools.partial(named_projections, rotary=True),
    }
    return {**{f"head groups {n}": functools.partial(head_groups, groups=n) for n in GROUPS}, **named}


def rank_main(rank: int, args: argparse.Namespace, store: str, queue: Any) -> None:
    """Measure all ways on one rank. Rank 0 puts ``(share of projections, link, name, seconds)`` into the queue."""
    join(rank, args.ranks, store)
    cp = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
    clock = Clock(args.virtual)
    link, kernel = Link(clock), Kernel(clock)
    simulate(link, kernel)
    heads = max(GROUPS) * args.ranks
    kv_heads = heads // args.queries_per_key

    def step(way: Any, seconds: float) -> float:
        def project(x: Tensor) -> Tensor:  # takes time in proportion to its output
            return Project.apply(x, clock, seconds * x.shape[1] / heads)

        xs = [torch.randn(1, h, args.tokens, 4, requires_grad=True) for h in (heads, kv_heads, kv_heads)]
        dist.barrier()
        link.free_at = link.busy = kernel.busy = 0.0
        start = clock.now()
        way(project, xs, cp).sum().backward()
        return clock.now() - start

    for share in args.projections:
        for ratio in args.link:
            for name, way in ways().items():
                link.bandwidth = kernel.pairs_per_second = 1e30
                step(way, 0.0)
                attend = args.seconds / (1 + share)
                link.bandwidth = link.busy * 1e30 / (args.seconds * ratio)
                kernel.pairs_per_second = kernel.busy * 1e30 / attend
                # q and output, k and v: forward once, backward twice
                seconds = (args.seconds - attend) / 3 / (2 + 2 * kv_heads / heads)
                found = torch.tensor([min(step(way, seconds) for _ in range(args.runs))])
                dist.all_reduce(found, dist.ReduceOp.MAX)
                if rank == 0:
                    queue.put((share, ratio, name, found.item()))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per rank; messages are real, durations are not")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of projections and attention together")
    parser.add_argument("--projections", type=float, nargs="+", default=[0.25, 1, 4], help="projections / attention")
    parser.add_argument("--link", type=float, nargs="+", default=[1.0, 0.5, 0.2], help="communication / computation")
    parser.add_argument("--queries-per-key", type=int, default=1, help="query heads per key/value head")
    parser.add_argument("--virtual", action="store_true", help="use a clock that only simulated durations advance")
    parser.add_argument("--runs", type=int, default=1, help="runs of each; the script prints the shortest")
    args = parser.parse_args()
    with on_ranks(rank_main, args) as queue:
        print("Step over the longer of computation and communication")
        for _ in range(len(args.projections) * len(args.link)):
            row = [queue.get() for _ in ways()]
            share, ratio = row[0][:2]
            print(f"projections / attention {share}, link {ratio}:", end="")
            for *_, name, seconds in row:
                print(f"  {name} {seconds / max(args.seconds, args.seconds * ratio):.2f}", end="", flush=True)
            print()


if __name__ == "__main__":
    main()

"""A model of the ring's forward with two and with three buffers for keys and values, on kernels of unequal speed.

    python -m benchmarks.simulated.ring_buffers

With two buffers a rank receives the next block into the one that it has just read: a transfer starts when both sides
have received the block before and have finished the kernel before that one. With three it need not wait for that
kernel. Durations of kernels vary between ranks and hops (log-normal); a transfer takes as long as its bytes. The table
shows the step over the longer of computation and communication.
"""

from __future__ import annotations

import argparse
import random
import statistics


def step(ranks: int, link: float, jitter: float, buffers: int, draw: random.Random) -> float:
    """Return the duration of one forward over the longer of a rank's computation and communication."""
    hops = ranks - 1
    kernel = [[draw.lognormvariate(-(jitter**2) / 2, jitter) for _ in range(ranks)] for _ in range(ranks)]
    arrived = [[0.0] * ranks]  # by hop and rank; hop 0 is the rank's own block
    done = [kernel[0]]
    for hop in range(1, hops + 1):
        free = done[hop - buffers] if hop >= buffers else [0.0] * ranks
        ready = [max(arrived[-1][rank], free[rank]) for rank in range(ranks)]
        # A rank sends and receives in one batch, which ends when both of its neighbours have come.
        arrived.append([max(ready[rank - 1], ready[rank], ready[(rank + 1) % ranks]) + link for rank in range(ranks)])
        done.append([max(arrived[-1][rank], done[-1][rank]) + kernel[hop][rank] for rank in range(ranks)])
    slowest = max(sum(kernel[hop][rank] for hop in range(ranks)) for rank in range(ranks))
    return max(done[-1]) / max(slowest, hops * link)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| ranks | link / kernel | jitter of kernels | two buffers | three buffers |\n|---|---|---|---|---|")
    for ranks in (8, 32):
        for link in (0.5, 0.9, 1.0):
            for jitter in (0.0, 0.05, 0.2):
                found = []
                for buffers in (2, 3):
                    draw = random.Random(args.seed)
                    found.append(statistics.mean(step(ranks, link, jitter, buffers, draw) for _ in range(args.samples)))
                print(f"| {ranks} | {link} | {jitter:.0%} | {found[0]:.3f} | {found[1]:.3f} |")


if __name__ == "__main__":
    main()

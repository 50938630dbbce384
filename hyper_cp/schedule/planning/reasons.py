"""The reason why a strategy is, or is not, the one to use first, in a sentence."""

from __future__ import annotations

from .strategies import Estimate


def explain(estimate: Estimate, best: Estimate, memory_bytes: float, layers: int) -> str:
    """One sentence about ``estimate``, compared with the best strategy."""
    if not estimate.fits:
        return _too_large(estimate, memory_bytes)
    if estimate is best:
        waits = estimate.exposed_seconds / estimate.step_seconds
        return f"fastest that fits; {waits:.0%} of its step waits for transfers"
    slower = best.tokens_per_second / estimate.tokens_per_second
    if slower < 1.01:
        more = (estimate.memory.peak - best.memory.peak) / 1e9
        return f"as fast, with {more:.1f} GB more memory" if more >= 0.05 else "as fast"
    return f"{slower:.2f}x the time: {_cause(estimate, best, layers)}"


def _too_large(estimate: Estimate, memory_bytes: float) -> str:
    memory = estimate.memory
    parts = {
        "states": memory.states,
        "saved activations": memory.saved,
        "the loss": memory.loss,
        "work space": memory.work,
    }
    if memory.loss < memory.work:
        del parts["the loss"]
    else:
        del parts["work space"]
    name = max(parts, key=lambda part: parts[part])
    return (
        f"does not fit: {memory.peak / 1e9:.1f} of {memory_bytes / 1e9:.0f} GB, {parts[name] / 1e9:.1f} GB of it {name}"
    )


def _cause(estimate: Estimate, best: Estimate, layers: int) -> str:
    """The largest part of the time that the best strategy does not take, per token of a rank."""

    def per_token(e: Estimate, seconds: float) -> float:
        return seconds / e.tokens_per_rank

    def idle(e: Estimate) -> float:
        kernels = e.attention.kernels_forward + e.attention.kernels_backward
        return kernels * (1 - 1 / e.balance)

    causes = {
        "transfers that nothing hides": per_token(estimate, estimate.exposed_seconds)
        - per_token(best, best.exposed_seconds),
        f"the fullest rank has {estimate.balance:.2f}x the mean work": layers
        * (per_token(estimate, idle(estimate)) - per_token(best, idle(best))),
    }
    recompute = ("none", "attention", "layers")
    compute = per_token(estimate, estimate.compute_seconds) - per_token(best, best.compute_seconds)
    if recompute.index(estimate.strategy.checkpointing) > recompute.index(best.strategy.checkpointing):
        causes["it computes activations again"] = compute
    else:
        causes["smaller kernels, and more partials to merge"] = compute - max(
            0.0, causes[f"the fullest rank has {estimate.balance:.2f}x the mean work"]
        )
    return max(causes, key=lambda cause: causes[cause])

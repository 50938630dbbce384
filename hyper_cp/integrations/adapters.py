"""Adapters of PEFT that are wrong in a model whose sequence is split over ranks."""

from __future__ import annotations

from torch import nn

_OVER_TOKENS = {"peft.tuners.lily": "Lily", "peft.tuners.shadow": "Shadow", "Velora": "VeLoRA"}
"""Adapters of PEFT that are no functions of one token, by their file or the class of their variant."""


def check_adapters(decoder: nn.Module) -> None:
    """Raise ``NotImplementedError`` for adapters of PEFT that read across positions, or change the loss."""
    for name, module in decoder.named_modules():
        variants = getattr(module, "lora_variant", None) or {}
        kinds = {type(variants[adapter]).__name__ for adapter in variants}
        if any(kind.startswith("ALora") for kind in kinds):
            raise NotImplementedError(
                f"module {name!r} has an activated LoRA adapter, which begins where its invocation is found among the "
                "tokens. Each rank has a share of them, and would not find it. Use a LoRA adapter without invocation"
            )
        file = type(module).__module__
        if "peft.tuners.adalora" in file:
            raise NotImplementedError(
                f"module {name!r} has an AdaLoRA adapter. Its model adds a term to the loss (orth_reg_weight), here "
                "once on each rank, and calls the forward of the model inside without its hooks. Use another adapter, "
                "such as LoRA"
            )
        method = next((kind for part, kind in _OVER_TOKENS.items() if part in file or part in " ".join(kinds)), None)
        if method is not None:
            raise NotImplementedError(
                f"module {name!r} has a {method} adapter, which computes an average over tokens, or attends to them. "
                "Each rank has a share of them. Use an adapter that treats tokens one by one, such as LoRA"
            )

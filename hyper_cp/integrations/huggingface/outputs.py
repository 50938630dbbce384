"""Outputs of a prepared model, whose losses the ranks share: with names inside, also where a tuple is wanted."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.utils.generic import ModelOutput


def wants_tuple(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """True if a forward of the model with these keywords returns a tuple."""
    given = kwargs.get("return_dict")
    config: Any = model.config
    return not (getattr(config, "return_dict", True) if given is None else given)


def check_ignored(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Raise ``ValueError`` for another mark of positions without a label than the one of ``prepare_batch``."""
    given = kwargs.get("ignore_index", -100)
    if kwargs.get("labels") is not None and given != -100:
        raise ValueError(
            f"{type(model).__name__} got labels and ignore_index={given}. prepare_batch marks positions without a "
            "label with -100, and counts all others. Leave ignore_index out, and write -100 into labels"
        )


class TupleOutput:
    """The hooks of a model that ask it for an output with names, which other hooks read, and then return a tuple."""

    def __init__(self) -> None:
        self.wanted = False
        """True if the forward that runs is to return a tuple."""

    def attach(self, model: nn.Module) -> None:
        """Register the hooks. Call it when all hooks that read outputs are registered."""
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after)

    def before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Ask the model for an output with names."""
        self.wanted = wants_tuple(model, kwargs)
        return (args, {**kwargs, "return_dict": True}) if self.wanted else None

    def after(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Return the tuple, if there should be one."""
        return output.to_tuple() if self.wanted and isinstance(output, ModelOutput) else None

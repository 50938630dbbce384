"""Short imports for Hugging Face: ``from hyper_cp.hf import Trainer, prepare_model``.

``Trainer`` and TRL's ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer``, ``GRPOTrainer``, ``RLOOTrainer`` and
``RewardTrainer`` are those of transformers and TRL with the argument ``style=``. They split sequences over the ranks
that ``parallelism_config=ParallelismConfig(cp_size=n)`` says. With ``cp_size=1`` they are the plain ones, so that one
script serves every size::

    from hyper_cp.hf import ParallelismConfig, Trainer

    arguments = TrainingArguments("out", parallelism_config=ParallelismConfig(cp_size=4))
    Trainer(model, arguments, train_dataset=dataset, style=ContextParallel(ulysses_degree=None)).train()

TRL is imported when one of its trainers is.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import transformers

from .integrations.accelerate import ParallelismConfig, enable
from .integrations.trainer import ContextParallelTrainer
from .integrations.transformers import generate, indexer_losses, prepare_batch, prepare_model

_OF_TRL = ("DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer")
__all__ = ["ParallelismConfig", "Trainer", "enable", "generate", "indexer_losses", "prepare_batch", "prepare_model"]


class Trainer(ContextParallelTrainer, transformers.Trainer):
    """transformers' Trainer under context parallelism, constructed with ``style=``, a
    :class:`~hyper_cp.ContextParallel`, and ``parallelism_config=`` among its arguments."""


def __getattr__(name: str) -> Any:
    """Make a trainer of TRL under context parallelism, when it is first asked for."""
    if name not in _OF_TRL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .integrations.trl import ContextParallelSFT, ContextParallelTRL

    mixin = ContextParallelSFT if name in ContextParallelSFT.own_losses else ContextParallelTRL
    document = f"TRL's {name} under context parallelism: see :class:`~{mixin.__module__}.{mixin.__name__}`."
    made = type(name, (mixin, getattr(import_module("trl"), name)), {"__module__": __name__, "__doc__": document})
    globals()[name] = made
    return made

"""TRL: SFTTrainer under context parallelism, packed datasets included.

TRL refuses packing with accelerate's context parallelism, which drops the mask between documents. Here::

    class SFT(ContextParallelSFT, SFTTrainer): ...

    SFT(model, SFTConfig(packing=True, max_length=65536, parallelism_config=ParallelismConfig(cp_size=8)),
        style=ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail"), ...).train()

TRL itself is not imported.
"""

from __future__ import annotations

from typing import Any

from .trainer import ContextParallelTrainer
from .transformers import prepare_batch

_PACKING = ("packing", "eval_packing")


class ContextParallelSFT(ContextParallelTrainer):
    """``class MyTrainer(ContextParallelSFT, SFTTrainer)``, constructed with ``style=`` as
    :class:`~hyper_cp.integrations.trainer.ContextParallelTrainer` is.

    Documents of a packed batch (position ids that restart) do not see each other, and the loss is that of one device,
    in evaluations too. TRL computes it without whole logits; its metrics of tokens and entropy are sums over all ranks.
    """

    own_losses = ("SFTTrainer",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("chunked_loss"):
            raise ValueError(
                "chunked_loss=True with an SFTTrainer, which computes its loss without whole logits already. Two heads "
                "would exclude each other. Leave chunked_loss out"
            )
        self._packing_settings: dict[str, Any] = {}
        super().__init__(*args, **kwargs)
        for name, value in self._packing_settings.items():
            setattr(self.args, name, value)  # type: ignore[attr-defined]
        if getattr(self, "compute_metrics", None) is not None or getattr(self, "aux_loss_enabled", False):
            raise NotImplementedError(
                "compute_metrics and router_aux_loss_coef are not supported with SFTTrainer: TRL computes logits and "
                "the loss of routers from this rank's tokens alone. Leave compute_metrics out, and set "
                "router_aux_loss_coef=0.0"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator. The datasets have been packed before, and TRL asks for packing once more after it, to
        refuse it: documents would not be kept apart by accelerate's own context parallelism."""
        super().create_accelerator_and_postprocess()
        arguments = self.args  # type: ignore[attr-defined]
        self._packing_settings = {name: getattr(arguments, name) for name in _PACKING if hasattr(arguments, name)}
        for name in self._packing_settings:
            setattr(arguments, name, False)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's loss of this rank's tokens. In evaluations TRL calls it with whole batches. For models that have
        ``accepts_loss_kwargs=False`` Trainer counts no labels, and TRL would take the mean of each rank's own."""
        whole = "context_parallel" not in inputs
        if whole:
            inputs = prepare_batch(self.handler, inputs)
        if whole or kwargs.get("num_items_in_batch") is None:
            scaled = getattr(self.args, "average_tokens_across_devices", False)  # type: ignore[attr-defined]
            factor = self.accelerator.num_processes if scaled else 1  # type: ignore[attr-defined]
            # So that the mean over the ranks that share the sequence is the mean over its tokens.
            kwargs["num_items_in_batch"] = inputs["num_items_in_batch"] * factor / self.handler.cp.size
        # Past the method of ContextParallelTrainer, which is for losses of models.
        return super(ContextParallelTrainer, self).compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

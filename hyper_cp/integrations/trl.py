"""TRL's trainers under context parallelism: SFT with packed datasets; DPO, KTO, GRPO, RLOO and reward models.

TRL refuses packing with accelerate's context parallelism, which drops the mask between documents. Here::

    class SFT(ContextParallelSFT, SFTTrainer): ...

    SFT(model, SFTConfig(packing=True, max_length=65536, parallelism_config=ParallelismConfig(cp_size=8)),
        style=ContextParallel(ulysses_degree=1, kv_exchange="ring", layout="head_tail"), ...).train()

The losses of the other trainers are functions of whole rows. Their models take whole batches, run on shares, and return
the few numbers for each token that TRL asks for, gathered. TRL itself is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.modeling_layers import GenericForSequenceClassification

from .._torch.modules import in_evaluation
from ..handler import ContextParallelHandler
from ..mesh.family import split_cp_mesh
from ..mesh_swap import context_parallel_mesh
from .huggingface.batch import check_entries
from .huggingface.checks import base_of
from .huggingface.decoding import SplitModelCache
from .huggingface.seams import cache_in
from .trainer import ContextParallelTrainer, hooks_of_trainer, where_split
from .transformers import generate_with, prepare_batch

_PACKING = ("packing", "eval_packing")


def _refuse_chunked_loss(trainer: str, kwargs: dict[str, Any]) -> None:
    if kwargs.get("chunked_loss"):
        raise ValueError(
            f"chunked_loss=True with {trainer}, which computes its loss without whole logits already. Two heads would "
            "exclude each other. Leave chunked_loss out"
        )


class ContextParallelSFT(ContextParallelTrainer):
    """``class MyTrainer(ContextParallelSFT, SFTTrainer)``, constructed with ``style=`` as
    :class:`~hyper_cp.integrations.trainer.ContextParallelTrainer` is.

    Documents of a packed batch (position ids that restart) do not see each other, and the loss is that of one device,
    in evaluations too. TRL computes it without whole logits; its metrics of tokens and entropy are sums over all ranks.
    """

    own_losses = ("SFTTrainer",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_chunked_loss("an SFTTrainer", kwargs)
        self._packing_settings: dict[str, Any] = {}
        try:
            super().__init__(*args, **kwargs)
        finally:  # also after an error: the arguments are the user's own
            for name, value in self._packing_settings.items():
                setattr(self.args, name, value)  # type: ignore[attr-defined]
        if self.handler is None:
            return
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
        if self.handler is None:
            return
        arguments = self.args  # type: ignore[attr-defined]
        self._packing_settings = {name: getattr(arguments, name) for name in _PACKING if hasattr(arguments, name)}
        for name in self._packing_settings:
            setattr(arguments, name, False)

    @where_split
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
        tokens, counted = inputs["input_ids"], inputs["context_parallel"].counted

        def forward(**given: Any) -> Any:
            output = model(**given)
            # TRL gathers the sum of a mask next; of position ids it counts one row, with the padding of a split.
            inputs["attention_mask"] = torch.ones_like(tokens) if counted is None else (counted != 0).to(tokens.device)
            return output

        with _gathering_by_rank(self):  # past the method of ContextParallelTrainer, which is for losses of models
            found = super(ContextParallelTrainer, self).compute_loss(forward, inputs, *args, **kwargs)  # type: ignore[misc]
        if not isinstance(found, tuple):
            return self.made_over_ranks(found)
        return (self.made_over_ranks(found[0]), *found[1:])


@contextmanager
def _gathering_by_rank(trainer: Any) -> Iterator[None]:
    """A block in which TRL's numbers ``[]`` of each rank (sums over its tokens, means over its rows) are gathered for
    metrics without data-parallel ranks whose rows the last batch repeats. Accelerate takes ranks for rows of it."""
    accelerator, cp = vars(trainer)["accelerator"], trainer.handler.cp.size

    def gather(x: Tensor) -> Tensor:
        state, found = accelerator.gradient_state, accelerator.gather(x)
        return found[: state.remainder * cp] if state.end_of_dataloader and state.remainder > 0 else found

    with _in_place_of(accelerator, "gather_for_metrics", gather):
        yield


@contextmanager
def _in_place_of(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A block in which a function is in the place of a method of ``owner``, which may be one of its own."""
    own = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)


_BY_ROWS: dict[str, Callable[[Any], bool]] = {
    "precompute_ref_log_probs": lambda x: not x,
    "normalize_advantages": lambda x: not x,
    "scale_rewards": lambda x: x != "batch",
    "multi_objective_aggregation": lambda x: x == "sum_then_normalize",
    "top_entropy_quantile": lambda x: x == 1.0,
}
"""Options, and their values with which TRL computes nothing from the rows of all ranks as if no two held the same."""


class ContextParallelTRL(ContextParallelTrainer):
    """``class MyTrainer(ContextParallelTRL, DPOTrainer)``, or KTOTrainer, GRPOTrainer, RLOOTrainer, RewardTrainer,
    constructed with ``style=`` as :class:`~hyper_cp.integrations.trainer.ContextParallelTrainer` is.

    Losses, evaluations and updated weights are those of one device. The ranks of a cp mesh hold the same rows and share
    their tokens. Rollouts (GRPO, RLOO) come from ``rollout_func``, from vLLM, or from the model without dropout, by
    :func:`~hyper_cp.integrations.transformers.generate`; with ``split_cache=False`` on a mesh of one rank, where each
    rank has a whole cache. Those of the first cp rank, and their rewards, count. Metrics of rollouts count those of
    every cp rank.

    Raises:
        NotImplementedError: for other trainers, losses of routers, and options whose values would count rows several
            times; for reward models whose head is not that of transformers' generic sequence classification; for
            rollouts of models that do not generate with a split cache.
        ValueError: for groups of generations that are split over data-parallel ranks.
    """

    own_losses = ("DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer")

    def __init__(self, *args: Any, split_cache: bool = True, **kwargs: Any) -> None:
        _refuse_chunked_loss("a trainer of TRL", kwargs)
        self._split_cache = split_cache
        super().__init__(*args, **kwargs)
        if self.handler is None:
            return
        if getattr(self, "aux_loss_enabled", False):
            raise NotImplementedError(
                "router_aux_loss_coef is not supported with ContextParallelTRL: TRL computes the loss of routers from "
                "this rank's tokens alone. Set router_aux_loss_coef=0.0"
            )
        if hasattr(self, "_tp_size"):  # TRL divides numbers of tokens by the ranks that hold the same rows
            self._tp_size *= self.handler.cp.size
        if isinstance(getattr(self, "ref_model", None), nn.Module):
            reference: Any = self.ref_model  # type: ignore[attr-defined]
            self._prepare_own(self.accelerator.unwrap_model(reference), self.handler.mesh)  # type: ignore[attr-defined]
        if hasattr(self, "num_generations"):
            self._alone = split_cp_mesh(self.handler.mesh).cp(1)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and prepare the model. TRL's number of rows for a generation counts all ranks."""
        super().create_accelerator_and_postprocess()
        if self.handler is None:
            return
        arguments, cp = vars(self)["args"], self.handler.cp.size
        for name, works in _BY_ROWS.items():
            given = getattr(arguments, name, None)
            if given is not None and not works(given):
                raise NotImplementedError(
                    f"{name}={given!r} is not supported with ContextParallelTRL. TRL computes it from the rows of all "
                    f"ranks, and {cp} ranks hold the same ones. Leave it out"
                )
        if hasattr(arguments, "num_generations"):
            _check_groups("train", arguments.per_device_train_batch_size * arguments.steps_per_generation, arguments)
            self.args = copy(arguments)
            self.args.generation_batch_size //= cp

    def _prepare_own(self, model: Any, mesh: DeviceMesh) -> None:
        """Prepare a model for shares, and let it take whole batches. A reward model scores its share of the tokens, and
        picks the last one from the gathered scores of all."""
        base = base_of(model)
        if not isinstance(base, GenericForSequenceClassification):
            super()._prepare_own(model, mesh)
            batches = _WholeBatches(base)
            hooks_of_trainer[base] = (
                base.register_forward_pre_hook(batches.split, with_kwargs=True, prepend=True),
                base.register_forward_hook(batches.gather, with_kwargs=True),
            )
            return
        body: Any = base.base_model
        self.prepare_once(body, mesh)
        batches = _WholeBatches(body)
        hooks_of_trainer[body] = (
            body.register_forward_pre_hook(batches.split, with_kwargs=True, prepend=True),
            base.score.register_forward_hook(lambda module, args, output: batches.whole(output)),
        )

    @where_split
    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> tuple[Any, Any]:
        return nullcontext, inputs

    @where_split
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss of whole rows, the same on every rank of the cp mesh. (That of KTO has a gathered mean.)"""
        with _gathering_by_rank(self):
            return super(ContextParallelTrainer, self).compute_loss(*args, **kwargs)  # type: ignore[misc]

    @where_split
    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, since the model returns outputs of whole rows."""
        return super(ContextParallelTrainer, self).prediction_step(*args, **kwargs)  # type: ignore[misc]

    @where_split
    def _generate(self, prompts: Any, *args: Any) -> Any:
        """TRL's rollouts, those of the first cp rank. Other ranks may have made others."""
        model, other = self.model, ("use_vllm", "use_transformers_continuous_batching", "rollout_func")  # type: ignore[attr-defined]
        _check_groups("train" if model.training else "eval", len(prompts), self)
        split = self._split_cache and not any(getattr(self, name, None) for name in other)
        with self._generating_together(base_of(model)) if split else context_parallel_mesh(model, self._alone):
            found = super()._generate(prompts, *args)  # type: ignore[misc]
        return gather_object([found])[self._first]

    @contextmanager
    def _generating_together(self, model: Any) -> Iterator[None]:
        """A block in which the ``generate`` of a model is that of all cp ranks, with a split cache."""
        method = model.generate

        def generate(input_ids: Tensor | None = None, **kwargs: Any) -> Any:
            with in_evaluation(model):  # TRL leaves dropout on, which would differ between ranks
                return generate_with(method, model, self.handler, input_ids, **kwargs)

        with _in_place_of(model, "generate", generate):
            yield

    @where_split
    def _calculate_rewards(self, inputs: Any, prompts: Any, *args: Any) -> Tensor:
        """TRL's rewards of the rows of all ranks, from the first rank of each cp mesh."""
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, *args)  # type: ignore[misc]
        firsts, states = zip(*gather_object([(self._first, torch.get_rng_state())]), strict=True)
        torch.set_rng_state(states[self._first])  # TRL shuffles the rows next, by a random order that must be one
        return rewards.unflatten(0, (-1, len(prompts)))[list(firsts)].flatten(0, 1)

    @property
    def _first(self) -> int:
        """The first rank of this rank's cp mesh, among all ranks."""
        return int(self.handler.mesh.mesh.flatten()[0])


def _check_groups(mode: str, rows: int, settings: Any) -> None:
    """Raise ``ValueError`` if a rank holds a part of a group of generations."""
    number = settings.num_generations
    if mode == "eval":
        number = getattr(settings, "num_generations_eval", None) or number
    if rows % number:
        raise ValueError(
            f"num_generations={number} does not divide the {rows} rows that a rank generates for (per_device_{mode}_"
            "batch_size, times steps_per_generation in training). Groups must not be split over ranks, some of which "
            "hold the same rows. Choose a multiple"
        )


class _WholeBatches:
    """The hooks of a prepared model that takes whole batches and returns values of whole sequences."""

    def __init__(self, model: nn.Module) -> None:
        self.handler = ContextParallelHandler.of(model)
        self.length: int | None = None
        """Tokens of each row of the batch that runs; None if nothing is split: on one rank, and in generation."""
        self.documents: Tensor | None = None

    def split(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace a whole batch by this rank's share."""
        self.length = None
        if self.handler.cp.size == 1 or isinstance(cache_in(kwargs), SplitModelCache):
            return None
        batch = {"input_ids": args[0], **kwargs} if args else kwargs
        local = prepare_batch(self.handler, batch)
        self.length, self.documents = check_entries(batch).shape[1], local["context_parallel"].documents
        return (), local

    def gather(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Make an output of shares one of whole sequences. TRL's head has no value for the last token of a row."""
        if self.length is None:
            return None
        found = {name: self.whole(x) for name, x in output.items() if name != "loss"}
        if kwargs.get("fused_lm_head"):
            found = {name: x[:, :-1] if isinstance(x, Tensor) and x.ndim > 1 else x for name, x in found.items()}
        return type(output)(**found)

    def whole(self, x: Any) -> Any:
        """Gather values of this rank's tokens ``[B, S/n, ...]`` into ``[B, S, ...]``; return others as they are."""
        if self.length is None or not isinstance(x, Tensor) or x.ndim < 2:
            return x
        if x.shape[1] * self.handler.cp.size != self.handler.padded_length(self.length):
            return x
        if x.dtype == torch.bool:
            return self.whole(x.to(torch.uint8)).bool()
        return self.handler.combine(x, 1, length=self.length, documents=self.documents, gradients="mean")

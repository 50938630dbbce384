"""A mixin for transformers.Trainer: training and evaluation under context parallelism."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from accelerate.utils.operations import recursively_apply
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .._torch.modules import hook_owners
from ..data.batch import compare_contents, contents_of
from ..data.collectives import by_rank
from ..mesh.agreement import digest
from ..module.mesh_binding import binding_of
from ..style import ContextParallel
from .accelerate import cp_mesh, enable
from .huggingface.checks import POOLED, base_of, decoder_of
from .huggingface.chunked_loss import ChunkedLoss
from .huggingface.pooled import PooledHook
from .huggingface.seams import has_head
from .huggingface.two_sequences import stacks_of
from .own_loss import WatchedLoss, replaces
from .transformers import prepare_batch, prepare_model

hooks_of_trainer: WeakKeyDictionary[Any, Iterable[Any]] = WeakKeyDictionary()
"""The hooks by which a model takes whole batches, of its last trainer. Those of the next one replace them."""


def where_split(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a mixin's method: with ``cp_size=1`` the method of the trainer behind the mixin runs in its place."""

    @wraps(method)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.handler is None:
            return getattr(super(ContextParallelTrainer, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return either


class ContextParallelTrainer:
    """``class MyTrainer(ContextParallelTrainer, Trainer)``, constructed with ``style=`` and
    ``TrainingArguments(parallelism_config=ParallelismConfig(cp_size=n))`` (on CPU that of
    :mod:`hyper_cp.integrations.accelerate`). :mod:`hyper_cp.hf` has such classes ready-made. Logged and evaluation
    losses are those of one device. With ``chunked_loss=True`` no whole logits are made; evaluations then have losses
    and no predictions. With ``cp_size=1`` the trainer behind the mixin runs as it is."""

    handler: Any = None
    """Splits batches; None with ``cp_size=1``."""

    _steps_checked = False
    """True once the steps of the user's have been read."""

    _epoch: Any = None
    """The iterator over the batches of the epoch that is running."""

    own_losses: tuple[str, ...] = ()
    """Names of trainers whose own ``compute_loss`` is right for shares of sequences."""

    def __init__(self, *args: Any, style: ContextParallel, chunked_loss: bool = False, **kwargs: Any) -> None:
        self.style, self.chunked_loss = style, chunked_loss
        if not hasattr(super(), "_prepare_context_parallel_inputs"):
            raise RuntimeError(
                f"transformers {transformers.__version__} has no Trainer._prepare_context_parallel_inputs. Batches "
                "would not be split. Install a transformers version that hyper_cp supports, and put "
                "ContextParallelTrainer before Trainer among the base classes"
            )
        self._refuse_own_loss()
        super().__init__(*args, **kwargs)
        if self.handler is None:
            return
        noise = getattr(vars(self)["args"], "neftune_noise_alpha", None)
        if noise is not None:
            raise NotImplementedError(
                f"neftune_noise_alpha={noise} is not supported. The noise is scaled by the length of the sequence that "
                "a model gets, which is this rank's share. Leave it out"
            )
        if self.label_smoother is not None or self.compute_loss_func is not None:  # type: ignore[attr-defined]
            raise NotImplementedError(
                "label_smoothing_factor and compute_loss_func are not supported. They pair local logits with unshifted "
                "labels, which is wrong at the ends of each rank's share. Let the model compute its loss"
            )

    def _refuse_own_loss(self) -> None:
        """Raise ``NotImplementedError`` if a trainer behind this mixin computes a loss in a way of its own."""
        classes = type(self).__mro__
        behind = classes[classes.index(ContextParallelTrainer) + 1 :]
        for trainer in behind[: behind.index(transformers.Trainer)]:
            own = "compute_loss" in vars(trainer) or replaces(trainer, "training_step")  # as OnlineDPO of TRL does
            known = trainer.__name__ in self.own_losses and trainer.__module__.startswith("trl.")
            if own and not known:
                names = f"Trainer that leaves the loss to the model, {', '.join(self.own_losses)}".rstrip(", ")
                raise NotImplementedError(
                    f"{trainer.__name__} computes its loss by itself, from the logits of this rank's tokens as if they "
                    f"were whole sequences. This mixin runs: {names}. Use ContextParallelTrainer with "
                    "transformers.Trainer, ContextParallelSFT with TRL's SFTTrainer, and ContextParallelTRL with its "
                    "DPO, KTO, GRPO, RLOO and reward trainers; other losses are loops (docs/guide/preference_losses.md)"
                )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        config = self.accelerator.parallelism_config  # type: ignore[attr-defined]
        if config is not None and not config.cp_enabled:
            return
        self.handler = enable(self.accelerator, style=self.style)  # type: ignore[attr-defined]
        if self.model is not None:  # type: ignore[attr-defined]
            self._prepare_own(self.model, cp_mesh(self.accelerator))  # type: ignore[attr-defined]

    @where_split
    def call_model_init(self, trial: Any = None) -> Any:
        """A model of ``model_init=``, prepared: Trainer makes one in its constructor, and another in every training."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        self._prepare_own(model, cp_mesh(self.accelerator))  # type: ignore[attr-defined]
        return model

    def _prepare_own(self, model: Any, mesh: DeviceMesh) -> None:
        """Prepare a model of this trainer for shares of sequences."""
        if stacks_of(base_of(model)) is not None:
            raise NotImplementedError(
                f"{type(base_of(model)).__name__} is an encoder-decoder, which splits its source and its target itself "
                "and takes the whole batch, but this trainer splits batches as one sequence. Call prepare_model and "
                "write the loop (docs/guide/encoders.md), or train with cp_size=1"
            )
        self.prepare_once(base_of(model), mesh, self.chunked_loss)

    def prepare_once(self, model: Any, mesh: DeviceMesh, chunked_loss: bool = False) -> None:
        """Prepare a model, unless a trainer before this one has prepared it alike."""
        for inside in model.modules():  # a trainer of rewards keeps them by the body of the model
            for handle in hooks_of_trainer.pop(inside, ()):
                handle.remove()
        binding = binding_of(decoder_of(model))
        chunked = isinstance(getattr(model.loss_function, "__self__", None), ChunkedLoss)
        alike = binding is not None and chunked == chunked_loss and binding.stack[0].mesh == mesh
        pooled = any(isinstance(owner, PooledHook) for owner in hook_owners(decoder_of(model)))
        alike = alike and pooled == has_head(model, POOLED)
        if not alike or binding is None or repr(binding.style) != repr(self.style):
            prepare_model(model, mesh, style=self.style, chunked_loss=chunked_loss)

    @where_split
    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model in DDP also if it has been evaluated before: accelerate would take it for wrapped, and no
        gradient would be reduced (transformers 5.24, accelerate 1.15)."""
        own: Any = self
        wrapped = getattr(own.model_wrapped, "_orig_mod", own.model_wrapped)  # of a compiled one
        if not (isinstance(wrapped, DistributedDataParallel) or own.is_fsdp_enabled or own.is_deepspeed_enabled):
            models = own.accelerator._models
            models[:] = [x for x in models if x not in (own.model, own.model_wrapped)]
            vars(own.model).pop("_is_accelerate_prepared", None)
            own.model_wrapped = own.model
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    @where_split
    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Batches of an epoch, as Trainer takes them. Ranks compare the first batch of each epoch: samplers may draw
        from random states that have come to differ, by a checkpoint of fewer ranks or by dropout."""
        found = super().get_batch_samples(epoch_iterator, *args, **kwargs)  # type: ignore[misc]
        if self._epoch is not epoch_iterator:
            self._epoch = epoch_iterator
            first = json.dumps(found[0][:1], default=_contents, skipkeys=True)
            compare_contents(self.handler, {"the first batch of an epoch": first}, type(self).__name__)
        return found

    @where_split
    def _prepare_context_parallel_inputs(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self._steps_checked:
            self._warn_of_own_steps()
        self._watch_own_loss()
        return nullcontext, self._share(inputs)

    def _watch_own_loss(self) -> None:
        """Read the graph of what a ``compute_loss`` of the user's returns."""
        given = self.compute_loss
        if isinstance(given, WatchedLoss) or getattr(given, "__module__", "").startswith("hyper_cp."):
            return
        vars(self)["compute_loss"] = WatchedLoss(given, self._reads_whole_batches())

    def _warn_of_own_steps(self) -> None:
        """Warn of a step of the user's that does not call the one behind it."""
        self._steps_checked, classes = True, type(self).__mro__
        in_front = classes[: classes.index(ContextParallelTrainer)]
        for kind, name in product(in_front, ("training_step", "prediction_step")):
            if replaces(kind, name):
                warnings.warn(
                    f"{vars(kind)[name].__qualname__} does not call that of super(). self.compute_loss returns a loss "
                    "whose mean over the ranks is that of the batch, and what is read beside it belongs to this rank's "
                    "tokens. Call it, or average over the ranks what is returned, and add terms in compute_loss",
                    stacklevel=3,
                )
        alone = not self.args.average_tokens_across_devices  # type: ignore[attr-defined]
        counts = product(in_front if alone else (), ("get_batch_samples", "_get_num_items_in_batch"))
        for kind, name in counts:
            if replaces(kind, name):
                warnings.warn(
                    f"{vars(kind)[name].__qualname__} does not call that of super(), which divides the number of "
                    "labels by the cp size, as Trainer expects with average_tokens_across_devices=False. Without that "
                    f"losses are too small. Call it, or divide the number by {self.handler.cp.size}",
                    stacklevel=3,
                )

    def _reads_whole_batches(self) -> bool:
        """True for a classifier of sequences: it splits batches itself, and returns whole logits."""
        model: Any = self.model  # type: ignore[attr-defined]
        return has_head(base_of(getattr(model, "_orig_mod", model)), POOLED)  # of a compiled one

    def _share(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """This rank's share of a batch. Some layouts place tokens by its documents, which are kept for outputs."""
        if self._reads_whole_batches():
            return inputs
        local = prepare_batch(self.handler, inputs)
        self._documents = local["context_parallel"].documents
        return local

    @where_split
    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of this rank's tokens, whose mean over the ranks that share the sequence is the loss of it."""
        compute = super().compute_loss  # type: ignore[misc]
        averages, accepts = self.args.average_tokens_across_devices, self.model_accepts_loss_kwargs  # type: ignore[attr-defined]
        scaled = averages and accepts and num_items_in_batch is not None  # Trainer multiplies by the number of ranks
        cp = 1 if scaled else self.handler.cp.size
        if num_items_in_batch is not None:  # Trainer has divided it by cp, which does not scale a loss of routers
            num_items_in_batch = num_items_in_batch * cp
        loss, *outputs = compute(model, inputs, True, num_items_in_batch)
        found = self.made_over_ranks(loss * cp)
        return (found, *outputs) if return_outputs else found

    def made_over_ranks(self, loss: Tensor) -> Tensor:
        """The same loss, of which a ``compute_loss`` of the user's around this one may make its own: that gets the mean
        over the ranks, with the gradient of this rank's part, so that any function of it is the same on all ranks."""
        if isinstance(watched := vars(self).get("compute_loss"), WatchedLoss):
            loss = loss + (self._mean(loss) - loss.detach())
            watched.add(loss)
        return loss

    def _mean(self, loss: Tensor) -> Tensor:
        """The mean of a loss over the ranks that share the sequence, the same on all of them."""
        return by_rank(self.handler.mesh, loss.detach().reshape(1)).mean()

    @where_split
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Trainer's step. It returns the loss of the batch, by which a step of the user's around it may decide: the
        same number on all ranks that share the sequence."""
        return self._mean(super().training_step(*args, **kwargs))  # type: ignore[misc]

    @where_split
    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of a batch once. Trainer adds up those of all ranks, which here hold the same whole ones."""
        state: Any = vars(self)["state"]
        before = state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // self.handler.cp.size

    @where_split
    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's part of the operations of a whole batch. Trainer adds up those of all ranks."""
        return int(super().floating_point_ops(inputs) // self.handler.cp.size)  # type: ignore[misc]

    @where_split
    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's output, whose ``training_loss`` has losses in it that were not logged: those of all ranks."""
        own, self._epoch = vars(self), None
        own["_tr_loss"] = self._mean(own["_tr_loss"])
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    @where_split
    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        length = inputs["input_ids"].shape[1]
        names = self.label_names  # type: ignore[attr-defined]
        labelled = bool(names) and all(inputs.get(x) is not None for x in names)
        if not labelled:  # Trainer does not call _prepare_context_parallel_inputs
            inputs = self._share(inputs)
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if loss is not None:
            loss = self._mean(loss)
        if self._reads_whole_batches():
            return loss, logits, labels
        return loss, recursively_apply(lambda x: self._whole(x, length), logits), labels

    def _whole(self, x: Tensor, length: int) -> Tensor:
        """Gather an output of every token ``[B, S/n, ...]`` into ``[B, S, ...]``."""
        share = self.handler.padded_length(length) // self.handler.cp.size
        if x.ndim < 2 or x.shape[1] != share:
            model = type(self.model).__name__  # type: ignore[attr-defined]
            raise NotImplementedError(
                f"evaluation got an output of shape {tuple(x.shape)} from {model}. Only outputs of "
                f"every token are gathered from the ranks, and this rank holds {share} tokens (dimension 1). Set "
                "prediction_loss_only=True, or leave the output out (aux_loss, image_hidden_states, ...): "
                "evaluate(ignore_keys=[...]), and train(ignore_keys_for_eval=[...])"
            )
        return self.handler.combine(x, 1, length=length, documents=self._documents)

    @property
    def gather_function(self) -> Any:
        """Gathers every sample once, although the ranks of a cp mesh share theirs."""
        return self._own_gather if self.handler is None else partial(recursively_apply, self._gather)

    @gather_function.setter
    def gather_function(self, own: Any) -> None:
        """Keep the function that Trainer sets, which gathers from all ranks: for ``cp_size=1``, and because it says if
        rows that fill the last batch are dropped."""
        self._own_gather = own

    def _gather(self, x: Tensor) -> Tensor:
        accelerator, state = self.accelerator, self.accelerator.gradient_state  # type: ignore[attr-defined]
        sizes = {"dp": accelerator.parallelism_config.data_parallel_size, "row": x.shape[0]}
        x = rearrange(accelerator.gather(x), "(dp cp row) ... -> cp (dp row) ...", **sizes)[0]
        every = self._own_gather == accelerator.gather  # Seq2SeqTrainer drops no row, also none that fills a last batch
        return x[: state.remainder] if state.end_of_dataloader and state.remainder > 0 and not every else x


def _contents(x: Any) -> Any:
    """The part of a value in a batch that ranks compare: tokens and text, and no floating-point values."""
    if isinstance(x, Tensor) and not x.is_floating_point():
        return digest(contents_of(x))
    return dict(x) if isinstance(x, Mapping) else type(x).__name__

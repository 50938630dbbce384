"""The hooks of a model around its decoder: its head, its losses, and the forwards of a generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

from ...data.packing import take_documents
from . import forward, router_loss
from .batch import TOKEN_TYPES, check_entries, prepare_batch
from .checks import always_overlays, check_inputs, decoder_of, makes_by_types, makes_mask, masks_by_types, masks_outputs
from .decoder import ON_THE_HOST, DecoderHook, as_one_device, tokens_in
from .decoding import SplitModelCache
from .forward import OneDevice
from .media import owner_of
from .model_loss import LossCheck, check_kind_of_loss, check_labels
from .outputs import check_ignored
from .seams import cache_in

PROMPT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", *TOKEN_TYPES)
"""Names of the arguments with rows of positions in the forward of a prompt."""


class HeadHook:
    """The hooks of a model around its decoder: they check what its head would do, and correct its router loss."""

    def __init__(self, decoder: DecoderHook) -> None:
        self.decoder = decoder
        self.formula_checked = False
        self.loss = LossCheck()

    @torch.compiler.disable(reason=ON_THE_HOST)
    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse arguments that the head would apply to this rank's share only. A model that makes masks of the types
        of tokens is given those of the whole sequence."""
        cache, kept = cache_in(kwargs), {}
        if isinstance(cache, SplitModelCache):
            cache.check(model, self.decoder.binding.active.mesh)
            kwargs = {**kwargs, "input_ids": args[0]} if args else dict(kwargs)
            cache.read_mask(kwargs.get("attention_mask"), len(check_entries({**kwargs, "position_ids": None})))
            if router_loss.requested(model, kwargs):
                kwargs["output_router_logits"] = False  # nobody trains on new tokens
            args, kept = args[1:], {name: kwargs.pop(name) for name in ("logits_to_keep",) if name in kwargs}
            if cache.get_seq_length() == 0:
                kwargs = self._begin(model, cache, kwargs, kept)
            if cache.get_seq_length() == 0:
                kwargs, kept = self._prompt(cache, kwargs, kept)
            else:
                new = check_entries({**kwargs, "position_ids": None})
                count = new.shape[1]
                if isinstance(mask := kwargs.get("attention_mask"), Tensor):
                    cache.turn.new_mask = mask[:, -count:]
                # By number: some models cut their masks, too, if they get a count of the last ones (Gemma 4).
                last = {name: x for name, x in kept.items() if count > 1 and isinstance(x, int) and 0 < x < count}
                kept |= {name: torch.arange(count - x, count, device=new.device) for name, x in last.items()}
            cache.running = True
        ready = kwargs.get("context_parallel")
        self.decoder.given_positions = kwargs.get("position_ids") is not None
        forward.offer(model, ready)
        if ready is not None or self.decoder.binding.active.parallel:
            check_ignored(model, kwargs)
        if self.decoder.binding.active.parallel:
            check_labels(model, kwargs)
            check_inputs(model, kwargs)
            self.loss.begin(model, ready, kwargs, self.decoder.binding.active.views[0])
            if router_loss.requested(model, kwargs):
                router_loss.check(model, kwargs, args[0] if args else kwargs.get("input_ids"))
        elif ready is not None and kwargs.get("shift_labels") is not None:
            check_kind_of_loss(model, kwargs)
        tokens = tokens_in(args, kwargs)
        made: dict[str, Any] = dict(kept)
        self.decoder.made_mask = ready is not None and kwargs.get("attention_mask") is None and makes_mask(model)
        mesh = self.decoder.binding.active
        documents = mesh.views[0].batch.documents, take_documents(dict(kwargs))
        if alone := self.decoder.on_one_device(mesh, documents, ready, kwargs):
            forward.begin(model, OneDevice(self.decoder.implementation))  # a model around its decoder makes masks, too
        if ready is not None and tokens is not None and masks_by_types(model):
            made |= {name: x.to(tokens.device) for name, x in ready.token_types.items() if name in kwargs}
            decoder = decoder_of(model)
            makes = len(made) > len(kept) or owner_of(model, decoder) is not None
            if makes and not makes_by_types(decoder) and kwargs.get("attention_mask") is None:
                # A mask of ones: without any, transformers takes the jumps of local positions for packed sequences.
                made["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
            if not alone and not ready.token_types and always_overlays(model) and kwargs.get("attention_mask") is None:
                made["attention_mask"] = create_masks_for_generate(model.config, tokens, None, None)
        counted = None if ready is None or alone or tokens is None else ready.counted
        if counted is not None and kwargs.get("attention_mask") is None and masks_outputs(model):
            made["attention_mask"] = self.decoder.given_mask = counted.to(tokens.device, torch.int64)
        if alone:
            made = {**as_one_device(ready, tokens, kwargs), **made}
        return (args, {**kwargs, **made}) if made or isinstance(cache, SplitModelCache) else None

    @staticmethod
    def _begin(model: Any, cache: SplitModelCache, kwargs: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        """The arguments for what is still to compute of a prompt. If the ranks share a part of its tokens only, the
        model has run over this part, and all ranks compute the others as new tokens."""
        length = check_entries({**kwargs, "position_ids": None}).shape[1]
        if (shared := cache.shared(length)) == length:
            return kwargs
        rows = {name: x for name in PROMPT if (x := kwargs.get(name)) is not None}
        dims = {name: -1 if name == "position_ids" else 1 for name in rows}
        model(**{**kwargs, **kept, **{name: x.narrow(dims[name], 0, shared) for name, x in rows.items()}})
        whole = rows.pop("attention_mask", None)  # which tells new tokens about those before them, too
        rest = {name: x.narrow(dims[name], shared, length - shared) for name, x in rows.items()}
        return {**kwargs, **rest, **({} if whole is None else {"attention_mask": whole})}

    def _prompt(
        self, cache: SplitModelCache, kwargs: dict[str, Any], kept: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's share of a prompt, and the row of the logits to compute."""
        whole = {name: kwargs[name] for name in PROMPT if kwargs.get(name) is not None}
        others = {name: x for name, x in kwargs.items() if name not in PROMPT}
        tokens = check_entries(whole)
        local = prepare_batch(cache.handler, whole)
        cache.begin_prompt(local["context_parallel"], tokens.shape[1], "attention_mask" in whole)
        rank, row = cache.last
        at = torch.tensor([row if cache.handler.cp.rank == rank else 0], device=tokens.device)
        return {**others, **local}, dict.fromkeys(kept, at)

    @torch.compiler.disable(reason=ON_THE_HOST)
    def after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Make the router loss that of the whole sequence."""
        forward.offer(model, None)
        self.decoder.made_mask, self.decoder.given_mask = False, None
        forward.end(model)
        mesh, cache = self.decoder.binding.active, cache_in(kwargs)
        if isinstance(cache, SplitModelCache):
            prompt, cache.turn.prompt, cache.turn.new_mask = cache.turn.prompt, None, None
            if output is not None:
                cache.running = False
                output.logits = (cache.of_first_rank if prompt is None else cache.hand_round)(output.logits)
        ready, mask = kwargs.get("context_parallel"), kwargs.get("attention_mask")
        if mesh.parallel:
            self.loss.end(model, kwargs, output, mesh.mesh, mesh.views[0])
        padded = ready is not None and ready.counted is not None  # on one rank, too, the model has not seen the mask
        if not (mesh.parallel or padded) or not isinstance(getattr(output, "aux_loss", None), Tensor):
            return
        if not self.formula_checked:
            router_loss.check_formula(model, output, mask, mesh.mesh)
            self.formula_checked = True
        router_loss.share(model, output, mask if ready is None else ready.counted, mesh.mesh)

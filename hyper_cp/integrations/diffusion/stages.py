"""The split of tokens at the first of a list of blocks of a diffusion transformer, and their gathering behind it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._torch import checkpoint
from ...data.collectives import by_rank
from ...handler import ContextParallelHandler
from ...module.attention_calls import AttentionRequest
from ...module.dispatch_mode import current_call
from ...module.mesh_binding import binding_of
from ...schedule.documents import documents_table
from .families import IMAGE, PROMPT, Family, Kinds


class Stage:
    """A list of blocks: the lengths of its sequence, and the hooks that split and gather it."""

    def __init__(self, handler: ContextParallelHandler, family: Family) -> None:
        self.handler, self.family = handler, family
        self.lengths: dict[str, int] = {IMAGE: 0, PROMPT: 0}
        """Tokens of the image, and of the prompt in joint attention."""

    def attach(self, lists: list[Any]) -> None:
        """Register the hooks of the blocks of lists, one after the other, and of their attention."""
        blocks = [block for together in lists for block in together]
        for number, block in enumerate(blocks):
            parameters = inspect.signature(block.forward).parameters.values()
            names = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
            block.register_forward_pre_hook(Entrance(self, names, number == 0).before, with_kwargs=True)
            for module in block.modules():
                found = binding_of(module)
                if found is not None and found.style.mode.kv_exchange != "replicated":
                    name = next(name for name, x in block.named_modules() if x is module)
                    hook = partial(self.before_attention, self.family.stream(name))
                    found.warned = True  # keys of other tokens than the queries are those that the family has
                    module.register_forward_pre_hook(hook, with_kwargs=True)
                elif found is not None:
                    module.register_forward_pre_hook(self.before_prompt, with_kwargs=True)
        if blocks:
            blocks[-1].register_forward_hook(self.gather)

    # ---- who holds which tokens

    def shares(self, kind: str) -> list[tuple[int, int]]:
        """Start and number of the tokens of each rank, of the prompt or of the image; padding not counted."""
        ranks, (image, prompt) = self.handler.cp.size, (self.lengths[IMAGE], self.lengths[PROMPT])
        prompts = [prompt // ranks + (rank < prompt % ranks) for rank in range(ranks)]
        images, left = [], image
        for count in prompts:
            images.append(min(self.local_length - count, left))
            left -= images[-1]
        counts = prompts if kind == PROMPT else images
        return [(sum(counts[:rank]), count) for rank, count in enumerate(counts)]

    @property
    def local_length(self) -> int:
        """The number of tokens of each rank, padding included."""
        return -(-sum(self.lengths.values()) // self.handler.cp.size)

    @property
    def both(self) -> Kinds:
        """The kinds of tokens of the sequence, in its order."""
        return self.family.order if self.lengths[PROMPT] else (IMAGE,)

    def total(self, kinds: Kinds) -> int:
        """The number of tokens of these kinds, on all ranks."""
        return sum(self.lengths[kind] for kind in kinds)

    def held(self, kinds: Kinds, rank: int | None = None) -> int:
        """The number of tokens of these kinds that a rank holds, padding included."""
        prompt = self.shares(PROMPT)[self.handler.cp.rank if rank is None else rank][1]
        return sum(prompt if kind == PROMPT else self.local_length - prompt for kind in kinds)

    def longest(self, kinds: Kinds) -> int:
        """The largest number of tokens of these kinds that a rank holds."""
        return max(self.held(kinds, rank) for rank in range(self.handler.cp.size))

    @property
    def padding(self) -> int:
        """The number of positions of the last rank that are padding."""
        return self.local_length * self.handler.cp.size - sum(self.lengths.values())

    def record(self, image: int, prompt: int) -> None:
        """Record the lengths of this forward, or raise ``ValueError`` if they cannot be split."""
        self.lengths = {IMAGE: image, PROMPT: prompt}
        ranks = self.handler.cp.size
        few = min(count for _, count in self.shares(IMAGE)) < 1 or (prompt and prompt < ranks)
        if few or (ranks > 1 and image <= self.longest((IMAGE,))):  # padding counted, all tokens look like a share
            raise ValueError(
                f"{image} tokens of the image and {prompt} of the prompt cannot be split over {ranks} ranks. Each "
                "needs at least one of both, and fewer than all of the image. Use fewer ranks, or larger inputs"
            )

    def split(self, x: Tensor, dim: int, kinds: Kinds) -> Tensor:
        """This rank's tokens of a whole tensor, those of the image with padding, in memory of their own."""
        if len(kinds) > 1:
            parts = zip(x.split([self.lengths[kind] for kind in kinds], dim), kinds, strict=True)
            return torch.cat([self.split(part, dim, (kind,)) for part, kind in parts], dim)
        start, count = self.shares(kinds[0])[self.handler.cp.rank]
        more, local = self.held(kinds) - count, x.narrow(dim, start, count)
        return F.pad(local, (0, 0) * (x.ndim - 1 - dim) + (0, more)) if more else local.contiguous()

    # ---- attention

    def before_attention(
        self, stream: tuple[Kinds, Kinds] | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse adapters, and let the attention call have the masks of all ranks."""
        given = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        wrong = [name for name, x in given.items() if x is not None and name.startswith("ip_")]
        if wrong:
            raise NotImplementedError(
                f"{type(module).__name__} got {', '.join(wrong)}. Its keys are those of whole sequences, which the "
                "ranks hold in another order. Leave it out"
            )
        if self.family.prompts and not self.family.order and given.get(PROMPT) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} got encoder_hidden_states where blocks of this type attend to the image. "
                "Each rank has all of the prompt, and no share of it. Use a configuration without only_cross_attention"
            )
        call = current_call()
        if call is not None:
            call.adapt = partial(self.with_masks, stream)
            if given.get("all_perturbed"):  # values are returned, without attention, on every rank
                call.must_route = False

    def before_prompt(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a module of attention to the prompt that attends to the image, of which each rank has a share."""
        names = list(inspect.signature(module.forward).parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        prompt = PROMPT if PROMPT in given else names[1]
        if given.get(prompt) is None and self.handler.cp.size > 1:
            raise NotImplementedError(
                f"{type(module).__name__} got no {prompt}, and would attend to this rank's tokens of the image only. "
                "Pass a prompt, and use a configuration without double_self_attention"
            )

    def with_masks(self, stream: tuple[Kinds, Kinds] | None, request: AttentionRequest) -> AttentionRequest:
        """An attention call for the keys of all ranks, in the order in which these hold them, equally many on each. The
        module makes its mask for this rank's keys, or has got that of the whole sequence."""
        ranks, picks = range(self.handler.cp.size), self.family.picks
        mask, is_causal, documents = request.call.mask, request.call.is_causal, request.call.documents
        if self.family.prompt_alone and is_causal:
            stream, is_causal = ((PROMPT,), (PROMPT,)), False
            before = torch.ones(self.lengths[PROMPT], self.lengths[PROMPT], dtype=torch.bool, device="cpu").tril()
            mask = before.to(request.query.device)[None, None]
        queries, keys = request.query.shape[2], request.key.shape[2]
        of_queries, of_keys = stream or ((IMAGE,) if n < self.local_length else self.both for n in (queries, keys))
        if picks:  # fewer of both
            of_queries = of_keys = self.both
        elif (queries, keys) != (self.held(of_queries), self.held(of_keys)):
            raise NotImplementedError(
                f"attention has {queries} queries and {keys} keys, and this rank holds {self.local_length} tokens of "
                "the sequence. Others are not split as these are. Use a model whose blocks attend to the whole sequence"
            )
        total, longest, counts = (
            self.total(of_keys),
            self.longest(of_keys),
            [self.held(of_keys, rank) for rank in ranks],
        )
        if picks:
            of_ranks = by_rank(self.handler.mesh, torch.tensor([keys], device=request.key.device))
            counts = of_ranks.flatten().tolist()
        held = [self.order(rank, of_keys, count, longest) for rank, count in zip(ranks, counts, strict=True)]
        real = [(start is not None, count) for rows in held for start, count in rows if count]
        ends = all(sees for sees, _ in real[:-1])  # if there is padding, it is behind the sequence
        if mask is not None or not ends or (not real[-1][0] and of_queries != of_keys):
            device = request.key.device
            at = torch.cat([_rows(start, count, device) for rows in held for start, count in rows])
            mask = self.of_all_ranks(mask, keys, at.clamp(min=0), total)
            if mask is None or not all(sees for sees, _ in real):
                visible = (at >= 0)[None, None, None]
                value = 0 if mask is not None and mask.dtype == torch.bool else -torch.inf
                mask = visible if mask is None else mask.masked_fill(~visible, value)
        elif not real[-1][0]:
            seen = sum(count for sees, count in real if sees)  # fewer than all tokens, if attention leaves some out
            documents = documents_table([0, seen, longest * len(ranks)])
        more = self.longest(of_queries) - queries, longest - keys
        if any(more):
            request.query = F.pad(request.query, (0, 0, 0, more[0]))
            request.key, request.value = (F.pad(x, (0, 0, 0, more[1])) for x in (request.key, request.value))
            to_caller = request.to_caller
            request.to_caller = lambda out: to_caller(out[:, :, :queries])
        request.call = replace(request.call, mask=mask, is_causal=is_causal, documents=documents)
        return request

    def of_all_ranks(self, mask: Tensor | None, keys: int, at: Tensor, total: int) -> Tensor | None:
        """The mask of an attention call, for the keys of all ranks. ``at``: their positions in the whole sequence."""
        if mask is None or self.handler.cp.size == 1:
            return mask
        if mask.ndim > 1 and mask.shape[-1] == total:
            return mask[..., at] if mask.shape[-2] != total else mask[..., at, :][..., at]
        if mask.shape[-1] != keys or keys < self.local_length:
            return mask
        if mask.ndim < 4 or (mask.shape[-2] > 1 and not self.family.pairs):
            raise NotImplementedError(
                f"attention got a mask of shape {tuple(mask.shape)}, which is made of pairs of this rank's tokens. "
                "Those with tokens of other ranks are missing. Leave out the mask of the prompt"
            )
        if mask.shape[-2] == 1:
            return self.handler.combine(mask, mask.ndim - 1, gradients=None)
        own = mask.diagonal(dim1=-2, dim2=-1).contiguous()  # of a product of 0 and 1, what each token has
        tokens = self.handler.combine(own, own.ndim - 1, gradients=None)
        return tokens[..., None] * tokens[..., None, :]

    def order(self, rank: int, kinds: Kinds, most: int, longest: int) -> list[tuple[int | None, int]]:
        """Starts and numbers of the adjacent tokens that a rank holds, in the whole sequence of these kinds, None for
        padding: the first ``most`` rows, and padding up to ``longest`` rows."""
        rows: list[tuple[int | None, int]] = []
        start = 0
        for kind in kinds:
            first, count = self.shares(kind)[rank]
            rows += [(start + first, count), (None, self.held((kind,), rank) - count)]
            start += self.lengths[kind]
        kept = []
        for begin, count in rows:
            kept.append((begin, min(count, most)))
            most -= kept[-1][1]
        return [*kept, (None, longest - sum(count for _, count in kept))]

    # ---- behind the last block

    def gather(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The results of the last block, of all tokens, on every rank."""
        if isinstance(output, Tensor):
            return self.whole(output, self.both if self.family.last else (IMAGE,))
        return tuple(
            x if x is None else self.whole(x, (kind,)) for x, kind in zip(output, self.family.returned, strict=True)
        )

    def whole(self, x: Tensor, kinds: Kinds) -> Tensor:
        """Gather the tokens of the image or of the prompt, or of both in one tensor."""
        dim = self.family.dim
        if x.shape[dim] != self.held(kinds):
            raise NotImplementedError(
                f"the last block returned {x.shape[dim]} tokens where this rank holds {self.held(kinds)}. They cannot "
                "be gathered. Remove hooks that change what blocks return"
            )
        if len(kinds) > 1:
            parts = zip(x.split([self.held((kind,)) for kind in kinds], dim), kinds, strict=True)
            return torch.cat([self.whole(part, (kind,)) for part, kind in parts], dim)
        shares, longest = self.shares(kinds[0]), self.longest(kinds)
        padded = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, longest - x.shape[dim]))
        joined = self.handler.combine(padded, dim, gradients="shares")
        return torch.cat([joined.narrow(dim, rank * longest, count) for rank, (_, count) in enumerate(shares)], dim)


def _mask_of_segments(total: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a block with one mask in place of segments, each of which sees itself (text: its past) and all
    tokens before, and of the keys that are no padding."""
    if given.get("segments") is None:
        return {}
    device = given[IMAGE].device
    mask = torch.ones(total, total, dtype=torch.bool, device=device).tril()
    end = 0
    for start, end, is_text in given["segments"]:
        if not is_text:
            mask[start:end, start:end] = True
    mask[end:] = True  # the image that is made
    valid = given.get("key_valid")
    mask = mask[None, None] if valid is None else mask & valid[:, None, None]
    return {"attention_mask": mask, "segments": None, "key_valid": None}


def _rows(start: int | None, count: int, device: torch.device) -> Tensor:
    """Adjacent positions; -1 for padding."""
    if start is None:
        return torch.full((count,), -1, device=device)
    return torch.arange(start, start + count, device=device)


_POSITIONS = ("rot", "freq", "pos", "rope", "cos", "sin", "indices")


def has_word(name: str, *words: str) -> bool:
    """True if one of the words is in a name. (torch.compile traces no regular expressions in torch 2.11.)"""
    return any(word in name for word in words)


class Entrance:
    """The hook of a block: it gives the block this rank's tokens of all that it gets."""

    def __init__(self, stage: Stage, names: list[str], first: bool) -> None:
        self.stage, self.names, self.first = stage, names, first

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments with this rank's tokens. Those of later blocks are split already, if earlier ones made them."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        stage, family = self.stage, self.stage.family
        joint = bool(family.order) and not family.last and given.get(family.prompt) is not None
        counts = {name: given[name].shape[family.dim] for name in (family.image, *([family.prompt] if joint else []))}
        counted = dict(family.counted) | ({family.last: IMAGE} if family.last else {})
        numbers = [x for x, y in given.items() if isinstance(y, int) and not isinstance(y, bool) and x not in counted]
        if self.first:
            behind = given.get(family.last, counts[family.image])
            stage.record(behind, counts.get(family.prompt, counts[family.image] - behind))
            mask = given.get("encoder_attention_mask") if family.picks else None
            if mask is not None and bool((mask.int().diff(dim=-1) > 0).any()):
                raise NotImplementedError(
                    f"{type(module).__name__} got an encoder_attention_mask that hides tokens before others of a "
                    "prompt. Attention moves those behind them forward, which the ranks cannot. Put padding at the end"
                )
        # Another forward may have come before this one is recomputed.
        (stage.lengths,) = checkpoint.batch_state(self, lambda: (stage.lengths,))
        kinds: dict[str, Kinds] = {name: (IMAGE if name == family.image else PROMPT,) for name in counts}
        if family.last:
            kinds = {family.image: stage.both}
        whole = {name: counts[name] == stage.total(kinds[name]) for name in counts}
        if numbers or any(not whole[name] and counts[name] != stage.held(kinds[name]) for name in counts):
            raise NotImplementedError(
                f"{type(module).__name__} got {', '.join(numbers) or 'other tokens than its neighbour'}. This rank "
                f"holds {stage.local_length} tokens of {stage.total(stage.both)}, and a number of tokens is one of "
                "the whole sequence. Use a configuration of the model without that"
            )

        masks = _mask_of_segments(stage.total(stage.both), given) if family.segments else {}

        def share(name: str, x: Any) -> Any:
            if name in masks:
                return masks[name]
            if name in kinds:
                return stage.split(x, family.dim, kinds[name]) if whole[name] else x
            if name == family.last and x is not None:
                return stage.held((IMAGE,))
            if name in counted and x is not None:
                start, count = stage.shares(counted[name])[stage.handler.cp.rank]
                return max(0, min(x - start, count))
            return x if name == family.prompt else mapped(name, x, lambda *y: self.share(type(module).__name__, *y))

        names = [*self.names, *[""] * len(args)]  # further ones are those that the block ignores
        return tuple(share(*pair) for pair in zip(names, args, strict=False)), {
            name: share(name, x) for name, x in kwargs.items()
        }

    def share(self, block: str, name: str, x: Tensor) -> Tensor:
        """This rank's tokens of another argument, found by the size of its dimensions; all of one without tokens."""
        lengths, family, both = self.stage.lengths, self.stage.family, self.stage.both
        text = name.startswith("encoder") or (family.prompts and has_word(name, "encoder", "prompt", "text"))
        text = text or (not family.streams and name.startswith(family.prompt))
        if text and (family.prompts or not lengths[PROMPT]):
            return x
        positions = has_word(name, *_POSITIONS)
        kinds = dict.fromkeys([*((kind,) for kind in both), both])
        if family.streams:
            kinds = {(PROMPT,) if has_word(name, "aud") else (IMAGE,): None}
        elif len(both) > 1 and not positions and not has_word(name, "mask", "context"):
            del kinds[(PROMPT,)]  # shifts and scales are those of images
        numbers = x.is_floating_point() or x.is_complex()  # of a token, in the last dimension; others count or mask
        first = 0 if positions or family.dim == 0 or (x.ndim == 1 and not numbers) else 1
        last = x.ndim - 1 if numbers and "mask" not in name else x.ndim
        found = [(dim, kind) for dim in range(first, last) for kind in kinds if x.shape[dim] == self.stage.total(kind)]
        if len(found) > 1 and "mask" in name:  # of pairs of the whole sequence
            return x
        if len(found) > 1:
            raise NotImplementedError(
                f"{block} got {name} of shape {tuple(x.shape)}, with {lengths[IMAGE]} tokens of the image and "
                f"{lengths[PROMPT]} of the prompt. Which dimension counts which tokens is not clear. Use other lengths"
            )
        return self.stage.split(x, *found[0]) if found else x


def mapped(name: str, x: Any, function: Callable[[str, Tensor], Tensor]) -> Any:
    """``x`` with ``function(name, tensor)`` of each tensor in it, in tuples, lists and dicts, whose keys are names.
    (Outputs of models are dicts.)"""
    if isinstance(x, Tensor):
        return function(name, x)
    if isinstance(x, Mapping):
        found: Any = copy.copy(x)
        for key, y in x.items():
            found[key] = mapped(str(key), y, function)
        return found
    return type(x)(mapped(name, y, function) for y in x) if type(x) in (tuple, list) else x

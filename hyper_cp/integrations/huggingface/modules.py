"""Modules of transformers that read the sequence in code of their own, and the hooks that show them all of it.

- Falcon calls ``F.scaled_dot_product_attention`` itself, with its own conventions for masks and heads.
- MiniMax computes lightning attention, a linear recurrence, block by block.
- Some rotary tables (dynamic NTK, LongRoPE and others) depend on the longest position of the whole batch.
- Layers of Llama 4 without rotation scale queries by positions that they count.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..._torch.compiling import is_compiling
from ..._torch.modes import unseen
from ..._torch.modules import hook_owners, is_running, numbered_alike
from ...mesh.agreement import REMEDY
from ...module.mixers.calls import RunningMixer, running_mixer
from ...module.mixers.hooks import MixerHooks
from ...module.thread_stack import ThreadStack
from .attention import attention_forward
from .forward import ForwardState, state_for
from .seams import CACHE, is_foreign, set_implementation, source_of

_running: ThreadStack[tuple[nn.Module, TorchFunctionMode]] = ThreadStack()
"""The modules that run in a mode of this file."""


def run_in(module: nn.Module, make: Callable[[nn.Module, Any, Any], TorchFunctionMode | None]) -> None:
    """Enter the mode that ``make`` returns (None: no mode) for the arguments of each call of the module, and leave it
    at the end of the call."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        mode = make(module, args, kwargs)
        if mode is not None:
            _running.push((module, mode))
            mode.__enter__()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        entered = _running.top
        if entered is not None and entered[0] is module:
            _running.remove(entered)
            entered[1].__exit__(None, None, None)

    with numbered_alike(module):
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)


def reach_copied_layers(decoder: PreTrainedModel, before: str) -> None:
    """Give the attention implementation of a decoder to layers whose configuration is a copy of the decoder's (those
    that ``copy.deepcopy`` made, or of another model), if they had the one that the decoder had ``before``."""
    of_decoder = decoder.config
    for module in decoder.modules():
        config: Any = getattr(module, "config", None)
        if type(config) is type(of_decoder) and config is not of_decoder and config._attn_implementation == before:
            set_implementation(module, of_decoder._attn_implementation)  # the configuration may be another model's


# --------------------------------------------------------------------------- attention that calls SDPA itself


def direct_attention(decoder: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of a decoder that call SDPA themselves; none if it runs another implementation."""
    if decoder.config._attn_implementation != "sdpa":
        return []
    return [module for module in decoder.modules() if _calls_sdpa(type(module))]


def _calls_sdpa(kind: type[nn.Module]) -> bool:
    known = "attention_mask" in inspect.signature(kind.forward).parameters
    if kind.forward.__module__.startswith("torch.") or not known:
        return False
    return "scaled_dot_product_attention(" in source_of(kind.forward)


def no_mask(device: torch.device) -> Tensor:
    """A mask in four dimensions, in place of one that models would make. They hand it on as it is."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def route(modules: list[nn.Module]) -> None:
    """Route the attention calls of these modules.

    (The dispatch mode of styled modules cannot: here a mask of one element means a causal mask, one key head serves all
    query heads without ``enable_gqa``, and documents and padding are those of the prepared batch.)
    """
    for module in modules:
        run_in(module, _direct)


def _direct(module: nn.Module, *_: Any) -> TorchFunctionMode | None:
    return _Sdpa(module, state) if isinstance(state := state_for(module), ForwardState) else None


class _Sdpa(TorchFunctionMode):
    """While entered, SDPA is attention over the sequence of all ranks."""

    def __init__(self, module: nn.Module, state: ForwardState) -> None:
        super().__init__()
        self.module, self.state = module, state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A KeyboardInterrupt ends a module's call without its hooks.
        alive = is_compiling() or is_running(self.module)
        if func is F.scaled_dot_product_attention and alive:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        mask = None if attn_mask is None or attn_mask.numel() == 1 else attn_mask
        bias, mask = (mask, None) if self.state.biases else (None, mask)  # made of no_mask, for all ranks
        options: dict[str, Any] = {"dropout": dropout_p, "scaling": scale, "key_bias": bias}
        out, _ = attention_forward(self.module, query, key, value, mask, context_parallel=self.state, **options)
        return out.transpose(1, 2)


# --------------------------------------------------------------------------- lightning attention

STEPS = ("torch.split(qkv_states", "torch.matmul(", "torch.cat(attn_output, dim=-2)")
"""The code around the recurrence in the forward of a module with lightning attention."""


def is_lightning(module: nn.Module) -> bool:
    """True for a module that computes lightning attention as MiniMax of transformers does."""
    has_rates = isinstance(getattr(module, "slope_rate", None), Tensor)
    return has_rates and all(step in source_of(type(module).forward) for step in STEPS)


class LightningHooks(MixerHooks):
    """The hooks of one module with lightning attention.

    Its forward calls no function for the recurrence. But it splits one tensor into q, k and v (``torch.split``), and
    concatenates the outputs of its blocks (``torch.cat``): the first shows the inputs of the recurrence, and the second
    is the place of its outputs. What lies between them is not computed.
    """

    def check_calls(self, module: nn.Module) -> None:
        """The recurrence is found in the forward itself."""

    def attach(self, module: nn.Module) -> None:
        """Register the hooks."""
        super().attach(module)
        run_in(module, _lightning)


def _lightning(module: nn.Module, *_: Any) -> TorchFunctionMode | None:
    mixer = running_mixer()
    return _Lightning(mixer, module) if mixer is not None and mixer.module is module else None


class _Lightning(TorchFunctionMode):
    """While entered, the recurrence between the split and the concatenation runs over all ranks."""

    def __init__(self, mixer: RunningMixer, module: nn.Module) -> None:
        super().__init__()
        self.mixer, self.module = mixer, module
        self.qkv: tuple[Tensor, ...] | None = None
        """q, k and v ``[B, S, H, D]`` between the two."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if running_mixer() is not self.mixer:  # a KeyboardInterrupt ended the module's call without its hooks
            return func(*args, **kwargs)
        if func is torch.split:
            self.qkv = func(*args, **kwargs)
            return tuple(x.detach() for x in self.qkv)  # what is computed of them is thrown away
        if func is torch.matmul and self.qkv is not None:
            a, b = args
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
            return a.new_zeros(()).expand(*batch, a.shape[-2], b.shape[-1])
        if func is torch.cat and self.qkv is not None:
            (q, k, v), self.qkv = self.qkv, None
            self.mixer.routed = True
            return self.mixer.recur(q, k, v, -self.module.get_buffer("slope_rate").flatten()).transpose(1, 2)
        return func(*args, **kwargs)


# --------------------------------------------------------------------------- tables of positions


def position_modules(decoder: nn.Module) -> list[nn.Module]:
    """The modules that count the positions of their input from 0, and take others instead, as those of BART do."""
    found = [m for m in decoder.modules() if "position_ids" in _parameters(m) and not [*m.children()]]
    return [m for m in found if _OFFSETS & _parameters(m)]


def id_position_modules(decoder: nn.Module) -> list[nn.Module]:
    """The modules that make positions of the ids of their input, padding excepted, as those of M2M100 do."""
    return [m for m in decoder.modules() if hasattr(m, _MAKER) and _OFFSETS & _parameters(m)]


def sinusoids(decoder: nn.Module) -> list[nn.Module]:
    """The modules that return the first rows of a table, as many as there are tokens, as those of MusicGen do."""
    found = [m for m in decoder.modules() if _OFFSETS & _parameters(m) and "position_ids" not in _parameters(m)]
    return [m for m in found if hasattr(m, "make_weights") and not hasattr(m, _MAKER)]


def _parameters(module: nn.Module) -> set[str]:
    return {*inspect.signature(module.forward).parameters}


_MAKER = "create_position_ids_from_input_ids"
_OFFSETS = {"cache_length", "past_key_values_length"}
"""Names of the number of tokens in a cache: the first one from transformers 5.24 on."""


def prepare_positions(decoder: nn.Module) -> None:
    """Let such modules take the positions of this rank's tokens in the whole sequence."""
    for module in position_modules(decoder):
        module.register_forward_pre_hook(_take_positions, with_kwargs=True)
    for module in id_position_modules(decoder):
        module.register_forward_pre_hook(_need_ids, with_kwargs=True)
        setattr(module, _MAKER, partial(_of_all_ids, module, getattr(module, _MAKER)))
    for module in sinusoids(decoder):
        module.register_forward_hook(_rows_of_positions)


def prepare_tables(decoder: nn.Module) -> None:
    """Let tables of sinusoids grow with the length of the whole sequence."""
    for module in decoder.modules():
        if hasattr(module, "make_weights"):
            module.register_forward_pre_hook(_grow_table)


def _grow_table(module: Any, args: tuple[Any, ...]) -> None:
    """Make a table of sinusoids as long as the whole sequence, and its first rows, which stand for no position."""
    state = state_for(module)
    if not isinstance(state, ForwardState) or state.positions is None:
        return
    padding = getattr(module, "padding_idx", None)
    length = len(state.positions) * state.mesh.views[0].size + max(getattr(module, "offset", 0), 1 + (padding or 0))
    if length > len(module.weights):
        module.make_weights(length, module.embedding_dim, *([] if padding is None else [padding]))


def _rows_of_positions(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    state = state_for(module)
    if not isinstance(state, ForwardState) or state.positions is None:
        return None
    return module.weights.index_select(0, state.positions).detach()


def _of_all_ids(module: nn.Module, make: Callable[..., Tensor], ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    state = state_for(module)
    if not isinstance(state, ForwardState):
        return make(ids, *args, **kwargs)
    return state.share(make(state.whole(ids), *args, **kwargs))


def _need_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    if isinstance(state_for(module), ForwardState) and given.get("input_ids") is None:
        raise NotImplementedError(
            f"{type(module).__name__} makes positions of the ids of tokens, and got none. Of embeddings it would count "
            "this rank's share. Pass input_ids"
        )


def _take_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state = state_for(module)
    if not isinstance(state, ForwardState) or state.positions is None:
        return None
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return (), {**given, "position_ids": state.positions}


# --------------------------------------------------------------------------- rotary tables

STATIC = {"default", "linear", "yarn", "llama3", "proportional", "ntk_alpha", "axial"}
"""Kinds of rotary embedding whose angles depend on a token's own position only."""


def prepare_rotary(decoder: nn.Module) -> int:
    """Hook the rotary embeddings of a decoder that depend on the longest position, and return their number.

    They take the maximum of the position ids that they are given, and a rank has only its own share of them. So the
    last position of the whole sequence is appended to the ids, and its row removed from the table. What a user's
    embedding takes of its ids is not known: its angles are compared in the first forward.
    """
    for name, module in decoder.named_modules():
        if _is_own_rotary(name, module) and module not in _compared:
            _compared.add(module)
            module.register_forward_hook(_ComparedAngles(name).compare, with_kwargs=True)
    found = [module for module in decoder.modules() if _kinds(module) - STATIC]
    for module in found:
        if not any(isinstance(owner, _LastPosition) for owner in hook_owners(module)):
            hooks = _LastPosition()
            module.register_forward_pre_hook(hooks.append, with_kwargs=True)
            module.register_forward_hook(hooks.remove_row)
    return len(found)


def _kinds(module: nn.Module) -> set[str]:
    """The kinds of rotary embedding that a module computes: one, or one for each type of layer."""
    kinds = getattr(module, "rope_type", None)
    return {str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,)) if kind is not None}


class _LastPosition:
    """The hooks of such a rotary embedding."""

    def append(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = state_for(module)
        if not isinstance(state, ForwardState):
            return None
        positional, keywords = list(args), dict(kwargs)
        given: Any = keywords if "position_ids" in keywords else positional
        at: Any = "position_ids" if "position_ids" in keywords else 1
        positions = given[at]
        last = torch.as_tensor(state.batch.last_position, dtype=positions.dtype, device=positions.device)
        given[at] = torch.cat([positions, last.expand(*positions.shape[:-1], 1)], -1)
        return tuple(positional), keywords

    def remove_row(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(state_for(module), ForwardState):
            return None
        if isinstance(output, Tensor):
            return output.narrow(-2, 0, output.shape[-2] - 1)
        return type(output)(x.narrow(-2, 0, x.shape[-2] - 1) for x in output)


_ROTARY = re.compile("[Rr]otary|R[oO]PE|Rope|(^|_)rope")
_compared: WeakSet[nn.Module] = WeakSet()
"""Rotary embeddings of users that have the hook."""


def _is_own_rotary(name: str, module: nn.Module) -> bool:
    """True for a rotary embedding of a user's, which has tables, and no weights, and does not say that it depends on
    the longest position."""
    named = _ROTARY.search(name.rpartition(".")[2]) or _ROTARY.search(type(module).__name__)
    own = named and is_foreign(type(module)) and not _kinds(module) - STATIC
    return bool(own) and all(p.ndim < 2 for p in module.parameters())


class _ComparedAngles:
    """The hook of a user's rotary embedding. The angles of this rank's tokens must be those that they have beside the
    first and the last position of the sequence."""

    def __init__(self, name: str) -> None:
        self.name, self.compared = name, False

    def compare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        state = state_for(module)
        if self.compared or is_compiling() or not isinstance(state, ForwardState):
            return
        outputs = _tables(output)
        positions: Any = kwargs.get("position_ids", next((x for x in args if _counts(x)), None))
        if not outputs or not _counts(positions):
            return
        last = torch.as_tensor(state.batch.last_position, dtype=positions.dtype, device=positions.device)
        ends = torch.stack([torch.zeros_like(last), last]).expand(*positions.shape[:-1], 2)
        longer = torch.cat([positions, ends], -1)
        given = [longer if x is positions else x for x in args]
        named = {key: longer if x is positions else x for key, x in kwargs.items()}
        differ = unseen(lambda: _angles_differ(module, given, named, outputs), positions.device)
        caller = f"module {self.name!r} ({type(module).__name__})"
        found = (("angles", "of others too" if differ else "of each by itself"),)
        state.mesh.views[0].agree("module", (("module", self.name),), caller, once=found, always=True)
        if differ:
            raise ValueError(
                f"{caller} makes the angles of a position of other positions too, and it has this rank's share of "
                f"them. Each rank would rotate by other ones. {REMEDY['angles']}"
            )
        self.compared = True


def _counts(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0 and x.dtype in (torch.int32, torch.int64)


def _tables(output: Any) -> list[Tensor]:
    return [x for x in (output if isinstance(output, (tuple, list)) else [output]) if isinstance(x, Tensor)]


def _angles_differ(module: nn.Module, args: list[Any], kwargs: dict[str, Any], outputs: list[Tensor]) -> bool:
    """True if tables for two more positions have other rows for the first ones."""
    try:
        tables = _tables(module.forward(*args, **kwargs))
    except Exception:  # it takes no other number of positions: nothing is known of it
        return False
    for own, table in zip(outputs, tables, strict=False):
        rows = own.shape[-2] if own.ndim > 1 else 0
        longer = table.shape == (*own.shape[:-2], rows + 2, own.shape[-1]) if rows else False
        if longer and not torch.allclose(table.narrow(-2, 0, rows).float(), own.float(), rtol=1e-4, atol=1e-5):
            return True
    return False


# --------------------------------------------------------------------------- positions that layers count

COUNTS = re.compile(r"arange\(\s*((hidden_states|query\w*)\.(shape\[|size\()|q_length, )")
"""Code that counts positions of the local hidden states."""
_COUNTED = r"get_seq_length\(self\.layer_idx\).*arange\(hidden_states\.shape\[1\], [^)]*\) \+ past_seen"
_OFFSET = r"get_query_offset\(self\.layer_idx\).*arange\(q_length, [^)]*\) \+ q_offset"
AFTER_CACHE = re.compile(f"{_COUNTED}|{_OFFSET}", re.DOTALL)
"""The same, from the number of tokens in a cache on."""


def counting(decoder: nn.Module) -> list[nn.Module]:
    """The modules inside of a decoder that make positions of their hidden states. (All layers of Llama 4 have code that
    does so for a scale, which most of them do not have.)"""
    found = [m for m in decoder.modules() if m is not decoder and COUNTS.search(source_of(type(m).forward))]
    return [m for m in found if getattr(m, "attn_temperature_tuning", True) and not getattr(m, "use_rope", False)]


def counts_after_cache(module: nn.Module) -> bool:
    """True for such a module that asks a cache for the number of tokens before its own."""
    return bool(CACHE and AFTER_CACHE.search(source_of(type(module).forward)))


def prepare_counting(decoder: nn.Module) -> None:
    """Let such modules count the positions of this rank's tokens in the whole sequence."""
    for module in counting(decoder):
        module.register_forward_pre_hook(_count_whole, with_kwargs=True)


def _count_whole(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    state = state_for(module)
    if not isinstance(state, ForwardState) or state.positions is None:
        return None
    return args, {**kwargs, CACHE: _Before(state.positions, kwargs.get(CACHE))}


class _Before:
    """A cache whose length is the number of tokens of all ranks before each of this rank's, less those of this rank."""

    def __init__(self, positions: Tensor, cache: Any) -> None:
        self.positions, self.cache = positions, cache

    def get_seq_length(self, *_: Any) -> Tensor:
        """The distance from local positions to those of the whole sequence."""
        return self.positions - torch.arange(len(self.positions), device=self.positions.device)

    get_query_offset = get_seq_length

    def get_mask_sizes(self, length: int, *_: Any) -> tuple[int, int]:
        """Those of this rank's tokens: a mask is none of a module's business."""
        return length, 0

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the cache of the model does; without one these keys and values."""
        return (key, value) if self.cache is None else self.cache.update(key, value, *args, **kwargs)

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Convolutions run over all ranks, which keep no states yet."""

    def update_conv_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return them."""
        return states

"""Checks of models, of the arguments of their forward and of batches: they refuse what would be wrong on a share."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, __version__

from ..._torch.modules import holds
from ...data.batch import contents_of
from ...data.collectives import by_rank
from ...data.packing import PreparedBatch
from ...handler import ContextParallelHandler
from ...mesh.agreement import digest
from ...mesh.arguments import check_type
from ...module.mixers.calls import is_mixer
from ...module.mixing import mixing as why_mixing
from ...module.mixing import mixing_modules
from ...schedule.layout import by_documents
from . import sparse
from .batch import is_media
from .media import encoders_in, owner_of
from .modules import (
    counting,
    counts_after_cache,
    direct_attention,
    id_position_modules,
    is_lightning,
    position_modules,
    sinusoids,
)
from .pooled import pool_in_code, poolers_of, pools_by_itself
from .relative import relative_modules
from .seams import has_head, in_file, is_foreign, own_forward, source_of
from .selected import LAYER, selects
from .two_sequences import HEADS, stacks_of, takes_media
from .written import makes_biases, writes_out, written_attention

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
"""Types of layers that do not mix positions, or do so by attention only."""
POOLED = re.compile(
    r"For(Sequence|Image|Video|Audio)Classification|ForMultipleChoice|ForNextSentence|ForReward|DoubleHeads"
    r"|ForQuestionAnswering"
)
"""Names of heads that pool over the sequence, or have a softmax over its positions."""
READS_ROWS = ("ChineseCLIPModel", "JevForDecision")
"""Models that take a few rows of the states of text: the first one, or those of marks in the prompt."""
OVER_POSITIONS = re.compile("ForQuestionAnswering")
"""Names of the latter."""
EAGER = "eager_attention_forward"
"""The name of eager attention in the files of models."""
SHIFTS = re.compile(r"fft|fourier_transform|\[:, (1:|:-1)[],]|attention_mask\.sum\(|\.roll\(|reduce_min\(")
"""Code that reads other positions than a token's own."""
MISSING = {"Llama4ForConditionalGeneration": ("MoeCausalLMOutputWithPast", "image_outputs")}
"""Models whose forward reads an attribute of an output that does not have it (transformers 5.24.0)."""


def base_of(model: Any) -> PreTrainedModel:
    """The model inside PEFT's wrapper around it; any other model of transformers itself."""
    inside = getattr(model, "get_base_model", None)
    found: PreTrainedModel = inside() if callable(inside) and hasattr(model, "peft_config") else model
    todo = (
        "Its class must be one of transformers, or extend one, which says where decoder, head and loss are. Prepare "
        "the model of transformers inside, before it is wrapped, and call the wrapper in your loop. For Trainer extend "
        "the class of the model (class Mine(LlamaForCausalLM)), and compute your loss in compute_loss"
    )
    if not (hasattr(found, "get_decoder") and hasattr(found, "loss_function")):  # a compiled one has those of its model
        check_type("model", found, PreTrainedModel, todo)
    return found


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder of a model. (Some models name their output layer ``decoder``, and ``get_decoder`` returns that.)"""
    found: Any = model.get_decoder()
    if not isinstance(found, PreTrainedModel):
        found = getattr(model, model.base_model_prefix, model)
    inside = found.get_decoder()
    if isinstance(inside, PreTrainedModel) and inside is not found:  # of a model with a head (Nemotron omni)
        return inside
    inner = [m for m in found.children() if isinstance(m, PreTrainedModel)]
    headed = found.get_output_embeddings() is not None  # Llama 4 and Kosmos 2, which do not find what is inside
    return inner[0] if headed and len(inner) == 1 else found


def check_model(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ``NotImplementedError``, with the reason, for a model whose forward would be wrong on a share."""
    _check_runs(model)
    name = type(decoder).__name__
    if not is_foreign(type(decoder)) and not source_of(type(decoder).forward):
        raise NotImplementedError(
            f"the source of {name} is not installed, and tells what its modules read (positions, padding, neighbours). "
            "Install transformers with its .py files"
        )
    _check_stacks(model, decoder)
    _check_pools(model, decoder)
    _check_mixers(decoder)
    _check_own_modules(model, decoder)
    _check_attention(decoder)
    _check_positions(decoder)


def _check_stacks(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Refuse an encoder-decoder whose two sequences cannot be split."""
    if stacks_of(model) is not None and masks_outputs(model):
        raise NotImplementedError(
            f"{type(model).__name__} multiplies the states of its encoder, of which each rank has a share, by the mask "
            "of the whole source. Put ContextParallel styles on its attention modules with parallelize_module"
        )
    if (decoder.config.is_encoder_decoder or model.config.is_encoder_decoder) and stacks_of(model) is None:
        inside = getattr(model, "language_model", None)
        if isinstance(inside, PreTrainedModel) and stacks_of(inside) is not None:  # BLIP-2 with T5
            raise NotImplementedError(
                f"{type(model).__name__} gives rows of images to an encoder-decoder, {type(inside).__name__}, which "
                "splits its source and its target by itself. Call prepare_model(model.language_model, ...), and the "
                "model with the whole batch on every rank"
            )
        why = "without a head that predicts the tokens of its target"
        if has_head(model, HEADS):
            why = "that makes the input of its decoder by a function which prepare_model does not know"
        if takes_media(model.get_encoder()):
            why = "whose encoder takes images or audio by itself, which prepare_model does not share out"
        raise NotImplementedError(
            f"{type(model).__name__} is an encoder-decoder {why}. Put ContextParallel styles on its attention modules "
            "with parallelize_module"
        )


def _check_pools(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Refuse a model that makes one row of the sequence, unless its head is known to."""
    of_user = own_forward(model) is not None and model is not decoder and not has_head(model, POOLED)
    source = source_of(type(model).forward) if of_user else ""
    if type(model).__name__ in READS_ROWS or (_MASKS.search(source) and _REDUCES.search(source)):
        raise NotImplementedError(
            f"{type(model).__name__} reads rows of its states by their positions in the whole sequence, and each rank "
            "has a share. Prepare the model inside, gather its output with handler.combine(hidden, 1), and read that"
        )
    pools = has_head(model, POOLED)
    inside = {*decoder.modules()}
    heads = [x for x in model.children() if inside.isdisjoint(x.modules())]
    between = [x for x in model.modules() if x not in inside and not inside.isdisjoint(x.modules())]
    beside = {*between, *(module for head in heads for module in head.modules())} - encoders_in(model)
    if (not pools and pool_in_code(beside)) or (
        pools and (model is decoder or not takes_tokens(decoder) or owner_of(model, decoder) is not None)
    ):
        raise NotImplementedError(
            f"{type(model).__name__} pools over the sequence, and each rank would pool over its share. Prepare "
            "the model without its head (model.base_model), gather its output with handler.combine(hidden, 1), and "
            "apply the head to that"
        )
    if pools_by_itself(decoder, encoders_in(decoder)) or (poolers_of(decoder) and not pools):
        raise NotImplementedError(
            f"{type(decoder).__name__} has a pooler, which pools over the sequence, and each rank would pool over its "
            "share. Make the model with add_pooling_layer=False, gather its output with handler.combine(hidden, 1), "
            "and pool that"
        )


def _check_mixers(decoder: PreTrainedModel) -> None:
    """Refuse recurrences and biases of positions that are made of a share."""
    name, config = type(decoder).__name__, decoder.config
    mixing = unrouted_mixers(decoder)
    if mixing:
        raise NotImplementedError(
            f"{name} has {', '.join(mixing)}, which mix positions in a way that context parallelism does not route, "
            "and would end at this rank's share. Use a model whose mixers call causal_conv1d_fn, "
            "chunk_gated_delta_rule and their kind (docs/guide/recurrent_layers.md)"
        )
    alibi = getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi"
    if alibi and not makes_biases(decoder):
        raise NotImplementedError(
            f"{name} adds ALiBi biases to attention scores, which it makes for the positions of a share. Use a model "
            "with rotary or learned positions"
        )


def _check_attention(decoder: PreTrainedModel) -> None:
    """Refuse attention that cannot be replaced, masks that are made of a share, and choices among its tokens."""
    name = type(decoder).__name__
    by_itself = not decoder._can_set_attn_implementation()
    if has_attention(decoder) and by_itself and not direct_attention(decoder) and not written_attention(decoder):
        raise NotImplementedError(
            f"{name} computes attention by itself, not through transformers' AttentionInterface or SDPA, so it cannot "
            'be replaced. Use a model that does; one that can call SDPA needs attn_implementation="sdpa"'
        )
    known = {x for m in decoder.modules() if sparse.is_known(type(m)) for x in m.modules()} | encoders_in(decoder)
    others = [m for m in decoder.modules() if m not in known]
    _refuse_modules(decoder, [] if by_itself else [m for m in others if writes_out(type(m))], _WRITES_OUT)
    if re.search(
        r"attention_mask(\.unsqueeze\(1\)\.unsqueeze\(2\)|\[:, None, None, :])", source_of(type(decoder).forward)
    ):
        raise NotImplementedError(
            f"{name} makes its attention mask by itself, of the tokens of this rank's share, and not by a function of "
            "transformers. Use a model whose forward calls create_bidirectional_mask or create_causal_mask"
        )
    _refuse_modules(
        decoder,
        [m for m in others if hasattr(m, "expert_capacity")],
        "gives each expert a limited number of the batch's tokens, and would count those of this rank's share. Use a "
        "model whose experts take any number of tokens",
    )
    _refuse_modules(
        decoder,
        [m for m in others if hasattr(m, "prepare_dynamic_mask")],
        "selects keys by learned numbers in a mask of all pairs of positions, and would select among this rank's share "
        "of the keys. Use a model without it",
    )
    _refuse_modules(decoder, [m for m in others if _shifts(m)], _SHIFTS)


def _check_positions(decoder: PreTrainedModel) -> None:
    """Refuse a decoder that counts positions from 0 on every rank."""
    _refuse_modules(
        decoder,
        [m for m in counting(decoder) if not counts_after_cache(m)],
        "counts positions by itself, from 0 on every rank. Use a model whose layers are given them",
    )
    counted = (
        "position_ids" in inspect.signature(decoder.forward).parameters
        or makes_biases(decoder)
        or relative_modules(decoder)
    )
    hooked = [*position_modules(decoder), *id_position_modules(decoder), *sinusoids(decoder)]
    if not counted and has_attention(decoder) and not hooked:
        raise NotImplementedError(
            f"{type(decoder).__name__} takes no position_ids: it counts positions itself, and would count them from 0 "
            "on every rank. Use a model whose forward takes position_ids"
        )


_WRITES_OUT = (
    "writes attention out beside modules that call transformers' AttentionInterface, and would attend to this rank's "
    "share of the keys. Use a model without it"
)
_SHIFTS = (
    "reads other positions without attention (neighbours, a count of tokens or a Fourier transform), and would end at "
    "this rank's share. Use a model without it (ESM: token_dropout=False)"
)


def check_added(decoder: PreTrainedModel, before: Collection[nn.Module]) -> None:
    """Raise ``NotImplementedError`` for modules that were put into a decoder since it was prepared, with the modules
    ``before``, if they read other positions."""
    whole = [*mixers_of(decoder), *encoders_in(decoder)]
    known = {inner for module in whole for inner in module.modules()}
    added = [m for m in decoder.modules() if m not in before and m not in known]
    mixing = [m for m in added if why_mixing(m) is not None]
    _refuse_modules(decoder, mixing, "mixes positions, and would end at this rank's share. Use a model without it")
    _refuse_modules(decoder, [m for m in added if _shifts(m)], _SHIFTS)
    if decoder._can_set_attn_implementation():
        _refuse_modules(decoder, [m for m in added if writes_out(type(m))], _WRITES_OUT)


def _check_runs(model: nn.Module) -> None:
    """Raise ``NotImplementedError`` for a model whose forward raises an error on one device, too."""
    name, file = type(model).__name__, sys.modules[type(model).__module__]
    made, read = MISSING.get(name, ("", ""))
    if made and read in source_of(type(model).forward) and not hasattr(getattr(file, made, None), read):
        raise NotImplementedError(
            f"{name} raises AttributeError in transformers {__version__}, on one device too, because it reads {read} "
            f"of a {made}, which has none. Set {file.__name__}.{made}.{read} = None before prepare_model, or install "
            "another version of transformers"
        )


def _refuse_modules(decoder: nn.Module, modules: Iterable[nn.Module], why: str) -> None:
    """Raise ``NotImplementedError`` for a decoder that has such modules."""
    if kinds := sorted({type(module).__name__ for module in modules}):
        name = type(decoder).__name__
        raise NotImplementedError(f"{name} {why}" if kinds == [name] else f"{name} has {', '.join(kinds)}, which {why}")


def takes_tokens(decoder: nn.Module) -> bool:
    """True for a decoder of text."""
    return "input_ids" in inspect.signature(decoder.forward).parameters


def mixers_of(decoder: nn.Module) -> list[nn.Module]:
    """The modules that run along the sequence by functions which are routed."""
    return [module for module in decoder.modules() if is_mixer(type(module)) or is_lightning(module)]


def _check_own_modules(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ``NotImplementedError`` for attention functions of users, which would be replaced, and for their modules
    that read other positions of this rank's share only."""
    chosen = decoder.config._attn_implementation
    for kind, functions in (("attention", AttentionInterface()), ("mask", AttentionMaskInterface())):
        function = None if "/" in str(chosen) else functions.get(chosen)  # with "/": a kernel of the hub
        if function is not None and is_foreign(inspect.unwrap(function)):
            raise NotImplementedError(
                f"attn_implementation={chosen!r} of {type(decoder).__name__} names a function of {kind} that was "
                f"registered ({function.__module__}.{function.__qualname__}) and would be replaced. Choose one of "
                "transformers' own, such as 'sdpa'; put a ContextParallel style on modules that call FlexAttention for "
                "functions of scores and masks"
            )
    check_own_forwards(decoder, chosen == "eager")
    head = model.get_output_embeddings()
    inside = list(head.modules()) if isinstance(head, nn.Module) else []
    for module in inside:
        does = "attends to positions" if isinstance(module, nn.MultiheadAttention) else why_mixing(module)
        if does is not None:
            raise NotImplementedError(
                f"the output layer of {type(model).__name__} has {type(module).__name__}, which {does}: those of this "
                "rank's share. Apply it to the gathered output of the model"
            )


def check_own_forwards(decoder: PreTrainedModel, eager: bool) -> None:
    """Raise ``NotImplementedError`` for modules of users, and forwards that they have put in the place of others, which
    attend to this rank's share or read other positions of it. ``eager``: the functions of eager attention, too."""
    if not decoder._can_set_attn_implementation():
        return
    for name, module in decoder.named_modules():
        named = f"module {name!r} ({type(module).__name__}) of {type(decoder).__name__}"
        multihead, own = isinstance(module, nn.MultiheadAttention), own_forward(module)
        source = "" if own is None else source_of(own)
        if _was_added(decoder, name) if multihead else _writes_attention(module, source):
            raise NotImplementedError(
                f"{named} computes attention by itself, over this rank's share. Let it call "
                "ALL_ATTENTION_FUNCTIONS.get_interface(...), as the attention of transformers' models does"
            )
        if SHIFTS.search(source) and not isinstance(module, PreTrainedModel):
            raise NotImplementedError(
                f"{named} has a forward ({own.__qualname__}) that reads other positions without attention (neighbours, "
                "or parts of the sequence), and would end at this rank's share. Use the one of its class"
            )
        function = in_file(module, EAGER) if eager else None
        if function is not None and not is_foreign(type(module)) and is_foreign(inspect.unwrap(function)):
            raise NotImplementedError(
                f"{EAGER} in the file of {named} is {function.__module__}.{function.__qualname__}, which would be "
                "replaced. Use that of transformers, or put a ContextParallel style on modules that call "
                "FlexAttention for functions of scores"
            )


def _was_added(decoder: nn.Module, name: str) -> bool:
    """True for an ``nn.MultiheadAttention`` of a user's, False for one of an encoder inside a decoder of
    transformers."""
    owner: Any = type(decoder.get_submodule(name.rpartition(".")[0]))
    return is_foreign(owner) or "MultiheadAttention" not in source_of(owner)


def has_attention(decoder: nn.Module) -> bool:
    """False for a decoder that consists of mixers only: it needs neither positions nor attention masks."""
    mixers = mixers_of(decoder)
    kinds = {type(module) for module in decoder.modules()} - {type(mixer) for mixer in mixers}
    return not mixers or any("Attention" in kind.__name__ for kind in kinds)


def unrouted_mixers(decoder: PreTrainedModel) -> list[str]:
    """The layers and modules that mix positions by something else than attention or a routed function."""
    modules = dict(decoder.named_modules())
    over_all_ranks = [*mixers_of(decoder), *(x for x in modules.values() if sparse.is_known(type(x)))]
    over_all_ranks += encoders_in(decoder)
    routed = {id(inner) for module in over_all_ranks for inner in module.modules()}
    mixing = [name for name in mixing_modules(decoder) if not any(id(x) in routed for x in modules[name].modules())]
    # A block or a model that contains another one of them is named after it.
    innermost = [x for x in mixing if not any(holds(x, y) for y in mixing)]
    kinds_of_modules = {type(modules[name]).__name__ for name in innermost}
    types = list(getattr(decoder.config, "layer_types", None) or ())
    lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == len(types)]
    layers = lists[0] if lists else [nn.Identity()] * len(types)
    kinds = {
        kind
        for kind, layer in zip(types, layers, strict=True)
        if kind not in LAYER_TYPES and not any(id(m) in routed for m in layer.modules())
        if kind != LAYER or not selects(layer, decoder)
        if not sparse.is_replaced(kind, layer)
    }
    return [f"layers of type {kind}" for kind in sorted(kinds)] or [
        f"modules {name}" for name in sorted(kinds_of_modules)
    ]


def _shifts(module: nn.Module) -> bool:
    """True for a module that reads neighbouring positions, or counts tokens (ESM, if it drops some)."""
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return max(module.kernel_size) > 1
    counts = getattr(module, "token_dropout", True)
    return bool(counts and SHIFTS.search(source_of(type(module).forward)))


def own_attention(decoder: nn.Module) -> list[nn.Module]:
    """The attention modules of a decoder whose forward is a user's; itself, if its own is and it has none by their
    names."""
    named = [
        module
        for module in decoder.modules()
        if any("Att" in x.__name__ for x in type(module).__mro__) and own_forward(module) is not None
    ]
    return named or ([decoder] if own_forward(decoder) is not None and not mixers_of(decoder) else [])


def _writes_attention(module: nn.Module, source: str) -> bool:
    """True if the source of a user's forward writes attention out, without transformers' AttentionInterface."""
    if not any("Att" in x.__name__ for x in type(module).__mro__) and "attention_mask" not in source:
        return False
    product = re.search(r"matmul\(|bmm\(|einsum\(| @ ", source)
    return "oftmax(" in source and product is not None and "get_interface(" not in source and "topk(" not in source


def masks_by_types(model: nn.Module) -> bool:
    """True if a model makes masks of the types of its tokens, in which the tokens of one image see each other."""
    return _says(model, _BY_TYPES)


def makes_by_types(decoder: nn.Module) -> bool:
    """True if a decoder makes these masks itself (HRM-Text): it is given a mask in its own hook."""
    return _BY_TYPES in source_of(type(decoder).forward)


_BY_TYPES = "block_sequence_ids"


def always_overlays(model: nn.Module) -> bool:
    """True if a model makes such masks of tokens without types, too, which are causal then (Gemma 4 unified)."""
    return _says(model, "block_sequence_ids = torch.full([*inputs_embeds.size()[:-1]], -1")


def _says(model: nn.Module, words: str) -> bool:
    """True if the forward of a model, or of a part of it, has these words."""
    return any(words in source_of(type(module).forward) for module in (model, *model.children()))


def makes_mask(model: nn.Module) -> bool:
    """True if a model makes a mask of ones for a batch without one."""
    return "attention_mask = torch.ones_like(input_ids)" in source_of(type(model).forward)


def masks_outputs(model: nn.Module) -> bool:
    """True if a model sets its outputs of padding to zero by the mask that it is given (ColPali)."""
    return _MASKS.search(source_of(type(model).forward)) is not None


_MASKS = re.compile(r"(\*|masked_fill\(|where\()\s*~?attention_mask[.\[]")
_REDUCES = re.compile(
    r"\.(sum|mean)\((dim=|axis=)?(1|-2)\b|torch\.(sum|mean)\([^\n]*, *(dim=|axis=)?(1|-2)\b|attention_mask\S*\.sum\("
    r"|einsum|\.(flip|argmax|cumsum)\("
)
"""Code that makes a row of several, or finds one."""


def sees_behind(decoder: Any) -> bool:
    """True for an encoder, whose tokens see those behind them: its padding sees the tokens of its row."""
    source = source_of(type(decoder).forward)
    if "config.use_bidirectional_attention" in source and decoder.config.use_bidirectional_attention:
        return True
    if "create_causal_mask" in source and ("config.is_decoder" not in source or decoder.config.is_decoder):
        return False
    return "create_bidirectional_mask" in source


def position_maker(decoder: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The function by which a decoder makes position ids of the ids of tokens, as RoBERTa does, or None."""
    name = "create_position_ids_from_input_ids"
    for module in decoder.modules():
        made = getattr(module, name, None)
        if made is None and f" {name}(" in source_of(type(module).forward):  # ESM: a function of its file
            made = in_file(module, name)
        table = getattr(module, "position_embedding_type", "absolute") == "absolute"  # rotary ones do not read them
        if made is not None and table:
            return partial(made, padding_idx=cast(Any, module).padding_idx)
    return None


def counts_mask(decoder: nn.Module) -> bool:
    """True if a decoder makes position ids of the mask, as OPT's does: with padding they are not 0, 1, 2 ..."""
    return "cumsum(" in source_of(type(decoder).forward)


def check_inputs(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise for arguments of a model's forward that its head would apply to this rank's share only."""
    name = type(model).__name__
    kept = kwargs.get("logits_to_keep")
    if kept is not None and (isinstance(kept, Tensor) or kept != 0):
        raise NotImplementedError(
            f"{name} got logits_to_keep={kept if isinstance(kept, int) else 'a tensor'}, as generate passes it: each "
            "rank would keep the last positions of its own share. Leave it out; to generate call "
            "hyper_cp.hf.generate(model, handler, input_ids). (Phi 3 drops the cache of generate where a text passes "
            "original_max_position_embeddings: generate in context_parallel_mesh(model, a mesh of one rank))"
        )
    media = [key for key, x in kwargs.items() if x is not None and is_media(key, x)]
    if media:
        raise NotImplementedError(
            f"{name} got {', '.join(media)}, all of which would be inserted into this rank's share. Pass the whole "
            "batch through prepare_batch: images and audio are shared out for models that encode them in "
            "get_image_features and get_audio_features. For others compute inputs_embeds (and position_ids) of the "
            "whole sequence first, and pass these to it"
        )


def check_padding(decoder: Any, mixers: list[nn.Module], layout: str, batch: PreparedBatch, tokens: Tensor) -> None:
    """Raise ``ValueError`` for a batch with padding before tokens, of which mixers would make something else than on
    one device."""
    name, config = type(decoder).__name__, decoder.config
    if mixers and tokens.shape[1] == 1 and (batch.tokens is not None or batch.keys is not None):
        raise ValueError(
            f"{name} got one token on each rank, of a batch with padding before tokens. transformers takes one token "
            "for a step of decoding, in which mixers do not set padding to zero. Use fewer ranks, or a longer sequence"
        )
    linear = {(type(mixer).__name__, x) for mixer in mixers for x in mixer.modules() if isinstance(x, nn.Linear)}
    biased = {kind for kind, x in linear if x.bias is not None and x.in_features == config.hidden_size}
    if biased and batch.tokens is not None and by_documents(layout):
        raise ValueError(
            f"layout={layout!r} with padding before tokens: {', '.join(sorted(biased))} of {name} makes a bias of "
            "padding, and convolves it with the tokens behind it, but in this layout padding is a document of its own. "
            'Pad rows at their end, or use layout="contiguous" or "head_tail"'
        )


def check_dropped_layers(stacks: Iterable[nn.Module]) -> None:
    """Raise ``NotImplementedError`` if a stack of layers skips some at random in this forward."""
    for stack in stacks:
        if stack.training and (rate := cast(float, stack.layerdrop)):
            raise NotImplementedError(
                f"{type(stack).__name__} skips layers at random in training (layerdrop={rate}). Ranks that draw other "
                "numbers would skip other layers, and exchange keys of different ones. Set layerdrop (or "
                "decoder_layerdrop, encoder_layerdrop) to 0.0 in the config before the model is made"
            )


_TOLD_APART = 8
"""Numbers of each embedding that are compared."""


def check_dispatched(handler: ContextParallelHandler, tokens: Tensor, name: str) -> None:
    """Raise ``ValueError`` on every rank if all ranks of the mesh hold the same ``tokens`` ``[B, S/n]``, or embeddings
    of them ``[B, S/n, D]``. One small communication."""
    if tokens.numel() < 2:
        return
    shape, tokens = (*tokens.shape[:2],), tokens.detach() if tokens.ndim < 3 else tokens.detach()[..., :_TOLD_APART]
    # Shares of one repeated token may be equal: padding, or numbers of a condition that all tokens of a row have.
    told = int(digest(contents_of(tokens)), 16) // 2 if bool((tokens != tokens[:, :1]).any()) else -1
    rows = by_rank(handler.mesh, torch.tensor([told], device=tokens.device))
    if told >= 0 and bool((rows == rows[0]).all()):
        raise ValueError(
            f"{name} got the same {shape} tokens on all {handler.cp.size} ranks. They must be shares "
            "of one sequence. Pass the whole batch through prepare_batch (or handler.dispatch); to generate call "
            "hyper_cp.hf.generate"
        )

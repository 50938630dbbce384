"""Generation with prepared models over a cache that is split over the ranks: the tokens of one device."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, ContextParallelHandler, context_parallel_mesh, split_cp_mesh
from tests.harness.hf_causal import tiny_causal
from tests.harness.hf_models import InDouble, LowestFirst, generate, make, prepare_model, tokens
from tests.harness.oracle import relative_error
from tests.harness.ranks import check_errors, errors_of, on_ranks

pytest.importorskip("transformers")

MADE = ("llama", "qwen3", "gemma3", "deepseek_v3")
MODES: dict[str, dict[str, Any]] = {
    "contiguous": {"ulysses_degree": 1},
    "head_tail": {"ulysses_degree": 1, "kv_exchange": "ring"},
    "per_document": {"ulysses_degree": 1, "kv_exchange": "needed"},
    "balanced": {"ulysses_degree": 1},
    "auto": {"ulysses_degree": 1},
}
LENGTH, NEW = 19, 4
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@cache
def model_of(name: str) -> Any:
    return (make(name) if name in MADE else tiny_causal(name)).eval()


def prepared(name: str, layout: str = "head_tail", **mode: Any) -> tuple[Any, ContextParallelHandler]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    style = ContextParallel(layout=layout, **(mode or MODES[layout]))
    return prepare_model(copy.deepcopy(model_of(name)), mesh, style=style), ContextParallelHandler(mesh, style)


def generated(model: Any, handler: ContextParallelHandler | None, ids: Tensor, **options: Any) -> Any:
    """The tokens that a model writes on one device, or with a handler on all ranks."""
    # Selections compare scores in single precision, and transformers takes any of equal ones.
    selects = hasattr(model.config, "index_topk")
    with LowestFirst() if selects else InDouble():
        if handler is None:
            return model.generate(ids, **{**GREEDY, **options})
        return generate(model, handler, ids, **{**GREEDY, **options})


def left_padded() -> dict[str, Tensor]:
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :5] = 0
    return {"attention_mask": mask}


@on_ranks
def written(names: list[str], layout: str, padded: bool) -> dict[str, tuple[bool, float]]:
    """True for the same tokens, and the largest relative error of the logits of a new token."""
    found, ids = {}, tokens(LENGTH)
    more = {"return_dict_in_generate": True, "output_logits": True, **(left_padded() if padded else {})}
    for name in names:
        want, got = generated(model_of(name), None, ids, **more), generated(*prepared(name, layout), ids, **more)
        error = max(relative_error(a, b) for a, b in zip(got.logits, want.logits, strict=True))
        found[name] = torch.equal(got.sequences, want.sequences), error
    return found


@pytest.mark.parametrize(
    ("world", "layout", "padded", "names"),
    [
        (2, "contiguous", False, "llama gemma3 deepseek_v3"),
        (2, "per_document", True, "qwen3 gemma2 gpt_oss deepseek_v32"),
        (3, "balanced", False, "gemma3 deepseek_v32"),
        (3, "auto", True, "llama gpt_oss"),
        (4, "head_tail", False, "deepseek_v3"),
        (4, "head_tail", True, "gemma3"),
    ],
)
def test_greedy_tokens_are_those_of_one_device(ranks: Any, world: int, layout: str, padded: bool, names: str) -> None:
    """Every model, and every layout."""
    for found in ranks(world, written, names.split(), layout, padded):
        assert all(same for same, _ in found.values()), found
        # Without the mode InDouble, norms compute in single precision.
        assert all(error <= (1e-5 if "v32" in name else 1e-9) for name, (_, error) in found.items()), found


@on_ranks
def with_mask_of(dtype: torch.dtype) -> float:
    """The error of logits with padding masks of another dtype, also in a further turn."""
    one, (model, handler), ids = model_of("llama"), prepared("llama"), tokens(LENGTH)
    mask, errors, cache = left_padded()["attention_mask"], [], {}
    more = {"return_dict_in_generate": True, "output_logits": True}
    for _ in range(2):
        got = generated(model, handler, ids, attention_mask=mask.to(dtype), **more, **cache)
        want = generated(one, None, ids, attention_mask=mask, **more)
        errors += [relative_error(a, b) for a, b in zip(got.logits, want.logits, strict=True)]
        ids, cache = torch.cat([got.sequences, tokens(5)], 1), {"past_key_values": got.past_key_values}
        mask = torch.nn.functional.pad(mask, (0, NEW + 5), value=1)
    return max(errors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_masks_of_other_dtypes(ranks: Any, dtype: torch.dtype) -> None:
    assert max(ranks(2, with_mask_of, dtype)) < 1e-9


# --------------------------------------------------------------------------- options of generate


@on_ranks
def options_of_generate() -> dict[str, bool]:
    from transformers import StoppingCriteria, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    class Listed(BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def put(self, value: Tensor) -> None:
            self.seen.append(value.flatten())

        def end(self) -> None:
            self.seen.append(torch.tensor([-1]))

    class Stops(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= LENGTH + 3)

    ids, one, found = tokens(LENGTH), model_of("gemma3"), {}
    model, handler = prepared("gemma3", ulysses_degree=None)

    def same(name: str, *, rows: Tensor = ids, **options: Any) -> None:
        want = generated(one, None, rows, **{k: x() if callable(x) else x for k, x in options.items()})
        got = generated(model, handler, rows, **{k: x() if callable(x) else x for k, x in options.items()})
        found[name] = torch.equal(got, want)

    same("end of text", eos_token_id=[3, 5, 7, 9, 11, 13, 15, 17, 19])
    same("stopping criteria", stopping_criteria=lambda: StoppingCriteriaList([Stops()]))
    same("beams", num_beams=3)
    for x in (one, model):  # as configs of the Hub have it
        x.generation_config.cache_implementation = "hybrid"
    same("hybrid cache")
    for x in (one, model):
        x.generation_config.cache_implementation = None
    same("copies", num_return_sequences=1, repetition_penalty=1.3)
    same("embeddings", rows=ids, inputs_embeds=one.get_input_embeddings()(ids).detach())
    same("in chunks", prefill_chunk_size=8)
    same("a long text", max_new_tokens=12)
    streams = [Listed(), Listed()]
    generated(one, None, ids[:1], streamer=streams[0])
    generated(model, handler, ids[:1], streamer=streams[1])
    found["streamer"] = torch.equal(*(torch.cat(x.seen) for x in streams))

    # Two turns of a conversation, whose second has several tokens, and padding of its own.
    for name, more in (("second turn", {}), ("padded second turn", left_padded())):
        first = generated(model, handler, ids, return_dict_in_generate=True, **more)
        longer, mask = torch.cat([first.sequences, tokens(5)], 1), {}
        if more:
            mask["attention_mask"] = torch.nn.functional.pad(more["attention_mask"], (0, NEW + 5), value=1)
            mask["attention_mask"][1, LENGTH + NEW] = 0
        second = generated(model, handler, longer, past_key_values=first.past_key_values, **mask)
        found[name] = torch.equal(second, generated(one, None, longer, **mask))
        found[f"{name}, memory"] = first.past_key_values.nbytes > 0

    # A mask that hides tokens in the cache: padding behind a text that has ended, and some of the prompt.
    hidden = torch.ones(2, LENGTH + NEW + 5, dtype=torch.int64)
    hidden[0, LENGTH + 1 : LENGTH + NEW] = hidden[1, 3:9] = 0
    turns = []
    for x in ((model, handler), (one, None)):
        first = generated(*x, ids, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, tokens(5)], 1)
        more = {"attention_mask": hidden, "return_dict_in_generate": True, "output_logits": True}
        turns.append(generated(*x, longer, past_key_values=first.past_key_values, **more))
    found["hidden"] = torch.equal(turns[0].sequences, turns[1].sequences)
    errors = [relative_error(a, b) for a, b in zip(turns[0].logits, turns[1].logits, strict=True)]
    found["logits of hidden"] = max(errors) <= 1e-9

    # Another degree, and the model of one rank.
    family = split_cp_mesh(handler.mesh)
    with context_parallel_mesh(model, family.cp(1)) as alone:
        found["one rank"] = torch.equal(generated(model, alone, ids), generated(one, None, ids))
    return found


def test_options_of_generate_and_further_turns(ranks: Any) -> None:
    for found in ranks(2, options_of_generate):
        assert len(found) == 16 and all(found.values()), found


@on_ranks
def alone(name: str) -> dict[str, bool]:
    """True for the tokens of one device, where each rank generates by itself."""
    one, found, (model, handler) = model_of(name), {}, prepared(name)
    copied = copy.deepcopy(model)  # with a mesh of its own, which stays that of both ranks
    calls: dict[str, dict[str, Any]] = {kind: {"cache_implementation": kind} for kind in ("static", "sliding_window")}
    calls["padded"] = {"cache_implementation": "static", **left_padded()}
    calls["lookup"] = {"prompt_lookup_num_tokens": 2, "rows": slice(1)}
    calls["guided"], calls["uncached"] = {"guidance_scale": 1.5}, {"use_cache": False}
    calls["hidden"] = {"output_hidden_states": True, "max_time": 1000.0}
    for call, options in calls.items():
        ids = tokens(LENGTH)[options.pop("rows", slice(None))]
        want = generated(one, None, ids, **options)
        with context_parallel_mesh(model, split_cp_mesh(handler.mesh).cp(1)) as own:
            found[call] = torch.equal(generated(model, own, ids, **options), want)
            with InDouble():
                found[f"{call}, model.generate"] = torch.equal(model.generate(ids, **GREEDY, **options), want)
    # Of what was made for one rank nothing remains for two.
    for x in (model, copied):
        found["together"] = torch.equal(generated(x, handler, tokens(LENGTH)), generated(one, None, tokens(LENGTH)))
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_on_one_rank_generate_takes_all_that_the_model_takes(ranks: Any, name: str) -> None:
    """transformers makes the masks of caches of fixed length before the forward, with the name of the attention that
    runs over the ranks."""
    for found in ranks(2, alone, name):
        assert len(found) == 15 and all(found.values()), found


RECURRENT = ("qwen3_next", "qwen3_5_text", "kimi_linear", "olmo_hybrid")


@on_ranks
def kept_caches() -> dict[str, Any]:
    """True for the tokens of one device, after changes that transformers' own caches allow."""
    ids, more, found = tokens(LENGTH), tokens(5), {}
    named = {"return_dict_in_generate": True}
    runs: tuple[tuple[Any, Any], ...] = ((model_of("llama"), None), prepared("llama"))

    def turns(change: Callable[[Any], Any], rows: Tensor, first: Any = torch.no_grad) -> bool:
        """The tokens of a second turn, once the cache of the first one has been changed."""
        written = []
        for model, handler in runs:
            with first():
                turn = generated(model, handler, ids, **named)
            cache = turn.past_key_values
            change(cache)
            with torch.no_grad():
                going_on = torch.cat([turn.sequences.clone()[rows], more[rows]], 1)
                written.append(generated(model, handler, going_on, past_key_values=cache))
        return torch.equal(*written)

    both, last_first = torch.arange(2), torch.tensor([1, 0])
    found["after inference_mode"] = turns(lambda cache: None, both, torch.inference_mode)
    found["rows chosen"] = turns(lambda cache: cache.batch_select_indices(last_first), last_first)
    found["rows repeated"] = turns(lambda cache: cache.batch_repeat_interleave(2), both.repeat_interleave(2))
    gc.collect()
    gc.disable()
    try:
        held = ref(generated(*runs[1], ids, **named).past_key_values._split[0].split)
        found["it lives no longer than it is held"] = held() is None
    finally:
        gc.enable()
    return found


def test_caches_of_further_turns(ranks: Any) -> None:
    for found in ranks(2, kept_caches):
        assert all(found.values()), found


@on_ranks
def every_recurrent_model(names: tuple[str, ...], layout: str) -> dict[str, bool | float]:
    """True for the same tokens, and the largest relative error of logits. Prompts split evenly, or leave some rest."""
    found: dict[str, bool | float] = {}
    listed = {"return_dict_in_generate": True, "output_logits": True}
    for name in names:
        one, (model, handler) = model_of(name), prepared(name, layout)
        first = name == names[0]
        for length, padded in ((24, False), (LENGTH, LENGTH - 1), (LENGTH, True)) if first else ((LENGTH, True),):
            more = {**listed, **(left_padded() if padded else {})}
            if padded > 1:  # a row begins among the tokens that are not shared
                more["attention_mask"][0, :padded] = 0
            want, got = generated(one, None, ids := tokens(length), **more), generated(model, handler, ids, **more)
            case = f"{name}, {length}, {padded}"
            found[case] = torch.equal(got.sequences, want.sequences)
            found[f"{case}, error"] = max(relative_error(a, b) for a, b in zip(got.logits, want.logits, strict=True))
        if not first or handler.cp.size > 2:
            continue
        found[f"{name}, beams"] = torch.equal(
            *(generated(*x, ids, num_beams=3) for x in ((model, handler), (one, None)))
        )
        longer, cache = torch.cat([got.sequences, tokens(5)], 1), got.past_key_values
        more = {"attention_mask": torch.nn.functional.pad(more["attention_mask"], (0, NEW + 5), value=1)}
        second = generated(model, handler, longer, past_key_values=cache, **more)
        found[f"{name}, second turn"] = torch.equal(second, generated(one, None, longer, **more))
    return found


@pytest.mark.parametrize(
    ("world", "layout", "names"),
    [(2, "contiguous", RECURRENT[1:]), (2, "head_tail", RECURRENT[:1]), (3, "balanced", RECURRENT[:1])],
)
def test_recurrent_layers_go_on_from_the_states_of_the_prompt(
    ranks: Any, world: int, layout: str, names: tuple[str, ...]
) -> None:
    """The first of these models with prompts of several lengths; on two ranks with beams and a second turn, too."""
    for found in ranks(world, every_recurrent_model, names, layout):
        bad = {case: x for case, x in found.items() if (x is False if isinstance(x, bool) else not x <= 1e-9)}
        assert not bad, bad


@on_ranks
def routed() -> bool:
    """A model whose config asks for the loss of its router, which nobody wants of new tokens."""
    model, handler = prepared("mixtral")
    model.config.output_router_logits = True
    return torch.equal(
        *(generated(*x, tokens(LENGTH), **left_padded()) for x in ((model, handler), (model_of("mixtral"), None)))
    )


def test_a_loss_of_routers_is_left_out(ranks: Any) -> None:
    assert all(ranks(2, routed))


@on_ranks
def sampled() -> tuple[bool, Tensor, Tensor]:
    """Ranks begin with random states of their own; the tokens are those of one device with that of the first."""
    ids, sampling = tokens(LENGTH), {"do_sample": True, "temperature": 3.0}
    one, (model, handler) = model_of("qwen3"), prepared("qwen3")
    torch.manual_seed(0)
    want = [generated(one, None, ids, **sampling) for _ in range(2)]
    torch.manual_seed(dist.get_rank())
    got = [generated(model, handler, ids, **sampling) for _ in range(2)]
    return all(map(torch.equal, got, want)), got[0], torch.rand(1)


def test_all_ranks_sample_the_same_tokens(ranks: Any) -> None:
    (same, first, a), (_, second, b) = ranks(2, sampled)
    torch.manual_seed(1)
    assert same and torch.equal(first, second) and torch.equal(b, torch.rand(1)) and not torch.equal(a, b)


@on_ranks
def seeded_alike() -> tuple[Tensor, Tensor]:
    """Numbers that one device and a rank draw behind a text, of the seed that all ranks have."""
    found = []
    for made in ((model_of("qwen3"), None), prepared("qwen3")):
        torch.manual_seed(0)
        generated(*made, tokens(LENGTH), do_sample=True)
        found.append(torch.rand(4))
    return found[0], found[1]


def test_ranks_with_one_seed_draw_alike_behind_a_text(ranks: Any) -> None:
    """Samplers that all ranks seed alike drew other batches from then on."""
    for want, got in ranks(2, seeded_alike):
        assert torch.equal(want, got)


# --------------------------------------------------------------------------- wrong use


@on_ranks
def wrong_use() -> dict[str, str]:
    from transformers import DynamicCache, GenerationConfig

    from hyper_cp.integrations.huggingface.decoding import SplitLayer

    ids, rank = tokens(8), dist.get_rank()
    model, handler = prepared("llama")

    def on_a_recurrent_model() -> None:
        mesh, style = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), ContextParallel(ulysses_degree=1)
        made = prepare_model(copy.deepcopy(tiny_causal("mamba2")), mesh, style=style)
        generated(made, ContextParallelHandler(mesh, style), ids)

    def training() -> None:
        generated(prepared("llama")[0].train(), handler, ids)

    def without_a_cache() -> None:
        made, own = prepared("llama")
        made.generation_config.use_cache = False
        generated(made, own, ids)

    def in_a_block() -> None:
        with handler.documents([0, 3, 8]):
            generated(model, handler, ids)

    first = generated(model, handler, ids, return_dict_in_generate=True)
    kept = first.past_key_values

    def on_another_mesh() -> None:
        with torch.no_grad(), context_parallel_mesh(model, split_cp_mesh(handler.mesh).cp(1)):
            model(ids[:, :1], past_key_values=kept)

    def interrupted() -> None:
        made, own = prepared("llama")
        found = generated(made, own, ids, return_dict_in_generate=True)
        hook = made.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with torch.no_grad(), suppress(ZeroDivisionError):
            made(ids[:, :1], past_key_values=found.past_key_values)
        hook.remove()
        generated(made, own, torch.cat([found.sequences, ids[:, :1]], 1), past_key_values=found.past_key_values)

    def scales_its_keys(new: Callable[..., Any]) -> None:
        """As an attention that changes what its cache returns."""
        add = SplitLayer.update

        def update(layer: SplitLayer, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            key, value = add(layer, key, value, *args, **kwargs)
            return new(key), value

        with mock.patch.object(SplitLayer, "update", update):
            generated(*prepared("llama"), ids)

    def masked(hidden: slice, shown: bool) -> None:
        """A prompt with padding, which a second turn shows."""
        mask = torch.ones(2, 8, dtype=torch.int64)
        mask[1, hidden] = 0
        found = generated(model, handler, ids, attention_mask=mask, return_dict_in_generate=True)
        assert shown
        generated(model, handler, torch.cat([found.sequences, ids], 1), past_key_values=found.past_key_values)

    run = partial(generated, model, handler, ids)
    packed = torch.arange(8).remainder(5)[None].expand(2, -1)
    negative = {"guidance_scale": 1.5, "negative_prompt_ids": ids}
    states = {"output_hidden_states": True, "return_dict_in_generate": True}
    differ = "generate: the ranks of the cp mesh of 2 ranks"
    return errors_of(
        {
            "RuntimeError: LlamaForCausalLM is in training mode": training,
            "NotImplementedError: generate got max_time": lambda: run(max_time=1.0),
            f"{differ}(?# prompts)": lambda: generated(model, handler, ids + rank),
            f"{differ}(?# numbers)": lambda: run(max_new_tokens=3 + rank),
            f"{differ}(?# lists)": lambda: run(suppress_tokens=[3, 4 + rank]),
            f"{differ}(?# options in a config)": lambda: run(
                generation_config=GenerationConfig(repetition_penalty=1.5 + rank)
            ),
            "NotImplementedError: LlamaAttention attends to other keys": lambda: scales_its_keys(lambda x: x * 3),
            "NotImplementedError: LlamaAttention attends to other keys(?# in place)": lambda: scales_its_keys(
                lambda x: x.mul_(3)
            ),
            "generate got use_cache=False": lambda: run(generation_config=GenerationConfig(use_cache=False)),
            "generate got use_cache=False(?# of the model)": without_a_cache,
            "NotImplementedError: generate got output_hidden_states": lambda: run(**states),
            "NotImplementedError: generate got guidance_scale": lambda: run(**negative),
            "TypeError: past_key_values is a DynamicCache": lambda: run(
                past_key_values=DynamicCache(config=model.config)
            ),
            "NotImplementedError: LlamaForCausalLM got logits_to_keep=1, as generate passes it": lambda: model.generate(
                ids, max_new_tokens=2
            ),
            "the prompt has 1 tokens, fewer than the cp mesh of 2 ranks": lambda: generated(model, handler, ids[:, :1]),
            "the prompt has 3 tokens. With recurrent layers, layout='head_tail' and 2 ranks": lambda: generated(
                *prepared("qwen3_next"), ids[:, :3]
            ),
            "NotImplementedError: generate got prefill_chunk_size=4 and a prompt with padding": lambda: generated(
                *prepared("qwen3_next"), ids, prefill_chunk_size=4, attention_mask=(torch.arange(8) > 4).expand(2, -1)
            ),
            "NotImplementedError: the prompt has documents that end at": lambda: run(position_ids=packed),
            "NotImplementedError: a prompt is read inside a handler.documents block": in_a_block,
            "LlamaForCausalLM runs on the mesh": on_another_mesh,
            "RuntimeError: LlamaForCausalLM runs with a split cache with gradients enabled": lambda: model(
                ids[:, :1], past_key_values=kept
            ),
            "RuntimeError: LlamaForCausalLM got a split cache in whose last forward an exception": interrupted,
            "input_ids has 8 tokens, and the cache 11": lambda: run(past_key_values=kept),
            r"attention_mask ends with padding in rows \[1\]": lambda: masked(slice(-2, None), False),
            "attention_mask shows positions that were padding": lambda: masked(slice(2), True),
            "NotImplementedError: Mamba2ForCausalLM keeps other things than keys and values": on_a_recurrent_model,
        }
    )


def test_wrong_use_raises_on_every_rank_and_says_why(ranks: Any) -> None:
    check_errors(ranks(2, wrong_use))


# --------------------------------------------------------------------------- every type


@on_ranks
def outcomes(kinds: list[str]) -> dict[str, tuple[str, str]]:
    """For each model type that is prepared: "exact", "WRONG", "refused" with the reason, or another error."""
    found = {}
    mesh, style = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), ContextParallel(**MODES["head_tail"])
    for kind in kinds:
        try:
            model = tiny_causal(kind).eval()
            made = prepare_model(copy.deepcopy(model), mesh, style=style)
            want = generated(model, None, ids := tokens(17), use_cache=True)
        except Exception:  # it is not prepared, or does not write by itself
            continue
        try:
            same = torch.equal(generated(made, ContextParallelHandler(mesh, style), ids, use_cache=True), want)
            found[kind] = "exact" if same else "WRONG", ""
        except Exception as error:
            found[kind] = "refused" if isinstance(error, NotImplementedError) else "CRASH", str(error)
    return found


@pytest.mark.slow
def test_every_causal_type_writes_as_one_device_does_or_is_refused(ranks: Any) -> None:
    """Some types; all with HYPER_CP_WRITE_README=1."""
    from tests.integrations.test_every_causal_model import ALWAYS, tried

    kinds = tried() if "HYPER_CP_WRITE_README" in os.environ else sorted({*tried()[::6], *ALWAYS})
    for found in ranks(2, outcomes, kinds, timeout=600):
        assert not {kind: x for kind, x in found.items() if x[0] not in ("exact", "refused")}
        exact = sum(outcome == "exact" for outcome, _ in found.values())
        least = len(kinds) / 196  # of all types, 120 and 165
        assert exact >= 120 * least and len(found) >= 165 * least, (exact, len(found), len(kinds))


@on_ranks
def from_other_logits() -> bool:
    """True for the tokens of one device, though rank 1 computes other logits: kernels that a process tunes for itself
    round in other ways than those of its neighbours."""
    ids = tokens(LENGTH)
    model, handler = prepared("llama")
    if dist.get_rank():
        model.lm_head.register_forward_hook(lambda module, args, out: -out)
    return torch.equal(generated(model, handler, ids), generated(model_of("llama"), None, ids))


def test_ranks_write_the_tokens_of_the_first_one(ranks: Any) -> None:
    """The last token of the prompt is on the first rank in this layout, too."""
    assert ranks(2, from_other_logits) == [True, True]

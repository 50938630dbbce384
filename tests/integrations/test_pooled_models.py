"""Models with heads that pool: copies, adapters and outputs as tuples give what one device gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from hyper_cp import ContextParallel, ContextParallelHandler
from tests.harness.hf_causal import CAUSAL, CLASSES, SEQ2SEQ, random_model, text_config, tiny_causal
from tests.harness.hf_models import SMALL, InDouble, gradients, prepare_batch, prepare_model, tokens
from tests.harness.oracle import absolute_error
from tests.harness.ranks import error_of, on_ranks, sum_over_ranks

pytest.importorskip("transformers")


def batch_of() -> dict[str, Tensor]:
    mask = torch.ones(2, 22, dtype=torch.int64)
    mask[1, -5:] = 0
    return {"input_ids": tokens(22) * mask, "attention_mask": mask, "labels": torch.tensor([0, 1])}


def prepared(model: Any, layout: str = "head_tail") -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return prepare_model(copy.deepcopy(model), mesh, style=ContextParallel(ulysses_degree=1, layout=layout))


def error(model: Any, made: Any, batch: dict[str, Tensor] | None = None, **options: Any) -> float:
    """The largest error of the loss, of the logits and of a gradient of a prepared model."""
    batch = batch_of() if batch is None else batch
    with InDouble():
        want = model(**batch)
        model.zero_grad()
        want.loss.backward()
        loss, logits = made(**batch, **options)[:2]
        made.zero_grad()
        loss.backward()
    total, *grads = sum_over_ranks(loss, *gradients(made))
    wanted = want.start_logits if "start_logits" in want else want.logits
    pairs = [(total, want.loss), (logits, wanted), *zip(grads, gradients(model), strict=True)]
    return max(absolute_error(a, b) for a, b in pairs)


@on_ranks
def copies() -> dict[str, float]:
    """Errors of a copy of BERT, and of copies of its pooler that PEFT makes, before and after it is prepared."""
    import peft

    model = tiny_causal("bert", CLASSES)
    found = {"copy": error(model, copy.deepcopy(prepared(model)))}
    config = peft.LoraConfig(
        target_modules=["query"], init_lora_weights=False, modules_to_save=["pooler", "classifier"]
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config).double()
    after = peft.get_peft_model(prepared(model), config).double()
    after.load_state_dict(adapted.state_dict())
    found |= {"adapted": error(adapted, prepared(adapted)), "adapters after": error(adapted, after)}
    found["their copy"] = error(adapted, copy.deepcopy(after))
    return found


def test_copies_of_poolers_gather_what_their_own_model_has_split(ranks: Any) -> None:
    pytest.importorskip("peft")
    for found in ranks(2, copies):
        assert len(found) == 4 and max(found.values()) <= 1e-10, found


def two_losses() -> float:
    """The largest error of a model with a loss of tokens and one of choices, in a tuple."""
    import transformers as hf

    sizes = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "num_labels": 1}
    model = hf.GPT2DoubleHeadsModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).double().eval()
    places = {"mc_token_ids": torch.tensor([21, 3]), "mc_labels": torch.tensor(1)}
    batch = {"input_ids": tokens(22), "labels": tokens(22), **places, "use_cache": False}
    with InDouble(), torch.no_grad():
        want = model(**batch, return_dict=False)[:2]
        found = sum_over_ranks(*prepared(model)(**batch, return_dict=False)[:2])
    return max(absolute_error(a, b) for a, b in zip(found, want, strict=True))


@on_ranks
def tuples() -> list[float]:
    """Errors of losses in tuples: of a whole batch on every rank, and of an encoder-decoder."""
    model = tiny_causal("llama", CLASSES)
    made = prepared(model)
    found = [error(model, made, return_dict=False), error(model, made), two_losses()]
    model, ids = tiny_causal("bart", SEQ2SEQ), tokens(22)
    batch, made = {"input_ids": ids, "labels": ids.flip(1)[:, :19].clone()}, prepared(model)
    with InDouble(), torch.no_grad():
        want = model(**batch)[0]
        return [*found, *(absolute_error(made(**batch, **x)[0], want) for x in ({}, {"return_dict": False}))]


@on_ranks
def states_of_layers(kind: str, return_dict: bool) -> float:
    """The largest error of the states of each layer, and of gradients of a loss of them."""
    model, batch = tiny_causal(kind, CLASSES), {"input_ids": tokens(22), "labels": torch.tensor([0, 1])}
    made = prepared(model)

    def step(model: Any) -> tuple[Any, list[Tensor]]:
        model.zero_grad()
        output = model(**batch, output_hidden_states=True, return_dict=return_dict)
        loss, states = (output.loss, output.hidden_states) if return_dict else (output[0], output[-1])
        ranks = dist.get_world_size() if model is made else 1
        (loss + sum(x.square().mean() for x in states) / ranks).backward()
        return states, gradients(model)

    with InDouble():
        want, found = step(model), step(made)
    pairs = [*zip(found[0], want[0], strict=True), *zip(sum_over_ranks(*found[1]), want[1], strict=True)]
    return max(absolute_error(a, b) for a, b in pairs)


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_states_of_layers_are_those_of_the_whole_sequence(ranks: Any, kind: str, return_dict: bool) -> None:
    assert max(ranks(2, states_of_layers, kind, return_dict)) <= 1e-10


def test_losses_in_tuples(ranks: Any) -> None:
    for found in ranks(2, tuples):
        assert len(found) == 5 and max(found) <= 1e-10, found


@on_ranks
def padding_is_pooled() -> list[float]:
    """Errors of a head that takes padding for the last token: that of embeddings, of unknown ids, and of a row of
    nothing but padding beside rows without any."""
    model, batch = tiny_causal("llama", CLASSES), batch_of()
    unknown = batch["input_ids"] + 1 - batch["attention_mask"]
    found = [error(model, prepared(model), {**batch, "input_ids": unknown})]
    empty = torch.ones_like(unknown)
    empty[-1] = 0
    found.append(error(model, prepared(model), {**batch, "input_ids": unknown * empty, "attention_mask": empty}))
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    return [*found, error(model, prepared(model), batch)]


def test_padding_that_a_head_takes_for_a_token(ranks: Any) -> None:
    for found in ranks(2, padding_is_pooled):
        assert len(found) == 3 and max(found) <= 1e-10, found


@on_ranks
def rotary_and_pads() -> list[float]:
    """Errors of ESM with rotary positions, which count padding as any token: rows padded on either side."""
    config = copy.deepcopy(tiny_causal("esm", CLASSES).config)
    config.position_embedding_type, batch = "rotary", batch_of()
    from transformers import EsmForSequenceClassification

    model = random_model(EsmForSequenceClassification, config)
    ids = batch["input_ids"].where(batch["attention_mask"] == 1, config.pad_token_id)
    left = {**batch, "input_ids": ids.flip(1), "attention_mask": batch["attention_mask"].flip(1)}
    return [error(model, prepared(model), x) for x in ({**batch, "input_ids": ids}, left)]


def test_rotary_positions_are_not_made_of_ids(ranks: Any) -> None:
    for found in ranks(2, rotary_and_pads):
        assert max(found) <= 1e-10, found


@on_ranks
def padding_is_first(kind: str) -> tuple[float, str]:
    """The error of a decoder whose pooler takes the first token, which is padding; and what it raises."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(7)
    config = copy.deepcopy(tiny_causal(kind, CLASSES).config)
    config.is_decoder = True
    model = AutoModelForSequenceClassification.from_config(config).double().eval()
    mask, found = batch_of()["attention_mask"].flip(1), [0.0]
    batches = [{**batch_of(), "attention_mask": x} for x in (mask, mask.bool())]
    refusal = error_of(lambda: found.extend(error(model, prepared(model), batch) for batch in batches))
    return max(found), refusal


def test_padding_that_a_pooler_takes_for_the_first_token(ranks: Any) -> None:
    for found, refusal in ranks(2, padding_is_first, "bert"):
        assert found <= 1e-10 and not refusal, (found, refusal)
    for _, refusal in ranks(2, padding_is_first, "megatron-bert"):  # eager attention alone
        assert "padding that sees no token is read, by a head" in refusal


@on_ranks
def answers(kind: str, layouts: list[str]) -> list[float]:
    """Errors of both logits, losses and gradients of question answering, with rows padded on either side, and whole."""
    from transformers import AutoModelForQuestionAnswering

    model, found = tiny_causal(kind, CLASSES), []
    torch.manual_seed(7)
    model = AutoModelForQuestionAnswering.from_config(model.config).double().eval()
    ends, whole = torch.tensor([3, 8]), batch_of()
    batch = {**whole, "start_positions": ends, "end_positions": ends + 5}
    del batch["labels"]
    left = {**batch, "attention_mask": whole["attention_mask"].flip(1)}
    plain = {name: x for name, x in batch.items() if name != "attention_mask"}
    for layout in layouts:
        made = prepared(model, layout)
        for given in (batch, left, plain):
            with InDouble(), torch.no_grad():
                ends_found, ends_wanted = made(**given).end_logits, model(**given).end_logits
            found += [error(model, made, given), absolute_error(ends_found, ends_wanted)]
    return found


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_answers_to_questions(ranks: Any, kind: str) -> None:
    layouts = ["contiguous", "head_tail"]
    for found in ranks(3, answers, kind, layouts):
        assert len(found) == 12 and max(found) <= 1e-10, found


@on_ranks
def eager_answers() -> tuple[list[float], str]:
    """BLOOM, whose padding on the left sees no token: errors of rows padded at their end, and the refusal of others."""
    from transformers import BloomForQuestionAnswering

    model, ends, whole = tiny_causal("bloom", CLASSES), torch.tensor([3, 8]), batch_of()
    model = BloomForQuestionAnswering(model.config).double().eval()
    batch = {**whole, "start_positions": ends, "end_positions": ends + 5}
    del batch["labels"]
    left = {**batch, "attention_mask": whole["attention_mask"].flip(1)}
    made = prepared(model)
    return [error(model, made, batch)], error_of(lambda: made(**left))


def test_eager_answers_over_padding_that_sees_no_token_are_refused(ranks: Any) -> None:
    for found, refusal in ranks(2, eager_answers):
        assert max(found) <= 1e-10, found
        assert "padding that sees no token is read, by a head" in refusal and "at their end" in refusal


@on_ranks
def pooling_by_themselves() -> list[str]:
    """The errors of text models that hand on a row that their own forward pools, or a head beside them."""
    import transformers as hf

    found = []
    kinds = hf.AltCLIPTextModel, hf.Tipsv2TextModel, hf.VideoPrismTextModel, hf.NeoMMEForRetrieval
    for kind in (*kinds, hf.DPRQuestionEncoder, hf.DPRReader):
        default = kind.config_class()
        model = kind(text_config(default.model_type, CAUSAL, default))
        found.append(error_of(lambda model=model: prepared(model)))
    return found


def test_embeddings_of_a_share_are_refused(ranks: Any) -> None:
    """Before, each rank made an embedding of its own share."""
    for found in ranks(2, pooling_by_themselves):
        for error in found:
            assert error.startswith("NotImplementedError") and "pools over the sequence" in error, error


@on_ranks
def seen_from_both_sides(layout: str) -> list[float]:
    """Errors of embeddings (means of tokens) and gradients of Gemma 3 as an encoder (EmbeddingGemma), with windows:
    of whole rows, of rows with padding on either side, and of packed documents."""
    import transformers as hf

    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "query_pre_attn_scalar": 8}
    config = hf.Gemma3TextConfig(**SMALL, **kinds, use_bidirectional_attention=True)
    whole, found = batch_of(), []
    del whole["labels"]
    left = {**whole, "attention_mask": whole["attention_mask"].flip(1)}
    packed = {"input_ids": whole["input_ids"], "position_ids": torch.arange(22).remainder(13).expand(2, -1)}
    for implementation in ("sdpa", "eager"):
        config._attn_implementation = implementation
        model = random_model(hf.Gemma3TextModel, config)
        made = prepared(model, layout)
        handler = ContextParallelHandler.of(made)
        for batch in ({"input_ids": whole["input_ids"]}, whole, left, packed):
            weight = batch.get("attention_mask", torch.ones(2, 22))[..., None].double()
            with InDouble():
                want = (model(**batch, use_cache=False).last_hidden_state * weight).sum(1) / weight.sum(1)
                local = prepare_batch(handler, {**batch, "loss_mask": weight.squeeze(2)})
                counted = local.pop("loss_mask")
                mean = handler.pool(made(**local).last_hidden_state, mask=counted, length=22, gradients=None).squeeze(1)
                for who, rows in ((model, want), (made, mean)):
                    who.zero_grad()
                    rows.sin().sum().backward()
            grads = zip(sum_over_ranks(*gradients(made)), gradients(model), strict=True)
            found += [absolute_error(a, b) for a, b in [(mean, want), *grads]]
    return found


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_decoders_that_are_encoders(ranks: Any, layout: str) -> None:
    for found in ranks(3, seen_from_both_sides, layout):
        assert max(found) <= 1e-10, found


# --------------------------------------------------------------------------- vectors of tokens


def col_bert() -> Any:
    """A class of a user's around BERT, as ColBERT's."""
    import transformers as hf
    from transformers.modeling_outputs import ModelOutput

    class Vectors(hf.BertPreTrainedModel):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.bert, self.linear = hf.BertModel(config, add_pooling_layer=False), torch.nn.Linear(32, 12)
            self.post_init()

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
            hidden = self.linear(self.bert(input_ids, attention_mask=attention_mask, **kwargs)[0])
            if attention_mask is not None:
                hidden = hidden * attention_mask.unsqueeze(2)
            return ModelOutput(embeddings=hidden)

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return random_model(Vectors, hf.BertConfig(vocab_size=64, max_position_embeddings=64, **sizes))


def late_interaction(kind: str) -> Any:
    """A small model that returns a vector of each token (ColPali and its kind)."""
    import transformers as hf

    if kind == "colbert":
        return col_bert()
    text = {**SMALL, "num_hidden_layers": 2, "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    if kind == "colpali":
        vision |= {
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            "projection_dim": SMALL["hidden_size"],
        }
        sizes = {"projection_dim": SMALL["hidden_size"], "hidden_size": SMALL["hidden_size"]}
        inner: Any = hf.PaliGemmaConfig(
            text_config={**text, "model_type": "gemma", "head_dim": 8},
            vision_config=vision,
            image_token_index=60,
            **sizes,
        )
        return random_model(hf.ColPaliForRetrieval, hf.ColPaliConfig(vlm_config=inner, embedding_dim=12))
    vision |= {"model_type": "siglip_vision_model"}
    layers = {"model_type": "modernbert", "local_attention": 8, "global_attn_every_n_layers": 2}
    inner = hf.ModernVBertConfig(text_config={**text, **layers}, vision_config=vision, image_token_id=60)
    return random_model(hf.ColModernVBertForRetrieval, hf.ColModernVBertConfig(vlm_config=inner, embedding_dim=12))


@on_ranks
def token_vectors(kind: str, side: str, length: int) -> float:
    """The largest error of the vectors and of a gradient of their similarities, of rows with padding."""
    model, mask = late_interaction(kind), torch.ones(2, length, dtype=torch.int64)
    (mask[1, -7:] if side == "right" else mask[1, :7]).zero_()
    batch = {"input_ids": tokens(length) * mask, "attention_mask": mask}
    if kind == "colpali":
        batch["token_type_ids"] = torch.zeros_like(mask)
    made = prepared(model)
    handler = ContextParallelHandler.of(made)
    with InDouble():
        want = model(**batch).embeddings
        found = handler.combine(made(**prepare_batch(handler, batch)).embeddings, 1, length=length, gradients="sum")
    for vectors in (want, found):
        pairs = torch.einsum("bnd,csd->bcns", vectors, vectors)
        (pairs.max(3)[0].sum(2).softmax(1)[:, 0].sum() / (1 if vectors is want else handler.cp.size)).backward()
    grads = zip(sum_over_ranks(*gradients(made)), gradients(model), strict=True)
    return max(absolute_error(a, b) for a, b in [(found, want), *grads])


@on_ranks
def rows_are_read() -> list[str]:
    """The errors of a model that is known to read rows of its states, and of a class that pools them by its mask."""
    from transformers import LlamaForCausalLM

    class Pooling(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
            hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs)[0]
            return (hidden * attention_mask.unsqueeze(2)).sum(1) / attention_mask.sum(1, keepdim=True)

    found = []
    classifier = tiny_causal("modernbert", CLASSES)
    kinds = type("JevForDecision", (LlamaForCausalLM,), {}), Pooling, type("Own", (type(classifier),), {})
    for kind, model in zip(kinds, (tiny_causal("llama"), tiny_causal("llama"), classifier), strict=True):
        model.__class__ = kind
        found.append(error_of(lambda model=model: prepared(model)))
    return found


def test_models_that_read_rows_of_their_states_are_refused(ranks: Any) -> None:
    for of_rows, pools, of_library in ranks(2, rows_are_read):
        assert of_library == ""
        for name, found in (("JevForDecision", of_rows), ("Pooling", pools)):
            assert found.startswith(f"NotImplementedError: {name} reads rows of its states by their positions"), found


@pytest.mark.parametrize("kind", ["colpali", "colmodernvbert", "colbert"])
def test_vectors_of_padding_are_zero_as_on_one_device(ranks: Any, kind: str) -> None:
    """Padding kept its vectors, and losses of similarities were 15 % off, gradients up to 270 %."""
    for side, length in (("right", 22), ("left", 24), ("right", 23)):
        assert max(ranks(2, token_vectors, kind, side, length)) <= 1e-9, (side, length)

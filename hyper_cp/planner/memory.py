"""Memory of one rank in a training step, by formula: states, tensors saved for backward, and the largest work space.

The model is a decoder of Llama's kind in plain PyTorch: RMSNorm, SwiGLU, and this library's attention. Its layers are
counted tensor by tensor, as autograd saves them. Allocators add fragmentation, which is not counted.

Where keys are selected, queries and outputs are kept as wide as latents, and selections from forward to backward,
whatever is recomputed. Where tokens are pooled into entries, every rank keeps those of the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..data.head import CHUNK_BYTES
from ..ops.kernels.indexer import SCORES_AT_ONCE, SORTED_AT_ONCE
from ..ops.kernels.selected import GATHERED_AT_ONCE
from .model import ModelShape, Pooling
from .traffic import ACCUMULATED, POSITION, Ranks
from .work import RankWork

CHECKPOINTING = ("none", "attention", "layers")
"""Activation checkpointing: none, of every layer but for its attention (``SAVE_LIST``), of every layer."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        states: parameters, gradients and optimizer states, and the weights of two layers that are gathered.
        saved: everything saved for backward by the layers, when the loss is reached.
        loss: logits and what the loss saves and makes of them.
        work: the largest work space of one layer in backward, its recomputed activations included, less what the
            backward of the last norm has freed; or that of an indexer, if it is larger.
    """

    states: float
    saved: float
    loss: float
    work: float

    @property
    def activations(self) -> float:
        """The peak above the states: saved tensors, and the loss or the first layer's backward."""
        return self.saved + max(self.loss, self.work)

    @property
    def peak(self) -> float:
        """The peak of a step."""
        return self.states + self.activations


def state_bytes(model: ModelShape, shards: int, per_parameter: float, element: int) -> float:
    """Bytes of parameters, gradients and optimizer states that are split over ``shards`` ranks (FSDP), with two layers
    gathered at a time if there are several."""
    gathered = 2 * model.stored_layer_weights * element if shards > 1 else 0
    return model.parameters * per_parameter / shards + gathered


def layer_saved(model: ModelShape, ranks: Ranks, tokens: float, element: int) -> float:
    """Bytes that one layer saves for backward without checkpointing, for ``tokens`` tokens of a rank.

    The tensors of both norms, q, k, v, the output of attention (twice if heads are exchanged: as attention returns it
    and as the projection receives it), its log-sum-exp, and four tensors of the MLP's inner size.
    """
    keys = model.numbers_that_travel(ranks.ulysses) * ranks.ulysses
    outputs = 2 if ranks.ulysses > 1 and not model.absorbed else 1
    absorbed = model.heads * sum(model.head_widths) if model.absorbed else 0
    channels = (1 + outputs) * model.query_width + absorbed + keys + 4 * model.ffn
    return tokens * (channels * element + model.heads * ACCUMULATED + 2 * norm_saved(model, element))


def norm_saved(model: ModelShape, element: int) -> float:
    """Bytes of a token that one RMSNorm saves: its input, its scale, and its output, which the next module saves.
    Unless it is one kernel, also the input in fp32 and the normalised input."""
    wide = max(element, ACCUMULATED)
    channels = {"fused": 2 * element, "plain": 2 * wide + element, "transformers": wide + 2 * element}
    return model.width * channels[model.norm] + ACCUMULATED


def saved_between(model: ModelShape, ranks: Ranks, tokens: float, element: int, checkpointing: str) -> float:
    """Bytes that one layer keeps until its backward begins: without its attention (``SAVE_LIST``) the output, the
    log-sum-exp and, if heads are exchanged, what the exchanges of q, k, v and of the output have returned."""
    if checkpointing == "none":
        return layer_saved(model, ranks, tokens, element)
    kept = tokens * model.width * element
    if checkpointing == "attention":
        channels = model.heads * model.head_widths[1]
        if ranks.ulysses > 1:
            channels += 2 * model.query_width + model.numbers_that_travel(ranks.ulysses) * ranks.ulysses
        kept += tokens * (channels * element + model.heads * ACCUMULATED)
    return kept


def selections_saved(model: ModelShape, ranks: Ranks, tokens: float, checkpointing: str) -> float:
    """Bytes of the selections of all layers. Those that share one keep it once, but each has what Ulysses ranks have
    gathered of it. A recompute selects nothing: it takes what the indexer of its forward has selected."""
    own = tokens * model.topk * POSITION
    gathered = model.layers * ranks.ulysses * own if ranks.ulysses > 1 and checkpointing != "layers" else 0.0
    selected = max(1, model.indexers) * own if ranks.ulysses == 1 or checkpointing != "none" else 0.0
    return selected + gathered


def entries_saved(pooling: Pooling, tokens: float, whole: float, element: int) -> float:
    """Bytes that one layer saves of its entries, for ``tokens`` tokens of a rank and ``whole`` tokens of all ranks.

    For each pooled token its key, its weight in fp32 (and in a narrower dtype, if the model has one) and whether there
    is one; for each entry of the rank five tensors of its norm and rotation in fp32; and the entries of all ranks.
    """
    if not pooling.window:  # keys of an indexer have no gradients
        return 0.0
    of_token = 2 * element + (ACCUMULATED if element < ACCUMULATED else 0) + 1
    of_entry = 5 * pooling.width * ACCUMULATED
    pooled = tokens * (pooling.row / 2 * of_token + of_entry / pooling.every)
    return pooled + whole / pooling.every * pooling.width * element


def entries_work(pooling: Pooling, whole: float) -> float:
    """Bytes of the sums of the gradients of one layer's entries, as keys and as values."""
    return 2 * whole / pooling.every * pooling.width * ACCUMULATED if pooling.window else 0.0


def selection_work(model: ModelShape, tokens: float) -> float:
    """Bytes that an indexer needs: the best keys so far, in 8 bytes each; at the end their positions, while some are
    sorted (three tensors of 8 bytes each); before, scores."""
    best = tokens * max([model.topk if model.indexers else 0, *(x.topk for x in model.poolings)])
    if not best:
        return 0.0
    sorting = POSITION * best + 24 * min(best, SORTED_AT_ONCE)
    return 8 * best + max(sorting, 2 * SCORES_AT_ONCE * ACCUMULATED)


def layer_work(
    model: ModelShape, ranks: Ranks, kv_exchange: str, batch: int, length: int, work: RankWork, element: int
) -> float:
    """Bytes that the backward of one layer needs beyond everything it has saved: in the MLP two gradients of its inner
    size, or in attention, before which the MLP and its norm have freed their tensors."""
    tokens = batch * length / ranks.size
    stream = 2 * tokens * model.width * element  # gradients of the residual stream
    mlp = 2 * tokens * model.ffn * element
    freed = tokens * (4 * model.ffn * element + norm_saved(model, element))
    return stream + max(mlp, _attention_work(model, ranks, kv_exchange, batch, length, work, element) - freed)


def _attention_work(
    model: ModelShape, ranks: Ranks, kv_exchange: str, batch: int, length: int, work: RankWork, element: int
) -> float:
    """Bytes of buffers in attention's backward: keys and values that arrive, and fp32 sums of gradients."""
    position = model.numbers_that_travel(ranks.ulysses) * batch  # elements of keys and values
    share, tokens = length / ranks.ring * position, batch * length / ranks.size
    of_query, of_output = (model.heads * width for width in model.head_widths)
    # sums of dk, dv and dq; dout and the dq returned
    own = share * ACCUMULATED + tokens * (of_query * ACCUMULATED + of_output * element)
    own += max(tokens * of_query * element, _gathered_work(model, ranks, batch, length))
    message = tokens * model.query_width * element if ranks.ulysses > 1 else 0.0
    if model.absorbed:  # keys of a block with their rotary parts, and their gradients apart from those of values
        share_of_one = length / ranks.ring
        others = length - share_of_one if kv_exchange == "all_gather" else 0.0
        most = max(share_of_one, others if work.hops else 0.0, *(float(rows.sum()) for rows in work.received))
        own += most * batch * (model.latent * element + sum(model.head_widths) * ACCUMULATED)
        own -= tokens * model.query_width * element  # outputs that are no longer as wide as latents have been freed
        message = 0.0  # heads are exchanged when these buffers have been freed
    elif model.latents_travel(ranks.ulysses):  # heads of one share, the sums of their gradients, and a copy of these
        own += length / ranks.ring * batch * model.numbers_of_heads(ranks.ulysses) * (2.2 * element + ACCUMULATED)
    if not work.hops:
        return own + message
    if kv_exchange == "ring":  # two blocks; the sum that leaves, the one that arrives, and what is added from hop 2 on
        return own + max(message, share * (2 * element + (2 if work.hops == 1 else 3) * ACCUMULATED))
    stages = max(1, min(len(work.received), work.ahead + 1))  # that are alive, with their gradients
    arriving = max((float(rows.sum()) for rows in work.received), default=float(length)) * position
    return own + max(message, stages * arriving * (element + ACCUMULATED) + share * element)


def _gathered_work(model: ModelShape, ranks: Ranks, batch: int, length: int) -> float:
    """Bytes of the selected keys and values of a few queries, of their gradients, and of four matrices of scores."""
    if not model.topk:
        return 0.0
    of_key, of_value = model.head_widths
    kv_heads = 1 if model.absorbed else model.numbers_of_heads(ranks.ulysses) // (2 * model.head_dim)
    pairs = min(GATHERED_AT_ONCE / of_key, batch * length / ranks.ring * kv_heads * model.topk)
    numbers = 2 * of_key + (1 if model.absorbed else 2) * of_value  # latents are gathered once
    return pairs * (numbers + 4 * model.heads / ranks.ulysses / kv_heads) * ACCUMULATED


def memory(
    model: ModelShape,
    ranks: Ranks,
    kv_exchange: str,
    batch: int,
    length: int,
    work: RankWork,
    *,
    checkpointing: str,
    chunked_loss: bool,
    element: int,
    states: float,
) -> Memory:
    """The memory of one rank, see :class:`Memory`."""
    tokens = batch * length / ranks.size
    saved = model.layers * saved_between(model, ranks, tokens, element, checkpointing)
    saved += tokens * norm_saved(model, element)  # the last one; its output is the head's input
    saved += selections_saved(model, ranks, tokens, checkpointing)
    saved += sum(x.layers * tokens * x.topk * POSITION for x in model.poolings)  # a recompute selects nothing again
    of_entries = {x: entries_saved(x, tokens, batch * length, element) for x in model.poolings}
    recomputed = 0.0
    if checkpointing == "none":
        saved += sum(x.layers * kept for x, kept in of_entries.items())
    else:
        recomputed = max(of_entries.values(), default=0.0)
    if checkpointing == "attention":  # windows of tokens are not brought again
        saved += sum(x.layers * tokens * x.tokens / x.every * x.row * element for x in model.poolings)
    if checkpointing == "layers" and ranks.ulysses > 1:  # selections are gathered again
        recomputed += ranks.ulysses * tokens * model.topk * POSITION
    if checkpointing != "none":
        recomputed += layer_saved(model, ranks, tokens, element) - saved_between(
            model, ranks, tokens, element, checkpointing
        )
    work_space = recomputed + layer_work(model, ranks, kv_exchange, batch, length, work, element)
    work_space += max((entries_work(x, batch * length) for x in model.poolings), default=0.0)
    work_space -= tokens * norm_saved(model, element)  # the last norm's backward has freed its tensors
    work_space = max(0.0, work_space, selection_work(model, tokens))
    return Memory(states, saved, loss_bytes(model, tokens, chunked_loss, element), work_space)


def loss_bytes(model: ModelShape, tokens: float, chunked: bool, element: int) -> float:
    """Bytes of the loss: the log-softmax of logits in fp32, its gradient and that of the logits. A chunked loss has
    those of a chunk, the gradient of its input, and that of the head in fp32."""
    per_token = 3 * model.vocabulary * max(element, ACCUMULATED)
    if not chunked:
        return tokens * per_token
    chunk = min(tokens, max(1, CHUNK_BYTES // (ACCUMULATED * model.vocabulary)))
    return chunk * per_token + tokens * model.width * element + model.head_weights * ACCUMULATED

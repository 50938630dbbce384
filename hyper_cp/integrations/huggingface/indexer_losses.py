"""Training the indexers of a prepared model: their losses, collected while its forward runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..._torch import checkpoint
from ..._torch.compiling import is_compiling
from ...mesh.cp_mesh import CPMesh
from ...module.thread_stack import ThreadStack
from ...ops.attention import attend
from ...ops.config import Call, Mode
from ...ops.engine import TileEngine
from ...ops.indexer_loss import loss_of


class Scored(NamedTuple):
    """The indexer's tensors that a selection was made of, and its mode and call."""

    of: tuple[Tensor, Tensor, Tensor]
    mode: Mode
    call: Call


class IndexerLosses:
    """The losses of the indexers of a forward, whether attention is dense, and the mesh that shares out its heads."""

    # No dataclass: FSDP2 makes new ones of those in a module's arguments, and losses would go to a list of its own.

    def __init__(self, dense: bool, heads_mesh: DeviceMesh | None = None) -> None:
        self.dense, self.heads_mesh = dense, heads_mesh
        self.found: list[Tensor] = []

    @staticmethod
    def refuse_where_lost(name: str, found: bool = True) -> None:
        """Raise where a loss would leave a layer without its gradients. ``found``: False if what an indexer scored has
        not come to the attention of its layer, as in compiled code."""
        compiled = is_compiling() or not found
        if compiled or checkpoint.in_function_forward():
            where = "compiled" if compiled else "in the forward of an autograd function (a reentrant checkpoint)"
            raise NotImplementedError(
                f"{name} runs {where} inside indexer_losses. The loss of an indexer leaves its layer beside the "
                "output, and would have no gradient. Run the forward eagerly, and checkpoint with use_reentrant=False"
            )

    def scored(self, module: nn.Module, indices: Tensor) -> Scored | None:
        """The tensors that the indexer of a layer made its selection of; None for a layer that shares another's."""
        name, own = type(module).__name__, getattr(module, "indexer", None) is not None
        self.refuse_where_lost(name)
        found: Scored | None = vars(indices).pop("scored", None)  # not for the layers that share it
        self.refuse_where_lost(name, found is not None or not own)
        return found

    def attend(
        self, module: nn.Module, indices: Tensor, q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, call: Call
    ) -> Tensor:
        """Attention of a layer; adds the loss of its indexer, if it has one of its own."""
        if mode.max_logits:
            raise NotImplementedError(
                f"{call.name} has an indexer loss and a style with max_logits=True. The loss computes attention in "
                "another way, which returns no largest logits. Leave out one of them"
            )
        scored = self.scored(module, indices)
        if self.dense:
            call = replace(call, selected=None)
        out, lse = attend(q, k, v, cp, mode, call, TileEngine(with_lse=True))
        if scored is None:
            return out
        if call.score is not None:
            raise NotImplementedError(
                f"{call.name} changes its logits (softcap), and the loss of its indexer does not know how. Train it "
                "without indexer_losses"
            )
        self._check_heads(call.name, q.shape[1], cast(int, module.num_heads))
        keys = (k,) if call.weight is None else (k[:, 0], v, *call.of_latents)
        index, (q, *keys) = _in_one_dtype(scored.of, (q, *keys))  # type: ignore[assignment]
        attended = q, keys[0] if call.weight is None else keys, lse
        of_index = replace(scored.call, selected=call.selected)
        loss = loss_of(index, attended, cp, scored.mode, of_index, call.scale, self.heads_mesh)
        if not checkpoint.in_recompute():
            self.found.append(loss)
        beside: Tensor = _Beside.apply(out, *module.indexer.parameters())  # type: ignore[union-attr]
        return beside

    def _check_heads(self, name: str, local: int, heads: int) -> None:
        """Raise unless ``heads_mesh`` shares out all heads."""
        ranks = 1 if self.heads_mesh is None else self.heads_mesh.size()
        if local * ranks != heads:
            raise ValueError(
                f"{name} has {local} of {heads} heads on this rank, and indexer_losses a heads_mesh of {ranks} ranks. "
                "The loss of an indexer is that of the weights of all heads, summed over the tensor-parallel ranks "
                'that share them out. Pass the mesh of these, indexer_losses(heads_mesh=world["tp"])'
            )


def _in_one_dtype(of: tuple[Tensor, ...], attended: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    """The indexer's tensors and attention's in the wider of two dtypes: dots3 scores in fp32 what attention has in
    half precision."""
    wide = torch.promote_types(of[0].dtype, attended[0].dtype)
    with torch.no_grad():  # what the scores are compared with
        attended = tuple(x.to(wide) for x in attended)
    return tuple(x.to(wide) for x in of), attended


class _Beside(torch.autograd.Function):
    """The output of a layer, with the parameters of its indexer in its graph, which get no gradient through it. DDP
    (``find_unused_parameters``) looks there for what backward will reach, and FSDP2 for outputs with gradients."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.others = [None] * len(parameters)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        return dout, *ctx.others


_collecting: ThreadStack[IndexerLosses | None] = ThreadStack()


@contextmanager
def indexer_losses(*, dense: bool = False, heads_mesh: DeviceMesh | None = None) -> Iterator[list[Tensor]]:
    """Train the lightning indexers of models that run in this block; elsewhere they are frozen, as transformers has it.

    An indexer reads hidden states that are detached, and its scores are compared with the weights of the attention of
    its layer (:func:`hyper_cp.ops.indexer_loss`). Layers that take the selection of another one have no loss. ::

        with indexer_losses() as losses:
            output = model(**local)  # a batch of prepare_batch
        of_tokens, tokens = torch.stack(losses).sum(0), local["shift_labels"] != -100
        (output.loss + handler.mean_loss(of_tokens, mask=tokens)).backward()

    Args:
        dense: attention sees all keys, and so does the loss (the warm-up of DeepSeek V3.2, in which all other
            parameters are frozen). False: selected keys only. With FSDP2, which gathers parameters where outputs have
            gradients, the model's loss must be a part of what is differentiated in the warm-up, too.
        heads_mesh: the 1-D mesh of the tensor-parallel ranks that share out the heads of attention.

    Yields:
        A list, which each indexer adds its losses ``[B, S/n]`` of this rank's tokens to. Enter one block for each
        forward; of nested blocks the innermost collects.

    Raises:
        ValueError: in a forward with tensor-parallel attention without its ``heads_mesh``.
        NotImplementedError: in a forward that is compiled, or in a reentrant activation checkpoint, through which no
            gradients of these losses would pass.
    """
    collected = IndexerLosses(dense, heads_mesh)
    _collecting.push(collected)
    try:
        yield collected.found
    finally:
        _collecting.remove(collected)


@contextmanager
def not_collecting() -> Iterator[None]:
    """A block in which forwards put the losses of their indexers nowhere, inside of an ``indexer_losses`` block too."""
    _collecting.push(None)
    try:
        yield
    finally:
        _collecting.remove(None)


def collecting() -> IndexerLosses | None:
    """The place where a forward that begins now puts the losses of its indexers."""
    return _collecting.top

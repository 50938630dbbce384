"""Training the indexers of a prepared model: their losses, collected while its forward runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch import checkpoint
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


@dataclass(eq=False)
class IndexerLosses:
    """The losses of the indexers of a forward, and whether attention is dense."""

    dense: bool
    found: list[Tensor] = field(default_factory=list)

    @staticmethod
    def refuse_where_lost(name: str) -> None:
        """Raise where a loss would leave a layer without its gradients."""
        if torch.compiler.is_compiling() or checkpoint.in_reentrant_forward():
            where = "compiled" if torch.compiler.is_compiling() else "in a reentrant activation checkpoint"
            raise NotImplementedError(
                f"{name} runs {where} inside indexer_losses. The loss of an indexer leaves its layer beside the "
                "output, and would have no gradient. Run the forward eagerly, and checkpoint with use_reentrant=False"
            )

    def attend(
        self, scored: Scored | None, q: Tensor, k: Tensor, v: Tensor, cp: CPMesh, mode: Mode, call: Call
    ) -> Tensor:
        """Attention of a layer; adds the loss of its indexer, if it has one of its own."""
        if self.dense:
            call = replace(call, selected=None)
        out, lse = attend(q, k, v, cp, mode, call, TileEngine(with_lse=True))
        if scored is not None:
            if call.score is not None:
                raise NotImplementedError(
                    f"{call.name} changes its logits (softcap), and the loss of its indexer does not know how. Train "
                    "it without indexer_losses"
                )
            keys = k if call.weight is None else (k[:, 0], v, *call.of_latents)
            of_index = replace(scored.call, selected=call.selected)
            loss = loss_of(scored.of, (q, keys, lse), cp, scored.mode, of_index, call.scale)
            if not checkpoint.in_recompute():
                self.found.append(loss)
        return out


_collecting: ThreadStack[IndexerLosses] = ThreadStack()


@contextmanager
def indexer_losses(*, dense: bool = False) -> Iterator[list[Tensor]]:
    """Train the lightning indexers of models that run in this block; elsewhere they are frozen, as transformers has it.

    An indexer reads hidden states that are detached, and its scores are compared with the weights of the attention of
    its layer (:func:`hyper_cp.ops.indexer_loss`). Layers that take the selection of another one have no loss. ::

        with indexer_losses() as losses:
            output = model(**local)  # a batch of prepare_batch
        of_tokens, tokens = torch.stack(losses).sum(0), local["shift_labels"] != -100
        (output.loss + handler.mean_loss(of_tokens, mask=tokens)).backward()

    Args:
        dense: attention sees all keys, and so does the loss (the warm-up of DeepSeek V3.2, in which all other
            parameters are frozen). False: selected keys only.

    Yields:
        A list, which each indexer adds its losses ``[B, S/n]`` of this rank's tokens to.

    Raises:
        NotImplementedError: in a forward that is compiled, or in a reentrant activation checkpoint, through which no
            gradients of these losses would pass.
    """
    collected = IndexerLosses(dense)
    _collecting.push(collected)
    try:
        yield collected.found
    finally:
        _collecting.remove(collected)


def collecting() -> IndexerLosses | None:
    """The place where a forward that begins now puts the losses of its indexers."""
    return _collecting.top

"""Behind the first forward of a prepared model, a few tokens run through it on all ranks together and on each alone.

The logits are the same, unless something in the model counts positions, or mixes them, within this rank's share: a
class, a function or an adapter of the user's. What is known by its type or its text is refused before; these numbers
find the rest.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

from ..._torch.checkpoint import in_backward, in_checkpoint
from ..._torch.modules import hook_owners, in_evaluation, without_hooks
from ...data.collectives import by_rank
from ...data.packing import attention_state
from ...data.sharding import local_share
from ...handler import ContextParallelHandler
from ...mesh.family import split_cp_mesh
from ...mesh_swap import context_parallel_mesh
from ...module.guards import unwatched
from ...module.mesh_binding import Binding
from ...module.mixers.calls import watching
from ...schedule.documents import documents_table
from ...schedule.layout import by_documents
from ...style import style_of
from ...verification.model_state import restore_model_state
from ...verification.record import Recorder
from .indexer_losses import not_collecting
from .seams import LIBRARIES, cache_in

logger = getLogger(__name__)

TOKENS, ALL_TOKENS = 32, 1024
"""The most tokens of each rank, and of all together (whole logits of them take memory on each rank)."""
EXACT, HALF, NOISE = 1e-2, 1e-1, 4
"""The norm of the difference, relative to that of the logits, from which on they differ: in fp32 and fp64 (products of
GPUs may round to fewer digits), and in half precision; there it may also be some times that of one rounding."""
FSDP = ("torch.distributed.fsdp.", "torch.distributed._composable.")
"""The beginnings of the names of modules with FSDP's hooks."""
STEP = torch.finfo(torch.bfloat16).eps / 2
"""The largest relative error of rounding to half precision."""


class FewTokens:
    """The comparison of one prepared model; it is made once, on the mesh that the model was prepared for."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.made = False

    def __deepcopy__(self, memo: dict[int, Any]) -> FewTokens:
        return FewTokens(copy.deepcopy(self.binding, memo))  # a copy is another model

    def compare(self, model: Any, tokens: Any, kwargs: dict[str, Any]) -> None:
        """Warn if a few tokens have other logits on the ranks of the mesh than on one device. (They are not those of a
        batch, so that nothing depends on what a rank got.)

        Args:
            tokens, kwargs: those of the forward that has just ended.
        """
        mesh = self.binding.active
        if self.made or cache_in(kwargs) is not None or not isinstance(tokens, Tensor):
            return
        if len(self.binding.stack) > 1 or not mesh.parallel:  # in a block, which other ranks may not be in
            return
        if watching.top is not None:  # a model around this one is watched in its first forward: compare in the next
            return
        if in_checkpoint() or in_backward() or any(isinstance(owner, Recorder) for owner in hook_owners(model)):
            return  # a checkpoint, which may keep results, or a run of verify
        self.made = True
        kinds = {kind for module in model.modules() for kind in (FSDPModule, FSDP1) if isinstance(module, kind)}
        if FSDP1 in kinds or (kinds and mesh.mesh.size() < dist.get_world_size()):
            # An exception would leave a unit of FSDP1 in a state that backward refuses. And other ranks, with which
            # units gather their weights, may be on meshes of other degrees, where nothing is compared.
            return
        state, ranks = kwargs.get("context_parallel"), mesh.mesh.size()
        few, error, limit = _few(model, tokens.shape[1], ranks, state), 0.0, math.inf
        try:
            error, limit = self._error(model, few)
        except Exception as reason:  # of a model that needs other inputs than tokens
            logger.info("%s was not compared with one device on a few tokens: %r", type(model).__name__, reason)
        of_ranks = by_rank(mesh.mesh, torch.tensor([error], device=mesh.mesh.device_type))
        found = of_ranks.nan_to_num(0.0).max().item()
        if found > limit:
            warnings.warn(
                f"{type(model).__name__} has other logits on the {ranks} ranks of the cp mesh than on one "
                f"device: after its first forward, {few * ranks} tokens ran through it both ways (in "
                f"evaluation, without gradients), and the norm of the difference is {found:.1%} of that of the logits. "
                "A class, a function or an adapter in it counts positions, or mixes them, within this rank's share of "
                "the sequence. hyper_cp.verify names the module, on a short batch. If the model draws random numbers "
                "in evaluation, or computes in 8 bits, leave the comparison out: prepare_model(..., compare=False)",
                stacklevel=2,
            )

    def _error(self, model: Any, few: int) -> tuple[float, float]:
        """The relative difference of this rank's logits, and what is allowed."""
        mesh = self.binding.active
        handler = ContextParallelHandler(mesh.mesh, style_of(self.binding))
        total = few * handler.cp.size
        ids = _tokens(model, total)
        with ExitStack() as stack:
            stack.enter_context(restore_model_state(model, ids.device.type, kept=True))
            stack.enter_context(in_evaluation(model))
            stack.enter_context(unwatched(model))
            stack.enter_context(without_hooks(model.modules(), _is_of_others))
            # The model's own forward is about to end, with whole weights. Another one would end it for FSDP, too.
            stack.enter_context(without_hooks([model], lambda module: module.startswith(FSDP)))
            stack.enter_context(not_collecting())
            stack.enter_context(torch.no_grad())
            stack.enter_context(_without_cache(ids.device.type))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(handler.cp.batch.aside())
            table = documents_table([[0, total]]) if by_documents(handler.layout) else None
            share = local_share(handler, ids, 1, table)
            state = attention_state(handler, table)
            state = replace(state, last_position=total - 1, length=few, numbered=True, packed=False)
            at = handler.position_ids(total, documents=table, device=ids.device)  # some models count them themselves
            split = _logits(model(input_ids=share, position_ids=at[None], context_parallel=state), few)
            with context_parallel_mesh(model, split_cp_mesh(mesh.mesh, [1]).cp(1)):
                state = replace(state, documents=None, length=total)

                def alone() -> Tensor:
                    return _logits(model(input_ids=ids, use_cache=False, context_parallel=state), total, at)

                with _dtypes() as found:
                    whole = alone()
                half = not found <= {torch.float32, torch.float64}
                limit = max(HALF, NOISE * _noise(model, alone, whole)) if half else EXACT
            return float((split - whole).norm() / whole.norm()), limit


def _few(model: Any, local: int, ranks: int, state: Any) -> int:
    """The number of tokens of each rank: no position is beyond those that the model has surely a place for. ``state``:
    that of the forward that has just ended."""
    last = getattr(getattr(state, "batch", state), "last_position", 0)
    places = getattr(model.config.get_text_config(), "max_position_embeddings", None) or local * ranks
    few = min(local, TOKENS, max(2, ALL_TOKENS // ranks), max(int(last) + 1, places // 2) // ranks)
    return few if few == local else few // 2 * 2  # of a layout with two parts


def _is_of_others(module: str) -> bool:
    """True for a Python module with hooks of the user's, which may keep what they see, or with those of a trainer that
    splits whole batches in front of the model."""
    return not module.startswith(LIBRARIES) or module == "hyper_cp.integrations.trl"


def _tokens(model: Any, total: int) -> Tensor:
    """Ids ``[1, total]`` of ordinary tokens: none that the configuration names."""
    config, table = model.config, model.get_input_embeddings().weight
    text = config.get_text_config()
    named = {x for part in (config, text) for name, x in vars(part).items() if "token" in name and isinstance(x, int)}
    ordinary = [x for x in range(min(text.vocab_size, len(table))) if x not in named]
    return torch.tensor([[ordinary[7 * i % len(ordinary)] for i in range(total)]], device=table.device)


def _logits(output: Any, length: int, at: Tensor | None = None) -> Tensor:
    """The logits, or the hidden states, of the ``length`` tokens of a forward, or at some of them."""
    named = [getattr(output, name, None) for name in ("logits", "last_hidden_state")]
    found = next((x for x in named if x is not None), None)
    found = output[0] if found is None else found
    found = found.to_local() if isinstance(found, DTensor) else found
    if found.ndim != 3 or found.shape[1] != length:
        raise ValueError(f"the output of {length} tokens has shape {tuple(found.shape)}")
    found = found if at is None else found.index_select(1, at.to(found.device))
    return found.float() if found.dtype != torch.float64 else found


@contextmanager
def _dtypes() -> Iterator[set[torch.dtype]]:
    """The dtypes of the outputs of all modules that run in the block."""
    found: set[torch.dtype] = set()

    def record(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found.add(output.dtype)

    handle = register_module_forward_hook(record)
    try:
        yield found
    finally:
        handle.remove()


def _noise(model: Any, alone: Callable[[], Tensor], logits: Tensor) -> float:
    """The relative difference of logits that one rounding of the embeddings makes: it grows from layer to layer, and
    sends tokens to other experts."""

    def rounded(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        up = torch.arange(output.shape[-1], device=output.device) % 2 == 1
        return torch.where(up, output * (1 + STEP), output * (1 - STEP))

    handle = model.get_input_embeddings().register_forward_hook(rounded)
    try:
        return float((alone() - logits).norm() / logits.norm())
    finally:
        handle.remove()


def _without_cache(device_type: str) -> AbstractContextManager[None]:
    """Autocast as it is, which keeps no casts of weights: those of the block have no graph."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, torch.get_autocast_dtype(device_type), cache_enabled=False)

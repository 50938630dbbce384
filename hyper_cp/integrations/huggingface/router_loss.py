"""The auxiliary loss of mixture-of-experts models: each rank's share of the one over the whole sequence.

A model computes it from the router logits of its own tokens: experts times the sum over experts of (fraction of tokens
that chose it) x (mean probability), which is no mean over ranks. It is linear in the probabilities, though. With the
fractions of all ranks, which have no gradient, the ranks' shares sum to the loss of one device, gradients included.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...data.collectives import by_rank
from .seams import in_file, is_foreign, source_of

PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""The parameters of the usual function ``load_balancing_loss_func``."""


def requested(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """True if a forward of the model with these keywords adds a router loss."""
    config: Any = model.config
    given = kwargs.get("output_router_logits")
    return bool(getattr(config.get_text_config(), "output_router_logits", False) if given is None else given)


def check(model: nn.Module, kwargs: dict[str, Any], tokens: Tensor | None) -> None:
    """Raise ``NotImplementedError`` unless the router loss of this forward can be made that of the whole sequence."""
    mask = kwargs.get("attention_mask")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if isinstance(mask, Tensor) and tokens is not None and tuple(mask.shape) != tuple(tokens.shape[:2]):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but this rank holds {tuple(tokens.shape[:2])} tokens, and "
            f"the router loss of {type(model).__name__} needs one value for each. Pass the batch through prepare_batch"
        )
    function = in_file(model, "load_balancing_loss_func")
    if function is None and coefficient(model) is None and _makes_none(type(model)):
        return  # the logits that it returns are those of this rank's tokens
    known = function is not None and list(inspect.signature(function).parameters) == PARAMETERS
    if not known or coefficient(model) is None or _top_k(model) is None:
        raise NotImplementedError(
            f"{type(model).__name__} has output_router_logits=True, but its router loss is not the usual "
            "load-balancing loss. The model would compute it from this rank's tokens, which is wrong. Pass "
            "output_router_logits=False"
        )


def _makes_none(kind: type[nn.Module]) -> bool:
    """True for a class of transformers whose forward has no router loss. (Classes derived from it may make one.)"""
    code = source_of(kind.forward).replace("aux_loss=None", "")
    foreign = any(is_foreign(base) for base in kind.__mro__ if issubclass(base, nn.Module))
    return not foreign and "aux_loss" not in code


def coefficient(model: nn.Module) -> float | None:
    """The factor of the router loss in the loss of a model."""
    return getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))


def _top_k(model: nn.Module) -> int | None:
    return getattr(model, "num_experts_per_tok", None)


def share(model: nn.Module, output: Any, counted: Tensor | None, mesh: DeviceMesh) -> None:
    """Replace ``aux_loss`` in a model's output, and its part of ``loss``, by this rank's share.

    Args:
        counted: the mask ``[B, S/n]`` of tokens that count; None if all do.
    """
    new = _loss(output.router_logits, _top_k(model) or 0, counted, mesh)
    if output.loss is not None:
        output.loss = output.loss + coefficient(model) * (new - output.aux_loss).to(output.loss.device)
    output.aux_loss = new


def check_formula(model: nn.Module, output: Any, mask: Tensor | None, mesh: DeviceMesh) -> None:
    """Raise ``NotImplementedError``, on all ranks, unless the model computes the load-balancing loss that this module
    knows.

    Args:
        mask: the mask ``[B, S/n]`` that the model was given; None if it has counted all tokens.
    """
    top_k, found = _top_k(model) or 0, output.aux_loss.detach()
    logits = [x.detach() for x in output.router_logits]
    expected = _loss(logits, top_k, mask, None)
    fits = torch.allclose(found.double(), expected.double(), rtol=1e-4)
    for dtype in () if fits else (torch.bfloat16, torch.float16):
        # Accelerate casts outputs of these dtypes to fp32. The model has taken their softmax before.
        narrow = [x.to(dtype) for x in logits]
        if all(bool((x == y).all()) for x, y in zip(logits, narrow, strict=True)):
            fits |= torch.allclose(found.double(), _loss(narrow, top_k, mask, None).double(), rtol=1e-2)
    if not bool(by_rank(mesh, torch.tensor([fits], device=found.device)).all()):
        raise NotImplementedError(
            f"{type(model).__name__} returned aux_loss={output.aux_loss.item()}, but the usual load-balancing loss of "
            f"its router logits is {expected.item()}. This version of transformers computes another one, which would "
            "be wrong for a share of the sequence. Pass output_router_logits=False"
        )


def _loss(logits: Sequence[Tensor], top_k: int, mask: Tensor | None, mesh: DeviceMesh | None) -> Tensor:
    """The load-balancing loss of router logits ``[tokens, experts]`` of all layers; with a mesh this rank's share."""
    device, experts = logits[0].device, logits[0].shape[-1]
    weights = logits[0].new_ones(len(logits[0])) if mask is None else mask.reshape(-1).to(device)
    weights = weights.float()  # as the model does
    chosen, probabilities = weights.new_zeros(experts), weights.new_zeros(experts)
    for layer in logits:
        routed = torch.softmax(layer.to(device), dim=-1)
        selected = torch.topk(routed, top_k, dim=-1)[1]
        chosen = chosen.scatter_add(0, selected.flatten(), weights.repeat_interleave(top_k))
        probabilities = probabilities + (routed.float() * weights[:, None]).sum(0)
    counts = torch.cat([chosen, weights.sum()[None] * len(logits)]).detach()
    if mesh is not None:
        counts = by_rank(mesh, counts).sum(0)
    rows = counts[-1]
    return experts * (counts[:-1] / rows * (probabilities / rows)).sum()

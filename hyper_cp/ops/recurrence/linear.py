"""Linear recurrences over a split sequence, as a function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...mesh import cp_mesh
from ...mesh.arguments import check_number
from ...mesh.cp_mesh import CPMesh
from ...mesh.failures import calling
from ..checks import check_split, documents_of
from ..exchange.ulysses import Ulysses
from ..settings import text
from . import kernels
from .checks import agree, check_layout_of, check_tensor
from .engine import RecurrenceSettings, differentiable_recurrence, with_final_state

FORM = "[batch, positions, heads, numbers of a head]"


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    *,
    mesh: DeviceMesh | CPMesh,
    scale: float = 1.0,
    layout: str = "contiguous",
    documents: Any = None,
    ulysses_degree: int | None = 1,
    kernel: str | None = None,
    final_state: list[Tensor] | None = None,
    name: str = "linear_recurrence",
) -> Tensor:
    """Compute the outputs of a layer whose state runs along the sequence, for this rank's share of the sequence.

    For each head, with a state H ``[dk, dv]`` that is zero before the first token of every document::

        H_t = exp(decay_t) * H_{t-1} + k_t v_t^T                                       # without beta
        H_t = (1 - beta_t k_t k_t^T) (exp(decay_t) * H_{t-1}) + beta_t k_t v_t^T       # with beta: the delta rule
        out_t = scale * H_t^T q_t

    ====================================================  ==============  =========
    layer                                                 decay           beta
    ====================================================  ==============  =========
    RetNet: a constant of each head                       ``[H]``         None
    Mamba 2 (SSD): q = C, k = B, v = dt x                 ``[B,S/n,H]``   None
    GLA: a number for each channel of k                   ``[B,S/n,H,dk]``  None
    Mamba 1: a head for each channel, dk = state size,    ``[B,S/n,H,dk]``  None
    dv = 1
    gated delta net                                       ``[B,S/n,H]``   ``[B,S/n,H]``
    Kimi delta attention                                  ``[B,S/n,H,dk]``  ``[B,S/n,H]``
    ====================================================  ==============  =========

    Each rank computes the affine map of every range of positions that it holds, gathers the maps of all ranks (one
    all-gather in each direction, whose size does not depend on the length) and runs its ranges from the right states.

    Args:
        q, k: ``[B, S/n, Hk, dk]``; Hk heads serve H / Hk consecutive heads of v each.
        v: ``[B, S/n, H, dv]``.
        decay: logarithms of the decay, at most 0 (the first call of a kind checks that). They may have another dtype
            than q, k and v.
        beta: the strength of the delta rule, as in the table; None: there is no delta rule.
        mesh: the cp mesh of n ranks.
        scale: the factor of q. (Functions of fla have ``dk ** -0.5`` as default.)
        layout: the positions that the ranks hold, as in :func:`hyper_cp.ops.attention`.
        documents: cumulative lengths ``[0, ..., S]`` of packed documents (a list or tensor, or one per batch row).
            None: those of the enclosing ``handler.documents`` block, if there is one.
        ulysses_degree: 1 passes states between ranks, for any number of heads, with the least communication. With a
            larger number (None: all ranks) that many adjacent ranks first exchange sequence for heads, if these split.
        kernel: ``"torch"`` (chunked, any device), ``"fla"`` (flash-linear-attention), or None to choose by device.
        final_state: a list to which the state after the last token of each row is appended, ``[B, H, dk, dv]``, the
            same on every rank. Padding behind it (of the block's batch, or of the table that the block yields) does
            not count; a document of your own table that is padding does. It needs no communication of its own, or one
            with padding; without gradients and with ``ulysses_degree=1`` only.
        name: names the caller in errors.

    Returns:
        ``[B, S/n, H, dv]`` in the dtype of v. States are fp32 (fp64 for fp64).

    Raises:
        ValueError, TypeError: on arguments that do not fit, before any communication.
        NotImplementedError: for a final state with gradients, or with heads that are exchanged.

    Example::

        >>> q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))  # this rank's half of 16 positions
        >>> linear_recurrence(q, k, v, -torch.rand(1, 8, 2), mesh=mesh).shape
        torch.Size([1, 8, 2, 4])

    Source: state passing between ranks as in LASP-2 (arXiv 2502.07563) and Mamba's context parallelism; the maps as in
        Mamba 2 (2405.21060), DeltaNet (2406.06484), gated delta net (2412.06464) and Kimi Linear (2510.26692).
    """
    for argument, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, argument, x, 4, FORM)
    why = "Kernels differ in their default: it is 1 here, and dk ** -0.5 in flash-linear-attention"
    check_number(f"{name}: scale", scale, why, "Pass scale=1.0, or scale=q.shape[-1] ** -0.5")
    decay, beta = _decays(name, v, decay), None if beta is None else _beta(name, v, beta)
    _check(name, q, k, v, decay)
    exchanged = ulysses_degree != 1
    if final_state is not None and (exchanged or torch.is_grad_enabled()):
        found = f"ulysses_degree={ulysses_degree}" if exchanged else "gradients enabled"
        raise NotImplementedError(
            f"{name}: final_state with {found}. It is a state to decode with: all heads on every rank, and no backward"
            ". Pass ulysses_degree=1, and call it under torch.no_grad()"
        )
    cp = (mesh if isinstance(mesh, CPMesh) else cp_mesh.view(mesh, ulysses_degree)) if exchanged else None
    cp = cp_mesh.whole_view(mesh) if cp is None else cp
    table = documents_of(mesh, cp, documents, name)
    agree(name, cp, layout, table, q, k, v, decay, beta, decay=decay, final_state=final_state is not None)
    check_layout_of(name, cp, layout, table, v.shape[0], v.shape[1])
    q = q * scale if scale != 1.0 else q
    settings = text(RecurrenceSettings(layout, kernels.choose(kernel, name, q, v, decay, beta), exchanged, cp.key))
    if exchanged and cp.ulysses.size > 1:
        todo = "(1 passes states instead, for any number of heads)"
        check_split(v.shape[2], "heads of states", cp, todo, f"{name}: ")
    with calling(name):
        if final_state is not None:
            out, last = with_final_state(q, k, v, decay, beta, table, settings)
            final_state.append(last)
            return out
        if not exchanged or cp.ulysses.size == 1:
            return _op(q, k, v, decay, beta, table, settings)
        ulysses = Ulysses(cp, layout, 1, 2, table)
        # Tensors with fewer heads come last: ranks share their heads if these do not split.
        given = [x for x in (v, decay, beta, q, k) if x is not None]
        v, decay, *rest = ulysses.to_heads(*given)
        q, k = rest[-2:]
        out = _op(q, k, v, decay, rest[0] if beta is not None else None, table, settings)
        result: Tensor = ulysses.to_sequence(out)
    return result


def _op(*arguments: Any) -> Tensor:
    out: Tensor = differentiable_recurrence(*arguments)
    return out


def _decays(name: str, v: Tensor, decay: Tensor) -> Tensor:
    """Decays as ``[B, S, H, 1 or dk]``."""
    heads = v.shape[2]
    if isinstance(decay, Tensor) and decay.ndim == 1 and decay.is_floating_point():
        decay = decay.expand(*v.shape[:2], -1)
    if isinstance(decay, Tensor) and decay.ndim == 3:
        decay = decay[..., None]
    check_tensor(name, "decay", decay, 4, "[heads], [batch, positions, heads] or [batch, positions, heads, dk]")
    if decay.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{name}: decay {tuple(decay.shape)} does not fit v {tuple(v.shape)}. It needs the batch, the positions "
            f"and the {heads} heads of v. Expand or reshape it"
        )
    return decay


def _beta(name: str, v: Tensor, beta: Tensor) -> Tensor:
    check_tensor(name, "beta", beta, 3, "[batch, positions, heads]")
    if beta.shape != v.shape[:3]:
        raise ValueError(
            f"{name}: beta {tuple(beta.shape)} does not fit v {tuple(v.shape)}. It needs a number for each position "
            "and head of v. Reshape it"
        )
    return beta[..., None]


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"{name}: q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}. They must be equal. Cast them to one"
        )
    if q.shape != k.shape or q.shape[:2] != v.shape[:2] or v.shape[2] % k.shape[2]:
        raise ValueError(
            f"{name}: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit. They are [batch, "
            "positions, heads, channels]: q and k have equal shapes, the batch and positions of v, and a number of "
            "heads that divides that of v. Reshape or transpose them"
        )
    if decay.shape[3] not in (1, k.shape[3]):
        raise ValueError(
            f"{name}: decay {tuple(decay.shape)} does not fit k {tuple(k.shape)}. A head has one decay, or one for "
            f"each of the {k.shape[3]} channels of k. Reshape it"
        )

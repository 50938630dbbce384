"""``verify``: run a batch without and with context parallelism, and name the first module that differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ._torch.modules import accumulates
from .data.loss import check_gradients
from .handler import ContextParallelHandler
from .mesh import batch_state, cp_mesh
from .mesh.arguments import check_amount, check_type
from .mesh.family import split_cp_mesh
from .module.mesh_binding import bindings
from .schedule.layout import check_layout
from .style import ContextParallel, style_of
from .verification.compare import TOLERANCES, Tolerance, coarsest
from .verification.conclude import conclude
from .verification.report import Cause, Report, Row
from .verification.runs import HALF, Runs

__all__ = ["Cause", "Report", "Row", "verify"]


def verify(
    model: nn.Module,
    mesh: DeviceMesh,
    batch: Any,
    *,
    loss_fn: Callable[[Any, Any, ContextParallelHandler], Tensor] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    gradients: str = "mean",
    layout: str | None = None,
) -> Report:
    """Compare a training step with context parallelism with the same step on one device. ::

        def loss_fn(model, batch, handler):  # your training step, from the whole batch to the loss
            batch = handler.get_batch_on_this_cp_rank(batch, shift_labels=True)
            with handler.documents(batch):
                logits = model(batch["input_ids"], batch["position_ids"])
            return handler.mean_loss(logits, batch["shift_labels"])

        report = verify(model, mesh, batch, loss_fn=loss_fn)
        print(report)  # report.ok is True if nothing differs

    The step runs twice on the model: on the cp mesh, and on every rank alone with the whole batch, where ``handler``
    has a mesh of one rank. The outputs of all modules in the order of execution, the loss, and the gradients of
    parameters and floating-point inputs must be equal. The report names the first module that differs, by how much, and
    the usual cause where it recognises one. Afterwards gradients, buffers, random numbers and hooks are what they were
    before, also after an exception.

    All ranks that the model communicates with make the call. Every rank needs memory for one step on the whole batch:
    use a short sequence, with documents, padding and ignored labels as in training.

    Args:
        model: the model as it is trained: with styled modules, prepared by an integration, or plain with a ``loss_fn``
            that opens ``context_parallel(handler.mesh, ...)``; also with tensor parallelism, DDP, FSDP2 or compile
            (compiled code runs in eager mode here).
        mesh: the cp mesh, of two ranks or more.
        batch: the whole batch, the same on all ranks of the cp mesh; mostly a dict of tensors.
        loss_fn: ``loss_fn(model, batch, handler) -> loss``. Take the mesh and the shares of the batch from ``handler``.
            By default entries of the batch are passed to the forward by name, and the loss is the cross-entropy with
            ``labels`` (unshifted), or without labels a weighted sum of the output. A prepared Hugging Face model runs
            through ``prepare_batch``; on one device it computes attention by itself, unless the batch is packed.
        rtol: the relative tolerance. Default 1e-4, in fp64 1e-6. In bf16 and fp16 the error against a copy of the model
            in fp32 may be three times that of one device. (Models under FSDP and DDP cannot be copied, nor those with a
            function in place of a forward. Their tolerance is 4 times the machine epsilon, of norms.)
        atol: the absolute tolerance that is added. Default 0.
        gradients: the reduction over cp ranks that your training loop makes after backward: ``"mean"`` or ``"sum"``. It
            is made here too, except for parameters that FSDP or DDP have reduced over the cp ranks. Without ``loss_fn``
            the gradients are always averaged.
        layout: the sequence layout, for models without styled modules. Default: that of ``context_parallel``,
            ``"head_tail"``.

    Returns:
        A :class:`Report`, the same on every rank of the cp mesh: ``.ok``, a table as its text, ``.json()``, ``.module``
        (the first that differs), ``.causes`` and ``.rows``.

    Raises:
        ValueError, TypeError: for a mesh of one rank or another one than the model's, for a batch that cannot be split,
            for a ``loss_fn`` that does not use its handler or the mesh of that, and while DDP or FSDP2 accumulate
            gradients that are not reduced; as well as everything that the step raises.
    """
    style = _checked(model, mesh, loss_fn, gradients, layout)
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None:
            check_amount(name, value, "It is a tolerance, with a default for each dtype if it is left out", zero=True)
    alone = split_cp_mesh(mesh, [1]).cp(1)
    runs = Runs(model, mesh, alone, batch, style, loss_fn, average=loss_fn is None or gradients == "mean")
    calls = batch_state.calls_of_engine
    parallel = runs.parallel()
    split = runs.handler.sequence is not None or batch_state.calls_of_engine > calls
    one = runs.whole(parallel)
    selected = [event.selection for event in one.events.values()]
    whole = bool(selected) and all(x is not None and x.kind == "same" for x in selected) and not one.unmatched
    if whole and not split and not bindings(model):
        raise ValueError(
            f"loss_fn ran {type(model).__name__} on whole sequences on every rank. Both runs were the same, so there "
            "is nothing to compare. Split the batch with the third argument of loss_fn, as in "
            "handler.get_batch_on_this_cp_rank(batch), or in a block of context_parallel(handler.mesh, ...)"
        )
    kind = coarsest(one)
    exact = runs.exact(parallel, one) if rtol is None and kind in HALF else None
    tolerance = Tolerance(TOLERANCES[kind] if rtol is None else rtol, atol or 0.0, norms=kind in HALF)
    return conclude(parallel, one, exact, mesh, runs.length, tolerance, runs.documents)


def _checked(
    model: nn.Module, mesh: DeviceMesh, loss_fn: Any, gradients: str, layout: str | None
) -> ContextParallel | str:
    """Check all that can be checked before the runs. Return the style of the model's modules, or a layout."""
    check_type("model", model, nn.Module, "The outputs of its modules are compared. Pass an nn.Module")
    cp_mesh.check_mesh(mesh)
    if mesh.size() < 2:
        raise ValueError(
            f"mesh has {mesh.size()} rank. There is nothing to compare without a second one. Pass a cp mesh of two or "
            "more ranks"
        )
    check_gradients(gradients)
    todo = "It is called as loss_fn(model, batch, handler). Pass a function"
    check_type("loss_fn", loss_fn, (Callable, type(None)), todo)
    unit = next((name for name, module in model.named_modules() if accumulates(module)), None)
    if unit is not None:
        raise ValueError(
            f"module {unit!r} of {type(model).__name__} accumulates gradients that are not reduced yet, as in "
            "no_sync() of DDP and after set_requires_gradient_sync(False) of FSDP2. verify compares reduced ones, "
            "and would add its own to these. Call it before or after an accumulation, with "
            "set_requires_gradient_sync(True)"
        )
    found = bindings(model)
    if not found:
        if loss_fn is None:
            raise ValueError(
                f"no module of {type(model).__name__} runs under ContextParallel. Without a style verify does not know "
                "how attention is shared. Apply the plan first, or pass loss_fn with a context_parallel block"
            )
        return "head_tail" if layout is None else check_layout(layout)
    if layout is not None and layout != found[0].style.mode.layout:
        raise ValueError(
            f"layout={layout!r}, but the modules of {type(model).__name__} have {found[0].style.mode.layout!r}. The "
            "layout of styled modules is known. Leave it out"
        )
    other = next((b for b in found if b.active.mesh != mesh), None)
    if other is not None:
        raise ValueError(
            f"{other.name} runs on {other.active.mesh}, not on mesh={mesh}. The model is verified on its own mesh. "
            "Pass that one, or call verify inside a context_parallel_mesh block"
        )
    return style_of(found[0])

"""The beginning of a styled module's call: its documents and its mesh, and the comparison of its model across ranks.

A rank with another layer, another style or another seed than the others computes, or hangs, without a word. So before a
styled module runs for the first time on a mesh, the ranks compare the styled modules of the model that is running, its
weights, and which module it is. That costs a few requests to a store, once for each module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import checkpoint
from .._torch.compiling import is_compiling
from .._torch.modes import unseen
from .._torch.modules import averaging_ranks, holds, parameters_of, running_modules
from ..mesh.agreement import digest, digest_of_tensor
from .dtensor import CPDims, ranks_along
from .mesh_binding import Binding, Plan, StyledMesh, binding_of


@dataclass
class Model:
    """A model, its qualified names, its styled modules, and the modules that its user exempts from checks."""

    root: nn.Module
    allowed: tuple[str, ...] = ()
    """Patterns of names, and types, beside those of the styles that are applied already."""
    names: dict[int, str] = field(init=False)
    """Qualified names of the modules, by identity."""
    styled: dict[str, Binding] = field(init=False)
    exempt: list[str] = field(init=False)
    """Names of the modules that the user exempts from checks, with everything inside them."""

    def __post_init__(self) -> None:
        modules = dict(self.root.named_modules())
        self.names = {id(module): name for name, module in modules.items()}
        self.styled = {name: found for name, module in modules.items() if (found := binding_of(module)) is not None}
        allow = {*self.allowed, *(pattern for found in self.styled.values() for pattern in found.style.allow)}
        self.exempt = [
            name
            for name, module in modules.items()
            if any(fnmatchcase(name, pattern) or type(module).__name__ == pattern for pattern in allow)
        ]

    def allows(self, name: str) -> bool:
        """True if the user exempts the module (or parameter) of this name, or one that contains it."""
        return any(name == outer or holds(outer, name) for outer in self.exempt)


def model_of(module: nn.Module, applied: nn.Module | None = None) -> Model:
    """The model of a module that is running: the outermost module of this thread's calls that contains it.

    Args:
        applied: the model that a plan was applied to, which counts where user code calls its parts by themselves.
    """
    outer = [root for root in running_modules() if _contains(root, module)]
    root = outer[-1] if outer else module
    return Model(applied if applied is not None and _contains(applied, root) else root)


def _contains(root: nn.Module, module: nn.Module) -> bool:
    return any(child is module for child in root.modules())


def begin_call(
    binding: Binding, module: nn.Module, read: Callable[[], tuple[Any, ...]], given: Iterable[Any] = ()
) -> tuple[Any, ...]:
    """Return the mesh of a call of a styled module, and the batch state that ``read`` returns: the one place where
    modules get them. In a recompute by activation checkpointing they are those of the forward.

    The first call of a module on a mesh compares its model across the ranks. On a mesh of one rank ``ValueError`` is
    raised if the hidden states among the arguments that it is ``given`` are the share of a batch of several ranks.
    """
    state: tuple[Any, ...] = checkpoint.batch_state(binding, lambda: (binding.of_call(), *read()))
    if not is_compiling():
        binding.ran = True
        if binding.first_call is not None and binding.active.parallel:
            binding.first_call(binding, module)
            binding.first_call = None
        if not state[0].parallel and binding.style.qkv_indices is None:
            dim = 0 if binding.style.seq_dim == 0 else 1
            for length in {x.shape[dim] for x in given if isinstance(x, Tensor) and x.ndim == 3}:
                state[0].views[0].batch.fits(length, None, 1)
    compare_model_across_ranks(binding, module, state[0])
    return state


def compare_model_across_ranks(binding: Binding, module: nn.Module, mesh: StyledMesh) -> None:
    """Compare the model of a module that runs for the first time on this mesh with those of the other ranks.

    Raises:
        ValueError: on every rank, before any communication of tensors: if the ranks have styled other modules, or
            otherwise; if they hold other weights; if they run another module now.
        NotImplementedError: if DeepSpeed has partitioned the weights.
    """
    cp = mesh.views[0]
    if is_compiling() or cp.agreement is None or cp.agreement in binding.compared:
        return
    averaged = map(averaging_ranks, running_modules())
    cp.batch.averaged |= any(len({*ranks} & {*mesh.cp_dims.ranks}) > 1 for ranks in averaged)
    model = None
    if binding.place is None:
        model = _model(binding, module)
        _warn_of_layouts(model)
        _warn_of_meshes(model)
        plan = Plan({name: repr(found.style) for name, found in model.styled.items()})
        for name, found in model.styled.items():
            found.place = name, plan
    if binding.place is None:  # held by something else than the model: an integration
        binding.place = "", Plan({"": repr(binding.style)})
    name, plan = binding.place
    cp.agree("plan", plan.signature, binding.name, details=lambda: plan.styles)
    if cp.agreement not in plan.compared:  # the weights of another model with such a plan are others
        model = model or _model(binding, module)
        _refuse_zero3(model)
        weights = unseen(lambda: dict(digests(model, mesh.cp_dims)), torch.device(mesh.mesh.device_type))
        total = digest("".join(f"{name}={value}" for name, value in weights.items()).encode())
        cp.agree("weights", plan.signature, binding.name, (("weights", total),), lambda: weights, always=True)
        plan.compared.add(cp.agreement)
    # Plans that were applied to the blocks of a model one by one have the same names in each.
    number = 0 if binding.applied is None else binding.applied[1]
    cp.agree("module", (("module", name), ("style", plan.styles[name]), ("plan number", number)), binding.name)
    binding.compared.add(cp.agreement)


class KnownModules:
    """The modules that a model had in its calls so far: adapters may be added to one that has run."""

    def __init__(self) -> None:
        self._seen: WeakSet[nn.Module] = WeakSet()
        self._weights = 0
        self._kept: Any = WeakTensorKeyDictionary()
        """The parameters in dicts and lists of them, in which others may take their names."""
        self.unchecked = False
        """True if there are modules that the caller has not checked."""

    def __deepcopy__(self, memo: dict[int, Any]) -> KnownModules:
        return KnownModules()

    def update(self, root: nn.Module, found: Iterable[Binding]) -> None:
        """Find modules that the model did not have in its last call. If it has new weights, in these or in others, the
        next call of the bindings compares the weights of the ranks once more."""
        modules = [*root.modules()]
        new, weights = [x for x in modules if x not in self._seen], sum(len(parameters_of(x)) for x in modules)
        kept = [p for x in modules if isinstance(x, (nn.ParameterDict, nn.ParameterList)) for p in x.parameters(False)]
        again = weights > self._weights or any(parameters_of(x) for x in new) or any(p not in self._kept for p in kept)
        again = again and len(self._seen) > 0
        self._seen.update(new)
        self._kept.update(dict.fromkeys(kept))
        self._weights = weights
        for binding in found if again else ():
            binding.compared.clear()
            if binding.place is not None:
                binding.place[1].compared.clear()
        self.unchecked |= bool(new)


def _refuse_zero3(model: Model) -> None:
    """Raise for parameters of DeepSpeed's ZeRO-3 (``ds_id``), which are empty but while their own module runs."""
    name = next((name for name, p in model.root.named_parameters() if hasattr(p, "ds_id")), None)
    if name is not None:
        raise NotImplementedError(
            f"parameter {name!r} of {type(model.root).__name__} is partitioned by DeepSpeed ZeRO-3. Its values are "
            "there only while its module runs, so that weights can be neither compared between ranks nor read by "
            "losses that take the head, and no test has run this. Shard with fully_shard (FSDP2) over the ranks of "
            "dp and cp together, which does what ZeRO-3 does, or use ZeRO stage 1 or 2"
        )


def _warn_of_layouts(model: Model) -> None:
    """Warn of a model whose styles expect the sequence in different layouts: one batch has only one."""
    styles = {name: found.style for name, found in model.styled.items() if found.active.parallel}
    layouts = {f"layout={style.mode.layout!r}": name for name, style in styles.items() if not style.cross_attention}
    why = (
        "In one batch some of them would assign wrong positions to tokens. Give all styles one layout "
        "(RecurrentContextParallel has its own argument); if the model has two sequences, an encoder's and a "
        "decoder's, and no mask between them, ignore this"
    )
    _warn_of_several(model, layouts, "expect the sequence in different layouts", why)


def _warn_of_meshes(model: Model) -> None:
    """Warn of a model whose styles split the sequence over different ranks: one batch is split over some of them."""
    ranks = {f"over ranks {[*x.active.cp_dims.ranks]}": name for name, x in model.styled.items() if x.active.parallel}
    why = (
        "The ranks of one batch hold its shares, so some of them would join shares of other batches. Give all styles "
        "one mesh; if the model has two sequences, each split over its own ranks, ignore this"
    )
    _warn_of_several(model, ranks, "attend to sequences that are split over different ranks", why)


def _warn_of_several(model: Model, found: dict[str, str], what: str, why: str) -> None:
    """Warn if there are several of something that a model should have one of; each has the name of a module."""
    if len(found) > 1:
        each = " and ".join(f"{name!r} {of}" for of, name in found.items())
        warnings.warn(f"modules of {type(model.root).__name__} {what}: {each}. {why}", stacklevel=7)


def _model(binding: Binding, module: nn.Module) -> Model:
    return model_of(module, None if binding.applied is None else binding.applied[0]())


# --------------------------------------------------------------------------- weights


def digests(model: Model, cp: CPDims) -> Iterator[tuple[str, str]]:
    """Name and digest of every parameter that the ranks of a cp mesh hold alike.

    Parameters that are sharded over cp ranks (FSDP, ZeRO, expert parallelism by DTensor) are left out, and so are those
    of modules that the user exempts from checks.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.root.modules()):
        return  # its parameters are plain tensors, some of them gathered at the moment
    for name, parameter in model.root.named_parameters():
        if hasattr(parameter, "ds_id") or not getattr(parameter, "allreduce", True) or model.allows(name):
            continue  # ds_id: DeepSpeed has taken it apart; allreduce=False: Megatron and DeepSpeed mark experts so
        with suppress(Exception):  # in a trace, a transform or a lazy module values cannot be read, on any rank
            local = _replicated(parameter, cp)
            if local is not None and local.numel() and not local.is_meta:
                yield f"parameter {name!r}", digest_of_tensor(local)


def _replicated(parameter: Tensor, cp: CPDims) -> Tensor | None:
    """The local tensor of a parameter; None if cp ranks hold different parts of it."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if not isinstance(placement, Replicate) and len(set(ranks_along(mesh, dim)) & set(cp.ranks)) > 1:
            return None
    return parameter.to_local()

"""``parallelize``: context parallelism in one call, which finds a model's attention modules and chooses a mode."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ._torch import flex_patch
from ._torch.modules import holds, running_modules
from .handler import ContextParallelHandler
from .mesh import cp_mesh
from .mesh.arguments import check_type
from .mesh.cp_mesh import CPMesh
from .module import attention_calls
from .module.dispatch_mode import EnteredMode, dispatching
from .module.guards import counts_from_0, takes_positions
from .module.mesh_binding import bindings
from .module.mixers.calls import is_mixer
from .planner.cluster import cluster_of
from .planner.model import ModelShape, model_shape
from .planner.traffic import Ranks, transfers
from .planner.work import ring_work
from .schedule import choices
from .schedule.documents import PackedDocuments
from .schedule.layout import by_documents
from .schedule.tiles import CAUSAL
from .style import ContextParallel, RecurrentContextParallel, styled_modules
from .verification.model_state import restore_model_state
from .verification.record import tensors


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    quiet: bool = False,
    **settings: Any,
) -> tuple[nn.Module, ContextParallelHandler]:
    """Apply context parallelism to a model, in place: find its attention modules, choose a mode, make the handler. ::

        model, handler = parallelize(model, mesh, (tokens[:1, :64], positions[:64]))
        for batch in handler.loader(batches, shift_labels=True):
            with handler.documents(batch):
                logits = model(batch["tokens"], batch["position_ids"])
                handler.mean_loss(logits, batch["shift_labels"]).backward()

    The first rank prints what was done as a plan, a ``parallelize_module`` call that you can write in its place.

    Args:
        model: any module whose attention calls :class:`ContextParallel` can route. Models of transformers are
            prepared by :func:`hyper_cp.integrations.transformers.prepare_model`.
        mesh: the cp mesh (1-D, or 2-D ``("ring", "ulysses")``).
        example: the arguments of the model for a small whole batch, the same on every rank: a tuple, or a dict of
            keywords. The model runs once on it, without gradients, and is restored. Models of transformers need none.
        quiet: print nothing.
        settings: the arguments of :class:`ContextParallel` that you choose yourself. The others follow rules: Ulysses
            has the largest degree that splits the heads of all modules and stays on one host; if ranks are left, a ring
            runs over them, in the head-tail layout. Layouts by documents (``"balanced"``) have
            ``kv_exchange="needed"``.

    Returns:
        The model, and a handler of its style.

    Raises:
        ValueError: if no attention call is found, if the example is missing, and for all that the style refuses.
        NotImplementedError: for attention that cannot be routed, and for cross-attention, which needs a plan of yours.

    Source: the rules are those of docs/start/choosing.md.
    """
    check_type("model", model, nn.Module, "Its attention modules are found. Pass the model")
    if own := OWN & settings.keys():
        raise ValueError(
            f"parallelize got {', '.join(sorted(own))}. It finds modules that call attention themselves, whose q, k "
            "and v are [B, H, S, D]. Leave them out, or write a plan for modules that receive q, k and v"
        )
    prepared = _is_of_transformers(model)
    layers, counted = (_layers_of_config(model), []) if prepared else _found(model, example, mesh.device_type)
    heads, kv_heads = (gcd(*numbers) for numbers in zip(*(x.heads for x in layers), strict=True))
    chosen, view = _choose(mesh, heads, kv_heads, settings)
    style = ContextParallel(qkv_indices=None, **chosen)
    plan: dict[str, ParallelStyle] = dict.fromkeys(_outermost([layer.name for layer in layers]), style)
    if prepared:
        from .integrations.transformers import prepare_model

        prepare_model(model, mesh, style=style)  # type: ignore[arg-type]
    else:
        recurrent = RecurrentContextParallel(layout=style.layout, allow=style.allow)
        plan |= dict.fromkeys(_mixers(model, [*plan]), recurrent)
        parallelize_module(model, mesh, plan if [*plan] != [""] else style)
        styled_modules(model, at_least=len(plan))
    if not quiet and not view.rank:
        print(_summary(model, plan, layers, chosen, view, prepared, counted))
    if counted and view.size > 1:
        warnings.warn(
            f"in the example, {', '.join(counted)} got positions 0, 1, 2, ..., which are no argument of the model, so "
            "it counts them, perhaps by torch.arange. A rank holds other positions, and the loss would be wrong. Give "
            "the forward of the model an argument for positions, and pass it the position_ids of the batch",
            stacklevel=2,
        )
    return model, ContextParallelHandler(mesh, style)


OWN = {"qkv_indices", "qkv_kwarg_names", "seq_dim", "head_dim"}
"""Settings of a style that depend on modules, which are found."""


def _is_of_transformers(model: nn.Module) -> bool:
    """True for a model that ``prepare_model`` takes. Raises for one inside of another module, whose masks and windows
    would be those of a share."""
    names = {"peft": "PeftModel", "transformers": "PreTrainedModel"}
    peft, kind = (getattr(sys.modules.get(name), of, ()) for name, of in names.items())
    inner: Any = model.get_base_model() if isinstance(model, peft) else model
    found = next((name for name, x in inner.named_modules() if isinstance(x, kind)), None)
    if found:
        raise NotImplementedError(
            f"{type(model).__name__} holds a model of transformers, {found!r}. It makes masks and positions by itself. "
            "Call parallelize with that model, and wrap it afterwards"
        )
    return found is not None


class _Layer(NamedTuple):
    """The attention of one module, of which each rank of a mesh will compute its part."""

    name: str
    heads: tuple[int, int]
    """Heads of queries, and of keys."""
    shape: ModelShape | None
    """The sizes of what travels; None: not known."""


# --------------------------------------------------------------------------- what the model has


class _Calls(EnteredMode):
    """Records the attention calls of a model, while it is entered, with the modules that make them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.layers: dict[str, _Layer] = {}
        self.counted: dict[str, int] = {}
        """Modules that got positions 0, 1, 2, ..., and how many."""
        self.lengths: set[int] = set()
        """Positions of the attention calls."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller = next(iter(running_modules()), None)
        if caller is not None and takes_positions(func, caller):
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and counts_from_0(x)]
            self.counted |= {self.names.get(id(caller), ""): x.shape[-1] for x in given}
        routed = attention_calls.ROUTED.get(attention_calls.key_of(func))
        unrouted = attention_calls.spelled(func) if routed is None else None
        if routed is not None or unrouted is not None:
            module = next((x for x in running_modules() if id(x) in self.names), None)
            if module is None:
                raise ValueError(
                    f"{func} is called while no module of the model runs. A plan needs the name of a module that calls "
                    "attention. Put the call into a module of the model"
                )
            if routed is None:
                raise NotImplementedError(
                    f"{self._of(module)} calls {unrouted}, which cannot be routed to context-parallel attention. It "
                    "would attend to this rank's share only. Call F.scaled_dot_product_attention or flex_attention, or "
                    "write a plan with ContextParallel on modules that receive q, k, v, where pure Ulysses runs any "
                    "kernel"
                )
            self._add(module, routed.read(self._of(module), *args, **kwargs))
        return attention_calls.PLAIN.get(func, func)(*args, **kwargs)

    def _of(self, module: nn.Module) -> str:
        return f"module {self.names[id(module)]!r} ({type(module).__name__})"

    def _add(self, module: nn.Module, request: attention_calls.AttentionRequest) -> None:
        q, k, v, name = request.query, request.key, request.value, self.names[id(module)]
        if q.shape[-2] != k.shape[-2]:
            raise NotImplementedError(
                f"{self._of(module)} attends from {q.shape[-2]} queries to {k.shape[-2]} keys. Cross-attention has two "
                "sequences, and which ranks hold the second one is for you to say. Write a plan with "
                "ContextParallel(cross_attention=True), see docs/guide/encoders.md"
            )
        self.lengths.add(q.shape[-2])
        heads = (q.shape[1], k.shape[1]) if request.call.weight is None else (q.shape[1], q.shape[1])
        width = (k.shape[-1] + v.shape[-1]) // 2
        sizes: dict[str, Any] = {"layers": 1, "width": heads[0] * width, "vocabulary": 1, "head_dim": width}
        if request.call.weight is not None:
            sizes |= {"latent": k.shape[-1] + v.shape[-1], "rotary": v.shape[-1], "head_dim": q.shape[-1]}
        if (other := self.layers.get(name)) is not None and other.heads != heads:
            # One style serves all calls of a module, whose traffic is not known then.
            self.layers[name] = _Layer(name, (gcd(other.heads[0], heads[0]), gcd(other.heads[1], heads[1])), None)
            return
        self.layers[name] = _Layer(name, heads, ModelShape(heads=heads[0], kv_heads=heads[1], **sizes))


def _found(model: nn.Module, example: Any, device_type: str) -> tuple[list[_Layer], list[str]]:
    """The attention of a model, as a forward shows it, and the modules for which it counts positions itself."""
    if not isinstance(example, (tuple, list, Mapping)):
        raise ValueError(
            f"example is {example if example is None else type(example).__name__}. The attention modules of a "
            f"{type(model).__name__} are found in one forward. Pass the arguments of the model for a small whole "
            "batch, as a tuple or a dict: parallelize(model, mesh, (tokens[:1, :64],))"
        )
    if bindings(model):
        raise ValueError(
            f"{type(model).__name__} has modules to which a plan is already applied. Applying another would split "
            "sequences twice. Make the model anew, or keep what the first call has returned"
        )
    flex_patch.install(dispatching)
    calls = _Calls(model)
    with restore_model_state(model, device_type), torch.no_grad(), calls:
        _ = model(**example) if isinstance(example, Mapping) else model(*example)
    if not calls.layers:
        raise ValueError(
            f"no attention call was found in the forward of {type(model).__name__}. It calls none of "
            "F.scaled_dot_product_attention, flex_attention, nn.MultiheadAttention and hyper_cp.ops.attention, so it "
            "writes attention out by hand or has none. Call one of them; for recurrent layers alone use "
            "RecurrentContextParallel in a plan"
        )
    counted = [f"{name!r}" for name, length in calls.counted.items() if length in calls.lengths]
    given = any(counts_from_0(x) for _, x in tensors(example))
    return [*calls.layers.values()], [] if given else counted


def _layers_of_config(model: Any) -> list[_Layer]:
    """The attention of a model of transformers, as its configuration has it: one for all layers, with numbers of heads
    that divide those of each."""
    config = model.config.get_text_config(decoder=True)
    each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    heads = gcd(*(getattr(x, "num_attention_heads", None) or 1 for x in each))
    kv_heads = gcd(*(getattr(x, "num_key_value_heads", None) or heads for x in each))
    try:
        shape = model_shape(config)
    except (NotImplementedError, TypeError, ValueError):
        shape = None  # layers whose traffic nothing knows: the summary leaves it out
    return [_Layer("", (heads, kv_heads), shape)]


def _outermost(names: Sequence[str]) -> list[str]:
    """The names of modules that no other one holds: a style routes all attention calls of a module's forward."""
    return [x for x in names if not any(holds(outer, x) for outer in names)]


def _mixers(model: nn.Module, styled: Sequence[str]) -> list[str]:
    """The outermost modules that call functions of recurrences, and hold no styled module."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name == outer or holds(outer, name) for outer in (*found, *styled))
        if is_mixer(type(module)) and not inside and not any(holds(name, other) for other in styled):
            found.append(name)
    return found


# --------------------------------------------------------------------------- what is chosen


def _choose(mesh: DeviceMesh, heads: int, kv_heads: int, settings: Mapping[str, Any]) -> tuple[dict[str, Any], CPMesh]:
    """The settings of the style, and the mesh as it sees it."""
    chosen = dict(settings)
    if chosen.get("ulysses_degree", "auto") == "auto":
        alone = mesh.ndim == 1 and mesh.size() > 1
        degrees = cp_mesh.degrees_within_host(mesh) if alone else [1]
        if (exchange := chosen.get("kv_exchange")) is not None:  # it asks for a ring
            degrees = [degree for degree in degrees if degree < mesh.size() and exchange != "replicated"] or [1]
        chosen["ulysses_degree"] = choices.ulysses_degree(degrees, heads, kv_heads) if mesh.ndim == 1 else None
    view = cp_mesh.view(mesh, chosen["ulysses_degree"])
    if view.size == 1 or view.ring.size > 1:
        placed = by_documents(chosen.get("layout", "contiguous"))
        rules = {"kv_exchange": "needed" if placed else "ring", "layout": "head_tail"}
        if chosen.get("load_balance") or not chosen.get("use_local_output", True):
            del rules["layout"]  # it must be contiguous
        chosen = {**rules, **chosen}
    return chosen, view


def _summary(
    model: nn.Module,
    plan: Mapping[str, ParallelStyle],
    layers: Sequence[_Layer],
    chosen: Mapping[str, Any],
    cp: CPMesh,
    prepared: bool,
    counted: Sequence[str],
) -> str:
    """The text that is printed: what was applied, why, and what travels."""
    ring, degree = cp.ring.size, cp.ulysses.size
    heads = " and ".join(sorted({f"{q} query and {k} key/value heads" for q, k in (x.heads for x in layers)}))
    ways = [f"Ulysses over {degree} adjacent ranks"] if degree > 1 else []
    ways += [f"{chosen['kv_exchange']} over {ring}"] if ring > 1 else []
    settings = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    lines = [f"context parallelism: {cp.size} ranks share each sequence of a {type(model).__name__}"]
    lines += [f"  mode      {', '.join(ways) or 'one rank'}; layout {chosen.get('layout', 'contiguous')!r} ({heads})"]
    if prepared:
        lines += [f"  the same  prepare_model(model, mesh, style=ContextParallel({settings}))"]
    else:
        lines += _as_plan(model, plan, settings, counted)
    shapes = [x.shape for x in layers if x.shape is not None]
    if cp.size > 1 and len(shapes) == len(layers):
        each = Counter(shapes).items()  # most layers are alike
        sent = sum(number * x.layers * _bytes_sent(x, cp, chosen, _element(model)) for x, number in each)
        lines += [f"  traffic   a rank sends {sent / 1024:,.1f} KiB for each of its tokens, forward and backward"]
    return "\n".join(lines)


def _as_plan(model: nn.Module, plan: Mapping[str, ParallelStyle], settings: str, counted: Sequence[str]) -> list[str]:
    """The plan as code, and the types of modules in it and beside it."""
    names, lines = dict(model.named_modules()), []
    for style in dict.fromkeys(plan.values()):
        own = [name for name in plan if plan[name] is style]
        text = f"ContextParallel(qkv_indices=None, {settings})"
        if isinstance(style, RecurrentContextParallel):
            text = f"RecurrentContextParallel(layout={style.layout!r})"
        lines += [f"  styled    {_counted(names[name] for name in own)}", f"  the same  style = {text}"]
        keys = "style" if own == [""] else f"{{{', '.join(f'{key!r}: style' for key in _patterns(own, [*names]))}}}"
        lines += [f"            parallelize_module(model, mesh, {keys})"]
    left = [x for name, x in names.items() if not any(x.children()) and name not in plan]
    wrong = f", but {', '.join(counted)} at positions that the model counts itself" if counted else ""
    return [*lines, f"  as it is  {_counted(left)}: each works on this rank's positions{wrong}"]


def _counted(modules: Iterable[nn.Module]) -> str:
    kinds = Counter(type(module).__name__ for module in modules)
    return ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())


def _patterns(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Keys of a plan that match these names and no others: numbers that vary become stars, where they can."""
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = name.split(".")
        alike.setdefault(tuple("*" if part.isdigit() else part for part in parts), []).append(parts)
    columns = [[set(column) for column in zip(*found, strict=True)] for found in alike.values()]
    keys = [".".join("*" if len(column) > 1 else next(iter(column)) for column in found) for found in columns]
    matched = {other for other in others for key in keys if _matches(other, key)}
    return keys if matched == {*names} else list(names)


def _matches(name: str, key: str) -> bool:
    parts, keys = name.split("."), key.split(".")
    return len(parts) == len(keys) and all(fnmatchcase(part, of) for part, of in zip(parts, keys, strict=True))


def _element(model: nn.Module) -> int:
    return next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)


def _bytes_sent(shape: ModelShape, cp: CPMesh, chosen: Mapping[str, Any], element: int) -> float:
    """The bytes that a rank sends in one layer for one of its tokens, if every query sees all keys before it."""
    ring, length, layout = cp.ring.size, 1024 * cp.size, chosen.get("layout", "contiguous")
    exchange, documents = chosen.get("kv_exchange", "all_gather"), PackedDocuments([[0, length]])
    work = ring_work(layout, ring, exchange, documents, CAUSAL)
    ranks, cluster = Ranks(ring, cp.ulysses.size, cp_mesh.ranks_per_host()), cluster_of("h100")
    found = transfers(shape, cluster, ranks, exchange, 1, length, work.rank, work.ranks[work.rank], element)
    return (found.sent.inside + found.sent.between) / 1024

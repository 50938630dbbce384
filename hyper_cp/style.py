"""ContextParallel and RecurrentContextParallel: the ParallelStyles that a user puts in a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ._torch.modules import checkpointed, guard_hooks, is_compiled, refuse_compiled
from .mesh.arguments import check_bool, check_int, check_sequence
from .module.guards import guard_plan, refuse_uncalled
from .module.hooks import AttentionHooks
from .module.mesh_binding import Binding, binding_of, describe
from .module.mixers.hooks import StyledMixerHooks
from .module.mixers.named import NamedMixerHooks, named_function
from .ops.config import Mode
from .schedule.layout import by_documents


class ContextParallel(ParallelStyle):
    """Run attention modules on a sequence that is split over the ranks of a cp mesh.

    Put it on the submodules that receive q, k, v (or, with ``qkv_indices=None``, on whole attention
    blocks that compute them) in a ``parallelize_module`` plan. Everything outside these modules
    works on the local share of the sequence, so it must treat positions one by one. Modules that are known not to
    (convolutions, recurrences, batch statistics, pools) raise when the plan is applied, and attention that is not
    routed raises in the first forward of the module that the plan was applied to; ``allow`` names modules that you
    exempt from these checks. Cumulative sums, token shifts and the like, written by hand, are not detected.

    Args:
        seq_dim: the sequence dimension of q, k, v and of the output. ``[B, S, H, D]``: 1 (default).
        head_dim: their head dimension. ``[B, S, H, D]``: 2 (default); for ``[B, H, S, D]`` pass
            ``seq_dim=2, head_dim=1``.
        ulysses_degree: how many adjacent ranks trade sequence for heads. ``None``: the whole mesh
            (pure Ulysses); 1: none (all-gather or ring); in between: a hybrid; ``"auto"``: the largest
            degree that the head counts allow and that stays on one host (docs/measured/planner.md).
        qkv_indices: positions of q, k, v among the module's arguments (they may be passed by
            keyword; names come from its signature), or ``None`` if the module computes them itself
            and calls attention in ``[B, H, S, D]``. ``(0, 1, 1)``: k and v are one tensor, which the module
            splits itself (``[B, S, H, Dk + Dv]`` of latent attention); it is exchanged once.
        qkv_kwarg_names: names of q, k, v if the module takes them as keywords only.
        load_balance: under a causal mask, rank r exchanges the tail half of its queries with rank n-1-r, so that work
            on contiguous data is balanced. Nothing is exchanged where work is balanced already.
        kv_exchange: the way keys and values reach the ranks that Ulysses leaves: ``"all_gather"``, ``"ring"``,
            ``"double_ring"`` (a ring inside each host, and one between hosts), ``"needed"`` (only the rows that queries
            see travel, for documents and windows), or ``"replicated"`` (every rank has all of them already, for
            cross-attention).
        layout: the positions that each rank holds: ``"contiguous"``, or ``"head_tail"`` (rank r of n
            holds chunks r and 2n-1-r of 2n, as in Megatron, TransformerEngine and PyTorch), ``"per_document"`` (every
            document head-tail), ``"balanced"`` (chunks dealt so that work is equal and little travels, by the documents
            of the batch; ``"balanced_4096"`` for layers with a window of 4096) or ``"auto"`` (the cheapest of all); or
            the name that :func:`hyper_cp.ops.layout_of_mask` returns.
        use_local_output: ``True``: outputs have the form of q, a plain tensor or a DTensor of the same mesh and
            placements. ``False``: outputs are DTensors that are also ``Shard(seq_dim)`` on the cp mesh (contiguous
            layout only), or on the mesh of cp and tp if q was a DTensor on a tp mesh.
        window: ``(left, right)``: sliding-window attention. A query sees at most ``left`` positions before and
            ``right`` positions after its own (None or -1: no bound), and none after it if the call is causal.
        head_groups: the number of groups in which heads are exchanged. The next group travels while attention to one is
            computed, in backward too, so that attention hides Ulysses' all-to-all. It needs ``qkv_indices=None`` (a
            module that receives q, k, v in ``[B, H, S, D]`` and hands them to attention will do), and heads that split
            into the groups. ``"auto"``: chosen by heads and tokens (docs/measured/planner.md), 1 where modules
            receive q, k, v; it is logged.
        exchange_stages: the number of stages in which keys and values travel with ``kv_exchange="needed"`` or
            ``"all_gather"``; the first tiles run while the rows of later stages are on their way. More stages hide more
            of the transfers, and cost launches and merges; with ``"needed"`` they hold fewer rows at a time.
            ``"auto"``: chosen for each batch by the rows that travel (docs/measured/planner.md), and logged; an
            all-gather stays whole, except on gloo.
        latents: what travels for modules that call :func:`hyper_cp.ops.latent_attention` (and for prepared models with
            latent attention). True: latents; False: heads; None: those that are fewer numbers for a token, and the
            choice is logged.
        latents_from: the name of the layer that expands latents (``"wkv_b"``, say), if the module makes keys and values
            of latents itself (``qkv_indices=None``). The layer's input then travels, and the rotary part at the end of
            each key. The first call compares what the layer makes with the module's own keys and values, and the
            parameters that they depend on.
        exchange_dtype: ``torch.bfloat16``: fp32 gradients of keys and values (and fp32 keys and values) travel between
            the ranks that Ulysses leaves in half of the bytes, see :func:`hyper_cp.ops.attention`. None: as they are.
        cross_attention: True if keys and values are another sequence than the queries (a decoder's view of an encoder).
            The documents and the padding of a block describe the queries and hide no keys then, so that a call inside a
            block needs an explicit ``attn_mask`` over the global positions of the keys (``[B, 1, 1, Skv]``).
        max_logits: keep the largest logit of each head of each module, for QK-clip, until
            :meth:`ContextParallelHandler.max_logits` reads it (docs/guide/max_logits.md has the cost). It needs a
            routed attention call. In compiled code it breaks the graph.
        allow: modules that you exempt from these checks: qualified names or patterns of them (everything inside is
            exempt too), or names of types. They may mix positions, get positions that count from 0, call attention
            that is not routed, or have other weights on each rank.

    A call may have packed documents: run it inside ``ContextParallelHandler.documents(...)``, or pass them to
    the styled module as the keyword argument ``documents`` (see :func:`hyper_cp.ops.attention`).

    q, k, v may be DTensors (tensor parallel with ``use_local_output=False``) on a mesh beside cp, ``Shard(head_dim)``
    or ``Replicate()`` there, or on one that has cp as a dimension, ``Shard(seq_dim)`` there (``layout="contiguous"``).
    The module itself runs on local tensors; outputs are placed as q was. One style may serve any number of modules.

    Raises:
        ValueError, TypeError: at construction, at ``parallelize_module`` or at the first call, with
            the argument, its value and what would work; always before communication.
        RuntimeError: if the ring dimension has more than one rank and the module returns without
            having made an attention call that could be routed; at ``parallelize_module``, if the module, or a module
            that contains it, is compiled already (the compiled graph has no hooks); in the first forward of a model (in
            eager mode), if attention beside the styled modules attends to this rank's share only, or if no styled
            module runs.

    Note:
        Attention inside the module must be ``F.scaled_dot_product_attention`` or ``flex_attention``, unless the mesh
        is pure Ulysses and q, k, v are the module's inputs; then any kernel works.

    Example::

        >>> mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
        >>> style = ContextParallel(seq_dim=2, head_dim=1, ulysses_degree=1, kv_exchange="ring", layout="head_tail")
        >>> model = parallelize_module(model, mesh, {"layers.*.attention.inner": style})
        >>> len(styled_modules(model, at_least=2))
        2

    Source: Ulysses arXiv 2309.14509; Colossal-AI sequence parallelism 2105.13120 and the K/V
    all-gather of Llama 3 2407.21783; ring 2310.01889; hybrid (USP) 2405.07719.
    """

    def __init__(
        self,
        seq_dim: int = 1,
        head_dim: int = 2,
        ulysses_degree: int | str | None = None,
        qkv_indices: Sequence[int] | None = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = (),
        load_balance: bool = False,
        *,
        kv_exchange: str = "all_gather",
        layout: str = "contiguous",
        use_local_output: bool = True,
        window: Sequence[int | None] | None = None,
        head_groups: int | str = 1,
        exchange_stages: int | str = "auto",
        latents: bool | None = None,
        latents_from: str | None = None,
        exchange_dtype: torch.dtype | None = None,
        cross_attention: bool = False,
        max_logits: bool = False,
        allow: Sequence[str] = (),
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"head_groups": head_groups, "exchange_stages": exchange_stages, "window": window}
        options["max_logits"] = max_logits
        self.mode = Mode(kv_exchange, layout, load_balance, latents=latents, exchange_dtype=exchange_dtype, **options)
        why = "Dimensions of q, k and v are counted from the left"
        self.seq_dim = check_int("seq_dim", seq_dim, why, least=0)
        self.head_dim = check_int("head_dim", head_dim, why, least=0)
        if seq_dim == head_dim:
            raise ValueError(
                f"seq_dim={seq_dim} and head_dim={head_dim} must name different dimensions. Heads are exchanged for "
                "the sequence. For [B, S, H, D] pass 1 and 2, for [B, H, S, D] 2 and 1"
            )
        why = "It is the number of ranks that trade sequence for heads; None is the whole mesh"
        self.ulysses_degree = check_int("ulysses_degree", ulysses_degree, why, others=(None, "auto"))
        if qkv_indices is not None:
            check_sequence("qkv_indices", qkv_indices, int)
        check_sequence("qkv_kwarg_names", qkv_kwarg_names, str)
        check_sequence("allow", allow, str)
        check_bool("use_local_output", use_local_output, "Outputs have the form of q, or are DTensors")
        check_bool("cross_attention", cross_attention, "Keys are those of the queries' sequence, or of another one")
        self.qkv_indices = None if qkv_indices is None else tuple(qkv_indices)
        self.qkv_kwarg_names, self.allow = tuple(qkv_kwarg_names), tuple(allow)
        self.latents_from = latents_from
        self.use_local_output, self.cross_attention = use_local_output, cross_attention
        self._check_inputs()
        self._check_sequences()
        self.copy_of: ContextParallel | None = None
        """The user's own style, if an integration has made this one of it: handlers of that one belong to its models,
        too."""

    def _check_inputs(self) -> None:
        """Check what the module is given against where its q, k and v come from."""
        at, names = self.qkv_indices, self.qkv_kwarg_names
        if at is not None and (not _q_k_v(at) or any(i < 0 for i in at)):
            raise ValueError(
                f"qkv_indices={at!r} must be the positions of q, k and v among the arguments. They differ, but for "
                "those of k and v if these are one tensor. Pass (0, 1, 2) or (0, 1, 1), say, or None if the module "
                "computes q, k, v itself"
            )
        if names and (at is None or not _q_k_v(names) or len(set(names)) != len(set(at))):
            raise ValueError(
                f"qkv_kwarg_names={names!r} do not fit qkv_indices={at!r}. Both describe q, k and v (k and v are equal "
                "in both if they are one tensor) of a module that receives them. Pass three names, or none"
            )
        if self.mode.groups > 1 and at is not None:
            raise ValueError(
                f"head_groups={self.head_groups} with qkv_indices={at!r} is not possible. Where q, k, v are exchanged "
                "before the module runs, it sees all its heads at once, so there is nothing to overlap. Set "
                "qkv_indices=None: its attention call (F.scaled_dot_product_attention in [B, H, S, D]) then exchanges "
                "them; or head_groups=1"
            )
        if self.latents_from is not None and (not isinstance(self.latents_from, str) or at is not None):
            raise ValueError(
                f"latents_from={self.latents_from!r} with qkv_indices={at!r} (the default is (0, 1, 2)). It is the "
                "name of a layer of a module that computes q, k and v itself. Pass a name, and qkv_indices=None. (A "
                "style for prepare_model needs neither)"
            )

    def _check_sequences(self) -> None:
        """Check the form of outputs and the sequence of the keys against the layout."""
        layout, exchange = self.layout, self.kv_exchange
        if not self.use_local_output and layout != "contiguous":
            raise ValueError(
                f"use_local_output=False with layout={layout!r} is not possible. It returns Shard({self.seq_dim}) "
                "DTensors, which mean contiguous order. Set use_local_output=True, or layout='contiguous'"
            )
        apart = by_documents(layout) and exchange != "replicated"
        if self.cross_attention and (self.window is not None or apart):
            raise ValueError(
                f"cross_attention=True with layout={layout!r}, window={self.window} and kv_exchange={exchange!r}. Keys "
                "of another sequence are not near a query, and do not lie where documents place queries. Leave out "
                'window; use layout="contiguous" or "head_tail", or kv_exchange="replicated"'
            )

    @property
    def kv_exchange(self) -> str:
        """The way keys and values reach the ranks that Ulysses leaves."""
        return self.mode.kv_exchange

    @property
    def layout(self) -> str:
        """The positions that each rank holds."""
        return self.mode.layout

    @property
    def load_balance(self) -> bool:
        """True if the tail half of the queries is exchanged under a causal mask."""
        return self.mode.load_balance

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """The sliding window, ``(left, right)`` or None."""
        return self.mode.window

    @property
    def head_groups(self) -> int | str:
        """The number of groups in which heads are exchanged, or ``"auto"``."""
        return self.mode.head_groups

    @property
    def exchange_stages(self) -> int | str:
        """The number of stages of the exchange, or ``"auto"``."""
        return self.mode.exchange_stages

    @property
    def latents(self) -> bool | None:
        """True if latents travel, False if heads do; None: whichever are fewer numbers."""
        return self.mode.latents

    @property
    def exchange_dtype(self) -> torch.dtype | None:
        """The dtype in which wider keys, values and gradients travel."""
        return self.mode.exchange_dtype

    @property
    def max_logits(self) -> bool:
        """True if modules keep the largest logit of each head."""
        return self.mode.max_logits

    def __repr__(self) -> str:
        names = "seq_dim head_dim ulysses_degree qkv_indices kv_exchange layout load_balance window head_groups"
        names += " exchange_stages latents latents_from exchange_dtype use_local_output cross_attention"
        names += " max_logits allow"
        return f"ContextParallel({', '.join(f'{name}={getattr(self, name)!r}' for name in names.split())})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        inner = checkpointed(module)
        if inner is not None:  # a recompute runs the hooks of the module inside the wrapper, not those of the wrapper
            self._apply(inner, device_mesh)
            return module
        if binding_of(module) is not None:
            raise ValueError(
                f"{type(self).__name__} is already applied to {describe(module)}. Applying it twice would split "
                "the sequence twice. Apply the plan once"
            )
        refuse_uncalled(module)
        if isinstance(module, nn.MultiheadAttention) and self.qkv_indices is not None:
            raise ValueError(
                f"qkv_indices={self.qkv_indices} on {describe(module)}. This module receives [B, S, C] and makes the "
                "heads of q, k, v itself. Set qkv_indices=None: its attention is then routed, in every mode"
            )
        refuse_compiled(module, describe(module))
        guard_hooks()
        hooks = self._hooks(module, device_mesh)
        guard_plan(module, hooks.binding, device_mesh)
        hooks.attach(module)
        return module

    def _hooks(self, module: nn.Module, device_mesh: DeviceMesh) -> AttentionHooks | StyledMixerHooks:
        return AttentionHooks(self, device_mesh, module)


class RecurrentContextParallel(ContextParallel):
    """Run modules whose state runs along the sequence (mixers) on a sequence that is split over the ranks of a cp mesh.

    Put it on modules that call one of these functions, under any name, in a ``parallelize_module`` plan:
    ``causal_conv1d_fn``, ``chunk_gated_delta_rule``, ``chunk_kda``, ``chunk_gla``, ``chunk_simple_gla`` (fla),
    ``mamba_chunk_scan_combined``, ``selective_scan_fn`` (mamba_ssm), or the plain torch ones that transformers has in
    their place. While such a module runs, these functions compute recurrences and convolutions over the whole sequence.
    Fused functions (``mamba_inner_fn``, ``mamba_split_conv1d_scan_combined``) return None, so that a mixer of
    transformers calls the functions above instead.

    A module that receives q, k, v and gates as arguments, and computes the recurrence in code of its own, needs
    ``kind``: the function that it computes, which then replaces its forward. (Its states never show outside of it, so
    nothing else would be exact.) In other modules call :func:`hyper_cp.ops.linear_recurrence` and
    :func:`hyper_cp.ops.causal_conv1d`.

    Args:
        ulysses_degree: 1 (default) passes states between ranks, for any number of heads. ``None`` exchanges the
            sequence of all ranks for heads of states, which must split over them (on a 2-D mesh: those of its
            ``ulysses`` dimension).
        kind: the function that a module computes: ``"linear_recurrence"``, or the public name of one of those above
            (``"chunk_gated_delta_rule"``, ``"mamba_chunk_scan_combined"`` ...). The first call compares it with the
            module's own forward on a few tokens, which must not depend on parameters that are no arguments.
        arguments: with ``kind``, the places of the function's arguments: ``{"q": 0, "g": "gates"}``, positions among
            the module's arguments or names of parameters of its forward. Arguments with equal names may be left out.
        options: with ``kind``, further arguments of the function: ``scale``, ``use_qk_l2norm_in_kernel``,
            ``dt_softplus``, ``dt_limit``, ``delta_softplus``, ``activation``.
        seq_dim, head_dim: with ``kind``, the dimensions of the sequence and of heads: 1 and 2, or 2 and 1.
        layout: as in :class:`ContextParallel`; it must be the layout of the attention modules of the model.
        allow: as in :class:`ContextParallel`.

    Raises:
        ValueError, TypeError, NotImplementedError: for a module that calls none of these functions (when the plan is
            applied), for a cache, an initial state or ``seq_idx`` in a call, for a module that does not compute its
            ``kind``, before communication.
        RuntimeError: if the module returns without having called one of them.

    Example::

        >>> mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
        >>> plan = {"layers.*.mixer": RecurrentContextParallel(layout="head_tail")}
        >>> hybrid = parallelize_module(hybrid, mesh, plan)

    Source: state passing between ranks as in LASP-2 (arXiv 2502.07563); see :func:`hyper_cp.ops.linear_recurrence`.
    """

    mixers = True

    def __init__(
        self,
        ulysses_degree: int | None = 1,
        *,
        kind: str | None = None,
        arguments: Mapping[str, int | str] | None = None,
        options: Mapping[str, Any] | None = None,
        seq_dim: int = 1,
        head_dim: int = 2,
        layout: str = "contiguous",
        allow: Sequence[str] = (),
    ) -> None:
        if ulysses_degree not in (None, 1):
            raise ValueError(
                f"ulysses_degree={ulysses_degree!r} of RecurrentContextParallel must be 1 (states pass between ranks) "
                "or None (all ranks of the mesh exchange heads). States are small, so that degrees between them gain "
                "nothing. Set it to 1"
            )
        super().__init__(seq_dim, head_dim, None, None, layout=layout, allow=allow)
        self.exchange_heads = ulysses_degree is None
        self.named = named_function(kind, arguments, options, seq_dim, head_dim)

    def __repr__(self) -> str:
        degree, named = None if self.exchange_heads else 1, "" if self.named is None else f"{self.named}, "
        return (
            f"RecurrentContextParallel(ulysses_degree={degree}, {named}layout={self.mode.layout!r}, allow={self.allow})"
        )

    def _hooks(self, module: nn.Module, device_mesh: DeviceMesh) -> StyledMixerHooks:
        if self.named is None:
            return StyledMixerHooks(self, device_mesh, module, self.exchange_heads)
        return NamedMixerHooks(self, device_mesh, module, self.exchange_heads, self.named)


def style_of(binding: Binding) -> ContextParallel:
    """The style of a binding, by its full type."""
    return cast(ContextParallel, binding.style)


def styled_modules(model: nn.Module, at_least: int = 0, *, ran: bool = False) -> dict[str, ContextParallel]:
    """Return the modules of ``model`` that run under ContextParallel: ``{fully qualified name: style}``.

    Use it after ``parallelize_module``, which only warns about a plan that matches nothing:
    ``styled_modules(model, at_least=1)`` raises ``ValueError`` in that case, as it does if two modules
    expect the sequence in different layouts. It also lets later errors call the modules by these names.

    Args:
        at_least: the number of modules that the plan should match: ``model.config.num_hidden_layers``, say.
        ran: also raise if one of them has not run yet. Use it after the first step: a module that is never called
            leaves its attention to other code. (Calls in compiled graphs are not counted.)

    Raises:
        ValueError: if there are fewer, if one has not run, or if they expect the sequence in different layouts.
    """
    found = {}
    for name, module in model.named_modules():
        binding = binding_of(module)
        if binding is not None:
            binding.name = f"module {name!r} ({type(module).__name__})"
            found[name] = style_of(binding)
    if len(found) < at_least:
        hidden = any(is_compiled(module) for module in model.modules())
        names = f" ({', '.join(found)})" if found else ""
        raise ValueError(
            f"ContextParallel was applied to {len(found)} modules of {type(model).__name__}{names}, and "
            f"at_least={at_least} are expected. Some keys of the plan match no module names. Compare them with "
            "[name for name, _ in model.named_modules()]"
            + (". (Wrappers are part of the names: apply the plan before torch.compile)" if hidden else "")
        )
    idle = [name for name, module in model.named_modules() if name in found and not _has_run(module)] if ran else []
    if idle:
        raise ValueError(
            f"{len(idle)} of {len(found)} modules under ContextParallel have not run: {', '.join(idle[:5])}. Their "
            "attention is computed somewhere else, or not at all. Apply the style to modules that the model calls"
        )
    layouts = {style.mode.layout: name for name, style in found.items()}
    if len(layouts) > 1:
        raise ValueError(
            f"modules of {type(model).__name__} expect the sequence in different layouts ("
            + ", ".join(f"{name}: {layout!r}" for layout, name in layouts.items())
            + "), but they share one batch. Give all styles one layout"
        )
    return found


def _has_run(module: nn.Module) -> bool:
    binding = binding_of(module)
    return binding is not None and (binding.ran or not binding.active.parallel)


def _q_k_v(where: Sequence[object]) -> bool:
    """True for three positions or names, of which only those of k and v may be equal."""
    return len(where) == 3 and where[0] not in where[1:]

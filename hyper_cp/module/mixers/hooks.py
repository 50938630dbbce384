"""The hooks of one mixer: while its forward runs, its recurrent calls mean recurrences over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..._torch.compiling import is_compiling
from ..._torch.modules import calls_running, numbered_alike
from ...mesh.cp_mesh import CPMesh
from ..dispatch_mode import alone
from ..mesh_binding import Binding, Style, describe, documents_keyword, takes_documents
from ..model import begin_call
from ..running_call import shares_in
from .calls import RunningMixer, is_mixer, route, route_mixer, running_mixers

Where = tuple[CPMesh, str, Tensor | None, int | None]
"""The mesh, layout, documents and Ulysses degree of a call."""


class MixerHooks:
    """The forward-pre-hook and the forward hook of a mixer.

    Args:
        name: names the module in errors.
        where: reads the mesh, layout and documents of a call of the module; None: one rank, nothing is routed.
    """

    def __init__(
        self, module: nn.Module, name: str, where: Callable[[nn.Module], Where | None] = lambda _: None
    ) -> None:
        self.name, self.where, self.warned = name, where, False
        self.check_calls(module)
        if getattr(module, "bidirectional", False) or getattr(module, "is_causal", True) is False:
            raise NotImplementedError(
                f"{name} is bidirectional (bidirectional=True or is_causal=False). Context parallelism passes states "
                "forward along the sequence, and the way back would need a pass of its own. Give a second module the "
                "flipped whole sequence (a share's flip is another one): "
                'handler.dispatch(handler.combine(x, length=batch.length, gradients="shares").flip(1), pad_value=0)'
            )

    def check_calls(self, module: nn.Module) -> None:
        """Route the functions that the module calls; raise if it calls none."""
        if not is_mixer(type(module)):
            raise NotImplementedError(
                f"{self.name} calls none of the functions that context parallelism can route along the sequence "
                "(causal_conv1d_fn, chunk_gated_delta_rule, chunk_kda, chunk_gla, mamba_chunk_scan_combined, "
                "selective_scan_fn). If it mixes positions, it would do so over this rank's share only. If it receives "
                "q, k, v and gates as arguments, name the function that it computes (kind=). Else leave it out of the "
                "plan, and call hyper_cp.ops.linear_recurrence(..., mesh=...) in it"
            )
        route_mixer(module)

    def attach(self, module: nn.Module) -> None:
        """Register the hooks."""
        with numbered_alike(module):
            module.register_forward_pre_hook(self.before, with_kwargs=True)
            module.register_forward_hook(self.after, always_call=True)
        for child in module.modules():
            if isinstance(child, (nn.Conv1d, nn.RNNBase)):
                with numbered_alike(child):
                    child.register_forward_pre_hook(self.refuse_child)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin to route."""
        self.begin(module, self.where(module), (*args, *kwargs.values()))
        return args, kwargs

    def begin(self, module: nn.Module, found: Where | None, given: tuple[Any, ...]) -> None:
        """Route the calls of a module that begins to run with these arguments; None: one rank, nothing is routed."""
        while (outer := running_mixers.top) is not None:
            # The call that begins here is on the stack of Python too: another one of the same module needs two.
            interrupted = not is_compiling() and outer.module is module and calls_running(module) < 2
            if outer.alive() and not interrupted:
                break
            running_mixers.remove(outer)  # a KeyboardInterrupt ended that call without its hooks
        if found is not None:
            if not is_compiling():
                route(type(module))  # again: a cell of a notebook may have bound the functions anew
            shares = [] if is_compiling() or self.warned else shares_in(given)
            running_mixers.push(RunningMixer(self.name, module, *found, owner=self, shares=shares))
        else:
            alone.push(module)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Stop routing; raise if nothing was routed."""
        alone.remove(module)
        mixer = running_mixers.top
        if mixer is None or mixer.module is not module:
            return
        running_mixers.remove(mixer)
        if output is not None and not mixer.routed:
            raise RuntimeError(
                f"{self.name} returned without calling one of the functions that context parallelism routes. It ran "
                "over this rank's share of the sequence only. Pass use_cache=False and no states; if it is another "
                "kind of module, leave it out of the plan"
            )

    def refuse_child(self, child: nn.Module, args: Any) -> None:
        """Raise for a convolution or a recurrence that is called as a module, and not by its weights."""
        running = running_mixers.top
        mixer = None if running is None or not running.alive() else running.module
        if mixer is not None and any(child is inner for inner in mixer.modules()):
            raise NotImplementedError(
                f"{self.name} calls its {type(child).__name__} as a module, over this rank's share of the sequence. "
                "Context parallelism routes causal_conv1d_fn and its kind, which take the weights. Use a version of "
                "the model that calls them, or leave it out of the plan"
            )


class StyledMixerHooks(MixerHooks):
    """The hooks of a module under :class:`hyper_cp.RecurrentContextParallel`."""

    def __init__(self, style: Style, device_mesh: DeviceMesh, module: nn.Module, exchange_heads: bool) -> None:
        self.exchange_heads = exchange_heads
        self.binding = Binding(style, device_mesh, describe(module))
        super().__init__(module, self.binding.name)
        self.takes_documents = takes_documents(module)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin to route, with the documents of the call."""
        self.name = self.binding.name
        given, kwargs = documents_keyword(kwargs, self.takes_documents)
        tensors = (*args, *kwargs.values())
        mesh, documents = begin_call(self.binding, module, lambda: (self.binding.active_documents(given),), tensors)
        where = mesh.views[0], self.binding.style.mode.layout, documents, None if self.exchange_heads else 1
        self.begin(module, where if mesh.parallel or documents is not None else None, tensors)
        return args, kwargs

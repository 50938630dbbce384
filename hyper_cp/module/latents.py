"""Modules that make keys and values of latents themselves: their latents travel in place of what they made."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from .._torch.compiling import is_compiling
from .._torch.leaves import broadcasts, joined, leaves_of
from .._torch.modes import unseen
from ..mesh.comm import gather_ranks
from ..mesh.cp_mesh import CPMesh
from ..ops.config import Call, Mode
from ..ops.latents import expand
from .latent_weight import NO_WEIGHT, is_read, latents_and_weight, say_heads_travel
from .replaced import conditions, name_of

_MOVES = re.compile(
    "View|Reshape|Split|Slice|Transpose|^TBackward|Permute|Movedim|queeze|Select|Index|Narrow|Unbind|Expand|Repeat|Clone|Copy|Cat"
    "|Stack|Pad|Alias|Strided|TorchTensor|Redistribute|Hook|RegisterPostBackward"
)
"""Names of functions in a graph of autograd that move numbers, or cast them."""
_CUTS = re.compile("Clamp|Hardtanh|Maximum|Minimum|Where|Masked|Relu|Threshold|Dropout|Index(Put|Fill|Add|Copy)")
"""Names of functions that may do nothing in one call and something in the next."""


def _cuts(node: Any) -> bool:
    """True for such a function, or one that has changed a part of a tensor in place and put no other tensor there."""
    in_place = node.name().endswith("CopySlices") and not any(other for other, _ in node.next_functions[1:])
    return in_place or bool(_CUTS.search(node.name()))


class LatentLayer:
    """The layer of a styled module that expands latents ``[B, S, R]`` to keys and values ``[B, S, H * (Dn + Dv)]``.

    Its input is kept until the module calls attention, with keys that end in a rotary part. The first such call
    compares keys and values with those that its weight makes of the latents, on all ranks. The first one with
    gradients also compares the parameters that they depend on, since a gain of 1 changes no value yet.
    """

    def __init__(self, owner: str, name: str, module: nn.Module) -> None:
        found = dict(module.named_modules()).get(name)
        if found is None:
            layers = [at for at, x in module.named_modules() if isinstance(x, nn.Linear)]
            raise ValueError(
                f"latents_from={name!r} is no submodule of {owner}. It names the layer that expands latents to keys "
                f"and values. Pass one of its layers: {', '.join(layers) or 'it has no nn.Linear'}"
            )
        self.owner, self.name, self.module = owner, name, module
        self.kept: tuple[nn.Module, Tensor] | None = None
        """The layer that was called last, and its input."""
        self.made: Any = None
        """The node of its output in the graph of autograd."""
        self.shared: bool | None = None
        """True if all heads have one rotary part; None before the first call."""
        self.compared: set[object] = set()
        """The meshes and conditions in which keys and values have been compared."""
        self.layer = found
        """The layer whose weight they have been compared with."""
        self.unclear = False
        """True if keys may depend on parameters that latents would drop."""
        found.register_forward_pre_hook(self.keep, with_kwargs=True)
        found.register_forward_hook(self.keep_node)

    def keep(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the latents of a call of the layer."""
        if not is_read(layer):
            given = [*args, *kwargs.values()]
            self.kept = (layer, given[0]) if given else None

    def keep_node(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Keep the node of the output of a call of the layer."""
        if not is_compiling() and not is_read(layer):
            self.made = output.grad_fn if isinstance(output, Tensor) else None

    def forget(self) -> None:
        """Let go of the last call: a node would keep its graph, and a module that holds one cannot be copied."""
        self.kept = self.made = None

    def in_place_of(
        self, cp: CPMesh, qkv: tuple[Tensor, Tensor, Tensor], call: Call, mode: Mode
    ) -> tuple[Tensor, Tensor, Call]:
        """Latents and their rotary part in place of k and v, and the call with the weight; or k and v, if heads must
        travel."""
        kept, made = self.kept, self.made
        self.forget()
        q, k, v = qkv
        if kept is None or call.weight is not None or mode.latents is False or self.unclear:
            return k, v, call
        layer, latent = self._with_adapters(kept[0]), kept[1]
        found = latents_and_weight(layer, latent)
        self.forget()  # an adapter calls the layer for its weight
        if found is None:
            say_heads_travel(self.owner, self.name, NO_WEIGHT)
            return k, v, call
        if is_compiling() and self.shared is None:
            say_heads_travel(self.owner, self.name, "ran in a compiled graph first")
            return k, v, call
        latent, weight, bias = found
        plain = len(weight) // q.shape[1] - v.shape[3]
        if layer is not self.layer:
            self.layer = layer
            self.compared.clear()
        now = None if is_compiling() else (cp.key, conditions(self.module))
        if now is not None and now not in self.compared:
            before = self.shared
            if not self._compare(cp, latent, q, k, v, weight, bias, plain):
                self.shared = before
                return k, v, call
            if torch.is_grad_enabled() and not self._depends_alike(cp, [latent, weight, bias], k, v, plain, made):
                return k, v, call
            self.shared = self.shared and before is not False
            self.compared.add(now)
        rope = k[:, :1, :, plain:] if self.shared else k[..., plain:]
        return latent.unsqueeze(1), rope, replace(call, weight=weight, bias=bias)

    def _with_adapters(self, layer: nn.Module) -> nn.Module:
        """The module that is in the place of the layer, if it has further parameters: adapters that were put around
        the layer after the plan was applied. Else the layer."""
        try:
            named = self.module.get_submodule(self.name)
        except AttributeError:
            return layer
        if named is layer or len([*named.parameters()]) == len([*layer.parameters()]):
            return layer
        return named

    def _compare(
        self,
        cp: CPMesh,
        latent: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plain: int,
    ) -> bool:
        """Raise ``ValueError`` on every rank unless keys and values are what the weight makes of the latents. False:
        a rank cannot tell yet, since its numbers are zero."""
        heads, bar = q.shape[1], 1e-9 if q.dtype == torch.float64 else 1e-4 if q.dtype == torch.float32 else 3e-2

        def verdicts() -> list[bool]:
            fits = latent.ndim == 3 and latent.shape[1] == k.shape[2] and k.shape[1] == v.shape[1] == heads
            fits = fits and len(weight) % heads == 0 and 0 < plain < k.shape[3] and weight.shape[1] == latent.shape[2]
            known = one = True
            if fits:
                rope = k[..., plain:]
                made = expand(latent.to(weight.dtype).unsqueeze(1), rope, heads, k.shape[3], weight, bias)
                fits = all(bool((a - b).abs().max() <= bar * b.abs().max()) for a, b in zip(made, (k, v), strict=True))
                known = all(bool(x.any()) for x in (k[..., :plain], v, rope))
                one = bool((rope == rope[:, :1]).all())
            mine = torch.tensor([fits, known, one], dtype=torch.uint8, device=q.device)
            found: list[bool] = gather_ranks(cp.flat, mine).amin(0).bool().tolist()
            return found

        fits, known, one = unseen(verdicts, q.device)
        if not fits:
            raise ValueError(
                f"latents_from={self.name!r}: {self.owner} calls attention with key {tuple(k.shape)} and value "
                f"{tuple(v.shape)}, which are not what that layer makes of its input {tuple(latent.shape)} with a "
                "rotary part behind each key, here or on another rank. Latents could not travel in their place. Name "
                "the layer whose output is [.., heads * (Dn + Dv)], or leave latents_from out"
            )
        self.shared = one if known else None
        return known

    def _depends_alike(
        self, cp: CPMesh, sources: list[Tensor | None], k: Tensor, v: Tensor, plain: int, made: Any
    ) -> bool:
        """Raise ``ValueError`` on every rank if keys or values depend on parameters beside those of the layer and of
        the latents. False: the graph of autograd does not tell these from the rotary part's, or has a function that may
        change keys in a later call (a clamp)."""
        parts = joined(k, plain)
        content, rope = (k.grad_fn, None) if parts is None else parts
        other: list[Tensor] = []
        between: set[str] = set()
        cuts: set[str] = set()
        edges = [get_gradient_edge(x).node for x in sources if x is not None and x.requires_grad]
        past: list[Any] = []

        def is_source(node: Any) -> bool:
            if node is made or node in edges:
                past.extend([node] if node is not made else [])
                return True
            if _cuts(node):
                cuts.add(node.name())
            return False

        def is_made(node: Any) -> bool:
            stops = is_source(node)
            if not stops and not _MOVES.search(node.name()):
                between.add(node.name())
            return stops

        def verdicts() -> list[bool]:
            found = [*leaves_of([v.grad_fn, *([] if parts is None else [content])], is_made)]
            if found or past:
                between.clear()  # adapters of the layer, say, or its output was changed in place: that is another node
            found += leaves_of([content] if parts is None else [], is_source)  # the rotary part is in the same graph
            of_heads = [*leaves_of([rope], lambda node: broadcasts(node, k.shape[1]))] if self.shared else []
            known = {id(x) for x in leaves_of(edges)} if found or of_heads else set()
            other.extend(x for x in found if id(x) not in known)
            own = any(id(x) not in known for x in of_heads)
            unclear = bool(between or cuts) or (bool(other) and parts is None)
            mine = torch.tensor([bool(other), unclear, own], dtype=torch.uint8, device=k.device)
            all_ranks: list[bool] = gather_ranks(cp.flat, mine).amax(0).bool().tolist()
            return all_ranks

        depends, unclear, own = unseen(verdicts, k.device)
        names = (
            ", ".join([*sorted(between | cuts), *(name_of(self.module, x) for x in other)])
            or "something on another rank"
        )
        if unclear:
            self.unclear = True
            say_heads_travel(self.owner, self.name, f"may not be all that makes keys of latents ({names})")
            return False
        if depends:
            raise ValueError(
                f"latents_from={self.name!r}: keys or values of {self.owner} also depend on {names}, which that layer "
                "does not have. Latents in their place would leave it out: no gradient would reach it, and outputs "
                "would be wrong once it is trained. Apply it to the latents, or to the layer (as adapters are), or "
                "leave latents_from out"
            )
        self.shared = self.shared and not own  # a rotary part for each head brings each its gradient
        return True

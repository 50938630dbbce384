"""Recurrent layers of unmodified models in a ``context_parallel`` block, and functions inside documents blocks."""

from __future__ import annotations

import copy
import functools
import sys
import threading
import warnings
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, ContextParallelHandler, RecurrentContextParallel, context_parallel
from hyper_cp.mesh.share_lengths import ShareLengths
from hyper_cp.module.mixers import calls
from hyper_cp.ops import attention, causal_conv1d, linear_recurrence, windows
from tests.harness import mixer, modules
from tests.harness.ranks import Ranks, error_of, on_ranks, sum_over_ranks
from tests.harness.recurrence_oracle import convolve, recur

DOCUMENTS = [0, 3, 13, 24]


def whole() -> Tensor:
    return torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def alone(documents: list[int] | None) -> list[Tensor]:
    model, edges = mixer.make(), documents or [0, 24]
    out = torch.cat([model(whole()[:, a:b]) for a, b in pairwise(edges)], 1)
    out.square().sum().backward()
    return [out.detach(), gradient(model)]


@on_ranks
def errors() -> dict[str, float]:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), {}
    for layout, documents, recomputed in (
        ("head_tail", None, False),
        ("contiguous", DOCUMENTS, False),
        ("head_tail", DOCUMENTS, True),
    ):
        model, x = mixer.make(), whole()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], layout=layout) as handler:
            with handler.documents(documents):
                out = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
            out.square().sum().backward()
            got = [handler.combine(out.detach(), 1), sum_over_ranks(gradient(model))[0]]
        want = alone(documents)
        found[f"{layout} {documents}"] = max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))
    # Outside of the block, and on one rank, the functions are what they were.
    one = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("others", "cp"))["cp"]
    with context_parallel(one):
        found["one rank"] = (mixer.make()(whole()) - alone(None)[0]).abs().max().item()
    found["outside"] = (mixer.make()(whole()) - alone(None)[0]).abs().max().item()
    return found


def test_mixers_in_a_block_are_exact(ranks: Ranks) -> None:
    for found in ranks(2, errors):
        assert all(error <= 1e-10 for error in found.values()), found


class RwkvAttention(nn.Module):
    """Runs along the sequence by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.key(x).cumsum(1)


HOW = ("sequential", "product", "einsum")


class RGLRUByHand(nn.Module):
    """Projects its inputs without a module of its own kind in between."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.eye(8, dtype=torch.float64))
        self.proj = nn.Sequential(nn.Sequential(nn.Linear(8, 8, dtype=torch.float64)), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "sequential":
            return self.proj(x)
        return x @ self.weight if self.how == "product" else torch.einsum("bsc,cd->bsd", x, self.weight)


@on_ranks
def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def run(model: nn.Module, reentrant: bool = False, **options: Any) -> None:
        x = whole()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], **options):
            checkpoint(model, x.clone().requires_grad_(), use_reentrant=True) if reentrant else model(x)

    return {
        "by none": error_of(lambda: run(nn.Sequential(RwkvAttention()))),
        **{f"by none, {how}": error_of(lambda how=how: run(nn.Sequential(RGLRUByHand(how)))) for how in HOW},
        "output_final_state": error_of(lambda: run(mixer.make(output_final_state=True))),
        "cached state": error_of(lambda: run(mixer.make(mixer.Decodes))),
        "conv1d": error_of(lambda: run(mixer.make(mixer.CallsModule))),
        "reentrant": error_of(lambda: run(mixer.make(), reentrant=True)),
        "": error_of(lambda: run(nn.Sequential(RwkvAttention()), allow=("0",))),
    }


def test_recurrences_that_a_block_cannot_route_are_refused(ranks: Ranks) -> None:
    for found in ranks(2, refusals):
        assert found.pop("") == ""
        for text, error in found.items():
            assert text.split(", ")[0] in error, (text, error)
            assert error.startswith(("RuntimeError", "NotImplementedError")), (text, error)


class NamedGatedDeltaNet(mixer.Mixer):
    """A mixer that is known by its name too."""


@on_ranks
def in_a_thread_of_backward() -> tuple[bool, str]:
    """Attention of a thread that inherits a block's mode, as threads of autograd do, and a mixer's projection there."""
    mesh, g = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), torch.Generator().manual_seed(3)
    q, layer = torch.randn(1, 2, 12, 4, generator=g), mixer.make(NamedGatedDeltaNet)
    found: list[Any] = []

    def inherited(mode: Any) -> None:
        torch.overrides._push_mode(mode)
        try:
            found.append(F.scaled_dot_product_attention(q, q, q, is_causal=True))
            found.append(error_of(lambda: layer(whole())))
        finally:
            torch.overrides._pop_mode()

    with context_parallel(mesh):
        want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        thread = threading.Thread(target=inherited, args=(torch.overrides._get_current_function_mode(),))
        thread.start(), thread.join()
    return torch.equal(want, found[0]), found[1]


def test_threads_of_backward_route_attention_and_refuse_recurrences(ranks: Ranks) -> None:
    for equal, error in ranks(2, in_a_thread_of_backward):
        assert equal and error.startswith("RuntimeError") and "NamedGatedDeltaNet" in error, error


@on_ranks
def functions() -> dict[str, tuple[float, str]]:
    """Errors of functions that read the documents of a block, and what recomputes after it raise."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    handler, g = ContextParallelHandler(mesh, "head_tail"), torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 24, 4, generator=g, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(2, 3, generator=g, dtype=torch.float64)

    def recurrence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return linear_recurrence(q, k, v, -v[..., 0].abs(), mesh=mesh, layout="head_tail").transpose(1, 2)

    def convolution(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_conv1d(q[..., 0] + k[..., 0] * v[..., 0], weight, mesh=mesh, layout="head_tail")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, is_causal=True, mesh=mesh, layout="head_tail")

    local = [handler.dispatch(x, 2).requires_grad_() for x in (q, k, v)]
    by_token = [x.transpose(1, 2) for x in (q, k, v)]
    apart = [[x[:, :, a:b] for x in (q, k, v)] for a, b in pairwise(DOCUMENTS)]
    want = (
        (recurrence, recur(*by_token, -by_token[2][..., 0].abs(), None, [DOCUMENTS]).transpose(1, 2)),
        (convolution, convolve(q[..., 0] + k[..., 0] * v[..., 0], weight, None, [DOCUMENTS])),
        (attend, torch.cat([F.scaled_dot_product_attention(*x, is_causal=True) for x in apart], 2)),
    )
    found = {}
    for run, expected in want:
        with handler.documents(DOCUMENTS):
            out = checkpoint(run, *local, use_reentrant=False)
        error = (handler.combine(out.detach(), 2) - expected).abs().max().item()
        found[run.__name__] = error, error_of(lambda out=out: out.sum().backward())
    with handler.documents(DOCUMENTS):  # documents describe queries only
        everywhere = attention(local[0], k[:, :, :5], v[:, :, :5], mesh=mesh, kv_exchange="replicated")
    expected = F.scaled_dot_product_attention(local[0], k[:, :, :5], v[:, :, :5])
    found["cross"] = (everywhere - expected).abs().max().item(), ""
    return found


def test_functions_read_the_documents_of_a_block(ranks: Ranks) -> None:
    for found in ranks(2, functions):
        for error, recompute in found.values():
            assert error <= 1e-10 and not recompute, found  # tests/ops/test_recomputes.py compares gradients


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, None]:
    return recur(q * k.shape[-1] ** -0.5, k, v, g, None, None), None


def helper(*args: Tensor) -> Any:
    return chunk_gla(*args)


REGISTRY = {"gla": chunk_gla}
PARTIAL = functools.partial(chunk_gla)


class Calls(nn.Module):
    """Calls its recurrence in a way of its own."""

    kept = staticmethod(chunk_gla)

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.inner = nn.Linear(8, 16).double(), modules.BNSD(True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g = (y.unflatten(-1, (2, 2)) for y in self.proj(x).chunk(4, -1))
        out: Tensor = self.call(q, k, v, -g.abs())[0]
        return out.flatten(2)


class Placeholder:
    """Stands in a file for a package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("please install it")


missing = Placeholder()


class Helper(Calls):
    other = missing

    def call(self, *args: Tensor) -> Any:
        return missing.chunk(*args) if len(args) > 4 else helper(*args)


class Property(Calls):
    @property
    def call(self) -> Any:
        return chunk_gla


class Nested(Calls):
    def call(self, *args: Tensor) -> Any:
        return (lambda *given: chunk_gla(*given))(*args)


class OfClass(Calls):
    @classmethod
    def call(cls, *args: Tensor) -> Any:
        return chunk_gla(*args)


class Registered(Calls):
    def call(self, *args: Tensor) -> Any:
        return REGISTRY["gla"](*args)


class Partial(Calls):
    def call(self, *args: Tensor) -> Any:
        return PARTIAL(*args)


class Static(Calls):
    def call(self, *args: Tensor) -> Any:
        return self.kept(*args)


RAW = (chunk_gla,)  # a tuple of a file is not searched


class KeptByItself(Calls):
    def __init__(self) -> None:
        super().__init__()
        self.kernels = {"gla": functools.partial(RAW[0])}

    def call(self, *args: Tensor) -> Any:
        return self.kernels["gla"](*args)


class Hybrid(nn.Module):
    """A mixer, and attention."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.attention = mixer, modules.BNSD(True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(*[self.mixer(x)[:, None]] * 3)[:, 0]
        return out


@on_ranks
def called(kind: type[Calls]) -> tuple[dict[str, float], dict[str, str]]:
    """Errors of outputs, and what was raised: in a block, under RecurrentContextParallel, and in a plan without it."""
    mesh, model, wrong, raised = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), Hybrid(kind()), {}, {}
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    want = model(whole()).detach()
    recurrent = {"mixer": RecurrentContextParallel()}
    for name, plan in {"block": None, "plan": recurrent, "attention alone": {}}.items():
        net, x = copy.deepcopy(model), whole()
        try:
            if plan is None:
                with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], layout="contiguous"):
                    out = net(x)
            else:
                parallelize_module(net, mesh, {"attention": ContextParallel(2, 1, 1), **plan})
                out = net(whole().chunk(2, 1)[dist.get_rank()])
            wrong[name] = (out - want.chunk(2, 1)[dist.get_rank()]).abs().max().item()
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raised[name] = str(error)
    return wrong, raised


@pytest.mark.parametrize("kind", [Helper, Property, Nested, OfClass, Registered, Partial, Static, KeptByItself])
def test_ways_to_call_a_recurrence_are_seen(ranks: Ranks, kind: type[Calls]) -> None:
    """Whatever keeps the function, nothing runs over a share: a plan routes it, or refuses the model."""
    for wrong, raised in ranks(2, called, kind):
        assert all(error <= 1e-10 for error in wrong.values()), wrong
        known = kind in (Helper, Property, Nested, OfClass)
        assert wrong.keys() == ({"block", "plan"} if known else {"block"}), raised
        assert known or "calls none of the functions" in raised["plan"]
        assert ("runs along the sequence" if known else "is not under RecurrentContextParallel") in raised[
            "attention alone"
        ]


def chunk_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, None]:
    return chunk_gla.__wrapped__(q, k, v, g) if hasattr(chunk_gla, "__wrapped__") else chunk_gla(q, k, v, g)


class Other(Calls):
    """A recurrence that is routed, and one that is not."""

    def call(self, *args: Tensor) -> Any:
        return chunk_delta_rule(chunk_gla(*args)[0], *args[1:])


class OtherAlone(Calls):
    def call(self, *args: Tensor) -> Any:
        return chunk_delta_rule(*args)


@pytest.mark.parametrize("kind", [Other, OtherAlone])
def test_recurrences_that_nothing_routes_are_refused(ranks: Ranks, kind: type[Calls]) -> None:
    """Before, one function that is routed was enough, and others ran over a share, in a plan and in a block."""
    for wrong, raised in ranks(2, called, kind):
        assert not wrong and raised.keys() == {"block", "plan", "attention alone"}
        for name in ("block", "plan"):
            assert "calls a recurrence that context parallelism does not route" in raised[name], raised


def token_shift(x: Tensor) -> Tensor:
    return F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0)) - x


def parallel_forgetting_attn(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, None]:
    return v + g.cumsum(1), None


def fused_attnres(x: Tensor) -> Tensor:
    return x


token_shift.__module__ = parallel_forgetting_attn.__module__ = fused_attnres.__module__ = "fla.modules.some"


class Shifts(Calls):
    def call(self, *args: Tensor) -> Any:
        return chunk_gla(*args[:2], token_shift(args[2]), args[3])


class Forgets(Calls):
    def call(self, *args: Tensor) -> Any:
        return parallel_forgetting_attn(*args)


class OverDepth(Calls):
    """A function of fla that mixes no positions, and one of a user with the name of one that does."""

    def call(self, *args: Tensor) -> Any:
        return chunk_gla(*args[:2], fused_attnres(causal_conv1d_of_user(args[2])), args[3])


def causal_conv1d_of_user(x: Tensor) -> Tensor:
    return 2 * x


causal_conv1d_of_user.__name__ = "causal_conv1d"


@pytest.mark.parametrize("kind", [Shifts, Forgets, OverDepth])
def test_other_functions_of_fla_are_refused(ranks: Ranks, kind: type[Calls]) -> None:
    """Before, they ran over a share, beside a recurrence that is routed, in attention's place, and in a block."""
    for wrong, raised in ranks(2, called_of_fla, kind):
        if kind is OverDepth:
            assert wrong.keys() == {"block", "plan"} and max(wrong.values()) <= 1e-10, (wrong, raised)
            continue
        assert not wrong and raised.keys() == {"block", "plan", "attention alone"}
        refused = "calls a token shift, a convolution, attention or a whole mixer of fla"
        assert refused in raised["block"] and (refused in raised["plan"]) == (kind is Shifts), raised
        assert kind is Shifts or "parallel_forgetting_attn on this rank's share" in raised["attention alone"], raised


@on_ranks
def called_of_fla(kind: type[Calls]) -> Any:
    calls._routed.discard(__name__)  # before fla was loaded
    sys.modules["fla.ops"] = ops = ModuleType("fla.ops")
    ops.__all__ = ["chunk_gla", "parallel_forgetting_attn", "fused_attnres"]  # type: ignore[attr-defined]
    try:
        return called(kind)
    finally:
        del sys.modules["fla.ops"]


CELL = """
def chunk_gla(q, k, v, g):
    return recur(q * k.shape[-1] ** -0.5, k, v, g, None, None), None

class Cell(Calls):
    def call(self, *args):
        return chunk_gla(*args)
"""


@on_ranks
def cells() -> list[float]:
    """Errors of a mixer that a notebook defines after its first block, in a second one, and in a plan whose functions
    the cell, which is run again, binds anew."""
    mesh, file = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), ModuleType("cells")
    rank, sys.modules["cells"] = mesh.get_local_rank(), file
    with context_parallel(mesh):
        pass
    vars(file).update(recur=recur, Calls=Calls)
    exec(CELL, vars(file))
    model: Any = Hybrid(file.Cell())
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    want, x = model(whole()).chunk(2, 1)[rank].detach(), whole()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], layout="contiguous"):
        found = [(model(x) - want).abs().max().item()]
    plan = {"mixer": RecurrentContextParallel(), "attention": ContextParallel(2, 1, 1)}
    parallelize_module(model, mesh, plan)
    for _ in range(2):
        found.append((model(whole().chunk(2, 1)[rank]) - want).abs().max().item())
        exec(CELL.partition("class")[0], vars(file))
    del sys.modules["cells"]
    return found


def test_functions_of_a_notebook_are_routed_whenever_they_are_defined(ranks: Ranks) -> None:
    for found in ranks(2, cells):
        assert max(found) <= 1e-10, found


@on_ranks
def spawned() -> float:
    """The error of a mixer of a script in a spawned process, whose module has a copy of the script's globals."""
    mesh, file = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), ModuleType("spawned")
    script: dict[str, Any] = {"__name__": "spawned", "recur": recur, "Calls": Calls}
    exec(CELL, script)
    vars(file).update(script)
    rank, sys.modules["spawned"] = mesh.get_local_rank(), file
    model: Any = Hybrid(file.Cell())
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    want, x = model(whole()).chunk(2, 1)[rank].detach(), whole()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], layout="contiguous"):
        error = (model(x) - want).abs().max().item()
    del sys.modules["spawned"]
    return error


def test_functions_of_a_spawned_script_are_routed(ranks: Ranks) -> None:
    assert max(ranks(2, spawned)) <= 1e-10


@on_ranks
def on_two_meshes() -> list[float]:
    """Errors of a module that two of four ranks run on their mesh, and then all on one of their own."""
    rank, found = dist.get_rank(), []
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    model = Helper()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    want = model(whole()).detach()
    for mesh in (pairs, init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))):
        if rank < 2 or mesh is not pairs:
            x = whole()
            with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], layout="contiguous"):
                out = model(x)
            found.append((out - want.chunk(mesh.size(), 1)[mesh.get_local_rank()]).abs().max().item())
    return found


def test_ranks_that_have_met_a_function_on_another_mesh_compare_it_again(ranks: Ranks) -> None:
    for errors in ranks(4, on_two_meshes):
        assert max(errors) <= 1e-10, errors


class InnerCheckpoint(nn.Module):
    """Recomputes its recurrence alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = mixer.make()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (2, 4)) for _ in range(3))
        out: Tensor = checkpoint(mixer.chunk_gla, q, k, v, -v.abs(), use_reentrant=True)[0]
        return out.flatten(2)


@on_ranks
def inner_checkpoint() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = parallelize_module(nn.Sequential(InnerCheckpoint()), mesh, {"0": RecurrentContextParallel()})
    with torch.no_grad():
        model(whole()[:, :12])  # gradients are off around it: right
    return error_of(lambda: model(whole()[:, :12].requires_grad_()))


def test_a_reentrant_checkpoint_inside_of_a_mixer_is_refused(ranks: Ranks) -> None:
    for error in ranks(2, inner_checkpoint):
        assert "calls chunk_gla with gradients switched off inside the module" in error, error


def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, how: str) -> Any:
    """A function of a user's file with a name of fla."""
    scale = 1.0 if how == "without its scale" else k.shape[-1] ** -0.5
    if how == "heads first":
        return recur(*(x.transpose(1, 2) for x in (q * scale, k, v, g)), None, None).transpose(1, 2), None
    out = recur(q * scale, k, v, g, None, None) * (GAIN if how == "a gain" else 1)
    return out if how == "no state" else (out, None)


GAIN = nn.Parameter(torch.ones((), dtype=torch.float64))


class OwnFunction(nn.Module):
    """Calls it as a function of its file; it is called in two ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.proj = how, nn.Linear(8, 16).double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g = (y.unflatten(-1, (2, 2)) for y in self.proj(x).chunk(4, -1))
        g = -g[..., 0].abs()
        given = (x.transpose(1, 2) for x in (q, k, v, g)) if self.how == "heads first" else (q, k, v, g)
        out: Tensor = chunk_simple_gla(*given, how=self.how)
        out = out if self.how == "no state" else out[0]
        return (out.transpose(1, 2) if self.how == "heads first" else out).flatten(2)


@on_ranks
def own_function(how: str) -> tuple[float, list[str]]:
    """The error of a module in a block, and what a block and a plan raise of it."""
    mesh, x, model = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), whole(), OwnFunction(how)
    dist.broadcast(model.proj.weight.data, 0), dist.broadcast(model.proj.bias.data, 0)
    want, errors, error = model(whole()).detach(), [], 0.0
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]) as handler:
        errors.append(error_of(lambda: model(x)))
        if not errors[0]:
            error = (handler.combine(model(x).detach(), 1) - want).abs().max().item()
    planned = parallelize_module(nn.Sequential(model), mesh, {"0": RecurrentContextParallel()})
    errors.append(error_of(lambda: planned(handler.dispatch(whole(), 1))))
    return error, errors


@pytest.mark.parametrize("how", ["as fla", "heads first", "without its scale", "a gain", "no state"])
def test_a_function_with_a_name_of_fla_that_is_another_is_refused(ranks: Ranks, how: str) -> None:
    for error, errors in ranks(2, own_function, how):
        if how == "as fla":
            assert error <= 1e-10 and errors == ["", ""]
        else:
            assert all(text.startswith("ValueError") and "chunk_simple_gla of" in text for text in errors), errors


@on_ranks
def layouts_of_functions(layout: str, also: bool) -> list[int]:
    """Warnings of two calls of each function, outside of a block, for the share of a handler's batch. ``also``: another
    handler has split in that layout too."""
    found = []
    for what in ("recurrence", "convolution", "windows", "backward"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        given: dict[str, Any] = {"layout": layout, "mesh": mesh}
        handler = ContextParallelHandler(mesh, "head_tail")
        handler.cp.batch.lengths = ShareLengths()  # other tests have had this mesh
        if also:
            ContextParallelHandler(mesh, layout).dispatch(torch.ones(1, 28), 1)
        x = handler.get_batch_on_this_cp_rank({"inputs_embeds": torch.ones(1, 28, 2)})["inputs_embeds"]
        heads = x[:, :, None].requires_grad_()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                if what == "recurrence":
                    linear_recurrence(heads, heads, heads, -torch.ones(1), **given)
                elif what == "convolution":
                    causal_conv1d(x.mT, torch.ones(2, 3), **given)
                elif what == "windows":
                    windows(x, [1], **given)
                else:  # behind the block of a table, which no handler has split
                    with ContextParallelHandler(mesh, layout).documents([0, 28]):
                        out = linear_recurrence(heads, heads, heads, -torch.ones(1), **given)
                    out.sum().backward()
        found.append(sum("split shares of that length as 'head_tail' only" in str(w.message) for w in caught))
    return found


def test_functions_of_another_layout_than_the_last_split_warn_once(ranks: Ranks) -> None:
    """Their default is "contiguous": errors of 0.6, without a word, where no block says how the batch was split."""
    assert ranks(2, layouts_of_functions, "contiguous", False) == [[1, 1, 1, 0]] * 2
    assert ranks(2, layouts_of_functions, "contiguous", True) == [[0, 0, 0, 0]] * 2
    assert ranks(2, layouts_of_functions, "head_tail", False) == [[0, 0, 0, 0]] * 2

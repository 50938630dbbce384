"""``RecurrentContextParallel(kind=...)``: modules that receive q, k, v and gates, and compute it themselves."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_cp import ContextParallelHandler, RecurrentContextParallel, context_parallel_mesh, split_cp_mesh
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.ops import SAVE_LIST
from tests.harness.operators import Operators
from tests.harness.ranks import Ranks, error_of, on_ranks, sum_over_ranks
from tests.harness.recurrence_oracle import convolve, recur, recur_from

LENGTH, DOCUMENTS = 24, [0, 3, 13, 24]


def scaled(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** -0.5


class DeltaRule(nn.Module):
    """The gated delta rule, or Kimi's, token by token."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return recur(scaled(q), k, v, g, beta, None)


class HeadsFirst(nn.Module):
    """The same with other names, scale and dimensions."""

    def forward(self, keys: Tensor, queries: Tensor, values: Tensor, *, gate: Tensor, strength: Tensor) -> Tensor:
        q, k, v, g, beta = (x.transpose(1, 2) for x in (queries, keys, values, gate, strength))
        return recur(q * 0.5, k, v, g, beta, None).transpose(1, 2)


class Ssd(nn.Module):
    """Mamba 2 as a recurrence of a state for each head."""

    def forward(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None) -> Tensor:
        dt = nn.functional.softplus(dt)
        out = recur(C, B, x * dt[..., None], A * dt, None, None)
        return out if D is None else out + x * D[:, None]


class Scan(nn.Module):
    """Mamba 1: a state for each channel."""

    def forward(self, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        q, k = (x.mT[:, :, None].expand(-1, -1, u.shape[1], -1) for x in (C, B))
        return recur(q, k, (u * delta).mT[..., None], delta.mT[..., None] * A, None, None).squeeze(-1).mT


class Convolution(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return convolve(x, weight, bias, None)


class Retention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        return recur(q, k, v, decay, None, None)


class Begins(nn.Module):
    """Retention with a part of its own that does nothing yet."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.drop = part, nn.Dropout(0.5)
        self.gain, self.skip = nn.Parameter(torch.ones(4, 1)), nn.Parameter(torch.zeros(4, 1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        out = recur(q, k, v, decay, None, None)
        if self.part == "gain":
            return out * self.gain
        if self.part == "skip":
            return out + self.skip * v
        return self.drop(out) if self.part == "dropout" else out


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def inputs(kind: str) -> tuple[nn.Module, dict[str, Any], dict[str, Tensor], dict[str, int]]:
    """A module, the settings of its style, its arguments, and the sequence dimension of those that have one."""
    q, k, v = random(2, LENGTH, 4, 3), nn.functional.normalize(random(2, LENGTH, 4, 3), dim=-1), random(2, LENGTH, 4, 5)
    g, beta = -random(2, LENGTH, 4).square(), random(2, LENGTH, 4).sigmoid()
    if kind == "delta":
        given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        return DeltaRule(), {"kind": "chunk_gated_delta_rule"}, given, dict.fromkeys(given, 1)
    if kind == "kda":
        given = {"q": q, "k": k, "v": v, "g": -random(2, LENGTH, 4, 3).square(), "beta": beta}
        return DeltaRule(), {"kind": "chunk_kda"}, given, dict.fromkeys(given, 1)
    if kind == "heads first":
        named = {"keys": k, "queries": q, "values": v, "gate": g, "strength": beta}
        places = {"k": 0, "q": "queries", "v": 2, "g": "gate", "beta": "strength"}
        style = {"kind": "chunk_gated_delta_rule", "arguments": places, "options": {"scale": 0.5}}
        given = {name: x.transpose(1, 2).contiguous() for name, x in named.items()}
        return HeadsFirst(), {**style, "seq_dim": 2, "head_dim": 1}, given, dict.fromkeys(given, 2)
    if kind == "mamba 2":
        given = {"x": v, "dt": g, "A": -random(4).abs(), "B": q, "C": k, "D": random(4)}
        style = {"kind": "mamba_chunk_scan_combined", "options": {"dt_softplus": True}}
        return Ssd(), style, given, dict.fromkeys(("x", "dt", "B", "C"), 1)
    if kind == "mamba":
        given = {"u": random(2, 6, LENGTH), "delta": random(2, 6, LENGTH).abs(), "A": -random(6, 3).abs()}
        given |= {"B": random(2, 3, LENGTH), "C": random(2, 3, LENGTH) / 2}
        return Scan(), {"kind": "selective_scan_fn"}, given, dict.fromkeys(("u", "delta", "B", "C"), 2)
    if kind == "convolution":
        given = {"x": random(2, 6, LENGTH), "weight": random(6, 4), "bias": random(6)}
        return Convolution(), {"kind": "causal_conv1d_fn"}, given, {"x": 2}
    given = {"q": q, "k": k, "v": v, "decay": -random(4).abs()}
    return Retention(), {"kind": "linear_recurrence"}, given, dict.fromkeys("qkv", 1)


KINDS = ("delta", "kda", "heads first", "mamba 2", "mamba", "convolution", "retention")


def alone(kind: str, documents: list[int] | None) -> list[Tensor]:
    """Output and gradients of one device, each document by itself."""
    module, _, given, dims = inputs(kind)
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    parts = [
        module(**{n: x.narrow(dims[n], a, b - a) if n in dims else x for n, x in leaves.items()})
        for a, b in pairwise(documents or [0, LENGTH])
    ]
    out = torch.cat(parts, next(iter(dims.values())))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(leaves.values()))]


def styled(kind: str, mesh: Any, layout: str, degree: int | None = 1) -> nn.Module:
    module, style, _, _ = inputs(kind)
    model = nn.ModuleDict({"inner": module})
    parallelize_module(model, mesh, {"inner": RecurrentContextParallel(degree, layout=layout, **style)})
    return model["inner"]


def error(kind: str, handler: Any, run: Any, documents: list[int] | None) -> float:
    """The largest error of outputs and gradients of a call over ranks."""
    _, _, given, dims = inputs(kind)
    dim = next(iter(dims.values()))
    leaves = {
        name: (handler.dispatch(x, dims[name]) if name in dims else x.clone()).requires_grad_()
        for name, x in given.items()
    }
    out = run(**leaves)
    grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    whole = [
        handler.combine(dx, dims[name]) if name in dims else sum_over_ranks(dx)[0]
        for name, dx in zip(leaves, grads, strict=True)
    ]
    got, want = [handler.combine(out.detach(), dim), *whole], alone(kind, documents)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True))


def save_ours(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVE_LIST else CheckpointPolicy.PREFER_RECOMPUTE


@on_ranks
def errors() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    found = {}
    for i, kind in enumerate(KINDS):
        for layout, documents in (("contiguous", None), ("head_tail", DOCUMENTS)):
            handler = ContextParallelHandler(mesh, layout)
            degree = None if i == 0 and layout == "head_tail" else 1
            with handler.documents(documents):
                module = styled(kind, mesh, layout, degree)
                found[f"{kind} {layout}"] = error(kind, handler, module, documents)
                if i == 0:  # a copy has hooks of its own; the first call has been compared already
                    with record_traffic() as traffic:
                        found[f"copy {layout}"] = error(kind, handler, copy.deepcopy(module), documents)
                    kinds = [x for x, _ in traffic.entries if x not in ("agreement", "all_to_all")]
                    assert degree is None or kinds.count("all_gather") == 2 + 6, kinds  # states; and combined results
    return found


@pytest.mark.slow
def test_modules_that_receive_their_inputs_are_exact(ranks: Ranks) -> None:
    for found in ranks(2, errors):
        assert all(e <= 1e-10 for e in found.values()), found


@on_ranks
def otherwise() -> dict[str, float]:
    """Recomputed, with a selective policy too, compiled, and on a mesh of one rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    handler, found = ContextParallelHandler(mesh, "head_tail"), {}
    contexts = {"context_fn": lambda: create_selective_checkpoint_contexts(save_ours)}
    more: dict[str, Any]
    for name, more in (("recomputed", {}), ("saved", contexts)):
        with handler.documents(DOCUMENTS):
            run = partial(checkpoint, styled("delta", mesh, "head_tail"), use_reentrant=False, **more)
            found[name] = error("delta", handler, run, DOCUMENTS)
    seen, module = [], styled("delta", mesh, "head_tail")
    for _ in range(2):
        with handler.documents(DOCUMENTS), Operators() as operators:
            found["seen"] = error("delta", handler, module, DOCUMENTS)
        seen.append(operators.calls)
    assert seen[0] == seen[1], "a checkpoint sees the comparison of the first call, and its recompute has none"
    with handler.documents(DOCUMENTS):
        graph = torch.compile(styled("delta", mesh, "head_tail"), fullgraph=True, backend="eager")
        found["compiled"] = error("delta", handler, graph, DOCUMENTS)
    family = split_cp_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    model = nn.ModuleDict({"inner": DeltaRule()})
    parallelize_module(model, family.cp(2), {"inner": RecurrentContextParallel(kind="chunk_gated_delta_rule")})
    with context_parallel_mesh(model, family.cp(1)) as one:
        found["one rank"] = error("delta", one, model["inner"], None)
    return found


@pytest.mark.slow
def test_checkpoints_graphs_and_other_meshes(ranks: Ranks) -> None:
    for found in ranks(2, otherwise):
        assert all(e <= 1e-10 for e in found.values()), found


class Pair(DeltaRule):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Any = None) -> Any:
        return super().forward(q, k, v, g, beta), None


class Masked(DeltaRule):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, mask: Tensor) -> Tensor:
        return super().forward(q, k, v, g, beta)


class Chunked(DeltaRule):
    """A forward that takes other lengths only: there is nothing to compare it with."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        raise ValueError("the length must be a multiple of 64")


@on_ranks
def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def run(module: nn.Module | None = None, more: Any = None, **style: Any) -> None:
        own, settings, given, dims = inputs("delta")
        settings = {**settings, **style}
        model = nn.ModuleDict({"inner": module or own})
        parallelize_module(model, mesh, {"inner": RecurrentContextParallel(**settings)})
        local = {n: x.narrow(dims[n], 0, 12) if n in dims else x for n, x in given.items()}
        model["inner"](**{**local, **(more or {})})

    g = inputs("delta")[2]["g"]
    growing = {"g": torch.ones_like(g[:, :12])} if dist.get_rank() == 0 else None  # the other rank hears of it
    bidirectional = DeltaRule()
    bidirectional.is_causal = False  # type: ignore[assignment]
    return {
        "kind='attention'": error_of(lambda: run(kind="attention")),
        "arguments has 'gate'": error_of(lambda: run(arguments={"gate": "g"})),
        "options has 'chunk_size'": error_of(lambda: run(options={"chunk_size": 4})),
        "arguments['q']=-1": error_of(lambda: run(arguments={"q": -1})),
        "has no argument 'decay'": error_of(lambda: run(kind="linear_recurrence")),
        "has no argument 9": error_of(lambda: run(arguments={"q": 9})),
        "needs the argument 'mask'": error_of(lambda: run(Masked())),
        "got mask=": error_of(lambda: run(Pair(), {"mask": torch.ones(1)})),
        "returns a tuple": error_of(lambda: run(Pair())),
        "their outputs differ": error_of(lambda: run(options={"scale": 1.0})),
        "without kind": error_of(lambda: RecurrentContextParallel(arguments={"q": 0})),
        "is a list": error_of(lambda: RecurrentContextParallel(kind="chunk_kda", arguments=["q"])),  # type: ignore[arg-type]
        "seq_dim=1 and head_dim=3": error_of(lambda: RecurrentContextParallel(kind="chunk_kda", head_dim=3)),
        "fixed form": error_of(lambda: RecurrentContextParallel(kind="selective_scan_fn", seq_dim=2, head_dim=1)),
        "is bidirectional": error_of(lambda: run(bidirectional)),
        "own forward": error_of(lambda: run(more=growing)),
        "": error_of(lambda: run(Chunked())),
    }


def test_wrong_names_are_refused(ranks: Ranks) -> None:
    for found in ranks(2, refusals):
        assert found.pop("") == ""
        for text, error_text in found.items():
            kinds = ("ValueError", "TypeError", "NotImplementedError")
            assert text in error_text and error_text.startswith(kinds), (text, error_text)


@on_ranks
def beginnings() -> dict[str, str]:
    """The errors of modules with parts that do nothing in their first call, "" where there is none."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    given = {n: x[:, :12] if n in "qkv" else x.requires_grad_() for n, x in inputs("retention")[2].items()}

    def run(part: str, how: str, reentrant: bool = False) -> str:
        model = nn.ModuleDict({"inner": Begins(part).double()})
        parallelize_module(model, mesh, {"inner": RecurrentContextParallel(kind="linear_recurrence")})
        inner = model["inner"]
        if how == "frozen":  # and trained later
            inner.requires_grad_(False)
            inner(**given)
            inner.requires_grad_(True)
        elif how == "evaluated":  # weights may be loaded behind
            inner.eval()
            with torch.no_grad():
                if found := error_of(lambda: inner(**given)):
                    return found
            inner.train()
        if how == "in a checkpoint":
            return error_of(lambda: checkpoint(inner, *given.values(), use_reentrant=reentrant).sum().backward())
        return error_of(lambda: inner(**given).sum().backward())

    found = {f"{part} {how}": run(part, how) for part in ("gain", "skip") for how in ("", "frozen", "evaluated")}
    checkpoints = {f"gain, reentrant: {r}": run("gain", "in a checkpoint", r) for r in (False, True)}
    return {**found, **checkpoints, "dropout": run("dropout", "evaluated"), "none": run("none", "evaluated")}


def test_parameters_that_do_nothing_yet_are_refused(ranks: Ranks) -> None:
    for found in ranks(2, beginnings):
        assert found.pop("none") == ""
        assert "their outputs differ" in found.pop("dropout")
        for name, text in found.items():
            assert f"depends on {name.split()[0].strip(',')}, which is no argument" in text, (name, text)


class Truncates(nn.Module):
    """Backpropagation through four tokens, by a module and by a function that is called as fla's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        state, out = v.new_zeros(len(v), *k.shape[2:], v.shape[3]), []
        for parts in zip(*(x.split(4, 1) for x in (q, k, v, decay)), strict=True):
            made, state = recur_from(state.detach(), *parts, None)
            out.append(made)
        return torch.cat(out, 1)


class Constant(nn.Module):
    """A decay without a gradient."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        return recur(q, k, v, decay.detach(), None, None)


def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, None]:
    return Truncates()(scaled(q), k, v, g), None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = True
) -> tuple[Tensor, None]:
    """Another epsilon than fla's, which shows where norms are small."""
    q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
    return recur(scaled(q), k, v, g, beta, None), None


class Calls(nn.Module):
    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gated = gated

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        if self.gated:
            return chunk_gated_delta_rule(q, k, v, decay, decay.exp(), use_qk_l2norm_in_kernel=True)[0]
        return chunk_simple_gla(q, k, v, decay)[0]


@on_ranks
def differing() -> list[str]:
    """The errors of a module, and of one whose decay gets no gradient and requires none, and of two functions that
    compute nearly what replaces them."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), []
    q, k, v = torch.randn(3, 2, 12, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v.requires_grad_()
    given = q, k, v, -torch.rand(2, 12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    of_kind = (Truncates(), Constant())
    for made, kind in (*((x, "linear_recurrence") for x in of_kind), (Calls(False), None), (Calls(True), None)):
        model = nn.ModuleDict({"inner": made})
        options: dict[str, Any] = {} if kind is None else {"kind": kind}
        parallelize_module(model, mesh, {"inner": RecurrentContextParallel(**options)})
        found.append(error_of(lambda model=model: model["inner"](*given)))
    return found


def test_gradients_that_end_early_and_another_epsilon_are_found(ranks: Ranks) -> None:
    """Outputs of the first call were the same."""
    for module, constant, function, norms in ranks(2, differing):
        assert not constant
        assert "ValueError: " in module and "their gradients differ by" in module
        assert "chunk_simple_gla of its package" in function and "their gradients differ by" in function
        assert "chunk_gated_delta_rule of its package" in norms and "their outputs differ by" in norms


class Writes(nn.Module):
    """It scales its queries in place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        return recur(q.mul_(0.5), k, v, decay, None, None)


@on_ranks
def written() -> bool:
    """True if what the forward is called with is as it was before, behind the comparison of the first call."""
    model = nn.ModuleDict({"inner": Writes()})
    given = [torch.ones(1, 4, 1, 2, dtype=torch.float64) for _ in range(3)], -torch.ones(1, 4, 1, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    style = RecurrentContextParallel(kind="chunk_simple_gla", arguments={"g": "decay"}, options={"scale": 0.5})
    parallelize_module(model, mesh, {"inner": style})
    model["inner"](*given[0], given[1])
    return bool((given[0][0] == 1).all())


def test_the_comparison_works_on_copies(ranks: Ranks) -> None:
    """The first tokens were scaled twice in the first call."""
    assert ranks(2, written) == [True, True]


class Keeps(nn.Module):
    """Retention that goes on from the state of the batch before, or keeps the state for others to read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.state = how, 0, torch.zeros(1, 2, 4, 4, dtype=torch.float64)
        self.register_buffer("kept", torch.zeros(1, 2, 4, 4, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        before = torch.zeros_like(self.state) if self.how == "for others" else self.state + self.kept
        out, state = recur_from(before, q, k, v, decay, None)
        self.calls += 1
        if self.how == "attribute":
            self.state = state.detach()
        elif self.how == "buffer":
            self.kept = state.detach()
        else:  # in place
            self.kept.copy_(state.detach())
        return out


class Gated(nn.Module):
    """A mixer whose function, which is called as fla's, goes on from the state that the mixer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Keeps("attribute")
        self.chunk_simple_gla = lambda q, k, v, g: (self.inner(scaled(q), k, v, g), None)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        return self.chunk_simple_gla(q, k, v, decay)[0]


@on_ranks
def keeping() -> dict[str, str]:
    """The errors of modules that keep states, of which only one rank sees some."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), {}
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 12, 2, 4, dtype=torch.float64, generator=generator)
    given = q, k, v, -0.1 * torch.rand(1, 12, 2, dtype=torch.float64, generator=generator)
    for how in ("attribute", "buffer", "in place", "for others", "a function", "on one rank"):
        one = how == "on one rank"
        made = Gated() if how == "a function" else Keeps("attribute" if one and dist.get_rank() else how)
        made.how = "for others" if one and not dist.get_rank() else getattr(made, "how", "")  # type: ignore[assignment]
        model = nn.ModuleDict({"inner": made})
        options = {} if how == "a function" else {"kind": "linear_recurrence"}
        parallelize_module(model, mesh, {"inner": RecurrentContextParallel(**options)})  # type: ignore[arg-type]
        with torch.no_grad():
            found[how] = error_of(lambda model=model: model["inner"](*given))
        keeps: Any = made.inner if isinstance(made, Gated) else made
        assert keeps.calls == 0 and not keeps.state.any() and not keeps.kept.any(), how
    return found


def test_states_that_are_kept_from_batch_to_batch_are_refused(ranks: Ranks) -> None:
    """The first call was the same, from a state of zeros; every other one began with zeros again, without a word."""
    first, second = ranks(2, keeping)
    assert not first.pop("for others") and not second.pop("for others")
    for found in (first, second):
        assert "ValueError" in found.pop("on one rank")
        for how, text in found.items():
            assert "ValueError: " in text and "when it is called again with the same tokens" in text, (how, text)


class Holds(nn.Module):
    """Retention with a gain of its own, which is 1 at first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.steps, self.log = how, 0, []
        if how == "buffer":
            self.register_buffer("gain", torch.ones(1, dtype=torch.float64))
        elif how == "number":
            self.gain = 1.0
        elif how == "tensor":
            self.gain = torch.ones(1, dtype=torch.float64)
        else:
            self.gain = nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=how == "trained")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        return recur(q, k, v, decay, None, None) * self.gain


@on_ranks
def held() -> dict[str, str]:
    """The errors of modules of which a gain is changed behind the first call; "" where nothing is that matters."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), {}
    given = {n: x[:, :12] if n in "qkv" else x for n, x in inputs("retention")[2].items()}
    for how, mode in (
        *((how, torch.no_grad) for how in ("buffer", "number", "tensor", "frozen")),
        ("trained", torch.inference_mode),  # no graph tells that the output depends on it
    ):
        model = nn.ModuleDict({"inner": Holds(how)})
        parallelize_module(model, mesh, {"inner": RecurrentContextParallel(kind="linear_recurrence")})
        inner: Any = model["inner"]
        with mode():
            inner(**given)
            with record_traffic() as traffic:
                inner.steps += 1 + dist.get_rank()  # nothing reads it, and it differs between the ranks
                if how != "number":
                    inner.gain.detach().fill_(1.0)
                inner(**given)
            assert "agreement" not in [kind for kind, _ in traffic.entries], traffic.entries
            if how == "number":
                inner.gain = 0.5
            elif how == "tensor":
                inner.gain = torch.full((1,), 0.5, dtype=torch.float64)
            else:
                inner.load_state_dict({"gain": torch.full((1,), 0.5, dtype=torch.float64)})
            found[how] = error_of(lambda inner=inner: inner(**given))
    return found


def test_what_a_module_holds_may_not_change_its_result_later(ranks: Ranks) -> None:
    """Numbers, buffers and frozen parameters that did nothing in the first call were dropped in the later ones."""
    for found in ranks(2, held):
        for how, text in found.items():
            assert "ValueError: " in text and "was changed behind an earlier call: their outputs differ" in text, how


class Logs(nn.Module):
    """Retention that counts its calls in lists, dicts, sets and queues, also those inside of others."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.seen, self.queue = [], set(), deque([1, 2], maxlen=2)
        self.stats: dict[str, Any] = {"calls": 0, "lengths": [], "sum": torch.zeros(1)}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
        self.log.append(q.shape[1])
        self.seen.add(q.shape[1])
        self.queue.append(0)
        self.stats["calls"] += 1
        self.stats["new"] = True
        self.stats["lengths"] += [q.shape[1]]
        self.stats["sum"] += 1
        return recur(q, k, v, decay, None, None)


@on_ranks
def logged() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = nn.ModuleDict({"inner": Logs()})
    parallelize_module(model, mesh, {"inner": RecurrentContextParallel(kind="linear_recurrence")})
    inner: Any = model["inner"]
    stats = inner.stats
    inner(**{n: x[:, :12] if n in "qkv" else x for n, x in inputs("retention")[2].items()})
    assert stats is inner.stats
    return repr((inner.log, inner.seen, [*inner.queue], stats))


def test_the_comparison_leaves_lists_and_dicts_as_they_were(ranks: Ranks) -> None:
    before = ([], set(), [1, 2], {"calls": 0, "lengths": [], "sum": torch.zeros(1)})
    assert ranks(2, logged) == [repr(before)] * 2

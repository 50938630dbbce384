"""``RecurrentContextParallel``: mixers of a plan over all ranks, with documents, compile, checkpointing; refusals."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_cp import (
    ContextParallel,
    ContextParallelHandler,
    RecurrentContextParallel,
    context_parallel,
    context_parallel_mesh,
    ops,
    split_cp_mesh,
)
from hyper_cp.mesh.comm import record_traffic
from hyper_cp.module.mixing import mixing
from hyper_cp.ops import SAVE_LIST, linear_recurrence, windows
from tests.harness import mixer
from tests.harness.kernels import chunk_kda as kda_kernel
from tests.harness.ranks import Ranks, error_of, on_ranks, sum_over_ranks

DOCUMENTS = [0, 3, 13, 24]


def inputs(length: int = 24) -> Tensor:
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def alone(documents: list[int] | None) -> tuple[Tensor, Tensor]:
    """Outputs and gradients of one device, each document by itself."""
    model, x = mixer.make(), inputs()
    edges = [0, 24] if documents is None else documents
    out = torch.cat([model(x[:, a:b]) for a, b in pairwise(edges)], 1)
    out.square().sum().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def styled(layout: str = "contiguous", degree: int | None = 1, mesh: Any = None) -> tuple[nn.Module, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)) if mesh is None else mesh
    model = mixer.make()
    parallelize_module(model, mesh, {"layers.*": RecurrentContextParallel(degree, layout=layout)})
    return model, ContextParallelHandler(mesh, layout)


def gradient(model: nn.Module) -> Tensor:
    return sum_over_ranks(torch.cat([p.grad.flatten() for p in model.parameters()]))[0]


def worst(model: nn.Module, handler: Any, out: Tensor, documents: list[int] | None) -> float:
    want, want_gradient = alone(documents)
    got = handler.combine(out.detach(), 1)
    return max((got - want).abs().max().item(), (gradient(model) - want_gradient).abs().max().item())


def recomputed(model: nn.Module, policy: Any = None) -> Any:
    more = {} if policy is None else {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    return lambda x: checkpoint(model, x, use_reentrant=False, **more)


def save_ours(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVE_LIST else CheckpointPolicy.PREFER_RECOMPUTE


@on_ranks
def runs() -> dict[str, float]:
    found, x = {}, inputs()
    cases: list[Any] = [("contiguous", None, 1), ("head_tail", DOCUMENTS, 1), ("per_document", DOCUMENTS, 1)]
    cases += [("head_tail", DOCUMENTS, None)] if dist.get_world_size() == 2 else []
    for layout, documents, degree in cases:
        model, handler = styled(layout, degree)
        with handler.documents(documents):
            out = model(handler.dispatch(x, 1))
            out.square().sum().backward()
            found[f"{layout} {degree}"] = worst(model, handler, out, documents)
    for name, policy in (("recomputed", None), ("saved", save_ours)):
        model, handler = styled("head_tail")
        with handler.documents(DOCUMENTS):
            local = handler.dispatch(x, 1)
            out = recomputed(model, policy)(local)
        with record_traffic() as traffic:  # after the block with the documents
            out.square().sum().backward()
        gathers = sum(operation == "all_gather" for operation, _ in traffic.entries)
        assert gathers == (4 if policy else 8), "two mixers, a convolution and a recurrence each"
        with handler.documents(DOCUMENTS):
            found[name] = worst(model, handler, out, DOCUMENTS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_mixers_of_a_plan_are_exact(world: int, ranks: Ranks) -> None:
    for found in ranks(world, runs):
        assert all(error <= 1e-10 for error in found.values()), found


class Stage(nn.Module):
    """A stage of a pipeline: the layers of a model, which never runs itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = model.layers

    forward = mixer.Stack.forward


@on_ranks
def applied_elsewhere() -> list[float]:
    """The errors of mixers whose plan was applied to their container, and to a model of which they run outside."""
    found, x = [], inputs()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    for container in (True, False):
        model, style = mixer.make(), RecurrentContextParallel(layout="head_tail")
        parallelize_module(model.layers if container else model, mesh, {"*" if container else "layers.*": style})
        handler = ContextParallelHandler(mesh, "head_tail")
        with handler.documents(DOCUMENTS):
            out = (model if container else Stage(model))(handler.dispatch(x, 1))
        out.square().sum().backward()
        found.append(worst(model, handler, out, DOCUMENTS))
    return found


def test_a_plan_on_the_container_of_mixers_runs_them(ranks: Ranks) -> None:
    for found in ranks(2, applied_elsewhere):
        assert all(error <= 1e-10 for error in found), found


class Checkpoints(mixer.Mixer):
    """A mixer that checkpoints its convolution, and its recurrence."""

    def mix(self, x: Tensor) -> Tensor:
        weight = self.conv1d.weight.squeeze(1)
        return mixer.causal_conv1d_fn(self.qkv(x).mT, weight, self.conv1d.bias, activation="silu")

    def forward(self, x: Tensor) -> Tensor:
        mixed = checkpoint(self.mix, x, use_reentrant=False)
        q, k, v = mixed.mT.unflatten(2, (3 * self.heads, -1)).chunk(3, 2)
        g, beta = self.gates(x).chunk(2, -1)
        gates = q, nn.functional.normalize(k, dim=-1), v, nn.functional.logsigmoid(g), beta.sigmoid()
        out, _ = checkpoint(mixer.chunk_gated_delta_rule, *gates, use_reentrant=False)
        return self.out(out.flatten(2))


@on_ranks
def checkpoints_inside() -> dict[str, float]:
    """The errors of mixers with checkpoints inside, under a plan, in one more checkpoint, and in a block. Backward runs
    behind the block of the documents, in that of another batch."""
    mesh, x = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), inputs()
    found = {}
    for where in ("plan", "outer", "block"):
        model = mixer.make(Checkpoints, Checkpoints)
        handler = ContextParallelHandler(mesh, "head_tail")
        if where != "block":
            parallelize_module(model, mesh, {"layers.*": RecurrentContextParallel(layout="head_tail")})
        block = context_parallel(mesh, layout="head_tail") if where == "block" else nullcontext()
        for step, documents in enumerate((DOCUMENTS, None)):
            model.zero_grad()
            run = recomputed(model) if where == "outer" else model
            with block, handler.documents(documents):
                out = run(handler.dispatch(x, 1))
            with handler.documents([0, 7, 24]):
                out.square().sum().backward()
            block = context_parallel(mesh, layout="head_tail") if where == "block" else nullcontext()
            found[f"{where} {step}"] = worst(model, handler, out, documents)
    return found


@pytest.mark.slow
def test_non_reentrant_checkpoints_inside_of_mixers_are_exact(ranks: Ranks) -> None:
    """Their recompute ran over the share, and PyTorch complained about shapes."""
    for found in ranks(2, checkpoints_inside):
        assert all(error <= 1e-10 for error in found.values()), found


@on_ranks
def compiled() -> dict[str, Any]:
    found, x = {}, inputs()
    model, handler = styled("head_tail")
    graph = torch.compile(model, fullgraph=True, backend="eager")
    for documents in ([0, 3, 13, 24], [0, 11, 20, 24]):
        model.zero_grad()
        stance = torch.compiler.set_stance("fail_on_recompile") if found else nullcontext()
        with handler.documents(documents), stance:
            out = graph(handler.dispatch(x, 1))
            out.square().sum().backward()
            found[str(documents)] = worst(model, handler, out, documents)
    return found


@pytest.mark.slow
@on_ranks
def graphs_of_equal_blocks() -> int:
    """The graphs of four equal blocks that are compiled one by one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    blocks = nn.ModuleList(mixer.make() for _ in range(4))
    parallelize_module(blocks, mesh, {"*.layers.*": RecurrentContextParallel()})
    torch.compiler.reset()
    before, x = counters["stats"]["unique_graphs"], inputs()[:, :12].requires_grad_()
    for block in blocks:
        block.compile(fullgraph=True, backend="eager")
        x = block(x)
    return counters["stats"]["unique_graphs"] - before


def test_equal_blocks_with_mixers_share_a_graph(ranks: Ranks) -> None:
    """Graphs held for the numbers of hooks, which differed: the ninth block ended in Dynamo's limit."""
    assert ranks(2, graphs_of_equal_blocks) == [2, 2]  # one is that of the first, whose input is a leaf


def test_mixers_compile_into_one_graph_for_all_documents(ranks: Ranks) -> None:
    for found in ranks(2, compiled):
        assert all(error <= 1e-10 for error in found.values()), found


@on_ranks
def functions_of_any_name() -> dict[str, float]:
    """A convolution that is a global of the mixer's file, and a recurrence that is not, or not under its own name."""
    found, mesh = {}, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    for kind in (mixer.Renamed, mixer.InOtherFile, mixer.ImportsLate, mixer.Keeps):
        model = mixer.make(kind)
        want, handler = model(inputs()), ContextParallelHandler(mesh, "contiguous")
        parallelize_module(model, mesh, {"layers.*": RecurrentContextParallel()})
        out = handler.combine(model(handler.dispatch(inputs(), 1)).detach(), 1)
        found[kind.__name__] = (out - want).abs().max().item()
    return found


def test_functions_are_routed_under_any_name(ranks: Ranks) -> None:
    """Before, the convolution counted as routed, and the recurrence began anew on each rank without a word."""
    for found in ranks(2, functions_of_any_name):
        assert all(error <= 1e-12 for error in found.values()), found


@on_ranks
def kept_in_any_way() -> dict[str, float]:
    """Errors of mixers whose convolution is a global of their file, in a plan and in a block."""
    found, mesh = {}, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    ways = {**mixer.WAYS, "attribute": mixer.Keeps, "attribute of its name": mixer.KeepsGatedDeltaNet}
    for name, make in ways.items():
        torch.manual_seed(3)
        model = nn.Sequential(make()).double()
        want, x = model(inputs()), inputs()
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], layout="contiguous") as handler:
            found[f"{name}: block"] = (handler.combine(model(x).detach(), 1) - want).abs().max().item()
        torch.manual_seed(3)
        model = parallelize_module(nn.Sequential(make()).double(), mesh, {"0": RecurrentContextParallel()})
        out = handler.combine(model(handler.dispatch(inputs(), 1)).detach(), 1)
        found[f"{name}: plan"] = (out - want).abs().max().item()
    return found


def test_functions_are_routed_in_whatever_keeps_them(ranks: Ranks) -> None:
    """Before, the recurrence of all of these began anew on each rank, in a block and in a plan."""
    for found in ranks(2, kept_in_any_way):
        assert len(found) == 24 and all(error <= 1e-12 for error in found.values()), found


BOTH_WAYS = """
class BothWays(mixer.Mixer):
    def forward(self, x):
        return super().forward(x) + super().forward(x.flip(1)).flip(1)
"""


@on_ranks
def flips() -> dict[str, list[int]]:
    """Warnings of two forwards of mixers of a plan."""
    mesh, kinds, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), {"right: one way": mixer.Mixer}, {}
    for file in ("tests.own", "right: fla.layers.both_ways"):
        names: dict[str, Any] = {"mixer": mixer, "__name__": file.rpartition(" ")[2]}
        exec(BOTH_WAYS, names)
        kinds[file] = names["BothWays"]
    for name, kind in kinds.items():
        model = parallelize_module(mixer.make(kind), mesh, {"layers.*": RecurrentContextParallel()})
        x = ContextParallelHandler(mesh, "contiguous").dispatch(inputs(), 1)
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(x)
            found.setdefault(name, []).append(
                sum("calls flip on a tensor (2, 12, 8)" in str(w.message) for w in caught)
            )
    return found


def test_flips_in_a_users_mixer_are_warned_of(ranks: Ranks) -> None:
    """A recurrence that is routed passes states forward; the way back of a share is none of the sequence."""
    for found in ranks(2, flips):
        assert found.pop("tests.own") == [1, 0] and set(map(tuple, found.values())) == {(0, 0)}


def test_mixers_are_found_whatever_the_names_of_their_functions() -> None:
    """A plan that leaves one of them out is refused."""
    for kind in (mixer.Mixer, mixer.Renamed, mixer.InOtherFile, mixer.ImportsLate, mixer.Keeps, OnlyRenamed):
        assert mixing(kind()) == "runs along the sequence", kind
    assert mixing(nn.Linear(2, 2)) is None


class OnlyRenamed(nn.Module):
    """A module that calls one function, under another name than its own."""

    def forward(self, *gates: Tensor) -> Any:
        return kda_kernel(*gates)


def gates(x: Tensor) -> tuple[Tensor, ...]:
    """Arguments of a recurrence that sums up along the sequence."""
    ones = torch.ones_like(x[:, :, None, :1])
    return ones, ones, x[:, :, None], x.new_zeros(1)


class RWKV(nn.Module):
    """A sum along the sequence by the library's function, once it has a mesh."""

    mesh: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) if self.mesh is None else linear_recurrence(*gates(x), mesh=self.mesh)[:, :, 0]


class LinearAttention(RWKV):
    """The same by the file of the function, in a helper."""

    def forward(self, x: Tensor) -> Tensor:
        return summed(x, self.mesh) if self.mesh is not None else super().forward(x)


def summed(x: Tensor, mesh: Any) -> Tensor:
    return ops.linear_recurrence(*gates(x), mesh=mesh)[:, :, 0]


class RetNet(RWKV):
    """The same by a function that it imports when it runs."""

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return super().forward(x)
        from hyper_cp.ops import linear_recurrence as ours

        return ours(*gates(x), mesh=self.mesh)[:, :, 0]


class ShortConv(RWKV):
    """A module that is named after a convolution, of two tokens."""

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh is None:
            return nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return windows(x, [1], mesh=self.mesh)[:, :, 0]


class Hyena(nn.Module):
    """The outer module of one that calls the function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = RWKV()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class RWKVByHand(nn.Module):
    """A recurrence of its own, behind a token shift by the library's function."""

    mesh: Any = None

    def forward(self, x: Tensor) -> Tensor:
        shifted, found = windows(x, [1], mesh=self.mesh)[:, :, 0], [torch.zeros_like(x[:, 0])]
        for t in range(x.shape[1]):
            found.append(0.5 * found[-1] + shifted[:, t])
        return torch.stack(found[1:], 1)


class AttendsTo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]


@on_ranks
def named_after_recurrences() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    style = ContextParallel(qkv_indices=None, ulysses_degree=1)
    found: dict[str, Any] = {}
    for kind in (RWKV, LinearAttention, RetNet, Hyena, ShortConv):
        model = nn.Sequential(AttendsTo(), kind())
        want = model(inputs())
        for module in model.modules():
            if isinstance(module, RWKV):
                module.mesh = mesh
        handler = ContextParallelHandler(mesh, "contiguous")
        with context_parallel(mesh, layout="contiguous"):
            block = handler.combine(model(handler.dispatch(inputs(), 1)), 1)
        parallelize_module(model, mesh, {"0": style})
        plan = handler.combine(model(handler.dispatch(inputs(), 1)), 1)
        found[kind.__name__] = max((x - want).abs().max().item() for x in (block, plan))
    by_hand = nn.Sequential(AttendsTo(), RWKVByHand())
    found["by hand"] = error_of(lambda: parallelize_module(by_hand, mesh, {"0": style}))
    return found


def test_modules_that_call_functions_of_the_library_are_not_refused_for_their_names(ranks: Ranks) -> None:
    """The error asked them to call what they call already."""
    for found in ranks(2, named_after_recurrences):
        assert "mixes positions along the sequence" in found.pop("by hand")
        assert max(found.values()) <= 1e-12, found


@on_ranks
def other_meshes() -> list[float]:
    """One rank, and a block on another mesh: the plain functions where there is nothing to share."""
    world = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    family, found = split_cp_mesh(world), []
    model, _ = styled("contiguous", mesh=world)
    with context_parallel_mesh(model, family.cp(1)) as handler:
        out = model(handler.dispatch(inputs(), 1))
    out.square().sum().backward()
    want, want_gradient = alone(None)
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    found += [(out - want).abs().max().item(), (got - want_gradient).abs().max().item()]
    return found


def test_mixers_follow_other_meshes(ranks: Ranks) -> None:
    assert all(error <= 1e-12 for found in ranks(2, other_meshes) for error in found)


@on_ranks
def refusals() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))

    def run(*kinds: Any, style: Any = None, **options: Any) -> None:
        model = mixer.make(*kinds, **options)
        parallelize_module(model, mesh, {"layers.*": style or RecurrentContextParallel()})
        model(inputs()[:, :12])

    def plan_without_mixers() -> None:
        parallelize_module(mixer.make(), mesh, {"layers.0": RecurrentContextParallel()})

    bidirectional = type("Bidirectional", (mixer.Mixer,), {"is_causal": False})
    return {
        "state": error_of(lambda: run(initial_state=torch.zeros(1))),
        "cache": error_of(lambda: run(output_final_state=True)),
        "documents": error_of(lambda: run(cu_seqlens=torch.tensor([0, 12]))),
        "reverse": error_of(lambda: run(reverse=True)),
        "unknown": error_of(lambda: run(use_beta_sigmoid_in_kernel=True)),
        "older name": error_of(lambda: run(offsets=torch.tensor([0, 12]))),
        "other parallelism": error_of(lambda: run(cp_context=object())),
        "decoding": error_of(lambda: run(mixer.Decodes)),
        "conv1d": error_of(lambda: run(mixer.CallsModule)),
        "idle": error_of(lambda: run(mixer.Idle)),
        "elsewhere": error_of(lambda: run(mixer.DeltaNetElsewhere)),
        "bidirectional": error_of(lambda: run(bidirectional)),
        "heads": error_of(lambda: run(style=RecurrentContextParallel(None), heads=1, size=8)),
        "degree": error_of(lambda: RecurrentContextParallel(4)),
        "left out": error_of(plan_without_mixers),
        "unharmed": error_of(lambda: mixer.make()(inputs())),
    }


def test_wrong_use_is_refused_with_the_reason(ranks: Ranks) -> None:
    for found in ranks(2, refusals):
        assert found["state"].startswith("NotImplementedError") and "initial_state" in found["state"]
        assert "output_final_state" in found["cache"] and "reverse" in found["reverse"]
        assert found["unknown"].startswith("NotImplementedError") and "use_beta_sigmoid" in found["unknown"]
        assert found["documents"].startswith("ValueError") and "cu_seqlens" in found["documents"]
        assert found["older name"].startswith("ValueError") and "offsets" in found["older name"]
        assert (
            found["other parallelism"].startswith("NotImplementedError") and "cp_context" in found["other parallelism"]
        )
        assert found["decoding"].startswith("NotImplementedError") and "cached state" in found["decoding"]
        assert found["conv1d"].startswith("NotImplementedError") and "as a module" in found["conv1d"]
        assert found["idle"].startswith("RuntimeError") and "this rank's share" in found["idle"]
        assert "calls none of the functions" in found["elsewhere"]
        assert "is bidirectional" in found["bidirectional"]
        assert found["heads"].startswith("ValueError") and "cannot split 1 heads" in found["heads"]
        assert found["degree"].startswith("ValueError") and "4" in found["degree"]
        assert "RecurrentContextParallel on ('layers.1" in found["left out"], found["left out"]
        assert found["unharmed"] == ""


class Frames(nn.Module):
    """A mixer within windows of ``size`` tokens, which become rows of the batch in front of it or in itself; 0: over
    the whole sequence, -1: over every other token."""

    def __init__(self, size: int, inside: bool) -> None:
        super().__init__()
        self.size, self.mixer = size, mixer.Mixer()
        if inside:
            whole = self.mixer.forward
            self.mixer.forward = lambda x: self.within(whole, x)  # type: ignore[method-assign]
        self.cut = (lambda f, x: f(x)) if inside else self.within

    def within(self, function: Any, x: Tensor) -> Tensor:
        if self.size < 0:
            return function(x[:, ::2]).repeat_interleave(2, 1)
        return function(x.reshape(-1, self.size or x.shape[1], 8)).view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self.mixer, x)


@on_ranks
def warnings_of_frames(way: str, size: int) -> list[int]:
    """Warnings of windows in two forwards: in a plan, in the block of a batch, and in one with a buffer."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), []
    model, x = Frames(size, way == "in the mixer"), torch.randn(2, 16, 8)
    handler = ContextParallelHandler(mesh, "contiguous")
    batch = handler.get_batch_on_this_cp_rank({"inputs_embeds": x})
    if way != "block":
        parallelize_module(model, mesh, {"mixer": RecurrentContextParallel()})
    block = context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], layout="contiguous")
    with block if way == "block" else handler.documents(batch if way == "in front" else None):
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model(x if way == "block" else batch["inputs_embeds"])
            found.append(sum("windows, frames or blocks" in str(w.message) for w in caught))
    return found


def test_windows_that_are_rows_of_the_batch_warn_once(ranks: Ranks) -> None:
    """Each was joined with that of the other ranks, without a word."""
    for way in ("block", "in front", "in the mixer"):
        assert ranks(2, warnings_of_frames, way, 4) == [[1, 0]] * 2, way
        for size in (0, -1):
            assert ranks(2, warnings_of_frames, way, size) == [[0, 0]] * 2, way

"""Modules that run chunk by chunk: exact, one gather and one reduction under FSDP2, counted memory, refusals."""

from __future__ import annotations

import copy
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hyper_cp import tiled
from hyper_cp.memory import MemoryCounter
from tests.harness.operators import Operators
from tests.harness.oracle import relative_error
from tests.harness.ranks import error_of, on_ranks

WIDTH, HIDDEN, LENGTH = 6, 10, 13
masks: Any = ModuleType("masks")
masks.draw = torch.rand_like


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0, hidden: int = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.unused = nn.LayerNorm(WIDTH), nn.Linear(1, 1)
        self.w1, self.w2 = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.w2(self.dropout(F.silu(self.w1(self.norm(x))))) * scale


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Checkpointed(Around):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def gradients(module: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(3, LENGTH, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    return x.to(dtype).requires_grad_(), grad.to(dtype)


def run(module: Any, dtype: torch.dtype = torch.float64, autocast: bool = False, **kwargs: Any) -> list[Tensor]:
    """Output and all gradients of one call."""
    x, grad = data(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(x, **kwargs)
        out.backward(grad.to(out.dtype))  # inside, where a cache of casts would still be there
    assert x.grad is not None
    return [out.detach(), x.grad, *gradients(module)]


@pytest.mark.parametrize("chunks", [1, 4, 100])
def test_values_and_gradients_are_those_of_one_call(chunks: int) -> None:
    plain = MLP().double()
    module = tiled(copy.deepcopy(plain), chunks)
    for case in (module, copy.deepcopy(module), tiled(copy.deepcopy(plain), chunks, seq_dim=-2)):
        found, wanted = run(case, scale=3.0), run(plain, scale=3.0)
        plain.zero_grad()
        assert len(found) == len(wanted) == 8 and max(map(relative_error, found, wanted)) <= 1e-14
        assert list(case.state_dict()) == list(plain.state_dict()) and case.unused.weight.grad is None
    with torch.no_grad():
        assert relative_error(module(data()[0]), plain(data()[0])) <= 1e-14


def test_half_precision_is_added_up_in_fp32() -> None:
    exact, plain = run(MLP().double()), run(MLP().bfloat16(), torch.bfloat16)
    found = run(tiled(MLP().bfloat16(), LENGTH), torch.bfloat16)
    for a, b, c in zip(found, plain, exact, strict=True):
        assert a.dtype == b.dtype and relative_error(a, c) <= 2 * relative_error(b, c)


def test_autocast_dropout_and_checkpoints() -> None:
    found, wanted = run(tiled(MLP(), 4), torch.float32, True), run(MLP(), torch.float32, True)
    assert max(map(relative_error, found, wanted)) <= 1e-2
    assert [a.dtype for a in found] == [b.dtype for b in wanted]
    module = tiled(MLP(0.5).double(), 4)
    torch.manual_seed(3)
    once = run(module)
    x, grad = data()
    torch.manual_seed(3)
    parts = [type(module).forward(module, part) for part in x.split(4, 1)]  # 13 positions in 4 chunks
    module.zero_grad()
    torch.cat(parts, 1).backward(grad)
    assert max(map(relative_error, once, [torch.cat(parts, 1), x.grad, *gradients(module)])) <= 1e-14  # type: ignore[arg-type]
    torch.manual_seed(3)
    module.zero_grad()
    again = run(Checkpointed(module))
    assert max(map(relative_error, once, again)) <= 1e-14


def test_one_chunk_of_the_inside_is_alive() -> None:
    length, hidden = 256, 512
    x = torch.randn(1, length, WIDTH, requires_grad=True)
    inside, peaks, saved = length * hidden * 4, [], []
    for chunks in (None, 16):
        module = MLP(hidden=hidden) if chunks is None else tiled(MLP(hidden=hidden), chunks)
        with MemoryCounter() as memory:
            out = module(x)
            saved.append(memory.alive["cpu"] - out.nbytes)
            out.sum().backward()
        peaks.append(memory.peak["cpu"])
    assert saved[0] >= 2 * inside and saved[1] <= 64
    assert peaks[0] >= 3 * inside and peaks[1] <= 5 * inside / 16 + 6 * x.nbytes + 3 * 2 * WIDTH * hidden * 4


# --------------------------------------------------------------------------- on ranks


@on_ranks
def sharded() -> tuple[list[float], list[int], str]:
    """Errors under FSDP2 (the module itself, and a block around it), DDP and tensor parallelism; gathers and reductions
    of the weights under FSDP2."""
    mesh, found, counts = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), [], []
    wanted = run(MLP().double())

    def compare(module: nn.Module, whole: nn.Module) -> None:
        found.extend(map(relative_error, run(module), wanted))

    for own in (True, False):
        inner = tiled(MLP().double(), 4)
        module = Around(inner)
        if own:
            fully_shard(inner, mesh=mesh)
        fully_shard(module, mesh=mesh)
        with Operators() as operators:
            compare(module, inner)
        transfers = [name for name, _ in operators.calls if name.startswith("c10d::")]
        counts += [sum(kind in name for name in transfers) for kind in ("gather", "reduce_scatter")]
    ddp = DistributedDataParallel(Around(tiled(MLP().double(), 4)), find_unused_parameters=True)
    compare(ddp, ddp)
    parallel = tiled(MLP().double(), 4)
    parallelize_module(parallel, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
    compare(parallel, parallel)
    inside = tiled(MLP().double(), 2)
    fully_shard(inside.w1, mesh=mesh)
    return found, counts, error_of(lambda: inside(data()[0]))


def test_weights_are_gathered_once_and_gradients_reduced_once(ranks: Any) -> None:
    for found, counts, refused in ranks(2, sharded):
        assert max(found) <= 1e-12
        assert counts == [2, 1, 1, 1]  # once a pass; a root keeps its weights between forward and backward
        assert refused.startswith("ValueError: module FSDPMLP" if "FSDPMLP" in refused else "ValueError: module MLP")
        assert "fully_shard was applied to 'w1' inside it" in refused


# --------------------------------------------------------------------------- wrong use


class LlamaAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Any = None) -> Any:
        return (x, y)


def test_wrong_use_is_refused() -> None:
    x = torch.zeros(2, 8, WIDTH)
    again = tiled(MLP(), 2)
    for call, kind, words in [
        (lambda: tiled(nn.Sequential(MLP(), nn.Conv1d(6, 6, 3)), 2), ValueError, "'1' .Conv1d. inside it convolves 3"),
        (lambda: tiled(nn.LSTM(6, 6), 2), ValueError, "it carries a state"),
        (
            lambda: tiled(nn.Sequential(nn.Softmax(1)), 2),
            ValueError,
            "'0' .Softmax. inside it takes a softmax over dim",
        ),
        (lambda: tiled(Around(LlamaAttention()), 2), ValueError, "'inner' .LlamaAttention. inside it is attention"),
        (lambda: tiled(nn.MultiheadAttention(6, 2), 2), ValueError, "it is attention"),
        (lambda: tiled(again, 2), ValueError, "it is tiled or compiled already"),
        (lambda: tiled(F.silu, 2), TypeError, "module is a function"),  # type: ignore[arg-type]
        (lambda: tiled(MLP(), 0), ValueError, "chunks=0"),
        (lambda: tiled(MLP(), 2.0), TypeError, "chunks is a float"),  # type: ignore[arg-type]
        (lambda: tiled(MLP(), 2, seq_dim="s"), TypeError, "seq_dim is a str"),  # type: ignore[arg-type]
        (lambda: tiled(MLP(), 2, seq_dim=3)(x), ValueError, "along seq_dim=3, and its input has shape"),
        (lambda: tiled(Pair(), 2)(x), ValueError, "returned a tuple"),
        (lambda: tiled(Pair(), 2)(x, x), TypeError, "got 2 tensors"),
        (lambda: tiled(Pair(), 2)(x, [x]), TypeError, "got 2 tensors, those inside of lists included"),
        (lambda: tiled(Pair(), 2)({"x": x}), TypeError, "got 1 tensors.*an argument by itself"),
        (lambda: tiled(nn.Flatten(1), 2)(x), ValueError, r"returned a Tensor .shape torch.Size..2, 24.."),
    ]:
        with pytest.raises(kind, match=words):
            call()
    module = tiled(MLP(), 2)
    out = module(x.requires_grad_())
    module.w1.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="Freeze parameters before the forward"):
        out.sum().backward()


def test_weights_that_are_changed_between_forward_and_backward_are_refused() -> None:
    """As autograd does for saved tensors; frozen weights count too."""
    for frozen in (False, True):
        module = tiled(MLP(), 2)
        module.w1.weight.requires_grad_(not frozen)
        out = module(torch.zeros(2, 8, WIDTH, requires_grad=True))
        with torch.no_grad():
            module.w1.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"'w1\.weight' was changed in place between forward and backward"):
            out.sum().backward()


@pytest.mark.parametrize("how", ["functional_call", "replaced"])
def test_weights_that_are_other_tensors_in_backward_are_refused(how: str) -> None:
    """Its chunks would be computed again with these."""
    module, x = tiled(nn.Linear(4, 4), 2), torch.randn(2, 6, 4, requires_grad=True)
    if how == "functional_call":
        out = torch.func.functional_call(module, {name: 2 * p for name, p in module.named_parameters()}, (x,))
    else:
        out = module(x)
        module.weight = nn.Parameter(module.weight.detach() * 3)
    with pytest.raises(RuntimeError, match="its weight 'weight' is another tensor in backward"):
        out.sum().backward()


class Buffered(nn.Module):
    """Reads and counts with buffers: chunks in place, and its runs in one that it makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.scale: Tensor
        self.count: Tensor
        self.runs: Tensor
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.runs = self.runs + 1
        return torch.tanh(self.dropout(self.layer(x)) * self.scale)


def test_a_compiled_module_does_not_differentiate_with_other_weights() -> None:
    inner = nn.Linear(WIDTH, WIDTH)
    module = tiled(nn.Sequential(inner, nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 2)
    out = torch.compile(module, backend="aot_eager")(torch.zeros(2, 8, WIDTH, requires_grad=True))
    with torch.no_grad():
        inner.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["scale", "count", "replaced"])
def test_buffers_that_are_changed_between_forward_and_backward_are_refused(name: str) -> None:
    """Also by another than the module in a buffer that it writes itself."""
    module = tiled(Buffered(), 2)
    module(torch.randn(2, 6, 4)).sum().backward()
    out = module(torch.randn(2, 6, 4))
    if name == "replaced":
        module.scale = torch.full((1,), 3.0)
    else:
        getattr(module, name).fill_(3)
    with pytest.raises(RuntimeError, match=f"its buffer '{name.replace('replaced', 'scale')}' was changed in place or"):
        out.sum().backward()


def test_buffers_that_a_module_writes_itself_are_its_own() -> None:
    """Several calls before their backwards, and a graph that runs twice, are as without buffers."""
    module = tiled(Buffered(), 2)
    first, second = (module(torch.randn(2, 6, 4)).sum() for _ in range(2))
    first.backward(retain_graph=True)
    second.backward()
    module.scale.fill_(2)  # behind their backwards
    with pytest.raises(RuntimeError, match="its buffer 'scale' was changed"):
        first.backward()
    copied = copy.deepcopy(module)
    copied(torch.randn(2, 6, 4)).sum().backward()
    assert float(module.count) == float(module.runs) == 2 * 2 + 2 * 2 and float(copied.count) == 12


@pytest.mark.parametrize("trained", [True, False])
def test_backward_has_the_mode_of_its_forward(trained: bool) -> None:
    """An evaluation in between changes no gradient, and finds its own mode again."""
    found = []
    for between in (False, True):
        torch.manual_seed(3)
        module = tiled(MLP(0.5).double(), 4).train(trained)
        x, grad = data()
        out = module(x)
        if between:
            module.train(not trained)
        out.backward(grad)
        assert module.training == module.dropout.training == (trained != between)
        found.append([out.detach(), x.grad, *gradients(module)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


def test_hooks_of_weights_are_refused() -> None:
    """They would be called for each chunk, and for the sum."""
    module = tiled(nn.Linear(4, 4), 2)
    handle = module.weight.register_hook(lambda grad: 3 * grad)
    with pytest.raises(NotImplementedError, match="a weight of it has a hook"):
        module(torch.randn(2, 6, 4))
    handle.remove()
    module(torch.randn(2, 6, 4)).sum().backward()


class Conditioned(nn.Module):
    """Reads a tensor that is no parameter of its own."""

    def __init__(self, condition: Tensor) -> None:
        super().__init__()
        self.layer, self.condition = nn.Linear(4, 4), [condition]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.condition[0]


@pytest.mark.parametrize("leaf", [True, False])
def test_a_tensor_that_is_no_parameter_is_refused(leaf: bool) -> None:
    """Its gradient would be missing."""
    condition = torch.ones(4, requires_grad=True)
    out = tiled(Conditioned(condition if leaf else condition.tanh()), 2)(torch.randn(2, 6, 4))
    with pytest.raises(NotImplementedError, match=r"reads a tensor \(shape \(4,\), or .* is no parameter of it"):
        out.sum().backward()


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_writes_to_the_input_are_refused_where_there_is_a_backward(needs_gradient: bool) -> None:
    """Backward would compute the chunks of another input: other gradients of weights, without a word."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.SiLU(inplace=True), nn.Linear(4, 4))
    x = torch.randn(2, 7, 4)
    expected = copy.deepcopy(module)(x.clone())
    tiled(module, 3)
    with torch.no_grad():
        given = x.clone()
        torch.testing.assert_close(module(given), expected)
        torch.testing.assert_close(given, F.silu(x))  # the caller sees the write, as without tiles
    with pytest.raises(NotImplementedError, match="Sequential is tiled, and writes to its input in place"):
        module(x.clone().requires_grad_(needs_gradient) * 1.0)


def dropped(x: Tensor, p: float) -> Tensor:
    return x * (torch.rand_like(x) > p)


class PathDropped(nn.Linear):
    """A layer whose method calls a function that draws."""

    def forward(self, x: Tensor) -> Tensor:
        return self.dropped(super().forward(x))

    def dropped(self, x: Tensor) -> Tensor:
        return dropped(x, 0.5)


def closed(function: Any) -> nn.Module:
    """A module whose forward calls a function that only its closure has."""

    class Closed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return Closed()


class Anything:
    """Answers to every name, as some configurations do."""

    def __getattr__(self, name: str) -> Anything:
        return self


class Dropping:
    """An object that is called as a function is."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.dropout(x)


class Masked(nn.Module):
    """Calls a function of a file that is imported."""

    def forward(self, x: Tensor) -> Tensor:
        return x * masks.draw(x)


class Keeping(nn.Module):
    """Calls a function that it keeps."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.function(x)


def test_modules_that_draw_are_known_by_what_they_call() -> None:
    kept, part = Keeping(F.dropout), Keeping(partial(F.dropout, p=0.5))
    of_code, several = Keeping(lambda x: F.dropout(F.gelu(x), 0.5)), Keeping(F.gelu)
    several.function = [F.gelu, {"drop": F.dropout}]
    of_object = Keeping(Dropping())
    with_draws = (PathDropped(4, 4), kept, part, of_code, several, of_object, Masked())
    reading = Keeping(Anything())
    with_draws = (*with_draws, closed(F.dropout))
    without = (nn.Dropout(), MLP(), nn.Linear(4, 4), Keeping(F.normalize), closed(F.gelu), reading)
    for module in (*with_draws, *without):  # nn.Dropout draws in training only, which is known when it runs
        assert tiled(module, 2).forward.draws == (module in with_draws), module


@pytest.mark.slow
@pytest.mark.parametrize("how", ["layer", "later", "kept"])
def test_inductor_differentiates_the_dropout_of_the_forward(how: str) -> None:
    """Inductor draws numbers of its own, which a recompute by hand does not find again. The module is linear; an
    adapter may bring its dropout later, to one in evaluation, and a function that it keeps may always draw."""
    between = {"layer": nn.Dropout(0.5), "later": nn.Identity(), "kept": Keeping(partial(F.dropout, p=0.5))}[how]
    layers = [nn.Linear(WIDTH, HIDDEN, bias=False), between, nn.Linear(HIDDEN, WIDTH, bias=False)]
    module: Any = tiled(nn.Sequential(*layers).double(), 4).train(how == "layer")
    if how == "later":
        module[1] = nn.Dropout(0.5)
    x, grad = (torch.randn(2, LENGTH, WIDTH, dtype=torch.float64) for _ in range(2))
    out = torch.compile(module)(x.requires_grad_())
    out.backward(grad)
    assert x.grad is not None
    assert (out * grad).sum().item() == pytest.approx((x * x.grad).sum().item(), rel=1e-9)

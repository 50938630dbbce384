"""ContextParallel on user modules: every way to pass q, k, v, every refusal, and nothing left behind."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from hyper_cp import ContextParallel, styled_modules
from hyper_cp.mesh import comm
from hyper_cp.ops import attention
from hyper_cp.ops.kernels import cpu
from tests.harness import modules
from tests.harness.oracle import plain_attention, relative_error, token_positions
from tests.harness.ranks import on_ranks

SEQ, HEADS, KV, DIM = 16, 4, 4, 8


def whole(kv_heads: int = KV) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(1, h, SEQ, DIM, generator=g, dtype=torch.float64) for h in (HEADS, kv_heads, kv_heads)]


def local(layout: str = "contiguous", kv_heads: int = KV) -> tuple[list[Tensor], Tensor]:
    """This rank's q, k, v ``[B, H, S, D]`` and its expected output."""
    mine = torch.tensor(token_positions(layout, dist.get_rank(), dist.get_world_size(), SEQ))
    q, k, v = whole(kv_heads)
    return [x[:, :, mine] for x in (q, k, v)], plain_attention(q, k, v, is_causal=True)[:, :, mine]


def apply(module: nn.Module, mesh_shape: tuple[int, ...] | None = None, **kwargs: Any) -> nn.Module:
    if mesh_shape is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    else:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ring", "ulysses"))
    return parallelize_module(module, mesh, ContextParallel(**kwargs))


MODES: list[dict[str, Any]] = [
    {"ulysses_degree": None},
    {"ulysses_degree": 1},
    {"ulysses_degree": 2, "kv_exchange": "ring", "layout": "head_tail"},
    {"ulysses_degree": "auto"},
]
BNSD = {"seq_dim": 2, "head_dim": 1}

# --------------------------------------------------------------------------- ways to call


@on_ranks
def call_every_way() -> dict[str, float]:
    errors = {}
    for mode in MODES:
        (q, k, v), want = local(mode.get("layout", "contiguous"))
        bshd = [x.transpose(1, 2) for x in (q, k, v)]
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        ways: dict[str, Callable[[], Tensor]] = {
            "positional": lambda: apply(modules.BNSD(), **BNSD, **mode)(q, k, v),
            "keywords": lambda: apply(modules.BNSD(), **BNSD, **mode)(v=v, note="x", k=k, q=q),
            "mixed": lambda: apply(modules.BNSD(), **BNSD, **mode)(q, k, v=v),
            "tuple": lambda: apply(modules.BNSD(packaging="tuple"), **BNSD, **mode)(q, k, v)[0],
            "list": lambda: apply(modules.BNSD(packaging="list"), **BNSD, **mode)(q, k, v)[0],
            "namedtuple": lambda: apply(modules.BNSD(packaging="namedtuple"), **BNSD, **mode)(q, k, v).hidden,
            "bshd": lambda: apply(modules.BSHD(), **mode)(*bshd).transpose(1, 2),
            "flat": lambda: apply(modules.BSHD(flat=True), **mode)(*bshd).unflatten(2, (HEADS, DIM)).transpose(1, 2),
            "packed": lambda: (
                apply(modules.Packed(), seq_dim=0, head_dim=1, **mode)(*packed, scale=DIM**-0.5)
                .transpose(0, 1)
                .unsqueeze(0)
            ),
            "keyword only": lambda: apply(
                modules.KeywordOnly(), **BNSD, qkv_kwarg_names=("queries", "keys", "values"), **mode
            )(keys=k, queries=q, values=v),
            "own qkv": lambda: apply(modules.BNSD(), **BNSD, qkv_indices=None, **mode)(q, k, v),
        }
        for name, way in ways.items():
            out = way()
            errors[f"{name} {mode}"] = relative_error(out, want) if out.shape == want.shape else 1.0
    return errors


@pytest.mark.slow
def test_every_way_to_pass_qkv_and_to_return(ranks: Any) -> None:
    for errors in ranks(4, call_every_way):
        assert max(errors.values()) <= 1e-10, {k: e for k, e in errors.items() if e > 1e-10}


@on_ranks
def by_hand_under_ulysses() -> float:
    (q, k, v), want = local()
    return relative_error(apply(modules.Silent(), **BNSD)(q, k, v), want)


def test_pure_ulysses_runs_any_kernel(ranks: Any) -> None:
    assert max(ranks(4, by_hand_under_ulysses)) <= 1e-10


@on_ranks
def on_a_2d_mesh() -> list[float]:
    (q, k, v), want = local()
    found = [apply(modules.BNSD(), shape, **BNSD)(q, k, v) for shape in ((2, 2), (1, 4), (4, 1))]
    found.append(apply(modules.BNSD(), **BNSD, ulysses_degree=2)(q, k, v))
    assert torch.equal(found[0], found[-1])
    return [relative_error(x, want) for x in found]


def test_2d_mesh_equals_1d_with_a_degree(ranks: Any) -> None:
    assert max(max(errors) for errors in ranks(4, on_a_2d_mesh)) <= 1e-10


@on_ranks
def on_a_slice_of_a_larger_mesh() -> list[float]:
    """cp as a dimension of dp x cp, both hybrid-able halves at work at once."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))["cp"]
    rank, errors = mesh.get_local_rank(), []
    q, k, v = whole()
    for mode in MODES:
        mine = torch.tensor(token_positions(mode.get("layout", "contiguous"), rank, 4, SEQ))
        module = parallelize_module(modules.BNSD(), mesh, ContextParallel(**BNSD, **mode))
        out = module(*(x[:, :, mine] for x in (q, k, v)))
        errors.append(relative_error(out, plain_attention(q, k, v, is_causal=True)[:, :, mine]))
    return errors


def test_cp_dimension_of_a_larger_mesh(ranks: Any) -> None:
    assert max(max(errors) for errors in ranks(8, on_a_slice_of_a_larger_mesh)) <= 1e-10


@on_ranks
def as_dtensor() -> tuple[bool, float]:
    (q, k, v), _ = local()
    out = apply(modules.BNSD(), **BNSD, use_local_output=False)(q, k, v)
    full = out.full_tensor() if isinstance(out, DTensor) else torch.zeros(1)
    return isinstance(out, DTensor), relative_error(full, plain_attention(*whole(), is_causal=True))


def test_use_local_output_false_returns_a_sharded_dtensor(ranks: Any) -> None:
    assert all(is_dtensor and error <= 1e-10 for is_dtensor, error in ranks(2, as_dtensor))


@on_ranks
def auto_choice() -> tuple[list[int], list[int]]:
    """Degrees that "auto" chooses for 4/4, 4/2 and 3/1 heads, on one host and on hosts of two."""
    import os

    chosen = []
    for host in ("4", "2"):
        os.environ["LOCAL_WORLD_SIZE"] = host
        from hyper_cp.module.mesh_binding import binding_of

        module = apply(modules.BNSD(), **BNSD, ulysses_degree="auto")
        binding = binding_of(module)
        assert binding is not None
        chosen.append([binding.active.view(*heads).ulysses.size for heads in ((4, 4), (4, 2), (3, 1))])
    return chosen[0], chosen[1]


def test_auto_is_the_widest_degree_of_heads_and_host(ranks: Any) -> None:
    assert ranks(4, auto_choice) == [([4, 2, 1], [2, 2, 1])] * 4


# --------------------------------------------------------------------------- refusals


@on_ranks
def refused(kind: str) -> None:
    """Make the mistake ``kind``; whatever happens, nothing may have been communicated."""
    (q, k, v), _ = local()
    with comm.record_traffic() as log:
        try:
            WRONG[kind][2](q, k, v)
        finally:
            if any(operation != "agreement" for operation, _ in log.entries):
                raise SystemError(f"communicated before refusing: {log.entries}")


def two_d_with_other_names(*_: Tensor) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ContextParallel()._apply(modules.BNSD(), mesh)


def three_d(*_: Tensor) -> None:
    ContextParallel()._apply(modules.BNSD(), init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))


def twice(*_: Tensor) -> None:
    apply(apply(modules.BNSD(), **BNSD), **BNSD)


def nothing_matched(*_: Tensor) -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Sequential(modules.BNSD())
    parallelize_module(model, mesh, {"attention": ContextParallel()})
    styled_modules(model, at_least=1)


def named(q: Tensor, k: Tensor, v: Tensor) -> None:
    model = nn.ModuleDict({"block": nn.ModuleDict({"attn": modules.Silent()})})
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(model, mesh, {"block.attn": ContextParallel(**BNSD, ulysses_degree=1)})
    styled_modules(model)
    model["block"]["attn"](q, k, v)  # type: ignore[index,operator]


class Flash(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.kwargs = kwargs

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.kwargs)


class MHA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x, x, x, need_weights=False)[0]


ring1 = {**BNSD, "ulysses_degree": 1}
Mistake = tuple[str, str, Callable[..., Any]]
WRONG: dict[str, Mistake] = {
    "heads": (
        "ValueError",
        "ulysses_degree=4 cannot split 6 query heads.*that work: 1, 2\\.",
        lambda q, k, v: apply(modules.BNSD(), **BNSD)(q.repeat(1, 2, 1, 1)[:, :6], k[:, :2], v[:, :2]),
    ),
    "heads, own qkv": (
        "ValueError",
        "cannot split 3 query heads.*that work: 1\\.",
        lambda q, k, v: apply(modules.BNSD(), qkv_indices=None, ulysses_degree=2)(q[:, :3], k[:, :3], v[:, :3]),
    ),
    "degree": (
        "ValueError",
        "ulysses_degree=3 does not divide the cp mesh of 4 ranks; degrees that do: 1, 2, 4",
        lambda *_: apply(modules.BNSD(), ulysses_degree=3),
    ),
    "2-D names": ("ValueError", r"2 dimensions named \('dp', 'cp'\).*Slice", two_d_with_other_names),
    "3-D": ("ValueError", "3 dimensions", three_d),
    "2-D and degree": (
        "ValueError",
        "ulysses_degree=4 contradicts the 2-D mesh, whose 'ulysses' dimension has 2",
        lambda *_: apply(modules.BNSD(), (2, 2), ulysses_degree=4),
    ),
    "not found": (
        "ValueError",
        "v was found neither at position 2 nor as keyword 'v'.*Set qkv_indices",
        lambda q, k, v: apply(modules.BNSD(), **BNSD)(q, k),
    ),
    "not a tensor": (
        "TypeError",
        "k is a str, not a tensor",
        lambda q, k, v: apply(modules.BNSD(), **BNSD)(q, "k", v),
    ),
    "dtypes": (
        "TypeError",
        "dtypes torch.float64, torch.float32, torch.float64.*Cast",
        lambda q, k, v: apply(modules.BNSD(), **BNSD)(q, k.float(), v),
    ),
    "dtypes, own qkv": (
        "TypeError",
        "dtypes torch.float64, torch.float32 and torch.float64",
        lambda q, k, v: apply(modules.BNSD(), qkv_indices=None)(q, k.float(), v),
    ),
    "dimensions": (
        "ValueError",
        "seq_dim=2 and head_dim=4 need 6 dimensions",
        lambda q, k, v: apply(modules.BNSD(), seq_dim=2, head_dim=4)(q, k, v),
    ),
    "lengths": (
        "ValueError",
        "k and v have 3 and 4 positions in dimension seq_dim=2",
        lambda q, k, v: apply(modules.BNSD(), **BNSD)(q, k[:, :, :3], v),
    ),
    "documents": (
        "ValueError",
        r"documents=\[0, 5, 9\] must be cumulative lengths that ascend from 0 to the global sequence length 16",
        lambda q, k, v: apply(modules.BNSD(), **BNSD, ulysses_degree=2)(q, k, v, documents=[0, 5, 9]),
    ),
    "documents, own qkv": (
        "ValueError",
        "the global sequence length 16",
        lambda q, k, v: apply(modules.BNSD(), qkv_indices=None, ulysses_degree=2)(q, k, v, documents=[[3, 16]]),
    ),
    "causal cross-attention": (
        "ValueError",
        "query has 16 and key 12 positions .*Cross-attention of different lengths takes no is_causal",
        lambda q, k, v: apply(modules.BNSD(), **ring1)(q, k[:, :, :3], v[:, :, :3]),
    ),
    "odd": (
        "ValueError",
        "local sequence length 3 is odd.*multiple of 8",
        lambda q, k, v: apply(modules.BNSD(), **BNSD, layout="head_tail")(*(x[:, :, :3] for x in (q, k, v))),
    ),
    "odd, balance": (
        "ValueError",
        "local sequence length 3 is odd.*multiple of 8",
        lambda q, k, v: apply(modules.BNSD(), **ring1, load_balance=True)(*(x[:, :, :3] for x in (q, k, v))),
    ),
    "no attention": (
        "RuntimeError",
        "module Silent returned without calling F.scaled_dot_product_attention",
        lambda q, k, v: apply(modules.Silent(), **ring1)(q, k, v),
    ),
    "no attention, own qkv": (
        "RuntimeError",
        "module Silent returned without calling",
        lambda q, k, v: apply(modules.Silent(), qkv_indices=None)(q, k, v),
    ),
    "no attention, named": ("RuntimeError", r"module 'block.attn' \(Silent\)", named),
    "twice": ("ValueError", "already applied to module BNSD", twice),
    "nothing matched": ("ValueError", "applied to 0 modules of Sequential, expected", nothing_matched),
    "mask": (
        "ValueError",
        r"attn_mask has shape \(1, 1, 4, 4\). It must be broadcastable to \[1, 4, 16, 16\]",
        lambda q, k, v: apply(Flash(attn_mask=torch.ones(4, 4, dtype=torch.bool)), **ring1)(q, k, v),
    ),
    "dropout": (
        "ValueError",
        "dropout_p=1.0 must be a probability below 1",
        lambda q, k, v: apply(Flash(dropout_p=1.0), **ring1)(q, k, v),
    ),
    "gqa": (
        "ValueError",
        "query has 4 heads and key 2. Pass enable_gqa=True",
        lambda q, k, v: apply(Flash(), **ring1)(q, k[:, :2], v[:, :2]),
    ),
    "MultiheadAttention": (
        "NotImplementedError",
        "module MHA calls nn.MultiheadAttention",
        lambda q, k, v: apply(MHA(), qkv_indices=None)(q.transpose(1, 2).flatten(2)),
    ),
    "not a mesh": (
        "TypeError",
        "mesh must be a torch.distributed.DeviceMesh, got str",
        lambda *_: ContextParallel()._apply(modules.BNSD(), "cp"),
    ),
}


@pytest.mark.parametrize("kind", list(WRONG))
@pytest.mark.filterwarnings("ignore")
def test_wrong_use_is_refused_on_every_rank_before_communication(ranks: Any, kind: str) -> None:
    exception, words, _ = WRONG[kind]
    ranks.raises(4, exception, words, refused, kind)


class Transposing(modules.BNSD):
    def forward(self, *qkv: Tensor) -> Tensor:
        return super().forward(*qkv).transpose(1, 2)


@on_ranks
def wrong_output() -> None:
    (q, k, v), _ = local()
    apply(Transposing(), **BNSD)(q, k, v)


def test_output_of_another_layout_is_refused(ranks: Any) -> None:
    ranks.raises(2, "ValueError", "must be a tensor with 16 positions in dimension seq_dim=2 and 2 heads", wrong_output)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"seq_dim": -1}, "seq_dim=-1"),
        ({"seq_dim": 1, "head_dim": 1}, "different dimensions"),
        ({"ulysses_degree": 0}, "ulysses_degree=0"),
        ({"ulysses_degree": "all"}, "ulysses_degree='all'"),
        ({"ulysses_degree": True}, "ulysses_degree=True"),
        ({"qkv_indices": (0, 1)}, re.escape("qkv_indices=(0, 1)")),
        ({"qkv_indices": None, "qkv_kwarg_names": ("q", "k", "v")}, "qkv_kwarg_names="),
        ({"kv_exchange": "p2p"}, "kv_exchange='p2p' is unknown; choose one of 'all_gather', 'ring'"),
        ({"layout": "zigzag"}, "layout='zigzag'"),
        ({"layout": "head_tail", "load_balance": True}, "balanced already"),
        ({"layout": "head_tail", "use_local_output": False}, "contiguous order"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ContextParallel(**kwargs)


# --------------------------------------------------------------------------- nothing left behind


def clean() -> bool:
    """No mode is left on the stack, and a plain call of another module is plain."""
    (q, k, v), _ = local()
    with comm.record_traffic() as log:
        F.scaled_dot_product_attention(q, k, v)
    return not torch.overrides._get_current_function_mode_stack() and not log.entries


def fails(module: nn.Module, *args: Any) -> str:
    try:
        module(*args)
    except Exception as error:
        return type(error).__name__
    return "nothing"


@on_ranks
def exceptions() -> list[Any]:
    (q, k, v), want = local()
    found: list[Any] = []
    for mode in ({"ulysses_degree": 1}, {"ulysses_degree": 2}):
        module = apply(modules.Failing(), **BNSD, **mode)
        found += [fails(module, q, k, v), clean()]
        module.broken = False  # type: ignore[assignment]
        found.append(relative_error(module(q, k, v), want) <= 1e-10)

        def bad_hook(*_: Any) -> None:
            raise LookupError("a hook's mistake")

        for prepend in (False, True):  # after ours, before ours
            hook = module.register_forward_pre_hook(bad_hook, prepend=prepend)
            found += [fails(module, q, k, v), clean()]
            hook.remove()
        hook = module.register_forward_hook(bad_hook)
        found += [fails(module, q, k, v), clean()]
        hook.remove()
        found.append(relative_error(module(q, k, v), want) <= 1e-10)
        found += [fails(module, q, k, "v"), clean()]  # our own refusal
        found.append(relative_error(module(q, k, v), want) <= 1e-10)
    return found


def test_exceptions_leave_nothing_behind(ranks: Any) -> None:
    one = ["KeyError", True, True, *["LookupError", True] * 3, True, "TypeError", True, True]
    assert ranks(4, exceptions) == [one * 2] * 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, dtype=torch.float64)
        self.inner = modules.BNSD()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(self.proj(q), k, v)


@on_ranks
def copies() -> list[bool]:
    (q, k, v), _ = local()
    plain = Model()
    names = [n for n, _ in plain.named_modules()], list(plain.state_dict())
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (4,))
    parallelize_module(model, mesh, {"inner": ContextParallel(**ring1)})
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.proj.weight.add_(1)
    full = plain_attention(plain.proj(whole()[0]), *whole()[1:], is_causal=True)
    want = full[:, :, dist.get_rank() * 4 :][:, :, :4]
    state = pickle.loads(pickle.dumps(model.state_dict()))
    return [
        ([n for n, _ in model.named_modules()], list(model.state_dict())) == names,
        relative_error(model(q, k, v), want) <= 1e-10,
        relative_error(twin(q, k, v), want) > 1e-3,
        relative_error(model(q, k, v), want) <= 1e-10,
        list(styled_modules(twin)) == ["inner"],
        all(torch.equal(a, b) for a, b in zip(state.values(), plain.state_dict().values(), strict=True)),
        fails_to_pickle(model),
    ]


def fails_to_pickle(model: nn.Module) -> bool:
    try:
        pickle.dumps(model)
    except TypeError as error:
        return "state_dict" in str(error)
    return False


def test_deepcopy_names_and_state_dict(ranks: Any) -> None:
    assert ranks(4, copies) == [[True] * 7] * 4


@on_ranks
def count_groups() -> list[int]:
    """Process groups made for a 24-layer model in several modes, styles and applications."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    made, original, counts = [], dist.new_group, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return original(*args, **kwargs)

    dist.new_group = counting
    try:
        for mode in (
            {"ulysses_degree": 2},
            {"ulysses_degree": 2, "kv_exchange": "ring"},
            *({"ulysses_degree": degree} for degree in (1, None, "auto")),
        ):
            model = nn.ModuleList(modules.BNSD() for _ in range(24))
            parallelize_module(model, mesh, {"*": ContextParallel(**BNSD, **mode)})
            assert len(styled_modules(model)) == 24
            counts.append(len(made))
    finally:
        dist.new_group = original
    return counts


def test_groups_are_made_once_per_mesh(ranks: Any) -> None:
    assert ranks(4, count_groups) == [[2, 2, 2, 2, 2]] * 4  # one ring and one ulysses group per rank


@on_ranks
def amp() -> list[Any]:
    (q, k, v), want = local()
    found: list[Any] = []
    for mode in MODES[:3]:
        if mode.get("layout"):
            (q, k, v), want = local("head_tail")
        with torch.autocast("cpu", torch.bfloat16):
            out = apply(modules.BNSD(), **BNSD, **mode)(q.float(), k.float(), v.float())
        found.append((out.dtype, relative_error(out, want) < 2e-2))
    return found


class Dtypes(nn.Module):
    """Notes what its attention gets: fp32 from RoPE, bf16 from a projection."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen = [x.dtype for x in (q, k, v)]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@on_ranks
def unequal_under_autocast() -> list[Any]:
    found: list[Any] = []
    for mode in MODES[:3]:
        (q, k, v), want = local(mode.get("layout", "contiguous"))
        module = apply(Dtypes(), **BNSD, **mode)
        mixed = [q.float().requires_grad_(), k.float(), v.bfloat16()]
        with torch.autocast("cpu", torch.bfloat16):
            out = module(*mixed)
            found.append(fails(module, q, k.float(), v.bfloat16()))  # fp64 is not cast
        out.sum().backward()
        found += [module.seen == [x.dtype for x in mixed], out.dtype, relative_error(out, want) < 2e-2]
        found += [mixed[0].grad.dtype, fails(module, *mixed)]  # as refused without autocast
    return found


def test_autocast_makes_unequal_dtypes_equal_where_attention_is_called(ranks: Any) -> None:
    one = ["TypeError", True, torch.bfloat16, True, torch.float32, "TypeError"]
    assert ranks(4, unequal_under_autocast) == [one * 3] * 4


def test_autocast_reaches_attention(ranks: Any) -> None:
    assert ranks(4, amp) == [[(torch.bfloat16, True)] * 3] * 4


@on_ranks
def no_warnings() -> bool:
    (q, k, v), _ = local()
    for mode in MODES:
        out = apply(modules.BNSD(), **BNSD, **mode)(*(x.clone().requires_grad_() for x in (q, k, v)))
        out.sum().backward()
    return True


def test_no_warning_comes_from_us(ranks: Any) -> None:
    assert all(ranks(4, no_warnings, warnings_as_errors=True))


# --------------------------------------------------------------------------- corners


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = modules.BNSD()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(q, k, v)


@on_ranks
def nested() -> None:
    (q, k, v), _ = local()
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(Outer(), mesh, {"": ContextParallel(**BNSD), "inner": ContextParallel(**BNSD)})
    try:
        model(q, k, v)
    finally:
        if not clean():
            raise SystemError("left something behind")


def test_styled_modules_inside_each_other_are_refused(ranks: Any) -> None:
    ranks.raises(2, "RuntimeError", "module BNSD was called inside module Outer", nested)


@on_ranks
def unordered_mesh() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    ContextParallel()._apply(modules.BNSD(), DeviceMesh("cpu", [1, 0], mesh_dim_names=("cp",)))


def test_a_mesh_out_of_order_is_refused(ranks: Any) -> None:
    ranks.raises(2, "ValueError", r"mesh lists its ranks as \[1, 0\], not ascending", unordered_mesh)


@on_ranks
def corners() -> dict[str, bool]:
    """Calls that are unusual but right."""
    world, found = dist.get_world_size(), {}
    for mode in MODES:
        layout = mode.get("layout", "contiguous")
        mine = torch.tensor(token_positions(layout, dist.get_rank(), world, SEQ))
        (q, k, v), want = local(layout)
        module = apply(modules.BNSD(), **BNSD, **mode)
        key = str(mode)
        with torch.no_grad():
            found[f"no_grad {key}"] = relative_error(module(q, k, v), want) <= 1e-10
        with torch.inference_mode():
            found[f"inference {key}"] = relative_error(module(q, k, v), want) <= 1e-10
        for needs in ((0,), (1,), (2,), (0, 2)):  # only some inputs want gradients; dout is expanded
            part = [x.clone().requires_grad_(i in needs) for i, x in enumerate((q, k, v))]
            full = [x.clone().requires_grad_(i in needs) for i, x in enumerate(whole())]
            module(*part).sum().backward()
            plain_attention(*full, is_causal=True).sum().backward()
            for a, b in zip(part, full, strict=True):
                expected = None if b.grad is None else b.grad[:, :, mine]
                neither = a.grad is None and expected is None
                found[f"only {needs} {key}"] = neither or torch.allclose(a.grad, expected, 0, 1e-10)
        nothing = [x[:0] for x in (q, k, v)]
        found[f"empty batch {key}"] = module(*nothing).shape == nothing[0].shape
        warmer = apply(Flash(is_causal=True, scale=0.05), **BNSD, **mode)(q, k, v)
        expected = plain_attention(*whole(), is_causal=True, scale=0.05)[:, :, mine]
        found[f"scale {key}"] = relative_error(warmer, expected) <= 1e-10
        half = apply(modules.BNSD(), **BNSD, **mode)(*(x.half() for x in (q, k, v)))
        found[f"fp16 {key}"] = half.dtype == torch.float16 and relative_error(half, want) < 5e-3
        twice = module(q, k, v) + module(q, k, v)
        found[f"twice in one graph {key}"] = relative_error(twice, 2 * want) <= 1e-10
    odd = [x[:, :, :3] for x in whole()]  # balance has nothing to do without a mask: odd lengths are fine
    out = apply(Flash(), **ring1, load_balance=True)(*odd)
    found["balance without a mask"] = out.shape[2] == 3
    return found


def test_unusual_calls(ranks: Any) -> None:
    for found in ranks(4, corners):
        assert all(found.values()), [name for name, good in found.items() if not good]


@on_ranks
def meshes_rebuilt(backend_jobs: int) -> list[float]:
    """Process groups destroyed and made again in one process: nothing stale is used."""
    rank, world, errors = dist.get_rank(), dist.get_world_size(), []
    store = dist.distributed_c10d._get_default_store()
    for job in range(backend_jobs):
        dist.destroy_process_group()
        prefix = dist.PrefixStore(f"again{job}", store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world)
        (q, k, v), want = local()
        for degree in (1, 2):
            errors.append(relative_error(apply(modules.BNSD(), **BNSD, ulysses_degree=degree)(q, k, v), want))
    return errors


def test_destroyed_and_rebuilt_groups(ranks: Any) -> None:
    assert max(max(errors) for errors in ranks(4, meshes_rebuilt, 3)) <= 1e-10


# --------------------------------------------------------------------------- what fresh eyes found


class CoreCheckpoint(nn.Module):
    """Recomputes only its attention, with the old kind of activation checkpointing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def core(*qkv: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*qkv, is_causal=True)

        return checkpoint(core, q, k, v, use_reentrant=True)


class Interrupted(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise KeyboardInterrupt


class Rotated(nn.Module):
    """Only v reaches attention as it came; q and k are changed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 2, k * 2, v, is_causal=True)


@on_ranks
def equal_sizes() -> list[float]:
    """As many heads as positions after the exchange, dimensions as they are."""
    world, rank, errors = dist.get_world_size(), dist.get_rank(), []
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2 * world**2, 2 * world, 8, generator=g, dtype=torch.float64) for _ in range(3))
    want = plain_attention(q, k, v, is_causal=True)[:, :, 2 * rank : 2 * rank + 2]
    mine = [x[:, :, 2 * rank : 2 * rank + 2] for x in (q, k, v)]
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            errors.append(relative_error(apply(modules.BNSD(), **BNSD)(*mine), want))
            out = apply(modules.BSHD())(*(x.transpose(1, 2) for x in mine))
            errors.append(relative_error(out.transpose(1, 2), want))
    return errors


def test_as_many_heads_as_positions(ranks: Any) -> None:
    assert max(max(errors) for errors in ranks(2, equal_sizes)) <= 1e-10


FOUND = {
    "swapped dimensions of equal sizes": (
        "ValueError",
        "Check seq_dim and head_dim",
        lambda *_: apply(modules.BNSD())(*(torch.randn(1, 4, 64, 8) for _ in range(3))),
    ),
    "swapped dimensions of equal sizes, rotated": (
        "ValueError",
        "Check seq_dim and head_dim",
        lambda *_: apply(Rotated())(*(torch.randn(1, 4, 64, 8) for _ in range(3))),
    ),
    "swapped dimensions": (
        "ValueError",
        r"query of shape .* should be \[batch, .* Check seq_dim and head_dim",
        lambda q, k, v: apply(modules.BSHD(), **BNSD)(*(x.transpose(1, 2) for x in (q, k, v))),
    ),
    "flattened heads": (
        "ValueError",
        "need 4 dimensions .*qkv_indices=None",
        lambda q, k, v: apply(modules.BSHD())(*(x.transpose(1, 2).flatten(2) for x in (q, k, v))),
    ),
    "reentrant checkpoint inside": (
        "RuntimeError",
        "gradients switched off inside the module",
        lambda q, k, v: apply(CoreCheckpoint(), **ring1)(*(x.requires_grad_() for x in (q, k, v))),
    ),
    "integers": (
        "TypeError",
        "query has dtype torch.int32. Attention takes",
        lambda q, k, v: apply(Flash(), **ring1)(*(x.int() for x in (q, k, v))),
    ),
    "ring without a ring": (
        "ValueError",
        'kv_exchange="ring" has no effect with ulysses_degree=None',
        lambda q, k, v: apply(Flash(), **BNSD, kv_exchange="ring"),
    ),
}


@on_ranks
def found_refused(kind: str) -> None:
    (q, k, v), _ = local()
    with comm.record_traffic() as log:
        try:
            FOUND[kind][2](q, k, v)
        finally:
            sent = [operation for operation, _ in log.entries if operation != "agreement"]
            if kind in ("flattened heads", "integers", "ring without a ring") and sent:
                raise SystemError("communicated before refusing")


@pytest.mark.parametrize("kind", FOUND)
def test_misuse_that_was_silent(ranks: Any, kind: str) -> None:
    ranks.raises(4, FOUND[kind][0], FOUND[kind][1], found_refused, kind)


@on_ranks
def interrupted() -> dict[str, bool]:
    """Torch runs no hooks after a KeyboardInterrupt: what it leaves must do no harm."""
    (q, k, v), want = local()
    with suppress(KeyboardInterrupt):
        apply(Interrupted(), **ring1)(q, k, v)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    other = apply(modules.BNSD(), **ring1)(q, k, v)
    return {
        "plain attention is local": relative_error(plain, plain_attention(q, k, v, is_causal=True)) <= 1e-10,
        "the next styled module runs": relative_error(other, want) <= 1e-10,
        "nothing is left": clean(),
    }


def test_keyboard_interrupt(ranks: Any) -> None:
    for found in ranks(4, interrupted):
        assert all(found.values()), found


@on_ranks
def failing_kernel(kv: str) -> float:
    """The kernel fails on every rank while keys are in flight; the process group stays usable."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    (q, k, v), want = local()

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("simulated")

    cpu.KERNEL.forward = fails  # type: ignore[method-assign]
    try:
        with suppress(torch.OutOfMemoryError):
            attention(*(x.repeat(1, 1, 8000, 1) for x in (q, k, v)), mesh=mesh, kv_exchange=kv)
    finally:
        del cpu.KERNEL.forward
    if comm._in_flight.pending:
        raise SystemError("transfers that nobody waits for")
    dist.barrier()
    return relative_error(attention(q, k, v, mesh=mesh, is_causal=True, kv_exchange=kv), want)


@pytest.mark.parametrize("kv", ["ring", "all_gather"])
def test_a_failing_kernel_leaves_no_transfer_behind(ranks: Any, kv: str) -> None:
    assert max(ranks(2, failing_kernel, kv, timeout=40)) <= 1e-10


@on_ranks
def channels_apart() -> float:
    """Head dims that do not lie side by side in memory."""
    (q, k, v), want = local()
    apart = torch.stack([q, k, v], dim=-1).requires_grad_()
    out = apply(modules.BNSD(), **ring1)(*apart.unbind(-1))
    out.sum().backward()
    return relative_error(out, want)


def test_head_dims_with_a_stride(ranks: Any) -> None:
    assert max(ranks(4, channels_apart)) <= 1e-10


@on_ranks
def nested_records() -> bool:
    (q, k, v), _ = local()
    module = apply(modules.BNSD(), **ring1)
    module(q, k, v)  # the first call also compares its signature
    with comm.record_traffic() as outer:
        with comm.record_traffic() as inner:
            module(q, k, v)
        module(q, k, v)
    return bool(inner.entries) and len(outer.entries) == 2 * len(inner.entries)


def test_records_nest(ranks: Any) -> None:
    assert all(ranks(2, nested_records))


@on_ranks
def dtensor_named_tuple() -> bool:
    module = apply(modules.BNSD(packaging="namedtuple"), **ring1, use_local_output=False)
    (q, k, v), _ = local()
    return isinstance(module(q, k, v), modules.Out)


def test_named_tuple_of_dtensors(ranks: Any) -> None:
    assert all(ranks(2, dtensor_named_tuple))

"""ContextParallel on user modules: every way to pass q, k, v and to return, in every mode."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, ContextParallelHandler, styled_modules
from hyper_cp.mesh import comm
from hyper_cp.module.mesh_binding import binding_of
from tests.harness import modules
from tests.harness.oracle import plain_attention, relative_error, token_positions
from tests.harness.ranks import on_ranks
from tests.harness.styled import BNSD, DIM, HEADS, MODES, RING1, SEQ, Flash, apply, fails, local, whole


@on_ranks
def call_every_way() -> dict[str, float]:
    errors = {}
    for mode in MODES:
        (q, k, v), want = local(mode.get("layout", "contiguous"))
        bshd = [x.transpose(1, 2) for x in (q, k, v)]
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        names = {**BNSD, "qkv_kwarg_names": ("queries", "keys", "values")}
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
            "keyword only": lambda: apply(modules.KeywordOnly(), **names, **mode)(keys=k, queries=q, values=v),
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


@pytest.mark.slow
def test_cp_dimension_of_a_larger_mesh(ranks: Any) -> None:
    assert max(max(errors) for errors in ranks(8, on_a_slice_of_a_larger_mesh)) <= 1e-10


@on_ranks
def auto_choice() -> tuple[list[int], list[int]]:
    """Degrees that "auto" chooses for 4/4, 4/2 and 3/1 heads, on one host and on hosts of two."""
    chosen = []
    for host in ("4", "2"):
        os.environ["LOCAL_WORLD_SIZE"] = host
        module = apply(modules.BNSD(), **BNSD, ulysses_degree="auto")
        binding = binding_of(module)
        assert binding is not None
        chosen.append([binding.active.view(*heads).ulysses.size for heads in ((4, 4), (4, 2), (3, 1))])
    return chosen[0], chosen[1]


def test_auto_is_the_widest_degree_of_heads_and_host(ranks: Any) -> None:
    assert ranks(4, auto_choice) == [([4, 2, 1], [2, 2, 1])] * 4


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
            equal = module(q.float(), k.float(), v.float())
            out = module(*mixed)
            found.append(fails(module, q, k.float(), v.bfloat16()))  # fp64 is not cast
        found += [equal.dtype, relative_error(equal, want) < 2e-2]
        out.sum().backward()
        found += [module.seen == [x.dtype for x in mixed], out.dtype, relative_error(out, want) < 2e-2]
        found += [mixed[0].grad.dtype, fails(module, *mixed)]  # as refused without autocast
    return found


def test_autocast_makes_unequal_dtypes_equal_where_attention_is_called(ranks: Any) -> None:
    one = ["TypeError", torch.bfloat16, True, True, torch.bfloat16, True, torch.float32, "TypeError"]
    assert ranks(4, unequal_under_autocast) == [one * 3] * 4


@on_ranks
def no_warnings() -> bool:
    (q, k, v), _ = local()
    for mode in MODES:
        out = apply(modules.BNSD(), **BNSD, **mode)(*(x.clone().requires_grad_() for x in (q, k, v)))
        out.sum().backward()
    return True


@pytest.mark.slow
def test_no_warning_comes_from_us(ranks: Any) -> None:
    assert all(ranks(4, no_warnings, warnings_as_errors=True))


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
    out = apply(Flash(), **RING1, load_balance=True)(*odd)
    found["balance without a mask"] = out.shape[2] == 3
    return found


@pytest.mark.slow
def test_unusual_calls(ranks: Any) -> None:
    for found in ranks(4, corners):
        assert all(found.values()), [name for name, good in found.items() if not good]


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


@on_ranks
def single_calls() -> dict[str, bool]:
    (q, k, v), want = local()
    found = {"any kernel under pure Ulysses": relative_error(apply(modules.Silent(), **BNSD)(q, k, v), want) <= 1e-10}
    apart = torch.stack([q, k, v], dim=-1).requires_grad_()
    out = apply(modules.BNSD(), **RING1)(*apart.unbind(-1))
    out.sum().backward()
    found["head dims that do not lie side by side in memory"] = relative_error(out, want) <= 1e-10
    out = apply(modules.BNSD(), **BNSD, use_local_output=False)(q, k, v)
    whole_out = plain_attention(*whole(), is_causal=True)
    found["a DTensor"] = isinstance(out, DTensor) and relative_error(out.full_tensor(), whole_out) <= 1e-10
    named = apply(modules.BNSD(packaging="namedtuple"), **RING1, use_local_output=False)
    found["a named tuple of DTensors"] = isinstance(named(q, k, v), modules.Out)
    with comm.record_traffic() as outer:
        with comm.record_traffic() as inner:
            named(q, k, v)
        named(q, k, v)
    found["records nest"] = bool(inner.entries) and len(outer.entries) == 2 * len(inner.entries)
    return found


def test_single_calls(ranks: Any) -> None:
    for found in ranks(4, single_calls):
        assert all(found.values()), found


@on_ranks
def half_in_another_autocast() -> float:
    """The error of fp16 inputs under autocast to bfloat16, whose heads are exchanged at the entrance of a module."""
    mesh = init_device_mesh("cpu", (2,))
    module = parallelize_module(modules.BNSD(), mesh, ContextParallel(2, 1, layout="head_tail"))
    q = torch.randn(1, 4, 16, 8, dtype=torch.float16, generator=torch.Generator().manual_seed(0))
    handler = ContextParallelHandler(mesh, "head_tail")
    mine = handler.dispatch(q, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(mine, mine, mine)
    return relative_error(handler.combine(out, 2).double(), plain_attention(*[q.double()] * 3, is_causal=True))


def test_half_precision_in_an_autocast_to_another(ranks: Any) -> None:
    assert max(ranks(2, half_in_another_autocast)) <= 2e-2


@on_ranks
def shapes_in_hooks() -> list[tuple[int, ...]]:
    """The output that a hook of the user's gets which was there before the plan; and that of one which came later."""
    (q, k, v), found, module = local()[0], [], modules.BNSD()
    module.register_forward_hook(lambda module, args, out: found.append(tuple(out.shape)))
    apply(module, **BNSD, ulysses_degree=2)
    module.register_forward_hook(lambda module, args, out: found.append(tuple(out.shape)))
    module(q, k, v)
    return [tuple(q.shape), *found]


def test_hooks_get_the_share_of_the_output(ranks: Any) -> None:
    """One that was there before the plan got the whole sequence of some heads."""
    for share, *others in ranks(2, shapes_in_hooks):
        assert others == [share] * 2

"""A styled module leaves nothing behind: after exceptions, copies, interrupts, rebuilt process groups."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, styled_modules
from hyper_cp.mesh import failures
from hyper_cp.ops import attention
from hyper_cp.ops.kernels import cpu
from tests.harness import modules
from tests.harness.oracle import plain_attention, relative_error
from tests.harness.ranks import on_ranks
from tests.harness.styled import BNSD, RING1, apply, clean, fails, local, whole


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
    parallelize_module(model, mesh, {"inner": ContextParallel(**RING1)})
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


class Interrupted(nn.Module):
    """Interrupted once, in the middle of its forward."""

    interrupted = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@on_ranks
def interrupted() -> dict[str, bool]:
    """Torch runs no hooks after a KeyboardInterrupt: what it leaves must do no harm."""
    (q, k, v), want = local()
    with suppress(KeyboardInterrupt):
        apply(Interrupted(), **RING1)(q, k, v)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    other = apply(modules.BNSD(), **RING1)(q, k, v)
    return {
        "plain attention is local": relative_error(plain, plain_attention(q, k, v, is_causal=True)) <= 1e-10,
        "the next styled module runs": relative_error(other, want) <= 1e-10,
        "nothing is left": clean(),
        **interrupted_module_again(),
    }


def interrupted_module_again() -> dict[str, bool]:
    """The interrupted module itself is called next, directly and by a module that calls it twice."""
    (q, k, v), want = local()
    found = {}
    for name, mode in (("alone", None), ("inside a mode", torch.overrides.BaseTorchFunctionMode())):
        module = apply(Interrupted(), **RING1)
        with suppress(KeyboardInterrupt):
            module(q, k, v)
        with mode or nullcontext():
            found[f"the interrupted module runs again, {name}"] = relative_error(module(q, k, v), want) <= 1e-10
            stack = torch.overrides._get_current_function_mode_stack()
            found[f"its mode is gone, {name}"] = stack == ([] if mode is None else [mode])
    return found


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
    if failures.here.pending:
        raise SystemError("transfers that nobody waits for")
    dist.barrier()
    return relative_error(attention(q, k, v, mesh=mesh, is_causal=True, kv_exchange=kv), want)


@pytest.mark.parametrize("kv", ["ring", "all_gather"])
def test_a_failing_kernel_leaves_no_transfer_behind(ranks: Any, kv: str) -> None:
    assert max(ranks(2, failing_kernel, kv, timeout=40)) <= 1e-10

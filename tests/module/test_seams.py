"""The private parts of PyTorch and Hugging Face that the package needs are where it expects them.

docs/measured/versions.md lists them. One that moved fails here, by a test or by one that the page names.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, overrides
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hyper_cp._torch import checkpoint as seam
from hyper_cp._torch import flex_patch, modes, modules, version

# --------------------------------------------------------------------------- recomputes


class Owner:
    """Stands for a styled module that selects twice: records the states and the selections of its calls."""

    def __init__(self) -> None:
        self.now, self.used = "forward", []
        self.made: list[str] = []
        self.selections: list[tuple[str, str, Tensor, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        (state,) = seam.batch_state(self, lambda: (self.now,))
        self.used.append(state)
        self.selections.append((self.now, state, self.select(), self.select()))
        return x.sin().exp()

    def select(self) -> Tensor:
        def make() -> Tensor:
            self.made.append(self.now)
            return torch.tensor(len(self.made))

        return seam.replayed(make)


def reentrant(f: Callable[..., Tensor], use_reentrant: bool = True) -> Callable[..., Tensor]:
    return lambda x: checkpoint(f, x.cos(), use_reentrant=use_reentrant).cos()


def hooked(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return reentrant(f, use_reentrant=False)


def composed(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return f(x.cos()).cos()

    return composable(Calls())


def offloaded(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Hooks of someone else are on top of the checkpoint's."""

    def run(x: Tensor) -> Tensor:
        y = x.cos()
        with torch.autograd.graph.save_on_cpu():
            out = f(y)
        return out.cos()

    return run


def differentiated(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Runs backward inside of the function, of which its result is made."""

    def run(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            f(y.cos()).sum().backward()
        assert y.grad is not None
        return f(x) * y.grad

    return run


@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
@pytest.mark.parametrize(
    "around",
    [
        (reentrant,),
        (hooked,),
        (composed,),
        (hooked, offloaded),
        (offloaded, hooked),
        (hooked, hooked),
        (hooked, reentrant),
        (reentrant, hooked),
        (reentrant, reentrant),
        (composed, hooked, reentrant),
        (reentrant, hooked, hooked),
        (hooked, differentiated, reentrant),
        (reentrant, differentiated, hooked),
    ],
    ids=lambda fs: " of ".join(f.__name__ for f in fs),
)
def test_a_recompute_gets_the_state_of_its_forward(around: tuple[Any, ...], early: bool) -> None:
    owner = Owner()
    run: Callable[..., Tensor] = owner
    for wrap in reversed(around):
        run = wrap(run)
    x = torch.randn(3, requires_grad=True)
    with set_checkpoint_early_stop(early):
        out = run(x)
        forwards = len(owner.used)
        owner.now = "backward"
        out.sum().backward()
    assert len(owner.used) > forwards
    assert set(owner.used) == {"forward"}
    assert set(owner.made) == {"forward"}
    pairs = [{(a.item(), b.item()) for now, _, a, b in owner.selections if now == t} for t in ("forward", "backward")]
    assert pairs[1] <= pairs[0]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_selections_are_replayed_from_the_first_after_an_interruption() -> None:
    """Before, the backward that ran again went on where the interrupted one had stopped: selections of other calls."""
    owner, broken, recomputed = Owner(), False, []

    def run(x: Tensor) -> Tensor:
        first = owner.select()
        if broken:
            raise MemoryError
        recomputed.append((first.item(), owner.select().item()))
        return x.sin()

    x = torch.randn(3, requires_grad=True)
    loss = reentrant(run)(x).sum()
    broken = True
    with pytest.raises(MemoryError):
        loss.backward(retain_graph=True)
    broken = False
    loss.backward()
    assert recomputed == [(1, 2), (1, 2)]


@pytest.mark.parametrize("kind", [reentrant, hooked])
def test_states_set_inside_a_checkpoint_are_those_of_the_recompute(kind: Any) -> None:
    owner = Owner()

    def twice(x: Tensor) -> Tensor:
        owner.now = "first"
        y = owner(x)
        owner.now = "second"
        return owner(y)

    kind(twice)(torch.randn(3, requires_grad=True)).sum().backward()
    assert owner.used == ["first", "second"] * 2


def test_the_outer_checkpoint_knows_the_call_outside_the_inner_one() -> None:
    """A reentrant checkpoint's inputs are computed again by the hooks of the one around it."""
    owner = Owner()

    def both(x: Tensor) -> Tensor:
        owner.now = "outside"
        y = owner(x)
        owner.now = "inside"
        return checkpoint(owner, y, use_reentrant=True)

    hooked(both)(torch.randn(3, requires_grad=True)).sum().backward()
    assert owner.used == ["outside", "inside", "outside", "inside", "inside"][: len(owner.used)]
    assert len(owner.used) >= 4


def test_hooks_come_back_in_order_and_are_left_alone_where_they_could_not() -> None:
    top = torch._C._autograd._top_saved_tensors_default_hooks
    found: list[Any] = []

    def look(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            before, hooks = top(True), seam._pack_hooks()
            assert len(hooks) == 2 and top(True) == before and hooks[0] is before[0]
            torch._C._autograd._saved_tensors_hooks_disable("disabled by a test", False)
            try:
                assert seam._pack_hooks() == hooks[:1] and top(True) == before
            finally:
                torch._C._autograd._saved_tensors_hooks_enable()
        found.append([recomputes for _, recomputes in seam._checkpoints()])
        return x.sin()

    hooked(look)(torch.randn(3, requires_grad=True)).sum().backward()
    assert found == [[False], [True]]


def test_the_forward_of_a_reentrant_checkpoint_is_that_of_an_autograd_function() -> None:
    found: list[bool] = []

    def look(x: Tensor) -> Tensor:
        found.append(seam.in_function_forward())
        return x.sin()

    for kind in (reentrant, hooked):
        kind(look)(torch.randn(3, requires_grad=True)).sum().backward()
    assert found == [True, False, False, False]


# --------------------------------------------------------------------------- modules, compiled ones, meshes


def test_hooks_running_calls_and_wrappers_of_a_module() -> None:
    class Looks(nn.Module):
        def before(self, module: nn.Module, args: Any) -> None:
            assert modules.is_running(module)

        def forward(self, x: Tensor) -> Tensor:
            return x if modules.is_running(self) else x * torch.nan

    module = Looks()
    module.register_forward_pre_hook(module.before)
    assert modules.hook_owners(module) == [module]
    assert module(torch.ones(1)).item() == 1 and not modules.is_running(module)
    assert modules.calls_running(module) == 0
    assert modules.checkpointed(checkpoint_wrapper(module)) is module and modules.checkpointed(module) is None
    assert not modules.is_compiled(module) and modules.is_compiled(torch.compile(module, backend="eager"))
    assert not modules.is_compiled(module), "torch.compile(module) gives another module"
    module.compile(backend="eager")
    assert modules.is_compiled(module)


def test_buffers_of_a_module_can_be_restored() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("absent", None)
    found = dict(modules.buffers_of(module))
    assert list(found) == ["running_mean", "running_var", "num_batches_tracked", "absent"]
    module.absent, module.running_mean = torch.ones(1), torch.ones(2)
    modules.buffers_of(module).clear()
    modules.buffers_of(module).update(found)
    assert module.absent is None and module.running_mean is found["running_mean"]


def test_a_mode_below_the_top_can_be_taken_out() -> None:
    class Mode(overrides.TorchFunctionMode):
        pass

    first, second, third = Mode(), Mode(), Mode()
    with first, second:
        third.__enter__()
        modes.take_out(second)
        assert overrides._get_current_function_mode_stack() == [first, third]
        modes.take_out(second)
        modes.take_out(first)
        second.__enter__()
        assert overrides._get_current_function_mode_stack() == [third, second]
    assert overrides._get_current_function_mode_stack() == []


def test_a_dispatch_mode_sees_operators_that_are_written_in_python_inside() -> None:
    @torch.library.custom_op("hyper_cp_test::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x.sinh() * 2

    seen = []

    class Mode(modes.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            if func.namespace != "hyper_cp_test":
                return func(*args, **(kwargs or {}))
            with self:
                return modes.run_kernel(func, "cpu", args, kwargs or {})

    with Mode():
        out = double(torch.ones(2))
    assert any("double" in name for name in seen) and any("sinh" in name for name in seen)
    assert torch.equal(out, torch.ones(2).sinh() * 2)


def test_compilations_are_counted() -> None:
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

    before = sum(FRAME_COMPILE_COUNTER.values())
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert sum(FRAME_COMPILE_COUNTER.values()) > before


def test_compiled_modules_are_found_without_the_counter() -> None:
    module = nn.Linear(2, 2)
    kept = torch.compile(module, backend="eager")
    with mock.patch.dict(sys.modules), pytest.raises(RuntimeError, match="compiled already"):
        del sys.modules["torch._dynamo.convert_frame"]
        modules.refuse_compiled(module, "linear")
    assert kept._orig_mod is module


def test_the_plan_being_applied_is_on_the_stack() -> None:
    assert {"module", "parallelize_plan"} <= {*parallelize_module.__code__.co_varnames}
    assert modules.plan_being_applied() == (None, None, [])


def test_the_body_of_flex_attention_can_be_replaced() -> None:
    assert inspect.isfunction(flex_attention) and flex_attention.__closure__ is None
    plain = flex_patch.plain_flex_attention
    assert plain is not flex_attention and list(inspect.signature(plain).parameters)[:3] == ["query", "key", "value"]
    flex_patch.install(lambda: False)
    assert flex_attention.__code__ is flex_patch._instead.__code__
    q = torch.randn(1, 1, 16, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow when it is not compiled
        out = flex_attention(q, q, q)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q))


# --------------------------------------------------------------------------- kernels


def test_sdpa_says_which_backend_it_chooses() -> None:
    q, k = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    backends = {int(x.value) for x in torch.nn.attention.SDPBackend.__members__.values()}
    assert torch._fused_sdp_choice(q, k, k, is_causal=True, enable_gqa=True) in backends


# --------------------------------------------------------------------------- Hugging Face


def test_accelerate_without_its_private_method_is_refused() -> None:
    from hyper_cp import ContextParallel
    from hyper_cp.integrations import accelerate as integration

    assert "self._prepare_cp(*args)" in inspect.getsource(integration.accelerate.Accelerator)
    assert "self._cp_context(" in inspect.getsource(integration.accelerate.Accelerator.maybe_context_parallel)
    with (
        mock.patch.object(integration, "cp_mesh"),
        mock.patch.object(integration, "ContextParallelHandler"),
        pytest.raises(RuntimeError, match=r"accelerate \d.* has no Accelerator._prepare_cp"),
    ):
        integration.enable(object(), style=ContextParallel())  # type: ignore[arg-type]


def test_a_trainer_without_its_private_method_is_refused() -> None:
    from transformers import Trainer

    from hyper_cp import ContextParallel
    from hyper_cp.integrations.trainer import ContextParallelTrainer

    assert "self._prepare_context_parallel_inputs(model, inputs)" in inspect.getsource(Trainer)
    with pytest.raises(RuntimeError, match=r"transformers \d.* has no Trainer._prepare_context_parallel_inputs"):
        type("Other", (ContextParallelTrainer, object), {})(style=ContextParallel())


def test_models_name_their_cache_as_generate_does() -> None:
    from transformers import BartForCausalLM, BartModel, GenerationMixin, LlamaForCausalLM, LlamaModel, __version__

    from hyper_cp.integrations.huggingface.seams import CACHE, CACHES

    why = f"transformers {__version__} names the cache of some models otherwise than {CACHE!r} (known: {CACHES})"
    methods = [x.forward for x in (LlamaModel, LlamaForCausalLM, BartModel, BartForCausalLM)]
    for method in (*methods, GenerationMixin.prepare_inputs_for_generation):
        assert CACHE in inspect.signature(method).parameters, why


def test_another_name_of_the_cache_is_refused() -> None:
    from hyper_cp.integrations import transformers as integration

    model = mock.Mock(training=False, generation_config=None)
    with (
        mock.patch.object(integration, "CACHE", ""),
        pytest.raises(NotImplementedError, match=r"transformers \d.*, whose models take their cache under none of"),
    ):
        integration.generate_with(model.generate, model, mock.Mock(), torch.ones(1, 3, dtype=torch.int64))
    model.generate.assert_not_called()


def test_tables_of_positions_are_found() -> None:
    from transformers import BartConfig, BartForCausalLM, M2M100Config, M2M100Model, __version__

    from hyper_cp.integrations.huggingface.modules import id_position_modules, position_modules

    why = f"transformers {__version__} names the number of cached tokens, an argument of tables of positions, anew"
    small = {"d_model": 16, "vocab_size": 9, "encoder_layers": 1, "decoder_layers": 1}
    with torch.device("meta"):
        assert position_modules(BartForCausalLM(BartConfig(**small))), why
        assert id_position_modules(M2M100Model(M2M100Config(**small))), why


# --------------------------------------------------------------------------- versions


def test_only_other_versions_warn_and_with_the_range() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for installed in ("2.11.0", "2.13.0+cpu", "2.15.1a0+git123"):
            version.warn_if_unsupported(installed)
        for installed in ("5.23.0", "5.24.1"):
            version.warn_if_unsupported(installed, "transformers")
    for installed in ("2.10.1", "2.16.0.dev20270101+cpu", "3.0.0"):
        with pytest.warns(UserWarning, match=rf"torch {installed.split('+')[0]}.* supports torch 2\.11 to 2\.15"):
            version.warn_if_unsupported(installed)
    for installed in ("5.22.0", "5.25.0.dev0"):
        with pytest.warns(UserWarning, match=rf"transformers {installed} .* supports transformers 5\.23 to 5\.24\."):
            version.warn_if_unsupported(installed, "transformers")

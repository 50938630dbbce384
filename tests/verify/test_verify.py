"""verify: right training steps pass in every form; each planted mistake is found, named, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_cp import ContextParallelHandler, verify
from hyper_cp.module.mesh_binding import bindings, swapped
from hyper_cp.verification import model_state, runs
from hyper_cp.verification.compare import Tolerance, compare_gradients
from hyper_cp.verification.record import Trace
from hyper_cp.verify import Report
from tests.harness import planted
from tests.harness.attention_case import cp_mesh
from tests.harness.planted import LENGTH, styled, whole_batch
from tests.harness.ranks import check_errors, error_of, errors_of, on_ranks

DOCS = Path(__file__).parents[2] / "docs" / "help" / "verify.md"
Summary = tuple[bool, str | None, str | None, str, str]
"""ok, the first module, the cause, the text and the JSON of a report."""


def summary(report: Report) -> Summary:
    return report.ok, report.module, report.cause, str(report), report.json()


def left_padding() -> Tensor:
    return torch.tensor([[1] * LENGTH, [0] * 4 + [1] * (LENGTH - 4)])


@on_ranks
def verified(cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> list[Summary]:
    """The reports of cases: the planted fault, the training step, entries of the batch, settings of the style."""
    mesh, found = cp_mesh(), []
    for fault, step, entries, style in cases:
        loss_fn = getattr(planted, step) if step else None
        model = styled(mesh, fault, **style)
        found.append(summary(verify(model, mesh, whole_batch(**entries), loss_fn=loss_fn)))
    return found


RIGHT: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("", "loss_fn", {}, {"ulysses_degree": 1, "kv_exchange": "ring", "layout": "head_tail"}),
    ("", "loss_fn", {"length": 21}, {"ulysses_degree": 1, "load_balance": True}),
    ("", "loss_fn", {"length": 21, "documents": [0, 6, 21]}, {"layout": "per_document"}),
    ("", "two_sequences", {}, {"ulysses_degree": 1, "layout": "balanced"}),
    ("", "loss_fn", {"attention_mask": left_padding()}, {"ulysses_degree": 1}),
    ("", "", {"attention_mask": left_padding(), "labels": whole_batch()["labels"]}, {}),
]


@pytest.mark.slow
def test_right_steps_pass_on_every_layout(ranks: Any) -> None:
    here, there = ranks(2, verified, RIGHT)
    for case, mine, theirs in zip(RIGHT, here, there, strict=True):
        assert mine == theirs, "one report for all ranks"
        assert mine[0] and mine[1] is None and mine[2] is None, (case, mine[3])
        rows = json.loads(mine[4])["rows"]
        assert {row["status"] for row in rows} == {"equal"}, case
        assert {"input", "output", "loss", "gradient"} == {row["kind"] for row in rows}
        assert max(row["error"] for row in rows) < 1e-12


@pytest.mark.slow
def test_a_hybrid_passes_on_four_ranks(ranks: Any) -> None:
    cases = [("", "loss_fn", {"length": 22}, {"ulysses_degree": 2, "layout": "head_tail"})]
    assert all(ok for ((ok, *_),) in ranks(4, verified, cases))


WRONG: list[tuple[str, str, dict[str, Any], str | None, str]] = [
    # fault of the model, training step, entries of the batch; the module and the cause that are named
    ("", "local_positions", {}, "(model)", "positions"),
    ("local arange", "loss_fn", {}, "places", "positions"),
    ("local table", "loss_fn", {}, "blocks.0", "positions"),
    ("local rope", "loss_fn", {}, "blocks.1.attention.inner", "positions"),
    ("", "undispatched", {}, "blocks.0.attention.inner", "batch"),
    ("", "shifted_after_sharding", {}, None, "labels"),
    ("", "mean_of_share", {}, None, "loss"),
    ("", "without_documents", {"documents": [0, 7, LENGTH]}, "blocks.0.attention.inner", "mask"),
    ("", "without_documents", {"attention_mask": left_padding()}, "blocks.0.attention.inner", "mask"),
    ("", "summed", {}, None, "factor"),
    ("", "divided", {}, None, "factor"),
    ("", "pooled", {}, None, "factor"),
    ("dropout", "loss_fn", {}, "blocks.1.extra", "dropout"),
    ("attention dropout", "loss_fn", {}, "blocks.1.attention.inner", "dropout"),
    ("unrouted", "loss_fn", {}, "blocks.1.extra.inner", "attention"),
    ("attention by hand", "loss_fn", {}, "blocks.1.extra.inner", "attention"),
    ("conv", "loss_fn", {}, "blocks.1.extra", "mixing"),
    ("lstm", "loss_fn", {}, "blocks.1.extra", "mixing"),
    ("batch norm", "loss_fn", {}, "blocks.1.extra.1", "mixing"),
    ("cumsum", "loss_fn", {}, "blocks.1.extra", "mixing"),
    ("token shift", "loss_fn", {}, "blocks.1.extra", "mixing"),
    ("normalise", "loss_fn", {}, "blocks.1.extra", "mixing"),
    *((fault, "loss_fn", {}, "blocks.1.mlp", "mixing") for fault in planted.IN_FORWARD),
]


@pytest.mark.slow
def test_every_planted_mistake_is_named(ranks: Any) -> None:
    style = {"ulysses_degree": 1, "layout": "head_tail"}
    here, there = ranks(2, verified, [(fault, step, entries, style) for fault, step, entries, _, _ in WRONG])
    for (fault, step, entries, module, cause), mine, theirs in zip(WRONG, here, there, strict=True):
        assert mine == theirs, "one report for all ranks"
        assert mine[:3] == (False, module, cause), (fault, step, entries, mine[3])
        first = json.loads(mine[4])["first"]
        assert first["error"] > first["tolerance"]
        assert f"Cause ({cause})" in mine[3] and "DIFFERENT, first in" in mine[3]
        assert fault != "conv" or "call hyper_cp.ops.causal_conv1d in its place, or replace" in mine[3]


@pytest.mark.parametrize("style", [{"ulysses_degree": 1, "layout": "head_tail"}, {"ulysses_degree": 2}])
def test_a_batch_that_was_not_split_is_named_where_modules_compute_q_k_v(ranks: Any, style: dict[str, Any]) -> None:
    """The first difference is inside the styled module: nothing that goes into it is wrong."""
    case = ("functional attention", "undispatched", {}, {"qkv_indices": None, **style})
    for ((ok, module, cause, text, _),) in ranks(2, verified, [case]):
        assert (ok, module, cause) == (False, "blocks.0.attention.wo", "batch"), text
        assert "first in blocks.0.attention.wo input, by" in text


# --------------------------------------------------------------------------- nothing is left behind


def state(model: nn.Module) -> dict[str, Any]:
    """All that a run could change; tensors by identity and by value, lists by identity and length."""
    found: dict[str, Any] = {
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
        "swapped": sum(len(x) for x in swapped.values()),
    }
    for name, p in model.named_parameters():
        found[name] = (id(p), p.detach().clone(), id(p.grad), None if p.grad is None else p.grad.clone())
    for name, b in model.named_buffers():
        found[name] = (id(b), b.clone())
    for name, module in model.named_modules():
        hooks = [list(h) for h in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)]
        attributes = {k: v for k, v in vars(module).items() if not k.startswith("_")}
        public = {k: (id(v), len(v) if isinstance(v, list) else 0) for k, v in attributes.items()}
        found[f"module {name}"] = (hooks, public, module.training)
    found["bindings"] = [(b.heads, len(b.stack), id(b.stack[0]), b.active_documents()) for b in bindings(model)]
    found["modes"] = len(torch.overrides._get_current_function_mode_stack())
    return found


class Counts(nn.Module):
    """A model that changes all kinds of attributes in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.counts: dict[str, Any] = {"tokens": 0, "rows": [1]}
        self.seen: set[int] = set()
        self._calls = 0
        self.table, self.generator = torch.zeros(2), torch.Generator().manual_seed(0)
        self.register_buffer("steps", torch.zeros(()))
        self.grown = torch.zeros(1)
        self.last = OrderedDict(a=1, b=2)
        self.others = [torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), torch.zeros(2)]
        self.others[2].untyped_storage().resize_(0)  # as FSDP does between two forwards

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(x.sum())
        self.counts["tokens"] += len(x)
        self.counts["rows"].append(2)
        self.counts["new"] = 1
        self.seen.add(len(x))
        self.last.pop("a")
        self.last["c"] = self._hooks_installed = True  # by a library, which has put hooks somewhere
        self._calls += 1
        self.table.add_(1)
        self.grown.data = torch.cat([self.grown, x])
        self.steps.add_(1)
        return x + torch.rand((), generator=self.generator)

    def content(self) -> Any:
        kept = (
            self.losses,
            self.counts,
            self.seen,
            self._calls,
            self.table.tolist(),
            self.steps.item(),
            self.last,
            self.grown,
        )
        return (*map(str, kept), self.generator.get_state().tolist())


def test_what_a_forward_changes_is_restored() -> None:
    """Before, lists, dicts, tensors and generators kept what the example of ``parallelize``, or ``verify``, brought."""
    model = Counts()
    before, lists = model.content(), (model.losses, model.counts)
    with contextlib.suppress(KeyError), model_state.restore_model_state(model, "cpu"):
        model(torch.ones(3))
        assert model.content() != before
        raise KeyError
    assert model.content() == before and model.losses is lists[0] and model.counts is lists[1]
    assert model._hooks_installed


class Private(nn.Module):
    """A model whose first forward sets a frozen parameter and registers a hook, and keeps marks of both."""

    _set = False

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(3), requires_grad=False)
        self._handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if not self._set:
            self.start.data.copy_(x)
            self._set = True
        if self._handle is None:
            self._handle = self.register_forward_hook(lambda module, args, out: 2 * out)
        return x - self.start


def test_what_a_first_forward_makes_and_marks_remains() -> None:
    """Half of it restored would be a mark without what it says, or the same hook twice."""
    model = Private()
    with model_state.restore_model_state(model, "cpu"):
        model(torch.arange(3.0))
    assert model.start.tolist() == [0, 1, 2]
    assert model(torch.ones(3)).tolist() == [2, 0, -2]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@on_ranks
def changes(fault: str, step: str) -> tuple[list[str], str]:
    """The names of what is not as before after verify, and the type of its exception."""
    mesh = cp_mesh()
    model, raised = styled(mesh, fault, max_logits=True), ""
    planted.loss_fn(model, whole_batch(), planted.ContextParallelHandler(mesh, "contiguous")).backward()
    model.eval().blocks[0].train()
    batch = whole_batch()
    before, entries = state(model), {name: x.clone() for name, x in batch.items()}
    try:
        verify(model, mesh, batch, loss_fn=getattr(planted, step))
    except KeyError as error:
        raised = type(error).__name__
    after = state(model)
    changed = [name for name in before.keys() | after.keys() if not same(before.get(name), after.get(name))]
    changed += [name for name, x in entries.items() if not torch.equal(x, batch[name])]
    return changed, raised


@pytest.mark.parametrize(
    ("fault", "step", "raised"),
    [("", "loss_fn", ""), ("batch norm", "loss_fn", ""), ("dropout", "loss_fn", ""), ("", "failing", "KeyError"),
     ("fails", "failing", "KeyError")],
)  # fmt: skip
def test_nothing_is_changed_afterwards(fault: str, step: str, raised: str, ranks: Any) -> None:
    assert ranks(2, changes, fault, step) == [([], raised)] * 2


# --------------------------------------------------------------------------- forms of use


@on_ranks
def in_small_parts() -> bool:
    """The result where every gradient is reduced alone, or with its neighbour."""
    mesh = cp_mesh()
    before, runs.BUCKET = runs.BUCKET, 300
    try:
        return verify(styled(mesh), mesh, whole_batch(), loss_fn=planted.loss_fn).ok
    finally:
        runs.BUCKET = before


def test_gradients_may_be_reduced_in_parts(ranks: Any) -> None:
    assert ranks(2, in_small_parts) == [True, True]


@on_ranks
def documented(code: str) -> bool:
    """The result of the example in docs/help/verify.md."""
    mesh = cp_mesh()
    names: dict[str, Any] = {"model": styled(mesh), "mesh": mesh, "batch": whole_batch(documents=[0, 9, LENGTH])}
    exec(code.replace("print(report)", ""), names)
    return bool(names["report"].ok)


def test_the_documented_example(ranks: Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    assert ranks(2, documented, code) == [True, True]


@on_ranks
def other_uses() -> dict[str, Summary]:
    """Reports of a context_parallel block, of gradients that are summed, and of given tolerances."""
    mesh, found = cp_mesh(), {}
    plain = planted.Planted()
    found["block"] = summary(verify(plain, mesh, whole_batch(), loss_fn=planted.in_block))
    model = styled(mesh)
    found["sum"] = summary(verify(model, mesh, whole_batch(), loss_fn=planted.summed, gradients="sum"))
    found["tolerant"] = summary(verify(model, mesh, whole_batch(), loss_fn=planted.mean_of_share, rtol=1.0, atol=1.0))
    found["strict"] = summary(verify(model, mesh, whole_batch(), loss_fn=planted.loss_fn, rtol=0.0))
    with torch.no_grad():
        model.head.weight.mul_(1 + dist.get_rank())
    found["ranks"] = summary(verify(plain_copy(model), mesh, whole_batch(), loss_fn=planted.in_block))
    return found


def plain_copy(model: nn.Module) -> nn.Module:
    plain = planted.Planted()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.slow
def test_other_forms_of_use(ranks: Any) -> None:
    here, there = ranks(2, other_uses)
    assert here == there
    assert here["block"][0] and here["sum"][0] and here["tolerant"][0], here
    assert not here["strict"][0]
    assert not here["ranks"][0] and here["ranks"][2] == "ranks", here["ranks"][3]


class Phases(nn.Module):
    """Turns pairs of features by complex numbers that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(
            torch.polar(torch.ones(8, dtype=torch.float64), torch.arange(8, dtype=torch.float64))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * self.phases).flatten(
            -2
        )


@on_ranks
def gates_of_zeros() -> list[str]:
    """Texts of reports of positions that are counted locally in front of a gate of zeros, and behind a step."""
    mesh, found = cp_mesh(), []
    model = styled(mesh, "local rope")
    weights = [(x, x.detach().clone()) for x in (model.blocks[1].attention.wo.weight, model.head.weight)]
    for gate in (0.0, 1.0):
        with torch.no_grad():
            for x, whole in weights:
                x.copy_(gate * whole)
        found.append(str(verify(model, mesh, whole_batch(), loss_fn=planted.loss_fn)))
    return found


def test_differences_that_zeros_hide_are_told(ranks: Any) -> None:
    """The report said that all tensors agree."""
    for hidden, seen in ranks(2, gates_of_zeros):
        assert "tensors (~) differ inside modules whose outputs agree" in hidden and "DIFFERENT" in seen, (hidden, seen)


class Text(dict[str, Any]):
    """Entries that are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Weights(NamedTuple):
    rows: Tensor


@on_ranks
def kinds_of_values() -> dict[str, Summary]:
    """Reports of right steps: a complex parameter, sparse gradients, and a batch of batches for half precision."""
    mesh, found = cp_mesh(), {}
    model = styled(mesh)
    model.blocks[0].extra = Phases()
    found["complex"] = summary(verify(model, mesh, whole_batch(), loss_fn=planted.loss_fn))
    wrong = verify(model, mesh, whole_batch(), loss_fn=planted.loss_fn, gradients="sum")
    assert not wrong.ok and wrong.cause == "factor", str(wrong)
    model = styled(mesh)
    model.embed.sparse = True
    found["sparse"] = summary(verify(model, mesh, whole_batch(), loss_fn=planted.loss_fn))
    weights = Weights(torch.ones(2, dtype=torch.bfloat16))
    model, batch = styled(mesh).bfloat16(), {"text": Text(whole_batch()), "weights": [weights]}

    def weighted(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
        (weights,) = batch["weights"]
        assert weights.rows.dtype == next(model.parameters()).dtype and batch["text"].input_ids.ndim == 2
        return planted.loss_fn(model, {**batch["text"]}, handler) * weights.rows.mean()

    found["nested"] = summary(verify(model, mesh, batch, loss_fn=weighted))
    return found


def test_kinds_of_values_in_right_steps(ranks: Any) -> None:
    """A right step was called wrong (complex), or verify ended in errors of PyTorch."""
    for found in ranks(2, kinds_of_values):
        for name, (ok, *_, text, _) in found.items():
            assert ok, (name, text)


class ReturnsLoss(nn.Module):
    """A frozen model that returns its loss, which positions within a share hardly change."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)

    def forward(self, *args: Any) -> Tensor:
        return self.inner(*args).square().mean() * 0 + 1


def local_positions_of_a_loss(model: nn.Module, batch: Any, handler: ContextParallelHandler) -> Tensor:
    local = handler.get_batch_on_this_cp_rank(batch)
    loss: Tensor = model(local["input_ids"], torch.arange(local["input_ids"].shape[1])[None])
    return loss


@on_ranks
def of_one_number() -> Summary:
    mesh = cp_mesh()
    return summary(verify(ReturnsLoss(styled(mesh)), mesh, whole_batch(), loss_fn=local_positions_of_a_loss))


def test_an_output_of_one_number_hides_nothing(ranks: Any) -> None:
    for ok, module, cause, text, _ in ranks(2, of_one_number):
        assert (ok, module, cause) == (False, "inner", "positions"), text


@on_ranks
def refused() -> dict[str, str]:
    mesh = cp_mesh()
    model, batch, plain = styled(mesh), whole_batch(), planted.Planted()
    return errors_of(
        {
            r"handler\.mesh": lambda: verify(plain, mesh, batch, loss_fn=planted.in_block_of_the_mesh),
            "no module of Planted runs under ContextParallel": lambda: verify(plain, mesh, batch),
            "TypeError: .*needs input_ids": lambda: verify(model, mesh, {"tokens": batch["input_ids"]}),
            "on whole sequences on every rank": lambda: verify(plain, mesh, batch, loss_fn=planted.undispatched),
            r"TypeError: loss_fn returned \(3,\)": lambda: verify(
                model, mesh, batch, loss_fn=lambda model, batch, handler: torch.ones(3)
            ),
            "TypeError: loss_fn returned a loss without a graph": lambda: verify(
                model, mesh, batch, loss_fn=torch.no_grad()(planted.loss_fn)
            ),
            "attention_mask of the batch shows no token": lambda: verify(
                model, mesh, {**batch, "attention_mask": torch.zeros(planted.ROWS, LENGTH)}
            ),
            "gradients='max'": lambda: verify(model, mesh, batch, gradients="max"),
            r"rtol=-1\.0": lambda: verify(model, mesh, batch, rtol=-1.0),
        }
    )


def test_wrong_uses_raise(ranks: Any) -> None:
    check_errors(ranks(2, refused))


@on_ranks
def arguments_refused() -> list[str]:
    """Values of verify's arguments, and the error that each raises."""
    mesh, batch = cp_mesh(), whole_batch()
    model = styled(mesh, ulysses_degree=1)
    plain: Any = {"model": planted.Planted(), "loss_fn": planted.in_block_of_the_mesh}
    ids = batch["input_ids"]
    values: dict[str, list[Any]] = {
        "model": [3, None, nn.Linear(2, 2)],
        "mesh": ["cp", None, 2],
        "batch": [{}, [], None, "x", {"input_ids": ids[0]}, {"input_ids": ids.tolist()}, {"input_ids": ids[:, :0]}],
        "rtol": ["x", True, float("nan"), -1],
        "atol": ["x", True, float("inf"), []],
        "gradients": ["x", 3, None, []],
        "loss_fn": [3, "x", lambda model, batch, handler: 3],
        "layout": ["x", 3, []],
    }
    found = []
    for name, tried in values.items():
        for value in tried:
            given = {"model": model, "mesh": mesh, "batch": batch, **(plain if name == "layout" else {}), name: value}
            found.append(f"{name}={value!r:.40}: {error_of(lambda given=given: verify(**given))}")
    return found


def test_no_value_of_an_argument_crashes(ranks: Any) -> None:
    ours = re.compile(r"^(\w+)=.*?: (ValueError|TypeError|NotImplementedError|RuntimeError): ")
    for found in ranks(2, arguments_refused):
        assert len(found) == 31 and not [line for line in found if not ours.match(line)]


@on_ranks
def alone() -> None:
    verify(styled(cp_mesh()), cp_mesh(), whole_batch())


def test_one_rank_has_nothing_to_compare(ranks: Any) -> None:
    ranks.raises(1, ValueError, "mesh has 1 rank", alone)


@pytest.mark.slow
def test_a_handler_of_another_layout_is_refused(ranks: Any) -> None:
    """The styled modules say so themselves, in the first forward."""
    ranks.raises(2, ValueError, "layout", verified, [("", "other_layout", {}, {"layout": "head_tail"})])


def mean_of_labels(model: nn.Module, batch: dict[str, Tensor], handler: ContextParallelHandler) -> Tensor:
    """A mean of each rank's labels, of which the last one has none."""
    local = handler.get_batch_on_this_cp_rank(batch, shift_labels=True)
    with handler.documents(local):
        logits = model(local["input_ids"], local["position_ids"])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), local["shift_labels"].flatten())


@on_ranks
def nan_of_a_rank() -> bool:
    mesh, batch = cp_mesh(), whole_batch()
    labels = batch["labels"].index_fill(1, torch.arange(LENGTH // 2, LENGTH), -100)
    model = styled(mesh, ulysses_degree=1, layout="contiguous")
    return verify(model, mesh, {**batch, "labels": labels}, loss_fn=mean_of_labels, gradients="sum").ok


def test_the_loss_of_a_rank_that_is_nan_differs(ranks: Any) -> None:
    """Python's max leaves out a NaN that is not the first."""
    assert ranks(2, nan_of_a_rank) == [False] * 2


@pytest.mark.parametrize("norms", [False, True])
def test_differences_from_zeros_are_judged_by_atol_itself(norms: bool) -> None:
    """Relative to zero both the error and the tolerance would be infinite."""
    zeros, tolerance = torch.zeros(4, dtype=torch.float64), Tolerance(1e-6, 1e-8, norms)
    for local, equal in ((zeros + 1.0, False), (zeros + 1e-9, True), (zeros, True)):
        error, allowed = tolerance.judge(local, zeros, None)
        assert (error <= allowed) == equal
    error, allowed = Tolerance(1e-6, 0.0, norms).judge(zeros + 1e-9, zeros, None)
    assert error > allowed


@pytest.mark.parametrize("exact", [False, True])
def test_one_large_gradient_hides_no_others(exact: bool) -> None:
    """In norms: a frequent token's row of an embedding, beside weights of keys, and a bias of rounding errors."""
    table = torch.zeros(1000, 64).index_fill(0, torch.tensor([7]), 1.0)
    one = Trace(gradients={"table": table, "keys": torch.full((64,), 1e-3), "bias": torch.full((64,), 1e-6)})
    wrong = Trace(gradients={"table": table, "keys": torch.full((64,), 1.05e-3), "bias": torch.full((64,), -1e-6)})
    rows = compare_gradients(wrong, one, one if exact else None, Tolerance(2**-5, norms=True))
    assert [row.status for row in rows] == ["equal", "differs", "equal"]


def test_infinite_values_on_both_sides_are_equal() -> None:
    """Logits of banned words are -inf, the lowest number or a low one. In norms, inf - inf is NaN, and a scale that is
    infinite, or nearly, would hide the others."""
    for lowest in (-torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -1e30, -1e9, -1e4):
        exact = torch.tensor([1.0, lowest, 2.0, lowest])
        rounded, wrong = exact.bfloat16().float(), torch.tensor([1.0, lowest, 3.0, lowest])
        for other, equal in ((exact.clone(), True), (rounded, True), (wrong, False), (-exact, False)):
            for norms, given in ((True, exact), (True, None), (False, None)):
                error, allowed = Tolerance(2**-5, norms=norms).judge(other, exact, given)
                assert (error <= allowed) == equal, (other, norms, given)

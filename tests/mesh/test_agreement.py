"""The comparison of what ranks bring: what is new is compared once, and then never again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hyper_cp import ContextParallel, styled_modules
from hyper_cp.mesh import agreement, comm, cp_mesh
from hyper_cp.mesh.agreement import Agreement, Signature
from hyper_cp.ops import attention, causal_conv1d, linear_recurrence
from tests.harness.ranks import error_of, on_ranks

BASE: Signature = (
    ("module", "layers.0"),
    ("shapes", (torch.Size([1, 4, 8, 8]), torch.Size([1, 2, 8, 8]))),
    ("dtypes", (torch.float32, torch.float32)),
    ("kv_exchange", "ring"),
    ("causal", True),
    ("scale", None),
)


def changed(field: str, value: Any) -> Signature:
    return tuple((name, value if name == field else old) for name, old in BASE)


def compared(call: Callable[[], Any]) -> int:
    """Comparisons between ranks that a call makes."""
    with comm.record_traffic() as log:
        call()
    return sum(operation == "agreement" for operation, _ in log.entries)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("cp",) if len(shape) == 1 else ("ring", "ulysses"))


# --------------------------------------------------------------------------- what is compared, and how often


@on_ranks
def calls_of_attention(world: int) -> list[int]:
    """Comparisons of: two equal calls each of three modes, then of another shape, of documents, of the first again."""
    mesh, q = mesh_of(world), torch.randn(1, 4, 8, 8)
    modes: list[dict[str, Any]] = [{}, {"ulysses_degree": None}, {"ulysses_degree": 2, "kv_exchange": "ring"}]
    counts = []
    for mode in modes:
        for _ in range(2):
            counts.append(compared(lambda: attention(q, q, q, mesh=mesh, is_causal=True, **mode)))
    longer = torch.randn(1, 4, 16, 8)
    counts.append(compared(lambda: attention(longer, longer, longer, mesh=mesh)))
    documents = [0, 5, 8 * world]
    counts.append(compared(lambda: attention(q, q, q, mesh=mesh, is_causal=True, documents=documents)))
    counts.append(compared(lambda: attention(q, q, q, mesh=mesh, is_causal=True, documents=documents)))
    counts.append(compared(lambda: attention(q, q, q, mesh=mesh, is_causal=True)))
    return counts


def test_what_has_been_compared_is_not_compared_again(ranks: Any) -> None:
    # The first call compares itself and that there are no documents; later ones what is new in them. A hybrid also
    # compares its degree before it makes process groups.
    assert ranks(4, calls_of_attention, 4) == [[2, 0, 1, 0, 2, 0, 1, 1, 0, 0]] * 4
    assert ranks(1, calls_of_attention_alone) == [0]


@on_ranks
def calls_of_attention_alone() -> int:
    q = torch.randn(1, 4, 8, 8)
    return compared(lambda: attention(q, q, q, mesh=mesh_of(1)))


@on_ranks
def batches(steps: int, layers: int) -> list[int]:
    mesh, q = mesh_of(2), torch.randn(1, 4, 8, 8)
    attention(q, q, q, mesh=mesh, is_causal=True)
    counts = []
    for step in range(steps):
        table = torch.tensor([[0, 3 + step, 16]])
        calls = [lambda table=table: attention(q, q, q, mesh=mesh, is_causal=True, documents=table)] * layers
        counts += [compared(call) for call in calls]
    return counts


def test_documents_are_compared_once_a_batch_not_once_a_layer(ranks: Any) -> None:
    assert ranks(2, batches, 3, 3) == [[1, 0, 0] * 3] * 2


@on_ranks
def microseconds_of_an_old_signature() -> float:
    cp = cp_mesh.view(mesh_of(2), 1)
    cp.agree("call", BASE)
    times = []
    for _ in range(20):
        start = time.thread_time()
        for _ in range(200):
            cp.agree("call", BASE)
        times.append((time.thread_time() - start) / 200 * 1e6)
    return min(times)


def test_an_old_signature_costs_a_lookup(ranks: Any) -> None:
    assert max(ranks(2, microseconds_of_an_old_signature)) < 5.0


# --------------------------------------------------------------------------- disagreement


@on_ranks
def disagree(field: str, value: Any) -> tuple[str, str, int, int]:
    """The error where rank 1 brings another value; then a correct call, and how often that is compared."""
    cp = cp_mesh.view(mesh_of(3), 1)
    mine = changed(field, value) if dist.get_rank() == 1 else BASE
    error = error_of(lambda: cp.agree("call", mine, "layers.0"))
    # Nothing is recorded: not what ranks 0 and 2 brought either.
    return (
        error,
        error_of(lambda: cp.agree("call", mine)),
        *(compared(lambda: cp.agree("call", BASE)) for _ in range(2)),
    )


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("shapes", (torch.Size([1, 4, 6, 8]), torch.Size([1, 2, 8, 8])), "rank 1: (1, 4, 6, 8), (1, 2, 8, 8); rank 2:"),
        ("dtypes", (torch.bfloat16, torch.float32), "rank 1: (torch.bfloat16, torch.float32); rank 2:"),
        ("kv_exchange", "all_gather", "rank 0: ring; rank 1: all_gather; rank 2: ring"),
        ("causal", False, "rank 0: True; rank 1: False; rank 2: True"),
        ("module", "layers.1", "rank 0: layers.0; rank 1: layers.1; rank 2: layers.0"),
    ],
)
def test_every_rank_raises_with_a_table_and_the_next_call_works(ranks: Any, field: str, value: Any, words: str) -> None:
    for first, second, *counts in ranks(3, disagree, field, value):
        assert first.startswith("ValueError: layers.0: the ranks of the cp mesh of 3 ranks (ring 3 x ulysses 1) call")
        assert f"different {field}: rank 0: " in first and words in first
        assert second.startswith("ValueError")
        assert counts == [1, 0]


@on_ranks
def several_fields() -> str:
    cp = cp_mesh.view(mesh_of(2), 1)
    mine = tuple(
        (name, f"{value}{dist.get_rank()}") if name in ("module", "causal") else (name, value) for name, value in BASE
    )
    return error_of(lambda: cp.agree("call", mine))


def test_all_fields_that_differ_are_in_the_table(ranks: Any) -> None:
    for error in ranks(2, several_fields):
        assert "different module and causal: rank 0: module=layers.00, causal=True0; rank 1: module=" in error


@on_ranks
def other_documents() -> list[str]:
    mesh, rank, q = mesh_of(3), dist.get_rank(), torch.randn(1, 4, 8, 8)
    found = [[0, 7, 24], [0, 5, 24], [0, 5, 24]][rank], [None, [0, 9, 24], None][rank]
    errors = [error_of(lambda documents=d: attention(q, q, q, mesh=mesh, documents=documents)) for d in found]
    return [*errors, error_of(lambda: attention(q, q, q, mesh=mesh, documents=[0, 5, 24]))]


def test_other_documents_on_other_ranks(ranks: Any) -> None:
    for first, second, third in ranks(3, other_documents):
        assert first.startswith("ValueError") and "different packed documents: ranks [1, 2] have others" in first
        assert "Enter the same documents block on every rank" in first
        assert second.startswith("ValueError") and "different packed documents: ranks [1] have others" in second
        assert third == ""


@on_ranks
def other_kinds() -> list[str]:
    cp, rank = cp_mesh.view(mesh_of(2), 1), dist.get_rank()
    return [
        error_of(lambda: cp.agree(("call", "documents")[rank], BASE if rank == 0 else (("documents", "ab"),), "layer")),
        error_of(lambda: cp.agree("call", BASE)),
    ]


def test_ranks_that_compare_different_things(ranks: Any) -> None:
    for error, after in ranks(2, other_kinds):
        words = "make different calls: rank 0 compares its attention call; rank 1 compares its packed documents."
        assert error.startswith("ValueError") and words in error
        assert after == ""


@on_ranks
def other_views() -> str:
    """Ranks that see the mesh differently."""
    views = [cp_mesh.view(mesh_of(4), degree) for degree in (1, 2)]
    q = torch.randn(1, 4, 8, 8)
    return error_of(lambda: attention(q, q, q, mesh=views[dist.get_rank() == 3]))


def test_ranks_with_another_ulysses_degree(ranks: Any) -> None:
    for error in ranks(4, other_views):
        assert error.startswith("ValueError")
        assert "different ulysses_degree: rank 0: 1; rank 1: 1; rank 2: 1; rank 3: 2" in error


@on_ranks
def other_scales() -> list[Any]:
    """Rank 1 brings another scale with a new signature; then all bring new scales with an old one."""
    mesh, q = mesh_of(2), torch.randn(1, 4, 8, 8)

    def call(scale: float, **options: Any) -> Any:
        return attention(q, q, q, mesh=mesh, scale=scale, **options)

    errors = [
        error_of(lambda: call(0.5 + dist.get_rank(), is_causal=True)),
        error_of(lambda: call(0.5, is_causal=True)),
    ]
    return [*errors, sum(compared(lambda s=s: call(0.1 * s, is_causal=True)) for s in range(1, 9))]


def test_the_scale_is_compared_with_a_new_signature_only(ranks: Any) -> None:
    for error, after, comparisons in ranks(2, other_scales):
        assert error.startswith("ValueError") and "different scale: rank 0: 0.5; rank 1: 1.5." in error
        assert (after, comparisons) == ("", 0)


@on_ranks
def gradients_on_one_rank(ulysses: int) -> list[str]:
    """Rank 0's tokens alone are made with a trainable parameter; then rank 1's take part in its gradient, too."""
    mesh, rank, x = mesh_of(2), dist.get_rank(), torch.randn(1, 2, 8, 4)
    p, heads, sinks = torch.ones(1, requires_grad=True), x.transpose(1, 2), torch.zeros(2, requires_grad=True)

    def attend(x: Tensor, **options: Any) -> Tensor:
        return attention(x, x, x, mesh=mesh, ulysses_degree=ulysses, **options)

    def recur(x: Tensor) -> Tensor:
        return linear_recurrence(x, x, x, -torch.ones(2), mesh=mesh)

    own = (lambda y: y * p) if rank == 0 else (lambda y: y)
    shared = (lambda y: y * p) if rank == 0 else (lambda y: y + 0 * p.sum())
    calls: list[Callable[[], Any]] = [
        lambda: attend(own(x)),
        lambda: recur(own(heads)),
        lambda: causal_conv1d(own(x[0].mT), torch.ones(4, 3), mesh=mesh),
        lambda: attend(shared(x)).sum().backward(),
        lambda: recur(shared(heads)).sum().backward(),
        lambda: torch.no_grad()(attend)(own(x)),
    ]
    if ulysses == 1:  # a node on every rank
        calls.append(lambda: attend(own(x), sinks=sinks).sum().backward())
    return [error_of(call) for call in calls]


@pytest.mark.parametrize("ulysses", [1, 2])
def test_a_gradient_that_one_rank_requires(ranks: Any, ulysses: int) -> None:
    """The other would have no backward, and would go on to calls whose keys meet the first one's gradients."""
    for attended, recurrent, convolved, *others in ranks(2, gradients_on_one_rank, ulysses):
        for error in (attended, recurrent, convolved):
            assert error.startswith("ValueError")
            assert "different requires_grad of their tensors: rank 0: True; rank 1: False. A rank without" in error
            assert "add 0 * p.sum() of its parameters" in error
        assert others == [""] * (4 if ulysses == 1 else 3)


@on_ranks
def other_calls_that_were_agreed_on(causal: tuple[bool, bool], extra: int) -> list[Any]:
    """All signatures are old, and rank 1 makes other calls than rank 0, silently. Then a new batch comes."""
    mesh, q, rank = mesh_of(2), torch.randn(1, 4, 8, 8), dist.get_rank()
    for is_causal in (True, False):
        attention(q, q, q, mesh=mesh, is_causal=is_causal)
    comparisons = compared(lambda: attention(q, q, q, mesh=mesh, is_causal=causal[rank]))
    for _ in range(extra * rank):  # (an attention call too many would hang in its transfers)
        cp_mesh.view(mesh, 1).agree("documents", (("documents", None),))
    errors = [error_of(lambda: attention(q, q, q, mesh=mesh, documents=[0, 3, 16])) for _ in range(2)]
    return [comparisons, *errors]


def test_other_calls_are_found_at_the_next_comparison(ranks: Any) -> None:
    for number, *found in ranks(2, other_calls_that_were_agreed_on, (True, False), 0):
        assert number == 0
        assert found[0].startswith("ValueError: attention: since the ranks of the cp mesh of 2 ranks") and not found[1]
        assert "ranks [1] have made others, or in another order than rank 0. Results since then are wrong" in found[0]
    for number, *found in ranks(2, other_calls_that_were_agreed_on, (True, True), 3):
        assert number == 0 and not found[1]
        assert "another number of them (signatures looked up: rank 0: 4; rank 1: 7)" in found[0]
    for number, *found in ranks(2, other_calls_that_were_agreed_on, (False, False), 0):
        assert number == 0 and found == ["", ""]


@on_ranks
def other_groups(degrees: tuple[int | None, ...]) -> list[str]:
    """Ranks with another degree, in groups of their own or in none; then all with the same."""
    mesh, q = mesh_of(4), torch.randn(1, 4, 8, 8)
    mine = degrees[dist.get_rank()]
    return [
        error_of(lambda d=d: attention(q, q, q, mesh=mesh, ulysses_degree=d))  # type: ignore[misc]
        for d in (mine, 2)
    ]


def test_ranks_that_would_make_other_groups(ranks: Any) -> None:
    for first, second in ranks(4, other_groups, (2, 2, 1, None)):
        assert first.startswith("ValueError") and second == ""
        assert "rank 0 compares its process groups; rank 1 compares its process groups; rank 2 compares" in first


# --------------------------------------------------------------------------- waiting alone


@on_ranks
def some_do_not_come() -> list[str]:
    """Rank 2 of 3 does not come to the first comparison. Then all come, twice."""
    cp, rank = cp_mesh.view(mesh_of(3), 1), dist.get_rank()
    os.environ["HYPER_CP_AGREE_TIMEOUT"] = "0.3"
    errors = ["" if rank == 2 else error_of(lambda: cp.agree("call", BASE, "layers.0"))]
    del os.environ["HYPER_CP_AGREE_TIMEOUT"]
    dist.barrier()
    time.sleep(0.3 * (rank < 2))  # rank 2 comes first, and must not read what the others brought before
    return [*errors, *(error_of(lambda c=c: cp.agree("call", changed("causal", c))) for c in (False, True))]


def test_a_rank_that_waits_alone_raises_and_a_later_call_works(ranks: Any) -> None:
    outcomes = ranks(3, some_do_not_come)
    for rank, (alone, *later) in enumerate(outcomes):
        assert later == ["", ""]
        if rank == 2:
            continue
        assert alone.startswith(f"RuntimeError: layers.0: rank {rank} of the cp mesh of 3 ranks (ring 3 x ulysses 1)")
        assert "compares its attention call, but ranks " in alone and "2]) have not come" in alone
        assert "hangs, has raised an error, is compiled" in alone and "recompile_limit" in alone
        assert "HYPER_CP_AGREE_TIMEOUT" in alone


def on_threads(calls: list[Callable[[], Any]]) -> list[str]:
    found = [""] * len(calls)

    def run(rank: int) -> None:
        found[rank] = error_of(calls[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def all_compare(team: list[Agreement], kind: str = "call", signature: Signature = BASE) -> list[str]:
    return on_threads([lambda a=a: a.compare_if_new(kind, signature, "cp mesh", "layer") for a in team])


def test_a_long_wait_warns_before_it_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(agreement, "PATIENCE", 0.05)
    monkeypatch.setattr(agreement, "TIMEOUT", 0.2)
    one = Agreement(dist.HashStore(), [3, 7], 0)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] \(global ranks \[7\]\)"):
        one.compare_if_new("call", BASE, "cp mesh", "layer")
    (record,) = caplog.records
    assert "ranks [1] (global ranks [7]) have not come" in record.getMessage()


def test_a_rank_that_comes_at_the_limit_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the check for all entries, and before the clock is read."""
    monkeypatch.setattr(agreement, "TIMEOUT", 0.0)
    store, clock, readings = dist.HashStore(), time.monotonic, []
    one, two = (Agreement(store, [3, 7], rank) for rank in range(2))

    def monotonic() -> float:
        readings.append(clock())
        if len(readings) == 2:
            two.compare_if_new("call", BASE, "cp mesh", "layer")
        return readings[-1]

    monkeypatch.setattr(agreement.time, "monotonic", monotonic)
    one.compare_if_new("call", BASE, "cp mesh", "layer")
    assert one.known("call", BASE) and two.known("call", BASE)


# --------------------------------------------------------------------------- the record


def test_the_record_is_bounded_and_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "RECORDED", 2)
    store = dist.HashStore()
    team = [Agreement(store, [0, 1], rank) for rank in range(2)]
    counts = []
    for kind, scale in [("call", 1), ("call", 2), ("documents", 1), ("call", 1), ("call", 3), ("call", 2), ("call", 1)]:
        with comm.record_traffic() as log:
            assert all_compare(team, kind, changed("scale", scale)) == ["", ""]
        counts.append(len(log.entries) // 2)
    # 3 drops 1, the oldest, although it has just been used: ranks need not agree on what was used last.
    assert counts == [1, 1, 1, 0, 1, 0, 1]


def test_a_mesh_made_again_does_not_read_the_entries_of_the_first() -> None:
    store = dist.HashStore()
    first = [Agreement(store, [0, 1], rank) for rank in range(2)]
    assert all_compare(first) == ["", ""]
    again = [Agreement(store, [0, 1], rank) for rank in range(2)]
    assert all_compare(again, signature=changed("scale", 2.0)) == ["", ""]
    os.environ["HYPER_CP_AGREE_TIMEOUT"] = "0.1"
    try:  # alone: no entry of rank 1 from before is taken for its answer
        assert "ranks [1]" in error_of(lambda: again[0].compare_if_new("call", BASE, "cp mesh", "layer"))
    finally:
        del os.environ["HYPER_CP_AGREE_TIMEOUT"]


def test_entries_do_not_pile_up_in_the_store() -> None:
    store = dist.HashStore()
    team = [Agreement(store, [0, 1], rank) for rank in range(2)]
    counts = []
    for step in range(6):
        assert all_compare(team, "documents", (("documents", step),)) == ["", ""]
        counts.append(store.num_keys())
    assert counts[1:] == [counts[1]] * 5


# --------------------------------------------------------------------------- meshes


@on_ranks
def interleaved() -> list[int]:
    """Two cp groups of two ranks with signatures of their own, the mesh of all, seen twice, and a 2-D one in turns."""
    whole, rows = mesh_of(4), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat, hybrid, own = cp_mesh.view(whole, 1), cp_mesh.view(whole, 2), cp_mesh.view(rows["cp"], 1)
    plane = cp_mesh.view(mesh_of(2, 2))
    assert flat.agreement is hybrid.agreement and len({id(m.agreement) for m in (flat, own, plane)}) == 3
    counts = []
    for step in range(2):
        for cp, signature in (
            (flat, BASE),
            (own, changed("scale", dist.get_rank() // 2)),
            (plane, BASE),
            (hybrid, BASE),  # agreed on through the other view
            (own, changed("scale", 2 + dist.get_rank() // 2)),
            (hybrid, changed("scale", step)),
        ):
            counts.append(compared(lambda cp=cp, signature=signature: cp.agree("call", signature)))
    return counts


def test_several_meshes_in_turns(ranks: Any) -> None:
    assert ranks(4, interleaved) == [[1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1]] * 4


@on_ranks
def without_a_cpu_backend() -> tuple[str, str, str, int]:
    group = dist.new_group(backend="cuda:gloo")  # the kind of group that init_process_group("nccl") makes
    cp = cp_mesh.view(DeviceMesh.from_group(group, "cpu"), 1)
    on_the_cpu = error_of(lambda: dist.all_reduce(torch.zeros(1), group=group))
    different = error_of(lambda: cp.agree("call", changed("scale", dist.get_rank())))
    return on_the_cpu, different, error_of(lambda: cp.agree("call", BASE)), compared(lambda: cp.agree("call", BASE))


def test_process_groups_without_a_backend_for_the_cpu(ranks: Any) -> None:
    for on_the_cpu, different, same, again in ranks(2, without_a_cpu_backend):
        assert "No backend type associated with device type cpu" in on_the_cpu
        assert different.startswith("ValueError") and "rank 0: 0; rank 1: 1" in different
        assert same == "" and again == 0


@pytest.mark.slow
def test_a_fake_process_group_compares_nothing() -> None:
    """The benchmark of host time runs on one: its other ranks do not exist."""
    options = ["--ranks", "4", "--calls", "2", "--only", "hybrid", "head_tail"]
    command = [sys.executable, "-m", "benchmarks.measured.host_time", *options]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| hybrid, 2 x ring | head_tail, 32 documents, second layer | 4 |" in done.stdout


# --------------------------------------------------------------------------- ranks that differ without harm


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@on_ranks
def named_on_one_rank() -> float:
    """Only rank 0 gives its modules their qualified names, before and after the first step."""
    model = nn.ModuleDict({"inner": Attention()})
    parallelize_module(model, mesh_of(2), {"inner": ContextParallel(2, 1, ulysses_degree=1, kv_exchange="ring")})
    x = torch.ones(1, 2, 4, 8)
    for _ in range(2):
        if dist.get_rank() == 0:
            styled_modules(model, at_least=1)
        out = model["inner"](x, x, x)
    return out.mean().item()


def test_names_given_on_one_rank_only_do_no_harm(ranks: Any) -> None:
    assert ranks(2, named_on_one_rank) == [1.0, 1.0]


@on_ranks
def meshes_in_different_orders() -> list[float]:
    """Ranks view two meshes of the same ranks in different orders before they attend on both."""
    meshes = [mesh_of(2), init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))]
    for mesh in meshes if dist.get_rank() else meshes[::-1]:
        cp_mesh.view(mesh, 1 if mesh.ndim == 1 else None)
    x = torch.ones(1, 2, 4, 8)
    return [
        attention(x, x, x, mesh=mesh, ulysses_degree=1 if mesh.ndim == 1 else None).mean().item() for mesh in meshes
    ]


def test_meshes_may_be_viewed_in_any_order(ranks: Any) -> None:
    assert ranks(2, meshes_in_different_orders) == [[1.0, 1.0]] * 2

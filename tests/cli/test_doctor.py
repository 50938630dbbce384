"""``hyper-cp doctor``: alone and on two ranks, its file of measurements, and what it says of a wrong exchange."""

from __future__ import annotations

import contextlib
import io
import json
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hyper_cp import plan
from hyper_cp.cli.diagnosis import machine
from hyper_cp.cli.diagnosis.findings import NOTE, WARNING
from hyper_cp.cli.main import main
from hyper_cp.mesh import comm
from hyper_cp.ops import engine, kernels
from hyper_cp.ops.exchange import travel
from tests.harness.ranks import on_ranks

QUICK = ["--message-mb", "0.1"]
LLAMA = {"layers": 32, "heads": 32, "kv_heads": 8, "width": 4096, "vocabulary": 128256}


class Shifted(travel.Travel):
    """A ring that has the first keys which arrive in each other's places."""

    def __iter__(self) -> Any:
        ring = any(move.pattern == "pair" for move in self.transfers.moves)
        for index, ((k, v), gradients) in enumerate(super().__iter__()):
            yield (k.roll(1, 2) if ring and index == 1 else k, v), gradients


class Wrong:
    """A kernel whose causal tiles see everything."""

    name = "planted"

    def forward(self, tile: Any) -> Any:
        return kernels.REFERENCE.forward(kernels.TileInputs(tile.q, tile.k, tile.v, (None, None), tile.scale))

    def backward(self, tile: Any, *merged: Any) -> Any:
        return kernels.REFERENCE.backward(tile, *merged)


PLANTED: dict[str, Any] = {
    "": contextlib.nullcontext,
    "all_gather": lambda: mock.patch.object(
        comm.GlooAxis, "all_gather", lambda axis, send, own=True: comm.Axis.all_gather(axis, send + 1e-3)
    ),
    "one rank": lambda: (
        mock.patch.object(engine, "Travel", Shifted) if comm.dist.get_rank() == 1 else contextlib.nullcontext()
    ),
    "kernel": lambda: kernels.register(Wrong(), "cpu", accepts=lambda *_: False),
}


@on_ranks
def command(planted: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of the command on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), PLANTED[planted]():
        code = main(["doctor", *QUICK, *arguments])
    return code, printed.getvalue()


@pytest.mark.slow
def test_two_ranks_are_well_and_the_planner_reads_what_was_measured(ranks: Any) -> None:
    (code, text), (other, nothing) = ranks(2, command, "", "--json")
    assert (code, other, nothing) == (0, 0, "")
    found = json.loads(text)
    assert found["ok"] and not [f for f in found["findings"] if f["status"] == "WRONG"]
    checked = [f["what"] for f in found["findings"] if f["section"] == "exchanges"]
    for kv_exchange in ("all_gather", "ring", "needed", "replicated"):
        assert any(f"kv_exchange='{kv_exchange}'" in what for what in checked)
    for transfer in ("send_recv", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_rows"):
        assert f"{transfer} of 2 ranks (ring, ulysses_degree=1)" in checked
    assert found["inside_gb_s"] > 0 and found["inside_us"] > 0 and found["gpus_per_host"] == 2
    cluster = plan(LLAMA, 2**14, gpus=2, measured=found).cluster
    assert cluster.inside_gb_s == found["inside_gb_s"]
    assert cluster.flops("matmul_share") == pytest.approx(found["matmul_tflops"] * 1e12)
    (split,) = (f for f in found["findings"] if f["section"] == "split")
    assert "ContextParallel(" in split["note"]


@on_ranks
def hosts_of_two() -> tuple[int, str]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return command("", "--json")


@pytest.mark.slow
def test_links_inside_and_between_hosts_are_measured_apart(ranks: Any) -> None:
    (code, text), *_ = ranks(4, hosts_of_two)
    found = json.loads(text)
    assert [f for f in found["findings"] if f["status"] == "WRONG"] == []
    assert code == 0 and found["gpus_per_host"] == 2 and found["between_gb_s"] > 0 and found["inside_us"] > 0
    links = [f["what"] for f in found["findings"] if f["section"] == "links"]
    assert links == ["mesh dimension ring, 2 ranks between hosts", "mesh dimension ulysses, 2 ranks inside a host"]
    checked = [f["what"] for f in found["findings"] if f["section"] == "exchanges"]
    assert any("ulysses_degree=2, kv_exchange='ring'" in what for what in checked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "wrong", "well"),
    [
        ("all_gather", ["all_gather of 2 ranks", "kv_exchange='all_gather'"], ["send_recv of", "kv_exchange='ring'"]),
        ("one rank", ["ulysses_degree=1, kv_exchange='ring'"], ["send_recv of", "kv_exchange='needed'"]),
        ("kernel", ["planted on cpu, float32"], ["cpu flash on cpu", "kv_exchange='ring'"]),
    ],
)
def test_what_is_wrong_is_named_and_ends_in_an_error(planted: str, wrong: Any, well: Any, ranks: Any) -> None:
    (code, text), (other, _) = ranks(2, command, planted)
    assert code == other == 1
    last = text.strip().splitlines()[-1]
    assert last.startswith("WRONG: ")
    for name in wrong:
        assert name in last, last
    for name in well:
        assert f"  ok       {name}" in text or any("  ok " in line and name in line for line in text.splitlines())
        assert not any("WRONG" in line and name in line for line in text.splitlines()), text
    assert "on rank" in text


def test_alone_it_makes_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", *QUICK]) == 0
    text = capsys.readouterr().out
    assert f"torch: {torch.__version__}" in text and "cpu flash on cpu, float32: it runs plain calls" in text
    assert "npu fusion attention: torch_npu is not installed" in text and text.strip().endswith("OK (0 warnings)")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("capability", "value", "said"),
    [
        (9, None, (NOTE, "for a ring on more than 4 ranks, or an all-gather in one stage, without FSDP2 only")),
        (9, "8", (NOTE, "set it to 1 if")),
        (9, "1", (NOTE, "keeps attention waiting with FSDP2, kv_exchange='needed'")),
        (10, None, None),
        (10, "8", None),
        (12, "1", (WARNING, "this GPU does not need it")),
        (None, None, None),
    ],
)
def test_one_hardware_queue_is_advised_only_where_it_is_right(capability: Any, value: Any, said: Any) -> None:
    variables = {"TORCH_NCCL_HIGH_PRIORITY": "1"} | ({} if value is None else {machine.QUEUES: value})
    device = {} if capability is None else {"capability": capability}
    ranks: Any = SimpleNamespace(device="cuda", size=8, per_host=8)
    found = machine._variables(ranks, [{"variables": variables, "device": device}] * 8)
    about = [(finding.status, finding.note) for finding in found if f"{machine.QUEUES} is" in finding.what]
    assert len(about) == (said is not None)
    for status, note in about:
        assert status == said[0] and said[1] in note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "abacus"], "--device abacus is not on this machine"),
        (["--message-mb", "-1"], "--message-mb -1.0 is not a positive number"),
        (["--ulysses-degree", "3"], "--ulysses-degree 3 does not divide the 1 ranks"),
    ],
)
def test_wrong_use_ends_in_an_error(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["doctor"], ["verify", "some:function"]], ids=str)
def test_ranks_that_cannot_find_each_other_are_an_error(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert main(command) == 2
    assert "RANK=0 is set, and MASTER_PORT is not" in capsys.readouterr().err

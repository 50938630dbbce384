"""``hyper-cp verify``: its report, its exit code, and its words about a wrong function."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from hyper_cp.cli.main import main
from tests.harness.ranks import on_ranks


@on_ranks
def command(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["verify", *arguments])
    return code, printed.getvalue()


def test_the_report_is_printed_once_and_the_exit_code_says_the_result(ranks: Any) -> None:
    here, there = ranks(2, command, "tests.harness.planted:verification")
    assert here[0] == 0 and "OK: " in here[1] and there == (0, "")
    here, there = ranks(2, command, "tests.harness.planted:wrong_verification", "--json")
    assert here[0] == there[0] == 1 and there[1] == ""
    assert json.loads(here[1])["module"] == "blocks.1.extra"
    here, _ = ranks(2, command, "tests.harness.planted:wrong_verification", "--rtol", "100")
    assert here[0] == 0


MISTAKES = {
    "tests.harness.planted": "Write MODULE:FUNCTION",
    "tests.harness.planted:nothing": "has no function 'nothing'",
    "tests.nowhere.planted:whole_batch": "no module 'tests.nowhere' was found",
    "tests.harness.planted:whole_batch": "returned ['input_ids', 'labels']",
    "tests.cli.test_verify:too_much": "returned rounds, which hyper_cp.verify does not take",
}


def too_much() -> dict[str, Any]:
    return {"model": None, "mesh": None, "batch": None, "rounds": 3}


@on_ranks
def mistakes() -> list[tuple[int, str]]:
    found = []
    for function in MISTAKES:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            code = main(["verify", function])
        found.append((code, printed.getvalue()))
    return found


def test_a_wrong_function_ends_in_one_sentence_of_the_first_rank(ranks: Any) -> None:
    here, there = ranks(2, mistakes)
    for (code, text), message in zip(here, MISTAKES.values(), strict=True):
        assert code == 2 and text.startswith("hyper-cp verify: ") and message in text and text.count("\n") == 1, text
    assert there == [(2, "")] * len(MISTAKES)


def test_without_ranks_it_says_how_to_start_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["verify", "some:function"]) == 2
    assert "torchrun --nproc-per-node 2 -m hyper_cp verify some:function" in capsys.readouterr().err

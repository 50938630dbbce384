"""`hyper-cp tiles`: the map of who computes what against the mask and the layout, and its output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hyper_cp.cli.main import main
from hyper_cp.cli.tiles import mode_panels, tile_map
from hyper_cp.schedule import lookup
from hyper_cp.schedule.documents import PackedDocuments
from tests.harness.oracle import visible_pairs

DOCUMENTS = [0, 5, 22, 23, 64]


@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "per_document", "balanced"])
@pytest.mark.parametrize("window", [None, 7])
def test_a_map_of_single_pairs_is_the_mask_by_ranks(layout: str, window: int | None) -> None:
    """With a cell for each pair, a cell is the rank of its query, negative where another rank holds its key."""
    found = tile_map(layout, 64, 4, DOCUMENTS, window, 64)
    resolved = lookup.resolve(layout, 4, 64, PackedDocuments([DOCUMENTS]))
    owner = np.zeros(64, dtype=int)
    for rank in range(4):
        owner[resolved.positions(rank).numpy()] = rank + 1
    sign = np.where(owner[:, None] == owner[None], 1, -1)
    visible = visible_pairs(64, True, None if window is None else (window, 0), [DOCUMENTS])[0, 0].numpy()
    assert (found == np.where(visible, sign * owner[:, None], 0)).all()


def test_maps_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiles", "--ranks", "2", "--length", "64", "--layouts", "contiguous"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("A....") and "b" * 16 + "B" * 16 in out
    assert "contiguous: work 1.49 x the mean, 0.50 of an all-gather travels" in out
    assert "A dot is hidden by the mask" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "3", "--length", "64"], "The length 64 splits over 3 ranks in the layouts"),
        (["--length", "64", "--documents", "60"], "--length 64 is not 60, that of the documents"),
        (
            ["--documents", "0,60,64"],
            "begins with 0, as boundaries do. It is a list of lengths in tokens. Pass the diff",
        ),
        (["--documents", "60,x"], "'x' is no number of tokens"),
        (["--ranks", "0"], "ranks=0 must be a positive int"),
        (["--window", "-3"], "--window -3 is negative"),
        (["--modes", "--window", "8"], "--modes with --documents or --window is not possible"),
        (["--picture", "tiles.xyz"], "--picture tiles.xyz has no ending of a picture"),
        (["--picture", "/nowhere/tiles.svg"], "lies in a folder that does not exist"),
    ],
)
def test_mistakes_end_in_one_sentence(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiles", *options]) == 2
    assert message in capsys.readouterr().err


def test_maps_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "tiles.svg"
    assert main(["tiles", "--documents", "5,17,1,41", "--picture", str(path)]) == 0
    assert "<svg" in path.read_text()[:1000]


def test_maps_of_modes(capsys: pytest.CaptureFixture[str]) -> None:
    """Every visible pair of every head has one rank; queries of a balanced mode are attended by their partner."""
    for panel in mode_panels(4, 64, 64):
        side = 2 if panel.title == "Ulysses" else 1
        top = panel.cells.any(1).argmax()  # two maps lie in the middle of a square
        first = panel.cells[top : top + 64, :64]
        visible = visible_pairs(64, True, None, None)[0, 0].numpy()
        assert ((first != 0) == visible).all(), panel.title
        assert len(np.unique(np.abs(panel.cells))) == 5 and panel.cells.shape[0] >= 64 * side, panel.title
    assert main(["tiles", "--modes", "--length", "64"]) == 0
    out = capsys.readouterr().out
    assert "all-gather or ring, contiguous: work 1.74 x the mean, a rank sends 6 x its q" in out
    assert "Ulysses: work 1.00 x the mean, a rank sends 3 x its q" in out

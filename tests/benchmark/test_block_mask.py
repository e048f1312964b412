"""``python -m cupyattn.benchmark block_mask``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import HEADER

from cupyattn.benchmark import block_mask, gpu_command
from cupyattn.benchmark.__main__ import main
from cupyattn.functional.device_info import device_count

CASE = block_mask.Case(300, 4, 2, 8, "float32")


def test_documents_share_out_the_sequence():
    document = CASE.document()
    assert len(document) == 300
    assert (np.diff(document) >= 0).all()
    assert np.unique(document).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("case", [CASE, CASE._replace(length=1000, documents=9)])
def test_kept_is_the_share_of_tiles_that_are_seen(case):
    document = case.document()
    seen = document[:, None] == document
    rows, keys = block_mask.TILE
    tiles = [
        seen[i : i + rows, j : j + keys].any()
        for i in range(0, case.length, rows)
        for j in range(0, case.length, keys)
    ]
    assert case.kept() == np.mean(tiles) < 1


def test_both_masks_give_the_same():
    calls = block_mask.calls_of(CASE, np)
    out, _ = calls["forward", "block_mask"]()
    assert np.array_equal(out, calls["forward", "mask_mod"]()[0])
    assert not np.allclose(out, calls["forward", "plain"]()[0])
    for direction in block_mask.DIRECTIONS[1:]:
        found, expected = (calls[direction, way]() for way in ("block_mask", "mask_mod"))
        for name in ("dq", "dk", "dv"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))


@pytest.fixture
def a_gpu(monkeypatch):
    """The command as on a GPU, but for the kernels and their times."""
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)

    def measure(arguments):
        seconds = iter([4e-3, 5e-3, 1e-3] * 3)

        def timer(call):
            call()
            return [next(seconds)] * 3

        rows = block_mask.time_cases(block_mask.cases_of(arguments), np, timer)
        return {"command": "block_mask", **HEADER, "calls": 3, "warm_up": 1, "rows": rows}

    monkeypatch.setattr(block_mask, "measure", measure)


SMALL = ("block_mask", "--length", "300", "--documents", "4", "--heads", "2", "--head-dim", "8")


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "block_mask.json"
    assert main([*SMALL, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "Documents in one sequence on A GPU" in printed
    assert f"{CASE.kept():.1%} of the tiles kept" in printed
    assert "4.000 ms" in printed
    assert "25.0%" in printed
    rows = json.loads(file.read_text())["rows"]
    assert [row["direction"] for row in rows] == list(block_mask.DIRECTIONS)
    assert rows[0]["time_over_kept"] == pytest.approx(0.25 / CASE.kept())


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="needs a GPU")
def test_on_a_gpu(tmp_path):
    file = tmp_path / "block_mask.json"
    assert main([*SMALL, "--calls", "3", "--warm-up", "1", "--json", str(file)]) == 0
    assert all(row["seconds"]["block_mask"] > 0 for row in json.loads(file.read_text())["rows"])

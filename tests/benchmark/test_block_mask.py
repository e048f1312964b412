"""``python -m cupyattn.benchmark block_mask``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cupyattn.benchmark import block_mask
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
    masks, arrays = block_mask.masks_of(CASE, np), CASE.arrays(np)
    calls = {
        (direction, way): block_mask.calls_of(way, masks, arrays, direction)
        for direction in block_mask.DIRECTIONS
        for way in block_mask.WAYS
    }
    out, _ = calls["forward", "block_mask"]()
    assert np.array_equal(out, calls["forward", "mask_mod"]()[0])
    assert not np.allclose(out, calls["forward", "plain"]()[0])
    for direction in block_mask.DIRECTIONS[1:]:
        found, expected = (calls[direction, way]() for way in ("block_mask", "mask_mod"))
        for name in ("dq", "dk", "dv"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))


SMALL = ("block_mask", "--length", "300", "--documents", "4", "--heads", "2", "--head-dim", "8")


def test_text_and_json(a_gpu, capsys, tmp_path):
    a_gpu.times.seconds += [4e-3, 5e-3, 1e-3] * 3
    file = tmp_path / "block_mask.json"
    assert main([*SMALL, "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Documents in one sequence on A GPU" in printed
    assert f"kept {CASE.kept()}" in printed
    assert "forward cupyattn block_mask 1.000 ms" in printed
    rows = json.loads(file.read_text())["rows"]
    assert [row["direction"] for row in rows[::3]] == list(block_mask.DIRECTIONS)
    assert all("times" in row for row in rows)
    assert rows[2]["flops"] == pytest.approx(rows[0]["flops"] * CASE.kept())


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="needs a GPU")
def test_on_a_gpu(tmp_path):
    file = tmp_path / "block_mask.json"
    assert main([*SMALL, "--calls", "3", "--json", str(file)]) == 0
    assert all(row["times"]["p50_s"] > 0 for row in json.loads(file.read_text())["rows"])

"""``python -m cupyattn.benchmark block_mask``: what it calls, counts and prints."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from support.fake_gpu import FakeTorch, gauge

import cupyattn
from cupyattn.benchmark import block_mask
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.frame.subjects import Subject, rows_of
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


def exactly(torch, seen, sq, sk):
    """What PyTorch's function does, by NumPy; of other documents if `torch` is `Astray`."""
    i, j = np.indices((sq, sk))
    mask = seen(0, 0, i, j) if type(torch) is FakeTorch else i >= j

    def attend(*tensors):
        turned = [np.asarray(x).swapaxes(1, 2) for x in tensors]
        return torch.from_dlpack(cupyattn.attention(*turned, mask=mask).swapaxes(1, 2))

    return attend


class Astray(FakeTorch):
    pass


@pytest.mark.parametrize(("torch", "agrees"), [(FakeTorch(), True), (Astray(), False)])
def test_flex_attention_has_the_same_documents(torch, agrees, monkeypatch):
    monkeypatch.setattr(block_mask.peers, "flex", exactly)
    parser = argparse.ArgumentParser()
    block_mask.BENCHMARK.add_parser(parser.add_subparsers())
    arguments = parser.parse_args([*SMALL, "--dtype", "float32"])
    rows = list(block_mask.rows(arguments, gauge(torch=torch, peers=("triton",))))
    flex = [row for row in rows if row["contender"] == "triton"]
    assert [row["direction"] for row in flex] == ["forward", "backward"], "which has no two ways"
    forward, backward = flex
    assert ("times" in forward) is agrees
    assert "differs from cupyattn's" in backward["unavailable"], "gradients here are zeros"
    if agrees:
        assert forward["flops"] == CASE.flops("forward", "block_mask")
    else:
        assert "differs from cupyattn's" in forward["unavailable"]


def test_without_torch_that_is_said():
    missing = gauge(torch=RuntimeError("a peer of PyTorch without it"), peers=("triton",))
    contender = block_mask.flex_attention(CASE, CASE.arrays(np), "forward", missing)
    (row,) = rows_of(Subject({}, [contender]), missing)
    assert row["unavailable"].endswith("a peer of PyTorch without it")


@pytest.mark.gpu
@pytest.mark.skipif(device_count() == 0, reason="needs a GPU")
def test_on_a_gpu(tmp_path):
    file = tmp_path / "block_mask.json"
    assert main([*SMALL, "--calls", "3", "--json", str(file)]) == 0
    assert all(row["times"]["p50_s"] > 0 for row in json.loads(file.read_text())["rows"])

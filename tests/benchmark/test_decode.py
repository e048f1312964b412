"""``python -m cupyattn.benchmark decode``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import HEADER

import cupyattn
from cupyattn.benchmark import decode, gpu_command
from cupyattn.benchmark.__main__ import main

CASE = decode.Case(3, 300, True, 4, 2, 8, 2, 16, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_a_case_is_a_valid_call(dtype):
    case = CASE._replace(dtype=dtype)
    arrays = case.arrays(np)
    assert cupyattn.paged_attention(*arrays, causal=True).shape == (3, 2, 4, 8)
    assert 256 <= arrays[4].min() <= arrays[4].max() <= 300
    assert len(set(arrays[3].ravel())) == arrays[3].size


@pytest.mark.parametrize("cache", ["int8", "int4"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_case_of_integers_is_a_valid_call(cache, heads_first):
    case = CASE._replace(cache=cache, heads_first=heads_first)
    _, k, _, _, _, *scales = case.arrays(np)
    assert all(each.strides[1] == 4 for each in scales)
    assert (k.strides[1] < k.strides[2]) == heads_first
    assert np.isfinite(case.call(np)()).all()
    row = 8 + 4 if cache == "int8" else 4 + 4
    assert case.bytes_of(np.array([300, 20, 0])) == 320 * 2 * 2 * row


@pytest.mark.parametrize("ragged", [False, True])
def test_a_dense_case_is_the_same_step(ragged):
    case = CASE._replace(dtype="float32", ragged=ragged, block_size=None)
    q, k, v, lengths = case.arrays(np)
    assert k.shape == v.shape == (3, lengths.max(), 2, 8)
    assert np.array_equal(lengths, case._replace(block_size=16).arrays(np)[4])
    alone = cupyattn.attention(q[2:], k[2:, : lengths[2]], v[2:, : lengths[2]], causal=True)
    assert np.allclose(case.call(np)()[2:], alone)


def test_what_is_counted():
    assert CASE._replace(ragged=False).bytes_of(np.array([300] * 3)) == 3 * 300 * 2 * 2 * 8 * 2


@pytest.fixture
def a_gpu(monkeypatch):
    """The command as on a GPU, but for the kernels and their times."""
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)

    def measure(arguments):
        def timer(calls, torch):
            for call in calls:
                call()
            return [2e-6 * len(calls)] * 3

        rows = decode.time_cases(decode.cases_of(arguments), arguments.layers, np, timer)
        more = {"calls": 3, "warm_up": 1, "copy_gb_per_s": 4.0, "layers": arguments.layers}
        return {"command": "decode", **HEADER, **more, "rows": rows}

    monkeypatch.setattr(decode, "measure", measure)


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "decode.json"
    call = ["decode", "--batch", "1", "2", "--context", "40", "--block-size", "16", "--heads", "4",
            "--kv-heads", "2", "--head-dim", "8", "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "4/2 heads, D 8, float16, 1 query tokens" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["bytes"] for row in rows] == [n * 2 * 2 * 8 * 2 for n in (40, 40, 80, 80)]
    assert [row["block_size"] for row in rows] == [16, None, 16, None]
    assert f"1 40 16 float 2.0 us {rows[0]['gb_per_s']:.0f} " in printed
    assert f"2 40 dense float 2.0 us {rows[3]['gb_per_s']:.0f} " in printed


def test_integers_beside_floats(a_gpu, capsys, tmp_path):
    file = tmp_path / "decode.json"
    call = ["decode", "--batch", "2", "--context", "40", "--heads", "2", "--kv-heads", "1",
            "--head-dim", "8", "--block-size", "16", "--cache", "float", "int4",
            "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["cache"] for row in rows] == ["float", "int4", "float"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 40 16 int4 2.0 us 1 0.16 1,000,000 1.00" in printed


@pytest.mark.parametrize(("layout", "blocks"), [("paged", [16, 256]), ("dense", [None])])
def test_one_layout_alone(a_gpu, tmp_path, layout, blocks):
    file = tmp_path / "decode.json"
    call = ["decode", "--batch", "1", "--context", "40", "--heads", "2", "--kv-heads", "1",
            "--head-dim", "8", "--layout", layout, "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["block_size"] for row in rows] == blocks


def test_without_a_gpu(capsys):
    if gpu_command.device_count():
        pytest.skip("there is a GPU")
    assert main(["decode"]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err

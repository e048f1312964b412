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
            return [2e-6] * 3

        rows = decode.time_cases(decode.cases_of(arguments), np, timer)
        more = {"calls": 3, "warm_up": 1, "copy_gb_per_s": 4.0}
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
    assert [row["bytes"] for row in rows] == [40 * 2 * 2 * 8 * 2, 80 * 2 * 2 * 8 * 2]
    assert f"1 40 16 2.0 us {rows[0]['gb_per_s']:.0f} " in printed


def test_without_a_gpu(capsys):
    if gpu_command.device_count():
        pytest.skip("there is a GPU")
    assert main(["decode"]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err

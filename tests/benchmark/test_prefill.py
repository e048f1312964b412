"""``python -m cupyattn.benchmark prefill``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import HEADER

import cupyattn
from cupyattn.benchmark import gpu_command, prefill
from cupyattn.benchmark.__main__ import main

CASE = prefill.Case(2, 70, 20, 4, 2, 8, 16, "float32")


def test_the_cache_holds_the_dense_keys():
    q, k, v = CASE.dense(np)
    paged = cupyattn.paged_attention(q, *CASE.paged(np, k, v), causal=True)
    assert np.array_equal(paged, cupyattn.attention(q, k, v, causal=True))


def test_what_is_counted():
    assert CASE.flops == 4 * 2 * 4 * 8 * sum(range(51, 71))


@pytest.fixture
def a_gpu(monkeypatch):
    """The command as on a GPU, but for the kernels and their times."""
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)

    def measure(arguments):
        seconds = iter([2e-6, 4e-6, 3e-6] * 10)

        def timer(calls, torch):
            for call in calls:
                call()
            return [next(seconds)] * 3

        rows = prefill.time_cases(prefill.cases_of(arguments), np, timer)
        return {"command": "prefill", **HEADER, "calls": 3, "warm_up": 1, "rows": rows}

    monkeypatch.setattr(prefill, "measure", measure)


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "prefill.json"
    call = ["prefill", "--batch", "1", "--context", "40", "12", "--block-size", "16", "--heads",
            "4", "--kv-heads", "2", "--head-dim", "8", "--queries", "20",
            "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "4/2 heads, D 8, float16, causal" in printed
    assert "1 40 20 16 2.0 us" in printed
    assert "1.50 0.75" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["queries"] for row in rows] == [20, 12]


def test_without_a_gpu(capsys):
    if gpu_command.device_count():
        pytest.skip("there is a GPU")
    assert main(["prefill"]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err

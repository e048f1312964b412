"""``python -m cupyattn.benchmark varlen``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import HEADER

from cupyattn.benchmark import gpu_command, varlen
from cupyattn.benchmark.__main__ import main

CASE = varlen.Case(40, 10, 4, 2, 8, True, "float32")


def test_the_ways_have_the_same_tokens():
    assert CASE.lengths("equal").tolist() == [10] * 4
    ragged = CASE.lengths("ragged")
    assert ragged.sum() == 40
    assert len(set(ragged.tolist())) > 1
    assert ragged.min() >= 0


def test_equal_lengths_are_the_dense_call():
    calls = varlen.calls_of(CASE, np)
    out, lse = calls["forward", "dense"]()
    packed, packed_lse = calls["forward", "equal"]()
    assert np.array_equal(packed, out.reshape(packed.shape))
    assert np.array_equal(packed_lse, np.swapaxes(lse, 0, 1).reshape(packed_lse.shape))
    dense, equal = calls["backward", "dense"](), calls["backward", "equal"]()
    for name in ("dq", "dk", "dv"):
        found = getattr(equal, name)
        assert np.array_equal(found, getattr(dense, name).reshape(found.shape))


def test_what_is_counted():
    assert CASE.flops("dense") == CASE.flops("equal") == 4 * 4 * 8 * 4 * 100 / 2
    assert CASE.flops("ragged") == 2 * 4 * 8 * (CASE.lengths("ragged") ** 2).sum()


@pytest.fixture
def a_gpu(monkeypatch):
    """The command as on a GPU, but for the kernels and their times."""
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)

    def measure(arguments):
        seconds = iter([1e-6, 2e-6, 4e-6] * 10)

        def timer(calls, torch):
            for call in calls:
                call()
            return [next(seconds)] * 3

        rows = varlen.time_cases(varlen.cases_of(arguments), np, timer)
        return {"command": "varlen", **HEADER, "calls": 3, "warm_up": 1, "rows": rows}

    monkeypatch.setattr(varlen, "measure", measure)


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "varlen.json"
    call = ["varlen", "--tokens", "40", "--length", "10", "--heads", "4", "--kv-heads", "2",
            "--head-dim", "8", "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "4/2 heads, D 8, float16, 40 tokens" in printed
    assert "10 no forward" in printed
    assert "10 yes backward" in printed
    assert " 0.50 " in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["causal"], row["direction"]) for row in rows] == [
        (causal, direction) for causal in (False, True) for direction in varlen.DIRECTIONS
    ]


def test_without_a_gpu(capsys):
    if gpu_command.device_count():
        pytest.skip("there is a GPU")
    assert main(["varlen"]) == 1
    assert "there is no CUDA device" in capsys.readouterr().err

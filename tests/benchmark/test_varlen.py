"""``python -m cupyattn.benchmark varlen``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np

from cupyattn.benchmark import varlen
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.cases import Harness

CASE = varlen.Problem(40, 10, 4, 2, 8, True, "float32")


def test_the_ways_have_the_same_tokens():
    assert CASE.lengths("equal").tolist() == [10] * 4
    ragged = CASE.lengths("ragged")
    assert ragged.sum() == 40
    assert len(set(ragged.tolist())) > 1
    assert ragged.min() >= 0


def test_equal_lengths_are_the_dense_call():
    arrays = varlen.Inputs(CASE, Harness(np)).arrays

    def call(layout, direction):
        return varlen.call_of(CASE, layout, direction, arrays, np)()

    out, lse = call("dense", "forward")
    packed, packed_lse = call("equal", "forward")
    assert np.array_equal(packed, out.reshape(packed.shape))
    assert np.array_equal(packed_lse, np.swapaxes(lse, 0, 1).reshape(packed_lse.shape))
    dense, equal = call("dense", "backward"), call("equal", "backward")
    for name in ("dq", "dk", "dv"):
        found = getattr(equal, name)
        assert np.array_equal(found, getattr(dense, name).reshape(found.shape))


def test_what_is_counted():
    assert CASE.flops("dense") == CASE.flops("equal") == 4 * 4 * 8 * 4 * 100 / 2
    assert CASE.flops("ragged") == 2 * 4 * 8 * (CASE.lengths("ragged") ** 2).sum()


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "varlen.json"
    a_gpu.times.seconds += [1e-6, 2e-6, 4e-6] * 4
    call = ["varlen", "--tokens", "40", "--length", "10", "--heads", "4", "--kv-heads", "2",
            "--head-dim", "8", "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "tokens 40, length 10, heads 4, kv_heads 2, head_dim 8, float16" in printed
    assert "no forward cupyattn equal 2.0 us" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["causal"], row["direction"], row["implementation"]) for row in rows] == [
        (causal, direction, f"cupyattn {way}")
        for causal in (False, True)
        for direction in varlen.FACTORS
        for way in varlen.LAYOUTS
    ]
    case = CASE._replace(causal=False)
    assert rows[1]["flops"] == case.flops("equal")
    assert rows[5]["flops"] == 2.5 * case.flops("ragged")

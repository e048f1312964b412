"""``python -m cupyattn.benchmark decode``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import CEILINGS

import cupyattn
from cupyattn.benchmark import decode
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


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_array_functions_compute_the_same(kv_heads):
    case = CASE._replace(
        ragged=False, block_size=None, queries=1, dtype="float32", kv_heads=kv_heads
    )
    (composed,) = case.composed(np)
    np.testing.assert_allclose(composed(), case.call(np)(), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="one query token"):
        case._replace(queries=2).composed(np)


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "decode.json"
    call = ["decode", "--batch", "1", "2", "--context", "40", "--block-size", "16", "--heads", "4",
            "--kv-heads", "2", "--head-dim", "8", "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "heads 4, kv_heads 2, head_dim 8, queries 1, float16, float" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["bytes"] for row in rows] == [n * 2 * 2 * 8 * 2 for n in (40, 40, 80, 80)]
    assert [row["block_size"] for row in rows] == [16, None, 16, None]
    assert "1 16 cupyattn 2.0 us" in printed
    assert "2 - cupyattn 2.0 us" in printed
    assert rows[0]["of_ceiling"] == pytest.approx(rows[0]["gb_per_s"] / CEILINGS["read_gb_per_s"])


def test_integers_beside_floats(a_gpu, capsys, tmp_path):
    a_gpu.times.seconds += [2e-6, 4e-6, 2e-6]
    file = tmp_path / "decode.json"
    call = ["decode", "--batch", "2", "--context", "40", "--heads", "2", "--kv-heads", "1",
            "--head-dim", "8", "--block-size", "16", "--cache", "float", "int4",
            "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["cache"] for row in rows] == ["float", "int4", "float"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "16 int4 cupyattn 4.0 us" in printed
    assert "5.0 MB 2.00" in printed, "beside floats"


@pytest.mark.parametrize(("layout", "blocks"), [("paged", [16, 256]), ("dense", [None])])
def test_one_layout_alone(a_gpu, tmp_path, layout, blocks):
    file = tmp_path / "decode.json"
    call = ["decode", "--batch", "1", "--context", "40", "--heads", "2", "--kv-heads", "1",
            "--head-dim", "8", "--layout", layout, "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["block_size"] for row in rows] == blocks

"""``python -m cupyattn.benchmark prefill``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np

import cupyattn
from cupyattn.benchmark import prefill
from cupyattn.benchmark.__main__ import main

CASE = prefill.Case(2, 70, 20, 4, 2, 8, 16, "float32")


def test_the_cache_holds_the_dense_keys():
    q, k, v = CASE.dense(np)
    paged = cupyattn.paged_attention(q, *CASE.paged(np, k, v), causal=True)
    assert np.array_equal(paged, cupyattn.attention(q, k, v, causal=True))


def test_what_is_counted():
    assert CASE.flops == 4 * 2 * 4 * 8 * sum(range(51, 71))


def test_text_and_json(a_gpu, capsys, tmp_path):
    a_gpu.times.seconds += [3e-6, 2e-6, 4e-6] * 2
    file = tmp_path / "prefill.json"
    call = ["prefill", "--batch", "1", "--context", "40", "12", "--block-size", "16", "--heads",
            "4", "--kv-heads", "2", "--head-dim", "8", "--queries", "20",
            "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "heads 4, kv_heads 2, head_dim 8, block_size 16, float16" in printed
    assert "40 20 cupyattn paged 2.0 us" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [(row["queries"], row["contender"]) for row in rows] == [
        (queries, f"cupyattn {way}") for queries in (20, 12) for way in ("dense", "paged", "packed")
    ]
    assert all("times" in row for row in rows), "and all agree"

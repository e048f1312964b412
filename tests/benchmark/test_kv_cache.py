"""``python -m cupyattn.benchmark kv_cache``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import CEILINGS

from cupyattn.benchmark import kv_cache
from cupyattn.benchmark.__main__ import main

CASE = kv_cache.Case("append", "float", 37, 4, 2, 8, 16, "float16")


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("cache", kv_cache.FORMATS)
@pytest.mark.parametrize("operation", kv_cache.OPERATIONS)
def test_a_case_is_a_valid_call(operation, cache, dtype):
    CASE._replace(operation=operation, cache=cache, dtype=dtype).call(np).run()


def test_what_is_counted():
    """Of append q is read and written; of a quantised cache there are scales."""
    token, stored = 2 * 2 * 8 * 2, 2 * 2 * (4 + 4)
    assert CASE.call(np).bytes == 37 * (2 * 4 * 8 * 2 + 2 * token)
    assert CASE._replace(operation="copy", cache="int4").call(np).bytes == 2 * 8 * 16 * stored
    gathered = CASE._replace(operation="gather", cache="int4").call(np)
    assert gathered.bytes == 37 * (stored + token)


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "kv_cache.json"
    call = ["kv_cache", "--tokens", "20", "--cache", "float", "int8", "--heads", "4", "--kv-heads",
            "2", "--head-dim", "8", "--json", str(file)]  # fmt: skip
    assert main(call) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "heads 4, kv_heads 2, head_dim 8, block_size 16, float16" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["operation"] for row in rows] == ["append"] * 2 + ["copy"] * 2 + ["gather"] * 2
    assert "append int8 cupyattn 2.0 us" in printed
    assert rows[0]["of_ceiling"] == pytest.approx(rows[0]["gb_per_s"] / CEILINGS["copy_gb_per_s"])

"""``python -m cupyattn.benchmark layers``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fake_gpu import HEADER

from cupyattn.benchmark import gpu_command
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.layers import command
from cupyattn.benchmark.layers.calls import our_backward, our_forward
from cupyattn.benchmark.layers.operations import OPERATIONS, Size, Source
from cupyattn.benchmark.layers.times import sets_of, time_operations

SMALL = Size(4, 256, "float16")
NAMES = {operation.name: operation for operation in OPERATIONS}


def nbytes(array):
    return array.nbytes if getattr(array, "ndim", 0) > 1 else 0


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_moves_what_is_counted(name):
    """Arrays with an item for each column or row do not count."""
    operation = NAMES[name]
    arrays = operation.arrays(SMALL, Source(np, 0))
    (forward,) = our_forward(operation, [arrays])
    result = forward()
    results = result if isinstance(result, tuple) else (result,)
    tables = arrays[1:] if name == "rope" else ()
    moved = sum(map(nbytes, (*arrays, *results))) - sum(map(nbytes, tables))
    assert moved == operation.forward_arrays * SMALL.array_bytes
    (backward,) = our_backward(operation, [arrays], np)
    assert backward.args and all(gradient is not None for gradient in backward()[:1])


def test_sets_of_arrays_are_larger_than_a_cache():
    assert sets_of(Size(8192, 768, "float16"), 2) == 16
    assert sets_of(Size(2048, 128_256, "float16"), 1) == 1


@pytest.fixture
def a_gpu(monkeypatch):
    """The command as on a GPU, but for the kernels and their times."""
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)

    def measure(arguments):
        chosen = [NAMES[name] for name in arguments.operation]
        sizes = [Size(r, w, arguments.dtype) for r in arguments.rows for w in arguments.width]
        rows = time_operations(chosen, sizes, np, lambda calls, torch: [2e-6 * len(calls)] * 3)
        more = {"torch": None, "calls": 3, "warm_up": 1, "copy_gb_per_s": 4.0}
        return {"command": "layers", **HEADER, **more, "rows": rows}

    monkeypatch.setattr(command, "measure", measure)


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "layers.json"
    call = ["layers", "--operation", "softmax", "--rows", "4", "--width", "256"]
    assert main([*call, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "4 rows of 256, float16" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row, arrays in zip(rows, (2, 3), strict=True):
        assert row["bytes"] == arrays * 4 * 256 * 2
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / 2e-6 / 1e9)
        line = f"softmax {row['direction']} cupyattn 2.0 us {row['gb_per_s']:.0f} "
        assert line in " ".join(printed.split())

"""``python -m cupyattn.benchmark layers``: what it calls, counts and prints."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from support.fake_gpu import HEADER

from cupyattn.benchmark import gpu_command
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.layers import command
from cupyattn.benchmark.layers.calls import our_backward, our_forward, require_agreement
from cupyattn.benchmark.layers.operation import Size, Source
from cupyattn.benchmark.layers.operations import OPERATIONS
from cupyattn.benchmark.layers.times import sets_of, time_operations

SMALL = Size(4, 256, "float16")
NAMES = {operation.name: operation for operation in OPERATIONS}


def nbytes(array):
    return array.nbytes if getattr(array, "ndim", 0) > 1 else 0


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_moves_what_is_counted(name):
    """Arrays with an item for each column or row do not count, and of a table what is looked up."""
    operation = NAMES[name]
    arrays = operation.arrays(SMALL, Source(np, 0))
    (forward,) = our_forward(operation, [arrays])
    result = forward()
    results = result if isinstance(result, tuple) else (result,)
    read = {"rope": arrays[:1], "embedding": results}.get(name, arrays)
    moved = sum(map(nbytes, (*read, *results)))
    assert moved == operation.traffic(SMALL, "forward")
    if operation.backward_arrays is None:
        return
    (backward,) = our_backward(operation, [arrays], np)
    assert backward.args and all(gradient is not None for gradient in backward()[:1])


def test_the_gradient_of_a_table_is_counted_whole():
    operation = NAMES["embedding"]
    arrays = operation.arrays(SMALL, Source(np, 0))
    (backward,) = our_backward(operation, [arrays], np)
    dtable, _ = backward()
    assert operation.traffic(SMALL, "backward") == backward.args[0].nbytes + dtable.nbytes


def test_products_are_counted():
    operation = NAMES["linear_cross_entropy"]
    x, w, labels = operation.arrays(SMALL, Source(np, 0))
    (backward,) = our_backward(operation, [(x, w, labels)], np)
    moved = sum(map(nbytes, (x, w, *backward()[:2])))
    assert operation.traffic(SMALL, "backward") == moved
    forward = 2 * x.shape[0] * x.shape[1] * w.shape[1]
    assert operation.flops(SMALL) == (forward, 2 * forward)


class OnGpu(np.ndarray):
    """What CuPy's arrays and PyTorch's tensors have, to bring them to NumPy."""

    def get(self):
        return np.array(self)

    def float(self):
        return self

    cpu, numpy = float, get


@pytest.mark.parametrize(("step", "agrees"), [(1, True), (0, False), (2, False)])
def test_steps_in_place_are_compared_from_the_same_start(step, agrees):
    """A peer that makes no step, or a second one, is told from one that makes the same."""
    operation = NAMES["adamw_step"]
    arrays = tuple(array.view(OnGpu) for array in operation.arrays(SMALL, Source(np, 0)))

    def taking(steps):
        def call():
            for _ in range(steps):
                our_forward(operation, [tuple(map(np.asarray, arrays))])[0]()
            return tuple(arrays[i] for i in operation.changes)

        return [call]

    with nullcontext() if agrees else pytest.raises(RuntimeError, match="adamw_step: result 0"):
        require_agreement(operation, arrays, taking(1), taking(step))


def test_sets_of_arrays_are_larger_than_a_cache():
    assert sets_of(2 * Size(8192, 768, "float16").array_bytes) == 16
    assert sets_of(Size(2048, 128_256, "float16").array_bytes) == 1


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


def test_products_are_shown_by_their_speed(a_gpu, capsys, monkeypatch):
    small = replace(NAMES["linear_cross_entropy"], shape=None)
    monkeypatch.setitem(NAMES, small.name, small)
    call = ["layers", "--operation", "linear_cross_entropy", "global_norm"]
    assert main([*call, "--rows", "4", "--width", "256"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    forward, backward = (f"{flops / 2e-6 / 1e12:.3g} TFLOP/s" for flops in small.flops(SMALL))
    for line in (
        f"linear_cross_entropy forward cupyattn 2.0 us {forward}",
        f"linear_cross_entropy backward cupyattn 2.0 us {backward}",
        "global_norm forward cupyattn 2.0 us 1 0.26",
    ):
        assert any(line in each for each in lines), lines
    assert not any("global_norm backward" in each for each in lines)

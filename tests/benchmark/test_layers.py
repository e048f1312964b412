"""``python -m cupyattn.benchmark layers``: what it calls, counts and prints."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_gpu import FakeTorch, harness

from cupyattn.benchmark import layers as command
from cupyattn.benchmark.cases import Arrays, Harness
from cupyattn.benchmark.layers import OPERATIONS, RowSize, own_call

SMALL = RowSize(4, 256, "float16")
NAMES = {operation.name: operation for operation in OPERATIONS}


def nbytes(array):
    return array.nbytes if getattr(array, "ndim", 0) > 1 else 0


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_moves_what_is_counted(name):
    """Arrays with an item for each column or row do not count, and of a table what is looked up."""
    operation = NAMES[name]
    arrays = operation.arrays(SMALL, Arrays(np))
    result = own_call(operation, "forward", arrays, Harness(np))()
    in_place = [arrays[at] for at in (0, 2, 3)] if name == "adamw_step" else [result]
    results = result if isinstance(result, tuple) else in_place
    read = {"rope": arrays[:1], "embedding": results}.get(name, arrays)
    moved = sum(map(nbytes, (*read, *results)))
    assert moved == operation.traffic(SMALL, "forward")
    if operation.backward_arrays is None:
        return
    backward = own_call(operation, "backward", arrays, Harness(np))
    assert backward.args and all(gradient is not None for gradient in backward()[:1])


def test_the_gradient_of_a_table_is_counted_whole():
    operation = NAMES["embedding"]
    arrays = operation.arrays(SMALL, Arrays(np))
    backward = own_call(operation, "backward", arrays, Harness(np))
    dtable, _ = backward()
    assert operation.traffic(SMALL, "backward") == backward.args[0].nbytes + dtable.nbytes


def test_products_are_counted():
    operation = NAMES["linear_cross_entropy"]
    x, w, labels = operation.arrays(SMALL, Arrays(np))
    backward = own_call(operation, "backward", (x, w, labels), Harness(np))
    moved = sum(map(nbytes, (x, w, *backward()[:2])))
    assert operation.traffic(SMALL, "backward") == moved
    forward = 2 * x.shape[0] * x.shape[1] * w.shape[1]
    assert operation.flops(SMALL) == (forward, 2 * forward)


def rows_of(measure, *words):
    return list(command.BENCHMARK.harness_rows(command.BENCHMARK.parse(*words)[1], measure))


TINY = ("--rows", "4", "--width", "256")


def test_peers_are_timed_forward_compiled_too(monkeypatch):
    for direction in ("forward", "backward"):
        monkeypatch.setattr(
            command, f"torch_{direction}",
            lambda torch, function, arrays, harness, to=direction: own_call(
                NAMES["silu"], to, arrays, harness
            ),
        )  # fmt: skip
    torch = FakeTorch()
    measure = harness(torch=torch, baselines=("eager", "compile"), compile_mode="a mode")
    rows = rows_of(measure, "--operation", "silu", *TINY)
    names = ["cupyattn", "torch eager", "torch compile"]
    assert [(row["direction"], row["implementation"]) for row in rows] == [
        (direction, name) for direction in ("forward", "backward") for name in names
    ]
    assert all("times" in row for row in rows)
    assert torch.compiled == ["a mode"] * 2

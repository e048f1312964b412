"""``python -m cupyattn.benchmark layers``: what it calls, counts and prints."""

from __future__ import annotations

import json
import types
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from support.fake_gpu import CEILINGS, harness

from cupyattn.benchmark import layers as command
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.cases import Arrays, Harness
from cupyattn.benchmark.layer_operations import OPERATIONS, Size
from cupyattn.benchmark.layers import own_call

SMALL = Size(4, 256, "float16")
NAMES = {operation.name: operation for operation in OPERATIONS}


def nbytes(array):
    return array.nbytes if getattr(array, "ndim", 0) > 1 else 0


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adamw_step_8bit"])
def test_an_operation_moves_what_is_counted(name):
    """Arrays with an item for each column or row do not count, and of a table what is looked up."""
    operation = NAMES[name]
    arrays = operation.arrays(SMALL, Arrays(np))
    result = own_call(operation, "forward", arrays, Harness(np))()
    results = result if isinstance(result, tuple) else (result,)
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


class Torch:
    """What of PyTorch is used, on NumPy; as a peer it is what it is told to be."""

    cuda = types.SimpleNamespace(
        Stream=object, stream=lambda stream: nullcontext(), synchronize=lambda: None
    )
    no_grad = nullcontext
    modes: tuple[str, ...] = ()

    def compile(self, function, *, dynamic, mode):
        self.modes += (mode,)
        return function

    @staticmethod
    def from_dlpack(array):
        class Tensor(np.ndarray):
            pass

        return array.view(Tensor)


@pytest.mark.parametrize(("steps", "agrees"), [(1, True), (0, False), (2, False)])
def test_steps_in_place_are_compared_from_the_same_start(steps, agrees, monkeypatch):
    """A peer that makes no step, or a second one, is told from one that makes the same."""
    operation = NAMES["adamw_step"]

    def theirs(torch, function, arrays, harness):
        def call():
            for _ in range(steps):
                own_call(operation, "forward", arrays, harness)()
            return tuple(arrays[i] for i in operation.changes)

        return call

    monkeypatch.setattr(command, "torch_forward", theirs)
    measure = harness(torch=Torch(), baselines=("eager",))
    ours, peer = rows_of(measure, "--operation", "adamw_step", *TINY)
    assert "times" in ours
    assert ("times" in peer) is agrees


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
    torch = Torch()
    measure = harness(torch=torch, baselines=("eager", "compile"), compile_mode="a mode")
    rows = rows_of(measure, "--operation", "silu", *TINY)
    names = ["cupyattn", "torch eager", "torch compile"]
    assert [(row["direction"], row["implementation"]) for row in rows] == [
        (direction, name) for direction in ("forward", "backward") for name in names
    ]
    assert all("times" in row for row in rows)
    assert torch.modes == ("a mode",) * 2


COMPOSED = [name for name, operation in NAMES.items() if operation.composed is not None]


@pytest.mark.parametrize("name", COMPOSED)
def test_array_functions_give_the_same(name, monkeypatch):
    """And are timed forward alone, where there is no PyTorch too."""
    small = replace(NAMES[name], shape=None, tolerance=4e-3)  # float16 has 1e-3
    monkeypatch.setattr(command, "OPERATIONS", (small,))
    measure = harness(torch=RuntimeError("not here"), baselines=("cupy",))
    forward, peer, *backward = rows_of(measure, "--operation", name, *TINY)
    assert (peer["implementation"], peer.get("unavailable")) == ("cupy", None)
    assert [row["implementation"] for row in (forward, *backward)] == ["cupyattn"] * (
        1 + len(backward)
    )


def test_what_array_functions_have_not():
    """Another generator, or an erf that NumPy and CuPy have not."""
    without = NAMES.keys() - set(COMPOSED)
    assert {name for name in without if not name.startswith("sample")} == {
        "geglu", "dropout", "dropout + add", "adamw_step_8bit", "add_to", "merge_attention",
        "quantize, nf4", "dequantize, nf4",
    }  # fmt: skip
    assert all("greedy" not in name for name in without)


def test_sets_of_arrays_are_larger_than_a_cache():
    assert Harness(np).sets(2 * Size(8192, 768, "float16").array_bytes, 16) == 16
    assert Harness(np).sets(Size(2048, 128_256, "float16").array_bytes, 16) == 1


def test_text_and_json(a_gpu, capsys, tmp_path):
    file = tmp_path / "layers.json"
    assert main(["layers", "--operation", "softmax", *TINY, "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "softmax, rows 4, width 256, float16" in printed
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["direction"] for row in rows] == ["forward", "backward"]
    for row, arrays in zip(rows, (2, 3), strict=True):
        assert row["bytes"] == arrays * 4 * 256 * 2
        assert row["of_ceiling"] == pytest.approx(row["gb_per_s"] / CEILINGS["copy_gb_per_s"])
        assert f"{row['direction']} cupyattn 2.0 us" in printed


@pytest.mark.parametrize(("dtype", "ceiling"), [("float16", "mma"), ("float32", "fma")])
def test_products_are_held_against_products(dtype, ceiling, a_gpu, tmp_path, monkeypatch):
    small = replace(NAMES["linear_cross_entropy"], shape=None)
    monkeypatch.setattr(command, "OPERATIONS", (small,))
    file = tmp_path / "layers.json"
    words = ("--operation", "linear_cross_entropy", *TINY, "--dtype", dtype)
    assert main(["layers", *words, "--json", str(file)]) == 0
    for row, flops in zip(json.loads(file.read_text())["rows"], small.flops(SMALL), strict=True):
        assert row["flops"] == flops
        assert row["of_ceiling"] == pytest.approx(row["tflops"] / CEILINGS[f"{ceiling}_tflops"])


def test_an_operation_of_one_size_is_timed_once():
    _, arguments = command.BENCHMARK.parse("--operation", "cross_entropy", "gelu")
    cases = command.sized(arguments)
    assert [operation.name for operation, _ in cases] == ["cross_entropy", "gelu", "gelu", "gelu"]

"""Arguments of launches, and invalid calls, which launch and write nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from support.devices import SENTINEL, kernels_only, placed
from support.files_of_a_call import in_new_process
from support.recording_device import Recorder, backward_call, device_array, launched
from support.strategies import BASE, EVERY_OPTION, SQ, B, D, H

import cupyattn
from cupyattn import (
    AttentionGrads,
    GatedGrads,
    attention,
    attention_backward,
    cross_entropy_backward,
    reference,
    rms_norm,
    rms_norm_backward,
    softmax,
    softmax_backward,
)
from cupyattn.runtime.arrays import adopt, dtype_of
from cupyattn.runtime.plan import MAX_GRID_X, Output, Planner, Step, launch, run, typed
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, StructParameter
from cupyattn.runtime.structs import new_struct

PARAMS = np.dtype([("n", np.int64), ("x", np.float32)], align=True)
PROBE = KernelSpec(
    entry="probe",
    source="probe.cu",
    parameters=(
        Pointer("x", const=True),
        Pointer("maybe", optional=True),
        Scalar("count", np.dtype(np.int32)),
        Scalar("scale", np.dtype(np.float32)),
        Scalar("stride", np.dtype(np.int64)),
        StructParameter("params", PARAMS, "Params"),
    ),
).specialise(threads=32, N=1)
X, STRUCT = np.zeros(3), np.zeros((), PARAMS)[()]


def test_arguments_have_the_types_that_the_kernel_declares():
    recorder = Recorder()
    launch(recorder, PROBE, 7, (X, None, 5, 2, np.int8(-3), STRUCT))
    specialisation, grid, (x, maybe, count, scale, stride, params) = recorder.started[0]
    assert specialisation is PROBE
    assert grid == (7, 1, 1)
    assert x is X
    assert maybe is None, "a null pointer"
    assert (type(count), type(scale), type(stride)) == (np.int32, np.float32, np.int64)
    assert (count, scale, stride) == (5, 2.0, -3)
    assert params is STRUCT


def test_an_optional_pointer_may_be_an_array():
    recorder = Recorder()
    launch(recorder, PROBE, 1, (X, X, 5, 0.1, 2**40, STRUCT))
    _, _, (_, maybe, _, scale, stride, _) = recorder.started[0]
    assert maybe is X
    assert scale == np.float32(0.1)
    assert stride == 2**40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: None}, "x of probe must be an array, not None"),
        ({5: np.zeros((), np.int64)[()]}, "params of probe is another struct"),
        ({5: np.zeros((), [("n", np.int64)])[()]}, "params of probe is another struct"),
        ({5: 5}, "params of probe is another struct"),
        ({6: 1}, "probe takes 6 arguments, got 7"),
    ],
)
def test_arguments_that_do_not_fit_start_nothing(change, message):
    recorder = Recorder()
    arguments = dict(enumerate((X, None, 5, 0.1, 1, STRUCT))) | change
    with pytest.raises(TypeError, match=message):
        launch(recorder, PROBE, 1, tuple(arguments.values()))
    assert not recorder.started


def test_empty_grid_starts_nothing():
    recorder = Recorder()
    launch(recorder, PROBE, 0, (X, None, 5, 0.1, 1, STRUCT))
    assert recorder.did_nothing


def test_the_largest_grid_and_one_more():
    recorder = Recorder()
    launch(recorder, PROBE, MAX_GRID_X, (X, None, 5, 0.1, 1, STRUCT))
    assert recorder.started[0][1] == (2**31 - 1, 1, 1)
    with pytest.raises(ValueError, match=r"2147483648 CTAs of probe; .*2147483647; split"):
        launch(recorder, PROBE, MAX_GRID_X + 1, (X, None, 5, 0.1, 1, STRUCT))
    assert len(recorder.started) == 1


@dataclass(slots=True)
class ProbeArrays(Record[T]):
    """The arrays of a plan: inputs, results and the workspace."""

    x: T | None = None
    maybe: T | None = None
    dw: T | None = None
    db: T | None = None
    out: T | None = None
    workspace: T | None = None


OUTPUT = Output((3,), np.dtype(np.float32))
NUMBERS = (5, 0.1, 1, STRUCT)
FILL = KernelSpec("fill", "fill.cu", (Pointer("x"),)).specialise(threads=32)


def test_a_run_zeroes_what_its_plan_says_once():
    """Given and allocated results and a part of the workspace are zeroed."""
    dw, workspace = np.ones(3, np.float32), np.ones(128, np.float32)
    arrays = ProbeArrays(dw=dw, workspace=workspace)
    planner = Planner(ProbeArrays, arrays, dict.fromkeys(("dw", "db", "out"), OUTPUT))
    _, sums = planner.scratch(5), planner.scratch(7)
    zero_first = (planner.slots.dw, planner.slots.db, sums)
    plan = planner.plan(zero_first=zero_first, zero_new=True)
    recorder = Recorder(make=lambda *output: np.ones(*output))
    results = run(recorder, plan, adopt(arrays))
    assert results.dw is dw
    assert not any(result.any() for result in (dw, results.db, results.out))
    assert workspace.nonzero()[0].tolist() == [*range(64), *range(71, 128)]
    assert len(recorder.zeroed) == 4


def started_by(planner, arrays, maybe=None):
    """The arrays that kernels get: x and `maybe`, or the array of that slot, then x."""
    slots = planner.slots
    probe = Step.of(PROBE, 1, (slots.x, slots.maybe if maybe is None else maybe), *NUMBERS)
    recorder = Recorder(make=np.empty)
    run(recorder, planner.plan(probe, Step.of(FILL, 1, (slots.x,))), adopt(arrays))
    return [arguments[: len(kernel.spec.pointers)] for kernel, _, arguments in recorder.started]


def test_kernels_get_the_arrays_of_their_slots_and_null_for_what_is_absent():
    """The arrays are given, allocated, or in the workspace."""
    arrays = ProbeArrays(X)
    (x, maybe), (filled,) = started_by(Planner(ProbeArrays, arrays, {}), arrays)
    assert (x is X, maybe, filled is X) == (True, None, True)
    arrays = ProbeArrays(X, X[1:])
    (x, maybe), _ = started_by(Planner(ProbeArrays, arrays, {}), arrays)
    assert x is X and np.shares_memory(maybe, X)
    arrays = ProbeArrays()
    planner = Planner(ProbeArrays, arrays, {"x": OUTPUT})
    (x, maybe), (filled,) = started_by(planner, arrays, planner.scratch(5))
    assert (x.shape, maybe.shape) == ((3,), (5,)) and filled is x


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_arrays_that_start_within_an_item_are_refused(recorder, dtype):
    """Reading them on a GPU faults and destroys the process's context."""
    aligned = [device_array((1, 2, 1, 8), dtype) for _ in range(4)]
    for crooked in range(4):
        arrays = list(aligned)
        arrays[crooked] = device_array((1, 2, 1, 8), dtype, address=2**41 + 1)
        with pytest.raises(ValueError, match="align"):
            attention(*arrays[:3], out=arrays[3], implementation="tiled")
    x = device_array((4, 8), dtype, address=2**41 + 1)
    with pytest.raises(ValueError, match="align"):
        softmax(x)
    assert not recorder.started


def test_a_scale_beyond_float32_is_refused(recorder):
    """As float32 the scale would be infinite, and the result NaN."""
    q = device_array((1, 2, 1, 8))
    with pytest.raises(ValueError, match="softmax_scale"):
        attention(q, q, q, softmax_scale=1e300, implementation="tiled")
    assert recorder.did_nothing


@pytest.mark.parametrize(
    ("shape", "passed"),
    [((2**16, 1, 2**15, 8), "2147483648 CTAs"), ((1, 2**30 + 1, 1, 8), "Sq = 1073741825")],
)
def test_problems_beyond_what_a_launch_can_do(recorder, shape, passed):
    q = device_array(shape, strides=(0, 0, 0, 2))
    k = device_array((shape[0], 3, shape[2], 8), strides=(0, 0, 0, 2))
    with pytest.raises(ValueError, match=rf"{passed}.*; .*at most.*; split"):
        attention(q, k, k, implementation="naive")
    assert not recorder.started


@pytest.mark.parametrize(
    ("implementation", "name"),
    [("tiled", "softcap"), ("naive", "softcap"), ("naive", "mask_mod"), ("flash", "mask_mod")],
)
def test_unsupported_options_are_refused_before_any_launch(recorder, implementation, name):
    q, k = device_array((2, 3, 4, 8)), device_array((2, 5, 2, 8))
    value = 0.5 if name == "softcap" else lambda b, h, i, j: j <= i
    with pytest.raises(NotImplementedError) as failure:
        attention(q, k, k, **{name: value}, implementation=implementation)
    said, _, then = str(failure.value).partition("; ")
    assert name in said
    assert "CPU path has every option" in then
    assert "leave backend('emulator')" in then
    assert recorder.did_nothing


@pytest.mark.parametrize("crooked", [1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_flash_refuses_keys_that_lie_too_far_apart(recorder, crooked, sign):
    """A tile's offsets have 32 bits; those of the float32 kernel have 64."""
    far = device_array((1, 2, 1, 64), np.float16, (2**40, sign * 2**26, 128, 2))
    near = device_array((1, 2, 1, 64), np.float16, (2**40, sign * (2**26 - 16), 128, 2))
    arrays = [near, near, near]
    launched(recorder, *arrays, implementation="flash")
    arrays[crooked] = far
    with pytest.raises(ValueError, match=r"bytes from one row to the next; .*ascontiguousarray"):
        attention(*arrays)
    far = device_array((1, 2, 1, 64), np.float32, (2**40, sign * 2**30, 256, 4))
    launched(recorder, far, far, far, implementation="flash")


@pytest.mark.parametrize("crooked", ["dout", "q", "k", "v"])
def test_the_flash_backward_refuses_rows_that_lie_too_far_apart(recorder, crooked):
    shape = (1, 2, 1, 8)
    near = {name: device_array(shape) for name in ("dout", "q", "k", "v", "out")}
    near["lse"] = device_array((1, 1, 2), np.float32)
    near[crooked] = device_array(shape, np.float16, (2**40, 2**26, 128, 2))
    with pytest.raises(ValueError, match=rf"{crooked} has .* one row to the next; .*copy"):
        attention_backward(*near.values())
    assert recorder.did_nothing
    near[crooked] = device_array(shape, np.float16, (2**40, -(2**26) + 16, 128, 2))
    attention_backward(*near.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: device_array((95,), np.uint8), r"95 bytes; .*needs 96.*empty\(96, 'uint8'\)"),
        (
            lambda: device_array((48, 2), np.uint8)[:, :1],
            r"strides \(2, 1\), not contiguous in C order; .*'uint8'",
        ),
        (lambda: device_array((99,), np.uint8)[1:], r"98 bytes, 1 beyond a multiple of 16; .*cupy"),
    ],
    ids=["small", "strided", "misaligned"],
)
def test_unsuitable_workspace_is_refused(recorder, make, message):
    arrays, options = backward_call()
    with pytest.raises(ValueError, match=rf"workspace has {message}"):
        attention_backward(*arrays.values(), **options, workspace=make())
    assert not recorder.started


def test_a_workspace_on_the_emulator_is_numpys():
    arrays = [np.zeros((1, 3, 1, 8), np.float32)] * 5 + [np.zeros((1, 1, 3), np.float32)]
    options = {"deterministic": True, "workspace": np.zeros(2, np.float32)}
    with (
        cupyattn.backend("emulator"),
        pytest.raises(ValueError, match=r"8 bytes; .*numpy\.empty\("),
    ):
        attention_backward(*arrays, **options)


def test_backward_starts_nothing_if_a_kernel_cannot_be_loaded(recorder, monkeypatch):
    """For example, the second kernel may not be loaded in a capture. Results stay unchanged."""
    load = recorder.load

    def load_one(specialisation: Specialisation) -> Any:
        if recorder.loaded:
            raise RuntimeError("no more kernels")
        return load(specialisation)

    monkeypatch.setattr(recorder, "load", load_one)
    arrays, options = backward_call()
    with pytest.raises(RuntimeError, match="no more kernels"):
        attention_backward(*arrays.values(), **options)
    assert not recorder.started


def test_backward_starts_nothing_if_a_grid_is_too_large(recorder):
    """The second kernel has a CTA for each 64 keys."""
    q = device_array((256, 1, 1, 8), np.float32)
    k = device_array((256, 2**29, 1, 8), np.float32, strides=(0, 0, 0, 4))
    lse = device_array((256, 1, 1), np.float32)
    with pytest.raises(ValueError, match=r"2147483648 CTAs of attention_backward_f32_dkdv"):
        attention_backward(q, q, k, k, q, lse, deterministic=True)
    assert not recorder.started


def test_a_workspace_may_not_overlap_an_array(recorder):
    arrays, options = backward_call()
    with pytest.raises(ValueError, match=r"workspace overlaps lse in memory; .* still read"):
        attention_backward(*arrays.values(), **options, workspace=arrays["lse"])
    assert recorder.did_nothing


def test_backward_without_a_kernel_names_another(recorder):
    q, k = device_array((2, 3, 4, 8)), device_array((2, 5, 2, 8))
    lse = device_array((2, 4, 3), np.float32)
    with pytest.raises(
        NotImplementedError, match=r"attention_backward.*pass implementation='flash'.*NumPy"
    ):
        attention_backward(q, q, k, k, q, lse, implementation="tiled")
    assert recorder.did_nothing


@pytest.mark.parametrize("name", ["workspace", "mask", "q_offset", "seqused_k", "out"])
def test_numpy_arrays_among_the_options_are_refused(recorder, name):
    q, k = device_array((2, 3, 4, 8)), device_array((2, 5, 2, 8))
    with pytest.raises(TypeError, match=rf"{name} is numpy.*all are CuPy"):
        attention(q, k, k, **{name: np.zeros(2, np.int32)}, implementation="tiled")
    assert recorder.did_nothing


def test_bad_results_are_refused_before_anything_is_done(recorder):
    q, k = device_array((2, 3, 4, 8)), device_array((2, 5, 2, 8))
    for out in (
        q,
        device_array((2, 3, 4, 8), np.float32),
        device_array((2, 3, 4, 7)),
        device_array((2, 3, 4, 8), strides=(0, 64, 16, 2)),
        device_array((2, 3, 4, 8), address=k.data.ptr + 16),
    ):
        with pytest.raises((TypeError, ValueError), match="out"):
            attention(q, k, k, out=out, implementation="tiled")
        with pytest.raises((TypeError, ValueError), match="out"):
            softmax(q, out=q if out is q else device_array((2, 3, 4, 7)))
    assert recorder.did_nothing


MANY = 2**31


def rows(batch: int, seq: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrays shaped like q and lse, without items."""
    return np.zeros((batch, seq, heads, 8), np.float32), np.zeros((batch, heads, seq), np.float32)


def attended(batch: int, seq: int, heads: int) -> Any:
    q, _ = rows(batch, seq, heads)
    return cupyattn.attention(q, q, q)


def differentiated(batch: int, seq: int, heads: int) -> Any:
    q, lse = rows(batch, seq, heads)
    return cupyattn.attention_backward(q, q, q, q, q, lse)


def merged(batch: int, seq: int, heads: int) -> Any:
    out, lse = rows(batch, seq, heads)
    return cupyattn.merge_attention(out, lse, out, lse)


@pytest.mark.parametrize(
    ("call", "shape", "name"),
    [
        (attended, (1, 0, MANY), "heads"),
        (attended, (0, 1, MANY), "heads"),
        (differentiated, (1, 0, MANY), "heads"),
        (differentiated, (MANY, 0, 1), "batch"),
        (merged, (1, 0, MANY), "heads"),
        (merged, (0, MANY, 1), "seq"),
    ],
)
def test_more_than_int32_holds_is_refused_by_name(
    call: Callable[..., Any], shape: tuple[int, int, int], name: str
):
    message = f"{name} = {MANY}; kernels take {name} as int32, {-MANY} to {MANY - 1}; split the"
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match=re.escape(message)):
        call(*shape)


def test_many_heads_with_items_are_refused_before_memory_is_taken():
    q = as_strided(np.zeros(8, np.float32), (1, 1, MANY, 8), (0, 0, 0, 4))
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match="heads = 2147483648; ker"):
        cupyattn.attention(q, q, q)


def test_struct_fields_refuse_integers_that_do_not_fit():
    inner = np.dtype([("count", np.uint32)])
    params = new_struct(
        np.dtype([("inner", inner), ("each", np.int32, (2,)), ("scale", np.float32)])
    )
    with pytest.raises(ValueError, match="count = 4294967296; kernels take count as uint32"):
        params["inner"]["count"] = 2**32
    with pytest.raises(ValueError, match="each = -2147483649; kernels take each as int32"):
        params["each"][1] = -(2**31) - 1
    with pytest.raises(ValueError, match=r"each = \(0, 2147483648\); kernels take"):
        params["each"] = 0, 2**31
    params["each"] = 0, 2**31 - 1
    params["inner"]["count"] = 2**32 - 1
    params["scale"] = 1.5
    filled = params[()]
    assert isinstance(filled, np.void)
    assert filled["each"].tolist() == [0, 2**31 - 1]
    assert (filled["inner"]["count"], filled["scale"]) == (2**32 - 1, 1.5)


def test_values_refuse_integers_that_do_not_fit():
    spec = KernelSpec("copy", "copy.cu", (Scalar("count", np.dtype(np.int32)),))
    assert typed(spec, [2**31 - 1]) == [2**31 - 1]
    assert typed(spec, [np.int64(-3)]) == [-3]
    with pytest.raises(ValueError, match="count = 2147483648; kernels take count as int32"):
        typed(spec, [2**31])


@pytest.mark.parametrize(
    ("dtype", "taken", "refused"),
    [
        ("float32", (1, True, Fraction(1, 2), np.float64(0.5), np.int8(2), math.inf), "1"),
        ("float16", (65504.0, -math.inf, np.float16(2)), 70000.0),
        ("bfloat16", (1e38, dtype_of("bfloat16").type(2), math.inf), 1e39),
        ("float64", (1e308, np.float32(0.5)), 10**400),
        ("bool", (True, np.True_, 0, 1), 2),
        ("uint8", (0, 255), -1),
    ],
)
def test_values_take_numbers_that_fit_alone(dtype, taken, refused):
    spec = KernelSpec("copy", "copy.cu", (Scalar("value", dtype_of(dtype)),))
    for value in taken:
        [converted] = typed(spec, [value])
        assert converted.dtype == dtype_of(dtype)
        assert converted == dtype_of(dtype).type(value)
    assert dtype.startswith(("bool", "u")) or math.isnan(typed(spec, [math.nan])[0])
    with pytest.raises((TypeError, ValueError), match=f"kernels take value as {dtype}, "):
        typed(spec, [refused])


def backward_arrays(**options: Any) -> tuple[Any, ...]:
    """dout, q, k, v, out and lse of the base problem."""
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    out, lse = reference.attention(*arrays, **options)
    return dout, *arrays, out.astype(np.float32), lse.astype(np.float32)


@kernels_only
def test_backward_option_without_a_kernel_is_refused(side):
    name = "mask_mod"
    options = {key: placed(side, value) for key, value in EVERY_OPTION[name].items()}
    dq = side.put(np.full((B, SQ, H, D), SENTINEL, np.float32))
    grads = AttentionGrads(dq)
    with pytest.raises(NotImplementedError, match=rf"{name} in attention_backward.*CPU path"):
        attention_backward(
            *map(side.put, backward_arrays()), **options, implementation="naive", grads=grads
        )
    assert (side.get(dq) == SENTINEL).all()


def test_arrays_with_too_many_axes_are_named(recorder):
    """Nothing is launched. Without gaps, and on the CPU, any number of axes is allowed."""
    gaps = device_array((6, 6, 6, 6, 6, 8))[::2, ::2, ::2, ::2, ::2]
    whole, labels = device_array((3, 3, 3, 3, 3, 8)), device_array((6,) * 5, int)
    labels = labels[::2, ::2, ::2, ::2, ::2]
    one, weight, rows = device_array((), "f4"), device_array((8,)), device_array((3,) * 5, "f4")
    refused = {
        "x": lambda: softmax(gaps),
        "grads": lambda: softmax_backward(whole, whole, grads=gaps),
        "x, residual": lambda: rms_norm(gaps, residual=gaps),
        "dtotal": lambda: rms_norm_backward(whole, whole, weight, rows, dtotal=gaps),
        "gate": lambda: cupyattn.swiglu(gaps),
        "grads.dgate": lambda: cupyattn.swiglu_backward(
            whole, whole, whole, grads=GatedGrads(gaps)
        ),
        "labels": lambda: cross_entropy_backward(one, whole, labels, rows),
        "ids": lambda: cupyattn.embedding(weight[None], labels),
        "dout": lambda: cupyattn.embedding_backward(
            gaps, weight[None], device_array((3,) * 5, int)
        ),
    }
    for name, call in refused.items():
        with pytest.raises(
            ValueError, match=rf"the strides of {name} leave \d axes apart; at most 4"
        ):
            call()
    mask = device_array((3, 1, 3, 1, 3, 1), bool)
    with pytest.raises(ValueError, match=r"strides of mask leave 5 .*whole shape what broadcasts"):
        softmax(whole, mask=mask)
    turned = device_array((3, 3, 3, 3, 8)).transpose(1, 0, 3, 2, 4), device_array((3, 3, 3, 3, 8))
    softmax(turned[0], out=turned[1])
    assert len(recorder.started) == 1


def test_a_token_that_is_more_than_a_launch_takes_is_refused():
    q = as_strided(np.zeros(8, np.float16), (1, 1, MANY, 8), (0, 0, 0, 2))
    tables = cupyattn.rope_tables(1, 8)
    message = "one such token is more than a launch of rope takes; split the batch or the heads"
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match=message):
        cupyattn.rope(q, *tables)


MOST_FILES = {"rms_norm": (12, 7), "gelu": (11, 7)}
"""Files that a function's first and second call execute at most."""


@pytest.mark.nvrtc
@pytest.mark.parametrize("function", MOST_FILES)
def test_call_executes_few_files(function):
    for executed, most in zip(in_new_process(function), MOST_FILES[function], strict=True):
        assert "runtime/plan.py" in executed.functions
        assert len(executed.functions) <= most, str(executed)

"""Calls on a GPU that are refused before anything is done: loaded, allocated or started."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.recording_device import backward_call, device_array, launched

import cupyattn
from cupyattn import attention, attention_backward, softmax
from cupyattn.kernels.spec import Specialisation


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_arrays_that_start_within_an_item_are_refused(recorder, dtype):
    """A GPU cannot read them: it would fault, and take the process's context with it."""
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
    """The kernels have it as float32: it would be infinite, and the result NaN."""
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
def test_what_has_no_kernel_says_so_and_does_nothing(recorder, implementation, name):
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
def test_a_workspace_that_does_not_do_is_refused(recorder, make, message):
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


def test_a_backward_of_which_a_kernel_cannot_be_loaded_starts_none(recorder, monkeypatch):
    """As where the second is the first of its kind within a capture: the results are as before."""
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


def test_a_backward_of_which_a_grid_is_too_large_starts_none(recorder):
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

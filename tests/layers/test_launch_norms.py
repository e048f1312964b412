"""What the norms pass to their kernels."""

from __future__ import annotations

import numpy as np
import pytest
from support.recording_device import device_array

from cupyattn import RMSNormGrads, layer_norm, layer_norm_backward, rms_norm, rms_norm_backward

F16, F32 = np.float16, np.float32


def test_what_the_forward_passes(recorder):
    x = device_array((3, 4, 2048))
    residual = device_array((3, 8, 2048))[:, :4]
    weight = device_array((2048,))
    out, total, rstd = rms_norm(x, weight, residual=residual, weight_offset=1.0, return_stats=True)
    ((kernel, grid, arguments),) = recorder.started
    macros = dict(kernel.macros)
    assert kernel.spec.entry == "norm_forward"
    assert macros["CENTRED"] == macros["WITH_BIAS"] == macros["WITH_MEAN"] == "false"
    assert macros["WITH_RESIDUAL"] == macros["WITH_WEIGHT"] == macros["WITH_RSTD"] == "true"
    assert (macros["VEC"], macros["STRIPS"], macros["LANES"]) == (8, 2, 128)
    assert grid == (-(-12 // (kernel.threads // 128)), 1, 1)
    *arrays, eps, offset, params = arguments
    for passed, expected in zip(
        arrays, (x, residual, weight, None, out, total, None, rstd), strict=True
    ):
        assert passed is expected
    assert (rstd.shape, rstd.dtype) == ((3, 4), F32)
    assert (eps, offset) == (np.float32(1e-6), 1.0)
    assert params["strides"][1].tolist()[:2] == [8 * 2048, 2048]


@pytest.mark.parametrize(
    ("length", "items", "strips"), [(768, 24, 3), (1024, 32, 4), (1000, 32, 4), (260, 16, 2)]
)
def test_a_row_has_as_many_strips_as_it_needs(recorder, length, items, strips):
    layer_norm(device_array((5, length)))
    macros = dict(recorder.started[0].specialisation.macros)
    expected = strips if length % 8 == 0 else items
    assert macros["STRIPS"] == expected


def test_what_the_backward_passes(recorder):
    """Few CTAs for each multiprocessor walk the rows, and one launch adds both sums."""
    x, dout = device_array((10_000, 2048)), device_array((10_000, 2048))
    weight, stats = device_array((2048,)), device_array((10_000,), F32)
    grads = layer_norm_backward(dout, x, weight, stats, stats, bias=weight)
    (kernel, grid, arguments), (sums, sums_grid, sums_arguments) = recorder.started
    assert kernel.spec.entry == "norm_backward"
    assert grid == (recorder.multiprocessors, 1, 1)
    assert dict(kernel.macros)["WITH_MEAN"] == "true"
    assert arguments[7] is grads.dx
    assert sums.spec.entry == "column_sums"
    assert sums_grid == (2 * 2048 // 32, 1, 1)
    assert sums_arguments[2] is grads.dweight
    assert sums_arguments[3] is grads.dbias
    assert sums_arguments[4:] == (recorder.multiprocessors, 2048, 0)
    assert arguments[8].shape == arguments[9].shape == (recorder.multiprocessors * 2048,)


def test_one_sum_or_none(recorder):
    x, stats = device_array((7, 64)), device_array((7,), F32)
    rms_norm_backward(x, x, device_array((64,)), stats)
    rms_norm_backward(x, x, None, stats)
    entries = [started.specialisation.spec.entry for started in recorder.started]
    assert entries == ["norm_backward", "column_sums", "norm_backward"]
    assert recorder.started[1].arguments[1] is None
    assert recorder.started[1].arguments[3] is None
    assert recorder.started[1].grid == (2, 1, 1)


def test_nothing_is_allocated_with_grads_and_workspace(recorder):
    x, stats, weight = device_array((7, 64)), device_array((7,), F32), device_array((64,))
    grads = RMSNormGrads(device_array((7, 64)), device_array((64,)))
    rms_norm_backward(x, x, weight, stats, grads=grads, workspace=device_array((4096,), np.uint8))
    assert recorder.allocated == []

"""Calls on a second GPU, and on two at once. Needs two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from cupyattn import attention, attention_backward, vjp
from cupyattn.runtime.device.cuda import device_count
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() < 2, reason="fewer than two GPUs")]
PROBLEM = AttentionCase(B=2, Sq=130, Sk=150, H=4, G=2, D=64, Dv=64, dtype="float16")


def on_device(ordinal: int, problem: AttentionCase = PROBLEM) -> list[Any]:
    """Return q, k, v and dout on a device."""
    import cupy

    with cupy.cuda.Device(ordinal):
        arrays = [*problem.arrays(), problem.gradients()[0]]
        return [cupy.asarray(array) for array in arrays]


@pytest.mark.parametrize("implementation", ["flash", "tiled", "naive"])
def test_the_arrays_choose_the_device(implementation):
    """The current device is another one and does not change."""
    import cupy

    q, k, v, _ = on_device(0)
    expected = attention(q, k, v, causal=True, implementation=implementation)
    q, k, v, _ = on_device(1)
    cupy.cuda.Device(1).synchronize()
    out = attention(q, k, v, causal=True, implementation=implementation)
    assert cupy.cuda.Device().id == 0
    assert out.device.id == 1
    assert_array_equal(cupy.asnumpy(out), cupy.asnumpy(expected))


@pytest.mark.parametrize("implementation", ["flash", "naive"])
def test_gradients_are_on_the_device_of_the_arrays(implementation):
    import cupy

    def gradients(ordinal: int) -> list[Any]:
        q, k, v, dout = on_device(ordinal)
        cupy.cuda.Device(ordinal).synchronize()
        results = attention(q, k, v, causal=True, return_lse=True)
        grads = attention_backward(
            dout, q, k, v, *results, causal=True, deterministic=True, implementation=implementation
        )
        return [grads.dq, grads.dk, grads.dv]

    expected = gradients(0)
    for gradient, wanted in zip(gradients(1), expected, strict=True):
        assert gradient.device.id == 1
        assert_array_equal(cupy.asnumpy(gradient), cupy.asnumpy(wanted))


@pytest.mark.parametrize("deterministic", [False, True])
def test_accumulators_are_zeroed_on_the_device_of_the_arrays(deterministic):
    """dq of the one-pass float32 kernel, a bias's gradient, and the gradient of an unused lse."""
    import cupy

    def gradients(ordinal: int) -> list[Any]:
        with cupy.cuda.Device(ordinal):
            q, k, v, dout = (cupy.asarray(a, np.float32) for a in on_device(ordinal))
            bias = cupy.zeros((PROBLEM.B, PROBLEM.H, PROBLEM.Sq, PROBLEM.Sk), np.float32)
        cupy.cuda.Device(ordinal).synchronize()
        options = {"bias": bias, "wrt": ("bias",), "return_lse": True}
        _, pullback = vjp(attention, q, k, v, **options)
        *grads, by_name = pullback((dout, None), deterministic=deterministic)
        return [*grads, by_name["bias"]]

    for gradient, wanted in zip(gradients(1), gradients(0), strict=True):
        assert gradient.device.id == 1
        np.testing.assert_allclose(
            cupy.asnumpy(gradient), cupy.asnumpy(wanted), rtol=1e-4, atol=1e-5
        )


def test_both_devices_and_several_streams_at_once():
    """Eight concurrent calls, on two streams of each device, have the results of single calls."""
    import cupy

    problems = [AttentionCase(B=2, Sq=500, Sk=700, H=4, G=2, D=64, Dv=64, dtype="float16",
                                 seed=seed) for seed in range(8)]  # fmt: skip
    arrays = [on_device(place % 2, problem) for place, problem in enumerate(problems)]
    for ordinal in range(2):
        cupy.cuda.Device(ordinal).synchronize()
    expected = []
    for q, k, v, dout in arrays:
        out, pullback = vjp(attention, q, k, v, causal=True)
        expected.append([out, *pullback(dout, deterministic=True)])
    for ordinal in range(2):
        cupy.cuda.Device(ordinal).synchronize()
    streams = []
    for place in range(4):
        with cupy.cuda.Device(place % 2):
            streams.append(cupy.cuda.Stream(non_blocking=True))
    results = []
    for place, (q, k, v, dout) in enumerate(arrays):
        with cupy.cuda.Device(place % 2), streams[place % 4]:
            out, pullback = vjp(attention, q, k, v, causal=True)
            results.append([out, *pullback(dout, deterministic=True)])
    for stream in streams:
        stream.synchronize()
    for actual, wanted in zip(results, expected, strict=True):
        for array, same in zip(actual, wanted, strict=True):
            assert_array_equal(cupy.asnumpy(array), cupy.asnumpy(same))
    assert len({np.asarray(cupy.asnumpy(out)).tobytes() for out, *_ in results}) == len(results)

"""What softmax passes to its kernels."""

from __future__ import annotations

import numpy as np
from support.recording_device import device_array

from cupyattn import softmax, softmax_backward


def test_what_softmax_passes_to_its_kernel(recorder):
    """Neighbouring axes that lie evenly are one; the last axis is the row."""
    x = device_array((3, 4, 5, 24), np.float32)
    softmax(x)
    strided = device_array((3, 4, 10, 24), np.float32)[:, ::-1, ::2]
    softmax_backward(strided, x)
    (forward, grid, (_, _, _, result, *_, params)), (backward, _, arguments) = recorder.started
    assert result.shape == x.shape
    assert dict(forward.macros)["VEC"] == 4
    assert grid == (-(-3 * 4 * 5 // (forward.threads // dict(forward.macros)["LANES"])), 1, 1)
    assert (params["rows"], params["length"]) == (60, 24)
    assert params["shape"].tolist() == [60, 1, 1, 1]
    assert params["strides"].tolist() == [[24, 0, 0, 0], [0] * 4, [0] * 4, [24, 0, 0, 0]]
    assert backward.spec.entry == "softmax_backward"
    assert arguments[0] is strided
    assert arguments[-1]["shape"].tolist() == [3, 4, 5, 1]
    assert arguments[-1]["strides"].tolist() == [
        [960, -240, 48, 0],
        [480, 120, 24, 0],
        [480, 120, 24, 0],
        [0, 0, 0, 0],
    ]

"""A kernel that is not loaded yet, in a call that a graph captures."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from cupyattn import (
    attention,
)


@pytest.mark.gpu
def test_a_first_call_within_a_capture_says_what_to_do(stream):
    """And the same call outside, and then in a capture again, works."""
    import cupy

    q = cupy.ones((1, 3, 1, 239), np.float32)  # head dims that nothing else here has
    v, out = cupy.ones((1, 3, 1, 197), np.float32), cupy.empty((1, 3, 1, 197), np.float32)
    cupy.cuda.Device().synchronize()

    def run() -> None:
        attention(q, q, v, out=out, implementation="naive")

    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"attention_naive.*; .*; call once first"):
                run()
        finally:
            stream.end_capture()
        run()
        stream.synchronize()
        expected = cupy.asnumpy(out)
        stream.begin_capture()
        try:
            run()
        finally:
            graph = stream.end_capture()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert_array_equal(cupy.asnumpy(out), expected)
    assert_allclose(expected, 1, rtol=1e-6)

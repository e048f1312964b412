"""What kernels write and what they leave as it is: results in views with gaps, and inputs."""

from __future__ import annotations

import numpy as np
import pytest

import cupyattn

pytestmark = pytest.mark.nvrtc


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32).astype(np.float16)


@pytest.mark.parametrize("implementation", ["tiled", "flash"])
def test_results_are_written_through_views(implementation):
    q, k, v = (normal(1, 20, 1, 16) for _ in range(3))
    expected = cupyattn.attention(q, k, v, causal=True)
    room = np.full((1, 20, 3, 40), 7, np.float16)
    lse_room = np.full((1, 3, 30), 7, np.float32)
    out, lse = room[:, ::-1, 1:2, 8:24], lse_room[:, 1:2, 5:25]
    with cupyattn.backend("emulator"):
        returned = cupyattn.attention(
            q, k, v, causal=True, implementation=implementation, return_lse=True, out=(out, lse)
        )
    assert returned[0] is out
    assert returned[1] is lse
    np.testing.assert_allclose(out, expected, atol=4e-3)
    out[...], lse[...] = 7, 7
    assert (room == 7).all(), "written outside the view"
    assert (lse_room == 7).all(), "written outside the view"


def test_inputs_are_untouched():
    packed = normal(2, 20, 3, 2, 16)
    q, k, v = (packed[:, :, i] for i in range(3))
    before = packed.copy()
    for array in (q, k, v):
        array.flags.writeable = False
    with cupyattn.backend("emulator"):
        cupyattn.attention(q, k, v)
        cupyattn.attention(q, k, v, implementation="tiled")
        cupyattn.softmax(q)
        cupyattn.softmax_backward(q, k)
    np.testing.assert_array_equal(packed, before)

"""Calls without batch elements, queries, keys, heads or columns."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import NUMPY, SENTINEL, everywhere
from support.strategies import AttentionProblem

from cupyattn import attention, attention_backward, softmax_backward
from cupyattn import softmax as softmax_forward


@everywhere
@pytest.mark.parametrize(
    "empty",
    [
        {"B": 0},
        {"Sq": 0},
        {"Sk": 0},
        {"Sq": 0, "Sk": 0},
        {"H": 0, "G": 0},
        {"H": 0},
        {"B": 0, "Sq": 0, "Sk": 0, "H": 0, "G": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_empty_attention(side, empty, dtype):
    """No keys give zeros and -inf; nothing else is there to be computed."""
    extents = {"B": 2, "Sq": 3, "Sk": 5, "H": 4, "G": 2, "D": 8, "Dv": 6, **empty}
    problem = AttentionProblem(**extents, dtype=dtype)
    arrays = [side.put(array) for array in problem.arrays()]
    out_shape = tuple(extents[letter] for letter in ("B", "Sq", "H", "Dv"))
    lse_shape = tuple(extents[letter] for letter in ("B", "H", "Sq"))
    into = (np.full(out_shape, SENTINEL, dtype), np.full(lse_shape, SENTINEL, np.float32))
    options = {"causal": True, "return_lse": True, "implementation": "tiled"}
    for given_out in (None, tuple(side.put(array) for array in into)):
        out, lse = attention(*arrays, **options, out=given_out)
        assert (out.shape, lse.shape) == (out_shape, lse_shape)
        assert (side.get(out) == 0).all()
        assert (side.get(lse) == -np.inf).all()
    if side is NUMPY:
        grads = attention_backward(out, *arrays, out, lse, causal=True)
        for gradient, array in zip(grads[:3], arrays, strict=True):
            assert_array_equal(gradient, np.zeros_like(array))


@pytest.mark.gpu
def test_empty_arrays_as_cupy_makes_them():
    """CuPy's own strides of empty arrays are zeros."""
    import cupy

    q, k = cupy.empty((3, 0, 2, 8), np.float32), cupy.ones((3, 4, 2, 8), np.float32)
    out, lse = cupy.empty((3, 0, 2, 8), np.float32), cupy.empty((3, 2, 0), np.float32)
    options = {"return_lse": True, "implementation": "tiled"}
    assert attention(q, k, k, out=(out, lse), **options)[0] is out
    out, lse = attention(k, q, q, **options)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert softmax_forward(q, out=cupy.empty_like(q)).shape == (3, 0, 2, 8)


def test_a_row_without_keys_has_its_sink_as_lse():
    q, k = np.ones((1, 2, 2, 4), np.float32), np.ones((1, 0, 2, 4), np.float32)
    sinks = np.array([0.5, -3.0], np.float32)
    out, lse = attention(q, k, k, sinks=sinks, return_lse=True)
    assert not out.any()
    assert_allclose(lse, np.broadcast_to(sinks[None, :, None], (1, 2, 2)), rtol=1e-6)


@everywhere
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 5), (0, 0)], ids=str)
def test_empty_softmax(side, shape):
    x, out = side.put(np.empty(shape, np.float32)), side.put(np.empty(shape, np.float32))
    assert softmax_forward(x).shape == shape
    assert softmax_forward(x, out=out) is out
    assert softmax_backward(x, out).shape == shape

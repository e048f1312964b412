"""What the public functions give: the reference rounded once, in the shapes and dtypes promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.testing import assert_array_equal
from support.devices import everywhere, unchanged
from support.dtypes import DTYPES, dtype_of
from support.strategies import AttentionProblem, attention_problems, softmax_problems

from cupyattn import attention, attention_backward, reference, softmax_backward
from cupyattn import softmax as softmax_forward


def round_to(exact: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if np.dtype(dtype).name != "bfloat16":
            return exact.astype(dtype)
        # ml_dtypes rounds to float32 first. Of its result and both neighbours, the nearest.
        result = exact.astype(dtype)
        for direction in (-np.inf, np.inf):
            neighbour = np.nextafter(result, np.array(direction, dtype))
            nearer = np.abs(neighbour.astype(float) - exact) < np.abs(result.astype(float) - exact)
            result = np.where(nearer, neighbour, result)
        return result


@given(attention_problems(dtypes=DTYPES, largest=40))
def test_numpy_results_are_the_references_rounded_once(problem: AttentionProblem):
    q, k, v = problem.arrays()
    options = problem.options()
    dout, dlse = problem.gradients()
    dtype = dtype_of(problem.dtype)
    exact_out, exact_lse = reference.attention(q, k, v, **options)
    with unchanged(dout, q, k, v, dlse, *options.values()):
        out, lse = attention(q, k, v, **options, return_lse=True)
        grads = attention_backward(dout, q, k, v, out, lse, **options, dlse=dlse)
    assert (out.dtype, lse.dtype) == (dtype, np.float32)
    assert_array_equal(out, round_to(exact_out, dtype))
    assert_array_equal(lse, round_to(exact_lse, np.float32))
    exact = reference.attention_backward(dout, q, k, v, out, lse, **options, dlse=dlse)
    given_arrays = {"dq": q, "dk": k, "dv": v, "dbias": options.get("bias")}
    given_arrays["dsinks"] = options.get("sinks")
    for name, array in given_arrays.items():
        gradient = getattr(grads, name)
        if array is None:
            assert gradient is None
        else:
            assert (gradient.shape, gradient.dtype) == (array.shape, array.dtype)
            assert_array_equal(gradient, round_to(getattr(exact, name), array.dtype))


@given(softmax_problems(dtypes=DTYPES))
def test_numpy_softmax_is_the_references_rounded_once(problem):
    x, dout = problem.x(), problem.dout()
    with unchanged(x, dout):
        out = softmax_forward(x)
        dx = softmax_backward(dout, out)
    assert (out.shape, out.dtype, dx.shape, dx.dtype) == (x.shape, x.dtype) * 2
    assert_array_equal(out, round_to(reference.softmax(x), x.dtype))
    assert_array_equal(dx, round_to(reference.softmax_backward(dout, out), x.dtype))


@everywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (1, 3)], ids=str)
def test_shapes_and_dtypes_of_results(side, dtype, return_lse, dims):
    problem = AttentionProblem(B=2, Sq=5, Sk=7, H=6, G=2, D=dims[0], Dv=dims[1], dtype=dtype)
    arrays = [side.put(array) for array in problem.arrays()]
    with unchanged(*arrays):
        results = attention(*arrays, return_lse=return_lse, implementation="tiled")
    out, lse = results if return_lse else (results, None)
    assert type(out) is type(arrays[0])
    assert (out.shape, out.dtype) == ((2, 5, 6, dims[1]), dtype_of(dtype))
    assert out.flags.c_contiguous
    if return_lse:
        assert isinstance(results, tuple)
        assert type(lse) is type(arrays[0])
        assert (lse.shape, lse.dtype) == ((2, 6, 5), np.float32)
    y = softmax_forward(arrays[0])
    dx = softmax_backward(arrays[0], y)
    for result in (y, dx):
        assert type(result) is type(arrays[0])
        assert (result.shape, result.dtype) == (arrays[0].shape, arrays[0].dtype)

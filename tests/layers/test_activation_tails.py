"""Activations far to the left: down to which size results keep their accuracy."""

from __future__ import annotations

from functools import partial
from math import erfc, exp, sqrt

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.devices import everywhere
from support.dtypes import dtype_of

import cupyattn
from cupyattn import reference

FUNCTIONS = {
    "gelu": cupyattn.gelu,
    "gelu_tanh": partial(cupyattn.gelu, approximate="tanh"),
    "silu": cupyattn.silu,
}


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_results_are_flushed_below_the_documented_size_alone(side, kind, dtype):
    """From 2**-118 on a result keeps its accuracy; nearer to 0 it is right, or 0."""
    x = np.linspace(-95, -5, 1801).astype(dtype_of(dtype))
    exact = reference.activation(x.astype(np.float64), kind)
    out = side.get(FUNCTIONS[kind](side.put(x))).astype(np.float64)
    right = np.abs(out - exact) <= (2.0**-10 if dtype == "float32" else 2.0**-7) * np.abs(exact)
    large = np.abs(exact) >= 2.0**-118
    assert large.any()
    assert not large.all()
    assert right[large].all()
    assert (right | (np.abs(out) <= np.abs(exact) * 1.001))[~large].all()
    assert out[0] == 0


def test_float64_results_are_not_flushed():
    x = np.array([-13.0, -20.0, -30.0])
    gelu = [each * erfc(-each / sqrt(2)) / 2 for each in x]
    slopes = [erfc(-e / sqrt(2)) / 2 + e * exp(-e * e / 2) / sqrt(2 * np.pi) for e in x]
    assert_allclose(cupyattn.gelu(x), gelu, rtol=1e-13)
    assert_allclose(cupyattn.gelu_backward(np.ones(3), x), slopes, rtol=1e-11)
    assert_allclose(cupyattn.geglu(x, x), gelu * x, rtol=1e-13)
    x = np.array([-88.0, -300.0, -700.0])
    silu = x * np.exp(x) / (1 + np.exp(x))
    assert_allclose(cupyattn.silu(x), silu, rtol=1e-13)
    assert_allclose(cupyattn.silu_backward(np.ones(3), x), np.exp(x) * (1 + x), rtol=1e-12)
    assert_allclose(cupyattn.swiglu(x, x), silu * x, rtol=1e-13)
    tanh_form = cupyattn.gelu(np.array([-12.0]), approximate="tanh")
    z = 2 * sqrt(2 / np.pi) * (12 + 0.044715 * 12**3)
    assert_allclose(tanh_form, -12 * exp(-z), rtol=1e-12)

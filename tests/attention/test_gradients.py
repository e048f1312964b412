"""Gradients of the NumPy backward are written, or added to what is there before one rounding."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.devices import unchanged
from support.strategies import BASE, EVERY_OPTION

from cupyattn import AttentionGrads, attention, attention_backward, reference
from cupyattn.testing import AttentionCase


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("given_names", [("dq", "dk", "dv", "dbias", "dsinks"), ("dk", "dsinks")])
def test_grads_are_written_or_added_to(accumulate, given_names):
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    options = {**EVERY_OPTION["bias"], **EVERY_OPTION["sinks"]}
    results = attention(*arrays, **options, return_lse=True)
    exact = reference.attention_backward(dout, *arrays, *results, **options)
    grads = AttentionGrads(
        *(
            np.full(gradient.shape, 0.5, np.float32) if name in given_names else None
            for name, gradient in exact._asdict().items()
        )
    )
    with unchanged(dout, *arrays, *results, *options.values()):
        returned = attention_backward(
            dout, *arrays, *results, **options, grads=grads, accumulate=accumulate
        )
    assert isinstance(returned, AttentionGrads)
    for name in AttentionGrads._fields:
        if name in given_names:
            assert getattr(returned, name) is getattr(grads, name)
        start = 0.5 if accumulate and name in given_names else 0.0
        assert_array_equal(getattr(returned, name), (getattr(exact, name) + start).astype("f4"))


def test_grads_of_half_are_added_before_rounding():
    """An addend below half a unit of what is there would vanish if it were rounded first."""
    problem = AttentionCase(B=1, Sq=3, Sk=1, H=1, G=1, D=2, Dv=2, dtype="float16")
    arrays = problem.arrays()
    results = attention(*arrays, return_lse=True)
    dout = np.full_like(results[0], 2.0**-12)
    grads = AttentionGrads(dv=np.ones((1, 1, 1, 2), np.float16))
    attention_backward(dout, *arrays, *results, grads=grads, accumulate=True)
    assert_array_equal(grads.dv, np.full((1, 1, 1, 2), np.float16(1 + 3 * 2.0**-12)))


def test_accumulating_infinities_is_nan_and_no_warning():
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    results = attention(*arrays, return_lse=True)
    dv = np.full_like(arrays[2], np.inf)
    grads = AttentionGrads(dv=dv)
    dout = np.full_like(dout, -np.inf)
    attention_backward(dout, *arrays, *results, grads=grads, accumulate=True)
    assert np.isnan(dv).all()

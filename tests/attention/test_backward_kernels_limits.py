"""The attention backward kernels at the limits: of float32's digits, and of what they count."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.backward_runs import run
from support.devices import KERNELS
from support.search import deep, examples
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention import values

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]


def without_digits() -> st.SearchStrategy[dict[str, Any]]:
    """Options of scores so large that a float32 lse cannot tell them apart."""
    sizes = st.floats(1e7, 2.0**127) | st.sampled_from([1e10, 2.0**60])
    rows = st.tuples(sizes, st.sampled_from([-1, 1])).map(np.prod)
    lowest = st.just(float(np.finfo(np.float32).min))
    bias = st.lists(rows | lowest | st.just(0.0), min_size=40, max_size=40)
    return st.fixed_dictionaries(
        {"bias": bias.map(lambda x: np.repeat(np.array(x, np.float32)[:, None], 70, axis=1))},
        optional={"sinks": st.just(np.array([1e10, -1e10], np.float32))},
    ) | st.fixed_dictionaries(
        {
            "alibi_slopes": st.just(np.array([0.5, 2], np.float32)),
            "q_offset": st.sampled_from([-(2**60), -(2**40), 2**60]),
        }
    )


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    [("float16", False), ("float32", False), *deep(("float16", True), ("float32", True))],
)
@examples(4)
@given(options=without_digits())
def test_no_weight_exceeds_one_where_lse_has_no_digits(
    dtype: str, deterministic: bool, options: dict[str, Any]
):
    problem = AttentionProblem(B=1, Sq=40, Sk=70, H=2, G=2, D=24, Dv=40, dtype=dtype)
    out, lse = reference.attention(*problem.arrays(), **options)
    results = out.astype(dtype), lse.astype(np.float32)
    dout, _ = problem.gradients()
    arrays = (dout, *problem.arrays(), *results)
    # On a GPU, where nobody reads values, slopes that are refused here reach the kernels.
    with mock.patch.object(values, "MAX_ALIBI", math.inf):
        grads = run(arrays, options, "flash", deterministic=deterministic)
    for name, gradient in grads.items():
        assert np.isfinite(gradient).all(), name
    assert (np.abs(grads["dv"]) <= 1.01 * np.abs(dout.astype(np.float64)).sum(1)[:, None]).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_scores_up_to_the_largest_float16_and_beyond(deterministic: bool):
    """Two keys of weight 1/2: ds = +-32 dout, and dq a 2048th of it."""
    q, ones = np.zeros((1, 1, 1, 64), np.float16), np.ones((1, 1, 1, 64), np.float16)
    k, v = np.concatenate([ones * 2.0**-8, q], 1), np.concatenate([ones, -ones], 1)
    k, v = k.astype(np.float16), v.astype(np.float16)
    lse = np.full((1, 1, 1), np.log(2), np.float32)
    for dout in (2046, -2046, 2100, 65504):
        arrays = ((dout * ones).astype(np.float16), q, k, v, q, lse)
        dq = run(arrays, {}, "flash", deterministic=deterministic)["dq"]
        np.testing.assert_allclose(dq, 32 * dout / 2048, rtol=2e-3)


def test_more_rows_than_the_scratch_counts_raise_before_anything_is_allocated():
    """2^16 sequences of 2^10 heads of 64 rows, all of one row in memory."""
    one = KERNELS.put(np.zeros((1, 1, 1, 1), np.float16))
    rows, keys = (KERNELS.xp.broadcast_to(one, (2**16, n, h, 1)) for n, h in ((64, 2**10), (1, 1)))
    lse = KERNELS.put(np.zeros((1, 1, 64), np.float32))
    lse = KERNELS.xp.broadcast_to(lse, (2**16, 2**10, 64))
    with pytest.raises(ValueError, match="up to 4294967295 rows together"):
        cupyattn.attention_backward(rows, rows, keys, keys, rows, lse)

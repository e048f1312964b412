"""Sums in float32 of arrays in any dtype."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS
from support.dtypes import DTYPES, dtype_of
from support.search import examples, wider

import cupyattn
from cupyattn import reference


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(7)
@given(
    dtype=st.sampled_from(wider(("float16",), DTYPES)),
    rows=st.integers(1, 3),
    length=st.sampled_from((1, 4, 7, 33, 256, 1021)),
    sliced=st.booleans(),
)
def test_within_the_bound(dtype, rows, length, sliced):
    rng = np.random.default_rng(length)
    x = rng.standard_normal((2, rows, length)).astype(dtype_of(dtype))
    total = 100 * rng.standard_normal((2, rows, length + 3 * sliced)).astype(np.float32)
    on_device = KERNELS.put(total)
    cupyattn.add_to(on_device[..., 3 * sliced :], KERNELS.put(x))
    found, before = KERNELS.get(on_device), total.copy()
    part, exact = found[..., 3 * sliced :], reference.add_to(before[..., 3 * sliced :], x)
    bound = reference.add_to_bound(before[..., 3 * sliced :], x)
    assert reference.error_ratio(part, exact, bound) <= 1
    np.testing.assert_array_equal(found[..., : 3 * sliced], before[..., : 3 * sliced])


def test_what_16_bits_would_lose_is_kept():
    total = np.full(1, 4096, np.float32)
    cupyattn.add_to(total, np.ones(1, np.float16))
    assert total[0] == 4097


def test_a_sum_may_be_added_to_itself():
    total = np.arange(5, dtype=np.float32)
    cupyattn.add_to(total, total)
    np.testing.assert_array_equal(total, 2 * np.arange(5))


@pytest.mark.parametrize(
    ("total", "x", "kind", "says"),
    [
        (np.zeros(4, np.float16), np.zeros(4, np.float16), TypeError, "total has dtype float16"),
        (np.zeros(4, np.float32), np.zeros(3, np.float16), ValueError, "x has shape"),
        (np.zeros(4, np.float32), np.zeros(4, np.int8), TypeError, "x has dtype int8"),
    ],
)
def test_refusals(total, x, kind, says):
    with pytest.raises(kind, match=says):
        cupyattn.add_to(total, x)

"""Expressions that are NaN where no query sees: what is hidden stays hidden in the gradients."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.devices import KERNELS
from support.search import deep

import cupyattn
from cupyattn import ScoreMod, attention, attention_backward

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

DISTANCES = ScoreMod(
    "score - logf(1 + q_idx - k_idx)",
    gradient="grad",
    python=(
        lambda score, b, h, q_idx, k_idx: score - np.log(np.maximum(1 + q_idx - k_idx, 1)),
        lambda score, grad, b, h, q_idx, k_idx: grad,
    ),
)


@pytest.mark.parametrize("deterministic", [False, *deep(True)])
@pytest.mark.parametrize(
    ("head_dim", "sq"), [(8, 20), *deep((8, 150), (64, 20), (64, 129), (136, 20))]
)
def test_an_expression_may_be_nan_where_no_query_sees(head_dim, sq, deterministic):
    """Rows beyond Sq are told of the last query, which sees no key that only they would see."""
    rng = np.random.default_rng(2)
    q, dout = rng.standard_normal((2, 1, sq, 2, head_dim)).astype("float16")
    k, v = rng.standard_normal((2, 1, sq + 20, 1, head_dim)).astype("float16")
    bias = rng.standard_normal((sq + 20,)).astype("float16")
    options = {"causal": True, "q_offset": 0, "score_mod": DISTANCES}
    with cupyattn.backend("reference"):
        out, lse = attention(q, k, v, bias=bias, return_lse=True, **options)
        expected = attention_backward(dout, q, k, v, out, lse, bias=bias, **options)
    given = [KERNELS.put(x) for x in (dout, q, k, v, out, lse)]
    found = attention_backward(
        *given, bias=KERNELS.put(bias), deterministic=deterministic, **options
    )
    for name in ("dq", "dk", "dv", "dbias"):
        mine, right = KERNELS.get(getattr(found, name)), getattr(expected, name)
        assert_allclose(mine.astype(float), right.astype(float), rtol=2e-2, atol=2e-2, err_msg=name)


def test_nor_where_no_query_of_a_packed_sequence_sees():
    rng, bounds, lengths = np.random.default_rng(3), np.int32([0, 20, 53]), np.int32([0, 40, 73])
    q, dout = rng.standard_normal((2, 53, 2, 8)).astype("float16")
    k, v = rng.standard_normal((2, 73, 1, 8)).astype("float16")
    options = {"causal": True, "q_offset": 0, "score_mod": DISTANCES}
    packed = (bounds, lengths, 33, 40)
    with cupyattn.backend("reference"):
        out, lse = cupyattn.attention_varlen(q, k, v, *packed, return_lse=True, **options)
        expected = cupyattn.attention_varlen_backward(dout, q, k, v, out, lse, *packed, **options)
    given = (*map(KERNELS.put, (dout, q, k, v, out, lse, bounds, lengths)), *packed[2:])
    found = cupyattn.attention_varlen_backward(*given, **options)
    for name in ("dq", "dk", "dv"):
        mine, right = KERNELS.get(getattr(found, name)), getattr(expected, name)
        assert_allclose(mine.astype(float), right.astype(float), rtol=2e-2, atol=2e-2, err_msg=name)

"""Norms of a float32 residual stream, to which they add 16-bit rows, normalised or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, dtype_of
from support.search import deep, examples, wider

import cupyattn
from cupyattn import reference
from cupyattn.testing import NormCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

ALL = ("weight", "bias", "residual")


def _put(array: np.ndarray | None) -> Any:
    return None if array is None else KERNELS.put(array)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(
    ("length", "dtype"),
    [(40, "bfloat16"), (3000, "float16"), *deep((41, "float16"), (1000, "float16"),
     (8200, "float16"), (17_000, "bfloat16"))],
)  # fmt: skip
def test_float32_stream_with_values_beyond_float16_is_within_bounds(length, dtype, centred):
    """x_scale times x is added to a stream that float16 does not hold; so is its gradient."""
    problem = NormCase((5, 1, length), dtype, centred, ALL)
    x, weight, bias, dout = map(problem.array, ("x", "weight", "bias", "dout"))
    stream = 100 * problem.array("residual").astype(np.float32)
    stream[..., 3] = 1e6
    norm = cupyattn.layer_norm if centred else cupyattn.rms_norm
    columns = (weight, bias) if centred else (weight,)
    scale = 2.0 ** (np.arange(length) % 5).astype(np.float32)
    options = {"residual": _put(stream), "x_scale": _put(scale), "eps": 1e-5, "return_stats": True}
    out, total, *stats = norm(_put(x), *map(_put, columns), **options)
    alone = norm(total, *map(_put, columns), eps=1e-5)
    assert_array_equal(KERNELS.get(alone), KERNELS.get(out))
    out, total, *stats = map(KERNELS.get, (out, total, *stats))
    assert out.dtype == x.dtype and np.isfinite(out.astype(np.float32)).all()
    assert_array_equal(total, (stream + scale * x.astype(np.float64)).astype(np.float32))
    of_norm = {"centred": centred, "eps": 1e-5}
    arrays = weight, bias if centred else None
    exact = reference.norm(total, None, *arrays, **of_norm)
    error, *_ = reference.norm_bound(total, *arrays, dtype=dtype, **of_norm)
    assert reference.error_ratio(out, exact[0], error) <= 1

    dtotal = 1e5 * problem.array("dtotal").astype(np.float32)
    given_arrays = [dout, total, weight, *stats]
    backward = cupyattn.layer_norm_backward if centred else cupyattn.rms_norm_backward
    options = {"bias": _put(bias)} if centred else {}
    found = backward(*map(_put, given_arrays), dtotal=_put(dtotal), **options)
    mean, rstd = stats if centred else (None, stats[0])
    arrays = dout, total, dtotal, weight, arrays[1], mean, rstd
    exact = reference.norm_backward(*arrays)
    bounds = reference.norm_backward_bound(*arrays, dtype=dtype)
    stored = reference.norm_backward_bound(*arrays, dtype="float32")
    assert found.dx.dtype == np.float32
    for gradient, right, bound in zip(found, exact, (stored[0], *bounds[1:]), strict=False):
        assert reference.error_ratio(KERNELS.get(gradient), right, bound) <= 1


@examples(6, deep=60)
@given(
    length=st.sampled_from(wider((40, 1152), (5, 7, 128, 1000, 3000, 5000, 9000))),
    rows=st.sampled_from((1, 3, 9)),
    dtype=st.sampled_from(wider(("float16",), ("bfloat16",))),
    scaled=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_x_is_normalised_before_it_is_added_to_a_float32_stream(length, rows, dtype, scaled, seed):
    check_inner_norm(length, rows, dtype, scaled, seed)


@pytest.mark.parametrize("length", deep(17_000, 16_389))
def test_long_rows_are_normalised_before_they_are_added(length):
    check_inner_norm(length, 2, "float16", True, 3)


def check_inner_norm(length: int, rows: int, dtype: str, scaled: bool, seed: int) -> None:
    """Compare the sum with that of two norms in float64, and out with the norm of the sum."""
    rng, kind = np.random.default_rng(seed), dtype_of(dtype)
    x, weight, inner = (
        rng.standard_normal(shape).astype(kind) for shape in ((rows, length), length, length)
    )
    x[0] *= kind.type(100)
    x[-1] = 0 if rows > 1 else x[-1]
    stream = (1e5 * rng.standard_normal((rows, length))).astype(np.float32)
    stream[:, ::2] = 0
    scale = 2.0 ** (np.arange(length) % 5).astype(np.float32) if scaled else None
    of_inner = {"eps": 0.01, "weight_offset": 1.0}
    options = {"eps": 1e-5, "weight_offset": 0.5}
    out, total, rstd = cupyattn.rms_norm(
        _put(x), _put(weight), residual=_put(stream), x_scale=_put(scale),
        x_norm=cupyattn.RMSNorm(_put(inner), **of_inner), return_stats=True, **options,
    )  # fmt: skip
    out, total, rstd = map(KERNELS.get, (out, total, rstd))
    normed = reference.norm(x, None, inner, centred=False, **of_inner)[0]
    exact = stream + (normed if scale is None else scale * normed)
    bound = reference.normed_sum_bound(stream, x, scale, weight=inner, **of_inner)
    assert reference.error_ratio(total, exact, bound) <= 1
    assert reference.error_ratio(total, stream.astype(float), bound) > 1 or not x[:-1].any()
    expected = reference.norm(total, None, weight, centred=False, **options)
    bounds = reference.norm_bound(total, weight, dtype=dtype, centred=False, **options)
    assert reference.error_ratio(out, expected[0], bounds[0]) <= 1
    assert reference.error_ratio(rstd, expected[3], bounds[2]) <= 1


def test_a_norm_of_x_is_not_rounded_before_the_sum():
    """Nothing is lost of a term that float16 would round."""
    x = np.arange(1, 41, dtype=np.float16)[None]
    weight, stream = np.ones(40, np.float16), np.zeros((1, 40), np.float32)
    norm = cupyattn.RMSNorm(_put(weight))
    _, total = cupyattn.rms_norm(_put(x), _put(weight), residual=_put(stream), x_norm=norm)
    exact = reference.norm(x, None, weight, centred=False, eps=1e-6)[0]
    np.testing.assert_allclose(KERNELS.get(total), exact, rtol=1e-6)
    assert np.abs(exact.astype(np.float16) / exact - 1).max() > 1e-5


def test_codes_of_a_stream_whose_term_is_normalised():
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((3, 64)).astype(np.float16), np.ones(64, np.float16)
    given_arrays = {"residual": x.astype(np.float32), "x_norm": cupyattn.RMSNorm(weight)}
    codes, total = cupyattn.rms_norm(x, weight, **given_arrays, quantize="int8")
    out, expected = cupyattn.rms_norm(x, weight, **given_arrays)
    assert_array_equal(total, expected)
    assert_array_equal(codes.codes, cupyattn.quantize_rows(out).codes)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"residual": None}, ValueError, "x_norm without a float32 residual"),
        ({"residual": np.ones((2, 4), np.float16)}, ValueError, "x_norm without a float32"),
        ({"x_norm": np.ones(4, np.float16)}, TypeError, "x_norm has type ndarray; it must be"),
        ({"x_norm": cupyattn.RMSNorm(np.ones(4, np.float32))}, TypeError, "x_norm's weight has"),
        ({"x_norm": cupyattn.RMSNorm(np.ones(3, np.float16))}, ValueError, "x_norm's weight has"),
        ({"x_norm": cupyattn.RMSNorm(np.ones(4, np.float16), -1)}, ValueError, "x_norm's eps = -1"),
    ],
)
def test_norms_of_x_that_do_not_fit_are_refused(changed, kind, message):
    x, w = np.ones((2, 4), np.float16), np.ones(4, np.float16)
    options = {"residual": x.astype(np.float32), "x_norm": cupyattn.RMSNorm(w)}
    with pytest.raises(kind, match=message):
        cupyattn.rms_norm(x, w, **options | changed)


def test_float32_stream_of_an_unpickled_dtype_equals_any_other():
    """NumPy's unpickled dtypes are equal to `np.dtype("float32")`, but are other objects."""
    x, w = np.ones((2, 32), np.float32), np.ones(32, np.float16)
    unpickled = x.astype(np.dtype(np.float32, copy=True))
    assert unpickled.dtype is not x.dtype
    assert_array_equal(cupyattn.rms_norm(unpickled, w), cupyattn.rms_norm(x, w))


def test_stream_options_that_do_not_fit_are_refused():
    x, w = np.ones((2, 4), np.float16), np.ones(4, np.float16)
    stream = x.astype(np.float32)
    with pytest.raises(ValueError, match="x_scale without a float32 residual"):
        cupyattn.rms_norm(x, w, residual=x, x_scale=np.ones(4, np.float32))
    for scale, kind in ((w, TypeError), (np.ones(3, np.float32), ValueError)):
        with pytest.raises(kind, match="x_scale has"):
            cupyattn.rms_norm(x, w, residual=stream, x_scale=scale)
    with pytest.raises(TypeError, match="x"):
        cupyattn.rms_norm(stream, w, residual=stream)
    with pytest.raises(ValueError, match=r"residual has shape \(2, 5\)|x has shape"):
        cupyattn.rms_norm(x, w, residual=np.ones((2, 5), np.float32))
    with pytest.raises(NotImplementedError, match="vjp of a norm"):
        cupyattn.vjp(lambda each: cupyattn.rms_norm(each, w, residual=stream)[0], x)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_quantised_float32_stream(centred, added):
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((5, 128), dtype=np.float32)
    x = rng.standard_normal((5, 128)).astype(np.float16) if added else rows
    arrays = [_put(x), _put(np.ones(128, np.float16))]
    options = {"residual": _put(rows)} if added else {}
    function = cupyattn.layer_norm if centred else cupyattn.rms_norm
    with KERNELS.running():
        want = function(*arrays, **options, return_stats=True)
        found = function(*arrays, **options, return_stats=True, quantize="int8", rotation=64)
        codes = cupyattn.quantize_rows(want[0], rotation=64)
    assert_array_equal(KERNELS.get(found[0].codes), KERNELS.get(codes.codes))
    assert_array_equal(KERNELS.get(found[0].scales), KERNELS.get(codes.scales))
    for result, other in zip(found[1:], want[1:], strict=True):
        assert_array_equal(KERNELS.get(result), KERNELS.get(other))

"""Activations and gated activations: results, tails, views, gradients and refusals."""

from __future__ import annotations

import itertools
from functools import partial
from math import erf, erfc, exp, sqrt, tanh
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import DTYPES, KERNELS, dtype_of, everywhere, kernels_only
from support.search import examples, mostly_deep, wider

import cupyattn
from cupyattn import GatedGrads, reference


class Activation(NamedTuple):
    """A public function, its backward, and its options."""

    name: str
    options: dict[str, Any]

    def __call__(self, *arrays: Any, **more: Any) -> Any:
        return getattr(cupyattn, self.name)(*arrays, **self.options, **more)

    def backward(self, *arrays: Any, **more: Any) -> Any:
        return getattr(cupyattn, f"{self.name}_backward")(*arrays, **self.options, **more)


PLAIN = {
    "gelu": Activation("gelu", {}),
    "gelu_tanh": Activation("gelu", {"approximate": "tanh"}),
    "silu": Activation("silu", {}),
}
GATED = {
    "gelu": Activation("geglu", {}),
    "gelu_tanh": Activation("geglu", {"approximate": "tanh"}),
    "silu": Activation("swiglu", {}),
}
KINDS = tuple(PLAIN)
EDGES = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, -65504.0, 3e38, -3e38, 1e19, -1e19, 1e-38]

# Each pair is some kernels to compile.
CASES = wider(
    (("gelu_tanh", "float32"), ("silu", "float16")),
    [(kind, dtype) for kind in KINDS for dtype in DTYPES],
)
# About vectors of 4 and 8 items and units of 8 lanes, and beyond 512 loads.
LENGTHS = wider((1, 3, 7, 8, 9, 31, 127, 128, 129, 300, 1021), (4096, 4104, 9001))


def values(seed: int, count: int, *shape: int, dtype: str, spread: float = 3.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(shape) * spread).astype(dtype_of(dtype)) for _ in range(count)]


def ratio(found: Any, exact: Any, bound: Any) -> float:
    return reference.error_ratio(KERNELS.get(found), exact, bound)


# Tests on NumPy come first: `kernels_run` stays active from its first use to the module's end.
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


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(4)
@given(
    case=st.sampled_from(CASES),
    rows=st.integers(1, 3),
    length=st.sampled_from(LENGTHS),
    spread=st.sampled_from((0.1, 3.0, 30.0)),
    seed=st.integers(0, 99),
)
def test_plain_within_bounds(case, rows, length, spread, seed):
    kind, dtype = case
    x, dout = values(seed, 2, rows, length, dtype=dtype, spread=spread)
    out = PLAIN[kind](KERNELS.put(x))
    bound = reference.activation_bound(x, kind, dtype=dtype)
    assert ratio(out, reference.activation(x, kind), bound) <= 1
    dx = PLAIN[kind].backward(KERNELS.put(dout), KERNELS.put(x))
    bound = reference.activation_backward_bound(dout, x, kind, dtype=dtype)
    assert ratio(dx, reference.activation_backward(dout, x, kind), bound) <= 1


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(4)
@given(
    case=st.sampled_from(CASES),
    rows=st.integers(1, 3),
    length=st.sampled_from(LENGTHS),
    packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_gated_within_bounds(case, rows, length, packed, seed):
    kind, dtype = case
    gate, up, dout = values(seed, 3, rows, length, dtype=dtype)
    given_arrays = (np.concatenate([gate, up], axis=-1),) if packed else (gate, up)
    placed = [KERNELS.put(array) for array in given_arrays]
    bound = reference.gated_bound(gate, up, kind, dtype=dtype)
    assert ratio(GATED[kind](*placed), reference.gated(gate, up, kind), bound) <= 1
    dgate, dup = GATED[kind].backward(KERNELS.put(dout), *placed)
    if packed:
        assert dup is None
        dgate, dup = dgate[:, :length], dgate[:, length:]
    exact = reference.gated_backward(dout, gate, up, kind)
    bounds = reference.gated_backward_bound(dout, gate, up, kind, dtype=dtype)
    for found, right, allowed in zip((dgate, dup), exact, bounds, strict=True):
        assert ratio(found, right, allowed) <= 1


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("kind", KINDS)
def test_every_float16(kind):
    """All 63,488 finite numbers, the infinities and NaN: no intermediate is inf * 0."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = x[~np.isnan(x) | (x.view(np.uint16) == 0x7E00)]
    out = PLAIN[kind](KERNELS.put(x))
    bound = reference.activation_bound(x, kind, dtype="float16")
    assert ratio(out, reference.activation(x, kind), bound) <= 1
    dx = PLAIN[kind].backward(KERNELS.put(np.ones_like(x)), KERNELS.put(x))
    bound = reference.activation_backward_bound(np.ones_like(x), x, kind, dtype="float16")
    assert ratio(dx, reference.activation_backward(1.0, x, kind), bound) <= 1


@everywhere
@pytest.mark.parametrize("kind", KINDS)
def test_limits(side, kind):
    x = np.array(EDGES, np.float32)
    out = side.get(PLAIN[kind](side.put(x)))
    expected = np.array([0, 0, np.inf, 0, np.nan, 65504, 0, 3e38, 0, 1e19, 0, 0], np.float32)
    assert_allclose(out, expected, atol=1e-38)
    assert np.signbit(out[[1, 3, 6, 8]]).all()
    dx = side.get(PLAIN[kind].backward(side.put(np.ones_like(x)), side.put(x)))
    assert_allclose(dx, [0.5, 0.5, 1, 0, np.nan, 1, 0, 1, 0, 1, 0, 0.5], atol=1e-18)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("kind", KINDS)
def test_infinity_times_a_vanishing_activation_is_nan_as_in_numpy(kind):
    """For example silu(-88): 0 times infinity is NaN, in kernels and in NumPy."""
    x = np.concatenate([np.linspace(-200, 30, 461), EDGES]).astype(np.float32)
    infinite = np.full_like(x, -np.inf)

    def found(put):
        gate, up = put(x), put(infinite)
        of_gated = GATED[kind].backward(up, gate, put(np.ones_like(x)))
        return GATED[kind](gate, up), PLAIN[kind].backward(up, gate), *of_gated

    with cupyattn.backend("reference"):
        expected = found(np.asarray)
    for result, right in zip(map(KERNELS.get, found(KERNELS.put)), expected, strict=True):
        assert_array_equal(result, right)
        assert np.isnan(right[x == -88]).all()


@everywhere
@pytest.mark.parametrize("packed", [False, True])
def test_gated_gradients_accumulate_and_overwrite_their_inputs(side, packed):
    gate, up, dout = (side.put(x) for x in values(0, 3, 2, 33, dtype="float32"))
    if packed:
        gate, up = side.put(values(1, 1, 2, 66, dtype="float32")[0]), None
    once = cupyattn.swiglu_backward(dout, gate, up)
    start = values(2, 2, 2, 66, dtype="float32")
    shapes = [(g, s) for g, s in zip(once, start, strict=True) if g is not None]
    there = [side.put(np.ascontiguousarray(s[:, : g.shape[1]])) for g, s in shapes]
    before = [side.get(array).copy() for array in there]
    grads = GatedGrads(*there)
    added = cupyattn.swiglu_backward(dout, gate, up, grads=grads, accumulate=True)
    for total, first, add, array in zip(added, before, once, there, strict=False):
        assert total is array
        assert_allclose(side.get(total), first + side.get(add), rtol=1e-6, atol=1e-6)
    once = [gradient if gradient is None else side.get(gradient).copy() for gradient in once]
    into = GatedGrads(gate, up)
    over = cupyattn.swiglu_backward(dout, gate, up, grads=into)
    assert over.dgate is gate and over.dup is up
    for found, right in zip(over, once, strict=True):
        if right is not None:
            assert_array_equal(side.get(found), right)


@everywhere
def test_plain_gradient_accumulates(side):
    x, dout, start = (side.put(x) for x in values(4, 3, 2, 33, dtype="float32"))
    once, before = side.get(cupyattn.silu_backward(dout, x)).copy(), side.get(start).copy()
    added = cupyattn.silu_backward(dout, x, grads=start, accumulate=True)
    assert added is start
    assert_allclose(side.get(added), once + before, rtol=1e-6, atol=1e-6)


def padded(side, array, pad):
    """Put the array in rows that are `pad` items longer."""
    wide = np.zeros((*array.shape[:-1], array.shape[-1] + pad), array.dtype)
    wide[..., : array.shape[-1]] = array
    return side.put(wide)[..., : array.shape[-1]]


@everywhere
def test_arrays_of_different_strides_give_the_same_results(side):
    arrays = values(5, 4, 3, 40, dtype="float32")
    x, dout, up = (side.put(array) for array in arrays[:3])
    names = "x", "dout", "up"
    wide = {name: padded(side, arrays[i], 8 * i + 8) for i, name in enumerate(names)}
    out, dx, gated, *grads = (padded(side, arrays[3], pad) for pad in range(32, 72, 8))
    for found, right in (
        (cupyattn.silu(wide["x"], out=out), cupyattn.silu(x)),
        (
            cupyattn.silu_backward(wide["dout"], wide["x"], grads=dx),
            cupyattn.silu_backward(dout, x),
        ),
        (cupyattn.swiglu(wide["x"], wide["up"], out=gated), cupyattn.swiglu(x, up)),
    ):
        assert_array_equal(side.get(found), side.get(right))
    cupyattn.swiglu_backward(wide["dout"], wide["x"], wide["up"], grads=GatedGrads(*grads))
    for found, right in zip(grads, cupyattn.swiglu_backward(dout, x, up), strict=True):
        assert_array_equal(side.get(found), side.get(right))


@everywhere
def test_out_that_is_x_gives_the_same_result(side):
    (x,) = values(3, 1, 3, 40, dtype="float16")
    expected = side.get(cupyattn.silu(side.put(x.copy())))
    placed = side.put(x)
    assert cupyattn.silu(placed, out=placed) is placed
    assert_array_equal(side.get(placed), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_gradients_match_finite_differences(kind):
    gate, up, dout, a, b = np.random.default_rng(5).standard_normal((5, 200)) * 2
    h = 1e-5

    def loss(step: float) -> float:
        return float((dout * reference.gated(gate + step * a, up + step * b, kind)).sum())

    dgate, dup = reference.gated_backward(dout, gate, up, kind)
    assert_allclose((dgate * a + dup * b).sum(), (loss(h) - loss(-h)) / (2 * h), rtol=1e-7)
    dx = reference.activation_backward(dout, gate, kind)
    assert_allclose(dx * up, dgate)


def test_reference_matches_scalar_formulas():
    for x in (-30.0, -5.0, -0.3, 0.0, 0.7, 12.0):
        assert_allclose(reference.activation(x, "gelu"), x * (1 + erf(x / sqrt(2))) / 2, atol=1e-14)
        u = sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        assert_allclose(reference.activation(x, "gelu_tanh"), x * (1 + tanh(u)) / 2, atol=1e-14)
        assert_allclose(reference.activation(x, "silu"), x / (1 + exp(-x)))
        assert reference.activation(x, "relu") == max(x, 0)


@everywhere
@pytest.mark.parametrize("kind", mostly_deep(KINDS, ["gelu_tanh"]))
def test_vjp(side, kind):
    gate, up, dout = (side.put(x) for x in values(7, 3, 2, 24, dtype="float32"))
    out, pullback = cupyattn.vjp(PLAIN[kind], gate)
    assert_array_equal(side.get(out), side.get(PLAIN[kind](gate)))
    assert_array_equal(side.get(pullback(dout)[0]), side.get(PLAIN[kind].backward(dout, gate)))
    _, pullback = cupyattn.vjp(lambda u: GATED[kind](gate, u), up)
    right = GATED[kind].backward(dout, gate, up)
    assert_array_equal(side.get(pullback(dout)[0]), side.get(right.dup))


@pytest.mark.deep
def test_results_match_torch():
    torch = pytest.importorskip("torch")
    x, up = values(9, 2, 4, 33, dtype="float32")
    given_x, given_up = (torch.tensor(array, requires_grad=True) for array in (x, up))
    functions = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }
    for kind, function in functions.items():
        out = function(given_x)
        (dx,) = torch.autograd.grad(out.sum(), given_x)
        assert_allclose(PLAIN[kind](x), out.detach().numpy(), atol=1e-6)
        assert_allclose(PLAIN[kind].backward(np.ones_like(x), x), dx.numpy(), atol=1e-6)
        gated = function(given_x) * given_up
        expected = torch.autograd.grad(gated.sum(), (given_x, given_up))
        assert_allclose(GATED[kind](x, up), gated.detach().numpy(), atol=1e-5)
        for mine, theirs in zip(
            GATED[kind].backward(np.ones_like(x), x, up), expected, strict=True
        ):
            assert_allclose(mine, theirs.numpy(), atol=1e-5)


X = np.zeros((3, 8), np.float32)


@everywhere
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x: cupyattn.gelu(x, approximate="erf"), ValueError, "approximate = 'erf'; allowed"),
        (lambda x: cupyattn.gelu(x, approximate=1), TypeError, "approximate = 1; allowed"),
        (lambda x: cupyattn.gelu(None), TypeError, "x is None; it is not optional"),
        (lambda x: cupyattn.silu(x[:, ::2]), ValueError, "x has strides .*contiguous"),
        (lambda x: cupyattn.silu(x, out=x[:2]), ValueError, r"out is float32 \(2, 8\)"),
        (lambda x: cupyattn.silu(x[1:], out=x[:-1]), ValueError, "out overlaps x in memory"),
        (lambda x: cupyattn.silu(x, out=x[:, ::-1]), ValueError, "out has strides"),
        (lambda x: cupyattn.swiglu(x[:, :7]), ValueError, r"gate has shape \(3, 7\); packed it is"),
        (lambda x: cupyattn.swiglu(x, x[:2]), ValueError, "up has shape .*shaped like gate"),
        (lambda x: cupyattn.swiglu(x, out=x[:, :4]), ValueError, "out overlaps gate"),
        (lambda x: cupyattn.silu_backward(x, x, accumulate=True), ValueError, "True without grads"),
        (lambda x: cupyattn.silu_backward(x, x, accumulate=1), TypeError, "accumulate = 1"),
        (lambda x: cupyattn.swiglu_backward(x, x, x, grads=(x, x)), TypeError, "grads has type"),
        (
            lambda x: cupyattn.swiglu_backward(x[:, :4], x, grads=GatedGrads(None, x)),
            ValueError, "grads.dup was given for packed",
        ),
        (
            lambda x: cupyattn.geglu_backward(x, x, x, grads=GatedGrads(x, x)),
            ValueError, r"grads\.dgate overlaps grads\.dup in memory; both are written",
        ),
    ],
)  # fmt: skip
def test_bad_input(side, call, kind, message):
    with pytest.raises(kind, match=message):
        call(side.put(X.copy()))


@kernels_only
@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_dtypes_without_a_kernel_are_refused(side, dtype):
    with pytest.raises(TypeError, match="x has dtype"):
        cupyattn.gelu(side.put(X.astype(dtype)))


@everywhere
def test_empty_arrays_and_scalars(side):
    for shape in ((0,), (3, 0), (0, 5), ()):
        x = side.put(np.zeros(shape, np.float32))
        assert cupyattn.gelu(x).shape == shape
        assert cupyattn.silu_backward(x, x).shape == shape
    x = side.put(np.zeros((0, 4), np.float32))
    assert cupyattn.swiglu(x).shape == (0, 2)
    assert cupyattn.swiglu_backward(cupyattn.swiglu(x), x).dgate.shape == (0, 4)


FUNCTIONS = {
    "gelu": cupyattn.gelu,
    "gelu_tanh": partial(cupyattn.gelu, approximate="tanh"),
    "silu": cupyattn.silu,
}


@everywhere
@pytest.mark.parametrize(
    ("kind", "dtype"),
    mostly_deep(
        itertools.product(FUNCTIONS, ("float32", "bfloat16")),
        [("gelu", "float32"), ("gelu_tanh", "float32"), ("silu", "bfloat16")],
    ),
)
def test_results_are_flushed_only_below_the_documented_size(side, kind, dtype):
    """Results of at least 2**-118 keep their accuracy; smaller ones are accurate or 0."""
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

"""What the public functions promise of arrays: views, out=, options, emptiness, streams, capture.

Each promise is tried on NumPy arrays, through the reference and through the emulated kernels, and
on a GPU on CuPy arrays. What the numbers should be is the kernel tests' matter; here they are
compared with the reference, or with another way to say the same.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from devices import EmulatedArrays, GpuArrays
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from strategies import (
    OPTIONS,
    AttentionProblem,
    attention_problems,
    dtype_of,
    softmax_problems,
)

import cupyattn
from cupyattn import AttentionGrads, attention, attention_backward, reference, softmax_backward
from cupyattn import softmax as softmax_forward

KERNEL_OPTIONS = ("causal", "softmax_scale", "window_size", "q_offset", "seqused_k")
DTYPES = ("float16", "float32", "bfloat16")
SENTINEL = 77.0


class NumpyArrays:
    """Like `GpuArrays`, for arrays that stay where they are and run through the reference."""

    def running(self) -> AbstractContextManager[None]:
        return cupyattn.backend("reference")

    def put(self, array: Any) -> Any:
        return array

    def get(self, array: Any) -> np.ndarray:
        return array


NUMPY, EMULATED, CUPY = NumpyArrays(), EmulatedArrays(), GpuArrays()
everywhere = pytest.mark.parametrize(
    "side",
    [
        pytest.param(NUMPY, id="numpy"),
        pytest.param(EMULATED, id="emulator", marks=pytest.mark.nvrtc),
        pytest.param(CUPY, id="cupy", marks=pytest.mark.gpu),
    ],
    indirect=True,
)

kernels_only = pytest.mark.parametrize(
    "side",
    [
        pytest.param(EMULATED, id="emulator", marks=pytest.mark.nvrtc),
        pytest.param(CUPY, id="cupy", marks=pytest.mark.gpu),
    ],
    indirect=True,
)


@pytest.fixture
def side(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Where arrays are, with calls running there."""
    with request.param.running():
        yield request.param


def placed(side: Any, value: Any) -> Any:
    """Move an option's arrays."""
    if isinstance(value, np.ndarray):
        return side.put(value)
    return tuple(placed(side, item) for item in value) if type(value) is tuple else value


def options_of(side: Any, problem: AttentionProblem) -> dict[str, Any]:
    options = {name: placed(side, value) for name, value in problem.options().items()}
    return {**options, "implementation": "tiled"}


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


@contextmanager
def unchanged(*values: Any) -> Iterator[None]:
    """The arrays among the values, and in tuples of them, keep their contents."""

    def contents(value: Any) -> Any:
        return tuple(map(contents, value)) if isinstance(value, tuple) else _bytes(value)

    before = contents(values)
    yield
    assert contents(values) == before, "an input was written to"


def _bytes(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return CUPY.get(value).tobytes() if type(value).__module__.startswith("cupy.") else None


# Results -----------------------------------------------------------------------------------------


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


# Views and out= ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "options"),
    [(NUMPY, OPTIONS), pytest.param(CUPY, KERNEL_OPTIONS, marks=pytest.mark.gpu)],
    ids=["numpy", "cupy"],
)
@given(st.data())
def test_views_equal_copies(side, options, data):
    """Packed qkv, transposes, slices, negative strides, a batch of stride 0."""
    problem = data.draw(attention_problems(options=options, largest=40))
    views = [side.put(array) for array in problem.arrays()]
    copies = [side.put(np.ascontiguousarray(array)) for array in problem.arrays()]
    options = options_of(side, problem)
    with unchanged(*views):
        of_views = attention(*views, **options, return_lse=True)
    of_copies = attention(*copies, **options, return_lse=True)
    for view, copy in zip(of_views, of_copies, strict=True):
        assert_array_equal(side.get(view), side.get(copy))


@given(attention_problems(largest=20))
def test_backward_of_views_equals_backward_of_copies(problem: AttentionProblem):
    arrays = dout, *qkv = (problem.gradients()[0], *problem.arrays())
    options = problem.options()
    results = attention(*qkv, **options, return_lse=True)
    of_views = attention_backward(*arrays, *results, **options)
    of_copies = attention_backward(*map(np.ascontiguousarray, arrays), *results, **options)
    assert dout is arrays[0]
    for view, copy in zip(of_views, of_copies, strict=True):
        assert (view is None) == (copy is None)
        if view is not None:
            assert_array_equal(view, copy)


@everywhere
def test_options_may_be_views_too(side):
    """Strided, reversed and broadcast seqused_k and q_offset (and on NumPy the rest)."""
    problem = AttentionProblem(B=3, Sq=4, Sk=6, H=4, G=2, D=8, Dv=8)
    arrays = [side.put(array) for array in problem.arrays()]
    used, offsets = np.array([9, 4, 9, 1, 9, 6])[::-2], np.broadcast_to(np.int32(2), (3,))
    options = {"seqused_k": used, "q_offset": offsets}
    if side is NUMPY:
        bias = problem.normal("bias", (6, 4, 2, 1))
        options |= {"bias": bias.transpose(3, 2, 1, 0)[:, ::-1].repeat(2, 1)[:, ::1, :, ::-1]}
        options |= {"mask": np.broadcast_to(bias[:, :1, 0, 0].T > -1, (3, 1, 4, 6))}
        options |= {"alibi_slopes": np.broadcast_to(np.float32(0.5), (3, 4))}
        options |= {"sinks": problem.normal("sinks", (8,))[::2]}
        options |= {"rotary": (np.ones((2, 8), np.float32).T, np.zeros((16, 2), np.float16)[::2])}
    copies = {name: _copied(value) for name, value in options.items()}
    viewed, copied = (
        attention(
            *arrays,
            **{name: placed(side, value) for name, value in named.items()},
            implementation="tiled",
        )
        for named in (options, copies)
    )
    assert_array_equal(side.get(viewed), side.get(copied))


def _copied(value: Any) -> Any:
    return tuple(map(_copied, value)) if isinstance(value, tuple) else np.array(value)


@everywhere
@pytest.mark.parametrize("return_lse", [False, True])
def test_out_is_written_and_returned(side, return_lse):
    """Into contiguous arrays, and into views whose surroundings stay as they are."""
    problem = AttentionProblem(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6, drawn=(("causal", True),))
    arrays = [side.put(array) for array in problem.arrays()]
    options = options_of(side, problem)
    expected = attention(*arrays, **options, return_lse=True)

    memory = side.put(np.full((2, 4, 9, 3, 6), SENTINEL, np.float32))
    lse_memory = side.put(np.full((4, 2, 8), SENTINEL, np.float32))
    strided = memory[:, ::-1, 2:7, 1].transpose(0, 2, 1, 3), lse_memory.transpose(1, 0, 2)[..., 1:6]
    fresh = (side.put(np.empty((2, 5, 4, 6), np.float32)), side.put(np.empty((2, 4, 5), "f4")))
    for out in (fresh, strided):
        given_out = out if return_lse else out[0]
        with unchanged(*arrays):
            returned = attention(*arrays, **options, return_lse=return_lse, out=given_out)
        returned = returned if return_lse else (returned,)
        for result, array, want in zip(returned, out, expected, strict=False):
            assert result is array
            assert_array_equal(side.get(array), side.get(want))
    for view in strided:
        view[...] = SENTINEL
    assert (side.get(memory) == SENTINEL).all()
    assert (side.get(lse_memory) == SENTINEL).all()


@everywhere
def test_softmax_writes_into_out(side):
    rng = np.random.default_rng(0)
    x, dout = (side.put(rng.standard_normal((3, 4, 9), "f4")) for _ in range(2))
    memory = side.put(np.full((4, 3, 11), SENTINEL, np.float32))
    into = memory.transpose(1, 0, 2)[..., 1:10]
    expected = softmax_forward(x)
    with unchanged(x, dout, expected):
        assert softmax_forward(x, out=into) is into
        assert_array_equal(side.get(into), side.get(expected))
        assert softmax_backward(dout, expected, dx=into) is into
        assert_array_equal(side.get(into), side.get(softmax_backward(dout, expected)))
    into[...] = SENTINEL
    assert (side.get(memory) == SENTINEL).all()


@everywhere
def test_interleaved_arrays_that_share_no_item_are_accepted(side):
    """One buffer holds q, k, v and out; another the odd and even rows of x and its softmax."""
    rng = np.random.default_rng(0)
    packed = side.put(rng.standard_normal((2, 5, 4, 3, 8), "f4"))
    q, k, v, out = (packed[:, :, i] for i in range(4))
    expected = attention(q, k, v, implementation="tiled")
    with unchanged(q, k, v):
        attention(q, k, v, out=out, implementation="tiled")
    assert_array_equal(side.get(out), side.get(expected))

    memory = side.put(rng.standard_normal((7, 9), "f4"))
    expected = softmax_forward(memory[1::2])
    assert_array_equal(
        side.get(softmax_forward(memory[1::2], out=memory[:-1:2])), side.get(expected)
    )


@everywhere
def test_one_array_may_be_q_k_and_v(side):
    x = side.put(np.random.default_rng(0).standard_normal((2, 5, 3, 8), "f4"))
    copies = (side.put(np.array(side.get(x))) for _ in range(3))
    with unchanged(x):
        same = attention(x, x, x, implementation="tiled")
    assert_array_equal(side.get(same), side.get(attention(*copies, implementation="tiled")))


def test_numpy_subclasses_are_taken_and_written_through(tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 3), "f4")
    expected = softmax_forward(x)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=(2, 3))
    softmax_forward(x.view(np.matrix), out=out)
    assert_array_equal(out, expected)


# Empty arrays ------------------------------------------------------------------------------------


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


# Options -----------------------------------------------------------------------------------------

B, SQ, SK, H, G, D, DV = 2, 5, 7, 4, 2, 8, 6
BASE = AttentionProblem(B=B, Sq=SQ, Sk=SK, H=H, G=G, D=D, Dv=DV)
ANGLES = np.outer(np.arange(20), [1.0, 0.3]).astype(np.float32)
POSITIONS = np.arange(SQ)[:, None] + SK - SQ
EVERY_OPTION: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "softmax_scale": {"softmax_scale": 0.9},
    "window_size": {"window_size": (2, 1)},
    "q_offset": {"q_offset": 1, "window_size": (3, None)},
    "q_offset array": {"q_offset": np.array([0, 3]), "window_size": (3, None)},
    "seqused_k": {"seqused_k": np.array([6, 3])},
    "mask": {"mask": BASE.normal("mask", (H, SQ, SK)) > -0.5},
    "bias": {"bias": BASE.normal("bias", (B, 1, SQ, SK))},
    "alibi_slopes": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": BASE.normal("sinks", (H,))},
    "dropout_p": {"dropout_p": 0.3, "seed": 5},
    "rotary": {"rotary": (np.cos(ANGLES), np.sin(ANGLES))},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j + h + b) % 4 != 0},
}
PLAIN = reference.attention(*BASE.arrays())[0].astype(np.float32)


def run_both_ways(**options: Any) -> tuple[np.ndarray, np.ndarray, AttentionGrads]:
    """Forward and backward of the base problem; inputs stay as they are, results are finite."""
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    with unchanged(dout, *arrays, *options.values()):
        out, lse = attention(*arrays, **options, return_lse=True)
        grads = attention_backward(dout, *arrays, out, lse, **options)
    assert (out.shape, lse.shape) == ((B, SQ, H, DV), (B, H, SQ))
    inputs = (*arrays, options.get("bias"), options.get("sinks"))
    for gradient, array in zip(grads, inputs, strict=True):
        assert (gradient is None) == (array is None)
        if array is not None:
            assert gradient.shape == array.shape
            assert np.isfinite(gradient).all()
    assert np.isfinite(out).all()
    return out, lse, grads


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_every_option_alone(name):
    out, _, grads = run_both_ways(**EVERY_OPTION[name])
    assert abs(out - PLAIN).max() > 1e-3, "the option made no difference"
    plain = attention_backward(
        BASE.gradients()[0], *BASE.arrays(), *attention(*BASE.arrays(), return_lse=True)
    )
    assert abs(grads.dv - plain.dv).max() > 1e-3
    assert abs(grads.dq - plain.dq).max() > 1e-3


@pytest.mark.parametrize(
    "pair",
    [
        pair
        for pair in itertools.combinations(EVERY_OPTION, 2)
        if EVERY_OPTION[pair[0]].keys().isdisjoint(EVERY_OPTION[pair[1]])
    ],
    ids="-".join,
)
def test_every_pair_of_options(pair):
    """Both count: the result is not that of either alone."""
    first, second = (EVERY_OPTION[name] for name in pair)
    out, _, _ = run_both_ways(**first, **second)
    for alone in (first, second):
        assert abs(out - attention(*BASE.arrays(), **alone)).max() > 1e-4


LEFT_OUT = np.where(np.arange(SK) > POSITIONS, -np.inf, 0).astype(np.float32)
SCORES = np.einsum("bihd,bjhd->bhij", BASE.arrays()[0], BASE.arrays()[1].repeat(2, 2)) / D**0.5
WIDE = EVERY_OPTION["mask"]["mask"]
EQUIVALENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal, window": ({"causal": True}, {"window_size": (None, 0)}),
    "causal, wider window": ({"causal": True}, {"causal": True, "window_size": (None, 3)}),
    "causal, mask": ({"causal": True}, {"mask": np.arange(SK) <= POSITIONS}),
    "causal, bias": ({"causal": True}, {"bias": LEFT_OUT}),
    "causal, mask_mod": ({"causal": True}, {"mask_mod": lambda b, h, i, j: j <= i + SK - SQ}),
    "causal, wide window": ({"causal": True}, {"window_size": (10**30, 0)}),
    "window, mask": (
        {"window_size": (2, 1)},
        {"mask": abs(2 * np.arange(SK) - 2 * POSITIONS + 1) <= 3},
    ),
    "no window": ({}, {"window_size": (None, None)}),
    "default offset": ({"causal": True}, {"causal": True, "q_offset": SK - SQ}),
    "offset array": (
        {"causal": True, "q_offset": 1},
        {"causal": True, "q_offset": np.array([1, 1], np.int32)},
    ),
    "far offset": ({}, {"causal": True, "q_offset": 2**60}),
    "default scale": ({}, {"softmax_scale": D**-0.5}),
    "all keys used": ({}, {"seqused_k": np.array([SK, SK])}),
    "seqused_k, mask": (
        {"seqused_k": np.array([6, 3])},
        {"mask": (np.arange(SK) < np.array([[6], [3]]))[:, None, None]},
    ),
    "mask, bias": ({"mask": WIDE}, {"bias": np.where(WIDE, 0, -np.inf).astype(np.float32)}),
    "mask, mask_mod": ({"mask": WIDE}, {"mask_mod": lambda b, h, i, j: WIDE[h, i, j]}),
    "bias of half": ({"bias": np.full(SK, 0.5, np.float16)}, {"bias": np.full(SK, 0.5, "f4")}),
    "alibi_slopes, bias": (
        EVERY_OPTION["alibi_slopes"],
        {"bias": -np.array([0.5, 0.25, 0.125, 0.0625], np.float32)[:, None, None]
         * abs(POSITIONS - np.arange(SK)).astype(np.float32)},
    ),
    "alibi_slopes of each batch element": (
        EVERY_OPTION["alibi_slopes"],
        {"alibi_slopes": np.array([[0.5, 0.25, 0.125, 0.0625]] * 2, np.float32)},
    ),
    "no dropout": ({}, {"dropout_p": 0.0, "seed": 3}),
    "no sinks": ({}, {"sinks": np.full(H, -np.inf, np.float32)}),
    "no rotation": ({}, {"rotary": (np.ones((9, 4), np.float32), np.zeros((9, 4), np.float16))}),
    "naive": ({}, {"implementation": "naive"}),
    "tiled": ({}, {"implementation": "tiled"}),
    "workspace": ({}, {"workspace": np.empty(7, np.uint8)}),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUIVALENT)
def test_two_ways_to_say_the_same(name):
    one, other = EQUIVALENT[name]
    forward_one, forward_other = (
        attention(*BASE.arrays(), **options, return_lse=True) for options in (one, other)
    )
    for left, right in zip(forward_one, forward_other, strict=True):
        assert_allclose(left, right, rtol=1e-6, atol=1e-6)
    if "implementation" not in other:
        grads_one, grads_other = (
            attention_backward(BASE.gradients()[0], *BASE.arrays(), *forward_one, **options)
            for options in (one, other)
        )
        for left, right in zip(grads_one[:3], grads_other[:3], strict=True):
            assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_softcap_is_a_bias_of_what_it_takes_away():
    capped = attention(*BASE.arrays(), softcap=1.5)
    bias = (1.5 * np.tanh(SCORES / 1.5) - SCORES).astype(np.float32)
    assert_allclose(capped, attention(*BASE.arrays(), bias=bias), rtol=1e-5, atol=1e-6)


def test_a_sink_is_a_key_without_a_value():
    q, k, v = BASE.arrays()
    sinks = EVERY_OPTION["sinks"]["sinks"]
    with_sinks = attention(q, k, v, sinks=sinks, return_lse=True)
    bias = np.zeros((H, 1, SK + 1), np.float32)
    bias[:, 0, SK] = sinks
    k, v = (np.concatenate([x, np.zeros_like(x[:, :1])], axis=1) for x in (k, v))
    with_keys = attention(q, k, v, bias=bias, return_lse=True)
    for left, right in zip(with_sinks, with_keys, strict=True):
        assert_allclose(left, right, rtol=1e-6, atol=1e-6)


def test_rotary_is_attention_of_rotated_arrays():
    q, k, v = BASE.arrays()
    cos, sin = np.cos(ANGLES), np.sin(ANGLES)
    for q_offset in (0, 9):
        turned_q = reference.rope(q, cos, sin, np.arange(SQ) + q_offset).astype(np.float32)
        turned_k = reference.rope(k, cos, sin, np.arange(SK)).astype(np.float32)
        expected = attention(turned_q, turned_k, v)
        actual = attention(q, k, v, rotary=(cos, sin), q_offset=q_offset)
        assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_dropout_drops_what_the_seed_says():
    """With the identity as values, out is the probabilities themselves."""
    q, k, _ = AttentionProblem(B=1, Sq=9, Sk=40, H=2, G=2, D=8, Dv=8).arrays()
    v = np.broadcast_to(np.eye(40, dtype=np.float32)[None, :, None], (1, 40, 2, 40))
    whole = attention(q, k, v)
    for seed in (0, 7, 2**64 - 1):
        dropped = attention(q, k, v, dropout_p=0.25, seed=seed)
        for h in range(2):
            kept = reference.attention_keep(seed, 0.25, 0, h, np.arange(9), np.arange(40))
            expected = np.where(kept, whole[0, :, h] / 0.75, 0)
            assert_allclose(dropped[0, :, h], expected, rtol=1e-6)
    _, lse = attention(q, k, v, dropout_p=0.25, seed=7, return_lse=True)
    assert_array_equal(lse, attention(q, k, v, return_lse=True)[1])


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {"causal": np.True_}),
    "softmax_scale int": ({"softmax_scale": 1.0}, {"softmax_scale": 1}),
    "softmax_scale": ({"softmax_scale": 0.5}, {"softmax_scale": np.float16(0.5)}),
    "window_size": ({"window_size": (2, 1)}, {"window_size": (np.uint8(2), np.int8(1))}),
    "far window": (
        {"window_size": (127, 2), "q_offset": -3},
        {"window_size": (np.int8(127), np.uint16(2)), "q_offset": np.int8(-3)},
    ),
    "softcap": ({"softcap": 1.5}, {"softcap": Fraction(3, 2)}),
    "softcap int": ({"softcap": 2.0}, {"softcap": np.int32(2)}),
    "dropout_p": ({"dropout_p": 0.5, "seed": 1}, {"dropout_p": np.float16(0.5), "seed": 1}),
    "dropout_p fraction": ({"dropout_p": 0.5, "seed": 1}, {"dropout_p": Fraction(1, 2), "seed": 1}),
    **{
        f"seed {kind.__name__}": (
            {"dropout_p": 0.5, "seed": 100},
            {"dropout_p": 0.5, "seed": kind(100)},
        )
        for kind in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64)
    },
}


@pytest.mark.parametrize("other_first", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_numbers_of_any_kind(name, other_first):
    """NumPy's scalars are numbers too, and what was called before makes no difference."""
    plain, other = KINDS[name]
    # A length of its own, so that nothing was called before.
    sk = 20 + 2 * list(KINDS).index(name) + other_first
    problem = AttentionProblem(B=1, Sq=5, Sk=sk, H=4, G=2, D=8, Dv=6)
    arrays, (dout, _) = problem.arrays(), problem.gradients()
    results = reference.attention(*arrays, **plain)
    exact = (*results, *reference.attention_backward(dout, *arrays, *results, **plain)[:3])
    for options in (other, plain) if other_first else (plain, other):
        out, lse = attention(*arrays, **options, return_lse=True)
        grads = attention_backward(dout, *arrays, out, lse, **options)
        for actual, expected in zip((out, lse, *grads[:3]), exact, strict=True):
            assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_nothing_of_a_call_is_kept():
    """Descriptions of calls are cached; the arrays, and what a mask_mod closes over, must go."""

    def call() -> list[weakref.ref[Any]]:
        arrays, mask = BASE.arrays(), WIDE.copy()
        options = {"bias": BASE.normal("bias", (SK,)), "mask_mod": lambda b, h, i, j: mask[h, i, j]}
        results = attention(*arrays, **options, return_lse=True)
        attention_backward(results[0], *arrays, *results, **options)
        return [weakref.ref(thing) for thing in (*arrays, mask, *options.values(), *results)]

    kept = call()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


# Backward ----------------------------------------------------------------------------------------


def backward_arrays(**options: Any) -> tuple[Any, ...]:
    """dout, q, k, v, out and lse of the base problem."""
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    out, lse = reference.attention(*arrays, **options)
    return dout, *arrays, out.astype(np.float32), lse.astype(np.float32)


def test_gradients_are_linear_in_dout_and_dlse():
    arrays, (dout, dlse) = BASE.arrays(), BASE.gradients()
    results = attention(*arrays, causal=True, return_lse=True)
    both, of_out, of_lse = (
        attention_backward(d, *arrays, *results, causal=True, dlse=dl)
        for d, dl in ((dout, dlse), (dout, None), (np.zeros_like(dout), dlse))
    )
    assert abs(of_lse.dq).max() > 1e-3
    assert not of_lse.dv.any()
    for name in ("dq", "dk", "dv"):
        total = getattr(of_out, name) + getattr(of_lse, name)
        assert_allclose(getattr(both, name), total, rtol=1e-5, atol=1e-6)


def test_deterministic_makes_no_difference_on_numpy():
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    results = attention(*arrays, return_lse=True)
    free, fixed = (
        attention_backward(dout, *arrays, *results, deterministic=on) for on in (False, True)
    )
    for left, right in zip(free[:3], fixed[:3], strict=True):
        assert_array_equal(left, right)


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
    problem = AttentionProblem(B=1, Sq=3, Sk=1, H=1, G=1, D=2, Dv=2, dtype="float16")
    arrays = problem.arrays()
    results = attention(*arrays, return_lse=True)
    dout = np.full_like(results[0], 2.0**-12)
    grads = AttentionGrads(None, None, np.ones((1, 1, 1, 2), np.float16), None, None)
    attention_backward(dout, *arrays, *results, grads=grads, accumulate=True)
    assert_array_equal(grads.dv, np.full((1, 1, 1, 2), np.float16(1 + 3 * 2.0**-12)))


def test_accumulating_infinities_is_nan_and_no_warning():
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    results = attention(*arrays, return_lse=True)
    dv = np.full_like(arrays[2], np.inf)
    grads = AttentionGrads(None, None, dv, None, None)
    dout = np.full_like(dout, -np.inf)
    attention_backward(dout, *arrays, *results, grads=grads, accumulate=True)
    assert np.isnan(dv).all()


# Other libraries' arrays, and what a GPU cannot do yet -------------------------------------------


class Interface:
    """Another library's array: the CUDA array interface and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__


class Capsule:
    """Another library's array: DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("foreign", [Interface, Capsule])
def test_arrays_of_other_libraries_come_in_without_a_copy(foreign):
    import cupy

    problem = AttentionProblem(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=8, view="transposed")
    arrays = [CUPY.put(array) for array in problem.arrays()]
    used = cupy.array([6, 3], np.int32)
    expected = attention(*arrays, seqused_k=used, implementation="tiled")
    memory = cupy.empty_like(expected)
    result = attention(
        *map(foreign, arrays),
        seqused_k=foreign(used),
        implementation="tiled",
        out=foreign(memory),
    )
    assert isinstance(result, cupy.ndarray)
    assert result.data.ptr == memory.data.ptr
    assert_array_equal(CUPY.get(memory), CUPY.get(expected))
    assert_array_equal(
        CUPY.get(softmax_forward(foreign(memory))), CUPY.get(softmax_forward(memory))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_come_in_without_a_copy(dtype):
    torch = pytest.importorskip("torch")
    import cupy

    rng = np.random.default_rng(0)
    packed = rng.standard_normal((2, 5, 3, 4, 8)).astype(dtype_of(dtype))
    on_torch = torch.from_numpy(packed.astype(np.float32)).cuda().to(getattr(torch, dtype))
    on_cupy = CUPY.put(packed)
    expected = attention(*(on_cupy[:, :, i] for i in range(3)), causal=True, implementation="tiled")
    out = torch.zeros((2, 5, 4, 8), dtype=on_torch.dtype, device="cuda")
    tensors = [on_torch[:, :, i] for i in range(3)]
    result = attention(*tensors, causal=True, implementation="tiled", out=out)
    assert isinstance(result, cupy.ndarray)
    assert result.dtype == dtype_of(dtype)
    cupy.cuda.Device().synchronize()
    assert_array_equal(out.float().cpu().numpy(), CUPY.get(expected).astype(np.float32))


@pytest.mark.gpu
def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    q = torch.zeros((1, 2, 1, 8))
    with pytest.raises(TypeError, match=r"q is a torch\.Tensor; .*numpy\.asarray\(q\)"):
        attention(q, q, q)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(EVERY_OPTION) - {*KERNEL_OPTIONS, "q_offset array"}))
def test_options_without_a_kernel_say_so(name):
    """By name, with the way that has them; nothing is written."""
    arrays = [CUPY.put(array) for array in BASE.arrays()]
    out = CUPY.put(np.full((B, SQ, H, DV), SENTINEL, np.float32))
    options = {key: placed(CUPY, value) for key, value in EVERY_OPTION[name].items()}
    only_reference = name in ("rotary", "mask_mod")
    for implementation in ("flash", "tiled", "naive") if only_reference else ("tiled", "naive"):
        with pytest.raises(NotImplementedError) as failure:
            attention(*arrays, **options, implementation=implementation, out=out)
        said, _, fix = str(failure.value).partition("; ")
        assert name in said
        assert "the CPU path has every option; pass NumPy arrays" in fix
    assert (CUPY.get(out) == SENTINEL).all()


@kernels_only
def test_backward_without_a_kernel_names_another(side):
    moved = [side.put(array) for array in backward_arrays()]
    with pytest.raises(NotImplementedError, match=r"'tiled'.*'naive'.*NumPy"):
        attention_backward(*moved, causal=True, implementation="tiled")


@kernels_only
@pytest.mark.parametrize("name", ["rotary", "mask_mod"])
def test_backward_options_without_a_kernel_say_so(side, name):
    options = {key: placed(side, value) for key, value in EVERY_OPTION[name].items()}
    dq = side.put(np.full((B, SQ, H, D), SENTINEL, np.float32))
    grads = AttentionGrads(dq, None, None, None, None)
    with pytest.raises(NotImplementedError, match=rf"{name} in attention_backward.*CPU path"):
        attention_backward(
            *map(side.put, backward_arrays()), **options, implementation="naive", grads=grads
        )
    assert (side.get(dq) == SENTINEL).all()


@pytest.mark.gpu
def test_softmax_of_too_many_axes_that_lie_apart():
    """Five axes with gaps between them; on NumPy, and without the gaps, any number will do."""
    import cupy

    x = np.random.default_rng(0).standard_normal((3, 3, 3, 3, 3, 4), "f4")
    bound = reference.softmax_bound(x, dtype="float32")
    actual = CUPY.get(softmax_forward(CUPY.put(x)))
    assert reference.error_ratio(actual, reference.softmax(x), bound) <= 1
    gaps = cupy.zeros((6, 6, 6, 6, 6, 4), np.float32)[::2, ::2, ::2, ::2, ::2]
    with pytest.raises(ValueError, match=r"leave 5 axes apart; .*at most 4 axes.*; copy"):
        softmax_forward(gaps)


@pytest.mark.gpu
def test_results_are_on_the_device_of_the_arrays():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    problem = AttentionProblem(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=8)
    expected = attention(*map(CUPY.put, problem.arrays()), implementation="tiled")
    with cupy.cuda.Device(1):
        arrays = [cupy.asarray(array) for array in problem.arrays()]
        cupy.cuda.Device().synchronize()
    out = attention(*arrays, implementation="tiled")
    assert out.device.id == 1
    assert_array_equal(cupy.asnumpy(out), cupy.asnumpy(expected))


# Names and documentation -------------------------------------------------------------------------

SHARED_OPTIONS = {
    "causal": False, "softmax_scale": None, "window_size": None, "q_offset": None,
    "seqused_k": None, "mask": None, "bias": None, "alibi_slopes": None, "softcap": None,
    "sinks": None, "dropout_p": 0.0, "seed": None, "rotary": None, "score_mod": None,
    "mask_mod": None,
}  # fmt: skip
SIGNATURES: dict[Callable[..., Any], tuple[tuple[str, ...], dict[str, Any]]] = {
    attention: (
        ("q", "k", "v"),
        {**SHARED_OPTIONS, "return_lse": False, "implementation": "flash", "out": None,
         "workspace": None},
    ),
    attention_backward: (
        ("dout", "q", "k", "v", "out", "lse"),
        {**SHARED_OPTIONS, "dlse": None, "deterministic": False,
         "implementation": "flash", "grads": None,
         "accumulate": False, "workspace": None},
    ),
    softmax_forward: (("x",), {"out": None}),
    softmax_backward: (("dout", "out"), {"dx": None}),
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_names_and_defaults(function):
    """Arrays by position alone, options by name alone."""
    parameters = inspect.signature(function).parameters.values()
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY)
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert (positional, options) == SIGNATURES[function]
    assert list(options) == list(SIGNATURES[function][1])
    assert len(parameters) == len(positional) + len(options)
    assert all(p.annotation is not p.empty for p in parameters)


def sections(docstring: str) -> dict[str, str]:
    """The text of each numpydoc section, by its heading."""
    heading = re.compile(r"^(\w[\w ]*)\n-+\n", re.MULTILINE)
    pieces = heading.split(inspect.cleandoc(docstring))
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


@pytest.mark.parametrize("name", sorted(set(cupyattn.__all__) - {"__version__"}))
def test_public_names_are_documented(name):
    """A one-line summary, then numpydoc sections that name every parameter or field."""
    public = getattr(cupyattn, name)
    assert public.__doc__, name
    assert inspect.cleandoc(public.__doc__).partition("\n")[0].endswith((".", "``."))
    found = sections(public.__doc__)
    if inspect.isclass(public):
        described, wanted = found.get("Attributes", ""), list(public._fields)
    else:
        is_context = inspect.isgeneratorfunction(inspect.unwrap(public))
        assert "Returns" in found or is_context
        assert "Examples" in found
        wanted = list(inspect.signature(public).parameters)
        described = found.get("Parameters", "")
        assert not wanted or "Raises" in found
    names = re.findall(r"^([\w, ]+?)(?: : .*)?$", described, re.MULTILINE)
    assert [n.strip() for line in names for n in line.split(",") if n.strip()] == wanted


def test_version_is_a_release():
    assert re.fullmatch(r"\d+\.\d+\.\d+", cupyattn.__version__)

"""Arrays of a call: views, outputs, shared buffers, empty arrays, arrays of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import CUPY, DTYPES, NUMPY, SENTINEL, dtype_of, everywhere, placed, unchanged
from support.strategies import OPTIONS, RUN_TIME_OPTIONS, attention_problems

from cupyattn import attention, attention_backward, softmax_backward
from cupyattn import softmax as softmax_forward
from cupyattn.testing import AttentionCase


def options_of(side: Any, problem: AttentionCase) -> dict[str, Any]:
    return {name: placed(side, value) for name, value in problem.keywords().items()}


@pytest.mark.parametrize(
    ("side", "options"),
    [(NUMPY, OPTIONS), pytest.param(CUPY, RUN_TIME_OPTIONS, marks=pytest.mark.gpu)],
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
        if side is NUMPY:  # BLAS adds in another order for other strides
            assert_nearly_equal(view, copy)
        else:
            assert_array_equal(side.get(view), side.get(copy))


def assert_nearly_equal(actual, expected):
    """Two results of float32 products, rounded to their dtype, differ by some of its units."""
    tolerance = {2: 1.6e-2, 4: 1e-5, 8: 1e-12}[expected.dtype.itemsize]
    wide = expected.astype(np.float64)
    largest = np.abs(wide[np.isfinite(wide)]).max(initial=0)
    assert_allclose(actual.astype(np.float64), wide, rtol=tolerance, atol=tolerance * largest)


@given(attention_problems(largest=20))
def test_backward_of_views_equals_backward_of_copies(problem: AttentionCase):
    arrays = dout, *qkv = (problem.gradients()[0], *problem.arrays())
    options = problem.keywords()
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
    problem = AttentionCase(B=3, Sq=4, Sk=6, H=4, G=2, D=8, Dv=8)
    arrays = [side.put(array) for array in problem.arrays()]
    used, offsets = np.array([9, 4, 9, 1, 9, 6])[::-2], np.broadcast_to(np.int32(2), (3,))
    options = {"seqused_k": used, "q_offset": offsets}
    if side is NUMPY:
        bias = problem.normal("bias", (6, 4, 2, 1))
        options |= {"bias": bias.transpose(3, 2, 1, 0)[:, ::-1].repeat(2, 1)[:, ::1, :, ::-1]}
        options |= {"mask": np.broadcast_to(bias[:, :1, 0, 0].T > -1, (3, 1, 4, 6))}
        options |= {"alibi_slopes": np.broadcast_to(np.float32(0.5), (3, 4))}
        options |= {"sinks": problem.normal("sinks", (8,))[::2]}
        options |= {"rotary": (np.ones((8, 4), "f4")[:, :2], np.zeros((16, 2), "f4")[::2])}
    copies = {name: _copied(value) for name, value in options.items()}
    viewed, copied = (
        attention(*arrays, **{name: placed(side, value) for name, value in named.items()})
        for named in (options, copies)
    )
    assert_array_equal(side.get(viewed), side.get(copied))


def _copied(value: Any) -> Any:
    return tuple(map(_copied, value)) if isinstance(value, tuple) else np.array(value)


@everywhere
@pytest.mark.parametrize("return_lse", [False, True])
def test_out_is_written_and_returned(side, return_lse):
    """Into contiguous arrays, and into views whose surroundings stay as they are."""
    problem = AttentionCase(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=6, options=(("causal", True),))
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
        assert softmax_backward(dout, expected, grads=into) is into
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

    problem = AttentionCase(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=8, view="transposed")
    arrays = [CUPY.put(array) for array in problem.arrays()]
    used = cupy.array([6, 3], np.int32)
    expected = attention(*arrays, seqused_k=used)
    memory = cupy.empty_like(expected)
    result = attention(*map(foreign, arrays), seqused_k=foreign(used), out=foreign(memory))
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
    with pytest.raises(TypeError, match=r"q has type torch\.Tensor; .*numpy\.asarray\(q\)"):
        attention(q, q, q)


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
    problem = AttentionCase(**extents, dtype=dtype)
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

"""From arguments to a started kernel: what is passed, where it runs, and what a call does not do.

What the host does is tried without a GPU: CuPy arrays at addresses where nothing is, and a device
that records what it is told to start. Streams and graphs need a GPU.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from strategies import dtype_of

from cupyattn import AttentionGrads, attention, attention_backward, softmax, softmax_backward
from cupyattn.kernels import cuda_device as device_module
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.launch import MAX_GRID_X, launch
from cupyattn.kernels.spec import KernelSpec, Pointer, Scalar, Specialisation, Struct
from cupyattn.kernels.structs import UNBOUNDED

PARAMS = np.dtype([("n", np.int64), ("x", np.float32)], align=True)
PROBE = KernelSpec(
    entry="probe",
    source="probe.cu",
    parameters=(
        Pointer("x", const=True),
        Pointer("maybe", optional=True),
        Scalar("count", np.dtype(np.int32)),
        Scalar("scale", np.dtype(np.float32)),
        Scalar("stride", np.dtype(np.int64)),
        Struct("params", PARAMS),
    ),
    macros=("N",),
).specialise(threads=32, shared_bytes=0, N=1)
X, STRUCT = np.zeros(3), np.zeros((), PARAMS)[()]


class Recorder:
    """A device that starts nothing and remembers everything."""

    arch = TURING
    name = "nothing"

    def __init__(self) -> None:
        self.loaded: list[Specialisation] = []
        self.allocated: list[Any] = []
        self.started: list[tuple[Specialisation, tuple[int, int, int], tuple[Any, ...]]] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        self.allocated.append(device_array(shape, dtype))
        return self.allocated[-1]

    def load(self, specialisation: Specialisation) -> Any:
        self.loaded.append(specialisation)
        recorder = self

        class Kernel:
            def start(self, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
                recorder.started.append((specialisation, grid, tuple(arguments)))

        return Kernel()

    @property
    def did_nothing(self) -> bool:
        return not (self.loaded or self.allocated or self.started)


def device_array(
    shape: tuple[int, ...],
    dtype: Any = np.float16,
    strides: tuple[int, ...] | None = None,
    address: int | None = None,
) -> Any:
    """A CuPy array whose items are nowhere: none may be touched. Without an address, a new one."""
    cupy = pytest.importorskip("cupy")
    if address is None:
        address = device_array.next_address
        device_array.next_address += 2**40
    memory = cupy.cuda.memory.UnownedMemory(address, 2**39, None, device_id=0)
    pointer = cupy.cuda.memory.MemoryPointer(memory, 0)
    return cupy.ndarray(shape, dtype, pointer, strides)


device_array.next_address = 2**42


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What the public functions take for the GPU."""
    recorder = Recorder()
    backend_module = sys.modules["cupyattn.functional.backend"]  # the function has its name
    monkeypatch.setattr(backend_module, "cuda_device", lambda ordinal: recorder)
    return recorder


def call(recorder: Recorder, *arrays: Any, **options: Any) -> tuple[dict[str, Any], Any, int]:
    """Run attention; returns its kernel's macros, its params, and the CTAs."""
    attention(*arrays, **{"implementation": "tiled", **options})
    specialisation, grid, arguments = recorder.started[-1]
    return dict(specialisation.macros), arguments[-1], grid[0]


# The arguments of a launch -----------------------------------------------------------------------


def test_arguments_have_the_types_that_the_kernel_declares():
    recorder = Recorder()
    launch(recorder, PROBE, 7, (X, None, 5, 2, np.int8(-3), STRUCT))
    specialisation, grid, (x, maybe, count, scale, stride, params) = recorder.started[0]
    assert specialisation is PROBE
    assert grid == (7, 1, 1)
    assert x is X
    assert maybe is None, "a null pointer"
    assert (type(count), type(scale), type(stride)) == (np.int32, np.float32, np.int64)
    assert (count, scale, stride) == (5, 2.0, -3)
    assert params is STRUCT


def test_an_optional_pointer_may_be_an_array():
    recorder = Recorder()
    launch(recorder, PROBE, 1, (X, X, 5, 0.1, 2**40, STRUCT))
    _, _, (_, maybe, _, scale, stride, _) = recorder.started[0]
    assert maybe is X
    assert scale == np.float32(0.1)
    assert stride == 2**40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: None}, "x of probe must be an array, not None"),
        ({5: np.zeros((), np.int64)[()]}, "params of probe is another struct"),
        ({5: np.zeros((), [("n", np.int64)])[()]}, "params of probe is another struct"),
        ({5: 5}, "params of probe is another struct"),
        ({6: 1}, "probe takes 6 arguments, got 7"),
    ],
)
def test_arguments_that_do_not_fit_start_nothing(change, message):
    recorder = Recorder()
    arguments = dict(enumerate((X, None, 5, 0.1, 1, STRUCT))) | change
    with pytest.raises(TypeError, match=message):
        launch(recorder, PROBE, 1, tuple(arguments.values()))
    assert not recorder.started


def test_a_grid_of_nothing_starts_nothing():
    recorder = Recorder()
    launch(recorder, PROBE, 0, (X, None, 5, 0.1, 1, STRUCT))
    assert recorder.did_nothing


def test_the_largest_grid_and_one_more():
    recorder = Recorder()
    launch(recorder, PROBE, MAX_GRID_X, (X, None, 5, 0.1, 1, STRUCT))
    assert recorder.started[0][1] == (2**31 - 1, 1, 1)
    with pytest.raises(ValueError, match=r"2147483648 CTAs of probe; .*2147483647; split"):
        launch(recorder, PROBE, MAX_GRID_X + 1, (X, None, 5, 0.1, 1, STRUCT))
    assert len(recorder.started) == 1


# What the operations pass ------------------------------------------------------------------------


def test_what_attention_passes_to_its_kernel(recorder):
    """Strides in items (out's and lse's too), lengths, the mask's window, the scale."""
    q = device_array((2, 33, 6, 64), strides=(0, -256, 640, 2))
    k, v = device_array((2, 50, 2, 64)), device_array((2, 50, 2, 64)).transpose(0, 1, 2, 3)
    out = device_array((2, 6, 33, 64)).transpose(0, 2, 1, 3)
    lse = device_array((6, 2, 33), np.float32).transpose(1, 0, 2)
    options = {"causal": True, "window_size": (7, 9), "softmax_scale": 0.5}
    attention(q, k, v, **options, out=(out, lse), return_lse=True, implementation="tiled")
    specialisation, grid, arguments = recorder.started[0]
    assert all(
        passed is array for passed, array in zip(arguments, (q, k, v, out, lse), strict=False)
    )
    assert arguments[5:7] == (None, None)
    params = arguments[-1]
    assert params["q"].tolist() == (0, -128, 320)
    assert params["k"].tolist() == (50 * 128, 128, 64)
    assert params["out"].tolist() == (6 * 33 * 64, 64, 33 * 64)
    assert params["lse"].tolist() == (33, 1, 66), "batch, query, head"
    assert (params["left"], params["right"]) == (7, 0), "causal cuts the right side"
    assert (params["sq"], params["sk"], params["heads"], params["group"]) == (33, 50, 6, 3)
    assert params["q_offset"] == 50 - 33
    assert params["scale_log2"] == np.float32(0.5 * np.log2(np.e))
    macros = dict(specialisation.macros)
    assert grid == (2 * 6 * -(-33 // (macros["WARPS"] * macros["ROWS"])), 1, 1)
    assert not recorder.allocated


@pytest.mark.parametrize(
    ("options", "window", "q_offset"),
    [
        ({}, (UNBOUNDED, UNBOUNDED), 6),
        ({"causal": True}, (UNBOUNDED, 0), 6),
        ({"window_size": (None, 0)}, (UNBOUNDED, 0), 6),
        ({"window_size": (3, None), "q_offset": -2}, (3, UNBOUNDED), -2),
        ({"window_size": (10**30, np.uint8(2)), "q_offset": 2**60}, (UNBOUNDED, 2), 2**60),
    ],
)
def test_windows_and_offsets_that_are_passed(recorder, options, window, q_offset):
    q, k = device_array((1, 4, 1, 8)), device_array((1, 10, 1, 8))
    _, params, _ = call(recorder, q, k, k, **options)
    assert (params["left"], params["right"]) == window
    assert params["q_offset"] == q_offset


@pytest.mark.parametrize(("dtype", "wide"), [(np.int32, 0), (np.int64, 1)])
def test_integer_arrays_are_passed_with_their_stride_and_width(recorder, dtype, wide):
    q, k = device_array((3, 4, 1, 8)), device_array((3, 10, 1, 8))
    used, offsets = device_array((6,), dtype)[::2], device_array((3,), dtype)[::-1]
    _, params, _ = call(recorder, q, k, k, seqused_k=used, q_offset=offsets)
    assert params["seqused_k"].tolist() == (2, wide)
    assert params["q_offsets"].tolist() == (-1, wide)
    arguments = recorder.started[-1][2]
    assert arguments[5] is offsets
    assert arguments[6] is used


@pytest.mark.parametrize(
    ("dtype", "head_dims", "row", "address", "vec"),
    [
        (np.float16, (64, 64), 64, 2**40, 8),
        (np.float32, (64, 64), 64, 2**40, 4),
        (np.float16, (64, 64), 64, 2**40 + 8, 1),  # starts between two vectors
        (np.float16, (64, 64), 68, 2**40, 1),  # rows of 136 bytes
        (np.float16, (64, 64), 72, 2**40, 8),
        (np.float32, (64, 64), 68, 2**40, 4),
        (np.float16, (60, 64), 64, 2**40, 1),  # D is no whole number of vectors
        (np.float32, (60, 64), 64, 2**40, 4),
        (np.float16, (64, 12), 64, 2**40, 1),  # nor Dv
    ],
)
def test_vectors_only_where_every_row_is_aligned(recorder, dtype, head_dims, row, address, vec):
    """One array out of line is enough; out's alignment does not matter."""
    size = np.dtype(dtype).itemsize
    strides = (3 * 2 * row * size, 2 * row * size, row * size, size)
    for crooked in range(3):
        arrays = [
            device_array((2, 3, 2, dim), dtype, strides, address if i == crooked else None)
            for i, dim in enumerate((head_dims[0], head_dims[0], head_dims[1]))
        ]
        out = device_array((2, 3, 2, head_dims[1] + 1), dtype)[..., 1:]
        macros, _, _ = call(recorder, *arrays, out=out)
        assert macros["VEC"] == vec


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_arrays_that_start_within_an_item_are_refused(recorder, dtype):
    """A GPU cannot read them: it would fault, and take the process's context with it."""
    aligned = [device_array((1, 2, 1, 8), dtype) for _ in range(4)]
    for crooked in range(4):
        arrays = list(aligned)
        arrays[crooked] = device_array((1, 2, 1, 8), dtype, address=2**41 + 1)
        with pytest.raises(ValueError, match="align"):
            attention(*arrays[:3], out=arrays[3], implementation="tiled")
    x = device_array((4, 8), dtype, address=2**41 + 1)
    with pytest.raises(ValueError, match="align"):
        softmax(x)
    assert not recorder.started


def test_a_scale_beyond_float32_is_refused(recorder):
    """The kernels have it as float32: it would be infinite, and the result NaN."""
    q = device_array((1, 2, 1, 8))
    with pytest.raises(ValueError, match="softmax_scale"):
        attention(q, q, q, softmax_scale=1e300, implementation="tiled")
    assert recorder.did_nothing


def test_the_naive_kernel_has_a_cta_for_each_row(recorder):
    q, k = device_array((2, 5, 6, 64)), device_array((2, 9, 3, 64))
    macros, params, ctas = call(recorder, q, k, k, implementation="naive")
    assert ctas == 2 * 5 * 6
    assert params["group"] == 2
    assert macros["HEAD_DIM"] == 64


def test_a_repeated_call_fills_in_nothing_anew(recorder):
    arrays = [device_array((2, 5, 6, 64)) for _ in range(3)]
    for _ in range(2):
        attention(*arrays, causal=True, implementation="tiled")
        softmax(arrays[0])
    first, first_softmax, second, second_softmax = (started[2] for started in recorder.started)
    assert first[-1] is second[-1]
    assert first_softmax[-1] is second_softmax[-1]


@pytest.mark.parametrize("return_lse", [False, True])
def test_allocations_are_the_results_and_no_more(recorder, return_lse):
    q, k, v = (device_array(shape) for shape in ((2, 5, 6, 64), (2, 9, 3, 64), (2, 9, 3, 32)))
    results = attention(q, k, v, return_lse=return_lse, implementation="tiled")
    shapes = [(2, 5, 6, 32), (2, 6, 5)] if return_lse else [(2, 5, 6, 32)]
    assert [array.shape for array in recorder.allocated] == shapes
    results = results if return_lse else (results,)
    assert all(a is b for a, b in zip(results, recorder.allocated, strict=True))
    lse = recorder.started[0][2][4]
    assert lse is (results[1] if return_lse else None)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)], ids=str)
def test_empty_problems_start_nothing(recorder, shape):
    batch, length, heads = shape
    q, k = device_array((batch, length, heads, 8)), device_array((batch, 5, heads, 8))
    out, lse = attention(q, k, k, return_lse=True, implementation="tiled")
    assert (out.shape, lse.shape) == ((*shape, 8), (batch, heads, length))
    into = device_array((*shape, 8))
    assert attention(q, k, k, out=into, implementation="tiled") is into
    assert softmax(q, out=into) is into
    assert softmax(device_array((3, 0))).shape == (3, 0)
    assert softmax_backward(q, q).shape == q.shape
    assert not recorder.started


def test_queries_without_keys_still_have_results_to_write(recorder):
    q, k = device_array((2, 3, 4, 8)), device_array((2, 0, 4, 8))
    _, params, ctas = call(recorder, q, k, k)
    assert (params["sk"], ctas) == (0, 2 * 4)


@pytest.mark.parametrize(
    ("shape", "passed"),
    [((2**16, 1, 2**15, 8), "2147483648 CTAs"), ((1, 2**30 + 1, 1, 8), "Sq = 1073741825")],
)
def test_problems_beyond_what_a_launch_can_do(recorder, shape, passed):
    q = device_array(shape, strides=(0, 0, 0, 2))
    k = device_array((shape[0], 3, shape[2], 8), strides=(0, 0, 0, 2))
    with pytest.raises(ValueError, match=rf"{passed}.*; .*at most.*; split"):
        attention(q, k, k, implementation="naive")
    assert not recorder.started


def test_what_softmax_passes_to_its_kernel(recorder):
    """Neighbouring axes that lie evenly are one; the last axis is the row."""
    x = device_array((3, 4, 5, 24), np.float32)
    softmax(x)
    strided = device_array((3, 4, 10, 24), np.float32)[:, ::-1, ::2]
    softmax_backward(strided, x)
    (forward, grid, (_, result, params)), (backward, _, arguments) = recorder.started
    assert result.shape == x.shape
    assert dict(forward.macros)["VEC"] == 4
    assert grid == (-(-3 * 4 * 5 // (forward.threads // dict(forward.macros)["LANES"])), 1, 1)
    assert (params["rows"], params["length"]) == (60, 24)
    assert params["shape"].tolist() == [1, 1, 1, 60]
    assert params["strides"].tolist() == [[0, 0, 0, 24]] * 2
    assert backward.spec.entry == "softmax_backward"
    assert arguments[0] is strided
    assert arguments[-1]["shape"].tolist() == [1, 3, 4, 5]
    assert arguments[-1]["strides"].tolist() == [
        [0, 960, -240, 48],
        [0, 480, 120, 24],
        [0, 480, 120, 24],
    ]


ARRAY_OPTIONS = {
    "mask": ((3, 5), bool),
    "bias": ((4, 3, 5), np.float16),
    "alibi_slopes": ((4,), np.float32),
    "sinks": ((4,), np.float32),
}


TEACHING = ("tiled", "naive")
ONLY_FLASH = (*ARRAY_OPTIONS, "softcap", "dropout_p")


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        *((implementation, name) for implementation in TEACHING for name in ONLY_FLASH),
        *((each, name) for each in (*TEACHING, "flash") for name in ("rotary", "mask_mod")),
    ],
)
def test_what_has_no_kernel_says_so_and_does_nothing(recorder, implementation, name):
    q, k = device_array((2, 3, 4, 8)), device_array((2, 5, 2, 8))
    options: dict[str, Any] = {"implementation": implementation}
    if name in ARRAY_OPTIONS:
        options[name] = device_array(*ARRAY_OPTIONS[name])
    elif name == "rotary":
        options[name] = device_array((9, 4)), device_array((9, 4))
    elif name == "mask_mod":
        options[name] = lambda b, h, i, j: j <= i
    else:
        options |= {name: 0.5, "seed": 1}
    with pytest.raises(NotImplementedError) as failure:
        attention(q, k, k, **options)
    said, _, then = str(failure.value).partition("; ")
    assert name in said
    assert "CPU path has every option" in then
    assert recorder.did_nothing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_takes_the_other_dtypes_on_a_kernel_of_their_own(recorder, dtype):
    """Vectors are four items: 8 bytes of bfloat16, where aligned to them."""
    itemsize = dtype_of(dtype).itemsize
    q = device_array((2, 70, 4, 64), dtype_of(dtype))
    macros, _, ctas = call(recorder, q, q, q, implementation="flash", softcap=5.0)
    assert (macros["DTYPE"], macros["VEC"], macros["COLUMN_LANES"]) == (dtype, 4, 8)
    assert (macros["SOFTCAP"], macros["BIAS"]) == ("true", "void")
    assert ctas == 2 * 4 * -(-70 // 128)
    strides = (70 * 4 * 68 * itemsize, 4 * 68 * itemsize, 68 * itemsize, itemsize)
    padded = device_array((2, 70, 4, 64), dtype_of(dtype), strides)
    assert call(recorder, padded, padded, padded, implementation="flash")[0]["VEC"] == 4
    strides = (70 * 4 * 66 * itemsize, 4 * 66 * itemsize, 66 * itemsize, itemsize)
    crooked = device_array((2, 70, 4, 64), dtype_of(dtype), strides)
    assert call(recorder, q, crooked, q, implementation="flash")[0]["VEC"] == 1
    wide = device_array((2, 70, 4, 160), dtype_of(dtype))
    _, _, ctas = call(recorder, q, q, wide, implementation="flash")
    assert ctas == 2 * 4 * -(-70 // 128)


@pytest.mark.parametrize("crooked", [1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_flash_refuses_keys_that_lie_too_far_apart(recorder, crooked, sign):
    """A tile's offsets have 32 bits; those of the tiled and of the float32 kernel have 64."""
    far = device_array((1, 2, 1, 64), np.float16, (2**40, sign * 2**26, 128, 2))
    near = device_array((1, 2, 1, 64), np.float16, (2**40, sign * (2**26 - 16), 128, 2))
    arrays = [near, near, near]
    call(recorder, *arrays, implementation="flash")
    arrays[crooked] = far
    with pytest.raises(ValueError, match=r"bytes from one key to the next; .*'tiled'"):
        attention(*arrays)
    call(recorder, *arrays, implementation="tiled")
    far = device_array((1, 2, 1, 64), np.float32, (2**40, sign * 2**30, 256, 4))
    call(recorder, far, far, far, implementation="flash")


def test_options_of_the_call_choose_the_flash_specialisation(recorder):
    q = device_array((2, 32, 4, 64), np.float16)
    macros, params, ctas = call(recorder, q, q, q, implementation="flash")
    assert (macros["BIAS"], macros["MASK"], macros["DROPOUT"]) == ("void", "false", "false")
    assert ctas == 2 * 4 * -(-32 // 128)
    bias = device_array((4, 1, 32), np.float32)
    macros, params, _ = call(
        recorder, q, q, q, implementation="flash", bias=bias, softcap=5.0, dropout_p=0.25, seed=7
    )
    assert (macros["BIAS"], macros["BIAS_VEC"]) == ("float32", 2)
    assert (macros["SOFTCAP"], macros["DROPOUT"], macros["SINKS"]) == ("true", "true", "void")
    assert params["scores"]["bias"].tolist() == (0, 32, 0, 1)
    assert (params["scores"]["seed"], params["scores"]["keep_from"]) == (7, 16384)


def backward_call(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of a backward call by name, and its options: (B, Sq, Sk, H, G, D, Dv) as in BASE."""
    f32 = np.float32
    shapes = {"dout": (2, 3, 4, 6), "q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 6)}
    arrays = {name: device_array(shape, f32) for name, shape in shapes.items()}
    arrays |= {"out": device_array((2, 3, 4, 6), f32), "lse": device_array((2, 4, 3), f32)}
    return arrays, {"implementation": "naive", **options}


def started_backward(recorder: Recorder) -> dict[str, tuple[dict[str, Any], Specialisation, int]]:
    """By kernel: its arguments by name, its specialisation, its CTAs."""
    found = {}
    for specialisation, grid, arguments in recorder.started:
        parameters = specialisation.spec.parameters
        named = {p.name: a for p, a in zip(parameters, arguments, strict=True)}
        kernel = specialisation.spec.entry.removeprefix("attention_backward_naive_")
        found[kernel] = (named, specialisation, grid[0])
    return found


def test_what_the_backward_passes_to_its_kernels(recorder):
    """In order, each with the call's arrays under the names of its parameters."""
    bias, sinks = device_array((4, 1, 5), np.float32), device_array((8,), np.float16)[::2]
    arrays, options = backward_call(bias=bias, sinks=sinks, softmax_scale=0.5, causal=True)
    arrays["lse"] = device_array((4, 2, 3), np.float32).transpose(1, 0, 2)
    dlse = device_array((2, 4, 6), np.float32)[..., :3]
    grads = attention_backward(*arrays.values(), **options, dlse=dlse)
    found = started_backward(recorder)
    assert list(found) == ["dq", "dkdv", "dbias", "dsinks"]
    assert [ctas for _, _, ctas in found.values()] == [2 * 4 * 3, 2 * 2 * 5, 1, 4]
    call_arrays = {**arrays, "bias": bias, "sinks": sinks, "dlse": dlse, **grads._asdict()}
    for arguments, _, _ in found.values():
        params = arguments.pop("params")
        delta = arguments.pop("delta")
        assert (delta.dtype, delta.shape) == (np.float32, (2 * 4 * 3,))
        assert delta.data.ptr == recorder.allocated[-1].data.ptr
        for name, argument in arguments.items():
            if name in call_arrays:
                assert argument is call_arrays[name]
            else:
                assert argument is None, f"{name} was not given"
    assert params["attention"]["lse"].tolist() == (3, 1, 6), "batch, query, head"
    assert params["dlse"].tolist() == (24, 1, 6)
    assert params["dout"].tolist() == (72, 24, 6)
    assert params["dk"].tolist() == (80, 16, 8)
    assert params["dbias"].tolist() == (0, 5, 0, 1)
    assert (params["dsinks_stride"], params["attention"]["scores"]["sinks_stride"]) == (1, 2)
    assert (params["batch"], params["accumulate"]) == (2, 0)
    assert params["scale"] == 0.5
    assert dict(found["dbias"][1].macros)["LANES"] == 1, "6 scores an item"


def test_a_backward_with_grads_and_workspace_allocates_nothing(recorder):
    arrays, options = backward_call()
    targets = [device_array(arrays[name].shape, np.float32) for name in "qkv"]
    workspace = device_array((2 * 4 * 3 + 1,), np.float32)
    grads = attention_backward(
        *arrays.values(),
        **options,
        grads=AttentionGrads(*targets, None, None),
        workspace=workspace,
        accumulate=True,
    )
    assert not recorder.allocated
    assert all(given is target for given, target in zip(grads, targets, strict=False))
    delta = started_backward(recorder)["dq"][0]["delta"]
    assert (delta.data.ptr, delta.size) == (workspace.data.ptr, 2 * 4 * 3)
    assert started_backward(recorder)["dq"][0]["params"]["accumulate"] == 1


def half_backward_call(**options: Any) -> tuple[list[Any], dict[str, Any]]:
    """A call that flash takes: (B, Sq, Sk, H, G, D, Dv) = (2, 70, 90, 4, 2, 8, 16)."""
    shapes = (2, 70, 4, 16), (2, 70, 4, 8), (2, 90, 2, 8), (2, 90, 2, 16), (2, 70, 4, 16)
    return [*map(device_array, shapes), device_array((2, 4, 70), np.float32)], options


ROWS = 2 * 4 * 128  # 70 query rows are padded to 128


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("deterministic", "bias_shape", "kernels", "scratch"),
    [
        (False, None, ["delta", "dkdv", "convert"], [2 * ROWS, 8 * ROWS]),
        (True, None, ["delta", "dkdv", "dq"], [2 * ROWS]),
        (False, (4, 1, 90), ["delta", "dkdv", "convert", "dbias"], [2 * ROWS, 8 * ROWS, 360]),
        (True, (4, 1, 90), ["delta", "dkdv", "dq", "dbias"], [2 * ROWS, 2 * 4 * 70 * 90]),
        (False, (2, 4, 70, 90), ["delta", "dkdv", "convert"], [2 * ROWS, 8 * ROWS]),
    ],
    ids=str,
)
def test_what_the_flash_backward_launches(
    recorder, monkeypatch, deterministic, bias_shape, kernels, scratch, accumulate
):
    """The kernels by the options, and the scratch that they share, as documented."""
    filled: list[Any] = []
    module = sys.modules["cupyattn.ops.attention_backward"]
    monkeypatch.setattr(module, "_fill_with_zeros", lambda _, names: filled.extend(names))
    bias = None if bias_shape is None else device_array(bias_shape)
    arrays, options = half_backward_call(bias=bias, sinks=device_array((4,)), causal=True)
    grads = AttentionGrads(*map(device_array, [a.shape for a in arrays[1:4]]), None, None)
    names = {"dbias": bias, "dsinks": options["sinks"]}
    targets = {n: None if a is None else device_array(a.shape) for n, a in names.items()}
    grads = grads._replace(**targets)
    attention_backward(
        *arrays, **options, deterministic=deterministic, grads=grads, accumulate=accumulate
    )
    entries = [s.spec.entry.removeprefix("attention_backward_") for s, _, _ in recorder.started]
    assert entries == [*kernels, "dsinks"]
    (workspace,) = recorder.allocated
    *others, last = scratch
    assert workspace.nbytes == sum(-(-4 * n // 256) * 256 for n in others) + 4 * last

    named = {}
    for specialisation, _, arguments in recorder.started:
        parameters = [parameter.name for parameter in specialisation.spec.parameters]
        named[specialisation.spec.entry] = dict(zip(parameters, arguments, strict=True))
    delta, dkdv = (named[f"attention_backward_{name}"] for name in ("delta", "dkdv"))
    zeroed = sum(scratch[1:])
    assert (0 if delta["zeroed"] is None else delta["zeroed"].size) == zeroed
    assert (dkdv["params"]["zeroed"], dkdv["params"]["accumulate"]) == (zeroed, accumulate)
    assert dkdv["params"]["rows_padded"] == 128
    broadcasts = bias_shape == (4, 1, 90)
    if broadcasts:
        summed = named["attention_backward_dbias"]
        assert dkdv["dbias"] is summed["scratch"]
        assert summed["dbias"] is grads.dbias
        assert summed["params"]["repeats"].tolist() == ([2, 1, 70, 1] if deterministic else [1] * 4)
    elif bias is not None:
        assert dkdv["dbias"] is grads.dbias
    assert filled == (["dbias"] if bias is not None and not broadcasts and not accumulate else [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("bias_shape", "kernels"),
    [
        (None, ["f32_delta", "f32_dkdv", "f32_dq"]),
        ((4, 3, 5), ["f32_delta", "f32_dkdv", "f32_dq", "naive_dbias"]),
        ((2, 4, 3, 5), ["f32_delta", "f32_dkdv", "f32_dq"]),
    ],
    ids=str,
)
def test_what_the_float_backward_launches(recorder, monkeypatch, dtype, bias_shape, kernels):
    filled: list[Any] = []
    module = sys.modules["cupyattn.ops.attention_backward"]
    monkeypatch.setattr(module, "_fill_with_zeros", lambda _, names: filled.extend(names))
    arrays, _ = backward_call()
    arrays = {
        name: array if name == "lse" else device_array(array.shape, dtype_of(dtype))
        for name, array in arrays.items()
    }
    bias = None if bias_shape is None else device_array(bias_shape, np.float32)
    grads = attention_backward(*arrays.values(), bias=bias, sinks=device_array((4,), np.float32))
    entries = [s.spec.entry.removeprefix("attention_backward_") for s, _, _ in recorder.started]
    assert entries == [*kernels, "naive_dsinks"]
    assert [grid[0] for _, grid, _ in recorder.started[:3]] == [2 * 4 * 3 // 8, 2 * 2, 2 * 4]
    specialisation, _, arguments = recorder.started[1]
    names = [parameter.name for parameter in specialisation.spec.parameters]
    macros, named = dict(specialisation.macros), dict(zip(names, arguments, strict=True))
    assert named["delta"].size == 2 * 4 * 3
    direct = bias_shape == (2, 4, 3, 5)
    assert macros["DBIAS"] == ("float32" if direct else "void")
    assert filled == (["dbias"] if direct else [])
    if bias is not None:
        assert named["dbias"] is grads.dbias


@pytest.mark.parametrize("crooked", ["dout", "q", "k", "v"])
def test_the_flash_backward_refuses_rows_that_lie_too_far_apart(recorder, crooked):
    shape = (1, 2, 1, 8)
    near = {name: device_array(shape) for name in ("dout", "q", "k", "v", "out")}
    near["lse"] = device_array((1, 1, 2), np.float32)
    near[crooked] = device_array(shape, np.float16, (2**40, 2**26, 128, 2))
    with pytest.raises(ValueError, match=rf"{crooked} has .* one row to the next; .*'naive'"):
        attention_backward(*near.values())
    assert recorder.did_nothing
    near[crooked] = device_array(shape, np.float16, (2**40, -(2**26) + 16, 128, 2))
    attention_backward(*near.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: device_array((95,), np.uint8), r"95 bytes; .*needs 96.*empty\(96, 'uint8'\)"),
        (lambda: device_array((48, 2), np.uint8)[:, :1], r"48 bytes, not contiguous; .*needs 96"),
        (lambda: device_array((99,), np.uint8)[1:], r"98 bytes; .*aligned to 16"),
    ],
    ids=["small", "strided", "misaligned"],
)
def test_a_workspace_that_does_not_do_is_refused(recorder, make, message):
    arrays, options = backward_call()
    with pytest.raises(ValueError, match=rf"workspace has {message}"):
        attention_backward(*arrays.values(), **options, workspace=make())
    assert not recorder.started


def test_a_workspace_may_not_overlap_an_array(recorder):
    arrays, options = backward_call()
    with pytest.raises(ValueError, match=r"workspace overlaps lse in memory"):
        attention_backward(*arrays.values(), **options, workspace=arrays["lse"])
    assert recorder.did_nothing


def test_a_backward_plan_is_made_once(recorder):
    """Arrays of one description share the kernels' struct; other options do not."""
    for options in ({}, {}, {"causal": True}):
        arrays, others = backward_call(**options)
        attention_backward(*arrays.values(), **others)
    first, again, causal = (started[2][-1] for started in recorder.started[::2])
    assert first is again
    assert first is not causal


def test_backward_without_a_kernel_names_another(recorder):
    q, k = device_array((2, 3, 4, 8)), device_array((2, 5, 2, 8))
    lse = device_array((2, 4, 3), np.float32)
    with pytest.raises(NotImplementedError, match=r"attention_backward.*'naive'.*NumPy arrays"):
        attention_backward(q, q, k, k, q, lse, implementation="tiled")
    assert recorder.did_nothing


@pytest.mark.parametrize("name", ["workspace", "mask", "q_offset", "seqused_k", "out"])
def test_numpy_arrays_among_the_options_are_refused(recorder, name):
    q, k = device_array((2, 3, 4, 8)), device_array((2, 5, 2, 8))
    with pytest.raises(TypeError, match=rf"{name} is numpy.*all are CuPy"):
        attention(q, k, k, **{name: np.zeros(2, np.int32)}, implementation="tiled")
    assert recorder.did_nothing


def test_bad_results_are_refused_before_anything_is_done(recorder):
    q, k = device_array((2, 3, 4, 8)), device_array((2, 5, 2, 8))
    for out in (
        q,
        device_array((2, 3, 4, 8), np.float32),
        device_array((2, 3, 4, 7)),
        device_array((2, 3, 4, 8), strides=(0, 64, 16, 2)),
        device_array((2, 3, 4, 8), address=k.data.ptr + 16),
    ):
        with pytest.raises((TypeError, ValueError), match="out"):
            attention(q, k, k, out=out, implementation="tiled")
        with pytest.raises((TypeError, ValueError), match="out"):
            softmax(q, out=q if out is q else device_array((2, 3, 4, 7)))
    assert recorder.did_nothing


@pytest.mark.parametrize(
    ("capability", "override", "number"),
    [(75, "", 75), (90, "", 90), (90, "75", 75), (90, " 80 ", 80), (75, "75", 75)],
)
def test_the_architecture_that_is_compiled_for(monkeypatch, capability, override, number):
    monkeypatch.setenv("CUPYATTN_ARCH", override)
    assert device_module._arch_for(capability).number == number


@pytest.mark.parametrize(
    ("capability", "override", "kind", "message"),
    [
        (70, "", RuntimeError, r"capability 7\.0; 7\.5 \(Turing\).*; .*NumPy arrays"),
        (90, "turing", ValueError, r"CUPYATTN_ARCH='turing'.*9\.0; .*such as 75.*; set"),
        (90, "7.5", ValueError, r"CUPYATTN_ARCH='7\.5'"),
        (75, "90", ValueError, r"not above the device's own"),
        (90, "76", ValueError, r"sm_76.*known are 75"),
        (90, "70", ValueError, r"sm_70.*known are 75"),
        (130, "", ValueError, r"sm_130.*CUPYATTN_ARCH=75"),
    ],
)
def test_architectures_that_cannot_be(monkeypatch, capability, override, kind, message):
    monkeypatch.setenv("CUPYATTN_ARCH", override)
    with pytest.raises(kind, match=message):
        device_module._arch_for(capability)


# Streams, allocations and graphs -----------------------------------------------------------------

SPIN = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""
LONG = 400_000_000  # ns; a call takes some tens of thousands


@pytest.fixture(scope="module")
def spin() -> Callable[[int], None]:
    """Keep the current stream busy for some nanoseconds."""
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")
    kernel((1,), (1,), (np.uint64(0),))  # compiled and loaded before anything is timed
    cupy.cuda.Device().synchronize()
    return lambda nanoseconds: kernel((1,), (1,), (np.uint64(nanoseconds),))


@pytest.fixture
def stream() -> Iterator[Any]:
    """A stream that does not wait for the default one, nor the other way round."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    yield stream
    stream.synchronize()


class Work:
    """Every function that has a kernel, called on arrays made once."""

    def __init__(self) -> None:
        import cupy

        rng = np.random.default_rng(0)
        self.q = cupy.asarray(rng.standard_normal((2, 40, 4, 64), "f4"))
        self.k = cupy.asarray(rng.standard_normal((2, 50, 2, 64), "f4"))
        self.dout = cupy.asarray(rng.standard_normal((2, 40, 4, 64), "f4"))
        self.out = tuple(cupy.empty_like(self.q) for _ in range(4))
        self.lse = cupy.empty((2, 4, 40), np.float32)
        self.used = cupy.asarray(np.array([50, 33]))
        self.calls: dict[str, Callable[[bool], Any]] = {
            "attention tiled": lambda given: self._attention("tiled", 0, given),
            "attention naive": lambda given: self._attention("naive", 1, given),
            "softmax": lambda given: softmax(self.q, out=self.out[2] if given else None),
            "softmax_backward": lambda given: softmax_backward(
                self.dout, self.q, dx=self.out[3] if given else None
            ),
        }
        for function in self.calls.values():  # compiled, loaded, planned
            function(True)
            function(False)
        cupy.cuda.Device().synchronize()

    def _attention(self, implementation: str, at: int, given: bool) -> Any:
        return attention(
            self.q,
            self.k,
            self.k,
            causal=True,
            seqused_k=self.used,
            return_lse=True,
            implementation=implementation,
            out=(self.out[at], self.lse) if given else None,
        )

    def results(self) -> list[np.ndarray]:
        """What every function gives for the present contents of q."""
        import cupy

        for function in self.calls.values():
            function(True)
        cupy.cuda.Device().synchronize()
        return [cupy.asnumpy(out) for out in self.out]


@pytest.fixture(scope="module")
def work() -> Work:
    return Work()


FUNCTIONS = ("attention tiled", "attention naive", "softmax", "softmax_backward")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_work_is_queued_on_the_current_stream(work, spin, stream, name):
    """Behind what the stream does first: new contents of q, which arrive late."""
    import cupy

    old = work.q.copy()
    fresh = -2 * old
    try:
        work.q[...] = fresh
        expected = dict(zip(FUNCTIONS, work.results(), strict=True))[name]
        work.q[...] = old
        stale = dict(zip(FUNCTIONS, work.results(), strict=True))[name]
        assert (stale != expected).any()
        with stream:
            work.calls[name](False)  # the stream's own memory pool has what it needs
            stream.synchronize()
            spin(LONG // 4)
            work.q[...] = fresh
            result = work.calls[name](False)
        assert not stream.done, "the call waited for the stream"
        stream.synchronize()
        result = result[0] if isinstance(result, tuple) else result
        assert_array_equal(cupy.asnumpy(result), expected)
    finally:
        cupy.cuda.Device().synchronize()
        work.q[...] = old
        cupy.cuda.Device().synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("given_out", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_waits_for_the_device(work, spin, stream, name, given_out):
    """A call returns while its own stream, and another one, are still busy."""
    import cupy

    other = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work.calls[name](given_out)  # the stream's own memory pool has what it needs
        stream.synchronize()
        spin(LONG)
    with other:
        spin(LONG)
    with stream:
        result = work.calls[name](given_out)
    assert not stream.done
    assert not other.done
    stream.synchronize()
    other.synchronize()
    del result


@contextmanager
def count_allocations() -> Iterator[list[int]]:
    """The sizes of what is taken from CuPy's memory pool meanwhile."""
    import cupy

    sizes: list[int] = []

    class Count(cupy.cuda.MemoryHook):
        name = "count_allocations"

        def malloc_preprocess(self, **kwargs: Any) -> None:
            sizes.append(kwargs["size"])

    with Count():
        yield sizes


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_results_are_allocated(work, name):
    import cupy

    pool = cupy.get_default_memory_pool()
    gc.collect()
    used = pool.used_bytes()
    with count_allocations() as sizes:
        work.calls[name](True)
    assert sizes == []
    assert pool.used_bytes() == used
    with count_allocations() as sizes:
        result = work.calls[name](False)
    results = result if isinstance(result, tuple) else (result,)
    assert sizes == [array.nbytes for array in results]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_captured_call_is_replayed_with_new_contents(work, stream, name):
    import cupy

    old = work.q.copy()
    index = FUNCTIONS.index(name)
    try:
        with stream:
            stream.begin_capture()
            try:
                work.calls[name](True)
            finally:
                graph = stream.end_capture()
        for factor in (1.0, -2.0):
            work.q[...] = factor * old
            expected = work.results()[index]
            work.out[index].fill(0)
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert_array_equal(cupy.asnumpy(work.out[index]), expected)
    finally:
        work.q[...] = old
        cupy.cuda.Device().synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("naive", "float16"), ("flash", "float16"), ("flash", "float32")],
)
def test_a_backward_can_be_captured_and_allocates_nothing(stream, implementation, dtype):
    """With grads and a workspace; bias and sinks bring every kernel."""
    import cupy

    rng = np.random.default_rng(0)
    q, k, v, dout = (
        cupy.asarray(rng.standard_normal((2, 70, 2, 32)).astype(dtype_of(dtype))) for _ in range(4)
    )
    bias, sinks = (cupy.asarray(rng.standard_normal(n, "f4")) for n in (70, 2))
    options = {"bias": bias, "sinks": sinks, "causal": True}
    results = attention(q, k, v, **options, return_lse=True, implementation="flash")
    options |= {"implementation": implementation, "deterministic": True}
    expected = attention_backward(dout, q, k, v, *results, **options)
    options["grads"] = AttentionGrads(*map(cupy.empty_like, expected))
    options["workspace"] = cupy.empty(2**20, np.uint8)
    attention_backward(dout, q, k, v, *results, **options)
    cupy.cuda.Device().synchronize()
    with stream, count_allocations() as sizes:
        stream.begin_capture()
        try:
            attention_backward(dout, q, k, v, *results, **options)
        finally:
            graph = stream.end_capture()
    assert sizes == []
    for gradient in options["grads"]:
        gradient.fill(7)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for gradient, wanted in zip(options["grads"], expected, strict=True):
        assert_array_equal(cupy.asnumpy(gradient), cupy.asnumpy(wanted))


@pytest.mark.gpu
def test_a_first_call_within_a_capture_says_what_to_do(stream):
    """And the same call outside, and then in a capture again, works."""
    import cupy

    q = cupy.ones((1, 3, 1, 239), np.float32)  # head dims that nothing else here has
    v, out = cupy.ones((1, 3, 1, 197), np.float32), cupy.empty((1, 3, 1, 197), np.float32)
    cupy.cuda.Device().synchronize()

    def run() -> None:
        attention(q, q, v, out=out, implementation="naive")

    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"attention_naive.*; .*; call once first"):
                run()
        finally:
            stream.end_capture()
        run()
        stream.synchronize()
        expected = cupy.asnumpy(out)
        stream.begin_capture()
        try:
            run()
        finally:
            graph = stream.end_capture()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert_array_equal(cupy.asnumpy(out), expected)
    assert_allclose(expected, 1, rtol=1e-6)


@pytest.mark.gpu
def test_threads_on_streams_of_their_own_load_a_kernel_once():
    """All of them meet its first call together."""
    import cupy

    q, v = cupy.ones((1, 3, 1, 233), np.float32), cupy.ones((1, 3, 1, 191), np.float32)
    cupy.cuda.Device().synchronize()
    before = len(device_module.cuda_device(0).loaded)
    barrier, results = threading.Barrier(8), {}

    def run(number: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            barrier.wait()
            out = attention(q, q, v, implementation="naive")
            stream.synchronize()
            results[number] = cupy.asnumpy(out)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(device_module.cuda_device(0).loaded) == before + 1
    assert sorted(results) == list(range(8))
    for result in results.values():
        assert_allclose(result, 1, rtol=1e-6)

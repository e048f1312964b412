"""What attention passes to its kernels, and which specialisation it chooses."""

from __future__ import annotations

import numpy as np
import pytest
from support.recording_device import backward_call, device_array, launched
from support.strategies import dtype_of

from cupyattn import AttentionGrads, attention, attention_backward, softmax, softmax_backward
from cupyattn.kernels.structs.attention import UNBOUNDED
from cupyattn.ops.attention import checks as attention_checks
from cupyattn.ops.attention import params as attention_params


def test_what_attention_passes_to_its_kernel(recorder):
    """Strides in items (out's and lse's too), lengths, the mask's window, the scale."""
    q = device_array((2, 33, 6, 64), strides=(0, -256, 640, 2))
    k, v = device_array((2, 50, 2, 64)), device_array((2, 50, 2, 64)).transpose(0, 1, 2, 3)
    out = device_array((2, 6, 33, 64)).transpose(0, 2, 1, 3)
    lse = device_array((6, 2, 33), np.float32).transpose(1, 0, 2)
    options = {"causal": True, "window_size": (7, 9), "softmax_scale": 0.5}
    attention(q, k, v, **options, out=(out, lse), return_lse=True)
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
    assert grid == (2 * 6, 1, 1), "33 queries are one tile"
    assert dict(specialisation.macros)["HEAD_DIM"] == 64
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
    _, params, _ = launched(recorder, q, k, k, **options)
    assert (params["left"], params["right"]) == window
    assert params["q_offset"] == q_offset


@pytest.mark.parametrize(("dtype", "wide"), [(np.int32, 0), (np.int64, 1)])
def test_integer_arrays_are_passed_with_their_stride_and_width(recorder, dtype, wide):
    q, k = device_array((3, 4, 1, 8)), device_array((3, 10, 1, 8))
    used, offsets = device_array((6,), dtype)[::2], device_array((3,), dtype)[::-1]
    _, params, _ = launched(recorder, q, k, k, seqused_k=used, q_offset=offsets)
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
    """One array out of line is enough."""
    size = np.dtype(dtype).itemsize
    strides = (3 * 2 * row * size, 2 * row * size, row * size, size)
    for crooked in range(4):
        arrays = [
            device_array((2, 3, 2, dim), dtype, strides, address if i == crooked else None)
            for i, dim in enumerate((head_dims[0], head_dims[0], head_dims[1], head_dims[1]))
        ]
        macros, _, _ = launched(recorder, *arrays[:3], out=arrays[3])
        assert macros["VEC"] == vec


@pytest.mark.parametrize(("implementation", "tile_q"), [("naive", 1), ("tiled", 32)])
def test_what_attention_passes_to_the_teaching_kernels(recorder, implementation, tile_q):
    q = device_array((2, 33, 6, 64), strides=(0, -256, 640, 2))
    k, v = device_array((2, 50, 2, 64)), device_array((2, 50, 2, 32))
    out = device_array((2, 6, 33, 32)).transpose(0, 2, 1, 3)
    lse = device_array((6, 2, 33), np.float32).transpose(1, 0, 2)
    attention(
        q, k, v, causal=True, softmax_scale=0.5, out=(out, lse), return_lse=True,
        implementation=implementation,
    )  # fmt: skip
    ((specialisation, grid, (*arguments, params)),) = recorder.started
    assert all(passed is x for passed, x in zip(arguments, (q, k, v, out, lse), strict=True))
    assert grid == (2 * 6 * -(-33 // tile_q), 1, 1)
    assert dict(specialisation.macros)["HEAD_DIM_V"] == 32
    assert params["q"].tolist() == (0, -128, 320)
    assert params["k"].tolist() == (50 * 128, 128, 64)
    assert params["out"].tolist() == (6 * 33 * 32, 32, 33 * 32)
    assert params["lse"].tolist() == (33, 1, 66), "batch, query, head"
    numbers = [params[name] for name in ("heads", "group", "sq", "sk", "causal", "softmax_scale")]
    assert numbers == [6, 3, 33, 50, 1, 0.5]


def test_what_the_naive_backward_passes_to_its_kernel(recorder):
    """One launch, with a CTA for each query row and each key, and no scratch memory."""
    arrays, _ = backward_call()
    dlse = device_array((2, 4, 6), np.float32)[..., :3]
    targets = [device_array(arrays[name].shape, np.float32) for name in "qkv"]
    attention_backward(
        *arrays.values(), dlse=dlse, grads=AttentionGrads(*targets), accumulate=True,
        implementation="naive",
    )  # fmt: skip
    ((_, grid, (*arguments, params)),) = recorder.started
    given = (*arrays.values(), dlse, *targets)
    assert all(passed is x for passed, x in zip(arguments, given, strict=True))
    assert grid == (2 * (4 * 3 + 2 * 5), 1, 1)
    assert params["dlse"].tolist() == (24, 1, 6)
    assert params["dk"].tolist() == (80, 16, 8)
    numbers = [params[name] for name in ("batch", "heads", "group", "sq", "sk", "accumulate")]
    assert numbers == [2, 4, 2, 3, 5, 1]
    assert params["causal"] == 0
    assert not recorder.allocated


def test_a_repeated_call_fills_in_nothing_anew(recorder):
    arrays = [device_array((2, 5, 6, 64)) for _ in range(3)]
    for _ in range(2):
        attention(*arrays, causal=True)
        softmax(arrays[0])
    first, first_softmax, second, second_softmax = (started[2] for started in recorder.started)
    assert first[-1] is second[-1]
    assert first_softmax[-1] is second_softmax[-1]


def test_another_seed_is_the_same_problem(recorder, monkeypatch):
    """A training step draws another dropout mask, and neither checks nor plans anything anew."""
    q = device_array((1, 4, 1, 8))
    forward = {"dropout_p": 0.5, "implementation": "flash"}
    calls = (
        lambda seed: attention(q, q, q, **forward, seed=seed),
        lambda seed: attention_backward(
            *(q, q, q, q, q, device_array((1, 1, 4), np.float32)), **forward, seed=seed
        ),
    )
    for call in calls:
        call(3)
    monkeypatch.setattr(attention_checks, "described_problem", None)
    monkeypatch.setattr(attention_params, "_fill_scores", None)
    for call in calls:
        recorder.started.clear()
        call(2**64 - 1)
        for _, _, (*_, params) in recorder.started:
            params = params if "scores" in params.dtype.names else params["attention"]
            assert params["scores"]["seed"] == 2**64 - 1
    with pytest.raises(ValueError, match="seed = -1"):
        calls[0](-1)


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
    _, params, ctas = launched(recorder, q, k, k)
    assert (params["sk"], ctas) == (0, 2 * 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flash_takes_the_other_dtypes_on_a_kernel_of_their_own(recorder, dtype):
    """Vectors are four items: 8 bytes of bfloat16, where aligned to them."""
    itemsize = dtype_of(dtype).itemsize
    q = device_array((2, 70, 4, 64), dtype_of(dtype))
    macros, _, ctas = launched(recorder, q, q, q, implementation="flash", softcap=5.0)
    assert (macros["DTYPE"], macros["VEC"], macros["COLUMN_LANES"]) == (dtype, 4, 8)
    assert (macros["SOFTCAP"], macros["BIAS"]) == ("true", "void")
    assert ctas == 2 * 4 * -(-70 // 128)
    strides = (70 * 4 * 68 * itemsize, 4 * 68 * itemsize, 68 * itemsize, itemsize)
    padded = device_array((2, 70, 4, 64), dtype_of(dtype), strides)
    assert launched(recorder, padded, padded, padded, implementation="flash")[0]["VEC"] == 4
    strides = (70 * 4 * 66 * itemsize, 4 * 66 * itemsize, 66 * itemsize, itemsize)
    crooked = device_array((2, 70, 4, 64), dtype_of(dtype), strides)
    assert launched(recorder, q, crooked, q, implementation="flash")[0]["VEC"] == 1
    wide = device_array((2, 70, 4, 160), dtype_of(dtype))
    _, _, ctas = launched(recorder, q, q, wide, implementation="flash")
    assert ctas == 2 * 4 * -(-70 // 128)


def test_options_of_the_call_choose_the_flash_specialisation(recorder):
    q = device_array((2, 32, 4, 64), np.float16)
    macros, params, ctas = launched(recorder, q, q, q, implementation="flash")
    assert (macros["BIAS"], macros["MASK"], macros["DROPOUT"]) == ("void", "false", "false")
    assert ctas == 2 * 4 * -(-32 // 128)
    bias = device_array((4, 1, 32), np.float32)
    macros, params, _ = launched(
        recorder, q, q, q, implementation="flash", bias=bias, softcap=5.0, dropout_p=0.25, seed=7
    )
    assert (macros["BIAS"], macros["BIAS_VEC"]) == ("float32", 2)
    assert (macros["SOFTCAP"], macros["DROPOUT"], macros["SINKS"]) == ("true", "true", "void")
    assert params["scores"]["bias"].tolist() == (0, 32, 0, 1)
    assert (params["scores"]["seed"], params["scores"]["keep_from"]) == (7, 16384)


@pytest.mark.parametrize(
    ("row_bytes", "together"), [(64, 4), (0, 4), (2**24 - 8, 4), (2**24, 2), (-64, 2)]
)
def test_a_bias_is_read_four_keys_at_a_time_where_offsets_of_rows_have_32_bits(
    recorder, row_bytes, together
):
    q = device_array((2, 32, 4, 64), np.float16)
    bias = device_array((32, 32), np.float16, (row_bytes, 2))
    macros, _, _ = launched(recorder, q, q, q, implementation="flash", bias=bias)
    assert macros["BIAS_VEC"] == together

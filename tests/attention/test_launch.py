"""Arguments, specialisations and scratch memory of the launches of attention and its backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices import dtype_of
from support.recording_device import Recorder, backward_call, device_array, launched

from cupyattn import AttentionGrads, attention, attention_backward, softmax, softmax_backward
from cupyattn.ops.attention import checks as attention_checks
from cupyattn.ops.attention import params as attention_params
from cupyattn.ops.attention.structs import UNBOUNDED
from cupyattn.runtime.spec import Specialisation


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
    monkeypatch.setattr(attention_params, "_score_params", None)
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


def started_backward(recorder: Recorder) -> dict[str, tuple[dict[str, Any], Specialisation, int]]:
    """By kernel: its arguments by name, its specialisation, its CTAs."""
    found = {}
    for specialisation, grid, arguments in recorder.started:
        parameters = specialisation.spec.parameters
        named = {p.name: a for p, a in zip(parameters, arguments, strict=True)}
        kernel = specialisation.spec.entry.removeprefix("attention_backward_f32_")
        found[kernel] = (named, specialisation, grid[0])
    return found


def memory_of(array: Any) -> tuple[int, int]:
    """Where an array begins, and how long it is."""
    return array.data.ptr, array.nbytes


def test_what_the_backward_passes_to_its_kernels(recorder):
    """In order, each with the call's arrays under the names of its parameters."""
    bias, sinks = device_array((4, 1, 5), np.float32), device_array((8,), np.float16)[::2]
    arrays, options = backward_call(bias=bias, sinks=sinks, softmax_scale=0.5, causal=True)
    arrays["lse"] = device_array((4, 2, 3), np.float32).transpose(1, 0, 2)
    dlse = device_array((2, 4, 6), np.float32)[..., :3]
    grads = attention_backward(*arrays.values(), **options, dlse=dlse)
    found = started_backward(recorder)
    assert list(found) == ["delta", "dkdv", "dq", "dbias", "dsinks"]
    assert [ctas for _, _, ctas in found.values()] == [2 * 4 * 3 // 8, 2 * 2, 2 * 4, 1, 4]
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
    delta = started_backward(recorder)["delta"][0]["delta"]
    assert (delta.data.ptr, delta.size) == (workspace.data.ptr, 2 * 4 * 3)
    assert started_backward(recorder)["dq"][0]["params"]["accumulate"] == 1


def half_backward_call(**options: Any) -> tuple[list[Any], dict[str, Any]]:
    """A call that flash takes: (B, Sq, Sk, H, G, D, Dv) = (2, 70, 90, 4, 2, 8, 16)."""
    shapes = (2, 70, 4, 16), (2, 70, 4, 8), (2, 90, 2, 8), (2, 90, 2, 16), (2, 70, 4, 16)
    return [*map(device_array, shapes), device_array((2, 4, 70), np.float32)], options


ROWS, KEYS = 2 * 4 * 128, 2 * 2 * 128  # 70 query rows are padded to 128, and so are 90 keys
SUMS = 2 * 4 * 4 * 90  # by each of four warps, of each batch element, which are a part each


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("deterministic", "bias_shape", "kernels", "scratch"),
    [
        (False, None, ["dkdv", "convert"], [8 * ROWS]),
        (True, None, ["dkdv", "dq"], []),
        (False, (4, 1, 90), ["dkdv", "convert", "summed_dbias", "dbias"], [SUMS, 8 * ROWS]),
        (True, (4, 1, 90), ["dkdv", "dq", "summed_dbias", "dbias"], [SUMS]),
        (False, (2, 4, 70, 90), ["dkdv", "convert"], [8 * ROWS]),
    ],
    ids=str,
)
def test_what_the_flash_backward_launches(
    recorder, deterministic, bias_shape, kernels, scratch, accumulate
):
    """The kernels by the options, and the scratch that they share, as documented."""
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
    assert entries == ["delta", "dsinks", "scales", *kernels]
    (workspace,) = recorder.allocated
    # Of delta two numbers a CTA of 32 rows, of each head two, and of dkdv and dq one a CTA.
    grids = [grid for s, grid, _ in recorder.started if s.spec.entry.endswith(("dkdv", "dq"))]
    *others, last = [2 * ROWS, 2 * (ROWS + KEYS) // 32, 2 * 2 * 4, max(grids)[0], *scratch]
    assert workspace.nbytes == sum(-(-4 * n // 256) * 256 for n in others) + 4 * last

    named = {}
    for specialisation, _, arguments in recorder.started:
        parameters = [parameter.name for parameter in specialisation.spec.parameters]
        named[specialisation.spec.entry] = dict(zip(parameters, arguments, strict=True))
    delta, dkdv = (named[f"attention_backward_{name}"] for name in ("delta", "dkdv"))
    zeroed = 0 if deterministic else scratch[-1]
    assert (0 if delta["zeroed"] is None else delta["zeroed"].size) == zeroed
    assert (dkdv["params"]["zeroed"], dkdv["params"]["accumulate"]) == (zeroed, accumulate)
    assert dkdv["params"]["rows_padded"] == 128
    broadcasts = bias_shape == (4, 1, 90)
    if broadcasts:
        summed, last = (named[f"attention_backward_{n}dbias"] for n in ("summed_", ""))
        assert summed["dbias"] is last["scratch"]
        assert last["dbias"] is grads.dbias
        assert last["params"]["repeats"].tolist() == [2, 1, 4, 1]
    elif bias is not None:
        assert dkdv["dbias"] is grads.dbias
    filled = [grads.dbias] if bias is not None and not broadcasts and not accumulate else []
    assert sorted(map(memory_of, recorder.zeroed)) == sorted(map(memory_of, filled))


@pytest.mark.parametrize(
    ("dtype", "deterministic", "one_pass"),
    [
        *(("float32", False, True), ("float32", True, False)),
        *(("bfloat16", False, True), ("bfloat16", True, False)),
    ],
)
@pytest.mark.parametrize(
    ("bias_shape", "kernels"), [(None, []), ((4, 3, 5), ["f32_dbias"]), ((2, 4, 3, 5), [])], ids=str
)
def test_what_the_float_backward_launches(
    recorder, dtype, deterministic, one_pass, bias_shape, kernels
):
    arrays, _ = backward_call()
    arrays = {
        name: array if name == "lse" else device_array(array.shape, dtype_of(dtype))
        for name, array in arrays.items()
    }
    bias = None if bias_shape is None else device_array(bias_shape, np.float32)
    sinks = device_array((4,), np.float32)
    grads = attention_backward(
        *arrays.values(), bias=bias, sinks=sinks, deterministic=deterministic
    )
    entries = [s.spec.entry.removeprefix("attention_backward_") for s, _, _ in recorder.started]
    rounded = one_pass and dtype != "float32"
    last = {"f32_convert": 2 * 4 * 3 // 8} if rounded else {} if one_pass else {"f32_dq": 2 * 4}
    gradients = ["f32_delta", "f32_dkdv", *last]
    assert entries == [*gradients, *kernels, "f32_dsinks"]
    ctas = [grid[0] for _, grid, _ in recorder.started[: len(gradients)]]
    assert ctas == [2 * 4 * 3 // 8, 2 * 2, *last.values()]
    specialisation, _, arguments = recorder.started[1]
    names = [parameter.name for parameter in specialisation.spec.parameters]
    macros, named = dict(specialisation.macros), dict(zip(names, arguments, strict=True))
    assert named["delta"].size == 2 * 4 * 3
    direct = bias_shape == (2, 4, 3, 5)
    assert macros["DBIAS"] == ("float32" if direct else "void")
    assert macros["ONE_PASS"] == ("true" if one_pass else "false")
    added_to = named["dq"]
    if rounded:  # (B, H, Sq, D) in scratch memory
        assert (added_to.dtype, added_to.size) == (np.float32, 2 * 4 * 3 * 8)
        assert named["params"]["dq"].tolist() == (4 * 3 * 8, 8, 3 * 8)
        _, _, (source, target, params) = recorder.started[2]
        assert source is added_to and target is grads.dq
        assert params["dq"].tolist() == (3 * 4 * 8, 4 * 8, 8)
    else:
        assert added_to is grads.dq
    filled = [added_to] * one_pass + [grads.dbias] * direct
    assert sorted(map(memory_of, recorder.zeroed)) == sorted(map(memory_of, filled))
    if bias is not None:
        assert named["dbias"] is grads.dbias


def test_a_backward_plan_is_made_once(recorder):
    """Arrays of one description share the kernels' struct; other options do not."""
    for options in ({}, {}, {"causal": True}):
        arrays, others = backward_call(**options)
        attention_backward(*arrays.values(), **others)
    first, again, causal = (started[2][-1] for started in recorder.started[::3])
    assert first is again
    assert first is not causal

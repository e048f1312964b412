"""Decode-shaped dense attention, whose keys all CTAs share: results, and which calls take it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS, placed
from support.forward_runs import in_float32
from support.paged import keys_shared, multiprocessors
from support.recording_device import device_array
from support.search import Search, deep, examples, wider
from support.strategies import FRUGAL, LONGEST, RUN_TIME_OPTIONS, attention_problems

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Report
from cupyattn.ops.attention import choice
from cupyattn.ops.attention import forward as attention_forward
from cupyattn.ops.attention.choice import LEAST_DECODED_KEYS
from cupyattn.ops.attention.kernels.decode import TENSOR_CORES, TILE_KEYS
from cupyattn.runtime.device.recorder import LaunchRecorder
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# One tile of rows on tensor cores, two where there are many rows; lanes, and single items.
HEAD_DIMS = wider(
    [(64, 64), (24, 24)],
    [*((dim, dim) for dim in (128, 256, 80, 33, 1, 512, 320, 448, 264, 257, 500))],
)
DTYPES = wider(["float16", "float32"], ["bfloat16"])
OPTION_SETS = (
    {"alibi_slopes": "float32", "softcap": "", "sinks": "float32"},
    *wider([], [{"alibi_slopes": "own"}, {"softcap": ""}, {"sinks": "own"}]),
)


@contextmanager
def decoded(*, wherever: bool = True) -> Iterator[None]:
    """Let the kernels of decoding take all calls that they have, or none, whatever is faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "_decodes_faster", lambda *_: wherever)
        attention_forward._plan.cache_clear()  # a plan is remembered for its problem
        yield
    attention_forward._plan.cache_clear()


def run(problem: AttentionCase, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Run one problem on the kernels; returns out and lse as NumPy arrays."""
    options = problem.keywords() | options
    results = cupyattn.attention(
        *map(KERNELS.put, problem.arrays()),
        **{name: placed(KERNELS, value) for name, value in options.items()},
        return_lse=True,
    )
    out, lse = map(KERNELS.get, results)
    return out, lse


def ratio(problem: AttentionCase, out: np.ndarray, lse: np.ndarray) -> float:
    """The largest error over its bound, that of the tiles and weights of decoding."""
    arrays, options = problem.arrays(), problem.keywords()
    exact = reference.attention(*arrays, **options)
    native = KERNELS.device.traits.native
    bounds = reference.attention_bound(
        *arrays,
        dtype=problem.dtype,
        tile_k=TILE_KEYS,
        float32_weights=in_float32(problem.dtype, native) or problem.D not in TENSOR_CORES[75],
        native=native,
        **options,
    )
    return max(reference.error_ratio(*each) for each in zip((out, lse), exact, bounds, strict=True))


def few(**more: Any) -> Any:
    """Problems of 1 to 16 queries, and a tile of keys or more."""
    return attention_problems(
        options=RUN_TIME_OPTIONS, queries=(1, 16), least_keys=16, largest=LONGEST,
        **{"dtypes": DTYPES, **FRUGAL, "crowd": 4, **more},
    )  # fmt: skip


def check(problem: AttentionCase, count: int) -> None:
    """The kernels of decoding run wherever they have the call, and stay within the bounds."""
    with decoded(), multiprocessors(count):
        assert ratio(problem, *run(problem)) <= 1


@given(
    problem=few(head_dims=HEAD_DIMS)
    if Search.deep
    else few(head_dims=HEAD_DIMS[:1], dtypes=DTYPES[:1])
    | few(head_dims=HEAD_DIMS[1:], dtypes=DTYPES[1:]),
    count=st.integers(1, 8),
)
@examples(6, deep=20)
def test_within_bounds_of_the_reference(problem: AttentionCase, count: int):
    """Keys of any length and view, queries at any positions, splits of any number."""
    check(problem, count)


@given(
    problem=few(
        head_dims=wider([(64, 64)], [(24, 24), (128, 128)]),
        dtypes=wider(DTYPES[:1], DTYPES[1:]),
        option_sets=OPTION_SETS,
    ),
    count=st.integers(1, 8),
)
@examples(4)
def test_options_within_bounds_of_the_reference(problem: AttentionCase, count: int):
    check(problem, count)


@given(data=st.data(), dtype=st.sampled_from(wider(("float16",), ("float32",))))
@examples(4, deep=12)
def test_dense_is_paged_with_every_block_in_its_place(data: st.DataObject, dtype: str):
    """Bit for bit: the same tiles by the same warps."""
    head_dim = {"float16": 64, "float32": 24}[dtype]
    batch, blocks, sq = (data.draw(st.integers(1, most)) for most in (3, 9, 4))
    problem = AttentionCase(
        B=batch, Sq=sq, Sk=32 * blocks, H=4, G=2, D=head_dim, Dv=head_dim, dtype=dtype,
        options=(("causal", True),
               ("seqused_k", tuple(data.draw(st.integers(0, 32 * blocks)) for _ in range(batch)))),
    )  # fmt: skip
    q, k, v = problem.arrays()
    used = problem.keywords()["seqused_k"]
    table = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
    caches = (x.reshape(batch * blocks, 32, 2, head_dim) for x in (k, v))
    with multiprocessors(data.draw(st.integers(1, 4))):
        with decoded():
            dense = run(problem)
        with keys_shared():
            paged = cupyattn.paged_attention(
                *map(KERNELS.put, (q, *caches, table, used)), causal=True, return_lse=True
            )
    for found, expected in zip(dense, paged, strict=True):
        assert np.array_equal(found, KERNELS.get(expected))


BASE = AttentionCase(B=2, Sq=3, Sk=45, H=4, G=2, D=64, Dv=64, dtype="float16")
ENDS = (16, 17, 31, 32, 33, 63, 65, 79)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "sk"),
    [
        *itertools.product(("float16",), (64,), ENDS),
        *itertools.product(("float32",), (24,), (17, 32, 33)),
        *deep(*itertools.product(("float32",), (24,), (16, 31, 63, 65, 79))),
        *deep(*itertools.product(("float16",), (128, 256, 33), ENDS)),
        *deep(("bfloat16", 128, 79), ("float32", 256, 79)),
        *deep(*(("float16", 64, sk) for sk in range(64, 81) if sk not in ENDS)),
    ],
)
def test_keys_that_end_within_a_tile(dtype: str, head_dim: int, sk: int):
    """The last tile begins early. With B = G = 1 no memory follows the last key."""
    problem = replace(BASE, B=1, G=1, H=2, Sk=sk, D=head_dim, Dv=head_dim, dtype=dtype)
    check(problem, 2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("used", [0, 1, 28, 29, 30, 32, 44])
def test_nan_after_the_keys_in_use_reaches_no_result(dtype: str, used: int):
    """The last tile begins at key 29: NaN lies within it, or before it."""
    head_dim = 64 if dtype == "float16" else 24
    problem = replace(
        BASE, dtype=dtype, D=head_dim, Dv=head_dim, options=(("seqused_k", (used, 45)),)
    )
    with decoded():
        out, lse = run(problem)
    assert np.isfinite(out).all()
    assert ratio(problem, out, lse) <= 1
    if used == 0:
        assert not out[0].any()
        assert np.isneginf(lse[0]).all()


def test_a_nan_in_use_is_seen_by_all_that_see_its_key():
    problem = replace(BASE, options=(("causal", True),))
    q, k, v = problem.arrays()
    v[1, 44] = np.nan
    with decoded():
        out = KERNELS.get(cupyattn.attention(*map(KERNELS.put, (q, k, v)), causal=True))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()


def test_more_keys_than_it_takes_without_a_pin():
    """No patch chooses the kernels here. out and lse are written into views."""
    problem = replace(BASE, Sk=LEAST_DECODED_KEYS + 1)
    q, k, v = map(KERNELS.put, problem.arrays())
    memory = KERNELS.put(np.full((2, 4, 3, 2, 64), 7, np.float16))
    out, lse = memory[:, :, :, 0].transpose(0, 2, 1, 3), KERNELS.put(np.zeros((2, 4, 3), "f4"))
    results = cupyattn.attention(q, k, v, return_lse=True, out=(out, lse))
    assert results[0] is out
    assert ratio(problem, KERNELS.get(out), KERNELS.get(lse)) <= 1
    assert (KERNELS.get(memory)[:, :, :, 1] == 7).all()


EXTREMES = {
    "far before the keys": {
        "alibi_slopes": 2.0 ** -np.array([20, 22, 24, 24]),
        "q_offset": -(2**24) - 3,
    },
    "far after the keys": {
        "alibi_slopes": 2.0 ** -np.array([20, 22, 24, 24]),
        "q_offset": 2**24 + 1,
    },
    "the largest softcap": {"softcap": 10_000.0},
    "sinks without keys": {"sinks": np.array([-1e10, -1e35, 2e38, -np.inf]), "q_offset": -70},
    "sinks": {"sinks": np.array([1e10, -3e38, 2e38, -np.inf])},
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_options_at_the_end_of_what_float32_has_digits_for(name: str, dtype: str):
    arrays = replace(BASE, dtype=dtype).arrays()
    neutral = {"alibi_slopes": np.zeros(4), "softcap": 10_000.0, "sinks": np.full(4, -np.inf)}
    options = {"causal": "keys" in name} | {
        key: value.astype(np.float32) if isinstance(value, np.ndarray) else value
        for key, value in (neutral | EXTREMES[name]).items()
    }
    exact = reference.attention(*arrays, **options)
    bounds = reference.attention_bound(*arrays, dtype=dtype, tile_k=16, **options)
    with decoded():
        found = cupyattn.attention(
            *map(KERNELS.put, arrays),
            **{key: placed(KERNELS, value) for key, value in options.items()},
            return_lse=True,
        )
    assert max(map(reference.error_ratio, map(KERNELS.get, found), exact, bounds)) <= 1


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("float32", 1.76e5)])
def test_scores_as_low_as_float32_goes(dtype: str, largest: float):
    """All -2e38 times log2(e), in float16 as low as they can be: every key weighs the same."""
    q, k, v = replace(BASE, dtype=dtype).arrays()
    q[...], k[...] = largest, -largest
    with decoded():
        out = cupyattn.attention(*map(KERNELS.put, (q, k, v)), softmax_scale=1e26)
    means = v.astype(np.float64).mean(axis=1, keepdims=True).repeat(2, axis=2)
    np.testing.assert_allclose(KERNELS.get(out), means.repeat(3, axis=1), atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"),
    [
        ("float16", 64, 4),
        *deep(
            ("float32", 24, 4),
            ("float16", 128, 8),
            ("float16", 256, 4),
            ("float16", 80, 4),
            ("bfloat16", 128, 4),
        ),
    ],
)
def test_k_and_v_are_read_once_in_whole_sectors(dtype: str, head_dim: int, group: int):
    """All that is moved stays within 5 % of K and V; the last tile of 5 keys is read as 16."""
    problem = AttentionCase(
        B=1, Sq=1, Sk=800 * group + 5, H=2 * group, G=2, D=head_dim, Dv=head_dim, dtype=dtype
    )
    q, k, v = problem.arrays()
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.attention(q, k, v)
    once = k.nbytes + v.nbytes
    streams = [each for each in report.accesses if "L1::no_allocate" in each.instruction.opcode]
    # Without tensor cores q comes the same way, once for each warp and part of the keys.
    assert once <= sum(access.bytes for access in streams) <= 1.05 * once
    assert all(access.efficiency == 1 for access in streams)
    assert report.sector_efficiency > 0.99
    assert report.dram_sectors_bytes <= 1.05 * once


def launched(recorder: LaunchRecorder, sq: int, sk: int, **changed: Any) -> list[str]:
    """The kernels that a call starts on 40 multiprocessors."""
    sizes = {"B": 1, "H": 8, "G": 2, "D": 128, "Dv": 128, "dtype": np.float16}
    sizes |= {name: changed.pop(name) for name in [*changed] if name in sizes}
    batch, heads, kv_heads, head_dim, head_dim_v, dtype = sizes.values()
    q = device_array((batch, sq, heads, head_dim), dtype)
    k, v = (device_array((batch, sk, kv_heads, d), dtype) for d in (head_dim, head_dim_v))
    cupyattn.attention(q, k, v, **changed)
    return [launch.specialisation.spec.entry for launch in recorder.started]


DECODE = ["attention_decode", "attention_decode_combine"]
FLASH = ["attention_forward"]
SPLIT = ["attention_forward_split", "attention_combine_parts"]


@pytest.mark.parametrize(
    ("sq", "sk", "changed", "expected"),
    [
        (1, 32_768, {}, DECODE),
        (1, LEAST_DECODED_KEYS, {}, DECODE),
        (1, LEAST_DECODED_KEYS - 1, {}, FLASH),
        (16, 4096, {}, DECODE),
        (17, 4096, {}, SPLIT),
        (0, 4096, {}, []),
        (1, 4096, {"Dv": 64}, SPLIT),
        (1, 4096, {"causal": True, "window_size": (200, 5)}, FLASH),
        (1, 4096, {"causal": True, "window_size": (600, 5)}, DECODE),
        (1, 4096, {"window_size": (None, 5)}, DECODE),
        (1, 4096, {"implementation": "tiled"}, ["attention_tiled"]),
        (1, 4096, {"softcap": 5.0}, DECODE),
        (1, 4096, {"dropout_p": 0.5, "seed": 0}, SPLIT),
        (1, 4096, {"dtype": np.float32}, DECODE),
        (17, 4096, {"dtype": np.float32}, ["attention_forward_split_f32", SPLIT[1]]),
        # A grid that fills the GPU: one pass over the keys always, more of them for a few tokens.
        (1, 4096, {"B": 64, "H": 2}, DECODE),
        (16, 4096, {"B": 64, "H": 2}, DECODE),
        (12, 4096, {"B": 64}, DECODE),
        (13, 4096, {"B": 64}, FLASH),
        (13, 4096, {"B": 7}, DECODE),
        (16, 4096, {"B": 64, "dtype": np.float32}, DECODE),
    ],
)
def test_calls_that_take_the_decode_kernels(recorder, sq, sk, changed, expected):
    assert launched(recorder, sq, sk, **changed) == expected


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("mask", (4096,), SPLIT),
        ("bias", (4096,), SPLIT),
        ("alibi_slopes", (8,), DECODE),
        ("sinks", (8,), DECODE),
        ("seqused_k", (1,), DECODE),
        ("q_offset", (1,), DECODE),
    ],
)
def test_options_that_are_arrays(recorder, name, shape, expected):
    dtypes = {"mask": bool, "seqused_k": np.int32, "q_offset": np.int64}
    option = {name: device_array(shape, dtypes.get(name, np.float32))}
    assert launched(recorder, 1, 4096, **option) == expected
    for launch in recorder.started if expected is DECODE else []:
        names = [parameter.name for parameter in launch.specialisation.spec.parameters]
        passed = dict(zip(names, launch.arguments, strict=True))
        wanted = {"seqused_k": ("seqlens_k", "q_offset")}.get(name, (name,))
        for parameter in wanted:
            if parameter in names:
                assert passed[parameter] is option[name]
        others = {"seqlens_k", "q_offset", "block_table"} - {*wanted}
        assert all(passed.get(other) is None for other in others)


@pytest.mark.parametrize("return_lse", [False, True])
def test_with_out_and_workspace_nothing_is_allocated(recorder, return_lse):
    q, k = device_array((1, 1, 8, 128)), device_array((1, 4096, 2, 128))
    out, lse = device_array(q.shape), device_array((1, 8, 1), np.float32)
    given = (out, lse) if return_lse else out
    workspace = device_array((2**22,), np.uint8)
    cupyattn.attention(q, k, k, return_lse=return_lse, out=given, workspace=workspace)
    assert not recorder.allocated
    forward, combine = recorder.started
    assert forward.arguments[10] is combine.arguments[5] is out
    assert (forward.arguments[11] is lse) == return_lse

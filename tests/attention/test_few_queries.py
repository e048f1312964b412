"""Dense attention of a few queries, whose keys all CTAs share: its results."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.attention_options import RUN_TIME_OPTIONS
from support.backward_runs import error_ratios
from support.devices import KERNELS, placed
from support.few_queries import decoded, ratio, run
from support.paged import keys_shared, multiprocessors
from support.search import Search, deep, examples, wider
from support.strategies import FRUGAL, LONGEST, AttentionProblem, attention_problems

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Report
from cupyattn.ops.attention.few_queries import LEAST_KEYS

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# One tile of rows on tensor cores, two where there are many rows; lanes, and single items.
HEAD_DIMS = wider([(64, 64), (24, 24)], [(128, 128), (256, 256), (80, 80), (33, 33), (1, 1)])
DTYPES = wider(["float16", "float32"], ["bfloat16"])
OPTION_SETS = (
    {"alibi_slopes": "float32", "softcap": "", "sinks": "float32"},
    *wider([], [{"alibi_slopes": "own"}, {"softcap": ""}, {"sinks": "own"}]),
)


def few(**more: Any) -> Any:
    """Problems of 1 to 16 queries, and a tile of keys or more."""
    return attention_problems(
        options=RUN_TIME_OPTIONS, queries=(1, 16), least_keys=16, largest=LONGEST,
        **{"dtypes": DTYPES, **FRUGAL, "crowd": 4, **more},
    )  # fmt: skip


def check(problem: AttentionProblem, count: int) -> None:
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
@examples(10)
def test_within_bounds_of_the_reference(problem: AttentionProblem, count: int):
    """Of any length, in any view, wherever queries stand and shares cut."""
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
def test_options_within_bounds_of_the_reference(problem: AttentionProblem, count: int):
    check(problem, count)


@given(data=st.data(), dtype=st.sampled_from(("float16", "float32")))
@examples(6)
def test_dense_is_paged_with_every_block_in_its_place(data: st.DataObject, dtype: str):
    """Bit for bit: the same tiles by the same warps."""
    head_dim = {"float16": 64, "float32": 24}[dtype]
    batch, blocks, sq = (data.draw(st.integers(1, most)) for most in (3, 9, 4))
    problem = AttentionProblem(
        B=batch, Sq=sq, Sk=32 * blocks, H=4, G=2, D=head_dim, Dv=head_dim, dtype=dtype,
        drawn=(("causal", True),
               ("seqused_k", tuple(data.draw(st.integers(0, 32 * blocks)) for _ in range(batch)))),
    )  # fmt: skip
    q, k, v = problem.arrays()
    used = problem.options()["seqused_k"]
    table = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
    caches = (x.reshape(batch * blocks, 32, 2, head_dim) for x in (k, v))
    with multiprocessors(data.draw(st.integers(1, 4))):
        with decoded():
            dense = run(problem)
        with KERNELS.running(), keys_shared():
            paged = cupyattn.paged_attention(
                *map(KERNELS.put, (q, *caches, table, used)), causal=True, return_lse=True
            )
    for found, expected in zip(dense, paged, strict=True):
        assert np.array_equal(found, KERNELS.get(expected))


BASE = AttentionProblem(B=2, Sq=3, Sk=45, H=4, G=2, D=64, Dv=64, dtype="float16")


ENDS = (16, 17, 31, 32, 33, 63, 65, 79)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "sk"),
    [
        *itertools.product(("float16",), (64,), ENDS),
        *itertools.product(("float32",), (24,), ENDS),
        *deep(*itertools.product(("float16",), (128, 256, 33), ENDS)),
        *deep(("bfloat16", 128, 79), ("float32", 256, 79)),
        *deep(*(("float16", 64, sk) for sk in range(64, 81) if sk not in ENDS)),
    ],
)
def test_keys_that_end_within_a_tile(dtype: str, head_dim: int, sk: int):
    """The last tile begins early, within the array: of B = G = 1 nothing lies behind it."""
    problem = replace(BASE, B=1, G=1, H=2, Sk=sk, D=head_dim, Dv=head_dim, dtype=dtype)
    check(problem, 2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("used", [0, 1, 28, 29, 30, 32, 44])
def test_nan_behind_the_keys_in_use_never_leaks(dtype: str, used: int):
    """Within the last tile, which begins at 29, and before it."""
    head_dim = 64 if dtype == "float16" else 24
    problem = replace(
        BASE, dtype=dtype, D=head_dim, Dv=head_dim, drawn=(("seqused_k", (used, 45)),)
    )
    with decoded():
        out, lse = run(problem)
    assert np.isfinite(out).all()
    assert ratio(problem, out, lse) <= 1
    if used == 0:
        assert not out[0].any()
        assert np.isneginf(lse[0]).all()


def test_a_nan_in_use_is_seen_by_all_that_see_its_key():
    problem = replace(BASE, drawn=(("causal", True),))
    q, k, v = problem.arrays()
    v[1, 44] = np.nan
    with decoded(), KERNELS.running():
        out = KERNELS.get(cupyattn.attention(*map(KERNELS.put, (q, k, v)), causal=True))
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()


def test_more_keys_than_it_takes_without_a_pin():
    """By the rule itself; out and lse are written where they lie, with strides."""
    problem = replace(BASE, Sk=LEAST_KEYS + 1)
    q, k, v = map(KERNELS.put, problem.arrays())
    memory = KERNELS.put(np.full((2, 4, 3, 2, 64), 7, np.float16))
    out, lse = memory[:, :, :, 0].transpose(0, 2, 1, 3), KERNELS.put(np.zeros((2, 4, 3), "f4"))
    with KERNELS.running():
        results = cupyattn.attention(q, k, v, return_lse=True, out=(out, lse))
    assert results[0] is out
    assert ratio(problem, KERNELS.get(out), KERNELS.get(lse)) <= 1
    assert (KERNELS.get(memory)[:, :, :, 1] == 7).all()


def test_workspace_given_and_too_small():
    problem = replace(BASE, Sk=300)
    with decoded(), multiprocessors(3):
        expected = run(problem)
        with pytest.raises(ValueError, match=r"workspace has 8 bytes.*needs (\d+)") as found:
            run(problem, workspace=np.empty(8, np.uint8))
        needed = int(str(found.value).partition("call needs ")[2].partition(",")[0])
        again = run(problem, workspace=np.empty(needed, np.uint8))
    assert all(map(np.array_equal, again, expected))


EXTREMES = {
    "far in front": {"alibi_slopes": 2.0 ** -np.array([20, 22, 24, 24]), "q_offset": -(2**24) - 3},
    "far behind": {"alibi_slopes": 2.0 ** -np.array([20, 22, 24, 24]), "q_offset": 2**24 + 1},
    "the largest softcap": {"softcap": 10_000.0},
    "sinks without keys": {"sinks": np.array([-1e10, -1e35, 2e38, -np.inf]), "q_offset": -70},
    "sinks": {"sinks": np.array([1e10, -3e38, 2e38, -np.inf])},
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_options_at_the_end_of_what_float32_has_digits_for(name: str, dtype: str):
    arrays = replace(BASE, dtype=dtype).arrays()
    options = {"causal": "keys" in name} | {
        key: value.astype(np.float32) if isinstance(value, np.ndarray) else value
        for key, value in EXTREMES[name].items()
    }
    exact = reference.attention(*arrays, **options)
    bounds = reference.attention_bound(*arrays, dtype=dtype, tile_k=16, **options)
    with decoded(), KERNELS.running():
        found = cupyattn.attention(
            *map(KERNELS.put, arrays),
            **{key: placed(KERNELS, value) for key, value in options.items()},
            return_lse=True,
        )
    assert max(map(reference.error_ratio, map(KERNELS.get, found), exact, bounds)) <= 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_scores_as_low_as_float32_goes(dtype: str):
    """All of them -2e38 times log2(e): every key weighs the same."""
    q, k, v = replace(BASE, dtype=dtype).arrays()
    q[...], k[...] = 1, -1
    with decoded(), KERNELS.running():
        out = cupyattn.attention(*map(KERNELS.put, (q, k, v)), softmax_scale=2e38 / 64)
    means = v.astype(np.float64).mean(axis=1, keepdims=True).repeat(2, axis=2)
    np.testing.assert_allclose(KERNELS.get(out), means.repeat(3, axis=1), atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_gradients_of_such_a_forward(dtype: str):
    """The backward takes out and lse as of any other, and stays within its bounds of them."""
    head_dim = 64 if dtype == "float16" else 24
    problem = replace(BASE, dtype=dtype, D=head_dim, Dv=head_dim, drawn=(("causal", True),))
    arrays, (dout, _) = problem.arrays(), problem.gradients()
    with decoded(), KERNELS.running():
        out, lse = run(problem)
        again, pullback = cupyattn.vjp(cupyattn.attention, *map(KERNELS.put, arrays), causal=True)
        assert np.array_equal(KERNELS.get(again), out)
        found = dict(
            zip(("dq", "dk", "dv"), map(KERNELS.get, pullback(KERNELS.put(dout))), strict=True)
        )
    ratios = error_ratios(found, (dout, *arrays, out, lse), {"causal": True})
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"),
    [
        ("float16", 64, 4),
        ("float32", 24, 4),
        *deep(("float16", 128, 8), ("float16", 256, 4), ("float16", 80, 4), ("bfloat16", 128, 4)),
    ],
)
def test_k_and_v_are_read_once_in_whole_sectors(dtype: str, head_dim: int, group: int):
    """All that is moved stays within 5 % of K and V; the last tile of 5 keys is read as 16."""
    problem = AttentionProblem(
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


@pytest.mark.gpu
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_captured_call_is_replayed_with_new_contents(used: bool, dtype: str):
    """Lengths too: the device works out the shares."""
    import cupy

    problem = replace(BASE, Sk=3001, dtype=dtype)
    q, k, v = map(cupy.asarray, problem.arrays())
    lengths = cupy.asarray([3001, 20], np.int32)
    options = {"seqused_k": lengths} if used else {}
    out, workspace = cupy.empty_like(q), cupy.empty(2**24, np.uint8)
    cupyattn.attention(q, k, v, out=out, workspace=workspace, **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            cupyattn.attention(q, k, v, out=out, workspace=workspace, **options)
        finally:
            graph = stream.end_capture()
    for factor, length in ((1, 1700), (-2, 0)):
        q *= factor
        lengths[1] = length
        expected = cupyattn.attention(q, k, v, **options)
        out.fill(7)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(cupy.asnumpy(out), cupy.asnumpy(expected))

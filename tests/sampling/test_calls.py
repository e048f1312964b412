"""Sampling by the kernels: the ids that NumPy replays, whatever shape, stride, dtype and option."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, dtype_of, everywhere, placed
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import reference
from cupyattn.emulator import Report
from cupyattn.ops.sampling.kernels import CANDIDATES, PART

FILTERS = {
    "none": {},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 3.5},
    "top_k": {"top_k": 40},
    "one": {"top_k": 1},
    "top_p": {"top_p": 0.9},
    "little": {"top_p": 1e-6},
    "most": {"top_p": 0.99999},
    "min_p": {"min_p": 0.05},
    "two": {"top_k": 300, "top_p": 0.8},
    "all": {"top_k": 100, "top_p": 0.95, "min_p": 0.02, "temperature": 0.7},
}


def logits_of(rows: int, tokens: int, dtype: str, spread: str = "normal", seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    x = 2.5 * rng.standard_normal((rows, tokens))
    if spread == "steps":  # many equal ones, and 0 the largest
        x = np.floor(x)
        x -= x.max(axis=-1, keepdims=True)
    elif spread == "flat":
        x = x / 1000
    elif spread == "equal":
        x[...] = 1.5
    elif spread == "masked":
        x[rng.random(x.shape) < 0.6] = -np.inf
        x[rng.random(x.shape) < 0.1] = np.nan
    return x.astype(dtype_of(dtype))


def drawn(logits: np.ndarray, **options: Any) -> np.ndarray:
    """Return the ids of the kernels, after comparing them with the reference."""
    moved = {name: placed(KERNELS, value) for name, value in options.items()}
    ids = KERNELS.get(cupyattn.sample(KERNELS.put(logits), **moved))
    given = {name: value for name, value in options.items() if name not in ("out", "workspace")}
    assert_array_equal(ids, reference.sample(logits, **given))
    return ids


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(4, deep=40)
@given(
    dtype=st.sampled_from(wider(("float16",), ("float32", "bfloat16"))),
    rows=st.integers(1, 4),
    tokens=st.sampled_from((1, 2, 7, 8, 100, 1001, PART - 1, PART, PART + 1, 3 * PART - 5)),
    spread=st.sampled_from(("normal", "steps", "flat", "masked")),
    filters=st.sampled_from(tuple(FILTERS)),
    penalised=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    step=st.sampled_from((0, 1, 2**32 - 1, 2**33 + 5)),
)
def test_kernels_draw_the_ids_of_the_reference(
    dtype, rows, tokens, spread, filters, penalised, seed, step
):
    options: dict[str, Any] = {**FILTERS[filters], "seed": seed, "step": step}
    if penalised:
        previous = np.random.default_rng(seed).integers(-1, tokens, (rows, 50)).astype(np.int32)
        options |= {"previous": previous, "repetition_penalty": 1.7}
    drawn(logits_of(rows, tokens, dtype, spread), **options)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(2)
@given(
    tokens=st.sampled_from((300, PART + 77)),
    integers=st.sampled_from(("int32", "int64")),
    seeds=st.sampled_from(("uint64", "int64")),
    stride=st.sampled_from((1, 3)),
    seed=st.integers(0, 1000),
)
def test_each_row_has_its_own_options(tokens, integers, seeds, stride, seed):
    rng, rows = np.random.default_rng(seed), 6

    def each(values: Any, dtype: str) -> np.ndarray:
        return rng.choice(values, rows * stride).astype(dtype)[::stride]

    drawn(
        logits_of(rows, tokens, "float16", "steps", seed),
        seed=each((0, 5, 2**63 - 1), seeds),
        step=each((0, 9, 2**31 - 1), integers),
        temperature=each((0, 1e-7, 0.5, 1, 2), "float32"),
        top_k=each((0, 1, 20, tokens + 1), integers),
        top_p=each((0.3, 0.9, 1), "float32"),
        min_p=each((0, 1e-30, 0.1, 1), "float32"),
        repetition_penalty=each((0.5, 1, 1.3), "float32"),
        previous=rng.integers(-1, tokens, (9, rows)).astype(np.int32).T,
    )


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("filters", ["none", "top_k", "all"])
def test_rows_of_different_levels_use_their_own_maximum(filters):
    """Scores are relative to the row's own largest logit."""
    logits = logits_of(5, PART + 77, "float16") + np.float16([[-300], [0], [200], [-40], [300]])
    drawn(logits, **FILTERS[filters], seed=5)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("filters", ["none", "two", *deep("top_p", "min_p")])
def test_equal_logits_of_any_size_are_all_drawn(filters):
    """Noise is added to the difference from the row's largest logit."""
    levels = np.array([3e6, 1e7, 1e8, 3e38, -1e8, -3e38], np.float32)
    x = np.repeat(levels, 24)[:, None].repeat(4, axis=1)
    ids = drawn(x, seed=5, **FILTERS[filters])
    assert all(set(each) == {0, 1, 2, 3} for each in ids.reshape(len(levels), -1))


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("filters", ["none", "all"])
def test_large_logits_of_several_parts(filters):
    """The row's largest logit may be in another part of the row."""
    x = logits_of(4, PART + 80, "float32", "steps") * np.float32(64) + np.float32(1e8)
    x[1:3] *= -3e30
    x[2, PART + 5] = 3e38
    drawn(x, seed=5, **{"temperature": 60.0, **FILTERS[filters]})
    drawn(x, seed=5, temperature=3e38)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
def test_filters_at_their_boundary_do_not_depend_on_rounding():
    x = np.log(np.tile(np.array([0.5, 0.3, 0.1, 0.1], np.float32), (40, 1)))
    assert set(drawn(x, seed=5, min_p=0.6)) == {0, 1}
    assert set(drawn(x, seed=5, top_p=0.8)) == {0, 1}
    assert set(drawn(x, seed=5, top_p=0.81)) == {0, 1, 2, 3}
    assert set(drawn(x, seed=5, top_p=0.5)) == {0}


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("filters", "penalised"),
    mostly_deep(
        itertools.product(("top_k", "top_p", "two"), (False, True)),
        [("top_k", True), ("top_p", True), ("two", False)],
    ),
)
def test_more_candidates_than_the_list_holds(filters, penalised):
    """All tokens are in one bin, so the row itself is read again."""
    rows, tokens = 2, CANDIDATES + 701
    options: dict[str, Any] = {**FILTERS[filters], "seed": 3}
    if penalised:
        previous = np.random.default_rng(1).integers(-1, PART, (rows, 3000)).astype(np.int32)
        options |= {"previous": previous, "repetition_penalty": 1.2}
    for spread in ("equal", "flat"):
        drawn(logits_of(rows, tokens, "float16", spread), **options)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    "filters", [{"top_k": 40}, {"top_p": 0.3}, {"top_k": 200, "top_p": 0.5}], ids=str
)
def test_cuts_among_candidates_of_one_bin(filters):
    """A few better tokens precede a bin with more tokens than are kept."""
    x = logits_of(8, 400, "float32", "flat")
    x[:, ::100] += 1
    drawn(x, seed=3, **filters)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("filters", [{"top_k": 60}, {"top_p": 0.9}], ids=str)
def test_bin_between_empty_bins_is_counted(filters):
    """All tokens but the best are in one bin, which is 1/16 of a factor of two wide."""
    bins = 8 + np.arange(4)
    x = np.zeros((16, 100), np.float32)
    x[:, 1:] = np.repeat(-(bins + 0.5) / 16 * np.log(2), 4)[:, None]
    assert drawn(x, seed=3, **filters).any()


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
def test_low_digits_of_weights_decide():
    """The best token weighs slightly less than top_p of the sum of all."""
    x = np.zeros((8, 1001), np.float32)
    x[:, 1:] = -6.907753944396973
    assert drawn(x, seed=3, top_p=0.5000024).any()


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(2**18, "float16"), *deep((128_256, "float16"), (2**18, "float32"))]
)
def test_large_vocabularies(tokens, dtype):
    x = logits_of(1, tokens, dtype)
    for filters in ("greedy", "none", "two"):
        drawn(x, seed=11, **FILTERS[filters])
    x[...] = 0.25
    x[0, [5, tokens - 1]] = 2.0
    assert drawn(x, seed=None, temperature=0) == [5]


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("margin", "filters"), [(1, "top_p"), (8, "none"), *deep((1, "none"), (8, "top_p"))]
)
def test_strided_rows_give_the_ids_of_the_reference(margin, filters):
    """Rows are apart, reversed, and unaligned; only the given out is written."""
    whole = logits_of(7, 515 + margin, "float16")
    for x in (whole[::-2, margin:], whole[:, margin : margin + 100], whole[3:4, margin:]):
        drawn(x, seed=4, **FILTERS[filters])
    x = KERNELS.put(whole)
    memory = KERNELS.put(np.full(11, 77, np.int32))
    workspace = KERNELS.put(np.full(2**20, 255, np.uint8))
    out = memory[2:9]
    options = {"seed": 4, **FILTERS[filters]}
    assert cupyattn.sample(x, out=out, workspace=workspace, **options) is out
    assert_array_equal(KERNELS.get(out), reference.sample(whole, **options))
    assert_array_equal(np.delete(KERNELS.get(memory), slice(2, 9)), 77)


@pytest.mark.nvrtc
def test_logits_are_read_in_whole_sectors():
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.sample(logits_of(2, PART + 512, "float16"), seed=0, temperature=0)
    assert report.sector_efficiency > 0.99


@everywhere
def test_nan_and_minus_infinity_are_never_drawn(side):
    """+inf is always drawn, and a row without a candidate gives -1."""
    nothing, x = -np.inf, np.zeros((5, 9), np.float32)
    x[0] = nothing
    x[1] = np.nan
    x[2, [3, 5]] = np.inf
    x[3, :8] = nothing
    x[4] = np.finfo(np.float32).min
    x[4, 6] = 0
    for filters in ("none", "greedy", "top_k", "one", "top_p", "min_p", "two"):
        ids = side.get(cupyattn.sample(side.put(x), seed=1, **FILTERS[filters]))
        assert_array_equal(ids, [-1, -1, 3, 8, 6])


@everywhere
@pytest.mark.parametrize("filters", ["none", "two"])
def test_row_draws_the_same_id_alone(side, filters):
    """Row i of a call with the seed s draws with seed s + i, wherever it is in the batch."""
    x, options = logits_of(5, 200, "float32"), FILTERS[filters]
    at_once = side.get(cupyattn.sample(side.put(x), seed=40, step=2, **options))
    seeds = np.arange(44, 39, -1)
    turned = cupyattn.sample(side.put(x[::-1].copy()), seed=side.put(seeds), step=2, **options)
    assert_array_equal(side.get(turned)[::-1], at_once)
    for row in range(5):
        alone = cupyattn.sample(side.put(x[row : row + 1]), seed=40 + row, step=2, **options)
        assert side.get(alone) == at_once[row]
    assert len({*at_once.tolist()}) > 1
    later = side.get(cupyattn.sample(side.put(x), seed=40, step=3, **options))
    assert (later != at_once).any()


@everywhere
def test_filters_that_keep_all_change_nothing(side):
    x = side.put(logits_of(20, 300, "float16"))
    expected = side.get(cupyattn.sample(x, seed=0))
    for options in ({"top_k": 0}, {"top_k": 300}, {"top_p": 1.0}, {"min_p": 0.0},
                    {"top_p": side.put(np.ones(20, np.float32))},
                    {"top_k": side.put(np.full(20, 301))},
                    {"repetition_penalty": 1.0, "previous": side.put(np.zeros((20, 2), np.int32))},
                    {"previous": side.put(np.zeros((20, 0), np.int32)), "repetition_penalty": 2.0},
                    ):  # fmt: skip
        assert_array_equal(side.get(cupyattn.sample(x, seed=0, **options)), expected)


@everywhere
def test_largest_seed_wraps_to_zero_in_the_next_row(side):
    x = side.put(logits_of(3, 100, "float32"))
    seeds = side.put(np.array([2**64 - 1, 0, 1], np.uint64))
    expected = side.get(cupyattn.sample(x, seed=seeds))
    assert_array_equal(side.get(cupyattn.sample(x, seed=2**64 - 1)), expected)


@everywhere
def test_no_rows_give_no_ids(side):
    ids = cupyattn.sample(side.put(np.zeros((0, 9), np.float16)), seed=0, top_k=3)
    assert ids.shape == (0,)
    assert ids.dtype == np.int32


@pytest.mark.gpu
@pytest.mark.parametrize("filtered", [False, True])
def test_options_in_place_between_replays_of_a_graph(filtered):
    """One capture serves every step: arrays of options change, and nothing is allocated."""
    import cupy

    rows, tokens = 4, 2 * PART + 100
    x = cupy.asarray(logits_of(rows, tokens, "float16"))
    arrays = {"seed": cupy.arange(rows, dtype=np.int64), "step": cupy.zeros(rows, np.int32)}
    if filtered:
        arrays |= {
            "temperature": cupy.ones(rows, np.float32),
            "top_k": cupy.zeros(rows, np.int32),
            "top_p": cupy.ones(rows, np.float32),
            "min_p": cupy.zeros(rows, np.float32),
            "repetition_penalty": cupy.ones(rows, np.float32),
            "previous": cupy.full((rows, 8), -1, np.int32),
        }
    out, workspace = cupy.empty(rows, np.int32), cupy.empty(2**20, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    rng = np.random.default_rng(0)
    with stream:
        cupyattn.sample(x, **arrays, out=out, workspace=workspace)
        stream.synchronize()
        stream.begin_capture()
        try:
            cupyattn.sample(x, **arrays, out=out, workspace=workspace)
        finally:
            graph = stream.end_capture()
        for step in range(6):
            arrays["step"] += 1
            x[...] = cupy.asarray(logits_of(rows, tokens, "float16", seed=step))
            if filtered:
                arrays["temperature"][...] = cupy.asarray(rng.choice([0, 0.7, 1.3], rows))
                arrays["top_k"][...] = cupy.asarray(rng.choice([0, 5, 500], rows))
                arrays["top_p"][...] = cupy.asarray(rng.choice([0.5, 0.9, 1], rows))
                arrays["min_p"][...] = cupy.asarray(rng.choice([0, 0.1], rows))
                arrays["repetition_penalty"][...] = cupy.asarray(rng.choice([1, 1.5], rows))
                arrays["previous"][:, step] = out
            options = {name: cupy.asnumpy(array) for name, array in arrays.items()}
            graph.launch(stream)
            assert_array_equal(cupy.asnumpy(out), reference.sample(cupy.asnumpy(x), **options))
    stream.synchronize()

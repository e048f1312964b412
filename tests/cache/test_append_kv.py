"""append_kv against the reference and its bounds: the emulator runs all checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, SENTINEL, dtype_of, everywhere
from support.paged import POSITIONS, AppendProblem
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention.reference.quantised import quantized_keys_bound
from cupyattn.ops.cache import problems
from cupyattn.ops.cache.kernels import AppendLaunch, append_config, specialise_append
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.compile import compile_ptx
from cupyattn.runtime.precision import U32

pytestmark = pytest.mark.nvrtc

# dtype, D, bits, half, interleaved, margin, norms: each is a kernel. With vectors and single items.
KINDS = wider(
    (
        ("float16", 64, None, 32, False, 0, ""), ("bfloat16", 40, 4, None, False, 0, ""),
        ("float32", 24, None, 8, True, 0, "qk"), ("float16", 34, 4, 15, False, 0, "k"),
        ("float32", 5, 8, 2, True, 1, ""), ("float16", 128, None, 64, False, 0, "qk"),
    ),
    (
        ("float16", 64, 8, 16, False, 0, "qk"), ("float16", 64, None, 32, False, 0, "q"),
        ("float16", 256, 4, 128, False, 0, "k"), ("bfloat16", 128, None, 64, False, 0, "qk"),
        ("float32", 256, 8, 64, True, 0, "q"), ("float16", 1, None, 0, False, 0, "qk"),
        ("bfloat16", 61, 8, 30, True, 1, "qk"), ("float16", 128, 4, None, False, 3, "qk"),
        ("float32", 128, 4, 64, False, 0, ""), ("float16", 80, 8, 40, True, 0, "qk"),
        ("bfloat16", 40, None, None, False, 0, "qk"), ("float16", 34, None, 15, False, 0, ""),
        ("float32", 24, 8, 8, True, 0, ""), ("float16", 256, 8, 64, False, 0, "qk"),
        ("float16", 512, None, 256, False, 0, "qk"), ("bfloat16", 512, 8, 128, True, 1, "qk"),
        ("float16", 264, 4, 60, False, 0, "k"), ("float32", 512, 4, 256, False, 0, ""),
    ),
)  # fmt: skip


@st.composite
def append_problems(draw: st.DrawFn) -> AppendProblem:
    """Draw problems of these kernels."""
    dtype, head_dim, bits, half, interleaved, margin, norms = draw(st.sampled_from(KINDS))
    total = draw(st.sampled_from((1, 2, 7, 16, 33)))
    return AppendProblem(
        tokens=draw(st.sampled_from(((total,), (1, total), (2, total)))),
        H=draw(st.sampled_from((1, 3, 8))),
        # Most often more than one head: others are a kernel of their own.
        G=draw(st.sampled_from((2, 3, 5))),
        D=head_dim,
        dtype=dtype,
        bits=bits,
        half=half,
        interleaved=interleaved,
        norms=norms,
        block_size=draw(st.sampled_from((1, 3, 16))),
        margin=margin,
        seed=draw(st.integers(0, 2**16)),
    )


PLAIN = AppendProblem((9,), H=5, G=3, D=64, dtype="float16")
ROTATED = replace(PLAIN, half=32)
NORMED = replace(ROTATED, norms="qk")
STORED = [None, 8, 4]


@given(problem=append_problems())
@examples(10)
def test_tokens_are_in_their_slots(problem):
    """Within the bounds, bit for bit where nothing is rotated; and nothing else is written."""
    given = problem.memory()
    assert problem.ratio(problem.appended(given), given) <= 1


@everywhere
@pytest.mark.parametrize("half", [20, *deep(None)])
def test_heads_are_normalised_and_then_rotated(side, half):
    """Also features that are not rotated; each of q and k by its own weight, eps and offset."""
    problem = replace(NORMED, half=half)
    given = problem.memory()
    given["flat"][:: problem.D * 3] *= 100
    placed = {name: side.put(array.copy()) for name, array in given.items()}
    with side.running():
        problem.call(placed)
    assert problem.ratio({n: side.get(a) for n, a in placed.items()}, given) <= 1


def test_a_norm_is_not_rounded_before_the_rotation():
    problem = replace(NORMED, bits=8)
    given = problem.memory()
    found = problem.appended(given)
    (_, _, k, _, slots), _ = problem.views(given)
    written = slots >= 0
    scales = found["scales"][:, 0][np.divmod(slots[written], problem.block_size)]
    plain = replace(problem, half=None)
    rounded = plain.exact("k", k, given).astype(np.float16)
    exact = problem.exact("k", k, given)
    bound = reference.quantisation_bound(exact, 8, error=2e-6)[1][written]
    of_rounded = replace(problem, norms="").exact("k", rounded, given)
    for tokens, fits in ((exact, True), (of_rounded, False)):
        expected = np.abs(tokens).max(axis=-1)[written] / 127
        assert (reference.error_ratio(scales, expected, bound) <= 1) == fits


@pytest.mark.parametrize("vector", [True, *deep(False)])
def test_norms_of_heads_that_are_zero_or_not_finite(vector):
    """Zeros stay; a NaN is in its own head only; the head of an infinity has zeros next to NaN."""
    problem = replace(NORMED, half=None, margin=0 if vector else 1)
    given = problem.memory()
    given["slot_mapping"][:] = np.arange(9)
    (_, _, k, _, _), options = problem.views(given)
    k[2, 0], k[3, 1, 5], options["q"][4, 2, 63] = 0, np.nan, np.inf
    found = problem.appended(given)
    (k_cache, *_), options = problem.views(found)
    stored = k_cache.reshape(-1, problem.G, problem.D)[:9].astype(float)
    assert (stored[2, 0] == 0).all()
    bad = np.isnan(stored).any(axis=-1)
    assert np.isnan(stored[3, 1]).all()
    assert bad.sum() == 1
    assert np.flatnonzero(np.isnan(options["q"][4, 2].astype(float))).tolist() == [63]
    assert (options["q"][4, 2, :63] == 0).all()
    assert np.isnan(options["q"].astype(float)).sum() == 1


# As KINDS, but without bits.
CENTRED_KINDS = wider(
    (
        ("float16", 64, 32, False, 0, ""), ("float16", 40, None, False, 0, ""),
        ("float16", 34, 15, True, 1, "k"),
    ),
    (
        ("float16", 128, 64, False, 0, "qk"), ("float16", 256, None, False, 0, "k"),
        ("bfloat16", 80, 40, True, 0, ""), ("float32", 64, 32, False, 0, ""),
        ("float32", 256, 64, False, 0, "qk"), ("float32", 5, None, False, 1, ""),
    ),
)  # fmt: skip


def centred_pools(problem: AppendProblem, seed: int = 0) -> dict[str, np.ndarray]:
    """A pool of codes whose heads' slots lie side by side, as PagedKVCache has it, and a centre."""
    blocks = len(problem.memory()["pool"]), problem.G, problem.block_size
    rng = np.random.default_rng(seed)
    return {
        "k_cache": np.full((*blocks, problem.D), 99, np.int8),
        "k_scales": np.full(blocks, SENTINEL, np.float32),
        "k_centre": rng.standard_normal((problem.G, problem.D), np.float32),
    }


def append_centred(problem: AppendProblem, memory: dict[str, Any], side: Any) -> dict[str, Any]:
    """Write tokens to the pools in `memory`; return all arrays after the call."""
    placed = {name: side.put(array.copy()) for name, array in memory.items()}
    (_, *others), options = problem.views(placed)
    options |= {"k_scales": placed["k_scales"].swapaxes(1, 2), "k_centre": placed["k_centre"]}
    with side.running():
        cupyattn.append_kv(placed["k_cache"].swapaxes(1, 2), *others, **options)
    return {name: side.get(array) for name, array in placed.items()}


@examples(8, deep=100)
@given(
    kind=st.sampled_from(CENTRED_KINDS),
    tokens=st.sampled_from(((1,), (7,), (2, 5))),
    heads=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_centred_keys_are_codes_of_what_is_rotated(kind, tokens, heads, seed):
    """Those of quantize_keys, bit by bit, where nothing is computed before; values stay floats."""
    dtype, head_dim, half, interleaved, margin, norms = kind
    problem = AppendProblem(
        tokens, H=3, G=heads, D=head_dim, dtype=dtype, half=half, interleaved=interleaved,
        margin=margin, norms=norms, seed=seed,
    )  # fmt: skip
    memory = problem.memory() | centred_pools(problem, seed)
    found = append_centred(problem, memory, KERNELS)
    (_, v_cache, k, v, slots), _ = problem.views(found)
    flat, slots = k.reshape(-1, heads, head_dim), slots.ravel()
    written = slots >= 0
    at = np.divmod(slots[written], problem.block_size)
    codes, scales = found["k_cache"].swapaxes(1, 2), found["k_scales"].swapaxes(1, 2)
    centre = found["k_centre"].astype(float)
    if half is None and not norms:
        expected = cupyattn.quantize_keys(flat[written], centre=found["k_centre"])
        assert_array_equal(codes[at], expected.codes)
        assert_array_equal(scales[at], expected.scales)
    exact = problem.exact("k", flat, memory)[written]
    off = 0 * exact
    if half is not None or norms:
        off = problem.bound("k", flat, memory, "float32")[written]
    values = codes[at] * scales[at][..., None].astype(float) + centre
    bound = quantized_keys_bound(exact, scales[at]) + off
    assert reference.error_ratio(values, exact, bound) <= 1
    largest = np.abs(exact - centre).max(axis=-1) / 127
    within = off.max(axis=-1, initial=0) / 127 + 4 * U32 * largest
    assert reference.error_ratio(scales[at], largest, within) <= 1
    assert_array_equal(v_cache[at], v.reshape(-1, heads, head_dim)[written])
    for array in (codes, scales, v_cache):
        rest = np.ones(array.shape[:2], bool)
        rest[at] = False
        assert (array[rest] == (99 if array.dtype == np.int8 else SENTINEL)).all()


@everywhere
def test_centred_keys_that_are_not_finite(side):
    problem = replace(PLAIN, half=None)
    memory = problem.memory() | centred_pools(problem)
    memory["slot_mapping"][:] = np.arange(9)
    k = problem.views(memory)[0][2]
    k[2, 0, 5], k[3, 1, 63], k[4, 2] = np.inf, np.nan, memory["k_centre"][2].astype(np.float16)
    memory["k_centre"][2] = k[4, 2]
    found = append_centred(problem, memory, side)
    scales = found["k_scales"].swapaxes(1, 2).reshape(-1, problem.G)[:9]
    codes = found["k_cache"].swapaxes(1, 2).reshape(-1, problem.G, problem.D)[:9]
    hit = np.zeros(scales.shape, bool)
    hit[2, 0] = hit[3, 1] = True
    assert_array_equal(np.isnan(scales), hit)
    assert not codes[hit].any()
    assert scales[4, 2] == np.float32(2.0**-126)
    assert not codes[4, 2].any()


def strided(array: np.ndarray) -> np.ndarray:
    """Return these numbers with a stride of 2 on each axis but the last, or on the only axis."""
    axes = tuple(2 * extent for extent in array.shape[:-1]) or (2 * array.size,)
    wide = np.zeros((*axes, *array.shape[len(axes) :]), array.dtype)
    every = (slice(None, None, 2),) * len(axes)
    wide[every] = array
    return wide[every]


@everywhere
@pytest.mark.parametrize("bits", STORED)
def test_writes_go_through_to_the_callers_arrays(side, bits):
    """Slices of packed tokens and of a pool; slots, positions and tables of any strides."""
    problem = replace(ROTATED, bits=bits)
    given = problem.memory()
    placed = {name: side.put(array.copy()) for name, array in given.items()}
    for name in ("slot_mapping", "positions", "cos", "sin"):
        placed[name] = side.put(strided(given[name]))
    with side.running():
        problem.call(placed)
    assert problem.ratio({n: side.get(a) for n, a in placed.items()}, given) <= 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "half", "interleaved"),
    mostly_deep(
        [("float16", 64, 32, False), ("float32", 24, 8, True), ("float16", 34, 15, False),
         ("bfloat16", 64, 24, True)],
        [("float16", 64, 32, False), ("float32", 24, 8, True)],
    ),
)  # fmt: skip
def test_the_rotation_is_that_of_rope_bit_for_bit(dtype, head_dim, half, interleaved):
    problem = AppendProblem(
        (2, 9), H=5, G=3, D=head_dim, dtype=dtype, half=half, interleaved=interleaved
    )
    given = problem.memory()
    found = problem.appended(given)
    (_, _, k, _, slots), options = problem.views(given)
    tables = map(KERNELS.put, options["rotary"][:2])
    with KERNELS.running():
        turned = cupyattn.rope(
            (KERNELS.put(options["q"].copy()), KERNELS.put(k.copy())), *tables,
            positions=KERNELS.put(options["positions"]), interleaved=interleaved,
        )  # fmt: skip
    q, k = map(KERNELS.get, turned)
    (k_cache, *_), options = problem.views(found)
    assert_array_equal(options["q"], q)
    at = np.divmod(slots[slots >= 0], problem.block_size)
    assert_array_equal(k_cache[at], k[slots >= 0])


@pytest.mark.parametrize("bits", [8, 4])
def test_rotated_keys_are_quantised_from_float32(bits):
    """Not from float16: a bound of half a scale would not show that."""
    problem = replace(ROTATED, bits=bits, dtype="float16", D=64)
    given = problem.memory()
    found = problem.appended(given)
    (_, _, k, _, slots), options = problem.views(given)
    exact = reference.rotated(k, *options["rotary"][:2], options["positions"])
    scales = found["scales"][:, 0][np.divmod(slots[slots >= 0], problem.block_size)]
    bound = reference.quantisation_bound(exact, problem.bits, error=1e-6)[1][slots >= 0]
    largest = {8: 127, 4: 7}[problem.bits]
    expected = np.abs(exact).max(axis=-1)[slots >= 0] / largest
    assert reference.error_ratio(scales, expected, bound) <= 1
    rounded = np.abs(exact.astype(np.float16)).max(axis=-1)[slots >= 0] / largest
    assert reference.error_ratio(rounded, expected, bound) > 1


@pytest.mark.parametrize(
    ("bits", "value"), [(None, np.nan), (8, np.inf), (4, -np.inf), *deep((8, np.nan), (4, np.nan))]
)
def test_numbers_that_are_not_finite_stay_in_their_head(bits, value):
    problem = replace(PLAIN, bits=bits)
    given = problem.memory()
    slots = given["slot_mapping"]
    slots[4] = np.setdiff1d(np.arange(slots.size), slots)[0]
    (_, _, k, v, _), _ = problem.views(given)
    k[4, 1, 7] = v[4, 2, 60] = value
    found = problem.appended(given)
    assert problem.ratio(found, given) <= 1
    if bits:
        assert np.flatnonzero(~np.isfinite(found["scales"])).size == 2


@pytest.mark.parametrize("bits", [8, 4])
def test_quantisation_is_bit_for_bit_at_any_size(bits):
    """Scales from what is flushed to the largest; quotients next to ties."""
    rng = np.random.default_rng(bits)
    problem = AppendProblem((64,), H=0, G=4, D=24, dtype="float32", bits=bits)
    given = problem.memory()
    (_, _, k, v, slots), _ = problem.views(given)
    slots[:] = rng.permutation(slots.size)
    for tokens in (k, v):
        sizes = 2.0 ** rng.integers(-149, 127, (*tokens.shape[:2], 1))
        tokens *= sizes
        scale = np.abs(tokens).max(axis=-1, keepdims=True) / np.float32({8: 127, 4: 7}[bits])
        halves = rng.integers(-7, 7, (*tokens.shape[:2], 12)) + 0.5
        tokens[..., 6:18] = halves.astype(np.float32) * scale
    assert problem.ratio(problem.appended(given), given) <= 1


@pytest.mark.parametrize("bits", [8, *deep(None, 4)])
def test_a_head_that_one_lane_holds(bits):
    problem = replace(PLAIN, D=8, bits=bits)
    given = problem.memory()
    assert problem.ratio(problem.appended(given), given) <= 1


@pytest.mark.parametrize("integers", ["int64", *deep("int32")])
def test_slots_that_do_not_exist_are_skipped(integers, monkeypatch):
    """Where values are not checked, as on a GPU; and rotated features without a row are NaN."""
    monkeypatch.setattr(problems, "checks_values", lambda _: False)
    problem = replace(ROTATED, integers=integers, bits=8)
    given = problem.memory()
    count = given["pool"].shape[0] * problem.block_size
    largest = np.iinfo(integers).max
    given["slot_mapping"][:] = (0, count, -2, count - 1, largest, -largest, -1, 5, 2**31 - 1)
    given["positions"][3], given["positions"][6] = -1, POSITIONS
    found = problem.appended(given)
    kept = np.isin(np.arange(count), (0, count - 1, 5))
    scales = found["scales"].swapaxes(1, 2).reshape(count, 2, -1)
    assert_array_equal((scales != 77).all(axis=(1, 2)), kept)
    assert_array_equal((scales == 77).all(axis=(1, 2)), ~kept)
    assert np.isnan(scales[count - 1, 0]).all()
    assert np.isfinite(scales[count - 1, 1]).all()
    _, options = problem.views(found)
    assert_array_equal(np.isnan(options["q"].astype(float)).all(axis=(1, 2)),
                       np.isin(np.arange(9), (3, 6)))  # fmt: skip


def test_every_array_has_strides_of_its_own():
    """Padded by another number of heads each, and of tokens in a block."""
    problem = replace(ROTATED, tokens=(2, 5), bits=8)
    given = problem.memory()
    (k_cache, v_cache, k, v, slots), options = problem.views(given)
    names = ("k_cache", "v_cache", "k", "v", "q", "k_scales", "v_scales")
    arrays = (k_cache, v_cache, k, v, *(options[name] for name in names[4:]))
    padded = {}
    for pad, (name, array) in enumerate(zip(names, arrays, strict=True), 1):
        axis = 2  # of heads
        shape = [extent + pad * (place in (1, axis)) for place, extent in enumerate(array.shape)]
        wide = KERNELS.put(np.zeros(shape, array.dtype))
        padded[name] = wide[:, : array.shape[1], : array.shape[2]]
        padded[name][...] = KERNELS.put(array)
    rotary = tuple(map(KERNELS.put, options["rotary"][:2]))
    with KERNELS.running():
        cupyattn.append_kv(
            *(padded[name] for name in names[:4]), KERNELS.put(slots), rotary=rotary,
            positions=KERNELS.put(options["positions"]),
            **{name: padded[name] for name in names[4:]},
        )  # fmt: skip
    expected = problem.views(problem.appended(given))
    for name, array in zip(names[:2], expected[0], strict=False):
        assert_array_equal(KERNELS.get(padded[name]), array)
    for name in names[4:]:
        assert_array_equal(KERNELS.get(padded[name]), expected[1][name])


@pytest.mark.parametrize(("vec", "normed"), [(8, False), (8, True), *deep((1, False), (1, True))])
def test_a_warp_has_read_its_queries_before_it_writes_them(vec, normed):
    """Lanes read what others overwrite. The emulator runs lanes in lockstep, a GPU need not."""
    options = "int32", "float32", "int32", False, normed
    launch = AppendLaunch("float16", "float16", 64, vec, *options)
    specialisation = specialise_append(append_config(75, ROTATED.H, launch.chunks), launch)
    ptx = compile_ptx(specialisation, TURING).code.decode()
    assert ptx.rindex("ld.global") < ptx.index("bar.warp.sync") < ptx.index("st.global")


def test_queries_of_tokens_that_are_left_out_are_rotated():
    given = ROTATED.memory()
    given["slot_mapping"][:] = -1
    found = ROTATED.appended(given)
    assert ROTATED.ratio(found, given) <= 1
    assert (found["flat"] != given["flat"]).any()


@everywhere
@pytest.mark.parametrize("dtype", ["float16", *deep("float32", "bfloat16")])
def test_keys_alone_are_rotated(side, dtype):
    """Without q."""
    problem = replace(ROTATED, dtype=dtype)
    given = problem.memory()
    placed = {name: side.put(array.copy()) for name, array in given.items()}
    arguments, options = problem.views(placed)
    with side.running():
        cupyattn.append_kv(*arguments, rotary=options["rotary"], positions=options["positions"])
    assert_array_equal(side.get(placed["flat"]), given["flat"])
    with_q = problem.appended(given)
    difference = with_q["pool"].astype(float) - side.get(placed["pool"]).astype(float)
    assert np.abs(difference).max() <= 2.0**-6  # the reference rounds otherwise here and there


@everywhere
@pytest.mark.parametrize("tokens", [(0,), (3, 0)])
def test_no_tokens(side, tokens):
    problem = replace(ROTATED, tokens=tokens)
    given = problem.memory()
    placed = {name: side.put(array.copy()) for name, array in given.items()}
    with side.running():
        problem.call(placed)
    assert_array_equal(side.get(placed["pool"]), given["pool"])


def test_a_rotation_of_no_features_copies():
    problem = replace(ROTATED, half=0)
    given = problem.memory()
    assert problem.ratio(problem.appended(given), given) == 0


@pytest.mark.parametrize("bits", STORED)
def test_float64_on_the_cpu(bits):
    problem = replace(NORMED, dtype="float64", bits=bits)
    found = problem.memory()
    before = problem.views({**found, "flat": found["flat"].copy()})[1]["q"].copy()
    problem.call(found)
    (k_cache, _, k, _, slots), options = problem.views(found)
    assert_array_equal(options["q"], problem.exact("q", before, found))
    at = np.divmod(slots[slots >= 0], problem.block_size)
    exact = problem.exact("k", k, found)[slots >= 0]
    if bits is None:
        assert_array_equal(k_cache[at], exact)
    else:
        stored, scales = reference.quantise(exact, bits)
        assert_array_equal(k_cache[at], stored)
        assert_array_equal(options["k_scales"][at], scales)


def test_a_cache_of_bfloat16_rounds_once():
    """Through float32, as ml_dtypes converts, some of the rotated numbers would round twice."""
    problem = AppendProblem((500,), H=1, G=4, D=64, dtype="bfloat16", half=32)
    found = problem.memory()
    (_, _, k, _, slots), options = problem.views(found)
    exact = reference.rotated(k, *options["rotary"][:2], options["positions"])[slots >= 0]
    problem.call(found)
    stored = problem.views(found)[0][0][np.divmod(slots[slots >= 0], problem.block_size)]
    neighbours = [np.nextafter(stored, dtype_of("bfloat16").type(side)).astype(float)
                  for side in (-np.inf, np.inf)]  # fmt: skip
    off = np.abs(stored.astype(float) - exact)
    assert all((off <= np.abs(other - exact)).all() for other in neighbours)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_queries_are_rotated_to_positions_that_there_are(backend):
    """Those of a token that is left out too; without queries its position may be anything."""
    given = ROTATED.memory()
    given["slot_mapping"][2], given["positions"][2] = -1, POSITIONS
    arguments, options = ROTATED.views(given)
    with cupyattn.backend(backend):
        cupyattn.append_kv(*arguments, **{**options, "q": None})
        before = given["flat"].copy()
        with pytest.raises(ValueError, match=rf"positions\[2\] is {POSITIONS}; the tables of "):
            cupyattn.append_kv(*arguments, **options)
    assert_array_equal(given["flat"], before)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("tokens", [(9,), (3, 3)])
def test_a_slot_that_stands_twice_is_refused(backend, tokens):
    problem = replace(ROTATED, tokens=tokens)
    given = problem.memory()
    slots = given["slot_mapping"].reshape(-1)
    slots[:] = (5, -1, 7, 2, -1, 1, 7, 0, 7)
    named = ("2", "6") if len(tokens) == 1 else ("0, 2", "2, 0")
    before = given["pool"].copy()
    message = r"slot_mapping\[{}\] and slot_mapping\[{}\] are both 7; ".format(*named)
    with cupyattn.backend(backend), pytest.raises(ValueError, match=message):
        problem.call(given)
    assert_array_equal(given["pool"], before)
    slots[[6, 8]] = -1
    with cupyattn.backend(backend):
        problem.call(given)

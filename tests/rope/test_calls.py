"""Rotary position embedding in every layout, and its tables with every scaling."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import DTYPES, KERNELS, dtype_of, everywhere
from support.recording_device import device_array
from support.search import deep, examples, wider

import cupyattn
from cupyattn import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    YarnScaling,
    reference,
)
from cupyattn.emulator import Report
from cupyattn.ops.rope import kernels
from cupyattn.testing import lay_out

LENGTH = 40
VIEWS = ("contiguous", "packed", "transposed", "sliced", "reversed")


def arrays(seed: int, dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype_of(dtype)) for shape in shapes]


def tables(pairs: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    return cupyattn.rope_tables(LENGTH, 2 * pairs, dtype=dtype)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(5)
@given(
    case=st.sampled_from(
        wider(
            (("float16", False), ("float32", True)),
            [(dtype, interleaved) for dtype in DTYPES for interleaved in (False, True)],
        )
    ),
    batch=st.integers(1, 2),
    length=st.sampled_from((1, 5, 33)),
    heads=st.sampled_from(((1, 1), (4, 2), (5, 3), (8, 1))),
    dim=st.sampled_from(((16, 8), (24, 8), (24, 4), (17, 5), (33, 16), (8, 0), (10, 5))),
    positions=st.sampled_from((None, "S", "B S")),
    inverse=st.booleans(),
    view=st.sampled_from(VIEWS),
    seed=st.integers(0, 9),
)
def test_within_bounds(case, batch, length, heads, dim, positions, inverse, view, seed):
    (dtype, interleaved), (dim, pairs) = case, dim
    shapes = [(batch, length, count, dim) for count in heads]
    q, k = arrays(seed, dtype, *shapes)
    cos, sin = tables(pairs)
    at, options = np.arange(length), {"interleaved": interleaved, "inverse": inverse}
    if positions:
        shape = (length,) if positions == "S" else (batch, length)
        at = np.random.default_rng(seed).integers(0, LENGTH, shape)
        options["positions"] = KERNELS.put(at)
    placed = tuple(KERNELS.put(lay_out(x, view)) for x in (q, k))
    found = cupyattn.rope(placed, KERNELS.put(cos), KERNELS.put(sin), **options)
    turn = -sin if inverse else sin
    for x, out in zip((q, k), found, strict=True):
        exact = reference.rope(x, cos, turn, at, interleaved=interleaved)
        bound = reference.rope_bound(x, cos, turn, at, dtype=dtype, interleaved=interleaved)
        assert reference.error_ratio(KERNELS.get(out), exact, bound) <= 1


@everywhere
@pytest.mark.parametrize(
    ("interleaved", "dim", "pairs"),
    [(False, 16, 8), (True, 13, 5), *deep((False, 13, 5), (True, 24, 4))],
)
def test_in_place_and_backward(side, interleaved, dim, pairs):
    q, k, dq, dk, there = arrays(0, "float32", *[(2, 6, 3, dim)] * 5)
    cos, sin = (side.put(table) for table in tables(pairs))
    options = {"interleaved": interleaved}
    turned = [side.get(x) for x in cupyattn.rope((side.put(q), side.put(k)), cos, sin, **options)]
    x = side.put(q.copy()), side.put(k.copy())
    found = cupyattn.rope(x, cos, sin, out=x, **options)
    assert found[0] is x[0] and found[1] is x[1]
    for array, expected in zip(found, turned, strict=True):
        assert_array_equal(side.get(array), expected)
    back = cupyattn.rope(found, cos, sin, inverse=True, **options)
    assert_allclose(side.get(back[0]), q, atol=2e-6)

    gradients = cupyattn.rope_backward((side.put(dq), side.put(dk)), cos, sin, **options)
    for gradient, x, out, dout in zip(gradients, (q, k), turned, (dq, dk), strict=True):
        inner = (side.get(gradient).astype(float) * x).sum()
        assert_allclose(inner, (out.astype(float) * dout).sum(), rtol=1e-4)
    into = side.put(there.copy())
    once = side.get(cupyattn.rope_backward(side.put(dq), cos, sin, **options))
    added = cupyattn.rope_backward(side.put(dq), cos, sin, grads=into, accumulate=True, **options)
    assert added is into
    assert_allclose(side.get(added), there + once, rtol=1e-5, atol=1e-6)


def test_interleaved_is_half_split_of_permuted_features():
    (x,) = arrays(1, "float64", (1, 4, 2, 10))
    cos, sin = tables(4, "float64")
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]
    with cupyattn.backend("reference"):
        half = cupyattn.rope(np.ascontiguousarray(x[..., order]), cos, sin)
        assert_allclose(cupyattn.rope(x, cos, sin, interleaved=True)[..., order], half)


@everywhere
def test_vjp(side):
    q, k, dq, dk = (side.put(x) for x in arrays(2, "float32", *[(1, 3, 2, 8)] * 4))
    cos, sin = (side.put(table) for table in tables(4))
    _, pullback = cupyattn.vjp(cupyattn.rope, (q, k), cos, sin, interleaved=True)
    (first, second), dcos, dsin = pullback((dq, dk))
    expected = cupyattn.rope_backward((dq, dk), cos, sin, interleaved=True)
    assert_array_equal(side.get(first), side.get(expected[0]))
    assert_array_equal(side.get(second), side.get(expected[1]))
    assert dcos is None and dsin is None
    (first, second), _, _ = pullback((dq, None))
    assert_array_equal(side.get(first), side.get(expected[0]))
    assert not side.get(second).any()
    for wrong in (dq, (dq,), (dq, dk, dk)):
        with pytest.raises(TypeError, match="the pullback of rope was given"):
            pullback(wrong)
    _, pullback = cupyattn.vjp(lambda x: cupyattn.rope(x, cos, sin), q)
    (dx,) = pullback(dq)
    assert_array_equal(side.get(dx), side.get(cupyattn.rope_backward(dq, cos, sin)))


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("interleaved", "dtype"),
    [(False, np.int32), (True, np.int64), *deep((False, np.int64), (True, np.int32))],
)
def test_positions_out_of_range_give_nan(monkeypatch, interleaved, dtype):
    """Without checks of values, tables are not read beyond their end."""
    monkeypatch.setattr(kernels, "checks_values", lambda operands: False)
    (x,) = arrays(3, "float16", (2, 3, 4, 24))
    cos, sin = tables(8)
    positions = np.array([[0, -1, 5], [LENGTH, LENGTH - 1, 2**31 - 1]], dtype)
    options = {"positions": KERNELS.put(positions), "interleaved": interleaved}
    out = KERNELS.get(cupyattn.rope(*map(KERNELS.put, (x, cos, sin)), **options))
    outside = (positions < 0) | (positions >= LENGTH)
    assert np.isnan(out[outside][..., :16]).all()
    assert_array_equal(out[..., 16:], x[..., 16:])
    kept = np.where(outside, 0, positions)
    expected = reference.rope(x, cos, sin, kept, interleaved=interleaved)
    assert_allclose(out[~outside], expected[~outside], atol=4e-3)


@pytest.mark.nvrtc
def test_copied_features_keep_their_bits_and_infinities_match():
    """Features beyond the pairs keep their bits; infinities follow the formula."""
    x = np.zeros((1, 2, 1, 12), np.float16)
    x[0, :, 0] = [4e4, 4e4, 1, np.inf, 4e4, -4e4, 0, 2, np.inf, -np.inf, np.nan, -0.0]
    cos, sin = tables(4)
    with cupyattn.backend("emulator"):
        out = cupyattn.rope(x, cos, sin)
    exact = reference.rope(x, cos, sin, np.arange(2))
    bound = reference.rope_bound(x, cos, sin, np.arange(2), dtype="float16")
    assert reference.error_ratio(out, exact, bound) <= 1
    assert out[..., 8:].tobytes() == x[..., 8:].tobytes()


@pytest.mark.nvrtc
@pytest.mark.parametrize("interleaved", [False, True])
def test_whole_sectors_of_q_and_k(interleaved):
    """A thread of float16 pairs reads 32 bytes of a table in two loads."""
    report = Report()
    q, k = arrays(0, "float16", (1, 8, 8, 64), (1, 8, 2, 64))
    with cupyattn.backend("emulator", report=report):
        cupyattn.rope((q, k), *tables(32), interleaved=interleaved)
    assert report.sector_efficiency == (1.0 if interleaved else 23 / 26)
    wasteful = {a.instruction.location[1] for a in report.accesses if a.efficiency < 1}
    assert len(wasteful) == (0 if interleaved else 1)  # the line that reads tables


def test_one_launch_for_q_and_k(recorder):
    q, k = device_array((2, 5, 8, 64)), device_array((2, 5, 2, 64))
    cos, sin = device_array((9, 32), np.float32), device_array((9, 32), np.float32)
    cupyattn.rope((q, k), cos, sin)
    cupyattn.rope((q, k), cos, sin, out=(q, k))
    ((first, grid, arguments), (_, _, again)) = recorder.started
    params = arguments[-1]
    assert dict(first.macros)["VEC"] == 8
    assert params["groups"].tolist() == [4, 1]
    assert (params["slots"], params["tokens"]) == (4, 10)
    assert grid == (2, 1, 1)
    assert arguments[0] is q and arguments[1] is k and again[5] is q and again[6] is k


def bad(**changes):
    call = {
        "x": np.zeros((2, 3, 4, 8), np.float32),
        "cos": np.zeros((5, 4), np.float32),
        "sin": np.zeros((5, 4), np.float32),
    }
    return {**call, **changes}


F32 = np.float32


@everywhere
@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"x": np.zeros((3, 4, 8), F32)}, ValueError, r"x has shape \(3, 4, 8\); x is \(B, S, H"),
        ({"x": np.zeros((2, 6, 4, 8), F32)}, ValueError, "S = 6 tokens.*cos and sin have 5 rows"),
        ({"x": np.zeros((2, 3, 4, 6), F32)}, ValueError, "cos has 4 columns, which rotate 8 feat"),
        ({"x": np.zeros((2, 3, 4, 8), int)}, TypeError, "x has dtype int64"),
        ({"x": None}, TypeError, "x is None"),
        ({"x": np.zeros((2, 3, 4, 16), F32)[..., ::2]}, ValueError, "x has strides"),
        ({"cos": np.zeros((4, 4), F32)}, ValueError, r"sin has shape \(5, 4\); sin is shaped like"),
        ({"cos": np.zeros((5, 4), np.float16)}, TypeError, "share one dtype"),
        ({"cos": np.zeros(5, F32)}, ValueError, "cos has shape"),
        ({"positions": np.array([0, 1])}, ValueError, r"positions has shape \(2,\); it is \(S,\)"),
        ({"positions": np.zeros((3, 2), int)}, ValueError, r"positions has shape \(3, 2\)"),
        ({"positions": np.zeros(3, F32)}, TypeError, "positions has dtype float32"),
        ({"interleaved": 1}, TypeError, "interleaved = 1"),
        ({"inverse": None}, TypeError, "inverse = None"),
        ({"out": np.zeros((2, 3, 4, 7), F32)}, ValueError, "out is float32"),
        ({"out": (None, None)}, TypeError, "out"),
    ],
)
def test_bad_input(side, changes, kind, message):
    call = {
        name: side.put(value) if isinstance(value, np.ndarray) else value
        for name, value in bad(**changes).items()
    }
    with pytest.raises(kind, match=message):
        cupyattn.rope(call.pop("x"), call.pop("cos"), call.pop("sin"), **call)


@everywhere
def test_bad_pairs(side):
    x, cos, sin = (side.put(a) for a in bad().values())
    other = side.put(np.zeros((2, 3, 1, 6), F32))
    for pair, kind, message in (
        ((x,), TypeError, "x has type tuple of length 1; it must be one array, or a tuple of two"),
        ((x, other), ValueError, r"x\[1\] has shape"),
        ((x, x), ValueError, r"out\[0\] overlaps x\[1\]"),
    ):
        with pytest.raises(kind, match=message):
            cupyattn.rope(pair, cos, sin, out=pair if len(pair) == 2 else None)
    with pytest.raises(TypeError, match="out has type list"):
        cupyattn.rope((x, x), cos, sin, out=[x, x])
    q = side.put(np.zeros((2, 3, 4, 8), F32))
    with pytest.raises(ValueError, match=r"out\[0\] overlaps x\[1\]"):
        cupyattn.rope((x, q), cos, sin, out=(q, None))
    with pytest.raises(ValueError, match="accumulate=True without grads"):
        cupyattn.rope_backward(x, cos, sin, accumulate=True)


@everywhere
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1, 2], [3, 5, -1]], r"positions\[1, 1\] is 5; cos and sin have rows 0 to 4"),
        ([0, 1, -1], r"positions\[2\] is -1"),
    ],
)
def test_error_names_the_first_position_out_of_range(side, positions, message):
    x, cos, sin = (side.put(a) for a in bad().values())
    with cupyattn.backend(checks=True), pytest.raises(ValueError, match=message):
        cupyattn.rope(x, cos, sin, positions=side.put(np.array(positions)))


@everywhere
@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)])
def test_empty_axes_give_empty_results(side, shape):
    _, cos, sin = (side.put(a) for a in bad().values())
    x = side.put(np.zeros(shape, F32))
    assert cupyattn.rope(x, cos, sin).shape == shape
    assert cupyattn.rope((x, x), cos, sin)[1].shape == shape


def test_plain_tables():
    cos, sin = cupyattn.rope_tables(100, 8, base=10000.0)
    assert cos.shape == sin.shape == (100, 4)
    assert cos.dtype == np.float32
    for position in (0, 1, 57, 99):
        for pair in range(4):
            angle = position / 10000.0 ** (2 * pair / 8)
            assert_allclose(cos[position, pair], math.cos(angle), atol=1e-7)
            assert_allclose(sin[position, pair], math.sin(angle), atol=1e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_are_rounded_once(dtype):
    cos, sin = cupyattn.rope_tables(5, 6, dtype=dtype)
    assert cos.dtype.name == sin.dtype.name == dtype
    exact = reference.rope_tables(5, 6)[1]
    assert_allclose(sin.astype(float), exact, atol=2.0**-8 if dtype == "bfloat16" else 2.0**-11)


def test_linear_scaling_interpolates_positions():
    plain = reference.rope_tables(33, 16)
    stretched = reference.rope_tables(129, 16, scaling=LinearScaling(4.0))
    for one, other in zip(plain, stretched, strict=True):
        assert_allclose(other[::4], one)
    assert LinearScaling(4.0).attention_scale == 1.0


def test_ntk_scaling_keeps_the_highest_and_divides_the_lowest_frequency():
    plain = reference.rope_frequencies(64)
    stretched = reference.rope_frequencies(64, scaling=NTKScaling(8.0))
    assert stretched[0] == plain[0] == 1
    assert_allclose(stretched[-1], plain[-1] / 8)
    assert_allclose(stretched, (10000.0 * 8.0 ** (64 / 62)) ** (-np.arange(32) / 32))
    assert reference.rope_frequencies(2, scaling=NTKScaling(8.0)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("length", "factors"), [(1, (1.0, 2.0)), (9, (1.0, 2.0)), (10, (4.0, 8.0))]
)
def test_longrope_divides_each_frequency_by_the_factors_of_the_length(length, factors):
    scaling = LongRopeScaling((1.0, 2.0), (4.0, 8.0), 9, 1.25)
    cos, sin = cupyattn.rope_tables(length, 4, base=100.0, scaling=scaling, dtype="float64")
    angles = np.arange(length)[:, None] * np.array([1.0, 0.1]) / factors
    assert_allclose(cos, 1.25 * np.cos(angles), rtol=1e-15)
    assert_allclose(sin, 1.25 * np.sin(angles), rtol=1e-15)


def test_llama_3_scaling():
    """Each frequency follows the branches of Meta's code of Llama 3.1."""
    plain = reference.rope_frequencies(128, base=500000.0)
    scaled = reference.rope_frequencies(128, base=500000.0, scaling=Llama3Scaling())
    counts = {"kept": 0, "between": 0, "divided": 0}
    for frequency, found in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected, which = frequency, "kept"
        elif wavelength > 8192 / 1:
            expected, which = frequency / 8, "divided"
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected, which = (1 - smooth) * frequency / 8 + smooth * frequency, "between"
        counts[which] += 1
        assert_allclose(found, expected, rtol=1e-12)
    assert counts == {"kept": 29, "between": 6, "divided": 29}


def test_yarn_scaling():
    """Qwen's scaling: factor 4 of 32,768. How often a pair rotates gives the ramp's ends."""
    scaling = YarnScaling(4.0, 32768)
    plain = reference.rope_frequencies(128, base=1e6)
    scaled = reference.rope_frequencies(128, base=1e6, scaling=scaling)
    turns = 32768 * plain / (2 * math.pi)
    low = int(np.flatnonzero(turns >= 32)[-1])  # the last pair that turns 32 times
    high = int(np.flatnonzero(turns <= 1)[0])
    assert (low, high) == (23, 40)
    for m, (frequency, found) in enumerate(zip(plain, scaled, strict=True)):
        ramp = min(max((m - low) / (high - low), 0), 1)
        assert_allclose(found, frequency * (1 - ramp) + frequency / 4 * ramp, rtol=1e-12)
    assert_allclose(scaling.attention_scale, 0.1 * math.log(4) + 1)
    cos, _ = reference.rope_tables(1, 128, base=1e6, scaling=scaling)
    assert_allclose(cos, scaling.attention_scale)
    assert YarnScaling(4.0, 32768, attention_factor=1.0).attention_scale == 1.0
    assert YarnScaling(1.0, 32768).attention_scale == 1.0
    short = reference.rope_frequencies(8, base=1e6, scaling=YarnScaling(4.0, 4))
    assert np.isfinite(short).all()


@pytest.mark.deep
def test_frequencies_match_transformers():
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    cases = {
        "linear": (LinearScaling(4.0), {"factor": 4.0}),
        "llama3": (
            Llama3Scaling(8.0),
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192},
        ),
        "yarn": (
            YarnScaling(4.0, 32768), {"factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    }  # fmt: skip
    for kind, (scaling, numbers) in cases.items():
        config = LlamaConfig(
            hidden_size=4096, num_attention_heads=32, rope_theta=500000.0,
            max_position_embeddings=131072, rope_scaling={"rope_type": kind, **numbers},
        )  # fmt: skip
        frequencies, scale = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        found = reference.rope_frequencies(128, base=500000.0, scaling=scaling)
        assert_allclose(found, frequencies.numpy(), rtol=1e-6)
        assert_allclose(scaling.attention_scale, scale, rtol=1e-6)


@pytest.mark.parametrize(
    ("args", "options", "kind", "message"),
    [
        ((-1, 8), {}, ValueError, "length = -1; it is 0 or more"),
        ((2**31, 0), {}, ValueError, "length = 2147483648; it is 0 or more, at most 2147483647"),
        ((2**63, 64), {}, ValueError, "length = 9223372036854775808; it is 0 or more"),
        ((2**64, 64), {}, ValueError, "length = 18446744073709551616; it is 0 or more"),
        ((10**5000, 64), {}, ValueError, "length = .*; it is 0 or more"),
        ((4, 2**63), {}, ValueError, "rotary_dim = 9223372036854775808; it is even, 0 or more"),
        ((4, 2**64), {}, ValueError, "rotary_dim = 18446744073709551616; it is even"),
        ((1.5, 8), {}, TypeError, "length is 1.5 of type float"),
        ((4, 7), {}, ValueError, "rotary_dim = 7; it is even"),
        ((4, "8"), {}, TypeError, "rotary_dim is '8'"),
        ((4, 8), {"base": 1.0}, ValueError, "base = 1.0; it is above 1"),
        ((4, 8), {"base": "1e4"}, TypeError, "base has type str"),
        ((4, 8), {"dtype": "int32"}, TypeError, "dtype = 'int32'; allowed are"),
        ((4, 8), {"dtype": "float"}, None, ""),
        ((4, 8), {"dtype": object()}, TypeError, "dtype = <object"),
        ((4, 8), {"scaling": 2.0}, TypeError, "scaling has type float; it must be None or one"),
        ((4, 8), {"scaling": LinearScaling(0)}, ValueError, "factor = 0.0 of LinearScaling; it is"),
        ((4, 8), {"scaling": LinearScaling("2")}, TypeError, "factor of scaling has type str"),
        ((4, 8), {"scaling": Llama3Scaling(8, 4, 4)}, ValueError, "high_freq_factor = 4; it is"),
        ((4, 8), {"scaling": YarnScaling(4, 9, 1, 32)}, ValueError, "beta_fast = 1; it is at"),
        ((4, 8), {"scaling": YarnScaling(4, 9, 1, 1), "dtype": "float64"}, None, ""),
        ((4, 4), {"scaling": LongRopeScaling((1.0,), (1.0, 2.0), 9)}, ValueError,
         "1 short_factors of LongRopeScaling; there is a factor for each of 2 pairs"),
        ((4, 4), {"scaling": LongRopeScaling((1.0, 2.0), (1.0, -2.0), 9)}, ValueError,
         "long_factors = -2.0 of LongRopeScaling; it is above 0"),
        ((4, 4), {"scaling": LongRopeScaling(("1", 2.0), (1.0, 2.0), 9)}, TypeError,
         "short_factors of scaling has type str"),
        ((4, 8), {"scaling": NTKScaling(1e300)}, ValueError, "NTKScaling.*angles of 4 positions"),
        ((4, 8), {"scaling": LinearScaling(1e-308)}, ValueError, "angles of 4 positions are fin"),
        ((4, 8), {"scaling": LinearScaling(1e-320)}, ValueError, "angles of 4 positions are fin"),
        ((4, 8), {"scaling": YarnScaling(4, 9, 1e-320, 1e-320)}, ValueError, "angles of 4 posit"),
        ((4, 8), {"scaling": YarnScaling(4, 9, 1e308)}, ValueError, "angles of 4 positions are"),
    ],
)  # fmt: skip
def test_bad_input_of_rope_tables(args, options, kind, message):
    if kind is None:
        assert cupyattn.rope_tables(*args, **options)[0].dtype == np.float64
        return
    with pytest.raises(kind, match=message):
        cupyattn.rope_tables(*args, **options)


def test_no_positions_and_no_features():
    assert cupyattn.rope_tables(0, 8)[0].shape == (0, 4)
    assert cupyattn.rope_tables(4, 0)[0].shape == (4, 0)


FACTORS, ORIGINAL_LENGTHS = st.floats(1, 64), st.integers(16, 40_000)
SCALINGS = st.one_of(
    st.none(),
    FACTORS.map(LinearScaling),
    FACTORS.map(NTKScaling),
    st.tuples(FACTORS, ORIGINAL_LENGTHS).map(lambda drawn: YarnScaling(*drawn)),
    st.tuples(FACTORS, ORIGINAL_LENGTHS).map(
        lambda drawn: Llama3Scaling(drawn[0], original_length=drawn[1])
    ),
)
"""Scalings of models, which make a context longer."""


@given(
    length=st.integers(0, 300),
    pairs=st.integers(0, 70),
    base=st.floats(1.001, 1e7),
    scaling=SCALINGS,
    dtype=st.sampled_from(DTYPES),
)
def test_drawn_tables_are_cos_and_sin_of_scaled_frequencies(length, pairs, base, scaling, dtype):
    """Every pair rotates evenly from angle 0, no faster than without scaling.

    Tables are rounded once. Angles are exact to about 1e-13 at these positions.
    """
    plain = reference.rope_frequencies(2 * pairs, base=base)
    frequencies = reference.rope_frequencies(2 * pairs, base=base, scaling=scaling)
    assert (frequencies > 0).all()
    assert (frequencies <= plain * (1 + 1e-12)).all()
    slowest = 1.0 if scaling is None else scaling.factor
    assert (frequencies >= plain / slowest * (1 - 1e-12)).all()

    cos, sin = cupyattn.rope_tables(length, 2 * pairs, base=base, scaling=scaling, dtype=dtype)
    assert cos.shape == sin.shape == (length, pairs)
    assert cos.dtype == sin.dtype == dtype_of(dtype)
    scale = 1.0 if scaling is None else scaling.attention_scale
    unit = float(ml_dtypes.finfo(dtype_of(dtype)).eps) / 2
    least = float(ml_dtypes.finfo(dtype_of(dtype)).smallest_subnormal)
    angles = np.outer(np.arange(length), frequencies)
    for table, exact in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        error = np.abs(table.astype(np.float64) - scale * exact)
        assert (error <= unit * np.abs(scale * exact) + least + 1e-13).all()

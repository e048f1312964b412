"""Tables of rotary embedding and the ways to stretch them, against what each model computes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from support.dtypes import DTYPES, dtype_of

import cupyattn
from cupyattn import LinearScaling, Llama3Scaling, NTKScaling, YarnScaling, reference


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


def test_ntk_scaling_keeps_the_highest_and_divides_the_lowest_frequency():
    plain = reference.rope_frequencies(64)
    stretched = reference.rope_frequencies(64, scaling=NTKScaling(8.0))
    assert stretched[0] == plain[0] == 1
    assert_allclose(stretched[-1], plain[-1] / 8)
    assert_allclose(stretched, (10000.0 * 8.0 ** (64 / 62)) ** (-np.arange(32) / 32))
    assert reference.rope_frequencies(2, scaling=NTKScaling(8.0)).tolist() == [1.0]


def test_llama_3_scaling():
    """Llama 3.1: each frequency by the branches of Meta's model code."""
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
    """Qwen's: factor 4 of 32,768. The ramp's ends follow from how often a pair turns."""
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


def test_transformers_computes_the_same():
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
        ((1.5, 8), {}, TypeError, "length is 1.5, a float"),
        ((4, 7), {}, ValueError, "rotary_dim = 7; it is even"),
        ((4, "8"), {}, TypeError, "rotary_dim is '8'"),
        ((4, 8), {"base": 1.0}, ValueError, "base = 1.0; it is above 1"),
        ((4, 8), {"base": "1e4"}, TypeError, "base is a str"),
        ((4, 8), {"dtype": "int32"}, TypeError, "dtype = 'int32'; allowed are"),
        ((4, 8), {"dtype": "float"}, None, ""),
        ((4, 8), {"dtype": object()}, TypeError, "dtype = <object"),
        ((4, 8), {"scaling": 2.0}, TypeError, "scaling is a float; it is None or one of Linear"),
        ((4, 8), {"scaling": LinearScaling(0)}, ValueError, "factor = 0.0 of LinearScaling; it is"),
        ((4, 8), {"scaling": LinearScaling("2")}, TypeError, "factor of scaling is a str"),
        ((4, 8), {"scaling": Llama3Scaling(8, 4, 4)}, ValueError, "high_freq_factor = 4; it is"),
        ((4, 8), {"scaling": YarnScaling(4, 9, 1, 32)}, ValueError, "beta_fast = 1; it is at"),
        ((4, 8), {"scaling": YarnScaling(4, 9, 1, 1), "dtype": "float64"}, None, ""),
        ((4, 8), {"scaling": NTKScaling(1e300)}, ValueError, "NTKScaling.*angles of 4 positions"),
        ((4, 8), {"scaling": LinearScaling(1e-308)}, ValueError, "angles of 4 positions are fin"),
        ((4, 8), {"scaling": LinearScaling(1e-320)}, ValueError, "angles of 4 positions are fin"),
        ((4, 8), {"scaling": YarnScaling(4, 9, 1e-320, 1e-320)}, ValueError, "angles of 4 posit"),
        ((4, 8), {"scaling": YarnScaling(4, 9, 1e308)}, ValueError, "angles of 4 positions are"),
    ],
)  # fmt: skip
def test_bad_input(args, options, kind, message):
    if kind is None:
        assert cupyattn.rope_tables(*args, **options)[0].dtype == np.float64
        return
    with pytest.raises(kind, match=message):
        cupyattn.rope_tables(*args, **options)


def test_no_positions_and_no_features():
    assert cupyattn.rope_tables(0, 8)[0].shape == (0, 4)
    assert cupyattn.rope_tables(4, 0)[0].shape == (4, 0)


FACTORS, LENGTHS = st.floats(1, 64), st.integers(16, 40_000)
SCALINGS = st.one_of(
    st.none(),
    FACTORS.map(LinearScaling),
    FACTORS.map(NTKScaling),
    st.tuples(FACTORS, LENGTHS).map(lambda drawn: YarnScaling(*drawn)),
    st.tuples(FACTORS, LENGTHS).map(
        lambda drawn: Llama3Scaling(drawn[0], original_length=drawn[1])
    ),
)
"""Those of models, which make a context longer."""


@given(
    length=st.integers(0, 300),
    pairs=st.integers(0, 70),
    base=st.floats(1.001, 1e7),
    scaling=SCALINGS,
    dtype=st.sampled_from(DTYPES),
)
def test_any_tables_are_turns_that_no_scaling_makes_faster(length, pairs, base, scaling, dtype):
    """Of one length; the first at 0, each pair by its own even step, slower than without scaling.

    Rounding is the dtype's, once; angles are exact to about 1e-13 at these positions.
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

"""NumPy arrays on the CPU: float32 arithmetic within its bounds, and tables for 16-bit arrays."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import DTYPES, dtype_of, unchanged
from support.linear_problems import ACTIVATIONS, LinearProblem

import cupyattn
from cupyattn import reference
from cupyattn.ops.activations import bounds as activation_bounds
from cupyattn.ops.activations import cpu as activation_cpu
from cupyattn.ops.attention import cpu as attention_cpu
from cupyattn.ops.attention.bounds import cpu_attention_bound
from cupyattn.ops.linear.bounds import cpu_linear_backward_bound, cpu_linear_bound
from cupyattn.ops.linear.cpu import HugePages, KeptWeights, kept_weights
from cupyattn.reference import error_ratio
from cupyattn.runtime.outputs import round_into
from cupyattn.testing import lay_out

KINDS = ("gelu", "gelu_tanh", "silu")
FORWARD = {
    "gelu": cupyattn.gelu,
    "gelu_tanh": partial(cupyattn.gelu, approximate="tanh"),
    "silu": cupyattn.silu,
}
BACKWARD = {
    "gelu": cupyattn.gelu_backward,
    "gelu_tanh": partial(cupyattn.gelu_backward, approximate="tanh"),
    "silu": cupyattn.silu_backward,
}
GATED = {
    "gelu": cupyattn.geglu,
    "gelu_tanh": partial(cupyattn.geglu, approximate="tanh"),
    "silu": cupyattn.swiglu,
}
GATED_BACKWARD = {
    "gelu": cupyattn.geglu_backward,
    "gelu_tanh": partial(cupyattn.geglu_backward, approximate="tanh"),
    "silu": cupyattn.swiglu_backward,
}
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, 2.0**-126, 3e38, -3e38,
           -88.0, -88.8, -104.0, 88.8, 104.0, 12.9, -12.9, -13.1, -14.6, 1e10, -1e10]  # fmt: skip


def numbers(shape: tuple[int, ...], dtype: str, spread: float, seed: int) -> np.ndarray:
    return (spread * np.random.default_rng(seed).standard_normal(shape)).astype(dtype_of(dtype))


def ratio(found: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> float:
    """Return `error_ratio` for results that overflow their dtype, as the exact ones do."""
    with np.errstate(over="ignore", invalid="ignore"):
        infinite = np.isinf(np.asarray(exact).astype(found.dtype))
        return error_ratio(found, np.where(infinite, np.sign(exact) * np.inf, exact), bound)


shapes = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.sampled_from([(activation_cpu.BLOCK - 1,), (2, activation_cpu.BLOCK + 1), (3, 7000)]),
)
cases = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "shape": shapes,
        "dtype": st.sampled_from(DTYPES),
        "view": st.sampled_from(("contiguous", "padded", "sliced")),
        "spread": st.sampled_from((1e-30, 0.1, 1.0, 4.0, 30.0)),
        "seed": st.integers(0, 2**32 - 1),
    }
)


@given(cases, st.booleans())
def test_activations_are_within_their_bounds(case: dict[str, Any], in_place: bool):
    kind, view = case["kind"], case["view"]
    x, dout = (
        lay_out(numbers(case["shape"], case["dtype"], spread, case["seed"] + n), view)
        for n, spread in enumerate((case["spread"], 1.0))
    )
    exact, size = reference.activation(x, kind), {"kind": kind, "dtype": x.dtype}
    exact_dx = reference.activation_backward(dout, x, kind)
    dx_bound = activation_bounds.cpu_activation_backward_bound(dout, x, **size)
    bound = activation_bounds.cpu_activation_bound(x, **size)
    with unchanged(x, dout):
        dx = BACKWARD[kind](dout, x)
    out = FORWARD[kind](x, out=x if in_place else lay_out(np.zeros_like(x), view))
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert ratio(out, exact, bound) <= 1
    assert ratio(dx, exact_dx, dx_bound) <= 1


@given(cases, st.booleans())
def test_gated_activations_are_within_their_bounds(case: dict[str, Any], packed: bool):
    kind, dtype = case["kind"], dtype_of(case["dtype"])
    *lead, items = case["shape"]
    both = lay_out(
        numbers((*lead, 2 * items), case["dtype"], case["spread"], case["seed"]), case["view"]
    )
    gate, up = both[..., :items], both[..., items:]
    dout = numbers(case["shape"], case["dtype"], 1.0, case["seed"] + 1)
    arrays = (both,) if packed else (gate, up)
    with unchanged(both, dout):
        out = GATED[kind](*arrays)
        dgate, dup = GATED_BACKWARD[kind](dout, *arrays)
    if packed:
        dgate, dup = dgate[..., :items], dgate[..., items:]
    bound = activation_bounds.cpu_gated_bound(gate, up, kind, dtype=dtype)
    assert ratio(out, reference.gated(gate, up, kind), bound) <= 1
    exact = reference.gated_backward(dout, gate, up, kind)
    bounds = activation_bounds.cpu_gated_backward_bound(dout, gate, up, kind, dtype=dtype)
    for found, right, off in zip((dgate, dup), exact, bounds, strict=True):
        assert ratio(found, right, off) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_special_values(kind):
    x = np.array(SPECIAL, np.float32)
    out = FORWARD[kind](x)
    exact = reference.activation(x, kind)
    assert ratio(out, exact, activation_bounds.cpu_activation_bound(x, kind, dtype="float32")) <= 1
    assert_array_equal(np.signbit(out[3:5]), [False, True])
    for dout, item in itertools.product(SPECIAL, repeat=2):
        pair = np.float32([dout]), np.float32([item])
        found, right = BACKWARD[kind](*pair), reference.activation_backward(*pair, kind)
        bound = activation_bounds.cpu_activation_backward_bound(*pair, kind, dtype="float32")
        assert ratio(found, right, bound) <= 1, (dout, item)
        found, right = GATED[kind](*pair), reference.gated(*pair, kind)
        bound = activation_bounds.cpu_gated_bound(*pair, kind, dtype="float32")
        assert ratio(found, right, bound) <= 1, (dout, item)


@pytest.mark.parametrize(("kind", "most"), [("gelu", 1), ("silu", 4)])
def test_units_in_the_last_place(kind, most):
    """Every 9973rd float32 from 2**-20 to 12.6, of both signs."""
    first, last = (np.float32(end).view(np.int32) for end in (2.0**-20, 12.6))
    x = np.arange(first, last, 9973, np.int32).view(np.float32)
    x = np.concatenate([x, -x])
    exact = reference.activation(x, kind)
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(FORWARD[kind](x) - exact) / unit).max() <= most


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_16_bits_is_rounded_once(kind, dtype):
    x = np.arange(2**16, dtype=np.uint16).view(dtype_of(dtype))
    with np.errstate(invalid="ignore"):  # signalling NaN
        exact = reference.activation(x, kind)
        found, right = FORWARD[kind](x), round_into(None, exact, x.dtype)
        assert_array_equal(found.astype(np.float32), right.astype(np.float32))


linear_cases = st.builds(
    LinearProblem,
    M=st.sampled_from([(0,), (1,), (2, 3), (17,), (3, 40)]),
    K=st.sampled_from((0, 1, 7, 64, 200)),
    N=st.sampled_from((1, 3, 33, 160)),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    transposed=st.booleans(),
    view=st.sampled_from(("contiguous", "padded", "sliced")),
    biased=st.booleans(),
    residual=st.booleans(),
    given=st.booleans(),
    spread=st.sampled_from((0.1, 1.0, 5.0)),
    seed=st.integers(0, 2**32 - 1),
)
quantised_cases = st.builds(
    LinearProblem,
    M=st.sampled_from([(1,), (2, 3), (20,)]),
    K=st.sampled_from((128, 256)),
    N=st.sampled_from((128, 384)),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from((None, "gelu", "swiglu")),
    transposed=st.booleans(),
    biased=st.booleans(),
    given=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    weights=st.sampled_from(("nf4", "int4", "int8")),
    block_size=st.just(64),
)


@given(st.one_of(linear_cases, quantised_cases), st.sampled_from((0, 2**30)))
def test_linear_is_within_its_bound(case: LinearProblem, kept_bytes: int):
    x, w, b = case.arrays()
    residual = case.normal("residual", *case.M, case.N) if case.residual else None
    options = {"activation": case.activation}
    kept = case.activation is not None
    with kept_weights(KeptWeights(kept_bytes)):
        out, z = cupyattn.linear(x, w, b, residual=residual, return_preactivation=True, **options)
    bound, z_bound = cpu_linear_bound(x, w, b, residual, **options, dtype=case.dtype)
    wide = [a if a is None or (case.weights and a is w) else a.astype(np.float64)
            for a in (x, w, b, residual)]  # fmt: skip
    exact, exact_z = reference.linear(*wide, **options)
    assert (out.shape, out.dtype) == (exact.shape, x.dtype)
    assert ratio(out, exact, bound) <= 1
    assert (z is not None) == kept
    if kept:
        assert ratio(z, exact_z, z_bound) <= 1

    dout = case.normal("dout", *case.M, case.N)
    options["preactivation"] = z if case.given else None
    grads = cupyattn.linear_backward(dout, x, w, b, **options)
    bounds = cpu_linear_backward_bound(dout, x, w, b, **options, dtype=case.dtype)
    if options["preactivation"] is not None:
        options["preactivation"] = z.astype(np.float64)
    right = reference.linear_backward(dout.astype(np.float64), *wide[:3], **options)
    for found, gradient, off in zip(grads, right, bounds, strict=True):
        assert (found is None) == (gradient is None)
        if found is not None:
            assert ratio(found, gradient, off) <= 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_of_values_that_are_not_finite(activation):
    x, w = np.ones((4, 3), np.float32), np.ones((3, 4), np.float32)
    x[1, 0], x[2, 0], x[3, 0] = np.nan, np.inf, -np.inf
    wide = x.astype(np.float64), w.astype(np.float64)
    exact, _ = reference.linear(*wide, activation=activation)
    found = cupyattn.linear(x, w, activation=activation)
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_kept_weights_end_at_their_limit_and_are_forgotten():
    x, w = numbers((1, 8), "float16", 1.0, 0), numbers((2, 6, 8), "float16", 1.0, 1)
    copies = KeptWeights(4 * w[0].size)
    with kept_weights(copies):
        first, second = (cupyattn.linear(x, each.T) for each in w)
        w[...] = 0
        assert_array_equal(cupyattn.linear(x, w[0].T), first)  # the copy
        assert not cupyattn.linear(x, w[1].T).any()
    assert second.any()
    assert copies.nbytes == copies.limit
    copies.forget()
    with kept_weights(copies):
        assert not cupyattn.linear(x, w[0].T).any()


def test_arrays_in_huge_pages_are_aligned_and_do_not_overlap():
    memory = HugePages()
    shapes = [(3, 5), (0,), (300, 301), (257, 1025), (2**13, 2**11), (300, 301)]
    arrays = [
        memory.empty(shape, dtype) for shape in shapes for dtype in ("f4", dtype_of("bfloat16"))
    ]
    for number, array in enumerate(arrays):
        assert array.flags.c_contiguous
        assert array.ctypes.data % (64 if array.nbytes >= 2**18 else 4) == 0
        array[...] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()


def test_generators_keep_copies_of_weights_while_they_generate():
    tiny = cupyattn.models.PRESETS["llama-3.2-1b"]._replace(
        num_layers=1, vocab_size=99, hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=64,
        intermediate_size=64, max_positions=64,
    )  # fmt: skip
    model = cupyattn.models.random(tiny, dtype="float16", xp=np)
    generator = cupyattn.models.Generator(model, num_blocks=4)
    generator.submit([1, 2, 3], max_new_tokens=3)
    generator.step()
    assert generator._copies.nbytes == 2 * (model.nbytes - 3 * 2 * 64)  # all but the norms
    while not generator.idle:
        generator.step()
    assert generator._copies.nbytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_long_attention_skips_tiles_and_keeps_its_bound(causal, dtype):
    q = numbers((1, 300, 4, 24), dtype, 1.0, 0)
    k, v = (numbers((1, 700, 2, 24), dtype, 1.0, seed) for seed in (1, 2))
    for options in ({}, {"window_size": (90, 20)}, {"q_offset": -50}):
        given = {"causal": causal, **options}
        out, lse = cupyattn.attention(q, k, v, **given, return_lse=True)
        exact, bounds = (
            reference.attention(q, k, v, **given),
            cpu_attention_bound(q, k, v, **given, dtype=dtype),
        )
        for found, right, bound in zip((out, lse), exact, bounds, strict=True):
            assert ratio(found, right, bound) <= 1


OPTIONS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": np.array([0.5, 1.5, -np.inf, 3.0], np.float32)},
    "softcap": {"softcap": 2.0, "softmax_scale": -0.7},
    "bias": {"bias": numbers((4, 1, 23), "float32", 2.0, 5)},
    "alibi_slopes": {"alibi_slopes": np.array([[0.1, 0.5, -0.2, 1]], np.float32).repeat(2, 0)},
    "mask": {"mask": numbers((2, 1, 9, 23), "float32", 1.0, 6) > 0, "causal": True},
    "no keys": {"q_offset": np.array([-30, -4]), "causal": True},
    "seqused_k": {"seqused_k": np.array([0, 7]), "window_size": (5, 3)},
    "rotary": {"rotary": cupyattn.rope_tables(40, 6), "q_offset": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_of_attention_is_within_its_bound_without_the_reference(name, monkeypatch):
    q = numbers((2, 9, 4, 8), "float32", 1.0, 0)
    k, v = (numbers((2, 23, 2, width), "float32", 1.0, width) for width in (8, 5))
    given = OPTIONS[name]
    with unchanged(q, k, v, *given.values()), monkeypatch.context() as patch:
        patch.setattr(attention_cpu.reference, "attention", None)
        found = cupyattn.attention(q, k, v, **given, return_lse=True)
    exact = reference.attention(q, k, v, **given)
    bounds = cpu_attention_bound(q, k, v, **given, dtype="float32")
    for result, right, bound in zip(found, exact, bounds, strict=True):
        assert error_ratio(result, right, bound) <= 1


def test_attention_of_values_that_are_not_finite_is_the_references():
    q, k, v = (numbers((1, 5, 2, 8), "float32", 1.0, seed) for seed in range(3))
    q[0, 1, 0, 0], k[0, 2, 1, 0], v[0, 3, 0, 1] = np.nan, np.inf, -np.inf
    out = cupyattn.attention(q, k, v, causal=True)
    exact, _ = reference.attention(q, k, v, causal=True)
    assert_array_equal(out, exact.astype(np.float32))


@pytest.mark.parametrize(
    ("largest", "options"),
    [
        (1e20, {}),
        (1e20, {"softmax_scale": 1e-30}),
        (1e18, {"softmax_scale": 1e3}),
        (1e19, {"bias": np.full((5, 5), -3e38, np.float32)}),
    ],
)
def test_attention_whose_scores_overflow_is_the_references(largest, options):
    q, k, v = (abs(numbers((1, 5, 2, 8), "float32", 1.0, seed)) for seed in range(3))
    q, k = q * np.float32(largest), k * np.float32(-largest)
    out, lse = cupyattn.attention(q, k, v, **options, return_lse=True)
    exact, exact_lse = reference.attention(q, k, v, **options)
    assert_array_equal(out, exact.astype(np.float32))
    with np.errstate(over="ignore"):
        assert_array_equal(lse, exact_lse.astype(np.float32))
    assert (out != 0).all()

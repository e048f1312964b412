"""Gradients of scores beyond float16's range, and of scores that a float32 lse has no digits for.

A power of two for each key-value head keeps gradients within the range.

The arrays here give scores gradients of some 100,000, and results that float16 has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.backward_runs import GRADIENTS, Arrays, error_ratios, inputs, run
from support.devices import KERNELS
from support.search import deep, mostly_deep
from support.varlen import VarlenProblem

import cupyattn
from cupyattn import ScoreMod, reference
from cupyattn.ops.attention.bounds import range_log2
from cupyattn.ops.attention.reference.scores import ScoreBlocks
from cupyattn.runtime import plan
from cupyattn.runtime.arrays import array_within
from cupyattn.runtime.device.cuda import CudaDevice
from cupyattn.testing import AttentionCase

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

LARGEST = 65_504  # of float16


@dataclass(frozen=True)
class Beyond(AttentionCase):
    """Small q and k, large v and dout; v has larger ones where keys are not in use."""

    def arrays(self) -> Arrays:
        q, k, v = super().arrays()
        v = np.where(np.isnan(v), np.float16(6_000), v * np.float16(200))
        return q * np.float16(0.01), k * np.float16(0.05), v

    def gradients(self) -> tuple[np.ndarray, np.ndarray]:
        dout, dlse = super().gradients()
        return dout * np.float16(2048), dlse


@dataclass(frozen=True)
class Uneven(Beyond):
    """The first sequence's are within float16's range, and those of first heads are smaller."""

    def arrays(self) -> Arrays:
        q, k, v = super().arrays()
        v[0] /= np.float16(256)
        v[:, :, 0] /= np.float16(8)
        return q, k, v


@contextmanager
def recorded_scales() -> Iterator[list[np.ndarray]]:
    """Collect the scales of each head, 2^-k and 2^k, that launches inside write."""
    written: list[np.ndarray] = []
    original = plan.start
    at: dict[int, Any] = {}

    def argument_within(_: CudaDevice, *place: Any) -> int:
        array = array_within(*place)
        at[array.data.ptr] = array
        return int(array.data.ptr)

    def start(device: Any, specialisation: Any, ctas: int, given: Any, values: Any) -> None:
        original(device, specialisation, ctas, given, values)
        if specialisation.spec.entry.startswith("attention_backward_scales"):
            names = [pointer.name for pointer in specialisation.spec.pointers]
            scales = given[names.index("scales")]
            written.append(
                np.array(scales if isinstance(scales, np.ndarray) else KERNELS.get(at[scales]))
            )

    with (
        mock.patch.object(plan, "start", start),
        mock.patch.object(CudaDevice, "argument_within", argument_within),  # gives an address alone
    ):
        yield written


PROBLEM = Beyond(B=2, Sq=40, Sk=70, H=4, G=2, D=64, Dv=64, dtype="float16")
EVERY_SCORE, EVERY_HEAD = (("bias", (shape, "float32")) for shape in ((2, 4, 40, 70), (4, 1, 70)))
OPTIONS = {
    "plain": (),
    "causal, keys in use": (("causal", True), ("seqused_k", (70, 33))),
    "dropout": (("dropout_p", 0.5),),
    "softcap, slopes": (("softcap", 2.0), ("alibi_slopes", ((4,), "float32", 1))),
    "sinks, mask": (("sinks", "float32"), ("mask", (4, 40, 70))),
    "dbias": (EVERY_SCORE,),
    "dbias of every head": (EVERY_HEAD,),
    "all": (
        *(("mask", (4, 40, 70)), EVERY_SCORE, ("softcap", 2.0)),
        *(("alibi_slopes", ((4,), "float16", 1)), ("sinks", "float32"), ("dropout_p", 0.5)),
    ),
}
SHAPES = {"": {}, "D 256": {"D": 256, "Dv": 256}, "scalar loads": {"D": 20, "Dv": 30}}


def problem_of(options: str, shape: str = "", **more: Any) -> Beyond:
    return replace(PROBLEM, options=OPTIONS[options], **SHAPES[shape], **more)


def largest_of_scores(arrays: Arrays, options: dict[str, Any]) -> float:
    """The largest gradient of a score."""
    shape = *arrays[5].shape, arrays[2].shape[1]
    bias = np.broadcast_to(options.get("bias", np.zeros((), np.float32)), shape)
    return np.abs(reference.attention_backward(*arrays, **{**options, "bias": bias}).dbias).max()


CASES = [
    *(("plain", ""), ("dbias", ""), ("dropout", ""), ("sinks, mask", ""), ("plain", "D 256")),
    *(("causal, keys in use", ""), ("softcap, slopes", ""), ("dbias of every head", "")),
    *(("plain", "scalar loads"), ("dbias", "D 256"), ("dropout", "D 256"), ("all", "")),
]


@pytest.mark.parametrize(
    ("options", "shape", "deterministic"),
    mostly_deep(
        [(*case, deterministic) for case in CASES for deterministic in (False, True)],
        [  # both backwards of the plain call; options in that whose two kernels compute scores
            *(("plain", "", False), ("plain", "", True), ("plain", "D 256", False)),
            ("all", "", True),
        ],
    ),
)
def test_gradients_are_within_their_bounds(options: str, shape: str, deterministic: bool):
    arrays, given = inputs(problem_of(options, shape))
    assert largest_of_scores(arrays, given) > LARGEST
    grads = run(arrays, given, "flash", deterministic=deterministic)
    ratios = error_ratios(grads, arrays, given)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("deterministic", [False, True])
def test_large_gradients_are_added_to_what_is_there(deterministic: bool):
    arrays, given = inputs(problem_of("plain"))
    once = run(arrays, given, "flash", deterministic=deterministic)
    grads = cupyattn.AttentionGrads(*(KERNELS.put(once[n].copy()) for n in ("dq", "dk", "dv")))
    twice = run(arrays, given, "flash", deterministic=True, grads=grads, accumulate=True)
    for name, gradient in twice.items():
        double = 2 * once[name].astype(np.float32)
        np.testing.assert_allclose(gradient, double, rtol=4e-3, atol=1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, *deep(160, 384)])
def test_packed_sequences(head_dim: int, deterministic: bool):
    """Each has its own power of two, and some have no queries or no keys."""
    problem = VarlenProblem(
        Uneven(*(5, 140, 150, 4, 2, head_dim, head_dim, "float16"), options=(("causal", True),)),
        queries=(5, 140, 0, 33, 70),
        keys=(20, 150, 7, 0, 65),
        spare=3,
    )
    ratios = problem.backward_ratios(problem.run_backward(deterministic=deterministic))
    assert max(ratios.values()) <= 1, ratios


def test_packed_sequences_have_the_powers_of_two_of_their_keys_in_use():
    """However large V is after them."""
    problem = VarlenProblem(
        Beyond(*(3, 20, 33, 4, 2, 64, 64, "float16"), options=(("seqused_k", (9, 33, 5)),)),
        queries=(20, 5, 0),
        keys=(33, 20, 7),
    )
    (dout, q, k, v, out, lse), _, options = problem.backward_inputs()
    expected = [
        range_log2(
            ScoreBlocks(q[None, rows], k[None, keys], v[None, keys], **own),
            *(dout[None, rows], out[None, rows], lse[None, :, rows]),
            options["dlse"][None, :, rows],
        )
        for rows, keys, own in problem.sequences()
        if rows.start < rows.stop
    ]
    with recorded_scales() as written:
        problem.run_backward(deterministic=True)
    scales = written[0].reshape(3, 2, 2, 2)
    for powers, log2 in zip(scales, expected, strict=False):  # the last has no queries
        np.testing.assert_array_equal(powers[..., 1], 2.0 ** log2[0, :, None] * np.ones(2))


@pytest.mark.parametrize("deterministic", [*deep(False), True])
def test_an_expression_is_given_the_gradient_itself(deterministic: bool):
    """One that cuts it off where float16 has long ended."""
    limit = 50_000.0
    (dout, q, k, v, out, lse), _ = inputs(problem_of("plain"))

    def gradient(score: Any, grad: np.ndarray, *_: Any) -> np.ndarray:
        return np.clip(grad, -limit, limit)

    modified = ScoreMod(
        "score",
        gradient=f"fmaxf(fminf(grad, {limit}f), {-limit}f)",
        python=(lambda s, *_: s, gradient),
    )
    exact = reference.attention_backward(
        dout, q, k, v, out, lse, score_mod=lambda s, *_: s, score_mod_gradient=gradient
    )
    arrays = map(KERNELS.put, (dout, q, k, v, out, lse))
    found = cupyattn.attention_backward(*arrays, score_mod=modified, deterministic=deterministic)
    for name in ("dq", "dk", "dv"):
        expected = getattr(exact, name)
        tolerance = 2e-3 * np.abs(expected).max()
        np.testing.assert_allclose(KERNELS.get(getattr(found, name)), expected, atol=tolerance)


def only(arrays: Arrays, batch: int, kv_head: int) -> Arrays:
    """The arrays where only one key-value head's are large."""
    group = PROBLEM.H // PROBLEM.G
    heads = slice(kv_head * group, (kv_head + 1) * group)
    dout, q, k, v, out, lse = (x.copy() for x in arrays)
    for array, factor, own in ((dout, 2048, heads), (v, 200, kv_head), (out, 200, heads)):
        large = array[batch, :, own].copy()
        array /= np.float16(factor)
        array[batch, :, own] = large
    return dout, q, k, v, out, lse


OTHERS = [(b, h) for b in range(2) for h in range(4) if (b, h) not in ((1, 2), (1, 3))]
OTHER_KEYS = [(0, 0), (0, 1), (1, 0)]


def same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Whether the gradients of all but batch element 1's second key-value head are the same."""
    for name, heads in (("dq", OTHERS), ("dk", OTHER_KEYS), ("dv", OTHER_KEYS)):
        for b, h in heads:
            assert np.isfinite(expected[name][b, :, h]).all()
            np.testing.assert_array_equal(found[name][b, :, h], expected[name][b, :, h])


def poisoned(arrays: Arrays, value: float) -> list[Arrays]:
    """Those with something else in a row of dout, or of v, or in a sum of logits."""
    results = []
    for at, place in ((0, (1, 7, 2, 3)), (3, (1, 9, 1, 5)), (5, (1, 2, 4))):
        results.append(tuple(x.copy() for x in arrays))
        results[-1][at][place] = value
    return results


@pytest.mark.parametrize("deterministic", [True, *deep(False)])
@pytest.mark.parametrize("value", [np.inf, *deep(np.nan)])
def test_other_heads_keep_their_bits(value: float, deterministic: bool):
    """Whatever one head's are: as large as this, or not finite."""
    arrays, _ = inputs(problem_of("plain"))
    large = only(arrays, 1, 1)
    small = [x.copy() for x in large]
    small[0][1, :, 2:] /= np.float16(2048)
    if deterministic:
        options: dict[str, Any] = {"deterministic": True}
    else:  # a tile of queries, and one of keys: a sum of one term is the same in any order
        options = {}
    expected = run(tuple(small), {}, "flash", **options)
    for others in (large, *poisoned(large, value)):
        same_bits(run(others, {}, "flash", **options), expected)


def test_a_row_that_is_not_finite_leaves_the_others_of_its_head_right():
    """Their digits stay, which a power of two for an infinity would take from them."""
    arrays, _ = inputs(problem_of("plain"))
    arrays[0][...] /= np.float16(2048)
    expected = run(arrays, {}, "flash", deterministic=True)["dq"]
    for value in (np.inf, np.nan):
        with_row = tuple(x.copy() for x in arrays)
        with_row[0][1, 7, 2, 3] = value  # one: infinities of both signs make a NaN of delta
        dq = run(with_row, {}, "flash", deterministic=True)["dq"]
        assert not np.isfinite(dq[1, 7, 2]).any()
        rows = np.arange(40) != 7
        np.testing.assert_array_equal(dq[1, rows, 2], expected[1, rows, 2])


def scales_of(arrays: Arrays, options: dict[str, Any]) -> np.ndarray:
    """Run a backward; returns 2^-k and 2^k as (B, G, group, 2)."""
    with recorded_scales() as written:
        run(arrays, options, "flash", deterministic=True)
    (scales,) = written
    batch, heads, kv_heads = *arrays[5].shape[:2], arrays[2].shape[2]
    return scales.reshape(batch, kv_heads, heads // kv_heads, 2)


def test_queries_that_see_no_key_have_no_part_in_it():
    """However large padded rows of dout and V are: the other rows would lose digits."""
    q, k, v, dout = np.random.default_rng(3).standard_normal((4, 1, 64, 1, 64)).astype(np.float16)
    mask = np.ones((64, 64), bool)
    mask[60:] = mask[:, 60:] = False
    exact = reference.attention(q, k, v, mask=mask)
    arrays = dout, q, k, v, exact[0].astype(np.float16), exact[1].astype(np.float32)
    v[:, 60:], dout[:, 60:] = 10, 60_000
    assert (range_log2(ScoreBlocks(q, k, v, mask=mask), dout, *arrays[4:], None) == 0).all()
    assert (scales_of(arrays, {"mask": mask}) == 1).all()


@pytest.mark.parametrize("options", ["plain", "causal, keys in use", *deep("dropout")])
def test_the_power_of_two_is_no_larger_than_the_bound_asks_for(options: str):
    arrays, given = inputs(problem_of(options))
    dout, q, k, v, out, lse = arrays
    dlse, scores = given.pop("dlse"), given
    found = []
    for log2, of_v in ((-24, 1), (-16, 1), (-9, 1), (-7, 1), (-4, 1), (0, 1), (2, 8)):
        rows = (dout * np.float16(2.0**log2), q, k, v * np.float16(of_v), out, lse)
        more = dlse * np.float32(1e5 if log2 == -9 else 1)  # delta alone may be large
        expected = range_log2(
            ScoreBlocks(*rows[1:4], **scores), dout=rows[0], out=out, lse=lse, dlse=more
        )
        scales = scales_of(rows, {**scores, "dlse": more})
        np.testing.assert_array_equal(scales[..., 0], 2.0 ** -expected[..., None] * np.ones(2))
        np.testing.assert_array_equal(scales[..., 1], 2.0 ** expected[..., None] * np.ones(2))
        found.append(expected)
    assert np.min(found) == 0
    assert np.max(found) == 15
    assert len(np.unique(found)) > 4


def test_each_key_value_head_has_a_power_of_two_of_its_own():
    arrays, given = inputs(Uneven(2, 40, 70, 4, 2, 64, 64, "float16"))
    dout, q, k, v, out, lse = arrays
    expected = range_log2(ScoreBlocks(q, k, v), dout, out, lse, given["dlse"])
    assert len(np.unique(expected)) == expected.size == 4
    scales = scales_of(arrays, given)
    np.testing.assert_array_equal(scales[..., 1], 2.0 ** expected[..., None] * np.ones(2))
    for deterministic in (False, True):
        grads = run(arrays, given, "flash", deterministic=deterministic)
        ratios = error_ratios(grads, arrays, given)
        assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("largest", [0, 1])
def test_any_head_of_a_group_may_have_the_largest(largest: int):
    (dout, *others), _ = inputs(problem_of("plain"))
    dout[:, :, 1 - largest :: 2] /= np.float16(256)
    q, k, v, out, lse = others
    expected = range_log2(ScoreBlocks(q, k, v), dout, out, lse, None)
    assert (expected > 0).all()
    scales = scales_of((dout, *others), {})
    np.testing.assert_array_equal(scales[..., 1], 2.0 ** expected[..., None] * np.ones(2))


def test_a_plan_of_rows_that_hold_nothing_has_a_scale_of_one():
    zeros = [np.zeros((1, n, h, 64), np.float16) for n, h in ((3, 2), (3, 2), (5, 1), (5, 1))]
    arrays = (*zeros, np.zeros((1, 3, 2, 64), np.float16), np.zeros((1, 2, 3), np.float32))
    assert (scales_of(arrays, {}) == 1).all()


BOTH_MODES = pytest.mark.parametrize("deterministic", [False, True])


def normal_arrays(std: float, head_dim: int, dtype: str, tokens: int = 64) -> list[np.ndarray]:
    """Arrays dout, q, k, v (1, tokens, 2, head_dim), with q and k of a standard deviation."""
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((4, 1, tokens, 2, head_dim))
    return list((arrays * np.array([1, std, std, 1])[:, None, None, None, None]).astype(dtype))


def check_against_exact(arrays: list[np.ndarray], deterministic: bool, dtype: str) -> None:
    """Compare with the gradients of the exact float64 lse: the bound contains its rounding."""
    out, lse = reference.attention(*arrays[1:])
    out = out.astype(dtype)
    grads = run((*arrays, out, lse.astype(np.float32)), {}, "flash", deterministic=deterministic)
    exact = reference.attention_backward(*arrays, out, lse)
    native = KERNELS.device.traits.native
    bounds = reference.attention_backward_bound(*arrays, out, lse, dtype=dtype, native=native)
    for name in ("dq", "dk", "dv"):
        assert np.isfinite(getattr(bounds, name)).all(), name
        assert np.isfinite(grads[name]).all(), name
        ratio = reference.error_ratio(grads[name], getattr(exact, name), getattr(bounds, name))
        assert ratio <= 1, (name, ratio)


@BOTH_MODES
@pytest.mark.parametrize("head_dim", mostly_deep([8, 40, 64, 128, 136, 256], [64, 256]))
@pytest.mark.parametrize("value", [1000, 1500, 3000, *deep(1250, 1750)])
def test_probability_of_a_single_key_is_at_most_one(value, head_dim, deterministic):
    """With one key P is 1, and dv is dout: 1."""
    x = np.full((1, 1, 1, head_dim), value, np.float16)
    ones = np.ones_like(x)
    placed = tuple(map(KERNELS.put, (x, x, ones)))
    out, lse = map(KERNELS.get, cupyattn.attention(*placed, return_lse=True))
    grads = run((ones, x, x, ones, out, lse), {}, "flash", deterministic=deterministic)
    assert (grads["dv"] >= 0).all()
    assert (grads["dv"] <= 1).all()
    assert all(np.isfinite(gradient).all() for gradient in grads.values())
    check_against_exact([ones, x, x, ones], deterministic, "float16")


@BOTH_MODES
@pytest.mark.parametrize("dtype", mostly_deep(["float16", "float32", "bfloat16"], ["float16"]))
@pytest.mark.parametrize("head_dim", mostly_deep([8, 64, 136, 256], [64, 256]))
@pytest.mark.parametrize("std", [75.0, 1500.0])
def test_large_random_scores_are_within_the_bound(std, head_dim, dtype, deterministic):
    check_against_exact(normal_arrays(std, head_dim, dtype), deterministic, dtype)


@pytest.mark.parametrize(
    "options", [{"causal": True}, *deep({"softcap": 1e4}, {"dropout_p": 0.5, "seed": 3})]
)
def test_large_scores_with_options_give_finite_gradients(options):
    dout, q, k, v = normal_arrays(1500.0, 64, "float16")
    out, lse = reference.attention(q, k, v, **options)
    arrays = dout, q, k, v, out.astype(np.float16), lse.astype(np.float32)
    grads = run(arrays, options, "flash")
    assert all(np.isfinite(gradient).all() for gradient in grads.values())
    kept = 2 if "dropout_p" in options else 1
    assert (np.abs(grads["dv"]) <= kept * 1.01 * np.abs(dout.astype(float)).sum(1)).all()


@BOTH_MODES
def test_packed_sequences_with_large_scores_have_the_gradients_of_dense_ones(deterministic):
    dout, q, k, v = normal_arrays(1500.0, 64, "float16", tokens=100)
    bounds, lengths = np.array([0, 36, 100], np.int32), (slice(0, 36), slice(36, 100))
    parts = [reference.attention(q[:, at], k[:, at], v[:, at]) for at in lengths]
    out = np.concatenate([part for part, _ in parts], 1)[0].astype(np.float16)
    lse = np.concatenate([part for _, part in parts], 2)[0].astype(np.float32)
    rows = [KERNELS.put(x[0]) for x in (dout, q, k, v)]
    placed = [KERNELS.put(x) for x in (out, lse, bounds, bounds)]
    grads = cupyattn.attention_varlen_backward(*rows, *placed, 64, 64, deterministic=deterministic)
    found = {name: KERNELS.get(getattr(grads, name)) for name in GRADIENTS[:3]}
    for at in lengths:
        arrays = dout[:, at], q[:, at], k[:, at], v[:, at], out[None, at], lse[None, :, at]
        exact = reference.attention_backward(*arrays)
        limits = reference.attention_backward_bound(*arrays, dtype="float16")
        for name, gradient in found.items():
            part = gradient[None, at], getattr(exact, name), getattr(limits, name)
            assert reference.error_ratio(*part) <= 1, name

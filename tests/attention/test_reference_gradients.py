"""The reference's backward against finite differences of its forward, and its properties."""

import tracemalloc
import warnings
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from support.search import Search, examples
from support.strategies import OPTIONS, attention_problems

from cupyattn.ops.attention.reference import scores
from cupyattn.reference import attention, attention_backward
from cupyattn.testing import AttentionCase

SHARDABLE = ("causal", "softmax_scale", "window_size", "q_offset", "seqused_k", "alibi_slopes")
SHARDABLE += ("softcap", "sinks")


def assert_grads_close(actual, expected, **tolerances):
    for name, x, y in zip(actual._fields, actual, expected, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            np.testing.assert_allclose(x, y, err_msg=name, **tolerances)


def gradients(problem):
    """Float64 inputs of a problem, what its loss weights, and the gradients of that loss."""
    q, k, v = (x.astype(np.float64) for x in problem.arrays())
    options = problem.keywords()
    for name in {"bias", "sinks"} & options.keys():
        options[name] = options[name].astype(np.float64)
    out, lse = attention(q, k, v, **options)
    dout, dlse = (x.astype(np.float64) for x in problem.gradients())
    dlse[~np.isfinite(lse)] = 0
    grads = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    return {"q": q, "k": k, "v": v} | options, (dout, dlse), grads


def loss(inputs, weights):
    options = {name: value for name, value in inputs.items() if name not in ("q", "k", "v")}
    out, lse = attention(inputs["q"], inputs["k"], inputs["v"], **options)
    dout, dlse = weights
    return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()


def check_against_differences(problem):
    """Each gradient's product with a random direction is the loss's slope in that direction."""
    inputs, weights, grads = gradients(problem)
    rng = np.random.default_rng(problem.seed)
    names = {
        "q": grads.dq,
        "k": grads.dk,
        "v": grads.dv,
        "bias": grads.dbias,
        "sinks": grads.dsinks,
    }
    for name, grad in names.items():
        assert (grad is None) == (inputs.get(name) is None)
        if grad is None:
            continue
        assert grad.shape == inputs[name].shape
        assert np.isfinite(grad).all()
        direction, h = rng.standard_normal(grad.shape), 1e-4
        ahead, behind = (
            loss(inputs | {name: inputs[name] + step * direction}, weights) for step in (h, -h)
        )
        np.testing.assert_allclose(
            (grad * direction).sum(),
            (ahead - behind) / (2 * h),
            rtol=2e-6,
            atol=2e-6 * (1 + np.abs(grad * direction).sum()),
            err_msg=name,
        )


SMALL = {"head_dims": ((2, 3), (6, 6)), "dtypes": ("float64",), "largest": 9, "spreads": (1.0,)}


@examples(50, deep=200)
@given(attention_problems(**SMALL))
def test_random_options_match_finite_differences(problem):
    check_against_differences(problem)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_matches_finite_differences(name):
    problems = attention_problems(options=[name], **SMALL).filter(lambda p: p.options)

    @settings(max_examples=20 if Search.deep else 6, database=None)
    @given(problems)
    def check(problem):
        check_against_differences(problem)

    check()


def test_every_element_matches_finite_differences():
    drawn = (
        ("causal", True),
        ("bias", ((2, 1, 4), "float64")),
        ("softcap", 2.0),
        ("sinks", "float32"),
        ("dropout_p", 0.4),
        ("rotary", (4, 1)),
    )
    problem = AttentionCase(1, 3, 4, 2, 1, 3, 2, dtype="float64", seed=1, options=drawn)
    inputs, weights, grads = gradients(problem)
    h = 1e-5
    for name, grad in zip(("q", "k", "v", "bias", "sinks"), grads, strict=True):
        for index in np.ndindex(grad.shape):
            step = np.zeros(grad.shape)
            step[index] = h
            ahead, behind = (
                loss(inputs | {name: inputs[name] + s}, weights) for s in (step, -step)
            )
            np.testing.assert_allclose(grad[index], (ahead - behind) / (2 * h), atol=1e-8)


@examples(10, deep=50)
@given(attention_problems(options=SHARDABLE, largest=40))
def test_parts_of_the_keys_give_parts_of_the_gradients(problem):
    """Keys split in two: results merge by lse; with the merged out and lse, gradients add up."""
    q, k, v = problem.arrays()
    dout, dlse = problem.gradients()
    options = {"q_offset": problem.Sk - problem.Sq} | problem.keywords()
    out, lse = attention(q, k, v, **options)
    whole = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)

    cut = problem.Sk // 3
    used = options.get("seqused_k", np.full(problem.B, problem.Sk))
    first = options | {"seqused_k": np.minimum(used, cut)}
    second = {
        **{name: value for name, value in options.items() if name != "sinks"},
        "q_offset": options["q_offset"] - cut,
        "seqused_k": np.maximum(used - cut, 0),
    }
    shards = ((k[:, :cut], v[:, :cut], first), (k[:, cut:], v[:, cut:], second))
    parts = [attention(q, *kv, **shard) for *kv, shard in shards]
    merged_lse = np.logaddexp(parts[0][1], parts[1][1])
    merged = sum(
        np.exp(part_lse - np.where(np.isinf(lse), 0, lse)).transpose(0, 2, 1)[..., None] * part_out
        for part_out, part_lse in parts
    )
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(merged, out, rtol=1e-11, atol=1e-12)

    a, b = (attention_backward(dout, q, *kv, out, lse, dlse=dlse, **shard) for *kv, shard in shards)
    close = {"rtol": 1e-11, "atol": 1e-11}
    np.testing.assert_allclose(a.dq + b.dq, whole.dq, **close)
    np.testing.assert_allclose(np.concatenate([a.dk, b.dk], axis=1), whole.dk, **close)
    np.testing.assert_allclose(np.concatenate([a.dv, b.dv], axis=1), whole.dv, **close)
    if whole.dsinks is not None:
        np.testing.assert_allclose(a.dsinks, whole.dsinks, **close)


def test_given_out_and_lse_are_used():
    problem = AttentionCase(1, 4, 5, 2, 1, 3, 3, dtype="float64")
    _, (dout, _), grads = gradients(problem)
    q, k, v = problem.arrays()
    out, lse = attention(q, k, v)
    other = attention_backward(dout, q, k, v, out, lse + np.log(2))
    np.testing.assert_allclose(2 * other.dv, attention_backward(dout, q, k, v, out, lse).dv)
    assert not np.allclose(attention_backward(dout, q, k, v, 2 * out, lse).dq, grads.dq)


@examples(10, deep=40)
@given(attention_problems(largest=40))
def test_block_size_does_not_matter(problem):
    inputs, (dout, dlse), whole = gradients(problem)
    q, k, v = (inputs.pop(name) for name in "qkv")
    out, lse = attention(q, k, v, **inputs)
    for size in (1, 5 * max(1, problem.Sk) + 1):
        with mock.patch.object(scores, "SCORES_PER_BLOCK", size):
            parts = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **inputs)
        assert_grads_close(parts, whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "q_offset": -3},
        {"bias": np.full((2, 1, 1), -np.inf)},
        {"seqused_k": np.zeros(1, np.int32)},
        {"mask": np.zeros((1, 1), bool), "sinks": np.zeros(2)},
        {"mask": np.zeros((1, 1), bool), "sinks": np.full(2, -np.inf)},
    ],
)
def test_rows_without_keys_have_no_gradient(options):
    q, k, v = np.ones((1, 3, 2, 4)), np.ones((1, 5, 1, 4)), np.ones((1, 5, 1, 2))
    if "seqused_k" in options:
        k, v = k * np.nan, v * np.nan
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = attention(q, k, v, **options)
        grads = attention_backward(out + 1, q, k, v, out, lse, **options)
    for grad in grads:
        assert grad is None or (grad == 0).all()


@pytest.mark.parametrize(("sq", "sk"), [(0, 5), (3, 0), (0, 0)])
def test_empty_sequences(sq, sk):
    q, k, v = np.ones((2, sq, 4, 3)), np.ones((2, sk, 2, 3)), np.ones((2, sk, 2, 5))
    bias = np.zeros((4, 1, sk))
    options = {"bias": bias, "causal": True, "dropout_p": 0.5, "seed": 1}
    out, lse = attention(q, k, v, **options)
    np.testing.assert_array_equal(out, np.zeros((2, sq, 4, 5)))
    np.testing.assert_array_equal(lse, np.full((2, 4, sq), -np.inf))
    grads = attention_backward(out, q, k, v, out, lse, **options)
    shapes = [None if grad is None else grad.shape for grad in grads]
    assert shapes == [q.shape, k.shape, v.shape, bias.shape, None]
    assert not any(grad.any() for grad in grads[:4])


def test_nan_reaches_the_keys_that_its_row_sees():
    q, k, v = np.ones((1, 4, 1, 2)), np.ones((1, 4, 1, 2)), np.ones((1, 4, 1, 2))
    bias = np.zeros((4, 4))
    bias[2, 1] = bias[0, 3] = np.nan  # causal hides the second
    out, lse = attention(q, k, v, bias=bias, causal=True)
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]).all(axis=-1), np.arange(4) == 2)
    np.testing.assert_array_equal(np.isnan(lse[0, 0]), np.arange(4) == 2)
    grads = attention_backward(np.ones(out.shape), q, k, v, out, lse, bias=bias, causal=True)
    np.testing.assert_array_equal(np.isnan(grads.dq[0, :, 0, 0]), [False, False, True, False])
    seen = [True, True, True, False]
    np.testing.assert_array_equal(np.isnan(grads.dk[0, :, 0, 0]), seen)
    np.testing.assert_array_equal(np.isnan(grads.dbias[2]), seen)
    assert np.isfinite(grads.dbias[[0, 1, 3]]).all()


def test_memory_does_not_grow_with_the_product_of_lengths():
    length, peaks = 4096, []
    dout, q, k, v = np.random.default_rng(0).standard_normal((4, 1, length, 1, 8), dtype=np.float32)
    options = {"alibi_slopes": [0.1], "softcap": 20.0}
    out, lse = attention(q, k, v, **options)
    for call in (
        lambda: attention(q, k, v, **options),
        lambda: attention_backward(dout, q, k, v, out, lse, **options),
    ):
        tracemalloc.start()
        call()
        peaks.append(tracemalloc.get_traced_memory()[1] / (8 * length**2))
        tracemalloc.stop()
    assert max(peaks) < 0.3

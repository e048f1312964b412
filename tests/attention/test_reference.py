"""The reference's forward against scalar loops written from the API's words, and edges.

The loops see views, groups of heads and hidden keys: no property repeats that.
"""

import math
import warnings
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from support.search import Search, examples
from support.strategies import OPTIONS, attention_problems

from cupyattn.ops.attention.reference import scores
from cupyattn.reference import attention

SMALL = {
    "head_dims": ((2, 3), (5, 5)),
    "dtypes": ("float64", "float32", "float16", "bfloat16"),
    "largest": 9,
    "spreads": (1.0,),
}


def philox_words(counter, key):
    """Philox4x32-10 in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def kept(seed, p, b, h, i, j):
    words = philox_words((4 * (j // 32) + (j % 8) // 2, i, h, b), (seed % 2**32, seed // 2**32))
    field = 2 * ((j % 32) // 8) + j % 2
    return words[field // 2] // 2 ** (16 * (field % 2)) % 2**16 >= round(65536 * p)


def element(x, *index):
    """x broadcast to the index's axes, at the index."""
    x = np.asarray(x)
    index = index[len(index) - x.ndim :]
    return x[tuple(0 if size == 1 else n for n, size in zip(index, x.shape, strict=True))]


def turned(x, tables, position):
    """A token's features x after rotary embedding."""
    x = [float(value) for value in x]
    if tables is None:
        return x
    cos, sin = tables
    half = cos.shape[1]
    for m in range(half):
        turn = complex(cos[position, m], sin[position, m])
        pair = complex(x[m], x[m + half]) * turn
        x[m], x[m + half] = pair.real, pair.imag
    return x


def one_row(q, k, v, b, h, i, options):
    """out[b, i, h] and lse[b, h, i] by scalar loops."""
    get = options.get
    sk, head_dim, group = k.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    offset, used = get("q_offset"), get("seqused_k")
    last = (sk if used is None else int(used[b])) - q.shape[1]
    position = i + (last if offset is None else int(element(offset, b)))
    scale = head_dim**-0.5 if get("softmax_scale") is None else get("softmax_scale")
    left, right = get("window_size") or (None, None)
    logits = {}
    for j in range(sk if get("seqused_k") is None else int(get("seqused_k")[b])):
        sees = not get("causal") or j <= position
        sees = sees and (left is None or position - left <= j)
        sees = sees and (right is None or j <= position + right)
        sees = sees and (get("mask") is None or element(get("mask"), b, h, i, j))
        sees = sees and (get("mask_mod") is None or get("mask_mod")(b, h, i, j))
        if not sees:
            continue
        # A query that sees no key may be at a position that the tables do not have.
        query = turned(q[b, i, h], get("rotary"), position)
        key = turned(k[b, j, h // group], get("rotary"), j)
        s = scale * sum(x * y for x, y in zip(query, key, strict=True))
        if get("softcap"):
            s = get("softcap") * math.tanh(s / get("softcap"))
        if get("bias") is not None:
            s += float(element(get("bias"), b, h, i, j))
        if get("alibi_slopes") is not None:
            s -= float(element(get("alibi_slopes"), b, h)) * abs(position - j)
        if s != -math.inf:
            logits[j] = s
    total = sum(math.exp(s) for s in logits.values())
    if get("sinks") is not None:
        total += math.exp(get("sinks")[h])
    out = [0.0] * v.shape[3]
    for j, s in logits.items():
        p = math.exp(s) / total
        if get("dropout_p"):
            p *= kept(get("seed"), get("dropout_p"), b, h, i, j) / (1 - get("dropout_p"))
        out = [o + p * float(x) for o, x in zip(out, v[b, j, h // group], strict=True)]
    return out, math.log(total) if total else -math.inf


def check_against_loops(problem):
    q, k, v = problem.arrays()
    options = problem.keywords()
    out, lse = attention(q, k, v, **options)
    assert out.shape == (problem.B, problem.Sq, problem.H, problem.Dv)
    assert lse.shape == (problem.B, problem.H, problem.Sq)
    assert out.dtype == lse.dtype == np.float64
    for b, h, i in np.ndindex(lse.shape):
        row, log_sum = one_row(q, k, v, b, h, i, options)
        np.testing.assert_allclose(out[b, i, h], row, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(lse[b, h, i], log_sum, rtol=1e-11, atol=1e-12)


@examples(50, deep=200)
@given(attention_problems(**SMALL))
def test_random_options_match_scalar_loops(problem):
    check_against_loops(problem)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_matches_scalar_loops(name):
    problems = attention_problems(options=[name], **SMALL).filter(lambda p: p.options)

    @settings(max_examples=20 if Search.deep else 6, database=None)
    @given(problems)
    def check(problem):
        assert [drawn for drawn, _ in problem.options] == [name] or name == "rotary"
        check_against_loops(problem)

    check()


@examples(10, deep=50)
@given(attention_problems(largest=40))
def test_block_size_does_not_matter(problem):
    q, k, v = problem.arrays()
    whole = attention(q, k, v, **problem.keywords())
    for size in (1, 3 * max(1, problem.Sk), 7 * max(1, problem.Sk) + 1):
        with mock.patch.object(scores, "SCORES_PER_BLOCK", size):
            parts = attention(q, k, v, **problem.keywords())
        for actual, expected in zip(parts, whole, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-13)


def test_unused_keys_may_hold_nan_in_every_array():
    rng = np.random.default_rng(0)
    q, k, v, bias = (
        rng.standard_normal(s) for s in ((2, 3, 2, 4), (2, 6, 1, 4), (2, 6, 1, 4), (3, 6))
    )
    used, options = np.array([4, 0]), {"q_offset": 5, "causal": True}
    expected = attention(q, k, v, seqused_k=used, bias=bias, **options)
    k[:, 4:] = v[:, 4:] = np.nan
    k[1] = v[1] = np.nan
    bias[:, 4:] = np.nan
    actual = attention(q, k, v, seqused_k=used, bias=bias, **options)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])
    assert (actual[1][1] == -np.inf).all()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "q_offset": -3},
        {"window_size": (0, 0), "q_offset": 100},
        {"mask": np.zeros((1, 1), bool)},
        {"bias": np.full((2, 1, 1), -np.inf)},
        {"seqused_k": np.zeros(1, np.int32)},
        {"mask_mod": lambda b, h, i, j: j < 0},
    ],
)
def test_rows_without_keys(options):
    q, k, v = np.ones((1, 3, 2, 4)), np.ones((1, 5, 1, 4)), np.ones((1, 5, 1, 2))
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        out, lse = attention(q, k, v, **options)
        assert (out == 0).all()
        assert (lse == -np.inf).all()
        out, lse = attention(q, k, v, sinks=np.array([2.0, -3.0]), **options)
        assert (out == 0).all()
        np.testing.assert_array_equal(lse, np.broadcast_to([[[2.0], [-3.0]]], (1, 2, 3)))
        assert (attention(q, k, v, sinks=[-np.inf] * 2, **options)[1] == -np.inf).all()


def test_scores_far_apart_do_not_overflow():
    q, k = np.full((1, 1, 1, 1), 1e5), np.array([-1e5, 1e5, 1e5]).reshape(1, 3, 1, 1)
    v = np.array([5.0, 1.0, 3.0]).reshape(1, 3, 1, 1)
    with np.errstate(all="raise"):
        out, lse = attention(q, k, v)
    assert out.item() == 2.0
    np.testing.assert_allclose(lse.item(), 1e10 + math.log(2), rtol=1e-15)

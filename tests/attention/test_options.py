"""Each option alone, with each other option, and compared with an equivalent call.

What the numbers should be is the kernel tests' matter; here options are compared with one another.
"""

from __future__ import annotations

import gc
import itertools
import pydoc
import re
import weakref
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import unchanged
from support.strategies import ANGLES, BASE, DV, EVERY_OPTION, POSITIONS, SK, SQ, B, D, H

from cupyattn import (
    AttentionGrads,
    MaskMod,
    Rotary,
    ScoreMod,
    attention,
    attention_backward,
    reference,
    rope,
)
from cupyattn.ops.attention.expressions import evaluator
from cupyattn.testing import AttentionCase

PLAIN = reference.attention(*BASE.arrays())[0].astype(np.float32)


def run_both_ways(**options: Any) -> tuple[np.ndarray, np.ndarray, AttentionGrads]:
    """Forward and backward of the base problem; inputs stay as they are, results are finite."""
    arrays, (dout, _) = BASE.arrays(), BASE.gradients()
    with unchanged(dout, *arrays, *options.values()):
        out, lse = attention(*arrays, **options, return_lse=True)
        grads = attention_backward(dout, *arrays, out, lse, **options)
    assert (out.shape, lse.shape) == ((B, SQ, H, DV), (B, H, SQ))
    inputs = (*arrays, options.get("bias"), options.get("sinks"))
    for gradient, array in zip(grads, inputs, strict=True):
        assert (gradient is None) == (array is None)
        if array is not None:
            assert gradient.shape == array.shape
            assert np.isfinite(gradient).all()
    assert np.isfinite(out).all()
    return out, lse, grads


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_every_option_alone(name):
    out, _, grads = run_both_ways(**EVERY_OPTION[name])
    assert abs(out - PLAIN).max() > 1e-3, "the option made no difference"
    plain = attention_backward(
        BASE.gradients()[0], *BASE.arrays(), *attention(*BASE.arrays(), return_lse=True)
    )
    assert abs(grads.dv - plain.dv).max() > 1e-3
    assert abs(grads.dq - plain.dq).max() > 1e-3


@pytest.mark.parametrize(
    "pair",
    [
        pair
        for pair in itertools.combinations(EVERY_OPTION, 2)
        if EVERY_OPTION[pair[0]].keys().isdisjoint(EVERY_OPTION[pair[1]])
    ],
    ids="-".join,
)
def test_every_pair_of_options(pair):
    """Both count: the result is not that of either alone."""
    first, second = (EVERY_OPTION[name] for name in pair)
    out, _, _ = run_both_ways(**first, **second)
    for alone in (first, second):
        assert abs(out - attention(*BASE.arrays(), **alone)).max() > 1e-4


LEFT_OUT = np.where(np.arange(SK) > POSITIONS, -np.inf, 0).astype(np.float32)
WIDE = EVERY_OPTION["mask"]["mask"]
EQUIVALENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal, window": ({"causal": True}, {"window_size": (None, 0)}),
    "causal, wider window": ({"causal": True}, {"causal": True, "window_size": (None, 3)}),
    "causal, mask": ({"causal": True}, {"mask": np.arange(SK) <= POSITIONS}),
    "causal, bias": ({"causal": True}, {"bias": LEFT_OUT}),
    "causal, mask_mod": ({"causal": True}, {"mask_mod": lambda b, h, i, j: j <= i + SK - SQ}),
    "causal, wide window": ({"causal": True}, {"window_size": (10**30, 0)}),
    "window, mask": (
        {"window_size": (2, 1)},
        {"mask": abs(2 * np.arange(SK) - 2 * POSITIONS + 1) <= 3},
    ),
    "no window": ({}, {"window_size": (None, None)}),
    "default offset": ({"causal": True}, {"causal": True, "q_offset": SK - SQ}),
    "offset array": (
        {"causal": True, "q_offset": 1},
        {"causal": True, "q_offset": np.array([1, 1], np.int32)},
    ),
    "far offset": ({}, {"causal": True, "q_offset": 2**60}),
    "default scale": ({}, {"softmax_scale": D**-0.5}),
    "all keys used": ({}, {"seqused_k": np.array([SK, SK])}),
    "seqused_k, mask": (
        {"seqused_k": np.array([6, 3])},
        {"mask": (np.arange(SK) < np.array([[6], [3]]))[:, None, None]},
    ),
    "mask, bias": ({"mask": WIDE}, {"bias": np.where(WIDE, 0, -np.inf).astype(np.float32)}),
    "mask, mask_mod": ({"mask": WIDE}, {"mask_mod": lambda b, h, i, j: WIDE[h, i, j]}),
    "bias of half": ({"bias": np.full(SK, 0.5, np.float16)}, {"bias": np.full(SK, 0.5, "f4")}),
    "alibi_slopes, bias": (
        EVERY_OPTION["alibi_slopes"],
        {"bias": -np.array([0.5, 0.25, 0.125, 0.0625], np.float32)[:, None, None]
         * abs(POSITIONS - np.arange(SK)).astype(np.float32)},
    ),
    "alibi_slopes, score_mod": (
        EVERY_OPTION["alibi_slopes"],
        {"score_mod": ScoreMod(
            "score - slopes[h] * abs(q_idx + offset - k_idx)", gradient="grad",
            slopes=np.array([0.5, 0.25, 0.125, 0.0625], np.float32), offset=np.array(SK - SQ),
        )},
    ),
    "softcap, score_mod": (
        {"softcap": 1.5},
        {"score_mod": ScoreMod(
            "1.5f * tanhf(score / 1.5f)",
            python=(lambda score, *_: 1.5 * np.tanh(score / 1.5),
                    lambda score, grad, *_: grad * (1 - np.tanh(score / 1.5) ** 2)),
        )},
    ),
    "expression, python": (
        {"score_mod": ScoreMod(
            "1.5f * tanhf(score / 1.5f)",
            gradient="grad * (1 - tanhf(score / 1.5f) * tanhf(score / 1.5f))",
        ), "mask_mod": MaskMod("k_idx % 3 || h == 1")},
        {"softcap": 1.5, "mask_mod": lambda b, h, i, j: (j % 3 != 0) | (h == 1)},
    ),
    "alibi_slopes of each batch element": (
        EVERY_OPTION["alibi_slopes"],
        {"alibi_slopes": np.array([[0.5, 0.25, 0.125, 0.0625]] * 2, np.float32)},
    ),
    "no dropout": ({}, {"dropout_p": 0.0, "seed": 3}),
    "no sinks": ({}, {"sinks": np.full(H, -np.inf, np.float32)}),
    "no rotation": ({}, {"rotary": (np.ones((9, 4), np.float16), np.zeros((9, 4), np.float16))}),
    "naive": ({}, {"implementation": "naive"}),
    "tiled": ({}, {"implementation": "tiled"}),
    "workspace": ({}, {"workspace": np.empty(7, np.uint8)}),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUIVALENT)
def test_two_ways_to_say_the_same(name):
    one, other = EQUIVALENT[name]
    forward_one, forward_other = (
        attention(*BASE.arrays(), **options, return_lse=True) for options in (one, other)
    )
    for left, right in zip(forward_one, forward_other, strict=True):
        assert_allclose(left, right, rtol=1e-6, atol=1e-6)
    if "implementation" not in other:
        grads_one, grads_other = (
            attention_backward(BASE.gradients()[0], *BASE.arrays(), *forward_one, **options)
            for options in (one, other)
        )
        for left, right in zip(grads_one[:3], grads_other[:3], strict=True):
            assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_taken_by_its_name(interleaved):
    """A Rotary does what the tuple does, and its pairs may be neighbours, forward and backward."""
    q, k, v = BASE.arrays()
    cos, sin = np.cos(ANGLES), np.sin(ANGLES)
    rotary = Rotary(cos, sin, interleaved)
    positions = np.arange(SQ)[None], np.arange(SK)[None]

    def rotated(x, where, **options):
        where = np.broadcast_to(where, x.shape[:2])
        return rope(x, cos, sin, positions=where, interleaved=interleaved, **options)

    arrays = rotated(q, positions[0]), rotated(k, positions[1]), v
    expected = attention(*arrays, q_offset=0, return_lse=True)
    found = attention(q, k, v, rotary=rotary, q_offset=0, return_lse=True)
    for actual, wanted in zip(found, expected, strict=True):
        assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)
    if not interleaved:
        assert_array_equal(attention(q, k, v, rotary=(cos, sin), q_offset=0), found[0])
    dout, _ = BASE.gradients()
    wanted = attention_backward(dout, *arrays, *expected, q_offset=0)
    dq, dk, dv, *_ = attention_backward(dout, q, k, v, *found, q_offset=0, rotary=rotary)
    assert_allclose(dq, rotated(wanted.dq, positions[0], inverse=True), rtol=1e-4, atol=1e-5)
    assert_allclose(dk, rotated(wanted.dk, positions[1], inverse=True), rtol=1e-4, atol=1e-5)
    assert_allclose(dv, wanted.dv, rtol=1e-4, atol=1e-5)


def test_bounds_know_which_features_are_a_pair():
    """Neighbouring pairs are halves of arrays whose features are in another order."""
    q, k, v = BASE.arrays()
    dout, _ = BASE.gradients()
    half = ANGLES.shape[-1]
    order = [*range(0, 2 * half, 2), *range(1, 2 * half, 2), *range(2 * half, D)]
    cos, sin = np.cos(ANGLES), np.sin(ANGLES)
    found = []
    for *arrays, rotary in ((q, k, (cos, sin, True)), (q[..., order], k[..., order], (cos, sin))):
        out, lse = reference.attention(*arrays, v, rotary=rotary, q_offset=0)
        options = {"rotary": rotary, "q_offset": 0, "dtype": "float16"}
        bounds = reference.attention_bound(*arrays, v, tile_k=32, **options)
        gradients = reference.attention_backward_bound(dout, *arrays, v, out, lse, **options)
        found.append((*bounds, gradients.dq, gradients.dk, gradients.dv))
    for index, (neighbours, halves) in enumerate(zip(*found, strict=True)):
        reordered = neighbours[..., order] if index in (2, 3) else neighbours
        assert_allclose(reordered, halves, rtol=1e-6)


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        (
            (ANGLES, ANGLES, True),
            r"rotary has type tuple of length 3; .*Rotary\(cos, sin, interleaved=False\)",
        ),
        (
            Rotary(ANGLES, None),
            "rotary has type Rotary of length 3, of which one is None; .*pass rotary=",
        ),
        (Rotary(ANGLES, ANGLES, 1), "rotary's interleaved = 1"),
        (ANGLES, "rotary has type ndarray; it must be a tuple"),
    ],
)
def test_what_is_no_rotary_is_refused(rotary, message):
    with pytest.raises(TypeError, match=message):
        attention(*BASE.arrays(), rotary=rotary)


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {"causal": np.True_}),
    "softmax_scale int": ({"softmax_scale": 1.0}, {"softmax_scale": 1}),
    "softmax_scale": ({"softmax_scale": 0.5}, {"softmax_scale": np.float16(0.5)}),
    "window_size": ({"window_size": (2, 1)}, {"window_size": (np.uint8(2), np.int8(1))}),
    "far window": (
        {"window_size": (127, 2), "q_offset": -3},
        {"window_size": (np.int8(127), np.uint16(2)), "q_offset": np.int8(-3)},
    ),
    "softcap": ({"softcap": 1.5}, {"softcap": Fraction(3, 2)}),
    "softcap int": ({"softcap": 2.0}, {"softcap": np.int32(2)}),
    "dropout_p": ({"dropout_p": 0.5, "seed": 1}, {"dropout_p": np.float16(0.5), "seed": 1}),
    "dropout_p fraction": ({"dropout_p": 0.5, "seed": 1}, {"dropout_p": Fraction(1, 2), "seed": 1}),
    **{
        f"seed {kind.__name__}": (
            {"dropout_p": 0.5, "seed": 100},
            {"dropout_p": 0.5, "seed": kind(100)},
        )
        for kind in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64)
    },
}


@pytest.mark.parametrize("other_first", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_numbers_of_any_kind(name, other_first):
    """NumPy's scalars are numbers too, and what was called before makes no difference."""
    plain, other = KINDS[name]
    # A length of its own, so that nothing was called before.
    sk = 20 + 2 * list(KINDS).index(name) + other_first
    problem = AttentionCase(B=1, Sq=5, Sk=sk, H=4, G=2, D=8, Dv=6)
    arrays, (dout, _) = problem.arrays(), problem.gradients()
    results = reference.attention(*arrays, **plain)
    exact = (*results, *reference.attention_backward(dout, *arrays, *results, **plain)[:3])
    for options in (other, plain) if other_first else (plain, other):
        out, lse = attention(*arrays, **options, return_lse=True)
        grads = attention_backward(dout, *arrays, out, lse, **options)
        for actual, expected in zip((out, lse, *grads[:3]), exact, strict=True):
            assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_nothing_of_a_call_is_kept():
    """Descriptions of calls are cached; the arrays, and what a mask_mod closes over, must go."""

    def call() -> list[weakref.ref[Any]]:
        arrays, mask = BASE.arrays(), WIDE.copy()
        options = {"bias": BASE.normal("bias", (SK,)), "mask_mod": lambda b, h, i, j: mask[h, i, j]}
        results = attention(*arrays, **options, return_lse=True)
        attention_backward(results[0], *arrays, *results, **options)
        return [weakref.ref(thing) for thing in (*arrays, mask, *options.values(), *results)]

    kept = call()
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


ROW, COL = np.arange(-4, 5)[:, None], np.arange(1, 4)
EVALUATED = {
    "i / j": np.trunc(ROW / COL),
    "i % j": np.fmod(ROW, COL),
    "i / 2.f": ROW / 2,
    "-i * j - 1 - 2": -ROW * COL - 3,
    "i + j << 1": (ROW + COL) * 2,
    "i >> 1 & 3 | 8": ((ROW >> 1) & 3) | 8,
    "~i ^ j": ~ROW ^ COL,
    "i < j == true": ROW < COL,
    "1 < i < 3": np.ones((9, 1)),
    "!i || i > 2 && j != 2": (ROW == 0) | ((ROW > 2) & (COL != 2)),
    "i > 0 ? j : i < 0 ? -1.5f : 0x10": np.where(ROW > 0, COL, np.where(ROW < 0, -1.5, 16)),
    "(i > 0) + (i > 1)": (ROW > 0) * 1 + (ROW > 1),
    "max(i, j) - min(i, 0)": np.maximum(ROW, COL) - np.minimum(ROW, 0),
    "fminf(i, NAN)": ROW,
    "abs(i) + fabsf(-.5f)": abs(ROW) + 0.5,
    "expf(i) + logf(j) * tanhf(i) + sqrtf(j)": np.exp(ROW)
    + np.log(COL) * np.tanh(ROW)
    + np.sqrt(COL),
    "(int)(i / 2.0) + int(-0.5)": np.trunc(ROW / 2),
    "static_cast<float>(i) / 2 + float(j)": ROW / 2 + COL,
    "0.1f": np.float64(np.float32(0.1)),
    "1e3 + 1.": 1001.0,
    "-INFINITY": -np.inf,
    "i >= 0 && i < 2 && table[i][j - 1] > 2": np.isin(ROW, [0, 1]) & ((ROW == 1) | (COL == 3)),
    "i != 0 && 4 / i == 2": ROW == 2,
    "i == 1 ? table[i][j - 1] : t": np.where(ROW == 1, COL + 3, 0.5),
    "powf(j, 2) /* squared */": COL**2,
}


@pytest.mark.parametrize("text", EVALUATED)
def test_expressions_mean_on_numpy_arrays_what_they_mean_in_c(text):
    function = evaluator(text, ("i", "j"), ("table", "t"), "float", NotImplementedError)
    table, t = np.arange(1, 7, dtype=np.float16).reshape(2, 3), np.array(0.5)
    found = function(ROW, COL, table=table, t=t)
    assert found.dtype == np.float64
    np.testing.assert_allclose(*np.broadcast_arrays(found, EVALUATED[text]), rtol=1e-15)


WRAPPED = {
    "i * 73856093 ^ j * 19349663": (ROW * 73856093 ^ COL * 19349663).astype(np.int32),
    "big * j * 2 > 0": np.zeros((9, 3)),
    "(i + 2147483647) / 2": np.trunc((ROW + 2147483647).astype(np.int32) / 2),
    "(1 << 31) / 3 + (1 << 31) % 3": np.int32(-(2**31 // 3) - 2),
    "i * 1073741824 * 4l": np.int64((ROW * 2**30).astype(np.int32)) * 4,
    "i * 2147483648": ROW * 2**31,
    "i * (wide - 1)": ROW * (2**40 - 1),
    "(int)wide + (int)1e10f - (int)NAN": 2**31 - 1,
    "(i & 0xFFFFFFFF) * 0xFFFFFFFF": -ROW % 2**32,
    "(i ? 1 << 30 : byte) * 4": np.where(ROW == 0, 4 * 255, 0),
    "abs(-2147483647 - 1) < 0": 1,
}


@pytest.mark.parametrize("text", WRAPPED)
def test_integers_have_the_types_of_c_and_wrap(text):
    given = {"big": np.array(2**30, np.int32), "wide": np.array(2**40), "byte": np.array(255, "u1")}
    function = evaluator(text, ("i", "j"), tuple(given), "float", NotImplementedError)
    found = function(ROW, COL, **given)
    assert_array_equal(*np.broadcast_arrays(found, np.float64(WRAPPED[text])))


REFUSED = {
    "__expf(score)": "'__expf' at 0",
    "score + erff(score)": "'erff' at 8",
    "score + 1u": "'1u' at 8",
    "score + 010": "'010' at 8",
    "std::min(score, 1.f)": "'std' at 0",
    "(unsigned)h": "'unsigned' at 1",
    "score * (size_t)h": "'size_t' at 9",
    "h and score": "'and' at 2",
    "(h, score)": "',' at 2",
    "score % 2.f": "'%' of a float",
    "[&] { return score; }()": "'{' at 4",
    "[&] { auto x = score; return x; }()": "'{' at 4",
    "(" * 5000 + "score" + ")" * 5000: "parts nested so deeply",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:20])
def test_error_names_the_part_that_numpy_arrays_do_not_evaluate(text):
    message = f"^ScoreMod's expression has {REFUSED[text]}, which NumPy arrays do not evaluate; .*"
    with pytest.raises(NotImplementedError, match=message + "; give ScoreMod python= as well"):
        attention(*BASE.arrays(), score_mod=ScoreMod(text))


MALFORMED = {
    "score = 1": "unexpected '=' at line 1, column 7",
    "score; 2": "unexpected ';' at line 1, column 6",
    "score + foo": "unknown name 'foo' at line 1, column 9",
    "score +\n (foo) * 2": "unknown name 'foo' at line 2, column 3",
    "score +\n": "unexpected end at line 2, column 1",
    "(score": "unexpected end at line 1, column 7",
    "score score": "unexpected 'score' at line 1, column 7",
    "score * * h": r"unexpected '\*' at line 1, column 9",
    "score + 2x": "unexpected '2x' at line 1, column 9",
    "h++": r"unexpected '\+\+' at line 1, column 2",
    "min(h, 1, 2)": "min takes 2 arguments at line 1, column 9",
    "expf()": r"unexpected '\)' at line 1, column 6",
    "score if h else 1": "unexpected 'if' at line 1, column 7",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_error_shows_where_an_expression_is_no_cpp(text):
    message = f"^ScoreMod's expression does not compile: {MALFORMED[text]}; it is an expression in "
    with pytest.raises(ValueError, match=rf"{message}.* k_idx, t; mend it there:\n.*\n *\^$"):
        attention(*BASE.arrays(), score_mod=ScoreMod(text, t=np.zeros(1, np.float32)))


def test_python_replaces_an_expression_that_is_not_evaluated():
    found = attention(
        *BASE.arrays(), score_mod=ScoreMod("__twice(score)", python=lambda s, *_: 2 * s)
    )
    assert (found == attention(*BASE.arrays(), score_mod=ScoreMod("2 * score"))).all()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("t[h]", IndexError, r"reads item 2 of t's axis 0; the axis has 2 items; .*min\(max\("),
        ("t[h - 1 < 0 ? 0 : h - 1]", IndexError, "reads item 2"),
        ("t[-1]", IndexError, "reads item -1"),
        ("t", ValueError, r"t has 0 indices in an expression; it has 1 axes, .*write t\[\.\.\.\]"),
        ("1 / h", ZeroDivisionError, "an integer of an expression is divided by 0"),
    ],
)
def test_values_that_an_expression_cannot_have(text, kind, message):
    with pytest.raises(kind, match=message):
        attention(*BASE.arrays(), score_mod=ScoreMod(text, t=np.ones(2, np.float32)))


def test_help_shows_public_names_only():
    for kind in (ScoreMod, MaskMod):
        text = pydoc.plain(pydoc.render_doc(kind))
        assert not re.findall(r"\b_(?!_)\w+", text)

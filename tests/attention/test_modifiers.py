"""score_mod and mask_mod through the kernels: expressions that say what built-in options say."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import KERNELS
from support.devices import placed as placed_within
from support.modifiers import Expression, by_the_reference
from support.search import deep, mostly_deep

import cupyattn
from cupyattn import MaskMod, ScoreMod, attention, attention_backward, vjp
from cupyattn.ops.attention.expressions import evaluator

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

HALF, FLOAT, BFLOAT = ("float16", 8), ("float32", 8), ("bfloat16", 24)
KINDS_DEEP = [("float16", 24), ("float32", 24), ("bfloat16", 8), BFLOAT]
WIDE = ("float16", 136)  # whose keys and values are kept by pairs of warps in the backward


@cache
def case(dtype: str, head_dim: int) -> Expression:
    return Expression(dtype, head_dim)


def both(x: Expression) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {"score_mod": x.score_mod(KERNELS.put), "mask_mod": x.mask_mod(KERNELS.put)}
    return own, {**x.score_options(), **x.mask_options()}


@pytest.mark.parametrize(
    "of",
    [HALF, FLOAT, *deep((WIDE,), (("float16", 264),), *((kind,) for kind in KINDS_DEEP))],
    ids=str,
)
def test_both_within_the_bounds_of_what_they_stand_for(of):
    own, alike = both(case(*of))
    ratios = case(*of).forward_ratios(own, alike)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize(
    ("of", "options"),
    [
        (HALF, {}),
        (FLOAT, {"deterministic": True}),
        *deep(
            (FLOAT, {}),
            (HALF, {"deterministic": True}),
            (WIDE, {}),
            (WIDE, {"deterministic": True}),
            *((kind, {}) for kind in KINDS_DEEP),
            *((kind, {"deterministic": True}) for kind in KINDS_DEEP[:2]),
        ),
    ],
    ids=str,
)
def test_gradients_within_the_bounds_of_what_they_stand_for(of, options):
    own, alike = both(case(*of))
    ratios = case(*of).backward_ratios(own, alike, **options)
    assert max(ratios.values()) <= 1, ratios


def small(dtype: str, *shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(4)]


plain_half = pytest.mark.parametrize("dtype", ["float16", *deep("float32")])


def close(dtype: str, rtol: float) -> dict[str, float]:
    """How close float32 has to come; float16 rounds its results, and P."""
    return {"rtol": rtol, "atol": rtol / 10} if dtype == "float32" else {"rtol": 1e-2, "atol": 3e-3}


SCALED = ScoreMod("0.5f * score", gradient="0.5f * grad")
BIASES = {"every score": (1, 2, 20, 33), "broadcast": (1, 2, 1, 33)}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float16", "every score"),
        *deep(("float32", "broadcast"), ("float16", "broadcast"), ("float32", "every score")),
    ],
)
def test_a_bias_gets_the_gradient_of_the_score_before_score_mod(dtype, shape):
    """Half of the scores with bias is half of the scale and half of the bias."""
    q, dout = (x[:, :20] for x in small(dtype, 1, 33, 2, 8)[:2])
    _, _, k, v = small(dtype, 1, 33, 2, 8)
    bias = np.random.default_rng(2).standard_normal(BIASES[shape]).astype(np.float32)
    halved = {"softmax_scale": 0.5 * 8**-0.5, "bias": 0.5 * bias}
    out, lse, expected = by_the_reference(dout, q, k, v, **halved)
    arrays = map(KERNELS.put, (dout, q, k, v, out, lse))
    found = attention_backward(*arrays, **placed({"bias": bias}), score_mod=SCALED)
    for name in ("dq", "dk", "dv"):
        assert_allclose(*both_of(name, found, expected), rtol=1e-2, atol=3e-3)
    dbias, half = both_of("dbias", found, expected)
    assert_allclose(dbias, 0.5 * half, rtol=1e-4, atol=1e-5)


def placed(options: dict[str, Any]) -> dict[str, Any]:
    return {n: KERNELS.put(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


def both_of(name: str, *results: Any) -> list[np.ndarray]:
    return [KERNELS.get(getattr(result, name)).astype(np.float64) for result in results]


def test_score_mod_comes_before_the_masks():
    """A hidden score stays hidden, and a score that the expression makes -inf is hidden too."""
    q, k, v, dout = small("float16", 1, 40, 2, 8)
    mask = np.random.default_rng(3).random((40, 40)) > 0.5
    far = ScoreMod(
        "q_idx - k_idx > 9 ? -INFINITY : k_idx > q_idx ? NAN : score + 3", gradient="grad"
    )
    own = {"mask": mask, "causal": True, "score_mod": far}
    alike = {"mask": mask, "causal": True, "window_size": (9, 0)}
    out, lse, expected = by_the_reference(dout, q, k, v, **alike)
    arrays = [*map(KERNELS.put, (q, k, v))]
    found, found_lse = attention(*arrays, **placed(own), return_lse=True)
    assert_allclose(KERNELS.get(found), out, rtol=1e-2, atol=1e-3)
    assert_allclose(KERNELS.get(found_lse), lse + 3, rtol=1e-5, atol=1e-5)
    grads = attention_backward(KERNELS.put(dout), *arrays, found, found_lse, **placed(own))
    for name in ("dq", "dk", "dv"):
        assert_allclose(*both_of(name, grads, expected), rtol=1e-2, atol=3e-3)


@plain_half
def test_rows_that_a_mask_mod_hides_whole_are_zeros(dtype):
    q, k, v, dout = (KERNELS.put(x) for x in small(dtype, 1, 40, 2, 8))
    some = MaskMod("q_idx % 3 != 0")
    out, lse = attention(q, k, v, mask_mod=some, return_lse=True)
    assert not KERNELS.get(out)[:, ::3].any()
    assert np.isneginf(KERNELS.get(lse)[..., ::3]).all()
    assert np.isfinite(KERNELS.get(lse)[..., 1::3]).all()
    grads = attention_backward(dout, q, k, v, out, lse, mask_mod=some)
    assert not KERNELS.get(grads.dq)[:, ::3].any()
    assert np.isfinite(KERNELS.get(grads.dk)).all()


@plain_half
def test_arrays_may_change_without_another_kernel(dtype):
    """Their contents, shapes and strides are arguments."""
    q, k, v, _ = (KERNELS.put(x) for x in small(dtype, 1, 20, 2, 8))
    outs = []
    for table in (np.zeros((3, 20), np.float32)[::2], np.ones((2, 20), np.float32).T.copy().T):
        shift = ScoreMod("score + table[h][k_idx] * k_idx", table=KERNELS.put(table))
        outs.append(KERNELS.get(attention(q, k, v, score_mod=shift)))
    plain = KERNELS.get(attention(q, k, v))
    assert_allclose(outs[0], plain, **close(dtype, 1e-6))
    assert abs(outs[1] - plain).max() > 0.1


@pytest.mark.deep
@plain_half
def test_vjp_takes_them(dtype):
    q, k, v, dout = small(dtype, 1, 20, 2, 8)
    causal = MaskMod("q_idx >= k_idx")
    out, pullback = vjp(attention, *map(KERNELS.put, (q, k, v)), mask_mod=causal, score_mod=SCALED)
    alike = {"causal": True, "softmax_scale": 0.5 * 8**-0.5}
    expected, _, grads = by_the_reference(dout, q, k, v, **alike)
    assert_allclose(KERNELS.get(out), expected, **close(dtype, 1e-5))
    for left, right in zip(pullback(KERNELS.put(dout)), grads[:3], strict=True):
        assert_allclose(KERNELS.get(left), right, **close(dtype, 1e-4))


def test_few_queries_take_the_kernels_that_have_expressions():
    q, k, v, _ = small("float16", 1, 300, 2, 16)
    arrays = [KERNELS.put(x) for x in (q[:, :1], k, v)]
    out = attention(*arrays, mask_mod=MaskMod("k_idx % 2 == 0"))
    with cupyattn.backend("reference"):
        even = attention(q[:, :1], k[:, ::2], v[:, ::2])
    assert_allclose(KERNELS.get(out), even, rtol=2e-3, atol=1e-3)


def test_no_scores_at_all():
    q, k, v, _ = small("float16", 1, 4, 2, 8)
    out = attention(
        *(KERNELS.put(x) for x in (q, k[:, :0], v[:, :0])), mask_mod=MaskMod("q_idx % 3 != 0")
    )
    assert_array_equal(KERNELS.get(out), np.zeros_like(q))


REFUSED = {
    "Python's //": ("q_idx // 8 == k_idx // 8", r"has '//' at 6; in C\+\+ that begins a comment; "),
    "#define": ("#define X\n1", r"has '.*' at \d+; .* directives, which read"),
    "#line": ("1\n #line 3", r"has '.*' at \d+; .* directives, which read"),
    "a digraph": ("%\\\n:include <x>\n1", r"has '.*' at \d+; .* directives, which read"),
    "__has_include": ("__has_include(<x>)", r"has '.*' at \d+; .* directives, which read"),
    "NUL": ("true\0", r"has '.*' at \d+; .* take that character out"),
    "a surrogate": ("true // \ud800", r"has '.*' at \d+; .* take that character out"),
    "a backslash": ("true +\\", "a backslash joins its line with the next"),
    "a backslash in a line": ("true \\\n ", "a backslash joins its line with the next"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_text_that_is_no_expression_is_refused(name):
    text, message = REFUSED[name]
    for make in (ScoreMod, MaskMod, lambda text: ScoreMod("score", gradient=text)):
        with pytest.raises(ValueError, match=message):
            make(text)


def test_a_backslash_within_a_line_is_taken():
    ScoreMod("score \\\n + 1.f")


WRONG = {
    "unknown name": (ScoreMod("score - slop[h]"), "score_mod", "column 9", '"slop" is undefined'),
    "second line": (ScoreMod("score -\n   * score"), "score_mod", "line 2, column 6", "pointer"),
    "not ended": (MaskMod("(q_idx > k_idx"), "mask_mod", "its end", 'expected a ")"'),
    "a statement": (MaskMod("q_idx > k_idx;"), "mask_mod", "column 14", 'expected a ")"'),
    "letters of two bytes": (ScoreMod("/* é */ score - slop[h]"), "score_mod", "column 17", "slop"),
    "after a tab": (ScoreMod("score\n\t- slop[h]"), "score_mod", "line 2, column 4", "slop"),
    "an assignment": (MaskMod("q_idx = k_idx"), "mask_mod", "column 1", "modifiable lvalue"),
    "no value": (ScoreMod("void(score)"), "score_mod", "its result", "invalid type conversion"),
    "a kernel's macro": (
        MaskMod("WARPS > 0", seen=np.zeros(1, bool), WARPS=np.ones((), bool)),
        "mask_mod", "named 'WARPS'", "another name",
    ),
    "gradient": (
        ScoreMod("score", gradient="grda"), "score_mod's gradient", "column 1", "grda",
    ),
    "index left out": (
        MaskMod("seen > 0", seen=np.zeros(4, bool)), "mask_mod", "column 6", "Indexed<",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    mostly_deep(
        WRONG, ["unknown name", "second line", "a kernel's macro", "gradient", "index left out"]
    ),
)
def test_an_expression_that_does_not_compile_is_shown_where_it_is_wrong(name):
    expression, *words = WRONG[name]
    option = "score_mod" if isinstance(expression, ScoreMod) else "mask_mod"
    if expression.arrays:
        expression.arrays = placed(expression.arrays)
    q, k, v, _ = (KERNELS.put(x) for x in small("float16", 1, 4, 2, 8))
    with pytest.raises(ValueError, match="does not compile") as failure:
        attention(q, k, v, **{option: expression})
    assert all(word in str(failure.value) for word in words), str(failure.value)


def test_names_of_kernels_are_free_for_arrays():
    """Kernels use these names for functions and local variables, or derive names from them."""
    names = ("min", "row", "expression", "score_mod_slopes", "slopes", "mask", "Modifiers")
    slopes = {name: np.float32([n + 1, 2 * n]) for n, name in enumerate(names)}
    terms = " + ".join(f"{10**n} * {name}[h]" for n, name in enumerate(names))
    once = sum(10**n * slopes[name] for n, name in enumerate(names))
    q, k, v, _ = (KERNELS.put(x) for x in small("float16", 1, 4, 2, 8))
    plain = attention(q, k, v, return_lse=True)
    named = ScoreMod(f"score + ({terms}) * 1e-6f", **placed(slopes))
    found = attention(q, k, v, score_mod=named, return_lse=True)
    added = KERNELS.get(found[1]) - KERNELS.get(plain[1])
    assert_allclose(added, np.broadcast_to(once[:, None] * 1e-6, added.shape), rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["grad", "NAN", "int", "this", "lambda", "__x", "a b", "", "1a", "é"]
)
def test_names_that_no_array_can_have(name):
    with pytest.raises(ValueError, match=r"named .*digits and underscores.*another name"):
        MaskMod("true", **{name: np.zeros(1)})


@pytest.mark.parametrize("kind", [ScoreMod, MaskMod])
@pytest.mark.parametrize("text", [None, "", 5, b"score"])
def test_an_expression_is_a_string(kind, text):
    with pytest.raises(TypeError, match=f"{kind.__name__}'s expression is .*; it is a string"):
        kind(text)


@pytest.mark.parametrize("expression", ["score > 0", "k_idx < 3 && grad != 0.f"])
def test_a_mask_has_no_scores(expression):
    with pytest.raises(ValueError, match=r"MaskMod's expression names '(score|grad)'.*ScoreMod"):
        MaskMod(expression)
    MaskMod("scores[k_idx] > 0", scores=np.zeros(4, np.float32))  # another name


@pytest.mark.parametrize("kind", [ScoreMod, MaskMod])
def test_an_array_cannot_be_named_python(kind):
    with pytest.raises(TypeError, match=r"python is <array .* an array needs another name"):
        kind("true", python=np.zeros(2))


def test_an_array_is_none_of_none_and_no_number():
    with pytest.raises(TypeError, match="given seen = None"):
        MaskMod("seen[h]", seen=None)
    for number in (2.5, np.float32(2.5)):
        with pytest.raises(TypeError, match=r"given t = .*2\.5.*; .* numpy\.asarray "):
            ScoreMod("score * t", t=number)
    q, k, v, _ = (KERNELS.put(x) for x in small("float32", 1, 4, 2, 8))
    with pytest.raises(TypeError, match=r"score_mod's t has type .*list; .* numpy\.asarray\(t\)"):
        attention(q, k, v, score_mod=ScoreMod("score * t[h]", t=[2.5]))


def test_arrays_are_called_in_errors_as_the_caller_calls_them():
    q, k, v, _ = (KERNELS.put(x) for x in small("float32", 1, 4, 2, 8))
    written = MaskMod("seen[0][0][0][0] == 0", seen=q)
    with pytest.raises(ValueError, match="out overlaps mask_mod's seen"):
        attention(KERNELS.put(KERNELS.get(q)), k, v, mask_mod=written, out=q)
    apart = KERNELS.put(np.zeros(9, np.uint8))[1:].view(np.float32)
    with pytest.raises(ValueError, match=r"mask_mod's seen starts .* example seen\.copy\(\)"):
        attention(q, k, v, mask_mod=MaskMod("seen[h]", seen=apart))
    short = KERNELS.put(np.zeros(2, np.int16))
    with pytest.raises(TypeError, match=r"mask_mod's seen has .* seen\.astype\('float32'\)$"):
        attention(q, k, v, mask_mod=MaskMod("seen[h]", seen=short))
    tables = [KERNELS.put(np.ones((8, 8), np.float32))[:, ::2]] * 2
    with pytest.raises(ValueError, match=r"rotary's cos has .* copy, ascontiguousarray\(cos\)$"):
        attention(q, k, v, rotary=tuple(tables))


def test_numpy_arrays_evaluate_an_expression_as_kernels_do():
    """Operators, precedence, integers rounded toward 0, and sides that are not evaluated."""
    q, k, v, dout = small("float32", 9, 9, 2, 8)
    mod = ScoreMod(
        "score * 1.5f - (q_idx - k_idx) / 2 * 0.25f + (q_idx - k_idx) % 3 * .125f\n"
        "+ (h ? t[min(k_idx, 3)] : -0.5e0f) /* why */ + !(q_idx & 1) + (k_idx << 1 >> 2 ^ 1)\n"
        "+ (q_idx >= k_idx && table[h][q_idx - k_idx] > 0 || float(b) > 0) - -fabsf(tanhf(score))\n"
        "+ (q_idx < k_idx ? 0 : k_idx == 0 ? 1.0f : fmaxf((int)t[0] % 2, expf(-k_idx / 3.0f)))",
        gradient="grad * (1.5f + (score > 0 ? 1 : -1) * (1 - tanhf(score) * tanhf(score)))",
        t=np.array([-1.75, 2, 0.5, 1], np.float16),
        table=np.random.default_rng(2).standard_normal((2, 9), np.float32),
    )
    mask = MaskMod("q_idx - k_idx <= 5 && (k_idx % 3 != 1 || q_idx == k_idx)")
    with cupyattn.backend("reference"):
        exact = attention(q, k, v, score_mod=mod, mask_mod=mask, return_lse=True)
        exact_grads = attention_backward(dout, q, k, v, *exact, score_mod=mod, mask_mod=mask)
    options = {"score_mod": placed_within(KERNELS, mod), "mask_mod": mask}
    arrays = [KERNELS.put(x) for x in (q, k, v)]
    found = attention(*arrays, **options, return_lse=True)
    grads = attention_backward(KERNELS.put(dout), *arrays, *found, **options)
    for one, other in zip((*found, *grads[:3]), (*exact, *exact_grads[:3]), strict=True):
        assert_allclose(KERNELS.get(one), other, rtol=2e-5, atol=2e-5)


def drawn_expression(draw: Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.15:
        return draw.choice(["i", "j", "x", "1", "2", "3", "7", "0.5f", "t[i&3]", "true"])
    a, b, c = (drawn_expression(draw, depth - 1) for _ in range(3))
    return draw.choice(
        [
            *(
                f"{a} {operator} {b}"
                for operator in [
                    "+",
                    "-",
                    "*",
                    "+",
                    "-",
                    "*",
                    "<",
                    ">",
                    "<=",
                    ">=",
                    "==",
                    "!=",
                    "&&",
                    "||",
                ]
            ),
            *(f"((int)({a}) {operator} int({b}))" for operator in ["&", "|", "^"]),
            *(f"((int)({a}) {operator} {c})" for operator in "/%" for c in ("3", "(-2)")),
            *(f"{function}({a}, {b} + 0.f)" for function in ("fminf", "fmaxf")),
            *(f"{function}(int({a}), int({b}))" for function in ("min", "max")),
            *(f"{function}({a})" for function in ("", "!", "-", "+", "~(int)", "fabsf")),
            *[f"({a} ? {b} : {c})"] * 3,
        ]
    )


@pytest.mark.parametrize("seed", [1, *deep(*range(2, 12))])
def test_expressions_have_the_value_that_the_compiler_gives_them(seed):
    """Any difference of precedence, promotion or rounding would show in one of them."""
    draw = Random(seed)
    texts = [drawn_expression(draw, 4) for _ in range(40)]
    lines = (f"  y[{n} * THREADS + lane] = {text};" for n, text in enumerate(texts))
    source = """extern "C" __global__ void values(const float* numbers, const float* t, float* y) {
      const int lane = threadIdx.x, i = lane % 8 - 3, j = lane / 8;
      const float x = numbers[lane];
    """ + "\n".join((*lines, "}"))
    lane, t = np.arange(64), np.array([1.5, -2, 3, 0], np.float32)
    numbers = (lane * 0.25 - 7).astype(np.float32)
    y = KERNELS.put(np.zeros((40, 64), np.float32))
    kernel = cupyattn.Kernel(source, inputs=["numbers", "t"], outputs=["y"], threads=64)
    kernel(1, KERNELS.put(numbers), KERNELS.put(t), y)
    for text, expected in zip(texts, KERNELS.get(y), strict=True):
        function = evaluator(text, ("i", "j", "x"), ("t",), "float", NotImplementedError)
        found = np.broadcast_to(function(lane % 8 - 3, lane // 8, numbers, t=t), 64)
        assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=text)


def test_integers_wrap_as_in_kernels():
    q, k, v, _ = small("float32", 40, 40, 1, 8)
    mask = MaskMod("((q_idx * 73856093) ^ (k_idx * 19349663)) % 7 != 0")
    mod = ScoreMod("score + (q_idx - 7 << 28) * (k_idx + 5) / 1e9f + (q_idx * 1e8f < (int)1e20f)")
    found = attention(*(KERNELS.put(x) for x in (q, k, v)), mask_mod=mask, score_mod=mod)
    with cupyattn.backend("reference"):
        expected = attention(q, k, v, mask_mod=mask, score_mod=mod)
    assert_allclose(KERNELS.get(found), expected, rtol=2e-5, atol=2e-5)


def test_a_score_mod_without_gradient_has_no_backward():
    q, k, v, dout = (KERNELS.put(x) for x in small("float16", 1, 4, 2, 8))
    out, lse = attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="give ScoreMod gradient="):
        attention_backward(dout, q, k, v, out, lse, score_mod=ScoreMod("score + 1"))


DISTANCES = ScoreMod("score - logf(1 + q_idx - k_idx)", gradient="grad")


@pytest.mark.parametrize("deterministic", [False, *deep(True)])
@pytest.mark.parametrize(
    ("head_dim", "sq"), [(8, 20), *deep((8, 150), (64, 20), (64, 129), (136, 20))]
)
def test_an_expression_may_be_nan_where_no_query_sees(head_dim, sq, deterministic):
    """Rows beyond Sq have the last query's index, which sees no key that only they would see."""
    rng = np.random.default_rng(2)
    q, dout = rng.standard_normal((2, 1, sq, 2, head_dim)).astype("float16")
    k, v = rng.standard_normal((2, 1, sq + 20, 1, head_dim)).astype("float16")
    bias = rng.standard_normal((sq + 20,)).astype("float16")
    options = {"causal": True, "q_offset": 0, "score_mod": DISTANCES}
    with cupyattn.backend("reference"):
        out, lse = attention(q, k, v, bias=bias, return_lse=True, **options)
        expected = attention_backward(dout, q, k, v, out, lse, bias=bias, **options)
    given = [KERNELS.put(x) for x in (dout, q, k, v, out, lse)]
    found = attention_backward(
        *given, bias=KERNELS.put(bias), deterministic=deterministic, **options
    )
    for name in ("dq", "dk", "dv", "dbias"):
        mine, right = KERNELS.get(getattr(found, name)), getattr(expected, name)
        assert_allclose(mine.astype(float), right.astype(float), rtol=2e-2, atol=2e-2, err_msg=name)


def test_an_expression_may_be_nan_where_no_query_of_a_packed_sequence_sees():
    rng, bounds, lengths = np.random.default_rng(3), np.int32([0, 20, 53]), np.int32([0, 40, 73])
    q, dout = rng.standard_normal((2, 53, 2, 8)).astype("float16")
    k, v = rng.standard_normal((2, 73, 1, 8)).astype("float16")
    options = {"causal": True, "q_offset": 0, "score_mod": DISTANCES}
    packed = (bounds, lengths, 33, 40)
    with cupyattn.backend("reference"):
        out, lse = cupyattn.attention_varlen(q, k, v, *packed, return_lse=True, **options)
        expected = cupyattn.attention_varlen_backward(dout, q, k, v, out, lse, *packed, **options)
    given = (*map(KERNELS.put, (dout, q, k, v, out, lse, bounds, lengths)), *packed[2:])
    found = cupyattn.attention_varlen_backward(*given, **options)
    for name in ("dq", "dk", "dv"):
        mine, right = KERNELS.get(getattr(found, name)), getattr(expected, name)
        assert_allclose(mine.astype(float), right.astype(float), rtol=2e-2, atol=2e-2, err_msg=name)

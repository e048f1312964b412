"""Bad arrays, results and options of the public functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from support.bad_input.call import (
    ARRAYS,
    BOOL,
    FLOATS,
    HUGE,
    INF,
    NAN,
    PLACED,
    Call,
    Row,
    full,
    normal,
    of,
    shaped,
)

from cupyattn import AttentionGrads, MaskMod


def in_ragged_rows(a: np.ndarray) -> np.ndarray:
    """Return an array of this shape whose rows are no whole number of items apart."""
    rows = np.zeros((*a.shape[:-1], a.shape[-1] * a.itemsize + a.itemsize // 2), np.uint8)
    return np.ndarray(a.shape, a.dtype, rows, strides=(*rows.strides[:-1], a.itemsize))


# What no input of floats may be, whichever function it is of.
NO_FLOATS: dict[str, tuple[Callable[[np.ndarray], Any], type[Exception], str, str]] = {
    "int32": (lambda a: a.astype(np.int32), TypeError, "has dtype int32", "float32"),
    "bool": (lambda a: a > 0, TypeError, "has dtype bool", "float32"),
    "complex": (lambda a: a.astype(np.complex64), TypeError, "has dtype complex64", "float32"),
    "reversed": (lambda a: a[..., ::-1], ValueError, "has strides", "axis must be contiguous"),
    "stepped": (lambda a: a.repeat(2, -1)[..., ::2], ValueError, "has strides", "contiguous"),
    "ragged rows": (in_ragged_rows, ValueError, "has strides", "whole numbers of items"),
    "number": (lambda a: 3.0, TypeError, "has type builtins.float", ARRAYS),
    "list": (lambda a: a.tolist(), TypeError, "has type builtins.list", ARRAYS),
    "text": (lambda a: "q", TypeError, "has type builtins.str", ARRAYS),
    "None": (lambda a: None, TypeError, "is", ARRAYS),
}
ONLY_IN_NUMPY: dict[str, tuple[Callable[[np.ndarray], Any], type[Exception], str, str]] = {
    "objects": (lambda a: a.astype(object), TypeError, "has dtype object", "float32"),
    "texts": (lambda a: a.astype("U9"), TypeError, "has dtype str", "float32"),
    "struct": (lambda a: a.view([("x", "f4")]), TypeError, "has dtype void32", "float32"),
    "long double": (lambda a: a.astype(np.longdouble), TypeError, "has dtype", "float32"),
    "swapped": (
        lambda a: a.astype(">f4"),
        TypeError,
        "has dtype float32 in foreign byte order",
        "",
    ),
    "masked": (np.ma.array, TypeError, "has type numpy.ma.MaskedArray", ARRAYS),
    "scalar": (lambda a: a.flat[0], TypeError, "has type numpy.float32", ARRAYS),
}


def array_rows(table: dict[str, Any], *names: str) -> Iterator[Row]:
    for name in names:
        for id, (change, kind, passed, allowed) in table.items():
            yield f"{name} {id}", {name: change}, kind, f"{name} {passed}", allowed


def shape_rows() -> Iterator[Row]:
    """q, k and v whose shapes do not fit together."""
    for name in ("q", "k", "v"):
        half = {name: lambda a: a.astype(np.float16)}
        yield f"{name} another float", half, TypeError, f"{name} has float16", "share one dtype"
        for id, change, shape in (
            ("no batch", lambda a: a[0], "("),
            ("5 axes", lambda a: a[None], "(1, 2, "),
            ("0 axes", lambda a: np.array(a.flat[0]), "()"),
        ):
            yield f"{name} {id}", {name: change}, ValueError, f"{name} has shape {shape}", "4 axes"
    for name, shape, allowed in (
        ("k", (1, 5, 2, 8), "(2, 5, 2, 8)"),
        ("k", (2, 5, 2, 7), "(2, 5, 2, 8)"),
        ("k", (0, 5, 2, 8), "(2, 5, 2, 8)"),
        ("v", (1, 5, 2, 6), "(2, 5, 2, 6)"),
        ("v", (2, 4, 2, 6), "(2, 5, 2, 6)"),
        ("v", (2, 0, 2, 6), "(2, 5, 2, 6)"),
        ("v", (2, 5, 4, 6), "(2, 5, 2, 6)"),
    ):
        change = {name: lambda a, shape=shape: normal(*shape)}
        yield f"{name} {shape}", change, ValueError, f"{name} has shape {shape}", allowed
    for heads in (0, 3, 8):
        change = {
            "k": lambda a, heads=heads: normal(2, 5, heads, 8),
            "v": lambda a, heads=heads: normal(2, 5, heads, 6),
        }
        passed = f"H = 4 heads, k and v have G = {heads}"
        yield f"G = {heads}", change, ValueError, passed, "H is a multiple of G"
    for dim in (0, 513):
        change = {
            "q": lambda a, dim=dim: normal(2, 3, 4, dim),
            "k": lambda a, dim=dim: normal(2, 5, 2, dim),
        }
        yield f"D = {dim}", change, ValueError, f"D = {dim}", "1 to 512"
        change = {"v": lambda a, dim=dim: normal(2, 5, 2, dim)}
        yield f"Dv = {dim}", change, ValueError, f"Dv = {dim}", "1 to 512"


TABLE = np.ones((9, 2), np.float32)
MASK, BIAS = np.ones((4, 3, 5), bool), np.zeros((4, 3, 5), np.float32)
SCORES = "(B, H, queries, keys) = (2, 4, 3, 5)"
DROP = "at least 0 and below 1"


def option_rows() -> Iterator[Row]:
    """The options that forward and backward share."""
    yield from of("causal", TypeError, "causal", BOOL, 1, 0, None, "yes", [True])
    yield from of("causal", TypeError, "causal", BOOL, np.array(True), np.array([1, 2]))
    scales = ("1", True, 1j, [1.0], np.array(1.0))
    yield from of("softmax_scale", TypeError, "softmax_scale has type ", "real number", *scales)
    yield from of("softmax_scale", ValueError, "softmax_scale = ", "finite", NAN, INF, -INF, HUGE)
    sides = (3, [1, 0], "ab", (1,), (1, 2, 3), (1.0, 0), (True, None), ("1", 0), ([1], 2))
    yield from of("window_size", TypeError, "window_size", "integer", *sides, np.array([1, 2]))
    sides = ((-1, 0), (0, -1), (None, -5))
    yield from of("window_size", ValueError, "window_size = {}", "0 or more", *sides)
    yield from of("q_offset", TypeError, "q_offset", "integer", True, 1.5, "3", [1, 2])
    one_each = "an int32 or int64 array (B,)"
    yield from of("q_offset", TypeError, "q_offset is [0, 1]", one_each, [0, 1])
    dtypes = "int32, int64"
    numbers = (np.zeros(2), np.zeros(2, np.uint8), np.zeros(2, bool))
    yield from of("q_offset", TypeError, "q_offset has dtype", dtypes, *numbers)
    yield from shaped("q_offset", "(B,), here (2,)", (3,), (2, 1), (), (1,), dtype=np.int32)
    yield from of("q_offset", ValueError, "q_offset = {}", str(2**60), 2**60 + 1, -(2**70))
    yield from of("seqused_k", TypeError, "seqused_k has type builtins.", ARRAYS, 3, [3, 5], (3, 5))
    yield from of("seqused_k", TypeError, "seqused_k has dtype", dtypes, *numbers)
    yield from shaped("seqused_k", "(B,), here (2,)", (3,), (2, 1), (), dtype=np.int64)
    yield from of("mask", TypeError, "mask has dtype", "bool", MASK.astype(int), BIAS)
    shapes = ((4, 3, 6), (3, 1, 1, 1), (1, 1, 4, 3, 5), (0,), (2,), (2, 4, 1, 3))
    yield from shaped("mask", SCORES, *shapes, dtype=bool)
    yield from of("mask", TypeError, "mask has type builtins.", ARRAYS, True, [[True]], "causal")
    yield from of("bias", TypeError, "bias has dtype", FLOATS, MASK, np.zeros(5), np.zeros(5, int))
    yield from shaped("bias", SCORES, *shapes)
    for name, array in (("bias", BIAS), ("alibi_slopes", full(4)), ("sinks", full(4))):
        apart = np.zeros((*array.shape, 6), np.uint8)[..., :4].view(np.float32)[..., 0]
        passed = f"{name} has strides"
        yield f"{name} ragged", {name: apart}, ValueError, passed, "whole numbers of items"
    yield from of("bias", TypeError, "bias has type builtins.", ARRAYS, 1.0, [0.0])
    yield from of("alibi_slopes", TypeError, "alibi_slopes has dtype", FLOATS, np.ones(4))
    yield from shaped("alibi_slopes", "(B, H)", (3,), (4, 2), (1, 4), (1,), (), (2, 4, 1))
    yield from of("softcap", TypeError, "softcap has type ", "real number", "50", True, np.ones(1))
    caps = (0, 0.0, -50.0, NAN, INF, HUGE)
    yield from of("softcap", ValueError, "softcap = ", "above 0", *caps)
    for cap, scale in ((1e-39, None), (5e-324, 0.01), (1e-13, 1e26), (1e-13, -1e26)):
        changes = {"softcap": cap, "softmax_scale": scale}
        passed = f"softcap = {cap} with softmax_scale = "
        yield f"softcap {cap} {scale}", changes, ValueError, passed, "1e+38 times softcap"
    yield from of("sinks", TypeError, "sinks has dtype", FLOATS, np.ones(4, int))
    yield from shaped("sinks", "(H,), here (4,)", (3,), (2, 4), (1,), ())
    yield from of("dropout_p", ValueError, "dropout_p = {} without a seed", "seed=", 0.25)
    yield from of("dropout_p", ValueError, "dropout_p = ", DROP, 1.0, 1, -0.1, 50, NAN, INF, HUGE)
    yield from of(
        "dropout_p", TypeError, "dropout_p has type ", "real number", "0.1", True, None, [0]
    )
    yield from of("seed", TypeError, "seed is ", "integer", 1.0, True, "1", (1,), np.array(1))
    yield from of("seed", ValueError, "seed = {}", "0 to 2**64 - 1", -1, 2**64, np.int8(-1))
    for id, bad in {"list": [TABLE] * 2, "array": TABLE, "1": (TABLE,), "3": (TABLE,) * 3}.items():
        yield f"rotary {id}", {"rotary": bad}, TypeError, "rotary has type ", "tuple (cos, sin)"
    for id, bad, kind, passed, allowed in (
        ("numbers", (1, 2), TypeError, "cos has type builtins.int", ARRAYS),
        ("half", (TABLE, None), TypeError, "rotary has type ", "(cos, sin)"),
        ("ints", (TABLE.astype(int), TABLE), TypeError, "rotary's cos has dtype int64", FLOATS),
        ("1 axis", (TABLE[0], TABLE[0]), ValueError, "rotary's cos has shape (2,)", "R/2)"),
        ("lengths", (TABLE, TABLE[:8]), ValueError, "rotary's sin has shape (8, 2)", "(9, 2)"),
        ("wide", (full(9, 5), full(9, 5)), ValueError, "5 columns", "D = 8"),
        ("two dtypes", (TABLE, TABLE.astype("f2")), TypeError, "sin has float16", "one dtype"),
        ("apart", (full(9, 4)[:, ::2],) * 2, ValueError, "cos has strides", "contiguous"),
    ):
        yield f"rotary {id}", {"rotary": bad}, kind, passed, allowed
    call = "score_mod(score, b, h, q_idx, k_idx)"
    masks = MaskMod("q_idx > k_idx")
    yield from of("score_mod", TypeError, "score_mod has type ", call, 3, "score", [abs], masks)
    call = "mask_mod(b, h, q_idx, k_idx)"
    yield from of("mask_mod", TypeError, "mask_mod has type ", call, 3, "causal", [abs])
    for id, bad, kind, passed, allowed in (
        ("list", [1.0], TypeError, "mask_mod's t has type builtins.list", ARRAYS),
        ("dtype", full(3).astype(complex), TypeError, "mask_mod's t has dtype", "float16"),
        ("axes", full(1, 1, 1, 1, 1), ValueError, "mask_mod's t has 5 axes", "at most 4"),
    ):
        changes = {"mask_mod": MaskMod("t[h] > 0", python=lambda *_, t: True, t=bad)}
        yield f"mask_mod of {id}", changes, kind, passed, allowed
    yield from of("workspace", TypeError, "workspace has type ", ARRAYS, 1024, [1], "w")


def numpy_option_rows() -> Iterator[Row]:
    """Options whose values are looked at (on a GPU that would synchronise), and NumPy's dtypes."""
    used, offset = np.array([-1, 5]), np.array([0, 7])
    yield "seqused_k -1", {"seqused_k": used}, ValueError, "from -1 to 5", "Sk = 5"
    yield "seqused_k 6", {"seqused_k": used + 1}, ValueError, "from 0 to 6", "Sk = 5"
    yield "q_offset huge", {"q_offset": offset + 2**62}, ValueError, "q_offset", str(2**60)
    yield from of("mask", TypeError, "mask has type numpy.ma.", ARRAYS, np.ma.array(MASK))
    objects = np.array([None, 1], object)
    yield from of("workspace", TypeError, "workspace has dtype object", "without", objects)
    yield from of("mask", TypeError, "mask has dtype object", "bool", MASK.astype(object))
    yield from of(
        "bias", TypeError, "bias has dtype float32 in foreign", FLOATS, BIAS.astype(">f4")
    )
    yield from of(
        "q_offset", TypeError, "q_offset has dtype int32 in", "int32", offset.astype(">i4")
    )
    for id, rows, offset, passed, allowed in (
        ("short for queries", 9, 7, "7 to 9", "0 to 8"),
        ("short for keys", 4, 0, "0 to 4", "0 to 3"),
        ("before the first", 9, -1, "-1 to 1", "0 to 8"),
        ("short for one batch element", 9, np.array([0, 7]), "0 to 9", "0 to 8"),
        ("empty", 0, 0, "0 to 4", "positions"),
    ):
        changes = {"rotary": (TABLE[:rows], TABLE[:rows]), "q_offset": offset}
        yield f"rotary {id}", changes, ValueError, passed, allowed
    for id, result, kind, allowed in (
        ("ints", np.ones((3, 5), int), TypeError, "bool"),
        ("floats", np.ones(5), TypeError, "bool"),
        ("None", None, TypeError, "bool"),
        ("text", "yes", TypeError, "bool"),
        ("another shape", np.ones((7, 7), bool), ValueError, "broadcast"),
        ("more axes", np.ones((2, 3, 5), bool), ValueError, "broadcast"),
    ):
        changes = {"mask_mod": lambda b, h, i, j, result=result: result}
        yield f"mask_mod returns {id}", changes, kind, "mask_mod", allowed


def read_only(*shape: int) -> np.ndarray:
    array = full(*shape)
    array.flags.writeable = False
    return array


def repeated(*shape: int) -> np.ndarray:
    """A writeable array whose batch elements are one in memory."""
    element = full(*shape[1:])
    return as_strided(element, shape, (0, *element.strides))


READ = "while inputs are still read"
OUT, LSE = "float32 (2, 3, 4, 6)", "float32 (2, 4, 3)"


def forward_rows() -> Iterator[Row]:
    names = ("fast", None, 3, ["flash"], b"flash")
    yield from of("implementation", ValueError, "implementation = ", "'flash', 'tiled'", *names)
    yield from of("return_lse", TypeError, "return_lse", BOOL, 1, None, "no", np.array([1, 2]))
    changes, passed = {"return_lse": False}, "out is a tuple without return_lse=True"
    yield "out tuple", changes, TypeError, passed, "one array"
    out, lse, half = full(2, 3, 4, 6), full(2, 4, 3), np.float16
    for id, given_out, kind, passed, allowed in (
        ("array with lse", out, TypeError, "out has type ", "(out, lse)"),
        ("list", [out, lse], TypeError, "out has type list", "(out, lse)"),
        ("of 3", (out, lse, lse), TypeError, "out has type tuple", "(out, lse)"),
        ("without lse", (out, None), TypeError, "out has type tuple", "(out, lse)"),
        ("only lse", (None, lse), TypeError, "out has type tuple", "(out, lse)"),
        ("numbers", (1.0, 2.0), TypeError, "out has type builtins.float", ARRAYS),
        ("shape", (full(2, 3, 4, 8), lse), ValueError, "out is float32 (2, 3, 4, 8)", OUT),
        ("dtype", (full(2, 3, 4, 6, dtype=half), lse), TypeError, "out is float16", OUT),
        ("stepped", (full(2, 3, 4, 12)[..., ::2], lse), ValueError, "out has", "contiguous"),
        ("repeats", (repeated(2, 3, 4, 6), lse), ValueError, "one item in memory", "own place"),
        ("lse's shape", (out, full(2, 3, 4)), ValueError, "lse is float32 (2, 3, 4)", LSE),
        ("lse's dtype", (out, full(2, 4, 3, dtype=float)), TypeError, "lse is float64", LSE),
        ("lse stepped", (out, full(2, 4, 6)[..., ::2]), ValueError, "lse has", "contiguous"),
    ):
        yield f"out {id}", {"out": given_out}, kind, passed, allowed
    yield from overlap_rows()


def overlap_rows() -> Iterator[Row]:
    """Results in the memory of an input, or of another result: made when all is in its place."""

    def in_q(call: Call) -> None:
        call.arrays["v"] = call.arrays["k"]
        call.options["out"] = call.arrays["q"][:, ::-1], call.options["out"][1]

    def in_k(call: Call) -> None:
        out = call.arrays["k"].ravel()[16:].reshape(2, 3, 4, 6)
        call.options["out"] = out, call.options["out"][1]

    def lse_in_v(call: Call) -> None:
        lse = call.arrays["v"].ravel()[96:].reshape(2, 4, 3)
        call.options["out"] = call.options["out"][0], lse

    def in_each_other(call: Call) -> None:
        memory = call.arrays["q"].copy().ravel()
        call.options["out"] = memory[:144].reshape(2, 3, 4, 6), memory[143:167].reshape(2, 4, 3)

    for passed, change, allowed in (
        ("out overlaps q", in_q, READ),
        ("out overlaps k", in_k, READ),
        ("lse overlaps v", lse_in_v, READ),
        ("out overlaps lse", in_each_other, "both are written"),
    ):
        yield passed, {PLACED: change}, ValueError, passed, allowed


def numpy_forward_rows() -> Iterator[Row]:
    names = np.array(["flash", "tiled"])
    yield from of("implementation", ValueError, "implementation = ", "'flash', 'tiled'", names)
    out, lse = full(2, 3, 4, 6), full(2, 4, 3)
    for id, given_out, kind, passed, allowed in (
        ("read-only", (read_only(2, 3, 4, 6), lse), ValueError, "out is read-only", "written"),
        ("lse read-only", (out, read_only(2, 4, 3)), ValueError, "lse is read-only", "written"),
        ("swapped", (out.astype(">f4"), lse), TypeError, "foreign byte order", OUT),
        ("masked", (np.ma.array(out), lse), TypeError, "out has type numpy.ma.", ARRAYS),
    ):
        yield f"out {id}", {"out": given_out}, kind, passed, allowed
    for id, result, kind, allowed in (
        ("bools", np.ones(5, bool), TypeError, "floats"),
        ("text", "yes", TypeError, "floats"),
        ("another shape", np.ones((7, 7)), ValueError, "broadcast"),
    ):
        changes = {"score_mod": lambda score, b, h, i, j, result=result: result}
        yield f"score_mod returns {id}", changes, kind, "score_mod", allowed


def some_grads(**fields: Any) -> AttentionGrads:
    return AttentionGrads(None, None, None, None, None)._replace(**fields)


def backward_rows() -> Iterator[Row]:
    yield from array_rows(NO_FLOATS, "dout", "out", "lse")
    for name, shape in (("dout", (2, 3, 4, 6)), ("out", (2, 3, 4, 6)), ("lse", (2, 4, 3))):
        half, shorter = {name: lambda a: a.astype(np.float16)}, {name: lambda a: a[:, :-1]}
        yield f"{name} half", half, TypeError, f"{name} has dtype float16", "float32"
        yield f"{name} shape", shorter, ValueError, f"{name} has shape", str(shape)
        yield f"{name} axes", {name: lambda a: a[0]}, ValueError, f"{name} has shape", str(shape)
    yield from of("dlse", TypeError, "dlse has dtype float64", "float32", np.zeros((2, 4, 3)))
    yield from of("dlse", TypeError, "dlse has type builtins.float", ARRAYS, 0.0)
    yield from shaped("dlse", "(B, H, Sq), here (2, 4, 3)", (2, 3, 4), (2, 4), (2, 4, 3, 1))
    plain = ([], (None,) * 5, {}, full(2, 3, 4, 8))
    yield from of("grads", TypeError, "grads has type ", "AttentionGrads", *plain)
    yield from of("accumulate", TypeError, "accumulate", BOOL, 1, "yes", None, np.array([1, 2]))
    yield from of("deterministic", TypeError, "deterministic", BOOL, 1, "yes", None)
    alone = {"grads": None, "accumulate": True}
    yield "accumulate alone", alone, ValueError, "accumulate=True without grads", "what is in grads"
    dq, dk, dv = "float32 (2, 3, 4, 8)", "float32 (2, 5, 2, 8)", "float32 (2, 5, 2, 6)"
    for id, grads, kind, passed, allowed in (
        ("number", {"dq": 1.0}, TypeError, "grads.dq has type builtins.float", ARRAYS),
        ("shape", {"dk": full(2, 3, 4, 8)}, ValueError, f"dk is {dq}", dk),
        ("dtype", {"dv": full(2, 5, 2, 6, dtype=float)}, TypeError, "dv is float64", dv),
        ("stepped", {"dv": full(2, 5, 2, 12)[..., ::2]}, ValueError, "dv has", "contiguous"),
        ("repeat", {"dq": repeated(2, 3, 4, 8)}, ValueError, "one item in memory", "own place"),
        ("dbias", {"dbias": full(4, 3, 5)}, ValueError, "grads.dbias was given", "no bias"),
        ("dsinks", {"dsinks": full(4)}, ValueError, "grads.dsinks was given", "no sinks"),
    ):
        yield f"grads {id}", {"grads": some_grads(**grads)}, kind, passed, allowed
    changes = {"bias": BIAS, "grads": some_grads(dbias=full(2, 4, 3, 5))}
    yield "dbias shape", changes, ValueError, "dbias is float32 (2, 4, 3, 5)", "float32 (4, 3, 5)"


def numpy_backward_rows() -> Iterator[Row]:
    """Calls refused after the check that a GPU has a kernel, and NumPy's dtypes."""

    def in_q(call: Call) -> None:
        call.options["grads"] = some_grads(dq=call.arrays["q"])

    def in_dout(call: Call) -> None:
        dv = call.arrays["dout"].ravel()[24:].reshape(2, 5, 2, 6)
        call.options["grads"] = some_grads(dv=dv)

    def in_each_other(call: Call) -> None:
        memory = full(2, 5, 2, 13)
        call.options["grads"] = some_grads(dk=memory[..., :8], dv=memory[..., 7:])

    for passed, change, allowed in (
        ("grads.dq overlaps q", in_q, READ),
        ("grads.dv overlaps dout", in_dout, READ),
        ("grads.dk overlaps grads.dv", in_each_other, "both are written"),
    ):
        yield passed, {PLACED: change}, ValueError, passed, allowed
    swapped, fixed = full(2, 3, 4, 8, dtype=">f4"), read_only(2, 3, 4, 8)
    yield (
        "dq swapped",
        {"grads": some_grads(dq=swapped)},
        TypeError,
        "foreign byte order",
        "float32",
    )
    yield (
        "dq fixed",
        {"grads": some_grads(dq=fixed)},
        ValueError,
        "grads.dq is read-only",
        "written",
    )


def softmax_rows() -> Iterator[Row]:
    yield from array_rows(NO_FLOATS, "x")
    no_axes = {"x": lambda a: np.array(1, np.float32)}
    yield "x 0 axes", no_axes, ValueError, "x has no axes", "last axis"
    result = "float32 (2, 3, 8)"
    for id, out, kind, passed, allowed in (
        ("shape", full(2, 3, 7), ValueError, "out is float32 (2, 3, 7)", result),
        ("axes", full(6, 8), ValueError, "out is float32 (6, 8)", result),
        ("dtype", full(2, 3, 8, dtype=np.float16), TypeError, "out is float16 (2, 3, 8)", result),
        ("stepped", full(2, 3, 16)[..., ::2], ValueError, "out has strides", "contiguous"),
        ("repeats", repeated(2, 3, 8), ValueError, "one item in memory", "own place"),
        ("list", [1.0], TypeError, "out has type builtins.list", ARRAYS),
    ):
        yield f"out {id}", {"out": out}, kind, passed, allowed
    into = {PLACED: lambda call: call.options.update(out=call.arrays["x"])}
    yield "out is x", into, ValueError, "out overlaps x", "while inputs are still read"


def softmax_backward_rows() -> Iterator[Row]:
    yield from array_rows(NO_FLOATS, "dout", "out")
    half, shorter = {"dout": lambda a: a.astype(np.float16)}, {"dout": lambda a: a[:, :2]}
    yield "dtypes", half, TypeError, "dout has dtype float16", "out's dtype, here float32"
    yield "shapes", shorter, ValueError, "dout has shape (2, 2, 8)", "like out, here (2, 3, 8)"
    yield "grads", {"grads": full(2, 3, 7)}, ValueError, "grads is float32 (2, 3, 7)", "(2, 3, 8)"
    into = {PLACED: lambda call: call.options.update(grads=call.arrays["out"][:, ::-1])}
    yield "grads in out", into, ValueError, "grads overlaps out", "while inputs are still read"

"""Bad values of the options that forward and backward share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from support.bad_input.call import full
from support.bad_input.row import ARRAYS, BOOL, FLOATS, HUGE, INF, NAN, Row, of, shaped

from cupyattn import MaskMod

TABLE = np.ones((9, 2), np.float32)
MASK, BIAS = np.ones((4, 3, 5), bool), np.zeros((4, 3, 5), np.float32)
SCORES = "(B, H, queries, keys) = (2, 4, 3, 5)"
DROP = "at least 0 and below 1"


def option_rows() -> Iterator[Row]:
    """The options that forward and backward share."""
    yield from of("causal", TypeError, "causal", BOOL, 1, 0, None, "yes", [True])
    yield from of("causal", TypeError, "causal", BOOL, np.array(True), np.array([1, 2]))
    scales = ("1", True, 1j, [1.0], np.array(1.0))
    yield from of("softmax_scale", TypeError, "softmax_scale is a ", "real number", *scales)
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
    yield from of("seqused_k", TypeError, "seqused_k is a builtins.", ARRAYS, 3, [3, 5], (3, 5))
    yield from of("seqused_k", TypeError, "seqused_k has dtype", dtypes, *numbers)
    yield from shaped("seqused_k", "(B,), here (2,)", (3,), (2, 1), (), dtype=np.int64)
    yield from of("mask", TypeError, "mask has dtype", "bool", MASK.astype(int), BIAS)
    shapes = ((4, 3, 6), (3, 1, 1, 1), (1, 1, 4, 3, 5), (0,), (2,), (2, 4, 1, 3))
    yield from shaped("mask", SCORES, *shapes, dtype=bool)
    yield from of("mask", TypeError, "mask is a builtins.", ARRAYS, True, [[True]], "causal")
    yield from of("bias", TypeError, "bias has dtype", FLOATS, MASK, np.zeros(5), np.zeros(5, int))
    yield from shaped("bias", SCORES, *shapes)
    for name, array in (("bias", BIAS), ("alibi_slopes", full(4)), ("sinks", full(4))):
        apart = np.zeros((*array.shape, 6), np.uint8)[..., :4].view(np.float32)[..., 0]
        passed = f"{name} has strides"
        yield f"{name} ragged", {name: apart}, ValueError, passed, "whole numbers of items"
    yield from of("bias", TypeError, "bias is a builtins.", ARRAYS, 1.0, [0.0])
    yield from of("alibi_slopes", TypeError, "alibi_slopes has dtype", FLOATS, np.ones(4))
    yield from shaped("alibi_slopes", "(B, H)", (3,), (4, 2), (1, 4), (1,), (), (2, 4, 1))
    yield from of("softcap", TypeError, "softcap is a ", "real number", "50", True, np.ones(1))
    caps = (0, 0.0, -50.0, NAN, INF, HUGE)
    yield from of("softcap", ValueError, "softcap = ", "above 0", *caps)
    for cap, scale in ((1e-39, None), (5e-324, 0.01), (0.5, 1e38), (0.5, -1e38)):
        changes = {"softcap": cap, "softmax_scale": scale}
        passed = f"softcap = {cap} with softmax_scale = "
        yield f"softcap {cap} {scale}", changes, ValueError, passed, "1e+38 times softcap"
    yield from of("sinks", TypeError, "sinks has dtype", FLOATS, np.ones(4, int))
    yield from shaped("sinks", "(H,), here (4,)", (3,), (2, 4), (1,), ())
    yield from of("dropout_p", ValueError, "dropout_p = {} without a seed", "seed=", 0.25)
    yield from of("dropout_p", ValueError, "dropout_p = ", DROP, 1.0, 1, -0.1, 50, NAN, INF, HUGE)
    yield from of("dropout_p", TypeError, "dropout_p is a ", "real number", "0.1", True, None, [0])
    yield from of("seed", TypeError, "seed is ", "integer", 1.0, True, "1", (1,), np.array(1))
    yield from of("seed", ValueError, "seed = {}", "0 to 2**64 - 1", -1, 2**64, np.int8(-1))
    for id, bad in {"list": [TABLE] * 2, "array": TABLE, "1": (TABLE,), "3": (TABLE,) * 3}.items():
        yield f"rotary {id}", {"rotary": bad}, TypeError, "rotary is a", "tuple (cos, sin)"
    for id, bad, kind, passed, allowed in (
        ("numbers", (1, 2), TypeError, "cos is a builtins.int", ARRAYS),
        ("half", (TABLE, None), TypeError, "rotary is a", "(cos, sin)"),
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
    yield from of("score_mod", TypeError, "score_mod is a ", call, 3, "score", [abs], masks)
    call = "mask_mod(b, h, q_idx, k_idx)"
    yield from of("mask_mod", TypeError, "mask_mod is a ", call, 3, "causal", [abs])
    for id, bad, kind, passed, allowed in (
        ("list", [1.0], TypeError, "mask_mod's t is a builtins.list", ARRAYS),
        ("dtype", full(3).astype(complex), TypeError, "mask_mod's t has dtype", "float16"),
        ("axes", full(1, 1, 1, 1, 1), ValueError, "mask_mod's t has 5 axes", "at most 4"),
    ):
        changes = {"mask_mod": MaskMod("t[h] > 0", python=lambda *_, t: True, t=bad)}
        yield f"mask_mod of {id}", changes, kind, passed, allowed
    yield from of("workspace", TypeError, "workspace is a ", ARRAYS, 1024, [1], "w")


def numpy_option_rows() -> Iterator[Row]:
    """Options whose values are looked at (on a GPU that would synchronise), and NumPy's dtypes."""
    used, offset = np.array([-1, 5]), np.array([0, 7])
    yield "seqused_k -1", {"seqused_k": used}, ValueError, "from -1 to 5", "Sk = 5"
    yield "seqused_k 6", {"seqused_k": used + 1}, ValueError, "from 0 to 6", "Sk = 5"
    yield "q_offset huge", {"q_offset": offset + 2**62}, ValueError, "q_offset", str(2**60)
    yield from of("mask", TypeError, "mask is a numpy.ma.", ARRAYS, np.ma.array(MASK))
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

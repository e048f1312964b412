"""Bad input: the right exception, what was passed, what is allowed, how to fix it; out untouched.

A row of the tables names a change to a valid call, the exception, and what the first part of its
message (what was passed) and the middle (what is allowed) have to say. On a GPU the same rows run
on CuPy arrays, but for those that only NumPy has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices import GpuArrays
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.lib.stride_tricks import as_strided
from strategies import attention_problems

import cupyattn
from cupyattn import AttentionGrads

FAULTS = (TypeError, ValueError, NotImplementedError)
SENTINEL = 77.0
HUGE = 10**400  # an int that no float holds
NAN, INF = float("nan"), float("inf")
ARRAYS = "numpy.ndarray, cupy.ndarray"
FLOATS = "float16, float32, bfloat16"
BOOL = "True or False"

PLACED = "when placed"  # a change of the whole call, made where it is to run

Row = tuple[str, dict[str, Any], type[Exception], str, str]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def full(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.full(shape, SENTINEL, dtype)


def read_only(*shape: int) -> np.ndarray:
    array = full(*shape)
    array.flags.writeable = False
    return array


def repeated(*shape: int) -> np.ndarray:
    """A writeable array whose batch elements are one in memory."""
    element = full(*shape[1:])
    return as_strided(element, shape, (0, *element.strides))


def in_ragged_rows(a: np.ndarray) -> np.ndarray:
    """The same shape, in rows of a number of bytes that is no whole number of items."""
    rows = np.zeros((*a.shape[:-1], a.shape[-1] * a.itemsize + a.itemsize // 2), np.uint8)
    return np.ndarray(a.shape, a.dtype, rows, strides=(*rows.strides[:-1], a.itemsize))


class Call:
    """A valid call: its arrays by name, and its options."""

    def __init__(self, function: Callable[..., Any], arrays: dict[str, Any], **options: Any):
        self.function = function
        self.arrays = arrays
        self.options = options

    def change(self, changes: dict[str, Any]) -> None:
        """Arrays by functions of them, options to values."""
        for name, change in changes.items():
            if name in self.arrays:
                self.arrays[name] = change(self.arrays[name])
            else:
                self.options[name] = change

    def place(self, library: str) -> None:
        """Move every array, with its strides, to where the call is to run."""
        if library == "cupy":
            self.arrays = {name: _moved(array) for name, array in self.arrays.items()}
            self.options = {name: _moved(option) for name, option in self.options.items()}

    def contents(self) -> list[bytes]:
        return [_bytes(array) for array in _arrays_in((self.arrays, self.options))]

    def run(self) -> Any:
        return self.function(*self.arrays.values(), **self.options)

    def refused(self) -> Exception:
        """Run it: it has to fail in the documented way and to leave all memory as it was."""
        before = self.contents()
        with pytest.raises(FAULTS) as failure:
            self.run()
        assert self.contents() == before, "a call that failed has written"
        assert_three_parts(failure.value)
        return failure.value


def assert_three_parts(failure: Exception) -> None:
    assert type(failure) in FAULTS, f"not one of ours: {failure!r}"
    parts = str(failure).split("; ")
    assert len(parts) >= 3, f"not three parts: {failure!r}"
    assert all(parts), failure


def _moved(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return GpuArrays().put(value)
    if isinstance(value, AttentionGrads):
        return AttentionGrads(*map(_moved, value))
    return tuple(map(_moved, value)) if type(value) is tuple else value


def _arrays_in(value: Any) -> Iterator[Any]:
    if isinstance(value, np.ndarray) or type(value).__module__.startswith("cupy."):
        yield value
    elif isinstance(value, dict):
        yield from _arrays_in(tuple(value.values()))
    elif isinstance(value, tuple):
        for item in value:
            yield from _arrays_in(item)


def _bytes(array: Any) -> bytes:
    return (array if isinstance(array, np.ndarray) else GpuArrays().get(array)).tobytes()


def forward() -> Call:
    """B = 2, Sq = 3, Sk = 5, H = 4, G = 2, D = 8, Dv = 6."""
    arrays = {"q": normal(2, 3, 4, 8), "k": normal(2, 5, 2, 8), "v": normal(2, 5, 2, 6)}
    out = (full(2, 3, 4, 6), full(2, 4, 3))
    return Call(cupyattn.attention, arrays, return_lse=True, out=out, implementation="tiled")


def backward() -> Call:
    arrays = {"dout": normal(2, 3, 4, 6), **forward().arrays}
    arrays |= {"out": normal(2, 3, 4, 6), "lse": normal(2, 4, 3)}
    grads = AttentionGrads(full(2, 3, 4, 8), full(2, 5, 2, 8), full(2, 5, 2, 6), None, None)
    return Call(cupyattn.attention_backward, arrays, grads=grads, implementation="naive")


def softmax() -> Call:
    return Call(cupyattn.softmax, {"x": normal(2, 3, 8)}, out=full(2, 3, 8))


def softmax_backward() -> Call:
    arrays = {"dout": normal(2, 3, 8), "out": normal(2, 3, 8)}
    return Call(cupyattn.softmax_backward, arrays, dx=full(2, 3, 8))


# What no input of floats may be, whichever function it is of.
NO_FLOATS: dict[str, tuple[Callable[[np.ndarray], Any], type[Exception], str, str]] = {
    "int32": (lambda a: a.astype(np.int32), TypeError, "has dtype int32", "float32"),
    "bool": (lambda a: a > 0, TypeError, "has dtype bool", "float32"),
    "float64": (lambda a: a.astype(np.float64), TypeError, "has dtype float64", "float32"),
    "complex": (lambda a: a.astype(np.complex64), TypeError, "has dtype complex64", "float32"),
    "reversed": (lambda a: a[..., ::-1], ValueError, "has strides", "axis must be contiguous"),
    "stepped": (lambda a: a.repeat(2, -1)[..., ::2], ValueError, "has strides", "contiguous"),
    "ragged rows": (in_ragged_rows, ValueError, "has strides", "whole numbers of items"),
    "number": (lambda a: 3.0, TypeError, "is a builtins.float", ARRAYS),
    "list": (lambda a: a.tolist(), TypeError, "is a builtins.list", ARRAYS),
    "text": (lambda a: "q", TypeError, "is a builtins.str", ARRAYS),
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
    "masked": (np.ma.array, TypeError, "is a numpy.ma.MaskedArray", ARRAYS),
    "scalar": (lambda a: a.flat[0], TypeError, "is a numpy.float32", ARRAYS),
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
    for dim in (0, 257):
        change = {
            "q": lambda a, dim=dim: normal(2, 3, 4, dim),
            "k": lambda a, dim=dim: normal(2, 5, 2, dim),
        }
        yield f"D = {dim}", change, ValueError, f"D = {dim}", "1 to 256"
        change = {"v": lambda a, dim=dim: normal(2, 5, 2, dim)}
        yield f"Dv = {dim}", change, ValueError, f"Dv = {dim}", "1 to 256"


def of(name: str, kind: type[Exception], passed: str, allowed: str, *values: Any) -> Iterator[Row]:
    """One row for each bad value of an option; {} in `passed` stands for the value."""
    for value in values:
        id = f"array {value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)
        yield f"{name} {id[:30]}", {name: value}, kind, passed.replace("{}", str(value)), allowed


def shaped(name: str, allowed: str, *shapes: tuple[int, ...], dtype: Any = "f4") -> Iterator[Row]:
    """One row for each bad shape of an option that is an array."""
    for shape in shapes:
        value = np.ones(shape, dtype)
        yield f"{name} {shape}", {name: value}, ValueError, f"{name} has shape {shape}", allowed


TABLE = np.ones((9, 2), np.float32)
MASK, BIAS = np.ones((4, 3, 5), bool), np.zeros((4, 3, 5), np.float32)
SCORES = "(B, H, Sq, Sk) = (2, 4, 3, 5)"
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
    ):
        yield f"rotary {id}", {"rotary": bad}, kind, passed, allowed
    yield from of("score_mod", NotImplementedError, "score_mod", "CPU path", abs, 3)
    call = "mask_mod(b, h, i, j)"
    yield from of("mask_mod", TypeError, "mask_mod is a ", call, 3, "causal", [abs])
    yield from of("workspace", TypeError, "workspace is a ", ARRAYS, 1024, [1], "w")


def numpy_option_rows() -> Iterator[Row]:
    """Options whose values are looked at (on a GPU that would synchronise), and NumPy's dtypes."""
    used, offset = np.array([-1, 5]), np.array([0, 7])
    yield "seqused_k -1", {"seqused_k": used}, ValueError, "from -1 to 5", "Sk = 5"
    yield "seqused_k 6", {"seqused_k": used + 1}, ValueError, "from 0 to 6", "Sk = 5"
    yield "q_offset huge", {"q_offset": offset + 2**62}, ValueError, "q_offset", str(2**60)
    yield from of("mask", TypeError, "mask is a numpy.ma.", ARRAYS, np.ma.array(MASK))
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


OUT, LSE = "float32 (2, 3, 4, 6)", "float32 (2, 4, 3)"


def forward_rows() -> Iterator[Row]:
    names = ("fast", None, 3, ["flash"], b"flash")
    yield from of("implementation", ValueError, "implementation = ", "'flash', 'tiled'", *names)
    yield from of("return_lse", TypeError, "return_lse", BOOL, 1, None, "no", np.array([1, 2]))
    yield "out tuple", {"return_lse": False}, TypeError, "out is a builtins.tuple", ARRAYS
    out, lse, half = full(2, 3, 4, 6), full(2, 4, 3), np.float16
    for id, given_out, kind, passed, allowed in (
        ("array with lse", out, TypeError, "out is a ", "(out, lse)"),
        ("list", [out, lse], TypeError, "out is a list", "(out, lse)"),
        ("of 3", (out, lse, lse), TypeError, "out is a tuple", "(out, lse)"),
        ("without lse", (out, None), TypeError, "out is a tuple", "(out, lse)"),
        ("only lse", (None, lse), TypeError, "out is a tuple", "(out, lse)"),
        ("numbers", (1.0, 2.0), TypeError, "out is a builtins.float", ARRAYS),
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

    for passed, change in (
        ("out overlaps q", in_q),
        ("out overlaps k", in_k),
        ("lse overlaps v", lse_in_v),
        ("out overlaps lse", in_each_other),
    ):
        yield passed, {PLACED: change}, ValueError, passed, "while inputs are still read"


def numpy_forward_rows() -> Iterator[Row]:
    names = np.array(["flash", "tiled"])
    yield from of("implementation", ValueError, "implementation = ", "'flash', 'tiled'", names)
    out, lse = full(2, 3, 4, 6), full(2, 4, 3)
    for id, given_out, kind, passed, allowed in (
        ("read-only", (read_only(2, 3, 4, 6), lse), ValueError, "out is read-only", "written"),
        ("lse read-only", (out, read_only(2, 4, 3)), ValueError, "lse is read-only", "written"),
        ("swapped", (out.astype(">f4"), lse), TypeError, "foreign byte order", OUT),
        ("masked", (np.ma.array(out), lse), TypeError, "out is a numpy.ma.", ARRAYS),
    ):
        yield f"out {id}", {"out": given_out}, kind, passed, allowed


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
    yield from of("dlse", TypeError, "dlse is a builtins.float", ARRAYS, 0.0)
    yield from shaped("dlse", "(B, H, Sq), here (2, 4, 3)", (2, 3, 4), (2, 4), (2, 4, 3, 1))
    plain = ([], (None,) * 5, {}, full(2, 3, 4, 8))
    yield from of("grads", TypeError, "grads is a ", "AttentionGrads", *plain)
    yield from of("accumulate", TypeError, "accumulate", BOOL, 1, "yes", None, np.array([1, 2]))
    yield from of("deterministic", TypeError, "deterministic", BOOL, 1, "yes", None)
    alone = {"grads": None, "accumulate": True}
    yield "accumulate alone", alone, ValueError, "accumulate=True without grads", "arrays of grads"
    dq, dk, dv = "float32 (2, 3, 4, 8)", "float32 (2, 5, 2, 8)", "float32 (2, 5, 2, 6)"
    for id, grads, kind, passed, allowed in (
        ("number", {"dq": 1.0}, TypeError, "dq is a builtins.float", ARRAYS),
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
    """What comes after the check that a GPU has a kernel, and NumPy's dtypes."""

    def in_q(call: Call) -> None:
        call.options["grads"] = some_grads(dq=call.arrays["q"])

    def in_dout(call: Call) -> None:
        dv = call.arrays["dout"].ravel()[24:].reshape(2, 5, 2, 6)
        call.options["grads"] = some_grads(dv=dv)

    def in_each_other(call: Call) -> None:
        memory = full(2, 5, 2, 13)
        call.options["grads"] = some_grads(dk=memory[..., :8], dv=memory[..., 7:])

    for passed, change in (
        ("dq overlaps q", in_q),
        ("dv overlaps dout", in_dout),
        ("dk overlaps dv", in_each_other),
    ):
        yield passed, {PLACED: change}, ValueError, passed, "while inputs are still read"
    swapped, fixed = full(2, 3, 4, 8, dtype=">f4"), read_only(2, 3, 4, 8)
    yield (
        "dq swapped",
        {"grads": some_grads(dq=swapped)},
        TypeError,
        "foreign byte order",
        "float32",
    )
    yield "dq fixed", {"grads": some_grads(dq=fixed)}, ValueError, "dq is read-only", "written"


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
        ("list", [1.0], TypeError, "out is a builtins.list", ARRAYS),
    ):
        yield f"out {id}", {"out": out}, kind, passed, allowed
    into = {PLACED: lambda call: call.options.update(out=call.arrays["x"])}
    yield "out is x", into, ValueError, "out overlaps x", "while inputs are still read"


def softmax_backward_rows() -> Iterator[Row]:
    yield from array_rows(NO_FLOATS, "dout", "out")
    half, shorter = {"out": lambda a: a.astype(np.float16)}, {"out": lambda a: a[:, :2]}
    yield "dtypes", half, TypeError, "out has float16", "share one dtype"
    yield "shapes", shorter, ValueError, "out has shape (2, 2, 8)", "(2, 3, 8)"
    yield "dx", {"dx": full(2, 3, 7)}, ValueError, "dx is float32 (2, 3, 7)", "(2, 3, 8)"
    into = {PLACED: lambda call: call.options.update(dx=call.arrays["out"][:, ::-1])}
    yield "dx in out", into, ValueError, "dx overlaps out", "while inputs are still read"


def params(make: Callable[[], Call], rows: Iterator[Row], numpy_rows: Any = ()) -> Iterator[Any]:
    """Every row on NumPy arrays; the first ones on CuPy arrays too."""
    for library, id, *row in (
        *((library, *row) for row in rows for library in ("numpy", "cupy")),
        *(("numpy", *row) for row in numpy_rows),
    ):
        marks = (pytest.mark.gpu,) if library == "cupy" else ()
        yield pytest.param(library, make, *row, id=f"{library} {make.__name__} {id}", marks=marks)


@pytest.mark.parametrize(
    ("library", "make", "changes", "kind", "passed", "allowed"),
    [
        *params(forward, array_rows(NO_FLOATS, "q", "k", "v"), array_rows(ONLY_IN_NUMPY, "q", "v")),
        *params(forward, shape_rows()),
        *params(forward, option_rows(), numpy_option_rows()),
        *params(forward, forward_rows(), numpy_forward_rows()),
        *params(backward, array_rows(NO_FLOATS, "q", "k", "v"), array_rows(ONLY_IN_NUMPY, "k")),
        *params(backward, shape_rows()),
        *params(backward, option_rows(), numpy_option_rows()),
        *params(backward, backward_rows(), numpy_backward_rows()),
        *params(softmax, softmax_rows(), array_rows(ONLY_IN_NUMPY, "x")),
        *params(softmax_backward, softmax_backward_rows(), array_rows(ONLY_IN_NUMPY, "dout")),
    ],
)
def test_bad_input(library, make, changes, kind, passed, allowed):
    call = make()
    call.change({name: change for name, change in changes.items() if name != PLACED})
    call.place(library)
    changes.get(PLACED, lambda call: None)(call)
    failure = call.refused()
    assert type(failure) is kind, repr(failure)
    said, *middle, _ = str(failure).split("; ")
    assert passed in said
    assert allowed in "; ".join(middle)


@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize(
    ("valid", "equal_but_wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}),
        ({"window_size": (1, 0)}, {"window_size": (True, False)}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"seed": 1}, {"seed": 1.0}),
        ({"seed": 1}, {"seed": True}),
        ({"q_offset": 1}, {"q_offset": True}),
    ],
    ids=str,
)
def test_what_was_called_before_makes_no_difference(make, valid, equal_but_wrong):
    """1 == 1.0 == True, also as keys of the caches of checked calls."""
    first, then = make(), make()
    first.change(valid)
    first.run()
    then.change(equal_but_wrong)
    assert type(then.refused()) is TypeError


def test_rotary_tables_reach_every_key_even_without_queries():
    arrays = {"q": normal(2, 0, 4, 8), "k": normal(2, 5, 2, 8), "v": normal(2, 5, 2, 6)}
    call = Call(cupyattn.attention, arrays, rotary=(TABLE[:4], TABLE[:4]))
    assert type(call.refused()) is ValueError


@pytest.mark.parametrize("make", [forward, backward])
def test_an_exception_in_mask_mod_is_the_callers(make):
    def mask_mod(b, h, i, j):
        raise KeyError("mine")

    call = make()
    call.change({"mask_mod": mask_mod})
    before = call.contents()
    with pytest.raises(KeyError, match="mine"):
        call.run()
    assert call.contents() == before


@pytest.mark.gpu
@pytest.mark.parametrize("make", [forward, backward, softmax, softmax_backward])
def test_numpy_and_cupy_arrays_mixed(make):
    """Any one array on the other side, outputs too."""
    names = [*make().arrays, *({"out", "dx", "grads"} & set(make().options))]
    for name in names:
        call, other = make(), make()
        call.place("cupy")
        source = other.arrays if name in other.arrays else other.options
        (call.arrays if name in call.arrays else call.options)[name] = source[name]
        failure = call.refused()
        assert type(failure) is TypeError
        assert "all arrays of a call are NumPy, or all are CuPy" in str(failure)
    for option, value in (("mask", MASK), ("rotary", (TABLE, TABLE)), ("workspace", TABLE)):
        if make in (forward, backward):
            call = make()
            call.place("cupy")
            call.change({option: value})
            assert "numpy" in str(call.refused()).split("; ")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [forward, backward, softmax, softmax_backward])
def test_arrays_on_two_devices(make):
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    call = make()
    call.place("cupy")
    first = next(iter(call.arrays))
    with cupy.cuda.Device(1):
        call.arrays[first] = cupy.zeros(call.arrays[first].shape, np.float32)
    failure = call.refused()
    assert type(failure) is ValueError
    assert f"{first} on device 1" in str(failure)


# Values that are wrong whatever the rest of a call is.
WRONG_OPTIONS: dict[str, tuple[Any, ...]] = {
    "causal": (1, None, "yes", 1.0, np.array([1, 2])),
    "softmax_scale": ("1", True, 1j, NAN, INF, HUGE, [1.0], np.bool_(True), ml_dtypes.bfloat16(1)),
    "window_size": (3, [1, 0], (1,), (1.0, 0), (True, None), (-1, 0), (None, np.int8(-1)), {1: 2}),
    "q_offset": (True, 1.5, "3", [0], np.array(0), 2**60 + 1, np.zeros((7, 2), int), np.bool_(1)),
    "seqused_k": (3, [3], np.ones(1), np.ones((2, 2), int), np.full(1, -1)),
    "mask": (True, np.ones((1,) * 5, bool), np.ones(1, int), np.ones(1000, bool)),
    "bias": (1.0, np.ones((1,) * 5, np.float32), np.ones(1), np.ones(1000, np.float32)),
    "alibi_slopes": (0.5, np.ones((1, 1, 1), np.float32), np.ones(1000, np.float32)),
    "softcap": ("50", True, 0, -1.0, NAN, INF, HUGE, 1j, np.timedelta64(1, "s")),
    "sinks": (0.0, [0.0], np.ones((1, 1), np.float32), np.ones(1000, np.float32)),
    "dropout_p": (1.0, -0.1, NAN, "0.1", None, True, HUGE, np.float32(1)),
    "seed": (1.5, "1", True, -1, 2**64, [1], np.bool_(True), np.int8(-1), np.timedelta64(1, "s")),
    "rotary": ((), TABLE, (TABLE,), (None, None), (TABLE, None), (1, 2), (full(9, 999),) * 2),
    "score_mod": (abs, 1),
    "mask_mod": (3, "causal", lambda b, h, i, j: 1.0, lambda b, h, i, j: np.ones((1, 1, 1), bool)),
    "workspace": (1024, "w"),
}
OTHER_TYPES: dict[str, Callable[[np.ndarray], Any]] = {
    "None": lambda a: None,
    "list": lambda a: a.tolist(),
    "tuple": tuple,
    "number": lambda a: 1.0,
    "scalar": lambda a: np.float32(1),
    "dict": lambda a: {"a": a},
    "function": lambda a: lambda: a,
    "masked": np.ma.array,
    "memoryview": lambda a: memoryview(b"1234"),
    "int": lambda a: np.zeros(a.shape, int),
    "float64": lambda a: a.astype(np.float64),
    "complex": lambda a: a.astype(np.complex64),
    "object": lambda a: a.astype(object),
    "swapped": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "fewer axes": lambda a: np.zeros(a.shape[1:], a.dtype),
    "more axes": lambda a: a[None],
    "no axes": lambda a: np.zeros((), a.dtype),
    "no dim": lambda a: a[..., :0],
    "much dim": lambda a: np.zeros((*a.shape[:-1], 257), a.dtype),
    "matrix": lambda a: np.zeros((2, 2), a.dtype).view(np.matrix),
}


@st.composite
def wrong_calls(draw: st.DrawFn) -> tuple[Call, str]:
    """A random valid call, wrong in one way."""
    problem = draw(attention_problems(head_dims=((8, 8), (6, 4)), largest=7))
    q, k, v = problem.arrays()
    options = problem.options()
    out = np.full((problem.B, problem.Sq, problem.H, problem.Dv), SENTINEL, q.dtype)
    lse = full(problem.B, problem.H, problem.Sq)
    call = Call(cupyattn.attention, {"q": q, "k": k, "v": v}, **options)
    if draw(st.booleans()):
        dout, dlse = problem.gradients()
        arrays = {"dout": dout, **call.arrays, "out": out, "lse": lse}
        call = Call(cupyattn.attention_backward, arrays, **options, dlse=dlse)
    else:
        call.options |= {"out": (out, lse), "return_lse": True}

    kind = draw(st.sampled_from(("option", "type", "extent", "order")))
    name = draw(st.sampled_from(tuple(call.arrays)))
    array = call.arrays[name]
    if kind == "option":
        name = draw(st.sampled_from(tuple(WRONG_OPTIONS)))
        value = draw(st.sampled_from(WRONG_OPTIONS[name]))
        call.options[name] = value
        if name == "dropout_p":
            call.options["seed"] = 1
        # What mask_mod returns is seen only where there are scores.
        assume(name != "mask_mod" or not callable(value) or problem.Sq * problem.Sk)
        assume(name != "mask_mod" or options.keys().isdisjoint({"seqused_k", "window_size"}))
    elif kind == "type":
        assume(array.size)  # an array that is empty already may lose its last axis
        call.arrays[name] = OTHER_TYPES[draw(st.sampled_from(tuple(OTHER_TYPES)))](array)
    elif kind == "extent":
        # One more in an axis that another array has too.
        name = draw(st.sampled_from([name for name in call.arrays if name != "q"]))
        axis = draw(st.integers(0, {"v": 2}.get(name, call.arrays[name].ndim - 1)))
        shape = list(call.arrays[name].shape)
        shape[axis] += 1
        call.arrays[name] = np.zeros(shape, call.arrays[name].dtype)
    else:
        assume(array.size and array.shape[-1] > 1)
        call.arrays[name] = array[..., ::-1]
    return call, f"{kind} {name}"


@given(wrong_calls())
def test_no_wrong_call_passes_or_fails_in_another_way(drawn: tuple[Call, str]):
    call, _ = drawn
    call.refused()


ODDITIES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.fractions(),
    st.decimals(),
    st.lists(st.integers(-2, 9), max_size=3),
    st.tuples(st.one_of(st.none(), st.integers(), st.floats()), st.none()),
    st.tuples(hnp.from_dtype(np.dtype(np.int8)), hnp.from_dtype(np.dtype(np.uint16))),
    hnp.scalar_dtypes().flatmap(hnp.from_dtype),
    hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=2, max_side=5)),
    st.sampled_from((Fraction(1, 2), object(), Ellipsis, NotImplemented)),
)
OPTIONS = (*WRONG_OPTIONS, "implementation", "return_lse", "out")
BACKWARD_OPTIONS = (*WRONG_OPTIONS, "dlse", "deterministic", "grads", "accumulate")


@given(st.data())
def test_anything_at_all_as_an_option(data: st.DataObject):
    """Whatever it is, the call runs or says in three parts what is wrong with it."""
    call, names = data.draw(st.sampled_from(((forward, OPTIONS), (backward, BACKWARD_OPTIONS))))
    call = call()
    call.options[data.draw(st.sampled_from(names))] = data.draw(ODDITIES)
    call.options.setdefault("seed", 1)
    before = [array.tobytes() for array in call.arrays.values()]
    try:
        call.run()
    except Exception as failure:
        assert_three_parts(failure)
    assert [array.tobytes() for array in call.arrays.values()] == before

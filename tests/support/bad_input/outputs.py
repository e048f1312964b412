"""Bad arrays to write into, and bad values of the options that only one function has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from support.bad_input.arrays import NO_FLOATS, array_rows
from support.bad_input.call import Call, full
from support.bad_input.options import BIAS
from support.bad_input.row import ARRAYS, BOOL, PLACED, Row, of, shaped

from cupyattn import AttentionGrads


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
        ("masked", (np.ma.array(out), lse), TypeError, "out is a numpy.ma.", ARRAYS),
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
    yield from of("dlse", TypeError, "dlse is a builtins.float", ARRAYS, 0.0)
    yield from shaped("dlse", "(B, H, Sq), here (2, 4, 3)", (2, 3, 4), (2, 4), (2, 4, 3, 1))
    plain = ([], (None,) * 5, {}, full(2, 3, 4, 8))
    yield from of("grads", TypeError, "grads is a ", "AttentionGrads", *plain)
    yield from of("accumulate", TypeError, "accumulate", BOOL, 1, "yes", None, np.array([1, 2]))
    yield from of("deterministic", TypeError, "deterministic", BOOL, 1, "yes", None)
    alone = {"grads": None, "accumulate": True}
    yield "accumulate alone", alone, ValueError, "accumulate=True without grads", "what is in grads"
    dq, dk, dv = "float32 (2, 3, 4, 8)", "float32 (2, 5, 2, 8)", "float32 (2, 5, 2, 6)"
    for id, grads, kind, passed, allowed in (
        ("number", {"dq": 1.0}, TypeError, "grads.dq is a builtins.float", ARRAYS),
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
    yield "grads", {"grads": full(2, 3, 7)}, ValueError, "grads is float32 (2, 3, 7)", "(2, 3, 8)"
    into = {PLACED: lambda call: call.options.update(grads=call.arrays["out"][:, ::-1])}
    yield "grads in out", into, ValueError, "grads overlaps out", "while inputs are still read"

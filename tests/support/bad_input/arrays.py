"""What no array of floats may be, and q, k and v that do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from support.bad_input.call import normal
from support.bad_input.row import ARRAYS, Row


def in_ragged_rows(a: np.ndarray) -> np.ndarray:
    """The same shape, in rows of a number of bytes that is no whole number of items."""
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

"""Rows of x in int8, for products with int8 weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyattn.ops.linear.weight_formats import UNIT, require_rotation
from cupyattn.runtime import html
from cupyattn.runtime.arrays import (
    ALIGNMENT,
    Array,
    Layout,
    adopt,
    is_contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.checks import FLOATS
from cupyattn.runtime.errors import NotAnArray, error, shown, size_text
from cupyattn.runtime.outputs import float_dtype
from cupyattn.runtime.plan import Output
from cupyattn.runtime.records import Record, T, given_of

MOST_INNER = 133_000
"""Maximum of K of a product of int8 rows: sums of K products of codes up to 127 fit in int32."""


def row_pieces(shape: tuple[int, ...]) -> dict[str, Output]:
    """Return the arrays of quantised rows of a shape (..., K).

    Examples
    --------
    >>> row_pieces((5, 64))["scales"]
    Output(shape=(5,), dtype=dtype('float32'))
    """
    return {
        "codes": Output(shape, np.dtype(np.int8)),
        "scales": Output(shape[:-1], np.dtype(np.float32)),
    }


@dataclass(slots=True)
class _RowCodeArrays(Record[T]):
    codes: T
    scales: T


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class QuantizedRows(NotAnArray):
    """Rows in int8 with a scale each, for `linear` in the place of x.

    `quantize_rows`, `rms_norm` and `layer_norm` make them. Several products can share them.

    Parameters
    ----------
    codes : int8 array (..., K)
        In C order, from -127 to 127; K is a multiple of 32.
    scales : float32 array (...)
        In C order. Row m is ``codes[m] * scales[m]``, rotated if there is a rotation.
    rotation : {None, 64}
        64 if blocks of 64 neighbouring items are rotated, as `QuantizedWeight` documents. K is a
        multiple of it. Only a weight of the same rotation has products with the rows.
    dtype : dtype or str
        "float16", "bfloat16" or "float32": the dtype of the rows before, and of products.

    Attributes
    ----------
    shape : tuple of int
        (..., K).
    ndim : int
        The number of axes.
    nbytes : int
        Bytes of both arrays.

    Raises
    ------
    TypeError, ValueError
        For arrays that do not fit each other or are not in C order, codes that do not start at a
        multiple of 16 bytes, and a rotation or a dtype that is not allowed.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    >>> cupyattn.quantize_rows(x)
    <QuantizedRows (3, 64) of float32, 204 bytes>
    """

    NOT_AN_ARRAY = (
        "products take it: linear(rows, weight)",
        "take the arrays .codes and .scales, of which row m is codes[m] * scales[m]",
    )

    codes: Array
    scales: Array
    rotation: int | None = None
    dtype: Any = field(default="float16", kw_only=True)

    def __post_init__(self) -> None:
        arrays = _RowCodeArrays(self.codes, self.scales)
        operands = adopt(arrays)
        for name, array in given_of(arrays).items():
            object.__setattr__(self, name, array)
        layouts = layouts_of(_RowCodeArrays[Layout], operands.description)
        object.__setattr__(self, "rotation", _fitting_rotation(layouts, self.rotation))
        object.__setattr__(self, "dtype", _row_dtype(self.dtype))
        starts = starts_of(_RowCodeArrays[int], operands.description)
        for name, start, unit in (("codes", starts.codes, ALIGNMENT), ("scales", starts.scales, 4)):
            if start % unit:
                raise error(
                    ValueError,
                    f"{name} start {start % unit} bytes beyond a multiple of {unit}",
                    f"kernels load {unit} bytes at once",
                    f"pass an array of its own, for example {name}.copy()",
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., K)."""
        return tuple(self.codes.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.codes.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of both arrays."""
        return int(self.codes.nbytes + self.scales.nbytes)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        rotated = "" if self.rotation is None else f"rotated by {self.rotation}, "
        return f"<QuantizedRows {self.shape} of {self.dtype.name}, {rotated}{self.nbytes:,} bytes>"

    def _repr_html_(self) -> str:
        known = {
            "shape": str(self.shape),
            "rotation": str(self.rotation),
            "of": self.dtype.name,
            "size": size_text(self.nbytes),
        }
        return html.section("QuantizedRows", html.facts(known))

    @classmethod
    def _of(
        cls, codes: Array, scales: Array, rotation: int | None, dtype: np.dtype
    ) -> QuantizedRows:
        """Make rows of arrays that fit, unchecked."""
        made = object.__new__(cls)
        for name, value in zip(_FIELDS, (codes, scales, rotation, dtype), strict=True):
            object.__setattr__(made, name, value)
        return made


_FIELDS = ("codes", "scales", "rotation", "dtype")


def quantized_rows(
    codes: Array, scales: Array, rotation: int | None, dtype: np.dtype
) -> QuantizedRows:
    """Return the rows of arrays that fit, unchecked."""
    return QuantizedRows._of(codes, scales, rotation, dtype)


def require_rows_out(
    out: Any, shape: tuple[int, ...], rotation: int | None, dtype: np.dtype
) -> QuantizedRows:
    """Return the out of a call that makes rows, or raise if it is no such rows."""
    if not isinstance(out, QuantizedRows):
        raise error(
            TypeError,
            f"out is {shown(out)}",
            "it is QuantizedRows",
            "pass rows of an earlier call, or none",
        )
    if (out.shape, out.rotation, out.dtype) != (shape, rotation, dtype):
        raise error(
            ValueError,
            f"out is {out!r}",
            f"the result is {shape} of {dtype.name}, rotation = {rotation}",
            "pass such rows, or none",
        )
    return out


def require_row_length(shape: tuple[int, ...], rotation: int | None) -> None:
    """Raise ValueError unless rows of a shape (..., K) can be quantised."""
    if not shape or shape[-1] % UNIT or not shape[-1]:
        raise error(
            ValueError,
            f"rows of shape {shape}",
            f"their last axis, K, is a multiple of {UNIT}: a weight in int8 has such rows",
            "pad K with zeros, or keep the rows in their dtype",
        )
    require_rotation(rotation, shape[-1])


def require_row_format(quantize: Any, rotation: Any) -> int | None:
    """Return the rotation of a norm that quantises its result, or raise."""
    if not isinstance(quantize, str) or quantize != "int8":
        raise error(
            ValueError if quantize is None or isinstance(quantize, str) else TypeError,
            f"quantize = {shown(quantize)}" + (", with a rotation" if quantize is None else ""),
            'it is "int8" for QuantizedRows, or None without a rotation',
            'pass quantize="int8"',
        )
    return require_rotation(rotation)


def _fitting_rotation(layouts: _RowCodeArrays[Layout], rotation: Any) -> int | None:
    for name, given in (("codes", layouts.codes), ("scales", layouts.scales)):
        if given is None:
            raise error(TypeError, f"{name} is None", "rows have both", f"pass an array as {name}")
    shape = layouts.codes.shape
    rotation = require_rotation(rotation)
    require_row_length(shape, rotation)
    for name, piece in row_pieces(shape).items():
        layout = getattr(layouts, name)
        if piece != (layout.shape, layout.dtype) or not is_contiguous(layout):
            strides = "" if is_contiguous(layout) else f" with strides {layout.strides}"
            raise error(
                ValueError,
                f"{name} is {layout}{strides}",
                f"with codes of shape {shape} it is {piece.dtype} {piece.shape} in C order",
                f"pass such an array as {name}",
            )
    return rotation


def _row_dtype(given: Any) -> np.dtype:
    dtype = float_dtype(given)
    if dtype.name not in FLOATS:
        raise error(
            TypeError,
            f"dtype = {shown(given)}",
            f"rows are of {', '.join(FLOATS)}",
            "pass one of them",
        )
    return dtype

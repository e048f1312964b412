"""Weights of products in four or eight bits: the arrays that one is kept in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from cupyattn.ops.linear.weight_formats import (
    FORMATS,
    Blocks,
    pieces,
    require_blocks,
    require_format,
    rows_apart,
    rows_of_piece,
)
from cupyattn.runtime.arrays import ALIGNMENT, Array, Layout, is_contiguous
from cupyattn.runtime.by_name import adopt, layouts_of, starts_of
from cupyattn.runtime.errors import RefusalError, error, shown

_WORD = 4
"""Bytes: all arrays but codes start at a multiple of that, codes of `ALIGNMENT`."""


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class QuantizedWeight:
    r"""The weight of a product in four or eight bits, for `linear` in the place of w.

    `quantize` makes one, `dequantize` the numbers that it stands for; `models.load` reads them from
    files. It is immutable, but its arrays may be written.

    Parameters
    ----------
    format : {"nf4", "nf4_nested", "int4", "int8", "q4_1", "q4_k"}
        What codes q and scales stand for; see Notes.
    codes : array
        uint8 (N, K / 2), for "int8" int8 (N, K): a row for each column of a (K, N) weight.
    scales : array
        (N, K / block_size) in float32 for "nf4" and "int8"; (N, K / block_size, 2) in float16 for
        "int4" and "q4_1"; uint8 for "nf4_nested" (N, K / block_size), for "q4_k" with a last axis
        of 2.
    super_scales : array, optional
        Of "q4_k" float16 (N, K / 256, 2). Of "nf4_nested" float32, a pair for each 64 neighbouring
        blocks of all rows: (N K / block_size / 64, 2), rounded up. Both require it.
    scale_table : float32 array (256,), optional
        Of "nf4_nested", which requires it.
    block_size : int
        Neighbouring weights along K that share a scale: K is a multiple of it, and of 32.
    transposed : bool
        False: it stands for a w (K, N), whose blocks lie along its first axis. True: for its
        transpose (N, K).

    Attributes
    ----------
    shape : tuple of int
        (K, N), or (N, K) where transposed.
    ndim : int
        2.
    nbytes : int
        Of all its arrays.
    T : QuantizedWeight
        The transpose: the same arrays, the other way round.

    Raises
    ------
    TypeError, ValueError
        For a format that there is none of, arrays that do not fit it or each other, rows that do
        not lie one behind the other, codes that do not start at a multiple of 16 bytes, and others
        that do not at a multiple of 4.

    Notes
    -----
    A weight is, in float32 arithmetic and for a code q:

    - "nf4" (Dettmers et al., arXiv:2305.14314, appendix E; bitsandbytes' layout): codebook[q]
      absmax; the scale is the absmax, and an even k stands in the high nibble of byte k / 2.
    - "nf4_nested" (section 3 there, double quantisation): the same, of the absmax scale_table[s] a
      + o, which rounds twice, for the scale s and (a, o) of its blocks' pair. 4.14 bits a weight
      instead of 4.5. bitsandbytes' a are of 256 blocks, and stand here four times.
    - "int4": (q - zero) scale, of (scale, zero); an even k stands in the low nibble, as below.
    - "int8": q scale, for signed q.
    - "q4_1" (ggml's Q4_1): q scale + offset, of (scale, offset).
    - "q4_k" (ggml's Q4_K): q (d sc) - (dmin m), of (sc, m), which have 6 bits, and (d, dmin) of the
      256 weights around.

    Where N is the first axis, slices of it are views: ``weight[10:20]``. Of "nf4_nested" they begin
    where a pair of super_scales does.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> w = np.random.default_rng(0).standard_normal((64, 6), dtype=np.float32)
    >>> weight = cupyattn.quantize(w)
    >>> weight
    <QuantizedWeight nf4 (64, 6), blocks of 64, 216 bytes>
    >>> weight.T[2:4].shape
    (2, 64)
    """

    format: str
    codes: Array
    scales: Array
    super_scales: Array | None = None
    scale_table: Array | None = None
    block_size: int = field(kw_only=True)
    transposed: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _ARRAYS}
        operands = adopt(given)
        for name, array in operands.arrays.items():
            object.__setattr__(self, name, array)
        if isinstance(self.block_size, Integral):
            object.__setattr__(self, "block_size", int(self.block_size))
        if not isinstance(self.transposed, bool):
            raise error(
                TypeError,
                f"transposed = {shown(self.transposed)}",
                "it is True or False",
                "pass one of these",
            )
        layouts = layouts_of(operands.description)
        _require_fit(self, layouts)
        for name, start in starts_of(operands.description).items():
            unit = ALIGNMENT if name == "codes" else _WORD
            if start % unit:
                raise error(
                    ValueError,
                    f"{name} start {start % unit} bytes beyond a multiple of {unit}",
                    f"kernels load {unit} bytes of a row at once",
                    f"pass an array of its own, for example {name}.copy()",
                )

    @property
    def outer(self) -> int:
        """N: the rows of codes."""
        return int(self.codes.shape[0])

    @property
    def inner(self) -> int:
        """K: what a product adds up over, and blocks lie along."""
        return int(self.codes.shape[1]) * 8 // FORMATS[self.format].bits

    @property
    def blocks(self) -> Blocks:
        """Its format and the size of its blocks."""
        return Blocks(self.format, self.block_size)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N), or (N, K) where transposed."""
        return (self.outer, self.inner) if self.transposed else (self.inner, self.outer)

    @property
    def ndim(self) -> int:
        """Two."""
        return 2

    @property
    def arrays(self) -> dict[str, Array]:
        """Its arrays by their names, without those that it has not."""
        named = ((name, getattr(self, name)) for name in _ARRAYS)
        return {name: array for name, array in named if array is not None}

    @property
    def nbytes(self) -> int:
        """The bytes of all its arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def T(self) -> QuantizedWeight:  # noqa: N802 (as arrays have it)
        """The transpose: the same arrays."""
        return self._of([getattr(self, name) for name in _ARRAYS], not self.transposed)

    def __len__(self) -> int:
        return self.shape[0]

    __iter__ = None  # or a loop would ask for [0], [1] and so on, and end at the first refusal

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse: NumPy would take it for a sequence without items."""
        raise self._no_array()

    def __dlpack_device__(self) -> Any:
        """Refuse, where something else asks whether it is an array."""
        raise self._no_array()

    def _no_array(self) -> RefusalError:
        return error(
            RefusalError,
            f"got {self!r} as an array",
            "products take it: linear(x, weight)",
            "make numbers of it with dequantize(weight)",
        )

    def __getitem__(self, rows: slice) -> QuantizedWeight:
        """Return some rows of a weight (N, K), as views."""
        start, stop, step = self._bounds(rows)
        if not self.transposed or step != 1 or start >= stop:
            raise error(
                IndexError,
                f"got [{shown(rows)}] of a quantised weight {self.shape}"
                + ("" if self.transposed else ", whose blocks lie along that axis"),
                "what is sliced is N, where it is the first axis, at least one row, by step 1",
                "transpose a weight (K, N) first: weight.T[start:stop].T",
            )
        apart = rows_apart(self.blocks, self.inner)
        if start % apart:
            raise error(
                IndexError,
                f"got [{shown(rows)}] of {self!r}",
                f"its rows share super_scales: slices of it begin at multiples of {apart}",
                "begin at one, or slice what dequantize returns",
            )
        return self._of(
            [
                None if (array := getattr(self, name)) is None
                else rows_of_piece(self.blocks, name, array, self.inner, start, stop)
                for name in _ARRAYS
            ],
            True,
        )  # fmt: skip

    def __repr__(self) -> str:
        return (
            f"<QuantizedWeight {self.format} {self.shape}, blocks of {self.block_size}, "
            f"{self.nbytes:,} bytes>"
        )

    def _bounds(self, rows: Any) -> tuple[int, int, int]:
        return rows.indices(self.outer) if isinstance(rows, slice) else (0, 0, 0)

    def _of(self, arrays: Sequence[Array | None], transposed: bool) -> QuantizedWeight:
        """Return another of the same format without a check: a product asks for `T` every time."""
        made = object.__new__(QuantizedWeight)
        values = self.format, *arrays, self.block_size, transposed
        for name, value in zip(_FIELDS, values, strict=True):
            object.__setattr__(made, name, value)
        return made


_ARRAYS = ("codes", "scales", "super_scales", "scale_table")
_FIELDS = ("format", *_ARRAYS, "block_size", "transposed")


def empty(blocks: Blocks, outer: int, inner: int, xp: Any) -> QuantizedWeight:
    """Return a weight (N, K) of N = `outer` and K = `inner` that has yet to be filled."""
    arrays = {
        name: xp.empty(*piece)
        for name, piece in pieces(blocks.format, outer, inner, blocks.block_size).items()
    }
    return QuantizedWeight(blocks.format, **arrays, block_size=blocks.block_size, transposed=True)


def _require_fit(weight: QuantizedWeight, layouts: Mapping[str, Layout]) -> None:
    """Raise unless the arrays are those of the format."""
    form = require_format(weight.format)
    for name in ("codes", "scales"):
        if name not in layouts:
            raise error(
                TypeError, f"{name} is None", "every format has it", f"pass an array as {name}"
            )
    codes = layouts["codes"]
    outer = codes.shape[0] if len(codes.shape) == 2 else 0
    if not outer:
        raise error(
            ValueError,
            f"codes have shape {codes.shape}",
            "they are a row for each of N >= 1 columns of the weight, two axes",
            "pass an array (N, K / 2), or (N, K) of int8",
        )
    inner = codes.shape[1] * 8 // form.bits
    require_blocks(weight.format, weight.block_size, inner)
    expected = pieces(weight.format, outer, inner, weight.block_size)
    for name, layout in layouts.items():
        piece = expected.get(name)
        if piece != (layout.shape, layout.dtype) or not is_contiguous(layout):
            broken = "" if is_contiguous(layout) else f" with strides {layout.strides}"
            form_text = "none" if piece is None else f"{piece.dtype} {piece.shape} in C order"
            raise error(
                ValueError,
                f"{name} is {layout}{broken}",
                f"of {weight.format!r} with N = {outer}, K = {inner} and blocks of "
                f"{weight.block_size} it is {form_text}",
                f"pass such an array as {name}",
            )
    if missing := expected.keys() - layouts.keys():
        raise error(
            ValueError,
            f"no {', '.join(missing)}",
            f"{weight.format!r} has {', '.join(expected)}",
            "pass it as well",
        )

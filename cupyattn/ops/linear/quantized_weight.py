"""Weights of products in four or eight bits, and their arrays."""

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
from cupyattn.runtime.arrays import (
    ALIGNMENT,
    Array,
    Layout,
    adopt,
    is_contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.errors import RefusalError, error, shown
from cupyattn.runtime.records import Record, T, fields_of, given_of

_WORD = 4
"""Bytes: codes start at a multiple of `ALIGNMENT`, all other arrays at a multiple of this."""


@dataclass(slots=True)
class _WeightArrays(Record[T]):
    codes: T
    scales: T
    super_scales: T | None = None
    scale_table: T | None = None


WEIGHT_FIELDS = fields_of(_WeightArrays)
"""The names of a quantised weight's arrays."""


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class QuantizedWeight:
    r"""The weight of a product in four or eight bits, for `linear` in the place of w.

    `quantize` makes one, `dequantize` computes its numbers, and `models.load` reads such weights
    from files. It is immutable, but its arrays may be written.

    Parameters
    ----------
    format : {"nf4", "nf4_nested", "int4", "int8", "q4_1", "q4_k"}
        The meaning of codes q and scales; see Notes.
    codes : array
        uint8 (N, K / 2), for "int8" int8 (N, K): a row for each column of a (K, N) weight.
    scales : array
        (N, K / block_size) in float32 for "nf4" and "int8"; (N, K / block_size, 2) in float16 for
        "int4" and "q4_1"; uint8 for "nf4_nested" (N, K / block_size), for "q4_k" with a last axis
        of 2.
    super_scales : array, optional
        For "q4_k" float16 (N, K / 256, 2). For "nf4_nested" float32, a pair for each 64
        neighbouring blocks of all rows: (N K / block_size / 64, 2), rounded up. Both require it.
    scale_table : float32 array (256,), optional
        Required by "nf4_nested"; no other format has it.
    block_size : int
        Neighbouring weights along K that share a scale: K is a multiple of it, and of 32.
    transposed : bool
        False: the weight is a w (K, N), whose blocks lie along its first axis. True: it is the
        transpose (N, K).

    Attributes
    ----------
    shape : tuple of int
        (K, N), or (N, K) where transposed.
    ndim : int
        2.
    nbytes : int
        Bytes of all its arrays.
    T : QuantizedWeight
        The transpose, with the same arrays.

    Raises
    ------
    TypeError, ValueError
        For an unknown format, arrays that do not fit the format or each other, arrays that are not
        in C order, codes that do not start at a multiple of 16 bytes, and other arrays that do not
        start at a multiple of 4.

    Notes
    -----
    The number of a code q, in float32 arithmetic:

    - "nf4" (Dettmers et al., arXiv:2305.14314, appendix E; bitsandbytes' layout): codebook[q]
      absmax. The scale is the absmax. An even k is in the high nibble of byte k / 2.
    - "nf4_nested" (section 3 of that paper, double quantisation): codebook[q] absmax with absmax =
      scale_table[s] a + o, which rounds twice, for the scale s and the pair (a, o) of the block's
      group: 4.14 bits a weight instead of 4.5. bitsandbytes' groups have 256 blocks: each of its a
      is here four times.
    - "int4": (q - zero) scale, with scales (scale, zero). An even k is in the low nibble, as in the
      formats below.
    - "int8": q scale, for signed q.
    - "q4_1" (ggml's Q4_1): q scale + offset, with scales (scale, offset).
    - "q4_k" (ggml's Q4_K): q (d sc) - (dmin m), with scales (sc, m) of 6 bits each, and
      super_scales (d, dmin) for each 256 weights.

    If N is the first axis, slices of it are views: ``weight[10:20]``. Slices of "nf4_nested" begin
    at the first row of a pair of super_scales.

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
        arrays = _WeightArrays(self.codes, self.scales, self.super_scales, self.scale_table)
        operands = adopt(arrays)
        for name, array in given_of(arrays).items():
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
        _require_fit(self, given_of(layouts_of(_WeightArrays[Layout], operands.description)))
        starts = given_of(starts_of(_WeightArrays[int], operands.description))
        for name, start in starts.items():
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
        """N, the number of rows of codes."""
        return int(self.codes.shape[0])

    @property
    def inner(self) -> int:
        """K, the axis that a product sums over and that blocks lie along."""
        return int(self.codes.shape[1]) * 8 // FORMATS[self.format].bits

    @property
    def blocks(self) -> Blocks:
        """The format and the size of the blocks."""
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
        """The arrays by name, without absent ones."""
        named = ((name, getattr(self, name)) for name in WEIGHT_FIELDS)
        return {name: array for name, array in named if array is not None}

    @property
    def nbytes(self) -> int:
        """The bytes of all its arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def T(self) -> QuantizedWeight:  # noqa: N802 (as arrays have it)
        """The transpose: the same arrays."""
        return self._of([getattr(self, name) for name in WEIGHT_FIELDS], not self.transposed)

    def __len__(self) -> int:
        return self.shape[0]

    __iter__ = None  # otherwise a loop would try [0], [1], ... and end at the first error

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse: NumPy would treat the weight as a sequence without items."""
        raise self._no_array()

    def __dlpack_device__(self) -> Any:
        """Refuse to be taken as an array by another library."""
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
        views = {
            name: rows_of_piece(self.blocks, name, array, self.inner, start, stop)
            for name, array in self.arrays.items()
        }
        return self._of([views.get(name) for name in WEIGHT_FIELDS], True)

    def __repr__(self) -> str:
        return (
            f"<QuantizedWeight {self.format} {self.shape}, blocks of {self.block_size}, "
            f"{self.nbytes:,} bytes>"
        )

    def _bounds(self, rows: Any) -> tuple[int, int, int]:
        return rows.indices(self.outer) if isinstance(rows, slice) else (0, 0, 0)

    def _of(self, arrays: Sequence[Array | None], transposed: bool) -> QuantizedWeight:
        """Return a weight with other arrays, unchecked: products use `T` in every call."""
        made = object.__new__(QuantizedWeight)
        values = self.format, *arrays, self.block_size, transposed
        for name, value in zip(_FIELDS, values, strict=True):
            object.__setattr__(made, name, value)
        return made


_FIELDS = ("format", *WEIGHT_FIELDS, "block_size", "transposed")


def empty(blocks: Blocks, outer: int, inner: int, xp: Any) -> QuantizedWeight:
    """Return an uninitialised weight (N, K) with N = `outer` and K = `inner`."""
    arrays = {
        name: xp.empty(*piece)
        for name, piece in pieces(blocks.format, outer, inner, blocks.block_size).items()
    }
    return QuantizedWeight(blocks.format, **arrays, block_size=blocks.block_size, transposed=True)


def _require_fit(weight: QuantizedWeight, layouts: Mapping[str, Layout]) -> None:
    """Raise unless the arrays have the format's shapes and dtypes, in C order."""
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

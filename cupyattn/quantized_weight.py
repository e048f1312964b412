"""Weights of products in four or eight bits: their formats, and the arrays they are kept in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import (
    ALIGNMENT,
    Array,
    Layout,
    adopt,
    is_contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.errors import error, shown


class Format(NamedTuple):
    """How a block of neighbouring weights along K is kept.

    Attributes
    ----------
    bits : int
        Of a code: two of four bits share a byte, those of eight are signed.
    scale : str
        The dtype of scales.
    numbers : int
        Of scales to a block: one, or a scale and what is subtracted or added.
    block_size : int, or None
        Weights of a block by default; None stands for a whole row.
    largest : int, or None
        A block has a power of two of weights from `smallest` to that; None is without a limit, and
        allows a whole row.
    smallest : int
        At least `UNIT`.
    super_block : int, or None
        Weights that share a row of super_scales.
    """

    bits: int
    scale: str
    numbers: int
    block_size: int | None
    largest: int | None
    smallest: int = 32
    super_block: int | None = None

    def allows(self, block_size: int, inner: int) -> bool:
        """Tell whether rows of `inner` weights may have blocks of that size."""
        if self.largest is None and block_size == inner:
            return True
        power = block_size > 0 and block_size & (block_size - 1) == 0
        return power and self.smallest <= block_size <= (self.largest or block_size)


WORD = 4
"""Bytes: all arrays but codes start at a multiple of that, codes of `ALIGNMENT`."""
UNIT = 32
"""K is a multiple of that: a row of four-bit codes has whole 16 bytes."""

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "nf4": Format(4, "float32", 1, 64, 4096),
        "int4": Format(4, "float16", 2, 128, 128),
        "int8": Format(8, "float32", 1, None, None),
        "q4_1": Format(4, "float16", 2, 32, 32),
        "q4_k": Format(4, "uint8", 2, 32, 32, super_block=256),
    }
)


NF4_CODEBOOK = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
     -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
     0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip
"""Quantiles of the normal distribution (Dettmers et al., arXiv:2305.14314, appendix E), as
bitsandbytes rounds them."""


class Blocks(NamedTuple):
    """How a weight is quantised, whatever its size."""

    format: str
    block_size: int


class Piece(NamedTuple):
    """An array of a quantised weight: what it has to be."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class QuantizedWeight:
    r"""The weight of a product in four or eight bits, for `linear` in the place of w.

    `quantize` makes one, `dequantize` the numbers that it stands for; `models.load` reads them from
    files. It is immutable, but its arrays may be written.

    Parameters
    ----------
    format : {"nf4", "int4", "int8", "q4_1", "q4_k"}
        What codes q and scales stand for; see Notes.
    codes : array
        uint8 (N, K / 2), for "int8" int8 (N, K): a row for each column of a (K, N) weight.
    scales : array
        (N, K / block_size) in float32 for "nf4" and "int8"; (N, K / block_size, 2) in float16 for
        "int4" and "q4_1", and in uint8 for "q4_k".
    super_scales : float16 array (N, K / 256, 2), optional
        Of "q4_k", which requires it.
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
    - "int4": (q - zero) scale, of (scale, zero); an even k stands in the low nibble, as below.
    - "int8": q scale, for signed q.
    - "q4_1" (ggml's Q4_1): q scale + offset, of (scale, offset).
    - "q4_k" (ggml's Q4_K): q (d sc) - (dmin m), of (sc, m), which have 6 bits, and (d, dmin) of the
      256 weights around.

    Where N is the first axis, slices of it are views: ``weight[10:20]``.

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
    block_size: int = field(kw_only=True)
    transposed: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("codes", "scales", "super_scales")}
        operands = adopt(given)
        for name, array in operands.arrays.items():
            object.__setattr__(self, name, array)
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
            unit = ALIGNMENT if name == "codes" else WORD
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
        named = {"codes": self.codes, "scales": self.scales, "super_scales": self.super_scales}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def nbytes(self) -> int:
        """The bytes of all its arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def T(self) -> QuantizedWeight:  # noqa: N802 (as arrays have it)
        """The transpose: the same arrays."""
        return self._of(self.codes, self.scales, self.super_scales, not self.transposed)

    def __len__(self) -> int:
        return self.shape[0]

    __iter__ = None  # or a loop would ask for [0], [1] and so on, and end at the first refusal

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse: NumPy would take it for a sequence without items."""
        raise error(
            TypeError,
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
        above = None if self.super_scales is None else self.super_scales[start:stop]
        return self._of(self.codes[start:stop], self.scales[start:stop], above, True)

    def __repr__(self) -> str:
        return (
            f"<QuantizedWeight {self.format} {self.shape}, blocks of {self.block_size}, "
            f"{self.nbytes:,} bytes>"
        )

    def _bounds(self, rows: Any) -> tuple[int, int, int]:
        return rows.indices(self.outer) if isinstance(rows, slice) else (0, 0, 0)

    def _of(
        self, codes: Array, scales: Array, super_scales: Array | None, transposed: bool
    ) -> QuantizedWeight:
        """Return another of the same format without a check: a product asks for `T` every time."""
        made = object.__new__(QuantizedWeight)
        values = self.format, codes, scales, super_scales, self.block_size, transposed
        for name, value in zip(_FIELDS, values, strict=True):
            object.__setattr__(made, name, value)
        return made


_FIELDS = ("format", "codes", "scales", "super_scales", "block_size", "transposed")


def pieces(kind: str, outer: int, inner: int, block_size: int) -> dict[str, Piece]:
    """Return the arrays of a weight of N = `outer` and K = `inner`.

    Examples
    --------
    >>> pieces("nf4", 6, 128, 64)["scales"]
    Piece(shape=(6, 2), dtype=dtype('float32'))
    """
    form = FORMATS[kind]
    code = Piece((outer, inner * form.bits // 8), np.dtype(np.uint8 if form.bits == 4 else np.int8))
    last = () if form.numbers == 1 else (form.numbers,)
    found = {
        "codes": code,
        "scales": Piece((outer, inner // block_size, *last), np.dtype(form.scale)),
    }
    if form.super_block is not None:
        shape = (outer, inner // form.super_block, *last)
        found["super_scales"] = Piece(shape, np.dtype(np.float16))
    return found


def empty(blocks: Blocks, outer: int, inner: int, xp: Any) -> QuantizedWeight:
    """Return a weight (N, K) of N = `outer` and K = `inner` that has yet to be filled."""
    arrays = {
        name: xp.empty(*piece)
        for name, piece in pieces(blocks.format, outer, inner, blocks.block_size).items()
    }
    return QuantizedWeight(blocks.format, **arrays, block_size=blocks.block_size, transposed=True)


def blocks_for(kind: str, inner: int) -> Blocks:
    """Return blocks as they are by default, or smaller ones where rows have no whole number.

    Examples
    --------
    >>> blocks_for("int4", 4096).block_size, blocks_for("int4", 576).block_size
    (128, 64)
    """
    block_size = FORMATS[kind].block_size or inner
    while inner % block_size and block_size > UNIT:
        block_size //= 2
    return Blocks(kind, block_size)


def require_format(kind: Any) -> Format:
    """Return a format by its name, or raise."""
    if isinstance(kind, str) and kind in FORMATS:
        return FORMATS[kind]
    raise error(
        ValueError if isinstance(kind, str) else TypeError,
        f"format = {shown(kind)}",
        f"formats are {', '.join(map(repr, FORMATS))}",
        "pass one of these",
    )


def require_blocks(kind: str, block_size: Any, inner: int) -> None:
    """Raise ValueError unless rows of K = `inner` weights have whole blocks of an allowed size."""
    form = FORMATS[kind]
    sizes = f"a power of two from {form.smallest}"
    if form.largest is None:
        sizes += " on, or K"
    elif form.largest == form.smallest:
        sizes = str(form.smallest)
    else:
        sizes += f" to {form.largest}"
    unit = math.lcm(UNIT, form.super_block or UNIT)
    whole = isinstance(block_size, int) and form.allows(block_size, inner)
    if not whole or inner < 1 or inner % block_size or inner % unit:
        raise error(
            ValueError,
            f"{kind!r} with K = {inner} and block_size = {shown(block_size)}",
            f"the size of a block is {sizes}; K is a multiple of it and of {unit}",
            "choose another block_size or format, or pad K with zeros",
        )


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

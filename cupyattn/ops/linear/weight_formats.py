"""Weights in four or eight bits: their formats, the sizes of their blocks, and their arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

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
from cupyattn.runtime.errors import NotAnArray, error, shown, size_text
from cupyattn.runtime.plan import Output
from cupyattn.runtime.records import Record, T, fields_of, given_of


class Format(NamedTuple):
    """The storage of a block of neighbouring weights along K.

    Attributes
    ----------
    bits : int
        Bits of a code: two codes of four bits share a byte; codes of eight bits are signed.
    scale : str
        The dtype of scales.
    numbers : int
        Numbers in a block's scales: a scale, or a scale and a number that is subtracted or added.
    block_size : int, or None
        Weights of a block by default; None means a whole row.
    largest : int, or None
        Maximum of a block's weights, which are a power of two from `smallest` on. None means no
        limit, and allows a whole row.
    smallest : int
        Minimum of a block's weights: at least `UNIT`.
    super_block : int, or None
        Weights of a row that share a pair of super_scales.
    group : int, or None
        Blocks, counted through all rows, whose scales are codes that share a pair of super_scales.
    """

    bits: int
    scale: str
    numbers: int
    block_size: int | None
    largest: int | None
    smallest: int = 32
    super_block: int | None = None
    group: int | None = None

    def allows(self, block_size: int, inner: int) -> bool:
        """Tell whether rows of `inner` weights may have blocks of that size."""
        if self.largest is None and block_size == inner:
            return True
        power = block_size > 0 and block_size & (block_size - 1) == 0
        return power and self.smallest <= block_size <= (self.largest or block_size)


INT4_LARGEST = 7.5 * 65504
"""Maximum of "int4" weights of both signs whose scale is finite in float16, for every block."""
INT4_SMALLEST = 15 * 2.0**-25
"""Maximum span of an "int4" block, which includes 0, whose scale is 0 in float16."""
TABLE = 256
"""Numbers that a scale of eight bits selects from."""
UNIT = 32
"""K is a multiple of `UNIT`: a row of four-bit codes has a multiple of 16 bytes."""

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "nf4": Format(4, "float32", 1, 64, 4096),
        "nf4_nested": Format(4, "uint8", 1, 64, 4096, group=64),
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
    """The format of a quantised weight, and the size of its blocks."""

    format: str
    block_size: int


def pieces(kind: str, outer: int, inner: int, block_size: int) -> dict[str, Output]:
    """Return the arrays of a weight of N = `outer` and K = `inner`.

    Examples
    --------
    >>> pieces("nf4", 6, 128, 64)["scales"]
    Output(shape=(6, 2), dtype=dtype('float32'))
    """
    form = FORMATS[kind]
    code = Output(
        (outer, inner * form.bits // 8), np.dtype(np.uint8 if form.bits == 4 else np.int8)
    )
    last = () if form.numbers == 1 else (form.numbers,)
    found = {
        "codes": code,
        "scales": Output((outer, inner // block_size, *last), np.dtype(form.scale)),
    }
    if form.super_block is not None:
        shape = (outer, inner // form.super_block, *last)
        found["super_scales"] = Output(shape, np.dtype(np.float16))
    if form.group is not None:
        groups = -(-outer * (inner // block_size) // form.group)
        found["super_scales"] = Output((groups, 2), np.dtype(np.float32))
        found["scale_table"] = Output((TABLE,), np.dtype(np.float32))
    return found


def rows_apart(blocks: Blocks, inner: int) -> int:
    """Return the number of rows whose multiples are allowed as the first row of a view.

    Examples
    --------
    >>> rows_apart(Blocks("nf4", 64), 2560), rows_apart(Blocks("nf4_nested", 64), 2560)
    (1, 8)
    """
    group = FORMATS[blocks.format].group
    return 1 if group is None else group // math.gcd(group, inner // blocks.block_size)


def rows_of_piece(blocks: Blocks, name: str, piece: Any, inner: int, start: int, stop: int) -> Any:
    """Return a view of one array of a weight for rows from an allowed start on."""
    group, per_row = FORMATS[blocks.format].group, inner // blocks.block_size
    if name == "scale_table":
        return piece
    if group is not None and name == "super_scales":
        return piece[start * per_row // group : -(-stop * per_row // group)]
    return piece[start:stop]


def blocks_for(kind: str, inner: int) -> Blocks:
    """Return the default blocks, or smaller ones if they do not divide the rows.

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


ROTATION = 64
"""Neighbours along K of a rotated block: the size of the Hadamard matrix."""


def require_rotation(rotation: Any, inner: int | None = None) -> int | None:
    """Return a rotation, or raise for one that is not allowed or does not divide K = `inner`."""
    whole = isinstance(rotation, Integral) and type(rotation) is not bool
    if rotation is not None and not (whole and rotation == ROTATION):
        raise error(
            ValueError if whole else TypeError,
            f"rotation = {shown(rotation)}",
            f"it is {ROTATION}, the size of the blocks that are rotated, or None",
            f"pass rotation={ROTATION}, or none",
        )
    if rotation is not None and inner is not None and inner % ROTATION:
        raise error(
            ValueError,
            f"rotation = {ROTATION} with K = {inner}",
            f"K is a multiple of the rotation: whole blocks of {ROTATION} are rotated",
            "pad K with zeros, or pass rotation=None",
        )
    return None if rotation is None else ROTATION


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
class QuantizedWeight(NotAnArray):
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
    rotation : {None, 64}
        64 for "int8" codes of H w in place of w: H rotates blocks of 64 neighbours along K by a
        Hadamard matrix / 8, which is orthogonal and its own inverse. `linear` rotates x too,
        because x w = (x H) (H w), and rotates a product with the transpose back, which takes
        neither b nor an activation. `dequantize` rotates back. K is a multiple of it.

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
    NOT_AN_ARRAY = (
        "products take it: linear(x, weight)",
        "make numbers of it with dequantize(weight)",
    )

    codes: Array
    scales: Array
    super_scales: Array | None = None
    scale_table: Array | None = None
    block_size: int = field(kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    rotation: int | None = field(default=None, kw_only=True)

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
        object.__setattr__(self, "rotation", require_rotation(self.rotation))
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
            f"{'' if self.rotation is None else f'rotated by {self.rotation}, '}"
            f"{self.nbytes:,} bytes>"
        )

    def _repr_html_(self) -> str:
        colours = html.BLUE, html.ORANGE, html.VIOLET, html.GREEN
        shares = [
            html.Share(f"bytes of {name}", array.nbytes, colour)
            for (name, array), colour in zip(self.arrays.items(), colours, strict=False)
        ]
        items = self.outer * self.inner
        of_float16 = self.nbytes / (2 * items)
        arrays = [
            (name, array.dtype.name, array.shape, array.nbytes)
            for name, array in self.arrays.items()
        ]
        known = {
            "shape": f"{self.shape} = {'(N, K)' if self.transposed else '(K, N)'}",
            "blocks": f"{self.block_size} neighbours along K share a scale",
            **({} if self.rotation is None else {"rotation": f"blocks of {self.rotation} along K"}),
            "size": f"{size_text(self.nbytes)}: {8 * self.nbytes / items:.2f} bits a weight, "
            f"{of_float16:.0%} of float16",
        }
        return html.section(
            f"QuantizedWeight {self.format}",
            html.facts(known),
            html.bar(shares),
            html.table(("array", "dtype", "shape", "bytes"), arrays),
        )

    def _bounds(self, rows: Any) -> tuple[int, int, int]:
        return rows.indices(self.outer) if isinstance(rows, slice) else (0, 0, 0)

    def _of(self, arrays: Sequence[Array | None], transposed: bool) -> QuantizedWeight:
        """Return a weight with other arrays, unchecked: products use `T` in every call."""
        made = object.__new__(QuantizedWeight)
        values = self.format, *arrays, self.block_size, transposed, self.rotation
        for name, value in zip(_FIELDS, values, strict=True):
            object.__setattr__(made, name, value)
        return made


_FIELDS = ("format", *WEIGHT_FIELDS, "block_size", "transposed", "rotation")


def empty(
    blocks: Blocks, outer: int, inner: int, xp: Any, rotation: int | None = None
) -> QuantizedWeight:
    """Return an uninitialised weight (N, K) with N = `outer` and K = `inner`."""
    arrays = {
        name: xp.empty(*piece)
        for name, piece in pieces(blocks.format, outer, inner, blocks.block_size).items()
    }
    size = blocks.block_size
    return QuantizedWeight(
        blocks.format, **arrays, block_size=size, rotation=rotation, transposed=True
    )


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
    require_rotation(weight.rotation, inner)
    if weight.rotation is not None and weight.format != "int8":
        raise error(
            ValueError,
            f"format = {weight.format!r} with rotation = {weight.rotation}",
            'weights of "int8" are rotated, no others',
            "pass rotation=None",
        )
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

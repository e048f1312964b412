"""Formats of weights in four or eight bits: the sizes of their blocks, and their arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.errors import error, shown


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


class Piece(NamedTuple):
    """The shape and dtype of an array of a quantised weight."""

    shape: tuple[int, ...]
    dtype: np.dtype


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
    if form.group is not None:
        groups = -(-outer * (inner // block_size) // form.group)
        found["super_scales"] = Piece((groups, 2), np.dtype(np.float32))
        found["scale_table"] = Piece((TABLE,), np.dtype(np.float32))
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

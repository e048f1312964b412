"""Rows of the table of products with few rows of x and a quantised weight, on tensor cores.

As of float16 (`thin`), bytes in flight are what is wanted. There are a quarter as many for a
number of k, so that a burst of a whole K is in reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class QuantisedThinConfig:
    """How a CTA shares the columns of w and k among its warps.

    Attributes
    ----------
    tiles : int
        Of a warp: 16 columns each, over the parts of K that fill the tile of x.
    steps : tuple of int
        Lengths of a burst to choose from, in spans of a column times parts.
    warps : int
        Of a CTA, at most.
    k_warps : int
        At most so many of them share columns and split K.
    ctas_per_sm : int
        Of Turing: what the compiler keeps registers for.
    chunks : int
        Of 8 k of a tile of x, that wait with a burst.
    """

    tiles: int
    steps: tuple[int, ...]
    warps: int
    k_warps: int
    ctas_per_sm: int
    chunks: int
    reason: str

    def fitted(self, inner: int, step_items: int) -> tuple[int, int]:
        """Return the steps of a burst and the warps that split K.

        Of those whose turns cover K with at most an eighth more zeros than need be (idle warps are
        bytes that are not in flight) the ones with the fewest turns, and then the longest burst.
        """

        def turns(choice: tuple[int, int]) -> int:
            return -(-inner // (choice[0] * choice[1] * step_items))

        def covered(choice: tuple[int, int]) -> int:
            return turns(choice) * choice[0] * choice[1]

        choices = [(s, k) for s in self.steps for k in range(1, self.k_warps + 1)]
        enough = min(map(covered, choices)) * 9 / 8
        fitting = (choice for choice in choices if covered(choice) <= enough)
        return min(fitting, key=lambda choice: (turns(choice), -choice[0]))


Table = Mapping[str, Mapping[int, Mapping[int | None, QuantisedThinConfig]]]
"""By kind (`kind_of`), by the most rows of x, by the most columns of the result."""

_ROW = QuantisedThinConfig
# Numbers are shares of the speed of a kernel that only reads the same bytes, on an H200 as
# compute_75 code, 2026-11-23, over the benchmark's sizes, in a sweep that is not kept; `benchmark
# linear --kind thin --weights nf4 int4` times the rows as they are. Rows without a number are
# chosen by their count of instructions and of bytes in flight.
_TURING: Table = {
    "nf4": {
        1: {
            4096: _ROW(2, (1,), 16, 8, 1, 2, "eight warps share K: 0.43 to 0.55"),
            None: _ROW(2, (1, 2), 16, 8, 1, 2, "bursts of two steps: 0.42 to 0.64"),
        },
        2: {None: _ROW(2, (1,), 16, 8, 1, 4, "8 columns and 256 bytes of each a warp")},
        4: {None: _ROW(2, (1,), 16, 8, 1, 4, "16 columns and 128 bytes of each a warp")},
        8: {
            4096: _ROW(2, (1,), 8, 8, 1, 4, "eight warps share K: 0.38 instead of 0.31"),
            None: _ROW(1, (1,), 16, 4, 1, 4, "four warps share K: 0.48"),
        },
        16: {
            4096: _ROW(2, (1,), 8, 8, 1, 2, "as 8 rows: 0.34"),
            None: _ROW(1, (1,), 16, 4, 1, 2, "as 8 rows: 0.39"),
        },
        32: {None: _ROW(1, (1,), 8, 8, 1, 1, "as 16 rows")},
    },
    "wide": {
        1: {
            4096: _ROW(2, (1,), 8, 8, 3, 2, "eight warps share K: 0.62 to 0.69"),
            None: _ROW(4, (1,), 4, 4, 4, 2, "small CTAs are done at once: 0.57 to 0.75"),
        },
        2: {None: _ROW(2, (1,), 8, 8, 2, 4, "8 columns and 256 bytes of each a warp")},
        4: {None: _ROW(2, (1,), 8, 8, 2, 4, "16 columns and 128 bytes of each a warp")},
        8: {
            4096: _ROW(2, (1,), 8, 8, 2, 4, "eight warps share K: 0.54"),
            None: _ROW(2, (1,), 8, 4, 2, 4, "32 columns and 64 bytes of each a warp: 0.68"),
        },
        16: {None: _ROW(2, (1,), 8, 8, 1, 2, "32 columns a warp: 0.34 to 0.42")},
        32: {None: _ROW(1, (1,), 8, 8, 1, 1, "as 16 rows")},
    },
    "narrow": {
        1: {None: _ROW(2, (1,), 8, 8, 2, 2, "4 columns, 512 bytes of each a warp: 0.40 to 0.50")},
        2: {None: _ROW(2, (1,), 8, 8, 2, 4, "8 columns and 256 bytes of each a warp")},
        4: {None: _ROW(2, (1,), 8, 8, 2, 4, "16 columns and 128 bytes of each a warp")},
        8: {None: _ROW(2, (1,), 8, 8, 2, 4, "32 columns, 64 bytes of each a warp: 0.41 to 0.50")},
        16: {None: _ROW(1, (1,), 8, 8, 2, 2, "16 columns: x takes registers; 0.32 to 0.34")},
        32: {None: _ROW(1, (1,), 8, 8, 1, 1, "as 16 rows")},
    },
    "bytes": {
        1: {
            4096: _ROW(4, (1,), 8, 8, 2, 4, "eight warps share K: 0.76 to 0.83"),
            None: _ROW(4, (1,), 8, 4, 2, 4, "four warps share K: 0.76 to 0.87"),
        },
        2: {None: _ROW(4, (1,), 8, 8, 2, 4, "16 columns and 256 bytes of each a warp")},
        4: {None: _ROW(2, (1,), 8, 8, 2, 4, "16 columns and 128 bytes of each a warp")},
        8: {
            4096: _ROW(1, (2,), 8, 8, 3, 4, "a third CTA: 0.65"),
            None: _ROW(2, (2,), 8, 8, 2, 4, "32 columns and 64 bytes of each a warp: 0.89"),
        },
        16: {
            4096: _ROW(1, (1, 2), 8, 8, 2, 2, "16 columns: x takes registers; 0.57"),
            None: _ROW(2, (1,), 8, 8, 2, 2, "32 columns a warp: 0.77"),
        },
        32: {None: _ROW(1, (1,), 8, 8, 1, 1, "as 16 rows")},
    },
}  # fmt: skip
TABLE: Mapping[int, Table] = {75: _TURING}

_NARROW = 32


def kind_of(weights: str, block_size: int) -> str:
    """Return which rows of the table a format takes: "nf4", "wide", "narrow" or "bytes".

    "wide" and "narrow" are integers of four bits in blocks of 64 and more, or of 32, whose scales
    take as many registers as the codes.

    Examples
    --------
    >>> [kind_of(*each) for each in (("nf4", 64), ("int4", 64), ("q4_k", 32), ("int8", 32))]
    ['nf4', 'wide', 'narrow', 'bytes']
    """
    narrow = "narrow" if block_size == _NARROW else "wide"
    return {"nf4": "nf4", "int8": "bytes"}.get(weights, narrow)

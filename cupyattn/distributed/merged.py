"""Results of a rank's queries, merged as blocks come by: in float32, whatever the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn import merge_attention
from cupyattn.distributed.plan import RingPlan, Rows
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy

Part = tuple[Array, Array]
"""out (B, rows, H, Dv) and lse (B, H, rows) of some queries to some keys."""


class Merged:
    """The parts merged so far for each piece of queries, and the results that they become.

    Parts come rounded to the dtype of the arrays, as any result. The first part of a piece is
    computed into its result; sums are kept in float32 (float64 for float64), and the last one is
    rounded into the result.
    """

    def __init__(self, plan: RingPlan, out: Array, lse: Array) -> None:
        extent = int(plan.cu_seqlens[-1])
        self._pieces = [
            Rows(place * extent, (place + 1) * extent) for place in range(plan.placement.pieces)
        ]
        self._results = out, lse
        calls = [call for step in plan.steps for call in step.calls]
        self._to_come = [
            sum(_within(piece, call.queries) for call in calls) for piece in self._pieces
        ]
        self._sums: list[Part | None] = [None] * len(self._pieces)

    def add(self, queries: Rows, compute: Callable[[Part], Any]) -> None:
        """Merge a part of some rows, which begin and end with pieces; `compute` writes it."""
        pieces = [number for number, piece in enumerate(self._pieces) if _within(piece, queries)]
        begun = any(self._sums[number] is not None for number in pieces)
        results = _rows(self._results, queries)
        part = _empty_like(*results) if begun else results
        compute(part)
        for number in pieces:
            start = self._pieces[number].start - queries.start
            stop = self._pieces[number].stop - queries.start
            self._to_come[number] -= 1
            of_piece, result = _rows(part, Rows(start, stop)), _rows(results, Rows(start, stop))
            before = self._sums[number]
            if before is not None:
                self._sums[number] = self._merged(number, before, of_piece, result)
                continue
            if begun:  # another piece had, and this one was computed beside it
                result[0][...], result[1][...] = of_piece
            self._sums[number] = result

    def _merged(self, number: int, before: Part, part: Part, result: Part) -> Part:
        exact = exact_dtype(before[0])
        into = before
        if self._to_come[number] == 0:
            into = result
        elif before[0].dtype != exact:
            into = _empty_like(*before, exact)
        merge_attention(*before, *part, out=into)
        return into

    def finish(self) -> None:
        """Write the results of queries that see nothing."""
        for held, piece in zip(self._sums, self._pieces, strict=True):
            if held is None:
                out, lse = _rows(self._results, piece)
                out[...], lse[...] = 0, -np.inf


def exact_dtype(array: Array) -> Any:
    """Return what sums of parts are kept in."""
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)


def _within(piece: Rows, rows: Rows) -> bool:
    return rows.start <= piece.start and piece.stop <= rows.stop


def _rows(part: Part, rows: Rows) -> Part:
    return part[0][:, rows.slice], part[1][:, :, rows.slice]


def _empty_like(out: Array, lse: Array, dtype: Any = None) -> Part:
    xp = np if isinstance(out, np.ndarray) else load_cupy()
    return xp.empty(out.shape, dtype or out.dtype), xp.empty(lse.shape, lse.dtype)

"""Results of a rank's queries, merged as blocks come by: in float32, whatever the dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn import merge_attention
from cupyattn.arrays import Array
from cupyattn.distributed.plan import RingPlan, Rows


class Merged:
    """Partial results of each piece of queries.

    Parts come rounded to the dtype of the arrays, as any result; their sums are kept in float32
    (float64 for float64), and rounded once more at the end.
    """

    def __init__(self, plan: RingPlan) -> None:
        extent = int(plan.cu_seqlens[-1])
        self._pieces = [
            Rows(place * extent, (place + 1) * extent) for place in range(plan.placement.pieces)
        ]
        self._parts: list[tuple[Array, Array] | None] = [None] * len(self._pieces)

    def add(self, queries: Rows, out: Array, lse: Array) -> None:
        """Merge a call's results of some rows, which begin and end with pieces."""
        for place, piece in enumerate(self._pieces):
            if queries.start <= piece.start and piece.stop <= queries.stop:
                rows = slice(piece.start - queries.start, piece.stop - queries.start)
                self._add(place, out[:, rows], lse[:, :, rows])

    def _add(self, place: int, out: Array, lse: Array) -> None:
        before = self._parts[place]
        if before is not None:
            exact = lse.dtype
            out, lse = merge_attention(
                before[0].astype(exact, copy=False), before[1], out.astype(exact, copy=False), lse
            )
        self._parts[place] = out, lse

    def store(self, out: Array, lse: Array) -> None:
        """Round what has been merged into results; queries without a part see nothing."""
        for piece, part in zip(self._pieces, self._parts, strict=True):
            rows = piece.slice
            if part is None:
                out[:, rows], lse[:, :, rows] = 0, -np.inf
            else:
                out[:, rows], lse[:, :, rows] = part


def exact_dtype(array: Array) -> Any:
    """Return what sums of parts are kept in."""
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)

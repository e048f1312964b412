"""Packed queries over a paged cache for tests: sequences with different numbers of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.devices import KERNELS
from support.paged import PagedProblem, scales_of

import cupyattn


@dataclass(frozen=True)
class PackedProblem(PagedProblem):
    """A call with cu_seqlens_q; Sq is max_seqlen_q, and behind the last row lie `spare` more."""

    queries: tuple[int, ...] = ()
    spare: int = 0

    @property
    def decoded(self) -> bool:
        return False

    def queries_of(self, b: int) -> int:
        return self.queries[b]

    @property
    def bounds(self) -> np.ndarray:
        """cu_seqlens_q."""
        return np.cumsum((0, *self.queries), dtype=np.int32)

    def arrays(self, order: int = 0) -> tuple[np.ndarray, ...]:
        q, *others = super().arrays(order)
        rows = [q[b, : self.queries[b]] for b in range(len(self.queries))]
        behind = np.full((self.spare, *q.shape[2:]), np.nan, q.dtype)
        return np.concatenate([*rows, behind]), *others

    def sequences(self, arrays: tuple[np.ndarray, ...]) -> Any:
        """Each sequence's own rows, and its arrays as a call of one sequence."""
        q, k, v, table, lengths, *scales = arrays
        for b, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if begin < end:
                own = slice(b, b + 1)
                rows = slice(begin, end)
                yield rows, (q[None, rows], k, v, table[own], lengths[own], *scales)

    def ratio(self, out: np.ndarray, lse: np.ndarray, arrays: tuple[np.ndarray, ...]) -> float:
        """The largest error of any sequence over its bound."""
        return max(
            (
                super(PackedProblem, self).ratio(out[None, rows], lse[None, :, rows], own)
                for rows, own in self.sequences(arrays)
            ),
            default=0.0,
        )

    def call(self, arrays: tuple[np.ndarray, ...], **more: Any) -> Any:
        """Run the kernels on the GPU, if there is one, otherwise on the emulator."""
        there = {
            name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
            for name, value in {"cu_seqlens_q": self.bounds, **self.keywords(), **more}.items()
        }
        with KERNELS.running():
            results = self.on_arrays(tuple(map(KERNELS.put, arrays)), **there)
        return tuple(map(KERNELS.get, results))

    def on_arrays(self, arrays: tuple[Any, ...], **more: Any) -> Any:
        """Call paged_attention where the arrays are; out and lse."""
        given = {"cu_seqlens_q": self.bounds, **self.keywords(), **scales_of(arrays), **more}
        return cupyattn.paged_attention(*arrays[:5], max_seqlen_q=self.Sq, return_lse=True, **given)

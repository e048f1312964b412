"""Packed queries over a paged cache for tests: sequences with different numbers of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.devices import KERNELS
from support.paged import PagedProblem

import cupyattn


@dataclass(frozen=True)
class PackedProblem(PagedProblem):
    """A call with cu_seqlens_q; Sq is max_seqlen_q, and behind the last row lie `spare` more."""

    queries: tuple[int, ...] = ()
    spare: int = 0

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
        q, k, v, table, lengths = arrays
        for b, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if begin < end:
                own = slice(b, b + 1)
                yield slice(begin, end), (q[None, begin:end], k, v, table[own], lengths[own])

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
        keywords = {**self.keywords(), "cu_seqlens_q": self.bounds, **more}
        there = {
            name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
            for name, value in keywords.items()
        }
        with KERNELS.running():
            results = cupyattn.paged_attention(
                *map(KERNELS.put, arrays), max_seqlen_q=self.Sq, return_lse=True, **there
            )
        return tuple(map(KERNELS.get, results))

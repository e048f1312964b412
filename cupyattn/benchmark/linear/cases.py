"""What the benchmark of linear calls: the shapes, and arrays of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Array, dtype_of
from cupyattn.benchmark.cuda_events import COLD_BYTES
from cupyattn.quantized_weight import FORMATS, Piece, QuantizedWeight, pieces

LARGE = ((8192, 16384, 4096), (8192, 2560, 10240), (8192, 3072, 768), (512, 16384, 4096))
"""(M, N, K) of products that arithmetic bounds."""
THIN = (
    (16384, 4096),
    (2560, 2560),
    (10240, 2560),
    (2560, 10240),
    (2048, 8192),
    (8192, 2048),
    (128256, 2048),
)
"""(N, K) of products that reading the weight bounds."""
THIN_ROWS = (1, 2, 4, 8, 16, 32, 64)
LAYOUTS = ("nk", "kn")
"""How w lies: as (N, K), of which linear is given the transpose, or as (K, N)."""


@dataclass(frozen=True)
class Case:
    """One product; letters as in the public API."""

    kind: str
    """"large", "thin" or "backward"."""
    M: int
    N: int
    K: int
    dtype: str
    layout: str
    activation: str | None
    weights: str | None = None
    """The format of a quantised w, in its usual blocks."""

    @property
    def flops(self) -> float:
        """Of the product, or of the backward's two; of one where w has no gradient.

        Examples
        --------
        >>> Case("large", 8192, 16384, 4096, "float16", "nk", None).flops == 2 * 2**39
        True
        """
        products = 2 if self.kind == "backward" and self.weights is None else 1
        return 2 * products * float(self.M) * self.N * self.K

    @property
    def weight_bytes(self) -> int:
        """Of w: of a quantised one codes and scales.

        Examples
        --------
        >>> Case("thin", 1, 16, 128, "float16", "nk", None, "nf4").weight_bytes
        1152
        """
        if self.weights is None:
            return self.N * self.K * dtype_of(self.dtype).itemsize
        return sum(_bytes_of(piece) for piece in self._pieces.values())

    @property
    def block_size(self) -> int:
        """Of a quantised w."""
        assert self.weights is not None
        return FORMATS[self.weights].block_size or self.K

    @property
    def _pieces(self) -> dict[str, Piece]:
        assert self.weights is not None
        return pieces(self.weights, self.N, self.K, self.block_size)

    @property
    def copies(self) -> int:
        """How many weights are taken in turn, so that none is in L2 still."""
        return max(-(-COLD_BYTES // self.weight_bytes), 2) if self.kind == "thin" else 1

    def quantised(self, memory: Array) -> QuantizedWeight:
        """Return a quantised w (N, K) in memory that holds any bytes; scales are overwritten."""
        assert self.weights is not None
        arrays, end = {}, 0
        for name, piece in self._pieces.items():
            start, end = end, end + _bytes_of(piece)
            arrays[name] = memory[start:end].view(piece.dtype).reshape(piece.shape)
            if name != "codes":
                arrays[name][...] = 63 if piece.dtype == np.uint8 else self.K**-0.5
        return QuantizedWeight(self.weights, **arrays, block_size=self.block_size, transposed=True)


def _bytes_of(piece: Piece) -> int:
    return int(np.prod(piece.shape)) * piece.dtype.itemsize


class Arrays(NamedTuple):
    """The arrays of a case: x, the weights as they lie, b, dout, and room for the result."""

    x: Array
    weights: list[Array] | list[QuantizedWeight]
    memory: list[Array]
    """That of each weight, in one piece."""
    b: Array
    dout: Array
    out: Array


def arrays_of(case: Case, xp: Any) -> Arrays:
    """Make the arrays of a case by the array library `xp`; weights are random, and scaled."""
    dtype = dtype_of(case.dtype)
    rng = np.random.default_rng(0)

    def random(*shape: int, scale: float = 1.0) -> Array:
        count = int(np.prod(shape))
        # A million numbers again and again: NumPy takes a second for a hundred million.
        numbers = rng.standard_normal(min(count, 2**20), np.float32) * np.float32(scale)
        return xp.resize(xp.asarray(numbers.astype(dtype)), count).reshape(shape)

    weights: Any
    if case.weights is None:
        shape = (case.N, case.K) if case.layout == "nk" else (case.K, case.N)
        memory = weights = [random(*shape, scale=case.K**-0.5) for _ in range(case.copies)]
    else:
        codes = xp.asarray(rng.integers(0, 256, 2**20, np.uint8))
        memory = [xp.resize(codes, case.weight_bytes) for _ in range(case.copies)]
        weights = [case.quantised(bytes_of) for bytes_of in memory]
    return Arrays(
        random(case.M, case.K),
        weights,
        memory,
        random(case.N),
        random(case.M, case.N),
        xp.empty((case.M, case.N), dtype),
    )

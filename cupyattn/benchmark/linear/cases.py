"""What the benchmark of linear calls: the shapes, and arrays of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Array, dtype_of
from cupyattn.benchmark.frame.clock import COLD_BYTES
from cupyattn.quantized_weight import QuantizedWeight
from cupyattn.weight_formats import FORMATS, pieces

LARGE = ((8192, 16384, 4096), (8192, 2560, 10240), (8192, 3072, 768), (512, 16384, 4096))
"""(M, N, K) of products that arithmetic bounds."""
QUANTISED = (
    (8192, 8192, 4096),
    (8192, 16384, 4096),
    (8192, 2560, 10240),
    (2048, 10240, 2560),
    (512, 10240, 2560),
)
"""The same with quantised weights: with as many rows as tiles wait for, and with few tiles."""
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
    """"large", "thin" or "backward"; or "dx", the product of dout and w^T alone."""
    M: int
    N: int
    K: int
    dtype: str
    layout: str
    activation: str | None
    weights: str | None = None
    """The format of w, where it is quantised."""

    @property
    def labels(self) -> dict[str, Any]:
        """What a row says of it."""
        return asdict(self)

    @property
    def flops(self) -> float:
        """Of the product, or of the backward's two.

        Examples
        --------
        >>> Case("large", 8192, 16384, 4096, "float16", "nk", None).flops == 2 * 2**39
        True
        """
        return (4 if self.kind == "backward" else 2) * float(self.M) * self.N * self.K

    @property
    def weight_bytes(self) -> int:
        """Of w."""
        if self.weights is None:
            return self.N * self.K * dtype_of(self.dtype).itemsize
        of = pieces(self.weights, self.N, self.K, block_size(self.weights, self.K))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in of.values())

    @property
    def bytes(self) -> int:
        """What has to move: w alone of few rows, otherwise every array once, gradients too."""
        if self.kind == "thin":
            return self.weight_bytes
        x, out = self.M * self.K, self.M * self.N
        item = dtype_of(self.dtype).itemsize
        if self.kind == "backward":  # x, w, b and their gradients; dout, and the preactivation
            more = 1 if self.activation is None else 2
            return 2 * self.weight_bytes + (2 * (x + self.N) + more * out) * item
        bias = 0 if self.kind == "dx" else self.N
        return self.weight_bytes + (x + out + bias) * item

    @property
    def copies(self) -> int:
        """How many weights are taken in turn, so that none is in L2 still."""
        return max(-(-COLD_BYTES // self.weight_bytes), 2) if self.kind == "thin" else 1


class Arrays(NamedTuple):
    """The arrays of a case: x, the weights as they lie, b, dout, and room for the result."""

    x: Array
    weights: list[Any]
    b: Array
    dout: Array
    out: Array


def block_size(name: str, inner: int) -> int:
    """Return what a format has by default.

    Examples
    --------
    >>> block_size("nf4", 4096), block_size("int8", 4096)
    (64, 4096)
    """
    return FORMATS[name].block_size or inner


def arrays_of(case: Case, xp: Any, copies: int | None = None) -> Arrays:
    """Make the arrays of a case by the array library `xp`; weights are random, and scaled.

    There are as many weights as `copies` says, by default as the case has for times.
    """
    dtype = dtype_of(case.dtype)
    rng = np.random.default_rng(0)

    def random(*shape: int, scale: float = 1.0) -> Array:
        count = int(np.prod(shape))
        # A million numbers again and again: NumPy takes a second for a hundred million.
        numbers = rng.standard_normal(min(count, 2**20), np.float32) * np.float32(scale)
        return xp.resize(xp.asarray(numbers.astype(dtype)), count).reshape(shape)

    def quantised(name: str) -> QuantizedWeight:
        arrays = {}
        size = block_size(name, case.K)
        for piece, (shape, kind) in pieces(name, case.N, case.K, size).items():
            count = int(np.prod(shape))
            if kind.kind == "f":
                part = rng.random(min(count, 2**20), np.float32) * np.float32(case.K**-0.5)
            else:
                part = rng.integers(0, 64 if piece == "scales" else 256, min(count, 2**20))
            own = part.astype(np.uint8).view(kind) if kind.kind != "f" else part.astype(kind)
            arrays[piece] = xp.resize(xp.asarray(own), count).reshape(shape)
        return QuantizedWeight(name, **arrays, block_size=size, transposed=True)

    shape = (case.N, case.K) if case.layout == "nk" else (case.K, case.N)
    weights = [
        random(*shape, scale=case.K**-0.5) if case.weights is None else quantised(case.weights)
        for _ in range(copies or case.copies)
    ]
    return Arrays(
        random(case.M, case.K),
        weights,
        random(case.N),
        random(case.M, case.N),
        xp.empty((case.M, case.K if case.kind == "dx" else case.N), dtype),
    )

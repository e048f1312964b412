"""What an operation of the benchmark of layers is: its arrays, its peer, its least traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Array, dtype_of


class Size(NamedTuple):
    """How large an operation's rows are: a token each."""

    rows: int
    width: int
    dtype: str

    @property
    def array_bytes(self) -> int:
        """Bytes of one array of rows."""
        return self.rows * self.width * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one of their items."""
        return dtype_of(self.dtype).itemsize


class Source:
    """Random arrays on the device of an array library."""

    def __init__(self, xp: Any, seed: int) -> None:
        self._xp = xp
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, dtype: str) -> Array:
        """Return numbers of the standard normal distribution."""
        count = math.prod(shape)
        # A million numbers again and again: NumPy takes a second for a hundred million.
        numbers = self._rng.standard_normal(min(count, 2**20), np.float32)
        items = self._xp.asarray(numbers.astype(dtype_of(dtype)))
        return self._xp.resize(items, count).reshape(shape)

    def labels(self, count: int, classes: int) -> Array:
        """Return int64 numbers of classes."""
        return self._xp.asarray(self._rng.integers(0, classes, count))

    def angles(self, positions: int, pairs: int) -> tuple[Array, Array]:
        """Return the cosines and sines of rotary embedding, float32."""
        frequencies = 10000.0 ** (-np.arange(pairs) / pairs)
        angles = np.arange(positions)[:, None] * frequencies
        cos, sin = (np.float32(table) for table in (np.cos(angles), np.sin(angles)))
        return self._xp.asarray(cos), self._xp.asarray(sin)


Arrays = tuple[Any, ...]


@dataclass(frozen=True)
class Operation:
    """One operation, and the least memory traffic that it can have."""

    name: str
    function: str
    """Its name in `cupyattn`."""
    arrays: Callable[[Size, Source], Arrays]
    """Makes what it takes by position."""
    torch: Callable[..., Any]
    """The same in PyTorch: takes torch and the tensors."""
    forward_arrays: int
    """How many arrays of rows the forward reads and writes."""
    backward_arrays: int | None
    """The same of the backward, from the gradient of the result; None where there is none."""
    more_bytes: Callable[[Size], tuple[int, int]] = lambda size: (0, 0)
    """Bytes of other arrays that the forward, and the backward, read and write."""
    flops: Callable[[Size], tuple[int, int]] | None = None
    """Of forward and backward, where products take the time."""
    changes: tuple[int, ...] = ()
    """Which of `arrays` are changed in place, and are the results."""
    options: Mapping[str, Any] = field(default_factory=dict)
    by_name: tuple[str, ...] = ()
    """Options that take the last of `arrays`."""
    tolerance: float = 0.02
    """How far the results may differ from PyTorch's, in shares of the largest."""
    composed: Callable[..., Any] | None = None
    """The forward by array functions: takes the array library and the arrays; None without."""
    shape: tuple[int, int] | None = None
    """Rows and width, where those of the other operations make no sense."""

    def size(self, size: Size) -> Size:
        """Return the size that stands for one of the other operations."""
        return size if self.shape is None else Size(*self.shape, size.dtype)

    def traffic(self, size: Size, direction: str) -> int:
        """Return the least bytes that a call moves."""
        backward = direction == "backward"
        rows = self.backward_arrays if backward else self.forward_arrays
        return (rows or 0) * size.array_bytes + self.more_bytes(size)[backward]

    def positional(self, arrays: Arrays) -> Arrays:
        """Return those of the arrays that are passed by position."""
        return arrays[: len(arrays) - len(self.by_name)]

    def named(self, arrays: Arrays) -> dict[str, Any]:
        """Return the options of a call."""
        rest = arrays[len(arrays) - len(self.by_name) :]
        return {**self.options, **dict(zip(self.by_name, rest, strict=True))}

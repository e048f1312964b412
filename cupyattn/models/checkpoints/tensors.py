"""Tensors in files, of which nothing is read before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.ops.linear.weight_formats import Blocks


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes
    ----------
    shape : tuple of int
        Of all of it.
    read : callable
        ``read(start, stop)`` gives these rows (of its first axis) as floats of any size.
    read_columns : callable, optional
        The same of its second axis, for files of weights (K, N).
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]
    read_columns: Callable[[int, int], np.ndarray] | None = None


class NestedScales(NamedTuple):
    """How else a weight in "nf4" may be read: in "nf4_nested", with scales as codes.

    Attributes
    ----------
    table : tuple of float
        What codes stand for.
    read : callable
        ``read(start, stop)``, from a row on that is a multiple of `rows_apart`.
    """

    table: tuple[float, ...]
    read: Callable[[int, int], QuantizedWeight]


class QuantisedTensor(NamedTuple):
    """The weight of a product that a file holds in four or eight bits.

    Attributes
    ----------
    shape : tuple of int
        (N, K).
    blocks : Blocks
        What its rows are read as.
    read : callable
        ``read(start, stop)`` gives these rows of N as NumPy arrays.
    nested : NestedScales, optional
        Where the file has codes for scales.
    """

    shape: tuple[int, ...]
    blocks: Blocks
    read: Callable[[int, int], QuantizedWeight]
    nested: NestedScales | None = None


AnyTensor = Tensor | QuantisedTensor

"""Golden vectors of ``atom`` and ``red`` in global and shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from support.golden.case import Case, make_case
from support.golden.values import UNSIGNED, floats, integers, random_bits

_THREADS = 128
_CELLS = 8


@dataclass(frozen=True)
class AtomicTable:
    """Atomics on cells of one size.

    Attributes
    ----------
    name : str
        Of the case.
    c_type, constraint : str
        Of the register of a cell.
    operations : tuple of str
        As ``add.u32``: each updates cells of the threads' own, by ``atom``.
    contested : tuple of str
        Those of `operations` tried on shared cells too, by ``red``: no order matters to them.
    given : tuple of three arrays
        First contents of the cells, operands, and what ``cas`` swaps in, per thread.
    contested_values : array
        Operands on the contested cells.
    compare : dtype
        What the cells hold, for the comparison.
    """

    name: str
    c_type: str
    constraint: str
    operations: tuple[str, ...]
    contested: tuple[str, ...]
    given: tuple[np.ndarray, np.ndarray, np.ndarray]
    contested_values: np.ndarray
    compare: type

    @property
    def rows(self) -> list[str]:
        """The rows of the old and new contents."""
        return [f"{space}.{o}" for o in self.operations for space in ("global", "shared")]

    @property
    def contested_rows(self) -> list[str]:
        """The rows of the contested cells."""
        return [f"{space}.{o}" for o in self.contested for space in ("global", "shared")]

    @property
    def case(self) -> Case:
        """Return the launch, of one CTA."""
        operations = []
        for row in self.rows:
            swapped = ", %3" if ".cas." in row else ""
            kind = f"OWN_{row.split('.')[0].upper()}"
            operations.append(f'{kind}("atom.{row} %0, [%1], %2{swapped};")')
        for row in self.contested_rows:
            kind = f"CONTESTED_{row.split('.')[0].upper()}"
            operations.append(f'{kind}("red.{row} [%0], %1;")')
        initial, values, swapped_in = self.given
        cells = np.zeros((len(self.rows), _THREADS), initial.dtype)
        return make_case(
            self.name,
            "atomics",
            1,
            {
                "initial": initial,
                "values": values,
                "swapped": swapped_in,
                "contested_values": self.contested_values,
            },
            {
                "old": cells,
                "new": cells.copy(),
                "contested": np.zeros((len(self.contested_rows), _CELLS), initial.dtype),
                "cells": np.zeros(_THREADS, initial.dtype),
            },
            macros={
                "OPERATIONS": " ".join(operations),
                "CELLS": _CELLS,
                "TYPE": self.c_type,
                "CONSTRAINT": f'"{self.constraint}"',
            },
            threads=_THREADS,
            scratch=frozenset({"cells"}),
        )


def _chosen(seed: int, values: np.ndarray) -> np.ndarray:
    """Return a value per thread."""
    return values[random_bits(seed, _THREADS, np.uint32) % np.uint32(len(values))]


def _integers(size: int) -> AtomicTable:
    dtype = UNSIGNED[size]
    bits = 8 * size
    first = _chosen(500 + size, integers(501, dtype, 40))
    second = _chosen(502 + size, integers(503, dtype, 40))
    second[::3] = first[::3]  # where cas swaps
    operations = [f"{op}.{t}{bits}" for op in ("min", "max") for t in "us"]
    operations += [f"{op}.b{bits}" for op in ("and", "or", "xor")]
    operations += [f"add.u{bits}"] + (["add.s32", "inc.u32", "dec.u32"] if size == 4 else [])
    contested = tuple(o for o in operations if o[:3] not in ("inc", "dec"))
    operations += [f"exch.b{bits}", f"cas.b{bits}"]
    return AtomicTable(
        f"atomic_b{bits}",
        {4: "uint32", 8: "uint64"}[size],
        {4: "r", 8: "l"}[size],
        tuple(operations),
        contested,
        (first, second, _chosen(504, integers(505, dtype, 40))),
        random_bits(506, _THREADS, dtype),
        dtype,
    )


def _wrapping() -> AtomicTable:
    """``inc`` and ``dec`` with one bound for all threads: then no order matters."""
    first = np.arange(_THREADS, dtype=np.uint32) * np.uint32(3)
    bound = np.full(_THREADS, 10, np.uint32)
    operations = ("inc.u32", "dec.u32")
    given = (first, bound, bound)
    return AtomicTable("atomic_wrap", "uint32", "r", operations, operations, given, bound,
                       np.uint32)  # fmt: skip


def _small_integers(seed: int, dtype: type) -> np.ndarray:
    return (random_bits(seed, _THREADS, np.uint32) % 17).astype(dtype) - dtype(8)


def _floats(kind: str, dtype: type, c_type: str, constraint: str) -> AtomicTable:
    first, second = (_chosen(seed, floats(seed, dtype, 40)) for seed in (510, 512))
    tiny = float(np.finfo(dtype).smallest_normal)
    first[:6] = np.array([0.0, tiny, tiny / 2, -tiny / 2, 1.5 * tiny, -0.0], dtype)
    second[:6] = np.array([tiny / 4, -tiny / 2, tiny / 4, tiny / 4, -tiny, -0.0], dtype)
    first[100:108] = np.arange(8)
    operation = (f"add.{kind}",)
    given = (first, second, second)
    return AtomicTable(f"atomic_{kind}", c_type, constraint, operation, operation, given,
                       _small_integers(514, dtype), dtype)  # fmt: skip


def _halves() -> tuple[AtomicTable, AtomicTable]:
    first, second = (_chosen(seed, floats(seed, np.float16, 40, 6)) for seed in (520, 522))
    small = _small_integers(524, np.float16)
    first[:_CELLS] = np.arange(_CELLS)  # the contested cells start with these
    single = tuple(x.view(np.uint16) for x in (first, second, second))
    pair = tuple(
        np.stack([x, np.roll(x, _CELLS // 2)], axis=1).view(np.uint32)[:, 0]
        for x in (first, second, second)
    )
    pair[0][:_CELLS] = np.arange(2 * _CELLS, dtype=np.float16).view(np.uint32)
    small_pair = np.stack([small, small[::-1]], axis=1).view(np.uint32)[:, 0]
    add, add_pair = ("add.noftz.f16",), ("add.noftz.f16x2",)
    return (
        AtomicTable("atomic_f16", "uint16", "h", (*add, "cas.b16"), add,
                    (single[0], single[1], single[2]), small.view(np.uint16), np.float16),
        AtomicTable("atomic_f16x2", "uint32", "r", add_pair, add_pair,
                    (pair[0], pair[1], pair[2]), small_pair, np.float16),
    )  # fmt: skip


ATOMICS = (
    _integers(4),
    _integers(8),
    _wrapping(),
    _floats("f32", np.float32, "float", "f"),
    _floats("f64", np.float64, "double", "d"),
    *_halves(),
)

"""Element-wise kernels (cuda_src/common/elements.cuh): how they are declared and configured.

An element kernel reads arrays of one shape item by item and writes arrays of that shape. One table
serves them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Scalar, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES
from cupyattn.runtime.structs import elements_struct
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for


@dataclass(frozen=True)
class ElementConfig:
    """How rows are cut: a unit is `lanes` threads times the loads of each."""

    threads: int
    lanes: int
    vectors: int
    """Loads of 16 bytes of each array that a thread has in flight."""
    singles: int
    """Loads of single items, where not every row starts at a vector."""
    reason: str

    @property
    def units_per_cta(self) -> int:
        """Units that one CTA works on side by side."""
        return self.threads // self.lanes

    def loads(self, vec: int) -> int:
        """Return how many loads of `vec` items a thread has in flight."""
        return self.vectors if vec > 1 else self.singles


ElementTable = Mapping[int, Mapping[int | None, ElementConfig]]

# The first row whose number of loads is not below that of a row of the arrays; None takes the rest.
# Timed on an H200 as compute_75 code by `python -m cupyattn.benchmark layers`, 2026-11-22, on 8192
# rows of 768 to 4096: one load a thread is 3 to 20 % faster than two, forward and backward, and 128
# threads are 1 to 2 % faster than 256, which are faster than 512.
ELEMENTS: ElementTable = {
    75: {
        512: ElementConfig(128, 8, 1, 8, "rows of up to 8 KiB: units of 128 bytes leave few idle"),
        None: ElementConfig(128, 32, 1, 8, "a warp 512 bytes; a second load a thread slows it"),
    }
}


_GATES = Gates(registers=72)  # of the gated backward; 64 do for the others


@dataclass(frozen=True, eq=False)
class ElementKernel:
    """An element-wise kernel: its names are those of the C parameters, in this order.

    Attributes
    ----------
    entry, source : str
        The kernel's entry and file, as in a `KernelSpec`.
    inputs : tuple of str
        Arrays that are read.
    results : tuple of str
        Arrays that are written.
    updated : tuple of str
        Arrays that are read and written: they are changed in place. They come before the inputs.
    optional : tuple of str
        Inputs that may be absent, whose pointers are null then. Macro WITH_<NAME> says which are
        there.
    float32 : tuple of str
        Arrays that have this dtype whatever that of the others (DTYPE).
    numbers : tuple of str
        float32 arrays of one item that may be absent: numbers that only the device knows.
    scalars : mapping
        Numbers passed by value, with their dtypes.
    choices : mapping
        Macros that a call decides, with the values that they may have.
    accumulates : bool
        Whether results may be added to what is there: macro ACCUMULATE.
    indexed : bool
        Whether an item's number matters: vectors then start at multiples of their length.
    table : ElementTable
        By architecture and loads in a row.
    """

    entry: str
    source: str
    inputs: tuple[str, ...]
    results: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    scalars: Mapping[str, type[np.generic]] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    accumulates: bool = False
    indexed: bool = False
    table: ElementTable = field(default_factory=lambda: ELEMENTS)

    @property
    def arrays(self) -> tuple[str, ...]:
        """All arrays: those that ElementsParams has strides for, in their order there."""
        return (*self.updated, *self.inputs, *self.results)

    @cached_property
    def spec(self) -> KernelSpec:
        """What is compiled and launched."""
        return KernelSpec(
            self.entry,
            self.source,
            (
                *(
                    Pointer(name, const=name in self.inputs, optional=name in self.optional)
                    for name in self.arrays
                ),
                *inputs(*self.numbers, optional=True),
                *(Scalar(name, np.dtype(kind)) for name, kind in self.scalars.items()),
                elements_struct(len(self.arrays)),
            ),
        )

    @cached_property
    def decisions(self) -> Mapping[str, tuple[str, ...]]:
        """Every macro that a call decides, with the values that it may have."""
        flags = [f"WITH_{name.upper()}" for name in self.optional]
        flags += ["ACCUMULATE"] if self.accumulates else []
        return {**self.choices, **dict.fromkeys(flags, (cpp_bool(False), cpp_bool(True)))}

    def vector_items(self, dtype: str) -> int:
        """Return how many items a load brings at the most: 16 bytes of the widest dtype."""
        widest = max(STORAGE[dtype], STORAGE["float32"] if self.float32 else 0)
        return VECTOR_BYTES // widest

    def config(self, arch: int, loads: int) -> ElementConfig:
        """Return the table row for rows of that many loads."""
        rows = rows_for(self.table, arch).items()
        return next(row for limit, row in rows if limit is None or loads <= limit)

    def specialise(
        self, arch: int, dtype: str, loads: int, vec: int, **decided: str
    ) -> Specialisation:
        """Specialise the kernel; `vec` is the items of one load, `decided` has all `decisions`."""
        return _specialise(self, self.config(arch, loads), dtype, vec, tuple(decided.items()))

    def catalogue(self, arch: int = TURING.number) -> Iterator[Specialisation]:
        """Yield every row of the table, dtypes, loads and decisions in pairs."""
        limits = rows_for(self.table, arch)
        beyond = max(filter(None, limits)) + 1
        decisions = self.decisions.values()
        for dtype, limit, whole, *decided in pairs(STORAGE, limits, (True, False), *decisions):
            vec = self.vector_items(dtype) if whole else 1
            macros = dict(zip(self.decisions, decided, strict=True))
            yield self.specialise(arch, dtype, limit or beyond, vec, **macros)


@cache
def _specialise(
    kernel: ElementKernel,
    config: ElementConfig,
    dtype: str,
    vec: int,
    decided: tuple[tuple[str, str], ...],
) -> Specialisation:
    macros: dict[str, Any] = {
        "DTYPE": dtype,
        "LANES": config.lanes,
        "VECTORS": config.loads(vec),
        "VEC": vec,
        **dict(decided),
    }
    return kernel.spec.specialise(threads=config.threads, gates=_GATES, **macros)


def catalogue_of(*kernels: ElementKernel, arch: int) -> Iterator[Specialisation]:
    """Yield the catalogues of several kernels."""
    return itertools.chain.from_iterable(kernel.catalogue(arch) for kernel in kernels)

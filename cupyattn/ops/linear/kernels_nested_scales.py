"""Launch configurations of absmax of blocks in codes of eight bits: into them and out of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, inputs
from cupyattn.runtime.tables import FLOAT_BYTES

_COUNT = Scalar("count", np.dtype(np.uint32))
NEST = KernelSpec(
    "nest_scales",
    "linear/quantised/nest_scales.cu",
    (*inputs("absmax"), *map(Pointer, ("scales", "super_scales", "scale_table")), _COUNT),
)
EXPAND = KernelSpec(
    "expand_scales",
    "linear/quantised/expand_scales.cu",
    (*inputs("scales", "super_scales", "scale_table"), Pointer("absmax"), _COUNT),
)
KERNELS = (NEST, EXPAND)

GROUP = 64
"""Blocks that share a pair of super_scales."""
TABLE = 256
"""Numbers that a code may stand for."""
_THREADS = TABLE  # each brings an entry of the table, or makes one
_ITEMS = 4  # of a thread of EXPAND: 16 bytes of float32


@cache
def nest() -> Specialisation:
    """Specialise NEST."""
    return NEST.specialise(threads=_THREADS, GROUP=GROUP)


@cache
def expand() -> Specialisation:
    """Specialise EXPAND."""
    return EXPAND.specialise(threads=_THREADS, static_shared_bytes=TABLE * FLOAT_BYTES, GROUP=GROUP)


def nest_ctas(count: int) -> int:
    """Return the grid: a warp for each group of blocks."""
    return -(-count // (GROUP * (_THREADS // WARP_SIZE)))


def expand_ctas(count: int) -> int:
    """Return the grid."""
    return -(-count // (_ITEMS * _THREADS))


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield both."""
    del arch  # one row serves all
    yield from (nest(), expand())

"""Launch configurations of block masks: an expression's tiles, and lists of them for kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.ops.attention.kernels.modifiers import Modifiers, modified
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, inputs
from cupyattn.runtime.tables import cpp_bool

TILE = 16
"""Queries and keys of a tile: what the tiles of all kernels are multiples of."""
WARPS = 8
"""Warps of a CTA of each kernel. A warp has a tile, or an entry of a list; a CTA has a list."""
LIST_HEAD = 2
"""Pairs of a list before its tiles (kListHead in block_lists.cuh)."""

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)

TILES_KERNEL = KernelSpec(
    "attention_block_mask",
    "attention/block_mask.cu",
    (
        Pointer("tiles"),
        Scalar("count", _INT64),
        *(Scalar(name, _INT32) for name in ("heads", "sq", "sk")),
    ),
)
LISTS_KERNEL = KernelSpec(
    "attention_block_lists",
    "attention/block_lists.cu",
    (
        *inputs("block_mask"),
        Pointer("lists"),
        *(Scalar(name, _INT32) for name in ("rows", "columns")),
        *(Scalar(f"{name}_span", _INT32) for name in ("own", "walked", "part")),
    ),
)
ORDER_KERNEL = KernelSpec(
    "attention_block_order",
    "attention/block_order.cu",
    (
        Pointer("lists"),
        Scalar("groups", _INT64),
        *(Scalar(name, _INT32) for name in ("group", "own_tiles", "walked_tiles")),
    ),
)
KERNELS = (TILES_KERNEL, LISTS_KERNEL, ORDER_KERNEL)


@cache
def tiles(modifiers: Modifiers | None) -> Specialisation:
    """Specialise the kernel that asks an expression."""
    return modified(TILES_KERNEL, modifiers).specialise(
        threads=WARPS * WARP_SIZE, TILE=TILE, MODIFIED=cpp_bool(modifiers is not None)
    )


@cache
def lists(of_keys: bool) -> Specialisation:
    """Specialise the kernel that lists tiles, for CTAs of rows or `of_keys`."""
    return LISTS_KERNEL.specialise(threads=WARPS * WARP_SIZE, OF_KEYS=cpp_bool(of_keys))


@cache
def order() -> Specialisation:
    """Specialise the kernel that finds which lists are longest."""
    return ORDER_KERNEL.specialise(threads=WARPS * WARP_SIZE)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield all: what asks an expression without one, by which all is seen."""
    del arch  # one row serves all
    yield tiles(None)
    yield lists(False)
    yield lists(True)
    yield order()

"""Launch configurations of block masks: an expression's tiles, and bits of them for kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.kernels.arch import TURING, WARP_SIZE
from cupyattn.kernels.configs.attention.modifiers import Modifiers, modified
from cupyattn.kernels.configs.tables import cpp_bool
from cupyattn.kernels.spec import KernelSpec, Pointer, Scalar, Specialisation, inputs

TILE = 16
"""Queries and keys of a tile: what the tiles of all kernels are multiples of."""
WARPS = 8
"""Of a CTA of either kernel, each a tile or a word of bits."""

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
BITS_KERNEL = KernelSpec(
    "attention_block_bits",
    "attention/block_bits.cu",
    (
        *inputs("block_mask"),
        Pointer("bits"),
        Scalar("matrices", _INT64),
        *(Scalar(name, _INT32) for name in ("rows", "columns", "own_span", "walked_span")),
    ),
)
KERNELS = (TILES_KERNEL, BITS_KERNEL)


@cache
def tiles(modifiers: Modifiers | None) -> Specialisation:
    """Specialise the kernel that asks an expression."""
    return modified(TILES_KERNEL, modifiers).specialise(
        threads=WARPS * WARP_SIZE, TILE=TILE, MODIFIED=cpp_bool(modifiers is not None)
    )


@cache
def bits(of_keys: bool) -> Specialisation:
    """Specialise the kernel that puts tiles together, for CTAs of rows or `of_keys`."""
    return BITS_KERNEL.specialise(threads=WARPS * WARP_SIZE, OF_KEYS=cpp_bool(of_keys))


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield all: what asks an expression without one, by which all is seen."""
    del arch  # one row serves all
    yield tiles(None)
    yield bits(False)
    yield bits(True)

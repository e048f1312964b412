"""Launch configurations of what quantises weights, and of what they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.ops.linear.structs import DEQUANTIZE_STRUCT, QUANTIZE_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.tables import cpp_bool, pairs

QUANTIZE = KernelSpec(
    "quantize",
    "linear/quantised/quantize.cu",
    (*inputs("w"), Pointer("codes"), Pointer("scales"), QUANTIZE_STRUCT),
)
DEQUANTIZE = KernelSpec(
    "dequantize",
    "linear/quantised/dequantize.cu",
    (
        *inputs("codes", "scales"),
        *inputs("super_scales", optional=True),
        Pointer("out"),
        DEQUANTIZE_STRUCT,
    ),
)
KERNELS = (QUANTIZE, DEQUANTIZE)

FORMATS = {"nf4": "Nf4", "int4": "Int4", "int8": "Int8", "q4_1": "Q4_1", "q4_k": "Q4_K"}
"""Formats by their names in Python and in C++ (formats.cuh)."""
MADE = ("nf4", "int4", "int8")
"""Those that QUANTIZE makes; the others come from files, or of these (nested_scales.py)."""

THREADS = 256
LANE_WEIGHTS = 8
"""What a lane of QUANTIZE has at a time: 4 bytes of codes, or 8."""
UNITS = {True: 8, False: 32}
"""Weights of a thread of DEQUANTIZE: along K a store of 16 bytes; across it what a sector of codes
holds, for neighbouring threads read other rows."""
CODEBOOK_BYTES = {"nf4": 64}
"""Of shared memory, by format."""


def lanes_of(block_size: int) -> int:
    """Return how many lanes share a block along K: a power of two.

    Examples
    --------
    >>> lanes_of(32), lanes_of(48), lanes_of(64), lanes_of(576)
    (4, 4, 8, 32)
    """
    return min(1 << (block_size // LANE_WEIGHTS).bit_length() - 1, WARP_SIZE)


@cache
def specialise_quantize(kind: str, dtype: str, lanes: int, vec: int) -> Specialisation:
    """Specialise QUANTIZE; lanes is 1 across K, vec 1 or 16 bytes' worth of weights."""
    return QUANTIZE.specialise(
        threads=THREADS, FORMAT=FORMATS[kind], DTYPE=dtype, LANES=lanes, VEC=vec
    )


@cache
def specialise_dequantize(kind: str, dtype: str, along: bool, vec: int) -> Specialisation:
    """Specialise DEQUANTIZE; `along` has its lanes along K, vec is 1 or 16 bytes' worth."""
    return DEQUANTIZE.specialise(
        threads=THREADS,
        static_shared_bytes=CODEBOOK_BYTES.get(kind, 0),
        FORMAT=FORMATS[kind],
        DTYPE=dtype,
        UNIT=UNITS[along],
        ALONG=cpp_bool(along),
        VEC=vec,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield formats, dtypes, lanes and loads in pairs."""
    del arch  # one row serves all
    for kind, dtype, lanes, whole in pairs(MADE, STORAGE, (1, 4, 8, 16, 32), (True, False)):
        vec = vector_items(dtype) if whole and lanes > 1 else 1
        yield specialise_quantize(kind, dtype, lanes, vec)
    for kind, dtype, along, whole in pairs(FORMATS, STORAGE, (True, False), (True, False)):
        vec = vector_items(dtype) if whole and along else 1
        yield specialise_dequantize(kind, dtype, along, vec)

"""Kernels that run before those of attention: codes of keys, and rotations of q and k.

Rotations are of gradients after attention too. Every call with rotary runs one, but for the queries
of the tensor-core forward, whose module says what a rotation within the loop would cost. The
backward's loop has no registers to spare either.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.ops.attention.kernels.parameters import PACKED, POSITIONS
from cupyattn.ops.attention.structs import (
    ATTENTION_STRUCT,
    CENTRES_STRUCT,
    KEYS_STRUCT,
    ROTARY_STRUCT,
    VARLEN_STRUCT,
)
from cupyattn.ops.rope.kernels import TABLE, specialise_rotation
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs, rows_for

_ARRAYS = inputs("x0", "x1", "cos", "sin")
_RESULTS = Pointer("out0"), Pointer("out1")
DENSE = KernelSpec(
    "attention_rotary",
    "attention/rotary.cu",
    (*_ARRAYS, *POSITIONS, *_RESULTS, ATTENTION_STRUCT, ROTARY_STRUCT),
)
VARLEN = KernelSpec(
    "attention_rotary_varlen",
    "attention/rotary.cu",
    (*_ARRAYS, *PACKED, *POSITIONS, *_RESULTS, VARLEN_STRUCT, ROTARY_STRUCT),
)
CENTRES = KernelSpec(
    "key_centres",
    "attention/key_centres.cu",
    (*inputs("k"), *inputs("cu_seqlens", optional=True), Pointer("centre"), CENTRES_STRUCT),
)
QUANTIZE_KEYS = KernelSpec(
    "quantize_keys",
    "attention/quantize_keys.cu",
    (
        *inputs("k"),
        *inputs("cu_seqlens", optional=True),
        *inputs("centre"),
        *map(Pointer, ("codes", "scales")),
        KEYS_STRUCT,
    ),
)

ITEMS, KEYS = 8, 4  # kItems and kKeys in quantize_keys.cu
_CENTRE_THREADS, _CENTRE_LANES = 256, 8
CENTRE_COLUMNS = _CENTRE_LANES * ITEMS  # of a key that a CTA of key_centres has
KEY_THREADS = 128
KERNELS = (DENSE, VARLEN, CENTRES, QUANTIZE_KEYS)


@cache
def specialise_centres(dtype: str, vec: int, packed: bool) -> Specialisation:
    """Specialise the kernel that computes centres; `vec` is 1 or 8 items of a load."""
    return CENTRES.specialise(
        threads=_CENTRE_THREADS,
        static_shared_bytes=_CENTRE_THREADS // WARP_SIZE * CENTRE_COLUMNS * FLOAT_BYTES,
        gates=Gates(registers=128),
        reason=f"a CTA adds {CENTRE_COLUMNS} columns of 256 keys, with all loads in flight",
        DTYPE=dtype,
        VEC=vec,
        PACKED=cpp_bool(packed),
    )


@cache
def specialise_keys(dtype: str, lanes: int, vec: int, packed: bool) -> Specialisation:
    """Specialise the kernel that writes codes; `packed` if each sequence has its own centre."""
    return QUANTIZE_KEYS.specialise(
        threads=KEY_THREADS,
        gates=Gates(registers=96),
        reason=f"{lanes} lanes have {KEYS} keys of a head, and read their centre once",
        DTYPE=dtype,
        LANES=lanes,
        VEC=vec,
        PACKED=cpp_bool(packed),
    )


def lanes_of(dim: int) -> int:
    """Return the lanes that share a key: a power of two."""
    return 1 << (-(-dim // ITEMS) - 1).bit_length()


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rotations (rope's rows, dtypes, loads, tables, choices) and codes of keys in pairs."""
    rows, flags = rows_for(TABLE, arch), (False, True)
    axes = STORAGE, rows, flags, STORAGE, (DENSE, VARLEN), flags, flags
    for dtype, limit, whole, table, spec, interleaved, accumulate in pairs(*axes):
        vec = vector_items(dtype) if whole else 1
        yield specialise_rotation(spec, rows[limit], dtype, vec, table, interleaved, accumulate)
    for dtype, whole, packed in pairs(STORAGE, flags, flags):
        yield specialise_centres(dtype, ITEMS if whole else 1, packed)
    for dtype, dim, whole, packed in pairs(STORAGE, (64, 128, 256), flags, flags):
        yield specialise_keys(dtype, lanes_of(dim), ITEMS if whole else 1, packed)

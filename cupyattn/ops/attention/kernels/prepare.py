"""Kernels that run before those of attention: codes of keys, and rotations of q and k.

Rotations are of gradients after attention too. Every call with rotary runs one, but for the queries
of the tensor-core forward, whose module says what a rotation within the loop would cost. The
backward's loop has no registers to spare either.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

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
    (
        *inputs("k"),
        *inputs("cu_seqlens", "seqused_k", "cos", "sin", "positions", optional=True),
        Pointer("centre"),
        CENTRES_STRUCT,
    ),
)
QUANTIZE_KEYS = KernelSpec(
    "quantize_keys",
    "attention/quantize_keys.cu",
    (
        *inputs("k"),
        *inputs("cu_seqlens", "cos", "sin", "positions", optional=True),
        *inputs("centre"),
        *map(Pointer, ("codes", "scales")),
        Pointer("q", optional=True),
        KEYS_STRUCT,
    ),
)

ITEMS, KEYS = 8, 4  # kItems and kKeys in quantize_keys.cu
_CENTRE_THREADS, _CENTRE_LANES = 256, 8
CENTRE_COLUMNS = _CENTRE_LANES * ITEMS  # of a key that a CTA of key_centres has
KEY_THREADS = 128
KERNELS = (DENSE, VARLEN, CENTRES, QUANTIZE_KEYS)


class KeyLaunch(NamedTuple):
    """Options of specialisations of both kernels of keys."""

    dtype: str
    whole: bool
    """Whether a load has 8 items."""
    packed: bool
    """Whether each token's sequence is looked up."""
    table: str = "void"
    """Dtype of the cosines and sines; void without a rotation."""
    interleaved: bool = False

    @property
    def macros(self) -> dict[str, Any]:
        """The macros that both have."""
        return {
            "DTYPE": self.dtype,
            "VEC": ITEMS if self.whole else 1,
            "PACKED": cpp_bool(self.packed),
            "TABLE": self.table,
            "INTERLEAVED": cpp_bool(self.interleaved),
        }


@cache
def specialise_centres(launch: KeyLaunch) -> Specialisation:
    """Specialise the kernel that computes centres."""
    return CENTRES.specialise(
        threads=_CENTRE_THREADS,
        static_shared_bytes=_CENTRE_THREADS // WARP_SIZE * CENTRE_COLUMNS * FLOAT_BYTES,
        gates=Gates(registers=128),
        reason=f"a CTA adds {CENTRE_COLUMNS} columns of 256 keys, with all loads in flight",
        **launch.macros,
    )


@cache
def specialise_keys(lanes: int, launch: KeyLaunch) -> Specialisation:
    """Specialise the kernel that writes codes."""
    return QUANTIZE_KEYS.specialise(
        threads=KEY_THREADS,
        gates=Gates(registers=72 if launch.table == "void" else 128),
        reason=f"{lanes} lanes have {KEYS} keys of a head, and read their centre once",
        LANES=lanes,
        **launch.macros,
    )


def lanes_of(dim: int) -> int:
    """Return the lanes that share a key: a power of two, at least as many as they have keys."""
    return max(1 << (-(-dim // ITEMS) - 1).bit_length(), KEYS)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield rotations (rope's rows, dtypes, loads, tables, choices) and codes of keys in pairs."""
    rows, flags = rows_for(TABLE, arch), (False, True)
    axes = STORAGE, rows, flags, STORAGE, (DENSE, VARLEN), flags, flags
    for dtype, limit, whole, table, spec, interleaved, accumulate in pairs(*axes):
        vec = vector_items(dtype) if whole else 1
        yield specialise_rotation(spec, rows[limit], dtype, vec, table, interleaved, accumulate)
    tables = ("void", *STORAGE)
    for dtype, whole, packed, table, interleaved in pairs(STORAGE, flags, flags, tables, flags):
        paired = interleaved and table != "void"
        yield specialise_centres(KeyLaunch(dtype, whole, packed, table, paired))
    for dtype, dim, whole, packed, table, interleaved in pairs(
        STORAGE, (64, 128, 256), flags, flags, tables, flags
    ):
        paired = interleaved and table != "void"
        yield specialise_keys(lanes_of(dim), KeyLaunch(dtype, whole, packed, table, paired))

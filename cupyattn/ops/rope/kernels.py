"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, Struct, inputs
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.structs import TOKEN_STRIDES
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for

# RopeParams in cuda_src/rope/rotate.cu
ROPE_PARAMS = np.dtype(
    [
        *((array, TOKEN_STRIDES, (2,)) for array in ("x", "out")),
        *((f"{table}_stride", np.int64) for table in ("cos", "sin")),
        *((f"positions_{axis}", np.int64) for axis in ("batch", "seq")),
        ("table_length", np.int64),
        *((field, np.uint32) for field in ("tokens", "seq")),
        *((field, np.uint32, (2,)) for field in ("heads", "groups")),
        *((field, np.uint32) for field in ("slots", "rotated_slots", "half", "dim")),
        ("sign", np.float32),
    ],
    align=True,
)


ROPE_STRUCT = Struct("params", ROPE_PARAMS, "RopeParams")


ROPE = KernelSpec(
    "rope",
    "rope/rotate.cu",
    (
        *inputs("x0"),
        *inputs("x1", optional=True),
        *inputs("cos", "sin"),
        *inputs("positions", optional=True),
        Pointer("out0"),
        Pointer("out1", optional=True),
        ROPE_STRUCT,
    ),
)
KERNELS = (ROPE,)

POSITIONS = {"int32": "int", "int64": "int64"}
"""Dtypes of positions, with their names in C."""


@dataclass(frozen=True)
class RopeConfig:
    """A CTA, and how many heads share a thread's cosines and sines."""

    threads: int
    heads: int
    reason: str


# The first row that has not fewer heads than any array; None takes the rest. Timed on an H200 as
# compute_75 code by `python -m cupyattn.benchmark layers --operation rope`, 2026-11-22: 8192
# tokens, float16.
TABLE: Mapping[int, Mapping[int | None, RopeConfig]] = {
    75: {
        1: RopeConfig(256, 1, "one head: no thread has a head that is not there"),
        None: RopeConfig(128, 2, "two heads a thread: 32 x 128 take 39 us, with four 40, one 41"),
    }
}


def rope_config(arch: int, heads: int) -> RopeConfig:
    """Return the table's row for arrays of at most that many heads."""
    rows = rows_for(TABLE, arch).items()
    return next(row for limit, row in rows if limit is None or heads <= limit)


@cache
def specialise_rotation(
    spec: KernelSpec,
    config: RopeConfig,
    dtype: str,
    vec: int,
    table: str,
    interleaved: bool,
    accumulate: bool,
    **macros: Any,
) -> Specialisation:
    """Specialise a kernel that rotates by tables of that dtype, by a row of the table.

    `vec` is the items of one load, 1 or 16 bytes' worth.
    """
    return spec.specialise(
        threads=config.threads,
        DTYPE=dtype,
        HEADS=config.heads,
        VEC=vec,
        TABLE=table,
        **macros,
        INTERLEAVED=cpp_bool(interleaved),
        ACCUMULATE=cpp_bool(accumulate),
    )


def specialise_rope(
    config: RopeConfig,
    dtype: str,
    vec: int,
    table: str,
    position: str,
    interleaved: bool,
    accumulate: bool,
) -> Specialisation:
    """Specialise the layer's kernel, for positions of that dtype."""
    pairing = interleaved, accumulate
    return specialise_rotation(
        ROPE, config, dtype, vec, table, *pairing, POSITION=POSITIONS[position]
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row of the table, dtypes, loads, tables, positions and choices in pairs."""
    rows, flags = rows_for(TABLE, arch), (False, True)
    axes = STORAGE, rows, flags, STORAGE, POSITIONS, flags, flags
    for dtype, limit, whole, table, position, interleaved, accumulate in pairs(*axes):
        vec = vector_items(dtype) if whole else 1
        yield specialise_rope(rows[limit], dtype, vec, table, position, interleaved, accumulate)

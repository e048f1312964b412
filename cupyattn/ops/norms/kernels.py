"""Kernels of layer norm and RMS norm: one forward and one backward serve both norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from cupyattn.ops.linear.weight_formats import ROTATION
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.row_kernel import Result, RowConfig, RowKernel, RowTable
from cupyattn.runtime.spec import Gates, Specialisation
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.tables import pairs, rows_for, with_gates

# For rows of 768, 2048 and 4096 items these were the fastest of several configurations that
# `python -m cupyattn.benchmark layers` timed (H200, compute_75 code, 2026-11-22, float16, 8192
# rows).
#
# Every row reads weight and bias again, from a cache: 2.0 times the sectors of x and out. CTAs that
# loop over rows, as in the backward, and keep both in registers touch 1.03 times the sectors and
# issue a tenth fewer instructions. But they take a third more registers, so that fewer rows are in
# flight, which limits an H200 (forward.cu). A T4 gains nothing: in the Turing model its load units
# are busy for a quarter of the time that memory takes (NVRTC 12.9, 2026-11-24).
_FORWARD_ROWS = {
    128: RowConfig(128, 8, 16, "short rows: four to a warp keep its lanes busy"),
    1024: RowConfig(128, 32, 32, "a warp a row: no barrier, all its loads in flight at once"),
    2048: RowConfig(128, 128, 16, "four warps a row: half the items a thread, a tenth less time"),
    4096: RowConfig(256, 256, 16, "eight warps a row: half the items a thread again"),
    16_384: RowConfig(512, 512, 32, "a CTA a row, still read once"),
    None: RowConfig(1024, 1024, 0, "longer than registers hold: a second read, from the cache"),
}
FORWARD_ROWS: RowTable = {
    75: with_gates(
        _FORWARD_ROWS,
        {
            128: Gates(registers=72),
            1024: Gates(registers=128),
            2048: Gates(registers=80),
            4096: Gates(registers=72),
            16_384: Gates(registers=128),
        },
    )
}

STREAM_ROWS: RowTable = {
    75: with_gates(
        _FORWARD_ROWS,
        {
            128: Gates(registers=96),
            1024: Gates(registers=152),
            **dict.fromkeys((2048, 4096), Gates(registers=96)),
            16_384: Gates(registers=128),
        },
    )
}
"""For rows of float32, which take more registers."""

_BACKWARD_ROWS = {
    128: RowConfig(256, 8, 16, "short rows: four to a warp keep its lanes busy", summing_ctas=2),
    1024: RowConfig(256, 32, 32, "a warp a row: no barrier", summing_ctas=1),
    2048: RowConfig(512, 128, 16, "four rows at once write one partial sum", summing_ctas=1),
    4096: RowConfig(512, 256, 16, "two rows at once write one partial sum", summing_ctas=1),
    8192: RowConfig(512, 512, 16, "a CTA a row, still read once", summing_ctas=1),
    None: RowConfig(
        1024, 1024, 0, "longer than registers hold: a second read, from the cache", summing_ctas=1
    ),
}
BACKWARD_ROWS: RowTable = {
    75: with_gates(
        _BACKWARD_ROWS,
        {
            128: Gates(registers=200),
            1024: Gates(registers=255),
            **dict.fromkeys((2048, 4096, 8192), Gates(registers=128)),
        },
    )
}


@dataclass(slots=True)
class NormArrays(Record[T]):
    """Arrays of a forward call of either norm."""

    x: T
    residual: T | None = None
    weight: T | None = None
    bias: T | None = None
    out: T | None = None
    total: T | None = None
    mean: T | None = None
    rstd: T | None = None


@dataclass(slots=True)
class CodedArrays(NormArrays[T]):
    """Arrays of a forward call whose out is quantised."""

    codes: T | None = None
    scales: T | None = None


@dataclass(slots=True)
class NormBackwardArrays(Record[T]):
    """Arrays of a backward call of either norm."""

    SHOWN_AS: ClassVar = MappingProxyType(
        {"dx": "grads.dx", "dweight": "grads.dweight", "dbias": "grads.dbias"}
    )

    dout: T
    x: T
    dtotal: T | None = None
    weight: T | None = None
    bias: T | None = None
    mean: T | None = None
    rstd: T | None = None
    dx: T | None = None
    dweight: T | None = None
    dbias: T | None = None
    workspace: T | None = None


FORWARD = RowKernel(
    "norm_forward",
    "norms/forward.cu",
    NormArrays,
    rows=("x", "residual"),
    columns=("weight", "bias"),
    results={
        "out": Result.ROW,
        "total": Result.ROW,
        "mean": Result.PER_ROW,
        "rstd": Result.PER_ROW,
    },
    optional=("residual", "weight", "bias", "mean", "rstd"),
    follows={"total": "residual"},
    in_place={"out": "x", "total": "residual"},
    choices={"centred": (True, False)},
    constants=dict.fromkeys(
        ("STREAM", "WITH_SCALE", "WITH_INNER_WEIGHT", "WITH_CODES", "ROTATED"), "false"
    ),
    scalars={"eps": np.float32, "weight_offset": np.float32},
    table=FORWARD_ROWS,
)
"""Forward of layer norm if `centred`, otherwise of RMS norm, which has no mean."""

CODED_FORWARD = replace(
    FORWARD,
    record=CodedArrays,
    results={**FORWARD.results, "codes": Result.CODES, "scales": Result.SCALE},
    optional=(*FORWARD.optional, "codes"),
    follows={**FORWARD.follows, "scales": "codes"},
    replaces={"codes": "out"},
    choices={**FORWARD.choices, "rotated": (True, False)},
    constants=dict.fromkeys(("STREAM", "WITH_SCALE", "WITH_INNER_WEIGHT"), "false"),
)
"""Forward whose out is quantised as `cupyattn.quantize_rows` does: its codes are always present."""

BACKWARD = RowKernel(
    "norm_backward",
    "norms/backward.cu",
    NormBackwardArrays,
    rows=("dout", "x", "dtotal"),
    columns=("weight", "bias"),
    per_row=("mean", "rstd"),
    results={"dx": Result.ROW, "dweight": Result.COLUMN_SUM, "dbias": Result.COLUMN_SUM},
    optional=("dtotal", "weight", "bias", "mean"),
    follows={"dweight": "weight", "dbias": "bias"},
    constants={"STREAM": "false"},
    scalars={"weight_offset": np.float32, "accumulate": np.int32},
    table=BACKWARD_ROWS,
)
"""Backward of layer norm if there is a mean, otherwise of RMS norm.

A bias means that its gradient is wanted; its items are not read.
"""


@dataclass(slots=True)
class StreamArrays(Record[T]):
    """Arrays of a forward call whose x is a float32 residual stream."""

    x: T
    residual: T | None = None
    weight: T | None = None
    bias: T | None = None
    scale: T | None = None
    inner_weight: T | None = None
    out: T | None = None
    total: T | None = None
    mean: T | None = None
    rstd: T | None = None


@dataclass(slots=True)
class AddedArrays(StreamArrays[T]):
    """Arrays of a call that passes the stream as the residual, and the term added to it as x."""

    SHOWN_AS: ClassVar = MappingProxyType(
        {
            "x": "residual",
            "residual": "x",
            "scale": "x_scale",
            "inner_weight": "x_norm's weight",
        }
    )


STREAM_FORWARD = replace(
    FORWARD,
    record=StreamArrays,
    columns=(*FORWARD.columns, "scale", "inner_weight"),
    optional=(*FORWARD.optional, "scale", "inner_weight"),
    stream=("x", "total", "scale"),
    scalars={**FORWARD.scalars, "inner_eps": np.float32, "inner_offset": np.float32},
    constants={"STREAM": "true", "WITH_CODES": "false", "ROTATED": "false"},
    table=STREAM_ROWS,
)
"""Forward of a float32 x to the 16-bit dtype of the weight, which a call must have."""

ADDED_FORWARD = replace(
    STREAM_FORWARD, record=AddedArrays, in_place={"out": "residual", "total": "x"}
)
"""Forward of a float32 x to which a 16-bit residual is added: the stream, and its next term."""

STREAM_BACKWARD = replace(
    BACKWARD,
    stream=("x", "dtotal", "dx"),
    constants={"STREAM": "true"},
)
"""Backward of either: x, dtotal and dx are float32."""


KERNELS = tuple(
    kernel.spec
    for kernel in (
        FORWARD,
        BACKWARD,
        CODED_FORWARD,
        STREAM_FORWARD,
        ADDED_FORWARD,
        STREAM_BACKWARD,
    )
)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every configuration, with dtypes, loads and optional arrays in pairs."""
    yield from FORWARD.catalogue(arch)
    limits = [limit for limit in rows_for(FORWARD_ROWS, arch) if limit is not None]
    for dtype, limit, centred, is_rotated, residual in pairs(
        STORAGE, limits, (True, False), (True, False), (True, False)
    ):
        vec = vector_items(dtype)
        present = ["weight", "codes", *(["bias"] if centred else []), *["residual"] * residual]
        choices = {"centred": centred, "rotated": is_rotated}
        if CODED_FORWARD.config(arch, limit).lanes * vec >= ROTATION:
            macros = CODED_FORWARD.macros_of(present, {}, choices)
            yield CODED_FORWARD.specialise(arch, dtype, limit, vec, macros)
    yield from BACKWARD.catalogue(arch)
    yield from STREAM_FORWARD.catalogue(arch)
    yield from STREAM_BACKWARD.catalogue(arch)

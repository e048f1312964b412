"""Launch configurations of the row-wise softmax kernels, for sm_75."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cupyattn.kernels.configs.dtypes import STORAGE, vector_items
from cupyattn.kernels.registry import SOFTMAX_BACKWARD, SOFTMAX_FORWARD
from cupyattn.kernels.spec import KernelSpec, Specialisation, Struct


@dataclass(frozen=True)
class RowConfig:
    """How many threads share a row, and how much of it each keeps in registers."""

    threads: int
    lanes: int
    items: int
    """Items of a row that a thread holds; 0 where the row is read again in each pass."""
    reason: str

    @property
    def rows_per_cta(self) -> int:
        """Rows that one CTA works on side by side."""
        return self.threads // self.lanes


# The first row whose length is not below that of the array's last axis; None takes the rest.
ROWS: dict[int | None, RowConfig] = {
    128: RowConfig(128, 8, 16, "short rows: four to a warp keep its lanes busy"),
    1024: RowConfig(128, 32, 32, "a warp a row: no barrier, 32 items a thread in registers"),
    8192: RowConfig(256, 256, 32, "a CTA a row, still read once"),
    None: RowConfig(512, 512, 0, "longer than registers hold: two reads"),
}


def row_config(length: int) -> RowConfig:
    """Return the table row for rows of `length` items."""
    return next(config for limit, config in ROWS.items() if limit is None or length <= limit)


@cache
def forward(dtype: str, length: int, vec: int) -> Specialisation:
    """Specialise the forward kernel; `vec` is the items of one load, 1 or 16 bytes' worth."""
    return _specialise(SOFTMAX_FORWARD, row_config(length), dtype, vec)


@cache
def backward(dtype: str, length: int, vec: int) -> Specialisation:
    """Specialise the backward kernel; `vec` is the items of one load, 1 or 16 bytes' worth."""
    return _specialise(SOFTMAX_BACKWARD, row_config(length), dtype, vec)


def _specialise(spec: KernelSpec, config: RowConfig, dtype: str, vec: int) -> Specialisation:
    params = spec.parameters[-1]
    assert isinstance(params, Struct)
    return spec.specialise(
        threads=config.threads,
        shared_bytes=0,
        DTYPE=dtype,
        THREADS=config.threads,
        LANES=config.lanes,
        STRIPS=max(config.items // vec, 1),
        VEC=vec,
        RESIDENT="true" if config.items else "false",
        PARAMS_BYTES=params.dtype.itemsize,
    )


def catalogue() -> Iterator[Specialisation]:
    """Yield every row in each dtype, with vector and scalar loads, forward and backward."""
    for dtype in STORAGE:
        for limit in ROWS:
            length = limit or max(filter(None, ROWS)) + 1
            for vec in (vector_items(dtype), 1):
                yield forward(dtype, length, vec)
                yield backward(dtype, length, vec)

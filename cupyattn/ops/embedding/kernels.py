"""Embedding: rows of a table, and the gradient of the table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.element_kernel import ElementConfig, ElementTable
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.structs import elements_struct
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for

_INT32, _INT64, _UINT32 = (np.dtype(kind) for kind in (np.int32, np.int64, np.uint32))

FORWARD = KernelSpec(
    "embedding",
    "embedding/forward.cu",
    (
        *inputs("table", "ids"),
        Pointer("out"),
        Scalar("table_rows", _INT64),
        Scalar("table_stride", _INT64),
        elements_struct(2),
    ),
)
IDS = KernelSpec(
    "embedding_ids",
    "embedding/ids.cu",
    (
        *inputs("ids"),
        Pointer("flat"),
        Scalar("rows", _INT32),
        Scalar("padded", _INT32),
        elements_struct(1),
    ),
)
SORT = KernelSpec(
    "embedding_sort",
    "embedding/sort.cu",
    (*inputs("ids"), Pointer("order"), Pointer("rows"), Scalar("count", _INT32)),
)
SUM = KernelSpec(
    "embedding_backward",
    "embedding/backward.cu",
    (
        *inputs("dout", "order", "rows"),
        Pointer("dtable"),
        Pointer("partials"),
        Scalar("table_rows", _INT32),
        Scalar("table_stride", _INT64),
        elements_struct(1),
    ),
)
COMBINE = KernelSpec(
    "embedding_combine",
    "embedding/combine.cu",
    (
        *inputs("rows", "partials"),
        Pointer("dtable"),
        Scalar("count", _INT32),
        Scalar("table_rows", _INT32),
        Scalar("table_stride", _INT64),
        Scalar("length", _INT64),
        Scalar("column_blocks", _UINT32),
    ),
)
KERNELS = (FORWARD, IDS, SORT, SUM, COMBINE)

_IDS = {"int32": "int", "int64": "int64"}
"""Dtypes of ids, with their names in C."""

THREADS = 256
SORT_READS = 4
"""Ids that a thread of the sorting kernel reads at a time: they are padded to that of a CTA."""
CHUNK = 32
"""Sorted tokens of a warp: a lane knows one."""
_WARP = 32


# A load of a row waits for its id: two a thread are 2, 8 and 9 % faster than the one of other
# element-wise kernels, on 8192 rows of 768, 2048 and 4096 of float16 (an H200 as compute_75 code,
# 2026-11-22, `python -m cupyattn.benchmark layers --operation embedding`).
# Rows copied as words, by a warp a unit, take 8.96, 18.92 and 35.69 us there; converted, by 8
# threads, they took 9.03, 19.03 and 36.33 (the same device, 2026-11-24, by a script that is not
# kept). What fits in one such unit was not measured, and stays with 8 threads.
# Limits are bytes of a row here: single items count as what they are.
FORWARD_ROWS: ElementTable = {
    75: {
        1024: ElementConfig(128, 8, 2, 8, "rows of up to 1 KiB: units of 256 bytes leave few idle"),
        None: ElementConfig(128, 32, 2, 8, "a warp 1,024 bytes"),
    }
}


def forward_config(arch: int, row_bytes: int) -> ElementConfig:
    """Return the row for rows of that many bytes."""
    rows = rows_for(FORWARD_ROWS, arch).items()
    return next(row for limit, row in rows if limit is None or row_bytes <= limit)


@cache
def specialise_forward(config: ElementConfig, dtype: str, vec: int, ids: str) -> Specialisation:
    """Specialise the lookup; `vec` is the items of one load, 1 or 16 bytes' worth."""
    return FORWARD.specialise(
        threads=config.threads,
        DTYPE=dtype,
        LANES=config.lanes,
        VECTORS=config.loads(vec),
        VEC=vec,
        IDS=_IDS[ids],
    )


@cache
def specialise_ids(ids: str) -> Specialisation:
    """Specialise what makes ids int32 and contiguous."""
    return IDS.specialise(threads=THREADS, IDS=_IDS[ids])


@cache
def specialise_sort() -> Specialisation:
    """Specialise the counting sort."""
    words = THREADS + 1 + THREADS // _WARP + 2 * SORT_READS * THREADS
    return SORT.specialise(threads=THREADS, static_shared_bytes=4 * words, READS=SORT_READS)


@cache
def specialise_sums(spec: KernelSpec, dtype: str, vec: int, accumulate: bool) -> Specialisation:
    """Specialise SUM or COMBINE."""
    return spec.specialise(
        threads=THREADS, DTYPE=dtype, VEC=vec, CHUNK=CHUNK, ACCUMULATE=cpp_bool(accumulate)
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row of the table, dtypes, loads and ids in pairs, and the backward's steps."""
    rows = rows_for(FORWARD_ROWS, arch)
    for dtype, limit, whole, ids in pairs(STORAGE, rows, (True, False), _IDS):
        yield specialise_forward(rows[limit], dtype, vector_items(dtype) if whole else 1, ids)
    yield from map(specialise_ids, _IDS)
    yield specialise_sort()
    for dtype, whole, accumulate in pairs(STORAGE, (True, False), (False, True)):
        for spec in (SUM, COMBINE):
            vec = vector_items(dtype) if whole else 1
            yield specialise_sums(spec, dtype, vec, accumulate)

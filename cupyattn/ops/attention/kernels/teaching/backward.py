"""Launch configuration of the naive attention backward kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from cupyattn.ops.attention.structs import TEACHING_BACKWARD_STRUCT
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import FLOAT_BYTES, MAX_HEAD_DIM

NAIVE_KERNEL = KernelSpec(
    "attention_backward_naive",
    "attention/teaching/naive_backward.cu",
    (
        *(*inputs("dout", "q", "k", "v", "out", "lse"), *inputs("dlse", optional=True)),
        *(Pointer("dq"), Pointer("dk"), Pointer("dv")),
        TEACHING_BACKWARD_STRUCT,
    ),
)
KERNELS = (NAIVE_KERNEL,)

THREADS = 128
"""Threads of a CTA, which visits as many keys, or queries, at a time."""


@cache
def naive(dtype: str, head_dim: int, head_dim_v: int) -> Specialisation:
    """Specialise the kernel of dq, dk and dv."""
    return NAIVE_KERNEL.specialise(
        threads=THREADS,
        static_shared_bytes=FLOAT_BYTES * (head_dim + head_dim_v + 2 * THREADS),
        gates=Gates(registers=96 if max(head_dim, head_dim_v) <= 256 else 128),
        DTYPE=dtype,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel at the largest head dims in each dtype."""
    del arch
    for dtype in STORAGE:
        yield naive(dtype, MAX_HEAD_DIM, MAX_HEAD_DIM)

"""Softmax over rows."""

from __future__ import annotations

from collections.abc import Iterator

from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.rows import Result, RowKernel
from cupyattn.kernels.spec import Specialisation

FORWARD = RowKernel(
    "softmax_forward", "layers/softmax_forward.cu", rows=("x",), results={"out": Result.ROW}
)
BACKWARD = RowKernel(
    "softmax_backward",
    "layers/softmax_backward.cu",
    rows=("dout", "out"),
    results={"dx": Result.ROW},
)
KERNELS = (FORWARD.spec, BACKWARD.spec)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row of the table, dtypes and loads in pairs."""
    yield from FORWARD.catalogue(arch)
    yield from BACKWARD.catalogue(arch)

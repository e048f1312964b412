"""Sums of the partial sums that row kernels leave."""

from __future__ import annotations

from collections.abc import Iterator

from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.kernels.configs.rows import COLUMN_SUMS, column_sums
from cupyattn.kernels.spec import Specialisation

KERNELS = (COLUMN_SUMS,)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel for each dtype of the result."""
    del arch  # one row serves all
    yield from map(column_sums, STORAGE)

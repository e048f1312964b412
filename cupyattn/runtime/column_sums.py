"""The kernel that adds the partial column sums of row kernels."""

from __future__ import annotations

from collections.abc import Iterator

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.row_kernel import COLUMN_SUMS, column_sums
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.storage import STORAGE

KERNELS = (COLUMN_SUMS,)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield the kernel for each dtype of the result."""
    del arch  # one configuration for all
    yield from map(column_sums, STORAGE)

"""What plans depend on of a device."""

from __future__ import annotations

from typing import NamedTuple

from cupyattn.runtime.tuning import USUAL, Choices

T4_L2_BYTES = 4 * 2**20


class Card(NamedTuple):
    """A device, as plans see it: tables go by its architecture, grids by its size.

    Its tensor cores decide between kernels. Cards of compute capability 7.5 need not have any.
    """

    arch: int
    """75, 80, ..."""
    multiprocessors: int
    tensor_cores: bool = True
    l2_bytes: int = T4_L2_BYTES
    """Of the cache that all multiprocessors share."""
    choices: Choices = USUAL
    """Rows that plans take where a table has several."""

    def has_mma(self, dtype: str) -> bool:
        """Tell whether products of a dtype run on tensor cores, otherwise in float32 arithmetic.

        Examples
        --------
        >>> [Card(75, 40).has_mma(dtype) for dtype in ("float16", "bfloat16", "float32")]
        [True, False, False]
        >>> Card(75, 16, tensor_cores=False).has_mma("float16")
        False
        """
        return self.tensor_cores and dtype == "float16"

"""The properties of a device that plans depend on."""

from __future__ import annotations

from typing import NamedTuple

from cupyattn.runtime.tuning import USUAL, Choices

T4_L2_BYTES = 4 * 2**20
NATIVE_ARCH = 80
"""The first architecture of kernels with cp.async, and with bfloat16 in mma."""


class DeviceTraits(NamedTuple):
    """The properties of a device that plans depend on.

    The architecture decides the configuration, the number of multiprocessors the grid, and tensor
    cores the kernel. Not all devices of compute capability 7.5 have tensor cores.
    """

    arch: int
    """The compute capability without its dot: 75, 80, ..."""
    multiprocessors: int
    tensor_cores: bool = True
    l2_bytes: int = T4_L2_BYTES
    """The size of the L2 cache, which all multiprocessors share."""
    choices: Choices = USUAL
    """The configurations that plans use where there are several candidates."""
    geforce: bool = False
    """Whether float16 products with float32 sums run at half the rate of other Turing devices."""

    def has_mma(self, dtype: str) -> bool:
        """Tell whether matrix products of a dtype use tensor cores instead of float32 arithmetic.

        Examples
        --------
        >>> [DeviceTraits(75, 40).has_mma(dtype) for dtype in ("float16", "bfloat16", "float32")]
        [True, False, False]
        >>> DeviceTraits(75, 16, tensor_cores=False).has_mma("float16")
        False
        """
        return self.tensor_cores and dtype == "float16"

    @property
    def native(self) -> bool:
        """Whether kernels written for sm_80 and later run: cp.async, and bfloat16 in mma.

        Examples
        --------
        >>> DeviceTraits(90, 132).native, DeviceTraits(75, 40).native
        (True, False)
        """
        return self.tensor_cores and self.arch >= NATIVE_ARCH

    def multiplies(self, dtype: str) -> bool:
        """Tell whether tensor cores multiply a dtype in kernels that have a path for sm_80.

        Examples
        --------
        >>> [DeviceTraits(90, 132).multiplies(dtype) for dtype in ("bfloat16", "float32")]
        [True, False]
        >>> [DeviceTraits(75, 40).multiplies(dtype) for dtype in ("float16", "bfloat16")]
        [True, False]
        """
        return self.has_mma(dtype) or (self.native and dtype == "bfloat16")

"""Whether a GPU has tensor cores that are worth using, and how that is known.

All GPUs of compute capability 7.5 run the mma instructions, but those of dies TU116 and TU117 have
no tensor cores, and run them about four times as slowly as the same products in float32. Nothing
that CUDA says of a device tells them apart: their names do, and the rate of mma itself.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arch import SUB_PARTITIONS, TURING
from cupyattn.runtime.device import Device
from cupyattn.runtime.device.mma_rate import FLOAT32_CYCLES, PRODUCTS, mma_rate
from cupyattn.runtime.plan import launch
from cupyattn.runtime.target import TENSOR_CORES_VARIABLE, tensor_cores_override

# As drivers name them: cards of the dies TU102, TU104 and TU106, then of TU116 and TU117.
_WITH = re.compile(r"\bRTX\b|\bT4G?$|\bT(10|40)$")
_WITHOUT = re.compile(r"\bGTX 16\d0\b|\bMX[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")


class TensorCores(NamedTuple):
    """An answer."""

    present: bool
    because: str
    """A clause, for people."""


IN_CAPTURE = TensorCores(True, "not measured yet: in a CUDA graph capture it is taken to have them")
"""Of a GPU that would have to be measured: mma is right on every one. It is asked again later."""


def without_measuring(capability: int, name: str) -> TensorCores | None:
    """Tell by the environment, the compute capability and the product name; None if none tells.

    Examples
    --------
    >>> without_measuring(75, "NVIDIA GeForce GTX 1650 Ti")
    TensorCores(present=False, because='its name')
    >>> without_measuring(90, "NVIDIA H200")
    TensorCores(present=True, because='its compute capability, 9.0')

    Raises
    ------
    ValueError
        If CUPYATTN_TENSOR_CORES is neither 0 nor 1.
    """
    override = tensor_cores_override()
    if override is not None:
        return TensorCores(override, f"{TENSOR_CORES_VARIABLE}={override:d}")
    if capability > TURING.number:
        return TensorCores(True, f"its compute capability, {capability / 10:.1f}")
    if _WITHOUT.search(name):
        return TensorCores(False, "its name")
    return TensorCores(True, "its name") if _WITH.search(name) else None


def measured(device: Device) -> TensorCores:
    """Time products on one multiprocessor by its own clock; waits for the current stream."""
    cycles: Any = device.empty((SUB_PARTITIONS,), np.dtype(np.int64))
    launch(device, mma_rate(), 1, (cycles,))
    each = max(cycles.tolist()) / PRODUCTS
    return TensorCores(
        each < FLOAT32_CYCLES,
        f"measured: a product of 16 x 8 x 8 takes {each:.0f} cycles by mma, {FLOAT32_CYCLES} by "
        "float32 units",
    )

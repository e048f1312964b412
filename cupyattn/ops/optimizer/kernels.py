"""AdamW, item by item and in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.element_kernel import ElementKernel
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import Specialisation

NUMBERS = (
    "scale", "beta1", "rest1", "beta2", "rest2", "step_size", "inverse_bias2", "eps", "decay",
)  # fmt: skip
"""What the kernel is passed by value."""


@dataclass(slots=True)
class AdamwArrays(Record[T]):
    """Arrays of one step; param, m and v are changed in place."""

    param: T
    grad: T
    m: T
    v: T
    grad_scale: T | None = None


ADAMW = ElementKernel(
    "adamw",
    "optimizer/adamw.cu",
    updated=("param", "m", "v"),
    inputs=("grad",),
    float32=("m", "v"),
    numbers=("grad_scale",),
    scalars=dict.fromkeys(NUMBERS, np.float32),
)
KERNELS = (ADAMW.spec,)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row of the table, dtypes and loads in pairs."""
    return ADAMW.catalogue(arch)

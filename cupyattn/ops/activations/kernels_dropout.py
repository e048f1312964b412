"""Dropout and dropout with a residual, item by item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.element_kernel import ElementKernel
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import Specialisation


@dataclass(slots=True)
class DropoutArrays(Record[T]):
    """Arrays of a call of dropout."""

    x: T
    residual: T | None = None
    out: T | None = None


@dataclass(slots=True)
class DropoutBackwardArrays(Record[T]):
    """Arrays of dropout's backward."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads.dx"})

    dout: T
    dx: T | None = None


DROPOUT = ElementKernel(
    "dropout",
    "activations/dropout.cu",
    inputs=("x", "residual"),
    optional=("residual",),
    results=("out",),
    scalars={"seed": np.uint64, "keep_from": np.uint32, "keep_scale": np.float32},
    indexed=True,
)
KERNELS = (DROPOUT.spec,)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row of the table, dtypes and loads in pairs."""
    return DROPOUT.catalogue(arch)

"""Sums in float32, item by item and in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.element_kernel import ElementKernel
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import Specialisation


@dataclass(slots=True)
class AddToArrays(Record[T]):
    """Arrays of a call of add_to."""

    total: T
    x: T


ADD_TO = ElementKernel(
    "add_to", "activations/add_to.cu", updated=("total",), inputs=("x",), float32=("total",)
)
KERNELS = (ADD_TO.spec,)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row of the table, dtypes and loads in pairs."""
    return ADD_TO.catalogue(arch)

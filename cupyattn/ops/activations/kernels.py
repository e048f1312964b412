"""Kernels of activations, gated activations, dropout and sums in float32: item by item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.elements import ElementKernel
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import Specialisation

ACTIVATIONS = {"gelu": "Gelu", "gelu_tanh": "GeluTanh", "silu": "Silu", "relu": "Relu"}
"""Each activation's struct in cuda_src/common/activations.cuh."""

_PUBLIC = {"ACTIVATION": ("Gelu", "GeluTanh", "Silu")}


@dataclass(slots=True)
class ActivationArrays(Record[T]):
    """Arrays of an activation."""

    x: T
    out: T | None = None


@dataclass(slots=True)
class ActivationBackwardArrays(Record[T]):
    """Arrays of the backward of an activation."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads"})

    dout: T
    x: T
    dx: T | None = None


@dataclass(slots=True)
class GatedArrays(Record[T]):
    """Arrays of a gated activation. Without up, gate has both in its last axis."""

    gate: T
    up: T | None = None
    out: T | None = None


@dataclass(slots=True)
class GatedBackwardArrays(Record[T]):
    """Arrays of the backward of a gated activation."""

    SHOWN_AS: ClassVar = MappingProxyType({"dgate": "grads.dgate", "dup": "grads.dup"})

    dout: T
    gate: T
    up: T | None = None
    dgate: T | None = None
    dup: T | None = None


FORWARD = ElementKernel(
    "activation", "activations/forward.cu", inputs=("x",), results=("out",), choices=_PUBLIC
)
BACKWARD = ElementKernel(
    "activation_backward",
    "activations/backward.cu",
    inputs=("dout", "x"),
    results=("dx",),
    choices=_PUBLIC,
    accumulates=True,
)
GATED = ElementKernel(
    "gated", "activations/gated.cu", inputs=("gate", "up"), results=("out",), choices=_PUBLIC
)
GATED_BACKWARD = ElementKernel(
    "gated_backward",
    "activations/gated_backward.cu",
    inputs=("dout", "gate", "up"),
    results=("dgate", "dup"),
    choices=_PUBLIC,
    accumulates=True,
)


@dataclass(slots=True)
class DropoutArrays(Record[T]):
    """Arrays of dropout."""

    x: T
    residual: T | None = None
    out: T | None = None


@dataclass(slots=True)
class DropoutBackwardArrays(Record[T]):
    """Arrays of the backward of dropout."""

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


@dataclass(slots=True)
class AddToArrays(Record[T]):
    """Arrays of add_to; total is changed in place."""

    total: T
    x: T


ADD_TO = ElementKernel(
    "add_to", "activations/add_to.cu", updated=("total",), inputs=("x",), float32=("total",)
)

_ALL = (FORWARD, BACKWARD, GATED, GATED_BACKWARD, DROPOUT, ADD_TO)
KERNELS = tuple(kernel.spec for kernel in _ALL)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield pairwise combinations of configurations, dtypes, loads and macros of each kernel."""
    for kernel in _ALL:
        yield from kernel.catalogue(arch)

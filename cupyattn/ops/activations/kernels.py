"""Activations and gated activations, item by item."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.element_kernel import ElementKernel, catalogue_of
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.spec import Specialisation

ACTIVATIONS = {"gelu": "Gelu", "gelu_tanh": "GeluTanh", "silu": "Silu", "relu": "Relu"}
"""Activations, with the struct of activations.cuh that computes each."""

_PUBLIC = {"ACTIVATION": ("Gelu", "GeluTanh", "Silu")}


@dataclass(slots=True)
class ActivationArrays(Record[T]):
    """Arrays of an activation's call."""

    x: T
    out: T | None = None


@dataclass(slots=True)
class ActivationBackwardArrays(Record[T]):
    """Arrays of an activation's backward."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads"})

    dout: T
    x: T
    dx: T | None = None


@dataclass(slots=True)
class GatedArrays(Record[T]):
    """Arrays of a gated activation; without up, gate holds both in its last axis."""

    gate: T
    up: T | None = None
    out: T | None = None


@dataclass(slots=True)
class GatedBackwardArrays(Record[T]):
    """Arrays of a gated activation's backward."""

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
KERNELS = (FORWARD.spec, BACKWARD.spec, GATED.spec, GATED_BACKWARD.spec)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row of the table, dtypes, loads and activations in pairs."""
    return catalogue_of(FORWARD, BACKWARD, GATED, GATED_BACKWARD, arch=arch)

"""Activations by name, for where no product applies them, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cupyattn import (
    GatedGrads,
    geglu,
    geglu_backward,
    gelu,
    gelu_backward,
    silu,
    silu_backward,
    swiglu,
    swiglu_backward,
)
from cupyattn.models.config import GATED
from cupyattn.runtime.arrays import Array

FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "silu": silu,
    "swiglu": swiglu,
    "geglu": geglu,
}
BACKWARDS: dict[str, Callable[..., Array]] = {
    "gelu": gelu_backward,
    "gelu_tanh": partial(gelu_backward, approximate="tanh"),
    "silu": silu_backward,
    "swiglu": swiglu_backward,
    "geglu": geglu_backward,
}


def activated(preactivation: Array, activation: str) -> Array:
    """Return the activation of rows: (..., F), of (..., 2 F) where it is gated."""
    return FUNCTIONS[activation](preactivation)


def activation_backward(dout: Array, preactivation: Array, activation: str, into: Array) -> Array:
    """Write the gradient of `activated` into an array, which may be the preactivation itself."""
    grads = GatedGrads(into) if activation in GATED else into
    BACKWARDS[activation](dout, preactivation, grads=grads)
    return into

"""What is timed for a case: this library, a kernel that only reads the weight, and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import cupyattn
from cupyattn.arrays import Array
from cupyattn.benchmark.frame.clock import Round
from cupyattn.benchmark.frame.subjects import Gauge
from cupyattn.benchmark.frame.torch_arrays import tensor_of, torch_stream
from cupyattn.benchmark.linear.cases import Arrays, Case
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES
from cupyattn.kernels.configs.linear.read_weight import CTAS_PER_SM, read_weight
from cupyattn.kernels.device import Device
from cupyattn.kernels.launch import launch
from cupyattn.quantized_weight import QuantizedWeight


def own_calls(case: Case, arrays: Arrays) -> Round:
    """Return calls for each of the weights, into arrays that are there."""
    x, weights, b, dout, out = arrays
    turned = [w.T if case.layout == "nk" else w for w in weights]
    if case.kind == "dx":
        return [partial(cupyattn.linear, dout, w.T, out=out) for w in turned]
    if case.kind != "backward":
        forward = partial(cupyattn.linear, activation=case.activation, out=out)
        return [partial(forward, x, w, b) for w in turned]
    preactivation = None
    if case.activation is not None:
        _, preactivation = cupyattn.linear(
            x, turned[0], b, activation=case.activation, return_preactivation=True
        )
    backward = partial(
        cupyattn.linear_backward, activation=case.activation, preactivation=preactivation
    )
    grads = cupyattn.LinearGrads(*backward(dout, x, turned[0], b))
    return [partial(backward, dout, x, w, b, grads=grads) for w in turned]


def reading_calls(device: Device, multiprocessors: int, arrays: Arrays, xp: Any) -> Round:
    """Return launches of the kernel that only reads each weight, or as many bytes."""
    sink = xp.zeros(1, np.uint32)
    of_bytes = [
        xp.zeros(w.nbytes, np.uint8) if isinstance(w, QuantizedWeight) else w
        for w in arrays.weights
    ]

    def read(weight: Array) -> None:
        count = weight.nbytes // VECTOR_BYTES
        launch(device, read_weight(), multiprocessors * CTAS_PER_SM, (weight, sink, count))

    return [partial(read, weight) for weight in of_bytes]


def torch_calls(gauge: Gauge, case: Case, arrays: Arrays, *, compiled: bool) -> Round:
    """Return the same by PyTorch, eager or through torch.compile, on the same memory."""
    torch = gauge.torch
    functional = torch.nn.functional
    after: dict[str | None, Callable[[Any], Any]] = {
        None: lambda z: z,
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
        "relu": functional.relu,
    }
    activation = after[case.activation]

    def linear(x: Any, w: Any, b: Any) -> Any:
        return activation(functional.linear(x, w, b))

    function = gauge.compiled(linear) if compiled else linear
    x, b, dout = (tensor_of(torch, array) for array in (arrays.x, arrays.b, arrays.dout))
    weights = [tensor_of(torch, w if case.layout == "nk" else w.T) for w in arrays.weights]
    if case.kind != "backward":

        def call(weight: Any) -> Any:
            with torch.no_grad():
                return function(x, weight, b)

        return [partial(call, weight) for weight in weights]
    of = [tensor.requires_grad_() for tensor in (x, weights[0], b)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch_stream(torch)):
        result = function(*of)
    torch.cuda.synchronize()
    return [lambda: torch.autograd.grad(result, of, dout, retain_graph=True)]


_FORMULAS: dict[str | None, Callable[[Any, Any], Any]] = {
    None: lambda xp, z: z,
    "relu": lambda xp, z: xp.maximum(z, 0),
    "silu": lambda xp, z: z / (1 + xp.exp(-z)),
    "gelu_tanh": lambda xp, z: z / (1 + xp.exp(-1.5957691216 * (z + 0.044715 * z**3))),
}
"""Activations of float32 arrays; 2 sqrt(2 / pi) is in the last."""
COMPOSED = tuple(_FORMULAS)
"""Activations that array functions make."""


def finished(case: Case, arrays: Arrays, product: Any, xp: Any) -> Any:
    """Return a product with its bias and activation, of array functions."""
    z = product.astype(np.float32) + arrays.b.astype(np.float32)
    return _FORMULAS[case.activation](xp, z).astype(product.dtype)


def array_calls(case: Case, arrays: Arrays, xp: Any, *, alone: bool) -> Round:
    """Return products of cuBLAS by CuPy: alone, or with what linear does behind them."""
    room = xp.empty_like(arrays.out)

    def call(weight: Array) -> Any:
        product = xp.matmul(arrays.x, weight.T if case.layout == "nk" else weight, out=room)
        return product if alone else finished(case, arrays, product, xp)

    return [partial(call, weight) for weight in arrays.weights]

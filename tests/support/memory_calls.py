"""Memory-bound calls that the model is asked for: the command's, and kernels within other calls.

Passes over rows run among other kernels of a call; only one kernel of each call is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.benchmark.linear import Inputs, Product
from cupyattn.benchmark.memory import modelled_calls
from cupyattn.benchmark.model import EMULATED, ModelledCall
from cupyattn.kernels.configs.attention.tensor_core.passes import delta_rows

_SHAPE = (1, 256, 4, 128)
_BIASED = (2, 128, 4, 64)
_FLOAT_BYTES = 4

Prepare = Callable[[], Callable[[], Any]]


def passes() -> Iterator[tuple[str, int, Prepare]]:
    """Yield kernels, their least bytes, and what makes the arrays of a call that launches them."""
    items = int(np.prod(_SHAPE))
    rows, row_bytes = items // _SHAPE[3], 2 * items
    # dout, out, lse and v to two numbers a row, and zeros for dq's sums; these to dq; k.
    delta = 3 * row_bytes + (3 * rows + items) * _FLOAT_BYTES
    scales = (2 * rows // delta_rows(_SHAPE[3]) + _SHAPE[2]) * 2 * _FLOAT_BYTES
    for suffix, call in (("", _attention), ("_varlen", _packed)):
        yield f"attention_backward_delta{suffix}", delta, call
        yield f"attention_backward_scales{suffix}", scales, call
        yield f"attention_backward_convert{suffix}", items * _FLOAT_BYTES + row_bytes, call
        yield f"attention_rotary{suffix}", 2 * row_bytes, call
    delta = (2 * items + rows) * _FLOAT_BYTES  # dout and out to a number a row
    yield "attention_backward_f32_delta", delta, _in_float32
    zeros = items * _FLOAT_BYTES  # of dq
    yield "attention_backward_f32_delta_varlen", delta + zeros, _packed_in_float32
    yield "attention_backward_f32_convert", items * _FLOAT_BYTES + row_bytes, _in_bfloat16
    batch, length, heads, _ = _BIASED
    scores = heads * length * length
    yield "attention_backward_dbias", scores * (batch * _FLOAT_BYTES + 2), _biased
    case = Product("backward", 256, 512, 64, "float16", "nk", "gelu_tanh")
    least = (3 * case.M * case.N + case.N) * 2  # dout and preactivation to dz
    yield "linear_preactivation_gradient", least, _product(case)
    case = Product("backward", 256, 512, 64, "float32", "nk", None)
    yield "linear_db_f32", (case.M + 1) * case.N * _FLOAT_BYTES, _product(case)


def _drawn(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    numbers = np.random.default_rng(0).standard_normal((4, *shape), np.float32)
    return numbers.astype(dtype_of(dtype))


def _attention(dtype: str = "float16") -> Callable[[], Any]:
    q, k, v, dout = _drawn(_SHAPE, dtype)
    tables = cupyattn.rope_tables(_SHAPE[1], _SHAPE[3])
    out, lse = cupyattn.attention(q, k, v, rotary=tables, return_lse=True)

    def call() -> None:
        cupyattn.attention(q, k, v, rotary=tables)
        cupyattn.attention_backward(dout, q, k, v, out, lse)

    return call


def _in_float32() -> Callable[[], Any]:
    return _attention("float32")


def _in_bfloat16() -> Callable[[], Any]:
    return _attention("bfloat16")


def _packed(dtype: str = "float16") -> Callable[[], Any]:
    q, k, v, dout = _drawn(_SHAPE[1:], dtype)
    most = _SHAPE[1] // 2
    bounds = np.array([0, most, 2 * most], np.int32)
    of_lengths = bounds, bounds, most, most
    tables = cupyattn.rope_tables(most, _SHAPE[3])
    out, lse = cupyattn.attention_varlen(q, k, v, *of_lengths, return_lse=True)

    def call() -> None:
        cupyattn.attention_varlen(q, k, v, *of_lengths, rotary=tables)
        cupyattn.attention_varlen_backward(dout, q, k, v, out, lse, *of_lengths)

    return call


def _packed_in_float32() -> Callable[[], Any]:
    return _packed("float32")


def _biased() -> Callable[[], Any]:
    q, k, v, dout = _drawn(_BIASED, "float16")
    bias = np.zeros((1, _BIASED[2], _BIASED[1], _BIASED[1]), np.float16)
    out, lse = cupyattn.attention(q, k, v, bias=bias, return_lse=True)

    def call() -> None:
        cupyattn.attention_backward(dout, q, k, v, out, lse, bias=bias, deterministic=True)

    return call


def _product(product: Product) -> Prepare:
    return lambda: Inputs(product, EMULATED).own_calls()[0]


def _biased_softmax() -> Callable[[], Any]:
    source = EMULATED.arrays()
    x, dout = (source.normal(64, 2048, dtype="float16") for _ in range(2))
    bias = source.normal(1, 2048, dtype="float16")
    out = cupyattn.softmax(x, bias=bias)
    return partial(cupyattn.softmax_backward, dout, out, bias=bias)


def every_call() -> Iterator[ModelledCall]:
    """Yield the command's calls, then those of other dtypes and within other calls."""
    yield from modelled_calls()
    for kernel, least_bytes, prepare in passes():
        yield ModelledCall(kernel.replace("_", " "), least_bytes, prepare, kernel)
    least = 2 * 2 * 64 * 2048 + 4 * 64  # dout, out and a number a row
    yield ModelledCall("softmax dbias", least, _biased_softmax, "softmax_dbias")
    for m, weights in ((16, None), (1, "nf4")):
        product = Product("large", m, 1024, 2048, "float32", "nk", None, weights)
        name = ", ".join(filter(None, (f"linear, M={m}", weights, "float32")))
        yield ModelledCall(name, product.weight_bytes, _product(product))

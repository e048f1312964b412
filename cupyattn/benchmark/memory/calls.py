"""The calls that are modelled by their bytes: of every memory-bound kernel, small for the emulator.

What a call does grows with its rows, so a few tell; the widths are those of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import cupyattn
from cupyattn.benchmark import kv_cache
from cupyattn.benchmark.decode import cases as decode
from cupyattn.benchmark.frame.emulated import ModelledCall
from cupyattn.benchmark.layers.calls import our_backward, our_forward
from cupyattn.benchmark.layers.operation import Operation, Size, Source
from cupyattn.benchmark.layers.operations import OPERATIONS
from cupyattn.benchmark.layers.without_peer import (
    ITEMS_OF_A_SCALE,
    biased_softmax_gradient,
    eight_bit_step,
)
from cupyattn.benchmark.linear.cases import Case
from cupyattn.benchmark.memory.passes import passes, product

_ROWS, _WIDTH = 64, 2048
_LOGITS = (4, 32_768)
_TABLE_ROWS = 512
_PRODUCTS = "linear_cross_entropy"  # whose time products take
_BATCH = " rows"  # of what is there for one row too
_LONG = ("cross_entropy", "sample")
_DECODED = {"paged": 16, "dense": None}
_THIN = ((1, 1024, 2048), (16, 1024, 2048))


def modelled_calls() -> Iterator[ModelledCall]:
    """Yield them by family."""
    for operation in OPERATIONS:
        for _, _, call in layer_calls(operation):
            yield call
    yield _merged()
    for kernel, least_bytes, prepare in passes():
        yield ModelledCall(_named(kernel), least_bytes, prepare, kernel)
    yield from _without_peer()
    for kind in kv_cache.OPERATIONS:
        for cache in ("float", "int8", "int4"):
            yield _of_cache(kind, cache)
    for layout, block_size in _DECODED.items():
        for cache in decode.CACHES if block_size else ("float",):
            yield _decoding(layout, block_size, cache)
    for m, n, k in _THIN:
        case = Case("large", m, n, k, "float16", "nk", None)  # one weight: no cache is timed
        yield ModelledCall(f"linear, M={m}", case.weight_bytes, product(case))
    for weights in ("nf4", "int4", "int8", "q4_k"):
        case = Case("large", *_THIN[0], "float16", "nk", None, weights)
        yield ModelledCall(f"linear, M=1, {weights}", case.weight_bytes, product(case))
    for m, of in ((16, None), (1, "nf4")):
        case = Case("large", m, *_THIN[0][1:], "float32", "nk", None, of)
        name = ", ".join(filter(None, (f"linear, M={m}", of, "float32")))
        yield ModelledCall(name, case.weight_bytes, product(case))
    yield from _quantising()


def layer_calls(operation: Operation) -> Iterator[tuple[str, Size, ModelledCall]]:
    """Yield direction, size and call, forward and backward; none where products take the time."""
    if operation.name == _PRODUCTS or operation.name.endswith(_BATCH):
        return
    rows, width = _LOGITS if operation.name.startswith(_LONG) else (_ROWS, _WIDTH)
    if operation.name.endswith("1 row"):
        rows = 1
    size = Size(rows, width, "float16")
    if operation.name == "embedding":
        operation = _small_table(operation)

    def forward() -> Callable[[], Any]:
        (call,) = our_forward(operation, [operation.arrays(size, Source(np, 0))])
        return call

    def backward() -> Callable[[], Any]:
        (call,) = our_backward(operation, [operation.arrays(size, Source(np, 0))], np)
        return call

    least = operation.traffic(size, "forward")
    yield "forward", size, ModelledCall(operation.name, least, forward)
    if operation.backward_arrays is not None:
        least = operation.traffic(size, "backward")
        yield "backward", size, ModelledCall(f"{operation.name}, backward", least, backward)


def _small_table(operation: Operation) -> Operation:
    """Return embedding of a small table; no kernel zeroes its gradient, but rows are written."""

    def arrays(size: Size, source: Source) -> tuple[Any, ...]:
        table = source.normal(_TABLE_ROWS, size.width, dtype=size.dtype)
        return table, source.labels(size.rows, _TABLE_ROWS)

    return replace(operation, arrays=arrays, backward_arrays=2, more_bytes=lambda size: (0, 0))


def _merged() -> ModelledCall:
    shape = (1, _ROWS, 16, 128)
    rows = int(np.prod(shape[:3]))

    def prepare() -> Callable[[], Any]:
        rng = np.random.default_rng(0)
        outs = rng.standard_normal((2, *shape), np.float32).astype(np.float16)
        lses = rng.standard_normal((2, 1, shape[2], shape[1]), np.float32)
        return lambda: cupyattn.merge_attention(outs[0], lses[0], outs[1], lses[1])

    return ModelledCall("merge_attention", 3 * rows * (2 * shape[3] + 4), prepare)


def _without_peer() -> Iterator[ModelledCall]:
    items = _ROWS * _WIDTH
    # param, m and v are read and written, grad is read; so are both scales.
    least = 16 * items + 16 * -(-items // ITEMS_OF_A_SCALE)
    yield ModelledCall("adamw_step_8bit", least, partial(eight_bit_step, _ROWS, _WIDTH, np))
    kernel, least = "softmax_dbias", 2 * 2 * items + 4 * _ROWS  # dout, out and a number a row
    gradient = partial(biased_softmax_gradient, _ROWS, _WIDTH, np)
    yield ModelledCall(_named(kernel), least, gradient, kernel)


def _quantising() -> Iterator[ModelledCall]:
    _, n, k = _THIN[0]
    case = Case("large", 1, n, k, "float16", "nk", None, "nf4")
    least = case.weight_bytes + 2 * n * k

    def weight() -> Any:
        return np.random.default_rng(0).standard_normal((n, k), np.float32).astype(np.float16).T

    yield ModelledCall("quantize, nf4", least, lambda: partial(cupyattn.quantize, weight()))

    def back() -> Callable[[], Any]:
        quantised = cupyattn.quantize(weight())
        out = np.empty((n, k), np.float16).T
        return partial(cupyattn.dequantize, quantised, out=out)

    yield ModelledCall("dequantize, nf4", least, back)


def _named(kernel: str) -> str:
    return kernel.replace("_", " ")


def _of_cache(kind: str, cache: str) -> ModelledCall:
    case = kv_cache.Case(kind, cache, 64, 16, 4, 128, 16, "float16")
    name = {"append": "append_kv", "copy": "copy_blocks", "gather": "gather"}[kind]
    return ModelledCall(f"{name}, {cache}", case.call(np).bytes, lambda: case.call(np).run)


def _decoding(layout: str, block_size: int | None, cache: str) -> ModelledCall:
    case = decode.Case(2, 512, False, 16, 4, 128, 1, block_size, "float16", cache)
    return ModelledCall(
        f"decode, {layout}, {cache}", case.bytes_of(case.lengths()), lambda: case.call(np)
    )

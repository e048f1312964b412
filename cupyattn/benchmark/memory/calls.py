"""The calls that are modelled by their bytes: of every memory-bound kernel, small for the emulator.

What a call does grows with its rows, so a few tell; the widths are those of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.benchmark import decode, kv_cache
from cupyattn.benchmark.layers.calls import our_backward, our_forward
from cupyattn.benchmark.layers.operation import Operation, Size, Source
from cupyattn.benchmark.layers.operations import OPERATIONS
from cupyattn.benchmark.linear.calls import own_calls
from cupyattn.benchmark.linear.cases import Case, arrays_of

_ROWS, _WIDTH = 64, 2048
_LOGITS = (4, 32_768)
_TABLE_ROWS = 512
_PRODUCTS = "linear_cross_entropy"  # whose time products take
_BATCH = " rows"  # of what is there for one row too
_LONG = ("cross_entropy", "sample")
_DECODED = {"paged": 16, "dense": None}
_THIN = ((1, 1024, 2048), (16, 1024, 2048))


class ModelledCall(NamedTuple):
    """A call by name, and the bytes that it cannot do without."""

    name: str
    least_bytes: int
    prepare: Callable[[], Callable[[], Any]]
    """Makes its arrays, on NumPy, and returns what is called."""
    kernel: str | None = None
    """The one of the call's kernels that is meant; otherwise all are."""


def modelled_calls() -> Iterator[ModelledCall]:
    """Yield them by family."""
    for operation in OPERATIONS:
        if operation.name != _PRODUCTS and not operation.name.endswith(_BATCH):
            yield from _layer(operation)
    yield _merged()
    yield from _beside_products()
    for kind in kv_cache.OPERATIONS:
        for cache in ("float", "int8", "int4"):
            yield _of_cache(kind, cache)
    for layout, block_size in _DECODED.items():
        for cache in decode.CACHES if block_size else ("float",):
            yield _decoding(layout, block_size, cache)
    for m, n, k in _THIN:
        case = Case("large", m, n, k, "float16", "nk", None)  # one weight: no cache is timed
        yield ModelledCall(f"linear, M={m}", case.weight_bytes, _product(case))


def _layer(operation: Operation) -> Iterator[ModelledCall]:
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

    yield ModelledCall(operation.name, operation.traffic(size, "forward"), forward)
    if operation.backward_arrays is not None:
        yield ModelledCall(
            f"{operation.name}, backward", operation.traffic(size, "backward"), backward
        )


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


def _beside_products() -> Iterator[ModelledCall]:
    """Yield the passes over rows that stand beside attention's products, and linear's."""
    shape = (1, 256, 4, 128)
    items = int(np.prod(shape))
    rows, row_bytes, float_bytes = items // shape[3], 2 * items, 4
    passes = {  # dout, out and lse to two numbers a row, and zeros for dq's sums; these to dq; k
        "attention_backward_delta": 2 * row_bytes + (3 * rows + items) * float_bytes,
        "attention_backward_convert": items * float_bytes + row_bytes,
        "attention_rotary": 2 * row_bytes,
    }

    def attention() -> Callable[[], Any]:
        rng = np.random.default_rng(0)
        q, k, v, dout = rng.standard_normal((4, *shape), np.float32).astype(np.float16)
        tables = cupyattn.rope_tables(shape[1], shape[3])
        out, lse = cupyattn.attention(q, k, v, rotary=tables, return_lse=True)

        def call() -> None:
            cupyattn.attention(q, k, v, rotary=tables)
            cupyattn.attention_backward(dout, q, k, v, out, lse)

        return call

    for kernel, least_bytes in passes.items():
        yield ModelledCall(_named(kernel), least_bytes, attention, kernel)
    case = Case("backward", 256, 512, 64, "float16", "nk", "gelu_tanh")
    kernel = "linear_preactivation_gradient"
    least = (3 * case.M * case.N + case.N) * 2  # dout and preactivation to dz
    yield ModelledCall(_named(kernel), least, _product(case), kernel)


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


def _product(case: Case) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        return own_calls(case, arrays_of(case, np))[0]

    return prepare

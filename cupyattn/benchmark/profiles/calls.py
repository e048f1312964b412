"""The calls whose kernels are profiled: together they launch every kernel of the library.

A kernel is profiled at its first launch in the first call that has it. Sizes are those of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import cupyattn
from cupyattn.benchmark import kv_cache
from cupyattn.benchmark.decode import cases as decode
from cupyattn.benchmark.layers.calls import our_backward, our_forward
from cupyattn.benchmark.layers.operation import Operation, Size, Source
from cupyattn.benchmark.layers.operations import OPERATIONS
from cupyattn.benchmark.layers.without_peer import biased_softmax_gradient, eight_bit_step
from cupyattn.benchmark.linear.calls import own_calls
from cupyattn.benchmark.linear.cases import Case, arrays_of
from cupyattn.benchmark.profiles.attention_calls import attention_calls

_ROWS, _WIDTH = 8192, 4096
_LAYERS = (
    *("add + rms_norm", "softmax", "logsumexp", "cross_entropy", "embedding", "rope", "gelu"),
    *("swiglu", "dropout", "adamw_step", "global_norm", "sample top-p, 64 rows"),
)

YOUNGER: tuple[str, ...] = (
    "attention_backward_naive",
    "attention_backward_f32_dbias",
    "attention_backward_f32_dsinks",
)
"""Kernels that came after the profiles: the next ones have them."""
CHANGED: tuple[str, ...] = ("attention_backward_summed_dbias", "attention_naive")
"""Kernels whose profiles are of other launches than today's: the next ones have these."""
WITHOUT_PROFILE = {
    **dict.fromkeys(YOUNGER, "is younger than the profiles"),
    "mma_rate": "runs once, where a card's name does not tell whether it has tensor cores",
    "fma_rate": "measures a card for the benchmarks",
    "read_weight": "the yardstick of the benchmark of linear, not the library's",
}
"""Kernels that have no profile, and why."""


class ProfiledCall(NamedTuple):
    """A call by name."""

    name: str
    prepare: Callable[[Any], Callable[[], Any]]
    """Makes its arrays by an array library, and returns what is called."""


def profiled_calls() -> Iterator[ProfiledCall]:
    """Yield them by family."""
    for name, prepare in attention_calls():
        yield ProfiledCall(name, prepare)
    yield from _caches()
    yield from _layers()
    yield from _products()


def _caches() -> Iterator[ProfiledCall]:
    case = decode.Case(8, 8192, False, 32, 8, 128, 1, 16, "float16")
    yield ProfiledCall("paged_attention, 8 sequences of 8192, one query each", case.call)
    for kind in kv_cache.OPERATIONS:
        moved = kv_cache.Case(kind, "float", 8192, 32, 8, 128, 16, "float16")
        name = {"append": "append_kv", "copy": "copy_blocks", "gather": "gather"}[kind]
        yield ProfiledCall(f"{name}, 8192 tokens", partial(_moved, moved))


def _moved(case: kv_cache.Case, xp: Any) -> Callable[[], Any]:
    return case.call(xp).run


def _layers() -> Iterator[ProfiledCall]:
    by_name = {operation.name: operation for operation in OPERATIONS}
    for name in _LAYERS:
        operation = by_name[name]
        size = operation.size(Size(_ROWS, _WIDTH, "float16"))
        label = f"{name}, {size.rows} x {size.width}"
        yield ProfiledCall(label, partial(_forward, operation, size))
        if operation.backward_arrays is not None:
            yield ProfiledCall(f"{label}, backward", partial(_backward, operation, size))
    rows = f"{_ROWS} x {_WIDTH}"
    gradient, step = (
        partial(make, _ROWS, _WIDTH) for make in (biased_softmax_gradient, eight_bit_step)
    )
    yield ProfiledCall(f"softmax with a bias, {rows}, backward", gradient)
    yield ProfiledCall(f"adamw_step_8bit, {rows}", step)
    yield ProfiledCall(f"add_to, {rows}", _added)


def _forward(operation: Operation, size: Size, xp: Any) -> Callable[[], Any]:
    (call,) = our_forward(operation, [operation.arrays(size, Source(xp, 0))])
    return call


def _backward(operation: Operation, size: Size, xp: Any) -> Callable[[], Any]:
    (call,) = our_backward(operation, [operation.arrays(size, Source(xp, 0))], xp)
    return call


def _added(xp: Any) -> Callable[[], Any]:
    source = Source(xp, 0)
    total, x = (source.normal(_ROWS, _WIDTH, dtype=kind) for kind in ("float32", "float16"))
    return partial(cupyattn.add_to, total, x)


def _products() -> Iterator[ProfiledCall]:
    many, few, one = (4096, 4096, 4096), (16, 8192, 4096), (1, 8192, 4096)
    in_float32, backward = (2048, 4096, 4096), "backward"
    for m, n, k, kind, dtype, activation, weights in (
        (*one, "large", "float16", None, None),
        (*few, "large", "float16", None, None),
        (16, 1024, 16384, "large", "float16", None, None),
        (*many, "large", "float16", None, None),
        (512, 1024, 16384, "large", "float16", None, None),
        (*many, backward, "float16", "gelu_tanh", None),
        (*few, "large", "float32", None, None),
        (*in_float32, "large", "float32", None, None),
        (*in_float32, backward, "float32", None, None),
        (*one, "large", "float16", None, "nf4"),
        (*one, "large", "float16", None, "nf4_nested"),
        (*one, "large", "float32", None, "nf4"),
        (*many, "large", "float16", None, "nf4"),
        (*many, backward, "float16", None, "nf4"),
        (*in_float32, "large", "float32", None, "nf4"),
        (*in_float32, backward, "float32", None, "nf4"),
    ):
        case = Case(kind, m, n, k, dtype, "nk", activation, weights)
        what = "linear" if kind == "large" else "linear_backward"
        options = ", ".join(filter(None, (dtype, activation, weights)))
        yield ProfiledCall(f"{what}, {m} x {n} x {k}, {options}", partial(_product, case))
    for form in ("nf4", "nf4_nested"):
        yield ProfiledCall(f"quantize, 4096 x 4096, {form}", partial(_quantised, form))
    yield ProfiledCall("dequantize, 4096 x 4096, nf4", _dequantised)


def _product(case: Case, xp: Any) -> Callable[[], Any]:
    return own_calls(case, arrays_of(case, xp))[0]


def _weight(xp: Any) -> Any:
    return Source(xp, 0).normal(_WIDTH, _WIDTH, dtype="float16").T


def _quantised(form: str, xp: Any) -> Callable[[], Any]:
    return partial(cupyattn.quantize, _weight(xp), format=form)


def _dequantised(xp: Any) -> Callable[[], Any]:
    return partial(cupyattn.dequantize, cupyattn.quantize(_weight(xp)))

"""Softmax over rows, its logarithm, and the log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.row_kernel import Result, RowConfig, RowKernel, RowTable
from cupyattn.runtime.spec import Gates, Specialisation
from cupyattn.runtime.storage import STORAGE
from cupyattn.runtime.tables import with_gates

_HELD = {
    128: RowConfig(128, 8, 16, "short rows: four to a warp keep its lanes busy"),
    1024: RowConfig(128, 32, 32, "a warp a row: no barrier, 32 items a thread in registers"),
    2048: RowConfig(128, 128, 16, "small CTAs: one loads while another stores"),
    4096: RowConfig(128, 128, 32, "the same with twice the items a thread"),
    8192: RowConfig(256, 256, 32, "a CTA a row, still read once"),
    16384: RowConfig(512, 512, 32, "the most that registers hold beside a second CTA"),
    None: RowConfig(256, 256, 0, "longer: two reads", in_flight=32),
}
_HELD_GATES: dict[int | None, Gates] = {
    **dict.fromkeys((1024, 4096, 8192, 16384), Gates(registers=96)),
    None: Gates(registers=160),
}
HELD: RowTable = {75: with_gates(_HELD, _HELD_GATES)}
"""For kernels that read a row, and then again."""

_STREAMED = {
    128: RowConfig(128, 8, 0, "short rows: four to a warp keep its lanes busy", in_flight=16),
    2048: RowConfig(128, 32, 0, "a warp a row: no barrier", in_flight=32),
    16384: RowConfig(128, 128, 0, "small CTAs: one loads while others reduce", in_flight=32),
    None: RowConfig(512, 512, 0, "64 bytes and more in flight a thread", in_flight=32),
}
_STREAMED_GATES = {
    128: Gates(registers=72),
    2048: Gates(registers=168),
    16384: Gates(registers=168),
    None: Gates(registers=112),
}
STREAMED: RowTable = {75: with_gates(_STREAMED, _STREAMED_GATES)}
"""For kernels that read a row once, from its beginning to its end."""

_WRITTEN = {limit: replace(row, in_flight=16) for limit, row in _STREAMED.items()}
STREAMED_BACKWARD: RowTable = {
    75: with_gates(
        _WRITTEN,
        {
            128: Gates(registers=128),
            2048: Gates(registers=128),
            16384: Gates(registers=80),
            None: Gates(registers=88),
        },
    )
}
"""The same where rows are written too: with a mask and a bias 32 items in flight spill."""

_SCORES: dict[str, Any] = {
    "broadcast": {"mask": ("bool",), "bias": tuple(STORAGE)},
    "choices": {"causal": (False, True)},
    "scalars": {"scale": np.float32, "queries": np.int64},
}
"""What the kernels that see scores take beside x."""
_LOGARITHM = {"logarithm": (False, True)}
_ACCUMULATE = {"accumulate": (False, True)}


@dataclass(slots=True)
class ScoreArrays(Record[T]):
    """Arrays of softmax, its logarithm and log-sum-exp, forward."""

    x: T
    mask: T | None = None
    bias: T | None = None
    out: T | None = None


@dataclass(slots=True)
class SoftmaxBackwardArrays(Record[T]):
    """Arrays of the backward of softmax and its logarithm."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads"})

    dout: T
    out: T
    dx: T | None = None
    row_sum: T | None = None


@dataclass(slots=True)
class LogSumExpBackwardArrays(Record[T]):
    """Arrays of the backward of log-sum-exp."""

    SHOWN_AS: ClassVar = MappingProxyType({"dx": "grads"})

    x: T
    dout: T
    out: T
    mask: T | None = None
    bias: T | None = None
    dx: T | None = None


FORWARD = RowKernel(
    "softmax_forward",
    "softmax/forward.cu",
    ScoreArrays,
    rows=("x",),
    results={"out": Result.ROW},
    optional=("mask", "bias"),
    table=HELD,
    **{**_SCORES, "choices": _SCORES["choices"] | _LOGARITHM},
)
BACKWARD = RowKernel(
    "softmax_backward",
    "softmax/backward.cu",
    SoftmaxBackwardArrays,
    rows=("dout", "out"),
    results={"dx": Result.ROW, "row_sum": Result.PER_ROW},
    optional=("row_sum",),
    choices=_LOGARITHM | _ACCUMULATE,
    scalars={"scale": np.float32},
    table=HELD,
)
"""`row_sum` is for the gradient of a bias, which softmax_dbias computes."""
LOGSUMEXP = RowKernel(
    "logsumexp",
    "softmax/logsumexp.cu",
    ScoreArrays,
    rows=("x",),
    results={"out": Result.PER_ROW},
    optional=("mask", "bias"),
    table=STREAMED,
    **_SCORES,
)
LOGSUMEXP_BACKWARD = RowKernel(
    "logsumexp_backward",
    "softmax/logsumexp_backward.cu",
    LogSumExpBackwardArrays,
    rows=("x",),
    per_row=("dout", "out"),
    results={"dx": Result.ROW},
    optional=("mask", "bias"),
    table=STREAMED_BACKWARD,
    **{**_SCORES, "choices": _SCORES["choices"] | _ACCUMULATE},
)
_ALL = (FORWARD, BACKWARD, LOGSUMEXP, LOGSUMEXP_BACKWARD)
KERNELS = tuple(kernel.spec for kernel in _ALL)


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row of the tables, with dtypes, loads and options in pairs."""
    for kernel in _ALL:
        yield from kernel.catalogue(arch)

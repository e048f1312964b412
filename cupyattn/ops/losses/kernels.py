"""Kernels of cross-entropy over rows of logits, and of the reduction of the rows' losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from cupyattn.ops.softmax.kernels import STREAMED
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.arrays import Array, Description, Layout, Operands, layouts_of
from cupyattn.runtime.device import Device
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.records import Record, T
from cupyattn.runtime.row_kernel import INTEGERS, Result, RowKernel
from cupyattn.runtime.spec import KernelSpec, Pointer, Scalar, Specialisation
from cupyattn.runtime.structs import row_params, rows_struct
from cupyattn.runtime.tables import cpp_bool

_LOSS: dict[str, Any] = {
    "integers": ("labels",),
    "scalars": {"ignore_index": np.int64, "label_smoothing": np.float32, "z_loss": np.float32},
    "table": STREAMED,
}


@dataclass(slots=True)
class CrossEntropyArrays(Record[T]):
    """Arrays of one forward call."""

    logits: T
    labels: T
    out: T | None = None
    lse: T | None = None
    workspace: T | None = None


@dataclass(slots=True)
class CrossEntropyBackwardArrays(Record[T]):
    """Arrays of one backward call."""

    logits: T
    dloss: T
    lse: T
    dlse: T | None
    labels: T
    dlogits: T | None = None
    workspace: T | None = None


@dataclass(slots=True)
class ReductionArrays(Record[T]):
    """Arrays of the reduction: the losses of rows, or the gradient of one loss to be divided."""

    losses: T | None = None
    dloss: T | None = None
    labels: T | None = None
    result: T | None = None


FORWARD = RowKernel(
    "cross_entropy_forward",
    "losses/cross_entropy_forward.cu",
    CrossEntropyArrays,
    rows=("logits",),
    results={"out": Result.PER_ROW, "lse": Result.PER_ROW},
    optional=("lse",),
    choices={"smoothed": (False, True)},
    **_LOSS,
)
BACKWARD = RowKernel(
    "cross_entropy_backward",
    "losses/cross_entropy_backward.cu",
    CrossEntropyBackwardArrays,
    rows=("logits",),
    per_row=("dloss", "lse", "dlse"),
    optional=("dlse",),
    results={"dlogits": Result.ROW},
    in_place={"dlogits": "logits"},
    choices={"accumulate": (False, True)},
    **_LOSS,
)
REDUCTION = KernelSpec(
    "loss_reduction",
    "losses/loss_reduction.cu",
    (
        Pointer("losses", const=True, optional=True),
        Pointer("dloss", const=True, optional=True),
        Pointer("labels", const=True),
        Pointer("result"),
        Scalar("ignore_index", np.dtype(np.int64)),
        rows_struct(1),
    ),
)
KERNELS = (FORWARD.spec, BACKWARD.spec, REDUCTION)

_REDUCTION_THREADS = 1024
"""One CTA adds all losses: the order is fixed, and of 8,192 losses each thread adds eight."""
_FLOAT32 = np.dtype(np.float32)


@cache
def _reduction(labels: str, mean: bool) -> Specialisation:
    """Specialise the reduction for a dtype of the labels, to the mean or the sum."""
    return REDUCTION.specialise(
        threads=_REDUCTION_THREADS, LABELS_DTYPE=labels, MEAN=cpp_bool(mean)
    )


def reduce_losses(
    device: Device, operands: Operands[ReductionArrays[Array]], ignore_index: int, mean: bool
) -> Array:
    """Reduce `losses` to one number, or divide the number `dloss`; the record has one of them.

    Rows with the label `ignore_index` do not count. With `mean`, divide by the number of rows that
    count.
    """
    plan = _reduction_plan(operands.description, ignore_index, mean)
    result = run(device, plan, operands).result
    assert result is not None
    return result


@lru_cache(maxsize=4096)
def _reduction_plan(description: Description, ignore_index: int, mean: bool) -> Plan:
    layouts = layouts_of(ReductionArrays[Layout], description)
    assert layouts.labels is not None
    shape, strides, dtype = layouts.labels
    items = tuple(stride // dtype.itemsize for stride in strides)
    params = row_params(shape, 1, {"labels": items})
    planner = Planner(ReductionArrays, layouts, {"result": Output((), _FLOAT32)})
    slots = planner.slots
    arrays = (slots.losses, slots.dloss, slots.labels, slots.result)
    return planner.plan(Step.of(_reduction(dtype.name, mean), 1, arrays, ignore_index, params))


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every configuration, with dtypes, loads and options in pairs."""
    yield from FORWARD.catalogue(arch)
    yield from BACKWARD.catalogue(arch)
    for labels, mean in itertools.product(INTEGERS, (True, False)):
        yield _reduction(labels, mean)

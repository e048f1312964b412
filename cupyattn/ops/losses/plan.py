"""What cross-entropy has beside its rows: options, labels, the reduction of its losses."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.losses.kernels import ReductionArrays, reduction
from cupyattn.runtime.arrays import Array, Description, Layout, Operands, layouts_of
from cupyattn.runtime.axes import row_params
from cupyattn.runtime.device import Device
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.numbers import factor, integer, real
from cupyattn.runtime.plan import Output, Plan, Planner, Step, run
from cupyattn.runtime.value_checks import on_host

REDUCTIONS = ("mean", "sum", "none")
_FLOAT32 = np.dtype(np.float32)


class LossOptions(NamedTuple):
    """The options of cross-entropy that its kernels have, checked."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


def checked_options(ignore_index: Any, label_smoothing: Any, z_loss: Any) -> LossOptions:
    """Check the options that are numbers.

    Raises
    ------
    TypeError, ValueError
        As `cross_entropy` documents.
    """
    ignored = integer("ignore_index", ignore_index)
    if not -(2**63) <= ignored < 2**63:
        raise error(
            ValueError,
            f"ignore_index = {shown(ignored)}",
            "it is an integer of 64 bits",
            "pass one that is no class, -100 for example",
        )
    smoothing = real("label_smoothing", label_smoothing)
    if not 0.0 <= smoothing <= 1.0:
        raise error(
            ValueError,
            f"label_smoothing = {smoothing}",
            "it is at least 0 and at most 1",
            "pass the share of the target that all classes get, 0.1 for a tenth",
        )
    weight = factor("z_loss", z_loss)
    if weight < 0.0:
        raise error(
            ValueError,
            f"z_loss = {weight}",
            "it is 0 or more: below, it would drive lse away from 0",
            "pass the weight of lse^2, 1e-4 for example",
        )
    return LossOptions(ignored, smoothing, weight)


def require_reduction(given: Any) -> None:
    """Raise ValueError unless it names one."""
    if not isinstance(given, str) or given not in REDUCTIONS:
        raise error(
            ValueError,
            f"reduction = {shown(given)}",
            f"allowed are {', '.join(map(repr, REDUCTIONS))}",
            "choose one of them; 'mean' is over the labels that are not ignored",
        )


def check_labels(labels: Array, classes: int, ignore_index: int) -> None:
    """Raise ValueError for the first label that is neither a class nor ignored."""
    host = on_host(labels)
    wrong = ((host < 0) | (host >= classes)) & (host != ignore_index)
    if wrong.any():
        place = tuple(int(axis) for axis in np.argwhere(wrong)[0])
        position = ", ".join(map(str, place))
        raise error(
            ValueError,
            f"labels[{position}] = {host[place]}",
            f"a label is at least 0 and below {classes}, the last axis of the logits, or it is "
            f"ignore_index = {ignore_index}",
            "correct it, or set it to ignore_index",
        )


def reduce_losses(
    device: Device, operands: Operands[ReductionArrays[Array]], ignore_index: int, mean: bool
) -> Array:
    """Reduce `losses` to one number, or divide the one number `dloss`; by labels that count.

    Parameters
    ----------
    device : Device
        Where the arrays are.
    operands : Operands
        `labels`, and `losses` or `dloss`; `result` if it is given.
    ignore_index : int
        The label that does not count.
    mean : bool
        Divide by their number, instead of by 1.
    """
    plan = _reduction_plan(operands.description, ignore_index, mean)
    return run(device, plan, operands).result


@lru_cache(maxsize=4096)
def _reduction_plan(description: Description, ignore_index: int, mean: bool) -> Plan:
    layouts = layouts_of(ReductionArrays[Layout], description)
    shape, strides, dtype = layouts.labels
    items = tuple(stride // dtype.itemsize for stride in strides)
    params = row_params(shape, 1, {"labels": items})
    planner = Planner(ReductionArrays, layouts, {"result": Output((), _FLOAT32)})
    slots = planner.slots
    arrays = (slots.losses, slots.dloss, slots.labels, slots.result)
    return planner.plan(Step.of(reduction(dtype.name, mean), 1, arrays, ignore_index, params))


def layout_of(array: Array) -> Layout:
    """Return what is known of an array without its memory."""
    return Layout(array.shape, array.strides, array.dtype)

"""The results of a ring: arrays that are given or made, and the merging of blocks into them.

Results of a rank's queries are merged in float32 for each dtype, as blocks arrive. What is written
must not overlap what is still read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cupyattn import AttentionGrads, merge_attention
from cupyattn.distributed.checks import adopted
from cupyattn.distributed.plan import RankRows, RingPlan
from cupyattn.distributed.problem import RingProblem
from cupyattn.runtime.arrays import Array, address
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, made_beforehand


class Wanted(NamedTuple):
    """A result: the array that was given for it, and what it has to be."""

    given: Array | None
    shape: tuple[int, ...]
    """With the axis that packed arrays were given."""
    dtype: Any


def given_results(out: Any, return_lse: bool) -> tuple[Array | None, Array | None]:
    """Return the arrays that were given for out and lse.

    Raises TypeError for another number of arrays than the call has results.
    """
    if out is None:
        return None, None
    kind = type(out).__name__
    passed = f"is a tuple of {len(out)}" if isinstance(out, tuple) else f"has type {kind}"
    if return_lse and not (isinstance(out, tuple) and len(out) == 2):
        raise error(
            TypeError, f"out {passed}", "with return_lse it must be a tuple", "pass out=(out, lse)"
        )
    if not return_lse and isinstance(out, tuple):
        raise error(
            TypeError, f"out {passed}", "without return_lse it must be one array", "pass one array"
        )
    return out if return_lse else (out, None)


def given_gradients(
    grads: object, accumulate: bool, *, bias: bool, sinks: bool
) -> dict[str, Array | None]:
    """Return the arrays that were given for the gradients, by name.

    Raises TypeError for anything but AttentionGrads; ValueError for a gradient that the call has
    not, and where there is nothing to add to.
    """
    names = ("dq", "dk", "dv", *["dbias"] * bias, *["dsinks"] * sinks)
    fix = f"pass grads=AttentionGrads({', '.join(names)})"
    if grads is None:
        if accumulate:
            raise error(
                ValueError, "accumulate=True without grads", "it adds to what is in grads", fix
            )
        return {}
    if not isinstance(grads, AttentionGrads):
        passed = f"grads has type {type(grads).__name__}"
        fields = ", ".join(AttentionGrads._fields)
        raise error(
            TypeError, passed, f"it must be an AttentionGrads of {fields}: arrays or None", fix
        )
    given = grads._asdict()
    for name, array in given.items():
        if array is not None and name not in names:
            raise error(
                ValueError,
                f"grads.{name} was given",
                f"gradients of this call are {', '.join(names)}",
                f"leave {name} out",
            )
    return given


def results_of(problem: RingProblem, wanted: dict[str, Wanted]) -> dict[str, Array]:
    """Return the arrays of the results: the given ones, or new ones on the current device.

    Raises ValueError for an array of another shape or dtype, one that cannot be written item by
    item, and one that shares memory with an input or another result.
    """
    found: dict[str, Array] = {}
    for name, (given, shape, dtype) in wanted.items():
        if problem.packed and name not in ("grads.dbias", "grads.dsinks"):
            shape = shape[1:]
        if given is None:
            found[name] = problem.xp.empty(shape, dtype)
            continue
        _require_writable(name, given, shape, dtype)
        for other, array in {**problem.arrays, **problem.options.arrays, **found}.items():
            _require_apart(name, given, other, array)
        found[name] = given
    return found


def lifted(array: Array, problem: RingProblem) -> Array:
    """Return an array with an axis of the batch."""
    return array[None] if problem.packed else array


def own_block(problem: RingProblem) -> tuple[Array, Array]:
    """Return this rank's keys and values as they are sent: rotated, and contiguous."""
    xp, k = problem.xp, problem.rotated(problem.arrays["k"])
    return xp.ascontiguousarray(k), xp.ascontiguousarray(problem.arrays["v"])


def _require_writable(name: str, given: Array, shape: tuple[int, ...], dtype: object) -> None:
    adopted({name: given}, {name: made_beforehand(name)})
    if given.shape != shape or given.dtype != dtype:
        raise error(
            ValueError,
            f"{name} is {given.dtype} {given.shape}",
            f"it is {dtype} {shape}",
            "leave it out to have a new array",
        )
    read_only = isinstance(given, np.ndarray) and not given.flags.writeable
    steps = zip(given.shape, given.strides, strict=True)
    if read_only or any(items > 1 and stride == 0 for items, stride in steps):
        raise error(
            ValueError,
            f"{name} is read-only" if read_only else f"{name} has strides {given.strides}",
            "a result has an own place in memory for every item, to be written",
            "pass an array that is not a broadcast view, or leave it out",
        )


def _require_apart(name: str, given: Array, other: str, array: Array) -> None:
    if np.shares_memory(_at_same_address(given), _at_same_address(array)):
        raise error(
            ValueError,
            f"{name} overlaps {other} in memory",
            "results are written while inputs are still read",
            f"pass separate memory for {name}, or leave it out",
        )


def _at_same_address(array: Array) -> np.ndarray:
    """Return a NumPy array at the same address, of a GPU's memory too; its items are never read."""
    interface = {
        "version": 3,
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.dtype.itemsize}",
        "data": (address(array), True),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


Part = tuple[Array, Array]
"""out (B, rows, H, Dv) and lse (B, H, rows) of some queries to some keys."""


class Merged:
    """The parts merged so far for each piece of queries, and the results that they become.

    Parts come rounded to the dtype of the arrays, as any result. The first part of a piece is
    computed into its result; sums are kept in float32 (float64 for float64), and the last one is
    rounded into the result.
    """

    def __init__(self, plan: RingPlan, out: Array, lse: Array) -> None:
        extent = int(plan.cu_seqlens[-1])
        self._pieces = [
            RankRows(place * extent, (place + 1) * extent) for place in range(plan.placement.pieces)
        ]
        self._results = out, lse
        calls = [call for step in plan.steps for call in step.calls]
        self._to_come = [
            sum(_within(piece, call.queries) for call in calls) for piece in self._pieces
        ]
        self._sums: list[Part | None] = [None] * len(self._pieces)

    def add(self, queries: RankRows, compute: Callable[[Part], Any]) -> None:
        """Merge a part of some rows, which begin and end with pieces; `compute` writes it."""
        pieces = [number for number, piece in enumerate(self._pieces) if _within(piece, queries)]
        begun = any(self._sums[number] is not None for number in pieces)
        results = _rows(self._results, queries)
        part = _empty_like(*results) if begun else results
        compute(part)
        for number in pieces:
            start = self._pieces[number].start - queries.start
            stop = self._pieces[number].stop - queries.start
            self._to_come[number] -= 1
            of_piece, result = (
                _rows(part, RankRows(start, stop)),
                _rows(results, RankRows(start, stop)),
            )
            before = self._sums[number]
            if before is not None:
                self._sums[number] = self._merged(number, before, of_piece, result)
                continue
            if begun:  # the call computed into new memory
                result[0][...], result[1][...] = of_piece
            self._sums[number] = result

    def _merged(self, number: int, before: Part, part: Part, result: Part) -> Part:
        exact = exact_dtype(before[0])
        into = before
        if self._to_come[number] == 0:
            into = result
        elif before[0].dtype != exact:
            into = _empty_like(*before, exact)
        merge_attention(*before, *part, out=into)
        return into

    def finish(self) -> None:
        """Write the results of queries that see nothing."""
        for held, piece in zip(self._sums, self._pieces, strict=True):
            if held is None:
                out, lse = _rows(self._results, piece)
                out[...], lse[...] = 0, -np.inf


def exact_dtype(array: Array) -> Any:
    """Return the dtype of sums of parts."""
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)


def _within(piece: RankRows, rows: RankRows) -> bool:
    return rows.start <= piece.start and piece.stop <= rows.stop


def _rows(part: Part, rows: RankRows) -> Part:
    return part[0][:, rows.slice], part[1][:, :, rows.slice]


def _empty_like(out: Array, lse: Array, dtype: object = None) -> Part:
    xp = np if isinstance(out, np.ndarray) else load_cupy()
    return xp.empty(out.shape, dtype or out.dtype), xp.empty(lse.shape, lse.dtype)

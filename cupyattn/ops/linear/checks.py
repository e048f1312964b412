"""The checks of a call of linear: its description, once."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from cupyattn.ops.linear.problem import (
    ACTIVATIONS,
    BACKWARD_RESULTS,
    FORWARD_RESULTS,
    GATED,
    SHOWN_AS,
    WEIGHT_ARRAYS,
    LinearProblem,
    Matrix,
    WeightFormat,
)
from cupyattn.ops.linear.weight_formats import FORMATS
from cupyattn.runtime.arrays import Layout, contiguous
from cupyattn.runtime.axes import merge_axes
from cupyattn.runtime.by_name import Description, Operands, Overlaps, layouts_of, starts_of
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.errors import error, made_beforehand, shown
from cupyattn.runtime.plan import Output
from cupyattn.runtime.spans import overlaps_itself

MAX_EXTENT = 2**31 - 1024
"""Of M, K and the columns of w: kernels count them, tile by tile, in 32 bits."""


def forward_problem(
    operands: Operands,
    activation: Any,
    return_preactivation: bool,
    weight: WeightFormat | None = None,
) -> LinearProblem:
    """Check a forward call, or find that its description was checked before.

    `weight` says what the arrays that stand for w are, where it is quantised.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    _require_activation(activation)
    problem = described_forward(operands.description, activation, return_preactivation, weight)
    problem.overlaps.check(operands)
    return problem


def backward_problem(
    operands: Operands, activation: Any, accumulate: bool, weight: WeightFormat | None = None
) -> LinearProblem:
    """Check a backward call, or find that its description was checked before.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    _require_activation(activation)
    problem = described_backward(operands.description, activation, accumulate, weight)
    problem.overlaps.check(operands)
    return problem


def _require_activation(activation: Any) -> None:
    allowed = (*ACTIVATIONS, *GATED)
    if activation is not None and not (isinstance(activation, str) and activation in allowed):
        raise error(
            ValueError if isinstance(activation, str) else TypeError,
            f"activation = {shown(activation)}",
            f"allowed are None, {', '.join(map(repr, allowed))}",
            "pass one of them",
        )


@lru_cache(maxsize=4096)
def described_forward(
    description: Description,
    activation: str | None,
    return_preactivation: bool,
    weight: WeightFormat | None = None,
) -> LinearProblem:
    """Check what is known of a forward call without its memory."""
    layouts = layouts_of(description)
    kept = return_preactivation and activation is not None
    inputs = ("x", "w", "b", "residual")
    problem = _problem(description, activation, inputs, FORWARD_RESULTS, weight)
    lead = layouts["x"].shape[:-1]
    if "residual" in layouts:
        shape = (*lead, problem.outer)
        _require_rows_like_x("residual", layouts["residual"], shape, "(..., N)")
        problem.matrices["residual"] = _as_rows("residual", layouts, problem)
    outputs = {"out": Output((*lead, problem.outer), problem.dtype)}
    if kept:
        outputs["preactivation"] = Output((*lead, problem.weight_columns), problem.dtype)
    for name, output in outputs.items():
        if name in layouts:
            require_output(name, layouts[name], *output)
        problem.matrices[name] = _as_rows(name, layouts, problem, output)
    problem.outputs.update(outputs)
    return problem


@lru_cache(maxsize=4096)
def described_backward(
    description: Description,
    activation: str | None,
    accumulate: bool,
    weight: WeightFormat | None = None,
) -> LinearProblem:
    """Check what is known of a backward call without its memory."""
    layouts = layouts_of(description)
    require_arrays(layouts, ("dout",))
    require_dtype("dout", layouts["dout"], CPU_FLOATS)
    inputs = ("dout", "x", "w", "b", "preactivation")
    problem = _problem(description, activation, inputs, BACKWARD_RESULTS, weight, accumulate)
    lead = layouts["x"].shape[:-1]
    _require_rows_like_x("dout", layouts["dout"], (*lead, problem.outer), "(..., N)")
    problem.matrices["dout"] = _as_rows("dout", layouts, problem)
    if "preactivation" in layouts and activation is None:
        raise error(
            ValueError,
            "preactivation was given without an activation",
            "it is what an activation was applied to",
            "pass the activation that linear was given, or no preactivation",
        )
    if activation is not None:
        saved = Output((*lead, problem.weight_columns), problem.dtype)
        if "preactivation" in layouts:
            _require_rows_like_x("preactivation", layouts["preactivation"], saved.shape, "(..., W)")
        problem.matrices["preactivation"] = _as_rows("preactivation", layouts, problem, saved)
    for name in BACKWARD_RESULTS:
        of = layouts.get(name[1:])
        if of is not None:
            problem.outputs[name] = Output(of.shape, of.dtype)
        elif name in layouts:
            quantised = name == "dw" and weight is not None
            raise error(
                ValueError,
                f"{SHOWN_AS[name]} was given",
                "a quantised weight has no gradient"
                if quantised
                else f"this call has no {name[1:]}",
                "leave None there",
            )
    _require_results(problem)
    return problem


def _require_results(problem: LinearProblem) -> None:
    """Check grads, and describe them as matrices."""
    layouts, outputs, matrices = problem.layouts, problem.outputs, problem.matrices
    for name in ("dx", "db"):
        if name in layouts:
            require_output(SHOWN_AS[name], layouts[name], *outputs[name])
    matrices["dx"] = _as_rows("dx", layouts, problem, outputs["dx"])
    if "dw" not in outputs:
        return
    shape, dtype = outputs["dw"]
    dw = layouts.get("dw")
    if dw is None and "dw" in problem.transposed:
        matrices["dw"] = _as_matrix(contiguous(shape[::-1], dtype), 0).transposed
        return
    if dw is None:
        dw = contiguous(shape, dtype)
    else:
        fix = made_beforehand(SHOWN_AS["dw"])
        if dw.shape != shape or dw.dtype != dtype or overlaps_itself(dw):
            require_output(SHOWN_AS["dw"], dw, shape, dtype)
        _require_a_contiguous_axis(SHOWN_AS["dw"], dw, fix)
    matrices["dw"] = _as_matrix(dw, problem.starts.get("dw", 0))


def _problem(
    description: Description,
    activation: str | None,
    inputs: tuple[str, ...],
    results: tuple[str, ...],
    weight: WeightFormat | None,
    accumulate: bool = False,
) -> LinearProblem:
    """Check x, w and b, and describe them."""
    layouts = layouts_of(description)
    require_arrays(layouts, ("x", "codes", "scales") if weight else ("x", "w"))
    x = layouts["x"]
    require_dtype("x", x, CPU_FLOATS)
    if not x.shape:
        raise error(ValueError, "x has no axes", "x is (..., K)", "pass x[None]")
    shape = _quantised_shape(layouts["codes"], weight) if weight else _plain_shape(layouts["w"])
    require_same_dtype(layouts, inputs)
    require_contiguous_rows("x", x)
    if shape[0] != x.shape[-1]:
        turned = " (w is the transpose of what some libraries keep)"
        raise error(
            ValueError,
            f"x has shape {x.shape}, w {shape}",
            f"w is (K, N) with K = {x.shape[-1]}, the last axis of x",
            f"pass w.T{turned}" if shape[1] == x.shape[-1] else "pass a w of that height",
        )
    columns = shape[1]
    if activation in GATED and columns % 2:
        raise error(
            ValueError,
            f"w has {columns} columns with activation={activation!r}",
            "a gated activation takes a w of shape (K, 2 N), N columns of the gate, then N others",
            "pass both halves side by side, for example numpy.concatenate([w_gate, w_up], axis=1)",
        )
    if "b" in layouts:
        require_shape("b", layouts["b"], (columns,), "(N,), an item for each column of w")
        require_contiguous_rows("b", layouts["b"])
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    rows = math.prod(x.shape[:-1])
    for name, extent in (("M", rows), ("K", x.shape[-1]), ("N", columns)):
        if extent > MAX_EXTENT:
            raise error(
                ValueError,
                f"{name} = {extent}",
                f"M, K and the columns of w are at most {MAX_EXTENT}",
                "split the call",
            )
    problem = LinearProblem(
        rows=rows,
        inner=x.shape[-1],
        outer=columns // 2 if activation in GATED else columns,
        dtype=x.dtype,
        activation=activation,
        layouts=layouts,
        matrices={},
        outputs={},
        starts=starts_of(description),
        overlaps=Overlaps.of(layouts, (*results, "workspace"), SHOWN_AS if "dx" in results else {}),
        accumulate=accumulate,
        weight=weight,
    )
    problem.matrices["x"] = _as_rows("x", layouts, problem)
    if weight is None:
        problem.matrices["w"] = _as_matrix(layouts["w"], problem.starts["w"])
    for name in WEIGHT_ARRAYS:
        if name in layouts:
            problem.matrices[name] = _as_lines(layouts[name], problem.starts[name])
    return problem


def _plain_shape(w: Layout) -> tuple[int, ...]:
    require_dtype("w", w, CPU_FLOATS)
    require_rank("w", w, "K N")
    _require_a_contiguous_axis("w", w)
    return w.shape


def _quantised_shape(codes: Layout, weight: WeightFormat) -> tuple[int, ...]:
    """Return the shape of the weight that the arrays stand for; its class has checked them."""
    rows, width = codes.shape
    width = width * 8 // FORMATS[weight.format].bits
    return (rows, width) if weight.transposed else (width, rows)


def _as_lines(layout: Layout, start: int) -> Matrix:
    """Describe an array in C order as a matrix: its first axis by all others."""
    columns = math.prod(layout.shape[1:])
    return Matrix(layout.shape[0], columns, columns, 1, layout.dtype.itemsize, start)


def _require_rows_like_x(name: str, layout: Layout, shape: tuple[int, ...], meaning: str) -> None:
    require_shape(name, layout, shape, f"{meaning} with the axes of x before its last")
    require_contiguous_rows(name, layout)


def _require_a_contiguous_axis(name: str, layout: Layout, fix: str = "") -> None:
    """Raise unless one of the two axes is contiguous and the strides are whole items."""
    itemsize = layout.dtype.itemsize
    if 0 in layout.shape:
        return
    if not any(
        extent == 1 or stride == itemsize
        for extent, stride in zip(layout.shape, layout.strides, strict=True)
    ):
        raise error(
            ValueError,
            f"{name} has strides {layout.strides} for items of {itemsize} bytes",
            "one of its two axes is contiguous, as in an array in C order, its transpose, and "
            "slices of either",
            fix or f"copy it with ascontiguousarray({name})",
        )
    require_whole_item_strides(name, layout, fix)


def _as_rows(
    name: str, layouts: dict[str, Layout], problem: LinearProblem, made: Output | None = None
) -> Matrix:
    """Describe an array of contiguous rows, or one that is to be made, as a matrix of M rows."""
    layout = layouts.get(name)
    if layout is None:
        assert made is not None
        layout = contiguous(*made)
    *lead, columns = layout.shape
    itemsize = layout.dtype.itemsize
    shape, (strides,) = merge_axes(
        tuple(lead), [tuple(stride // itemsize for stride in layout.strides[:-1])]
    )
    if len(shape) > 1 and problem.rows * columns:
        raise error(
            ValueError,
            f"{SHOWN_AS.get(name, name)} has shape {layout.shape} and strides {layout.strides}",
            "the axes before the last lie evenly in memory, so that they are M rows",
            f"copy it with ascontiguousarray({name}), or call for each part",
        )
    row_stride = strides[0] if len(shape) == 1 else columns
    start = problem.starts.get(name, 0)
    return Matrix(problem.rows, columns, row_stride, 1, itemsize, start)


def _as_matrix(layout: Layout, start: int) -> Matrix:
    """Describe a two-dimensional array that is contiguous along one of its axes."""
    itemsize = layout.dtype.itemsize
    rows, columns = layout.shape
    row_stride, column_stride = (stride // itemsize for stride in layout.strides)
    if column_stride == 1 and columns > 1:
        return Matrix(rows, columns, row_stride, 1, itemsize, start)
    if row_stride == 1 and rows > 1:
        return Matrix(rows, columns, 1, column_stride, itemsize, start)
    if columns == 1:
        return Matrix(rows, columns, row_stride, 1, itemsize, start)
    return Matrix(rows, columns, 1, column_stride, itemsize, start)

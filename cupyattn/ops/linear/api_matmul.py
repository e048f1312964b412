"""`matmul`: products of batches of matrices, and their gradients."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.linear import cpu
from cupyattn.ops.linear.plan import MAX_EXTENT
from cupyattn.ops.linear.plan_matmul import MatmulArrays, MatmulCall, MatmulProblem, matmul_plan
from cupyattn.ops.linear.problem import Matrix
from cupyattn.runtime.arrays import (
    Array,
    Description,
    Layout,
    adopt,
    contiguous,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    Overlaps,
    fixes_of_results,
    require_dtype,
    require_given,
    require_item_alignment,
    require_kernel_dtype,
    require_own_items,
    require_same_dtype,
    require_whole_item_strides,
)
from cupyattn.runtime.differentiable import differentiable, recorder
from cupyattn.runtime.errors import error, made_beforehand
from cupyattn.runtime.outputs import round_into
from cupyattn.runtime.plan import Output, run
from cupyattn.runtime.records import given_of

_DTYPES = (*CPU_FLOATS, "int8")
_FIXES = fixes_of_results("out")
MAX_INT8_INNER = 2**17 - 1
"""Maximum of K for int8: so many products of -128 with itself fit in int32."""


class MatmulGrads(NamedTuple):
    """Gradients of `matmul`."""

    da: Array
    db: Array


@differentiable(lambda: _backward, gradients=MatmulGrads._fields)
def matmul(a: Array, b: Array, /, *, out: Array | None = None) -> Array:
    """Multiply matrices, or batches of them, as ``numpy.matmul`` does.

    Parameters
    ----------
    a : array (..., M, K)
        float16, float32, bfloat16 or int8, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. Any strides: transposes, slices and broadcast views need no copy. An array (K,)
        counts as (1, K), and the result is without that axis.
    b : array (..., K, N), dtype of a
        Any strides. The axes before the last two broadcast with those of a. An array (K,) counts as
        (K, 1), and the result is without that axis.
    out : array (..., M, N), optional
        Where to write the result; must overlap no other array. One of its last two axes is
        contiguous; other axes may have any stride, and so may that of a product with a vector.

    Returns
    -------
    array (..., M, N)
        dtype of a; int32 of int8. K = 0 gives zeros.

    Raises
    ------
    TypeError
        For anything that is not an array, NumPy and CuPy arrays mixed, or dtypes that are not
        allowed or differ; with int8 in a function that `vjp` differentiates.
    ValueError
        For an array without axes, values of K that differ, batch axes that do not broadcast, an out
        that does not fit or overlaps another array, and with int8 for K above 131,071, whose sums
        could exceed int32. On kernels also for more than four batch axes that do not merge.
    RuntimeError
        As `attention`.

    Notes
    -----
    A batch is one launch. Where all members share b, the rows of all are one product, and likewise
    with a. Without a batch the kernels of `linear` run, if the strides are those that it takes.
    Products are accumulated in float32 and rounded once; those of int8 are exact. float16 and int8
    run on tensor cores if the GPU has them, and bfloat16 from compute capability 8.0 on. Otherwise
    both run in float32 arithmetic, as float32 does, and int8 on dot products of four items. The
    fastest operands have contiguous rows or columns that start at multiples of 16 bytes and are
    whole multiples of 16 bytes long; of int8, those that are contiguous along K. Any others are
    loaded item by item. On NumPy arrays BLAS multiplies in float32, for float64 and int8 in
    float64.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 3, 4, 5, 8), dtype=np.float32)
    >>> scores = cupyattn.matmul(q, k.swapaxes(-1, -2))
    >>> scores.shape
    (3, 4, 5, 5)
    >>> np.allclose(scores, q @ k.swapaxes(-1, -2), atol=1e-5)
    True

    Sums of int8 do not overflow:

    >>> ones = np.full((2, 1000), 100, np.int8)
    >>> cupyattn.matmul(ones, ones.T)
    array([[10000000, 10000000],
           [10000000, 10000000]], dtype=int32)
    """
    arrays = MatmulArrays(a, b, out)
    operands = adopt(arrays, _FIXES)
    call = described_matmul(operands.description)
    if call.problem.dtype == np.int8 and recorder.get() is not None:
        raise error(
            TypeError,
            "vjp of a function that multiplies int8 arrays by matmul",
            "integers have no gradients: those of a and b would be lost",
            'multiply floats, or call linear(x, quantize(w, "int8", rotation=64), '
            'activations="int8"), which has the gradient of x; or compute the product before vjp',
        )
    call.overlaps.check(operands)
    device = device_of(operands)
    if device is None:
        _on_cpu(arrays, call)
    else:
        _require_for_kernels(call)
        run(device, matmul_plan(call, device.traits), operands)
    assert arrays.out is not None
    return arrays.out


def _on_cpu(arrays: MatmulArrays[Any], call: MatmulCall) -> None:
    """Compute the result, and store it in its field."""
    product = cpu.matmul(arrays.a, arrays.b)
    arrays.out = round_into(arrays.out, product, call.outputs["out"].dtype)


def product_by(library: Any, x: Any, y: Any) -> Any:
    """Return a matrix product by NumPy or CuPy, or by `matmul` where CuPy is slow or fails.

    CuPy multiplies batches of float16 as float32, and has no batches of bfloat16.
    """
    names = {getattr(getattr(each, "dtype", None), "name", "") for each in (x, y)}
    batch = max(getattr(x, "ndim", 0), getattr(y, "ndim", 0)) > 2
    if library is not np and batch and names in ({"float16"}, {"bfloat16"}):
        return matmul(x, y)
    return library.matmul(x, y)


def _backward(dout: Array, a: Array, b: Array, /) -> MatmulGrads:
    """Return da = dout b^T and db = a^T dout: sums over the batch axes in which each is broadcast.

    Such an axis is a part of the product's sum, so that gradients are rounded once.
    """
    row, column = a.ndim == 1, b.ndim == 1
    whole_a, whole_b = a[None] if row else a, b[:, None] if column else b
    whole = dout[..., None, :] if row and not column else dout
    if column:
        whole = dout[None, None] if row else dout[..., None]
    da = _summed(whole_a.shape, whole, whole_b.swapaxes(-1, -2))
    db = _summed(whole_b.shape, whole_a.swapaxes(-1, -2), whole)
    return MatmulGrads(da.reshape(a.shape), db.reshape(b.shape))


def _summed(shape: tuple[int, ...], x: Any, y: Any) -> Any:
    """Return x y, summed over the batch axes that `shape` lacks or has as 1: x and y have them."""
    rank = max(x.ndim, y.ndim)
    x, y = (each.reshape((1,) * (rank - each.ndim) + each.shape) for each in (x, y))
    wanted = (1,) * (rank - len(shape)) + shape
    axes = [n for n in range(rank - 2) if wanted[n] == 1 != max(x.shape[n], y.shape[n])]
    if axes:
        kept = [axis for axis in range(rank - 2) if axis not in axes]
        x = x.transpose(*kept, rank - 2, *axes, rank - 1)
        y = y.transpose(*kept, *axes, rank - 2, rank - 1)
        total = math.prod(x.shape[len(kept) + 1 :])
        x = x.reshape(*x.shape[: len(kept) + 1], total)
        y = y.reshape(*y.shape[: len(kept)], total, y.shape[-1])
    return matmul(x, y).reshape(shape)


@lru_cache(maxsize=4096)
def described_matmul(description: Description) -> MatmulCall:
    """Check a call by the description of its `MatmulArrays`."""
    layouts = layouts_of(MatmulArrays[Layout], description)
    starts = starts_of(MatmulArrays[int], description)
    for name in ("a", "b"):
        layout = getattr(layouts, name)
        require_given(name, layout)
        require_dtype(name, layout, _DTYPES)
        if not layout.shape:
            raise error(ValueError, f"{name} has no axes", "it has one or more", _multiply(name))
        require_whole_item_strides(name, layout)
    a, b = layouts.a, layouts.b
    require_same_dtype({"a": a, "b": b})
    whole_a = a if len(a.shape) > 1 else _with_axis(a, 0)
    whole_b = b if len(b.shape) > 1 else _with_axis(b, 1)
    rows, inner = whole_a.shape[-2:]
    columns = whole_b.shape[-1]
    _require_sizes(a, b, rows, inner, columns)
    batch = _batch_shape(whole_a.shape[:-2], whole_b.shape[:-2], a, b)
    shape = batch + (rows,) * (len(a.shape) > 1) + (columns,) * (len(b.shape) > 1)
    output = Output(shape, np.dtype(np.int32) if a.dtype == np.int8 else a.dtype)
    given = layouts.out
    if given is not None:
        _require_out(given, output, min(len(a.shape), len(b.shape)) > 1)
    out = given or contiguous(*output)
    if len(a.shape) == 1:
        out = _with_axis(out, len(batch))
    if len(b.shape) == 1:
        out = _with_axis(out, len(out.shape))
    problem = MatmulProblem(
        a.dtype,
        _matrix(whole_a, starts.a),
        _matrix(whole_b, starts.b),
        _matrix(out, starts.out),
        batch,
        tuple(_batch_strides(each, batch) for each in (whole_a, whole_b, out)),
    )
    return MatmulCall(problem, layouts, starts, {"out": output}, Overlaps.of(layouts, ("out",)))


def _multiply(name: str) -> str:
    return f"multiply numbers with *, or pass {name}[None]"


def _with_axis(layout: Layout, axis: int) -> Layout:
    """Return the layout with an axis of one item before `axis`."""
    shape, strides, dtype = layout
    return Layout((*shape[:axis], 1, *shape[axis:]), (*strides[:axis], 0, *strides[axis:]), dtype)


def _require_sizes(a: Layout, b: Layout, rows: int, inner: int, columns: int) -> None:
    height = b.shape[-2] if len(b.shape) > 1 else b.shape[0]
    if inner != height:
        turned = len(b.shape) > 1 and b.shape[-1] == inner
        raise error(
            ValueError,
            f"a has shape {a.shape}, b {b.shape}",
            f"a is (..., M, K) and b (..., K, N), here with K = {inner} and {height}",
            "pass b.swapaxes(-1, -2)" if turned else "pass arrays of one K",
        )
    for name, extent in (("M", rows), ("K", inner), ("N", columns)):
        if extent > MAX_EXTENT:
            raise error(
                ValueError,
                f"{name} = {extent}",
                f"M, K and N are at most {MAX_EXTENT}",
                "split the call",
            )
    if a.dtype == np.int8 and inner > MAX_INT8_INNER:
        raise error(
            ValueError,
            f"K = {inner} with int8",
            f"K is at most {MAX_INT8_INNER}, so that sums fit in int32",
            "split K, and add the results in int64",
        )


def _batch_shape(
    a_batch: tuple[int, ...], b_batch: tuple[int, ...], a: Layout, b: Layout
) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(a_batch, b_batch)
    except ValueError:
        raise error(
            ValueError,
            f"a has shape {a.shape}, b {b.shape}",
            f"the axes before the last two broadcast, here {a_batch} and {b_batch}",
            "reshape one of them, with 1 where it is to be repeated",
        ) from None


def _require_out(out: Layout, output: Output, matrices: bool) -> None:
    """Raise unless an out has the result's shape and dtype, and kernels can store its lines."""
    shape, dtype = output
    if out.shape != shape or out.dtype != dtype:
        raise error(
            ValueError if out.dtype == dtype else TypeError,
            f"out is {out}",
            f"the result is {dtype.name} {shape}",
            "pass an array of that shape and dtype, or none",
        )
    fix = made_beforehand("out")
    require_whole_item_strides("out", out, fix)
    require_own_items("out", out)
    lines = [
        extent <= 1 or stride == dtype.itemsize
        for extent, stride in zip(shape[-2:], out.strides[-2:], strict=True)
    ]
    if matrices and 0 not in shape and not any(lines):
        raise error(
            ValueError,
            f"out has strides {out.strides} for items of {dtype.itemsize} bytes",
            "one of its last two axes is contiguous",
            fix,
        )


def _matrix(layout: Layout, start: int | None) -> Matrix:
    itemsize = layout.dtype.itemsize
    rows, columns = layout.shape[-2:]
    row_stride, column_stride = (stride // itemsize for stride in layout.strides[-2:])
    return Matrix(rows, columns, row_stride, column_stride, itemsize, start or 0)


def _batch_strides(layout: Layout, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the broadcast batch axes, in items."""
    own = zip(layout.shape[:-2], layout.strides[:-2], strict=True)
    strides = [0 if extent == 1 else stride // layout.dtype.itemsize for extent, stride in own]
    return (0,) * (len(batch) - len(strides)) + tuple(strides)


def _require_for_kernels(call: MatmulCall) -> None:
    """Raise for arrays that only NumPy's path accepts."""
    if call.problem.dtype != np.int8:
        require_kernel_dtype("a", call.problem.dtype)
    require_item_alignment(given_of(call.layouts), given_of(call.starts))

"""`quantize`, `dequantize` and `quantize_rows`: weights into few bits and back, rows into int8."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.linear import reference
from cupyattn.ops.linear.kernels_int8 import LEAST_ROWS
from cupyattn.ops.linear.kernels_quantised import (
    DequantizeArrays,
    QuantizeArrays,
    dequantize_problem,
    quantize_blocks,
    run_dequantize,
    run_quantize,
)
from cupyattn.ops.linear.kernels_rows import RowsArrays, rows_plan, rows_problem
from cupyattn.ops.linear.row_formats import QuantizedRows, quantized_rows, require_rows_out
from cupyattn.ops.linear.weight_formats import (
    FORMATS,
    WEIGHT_FIELDS,
    Blocks,
    QuantizedWeight,
    require_rotation,
)
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.outputs import float_dtype, round_into, widened
from cupyattn.runtime.plan import run

_FIXES = fixes_of_results("out")


def quantize(
    w: Array,
    /,
    *,
    format: str = "nf4",
    block_size: int | None = None,
    rotation: int | None = None,
    out: QuantizedWeight | None = None,
    workspace: Array | None = None,
) -> QuantizedWeight:
    r"""Quantise the weight of a product to four or eight bits.

    Parameters
    ----------
    w : array (K, N)
        float16, float32 or bfloat16, CuPy or NumPy, with any strides: ``w.T`` of an array (N, K)
        needs no copy. ``quantize(w.T).T`` is w quantised along its rows.
    format : {"nf4", "nf4_nested", "int4", "int8"}
        See Notes.
    block_size : int, optional
        Neighbouring weights along K that share a scale. 64 for "nf4" and "nf4_nested" by default,
        otherwise a power of two from 32 to 4096; 128 for "int4", or 32 or 64; all of K for "int8",
        or a power of two from 32 on.
    rotation : {None, 64}
        64 rotates blocks of 64 neighbours along K by a Hadamard matrix before "int8" rounds them:
        an outlier is spread over its block. Products rotate x too, so that their results are those
        of w. No other format has it. A column may become NaN if the magnitudes of a block sum to
        more than float32 holds.
    out : QuantizedWeight (K, N), optional
        Where to write: a weight of that format. Its block size is used if none is given, and its
        rotation is the given one.
    workspace : array, optional
        Scratch memory for "nf4_nested", 4 bytes a block, and for a rotation, 4 bytes a weight;
        otherwise it is allocated.

    Returns
    -------
    QuantizedWeight
        (K, N) on the device of w, which `linear` accepts in place of w.

    Raises
    ------
    TypeError
        For anything that is not an array, or a dtype or out that is not allowed.
    ValueError
        For another format, block size or rotation, a K that is not a multiple of the block size,
        the rotation and 32, and an out that does not fit. If values are checked (`backend`; always
        for NumPy arrays),
        also for a w that is not finite, and for an "int4" block that spans more than 982,560, so
        that its scale exceeds float16. On a GPU such a block becomes NaN.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    "nf4" (Dettmers et al., arXiv:2305.14314) chooses the nearest of 16 quantiles of the normal
    distribution times the block's absmax: the same codes as bitsandbytes. "nf4_nested" has the
    codes of "nf4", and absmax in eight bits: 256 even steps from the smallest absmax of 64
    neighbouring blocks to the largest. "int4" has 16 steps from the smallest weight of a block to
    the largest, one of which is 0, and its scale is float16: a block spans at most 982,560, the
    scale of a block that spans less than 9.2e-4 has fewer bits, and a block that spans at most
    4.4e-7 becomes zeros, without an error. "int8" has 255 steps from -absmax to absmax.

    Results are reproducible, bit by bit, and equal on every device: float32 arithmetic is correctly
    rounded, and subnormal numbers are 0. A block of zeros stays zeros. "int8" turns float32's
    largest number into infinity: its step is rounded up.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> w = np.random.default_rng(0).standard_normal((256, 32), dtype=np.float32)
    >>> for format in ("nf4", "int4", "int8"):
    ...     weight = cupyattn.quantize(w, format=format)
    ...     error = cupyattn.dequantize(weight) - w
    ...     print(weight.nbytes, f"{np.abs(error).mean():.3f}")
    4608 0.071
    4352 0.088
    8320 0.006
    """
    if out is not None:
        _require_weight("out", out)
    rotation = require_rotation(rotation)
    if block_size is None and out is not None:
        block_size = out.block_size
    arrays: QuantizeArrays[Any] = QuantizeArrays(w, workspace=workspace)
    if out is not None:
        for name in WEIGHT_FIELDS:
            setattr(arrays, name, getattr(out, name))
    operands = adopt(arrays)
    blocks = quantize_blocks(operands, format, block_size, rotation)
    if out is not None:
        _require_out(out, blocks, rotation, arrays.w.shape)
    device = device_of(operands)
    if device is not None:
        run_quantize(device, blocks, rotation, operands)
    else:
        _quantised_on_cpu(arrays, blocks, rotation)
    if out is not None:
        return out
    made: Any = (arrays.codes, arrays.scales, arrays.super_scales, arrays.scale_table)
    return QuantizedWeight(blocks.format, *made, block_size=blocks.block_size, rotation=rotation)


def _quantised_on_cpu(arrays: QuantizeArrays[Any], blocks: Blocks, rotation: int | None) -> None:
    """Compute the weight's arrays, and store them in their fields or in the given arrays."""
    nested = FORMATS[blocks.format].group is not None
    kind = "nf4" if nested else blocks.format
    rows = arrays.w.T
    if rotation is not None:
        rows = reference.rotated(widened(np.ascontiguousarray(rows)))
    codes, scales = reference.quantize(rows, kind, blocks.block_size)
    made = (codes, *reference.nest_scales(scales)) if nested else (codes, scales)
    for name, array in zip(WEIGHT_FIELDS, made, strict=False):
        target = getattr(arrays, name)
        if target is None:
            setattr(arrays, name, array)
        else:
            target[...] = array


def dequantize(
    weight: QuantizedWeight,
    /,
    *,
    dtype: Any = None,
    out: Array | None = None,
    workspace: Array | None = None,
) -> Array:
    r"""Compute the numbers of a quantised weight.

    Parameters
    ----------
    weight : QuantizedWeight
        A weight of any format: `QuantizedWeight` documents its codes.
    dtype : optional
        The dtype of out, or "float32", by default. float32 holds every weight exactly, unless the
        weight is rotated; other dtypes round it once. "float16", "bfloat16", and on NumPy arrays
        outside of the emulator "float64".
    out : array, optional
        Where to write, with the weight's shape and any strides; must not overlap the weight's
        arrays.
    workspace : array, optional
        Scratch memory for "nf4_nested", 4 bytes a block, and for a rotated weight, 4 bytes a
        weight; otherwise it is allocated.

    Returns
    -------
    array
        With the weight's shape. A new array has the order of the codes: K is contiguous.

    Raises
    ------
    TypeError
        For anything that is not a QuantizedWeight, a dtype that is not allowed, and an out of
        another dtype.
    ValueError
        For an out of another shape, an out whose items overlap, and an out that overlaps the
        weight.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    A rotated weight is rotated back in float32, which rounds.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> w = np.linspace(-1, 1, 64, dtype=np.float32).reshape(64, 1)
    >>> weight = cupyattn.quantize(w, format="int8")
    >>> np.allclose(cupyattn.dequantize(weight), w, rtol=0, atol=0.5 / 127)
    True
    """
    _require_weight("weight", weight)
    arrays = DequantizeArrays(
        weight.codes, weight.scales, weight.super_scales, weight.scale_table, out, workspace
    )
    operands = adopt(arrays, _FIXES)
    out = arrays.out
    if dtype is None:
        kind = np.dtype(np.float32) if out is None else float_dtype(out.dtype)
    else:
        kind = float_dtype(dtype)
    form = weight.blocks, weight.transposed, weight.rotation
    problem = dequantize_problem(operands, *form, kind)
    device = device_of(operands)
    if device is not None:
        return run_dequantize(device, problem, operands)
    rows = reference.dequantised_rows(weight)
    if weight.rotation is not None:
        rows = reference.rotated(rows)
    if out is None and kind == np.float32:
        return rows if weight.transposed else rows.T
    exact = rows if weight.transposed else rows.T
    return round_into(out, exact, kind, transposed=not weight.transposed)


def quantize_rows(
    x: Array, /, *, rotation: int | None = None, out: QuantizedRows | None = None
) -> QuantizedRows:
    r"""Quantise rows to int8 with one scale each, for products with int8 weights.

    Parameters
    ----------
    x : array (..., K)
        float16, float32 or bfloat16, CuPy or NumPy. The last axis is contiguous, and K is a
        multiple of 32. The axes before it are evenly spaced in memory, as for `linear`.
    rotation : {None, 64}
        64 rotates blocks of 64 neighbours by a Hadamard matrix first: an outlier is spread over its
        block. It is for products with a weight that is rotated too, and divides K.
    out : QuantizedRows (..., K), optional
        Where to write: rows of that shape, rotation and dtype.

    Returns
    -------
    QuantizedRows
        (..., K) on the device of x, which `linear` accepts in place of x. Several products can
        share it.

    Raises
    ------
    TypeError
        For anything that is not an array, or a dtype or out that is not allowed.
    ValueError
        For a K that is no multiple of 32 or of the rotation, strides that are not allowed, and an
        out that does not fit or overlaps x.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    The scale of a row is absmax / 127, and a code is x * (127 / absmax), rounded to the nearest
    even integer; each operation is float32 and correctly rounded, and subnormal numbers are 0.
    Results are equal on every device, bit by bit. A row whose absmax is below 2**-100 has scale 0.
    The scale of a row with an infinity or a NaN is NaN, and so is that row of every product.

    A rotation sums and subtracts items 1, 2, 4, 8, 16 and 32 apart, in this order; the factor 1 / 8
    of the Hadamard matrix is in the scale.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.zeros((2, 32), np.float32)
    >>> x[0, :3] = 1, -4, 2
    >>> rows = cupyattn.quantize_rows(x)
    >>> rows.codes[:, :4]
    array([[  32, -127,   64,    0],
           [   0,    0,    0,    0]], dtype=int8)
    >>> rows.scales * 127
    array([4., 0.], dtype=float32)
    """
    rotation = require_rotation(rotation)
    arrays: RowsArrays[Any] = RowsArrays(x)
    if out is not None:
        arrays.codes, arrays.scales = (getattr(out, name, None) for name in ("codes", "scales"))
    operands = adopt(arrays)
    problem = rows_problem(operands, rotation)
    dtype = arrays.x.dtype
    if out is not None:
        require_rows_out(out, arrays.x.shape, rotation, dtype)
    device = device_of(operands)
    if device is not None:
        run(device, rows_plan(problem), operands)
    else:
        made = reference.quantize_rows(arrays.x, rotation)
        for name, array in zip(("codes", "scales"), made, strict=True):
            target = getattr(arrays, name)
            if target is None:
                setattr(arrays, name, array)
            else:
                target[...] = array
    if out is not None:
        return out
    codes: Any = arrays.codes
    scales: Any = arrays.scales
    return quantized_rows(codes, scales, rotation, dtype)


def multiplies_int8(x: Array) -> bool:
    """Tell whether products of rows (M, K) with ``activations="int8"`` multiply int8 by int8.

    >>> multiplies_int8(np.zeros((1, 64), np.float32))  # on NumPy arrays they always do
    True
    """
    device = device_of(adopt(RowsArrays(x)))
    if device is None:
        return True
    return device.traits.tensor_cores and len(x) >= LEAST_ROWS[device.traits.geforce]


def _require_weight(name: str, given: Any) -> None:
    if not isinstance(given, QuantizedWeight):
        raise error(
            TypeError,
            f"{name} is {shown(given)}",
            "it is a QuantizedWeight",
            "make one with quantize(w)",
        )


def _require_out(
    out: QuantizedWeight, blocks: Blocks, rotation: int | None, shape: tuple[int, ...]
) -> None:
    given = out.blocks, out.shape, out.transposed, out.rotation
    if given != (blocks, shape, False, rotation):
        raise error(
            ValueError,
            f"out is {out}",
            f"the result is {blocks.format} {shape}, blocks of {blocks.block_size}, rotation = "
            f"{rotation}, whose blocks lie along its first axis",
            "pass such a weight, or none; of a transposed one pass out.T",
        )

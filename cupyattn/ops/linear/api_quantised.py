"""`quantize` and `dequantize`: weights into four or eight bits and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.linear import reference
from cupyattn.ops.linear.kernels_quantised import (
    DequantizeArrays,
    QuantizeArrays,
    dequantize_problem,
    quantize_blocks,
    run_dequantize,
    run_quantize,
)
from cupyattn.ops.linear.weight_formats import FORMATS, WEIGHT_FIELDS, Blocks, QuantizedWeight
from cupyattn.runtime.arrays import Array, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.outputs import float_dtype, round_into

_FIXES = fixes_of_results("out")


def quantize(
    w: Array,
    /,
    *,
    format: str = "nf4",
    block_size: int | None = None,
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
    out : QuantizedWeight (K, N), optional
        Where to write: a weight of that format. Its block size is used if none is given.
    workspace : array, optional
        Scratch memory for "nf4_nested": 4 bytes a block; otherwise it is allocated.

    Returns
    -------
    QuantizedWeight
        (K, N) on the device of w, which `linear` accepts in place of w.

    Raises
    ------
    TypeError
        For anything that is not an array, or a dtype or out that is not allowed.
    ValueError
        For another format or block size, a K that is not a multiple of the block size and of 32,
        and an out that does not fit. If values are checked (`backend`; always for NumPy arrays),
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
    if block_size is None and out is not None:
        block_size = out.block_size
    arrays: QuantizeArrays[Any] = QuantizeArrays(w, workspace=workspace)
    if out is not None:
        for name in WEIGHT_FIELDS:
            setattr(arrays, name, getattr(out, name))
    operands = adopt(arrays)
    blocks = quantize_blocks(operands, format, block_size)
    if out is not None:
        _require_out(out, blocks, arrays.w.shape)
    device = device_of(operands)
    if device is not None:
        run_quantize(device, blocks, operands)
    else:
        _quantised_on_cpu(arrays, blocks)
    if out is not None:
        return out
    made: Any = (arrays.codes, arrays.scales, arrays.super_scales, arrays.scale_table)
    return QuantizedWeight(blocks.format, *made, block_size=blocks.block_size)


def _quantised_on_cpu(arrays: QuantizeArrays[Any], blocks: Blocks) -> None:
    """Compute the weight's arrays, and store them in their fields or in the given arrays."""
    nested = FORMATS[blocks.format].group is not None
    kind = "nf4" if nested else blocks.format
    codes, scales = reference.quantize(arrays.w.T, kind, blocks.block_size)
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
        The dtype of out, or "float32", by default. float32 holds every weight exactly; other dtypes
        round it once. "float16", "bfloat16", and on NumPy arrays outside of the emulator "float64".
    out : array, optional
        Where to write, with the weight's shape and any strides; must not overlap the weight's
        arrays.
    workspace : array, optional
        Scratch memory for "nf4_nested": 4 bytes a block; otherwise it is allocated.

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
    problem = dequantize_problem(operands, weight.blocks, weight.transposed, kind)
    device = device_of(operands)
    if device is not None:
        return run_dequantize(device, problem, operands)
    rows = reference.dequantised_rows(weight)
    if out is None and kind == np.float32:
        return rows if weight.transposed else rows.T
    exact = rows if weight.transposed else rows.T
    return round_into(out, exact, kind, transposed=not weight.transposed)


def _require_weight(name: str, given: Any) -> None:
    if not isinstance(given, QuantizedWeight):
        raise error(
            TypeError,
            f"{name} is {shown(given)}",
            "it is a QuantizedWeight",
            "make one with quantize(w)",
        )


def _require_out(out: QuantizedWeight, blocks: Blocks, shape: tuple[int, ...]) -> None:
    if (out.blocks, out.shape, out.transposed) != (blocks, shape, False):
        raise error(
            ValueError,
            f"out is {out}",
            f"the result is {blocks.format} {shape}, blocks of {blocks.block_size}, whose blocks "
            "lie along its first axis",
            "pass such a weight, or none; of a transposed one pass out.T",
        )

"""Weights into four or eight bits, and out of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.linear import reference
from cupyattn.ops.linear.quantised import (
    dequantize_problem,
    quantize_blocks,
    run_dequantize,
    run_quantize,
)
from cupyattn.ops.linear.quantized_weight import QuantizedWeight
from cupyattn.ops.linear.weight_formats import FORMATS, Blocks
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import adopt
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.float_dtypes import float_dtype
from cupyattn.runtime.rounding import round_into

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
        float16, float32 or bfloat16, CuPy or NumPy, of any strides: ``w.T`` of an array (N, K) is
        free, and so is ``quantize(w.T).T``, which is quantised along its rows.
    format : {"nf4", "nf4_nested", "int4", "int8"}
        See Notes.
    block_size : int, optional
        Neighbouring weights along K that share a scale. 64 for "nf4" and "nf4_nested" by default,
        otherwise a power of two from 32 to 4096; 128 for "int4", or 32 or 64; all of K for "int8",
        or a power of two from 32 on.
    out : QuantizedWeight (K, N), optional
        Where to write: of that format, and of its own block size where none is given.
    workspace : array, optional
        Scratch memory of "nf4_nested": 4 bytes a block. Without it, it is allocated.

    Returns
    -------
    QuantizedWeight
        (K, N) on the device of w, for `linear` in the place of w.

    Raises
    ------
    TypeError
        For something that is no array, or a dtype or out that is not allowed.
    ValueError
        For another format or block size, a K that is no multiple of it and of 32, an out that does
        not fit, and, where values are checked (`backend`; NumPy arrays always), for a w that is not
        finite, or of which a block of "int4" spans more than 982,560, so that its scale is beyond
        float16. On a GPU such a block becomes NaN.
    RuntimeError
        On a GPU, as `attention`.

    Notes
    -----
    "nf4" (Dettmers et al., arXiv:2305.14314) takes the nearest of 16 quantiles of the normal
    distribution times the block's absmax: the codes that bitsandbytes takes. "nf4_nested" has the
    same codes, and absmax in eight bits: 256 even steps from the least of 64 neighbouring blocks to
    their largest. "int4" has 16 steps from the least weight of a block to its largest, 0 among
    them, and its scale in float16: a block spans 982,560 at the most, and from 9.2e-4 down its
    scale has fewer bits; one that spans 4.4e-7 or less becomes zeros, without an error. "int8" has
    255 steps from -absmax to absmax.

    The same bits from run to run and on every device: float32 arithmetic, correctly rounded, in
    which subnormal numbers are 0. A block of zeros stays zeros. "int8" gives float32's largest
    number back as infinity: its step is rounded up.

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
    given = out.arrays if out is not None else {}
    operands = adopt({"w": w, **given, "workspace": workspace})
    blocks = quantize_blocks(operands, format, block_size)
    arrays = operands.arrays
    if out is not None:
        _require_out(out, blocks, arrays["w"].shape)
    device = device_of(operands)
    if device is not None:
        results = run_quantize(device, blocks, operands)
    else:
        results = _quantised_on_cpu(arrays["w"].T, blocks)
        for name in results.keys() & arrays:
            arrays[name][...] = results[name]
    if out is not None:
        return out
    return QuantizedWeight(blocks.format, **results, block_size=blocks.block_size)


def _quantised_on_cpu(rows: Array, blocks: Blocks) -> dict[str, Array]:
    nested = FORMATS[blocks.format].group is not None
    codes, scales = reference.quantize(rows, "nf4" if nested else blocks.format, blocks.block_size)
    if not nested:
        return {"codes": codes, "scales": scales}
    scales, super_scales, table = reference.nest_scales(scales)
    return {"codes": codes, "scales": scales, "super_scales": super_scales, "scale_table": table}


def dequantize(
    weight: QuantizedWeight,
    /,
    *,
    dtype: Any = None,
    out: Array | None = None,
    workspace: Array | None = None,
) -> Array:
    r"""Return the numbers that a quantised weight stands for.

    Parameters
    ----------
    weight : QuantizedWeight
        Of any format: `QuantizedWeight` says what its codes are.
    dtype : optional
        "float32" by default, or that of out: float32 has every weight as it is, others round it
        once. "float16", "bfloat16", and on NumPy arrays outside of the emulator "float64".
    out : array, optional
        Where to write, of the weight's shape and any strides; must overlap no array of it.
    workspace : array, optional
        Scratch memory of "nf4_nested": 4 bytes a block. Without it, it is allocated.

    Returns
    -------
    array
        Of the weight's shape. A new one lies as the codes do: the axis of N is the slower one.

    Raises
    ------
    TypeError
        For something that is no QuantizedWeight, a dtype that is not allowed, and an out of
        another.
    ValueError
        For an out of another shape, one whose items overlap, and one that overlaps the weight.
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
    operands = adopt({**weight.arrays, "out": out, "workspace": workspace}, _FIXES)
    if dtype is None:
        kind = np.dtype(np.float32) if out is None else float_dtype(operands.arrays["out"].dtype)
    else:
        kind = float_dtype(dtype)
    problem = dequantize_problem(operands, weight.blocks, weight.transposed, kind)
    device = device_of(operands)
    if device is not None:
        return run_dequantize(device, problem, operands)
    rows = reference.dequantised_rows(weight)
    given = operands.arrays.get("out")
    if given is None and kind == np.float32:
        return rows if weight.transposed else rows.T
    exact = rows if weight.transposed else rows.T
    return round_into(given, exact, kind, transposed=not weight.transposed)


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

"""Parts of a weight (N, K) for a rank, floats or quantised: some of its rows, or of its columns.

Scales that are codes ("nf4_nested") become the float32 that they stand for, 4.5 bits a weight
instead of 4.14: they share super_scales through all rows, so that parts have no whole groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cupyattn import QuantizedWeight
from cupyattn.ops.linear.weight_formats import FORMATS, UNIT
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error


def rows_of(weight: Array | QuantizedWeight, parts: Sequence[slice], xp: Any) -> Any:
    """Return rows of a weight on the host, part behind part, in new arrays of `xp`."""

    def cut(array: Array) -> Array:
        return xp.concatenate([xp.asarray(array[part]) for part in parts])

    if not isinstance(weight, QuantizedWeight):
        return cut(weight)
    weight = _with_float_scales(weight)
    arrays = {name: cut(array) for name, array in weight.arrays.items()}
    return QuantizedWeight(weight.format, **arrays, block_size=weight.block_size, transposed=True)


def columns_of(weight: Array | QuantizedWeight, part: slice, xp: Any) -> Any:
    """Return columns of a weight on the host in new arrays of `xp`.

    A part that begins or ends within blocks has smaller ones, with the scales of those that they
    are of: it stands for the same numbers.

    Raises
    ------
    ValueError
        If the format has no blocks so small.
    """
    if not isinstance(weight, QuantizedWeight):
        return xp.array(weight[:, part], order="C")
    weight = _with_float_scales(weight)
    form, inner = FORMATS[weight.format], part.stop - part.start
    block_size = math.gcd(weight.block_size, part.start, part.stop)
    unit = math.lcm(UNIT, form.super_block or UNIT)
    if not form.allows(block_size, inner) or part.start % unit or part.stop % unit:
        raise error(
            ValueError,
            f"columns {part.start} to {part.stop} of {weight!r}",
            f"a rank's columns are whole blocks of its format, and multiples of {unit}",
            "choose another number of ranks, or load the model with quantize=None",
        )

    def cut(array: Array, columns: int, repeats: int = 1) -> Array:
        """Cut an array with an item for as many columns; each item stands for `repeats` blocks."""
        first, last = part.start // columns, -(-part.stop // columns)
        found = xp.array(array[:, first:last], order="C")
        if repeats == 1:
            return found
        begin = (part.start - first * columns) // block_size
        return xp.ascontiguousarray(
            xp.repeat(found, repeats, axis=1)[:, begin : begin + inner // block_size]
        )

    arrays = {
        "codes": cut(weight.codes, 8 // form.bits),
        "scales": cut(weight.scales, weight.block_size, weight.block_size // block_size),
    }
    if weight.super_scales is not None:
        arrays["super_scales"] = cut(weight.super_scales, unit)
    return QuantizedWeight(weight.format, **arrays, block_size=block_size, transposed=True)


def _with_float_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the same weight, with float32 in place of scales that are codes."""
    if weight.super_scales is None or weight.scale_table is None:
        return weight
    group = FORMATS[weight.format].group or 1
    factor, offset = weight.super_scales.repeat(group, axis=0)[: weight.scales.size].T
    absmax = weight.scale_table[weight.scales.reshape(-1)] * factor + offset
    return QuantizedWeight(
        "nf4",
        weight.codes,
        absmax.reshape(weight.scales.shape),
        block_size=weight.block_size,
        transposed=True,
    )

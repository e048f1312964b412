"""A weight as an argument: an array, or the arrays of one that is quantised."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.linear.problem import WeightFormat
from cupyattn.ops.linear.quantized_weight import QuantizedWeight


def weight_arrays(w: Any) -> tuple[dict[str, Any], WeightFormat | None]:
    """Return the arrays by the names that a problem has for them, and what they stand for."""
    if not isinstance(w, QuantizedWeight):
        return {"w": w}, None
    return w.arrays, WeightFormat(w.format, w.block_size, w.transposed)

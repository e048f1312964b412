"""Error bound of the kernels of rotary position embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from cupyattn.ops.rope.reference import pairs_of, rope
from cupyattn.runtime.precision import TINY32, U32, precision_of


def rope_bound(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    positions: ArrayLike,
    *,
    dtype: DTypeLike,
    interleaved: bool = False,
    present: ArrayLike = 0.0,
) -> NDArray[np.float64]:
    """Return the error bound of `rope`, or with -sin of its backward; it is added to `present`.

    Two products, their sum, and its sum with `present` are rounded in float32. Each rounding is at
    most u32 times the sum of the magnitudes. Products below 2**-126 are flushed to 0.
    """
    there = np.asarray(present, np.float64)
    terms = rotated_sizes(x, cos, sin, positions, interleaved=interleaved)
    exact = rope(x, cos, sin, positions, interleaved=interleaved) + there
    with np.errstate(invalid="ignore", over="ignore"):
        error = U32 * (3 * terms + np.abs(there)) + 4 * TINY32
        return error + precision_of(dtype).store(np.abs(exact) + error)


def rotated_sizes(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    positions: ArrayLike,
    *,
    interleaved: bool = False,
) -> NDArray[np.float64]:
    """Return |x_a| |cos| + |x_b| |sin| for both features of each pair; arguments as for `rope`."""
    sizes = np.abs(np.asarray(x, np.float64))
    absolute = np.abs(np.asarray(cos, np.float64)), np.abs(np.asarray(sin, np.float64))
    firsts, _ = pairs_of(absolute[0].shape[1], interleaved=interleaved)
    terms = rope(sizes, *absolute, positions, interleaved=interleaved)
    negative = absolute[0], -absolute[1]  # with -|sin| the first feature is the sum
    sums = rope(sizes, *negative, positions, interleaved=interleaved)
    terms[..., firsts] = sums[..., firsts]
    return terms

"""How far a right rotary kernel may be from the reference."""

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
    """Error bound of `rope`, and of its backward with -sin; `present` is what it is added to.

    Two products, their sum and that with what is there are rounded in float32, each by at most u32
    of the sum of their sizes; products below 2**-126 are flushed.
    """
    sizes = np.abs(np.asarray(x, np.float64))
    absolute = np.abs(np.asarray(cos, np.float64)), np.abs(np.asarray(sin, np.float64))
    there = np.asarray(present, np.float64)
    # |x_a| |cos| + |x_b| |sin|, for both of a pair: with -|sin| the first is a sum.
    firsts, _ = pairs_of(absolute[0].shape[1], interleaved=interleaved)
    terms = rope(sizes, *absolute, positions, interleaved=interleaved)
    negative = absolute[0], -absolute[1]
    sums = rope(sizes, *negative, positions, interleaved=interleaved)
    terms[..., firsts] = sums[..., firsts]
    exact = rope(x, cos, sin, positions, interleaved=interleaved) + there
    with np.errstate(invalid="ignore", over="ignore"):
        error = U32 * (3 * terms + np.abs(there)) + 4 * TINY32
        return error + precision_of(dtype).store(np.abs(exact) + error)

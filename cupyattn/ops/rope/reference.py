"""Rotary position embedding: feature m is paired with feature m + R/2, or 2m with 2m + 1.

Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding",
arXiv:2104.09864, equation 34, which pairs neighbours ("interleaved"); the "half" layout permutes
the features as GPT-NeoX has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def rotate(
    x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], *, interleaved: bool = False
) -> NDArray[np.float64]:
    """Rotate the first R features of x (..., D) by the angles of cos and sin (..., R/2).

    The transpose, and for cos**2 + sin**2 = 1 the inverse, is `rotate(x, cos, -sin)`.
    """
    half = cos.shape[-1]
    result = np.array(x, dtype=np.float64)
    firsts, seconds = pairs_of(half, interleaved=interleaved)
    first, second = result[..., firsts].copy(), result[..., seconds].copy()
    with np.errstate(invalid="ignore", over="ignore"):
        result[..., firsts] = first * cos - second * sin
        result[..., seconds] = second * cos + first * sin
    return result


def pairs_of(half: int, *, interleaved: bool) -> tuple[slice, slice]:
    """Return where the first and the second features of `half` pairs are."""
    if interleaved:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)


def table_rows(table: NDArray[Any], positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """Rows of a table of cosines or sines, as float64.

    Raises
    ------
    IndexError
        If a position is outside the table (NumPy would read a negative one from the end).
    """
    lowest, highest = np.min(positions, initial=0), np.max(positions, initial=-1)
    if lowest < 0 or highest >= len(table):
        raise IndexError(
            f"rotary positions {lowest} to {highest} are not all within the {len(table)} rows of "
            "cos and sin; pass larger tables, or a q_offset that makes every i + q_offset a row"
        )
    return np.asarray(table[positions], dtype=np.float64)


def rope(
    x: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    positions: ArrayLike,
    *,
    interleaved: bool = False,
) -> NDArray[np.float64]:
    """Rotate the feature pairs of every token by the angles of its position.

    Parameters
    ----------
    x : (B, S, H, D) floats
    cos, sin : (P, R/2) floats
        Cosine and sine of the angle of each position and pair; R <= D, R even. Features from R on
        are left alone.
    positions : (S,) or (B, S) ints in [0, P)
        Position of each token.
    interleaved : bool
        Whether neighbouring features are paired.

    Returns
    -------
    (B, S, H, D) float64

    Raises
    ------
    IndexError
        If a position is outside the tables.

    Examples
    --------
    >>> x = np.array([[[[1.0, 2.0, 3.0]]]])
    >>> rope(x, cos=[[0.0]], sin=[[1.0]], positions=[0])
    array([[[[-2.,  1.,  3.]]]])
    """
    positions = np.asarray(positions)
    cos, sin = (table_rows(np.asarray(t), positions)[..., None, :] for t in (cos, sin))
    return rotate(np.asarray(x), cos, sin, interleaved=interleaved)


def rope_backward(
    dout: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    positions: ArrayLike,
    *,
    interleaved: bool = False,
) -> NDArray[np.float64]:
    """Gradient of rope's input: the transposed rotation of dout. Shapes and errors as in `rope`."""
    return rope(dout, cos, -np.asarray(sin), positions, interleaved=interleaved)

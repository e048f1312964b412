"""Error bounds of the cache's functions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention.reference.cache_formats import STORED_BITS, quantisation_bound
from cupyattn.ops.cache.reference import rotated
from cupyattn.ops.rope.bounds import rope_bound
from cupyattn.runtime.precision import U32, precision_of


def append_kv_bound(
    x: np.ndarray,
    dtype: str,
    rotary: tuple[np.ndarray, np.ndarray] | None = None,
    positions: np.ndarray | None = None,
    *,
    interleaved: bool = False,
) -> NDArray[np.float64]:
    """Error bound of the tokens x (total, heads, D) that append_kv stores, read back as numbers.

    `dtype` is the cache's. Tokens that are not rotated are stored exactly in their own dtype.
    Rotated ones err by `rope_bound`; a quantised cache does not have its rounding of the store.
    """
    exact = np.asarray(x, np.float64)
    error: NDArray[np.float64] = np.zeros_like(exact)
    if rotary is not None:
        assert positions is not None
        stored_as = "float32" if dtype in STORED_BITS else dtype
        tokens = np.asarray(x)[None]
        error = rope_bound(tokens, *rotary, positions, dtype=stored_as, interleaved=interleaved)[0]
        exact = rotated(x, *rotary, positions, interleaved=interleaved)
    if dtype in STORED_BITS:
        return quantisation_bound(exact, STORED_BITS[dtype], error=error)[0]
    return error


def gather_bound(exact: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Error bound of gathered values of a quantised cache.

    The product rounds in float32, and at the store.
    """
    error = U32 * np.abs(exact)
    return error + precision_of(dtype).store(np.abs(exact) + error)

"""Error bounds of the cache's functions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention.reference.cache_formats import STORED_BITS, quantisation_bound
from cupyattn.ops.cache.reference import normed, rotated
from cupyattn.ops.norms.api import RMSNorm
from cupyattn.ops.norms.bounds import norm_bound
from cupyattn.ops.rope.bounds import rope_bound, rotated_sizes
from cupyattn.runtime.precision import TINY32, U32, precision_of


def append_kv_bound(
    x: np.ndarray,
    dtype: str,
    rotary: tuple[np.ndarray, np.ndarray] | None = None,
    positions: np.ndarray | None = None,
    *,
    interleaved: bool = False,
    norm: RMSNorm | None = None,
) -> NDArray[np.float64]:
    """Error bound of the tokens x (total, heads, D) that append_kv stores, read back as numbers.

    `dtype` is the cache's. Tokens that are not rotated are stored exactly in their own dtype.
    Rotated ones err by `rope_bound`; a quantised cache does not have its rounding of the store.

    A normalised feature n errs by e, the `norm_bound` of float32: the norm is not rounded to the
    tokens' dtype. Rotating the features a and b of a pair adds |cos| e_a + |sin| e_b, and three
    roundings of terms that are at most |n| + e. The store rounds what is found.
    """
    exact = np.asarray(x, np.float64)
    error: NDArray[np.float64] = np.zeros_like(exact)
    stored_as = "float32" if dtype in STORED_BITS else dtype
    if norm is not None:
        weight, eps, offset = np.asarray(norm.weight), norm.eps, norm.weight_offset
        exact = normed(np.asarray(x), weight, eps, offset)
        error, *_ = norm_bound(
            x, weight, dtype="float32", centred=False, eps=eps, weight_offset=offset
        )
        if rotary is not None:
            assert positions is not None
            places = (*rotary, positions)
            terms = rotated_sizes((np.abs(exact) + error)[None], *places, interleaved=interleaved)
            spread = rotated_sizes(error[None], *places, interleaved=interleaved)
            error = (U32 * 3 * terms + 4 * TINY32 + spread)[0]
            exact = rotated(exact, *places, interleaved=interleaved)
        if dtype not in STORED_BITS:
            error = error + precision_of(stored_as).store(np.abs(exact) + error)
    elif rotary is not None:
        assert positions is not None
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

"""bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention.reference.cache_formats import STORED_BITS, quantisation_bound
from cupyattn.ops.cache.reference import rotated
from cupyattn.ops.rope.bounds import rope_bound
from cupyattn.runtime.precision import U32, precision_of


def append_kv_bound(
    x: NDArray[Any],
    dtype: str,
    rotary: tuple[NDArray[Any], NDArray[Any]] | None = None,
    positions: NDArray[Any] | None = None,
    *,
    interleaved: bool = False,
) -> NDArray[np.float64]:
    """Error bound of what append_kv stores of tokens x (total, heads, D), read back as numbers.

    `dtype` is the cache's: what is not rotated is stored exactly in the dtype that it has, and
    what is, with `rope_bound`, whose rounding of the store a quantised cache has not.
    """
    error: Any = 0.0
    if rotary is not None:
        stored_as = "float32" if dtype in STORED_BITS else dtype
        tokens = np.asarray(x)[None]
        error = rope_bound(
            tokens, *rotary, positions, dtype=stored_as, interleaved=interleaved  # type: ignore[arg-type]
        )[0]  # fmt: skip
        exact = rotated(x, *rotary, positions, interleaved=interleaved)  # type: ignore[arg-type]
    else:
        exact = np.asarray(x, np.float64)
    if dtype in STORED_BITS:
        return quantisation_bound(exact, STORED_BITS[dtype], error=error)[0]
    return np.broadcast_to(error, exact.shape)


def gather_bound(exact: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Error bound of gathered values of a quantised cache.

    The product rounds in float32, and at the store.
    """
    error = U32 * np.abs(exact)
    return error + precision_of(dtype).store(np.abs(exact) + error)

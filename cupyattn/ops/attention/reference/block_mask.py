"""Which tiles of the scores a mask leaves: none, some or all of their scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

EMPTY, PARTIAL, FULL = range(3)
_SCORES_AT_ONCE = 2**22


def block_mask(
    mask_mod: Callable[..., Any], shape: tuple[int, int, int, int], tile: int
) -> NDArray[np.uint8]:
    """Return 0, 1 or 2 for each tile whose scores are seen not at all, in part or in full.

    Parameters
    ----------
    mask_mod : callable
        ``mask_mod(b, h, q_idx, k_idx)`` of integer arrays that broadcast together; bools.
    shape : (B, H, Sq, Sk)
        Of the scores. What a tile has beyond them does not count.
    tile : int
        Queries and keys of a tile.

    Returns
    -------
    array (B, H, ceil(Sq / tile), ceil(Sk / tile))

    Examples
    --------
    >>> block_mask(lambda b, h, i, j: i >= j, (1, 1, 5, 6), 2)[0, 0]
    array([[1, 0, 0],
           [2, 1, 0],
           [2, 2, 1]], dtype=uint8)
    """
    batch, heads, sq, sk = shape
    tiles = np.zeros((batch, heads, -(-sq // tile), -(-sk // tile)), np.uint8)
    if not tiles.size:
        return tiles
    rows = max(1, _SCORES_AT_ONCE // (sk * tile)) * tile
    columns, keys = np.arange(0, sk, tile), np.arange(sk)[None, :]
    for b, h in np.ndindex(batch, heads):
        for first in range(0, sq, rows):
            queries = np.arange(first, min(first + rows, sq))[:, None]
            seen = mask_mod(np.asarray(b), np.asarray(h), queries, keys)
            seen = np.broadcast_to(seen, (len(queries), sk))
            starts = np.arange(0, len(queries), tile)
            some, every = (
                over.reduceat(over.reduceat(seen, columns, axis=1), starts, axis=0)
                for over in (np.logical_or, np.logical_and)
            )
            tiles[b, h, first // tile :][: len(starts)] = np.where(every, FULL, some)
    return tiles

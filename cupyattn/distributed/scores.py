"""Masks, biases and expressions of positions, cut to the scores of one call.

A rank passes the rows of its own queries, of all keys: a call takes those of its queries, and the
columns where its keys stand. An expression counts queries and keys from the beginning of a call; it
is told where in the whole these begin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from cupyattn import BlockMask, MaskMod, ScoreMod
from cupyattn.distributed.placement import Placement
from cupyattn.distributed.plan import Call
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy

_AT = "ring_at"


def with_four_axes(array: Array) -> Array:
    """Return a mask or a bias as (B, H, S, Sk), with 1 where it does not vary."""
    return array[(None,) * (4 - array.ndim)]


def place_of(array: Array, call: Call, placement: Placement) -> tuple[slice, ...]:
    """Return where in a mask or a bias of four axes the scores of a call stand."""
    start, count = call.key_starts[0], call.keys.stop - call.keys.start
    columns = slice(start, start + count * placement.step, placement.step)
    return (
        slice(None),
        slice(None),
        call.queries.slice if array.shape[2] > 1 else slice(None),
        columns if array.shape[3] > 1 else slice(None),
    )


def blocks_of(of_whole: BlockMask, mask_mod: Any, call: Call, placement: Placement) -> Any:
    """Return the block mask of a call, whose mask_mod has been told where it stands.

    A tile that reaches beyond a piece says no less of what it has within. Where tiles lie across
    the beginning of a piece, and of striped tokens, the mask_mod decides alone.
    """
    rows, keys = (part.stop - part.start for part in (call.queries, call.keys))
    starts = call.query_starts[0], call.key_starts[0]
    if placement.step > 1 or any(start % of_whole.tile[0] for start in starts):
        return mask_mod
    down, across = (
        slice(start // side, -(-(start + count) // side))
        for start, count, side in zip(starts, (rows, keys), of_whole.tile, strict=True)
    )
    tiles = of_whole.tiles[:, :, down, across]
    xp = np if isinstance(tiles, np.ndarray) else load_cupy()
    batch, heads = of_whole.shape[:2]
    blocks = of_whole.blocks._replace(shape=(batch, heads, rows, keys), q_offset=None)
    return BlockMask(mask_mod, blocks, xp.ascontiguousarray(tiles))


class Places(NamedTuple):
    """Where the scores of a call stand."""

    at: Array
    """(3, n): sequence, position of the first query and of the first key; n is 1, or for packed
    sequences how many there are."""
    packed: bool
    step: int
    """How many positions lie between two neighbours."""

    def __call__(self, b: Any, q_idx: Any, k_idx: Any) -> tuple[Any, Any, Any]:
        """Return where scores stand in the whole, of where they do in the call."""
        batch, query, key = (row[b if self.packed else 0] for row in self.at)
        return b + batch, query + self.step * q_idx, key + self.step * k_idx


def moved(given: Any, places: Places) -> Any:
    """Return a score_mod or mask_mod of a call, of that of the whole sequences.

    In C++ the expression is the body of a function of the names that it has, so that these mean
    the whole. What of it changes from call to call is an array: kernels are compiled once.
    """
    if not isinstance(given, ScoreMod | MaskMod):
        return None if given is None else _moved_function(given, places)
    name = _AT
    while name in given.arrays:
        name += "_"
    item = "b" if places.packed else "0"
    arguments = (
        f"b + {name}[0][{item}]",
        f"{name}[1][{item}] + {places.step} * q_idx",
        f"{name}[2][{item}] + {places.step} * k_idx",
    )

    def expression(text: str, shown_as: str) -> str:
        return (
            "[&](const int b, const int q_idx, const int k_idx) { return\n"
            f'#line 1 "{shown_as}"\n{text}\n;}}({", ".join(arguments)})'
        )

    def function(of_whole: Callable[..., Any] | None) -> Any:
        return of_whole and _moved_function(of_whole, places, name)

    return given._rewritten(expression, function, {**given.arrays, name: places.at})


def _moved_function(of_whole: Callable[..., Any], places: Places, unknown: str = "") -> Any:
    """Return a Python function of a call's scores; `unknown` is an array that it does not take."""

    @wraps(of_whole)  # errors name the user's
    def of_call(*operands: Any, **arrays: Any) -> Any:
        *others, b, h, q_idx, k_idx = operands
        arrays.pop(unknown, None)
        b, q_idx, k_idx = places(b, q_idx, k_idx)
        return of_whole(*others, b, h, q_idx, k_idx, **arrays)

    return of_call

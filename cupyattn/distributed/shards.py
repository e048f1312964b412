"""Whole arrays cut for ranks by a placement, and joined again.

Of packed sequences a rank holds the first piece of each, then the second piece of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from cupyattn.distributed.checks import adopted, require_array
from cupyattn.distributed.placement import (
    Placement,
    placement_of,
    require_rank,
    sequence_bounds,
    token_positions,
)
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown


def shard(
    x: Array,
    /,
    rank: int,
    ranks: int,
    *,
    placement: str = "zigzag",
    axis: int | None = None,
    cu_seqlens: object = None,
) -> Array:
    """Cut a rank's tokens out of an array of all tokens.

    Parameters
    ----------
    x : array
        NumPy or CuPy, of any dtype.
    rank, ranks : int
        Which rank, of how many.
    placement : {"zigzag", "contiguous", "striped"}
        Which tokens a rank holds: with zigzag pieces rank and ``2 * ranks - 1 - rank`` of
        ``2 * ranks``, with contiguous piece rank of ranks, with striped every ranks-th token.
    axis : int, optional
        That of the tokens; 1 by default, as in q (B, S, H, D), and 0 with cu_seqlens.
    cu_seqlens : integers (B + 1,), optional
        Where packed sequences begin, a sequence or a NumPy array. Each of them is cut alike; the
        rank's first pieces of all sequences come first, then with zigzag its second ones.

    Returns
    -------
    array
        A new array.

    Raises
    ------
    TypeError
        For an x that is no array, an axis that is no integer, and cu_seqlens that are not on the
        host.
    ValueError
        For a rank or an axis that is none, or a length that does not split into equal pieces.

    Examples
    --------
    >>> import numpy as np
    >>> tokens = np.arange(8)
    >>> [shard(tokens, rank, 2, axis=0).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> shard(tokens, 1, 2, axis=0, placement="striped").tolist()
    [1, 3, 5, 7]
    """
    x = require_array(x)[0]
    axis = _token_axis(axis, cu_seqlens, x.shape)
    rank, ranks = require_rank(rank, ranks)
    begins, lengths = _sequences(x.shape[axis], cu_seqlens)
    rows = _rows(placement_of(placement, ranks, lengths), rank, begins, lengths)
    parts = [x[_at(axis, part)] for part in rows] or [x[_at(axis, slice(0))]]
    return _array_module(x).concatenate(parts, axis=axis)


def unshard(
    shards: Iterable[Array],
    /,
    *,
    placement: str = "zigzag",
    axis: int | None = None,
    cu_seqlens: object = None,
) -> Array:
    """Join the shards of all ranks into an array of all tokens.

    Parameters
    ----------
    shards : arrays
        One a rank, in the order of ranks; all of one shape, dtype and device. `Group.all_gather`
        returns such a list.
    placement, axis, cu_seqlens
        As given to `shard`.

    Returns
    -------
    array
        A new array.

    Raises
    ------
    TypeError
        For shards that are no arrays, or not all NumPy or all CuPy.
    ValueError
        For no shards or shards of different shapes, dtypes or devices, an axis that they have not,
        or a length that does not split so.

    Examples
    --------
    >>> import numpy as np
    >>> tokens = np.arange(12)
    >>> shards = [shard(tokens, rank, 3, axis=0) for rank in range(3)]
    >>> unshard(shards, axis=0).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """
    if not isinstance(shards, Iterable):
        raise error(
            TypeError,
            f"shards = {shown(shards)}",
            "it is a sequence of arrays, one for each rank",
            "pass what every rank holds, as run and Group.all_gather return it",
        )
    given = {f"shards[{rank}]": part for rank, part in enumerate(shards)}
    arrays = list(adopted(given).arrays.values())
    kinds = [f"{part.dtype} {part.shape}" for part in arrays]
    if len(set(kinds)) != 1 or len(arrays) < len(given):  # None is no array
        raise error(
            ValueError,
            f"shards that are {shown(kinds)}",
            "there is one for each rank, and all have one shape and dtype",
            "pass what every rank holds",
        )
    first, ranks = arrays[0], len(arrays)
    axis = _token_axis(axis, cu_seqlens, first.shape)
    length = first.shape[axis] * ranks
    begins, lengths = _sequences(length, cu_seqlens)
    chosen = placement_of(placement, ranks, lengths)
    whole = _array_module(first).empty(
        (*first.shape[:axis], length, *first.shape[axis + 1 :]), first.dtype
    )
    for rank, part in enumerate(arrays):
        place = 0
        for rows in _rows(chosen, rank, begins, lengths):
            end = place + len(range(*rows.indices(length)))
            whole[_at(axis, rows)] = part[_at(axis, slice(place, end))]
            place = end
    return whole


def positions(
    rank: int,
    ranks: int,
    length: int | None = None,
    *,
    placement: str = "zigzag",
    cu_seqlens: object = None,
) -> NDArray[np.int32]:
    """Return the position in its sequence of each token of a rank.

    Parameters
    ----------
    rank, ranks : int
        Which rank, of how many.
    length : int, optional
        Of the whole sequence; cu_seqlens has it where that is given.
    placement, cu_seqlens
        As given to `shard`.

    Returns
    -------
    int32 array (S,)

    Raises
    ------
    ValueError
        As `shard`.

    Examples
    --------
    >>> positions(0, 2, 8).tolist()
    [0, 1, 6, 7]
    """
    rank, ranks = require_rank(rank, ranks)
    _, lengths = _sequences(length, cu_seqlens)
    return token_positions(placement_of(placement, ranks, lengths), rank, lengths)


def _sequences(length: int | None, cu_seqlens: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where each sequence begins, and its length."""
    if cu_seqlens is None:
        if length is None:
            raise error(
                TypeError,
                "neither length nor cu_seqlens",
                "one of them sets the number of tokens",
                "pass the length of the whole sequence",
            )
        if not isinstance(length, int | np.integer) or length < 0:
            raise error(
                ValueError if isinstance(length, int | np.integer) else TypeError,
                f"length = {shown(length)}",
                "it is an integer, 0 or more",
                "pass the number of tokens of the whole sequence",
            )
        return (0,), (int(length),)
    bounds = sequence_bounds(cu_seqlens)
    if length is not None and bounds[-1] != length:
        raise error(
            ValueError,
            f"cu_seqlens end at {bounds[-1]}, but all ranks hold {length} tokens",
            "they are those of whole sequences",
            "pass the cu_seqlens of the whole sequences",
        )
    return bounds[:-1], tuple(after - before for before, after in pairwise(bounds))


def _rows(
    placement: Placement, rank: int, begins: Sequence[int], lengths: Sequence[int]
) -> list[slice]:
    """Return the rows of the whole array that a rank holds, in its order."""
    rows = []
    for number in placement.numbers(rank):
        for begin, length in zip(begins, lengths, strict=True):
            piece = placement.piece(number, length)
            rows.append(slice(begin + piece.start, begin + piece.stop, placement.step))
    return rows


def _at(axis: int, rows: slice) -> tuple[slice, ...]:
    """Return the index of rows along an axis."""
    return (*(slice(None),) * axis, rows)


def _token_axis(axis: object, cu_seqlens: object, shape: tuple[int, ...]) -> int:
    """Return which of the axes has the tokens, counted from the first."""
    if axis is None:
        axis = 1 if cu_seqlens is None else 0
    if not isinstance(axis, int | np.integer) or not -len(shape) <= axis < len(shape):
        raise error(
            ValueError if isinstance(axis, int | np.integer) else TypeError,
            f"axis = {shown(axis)} of an array {shape}",
            "it is the number of the axis that has the tokens: by default 1, with cu_seqlens 0",
            "pass axis=0 for an array of tokens alone",
        )
    return int(axis) % len(shape)


def _array_module(x: Array) -> ModuleType:
    return np if isinstance(x, np.ndarray) else load_cupy()

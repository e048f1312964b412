"""Which tokens of a sequence each rank holds, and whole arrays cut and put together by that.

A sequence is cut into pieces of equal length, numbered in order. A rank holds one or two of them:

    contiguous   rank r holds piece r of as many as there are ranks
    zigzag       rank r holds pieces r and 2 ranks - 1 - r of twice as many
    striped      rank r holds tokens r, r + ranks, r + 2 ranks ...

With causal attention the last tokens see most keys: contiguous pieces leave the first ranks idle.
Zigzag pairs an early piece with a late one (Zhu, ring-flash-attention, 2024), striped deals tokens
out one by one (Brandon et al., arXiv:2311.09431): each rank has as much work as the others.

Packed sequences are each cut alike. A rank holds the first piece of every sequence, one behind the
other, and with zigzag behind all of those the second pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupyattn.arrays import Array, adopt
from cupyattn.cupy_library import load_cupy
from cupyattn.errors import error, shown

PLACEMENTS = ("zigzag", "contiguous", "striped")


class Placement(NamedTuple):
    """How the tokens of sequences are dealt out to ranks."""

    name: str
    ranks: int

    @property
    def pieces(self) -> int:
        """How many pieces a rank holds."""
        return 2 if self.name == "zigzag" else 1

    @property
    def step(self) -> int:
        """How many positions lie between two neighbouring tokens of a piece."""
        return self.ranks if self.name == "striped" else 1

    def numbers(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the rank's pieces, in the order in which it holds them."""
        return (rank, 2 * self.ranks - 1 - rank) if self.name == "zigzag" else (rank,)

    def piece_length(self, length: int) -> int:
        """Return how many tokens a piece of a sequence has."""
        return length // (self.pieces * self.ranks)

    def first_position(self, number: int, length: int) -> int:
        """Return the position of a piece's first token."""
        return number if self.name == "striped" else number * self.piece_length(length)

    def piece(self, number: int, length: int) -> range:
        """Return the positions of a piece's tokens."""
        start = self.first_position(number, length)
        return range(start, start + self.piece_length(length) * self.step, self.step)


def placement_of(name: Any, ranks: int, lengths: Sequence[int]) -> Placement:
    """Check that a placement can deal out sequences of these lengths.

    One rank holds all tokens in their order under each of them, which is what contiguous says.

    Raises
    ------
    ValueError
        For a placement that does not exist, or a length that it cannot split.
    """
    if not isinstance(name, str) or name not in PLACEMENTS:
        raise error(
            ValueError,
            f"placement = {shown(name)}",
            f"allowed are {', '.join(map(repr, PLACEMENTS))}",
            "leave it out for zigzag, which balances causal attention",
        )
    placement = Placement(name if ranks > 1 else "contiguous", ranks)
    shares = placement.pieces * ranks
    for length in lengths:
        if length % shares:
            raise error(
                ValueError,
                f"a sequence of {length} tokens over {ranks} ranks, {name}",
                f"each rank holds {placement.pieces} equal piece(s) of each sequence, so its "
                f"length is a multiple of {shares}",
                "pad the sequence, or choose another placement or number of ranks",
            )
    return placement


def shard(
    x: Array,
    /,
    rank: int,
    ranks: int,
    *,
    placement: str = "zigzag",
    axis: int | None = None,
    cu_seqlens: Any = None,
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
    x = adopt({"x": x}).arrays["x"]
    axis = _token_axis(axis, cu_seqlens, x.shape)
    require_rank(rank, ranks)
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
    cu_seqlens: Any = None,
) -> Array:
    """Put the shards of all ranks together to an array of all tokens.

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
    given = {f"shards[{rank}]": part for rank, part in enumerate(shards)}
    arrays = list(adopt(given).arrays.values())
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
    cu_seqlens: Any = None,
) -> NDArray[np.int32]:
    """Return where in its sequence each token of a rank stands.

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
    require_rank(rank, ranks)
    _, lengths = _sequences(length, cu_seqlens)
    return token_positions(placement_of(placement, ranks, lengths), rank, lengths)


def token_positions(placement: Placement, rank: int, lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return where in its sequence each token of a rank stands, of sequences of these lengths."""
    pieces = [
        np.asarray(placement.piece(number, length), np.int32)
        for number in placement.numbers(rank)
        for length in lengths
    ]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def sequence_bounds(cu_seqlens: Any) -> tuple[int, ...]:
    """Take the bounds of packed sequences as numbers of the host.

    Raises
    ------
    TypeError
        For what is no sequence of integers in the memory of the host.
    ValueError
        Where they do not begin with 0, or fall.
    """
    try:
        given = np.asarray(cu_seqlens)
        whole = given.ndim == 1 and given.size > 0 and given.dtype.kind in "iu"
    except TypeError:  # CuPy's arrays are not converted by stealth
        whole = False
    if not whole:
        raise error(
            TypeError,
            f"cu_seqlens = {shown(cu_seqlens)}",
            "a ring plans on the host: they are integers (B + 1,), in a sequence or a NumPy array",
            "pass those of whole sequences; of an array on a GPU pass cu_seqlens.get(), once",
        )
    bounds = tuple(map(int, given))
    if bounds[0] != 0 or any(after < before for before, after in pairwise(bounds)):
        raise error(
            ValueError,
            f"cu_seqlens = {shown(list(bounds))}",
            "they begin with 0 and never fall",
            "pass the sums of the lengths of whole sequences, 0 first",
        )
    return bounds


def require_rank(rank: Any, ranks: Any) -> None:
    """Raise ValueError unless there is such a rank."""
    if not (isinstance(ranks, int) and ranks >= 1 and isinstance(rank, int) and 0 <= rank < ranks):
        raise error(
            ValueError,
            f"rank {shown(rank)} of {shown(ranks)}",
            "there is 1 rank or more, and they are numbered from 0",
            "pass the rank and the number of ranks, as group.rank and group.size have them",
        )


def _sequences(length: int | None, cu_seqlens: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where each sequence begins, and its length."""
    if cu_seqlens is None:
        if length is None:
            raise error(
                TypeError,
                "neither length nor cu_seqlens",
                "one of them says how many tokens there are",
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
            f"cu_seqlens end at {bounds[-1]}, and all ranks together hold {length} tokens",
            "they are those of whole sequences",
            "pass the cu_seqlens of before the sequences were cut",
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


def _token_axis(axis: Any, cu_seqlens: Any, shape: tuple[int, ...]) -> int:
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


def _array_module(x: Array) -> Any:
    return np if isinstance(x, np.ndarray) else load_cupy()

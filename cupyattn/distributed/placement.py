"""Which tokens of a sequence each rank holds.

A sequence is cut into pieces of equal length, numbered in order. A rank holds one or two of them:

    contiguous   of R pieces, R ranks: rank r holds piece r
    zigzag       of 2 R pieces: rank r holds pieces r and 2 R - 1 - r
    striped      rank r holds tokens r, r + R, r + 2 R ...

With causal attention the last tokens see most keys: contiguous pieces leave the first ranks idle.
Zigzag pairs an early piece with a late one (Zhu, ring-flash-attention, 2024), striped deals tokens
out one by one (Brandon et al., arXiv:2311.09431): each rank has as much work as the others.

Each packed sequence is cut in this way. A rank holds the first piece of every sequence, then with
zigzag the second piece of every sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupyattn.runtime.errors import error, shown

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


def placement_of(name: object, ranks: int, lengths: Sequence[int]) -> Placement:
    """Check that a placement can deal out sequences of these lengths.

    A single rank holds all tokens in order, so its placement is contiguous.

    Raises ValueError for a placement that does not exist, or a length that it cannot split.
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


def token_positions(placement: Placement, rank: int, lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return the position in its sequence of each token of a rank."""
    pieces = [
        np.asarray(placement.piece(number, length), np.int32)
        for number in placement.numbers(rank)
        for length in lengths
    ]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def sequence_bounds(cu_seqlens: object) -> tuple[int, ...]:
    """Take the bounds of packed sequences as numbers of the host.

    Raises TypeError unless it is a sequence of integers in host memory; ValueError where
    they do not begin with 0, or fall.
    """
    try:
        given = np.asarray(cu_seqlens)
        whole = given.ndim == 1 and given.size > 0 and given.dtype.kind in "iu"
    except TypeError:  # CuPy arrays are not converted implicitly
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


def require_rank(rank: Any, ranks: Any) -> tuple[int, int]:
    """Return both as Python's integers, and raise ValueError unless there is such a rank."""
    numbers = all(isinstance(number, int | np.integer) for number in (rank, ranks))
    if not (numbers and 0 <= rank < ranks):
        raise error(
            ValueError,
            f"rank {shown(rank)} of {shown(ranks)}",
            "there is 1 rank or more, and they are numbered from 0",
            "pass the rank and the number of ranks, as group.rank and group.size have them",
        )
    return int(rank), int(ranks)

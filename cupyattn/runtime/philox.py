"""Philox4x32-10, the counter-based random number generator of dropout masks.

A counter-based generator is a pure function of (key, counter). So forward, backward, this reference
and every tile shape of every kernel compute the same number for score (b, h, i, j), without any
shared state.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section
3.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # golden ratio and sqrt(3) - 1, as 32-bit fractions
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_ROUNDS = 10

Words = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]


def philox4x32_10(
    counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]
) -> Words:
    """Return four random 32-bit words for each counter.

    Parameters
    ----------
    counter : four arrays of integers in [0, 2**32)
        The words of the counter; they broadcast against each other.
    key : two ints in [0, 2**32)
        The words of the key, low word first.

    Returns
    -------
    four uint32 arrays of the broadcast shape

    Examples
    --------
    >>> [hex(int(word)) for word in philox4x32_10((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    for step in range(_ROUNDS):
        k0, k1 = (
            np.uint64((word + step * increment) & 0xFFFFFFFF)
            for word, increment in zip(key, _KEY_STEPS, strict=True)
        )
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ k0,
            product1 & _LOW_WORD,
            (product0 >> _WORD_BITS) ^ c3 ^ k1,
            product0 & _LOW_WORD,
        )
    w0, w1, w2, w3 = (word.astype(np.uint32) for word in np.broadcast_arrays(c0, c1, c2, c3))
    return w0, w1, w2, w3


def attention_keep(
    seed: int, p: float, b: int, h: int, i: ArrayLike, j: ArrayLike
) -> NDArray[np.bool_]:
    """Return which scores of one head dropout keeps.

    The key is the seed; the counter is (4 (j // 32) + (j % 8) // 2, i, h, b). The four words are
    eight 16-bit fields, low half first. Score j uses field 2 ((j % 32) // 8) + j % 2 and is kept
    if the field is at least round(65536 p). So one counter is enough for the eight scores that a
    thread of a tensor-core kernel holds in 32 keys.

    Parameters
    ----------
    seed : int in [0, 2**64)
    p : float in [0, 1)
        Probability of dropping a score.
    b, h : int
        Batch element and query head.
    i : (M,) ints
        Queries.
    j : (N,) ints
        Keys.

    Returns
    -------
    (M, N) bool
        True where the score is kept.
    """
    i, j = np.asarray(i), np.asarray(j)
    counters, counter_of_key = np.unique(4 * (j // 32) + j % 8 // 2, return_inverse=True)
    words = philox4x32_10((counters, i[:, None], h, b), (seed & 0xFFFFFFFF, seed >> 32))
    fields = np.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])
    # NumPy puts the key axis first because a slice is between the two index arrays.
    field_of_score = fields[2 * (j % 32 // 8) + j % 2, :, counter_of_key].T
    return field_of_score >= round(65536 * p)


def element_keep(seed: int, p: float, items: ArrayLike) -> NDArray[np.bool_]:
    """Return which items of an array `dropout` keeps.

    The key is the seed. The counter of item e, its index in C order, is (g % 2**32, g // 2**32, 0,
    2**31) with g = e // 8, so eight items share a counter. (No batch element of attention has the
    number 2**31.) The four words are eight 16-bit fields, low half first. Item e uses field e % 8
    and is kept if the field is at least round(65536 p).

    Parameters
    ----------
    seed : int in [0, 2**64)
    p : float in [0, 1)
        Probability of dropping an item.
    items : ints in [0, 2**63), of any shape
        Their indices in C order.

    Returns
    -------
    bool, of that shape
        True where the item is kept.

    Examples
    --------
    >>> element_keep(0, 0.5, np.arange(8)).astype(int)
    array([1, 1, 1, 1, 0, 1, 0, 0])
    """
    items = np.asarray(items, dtype=np.uint64)
    groups, of_item = np.unique(items // np.uint64(8), return_inverse=True)
    low, high = groups & _LOW_WORD, groups >> _WORD_BITS
    words = philox4x32_10((low, high, 0, 2**31), (seed & 0xFFFFFFFF, seed >> 32))
    fields = np.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])
    chosen = fields[(items % np.uint64(8)).astype(np.intp), of_item.reshape(items.shape)]
    return np.asarray(chosen >= round(65536 * p))

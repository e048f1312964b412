"""Philox4x32-10, the counter-based random number generator of dropout masks.

A counter-based generator is a pure function of (key, counter). So forward, backward, this reference
and every tile shape of every kernel compute the same number for an item, without any shared state.

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

Counter = tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike]
Words = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]


def philox4x32_10(counter: Counter, key: tuple[int, int]) -> Words:
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


def kept_fields(seed: int, p: float, counter: Counter) -> NDArray[np.bool_]:
    """Return which 16-bit fields of the words a probability `p` of dropping keeps.

    The key is the seed, an int in [0, 2**64). The four words of a counter are eight fields, which
    come first in the result, the low half of each word first. A field is kept if it is at least
    round(65536 p).
    """
    words = philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32))
    fields = np.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])
    return np.asarray(fields >= round(65536 * p))

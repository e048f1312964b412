"""Sampling, repeated from its seed: the float32 arithmetic of the kernels, bit for bit.

Every step uses single float32 additions, multiplications and divisions, or integers, which NumPy
and a GPU compute alike. So a draw is the same on any device, whatever the order of the CTAs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupyattn.runtime.philox import philox4x32_10
from cupyattn.runtime.precision import Float64

Float32 = NDArray[np.float32]
UInt64 = NDArray[np.uint64]

LEAST_TEMPERATURE = np.float32(1e-6)
"""Below it a row is greedy."""
_F = np.float32
_LARGEST_FINITE = np.finfo(np.float32).max
_LOG2_E = _F(1.4426950408889634)
_TINY = _F(2.0**-126)  # a GPU flushes what is smaller
_FARTHEST = 2**30 - 1
_REACHED = _F(2.0**64 - 2.0**46)  # a sum that is 2^-18 of top_p less counts as top_p
_NEAR = 2**6  # a distance that is 2^-18 more than that of min_p counts as min_p's
_COUNTER = 0x80000001  # word 3 of Philox's counter, which dropout never uses
_LOG2 = (
    *map(_F, (1.4426949, -0.7213528, 0.48092324, -0.36023962)),
    *map(_F, (0.2870987, -0.24887687, 0.23404233, -0.14581162)),
)
"""Coefficients of P in log2(1 + t) = t P(t)."""
_EXP2 = tuple(map(_F, (1.0, -0.69314694, 0.24021383, -0.055404343, 0.009337598, -0.0010003551)))
"""Coefficients of a polynomial for 2^-f, f from 0 to 1."""


class SampleOptions(NamedTuple):
    """The options of one row."""

    seed: int
    step: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float

    @property
    def greedy(self) -> bool:
        """Whether the first of the largest logits is taken."""
        return not _F(self.temperature) >= LEAST_TEMPERATURE


def sample(
    logits: ArrayLike,
    *,
    seed: ArrayLike | None,
    step: ArrayLike = 0,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    repetition_penalty: ArrayLike = 1.0,
    previous: ArrayLike | None = None,
) -> NDArray[np.int32]:
    """Return the token of each row, as `cupyattn.sample` draws it.

    Examples
    --------
    >>> logits = np.log([[0.5, 0.25, 0.25]] * 4)
    >>> sample(logits, seed=0, temperature=0.0)
    array([0, 0, 0, 0], dtype=int32)
    """
    rows = np.asarray(logits)
    of_rows = _options(len(rows), seed, step, temperature, top_k, top_p, min_p, repetition_penalty)
    ids = np.empty(len(rows), np.int32)
    for row, options in enumerate(of_rows):
        x = _weakened(rows[row], options, None if previous is None else np.asarray(previous)[row])
        ids[row] = _draw(x, options)
    return ids


def sampling_probabilities(
    logits: ArrayLike,
    *,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    repetition_penalty: ArrayLike = 1.0,
    previous: ArrayLike | None = None,
) -> Float64:
    """Return the probabilities with which `sample` draws: the softmax over each row's kept tokens.

    Examples
    --------
    >>> logits = np.log([[0.5, 0.3, 0.15, 0.05]])
    >>> sampling_probabilities(logits, top_p=0.75).round(3)
    array([[0.625, 0.375, 0.   , 0.   ]])
    """
    rows = np.asarray(logits)
    of_rows = _options(len(rows), 0, 0, temperature, top_k, top_p, min_p, repetition_penalty)
    found = np.zeros(rows.shape)
    for row, options in enumerate(of_rows):
        x = _weakened(rows[row], options, None if previous is None else np.asarray(previous)[row])
        kept = np.flatnonzero(x > -np.inf)
        if not len(kept):
            continue
        if options.greedy or x.max() == np.inf:
            found[row, x.argmax()] = 1
            continue
        scores = _scores(x[kept], options.temperature)
        inside = _kept(scores, options)
        weights = np.exp2(scores[inside].astype(np.float64))
        found[row, kept[inside]] = weights / weights.sum()
    return found


def gumbel_log2(words: NDArray[np.uint32]) -> Float32:
    """Return Gumbel noise in base 2 of random words: -log2(-log2 u) with u = (word | 1) / 2^32.

    Examples
    --------
    >>> gumbel_log2(np.array([0, 2**31, 2**32 - 1], np.uint32)).tolist()
    [-5.0, -0.0, 31.471233367919922]
    """
    odd = words | np.uint32(1)
    zeros = 31 - (np.frexp(odd.astype(np.float64))[1] - 1)
    m = odd << zeros.astype(np.uint32)
    upper = m >= np.uint32(0xB504F334)  # the first above sqrt(2) 2^31
    from_one = np.where(upper, m, m - np.uint32(2**31)).view(np.int32).astype(np.float32)
    t = from_one * np.where(upper, _F(2.0**-32), _F(2.0**-31))
    exponent = np.where(upper, -zeros, -zeros - 1).astype(np.float32)
    return -_log2(-(exponent + _log2_near_one(t)))


def _options(rows: int, seed: Any, *others: Any) -> list[SampleOptions]:
    """Return the options of each row; a seed for all rows grows by one from row to row."""
    per_row = np.ndim(seed) > 0
    seeds = [int(s) % 2**64 for s in (seed if per_row else [(seed or 0) + r for r in range(rows)])]
    defaults = (0, 1.0, 0, 1.0, 0.0, 1.0)
    given = [
        default if other is None else other for other, default in zip(others, defaults, strict=True)
    ]
    columns = [np.broadcast_to(np.asarray(other), (rows,)).tolist() for other in given]
    return [SampleOptions(*each) for each in zip(seeds, *columns, strict=True)]


def _weakened(logits: Any, options: SampleOptions, previous: Any) -> Float32:
    """Return logits in float32, weaker for previous tokens, and -inf for NaN."""
    x = _flushed(np.array(logits, dtype=np.float32))
    if previous is not None:
        tokens = np.unique(previous[(previous >= 0) & (previous < len(x))])
        weak, penalty = x[tokens], _F(options.repetition_penalty)
        with np.errstate(over="ignore", invalid="ignore"):
            x[tokens] = np.where(weak > 0, weak / penalty, weak * penalty)
    x[np.isnan(x)] = -np.inf
    return _flushed(x)


def _draw(x: Float32, options: SampleOptions) -> int:
    first = int(x.argmax())
    if options.greedy or x[first] == -np.inf:
        return first if x[first] > -np.inf else -1
    tokens = np.flatnonzero(x > -np.inf)
    scores = _scores(x[tokens], options.temperature)
    inside = _kept(scores, options)
    keys = scores[inside] + _token_gumbel(options, tokens[inside])
    return int(tokens[inside][keys.argmax()])


def _scores(x: Float32, temperature: float) -> Float32:
    """Return the scores in base 2 of logits above -inf: 0 for the largest, negative for others."""
    with np.errstate(over="ignore", under="ignore"):
        differences = _flushed(x - np.minimum(x.max(), _LARGEST_FINITE))
        return _flushed(differences * np.maximum(_LOG2_E / _F(temperature), _TINY))


def _flushed(x: Float32) -> Float32:
    """Replace subnormal numbers by 0, in place; return the array."""
    x[np.abs(x) < _TINY] = 0
    return x


def _kept(scores: Float32, options: SampleOptions) -> NDArray[np.bool_]:
    """Return which tokens the filters keep: those with the largest scores, ties included."""
    with np.errstate(over="ignore"):
        units = -scores * _F(2.0**24)
    distances = np.minimum(np.clip(units, 0, _F(2.0**30)).astype(np.int64), _FARTHEST)
    farthest = _FARTHEST
    if 0 < options.top_k < len(scores):
        farthest = int(np.partition(distances, options.top_k - 1)[options.top_k - 1])
    if _F(options.top_p) < 1:
        order = np.sort(distances[distances <= farthest])
        reached = np.cumsum(_weights(order))
        share = int(_F(max(options.top_p, 0.0)) * _REACHED)
        wanted = max(int(reached[-1]) * share >> 64, 1)
        farthest = int(order[np.searchsorted(reached, np.uint64(wanted))])
    if _F(options.min_p) >= _TINY:
        least = -_log2(np.array([options.min_p], np.float32))[0] * _F(2.0**24)
        farthest = min(farthest, int(np.clip(least, 0, 2.0**30)) + _NEAR)
    return distances <= farthest


def _weights(distances: NDArray[np.int64]) -> UInt64:
    """Return 2^41 2^-distance as integers."""
    f = (distances & 0xFFFFFF).astype(np.float32) * _F(2.0**-24)
    p = np.full_like(f, _EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        p = p * f + coefficient
    whole = (p * _F(2.0**24)).astype(np.uint64)
    return (whole << np.uint64(17)) >> (distances >> 24).astype(np.uint64)


def _token_gumbel(options: SampleOptions, tokens: NDArray[np.intp]) -> Float32:
    """Return the noise of tokens: four neighbours take the words of one call of Philox."""
    quads, of_token = np.unique(tokens // 4, return_inverse=True)
    counter = (quads, options.step & 0xFFFFFFFF, options.step >> 32 & 0xFFFFFFFF, _COUNTER)
    words = np.stack(philox4x32_10(counter, (options.seed & 0xFFFFFFFF, options.seed >> 32)))
    return gumbel_log2(words[tokens % 4, of_token])


def _log2(x: Float32) -> Float32:
    """Return log2 of positive numbers that are not subnormal."""
    bits = x.view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> 23
    t = (bits - (exponent << 23)).view(np.float32) - _F(1)
    return exponent.astype(np.float32) + _log2_near_one(t)


def _log2_near_one(t: Float32) -> Float32:
    """Return log2(1 + t) for 1 + t from sqrt(1/2) to sqrt(2)."""
    p = np.full_like(t, _LOG2[-1])
    for coefficient in _LOG2[-2::-1]:
        p = p * t + coefficient
    return p * t

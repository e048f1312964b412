"""Rotary position embedding in float64, and the frequencies of every scaling.

Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding",
arXiv:2104.09864, equation 34, which pairs features 2m and 2m + 1 ("interleaved"). GPT-NeoX and most
models permute the features: they pair m and m + R/2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupyattn.runtime.precision import Float64


def rotate(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, interleaved: bool = False
) -> NDArray[np.float64]:
    """Rotate the first R features of x (..., D) by the angles of cos and sin (..., R/2).

    The transpose, and for cos**2 + sin**2 = 1 the inverse, is `rotate(x, cos, -sin)`.
    """
    half = cos.shape[-1]
    result = np.array(x, dtype=np.float64)
    firsts, seconds = pairs_of(half, interleaved=interleaved)
    first, second = result[..., firsts].copy(), result[..., seconds].copy()
    with np.errstate(invalid="ignore", over="ignore"):
        result[..., firsts] = first * cos - second * sin
        result[..., seconds] = second * cos + first * sin
    return result


def pairs_of(half: int, *, interleaved: bool) -> tuple[slice, slice]:
    """Return the slices of the first and of the second features of `half` pairs."""
    if interleaved:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)


def table_rows(table: np.ndarray, positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return rows of a table of cosines or sines, as float64.

    Raises
    ------
    IndexError
        If a position is outside the table (NumPy would read a negative one from the end).
    """
    lowest, highest = np.min(positions, initial=0), np.max(positions, initial=-1)
    if lowest < 0 or highest >= len(table):
        raise IndexError(
            f"rotary positions {lowest} to {highest} are not all within the {len(table)} rows of "
            "cos and sin; pass larger tables, or a q_offset that makes every i + q_offset a row"
        )
    return np.asarray(table[positions], dtype=np.float64)


def rope(
    x: ArrayLike, cos: ArrayLike, sin: ArrayLike, positions: ArrayLike, *, interleaved: bool = False
) -> NDArray[np.float64]:
    """Rotate the feature pairs of every token by the angles of its position.

    Parameters
    ----------
    x : (B, S, H, D) floats
    cos, sin : (P, R/2) floats
        Cosine and sine of the angle of each position and pair; R <= D, R even. Features from R on
        are left alone.
    positions : (S,) or (B, S) ints in [0, P)
        Position of each token.
    interleaved : bool
        Whether neighbouring features are paired.

    Returns
    -------
    (B, S, H, D) float64

    Raises
    ------
    IndexError
        If a position is outside the tables.

    Examples
    --------
    >>> x = np.array([[[[1.0, 2.0, 3.0]]]])
    >>> rope(x, cos=[[0.0]], sin=[[1.0]], positions=[0])
    array([[[[-2.,  1.,  3.]]]])
    """
    positions = np.asarray(positions)
    cos, sin = (table_rows(np.asarray(t), positions)[..., None, :] for t in (cos, sin))
    return rotate(np.asarray(x), cos, sin, interleaved=interleaved)


def rope_backward(
    dout: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    positions: ArrayLike,
    *,
    interleaved: bool = False,
) -> NDArray[np.float64]:
    """Return the gradient with respect to x of `rope`: the transposed rotation of dout."""
    return rope(dout, cos, -np.asarray(sin), positions, interleaved=interleaved)


class LinearScaling(NamedTuple):
    """Position interpolation: all angles are divided by a factor.

    Chen et al., "Extending context window of large language models via positional interpolation",
    arXiv:2306.15595, equation 4.

    Attributes
    ----------
    factor : float
        How many times longer the context becomes.
    """

    factor: float

    def frequencies(self, plain: Float64, base: float) -> Float64:
        """Return the frequencies, from those without scaling."""
        return plain / self.factor

    @property
    def attention_scale(self) -> float:
        """The factor of cosines and sines."""
        return 1.0


class NTKScaling(NamedTuple):
    """NTK-aware interpolation: a larger base, so that the lowest frequency is divided by a factor.

    Peng et al., "YaRN: efficient context window extension of large language models",
    arXiv:2309.00071, section 3.1, definition 1: base' = base * factor ** (R / (R - 2)).

    Attributes
    ----------
    factor : float
        How many times longer the context becomes.
    """

    factor: float

    def frequencies(self, plain: Float64, base: float) -> Float64:
        """Return the frequencies, from those without scaling."""
        rotary_dim = 2 * plain.size
        if rotary_dim <= 2:
            return plain  # the only frequency is 1 for any base
        stretched = base * self.factor ** (rotary_dim / (rotary_dim - 2))
        return stretched ** (-np.arange(plain.size) / plain.size)

    @property
    def attention_scale(self) -> float:
        """The factor of cosines and sines."""
        return 1.0


class YarnScaling(NamedTuple):
    """YaRN: low frequencies are interpolated, high ones kept, with a linear ramp in between.

    Peng et al., arXiv:2309.00071, section 3.2 and equation 22 (the scale). The ramp is that of
    their code and models: linear in m between the pairs that rotate beta_fast and beta_slow times
    in original_length positions, the first rounded down and the second up.

    Attributes
    ----------
    factor : float
        How many times longer the context becomes.
    original_length : int
        Length that the model was trained on.
    beta_fast : float
        A pair with at least this many rotations in original_length keeps its frequency.
    beta_slow : float
        A pair with at most this many rotations is interpolated.
    attention_factor : float, optional
        The factor of cosines and sines; by default 0.1 ln(factor) + 1.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def frequencies(self, plain: Float64, base: float) -> Float64:
        """Return the frequencies, from those without scaling."""
        low = max(math.floor(self._pair_of(self.beta_fast, plain.size, base)), 0)
        high = min(math.ceil(self._pair_of(self.beta_slow, plain.size, base)), 2 * plain.size - 1)
        width = high - low if high != low else 0.001
        interpolated = np.clip((np.arange(plain.size) - low) / width, 0.0, 1.0)
        return plain * (interpolated / self.factor + 1 - interpolated)

    def _pair_of(self, turns: float, pairs: int, base: float) -> float:
        """Return the m whose pair rotates `turns` times: turns = L base**(-m / pairs) / (2 pi)."""
        return pairs * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base)

    @property
    def attention_scale(self) -> float:
        """The factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0


class Llama3Scaling(NamedTuple):
    """The scaling of Llama 3.1 and later models: low frequencies are divided, high ones kept.

    The formula is that of Meta's model code ("apply_scaling"). A wavelength above original_length /
    low_freq_factor positions is multiplied by factor; one below original_length / high_freq_factor
    is kept. In between the frequency is a weighted mean of both.

    Attributes
    ----------
    factor : float
        The divisor of the lowest frequencies.
    low_freq_factor : float
        A frequency with at most this many waves in original_length positions is divided.
    high_freq_factor : float
        A frequency with at least this many waves is kept.
    original_length : int
        Length that the model was first trained on.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def frequencies(self, plain: Float64, base: float) -> Float64:
        """Return the frequencies, from those without scaling."""
        waves = self.original_length * plain / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((waves - self.low_freq_factor) / width, 0.0, 1.0)
        return plain * (kept + (1 - kept) / self.factor)

    @property
    def attention_scale(self) -> float:
        """The factor of cosines and sines."""
        return 1.0


class LongRopeScaling(NamedTuple):
    """LongRoPE: each frequency is divided by its own factor, one of two lists by the length.

    Ding et al., "LongRoPE: extending LLM context window beyond 2 million tokens", arXiv:2402.13753.
    Phi-3 and Phi-4 have the two lists.

    Attributes
    ----------
    short_factors, long_factors : tuple of float
        A factor for each pair: for tables of at most original_length positions, and for longer
        ones.
    original_length : int
        Length that the model was first trained on.
    attention_factor : float
        The factor of cosines and sines.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    attention_factor: float = 1.0

    def frequencies(self, plain: Float64, base: float, length: int = 1) -> Float64:
        """Return the frequencies in tables of a length, from those without scaling."""
        is_long = length > self.original_length
        return plain / np.asarray(self.long_factors if is_long else self.short_factors)

    @property
    def attention_scale(self) -> float:
        """The factor of cosines and sines."""
        return self.attention_factor


RopeScaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | LongRopeScaling


def rope_frequencies(
    rotary_dim: int, *, base: float = 10000.0, scaling: RopeScaling | None = None, length: int = 1
) -> Float64:
    """Return the angle by which each pair rotates from one position to the next.

    Examples
    --------
    >>> rope_frequencies(4, base=100.0)
    array([1. , 0.1])
    >>> rope_frequencies(4, base=100.0, scaling=LinearScaling(4.0))
    array([0.25 , 0.025])
    """
    half = rotary_dim // 2
    plain = np.asarray(base ** (-np.arange(half) / max(half, 1)), dtype=np.float64)
    if isinstance(scaling, LongRopeScaling):
        return scaling.frequencies(plain, base, length)
    return plain if scaling is None else scaling.frequencies(plain, base)


def rope_tables(
    length: int, rotary_dim: int, *, base: float = 10000.0, scaling: RopeScaling | None = None
) -> tuple[Float64, Float64]:
    """Return cosines and sines (length, rotary_dim / 2) of every position and pair."""
    frequencies = rope_frequencies(rotary_dim, base=base, scaling=scaling, length=length)
    angles = np.arange(length)[:, None] * frequencies
    scale = 1.0 if scaling is None else scaling.attention_scale
    return scale * np.cos(angles), scale * np.sin(angles)

"""Random float32, and rationals rounded to a binary format by definition."""

import math
from fractions import Fraction

import numpy as np

RNG = np.random.default_rng(2)
TINY = float(np.finfo(np.float32).smallest_normal)


def floats(count: int = 300, spread: int = 40) -> np.ndarray:
    """Random float32 of many magnitudes, then the awkward ones."""
    values = RNG.standard_normal(count) * 2.0 ** RNG.integers(-spread, spread, count)
    edges = [0.0, -0.0, 1.0, -1.0, 1 + 2**-23, TINY, -TINY, 2**-149, -(2**-140), 3.0e38, 65504.0,
             np.inf, -np.inf, np.nan]  # fmt: skip
    return np.concatenate([values, edges]).astype(np.float32)


def round_exact(
    value: Fraction, mode: str, precision: int, smallest: int, largest: float, dtype: type
) -> float:
    """Round a rational to a binary format, by definition."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - precision + 1, smallest)
    steps = value / unit
    low = math.floor(steps)
    rest = steps - low
    if mode == "rz":
        mode = "rm" if value > 0 else "rp"
    if mode == "rm":
        n = low
    elif mode == "rp":
        n = low + (rest > 0)
    else:
        n = low + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1))
    result = n * unit
    if abs(result) > Fraction(largest):
        towards_zero = (mode == "rm" and value > 0) or (mode == "rp" and value < 0)
        return math.copysign(largest if towards_zero else math.inf, value)
    return float(dtype(float(result)))


def to_single(value: Fraction, mode: str = "rn") -> float:
    return round_exact(value, mode, 24, -149, float(np.finfo(np.float32).max), np.float32)


def to_half(value: Fraction, mode: str = "rn") -> float:
    return round_exact(value, mode, 11, -24, 65504.0, np.float16)

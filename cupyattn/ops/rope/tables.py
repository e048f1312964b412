"""The tables of rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyattn.ops.rope import reference
from cupyattn.ops.rope.reference import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RopeScaling,
    YarnScaling,
)
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.float_dtypes import float_dtype
from cupyattn.runtime.numbers import integer, real
from cupyattn.runtime.rounding import round_into

_MOST = 2**31 - 1
"""Positions, and features: kernels count in int32."""
_SCALINGS = (LinearScaling, NTKScaling, YarnScaling, Llama3Scaling)


def rope_tables(
    length: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    dtype: Any = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    r"""Cosines and sines for `rope` and for the option ``rotary`` of `attention`.

    Parameters
    ----------
    length : int
        Positions, from 0 on: at most 2**31 - 1.
    rotary_dim : int
        R, the number of features that are rotated: even, less than 2**31.
    base : float
        Pair m turns by ``base ** (-2 m / R)`` from one position to the next.
    scaling : LinearScaling, NTKScaling, YarnScaling or Llama3Scaling, optional
        How a model reaches beyond the length that it was trained on.
    dtype : {"float32", "float16", "bfloat16", "float64"}
        Of the tables, which are computed in float64 and rounded once.

    Returns
    -------
    cos, sin : numpy.ndarray (length, R/2)
        For a GPU copy them once, by cupy.asarray.

    Raises
    ------
    TypeError
        For numbers, a scaling or a dtype of another kind.
    ValueError
        For a length or a rotary_dim that is negative or too large, an odd rotary_dim, a base that
        is not above 1, a scaling whose numbers make no sense, or angles that are not finite.

    Notes
    -----
    Su et al., arXiv:2104.09864, section 3.2.2. Other libraries compute angles in float32, which at
    position 100,000 err by up to 0.004; these do not.

    Examples
    --------
    >>> import cupyattn
    >>> cos, sin = cupyattn.rope_tables(3, 4)
    >>> sin.round(4)
    array([[0.    , 0.    ],
           [0.8415, 0.01  ],
           [0.9093, 0.02  ]], dtype=float32)
    >>> llama = cupyattn.Llama3Scaling(factor=8.0, original_length=8192)
    >>> cos, sin = cupyattn.rope_tables(131072, 128, base=500000.0, scaling=llama)
    """
    length, rotary_dim = integer("length", length), integer("rotary_dim", rotary_dim)
    base = real("base", base)
    _require(
        0 <= length <= _MOST,
        f"length = {shown(length)}",
        f"it is 0 or more, at most {_MOST}",
        "pass how many positions",
    )
    _require(
        0 <= rotary_dim <= _MOST and rotary_dim % 2 == 0,
        f"rotary_dim = {shown(rotary_dim)}",
        f"it is even, 0 or more, at most {_MOST}: features turn in pairs",
        "pass the number of features that are rotated",
    )
    _require(
        1 < base < float("inf"),
        f"base = {base}",
        "it is above 1 and finite",
        "pass the model's, 10000.0 most often",
    )
    _check_scaling(scaling)
    _require(
        math.isfinite(_largest_angle(length, rotary_dim, base, scaling)),
        f"base = {base} with scaling = {shown(scaling)}",
        f"angles of {length} positions are finite numbers",
        "pass the model's",
    )
    kind = float_dtype(dtype)
    exact = reference.rope_tables(length, rotary_dim, base=base, scaling=scaling)
    cos, sin = (round_into(None, table, kind) for table in exact)
    return cos, sin


def _largest_angle(length: int, rotary_dim: int, base: float, scaling: RopeScaling | None) -> float:
    """Return the largest angle of a table; inf for frequencies that no float holds."""
    try:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            found = reference.rope_frequencies(rotary_dim, base=base, scaling=scaling)
            return float(max(length - 1, 1) * found.max(initial=0.0))
    except (OverflowError, ValueError):  # as Python's own arithmetic refuses them
        return math.inf


def _check_scaling(scaling: Any) -> None:
    if scaling is None:
        return
    names = ", ".join(each.__name__ for each in _SCALINGS)
    if not isinstance(scaling, _SCALINGS):
        raise error(
            TypeError,
            f"scaling is a {type(scaling).__name__}",
            f"it is None or one of {names}",
            "pass for example scaling=cupyattn.LinearScaling(2.0)",
        )
    for name, value in scaling._asdict().items():
        if value is None:
            continue
        number = real(f"{name} of scaling", value)
        _require(
            0 < number < float("inf"),
            f"{name} = {number} of {type(scaling).__name__}",
            "it is above 0 and finite",
            "pass the model's",
        )
    if isinstance(scaling, Llama3Scaling):
        _require(
            scaling.high_freq_factor > scaling.low_freq_factor,
            f"high_freq_factor = {scaling.high_freq_factor}",
            f"it is above low_freq_factor = {scaling.low_freq_factor}",
            "pass the model's",
        )
    if isinstance(scaling, YarnScaling):
        _require(
            scaling.beta_fast >= scaling.beta_slow,  # some models have them equal
            f"beta_fast = {scaling.beta_fast}",
            f"it is at least beta_slow = {scaling.beta_slow}",
            "pass the model's",
        )


def _require(holds: bool, passed: str, allowed: str, fix: str) -> None:
    if not holds:
        raise error(ValueError, passed, allowed, fix)

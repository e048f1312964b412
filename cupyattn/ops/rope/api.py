"""Rotary position embedding, forward and backward, and its tables."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, overload

import numpy as np

from cupyattn.ops.rope import reference
from cupyattn.ops.rope.kernels import (
    RopeArrays,
    RopeBackwardArrays,
    RopePairArrays,
    RopePairBackwardArrays,
    RopeProblem,
    rope_problem,
    run_rope,
)
from cupyattn.ops.rope.reference import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    RopeScaling,
    YarnScaling,
)
from cupyattn.runtime.arrays import Array, Layout, adopt
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    fixes_of_results,
    integer,
    real,
    require_bool,
    require_contiguous_rows,
    require_dtype,
    require_rank,
    require_same_dtype,
    require_shape,
)
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.outputs import float_dtype, require_grads, round_into

_FIXES = {
    "positions": "pass an int32 array of shape (S,) or (B, S), for example numpy.arange(S)",
    **fixes_of_results("out", "out[0]", "out[1]"),
}


class Rotary(NamedTuple):
    """The tables of a rotary position embedding, for functions that rotate q and k themselves.

    Attributes
    ----------
    cos, sin : array (positions, R/2)
        Cosine and sine of each position and pair, as `rope_tables` returns them.
    interleaved : bool
        Pair features 2m and 2m + 1, instead of m and m + R/2.
    """

    cos: Array
    sin: Array
    interleaved: bool = False


def checked_rotary(rotary: Any) -> Rotary:
    """Return the option ``rotary`` of a function as a `Rotary`; it may be a tuple (cos, sin).

    Raises
    ------
    TypeError
        If it is anything else.
    """
    fits = isinstance(rotary, tuple) and (len(rotary) == 2 or isinstance(rotary, Rotary))
    if not fits or rotary[0] is None or rotary[1] is None:
        raise error(
            TypeError,
            f"rotary has type {type(rotary).__name__}"
            + (f" of length {len(rotary)}" if isinstance(rotary, tuple) else "")
            + (", of which one is None" if fits else ""),
            "it must be a tuple (cos, sin) of arrays (positions, R/2), or Rotary(cos, sin, "
            "interleaved=False)",
            "pass rotary=(cos, sin)",
        )
    tables = Rotary(*rotary)
    require_bool("rotary's interleaved", tables.interleaved)
    return tables._replace(interleaved=bool(tables.interleaved))


def require_rotary_tables(cos: Layout, sin: Layout, head_dim: int) -> None:
    """Raise unless a function's tables fit each other and heads of D features."""
    for name, table in (("cos", cos), ("sin", sin)):
        require_dtype(f"rotary's {name}", table, CPU_FLOATS)
        require_rank(f"rotary's {name}", table, "positions R/2")
        require_contiguous_rows(f"rotary's {name}", table)
    require_shape("rotary's sin", sin, cos.shape, "(positions, R/2) like cos")
    require_same_dtype({"cos": cos, "sin": sin})
    if 2 * cos.shape[1] > head_dim:
        raise error(
            ValueError,
            f"rotary tables of {cos.shape[1]} columns rotate {2 * cos.shape[1]} features",
            f"at most D = {head_dim} features can be rotated",
            "make tables of at most D / 2 columns",
        )


@overload
def rope(
    x: Array,
    cos: Array,
    sin: Array,
    /,
    *,
    positions: Array | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    out: Array | None = None,
) -> Array: ...
@overload
def rope(
    x: tuple[Array, Array],
    cos: Array,
    sin: Array,
    /,
    *,
    positions: Array | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]: ...
@differentiable(lambda: rope_backward, gradients=("dx",))
def rope(
    x: Array | tuple[Array, Array],
    cos: Array,
    sin: Array,
    /,
    *,
    positions: Array | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    out: Array | tuple[Array, Array] | None = None,
) -> Any:
    r"""Rotary position embedding: rotate pairs of features by angles that grow with the position.

    Parameters
    ----------
    x : array (B, S, H, D), or a tuple (q, k) of two
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous; the others may have any stride. The arrays of a tuple
        are rotated in one launch and may differ only in their numbers of heads.
    cos, sin : array (P, R/2)
        Cosine and sine of each position and pair, as `rope_tables` returns them, in any of these
        dtypes. The first R features of a head are rotated, the others copied.
    positions : array (S,) or (B, S), int32 or int64, optional
        The position of each token, a row of the tables. By default token s has position s.
    interleaved : bool
        Pair features 2m and 2m + 1, as the paper and GPT-J do. Otherwise pair m and m + R/2, as
        GPT-NeoX, Llama and most models do.
    inverse : bool
        Rotate by the negative angles.
    out : array or tuple of two, optional
        Where to write the results: x itself, or memory that does not overlap it.

    Returns
    -------
    array (B, S, H, D), dtype of x; or a tuple of two

    Raises
    ------
    TypeError
        For an argument that is not an array, NumPy and CuPy arrays mixed, or a dtype that is not
        allowed.
    ValueError
        For shapes that disagree, tables with more than D / 2 columns or, without positions, fewer
        than S rows, an out of another shape or dtype, and an out that overlaps x and is not x. On
        the CPU and with ``backend(checks=True)`` also for a position outside of the tables;
        otherwise the token's rotated features are NaN.
    RuntimeError
        As `attention`.

    Notes
    -----
    Su et al., "RoFormer: enhanced transformer with rotary position embedding", arXiv:2104.09864,
    equation 34. Computed in float32, rounded once.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cos, sin = cupyattn.rope_tables(16, 8)
    >>> q, k = np.ones((1, 3, 4, 8), np.float32), np.ones((1, 3, 2, 8), np.float32)
    >>> q_rotated, k_rotated = cupyattn.rope((q, k), cos, sin)
    >>> back = cupyattn.rope(q_rotated, cos, sin, inverse=True)
    >>> np.allclose(back, q)
    True

    Products of q and k depend only on the distance of their positions:

    >>> later = cupyattn.rope((q, k), cos, sin, positions=np.array([5, 6, 7]))
    >>> np.allclose((later[0][0, 2, 0] * later[1][0, 0, 0]).sum(),
    ...             (q_rotated[0, 2, 0] * k_rotated[0, 0, 0]).sum())
    True
    """
    kinds = RopeArrays, RopePairArrays
    return _rotated(kinds, x, cos, sin, positions, out, interleaved=interleaved, inverse=inverse)


@overload
def rope_backward(
    dout: Array,
    cos: Array,
    sin: Array,
    /,
    *,
    positions: Array | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    grads: Array | None = None,
    accumulate: bool = False,
) -> Array: ...
@overload
def rope_backward(
    dout: tuple[Array, Array],
    cos: Array,
    sin: Array,
    /,
    *,
    positions: Array | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    grads: tuple[Array, Array] | None = None,
    accumulate: bool = False,
) -> tuple[Array, Array]: ...
def rope_backward(
    dout: Array | tuple[Array, Array],
    cos: Array,
    sin: Array,
    /,
    *,
    positions: Array | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    grads: Array | tuple[Array, Array] | None = None,
    accumulate: bool = False,
) -> Any:
    r"""Gradient of `rope`: the inverse rotation of dout.

    Parameters
    ----------
    dout : array (B, S, H, D), or a tuple of two
        Gradient with respect to the result, or results.
    cos, sin, positions, interleaved, inverse : optional
        As given to `rope`.
    grads : array or tuple of two, optional
        Where to write the gradient: dout itself, or memory that does not overlap it.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    array (B, S, H, D), dtype of dout; or a tuple of two
        Gradient with respect to x: the transposed rotation, which is the inverse if cos**2 + sin**2
        is 1.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `rope`; and for accumulate without grads.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cos, sin = cupyattn.rope_tables(4, 2)
    >>> dout = np.array([[[[1.0, 0.0]], [[1.0, 0.0]]]], np.float32)
    >>> cupyattn.rope_backward(dout, cos, sin)[0, :, 0].round(4)
    array([[ 1.    ,  0.    ],
           [ 0.5403, -0.8415]], dtype=float32)
    """
    require_bool("accumulate", accumulate)
    require_grads(grads, accumulate)
    require_bool("inverse", inverse)
    return _rotated(
        (RopeBackwardArrays, RopePairBackwardArrays),
        dout,
        cos,
        sin,
        positions,
        grads,
        interleaved=interleaved,
        inverse=not inverse,
        accumulate=accumulate,
    )


def _rotated(
    kinds: tuple[type[RopeArrays[Any]], type[RopeArrays[Any]]],
    x: Any,
    cos: Array,
    sin: Array,
    positions: Array | None,
    out: Any,
    *,
    interleaved: bool,
    inverse: bool,
    accumulate: bool = False,
) -> Any:
    """Rotate one array, or a tuple of two; `kinds` has the records of both cases."""
    one, two = kinds
    require_bool("interleaved", interleaved)
    require_bool("inverse", inverse)
    x0, x1 = _both(one.SHOWN_AS["x0"], x, x)
    out0, out1 = _both(one.SHOWN_AS["out0"], out, x)
    kind = two if isinstance(x, tuple) else one
    operands = adopt(kind(x0, x1, cos, sin, positions, out0, out1), _FIXES)
    problem = rope_problem(
        operands, interleaved=bool(interleaved), inverse=bool(inverse), accumulate=bool(accumulate)
    )
    device = device_of(operands)
    if device is None:
        found = _on_cpu(problem, operands.arrays)
    else:
        found = run_rope(device, problem, operands)
    return (found.out0, found.out1) if isinstance(x, tuple) else found.out0


def _both(name: str, value: Any, x: Any) -> tuple[Any, Any]:
    """Take apart the arrays that belong to x: one, or a tuple of two; None for results to make."""
    if not isinstance(x, tuple | list):
        return value, None
    pair = (None, None) if value is None else value
    if not isinstance(pair, tuple) or len(pair) != 2:
        count = f" of length {len(pair)}" if isinstance(pair, tuple) else ""
        raise error(
            TypeError,
            f"{name} has type {type(value).__name__}{count}",
            "it must be one array, or a tuple of two; results as the arguments are",
            "pass a tuple (q, k), or call rope for each array",
        )
    return pair


def _on_cpu(problem: RopeProblem, arrays: RopeArrays[Any]) -> RopeArrays[Any]:
    length = problem.arrays.x0.shape[1]
    positions = np.arange(length) if arrays.positions is None else arrays.positions
    sin = -arrays.sin if problem.inverse else arrays.sin
    for x, out in zip(("x0", "x1"), problem.outputs, strict=False):
        exact = reference.rope(
            getattr(arrays, x), arrays.cos, sin, positions, interleaved=problem.interleaved
        )
        given = getattr(arrays, out)
        if problem.accumulate and given is not None:
            exact = exact + given.astype(np.float64)
        setattr(arrays, out, round_into(given, exact, problem.dtype))
    return arrays


_MOST = 2**31 - 1
"""The most positions, and features: kernels count in int32."""
_SCALINGS = (LinearScaling, NTKScaling, YarnScaling, Llama3Scaling, LongRopeScaling)


def rope_tables(
    length: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    dtype: Any = "float32",
) -> tuple[np.ndarray, np.ndarray]:
    r"""Compute the cosines and sines for `rope` and for the option ``rotary`` of `attention`.

    Parameters
    ----------
    length : int
        Number of positions, which start at 0; at most 2**31 - 1.
    rotary_dim : int
        R, the number of features that are rotated: even, below 2**31.
    base : float
        Pair m rotates by ``base ** (-2 m / R)`` from one position to the next.
    scaling : LinearScaling, NTKScaling, YarnScaling, Llama3Scaling or LongRopeScaling, optional
        Changes the frequencies, to use a model beyond the length that it was trained on. The
        frequencies of LongRopeScaling depend on `length`.
    dtype : {"float32", "float16", "bfloat16", "float64"}
        dtype of the tables, which are computed in float64 and rounded once.

    Returns
    -------
    cos, sin : numpy.ndarray (length, R/2)
        To use them on a GPU, copy them once with cupy.asarray.

    Raises
    ------
    TypeError
        For a number, a scaling or a dtype of another type.
    ValueError
        For a length or rotary_dim that is negative or too large, an odd rotary_dim, a base that is
        not above 1, a scaling whose numbers are out of range, or angles that are not finite.

    Notes
    -----
    Su et al., arXiv:2104.09864, section 3.2.2. Angles are computed in float64: in float32 those of
    position 100,000 would be off by up to 0.004.

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
        f"it is even, 0 or more, at most {_MOST}: features are rotated in pairs",
        "pass the number of features that are rotated",
    )
    _require(
        1 < base < float("inf"),
        f"base = {base}",
        "it is above 1 and finite",
        "pass the model's, 10000.0 most often",
    )
    _check_scaling(scaling, rotary_dim)
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
    """Return the largest angle of a table; inf for frequencies that are too large for a float."""
    try:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            options: Any = {"base": base, "scaling": scaling, "length": length}
            found = reference.rope_frequencies(rotary_dim, **options)
            return float(max(length - 1, 1) * found.max(initial=0.0))
    except (OverflowError, ValueError):  # raised by Python's own arithmetic
        return math.inf


def _check_scaling(scaling: object, rotary_dim: int) -> None:
    if scaling is None:
        return
    names = ", ".join(each.__name__ for each in _SCALINGS)
    if not isinstance(scaling, _SCALINGS):
        raise error(
            TypeError,
            f"scaling has type {type(scaling).__name__}",
            f"it must be None or one of {names}",
            "pass for example scaling=cupyattn.LinearScaling(2.0)",
        )
    for name, value in scaling._asdict().items():
        if value is None:
            continue
        several = isinstance(value, tuple)
        for each in value if several else (value,):
            number = real(f"{name} of scaling", each)
            _require(
                0 < number < float("inf"),
                f"{name} = {number} of {type(scaling).__name__}",
                "it is above 0 and finite",
                "pass the model's",
            )
        _require(
            not several or len(value) == rotary_dim // 2,
            f"{len(value) if several else 1} {name} of {type(scaling).__name__}",
            f"there is a factor for each of {rotary_dim // 2} pairs",
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

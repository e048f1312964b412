"""Rotary position embedding, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.rope import reference
from cupyattn.ops.rope.plan import RopeProblem, rope_problem, run_rope
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import adopt
from cupyattn.runtime.checks import fixes_of_results, require_bool
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import require_grads
from cupyattn.runtime.rounding import round_into

_FIXES = {
    "positions": "pass an int32 array of shape (S,) or (B, S), for example numpy.arange(S)",
    **fixes_of_results("out", "out[0]", "out[1]"),
}


class Rotary(NamedTuple):
    """The tables of a rotary position embedding, for functions that rotate on the way.

    Attributes
    ----------
    cos, sin : array (positions, R/2)
        As `rope_tables` makes them, and `rope` takes them.
    interleaved : bool
        Pair features 2m and 2m + 1, not m and m + R/2.
    """

    cos: Array
    sin: Array
    interleaved: bool = False


def checked_rotary(rotary: Any) -> Rotary:
    """Take what functions that rotate on the way are given: (cos, sin), or a `Rotary`.

    Raises
    ------
    TypeError
        If it is anything else.
    """
    fits = isinstance(rotary, tuple) and (len(rotary) == 2 or isinstance(rotary, Rotary))
    if not fits or rotary[0] is None or rotary[1] is None:
        raise error(
            TypeError,
            f"rotary is a {type(rotary).__name__}"
            + (f" of {len(rotary)}" if isinstance(rotary, tuple) else "")
            + (", of which one is None" if fits else ""),
            "it is a tuple (cos, sin) of arrays (positions, R/2), or Rotary(cos, sin, "
            "interleaved=False)",
            "pass rotary=(cos, sin)",
        )
    tables = Rotary(*rotary)
    require_bool("rotary's interleaved", tables.interleaved)
    return tables._replace(interleaved=bool(tables.interleaved))


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
    r"""Rotary position embedding: each pair of features turns by an angle of its token's position.

    Parameters
    ----------
    x : array (B, S, H, D), or a tuple (q, k) of two
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous; the others may have any stride. Of a tuple, which is
        one launch, only the numbers of heads may differ.
    cos, sin : array (P, R/2)
        Cosine and sine of each position and pair, of any of these dtypes, from `rope_tables` say.
        The first R features of a head are rotated, the others copied.
    positions : array (S,) or (B, S), int32 or int64, optional
        Where each token stands: a row of the tables. By default token s stands at s.
    interleaved : bool
        Pair features 2m and 2m + 1, as the paper and GPT-J have it. Otherwise pair m and m + R/2,
        as GPT-NeoX, Llama and most models do.
    inverse : bool
        Turn back: by the negative angles.
    out : array or tuple of two, optional
        Where to write the results: x itself, or memory that does not overlap it.

    Returns
    -------
    array (B, S, H, D), dtype of x; or a tuple of two

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For shapes that disagree, tables with more than D / 2 columns or, without positions, fewer
        than S rows, and an out that does not fit or overlaps x and is not x. For a position outside
        of the tables, on the CPU and with ``backend(checks=True)``; otherwise the token's rotated
        features are NaN.
    RuntimeError
        As `attention`.

    Notes
    -----
    Su et al., "RoFormer: enhanced transformer with rotary position embedding", arXiv:2104.09864,
    equation 34. float32 inside, one rounding.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cos, sin = cupyattn.rope_tables(16, 8)
    >>> q, k = np.ones((1, 3, 4, 8), np.float32), np.ones((1, 3, 2, 8), np.float32)
    >>> q_turned, k_turned = cupyattn.rope((q, k), cos, sin)
    >>> back = cupyattn.rope(q_turned, cos, sin, inverse=True)
    >>> np.allclose(back, q)
    True

    Products depend on the distance of positions alone:

    >>> later = cupyattn.rope((q, k), cos, sin, positions=np.array([5, 6, 7]))
    >>> np.allclose((later[0][0, 2, 0] * later[1][0, 0, 0]).sum(),
    ...             (q_turned[0, 2, 0] * k_turned[0, 0, 0]).sum())
    True
    """
    return _rotated(x, cos, sin, positions, interleaved, inverse, ("x", "out"), out, False)


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
        Gradient with respect to x. Where cos**2 + sin**2 is not 1 it is the transpose, not the
        inverse.

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
    names = "dout", "grads"
    return _rotated(dout, cos, sin, positions, interleaved, not inverse, names, grads, accumulate)


def _rotated(
    x: Any,
    cos: Array,
    sin: Array,
    positions: Array | None,
    interleaved: bool,
    inverse: bool,
    names: tuple[str, str],
    out: Any,
    accumulate: bool,
) -> Any:
    require_bool("interleaved", interleaved)
    require_bool("inverse", inverse)
    given = _by_name(names[0], x, x)
    results = _by_name(names[1], out, x)
    operands = adopt({**given, "cos": cos, "sin": sin, "positions": positions, **results}, _FIXES)
    problem = rope_problem(
        operands,
        tuple(zip(given, results, strict=True)),
        interleaved=bool(interleaved),
        inverse=bool(inverse),
        accumulate=bool(accumulate),
    )
    device = device_of(operands)
    if device is None:
        found = _on_cpu(problem, operands.arrays)
    else:
        found = run_rope(device, problem, operands)
    turned = tuple([found[name] for name in results])
    return turned if isinstance(x, tuple) else turned[0]


def _by_name(name: str, value: Any, x: Any) -> dict[str, Any]:
    """Name one array, or those of a tuple, as x is; None stands for results that are to be made."""
    if not isinstance(x, tuple | list):
        return {name: value}
    pair = (None, None) if value is None else value
    if not isinstance(pair, tuple) or len(pair) != 2:
        count = f" of {len(pair)}" if isinstance(pair, tuple) else ""
        raise error(
            TypeError,
            f"{name} is a {type(value).__name__}{count}",
            "it is one array, or a tuple of two; results as the arguments are",
            "pass a tuple (q, k), or call rope for each array",
        )
    return {f"{name}[{i}]": item for i, item in enumerate(pair)}


def _on_cpu(problem: RopeProblem, arrays: dict[str, Any]) -> dict[str, Any]:
    length = problem.first.shape[1]
    positions = arrays.get("positions", np.arange(length))
    sin = -arrays["sin"] if problem.inverse else arrays["sin"]
    found = {}
    for x, out in problem.rotated.items():
        exact = reference.rope(
            arrays[x], arrays["cos"], sin, positions, interleaved=problem.interleaved
        )
        if problem.accumulate and out in arrays:
            exact = exact + arrays[out].astype(np.float64)
        found[out] = round_into(arrays.get(out), exact, problem.first.dtype)
    return found

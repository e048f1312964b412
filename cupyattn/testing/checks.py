"""Expected results with their bounds, an assertion that compares, the emulator as a fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn.runtime.backend import kernels_run_numpy_arrays
from cupyattn.runtime.compile import nvrtc_version
from cupyattn.runtime.errors import error
from cupyattn.runtime.precision import error_ratios, in_float64
from cupyattn.testing.arrays import ExpectedResult
from cupyattn.testing.rules import NUMPY_RULES, RULES

_MEMORY = ("out", "grads", "dlogits", "workspace")
"""Options that say where results are written."""


def expected(function: Callable[..., Any], /, *arrays: Any, **options: Any) -> ExpectedResult:
    """Return the exact result of a call, and the error bound of each element.

    Parameters
    ----------
    function : callable
        A public function of cupyattn: `cupyattn.attention`, `cupyattn.attention_varlen`,
        `cupyattn.paged_attention`, `cupyattn.merge_attention`, `cupyattn.linear`,
        `cupyattn.linear_gelu`, `cupyattn.matmul`, `cupyattn.softmax`, `cupyattn.log_softmax`,
        `cupyattn.logsumexp`, `cupyattn.layer_norm`, `cupyattn.rms_norm`, `cupyattn.gelu`,
        `cupyattn.silu`, `cupyattn.swiglu`, `cupyattn.geglu`, `cupyattn.dropout`, `cupyattn.rope`,
        `cupyattn.embedding`, `cupyattn.cross_entropy`, or the backward of one of them.
    *arrays
        The positional arguments of the call, CuPy or NumPy arrays of float16, bfloat16 or float32.
        A backward gets the results of the forward exactly as the tested backward gets them.
    **options
        The keyword arguments of the call. ``out``, ``grads`` and ``workspace`` are
        ignored.

    Returns
    -------
    ExpectedResult
        ``(result, bound)`` with the structure of the call's result: arrays, tuples or named tuples
        of gradients. Rows that belong to no sequence of a packed call are NaN in the result and
        infinite in the bound; `assert_within_bounds` lets any value pass there.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the function itself, for a call that is not as documented.
    NotImplementedError
        For a function without bounds, for ``score_mod`` and for ``accumulate=True``.
    ValueError
        For float64 arrays, which no kernel takes.

    Notes
    -----
    The bounds follow from the roundings: each family of ``cupyattn.ops`` derives its own in
    ``bounds.py``. They hold for any order of the sums. CuPy arrays, and NumPy arrays within
    ``backend("emulator")``, get the bounds of the kernels. Elsewhere, NumPy arrays get the larger
    of these and the bounds of the arithmetic in NumPy, which is in float64 or in float32.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
    >>> want = expected(cupyattn.attention, q, k, v, causal=True)
    >>> out = cupyattn.attention(q, k, v, causal=True)
    >>> bool((abs(out - want.result) <= want.bound).all()), bool(want.bound.max() < 1e-4)
    (True, True)
    >>> out, lse = expected(cupyattn.attention, q, k, v, return_lse=True).result
    >>> out.shape, lse.shape
    ((1, 5, 2, 8), (1, 2, 5))
    """
    name = _name_with_bounds(function)
    given = tuple(map(on_host, arrays))
    named = {name: on_host(value) for name, value in options.items() if name not in _MEMORY}
    if named.pop("accumulate", False):
        raise error(
            NotImplementedError,
            "accumulate=True",
            "bounds are those of new gradients",
            "leave it out, or add what was in the arrays to the result and its rounding to the "
            "bound",
        )
    with cupyattn.backend("reference"):
        function(*given, **named)  # raises for a call that is not as documented
    want = RULES[name](*given, **named)
    by_kernels = any(map(_on_gpu, arrays)) or kernels_run_numpy_arrays()
    if by_kernels or name not in NUMPY_RULES:
        return want
    return ExpectedResult(
        want.result, _larger(want.bound, NUMPY_RULES[name](*given, **named).bound)
    )


def bound(function: Callable[..., Any], /, *arrays: Any, **options: Any) -> Any:
    """Return the error bounds of a call's results: the `bound` of `expected`.

    Parameters
    ----------
    function, *arrays, **options
        As for `expected`.

    Returns
    -------
    array in float64, or tuple of these and None
        For each element, the largest error of a kernel in the dtype of the arrays.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `expected`.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.ones((2, 100), np.float16)
    >>> limit = bound(cupyattn.softmax, x)
    >>> limit.shape, bool((0 < limit).all()), bool((limit < 1e-5).all())
    ((2, 100), True, True)
    """
    return expected(function, *arrays, **options).bound


def on_host(value: Any) -> Any:
    """Return an argument with NumPy arrays in place of CuPy arrays."""
    if isinstance(value, tuple):
        items = map(on_host, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if _on_gpu(value):
        return value.get()
    if isinstance(value, cupyattn.BlockMask):
        return on_host(value.mask_mod)
    if isinstance(value, cupyattn.MaskMod):
        moved = copy(value)
        moved.arrays = {name: on_host(array) for name, array in value.arrays.items()}
        return moved
    if isinstance(value, cupyattn.QuantizedWeight):
        arrays = {name: on_host(array) for name, array in value.arrays.items()}
        return cupyattn.QuantizedWeight(
            value.format,
            **arrays,
            block_size=value.block_size,
            transposed=value.transposed,
            rotation=value.rotation,
        )
    if isinstance(value, cupyattn.QuantizedKeys):
        return cupyattn.QuantizedKeys(*map(on_host, (value.codes, value.scales, value.centre)))
    if isinstance(value, cupyattn.QuantizedRows):
        codes, scales = on_host(value.codes), on_host(value.scales)
        return cupyattn.QuantizedRows(codes, scales, value.rotation, dtype=value.dtype)
    return value


def _name_with_bounds(function: Any) -> str:
    """Return the name of a function that has bounds."""
    name: str = getattr(function, "__name__", "")
    if name in RULES and function is getattr(cupyattn, name):
        return name
    raise error(
        NotImplementedError,
        f"no bounds for {name or function!r}",
        f"functions with bounds are {', '.join(sorted(RULES))}",
        "pass one of these functions of cupyattn itself, or derive a bound of your own",
    )


def _larger(first: Any, second: Any) -> Any:
    """Return the larger of two bounds, of each element."""
    if first is None or not isinstance(first, tuple):
        return None if first is None else np.fmax(first, second)
    both = (_larger(*each) for each in zip(first, second, strict=True))
    return type(first)(*both) if hasattr(first, "_fields") else tuple(both)


def _on_gpu(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_on_gpu, value))
    return type(value).__module__.partition(".")[0] == "cupy"


def assert_within_bounds(result: Any, reference: Any, bound: Any) -> None:
    """Assert that each element of a result is within its bound of the reference.

    Parameters
    ----------
    result : array, or tuple of arrays and None
        What was computed, CuPy or NumPy arrays.
    reference : array, or tuple
        The exact result, with the structure and the shapes of `result`.
    bound : array or float, or tuple
        The largest error of each element; it broadcasts to the reference.

    Returns
    -------
    None

    Raises
    ------
    AssertionError
        With the worst element (its index, value, expected value, error, bound, and the ratio of
        these) and the number of elements outside; or for another structure or shape.

    Notes
    -----
    NaN equals NaN, and an infinity the same infinity, whatever the bound is. A value that is not
    finite is outside wherever the reference is a number. If the reference is NaN and the bound
    infinite, any value passes: `expected` marks rows that belong to no sequence that way.

    Examples
    --------
    >>> import numpy as np
    >>> exact = np.array([[0.1, 0.2], [0.3, 0.4]])
    >>> assert_within_bounds(exact.astype(np.float32), exact, 1e-7)
    >>> assert_within_bounds(exact + [[0, 0.0015], [0, 0.002]], exact, 1e-3)
    Traceback (most recent call last):
        ...
    AssertionError: 2 of 4 elements of the result are outside of their bounds. The worst one:
      index     [1, 1]
      actual    0.402
      expected  0.4
      error     0.002
      bound     0.001
      ratio     2
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    problems = [_outside(*each) for each in _parts("the result", result, reference, bound)]
    if found := [text for text in problems if text]:
        raise AssertionError("\n".join(found))


def _parts(
    name: str, result: Any, reference: Any, bound: Any
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the arrays of a result with their names, references and bounds."""
    if isinstance(reference, tuple):
        if not isinstance(result, tuple) or len(result) != len(reference):
            raise AssertionError(
                f"{name} is {_kind(result)}, and the reference {_kind(reference)}: pass results of "
                "the same structure"
            )
        fields = getattr(reference, "_fields", [f"{name}[{i}]" for i in range(len(reference))])
        bounds = bound if isinstance(bound, tuple) else (bound,) * len(reference)
        for each in zip(fields, result, reference, bounds, strict=True):
            yield from _parts(*each)
    elif (result is None) != (reference is None):
        raise AssertionError(f"{name} is {_kind(result)}, and the reference {_kind(reference)}")
    elif result is not None:
        yield name, result, reference, bound


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else "one array"


def _outside(name: str, result: Any, reference: Any, bound: Any) -> str:
    """Describe the worst element, or return nothing if all are within their bounds."""
    actual, exact = (in_float64(on_host(array)) for array in (result, reference))
    if actual.shape != exact.shape:
        raise AssertionError(
            f"{name} has shape {actual.shape}, and the reference {exact.shape}: a broadcast "
            "comparison would hide a wrong one"
        )
    limit = np.broadcast_to(np.asarray(bound, np.float64), exact.shape)
    ratios = error_ratios(actual, exact, limit)
    outside = int((ratios > 1).sum())
    if not outside:
        return ""
    at = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    with np.errstate(invalid="ignore"):
        worst = {
            "index": [int(i) for i in at],
            "actual": f"{actual[at]:.9g}",
            "expected": f"{exact[at]:.9g}",
            "error": f"{abs(actual[at] - exact[at]):.3g}",
            "bound": f"{limit[at]:.3g}",
            "ratio": f"{ratios[at]:.3g}",
        }
    rows = "\n".join(f"  {label:<8}  {value}" for label, value in worst.items())
    many = f"{outside:,} of {ratios.size:,} elements of {name} are outside of their bounds"
    return f"{many}. The worst one:\n{rows}"


@pytest.fixture(scope="class")  # in effect one test, or one class; hypothesis refuses "function"
def emulated() -> Iterator[None]:
    """Run the kernels of a test on the emulator, with every check.

    Import it into the test file or into its ``conftest.py``, and name it as a parameter of a test
    or in ``pytest.mark.usefixtures("emulated")``. It is in effect for that test; in a class, for
    the rest of the class. hypothesis accepts it with ``given``.

    Calls of cupyattn's functions and of `cupyattn.Kernel` on NumPy arrays then run kernels on the
    CPU. An access out of bounds, a race in shared memory, a read of memory that was never written
    or a barrier that not all threads reach raises one of the errors of `cupyattn.emulator`. CuPy
    arrays run on their GPU as always.

    Returns
    -------
    None

    Notes
    -----
    It needs NVRTC: ``pip install 'cupyattn[testing,emulator]'``. Without it a test that uses the
    fixture is skipped, with the reason.
    """
    try:
        nvrtc_version()
    except RuntimeError as missing:
        pytest.skip(str(missing))
    with cupyattn.backend("emulator", checks=True):
        yield

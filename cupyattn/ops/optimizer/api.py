"""A step of AdamW, also with 8-bit running means, and the norm of all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import numpy as np

from cupyattn.ops.optimizer import reference
from cupyattn.ops.optimizer.kernels import (
    ADAMW,
    NORM,
    WRITTEN,
    AdamwArrays,
    AdamwNumbers,
    EightBitArrays,
    eight_bit_problem,
    norm_arrays,
    norm_problem,
    run_eight_bit,
    run_norm,
)
from cupyattn.runtime.arrays import (
    Array,
    adopt,
    exports_memory,
    layouts_of,
    share_an_item,
    span,
)
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.elements import call_elements, require_elements
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import round_into
from cupyattn.runtime.records import values_of

Arrays: TypeAlias = "Array | dict[str, Any]"
"""An array, or a dictionary of such by name, also of dictionaries."""

_NORM_FIXES = fixes_of_results("out")
_UNPACKED = "unpack it, as in global_norm(*arrays)"
_EIGHT_BIT_FIXES = fixes_of_results(*WRITTEN)


def adamw_step(
    param: Arrays,
    grad: Arrays,
    m: Arrays,
    v: Arrays,
    /,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_scale: float | Array = 1.0,
) -> None:
    r"""One step of AdamW, in place: param, m and v are changed.

    Parameters
    ----------
    param : array (..., N), or dictionary of arrays
        The parameters: float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside
        of the emulator. The last axis is contiguous; the others may have any stride. A dictionary
        has arrays by name, or dictionaries of them; grad, m and v are dictionaries with the same
        keys then.
    grad : array (..., N), dtype of param, or dictionary of arrays
        Their gradient. In a dictionary None leaves that parameter, its m and its v as they are.
    m, v : array (..., N), float32, or dictionary of arrays
        Running means of the gradient and of its square. Make them once, as zeros, before the first
        step, and keep them.
    step : int
        The number of this step, counted from 1.
    lr : float
        Learning rate.
    betas : tuple of two floats
        Decay rates of the running means; at least 0 and below 1.
    eps : float
        Added to the root of v.
    weight_decay : float
        param is multiplied by ``1 - lr * weight_decay``.
    grad_scale : float or array of one float32, shape ()
        Factor of the gradient: the inverse of a loss scale, or the factor that clips the norm. As
        an array it stays on the GPU: ``cupy.minimum(1, limit / global_norm(*gradients))``. A number
        has to be finite; if it is not, neither are the gradients, and the step should be skipped.

    Returns
    -------
    None

    Raises
    ------
    TypeError
        For an argument that is not an array, NumPy and CuPy arrays mixed, dtypes that are not
        allowed, or options of another kind.
    ValueError
        For different shapes, a last axis that is not contiguous, a param, m or v that is read-only
        or overlaps another array (grad may be param itself), or options out of range. Kernels also
        refuse arrays whose axes before the last leave more than four axes after merging. For
        dictionaries of different keys, and for arrays of two entries that share memory and are
        written. Dictionaries are checked as a whole before anything is written.
    RuntimeError
        As `attention`.

    Notes
    -----
    Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv:1711.05101, algorithm 2.
    The defaults are those of torch.optim.AdamW. Computed in float32; param is rounded once. A
    float16 param ignores steps below 2**-11 of its value: train a float32 param, and copy it.
    ``(1 - beta2) * grad**2`` is float32 too. Above 3.4e38 (a grad of 5.8e20 with the usual betas) v
    is inf and its parameter no longer changes. Below 1.2e-38 (a grad of 3.4e-18) it counts as 0,
    which matters only for an eps of 1e-17 or less.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> param, grad = np.ones(2, np.float32), np.array([0.5, -2.0], np.float32)
    >>> m, v = np.zeros((2, 2), np.float32)
    >>> cupyattn.adamw_step(param, grad, m, v, step=1, lr=0.1, weight_decay=0.0)
    >>> param
    array([0.9, 1.1], dtype=float32)

    All parameters of a model, with their gradients by name:

    >>> params = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32)}
    >>> m, v = ({name: np.zeros(x.shape, np.float32) for name, x in params.items()} for _ in "mv")
    >>> gradients = {"weight": np.ones((2, 3), np.float32), "bias": -np.ones(3, np.float32)}
    >>> cupyattn.adamw_step(params, gradients, m, v, step=1, lr=0.1)
    >>> params["bias"]
    array([0.1, 0.1, 0.1], dtype=float32)
    """
    numbers, scale = _checked(step, lr, betas, eps, weight_decay, grad_scale)

    def exact(p: Any, m: Any, v: Any, g: Any) -> tuple[np.ndarray, ...]:
        return reference.adamw_step(p, g, m, v, **_options(numbers, scale))

    if isinstance(param, dict) or isinstance(grad, dict):
        given = {"param": param, "grad": grad, "m": m, "v": v}
        records = {path: AdamwArrays(*(*each, scale)) for path, each in _entries(given)}
        for path, arrays in records.items():
            with _entry(path):
                require_elements(ADAMW, arrays)
        _require_apart(records)
    else:
        records = {"": AdamwArrays(param, grad, m, v, scale)}
    for arrays in records.values():
        call_elements(ADAMW, arrays, exact, scalars=numbers.scalars)


def adamw_step_8bit(
    param: Arrays,
    grad: Arrays,
    m: Arrays,
    v: Arrays,
    m_scales: Arrays,
    v_scales: Arrays,
    /,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_scale: float | Array = 1.0,
) -> None:
    r"""One step of AdamW, in place, with running means of one byte an item instead of four.

    Parameters
    ----------
    param : float32 array of any shape, in C order, or dictionary of arrays
        The parameters, CuPy or NumPy. Dictionaries are as in `adamw_step`.
    grad : float32 array, shape of param, in C order
        Their gradient.
    m, v : int8 and uint8 array, shape of param, in C order
        Codes of the running means of the gradient and of its square. Make them once, as zeros,
        before the first step, and keep them.
    m_scales, v_scales : float32 array (ceil(items / 256),)
        The value of the largest code in each 256 items of m and v; zeros before the first step.
    step, lr, betas, eps, weight_decay, grad_scale
        As `adamw_step` documents.

    Returns
    -------
    None

    Raises
    ------
    TypeError, ValueError
        As `adamw_step`; and for an array that is not in C order.
    RuntimeError
        As `attention`.

    Notes
    -----
    Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise quantization",
    arXiv:2110.02861. A step moves 16 bytes an item instead of 28. Codes are a dynamic tree over
    seven decades for m and eight for v; no step rounds a positive v to 0. The largest number of a
    block is kept exactly. Others in its decade are off by at most 0.71% (m) and 0.36% (v) of it; in
    each lower decade the error is a fifth of that in the decade above. The update uses the
    unrounded means. Results on the CPU and on a GPU have the same bits. Gradients that are not
    finite spoil their whole block: skip such steps.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> param, grad = np.ones(2, np.float32), np.array([0.5, -2.0], np.float32)
    >>> m, v = np.zeros(2, np.int8), np.zeros(2, np.uint8)
    >>> m_scales, v_scales = np.zeros((2, 1), np.float32)
    >>> cupyattn.adamw_step_8bit(
    ...     param, grad, m, v, m_scales, v_scales, step=1, lr=0.1, weight_decay=0.0
    ... )
    >>> param, m, v
    (array([0.9, 1.1], dtype=float32), array([  74, -127], dtype=int8),
    array([100, 255], dtype=uint8))
    """
    numbers, scale = _checked(step, lr, betas, eps, weight_decay, grad_scale)
    if not isinstance(param, dict) and not isinstance(grad, dict):
        _eight_bit(EightBitArrays(param, grad, m, v, m_scales, v_scales, scale), numbers)()
        return
    given = dict(zip(EightBitArrays.FIELDS, (param, grad, m, v, m_scales, v_scales), strict=False))
    records = {path: EightBitArrays(*(*each, scale)) for path, each in _entries(given)}
    updates = []
    for path, arrays in records.items():
        with _entry(path):
            updates.append(_eight_bit(arrays, numbers))
    _require_apart(records)
    for update in updates:
        update()


def _eight_bit(arrays: EightBitArrays[Any], numbers: AdamwNumbers) -> Callable[[], object]:
    """Check the arrays of a step; return the step."""
    operands = adopt(arrays, _EIGHT_BIT_FIXES)
    problem = eight_bit_problem(operands)
    device = device_of(operands)
    if device is not None:
        return lambda: run_eight_bit(device, problem, operands, numbers)
    return lambda: _eight_bit_on_cpu(arrays, numbers)


def _eight_bit_on_cpu(arrays: EightBitArrays[Any], numbers: AdamwNumbers) -> None:
    exact = reference.adamw_step_8bit(
        *(arrays.param, arrays.grad, arrays.m, arrays.v, arrays.m_scales, arrays.v_scales),
        **_options(numbers, arrays.grad_scale),
    )
    for name, result in zip(WRITTEN, exact, strict=True):
        getattr(arrays, name)[...] = result


def _entries(given: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield where each parameter is in dictionaries, and its arrays, if there is a gradient."""
    seen: dict[int, str] = {}
    for path, arrays in _matching(given, ""):
        if arrays[1] is None:
            continue
        if arrays[0] is not None and id(arrays[0]) in seen:
            raise error(
                ValueError,
                f"param{path} is param{seen[id(arrays[0])]}",
                "each array is updated once",
                "leave one out of all dictionaries, and add its gradient to that of the other",
            )
        seen[id(arrays[0])] = path
        yield path, arrays


def _require_apart(records: Mapping[str, AdamwArrays[Any] | EightBitArrays[Any]]) -> None:
    """Raise ValueError if arrays of two entries that are written share an item."""
    ranges = []
    for path, record in records.items():
        operands = adopt(record)
        layouts = values_of(layouts_of(type(record), operands.description))
        for name, layout, place in zip(record.FIELDS, layouts, operands.places, strict=True):
            if name in WRITTEN and layout is not None:
                start, end = span(layout)
                ranges.append((place + start, place + end, place, path, name, layout))
    ranges.sort(key=lambda each: each[:2])
    before: list[Any] = []
    for each in ranges:
        start, _, place, path, name, layout = each
        before = [other for other in before if other[1] > start]
        for _, _, other_place, other_path, other_name, other_layout in before:
            # Two entries' columns of one array have a common range, but no common item.
            if path != other_path and share_an_item(other_layout, layout, place - other_place):
                raise error(
                    ValueError,
                    f"{name}{path} overlaps {other_name}{other_path} in memory",
                    "each array is updated once",
                    "copy one, or leave one out of all dictionaries and add its gradient to that "
                    "of the other",
                )
        before.append(each)


def _matching(given: dict[str, Any], path: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    dictionaries = [name for name, value in given.items() if isinstance(value, dict)]
    if not dictionaries:
        yield path, tuple(given.values())
        return
    for name, value in given.items():
        if name not in dictionaries:
            raise error(
                TypeError,
                f"{name}{path} has type {type(value).__name__}",
                f"{dictionaries[0]}{path} is a dictionary",
                f"pass {', '.join(given)} all as arrays or all as dictionaries with the same keys",
            )
        for one, other in (("param", name), (name, "param")):
            for key in given[one]:
                if key not in given[other]:
                    raise error(
                        ValueError,
                        f"{other}{path} has no {key!r}",
                        f"{one}{path} has it, and the keys are the same in {', '.join(given)}",
                        "add it; a gradient may be None"
                        if one == "param"
                        else "add it or remove it",
                    )
    for key in given["param"]:
        within = {name: value[key] for name, value in given.items()}
        yield from _matching(within, f"{path}[{key!r}]")


@contextmanager
def _entry(path: str) -> Iterator[None]:
    """Say in errors of checks which entry of the dictionaries is wrong."""
    try:
        yield
    except (TypeError, ValueError) as failure:
        raise type(failure)(f"the arrays of {path}: {failure}") from failure


def _checked(
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float | Array,
) -> tuple[AdamwNumbers, Array | None]:
    """Check the options of a step; return them, and grad_scale if it is an array."""
    is_array = exports_memory(grad_scale) and not isinstance(grad_scale, np.generic)
    number = 1.0 if is_array else grad_scale
    numbers = AdamwNumbers.of(step, lr, betas, eps, weight_decay, number)
    return numbers, cast(Array, grad_scale) if is_array else None


def _options(numbers: AdamwNumbers, scale: Array | None) -> dict[str, Any]:
    """Return the options of the reference; an array `scale` replaces the number."""
    return {
        "step": numbers.step,
        "lr": numbers.lr,
        "betas": (numbers.beta1, numbers.beta2),
        "eps": numbers.eps,
        "weight_decay": numbers.weight_decay,
        "grad_scale": numbers.grad_scale if scale is None else float(scale),
    }


def global_norm(*arrays: Array, out: Array | None = None, workspace: Array | None = None) -> Array:
    r"""Compute the norm of all items of several arrays: ``sqrt(sum(x**2))``.

    Parameters
    ----------
    arrays : arrays of any shape
        float16, float32 or bfloat16, also mixed, CuPy or NumPy; float64 on NumPy arrays outside of
        the emulator. Kernels take arrays whose axes merge into rows of neighbouring items that are
        evenly apart.
    out : array of one float32, shape (), optional
        Where to write the result; must not overlap the arrays.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. 4,096 bytes for each array suffice.

    Returns
    -------
    array of one float32, shape ()
        On a GPU it stays there and the host does not wait for it; `adamw_step` takes such an array
        as grad_scale.

    Raises
    ------
    TypeError
        For a call without arrays, an argument that is not an array, NumPy and CuPy arrays mixed, or
        a dtype that is not allowed.
    ValueError
        For an out of another shape or dtype; for kernels also for a workspace that is too small, or
        an array whose axes do not merge into rows.
    RuntimeError
        As `attention`.

    Notes
    -----
    Bitwise the same from run to run. Squares are summed in float32: items beyond 1.8e19 give inf,
    and those below 1.1e-19 count as 0. Eight arrays of a dtype share a launch.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> float(cupyattn.global_norm(np.array([3.0], np.float32), np.array([[0.0, 4.0]], np.float16)))
    5.0
    """
    record = norm_arrays(len(arrays))(*arrays, out, workspace)
    fixes = _NORM_FIXES
    if any(isinstance(array, list | tuple) for array in arrays):
        lists = [
            f"arrays[{i}]"
            for i, array in enumerate(arrays)
            if isinstance(array, list | tuple) and any(map(exports_memory, array))
        ]
        fixes = {**fixes, **dict.fromkeys(lists, _UNPACKED)}
    operands = adopt(record, fixes)
    problem = norm_problem(operands)
    device = device_of(operands)
    if device is not None:
        return run_norm(device, problem, operands)
    exact = reference.global_norm(*(getattr(record, name) for name in problem.summed))
    return round_into(record.out, np.asarray(exact), NORM.dtype)

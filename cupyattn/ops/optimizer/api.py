"""A step of AdamW, also with 8-bit running means, and the norm of all gradients."""

from __future__ import annotations

from typing import Any, cast

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
from cupyattn.runtime.arrays import Array, adopt, exports_memory
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.elements import call_elements
from cupyattn.runtime.outputs import round_into

_NORM_FIXES = fixes_of_results("out")
_UNPACKED = "unpack it, as in global_norm(*arrays)"
_EIGHT_BIT_FIXES = fixes_of_results(*WRITTEN)


def adamw_step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    /,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float | Array = 1.0,
) -> None:
    r"""One step of AdamW, in place: param, m and v are changed.

    Parameters
    ----------
    param : array (..., N)
        The parameters: float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside
        of the emulator. The last axis is contiguous; the others may have any stride.
    grad : array (..., N), dtype of param
        Their gradient.
    m, v : array (..., N), float32
        Running means of the gradient and of its square. Make them once, as zeros, before the first
        step, and keep them.
    step : int
        The number of this step, counted from 1.
    lr : float
        Learning rate.
    betas : tuple of two floats
        Decay rates of the running means, usually (0.9, 0.999); at least 0 and below 1.
    eps : float
        Added to the root of v, usually 1e-8.
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
        refuse arrays whose axes before the last leave more than four axes after merging.
    RuntimeError
        As `attention`.

    Notes ----- Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv:1711.05101,
    algorithm 2. Computed in float32; param is rounded once. A float16 param ignores steps below
    2**-11 of its value: train a float32 param, and copy it. ``(1 - beta2) * grad**2`` is float32
    too. Above 3.4e38 (a grad of 5.8e20 with the usual betas) v is inf and its parameter no longer
    changes. Below 1.2e-38 (a grad of 3.4e-18) it counts as 0, which matters only for an eps of
    1e-17 or less.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> param, grad = np.ones(2, np.float32), np.array([0.5, -2.0], np.float32)
    >>> m, v = np.zeros((2, 2), np.float32)
    >>> cupyattn.adamw_step(param, grad, m, v, step=1, lr=0.1, betas=(0.9, 0.999), eps=1e-8,
    ...                     weight_decay=0.0)
    >>> param
    array([0.9, 1.1], dtype=float32)
    """
    numbers, scale = _checked(step, lr, betas, eps, weight_decay, grad_scale)

    call_elements(
        ADAMW,
        AdamwArrays(param, grad, m, v, scale),
        lambda p, m, v, g: reference.adamw_step(p, g, m, v, **_options(numbers, scale)),
        scalars=numbers.scalars,
    )


def adamw_step_8bit(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    m_scales: Array,
    v_scales: Array,
    /,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float | Array = 1.0,
) -> None:
    r"""One step of AdamW, in place, with running means of one byte an item instead of four.

    Parameters
    ----------
    param : float32 array of any shape, in C order
        The parameters, CuPy or NumPy.
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

    Notes ----- Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise
    quantization", arXiv:2110.02861. A step moves 16 bytes an item instead of 28. Codes are a
    dynamic tree over seven decades for m and eight for v; no step rounds a positive v to 0. The
    largest number of a block is kept exactly. Others in its decade are off by at most 0.71% (m) and
    0.36% (v) of it; in each lower decade the error is a fifth of that in the decade above. The
    update uses the unrounded means. Results on the CPU and on a GPU have the same bits. Gradients
    that are not finite spoil their whole block: skip such steps.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> param, grad = np.ones(2, np.float32), np.array([0.5, -2.0], np.float32)
    >>> m, v = np.zeros(2, np.int8), np.zeros(2, np.uint8)
    >>> m_scales, v_scales = np.zeros((2, 1), np.float32)
    >>> cupyattn.adamw_step_8bit(param, grad, m, v, m_scales, v_scales, step=1, lr=0.1,
    ...                          betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    >>> param, m, v
    (array([0.9, 1.1], dtype=float32), array([  74, -127], dtype=int8),
    array([100, 255], dtype=uint8))
    """
    numbers, scale = _checked(step, lr, betas, eps, weight_decay, grad_scale)
    arrays = EightBitArrays(param, grad, m, v, m_scales, v_scales, scale)
    operands = adopt(arrays, _EIGHT_BIT_FIXES)
    problem = eight_bit_problem(operands)
    device = device_of(operands)
    if device is not None:
        run_eight_bit(device, problem, operands, numbers)
    else:
        _eight_bit_on_cpu(arrays, numbers)


def _eight_bit_on_cpu(arrays: EightBitArrays[Any], numbers: AdamwNumbers) -> None:
    exact = reference.adamw_step_8bit(
        *(arrays.param, arrays.grad, arrays.m, arrays.v, arrays.m_scales, arrays.v_scales),
        **_options(numbers, arrays.grad_scale),
    )
    for name, result in zip(WRITTEN, exact, strict=True):
        getattr(arrays, name)[...] = result


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

"""What an optimiser does with gradients: a step of AdamW, and the norm of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.ops.optimizer import reference
from cupyattn.ops.optimizer.kernels import ADAMW, AdamwArrays
from cupyattn.ops.optimizer.plan import AdamwNumbers
from cupyattn.ops.optimizer.plan_global_norm import OUTPUT, norm_problem, run_norm
from cupyattn.runtime.arrays import Array, exports_memory
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import adopt
from cupyattn.runtime.call_elements import call_elements
from cupyattn.runtime.checks import fixes_of_results
from cupyattn.runtime.rounding import round_into

_NORM_FIXES = fixes_of_results("out")
_UNPACKED = "unpack it, as in global_norm(*arrays)"


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
        Running means of the gradient and of its square: made once, zeros before the first step,
        and kept.
    step : int
        The number of this step, from 1 on.
    lr : float
        Learning rate.
    betas : tuple of two floats
        By what the running means are multiplied, (0.9, 0.999) most often; 0 to below 1.
    eps : float
        Is added to the root of v, 1e-8 most often.
    weight_decay : float
        param loses ``lr * weight_decay`` of itself.
    grad_scale : float or array of one float32, shape ()
        Multiplies the gradient: 1 over a loss scale, or what clips the norm. An array is a number
        that stays on the GPU, as ``cupy.minimum(1, limit / global_norm(*gradients))``. A number is
        finite; where it is not, nor are the gradients: skip the step.

    Returns
    -------
    None

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, dtypes that are not allowed, or
        options of another kind.
    ValueError
        For shapes that differ, a last axis that is not contiguous, arrays to change that are
        read-only or overlap others (grad may be param itself), or options out of range; for kernels
        also if more than four axes before the last lie unevenly in memory.
    RuntimeError
        As `attention`.

    Notes
    -----
    Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv:1711.05101, algorithm 2.
    float32 inside, param rounded once. A float16 param keeps no step below 2**-11 of itself: train
    a float32 one, and copy it. ``(1 - beta2) * grad**2`` is float32 too: beyond 3.4e38 (a grad of
    5.8e20 with the usual betas) v is inf, and its item moves no more; below 1.2e-38 (3.4e-18) it
    counts as 0, which matters beside an eps of 1e-17 or less.

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
    is_array = exports_memory(grad_scale) and not isinstance(grad_scale, np.generic)
    scale = grad_scale if is_array else None
    numbers = AdamwNumbers.of(step, lr, betas, eps, weight_decay, 1.0 if is_array else grad_scale)

    def exact(param: Any, m: Any, v: Any, grad: Any) -> tuple[np.ndarray, ...]:
        number = numbers.grad_scale if scale is None else float(scale)
        return reference.adamw_step(
            param,
            grad,
            m,
            v,
            step=numbers.step,
            lr=numbers.lr,
            betas=(numbers.beta1, numbers.beta2),
            eps=numbers.eps,
            weight_decay=numbers.weight_decay,
            grad_scale=number,
        )

    arrays = AdamwArrays(param, grad, m, v, scale)
    call_elements(ADAMW, arrays, exact, scalars=numbers.scalars)


def global_norm(*arrays: Array, out: Array | None = None, workspace: Array | None = None) -> Array:
    r"""Norm of all items of some arrays together: ``sqrt(sum(x**2))``.

    Parameters
    ----------
    arrays : arrays of any shape
        float16, float32 or bfloat16, also mixed, CuPy or NumPy; float64 on NumPy arrays outside of
        the emulator. In memory each is rows of neighbouring items, evenly apart.
    out : array of one float32, shape (), optional
        Where to write the result; must not overlap the arrays.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. 4,096 bytes for each array suffice.

    Returns
    -------
    array of one float32, shape ()
        On a GPU it stays there, and nothing waits for it: `adamw_step` takes it in a grad_scale.

    Raises
    ------
    TypeError
        For no arrays, something that is no array, NumPy and CuPy arrays mixed, or a dtype that is
        not allowed.
    ValueError
        For an out that does not fit, and of kernels for a workspace that is too small or an array
        whose axes lie too unevenly in memory.
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
    named = {f"arrays[{i}]": array for i, array in enumerate(arrays)}
    lists = [
        name
        for name, array in named.items()
        if isinstance(array, list | tuple) and any(map(exports_memory, array))
    ]
    fixes = {**_NORM_FIXES, **dict.fromkeys(lists, _UNPACKED)} if lists else _NORM_FIXES
    operands = adopt({**named, "out": out, "workspace": workspace}, fixes)
    problem = norm_problem(operands)
    device = device_of(operands)
    if device is not None:
        return run_norm(device, problem, operands)
    exact = reference.global_norm(*(operands.arrays[name] for name in problem.names))
    return round_into(operands.arrays.get("out"), np.asarray(exact), OUTPUT.dtype)

"""A step of AdamW whose running means are kept in eight bits."""

from __future__ import annotations

import numpy as np

from cupyattn.ops.optimizer import reference
from cupyattn.ops.optimizer.plan import AdamwNumbers
from cupyattn.ops.optimizer.plan_8bit import WRITTEN, eight_bit_problem, run_eight_bit
from cupyattn.runtime.arrays import Array, exports_memory
from cupyattn.runtime.backend import device_of
from cupyattn.runtime.by_name import adopt
from cupyattn.runtime.checks import fixes_of_results

_FIXES = fixes_of_results(*WRITTEN)


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
        Running means of the gradient and of its square: made once, zeros before the first step,
        and kept.
    m_scales, v_scales : float32 array (ceil(items / 256),)
        What the largest code of each 256 items of m and v stands for: zeros before the first step.
    step, lr, betas, eps, weight_decay, grad_scale
        As of `adamw_step`.

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
    seven decades for m, and over eight for v, which no step rounds to 0. The largest number of a
    block is kept as it is; others of its decade are off by at most 0.71% (m) and 0.36% (v) of that,
    and by a fifth of it in each decade further down. The update is that of the unrounded means.
    The same bits on the CPU and on a GPU. Gradients that are not finite spoil their blocks, as they
    spoil `adamw_step`'s items: skip such steps.

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
    is_array = exports_memory(grad_scale) and not isinstance(grad_scale, np.generic)
    scale = grad_scale if is_array else None
    numbers = AdamwNumbers.of(step, lr, betas, eps, weight_decay, 1.0 if is_array else grad_scale)
    operands = adopt(
        {"param": param, "grad": grad, "m": m, "v": v, "m_scales": m_scales, "v_scales": v_scales,
         "grad_scale": scale},
        _FIXES,
    )  # fmt: skip
    problem = eight_bit_problem(operands)
    device = device_of(operands)
    if device is not None:
        return run_eight_bit(device, problem, operands, numbers)
    exact = reference.adamw_step_8bit(
        param, grad, m, v, m_scales, v_scales,
        step=numbers.step, lr=numbers.lr, betas=(numbers.beta1, numbers.beta2), eps=numbers.eps,
        weight_decay=numbers.weight_decay,
        grad_scale=numbers.grad_scale if scale is None else float(scale),
    )  # fmt: skip
    for name, result in zip(WRITTEN, exact, strict=True):
        operands.arrays[name][...] = result
    return None

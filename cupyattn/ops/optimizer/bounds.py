"""Error bounds of the kernels of AdamW and of the global norm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cupyattn.ops.optimizer.reference import adamw_step, global_norm
from cupyattn.runtime.precision import TINY32, U32, Float64, precision_of


def adamw_step_bound(
    param: ArrayLike,
    grad: ArrayLike,
    m: ArrayLike,
    v: ArrayLike,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    dtype: DTypeLike,
) -> tuple[Float64, Float64, Float64]:
    """Return the error bounds of `adamw_step` for param, which is rounded to dtype, m and v.

    m and v are sums of two products. With the roundings of their factors these have three and four
    roundings; small products are flushed to 0. The denominator has half of v's relative error, the
    root of what was flushed, and four roundings of its own. The quotient, its factor and the final
    sum add four more.
    """
    param, grad, m, v = (np.asarray(each, dtype=np.float64) for each in (param, grad, m, v))
    numbers: dict[str, Any] = {
        "step": step,
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
    }
    beta1, beta2 = betas
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        new_param, new_m, new_v = adamw_step(param, grad, m, v, **numbers, grad_scale=grad_scale)
        g = np.abs(grad_scale * grad)
        m_error = 5 * U32 * (beta1 * np.abs(m) + (1 - beta1) * g) + 4 * TINY32
        v_error = 8 * U32 * new_v + 4 * TINY32
        bias1, bias2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
        size = np.sqrt(new_v) / bias2 + eps
        size_error = 9 * U32 * size + np.sqrt(4 * TINY32) / bias2
        update = np.abs(new_m) / size
        update_error = m_error / size + update * size_error / size
        decay = abs(1 - lr * weight_decay)
        error = lr / bias1 * (update_error + 4 * U32 * update) + 3 * U32 * decay * np.abs(param)
        error = error + U32 * np.abs(new_param) + 3 * TINY32
        param_error = error + precision_of(dtype).store(np.abs(new_param) + error)
    return param_error, m_error, v_error


def global_norm_bound(*arrays: ArrayLike) -> float:
    """Return the error bound of `global_norm`.

    A square is rounded once. A thread adds it to at most 32 others and to those of every 2**18-th
    item of its array. The sums of the threads are added in trees of 10 levels, twice; in between
    one thread adds at most four sums for each array. The root halves the relative error, and is
    rounded. Squares below 2**-126 are flushed to 0.
    """
    norm, sizes = global_norm(*arrays), [np.size(array) for array in arrays]
    if not math.isfinite(norm):
        return 0.0
    roundings = 64 + max(sizes) / 2**18 + 4 * len(sizes)
    return roundings * U32 * norm + math.sqrt(sum(sizes) * TINY32)

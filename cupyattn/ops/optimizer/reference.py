"""AdamW in float64, AdamW with 8-bit running means bit for bit, and the global norm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupyattn.runtime.precision import Float64


def adamw_step(
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
) -> tuple[Float64, Float64, Float64]:
    """Return param, m and v after a step (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2).

    Examples
    --------
    >>> numbers = dict(step=1, lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0)
    >>> [each.round(6).tolist() for each in adamw_step([1.0], [2.0], [0.0], [0.0], **numbers)]
    [[0.9], [0.2], [0.04]]
    """
    param, grad, m, v = (np.asarray(each, dtype=np.float64) for each in (param, grad, m, v))
    beta1, beta2 = betas
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        g = grad_scale * grad
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        size = np.sqrt(v / (1 - beta2**step)) + eps
        update = m / (1 - beta1**step) / size
        return (1 - lr * weight_decay) * param - lr * update, m, v


def global_norm(*arrays: ArrayLike) -> float:
    """Return the root of the sum of all squares.

    Examples
    --------
    >>> global_norm([3.0], [[0.0, 4.0]])
    5.0
    """
    squares = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for array in arrays:
            squares += float(np.sum(np.square(np.asarray(array, dtype=np.float64))))
    return math.sqrt(squares) if squares == squares else math.nan


Float32 = NDArray[np.float32]

BLOCK = 256
"""Items that share a scale."""
DECADES = {"m": 7, "v": 8}
_TINY = np.float32(2.0**-126)
_TENTHS = (np.float32(0.1), np.float32(0.01), np.float32(0.0001))


def decode(codes: np.ndarray, decades: int) -> Float32:
    """Return the values of the codes of a dynamic tree, from 0 to 1; int8 codes have a sign.

    Dettmers et al., "8-bit optimizers via block-wise quantization", arXiv:2110.02861, section 1.3:
    the leading bit of a code selects the decade, the bits below it divide the decade evenly. Here
    the value of a code is the upper end of its interval, so that the largest is exactly 1.

    Examples
    --------
    >>> decode(np.array([0, 127, -127, 64, 1], np.int8), 7).tolist()
    [0.0, 1.0, -1.0, 0.11406250298023224, 9.999999974752427e-07]
    """
    sizes = np.abs(codes.astype(np.int32))
    decade = np.frexp(np.maximum(sizes, 1).astype(np.float32))[1] - 1
    part = (sizes - 2**decade + 1).astype(np.float32) * np.exp2(-decade).astype(np.float32)
    below = decades - 1 - decade
    one, two, four = (
        np.where(below & bit, tenth, np.float32(1))
        for bit, tenth in zip((1, 2, 4), _TENTHS, strict=True)
    )
    size = one * two * four * (np.float32(0.1) + np.float32(0.9) * part)
    return np.where(sizes == 0, np.float32(0), np.where(codes < 0, -size, size))


def encode(x: Float32, largest: Float32, decades: int) -> NDArray[np.int32]:
    """Return the nearest codes of x / largest, for x >= 0.

    Examples
    --------
    >>> encode(np.float32([0, 1, 0.5, 0.1, 1e-3, 1e-9]), np.float32(1), 7).tolist()
    [0, 127, 91, 63, 15, 0]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        y = _flushed(x / largest)
    y = np.fmin(np.fmax(y, np.float32(0)), np.float32(1))
    below = np.zeros(y.shape, np.int32)
    for step in (4, 2, 1):
        raised = y * np.float32(10**step)
        lower = (raised <= 1) & (below + step < decades)
        y, below = np.where(lower, raised, y), below + step * lower
    decade = decades - 1 - below
    parts = np.float32(1.1111112) * np.exp2(decade).astype(np.float32)
    return 2**decade - 1 + np.rint((y - np.float32(0.1)) * parts).astype(np.int32)


def adamw_step_8bit(
    param: Float32,
    grad: Float32,
    m: NDArray[np.int8],
    v: NDArray[np.uint8],
    m_scales: Float32,
    v_scales: Float32,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> tuple[np.ndarray, ...]:
    """Return param, m, v and both scales after a step.

    Examples
    --------
    >>> numbers = dict(step=1, lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0)
    >>> zeros = np.zeros(2, np.int8), np.zeros(2, np.uint8), np.zeros((2, 1), np.float32)
    >>> given = np.ones(2, np.float32), np.float32([2, -1]), *zeros[:2], *zeros[2]
    >>> param, m, v, *scales = adamw_step_8bit(*given, **numbers)
    >>> param, m.tolist(), v.tolist()
    (array([0.9, 1.1], dtype=float32), [127, -91], [255, 148])
    """
    beta1, beta2 = betas
    b1, rest1, b2, rest2 = map(np.float32, (beta1, 1 - beta1, beta2, 1 - beta2))
    others = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step), eps, 1 - lr * weight_decay
    step_size, inverse_bias2, least, decay = map(np.float32, others)
    with np.errstate(all="ignore"):
        g = _flushed(np.float32(grad_scale) * _flushed(_blocks(grad)))
        old_m = _flushed(m_scales[:, None] * decode(_blocks(m), DECADES["m"]))
        old_v = _flushed(v_scales[:, None] * decode(_blocks(v), DECADES["v"]))
        new_m = _flushed(_flushed(b1 * old_m) + _flushed(rest1 * g))
        new_v = _flushed(_flushed(b2 * old_v) + _flushed(_flushed(rest2 * g) * g))
        root = _flushed(np.sqrt(new_v) * inverse_bias2) + least
        update = _flushed(step_size * _flushed(new_m / root))
        new_param = _flushed(_flushed(decay * _flushed(_blocks(param))) - update)
        # NumPy's maximum is NaN if any item is, as the kernel's is.
        sizes = np.abs(new_m)
        new_scales = sizes.max(axis=1, initial=0), new_v.max(axis=1, initial=0)
        m_codes = encode(sizes, new_scales[0][:, None], DECADES["m"])
        v_codes = encode(new_v, new_scales[1][:, None], DECADES["v"])
    # A v that became 0 would divide by eps alone.
    v_codes = np.where((v_codes == 0) & (new_v > 0), 1, v_codes)
    codes = np.where(new_m < 0, -m_codes, m_codes).astype(np.int8), v_codes.astype(np.uint8)
    results: tuple[Any, ...] = (new_param, *codes)
    items = (each.reshape(-1)[: param.size].reshape(param.shape) for each in results)
    return *items, *new_scales


def _blocks(x: np.ndarray) -> np.ndarray:
    """Return the items as (blocks, 256), padded with zeros."""
    flat = x.reshape(-1)
    return np.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)

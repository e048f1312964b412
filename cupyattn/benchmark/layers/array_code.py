"""The same layers as compositions of array functions, as one writes them in CuPy or NumPy.

They compute in float32, as models do, and forward only: nothing differentiates them. Dropout and
draws of tokens are missing, for another generator would be timed, and geglu, for an array library
has no erf.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.arrays import Array


def _wide(x: Array) -> Array:
    return x.astype(np.float32)


def layer_norm(xp: Any, x: Array, w: Array, b: Array) -> Array:
    """Return the layer norm."""
    wide = _wide(x)
    wide -= wide.mean(-1, keepdims=True)
    wide /= xp.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return (wide * w + b).astype(x.dtype)


def rms_norm(xp: Any, x: Array, w: Array) -> Array:
    """Return the RMS norm."""
    wide = _wide(x)
    wide /= xp.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * w).astype(x.dtype)


def add_layer_norm(xp: Any, x: Array, w: Array, b: Array, residual: Array) -> tuple[Array, Array]:
    """Return the layer norm of a sum, and the sum."""
    total = x + residual
    return layer_norm(xp, total, w, b), total


def add_rms_norm(xp: Any, x: Array, w: Array, residual: Array) -> tuple[Array, Array]:
    """Return the RMS norm of a sum, and the sum."""
    total = x + residual
    return rms_norm(xp, total, w), total


def softmax(xp: Any, x: Array) -> Array:
    """Return the softmax of each row."""
    wide = _wide(x)
    wide -= wide.max(-1, keepdims=True)
    xp.exp(wide, out=wide)
    wide /= wide.sum(-1, keepdims=True)
    return wide.astype(x.dtype)


def _logs(xp: Any, x: Array) -> tuple[Array, Array]:
    """Return x in float32, and the logarithm of the sum of exponentials of each row."""
    wide = _wide(x)
    largest = wide.max(-1, keepdims=True)
    return wide, largest + xp.log(xp.exp(wide - largest).sum(-1, keepdims=True))


def log_softmax(xp: Any, x: Array) -> Array:
    """Return its logarithm."""
    wide, logs = _logs(xp, x)
    return (wide - logs).astype(x.dtype)


def logsumexp(xp: Any, x: Array) -> Array:
    """Return the logarithm of the sum of exponentials of each row."""
    _, logs = _logs(xp, x)
    return logs[..., 0].astype(x.dtype)


def cross_entropy(xp: Any, logits: Array, labels: Array) -> Array:
    """Return the mean loss."""
    wide, logs = _logs(xp, logits)
    return (logs[:, 0] - wide[xp.arange(len(labels)), labels]).mean()


def rope(xp: Any, x: Array, cos: Array, sin: Array) -> Array:
    """Turn halves of x against each other."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = _wide(x[..., :half]), _wide(x[..., half:])
    turned = (first * cos - second * sin, second * cos + first * sin)
    return xp.concatenate(turned, -1).astype(x.dtype)


def linear_cross_entropy(xp: Any, x: Array, w: Array, labels: Array) -> Array:
    """Return the mean loss of logits that lie in memory."""
    return cross_entropy(xp, xp.matmul(x, w), labels)


def gelu(xp: Any, x: Array) -> Array:
    """Return tanh's approximation."""
    wide = _wide(x)
    inner = (2 / np.pi) ** 0.5 * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + xp.tanh(inner))).astype(x.dtype)


def _sigmoid_product(xp: Any, x: Array) -> Array:
    wide = _wide(x)
    return wide / (1 + xp.exp(-wide))


def silu(xp: Any, x: Array) -> Array:
    """Return x times its sigmoid."""
    return _sigmoid_product(xp, x).astype(x.dtype)


def swiglu(xp: Any, packed: Array) -> Array:
    """Return silu of one half times the other."""
    half = packed.shape[-1] // 2
    return (_sigmoid_product(xp, packed[..., :half]) * packed[..., half:]).astype(packed.dtype)


def adamw_step(
    xp: Any, param: Array, grad: Array, m: Array, v: Array, *, step: int, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Step in place."""
    beta1, beta2 = betas
    wide = _wide(grad)
    m *= beta1
    m += (1 - beta1) * wide
    v *= beta2
    v += (1 - beta2) * wide * wide
    moved = (m / (1 - beta1**step)) / (xp.sqrt(v / (1 - beta2**step)) + eps)
    param[...] = (_wide(param) * (1 - lr * weight_decay) - lr * moved).astype(param.dtype)
    return param, m, v


def embedding(xp: Any, table: Array, ids: Array) -> Array:
    """Look up rows."""
    return table[ids]


def global_norm(xp: Any, x: Array) -> Array:
    """Return the norm of all items."""
    return xp.sqrt((_wide(x) ** 2).sum())


def argmax(xp: Any, logits: Array) -> Array:
    """Return each row's largest, which greedy sampling takes."""
    return logits.argmax(-1)

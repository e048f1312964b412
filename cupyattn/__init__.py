"""Exact attention for array code: CUDA kernels for Turing GPUs behind a NumPy-like API.

>>> import numpy as np, cupyattn
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
>>> cupyattn.attention(q, k, v, causal=True).shape
(1, 5, 2, 8)

CuPy arrays run on the GPU, NumPy arrays on the CPU: through the float64 reference, or the kernels
themselves on an emulator (`backend`).
"""

__version__ = "0.1.0"

from cupyattn.functional import (
    AttentionGrads,
    attention,
    attention_backward,
    backend,
    device_info,
    softmax,
    softmax_backward,
    vjp,
)

__all__ = [
    "AttentionGrads",
    "__version__",
    "attention",
    "attention_backward",
    "backend",
    "device_info",
    "softmax",
    "softmax_backward",
    "vjp",
]

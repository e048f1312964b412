"""The public functions: documentation, defaults, and the choice of where a call runs.

CuPy arrays go to `cupyattn.ops` and its kernels, NumPy arrays to `cupyattn.reference` or, where
`backend` says so, to the same kernels on the emulator; the checks of a call are the same for all.
"""

from cupyattn.functional.attention.backward import attention_backward
from cupyattn.functional.backend import backend
from cupyattn.functional.device_info import device_info
from cupyattn.functional.layers.softmax import softmax_backward
from cupyattn.functional.rules import attention, softmax
from cupyattn.functional.vjp import vjp
from cupyattn.gradients import AttentionGrads

__all__ = [
    "AttentionGrads",
    "attention",
    "attention_backward",
    "backend",
    "device_info",
    "softmax",
    "softmax_backward",
    "vjp",
]

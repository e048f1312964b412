"""The public functions: documentation, defaults, and the choice of where a call runs.

CuPy arrays go to `cupyattn.ops` and its kernels, NumPy arrays to `cupyattn.reference` or, where
`backend` says so, to the same kernels on the emulator; the checks of a call are the same for all.
"""

from cupyattn.functional.attention.backward import attention_backward
from cupyattn.functional.backend import backend
from cupyattn.functional.device_info import device_info
from cupyattn.functional.layers.softmax import softmax_backward
from cupyattn.functional.linear.backward import linear_backward
from cupyattn.functional.linear.gelu import linear_gelu_backward
from cupyattn.functional.rules import attention, linear, linear_gelu, softmax
from cupyattn.functional.vjp import vjp
from cupyattn.gradients import AttentionGrads, LinearGrads

__all__ = [
    "AttentionGrads",
    "LinearGrads",
    "attention",
    "attention_backward",
    "backend",
    "device_info",
    "linear",
    "linear_backward",
    "linear_gelu",
    "linear_gelu_backward",
    "softmax",
    "softmax_backward",
    "vjp",
]

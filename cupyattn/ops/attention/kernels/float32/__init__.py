"""Float32 arithmetic: float32, bfloat16, and float16 on devices without tensor cores."""

from cupyattn.ops.attention.kernels.float32 import backward, forward

__all__ = ["backward", "forward"]

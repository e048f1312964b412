"""Float32 arithmetic: float32, bfloat16, and float16 on cards without tensor cores."""

from cupyattn.kernels.configs.attention.float32 import backward, forward

__all__ = ["backward", "forward"]

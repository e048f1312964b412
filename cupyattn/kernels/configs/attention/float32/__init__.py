"""float32 and bfloat16 in float32 arithmetic."""

from cupyattn.kernels.configs.attention.float32 import backward, forward

__all__ = ["backward", "forward"]

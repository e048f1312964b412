"""float16 on tensor cores."""

from cupyattn.kernels.configs.attention.tensor_core import backward, forward, passes

__all__ = ["backward", "forward", "passes"]

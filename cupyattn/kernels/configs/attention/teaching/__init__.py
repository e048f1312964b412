"""The kernels to be read and compared: naive and tiled."""

from cupyattn.kernels.configs.attention.teaching import backward, forward

__all__ = ["backward", "forward"]

"""The kernels to be read and compared: naive and tiled."""

from cupyattn.ops.attention.kernels.teaching import backward, forward

__all__ = ["backward", "forward"]

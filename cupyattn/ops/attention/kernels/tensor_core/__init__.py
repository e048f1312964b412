"""float16 on tensor cores."""

from cupyattn.ops.attention.kernels.tensor_core import (
    backward_dkdv,
    backward_dq,
    backward_summed_dbias,
    forward,
    passes,
)

__all__ = ["backward_dkdv", "backward_dq", "backward_summed_dbias", "forward", "passes"]

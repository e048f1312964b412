"""Arrays that PyTorch and this library share."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cupyattn.arrays import Array


def tensor_of(torch: Any, array: Array) -> Any:
    """Return a tensor on the memory of an array."""
    name = array.dtype.name
    if name == "bfloat16":  # of which CuPy cannot make a DLPack
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    if name == "bool":
        return torch.from_dlpack(array.view(np.uint8)).view(torch.bool)
    return torch.from_dlpack(array)


def float_array(result: Any, xp: Any) -> Array:
    """Return a float32 copy of an array, or of a tensor, by the array library `xp`."""
    if hasattr(result, "detach"):
        result = xp.from_dlpack(result.detach().float().contiguous())
    return result.astype(np.float32)


@cache
def torch_stream(torch: Any) -> Any:
    """Return the stream that PyTorch's calls are captured on.

    Gradients are computed on the stream of their forward: that has to be this one.
    """
    return torch.cuda.Stream()

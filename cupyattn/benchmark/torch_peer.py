"""The same attention by PyTorch, where it is installed: something to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn.arrays import Array
from cupyattn.benchmark.attention.cases import Arguments, Arrays
from cupyattn.errors import error

TORCH = "torch"
TAKES = ("plain", "causal", "bias", "mask", "dropout")
"""The options that scaled_dot_product_attention has too."""


def load_torch() -> Any:
    """Import PyTorch.

    Raises
    ------
    RuntimeError
        If it is not there, or sees no GPU.
    """
    try:
        import torch
    except ImportError:
        raise error(
            RuntimeError,
            "--peer torch without PyTorch",
            "it is no dependency of this library, and only timed beside it",
            "pip install torch, or leave --peer out",
        ) from None
    if not torch.cuda.is_available():
        raise error(
            RuntimeError,
            f"--peer torch, but PyTorch {torch.__version__} sees no GPU",
            "a build for CUDA is needed",
            "install one, or leave --peer out",
        )
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # gradients are taken again and again
    torch._dynamo.config.recompile_limit = 10_000  # of one function, for every size that is timed
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    return torch


def torch_call(torch: Any, arrays: Arrays, arguments: Arguments) -> Callable[[], Any]:
    """Return a call of ``scaled_dot_product_attention`` on the same memory and the same stream.

    CuPy's and PyTorch's current streams are both the device's default one unless changed.
    """
    tensors, taken = _taken(torch, arrays, arguments)
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> Any:
        with torch.no_grad():
            return attend(*tensors, **taken)

    return call


def torch_backward_call(torch: Any, arrays: Arrays, arguments: Arguments) -> Callable[[], Any]:
    """Return a call of ``torch.autograd.grad`` of it: gradients of q, k, v and a bias."""
    tensors, taken = _taken(torch, arrays, arguments)
    of = [*tensors, *([taken["attn_mask"]] if "bias" in arguments else [])]
    for tensor in of:
        tensor.requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, **taken)
    dout = tensor_of(torch, arrays.dout).transpose(1, 2)
    return lambda: torch.autograd.grad(out, of, dout, retain_graph=True)


def _taken(torch: Any, arrays: Arrays, arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
    """Return what PyTorch's function takes by position, q, k and v, and by name."""
    taken = {
        "is_causal": arguments.get("causal", False),
        "dropout_p": arguments.get("dropout_p", 0.0),
    }
    for name in ("bias", "mask"):
        if name in arguments:
            taken["attn_mask"] = tensor_of(torch, arguments[name])
    return [tensor_of(torch, array).transpose(1, 2) for array in arrays[:3]], taken


def tensor_of(torch: Any, array: Array) -> Any:
    """Return a tensor on the memory of an array."""
    name = array.dtype.name
    if name == "bfloat16":  # of which CuPy cannot make a DLPack
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    if name == "bool":
        return torch.from_dlpack(array.view(np.uint8)).view(torch.bool)
    return torch.from_dlpack(array)

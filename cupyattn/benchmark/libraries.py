"""Baselines, which compute the same in the same run: their names, PyTorch, shared arrays."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType

import numpy as np

from cupyattn.benchmark.timer import Round, Tensor, torch_stream
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error

BASELINES = {
    **{name: f"torch {name}" for name in ("eager", "cudnn", "flash", "efficient", "math")},
    **{"compile": "torch compile", "triton": "triton", "cublas": "cublas", "cupy": "cupy"},
    **{"transformers": "transformers", "static": "transformers static", "peft": "peft"},
}
"""Names of baselines in rows, by their names on the command line."""
MEANING = (
    "eager is PyTorch's own choice, and cudnn, flash, efficient and math are back-ends of its "
    "scaled_dot_product_attention; compile is torch.compile; triton is its "
    "flex_attention, compiled; cublas is the product alone, and cupy a composition of array "
    "functions"
)
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION",
            "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}  # fmt: skip
"""Members of ``torch.nn.attention.SDPBackend``."""
SLOW = ("compile", "triton", "transformers", "static", "peft")
"""Baselines that compile or load for seconds: they are left out first when time runs short."""
GROUPS = {"all": tuple(BASELINES), "torch": ("eager", *BACKENDS, "compile", "triton"), "none": ()}
ARRAY_CODE = ("cublas", "cupy")
"""Baselines that are functions of CuPy."""
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
"""Modes of ``torch.compile``; the timer makes the graphs of every implementation alike."""


class NotAskedError(RuntimeError):
    """An implementation was not run, for lack of time or of its library."""


def baseline_names(text: str) -> tuple[str, ...]:
    """Read the names of baselines from the command line.

    Examples
    --------
    >>> baseline_names("eager,cupy"), baseline_names("none")
    (('eager', 'cupy'), ())
    """
    return GROUPS[text] if text in GROUPS else tuple(names_among((*BASELINES, *GROUPS), text))


def names_among(known: Sequence[str], text: str) -> list[str]:
    """Read names with commas between them, each of which is one of `known`."""
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))} is not among {', '.join(known)}"
        )
    return names


def load_torch() -> ModuleType:
    """Import PyTorch; raise NotAskedError if it is not installed or sees no GPU."""
    try:
        import torch
    except ImportError:
        raise error(
            NotAskedError,
            "a baseline of PyTorch without PyTorch",
            "it is not a dependency of this library; benchmarks only time it",
            "pip install torch, or leave --peers out",
        ) from None
    if not torch.cuda.is_available():
        raise error(
            NotAskedError,
            f"a baseline of PyTorch, but PyTorch {torch.__version__} sees no GPU",
            "a build for CUDA is needed",
            "install one, or leave --peers out",
        )
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # gradients are taken again and again
    torch._dynamo.config.recompile_limit = 10_000  # one function for every size that is timed
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    return torch


def missing_library(name: str, failure: ImportError) -> NotAskedError:
    """Return the error for a baseline that is not installed."""
    return error(
        NotAskedError,
        f"--peers {name}, which did not import ({failure})",
        "it is not a dependency of this library; benchmarks only time it",
        "install it, or leave it out of --peers",
    )


def free_memory(torch: ModuleType | None) -> None:
    """Give back the unused memory that the pools of CuPy and PyTorch hold."""
    load_cupy().get_default_memory_pool().free_all_blocks()
    if torch is not None:
        torch.cuda.empty_cache()


def tensor_of(torch: ModuleType, array: Array) -> Tensor:
    """Return a tensor on the memory of an array."""
    name = array.dtype.name
    if name == "bfloat16":  # CuPy cannot export it by DLPack
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    if name == "bool":
        return torch.from_dlpack(array.view(np.uint8)).view(torch.bool)
    return torch.from_dlpack(array)


def float_array(result: Array | Tensor, xp: ModuleType) -> Array:
    """Return a float32 copy of an array or a tensor, by the array library `xp`."""
    if hasattr(result, "detach"):
        result = xp.from_dlpack(result.detach().float().contiguous())
    return result.astype(np.float32)


def swapped(tensor: Tensor) -> Tensor:
    """Return (B, S, H, D) of (B, H, S, D), or the reverse."""
    return tensor.transpose(1, 2)


def all_swapped(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Swap the axes of the first three tensors, dq, dk and dv."""
    return tuple(map(swapped, tensors[:3]))


Attend = Callable[..., Tensor]
Within = Callable[[], AbstractContextManager[object]]
ANYWHERE: Within = nullcontext


def forward_calls(
    torch: ModuleType, function: Attend, tensors: Sequence[object], within: Within = ANYWHERE
) -> Round:
    """Return a call of PyTorch's function that records no gradients."""

    def call() -> Tensor:
        with torch.no_grad(), within():
            return function(*tensors)

    return [call]


def backward_calls(
    torch: ModuleType,
    function: Attend,
    tensors: Sequence[Tensor],
    within: Within = ANYWHERE,
    *,
    dout: object,
) -> Round:
    """Return a call that differentiates the result of PyTorch's function."""
    for tensor in tensors:
        tensor.requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch_stream(torch)), within():
        out = function(*tensors)
    torch.cuda.synchronize()
    return [lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True)]


def step_calls(
    torch: ModuleType,
    function: Attend,
    tensors: Sequence[Tensor],
    within: Within = ANYWHERE,
    *,
    dout: object,
) -> Round:
    """Return a call of PyTorch's function followed by its gradient."""
    for tensor in tensors:
        tensor.requires_grad_()

    def call() -> Tensor:
        with within():
            return torch.autograd.grad(function(*tensors), tensors, dout)

    return [call]


def torch_attention(torch: ModuleType, name: str, **options: object) -> tuple[Attend, Within]:
    """Return PyTorch's attention of (B, H, S, D) by a back-end, and the context that selects it.

    The function takes q, k, v and optionally a bias.
    """

    def attend(*tensors: object) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

    if name not in BACKENDS:
        return attend, ANYWHERE
    backend = getattr(torch.nn.attention.SDPBackend, BACKENDS[name])
    return attend, partial(torch.nn.attention.sdpa_kernel, backend)


def flex_attention(
    torch: ModuleType, seen: Callable[..., object] | None, sq: int, sk: int
) -> Attend:
    """Return flex_attention of q, k and v (B, H, S, D), which Inductor compiles by Triton.

    `seen` returns whether query i of head h and batch b sees key j; tiles without such a pair are
    skipped. With None every query sees every key.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    if seen is None:
        return lambda q, k, v: compiled(q, k, v)
    blocks = create_block_mask(seen, None, None, sq, sk)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)

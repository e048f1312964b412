"""Who else computes the same in the same run: one list of names for every benchmark."""

from __future__ import annotations

import argparse
from typing import Any

from cupyattn.benchmark.frame.rows import NotAskedError
from cupyattn.cupy_library import load_cupy
from cupyattn.errors import error

PEERS = {
    "eager": "torch eager",
    "cudnn": "torch cudnn",
    "flash": "torch flash",
    "efficient": "torch efficient",
    "math": "torch math",
    "compile": "torch compile",
    "triton": "triton",
    "cublas": "cublas",
    "cupy": "cupy",
    "transformers": "transformers",
    "static": "transformers static",
    "vllm": "vllm",
    "peft": "peft",
    "peft-nf4": "peft nf4",
}
"""What a contender is called, by its name on the command line."""
MEANING = (
    "eager is PyTorch's own choice, and cudnn, flash, efficient and math are back-ends of its "
    "scaled_dot_product_attention; compile is torch.compile; triton is its "
    "flex_attention, compiled; cublas is the product alone, and cupy a composition of array "
    "functions"
)
BACKENDS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
"""Of ``torch.nn.attention.SDPBackend``."""
SLOW = ("compile", "triton", "transformers", "static", "vllm", "peft", "peft-nf4")
"""Those that compile or load for seconds: they are left out first when time runs short."""
GROUPS = {
    "all": tuple(PEERS),
    "torch": ("eager", *BACKENDS, "compile", "triton"),
    "none": (),
}
"""What else can be said on the command line."""
ARRAY_CODE = ("cublas", "cupy")
"""Those that are functions of CuPy."""
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")
"""Of ``torch.compile``: the clock makes the graphs, of every contender alike."""


def peer_names(text: str) -> tuple[str, ...]:
    """Read the names of peers from the command line.

    Examples
    --------
    >>> peer_names("eager,cupy"), peer_names("none")
    (('eager', 'cupy'), ())
    """
    if text in GROUPS:
        return GROUPS[text]
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))} is no peer; they are {', '.join((*PEERS, *GROUPS))}"
        )
    return names


def load_torch() -> Any:
    """Import PyTorch, which then works on CuPy's current stream, as both do by default.

    Raises
    ------
    NotAskedError
        If it is not there, or sees no GPU.
    """
    try:
        import torch
    except ImportError:
        raise error(
            NotAskedError,
            "a peer of PyTorch without it",
            "it is no dependency of this library, and only timed beside it",
            "pip install torch, or leave --peers out",
        ) from None
    if not torch.cuda.is_available():
        raise error(
            NotAskedError,
            f"a peer of PyTorch, but PyTorch {torch.__version__} sees no GPU",
            "a build for CUDA is needed",
            "install one, or leave --peers out",
        )
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # gradients are taken again and again
    torch._dynamo.config.recompile_limit = 10_000  # of one function, for every size that is timed
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    return torch


def free_memory(torch: Any) -> None:
    """Give back what the pools of CuPy and PyTorch hold and nobody uses."""
    load_cupy().get_default_memory_pool().free_all_blocks()
    if torch is not None:
        torch.cuda.empty_cache()

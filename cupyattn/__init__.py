"""Exact attention, layers and a paged KV cache for array code: CUDA kernels for Turing and newer.

>>> import numpy as np, cupyattn
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
>>> cupyattn.attention(q, k, v, causal=True).shape
(1, 5, 2, 8)

CuPy arrays run on the GPU, NumPy arrays on the CPU: in NumPy, or by the kernels themselves on an
emulator (`backend`). `cupyattn.models` has language models, `cupyattn.emulator` runs any
kernel, and `cupyattn.testing` has what property tests need. Every name is imported when it is first
used: ``import cupyattn`` alone loads neither NumPy nor the functions.
"""

# The star import below is for type checkers alone.
# ruff: noqa: F403, F405
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cupyattn.runtime.fork import no_fork

__version__ = "0.1.0"

__all__ = [
    "AttentionGrads",
    "BlockAllocator",
    "BlockMask",
    "Copy",
    "DropoutGrads",
    "DropoutSeed",
    "GatedGrads",
    "Kernel",
    "LayerNormGrads",
    "LinearCrossEntropyGrads",
    "LinearGrads",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MaskMod",
    "NTKScaling",
    "OutOfBlocksError",
    "PagedKVCache",
    "QuantizedKeys",
    "QuantizedRows",
    "QuantizedWeight",
    "RMSNorm",
    "RMSNormGrads",
    "Rotary",
    "Scheduler",
    "ScoreMod",
    "Sequence",
    "SoftmaxGrads",
    "YarnScaling",
    "__version__",
    "adamw_step",
    "adamw_step_8bit",
    "add_to",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "backend",
    "block_mask",
    "checkpoint",
    "copy_blocks",
    "cross_entropy",
    "cross_entropy_backward",
    "custom_vjp",
    "dequantize",
    "device_info",
    "dropout",
    "dropout_backward",
    "embedding",
    "embedding_backward",
    "explain",
    "gather",
    "geglu",
    "geglu_backward",
    "gelu",
    "gelu_backward",
    "global_norm",
    "grad",
    "layer_norm",
    "layer_norm_backward",
    "linear",
    "linear_backward",
    "linear_cross_entropy",
    "linear_cross_entropy_backward",
    "linear_gelu",
    "linear_gelu_backward",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "logsumexp_backward",
    "matmul",
    "merge_attention",
    "paged_attention",
    "quantize",
    "quantize_keys",
    "quantize_rows",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_backward",
    "rope_tables",
    "sample",
    "silu",
    "silu_backward",
    "softmax",
    "softmax_backward",
    "stop_gradient",
    "swiglu",
    "swiglu_backward",
    "value_and_grad",
    "vjp",
]

_MODULES = ("autodiff", "distributed", "emulator", "kv_cache", "models", "reference", "testing")
_HOMES = {
    **dict.fromkeys(
        (
            "BlockAllocator",
            "Copy",
            "OutOfBlocksError",
            "PagedKVCache",
            "Scheduler",
            "Sequence",
        ),
        "kv_cache",
    ),
    "explain": "explanation",
}
"""Where public names are, if not in `cupyattn.functions`."""

if TYPE_CHECKING:
    from cupyattn import autodiff as autodiff
    from cupyattn import emulator as emulator
    from cupyattn.explanation import explain
    from cupyattn.functions import *
    from cupyattn.kv_cache import (
        BlockAllocator,
        Copy,
        OutOfBlocksError,
        PagedKVCache,
        Scheduler,
        Sequence,
    )
else:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES and name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with no_fork():
            if name in _MODULES:
                return import_module(f"cupyattn.{name}")
            home = _HOMES.get(name, "functions")
            value = getattr(import_module(f"cupyattn.{home}"), name)
        globals()[name] = value  # the next look-up does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})

"""Language models on the library's functions: from files of weights to logits and text.

>>> import numpy as np
>>> from cupyattn import models
>>> sorted(models.PRESETS)
['gemma-3-1b', 'gpt2', 'llama-3.2-1b', 'phi-2', 'phi-4-mini',
 'qwen3-0.6b', 'qwen3-1.7b', 'qwen3-4b']

`cupyattn.models.training` fine-tunes them; it is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cupyattn.models.config import PRESETS, Config
from cupyattn.models.forward import Attend
from cupyattn.models.generation import Generation, Generator, Prompt
from cupyattn.models.loading import load, random
from cupyattn.models.tokenizer import Tokenizer
from cupyattn.models.transformer import Model
from cupyattn.models.weights import Layer, Norm, Product, Weights
from cupyattn.runtime.fork import no_fork

__all__ = [
    "PRESETS",
    "Attend",
    "Config",
    "Generation",
    "Generator",
    "Layer",
    "Model",
    "Norm",
    "Product",
    "Prompt",
    "Tokenizer",
    "Weights",
    "load",
    "random",
]

if TYPE_CHECKING:
    from cupyattn.models import training as training
else:  # a type checker would take it for any name

    def __getattr__(name: str) -> Any:
        if name == "training":
            with no_fork():
                return import_module("cupyattn.models.training")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "training"})

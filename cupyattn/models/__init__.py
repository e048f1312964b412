"""GPT-2, Llama and Phi-2 on the library's own functions: from files of weights to logits.

>>> import numpy as np
>>> from cupyattn import models
>>> sorted(models.PRESETS)
['gpt2', 'llama-3.2-1b', 'phi-2']
"""

from cupyattn.models.config import PRESETS, Config
from cupyattn.models.forward import Attend
from cupyattn.models.generation import Generation, Generator, Prompt
from cupyattn.models.loading import load
from cupyattn.models.random_weights import random
from cupyattn.models.tokenizer import Tokenizer
from cupyattn.models.transformer import Model
from cupyattn.models.weights import Layer, Norm, Product, Weights

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

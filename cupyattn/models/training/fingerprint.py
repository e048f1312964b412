"""A fingerprint that tells a model's weights from other weights of the same shapes."""

from __future__ import annotations

import json
from hashlib import sha256

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.config import Config
from cupyattn.models.weights import Weights, named_arrays, named_parts
from cupyattn.runtime.arrays import Array

_OF_A_MODEL = (
    "architecture", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "norm_eps", "activation", "rotary_dim", "rope_base", "qkv_bias",
    "output_bias", "mlp_bias", "head_bias",
)  # fmt: skip
_ITEMS = 64
"""Items read of each array: a model that was trained further differs in all of its arrays."""


def fingerprint(weights: Weights) -> str:
    """Return a number, in hexadecimal, of some items of each array, and of the sum of all bits.

    Items that are evenly apart tell their order; the sum, one pass over an array where it lies,
    tells whether any other is another.

    Examples
    --------
    >>> from cupyattn import models
    >>> tiny = models.PRESETS["gpt2"]._replace(num_layers=1, vocab_size=99)
    >>> one, same, other = (models.random(tiny, seed=seed, xp=np) for seed in (1, 1, 2))
    >>> fingerprint(one.weights) == fingerprint(same.weights) != fingerprint(other.weights)
    True
    """
    found = sha256()
    for name, array in named_arrays(weights):
        found.update(name.encode())
        found.update(_on_host(_some(array)).tobytes())
        words = array.reshape(-1).view(f"u{array.dtype.itemsize}")
        found.update(int(words.sum(dtype=np.uint64)).to_bytes(8, "little"))
    return found.hexdigest()[:16]


def kept_in(weights: Weights) -> str:
    """Return the dtypes and formats of weights: in others the same model has another fingerprint.

    Examples
    --------
    >>> from cupyattn import models
    >>> tiny = models.PRESETS["gpt2"]._replace(num_layers=1, vocab_size=99)
    >>> kept_in(models.random(tiny, dtype="float16", quantize="nf4", xp=np).weights)
    'float16, nf4'
    """
    parts = (part for _, part in named_parts(weights))
    kinds = {p.format if isinstance(p, QuantizedWeight) else p.dtype.name for p in parts}
    return ", ".join(sorted(kinds))


def config_fingerprint(config: Config) -> str:
    """Return a number, in hexadecimal, of what is the same in each file of a model.

    How long its texts are, which tokens there are, and whether the head lies in a file once more
    differ between a folder and a GGUF file, and numbers of float32 by their last digits.

    Examples
    --------
    >>> from cupyattn import models
    >>> gpt2 = models.PRESETS["gpt2"]
    >>> longer, wider = gpt2._replace(max_positions=2048), gpt2._replace(hidden_size=1024)
    >>> config_fingerprint(gpt2) == config_fingerprint(longer) != config_fingerprint(wider)
    True
    """
    found = [getattr(config, name) for name in _OF_A_MODEL]
    told = [f"{value:.6g}" if isinstance(value, float) else value for value in found]
    return sha256(json.dumps(told).encode()).hexdigest()[:16]


def _some(array: Array) -> Array:
    flat = array.reshape(-1)
    return flat[:: max(flat.size // _ITEMS, 1)]


def _on_host(array: Array) -> np.ndarray:
    return np.ascontiguousarray(array if isinstance(array, np.ndarray) else array.get())

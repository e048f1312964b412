"""Models whose weights are random numbers, for times, shapes and tests."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyattn
from cupyattn import QuantizedWeight
from cupyattn.models.config import PRESETS, Config, checked
from cupyattn.models.device import model_dtype, model_library
from cupyattn.models.quantised import quantises_to
from cupyattn.models.transformer import Model
from cupyattn.models.weights import empty, named_parts
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown

_AT_ONCE = 1 << 22  # numbers: some arrays of 16 MiB, beside a model of gigabytes


def random(
    name_or_config: str | Config,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    xp: Any = None,
    seed: int = 0,
) -> Model:
    """Make a model with random weights, on its device.

    Parameters
    ----------
    name_or_config : {"gpt2", "llama-3.2-1b", "phi-2"} or Config
        Which shapes: those of GPT-2 (124 million), Llama-3.2-1B, Phi-2, or any others.
    dtype, quantize, xp : optional
        As of `load`, but that there is no file.
    seed : int
        Of ``xp.random.default_rng``: the same numbers every time; NumPy and CuPy differ.

    Returns
    -------
    Model
        Without a tokenizer. Weights of a product with K terms are normal with variance 1 / K, so
        that hidden states keep their size.

    Raises
    ------
    TypeError, ValueError
        For a name that there is none of, a config whose numbers do not fit together, and as `load`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import models
    >>> tiny = models.PRESETS["llama-3.2-1b"]._replace(num_layers=1, vocab_size=99, hidden_size=64)
    >>> models.random(tiny._replace(max_positions=128), dtype="float32", xp=np).nbytes
    7628288
    """
    config = _config(name_or_config)
    xp = model_library(xp)
    dtype = model_dtype(dtype, xp)
    weights = empty(config, dtype, xp, quantises_to(quantize))
    generator = xp.random.default_rng(seed)
    for name, part in named_parts(weights):
        if part.ndim == 2:
            mean, deviation = 0.0, part.shape[1] ** -0.5
        else:
            mean, deviation = float(name.endswith("norm.weight")), 0.1
        if isinstance(part, QuantizedWeight):
            _fill_quantised(part, generator, deviation)
        else:
            _fill(part, generator, mean, deviation)
    return Model(config, weights, dtype, xp)


def _fill_quantised(weight: QuantizedWeight, generator: Any, deviation: float) -> None:
    rows, inner = weight.shape
    step = max(1, _AT_ONCE // inner)
    for start in range(0, rows, step):
        part = weight[start : start + step]
        normal = deviation * generator.standard_normal(part.shape, dtype=np.float32)
        cupyattn.quantize(normal.T, format=weight.format, out=part.T)


def _fill(array: Array, generator: Any, mean: float, deviation: float) -> None:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        normal = generator.standard_normal(part.size, dtype=np.float32)
        part[...] = (mean + deviation * normal).astype(part.dtype)


def _config(given: Any) -> Config:
    if isinstance(given, Config):
        return checked(given)
    if isinstance(given, str) and given in PRESETS:
        return PRESETS[given]
    raise error(
        ValueError if isinstance(given, str) else TypeError,
        f"got {shown(given)}",
        f"it is {', '.join(map(repr, PRESETS))} or a models.Config",
        "pass one of these; a model's own weights are read by models.load",
    )

"""Tiny models that generate, and the texts that a fresh full forward at each step makes."""

from __future__ import annotations

from functools import cache

import numpy as np
from support.tiny_models import TINY

from cupyattn import models

NEW = 12


def tiny(name, **changes):
    return TINY[name]._replace(**{"max_positions": 96, **changes})


@cache
def numpy_model(name):
    return models.random(tiny(name), dtype="float32", xp=np, seed=3)


def placed(part, xp, dtype):
    """The same weights in another library, whose random numbers are others."""
    if isinstance(part, tuple):
        parts = [placed(each, xp, dtype) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
    return xp.asarray(part.astype(dtype)) if hasattr(part, "shape") else part


def model_on(xp, name, dtype="float32", **changes):
    config = tiny(name, **changes)
    weights = models.random(config, dtype="float32", xp=np, seed=3).weights
    return models.Model(config, placed(weights, xp, dtype), dtype, xp)


def prompts_of(name, lengths=(14, 7, 20, 33, 15)):
    rng = np.random.default_rng(0)
    return [rng.integers(0, TINY[name].vocab_size, length).tolist() for length in lengths]


def alone(model, prompt, new=NEW):
    """Each token from a full forward over all before it, and its lead over the second."""
    tokens, leads = list(prompt), []
    for _ in range(new):
        logits = model.logits([tokens])[0, -1]
        on_host = np.asarray(logits if model.xp is np else logits.get(), np.float32)
        leads.append(np.diff(np.sort(on_host)[-2:]).item())
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], min(leads)


@cache
def expected(name):
    found = [alone(numpy_model(name), prompt) for prompt in prompts_of(name)]
    assert min(lead for _, lead in found) > 1e-5, "another seed: these are nearly equal"
    return [tokens for tokens, _ in found]


WAYS = {
    "plain": {},
    "captured": {"captured": True},
    "chunks of prompts": {"max_tokens": 32},
    "one at a time": {"max_batch": 1},
    "recompute": {"num_blocks": 5},
    "swap": {"num_blocks": 5, "preempt": "swap", "num_host_blocks": 9},
    "captured, recompute": {"captured": True, "num_blocks": 5},
    "captured, swap": {"captured": True, "num_blocks": 5, "preempt": "swap", "num_host_blocks": 9},
    "lookup": {"lookup": 3},
    "lookup, recompute": {"lookup": 3, "num_blocks": 5},
    "captured, lookup, recompute": {"captured": True, "lookup": 3, "num_blocks": 5},
}

"""Whole models of transformers: those of the same files, or random weights of the same shapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cupyattn.benchmark.libraries import missing_library
from cupyattn.models import Config, Model
from cupyattn.models.checkpoints.config_writing import config_json
from cupyattn.runtime.annotations import Keywords

GENERATING = ("transformers", "static")
"""transformers as it is, and with its static cache and compiled."""


class TimedRun(NamedTuple):
    """Seconds until every prompt of a batch has a token, and of all steps after that.

    `early` counts the tokens after `first_s`: prompts that do not fit into one step get their first
    tokens one after the other.
    """

    first_s: float
    rest_s: float
    tokens: list[list[int]]
    early: int


Generate = Callable[[list[list[int]], int], TimedRun]
"""A function that continues each prompt greedily by a number of tokens."""


class PromptSize(NamedTuple):
    """A batch of prompts that are equally long, and how many tokens each gets."""

    batch: int
    prompt: int
    new: int

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Draw prompts: another seed gives others, so that no prefix is found in a cache."""
        drawn = np.random.default_rng(seed).integers(0, vocab_size, (self.batch, self.prompt))
        return drawn.tolist()


def baseline(name: str, model: Model, folder: str | None) -> Generate:
    """Return another library's generation; raise RuntimeError if it cannot run this model."""
    try:
        torch, transformers = import_module("torch"), import_module("transformers")
    except ImportError as failure:
        raise missing_library(name, failure) from failure
    make, dtype = transformers.AutoModelForCausalLM, getattr(torch, model.dtype)
    if folder is not None:
        theirs = make.from_pretrained(folder, dtype=dtype)
    else:
        config = transformers_config(transformers, model.config)
        theirs = make.from_config(config, dtype=dtype)
    device = "cpu" if model.xp is np else "cuda"
    theirs = theirs.to(device).eval()
    options: Keywords = {} if name == "transformers" else {"cache_implementation": "static"}

    def generate(ids: list[list[int]], new: int) -> list[list[int]]:
        given = torch.tensor(ids, device=device)
        with torch.no_grad():
            found = theirs.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=new,
                min_new_tokens=new, do_sample=False, pad_token_id=0, **options,
            )  # fmt: skip
        return found[:, given.shape[1] :].tolist()

    def run(prompts: list[list[int]], new: int) -> TimedRun:
        """Time the first token by a separate call: the library does not report when it came."""
        began = time.perf_counter()
        generate(prompts, 1)
        first = time.perf_counter() - began
        began = time.perf_counter()
        tokens = generate(prompts, new)
        rest = max(time.perf_counter() - began - first, 1e-9)
        return TimedRun(first, rest, tokens, len(prompts))

    return run


def transformers_config(transformers: ModuleType, config: Config) -> Any:
    """Return transformers' config of the same numbers."""
    written = config_json(config, "the model")
    kind = written.pop("model_type")
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return transformers.AutoConfig.for_model(kind, **{**written, **none})

"""Generations that are timed: the first token, and those behind it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyattn import models


class Run(NamedTuple):
    """Seconds until every prompt of a batch has a token, and of all steps behind that.

    Attributes
    ----------
    first_s, rest_s : float
        The seconds.
    tokens : list of list of int
        All tokens of each prompt.
    early : int
        How many of them there were after `first_s`: prompts that do not fit into one step get
        their first tokens one after the other.
    """

    first_s: float
    rest_s: float
    tokens: list[list[int]]
    early: int


Generate = Callable[[list[list[int]], int], Run]
"""Continues prompts greedily by as many tokens each."""


class Size(NamedTuple):
    """A batch of prompts that are equally long, and how many tokens each gets."""

    batch: int
    prompt: int
    new: int

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Draw them: another seed gives others, so that no prefix is found in a cache."""
        drawn = np.random.default_rng(seed).integers(0, vocab_size, (self.batch, self.prompt))
        return drawn.tolist()


def own(model: Any, size: Size, **options: Any) -> Generate:
    """Return this library's generation, from one cache and with steps that stay captured."""
    generator = models.Generator(
        model, lengths=[size.prompt + size.new] * size.batch, max_batch=size.batch, **options
    )

    def generate(prompts: list[list[int]], new: int) -> Run:
        began = time.perf_counter()
        submitted = [generator.submit(prompt, max_new_tokens=new) for prompt in prompts]
        while not all(each.outputs[0] for each in submitted):
            generator.step()
        first = time.perf_counter()
        early = sum(len(each.outputs[0]) for each in submitted)
        while not generator.idle:
            generator.step()
        ended = time.perf_counter()
        tokens = [each.outputs[0] for each in submitted]
        return Run(first - began, ended - first, tokens, early)

    return generate


def timed(generate: Generate, size: Size, vocab_size: int, runs: int) -> dict[str, Any]:
    """Return the times of runs behind a first one, which compiles and captures.

    Returns
    -------
    dict
        ``first_s`` and ``step_s`` (of a step behind the first token) of each run;
        ``tokens_per_s`` of those behind the first, a median; ``tokens`` of the last run; and
        ``cold_s``: the first token of the first run.
    """
    done = [
        generate(size.prompts(vocab_size, seed), size.new) for seed in (*range(runs), runs, runs)
    ]  # the last two are of one prompt: that its tokens are found again is checked
    measured = done[1:-1]
    rates = [(sum(map(len, run.tokens)) - run.early) / run.rest_s for run in measured]
    return {
        "first_s": [run.first_s for run in measured],
        "step_s": [size.batch / max(rate, 1e-9) for rate in rates],
        "tokens_per_s": statistics.median(rates),
        "cold_s": done[0].first_s,
        "repeats": done[-1].tokens == done[-2].tokens,
        "tokens": done[-1].tokens,
    }


def equal_share(found: list[list[int]], wanted: list[list[int]]) -> float:
    """Return the share of tokens up to the first of each sequence that differs.

    Examples
    --------
    >>> equal_share([[1, 2, 3, 4], [5, 6]], [[1, 2, 0, 4], [5, 6]])
    0.6666666666666666
    """
    equal = total = 0
    for one, other in zip(found, wanted, strict=True):
        total += len(other)
        for a, b in zip(one, other, strict=False):
            if a != b:
                break
            equal += 1
    return equal / total if total else 1.0

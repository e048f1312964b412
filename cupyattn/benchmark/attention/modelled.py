"""Attention without a GPU: the model's rate of each kernel, and what the emulator counts of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cupyattn.benchmark.attention.arguments import calls_of
from cupyattn.benchmark.attention.cases import (
    PLAIN,
    Case,
    Inputs,
    arguments_of,
    inputs_of,
    unfilled,
)
from cupyattn.benchmark.attention.contenders import (
    backward_contenders,
    forward_contenders,
)
from cupyattn.benchmark.frame.emulated import ModelledCall, of_products
from cupyattn.benchmark.frame.rows import Row
from cupyattn.benchmark.frame.subjects import Contender, Gauge
from cupyattn.benchmark.frame.turing_model import Model, rate_of, rate_of_call
from cupyattn.progress import progress
from cupyattn.turing import T4

COUNTED: dict[str, Any] = {"batch": 1, "heads": 1, "seqlen": 128}
"""What the emulator runs: counts of an iteration are those of a long sequence."""
_SIMPLE = (PLAIN, "causal")
MODELLED = (*_SIMPLE, "softcap", "alibi", "score_mod", "sinks", "dropout")
"""Options with a modelled row: those without an array of all scores, or other kernels beside."""
_LONGEST = 4096  # tokens of a call whose kernels are modelled with an option


def forward(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each kernel, dtype, head dim, and for options that are modelled."""

    def contenders(inputs: Inputs) -> list[Contender]:
        return forward_contenders(arguments.implementation, inputs, Gauge.idle(np))

    yield from _rows("attention", arguments, contenders, Case.flops, 1)


def backward(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the same of the backward, deterministic and not."""
    modes = {"both": (False, True), "only": (True,), "never": (False,)}[arguments.deterministic]

    def contenders(inputs: Inputs) -> list[Contender]:
        return backward_contenders(arguments.implementation, modes, inputs, Gauge.idle(np))

    yield from _rows("attention_backward", arguments, contenders, Case.backward_flops, 2)


def _rows(
    command: str,
    arguments: argparse.Namespace,
    contenders: Callable[[Inputs], list[Contender]],
    flops: Callable[[Case, str], float],
    moves: int,
) -> Iterator[Row]:
    """Yield rows of the largest batch and the longest sequences: rates hardly depend on them.

    The bytes of a case move so many times: the backward has its gradients too.
    """
    model, found = Model(T4), {}
    for case, option in calls_of(arguments):
        if option in MODELLED:
            found[case.dtype, case.head_dim, option] = (case, option)
    with progress("modelling", len(found)) as step:
        for case, option in found.values():
            small = replace(case, **COUNTED)
            of_case = contenders(_planned(case, option))
            counted = contenders(inputs_of(small, option, np))
            for contender, planned in zip(counted, of_case, strict=True):
                labels: dict[str, Any] = {**case.labels, "option": option}
                if option in _SIMPLE:
                    rate = rate_of(model, command, {**labels, "contender": contender.name})
                else:
                    rate = rate_of_call(model, _first_of(planned))
                call = ModelledCall(contender.name, moves * small.bytes, _first_of(contender))
                yield of_products(
                    labels, contender.name, flops(case, option), rate, call,
                    least_bytes=moves * case.bytes,
                )  # fmt: skip
            step(f"head dim {case.head_dim}, {option}")


def _planned(case: Case, option: str) -> Inputs:
    """Return a call of the case's kernels, short enough for those that are slow."""
    short = replace(case, batch=1, seqlen=min(case.seqlen, _LONGEST))
    return Inputs(short, option, unfilled(short), partial(arguments_of, option, short, np))


def _first_of(contender: Contender) -> Callable[[], Callable[[], Any]]:
    return lambda: contender.prepare()[0]

"""What sampling is told: a number for all rows, or an array with one for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.numbers import integer, real
from cupyattn.runtime.value_checks import on_host

DTYPES = {
    "seed": ("uint64", "int64"),
    "step": ("int32", "int64"),
    "temperature": ("float32",),
    "top_k": ("int32", "int64"),
    "top_p": ("float32",),
    "min_p": ("float32",),
    "repetition_penalty": ("float32",),
}
"""Of the arrays."""


class _Rule(NamedTuple):
    """Which numbers an option allows."""

    holds: Callable[[Any], Any]
    allowed: str
    fix: str


_RULES = {
    "seed": _Rule(
        lambda seed: (seed >= 0) & (seed < 2**64),
        "it is an integer from 0 to 2**64 - 1",
        "reduce it modulo 2**64",
    ),
    "step": _Rule(
        lambda step: (step >= 0) & (step < 2**63),
        "it is an integer from 0 to 2**63 - 1",
        "count steps from 0",
    ),
    "temperature": _Rule(
        lambda temperature: (temperature >= 0) & (temperature < math.inf),
        "it is finite, 0 (greedy) or more",
        "pass 0 for the largest logit, 1 for the logits as they are",
    ),
    "top_k": _Rule(
        lambda top_k: (top_k >= 0) & (top_k < 2**63),
        "it is an integer, 1 or more, or 0 for none",
        "pass how many tokens to keep",
    ),
    "top_p": _Rule(
        lambda top_p: (top_p > 0) & (top_p <= 1),
        "it is above 0 and at most 1",
        "pass the share of the probability to keep, 1 for all of it",
    ),
    "min_p": _Rule(
        lambda min_p: (min_p >= 0) & (min_p <= 1),
        "it is 0 to 1",
        "pass the least share of the largest probability, 0 for none",
    ),
    "repetition_penalty": _Rule(
        lambda penalty: (penalty > 0) & (penalty < math.inf),
        "it is finite and more than 0",
        "pass 1 for none, more to weaken previous tokens",
    ),
}


class SampleNumbers(NamedTuple):
    """Checked options that are numbers; of those that are arrays a default, which is not read."""

    seed: int = 0
    step: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SampleNumbers:
        """Check options by name, without those that are arrays.

        Raises
        ------
        TypeError, ValueError
            As `sample` documents.
        """
        values = dict(given)
        drawn = {}  # what mostly differs from call to call
        for name in ("seed", "step"):
            if name in values:
                value = values.pop(name)
                if value is not None or name == "step" or given.get("temperature") != 0:
                    drawn[name] = _checked(name, value)
        try:
            others = _numbers(tuple(values), *values.values())
        except TypeError:  # of a wrong kind, or without a hash: what it is says its own check
            others = _numbers.__wrapped__(tuple(values), *values.values())
        return others._replace(**drawn)


@lru_cache(maxsize=1024, typed=True)
def _numbers(names: tuple[str, ...], *values: Any) -> SampleNumbers:
    given = zip(names, values, strict=True)
    return SampleNumbers(
        **{
            name: _checked(name, value)
            for name, value in given
            if value is not None or name not in ("top_k", "top_p", "min_p")
        }
    )


def _checked(name: str, value: Any) -> Any:
    number, rule = _number(name, value), _RULES[name]
    if not rule.holds(number):
        raise error(ValueError, f"{name} = {shown(value)}", rule.allowed, rule.fix)
    return number


def _number(name: str, value: Any) -> Any:
    dtype = DTYPES[name][0]
    if isinstance(value, list | tuple):
        raise error(
            TypeError,
            f"{name} is a {type(value).__name__}",
            "it is a number for all rows, or an array (rows,)",
            f"pass an array, one a row: numpy.array({name}, {dtype!r})",
        )
    if dtype == "float32":
        return real(name, value)
    if value is None:
        raise error(
            TypeError,
            f"{name} is None",
            "tokens are drawn from the seed alone, so that a draw can be repeated",
            "pass an integer seed, or temperature=0",
        )
    return integer(name, value)


def require_values(arrays: Mapping[str, Array], vocabulary: int) -> None:
    """Raise ValueError for the first of an array's numbers that is out of range.

    Those of arrays on a GPU are waited for.
    """
    for name, rule in _RULES.items():
        if name not in arrays:
            continue
        values = on_host(arrays[name])
        with np.errstate(invalid="ignore"):
            wrong = ~np.asarray(rule.holds(values), bool)
        if wrong.any():
            row = int(wrong.argmax())
            raise error(ValueError, f"{name}[{row}] = {values[row]}", rule.allowed, rule.fix)
    if "previous" in arrays:
        previous = on_host(arrays["previous"])
        wrong = (previous < -1) | (previous >= vocabulary)
        if wrong.any():
            row, column = (int(i) for i in np.unravel_index(wrong.argmax(), wrong.shape))
            raise error(
                ValueError,
                f"previous[{row}, {column}] is {previous[row, column]}",
                f"logits have tokens 0 to {vocabulary - 1}, and -1 is none",
                "pass the ids of those tokens",
            )

"""Learning rates, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from cupyattn.models.training.counts import count_of, positive_number
from cupyattn.runtime.errors import error, shown

_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 + 0.5 * math.cos(math.pi * done),
}
SCHEDULES = tuple(_SHAPES)


class Schedule(NamedTuple):
    """A learning rate that rises for ``warmup`` steps and then falls to 0, just behind the last.

    Attributes
    ----------
    kind : {"cosine", "linear", "constant"}
        How it falls: by half a period of a cosine (Loshchilov and Hutter, arXiv:1608.03983,
        equation 5, without restarts), in a straight line, or not at all.
    lr : float
        The highest rate.
    steps : int
        Of the whole training, those of the warm-up among them.
    warmup : int
        Steps below the highest rate at the beginning: step s has ``lr * s / (warmup + 1)``.

    Examples
    --------
    >>> rate = Schedule("linear", 1.0, steps=5, warmup=1)
    >>> [rate.at(step) for step in range(1, 6)]
    [0.5, 1.0, 0.75, 0.5, 0.25]
    """

    kind: str
    lr: float
    steps: int
    warmup: int = 0

    @classmethod
    def checked(cls, kind: str, lr: float, steps: int, warmup: int) -> Schedule:
        """Make one of numbers that make sense.

        Raises
        ------
        TypeError, ValueError
            For another kind, a rate that is not positive, or more steps of warm-up than steps.
        """
        if kind not in SCHEDULES:
            raise error(
                ValueError,
                f"schedule = {shown(kind)}",
                f"it is {', '.join(map(repr, SCHEDULES))}",
                "pass one of these",
            )
        lr = positive_number("lr", lr, example=1e-4)
        steps = count_of("steps", steps, least=1)
        warmup = count_of("warmup", warmup, least=0)
        if warmup >= steps:
            raise error(
                ValueError,
                f"warmup = {warmup} of {steps} steps",
                "the warm-up is shorter than the training",
                "pass fewer steps of warm-up, or train for longer",
            )
        return cls(kind, lr, steps, warmup)

    def at(self, step: int) -> float:
        """Return the rate of a step, which count from 1.

        Raises
        ------
        ValueError
            For a step behind the last, or before the first.
        """
        if not 1 <= step <= self.steps:
            raise error(
                ValueError,
                f"step {step} of {self.steps}",
                "a schedule has rates of its own steps alone, from 1 on",
                "make a schedule of more steps",
            )
        if step <= self.warmup:
            return self.lr * step / (self.warmup + 1)
        done = (step - 1 - self.warmup) / (self.steps - self.warmup)
        return self.lr * _SHAPES[self.kind](done)

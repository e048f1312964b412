"""AdamW over all that is learnt, its learning rates, and the loss scale.

One launch updates the matrices, which decay, and one all else: each group is views of one array.
The loss scale keeps float16 gradients within float16's range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from types import ModuleType
from typing import NamedTuple

import numpy as np

from cupyattn import adamw_step, adamw_step_8bit, backend, global_norm
from cupyattn.models.generation.options import as_count
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown

LARGEST = 1e38  # the largest number that kernels take in float32


def as_float(given: object) -> float:
    """Return a real number of any type as a float; NaN for anything else.

    >>> as_float(3), as_float("3")
    (3.0, nan)
    """
    if not isinstance(given, Real) or isinstance(given, bool):
        return math.nan
    try:
        return float(given)
    except OverflowError:
        return math.inf  # of either sign: no option allows it


def positive_number(name: str, given: object, *, allowed: str = "", example: float = 1.0) -> float:
    """Return a positive number within float32, or raise; `allowed` is what else may be."""
    number = as_float(given)
    if 0 < number <= LARGEST:
        return number
    raise error(
        ValueError,
        f"{name} = {shown(given)}",
        f"it is a positive number up to {LARGEST:g}{allowed}",
        f"pass for example {example:g}",
    )


ALIGNMENT = 256
"""Items: no block of an 8-bit state has items of two arrays."""


class Flat(NamedTuple):
    """One float32 array that contains others, with zeros between them that stay zeros.

    Its first `matrices` items are arrays of two axes or more, which decay. Norms and biases follow.
    """

    array: Array
    views: dict[str, Array]
    matrices: int

    @property
    def parts(self) -> tuple[tuple[slice, bool], ...]:
        """The parts that are not empty, each with whether weight decay applies to it."""
        parts = slice(0, self.matrices), slice(self.matrices, self.array.size)
        both = zip(parts, (True, False), strict=True)
        return tuple((part, decays) for part, decays in both if part.start < part.stop)


def zeros(shapes: dict[str, tuple[int, ...]], xp: ModuleType) -> Flat:
    """Return arrays of these shapes, as views of one.

    >>> flat = zeros({"bias": (3,), "weight": (2, 300)}, np)
    >>> flat.array.size, flat.matrices, flat.views["weight"].shape
    (1024, 768, (2, 300))
    """
    ordered = sorted(shapes, key=lambda name: len(shapes[name]) < 2)
    places, end, matrices = {}, 0, 0
    for name in ordered:
        places[name] = end
        end += -(-math.prod(shapes[name]) // ALIGNMENT) * ALIGNMENT
        matrices = end if len(shapes[name]) > 1 else matrices
    array = xp.zeros(end, np.float32)
    views = {
        name: array[places[name] : places[name] + math.prod(shape)].reshape(shape)
        for name, shape in shapes.items()
    }
    return Flat(array, views, matrices)


def flatten(arrays: dict[str, Array], xp: ModuleType) -> Flat:
    """Copy arrays into one, and replace them in the dict by its views."""
    flat = zeros({name: array.shape for name, array in arrays.items()}, xp)
    for name, view in flat.views.items():
        view[...] = arrays[name]
        arrays[name] = view
    return flat


STATES = ("float32", "8bit")
_BLOCK = 256  # items that share a scale of an 8-bit state
assert ALIGNMENT % _BLOCK == 0, "no block is of two arrays"


class AdamWOptions(NamedTuple):
    """Options of an AdamW step, except the learning rate.

    Attributes
    ----------
    betas, eps, weight_decay
        Options of `cupyattn.adamw_step`. Arrays of one axis, norms and biases, do not decay.
    clip : float or None
        The largest norm of all gradients; larger ones are scaled down to it.
    state : {"float32", "8bit"}
        The format of the running means: 8 bytes for each learnt number, or 2.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = 1.0
    state: str = "float32"

    def checked(self) -> AdamWOptions:
        """Return valid options as Python's own numbers.

        Raises
        ------
        TypeError, ValueError
            For numbers out of range.
        """
        one = np.zeros((4, 1), np.float32)
        decay = self.weight_decay
        with backend("reference"):  # checks the numbers
            adamw_step(*one, step=1, lr=0.0, betas=self.betas, eps=self.eps, weight_decay=decay)
        clip = self.clip
        if clip is not None:
            clip = positive_number("clip", clip, allowed=", or None")
        if self.state not in STATES:
            raise error(
                ValueError,
                f"state = {shown(self.state)}",
                f"it must be one of {', '.join(map(repr, STATES))}",
                "pass one of these",
            )
        beta1, beta2 = self.betas
        betas = float(beta1), float(beta2)
        return AdamWOptions(betas, float(self.eps), float(decay), clip, self.state)


class AdamW:
    """Parameters, gradients and running means, each as views of one array."""

    def __init__(self, arrays: dict[str, Array], options: AdamWOptions, xp: ModuleType) -> None:
        self.options = options.checked()
        self.steps = 0
        self._parameters = flatten(arrays, xp)
        self._gradients = zeros({name: array.shape for name, array in arrays.items()}, xp)
        items = self._parameters.array.size
        self._means = _means(options.state, items, xp)
        self._norm = xp.zeros((), np.float32)

    @property
    def gradients(self) -> dict[str, Array]:
        """The arrays that gradients are written to, by name."""
        return self._gradients.views

    @property
    def parameters(self) -> dict[str, Array]:
        """The arrays that a step changes, by name."""
        return self._parameters.views

    def zero_gradients(self) -> None:
        """Set all gradients to zero, which begins a step."""
        self._gradients.array.fill(0)

    def norm(self) -> Array:
        """Return the norm of all gradients, on their device."""
        return global_norm(self._gradients.array, out=self._norm)

    def step(self, lr: float, grad_norm: float, loss_scale: float) -> None:
        """Change the parameters; `grad_norm` is without the loss scale that the gradients have."""
        self.steps += 1
        clip = self.options.clip
        shrink = 1.0 if clip is None or grad_norm <= clip else clip / grad_norm
        change = adamw_step if self.options.state == "float32" else adamw_step_8bit
        for part, decays in self._parameters.parts:
            blocks = slice(part.start // _BLOCK, part.stop // _BLOCK)
            change(
                self._parameters.array[part],
                self._gradients.array[part],
                *(mean[blocks if "scales" in name else part] for name, mean in self._means.items()),
                step=self.steps,
                lr=lr,
                betas=self.options.betas,
                eps=self.options.eps,
                weight_decay=self.options.weight_decay if decays else 0.0,
                grad_scale=shrink / loss_scale,
            )

    def saved(self) -> dict[str, Array]:
        """Return the arrays of a checkpoint, by name."""
        return {"parameters": self._parameters.array, **self._means}


def state_bytes(state: str, items: int) -> int:
    """Return the bytes of the running means of so many items.

    >>> state_bytes("float32", 256), state_bytes("8bit", 256)
    (2048, 520)
    """
    return 8 * items if state == "float32" else 2 * items + 8 * (items // _BLOCK)


def _means(state: str, items: int, xp: ModuleType) -> dict[str, Array]:
    """Return zeros for the running means, in the order of the arguments of the step."""
    if state == "float32":
        return {name: xp.zeros(items, np.float32) for name in ("m", "v")}
    codes = {"m": xp.zeros(items, np.int8), "v": xp.zeros(items, np.uint8)}
    scales = (xp.zeros(items // _BLOCK, np.float32) for _ in range(2))
    return {**codes, **dict(zip(("m_scales", "v_scales"), scales, strict=True))}


FIRST = 2.0**16
LEAST, MOST = 1.0, 2.0**24
GOOD_STEPS = 2000
MOST_SKIPPED = 40
"""Consecutive steps: from the highest scale to the lowest, and some more."""


@dataclass
class LossScale:
    """A factor of the loss that adapts to the range of the gradients.

    It is halved if gradients overflow, and that step is skipped; it is doubled after `good_steps`
    steps without overflow (Micikevicius et al., "Mixed precision training", arXiv:1710.03740,
    section 3.2). Powers of two round nothing.

    Attributes
    ----------
    scale : float
        The factor in the next step.
    dynamic : bool
        Whether it changes; that of float32 models stays 1.
    good_steps : int
        Steps after which it is doubled.
    good, skipped : int
        Steps since the last change, and consecutive skipped ones.
    """

    scale: float = FIRST
    dynamic: bool = True
    good_steps: int = GOOD_STEPS
    good: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        """Convert to Python's own numbers.

        Raises
        ------
        TypeError, ValueError
            For a scale that is not positive, and steps that are not counts.
        """
        self.scale = positive_number("scale", self.scale, example=FIRST)
        self.dynamic = bool(self.dynamic)
        for name, least in (("good_steps", 1), ("good", 0), ("skipped", 0)):
            setattr(self, name, as_count(name, getattr(self, name), least))

    @classmethod
    def off(cls) -> LossScale:
        """Return a scale of 1 that does not change."""
        return cls(1.0, dynamic=False)

    def update(self, finite: bool) -> None:
        """Adapt the scale, given whether the gradients of a step were finite.

        Raises
        ------
        FloatingPointError
            If so many steps were not finite that no scale will help.
        """
        if finite:
            self.skipped = 0
            self.good += 1
            if self.dynamic and self.good >= self.good_steps:
                self.scale, self.good = min(2 * self.scale, MOST), 0
            return
        self.good = 0
        self.skipped += 1
        if self.dynamic:
            self.scale = max(self.scale / 2, LEAST)
        if self.skipped >= (MOST_SKIPPED if self.dynamic else 1):
            raise error(
                FloatingPointError,
                f"the loss or its gradients are not finite, {self.skipped} steps in a row, the "
                f"last with a loss scale of {self.scale:g}",
                "steps that are not finite are skipped, and the loss scale is halved",
                "take a smaller learning rate or a longer warm-up, clip gradients, or train in "
                "float32; earlier checkpoints are good",
            )

    def state(self) -> Json:
        """Return the values for a checkpoint."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def restore(self, state: Json) -> None:
        """Continue from the values of a checkpoint."""
        self.scale, self.good = state["scale"], state["good"]
        self.skipped = state["skipped"]


_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 + 0.5 * math.cos(math.pi * done),
}
SCHEDULES = tuple(_SHAPES)


class Schedule(NamedTuple):
    """A learning rate that rises for ``warmup`` steps and then falls to 0 after the last.

    Attributes
    ----------
    kind : {"cosine", "linear", "constant"}
        How it falls: by half a period of a cosine (Loshchilov and Hutter, arXiv:1608.03983,
        equation 5, without restarts), in a straight line, or not at all.
    lr : float
        The highest rate.
    steps : int
        All steps of the training, including the warm-up.
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
        """Return a valid schedule.

        Raises
        ------
        TypeError, ValueError
            For another kind, a rate that is not positive, or more steps of warm-up than steps.
        """
        if kind not in SCHEDULES:
            raise error(
                ValueError,
                f"schedule = {shown(kind)}",
                f"it must be one of {', '.join(map(repr, SCHEDULES))}",
                "pass one of these",
            )
        lr = positive_number("lr", lr, example=1e-4)
        steps = as_count("steps", steps, 1)
        warmup = as_count("warmup", warmup, 0)
        if warmup >= steps:
            raise error(
                ValueError,
                f"warmup = {warmup} of {steps} steps",
                "the warm-up must be shorter than the training",
                "pass fewer steps of warm-up, or train for longer",
            )
        return cls(kind, lr, steps, warmup)

    def at(self, step: int) -> float:
        """Return the rate of a step; steps count from 1.

        Raises
        ------
        ValueError
            For a step after the last, or before the first.
        """
        if not 1 <= step <= self.steps:
            raise error(
                ValueError,
                f"step {step} of {self.steps}",
                "a schedule has only rates for its own steps, from 1 on",
                "make a schedule of more steps",
            )
        if step <= self.warmup:
            return self.lr * step / (self.warmup + 1)
        done = (step - 1 - self.warmup) / (self.steps - self.warmup)
        return self.lr * _SHAPES[self.kind](done)

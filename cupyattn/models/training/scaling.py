"""The loss scale, which keeps float16 gradients within what float16 holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupyattn.models.training.counts import count_of, positive_number
from cupyattn.runtime.errors import error

FIRST = 2.0**16
LEAST, MOST = 1.0, 2.0**24
GOOD_STEPS = 2000
MOST_SKIPPED = 40
"""Steps in a row: from the highest scale to the lowest, and some more."""


@dataclass
class LossScale:
    """A factor of the loss that follows what the gradients bear.

    It is halved where gradients overflow, and that step is skipped; it is doubled after
    `good_steps` steps that did not (Micikevicius et al., "Mixed precision training",
    arXiv:1710.03740, section 3.2). Powers of two round nothing.

    Attributes
    ----------
    scale : float
        What the next step takes.
    dynamic : bool
        Whether it changes: that of float32 models is 1, and stays.
    good_steps : int
        After which it is doubled.
    good, skipped : int
        Steps since the last change, and skipped ones in a row.
    """

    scale: float = FIRST
    dynamic: bool = True
    good_steps: int = GOOD_STEPS
    good: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        """Keep Python's own numbers.

        Raises
        ------
        TypeError, ValueError
            For a scale that is not positive, and steps that are no counts.
        """
        self.scale = positive_number("scale", self.scale, example=FIRST)
        self.dynamic = bool(self.dynamic)
        for name, least in (("good_steps", 1), ("good", 0), ("skipped", 0)):
            setattr(self, name, count_of(name, getattr(self, name), least=least))

    @classmethod
    def off(cls) -> LossScale:
        """Return that of a model whose gradients need none."""
        return cls(1.0, dynamic=False)

    def update(self, finite: bool) -> None:
        """Take over whether a step's gradients were finite.

        Raises
        ------
        FloatingPointError
            If they have not been for so many steps that no scale will help.
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
                "float32; what was saved before is good",
            )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.scale, self.good = state["scale"], state["good"]
        self.skipped = state["skipped"]

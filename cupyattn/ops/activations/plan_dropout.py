"""What dropout is told: a probability, and a seed from which its mask is drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.numbers import integer, real

FIELDS = 65536
"""Values of an item's random field."""


class Draw(NamedTuple):
    """A checked probability and seed."""

    p: float
    seed: int

    @classmethod
    def of(cls, p: Any, seed: Any) -> Draw:
        """Check them.

        Raises
        ------
        TypeError, ValueError
            As `dropout` documents.
        """
        probability = real("p", p)
        if not 0.0 <= probability < 1.0:
            raise error(
                ValueError,
                f"p = {probability}",
                "it is at least 0 and below 1",
                "pass the share of items to drop, 0.1 for a tenth",
            )
        if seed is None:
            if probability > 0.0:
                raise error(
                    ValueError,
                    f"p = {probability} without a seed",
                    "dropout draws its mask from the seed alone, so that the backward can draw it "
                    "again",
                    "pass an integer seed, another one each training step",
                )
            return cls(probability, 0)
        number = integer("seed", seed)
        if not 0 <= number < 2**64:
            raise error(
                ValueError,
                f"seed = {shown(seed)}",
                "it is an integer from 0 to 2**64 - 1",
                "reduce it modulo 2**64",
            )
        return cls(probability, number)

    @property
    def scalars(self) -> dict[str, Any]:
        """What the kernel is passed."""
        keep_from = round(FIELDS * self.p)
        return {
            "seed": self.seed,
            "keep_from": keep_from,
            "keep_scale": FIELDS / (FIELDS - keep_from) if keep_from < FIELDS else 0.0,
        }

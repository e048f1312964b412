"""What a step of AdamW is told."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.numbers import factor, integer, real


class AdamwNumbers(NamedTuple):
    """Checked options of a step."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float

    @classmethod
    def of(
        cls, step: Any, lr: Any, betas: Any, eps: Any, weight_decay: Any, grad_scale: Any
    ) -> AdamwNumbers:
        """Check them.

        Raises
        ------
        TypeError, ValueError
            As `adamw_step` documents.
        """
        count = integer("step", step)
        _require(count >= 1, f"step = {count}", "steps count from 1", "pass 1 in the first step")
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise error(
                TypeError,
                f"betas is {shown(betas)}",
                "it is a tuple of two numbers",
                "pass for example betas=(0.9, 0.999)",
            )
        beta1, beta2 = (real(f"betas[{i}]", beta) for i, beta in enumerate(betas))
        for i, beta in enumerate((beta1, beta2)):
            _require(
                0 <= beta < 1,
                f"betas[{i}] = {beta}",
                "it is at least 0 and below 1",
                "pass for example betas=(0.9, 0.999)",
            )
        rates = {
            name: factor(name, value, least=0.0)
            for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay))
        }
        scale = real("grad_scale", grad_scale)
        _require(
            math.isfinite(scale),
            f"grad_scale = {scale}",
            "it is finite: one that is not, of a norm for example, says that the gradients are not "
            "finite",
            "skip this step, and lower the loss scale if there is one",
        )
        scale = factor("grad_scale", scale)
        return cls(count, rates["lr"], beta1, beta2, rates["eps"], rates["weight_decay"], scale)

    @property
    def scalars(self) -> dict[str, float]:
        """What the kernel is passed."""
        return {
            "scale": self.grad_scale,
            "beta1": self.beta1,
            "rest1": 1 - self.beta1,
            "beta2": self.beta2,
            "rest2": 1 - self.beta2,
            "step_size": self.lr / (1 - self.beta1**self.step),
            "inverse_bias2": 1 / math.sqrt(1 - self.beta2**self.step),
            "eps": self.eps,
            "decay": 1 - self.lr * self.weight_decay,
        }


def _require(holds: bool, passed: str, allowed: str, fix: str) -> None:
    if not holds:
        raise error(ValueError, passed, allowed, fix)

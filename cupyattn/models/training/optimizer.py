"""AdamW over all that is learnt: one launch for what decays, one for what does not."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyattn import adamw_step, adamw_step_8bit, backend, global_norm
from cupyattn.models.training.counts import positive_number
from cupyattn.models.training.flat import ALIGNMENT, flatten, zeros
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error, shown

STATES = ("float32", "8bit")
_BLOCK = 256  # items that share a scale of an 8-bit state
assert ALIGNMENT % _BLOCK == 0, "no block is of two arrays"


class AdamWOptions(NamedTuple):
    """Options of an AdamW step, all but the learning rate.

    Attributes
    ----------
    betas, eps, weight_decay
        As of `cupyattn.adamw_step`. What has one axis, norms and biases, does not decay.
    clip : float or None
        The largest norm of all gradients together: larger ones are scaled down to it.
    state : {"float32", "8bit"}
        What the running means are kept in: 8 bytes of each number that is learnt, or 2.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = 1.0
    state: str = "float32"

    def checked(self) -> AdamWOptions:
        """Return them, in Python's own numbers.

        Raises
        ------
        TypeError, ValueError
            For numbers out of range; those of `cupyattn.adamw_step` too, before the first step.
        """
        with backend("reference"):  # which is asked, of arrays of one item
            adamw_step(
                *np.zeros((4, 1), np.float32),
                step=1,
                lr=0.0,
                betas=self.betas,
                eps=self.eps,
                weight_decay=self.weight_decay,
            )
        clip = self.clip
        if clip is not None:
            clip = positive_number("clip", clip, allowed=", or None")
        if self.state not in STATES:
            raise error(
                ValueError,
                f"state = {shown(self.state)}",
                f"it is {', '.join(map(repr, STATES))}",
                "pass one of these",
            )
        beta1, beta2 = self.betas
        return AdamWOptions(
            (float(beta1), float(beta2)),
            float(self.eps),
            float(self.weight_decay),
            clip,
            self.state,
        )


class AdamW:
    """Parameters, gradients and running means, each as views of one array.

    Parameters
    ----------
    arrays : dict of float32 arrays
        What is learnt: views take the arrays' place in it.
    options : AdamWOptions
    xp : module
        numpy or cupy.
    """

    def __init__(self, arrays: dict[str, Array], options: AdamWOptions, xp: Any) -> None:
        self.options = options.checked()
        self.steps = 0
        self._parameters = flatten(arrays, xp)
        self._gradients = zeros({name: array.shape for name, array in arrays.items()}, xp)
        items = self._parameters.array.size
        self._means = _means(options.state, items, xp)
        self._norm = xp.zeros((), np.float32)

    @property
    def gradients(self) -> dict[str, Array]:
        """Where gradients are written, by the names of the arrays."""
        return self._gradients.views

    @property
    def parameters(self) -> dict[str, Array]:
        """The arrays that a step changes, by their names."""
        return self._parameters.views

    def zero_gradients(self) -> None:
        """Begin a step: what is added to gradients is added to zeros."""
        self._gradients.array.fill(0)

    def norm(self) -> Array:
        """Return the norm of all gradients together, where they are."""
        return global_norm(self._gradients.array, out=self._norm)

    def step(self, lr: float, grad_norm: float, loss_scale: float) -> None:
        """Change the parameters.

        Parameters
        ----------
        lr : float
            Learning rate.
        grad_norm : float
            Of the gradients without the loss scale.
        loss_scale : float
            That the gradients have.
        """
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
        """Return what a checkpoint keeps, by name."""
        return {"parameters": self._parameters.array, **self._means}


def state_bytes(state: str, items: int) -> int:
    """Return the bytes of the running means of so many items.

    Examples
    --------
    >>> state_bytes("float32", 256), state_bytes("8bit", 256)
    (2048, 520)
    """
    return 8 * items if state == "float32" else 2 * items + 8 * (items // _BLOCK)


def _means(state: str, items: int, xp: Any) -> dict[str, Array]:
    """Return zeros for the running means, in the order in which the step takes them."""
    if state == "float32":
        return {name: xp.zeros(items, np.float32) for name in ("m", "v")}
    codes = {"m": xp.zeros(items, np.int8), "v": xp.zeros(items, np.uint8)}
    scales = (xp.zeros(items // _BLOCK, np.float32) for _ in range(2))
    return {**codes, **dict(zip(("m_scales", "v_scales"), scales, strict=True))}

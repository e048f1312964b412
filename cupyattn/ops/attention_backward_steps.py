"""What an attention backward launches: several kernels, and the scratch memory that they share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyattn.kernels.spec import Specialisation
from cupyattn.kernels.structs import BACKWARD_PARAMS
from cupyattn.ops.attention_params import with_seed

SCRATCH_ALIGNMENT = 256  # bytes: what CuPy gives an array of its own
_SCRATCH_DTYPE = np.dtype(np.float32)


class Step(NamedTuple):
    """One launch: its arguments are looked up by the names of the kernel's parameters."""

    specialisation: Specialisation
    ctas: int
    params: Any
    """What its struct is passed."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parameters that take the array of another name."""

    def arguments(self, named: dict[str, Any]) -> list[Any]:
        """Take the arguments from what a call has by name; absent ones are None."""
        other_names = dict(self.renamed)
        *pointers, _ = self.specialisation.spec.parameters
        return [*(named.get(other_names.get(p.name, p.name)) for p in pointers), self.params]


class Scratch(NamedTuple):
    """A float32 array within the workspace."""

    name: str
    offset: int
    """In bytes."""
    items: int

    def within(self, workspace: Any) -> Any:
        """Return the array, of a flat workspace of bytes."""
        end = self.offset + self.items * _SCRATCH_DTYPE.itemsize
        return workspace[self.offset : end].view(_SCRATCH_DTYPE)


class Plan(NamedTuple):
    """All that the launches of a call need and that does not change from call to call."""

    steps: tuple[Step, ...]
    scratch: tuple[Scratch, ...]
    zero_first: tuple[str, ...] = ()
    """Results that have to be zero before the first launch."""

    def seeded(self, seed: int) -> tuple[Step, ...]:
        """Return the steps with a seed for dropout."""
        return tuple(
            step._replace(params=with_seed(step.params, seed))
            if step.params.dtype == BACKWARD_PARAMS
            else step
            for step in self.steps
        )

    @property
    def workspace_bytes(self) -> int:
        """What the scratch takes."""
        return max(
            (piece.offset + piece.items * _SCRATCH_DTYPE.itemsize for piece in self.scratch),
            default=0,
        )


def lay_out_scratch(items: dict[str, int]) -> tuple[Scratch, ...]:
    """Place float32 arrays one behind the other.

    Examples
    --------
    >>> lay_out_scratch({"delta": 3, "dq_acc": 100})
    (Scratch(name='delta', offset=0, items=3), Scratch(name='dq_acc', offset=256, items=100))
    """
    placed, end = [], 0
    for name, count in items.items():
        placed.append(Scratch(name, end, count))
        size = count * _SCRATCH_DTYPE.itemsize
        end += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return tuple(placed)


def spanning(name: str, pieces: tuple[Scratch, ...]) -> tuple[Scratch, ...]:
    """Return one array over neighbouring pieces; none over none.

    Examples
    --------
    >>> spanning("zeroed", lay_out_scratch({"dq_acc": 3, "scratch": 100}))
    (Scratch(name='zeroed', offset=0, items=164),)
    """
    if not pieces:
        return ()
    first, last = pieces[0], pieces[-1]
    items = (last.offset - first.offset) // _SCRATCH_DTYPE.itemsize + last.items
    return (Scratch(name, first.offset, items),)

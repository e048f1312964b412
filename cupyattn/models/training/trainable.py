"""What a `Trainer` trains."""

from __future__ import annotations

from typing import Protocol

from cupyattn.arrays import Array
from cupyattn.models.training.batch import Batch


class Trainable(Protocol):
    """A model some arrays of which are learnt.

    Attributes
    ----------
    arrays : dict of float32 arrays
        What is learnt, by name, on the model's device. A trainer puts views of one array in their
        place, and writes to them.
    """

    arrays: dict[str, Array]

    def gradients(
        self,
        batch: Batch,
        into: dict[str, Array],
        /,
        *,
        num_labels: int,
        loss_scale: float | Array,
        seed: int,
        accumulate: bool,
    ) -> Array:
        """Return the loss of a batch, and write or add its gradients.

        Parameters
        ----------
        batch : Batch
            On the model's device.
        into : dict of float32 arrays
            Where ``loss_scale * d loss / d array`` goes, by the names of ``arrays``.
        num_labels : int
            Divides the sum of the tokens' losses: the labels of a whole step, not of this batch.
        loss_scale : float, or array of one float32
            Multiplies gradients, not the loss.
        seed : int
            Of dropout.
        accumulate : bool
            Add to what `into` holds.

        Returns
        -------
        array of one float32, shape ()
        """
        ...

    def updated(self) -> None:
        """Take over what was written to ``arrays``."""
        ...

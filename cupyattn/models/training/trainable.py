"""The interface of models that a `Trainer` trains, and checks of models and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cupyattn.models.config import Config
from cupyattn.models.training.batch import IGNORED, Batch, Sample
from cupyattn.models.transformer import Model
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error


def require_whole(model: Model) -> None:
    """Raise NotImplementedError for a model of which a rank has a share."""
    if model.group is not None:
        raise error(
            NotImplementedError,
            f"a model over {model.group.size} ranks",
            "what is trained is on one GPU: gradients are not summed over ranks",
            "load the model without a group, with quantize='nf4' where memory is short",
        )


def require_samples(config: Config, samples: Sequence[Sample]) -> None:
    """Raise ValueError for samples that a model has no rows or no positions for.

    A GPU would compute NaN of them, in whatever step they come.
    """
    for number, sample in enumerate(samples):
        if len(sample.ids) > config.max_positions:
            raise error(
                ValueError,
                f"samples[{number}] has {len(sample.ids)} tokens",
                f"the model has {config.max_positions} positions",
                "cut it into several samples",
            )
        for name, ids in sample._asdict().items():
            known = (ids >= 0) & (ids < config.vocab_size)
            if name == "labels":
                known |= ids == IGNORED
            if not known.all():
                raise error(
                    ValueError,
                    f"samples[{number}] has {int(ids[np.argmin(known)])} among its {name}",
                    f"the model knows the tokens 0 to {config.vocab_size - 1}",
                    "write ids with the tokenizer of this very model",
                )


class Trainable(Protocol):
    """A model some arrays of which are learnt.

    Attributes
    ----------
    arrays : dict of float32 arrays
        What is learnt, by name, on the model's device. A trainer puts views of one array in their
        place, and writes to them.
    """

    arrays: dict[str, Array]

    def require(self, samples: Sequence[Sample], /) -> None:
        """Raise ValueError for samples that the model cannot take, before the first step."""
        ...

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

    def identity(self) -> dict[str, Any]:
        """Return what losses depend on beside ``arrays``, as JSON: options, and frozen weights.

        A training is resumed where it is the same.
        """
        ...

"""The loss of samples that nothing is learnt from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupyattn.models.loss import mean_loss
from cupyattn.models.training.batch import IGNORED, Batch, Sample, moved
from cupyattn.models.training.packing import Packing
from cupyattn.models.training.sample_attention import SampleAttention
from cupyattn.models.training.trainable import require_samples
from cupyattn.models.transformer import Model
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error


def batch_loss(model: Model, batch: Batch) -> Array:
    """Return the mean loss of a batch's labels, by the forward alone; the batch is on its device.

    Examples
    --------
    >>> from cupyattn import models
    >>> from cupyattn.models.training.batch import packed
    >>> tiny = models.PRESETS["gpt2"]._replace(
    ...     num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8,
    ...     intermediate_size=32, vocab_size=50,
    ... )
    >>> model = models.random(tiny, dtype="float32", xp=np)
    >>> model.weights.embedding[:] = 0
    >>> float(np.exp(batch_loss(model, packed([Sample.of([3, 1, 4], [True] * 3)])))).__round__(3)
    50.0
    """
    attend = SampleAttention(model, batch)
    hidden = model.hidden(batch.ids, batch.positions, attend)
    return mean_loss(model.weights.head, hidden, batch.labels, model.xp)


def loss_of(model: Model, samples: Sequence[Sample], *, batch_tokens: int) -> float:
    """Return the mean loss of all labels of the samples, in batches of so many tokens."""
    require_samples(model.config, samples)
    packing = Packing(samples, batch_tokens=batch_tokens)
    total = labels = 0.0
    for _ in packing.epoch(0):
        batch = next(packing)
        count = int(np.count_nonzero(batch.labels != IGNORED))
        if count:
            total += count * float(batch_loss(model, moved(batch, model.xp)))
        labels += count
    if not labels:
        raise error(
            ValueError,
            "samples without labels",
            "a loss is of one token or more that is to be predicted",
            "pass samples of two tokens or more (Sample.num_labels)",
        )
    return total / labels

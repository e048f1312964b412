"""Models in float64, the smallest model, packed batches, gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

import cupyattn
from cupyattn import models
from cupyattn.models import Config, Model
from cupyattn.models.training.batches import IGNORED, Batch, Packing, Sample
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.optimizer import LossScale, Schedule
from cupyattn.models.training.trainable import batch_loss
from cupyattn.models.training.trainer import Trainer
from cupyattn.models.weights import empty, named_arrays

LENGTHS = (5, 1, 8)


def model_of(config: Config, dtype: str = "float64", seed: int = 1) -> Model:
    """A random model."""
    return converted(models.random(config, dtype="float32", xp=np, seed=seed), dtype)


def converted(model: Model, dtype: str = "float64") -> Model:
    """Return the model in another dtype: none is loaded in float64."""
    weights = empty(model.config, dtype, np)
    pairs = zip(named_arrays(weights), named_arrays(model.weights), strict=True)
    for (_, array), (_, found) in pairs:
        array[...] = found
    return Model(model.config, weights, dtype, np)


def batch_of(config: Config, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> Batch:
    """Samples of random tokens, of which some have no label."""
    generator = np.random.default_rng(seed)
    total = sum(lengths)
    ids, labels = generator.integers(0, config.vocab_size, (2, total), np.int32)
    labels[generator.random(total) < 0.2] = IGNORED
    labels[0] = ids[0]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    return Batch(ids, labels, positions, bounds, max(lengths))


def samples_of(batch: Batch) -> list[Batch]:
    """Each sample of a batch as a batch."""
    bounds = batch.cu_seqlens.tolist()
    return [
        Batch(
            *(array[start:stop] for array in batch[:3]),
            np.array([0, stop - start], np.int32),
            stop - start,
        )
        for start, stop in pairwise(bounds)
    ]


def adapters_of(model: Model, **options: Any) -> LoraAdapters:
    """Adapters that add something."""
    adapters = LoraAdapters(model, **{"rank": 3, "alpha": 4, **options})
    generator = np.random.default_rng(9)
    for array in adapters.arrays.values():
        array[...] = model.xp.asarray(0.3 * generator.standard_normal(array.shape))
    adapters.updated()
    return adapters


def num_labels(batch: Batch) -> int:
    return int(np.count_nonzero(batch.labels != IGNORED))


def gradients_of(
    trained: Any, batch: Batch, *, loss_scale: Any = 1.0, seed: int = 3, **options: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and all gradients, in new arrays that held something else."""
    into = {name: np.full_like(array, np.nan) for name, array in trained.arrays.items()}
    into = options.pop("into", into)
    given = {"num_labels": num_labels(batch), "accumulate": False, **options}
    loss = trained.gradients(batch, into, loss_scale=loss_scale, seed=seed, **given)
    return float(loss), into


def packed_loss(model: Model, batch: Batch) -> float:
    """The loss of a batch by the forward alone."""
    return float(batch_loss(model, batch))


def require_gradients(
    loss: Callable[[], float],
    arrays: dict[str, np.ndarray],
    gradients: dict[str, np.ndarray],
    updated: Callable[[], None],
) -> None:
    """Require each array's gradient along a random direction to be the loss's central difference.

    Errors: about step**2 of the step, and 1e-16 / step of the two losses.
    """
    generator, step = np.random.default_rng(7), 1e-5
    for name, array in arrays.items():
        direction = generator.standard_normal(array.shape)
        direction /= np.linalg.norm(direction)
        kept, sides = array.copy(), []
        for sign in (1, -1):
            array[...] = kept + sign * step * direction
            updated()
            sides.append(loss())
        array[...] = kept
        updated()
        found = float((gradients[name] * direction).sum())
        expected = (sides[0] - sides[1]) / (2 * step)
        assert abs(found - expected) <= 1e-7, f"{name}: {found}, by differences {expected}"


TOKENS, STEPS = 7, 14


class Bigram:
    """Logits of the next token are ``table[token] + bias``, with dropout if there is any.

    `half` has the gradients of the logits pass through float16, where a large loss scale overflows.
    """

    def __init__(
        self, vocabulary: int, *, dropout: float = 0.0, half: bool = False, put: Any = np.asarray
    ) -> None:
        rng = np.random.default_rng(0)
        table = 0.1 * rng.standard_normal((vocabulary, vocabulary), dtype=np.float32)
        self.arrays = {"bias": put(np.zeros(vocabulary, np.float32)), "table": put(table)}
        self.dropout = dropout
        self.half = half
        self.updates = 0

    def require(self, samples: Sequence[Sample], /) -> None:
        """Its tests make samples of its own tokens."""

    def gradients(
        self, batch: Batch, into: dict[str, Any], /, *, num_labels: int, loss_scale: float,
        seed: int, accumulate: bool,
    ) -> Any:  # fmt: skip
        logits = cupyattn.embedding(self.arrays["table"], batch.ids) + self.arrays["bias"]
        logits = cupyattn.dropout(logits, self.dropout, seed)
        loss, lse = cupyattn.cross_entropy(
            logits, batch.labels, reduction="sum", return_lse=True
        )  # fmt: skip
        dloss = (0 * loss + np.float32(loss_scale / num_labels)).reshape(loss.shape)
        dlogits = cupyattn.cross_entropy_backward(
            dloss.astype(np.float32), logits, batch.labels, lse, reduction="sum"
        )
        if self.half:
            with np.errstate(over="ignore"):
                dlogits = dlogits.astype(np.float16).astype(np.float32)
        dlogits = cupyattn.dropout_backward(dlogits, self.dropout, seed).dx
        dtable = into["table"] if accumulate else None
        found = cupyattn.embedding_backward(
            dlogits, self.arrays["table"], batch.ids, grads=dtable, accumulate=accumulate
        )
        if not accumulate:
            into["table"][...] = found
            into["bias"][...] = 0
        with np.errstate(invalid="ignore"):
            into["bias"][...] += dlogits.sum(axis=0)
        return loss / np.float32(num_labels)

    def updated(self) -> None:
        self.updates += 1

    def identity(self) -> dict[str, Any]:
        return {"dropout": self.dropout}


def counting(tokens: int, *, samples: int) -> list[Sample]:
    """Return texts in which each token is followed by the next number."""
    rng = np.random.default_rng(0)
    made = []
    for length in rng.integers(2, 12, samples).tolist():
        first = int(rng.integers(tokens))
        ids = [(first + i) % tokens for i in range(length)]
        made.append(Sample.of(ids, [True] * length))
    return made


def trained(samples=30, *, vocabulary=TOKENS, seed=0, lr=0.1, loss_scale=None, **options):
    """Everything that has a state: dropout, a loss scale that overflows and grows, two batches."""
    packing = Packing(counting(TOKENS, samples=samples), batch_tokens=24)
    return Trainer(
        Bigram(vocabulary, dropout=0.2, half=True),
        packing,
        schedule=Schedule("cosine", lr, STEPS, warmup=2),
        accumulate=2,
        loss_scale=loss_scale or LossScale(2.0**22, good_steps=2),
        seed=seed,
        **options,
    )

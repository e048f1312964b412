"""Which samples share a batch: short ones together, in another order each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.training.batch import Batch, Sample, packed
from cupyattn.models.training.counts import count_of
from cupyattn.runtime.errors import error

_WINDOW = 1024
"""Samples that are packed with one another: enough to fill batches, few enough to mix."""
DIGEST = "sha256:"
"""The beginning of a digest: errors tell that it differs, and not from what."""


def packs(lengths: Sequence[int], capacity: int, generator: np.random.Generator) -> list[list[int]]:
    """Put samples into batches of at most `capacity` tokens.

    They are drawn in a random order. Of each window of a thousand the long ones go first, each to
    the first batch with room for it (first fit decreasing), and then batches are drawn in a random
    order again. Long is meant give or take a factor of two, so that the same samples do not meet in
    every epoch.

    Examples
    --------
    >>> found = packs([5, 4, 3, 3, 2, 1], 9, np.random.default_rng(0))
    >>> sorted(sorted(pack) for pack in found)
    [[0, 1], [2, 3, 4, 5]]
    """
    order = generator.permutation(len(lengths)).tolist()
    made: list[list[int]] = []
    for start in range(0, len(order), _WINDOW):
        window = order[start : start + _WINDOW]
        share = generator.uniform(0.5, 1.0, len(window)).tolist()
        size = {sample: lengths[sample] * share[i] for i, sample in enumerate(window)}
        made += _first_fit(sorted(window, key=size.__getitem__, reverse=True), lengths, capacity)
    return [made[i] for i in generator.permutation(len(made)).tolist()]


def _first_fit(samples: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    made: list[list[int]] = []
    room: list[int] = []
    for sample in samples:
        length = lengths[sample]
        for i, left in enumerate(room):
            if length <= left:
                made[i].append(sample)
                room[i] -= length
                break
        else:
            made.append([sample])
            room.append(capacity - length)
    return made


def digest(samples: Sequence[Sample]) -> str:
    """Return what tells samples and their order from any others."""
    found = sha256()
    for sample in samples:
        for array in (np.array(len(sample.ids), np.int64), sample.ids, sample.labels):
            found.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return DIGEST + found.hexdigest()


class Position(NamedTuple):
    """How far a training is in its data."""

    epoch: int = 0
    batch: int = 0
    """The number of the next batch in the epoch."""


class Packing:
    """Batches of samples, epoch after epoch without end: the same for the same seed.

    Parameters
    ----------
    samples : sequence of Sample
        At least one.
    batch_tokens : int
        The most tokens of a batch.
    seed : int
        Of the order.

    Raises
    ------
    ValueError
        If a sample is longer than a batch, or there is none.
    """

    def __init__(self, samples: Sequence[Sample], *, batch_tokens: int, seed: int = 0) -> None:
        if not samples:
            raise error(ValueError, "no samples", "a training needs one or more", "pass some")
        self.seed = count_of("seed", seed, least=0)
        self.batch_tokens = count_of("batch_tokens", batch_tokens, least=1)
        longest = max(len(sample.ids) for sample in samples)
        if longest > batch_tokens:
            raise error(
                ValueError,
                f"a sample of {longest} tokens in batches of {batch_tokens}",
                "a sample is in one batch as a whole",
                "raise --batch-tokens, or lower --max-length",
            )
        self.samples = samples
        self.position = Position()
        self._epoch: tuple[int, list[list[int]]] | None = None

    def epoch(self, number: int) -> list[list[int]]:
        """Return which samples each batch of an epoch has."""
        if self._epoch is None or self._epoch[0] != number:
            generator = np.random.default_rng([self.seed, number])
            lengths = [len(sample.ids) for sample in self.samples]
            self._epoch = number, packs(lengths, self.batch_tokens, generator)
        return self._epoch[1]

    def batches(self, epochs: int) -> int:
        """Return how many batches so many epochs have."""
        return sum(len(self.epoch(number)) for number in range(epochs))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield next(self)

    def __next__(self) -> Batch:
        batch, self.position = self.at(self.position)
        return batch

    def at(self, position: Position) -> tuple[Batch, Position]:
        """Return the batch of a position, and the position of the next one."""
        epoch, at = position
        here = self.epoch(epoch)
        last = at + 1 == len(here)
        following = Position(epoch + 1, 0) if last else Position(epoch, at + 1)
        return packed([self.samples[i] for i in here[at]]), following

    def identity(self) -> dict[str, Any]:
        """Return what has to be the same where a training goes on."""
        return {
            "the samples": digest(self.samples),
            "Packing.batch_tokens": self.batch_tokens,
            "Packing.seed": self.seed,
        }

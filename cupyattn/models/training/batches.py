"""Batches of packed samples, in another order each epoch, and what each token should predict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from types import ModuleType
from typing import NamedTuple

import numpy as np

from cupyattn.models.generation.options import as_count
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error

_LARGEST = np.iinfo(np.int32).max
IGNORED = -100
"""The label that `cupyattn.cross_entropy` ignores."""


class Batch(NamedTuple):
    """Samples packed one after the other, as for `cupyattn.attention_varlen`.

    Attributes
    ----------
    ids, labels : int32 array (total,)
        Tokens, and the token that each should predict; -100 has no loss.
    positions : int32 array (total,)
        The position of each token; every sample begins at 0.
    cu_seqlens : int32 array (samples + 1,)
        Where each sample begins, and the end of the last.
    max_seqlen : int
        The longest sample.
    """

    ids: Array
    labels: Array
    positions: Array
    cu_seqlens: Array
    max_seqlen: int


class Sample(NamedTuple):
    """One text: int32 arrays (tokens,) of ids and of the labels that each id should predict."""

    ids: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, ids: Sequence[int], learnt: Sequence[bool]) -> Sample:
        """Make a sample from tokens, and a flag for each whether it is to be predicted.

        Raises
        ------
        TypeError, ValueError
            For ids that are not a list of integers of 0 or more, or another number of flags.

        Examples
        --------
        >>> Sample.of([5, 6, 7], [False, False, True]).labels.tolist()
        [-100, 7, -100]
        """
        given, flags = np.asarray(ids), np.asarray(learnt, bool)
        if given.size and given.dtype.kind not in "iu":
            raise _no_sample(TypeError, f"ids of {given.dtype}")
        if given.ndim != 1 or flags.shape != given.shape:
            raise _no_sample(
                ValueError, f"ids of shape {given.shape} and learnt of shape {flags.shape}"
            )
        if given.size and not 0 <= given.min() <= given.max() <= _LARGEST:
            raise _no_sample(ValueError, f"ids from {given.min()} to {given.max()}")
        tokens = given.astype(np.int32)
        wanted = np.where(flags, tokens, np.int32(IGNORED))
        return cls(tokens, np.append(wanted[1:], np.int32(IGNORED)).astype(np.int32))

    @property
    def num_labels(self) -> int:
        """How many tokens are to be predicted."""
        return int(np.count_nonzero(self.labels != IGNORED))


def _no_sample(kind: type[Exception], passed: str) -> Exception:
    return error(
        kind,
        passed,
        f"a sample is a list of token ids, integers of 0 to {_LARGEST}, and a flag for each",
        "pass for example Sample.of(tokenizer.encode(text), [True] * len(ids))",
    )


def packed(samples: Sequence[Sample]) -> Batch:
    """Put samples one after the other, in NumPy arrays.

    Examples
    --------
    >>> batch = packed([Sample.of([1, 2], [True] * 2), Sample.of([3, 4, 5], [True] * 3)])
    >>> batch.cu_seqlens.tolist(), batch.positions.tolist(), batch.max_seqlen
    ([0, 2, 5], [0, 1, 0, 1, 2], 3)
    """
    lengths = [len(sample.ids) for sample in samples]
    return Batch(
        np.concatenate([sample.ids for sample in samples]),
        np.concatenate([sample.labels for sample in samples]),
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        np.cumsum([0, *lengths], dtype=np.int32),
        max(lengths),
    )


def moved(batch: Batch, xp: ModuleType) -> Batch:
    """Return the batch in arrays of another library, on the current device."""
    ids, labels, positions, cu_seqlens = (xp.asarray(array) for array in batch[:4])
    return Batch(ids, labels, positions, cu_seqlens, batch.max_seqlen)


_WINDOW = 1024
"""Samples that are packed at a time: enough to fill batches, few enough to mix."""
DIGEST = "sha256:"
"""The beginning of a digest: errors report that it differs, but no values."""


def packs(lengths: Sequence[int], capacity: int, generator: np.random.Generator) -> list[list[int]]:
    """Put samples into batches of at most `capacity` tokens; return the samples of each batch.

    Samples are drawn in a random order. The long ones of each window of a thousand go first, each
    into the first batch with room (first fit decreasing). Then batches are drawn in a random order.
    Lengths are compared after a random factor of up to two, so that epochs combine different
    samples.

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
    """Return a digest of samples and their order."""
    found = sha256()
    for sample in samples:
        for array in (np.array(len(sample.ids), np.int64), sample.ids, sample.labels):
            found.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return DIGEST + found.hexdigest()


class Position(NamedTuple):
    """The position of a training in its data."""

    epoch: int = 0
    batch: int = 0
    """The number of the next batch in the epoch."""


class Packing:
    """Batches of samples, epoch after epoch without end, which depend only on the seed.

    Parameters
    ----------
    samples : sequence of Sample
        At least one.
    batch_tokens : int
        The most tokens of a batch.
    seed : int
        For the order.

    Raises
    ------
    ValueError
        If a sample is longer than a batch, or there is none.
    """

    def __init__(self, samples: Sequence[Sample], *, batch_tokens: int, seed: int = 0) -> None:
        if not samples:
            raise error(
                ValueError, "got no samples", "a training needs at least one", "pass some samples"
            )
        self.seed = as_count("seed", seed, 0)
        self.batch_tokens = as_count("batch_tokens", batch_tokens, 1)
        longest = max(len(sample.ids) for sample in samples)
        if longest > batch_tokens:
            raise error(
                ValueError,
                f"a sample of {longest} tokens in batches of {batch_tokens}",
                "a sample must fit into one batch",
                "raise batch_tokens (--batch-tokens), or lower --max-length",
            )
        self.samples = samples
        self.position = Position()
        self._epoch: tuple[int, list[list[int]]] | None = None

    def epoch(self, number: int) -> list[list[int]]:
        """Return the samples of each batch of an epoch."""
        if self._epoch is None or self._epoch[0] != number:
            generator = np.random.default_rng([self.seed, number])
            lengths = [len(sample.ids) for sample in self.samples]
            self._epoch = number, packs(lengths, self.batch_tokens, generator)
        return self._epoch[1]

    def batches(self, epochs: int) -> int:
        """Return the number of batches in so many epochs."""
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

    def identity(self) -> Json:
        """Return the values that must be the same when a training is resumed."""
        return {
            "the samples": digest(self.samples),
            "Packing.batch_tokens": self.batch_tokens,
            "Packing.seed": self.seed,
        }

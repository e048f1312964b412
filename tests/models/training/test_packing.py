"""Samples into batches: every one once an epoch, in an order that the seed decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.bigram import counting

from cupyattn.models.training.batch import IGNORED, Sample, packed
from cupyattn.models.training.packing import Packing, Position, digest, packs


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    room=st.integers(40, 90),
    seed=st.integers(0, 5),
)
def test_each_sample_once_and_batches_full(lengths, room, seed):
    found = packs(lengths, room, np.random.default_rng(seed))
    assert sorted(i for pack in found for i in pack) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[i] for i in pack) for pack in found)
    assert sizes[-1] <= room
    # First fit: the emptiest two would have shared a batch.
    assert len(sizes) < 2 or sizes[0] + sizes[1] > room
    assert found == packs(lengths, room, np.random.default_rng(seed))


def test_windows_keep_long_samples_apart():
    """Of thousands not all of the longest come together."""
    lengths = np.random.default_rng(0).integers(1, 100, 3000).tolist()
    found = packs(lengths, 200, np.random.default_rng(1))
    longest = [max(lengths[i] for i in pack) for pack in found]
    early, late = longest[: len(found) // 2], longest[len(found) // 2 :]
    assert abs(np.mean(early) - np.mean(late)) < 5
    assert sum(lengths) / (200 * len(found)) > 0.97


def test_batches_are_the_samples():
    samples = [Sample.of([4, 5, 6], [False, True, True]), Sample.of([7, 8], [True, False])]
    batch = packed(samples)
    assert_array_equal(batch.ids, [4, 5, 6, 7, 8])
    assert_array_equal(batch.labels, [5, 6, IGNORED, IGNORED, IGNORED])
    assert_array_equal(batch.positions, [0, 1, 2, 0, 1])
    assert_array_equal(batch.cu_seqlens, [0, 3, 5])
    assert batch.max_seqlen == 3
    assert {array.dtype for array in batch[:4]} == {np.dtype(np.int32)}
    assert [sample.num_labels for sample in samples] == [2, 0]


def test_epochs_differ_and_repeat():
    packing, again = (Packing(counting(9, samples=40), batch_tokens=30, seed=4) for _ in "ab")
    orders = [packing.epoch(number) for number in range(3)]
    assert orders[0] != orders[1] != orders[2]
    meeting = [{(i, j) for pack in order for i in pack for j in pack if i < j} for order in orders]
    assert len(meeting[0] & meeting[1]) < len(meeting[0]) / 2
    assert [again.epoch(number) for number in range(3)] == orders
    assert packing.batches(3) == sum(map(len, orders))
    assert Packing(packing.samples, batch_tokens=30, seed=5).epoch(0) != orders[0]


def test_it_goes_on_from_a_position():
    packing = Packing(counting(9, samples=20), batch_tokens=30)
    batches = [next(packing) for _ in range(2 * packing.batches(1))]
    for at in (0, 3, packing.batches(1) - 1, packing.batches(1)):
        again = Packing(packing.samples, batch_tokens=30)
        for _ in range(at):
            next(again)
        other = Packing(packing.samples, batch_tokens=30)
        other.position = Position(*again.position)
        assert_array_equal(next(other).ids, batches[at].ids)


def test_a_digest_knows_other_samples():
    samples = counting(9, samples=5)
    changed = [*samples[:-1], Sample(samples[-1].ids, samples[-1].labels * 0)]
    digests = {digest(given) for given in (samples, changed)}
    assert len(digests) == 2
    assert digest(counting(9, samples=5)) in digests


def test_bad_packings():
    with pytest.raises(ValueError, match="no samples"):
        Packing([], batch_tokens=9)
    with pytest.raises(ValueError, match=r"a sample of 3 tokens in batches of 2; .*--batch-tokens"):
        Packing([Sample.of([1, 2, 3], [True] * 3)], batch_tokens=2)

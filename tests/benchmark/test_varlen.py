"""``python -m cupyattn.benchmark varlen``: what it calls, counts and prints."""

from __future__ import annotations

import numpy as np

from cupyattn.benchmark import varlen
from cupyattn.benchmark.cases import Harness

CASE = varlen.PackedAttentionProblem(40, 10, 4, 2, 8, True, "float32")


def test_the_ways_have_the_same_tokens():
    assert CASE.lengths("equal").tolist() == [10] * 4
    ragged = CASE.lengths("ragged")
    assert ragged.sum() == 40
    assert len(set(ragged.tolist())) > 1
    assert ragged.min() >= 0


def test_equal_lengths_are_the_dense_call():
    source = Harness(np).arrays(2)
    arrays = [source.normal(*shape, dtype=CASE.dtype) for shape in CASE.shapes]

    def call(layout, direction):
        return varlen.call_of(CASE, layout, direction, arrays, np)()

    out, lse = call("dense", "forward")
    packed, packed_lse = call("equal", "forward")
    assert np.array_equal(packed, out.reshape(packed.shape))
    assert np.array_equal(packed_lse, np.swapaxes(lse, 0, 1).reshape(packed_lse.shape))
    dense, equal = call("dense", "backward"), call("equal", "backward")
    for name in ("dq", "dk", "dv"):
        found = getattr(equal, name)
        assert np.array_equal(found, getattr(dense, name).reshape(found.shape))


def test_what_is_counted():
    assert CASE.flops("dense") == CASE.flops("equal") == 4 * 4 * 8 * 4 * 100 / 2
    assert CASE.flops("ragged") == 2 * 4 * 8 * (CASE.lengths("ragged") ** 2).sum()

"""Arrays cut for ranks and put together: what is taken, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyattn.distributed import positions, ring_attention, run, shard, unshard
from cupyattn.distributed.placement import PLACEMENTS

X = np.arange(24).reshape(1, 8, 3)


def halves(**how: Any) -> list[np.ndarray]:
    return [shard(X, rank, 2, **how) for rank in range(2)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", [list, tuple, iter, np.stack])
def test_shards_come_in_anything_that_has_them_in_order(kind, placement):
    parts = halves(placement=placement)
    np.testing.assert_array_equal(unshard(kind(parts), placement=placement), X)


@pytest.mark.parametrize("axis", [1, -2, np.int64(1)])
def test_an_axis_from_either_end(axis):
    np.testing.assert_array_equal(unshard(halves(axis=axis), axis=axis), X)


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_ranks_are_integers_of_any_kind(kind):
    np.testing.assert_array_equal(shard(X, kind(1), kind(2)), halves()[1])
    many = positions(kind(99), kind(200), 400)  # twice as many pieces are no uint8
    np.testing.assert_array_equal(many, positions(99, 200, 400))


@pytest.mark.parametrize("bounds", [[0], [0, 0]])
def test_no_tokens_at_all(bounds):
    nothing = np.zeros((0, 2, 8))
    part = shard(nothing, 1, 2, cu_seqlens=bounds)
    assert part.shape == (0, 2, 8)
    assert unshard([part] * 2, cu_seqlens=bounds).shape == (0, 2, 8)
    assert positions(0, 2, cu_seqlens=bounds).shape == (0,)

    def of_rank(group: Any) -> Any:
        return ring_attention(part, part, part, group=group, cu_seqlens=bounds)

    assert [out.shape for out in run(of_rank, 2)] == [(0, 2, 8)] * 2


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: shard(X[0, :, 0], 0, 2), ValueError, r"axis = 1 of an array \(8,\); .*axis=0"),
        (lambda: shard(X, 0, 2, axis=9), ValueError, r"axis = 9 of an array \(1, 8, 3\)"),
        (lambda: shard(X, 0, 2, axis=-4), ValueError, "axis = -4"),
        (lambda: shard(X, 0, 2, axis="x"), TypeError, "axis = 'x'"),
        (lambda: shard(np.array(3), 0, 2, axis=0), ValueError, r"axis = 0 of an array \(\)"),
        (lambda: shard([1, 2, 3, 4], 0, 2, axis=0), TypeError, r"x is a builtins\.list"),
        (lambda: shard(None, 0, 2), TypeError, "x is None; it is an array"),
        (lambda: shard(X, 0.0, 2), ValueError, r"rank 0\.0 of 2"),
        (lambda: shard(X, 0, 0), ValueError, "rank 0 of 0; there is 1 rank or more"),
        (lambda: unshard(3), TypeError, "shards = 3; it is a sequence of arrays"),
        (lambda: unshard([]), ValueError, r"shards that are \[\]; there is one for each rank"),
        (lambda: unshard([[1, 2], [3, 4]], axis=0), TypeError, r"shards\[0\] is a builtins\.list"),
        (lambda: unshard([X, X[:, :4]]), ValueError, r"int64 \(1, 8, 3\)', 'int64 \(1, 4, 3\)'"),
        (lambda: unshard([X, X.astype(np.int32)]), ValueError, "one shape and dtype"),
        (lambda: unshard([X, None]), ValueError, "there is one for each rank"),
        (lambda: unshard([X, X], axis=3), ValueError, "axis = 3"),
        (lambda: positions(0, 2, -8), ValueError, "length = -8; it is an integer, 0 or more"),
        (lambda: positions(0, 2, 8.0), TypeError, r"length = 8\.0"),
        (lambda: positions(0, 2), TypeError, "neither length nor cu_seqlens"),
    ],
)
def test_what_is_refused(call, kind, says):
    with pytest.raises(kind, match=says):
        call()

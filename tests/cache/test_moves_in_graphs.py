"""append_kv, copy_blocks and gather in a CUDA graph: nothing waits, nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.paged import AppendProblem

import cupyattn

pytestmark = pytest.mark.gpu

PROBLEM = AppendProblem((9,), H=5, G=3, D=64, dtype="float16", bits=8, half=32)


def replayed(call: Callable[[], None]) -> Callable[[], None]:
    """Capture a call that was made before; return what replays it and waits."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()

    def replay() -> None:
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()

    return replay


def on_gpu(memory: dict[str, np.ndarray]) -> dict[str, Any]:
    import cupy

    return {name: cupy.asarray(array) for name, array in memory.items()}


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_append_kv_is_replayed_with_new_contents(bits):
    problem = AppendProblem(**{**vars(PROBLEM), "bits": bits})
    placed = on_gpu(problem.memory())
    problem.call(placed)
    replay = replayed(lambda: problem.call(placed))
    for seed in (1, 2):
        given = AppendProblem(**{**vars(problem), "seed": seed}).memory()
        for name, array in placed.items():
            array.set(given[name])
        replay()
        assert problem.ratio({name: array.get() for name, array in placed.items()}, given) <= 1


@pytest.mark.parametrize("as_array", [True, False])
def test_copy_blocks_is_replayed(as_array):
    """The pairs of a sequence are those of the capture, an array's those of the replay."""
    import cupy

    rng = np.random.default_rng(0)
    caches = cupy.zeros((2, 6, 4, 2, 8), np.float16)
    copies = cupy.asarray(np.array([(0, 1), (1, 2)], np.int32)) if as_array else [(0, 1), (1, 2)]
    cupyattn.copy_blocks(caches[0], caches[1], copies)
    replay = replayed(lambda: cupyattn.copy_blocks(caches[0], caches[1], copies))
    for pairs in ([(0, 1), (1, 2)], [(3, 4), (4, 0)] if as_array else [(0, 1), (1, 2)]):
        expected = rng.standard_normal(caches.shape).astype(np.float16)
        caches.set(expected)
        if as_array:
            copies.set(np.array(pairs, np.int32))
        for src, dst in pairs:
            expected[:, dst] = expected[:, src]
        replay()
        assert_array_equal(caches.get(), expected)


def test_gather_is_replayed_into_given_results():
    import cupy

    rng = np.random.default_rng(0)
    caches = cupy.asarray(rng.standard_normal((2, 6, 4, 2, 8)).astype(np.float16))
    table = cupy.zeros((2, 3), np.int32)
    lengths = cupy.zeros(2, np.int32)
    out = tuple(cupy.empty((2, 12, 2, 8), np.float16) for _ in range(2))

    def call() -> None:
        cupyattn.gather(caches[0], caches[1], table, lengths, out=out)

    call()
    replay = replayed(call)
    for ids, counts in (([[1, 2, 3], [4, 5, -1]], [12, 5]), ([[5, -1, -1], [0, 1, 2]], [3, 9])):
        table.set(np.array(ids, np.int32))
        lengths.set(np.array(counts, np.int32))
        replay()
        expected = cupyattn.gather(*caches.get(), table.get(), lengths.get())
        for found, exact in zip(out, expected, strict=True):
            assert_array_equal(found.get(), exact)


def test_nothing_is_allocated():
    import cupy

    placed = on_gpu(PROBLEM.memory())
    PROBLEM.call(placed)
    caches = cupy.zeros((2, 6, 4, 2, 8), np.float16)
    cupyattn.copy_blocks(caches[0], caches[1], [(0, 1)])
    sizes: list[int] = []

    class Count(cupy.cuda.MemoryHook):
        name = "count"

        def malloc_preprocess(self, **kwargs: Any) -> None:
            sizes.append(kwargs["size"])

    with Count():
        PROBLEM.call(placed)
        cupyattn.copy_blocks(caches[0], caches[1], [(1, 2), (2, 3)])
    assert sizes == []

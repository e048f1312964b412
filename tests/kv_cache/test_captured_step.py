"""A decode step in a CUDA graph, whose tables are updated in place between its replays."""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn import PagedKVCache, rope_tables

LAYERS, HEADS, KV_HEADS, HEAD_DIM, MAX_BATCH = 2, 8, 2, 64, 5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "int4"])
def test_a_captured_step_runs_on_updated_tables(dtype):
    """Sequences grow, fork and end between replays; each replay does what the call does then."""
    import cupy

    rng = np.random.default_rng(0)
    token_dtype = "float32" if dtype == "int4" else dtype
    cache = PagedKVCache(LAYERS, 40, 16, KV_HEADS, HEAD_DIM, dtype=dtype, xp=cupy)
    rotary = tuple(map(cupy.asarray, rope_tables(128, HEAD_DIM)))

    def drawn(*shape):
        return cupy.asarray(rng.standard_normal(shape).astype(token_dtype))

    sequences = [cache.allocator.add([0] * length) for length in (40, 3, 16)]
    prompts = cache.step_tables(sequences, [40, 3, 16])
    for layer in range(LAYERS):
        k, v = drawn(2, 59, KV_HEADS, HEAD_DIM)
        cache.append(layer, k, v, prompts, rotary=rotary)
    for sequence in sequences:
        sequence.append([1])
    tables = cache.step_tables(sequences, max_batch=MAX_BATCH, max_blocks=8, max_tokens=MAX_BATCH)
    source, q = (drawn(MAX_BATCH, 1, HEADS, HEAD_DIM) for _ in range(2))
    k, v = (drawn(MAX_BATCH, 1, KV_HEADS, HEAD_DIM) for _ in range(2))
    out = cupy.empty((LAYERS, *q.shape), q.dtype)
    workspace = cupy.empty(2**24, np.uint8)

    def step():
        for layer in range(LAYERS):
            q[...] = source
            cache.append(layer, k, v, tables, q=q, rotary=rotary)
            cache.attend(layer, q, tables, out=out[layer], workspace=workspace)

    pools = [
        each for each in (cache.k, cache.v, cache.k_scales, cache.v_scales) if each is not None
    ]

    def contents():
        return [cupy.asnumpy(each) for each in (out, *pools)]

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        step()  # compiled and loaded
        stream.synchronize()
        stream.begin_capture()
        try:
            step()
        finally:
            graph = stream.end_capture()
        found = []
        for number in range(4):
            before = [pool.copy() for pool in pools]
            graph.launch(stream)
            replayed = contents()
            for pool, contents_before in zip(pools, before, strict=True):
                pool[...] = contents_before
            out.fill(0)
            step()
            for replay, call in zip(replayed, contents(), strict=True):
                np.testing.assert_array_equal(replay, call)
            found.append(replayed[0])
            assert not replayed[0][:, len(sequences) :].any(), "rows without a sequence give zeros"
            if number == 0:
                sequences.append(sequences[0].fork())
            if number == 2:
                sequences.pop(1).free()
            for sequence in sequences:
                cache.copy(sequence.append([number]))
            tables.update(sequences)
            for array in (source, k, v):
                array[...] = drawn(*array.shape)
        assert len({each.tobytes() for each in found}) == len(found)
    stream.synchronize()

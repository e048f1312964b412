"""Parts of attention drop what the whole drops: where a call's scores stand in it."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import KERNELS
from support.search import deep

from cupyattn import (
    DropoutSeed,
    attention,
    attention_backward,
    attention_varlen,
    reference,
)

PLACE = DropoutSeed(seed=2**40 + 3, batch=2, query=37, key=96)
PART = {"dropout_p": 0.4, "seed": PLACE.seed, "dropout_start": PLACE[1:]}
"""As the reference says it."""


def arrays(dtype: str, dim: int = 24) -> list[np.ndarray]:
    """q, k, v and dout of two sequences, whose lengths end inside of tiles."""
    rng = np.random.default_rng(1)
    shapes = (2, 70, 2, dim), (2, 131, 1, dim), (2, 131, 1, dim), (2, 70, 2, dim)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def test_numpy_arrays_drop_what_the_whole_drops():
    """The mask of a part, cut out of that of the whole."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, 160, 2, 8)) for _ in range(3))
    options = {"dropout_p": 0.5, "return_lse": True}
    _, lse = attention(q, k, v, seed=4, **options)
    whole = attention_backward(v, q, k, v, v, lse, dropout_p=0.5, seed=4)
    parts = []
    for keys in (slice(0, 96), slice(96, 160)):
        seed = DropoutSeed(4, batch=1, query=50, key=keys.start)
        rows = slice(50, 160)
        part = attention_backward(
            v[1:, rows], q[1:, rows], k[1:, keys], v[1:, keys], v[1:, rows], lse[1:, :, rows],
            dropout_p=0.5, seed=seed,
        )  # fmt: skip
        parts.append(part.dq)
    np.testing.assert_allclose(sum(parts), whole.dq[1:, 50:], atol=1e-12)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_kernels_drop_what_the_seed_says(dtype):
    q, k, v, dout = arrays(dtype)
    options = {"dropout_p": 0.4, "seed": PLACE}
    exact, exact_lse = reference.attention(q, k, v, **PART)
    out = attention(*map(KERNELS.put, (q, k, v)), **options)
    bounds = reference.attention_bound(q, k, v, dtype=dtype, tile_k=16, **PART)
    assert reference.error_ratio(KERNELS.get(out), exact, bounds[0]) <= 1
    given = (dout, q, k, v, exact.astype(dtype), exact_lse.astype(np.float32))
    grads = attention_backward(*map(KERNELS.put, given), **options)
    expected = reference.attention_backward(*given, **PART)
    limits = reference.attention_backward_bound(*given, dtype=dtype, **PART)
    for name in ("dq", "dk", "dv"):
        found = KERNELS.get(getattr(grads, name))
        ratio = reference.error_ratio(found, getattr(expected, name), getattr(limits, name))
        assert ratio <= 1, name


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
def test_packed_sequences_count_from_the_first():
    q, k, v, _ = arrays("float16")
    bounds = [np.array([0, 70, 140], np.int32), np.array([0, 131, 262], np.int32)]
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    out = attention_varlen(*map(KERNELS.put, (*flat, *bounds)), 70, 131, dropout_p=0.4, seed=PLACE)
    exact, _ = reference.attention(q, k, v, **PART)
    limit, _ = reference.attention_bound(q, k, v, dtype="float16", tile_k=16, **PART)
    assert reference.error_ratio(KERNELS.get(out).reshape(exact.shape), exact, limit) <= 1


@pytest.mark.parametrize(
    ("seed", "says"),
    [
        (DropoutSeed(-1), "seed = -1"),
        (DropoutSeed(0, batch=-1), "batch of a DropoutSeed = -1"),
        (DropoutSeed(0, query=2**31), "query of a DropoutSeed = 2147483648"),
        (DropoutSeed(0, key=16), "key of a DropoutSeed = 16; .* a multiple of 32"),
    ],
)
def test_a_place_that_is_none_is_refused(seed, says):
    q, k, v, _ = arrays("float32")
    with pytest.raises(ValueError, match=says):
        attention(q, k, v, dropout_p=0.1, seed=seed)
    with pytest.raises(TypeError, match="query of a DropoutSeed"):
        attention(q, k, v, dropout_p=0.1, seed=DropoutSeed(0, query="x"))

"""Edges of options: float32's and float16's digits, default offsets, dropout of parts of a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.devices import KERNELS, everywhere
from support.search import deep

import cupyattn
from cupyattn import DropoutSeed, attention, attention_backward, attention_varlen, reference

pytestmark = pytest.mark.nvrtc

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 1, 70, 2, 16)).astype(np.float32)


def error_ratio(dtype: str, **options) -> float:
    """Return the largest error of out and lse over its bound.

    The other options are there without an effect, so that all calls have the same kernel.
    """
    neutral = {"alibi_slopes": np.zeros(2), "softcap": 10_000.0, "sinks": np.full(2, -np.inf)}
    options = {**{name: np.float32(value) for name, value in neutral.items()}, **options}
    arrays = [array.astype(dtype) for array in (Q, K, V)]
    exact = reference.attention(*arrays, **options)
    bounds = reference.attention_bound(*arrays, dtype=arrays[0].dtype, tile_k=16, **options)
    placed = {
        name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    with KERNELS.running():
        found = cupyattn.attention(*map(KERNELS.put, arrays), **placed, return_lse=True)
    return max(map(reference.error_ratio, map(KERNELS.get, found), exact, bounds))


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("sink", [2e38, 1e10, -3e38, -np.inf])
def test_sinks_of_any_size_that_is_allowed(dtype, sink):
    assert error_ratio(dtype, sinks=np.full(2, sink, np.float32)) <= 1


@pytest.mark.parametrize("sink", [2.1e38, 3e38, np.inf])
@pytest.mark.parametrize("name", ["reference", "emulator"])
def test_sinks_beyond_are_refused(sink, name):
    sinks = np.array([1, sink], np.float32)
    with cupyattn.backend(name), pytest.raises(ValueError, match=r"sinks has .*at most 2e\+38"):
        cupyattn.attention(Q, K, V, sinks=sinks)


@pytest.mark.gpu
def test_sinks_beyond_are_refused_on_a_gpu_that_checks_values():
    arrays = map(KERNELS.put, (Q, K, V))
    sinks = KERNELS.put(np.array([1, 3e38], np.float32))
    with cupyattn.backend(checks=True), pytest.raises(ValueError, match="sinks has values up to"):
        cupyattn.attention(*arrays, sinks=sinks)


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_the_largest_softcap_is_within_its_bound(dtype):
    assert error_ratio(dtype, softcap=10_000.0) <= 1


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("scale", [1e26, -1e26])
def test_the_largest_scale_of_the_largest_float16_gives_no_nan(dtype, scale):
    q, k, v = (np.full((1, 3, 1, 256), 65504.0, dtype) for _ in range(3))
    with KERNELS.running():
        out = cupyattn.attention(*map(KERNELS.put, (q, k, v)), softmax_scale=scale)
    assert np.isfinite(KERNELS.get(out)).all()


def test_larger_scales_are_refused():
    with pytest.raises(ValueError, match=r"softmax_scale = 1\.1e\+26; it is .* up to 1e\+26"):
        cupyattn.attention(Q, K, V, softmax_scale=1.1e26)


@pytest.mark.parametrize("softcap", [10_001, 1e30, np.inf])
def test_larger_softcaps_are_refused(softcap):
    with pytest.raises(ValueError, match=r"softcap = .* at most 10000"):
        cupyattn.attention(Q, K, V, softcap=softcap)


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize("q_offset", [2**20, 2**24, 2**24 + 1, -(2**24) - 3])
def test_alibi_far_from_the_keys_is_within_its_bound(dtype, q_offset):
    """Its slope small: the distances, not the size of the scores, are what could lose digits."""
    slopes = np.array([2.0**-20, 2.0**-24], np.float32)
    assert error_ratio(dtype, alibi_slopes=slopes, q_offset=q_offset) <= 1


# With 70 queries and keys, the nearest key of the last query is as far away as q_offset says, and
# so is that of the first query where q_offset is below 0; the furthest keys are 69 away, or as a
# window says.
AT_THE_LIMIT = [
    (0.5, {"q_offset": 2**21}),
    (0.5, {"q_offset": -(2**21)}),
    (0.5, {"q_offset": 2**21 - 30, "seqused_k": np.array([40])}),
    (0.5, {"q_offset": np.array([2**21])}),
    (-0.5, {"q_offset": 2**21 - 69}),
    (-15_196.0, {}),
    (-116_508.0, {"window_size": (9, 0)}),
    (1e30, {}),
]


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
@pytest.mark.parametrize(("slope", "options"), AT_THE_LIMIT)
def test_alibi_at_its_limit_is_within_its_bound(dtype, slope, options):
    assert error_ratio(dtype, alibi_slopes=np.full(2, slope, np.float32), **options) <= 1


@pytest.mark.parametrize("name", ["reference", "emulator"])
@pytest.mark.parametrize(("slope", "options"), AT_THE_LIMIT[:-1])
def test_alibi_beyond_its_limit_is_refused(slope, options, name):
    """A GPU's result would be off by as much as it is large: 0.14 at 8 times as far."""
    slopes = np.array([0, slope * (1 + 2**-10)], np.float32)
    for call in (
        lambda: cupyattn.attention(Q, K, V, alibi_slopes=slopes, **options),
        lambda: cupyattn.attention(Q, K, V, alibi_slopes=slopes[None], **options),
        lambda: cupyattn.attention_backward(
            Q, Q, K, V, Q, np.zeros((1, 2, 70), np.float32), alibi_slopes=slopes, **options
        ),
    ):
        with cupyattn.backend(name), pytest.raises(ValueError, match="at most 1,048,576: larger"):
            call()


def test_alibi_of_packed_and_paged_sequences_is_refused_too():
    slopes, message = np.full(2, -0.5, np.float32), "alibi_slopes times distances come to "
    packed, bounds = Q[0], np.array([0, 30, 70], np.int32)
    with pytest.raises(ValueError, match=message):
        cupyattn.attention_varlen(
            packed, packed, packed, bounds, bounds, 40, 40, alibi_slopes=slopes, q_offset=2**22
        )
    cache, table = np.zeros((1, 16, 2, 16), np.float32), np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match=message):
        cupyattn.paged_attention(
            Q[:, :1], cache, cache, table, np.array([16]), alibi_slopes=slopes * 2**18
        )


def test_alibi_of_float64_reaches_further():
    arrays, slopes = [x.astype(float) for x in (Q, K, V)], np.full(2, 0.5)
    near = cupyattn.attention(*arrays, alibi_slopes=slopes, q_offset=70)
    far = cupyattn.attention(*arrays, alibi_slopes=slopes, q_offset=2**24)
    np.testing.assert_allclose(far, near, atol=1e-7)
    with pytest.raises(ValueError, match="at most 562,949,953,421,312: larger scores"):
        cupyattn.attention(*arrays, alibi_slopes=slopes, q_offset=2**51)


def test_alibi_may_be_infinite_or_nan_as_it_is():
    for slope in (np.inf, np.nan):
        slopes = np.full(2, slope, np.float32)
        with np.errstate(invalid="ignore"):
            assert np.isnan(cupyattn.attention(Q, K, V, alibi_slopes=slopes)).all()
    with pytest.raises(ValueError, match="come to inf"):
        cupyattn.attention(Q, K, V, alibi_slopes=np.full(2, np.inf, np.float32), q_offset=90)


USED = (9, 70, 3, 0)
SQ, CACHE = 5, 80
DIM, DIM_V = 24, 40
OPTIONS = [{"causal": True}, {"window_size": (2, 1)}, *deep({"alibi_slopes": True})]


def cached_arrays(dtype: str) -> list[np.ndarray]:
    """Queries, and a cache whose unused end holds NaN."""
    rng = np.random.default_rng(0)
    shapes = (SQ, 4, DIM), (CACHE, 2, DIM), (CACHE, 2, DIM_V)
    q, k, v = (rng.standard_normal((len(USED), *shape)).astype(dtype) for shape in shapes)
    for b, used in enumerate(USED):
        k[b, used:] = v[b, used:] = np.nan
    return [q, k, v]


@everywhere
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_a_prefill_into_a_longer_cache_is_causal(side, dtype, options):
    """Check results and gradients against calls of each sequence alone."""
    if "alibi_slopes" in options:
        options = {"alibi_slopes": side.put(np.linspace(0.1, 0.4, 4).astype(np.float32))}
    q, k, v = cached_arrays(dtype)
    used = side.put(np.array(USED, np.int32))
    placed = [*map(side.put, (q, k, v))]
    out, lse = cupyattn.attention(*placed, seqused_k=used, return_lse=True, **options)
    dout = np.ones((*q.shape[:3], DIM_V), dtype)
    together = cupyattn.attention_backward(
        side.put(dout), *placed, out, lse, seqused_k=used, **options
    )
    tolerance = 2e-2 if dtype == "float16" else 1e-4
    for b, length in enumerate(USED):
        alone = [
            side.put(np.ascontiguousarray(a)) for a in (q[[b]], k[[b], :length], v[[b], :length])
        ]
        out_b, lse_b = cupyattn.attention(*alone, return_lse=True, **options)
        grads = cupyattn.attention_backward(side.put(dout[[b]]), *alone, out_b, lse_b, **options)
        pairs = [(out[b], out_b[0]), (lse[b], lse_b[0]), (together.dq[b], grads.dq[0])]
        pairs += [(together.dk[b, :length], grads.dk[0]), (together.dv[b, :length], grads.dv[0])]
        for found, expected in pairs:
            np.testing.assert_allclose(
                side.get(found), side.get(expected), atol=tolerance, rtol=tolerance
            )


@everywhere
def test_a_given_offset_counts_from_the_first_key(side):
    q, k, v = map(side.put, cached_arrays("float16"))
    used = np.array(USED, np.int64)
    by_default = cupyattn.attention(q, k, v, causal=True, seqused_k=side.put(used))
    given = cupyattn.attention(
        q, k, v, causal=True, seqused_k=side.put(used), q_offset=side.put(used - SQ)
    )
    assert side.get(by_default).tobytes() == side.get(given).tobytes()
    other = cupyattn.attention(q, k, v, causal=True, seqused_k=side.put(used), q_offset=CACHE - SQ)
    assert (side.get(other)[0] != side.get(by_default)[0]).any()


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
    native = KERNELS.device.traits.native
    limits = reference.attention_backward_bound(*given, dtype=dtype, native=native, **PART)
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


@pytest.mark.usefixtures("default_architecture")
@pytest.mark.parametrize("kind", ["dense", "packed", "paged"])
def test_float16_accumulators_refuse_large_values_in_use(kind: str):
    """Values of keys that are not in use may be anything. An infinity would reach other columns."""
    q, k, v = (np.ones((2, 32, 2, 64), np.float16) for _ in range(3))
    v[:, 20:] = 300
    v[1, 23:] = np.inf
    lengths = np.array([20, 20], np.int32)
    options: dict[str, Any] = {"accumulator": "float16"}
    arrays: list[Any] = [q, k, v]
    if kind == "dense":
        options["seqused_k"] = lengths
    elif kind == "packed":
        bounds = np.array([0, 32, 64], np.int32)
        arrays = [x.reshape(64, 2, 64) for x in arrays] + [bounds, bounds, 32, 32]
        options["seqused_k"] = lengths
    else:
        table = np.array([[0, 1], [2, 3]], np.int32)
        arrays = [q, *(x.reshape(4, 16, 2, 64) for x in (k, v)), table, lengths]
    call = {
        "dense": cupyattn.attention,
        "packed": cupyattn.attention_varlen,
        "paged": cupyattn.paged_attention,
    }[kind]
    with cupyattn.backend("emulator"):
        assert (call(*arrays, **options) == 1).all()
        lengths[1] = 23
        with pytest.raises(ValueError, match=r"v has absolute values up to 300\.0.*at most 250"):
            call(*arrays, **options)
        lengths[1] = 24
        with pytest.raises(ValueError, match="v has absolute values up to inf"):
            call(*arrays, **options)


@pytest.mark.usefixtures("default_architecture")
def test_packed_and_paged_float16_accumulators_give_the_dense_result():
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, 1, 48, 2, 64)).astype(np.float16)
    bounds, table = np.array([0, 48], np.int32), np.arange(3, dtype=np.int32)[None]
    pools = [x.reshape(3, 16, 2, 64) for x in (k, v)]
    options: dict[str, Any] = {"causal": True, "accumulator": "float16"}
    with cupyattn.backend("emulator"):
        dense = cupyattn.attention(q, k, v, **options)
        packed = cupyattn.attention_varlen(q[0], k[0], v[0], bounds, bounds, 48, 48, **options)
        paged = cupyattn.paged_attention(q, *pools, table, bounds[1:], **options)
        plain = cupyattn.attention(q, k, v, causal=True)
    assert_array_equal(packed, dense[0])
    assert_array_equal(paged, dense)
    assert (plain != dense).any(), "the same sums"

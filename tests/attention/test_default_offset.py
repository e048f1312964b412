"""Where queries stand unless q_offset says so: the last one at the last key in use."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import everywhere
from support.search import deep

import cupyattn

USED = (9, 70, 3, 0)
SQ, CACHE = 5, 80
DIM, DIM_V = 24, 40
OPTIONS = ({"causal": True}, {"window_size": (2, 1)}, {"alibi_slopes": True})


def arrays(dtype: str) -> list[np.ndarray]:
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
    """The same as calls of the sequences alone; gradients too."""
    if "alibi_slopes" in options:
        options = {"alibi_slopes": side.put(np.linspace(0.1, 0.4, 4).astype(np.float32))}
    q, k, v = arrays(dtype)
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
    q, k, v = map(side.put, arrays("float16"))
    used = np.array(USED, np.int64)
    by_default = cupyattn.attention(q, k, v, causal=True, seqused_k=side.put(used))
    given = cupyattn.attention(
        q, k, v, causal=True, seqused_k=side.put(used), q_offset=side.put(used - SQ)
    )
    assert side.get(by_default).tobytes() == side.get(given).tobytes()
    other = cupyattn.attention(q, k, v, causal=True, seqused_k=side.put(used), q_offset=CACHE - SQ)
    assert (side.get(other)[0] != side.get(by_default)[0]).any()

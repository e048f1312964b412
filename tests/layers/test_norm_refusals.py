"""What the norms refuse, wherever they run: what was passed, what is allowed, how to fix it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices import everywhere, placed

import cupyattn
from cupyattn import LayerNormGrads, RMSNormGrads

F32, F16 = np.float32, np.float16
X, W = np.zeros((3, 8), F32), np.ones(8, F32)
STATS = np.zeros(3, F32)
LAYER, RMS = cupyattn.layer_norm, cupyattn.rms_norm
LAYER_BACK, RMS_BACK = cupyattn.layer_norm_backward, cupyattn.rms_norm_backward
BACK = (X, X, W, STATS, STATS)

REFUSED: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (LAYER, (None,), {}, TypeError, "x is None; it is not optional"),
    (LAYER, (np.zeros((), F32),), {}, ValueError, "x has no axes; it runs over the last axis"),
    (LAYER, (X.T,), {}, ValueError, "x has strides .*the last axis must be contiguous"),
    (LAYER, (np.zeros((3, 8), np.int32),), {}, TypeError, "x has dtype int32"),
    (LAYER, (X, W.astype(F16)), {}, TypeError, "x has float32, weight has float16; .*share one"),
    (LAYER, (X, W[:7]), {}, ValueError, r"weight has shape \(7,\); .*for each column, here \(8,\)"),
    (LAYER, (X, W, W[:1]), {}, ValueError, r"bias has shape \(1,\)"),
    (RMS, (X, np.ones(16, F32)[::2]), {}, ValueError, "weight has strides"),
    (LAYER, (X,), {"residual": X[0]}, ValueError, r"residual has shape \(8,\); .*shaped like x"),
    (LAYER, (X,), {"eps": -1.0}, ValueError, r"eps = -1.0; it is 0 or more"),
    (LAYER, (X,), {"eps": float("nan")}, ValueError, "eps = nan; it is a finite number up to"),
    (LAYER, (X,), {"eps": "1e-5"}, TypeError, "eps is a str; it is a real number"),
    (RMS, (X,), {"weight_offset": True}, TypeError, "weight_offset is a bool"),
    (RMS, (X,), {"weight_offset": float("inf")}, ValueError, "weight_offset = inf; it is a finite"),
    (RMS, (X,), {"weight_offset": 1e39}, ValueError, r"weight_offset = 1e\+39; it is a finite"),
    (LAYER, (X,), {"return_stats": 1}, TypeError, "return_stats = 1; it is True or False"),
    (LAYER, (X,), {"out": (X + 1,)}, TypeError, "out is a tuple of 1; this call has one result"),
    (LAYER, (X,), {"out": X + 1, "return_stats": True}, TypeError,
     r"out is a ndarray; .* of the 3 results of this call; pass out=\(out, mean, rstd\)"),
    (RMS, (X,), {"residual": X, "out": (X + 1, None)}, TypeError, r"pass out=\(out, total\)"),
    (LAYER, (X,), {"out": np.zeros((3, 9), F32)}, ValueError, "out is float32"),
    (LAYER, (X, W, W), {"out": np.broadcast_to(W, (3, 8))}, ValueError, "own place for every item"),
    (LAYER_BACK, (X, X, W, None, STATS), {}, TypeError, "mean is None; it is not optional"),
    (LAYER_BACK, (X, X, W, STATS, None), {}, TypeError, "rstd is None; it is not optional"),
    (RMS_BACK, (X, X[:2], W, STATS), {}, ValueError, r"x has shape \(2, 8\); .*shaped like dout"),
    (RMS_BACK, (X, X, W, STATS[:2]), {}, ValueError, r"rstd has shape \(2,\); .*for each row"),
    (RMS_BACK, (X, X, W, STATS.astype(F16)), {}, TypeError, "rstd has dtype float16"),
    (LAYER_BACK, BACK, {"dtotal": X.astype(F16)}, TypeError, "dtotal has float16"),
    (LAYER_BACK, BACK, {"bias": W[:2]}, ValueError, r"bias has shape \(2,\)"),
    (LAYER_BACK, BACK, {"accumulate": True}, ValueError, "accumulate=True without grads"),
    (LAYER_BACK, BACK, {"accumulate": 2}, TypeError, "accumulate = 2"),
    (LAYER_BACK, BACK, {"grads": RMSNormGrads()}, TypeError, "grads is a RMSNormGrads; it is a L"),
    (LAYER_BACK, BACK, {"grads": LayerNormGrads(dbias=np.zeros(8, F32))}, ValueError,
     r"grads\.dbias was given without bias; .* if there is the other; leave it out, or pass bias"),
    (RMS_BACK, (X, X, None, STATS), {"grads": RMSNormGrads(None, np.zeros(8, F32))}, ValueError,
     r"grads\.dweight was given without weight"),
    (RMS_BACK, (X, X, W, STATS), {"grads": RMSNormGrads(dx=np.zeros(8, F32))}, ValueError,
     r"grads\.dx is"),
    (RMS_BACK, (X, X, W, STATS), {"workspace": X.T}, ValueError, "workspace has strides"),
]  # fmt: skip


@everywhere
@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row[0].__name__}: {row[4][:30]}")
def test_refused(side, row):
    function, args, options, kind, message = row
    with pytest.raises(kind, match=message):
        function(
            *(placed(side, each) for each in args),
            **{name: _placed(side, each) for name, each in options.items()},
        )


def _placed(side, value):
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(placed(side, tuple(value)))
    return placed(side, value)


@everywhere
def test_results_overlap_nothing_that_is_read_later(side):
    memory = side.put(np.zeros((4, 8), F32))
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        cupyattn.layer_norm(memory[:3], out=memory[1:])
    x, residual, out = memory[:3], side.put(X), side.put(X + 1)
    with pytest.raises(ValueError, match="total overlaps x in memory"):
        cupyattn.rms_norm(x, residual=residual, out=(out, x))
    rstd, grads = side.put(STATS), RMSNormGrads(x)
    with pytest.raises(ValueError, match=r"grads\.dx overlaps dout in memory"):
        cupyattn.rms_norm_backward(x, residual, None, rstd, grads=grads)

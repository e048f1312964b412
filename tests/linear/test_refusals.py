"""What linear refuses: each error says what was passed, what is allowed, how to fix it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices import everywhere
from support.quantised_weights import made_up

import cupyattn
from cupyattn import LinearGrads, QuantizedWeight


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


QUANTISED = made_up("int4", 6, 64, 32)
"""(64, 6), its codes along 64."""


def forward(**changed: Any) -> Any:
    given = {"x": zeros(3, 8), "w": zeros(8, 6), "b": zeros(6), **changed}
    return cupyattn.linear(given.pop("x"), given.pop("w"), given.pop("b"), **given)


def backward(**changed: Any) -> Any:
    given = {"dout": zeros(3, 6), "x": zeros(3, 8), "w": zeros(8, 6), "b": zeros(6), **changed}
    arrays = [given.pop(name) for name in ("dout", "x", "w", "b")]
    return cupyattn.linear_backward(*arrays, **given)


FORWARD = {
    "w of another height": ({"w": zeros(6, 8)}, r"w is \(K, N\) with K = 8.*; pass w\.T"),
    "w of no height of x": ({"w": zeros(7, 6)}, "w is .* with K = 8"),
    "w of three axes": ({"w": zeros(1, 8, 6)}, r"w is \(K, N\), 2 axes"),
    "w strided both ways": ({"w": zeros(16, 12)[::2, ::2]}, "one of its two axes is contiguous"),
    "x without axes": ({"x": zeros()}, "x has no axes"),
    "x with a strided last axis": ({"x": zeros(3, 16)[:, ::2]}, "last axis must be contiguous"),
    "x of rows that lie unevenly": (
        {"x": zeros(2, 4, 8)[:, :3]}, "axes before the last lie evenly",
    ),
    "b of another length": ({"b": zeros(8)}, r"b is \(N,\)"),
    "b of another dtype": ({"b": zeros(6, dtype="float16")}, "share one dtype"),
    "integers": ({"x": zeros(3, 8, dtype="int32")}, "allowed are float16"),
    "no such activation": ({"activation": "tanh"}, "allowed are None, 'gelu'"),
    "an odd gated w": ({"w": zeros(8, 5), "b": None, "activation": "swiglu"}, r"\(K, 2 N\)"),
    "a residual of another shape": ({"residual": zeros(3, 5)}, "residual is .*with the axes of x"),
    "out of another shape": ({"out": zeros(3, 5)}, r"the result is float32 \(3, 6\)"),
    "out of another dtype": ({"out": zeros(3, 6, dtype="float16")}, "the result is float32"),
    "a tuple for one result": ({"out": (zeros(3, 6),)}, "it is one array then"),
    "one array for two results": (
        {"out": zeros(3, 6), "return_preactivation": True}, r"a tuple \(out, preactivation\)",
    ),
    "a preactivation of nothing": (
        {"out": (None, zeros(3, 6)), "return_preactivation": True}, "there is no activation",
    ),
    "a flag that is none": ({"return_preactivation": 1}, "it is True or False"),
    "no weight": ({"w": None}, "w is None"),
    "a quantised w the other way round": (
        {"x": zeros(3, 6), "w": QUANTISED}, r"w is \(K, N\) with K = 6.*; pass w\.T",
    ),
    "a quantised w of another height": ({"w": QUANTISED}, r"x has shape \(3, 8\), w \(64, 6\)"),
    "a gated quantised w of odd columns": (
        {"x": zeros(3, 64), "w": made_up("int4", 5, 64, 32), "b": None, "activation": "swiglu"},
        r"\(K, 2 N\)",
    ),
    "no array": ({"x": [1.0]}, "x is a builtins.list"),
}  # fmt: skip
BACKWARD = {
    "dout of another shape": ({"dout": zeros(3, 8)}, "dout is .*with the axes of x"),
    "no dout": ({"dout": None}, "dout is None"),
    "a preactivation of no activation": (
        {"preactivation": zeros(3, 6)}, "preactivation was given without an activation",
    ),
    "a preactivation of another shape": (
        {"preactivation": zeros(3, 5), "activation": "relu"}, "preactivation is",
    ),
    "grads of another kind": ({"grads": (None, None)}, "it is a LinearGrads"),
    "dw of another shape": ({"grads": LinearGrads(dw=zeros(6, 8))}, r"grads.dw is .*\(8, 6\)"),
    "dw strided both ways": (
        {"grads": LinearGrads(dw=zeros(16, 12)[::2, ::2])}, "grads.dw has strides .*one of its two",
    ),
    "dw broadcast": (
        {"grads": LinearGrads(dw=np.broadcast_to(zeros(6), (8, 6)))}, "one item in memory",
    ),
    "db of no bias": ({"b": None, "grads": LinearGrads(db=zeros(6))}, "this call has no b"),
    "dw of a quantised w": (
        {"x": zeros(3, 64), "w": QUANTISED, "grads": LinearGrads(dw=zeros(64, 6))},
        "a quantised weight has no gradient",
    ),
    "adding to nothing": ({"accumulate": True}, "accumulate=True without grads"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "changed", "message"),
    [
        *(pytest.param(forward, *case, id=name) for name, case in FORWARD.items()),
        *(pytest.param(backward, *case, id=name) for name, case in BACKWARD.items()),
    ],
)
def test_is_refused(call, changed, message):
    with pytest.raises((TypeError, ValueError), match=message) as refused:
        call(**changed)
    assert str(refused.value).count("; ") >= 2


def test_scales_start_at_whole_words():
    """Slices of a file's bytes may start anywhere; kernels load a scale and its shift at once."""
    scales = np.zeros(QUANTISED.scales.size + 8, np.float16)
    first = 1 - scales.ctypes.data // 2 % 2
    odd = scales[first:][: QUANTISED.scales.size].reshape(QUANTISED.scales.shape)
    with pytest.raises(ValueError, match="scales start 2 bytes beyond a multiple of 4"):
        QuantizedWeight("int4", QUANTISED.codes, odd, block_size=32)


def test_results_may_not_overlap_what_is_read():
    x = zeros(4, 6)
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        cupyattn.linear(x, zeros(6, 6), out=x)
    w = zeros(6, 6)
    with pytest.raises(ValueError, match=r"grads\.dw overlaps w in memory"):
        cupyattn.linear_backward(x, x, w, grads=LinearGrads(dw=w))


def test_approximate_has_two_values():
    for wrong, kind in (("erf", ValueError), (True, TypeError)):
        with pytest.raises(kind, match="approximate = "):
            cupyattn.linear_gelu(zeros(3, 8), zeros(8, 6), approximate=wrong)


@everywhere
def test_leading_axes_merge_to_rows(side):
    """(2, 3) rows of a wider array lie evenly; so does a broadcast row."""
    wide = np.ones((2, 3, 20), np.float32)
    x = wide[..., :8]
    w, row = np.ones((8, 6), np.float32), np.broadcast_to(np.ones(8, np.float32), (4, 8))
    out = cupyattn.linear(*map(side.put, (x, w)))
    assert out.shape == (2, 3, 6)
    assert (side.get(out) == 8).all()
    assert (side.get(cupyattn.linear(*map(side.put, (row, w)))) == 8).all()
    assert cupyattn.linear(side.put(np.ones(8, np.float32)), side.put(w)).shape == (6,)

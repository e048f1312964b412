"""Errors of the norms and of sampling: the argument, the allowed values and the remedy."""

from __future__ import annotations

import re
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

REFUSED_NORMS: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (LAYER, (None,), {}, TypeError, "x is None; it is not optional"),
    (LAYER, (np.zeros((), F32),), {}, ValueError, "x has no axes; it runs over the last axis"),
    (LAYER, (X.T,), {}, ValueError, "x has strides .*the last axis must be contiguous"),
    (LAYER, (np.zeros((3, 8), np.int32),), {}, TypeError, "x has dtype int32"),
    (LAYER, (X.astype(F16), W), {}, TypeError, "x has float16, weight has float32; .*share one"),
    (LAYER, (X, W[:7]), {}, ValueError, r"weight has shape \(7,\); .*for each column, here \(8,\)"),
    (LAYER, (X, W, W[:1]), {}, ValueError, r"bias has shape \(1,\)"),
    (RMS, (X, np.ones(16, F32)[::2]), {}, ValueError, "weight has strides"),
    (LAYER, (X,), {"residual": X[0]}, ValueError, r"residual has shape \(8,\); .*shaped like x"),
    (LAYER, (X,), {"eps": -1.0}, ValueError, r"eps = -1.0; it is 0 or more"),
    (LAYER, (X,), {"eps": float("nan")}, ValueError, "eps = nan; it is a finite number up to"),
    (LAYER, (X,), {"eps": "1e-5"}, TypeError, "eps has type str; it must be a real number"),
    (RMS, (X,), {"weight_offset": True}, TypeError, "weight_offset has type bool"),
    (RMS, (X,), {"weight_offset": float("inf")}, ValueError, "weight_offset = inf; it is a finite"),
    (RMS, (X,), {"weight_offset": 1e39}, ValueError, r"weight_offset = 1e\+39; it is a finite"),
    (LAYER, (X,), {"return_stats": 1}, TypeError, "return_stats = 1; it is True or False"),
    (LAYER, (X,), {"out": (X + 1,)}, TypeError, "out is a tuple of 1; this call has one result"),
    (LAYER, (X,), {"out": X + 1, "return_stats": True}, TypeError,
     r"out has type ndarray; .* of the 3 results of this call; pass out=\(out, mean, rstd\)"),
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
    (LAYER_BACK, BACK, {"grads": RMSNormGrads()}, TypeError, "grads has type RMSNormGrads"),
    (LAYER_BACK, BACK, {"grads": LayerNormGrads(dbias=np.zeros(8, F32))}, ValueError,
     r"grads\.dbias was given without bias; .* if there is the other; leave it out, or pass bias"),
    (RMS_BACK, (X, X, None, STATS), {"grads": RMSNormGrads(None, np.zeros(8, F32))}, ValueError,
     r"grads\.dweight was given without weight"),
    (RMS_BACK, (X, X, W, STATS), {"grads": RMSNormGrads(dx=np.zeros(8, F32))}, ValueError,
     r"grads\.dx is"),
    (RMS_BACK, (X, X, W, STATS), {"workspace": X.T}, ValueError, "workspace has strides"),
]  # fmt: skip


@everywhere
@pytest.mark.parametrize(
    "case", REFUSED_NORMS, ids=lambda case: f"{case[0].__name__}: {case[4][:30]}"
)
def test_bad_input_of_norms(side, case):
    function, args, options, kind, message = case
    with pytest.raises(kind, match=message):
        function(
            *(placed(side, each) for each in args),
            **{name: placed_fields(side, each) for name, each in options.items()},
        )


def placed_fields(side, value):
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(placed(side, tuple(value)))
    return placed(side, value)


PACKED, BIAS = np.zeros((3, 16), F32), np.zeros(8, F32)
BACKWARDS: dict[str, Any] = {
    "layer_norm": lambda d, c: LAYER_BACK(d, c(X), c(W), *placed_statistics(c, 2)),
    "rms_norm": lambda d, c: RMS_BACK(d, c(X), c(W), *placed_statistics(c, 1)),
    "gelu": lambda d, c: cupyattn.gelu_backward(d, c(X)),
    "silu": lambda d, c: cupyattn.silu_backward(d, c(X)),
    "swiglu": lambda d, c: cupyattn.swiglu_backward(d, c(X), c(X)),
    "packed geglu": lambda d, c: cupyattn.geglu_backward(d, c(PACKED)),
    "softmax": lambda d, c: cupyattn.softmax_backward(d, c(X)),
    "softmax with bias": lambda d, c: cupyattn.softmax_backward(d, c(X), bias=c(BIAS)),
    "linear": lambda d, c: cupyattn.linear_backward(d, c(X), c(np.zeros((8, 8), F32))),
}


def placed_statistics(convert, count):
    statistics = convert(STATS)
    return [statistics.astype("float64") if convert(X).dtype == "float64" else statistics] * count


@everywhere
@pytest.mark.parametrize("name", BACKWARDS)
def test_error_blames_dout_that_disagrees_with_the_other_arrays(side, name):
    def call(dout, dtype=F32):
        return BACKWARDS[name](placed(side, dout), lambda x: placed(side, x.astype(dtype)))

    for shape in ((3, 4), (2, 8), (8,), (3, 8, 1)):
        expected = rf"^dout has shape {re.escape(str(shape))}; dout is .*here \(3, 8\)"
        with pytest.raises(ValueError, match=expected):
            call(np.zeros(shape, F32))
    with pytest.raises(TypeError, match=r"^dout has dtype float16; .*dout\.astype\('float32'\)$"):
        call(X.astype(F16))
    repeated = r"^dout has strides \(0, 0\) .*pass a contiguous copy, ascontiguousarray\(dout\)$"
    with pytest.raises(ValueError, match=repeated):
        call(np.broadcast_to(F32(1), (3, 8)))


def test_error_blames_a_float32_dout_of_float64_arrays():
    for backward in BACKWARDS.values():
        with pytest.raises(TypeError, match=r"^dout has dtype float32; .*astype\('float64'\)$"):
            backward(X, lambda x: x.astype(np.float64))


@everywhere
def test_results_of_norms_that_overlap_inputs_are_refused(side):
    memory = side.put(np.zeros((4, 8), F32))
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        cupyattn.layer_norm(memory[:3], out=memory[1:])
    x, residual, out = memory[:3], side.put(X), side.put(X + 1)
    with pytest.raises(ValueError, match="total overlaps x in memory"):
        cupyattn.rms_norm(x, residual=residual, out=(out, x))
    rstd, grads = side.put(STATS), RMSNormGrads(x)
    with pytest.raises(ValueError, match=r"grads\.dx overlaps dout in memory"):
        cupyattn.rms_norm_backward(x, residual, None, rstd, grads=grads)


LOGITS = np.zeros((2, 9), np.float32)
PREVIOUS = np.array([[0, -1], [8, 3]], np.int32)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


@everywhere
@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"logits": None}, TypeError, "logits is None"),
        ({"logits": LOGITS[0]}, ValueError, r"logits has shape \(9,\); logits is \(rows, V\)"),
        ({"logits": LOGITS[None]}, ValueError, r"logits has shape \(1, 2, 9\)"),
        ({"logits": LOGITS.astype(int)}, TypeError, "logits has dtype int64"),
        ({"logits": LOGITS.astype(float)}, TypeError, "logits has dtype float64; allowed are flo"),
        ({"logits": LOGITS[:, ::2]}, ValueError, "logits has strides"),
        ({"logits": LOGITS[:, :0]}, ValueError, "V = 0; a row has 1 to 262,144 tokens"),
        ({"logits": np.zeros((1, 2**18 + 1), np.float16)}, ValueError, "V = 262145"),
        ({"seed": None}, TypeError, "seed is None"),
        ({"seed": -1}, ValueError, r"seed = -1; it is an integer from 0 to 2\*\*64 - 1"),
        ({"seed": 2**64}, ValueError, "seed = 18446744073709551616"),
        ({"seed": 1.5}, TypeError, "seed is 1.5 of type float"),
        ({"seed": ones(2, dtype=np.int32)}, TypeError, "seed has dtype int32; allowed are uint64"),
        ({"seed": ones(3, dtype=int)}, ValueError, r"seed has shape \(3,\).*here \(2,\)"),
        ({"step": -1}, ValueError, "step = -1"),
        ({"step": True}, TypeError, "step is True"),
        ({"step": ones(2)}, TypeError, "step has dtype float32; allowed are int32, int64"),
        ({"temperature": -0.5}, ValueError, "temperature = -0.5; it is finite, 0"),
        ({"temperature": np.inf}, ValueError, "temperature = inf"),
        ({"temperature": np.nan}, ValueError, "temperature = nan"),
        ({"temperature": "1"}, TypeError, "temperature has type str; it must be a real number"),
        ({"temperature": None}, TypeError, "temperature has type NoneType"),
        ({"temperature": ones(2, 1)}, ValueError, r"temperature has shape \(2, 1\)"),
        ({"temperature": ones(2, dtype=float)}, TypeError, "temperature has dtype float64"),
        ({"top_k": -1}, ValueError, "top_k = -1"),
        ({"top_k": 1.0}, TypeError, "top_k is 1.0 of type float"),
        ({"top_k": ones(2)}, TypeError, "top_k has dtype float32; allowed are int32, int64"),
        ({"top_p": 0}, ValueError, "top_p = 0; it is above 0 and at most 1"),
        ({"top_p": 1.5}, ValueError, "top_p = 1.5"),
        ({"top_p": np.nan}, ValueError, "top_p = nan"),
        ({"top_p": ones(2, dtype=np.float16)}, TypeError, "top_p has dtype float16"),
        ({"min_p": -0.1}, ValueError, "min_p = -0.1; it is 0 to 1"),
        ({"min_p": 1.1}, ValueError, "min_p = 1.1"),
        ({"min_p": [0.1, 0.2]}, TypeError, "min_p has type list"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty = 0; it is finite and more"),
        ({"repetition_penalty": 2.0, "previous": None}, TypeError, "without previous"),
        ({"repetition_penalty": ones(2), "previous": None}, TypeError, "without previous"),
        ({"previous": PREVIOUS.astype(int)}, TypeError, "previous has dtype int64"),
        ({"previous": PREVIOUS[0]}, ValueError, r"previous has shape \(2,\)"),
        ({"previous": PREVIOUS[:1]}, ValueError, r"previous has shape \(1, 2\).*here \(2, 2\)"),
        ({"out": ones(2)}, TypeError, "out is float32"),
        ({"out": ones(3, dtype=np.int32)}, ValueError, r"out is int32 \(3,\); the result is int32"),
        ({"workspace": np.zeros((9, 9), np.uint8)[:, :3]}, ValueError, "workspace has strides"),
    ],
)  # fmt: skip
def test_bad_input_of_sample(side, changed, kind, message):
    given = {"logits": LOGITS, "seed": 0, "previous": PREVIOUS, **changed}
    logits = placed(side, given.pop("logits"))
    with pytest.raises(kind, match=message):
        cupyattn.sample(logits, **{name: placed(side, value) for name, value in given.items()})


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    "name", ["seed", "step", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
)
def test_error_for_a_list_says_to_pass_an_array(name, kind):
    """The example in the message is evaluated and accepted."""
    given: dict[str, Any] = {"seed": 0, "previous": PREVIOUS, name: kind([1, 1])}
    message = f"^{name} has type {kind.__name__}; it must be a number for .*; pass an array, one a"
    with pytest.raises(TypeError, match=message) as said:
        cupyattn.sample(LOGITS, **given)
    *_, example = str(said.value).split(": ")
    followed = eval(example, {"numpy": np, name: given[name]})
    assert cupyattn.sample(LOGITS, **{**given, name: followed}).shape == (2,)


def test_true_is_refused_after_a_call_with_1():
    """Checked numbers are cached, and 1 == True."""
    cupyattn.sample(LOGITS, seed=0, top_k=1, step=1)
    for name in ("top_k", "step", "seed"):
        with pytest.raises(TypeError, match=f"{name} is True"):
            cupyattn.sample(LOGITS, **{"seed": 0, name: True})


@everywhere
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("seed", np.array([0, -5]), r"seed\[1\] = -5"),
        ("step", np.array([-1, 0]), r"step\[0\] = -1"),
        ("temperature", np.array([1, -1], np.float32), r"temperature\[1\] = -1.0"),
        ("temperature", np.array([1, np.nan], np.float32), r"temperature\[1\] = nan"),
        ("top_k", np.array([3, -2], np.int32), r"top_k\[1\] = -2"),
        ("top_p", np.array([0, 1], np.float32), r"top_p\[0\] = 0.0"),
        ("min_p", np.array([0, 2], np.float32), r"min_p\[1\] = 2.0"),
        ("repetition_penalty", np.array([1, 0], np.float32), r"repetition_penalty\[1\] = 0.0"),
        ("previous", np.array([[0, 1], [2, 9]], np.int32), r"previous\[1, 1\] is 9; .* 0 to 8"),
        ("previous", np.array([[0, -2], [2, 9]], np.int32), r"previous\[0, 1\] is -2"),
    ],
)  # fmt: skip
def test_error_names_the_first_number_out_of_range(side, name, values, message):
    given = {"seed": 0, "previous": PREVIOUS, name: values}
    given = {each: placed(side, value) for each, value in given.items()}
    with cupyattn.backend(checks=True), pytest.raises(ValueError, match=message):
        cupyattn.sample(side.put(LOGITS.copy()), **given)


@everywhere
def test_out_that_overlaps_previous_is_refused(side):
    memory = side.put(np.zeros((2, 9), np.int32))
    with pytest.raises(ValueError, match="out overlaps previous"):
        cupyattn.sample(side.put(LOGITS.copy()), seed=0, previous=memory, out=memory[0, :2])


def test_greedy_needs_no_seed():
    assert cupyattn.sample(LOGITS, seed=None, temperature=0).tolist() == [0, 0]
    with pytest.raises(TypeError, match="seed is None"):
        cupyattn.sample(LOGITS, seed=None, temperature=np.zeros(2, np.float32))


@pytest.mark.nvrtc
def test_too_small_workspace_is_refused_before_any_write():
    out = np.full(2, 77, np.int32)
    with cupyattn.backend("emulator"), pytest.raises(ValueError, match="workspace has 100 bytes"):
        cupyattn.sample(LOGITS, seed=0, top_p=0.5, out=out, workspace=np.zeros(100, np.uint8))
    assert out.tolist() == [77, 77]

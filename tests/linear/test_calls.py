"""Calls of linear: launches, workspaces, the layout of dw, vjp and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import everywhere
from support.linear_problems import LinearProblem, exact
from support.quantised_weights import made_up
from support.recording_device import Recorder
from support.search import deep

import cupyattn
from cupyattn import (
    LinearCrossEntropyGrads,
    LinearGrads,
    QuantizedWeight,
    linear,
    linear_backward,
    linear_gelu,
    linear_gelu_backward,
    reference,
    vjp,
)
from cupyattn.ops.linear.plan import backward_call, backward_plan, forward_call, forward_plan
from cupyattn.ops.linear.problem import LinearArrays, LinearBackwardArrays
from cupyattn.reference import error_ratio
from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.plan import run


def made(recorder):
    """Return the shapes and dtypes of the allocated arrays."""
    return [(array.shape, array.dtype.name) for array in recorder.allocated]


def launch_forward(case, saved=False, **more):
    recorder = Recorder(np.empty)
    x, w, b = case.arrays()
    operands = adopt(LinearArrays(x, w, b=b, **more))
    call = forward_call(operands, case.activation, saved, None)
    return recorder, run(recorder, forward_plan(call, recorder.traits), operands)


def launch_backward(case, saved=True, **more):
    recorder = Recorder(np.empty)
    x, w, b = case.arrays()
    dout = case.normal("dout", *case.M, case.N)
    z = case.normal("z", *case.M, case.width) if saved and case.activation else None
    operands = adopt(LinearBackwardArrays(dout, x, w, b=b, preactivation=z, **more))
    call = backward_call(operands, case.activation, case.accumulate, None)
    return recorder, run(recorder, backward_plan(call, recorder.traits), operands)


@pytest.mark.parametrize(("rows", "entry"), [(1, "thin"), (16, "thin"), (17, "forward")])
def test_one_launch_forward(rows, entry):
    case = LinearProblem((rows,), 64, 64, activation="relu")
    recorder, results = launch_forward(case, saved=True)
    assert recorder.entries == [f"linear_{entry}_f32"]
    assert results.out.shape == results.preactivation.shape == (rows, 64)
    assert made(recorder) == [((rows, 64), "float32")] * 2


def test_given_out_is_used():
    out = np.zeros((40, 64), np.float32)
    recorder, results = launch_forward(LinearProblem((40,), 64, 64), out=out)
    assert results.out is out
    assert not recorder.allocated


@pytest.mark.parametrize(("outer", "tile"), [(64, 64), (640, 128)])
def test_large_tiles_for_results_of_many(outer, tile):
    recorder, _ = launch_forward(LinearProblem((1024,), 8, outer))
    (launch,) = recorder.launches
    assert dict(launch.specialisation.macros)["TILE_M"] == tile
    assert launch.grid[0] == -(-1024 // tile) * -(-outer // 64)


def test_backward_with_a_preactivation_has_four_launches():
    recorder, results = launch_backward(LinearProblem((40,), 64, 64, activation="silu"))
    assert recorder.entries == ["linear_dx_f32", "linear_dw_f32", "linear_db_f32", "column_sums"]
    assert (results.dx.shape, results.dw.shape, results.db.shape) == ((40, 64), (64, 64), (64,))


def test_backward_without_a_preactivation_computes_it_in_the_workspace():
    case = LinearProblem((40,), 64, 64, activation="swiglu", biased=False)
    recorder, _ = launch_backward(case, saved=False)
    assert recorder.entries == ["linear_forward_f32", "linear_dx_f32", "linear_dw_f32"]
    first, dx, _ = recorder.launches
    assert first.arguments[4].nbytes == 40 * 128 * 4
    assert np.shares_memory(first.arguments[4], dx.arguments[2])
    assert first.arguments[2:4] == (None, None)
    assert first.arguments[5] is None


def test_a_workspace_makes_allocations_unnecessary():
    case = LinearProblem((40,), 64, 64, "bfloat16", "gelu")
    x, w, b = case.arrays()
    grads = {"dx": np.zeros_like(x), "dw": np.zeros_like(w), "db": np.zeros_like(b)}
    with pytest.raises(
        ValueError, match=r"workspace has 100 bytes; this call needs (\d+)"
    ) as small:
        launch_backward(case, saved=False, workspace=np.zeros(100, np.uint8), **grads)
    needed = int(str(small.value).split("needs ")[1].split(",")[0])
    assert needed >= 40 * 64 * 2
    recorder, _ = launch_backward(case, saved=False, workspace=np.zeros(needed, np.uint8), **grads)
    assert not recorder.allocated


def test_accumulate_starts_new_gradients_at_zero():
    case = LinearProblem((5,), 8, 8, accumulate=True)
    dw = np.ones((8, 8), np.float32)
    _, results = launch_backward(case, dw=dw)
    assert results.dw is dw
    assert (dw == 1).all()
    assert not results.dx.any()


def test_equal_calls_share_a_plan():
    first, second = (launch_forward(LinearProblem((40,), 64, 64))[0] for _ in range(2))
    assert first.launches[0].specialisation is second.launches[0].specialisation
    assert first.launches[0].arguments[-1] is second.launches[0].arguments[-1]


CASE = LinearProblem((70,), 24, 40, transposed=True)
CASES = [
    CASE,
    replace(CASE, transposed=False),
    replace(CASE, dtype="float16"),
    replace(CASE, dtype="float16", transposed=False),
    replace(CASE, dtype="float16", M=(0,)),
    *deep(replace(CASE, view="sliced"), replace(CASE, dtype="float16", activation="swiglu")),
    *deep(replace(CASE, dtype="bfloat16", activation="gelu")),
]


def strides(array: Any, *, transposed: bool) -> tuple[int, int]:
    """Return the strides of a new array in C order, or of the transpose of one."""
    rows, columns = array.shape
    item = array.dtype.itemsize
    return (item, rows * item) if transposed else (columns * item, item)


def ratio(dw: Any, case: LinearProblem, arrays: Any) -> float:
    """The largest error of dw over its bound."""
    expected = reference.linear_backward(*map(exact, arrays), activation=case.activation).dw
    bound = reference.linear_backward_bound(*arrays, dtype=case.dtype, activation=case.activation)
    return error_ratio(dw, expected, bound.dw)


@everywhere
@pytest.mark.parametrize("case", CASES, ids=str)
def test_new_dw_has_the_order_of_w(side, case):
    x, w, b = case.arrays()
    dout = case.normal("dout", *case.M, case.N)
    given = [side.put(array) for array in (dout, x, w, b)]
    dw = cupyattn.linear_backward(*given, activation=case.activation).dw
    assert dw.shape == w.shape
    assert dw.dtype == w.dtype
    assert dw.strides == strides(dw, transposed=case.transposed)
    assert ratio(side.get(dw), case, (dout, x, w, b)) <= 1


@everywhere
@pytest.mark.parametrize("transposed", [False, True])
def test_given_dw_keeps_its_order(side, transposed):
    """A given dw may have the other order than w. A new dw next to a given dx has that of w."""
    case = replace(CASE, transposed=transposed)
    x, w, b = case.arrays()
    dout = case.normal("dout", 70, 40)
    given = [side.put(array) for array in (dout, x, w, b)]
    plain = cupyattn.linear_backward(*given)
    other = side.put(np.full(w.shape, 7, np.float32, order="C" if transposed else "F"))
    found = cupyattn.linear_backward(*given, grads=LinearGrads(dw=other))
    assert found.dw is other
    assert other.strides == strides(other, transposed=not transposed)
    assert ratio(side.get(other), case, (dout, x, w, b)) <= 1
    dx = LinearGrads(dx=side.put(np.zeros_like(x)))
    added = cupyattn.linear_backward(*given, grads=dx, accumulate=True)
    assert added.dw.strides == strides(w, transposed=transposed)
    np.testing.assert_array_equal(side.get(added.dw), side.get(plain.dw))


@everywhere
@pytest.mark.parametrize("shape", [(24, 1), (0, 40), *deep(((1, 40),), ((1, 1),), ((24, 0),))])
def test_dw_of_one_row_or_column_is_contiguous_both_ways(side, shape):
    inner, outer = shape
    x, dout = np.ones((3, inner), np.float32), np.ones((3, outer), np.float32)
    for w in (np.ones(shape, np.float32), np.ones(shape[::-1], np.float32).T):
        dw = cupyattn.linear_backward(*map(side.put, (dout, x, w))).dw
        assert dw.flags.c_contiguous
        assert dw.T.flags.c_contiguous
        assert (side.get(dw) == 3).all()


def _loss(side, given):
    labels = side.put(np.arange(70) % 40)
    loss, lse = cupyattn.linear_cross_entropy(*given[:2], labels, reduction="sum", return_lse=True)
    return (side.put(np.ones_like(side.get(loss))), lse), labels


@everywhere
def test_cross_entropy_gives_dw_in_the_order_of_w(side):
    x, w, _ = CASE.arrays()
    given = side.put(x), side.put(w)
    (dloss, lse), labels = _loss(side, given)
    plain, into = (
        cupyattn.linear_cross_entropy_backward(
            dloss, *given, labels, lse, reduction="sum", logits_bytes=35 * 40 * 4, grads=grads
        )
        for grads in (None, LinearCrossEntropyGrads(dw=side.put(np.zeros(w.shape, np.float32))))
    )
    assert plain.dw.strides == strides(w, transposed=True)
    assert into.dw.strides == strides(w, transposed=False)
    np.testing.assert_allclose(side.get(plain.dw), side.get(into.dw), rtol=1e-5, atol=1e-5)


RNG = np.random.default_rng(0)
X, DOUT = RNG.standard_normal((2, 5, 4), dtype=np.float32)
W = RNG.standard_normal((4, 4), dtype=np.float32)
B = RNG.standard_normal(4, dtype=np.float32)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_pullback_gives_the_gradients_of_the_backward(activation):
    out, pullback = vjp(linear, X, W, B, activation=activation)
    assert_array_equal(out, linear(X, W, B, activation=activation))
    _, z = linear(X, W, B, activation=activation, return_preactivation=True)
    expected = linear_backward(DOUT, X, W, B, activation=activation, preactivation=z)
    for gradient, right in zip(pullback(DOUT), expected, strict=True):
        assert_array_equal(gradient, right)


def test_pullback_of_a_residual():
    out, pullback = vjp(linear, X, W, residual=X, activation="relu", wrt=("residual",))
    dx, dw, more = pullback(DOUT)
    assert_array_equal(more["residual"], DOUT)
    assert dx.shape == X.shape
    assert dw.shape == W.shape
    assert out.shape == DOUT.shape


def test_gradient_of_the_preactivation_is_refused():
    (out, z), pullback = vjp(linear, X, W, activation="relu", return_preactivation=True)
    assert_array_equal(out, np.maximum(z, 0))
    dx, _ = pullback((DOUT, None))
    assert dx.shape == X.shape
    with pytest.raises(TypeError, match=r"preactivation was given; .* has no gradient; pass None"):
        pullback((DOUT, DOUT))


def test_pullback_accumulates_in_given_grads():
    _, pullback = vjp(linear_gelu, X, W, B, approximate="none")
    grads = LinearGrads(*map(np.zeros_like, (X, W, B)))
    once = pullback(DOUT, grads=grads)
    assert once[1] is grads.dw
    kept = grads.dw.copy()
    pullback(DOUT, grads=grads, accumulate=True)
    np.testing.assert_allclose(grads.dw, 2 * kept, rtol=1e-6)
    expected = linear_gelu_backward(DOUT, X, W, B, approximate="none")
    np.testing.assert_allclose(kept, expected.dw, rtol=1e-5)


def test_vjp_with_respect_to_w_alone():
    out, pullback = vjp(lambda w: cupyattn.linear(X, w, B), W)
    (dw,) = pullback(DOUT)
    np.testing.assert_allclose(dw, X.T @ DOUT, rtol=1e-5)
    assert out.shape == DOUT.shape


@pytest.mark.deep
@pytest.mark.parametrize(
    "activation", [None, "gelu", "gelu_tanh", "silu", "relu", "swiglu", "geglu"]
)
def test_results_match_torch(activation):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    gated = activation in ("swiglu", "geglu")
    x, residual, dout = RNG.standard_normal((3, 2, 5, 6))
    weight, b = RNG.standard_normal((12 if gated else 6, 6)), RNG.standard_normal(6 + 6 * gated)
    given = [torch.tensor(array, requires_grad=True) for array in (x, weight, b, residual)]
    z = functional.linear(*given[:3])
    act = {
        None: lambda z: z,
        "gelu": functional.gelu,
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
        "silu": functional.silu,
        "relu": functional.relu,
        "swiglu": lambda z: functional.silu(z[..., :6]) * z[..., 6:],
        "geglu": lambda z: functional.gelu(z[..., :6]) * z[..., 6:],
    }[activation]
    expected = act(z) + given[3]
    options = {"activation": activation, "residual": residual, "wrt": ("residual",)}
    out, pullback = vjp(linear, x, weight.T, b, **options)
    assert_allclose(out, expected.detach().numpy(), rtol=1e-9, atol=1e-12)
    dx, dw, db, more = pullback(dout)
    gradients = torch.autograd.grad(expected, given, torch.tensor(dout))
    for found, right in zip((dx, dw.T, db, more["residual"]), gradients, strict=True):
        assert_allclose(found, right.numpy(), rtol=1e-9, atol=1e-12)


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


QUANTISED = made_up("int4", 6, 64, 32)
"""(64, 6), its codes along 64."""


def call_forward(**changed: Any) -> Any:
    given = {"x": zeros(3, 8), "w": zeros(8, 6), "b": zeros(6), **changed}
    return cupyattn.linear(given.pop("x"), given.pop("w"), given.pop("b"), **given)


def call_backward(**changed: Any) -> Any:
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
    "no array": ({"x": [1.0]}, "x has type builtins.list"),
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
    "grads of another kind": ({"grads": (None, None)}, "it must be a LinearGrads"),
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
        *(pytest.param(call_forward, *case, id=name) for name, case in FORWARD.items()),
        *(pytest.param(call_backward, *case, id=name) for name, case in BACKWARD.items()),
    ],
)
def test_bad_input_is_refused(call, changed, message):
    with pytest.raises((TypeError, ValueError), match=message) as refused:
        call(**changed)
    assert str(refused.value).count("; ") >= 2


def test_unaligned_scales_are_refused():
    """Kernels load a scale with its shift, and slices of a file may start anywhere."""
    scales = np.zeros(QUANTISED.scales.size + 8, np.float16)
    first = 1 - scales.ctypes.data // 2 % 2
    odd = scales[first:][: QUANTISED.scales.size].reshape(QUANTISED.scales.shape)
    with pytest.raises(ValueError, match="scales start 2 bytes beyond a multiple of 4"):
        QuantizedWeight("int4", QUANTISED.codes, odd, block_size=32)


def test_results_that_overlap_inputs_are_refused():
    x = zeros(4, 6)
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        cupyattn.linear(x, zeros(6, 6), out=x)
    w = zeros(6, 6)
    with pytest.raises(ValueError, match=r"grads\.dw overlaps w in memory"):
        cupyattn.linear_backward(x, x, w, grads=LinearGrads(dw=w))


def test_bad_approximate_is_refused():
    for wrong, kind in (("erf", ValueError), (True, TypeError)):
        with pytest.raises(kind, match="approximate = "):
            cupyattn.linear_gelu(zeros(3, 8), zeros(8, 6), approximate=wrong)


@everywhere
def test_leading_axes_merge_to_rows(side):
    """(2, 3) rows of a wider array lie evenly; so does a broadcast row."""
    wide = np.ones((2, 3, 20), np.float32)
    x = wide[..., :8]
    w, row = np.ones((8, 6), np.float32), np.broadcast_to(np.ones(8, np.float32), (6, 8))
    out = cupyattn.linear(*map(side.put, (x, w)))
    assert out.shape == (2, 3, 6)
    assert (side.get(out) == 8).all()
    assert (side.get(cupyattn.linear(*map(side.put, (row, w)))) == 8).all()
    assert cupyattn.linear(side.put(np.ones(8, np.float32)), side.put(w)).shape == (6,)

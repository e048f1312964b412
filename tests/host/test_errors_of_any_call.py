"""Calls that hypothesis draws and makes wrong: each says what is wrong, or it is not, and runs."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.bad_input.call import Call, assert_three_parts, backward, forward, full
from support.bad_input.options import TABLE
from support.bad_input.row import HUGE, INF, NAN
from support.devices import SENTINEL
from support.strategies import attention_problems

import cupyattn

# Values that are wrong whatever the rest of a call is.
WRONG_OPTIONS: dict[str, tuple[Any, ...]] = {
    "causal": (1, None, "yes", 1.0, np.array([1, 2])),
    "softmax_scale": ("1", True, 1j, NAN, INF, HUGE, [1.0], np.bool_(True), ml_dtypes.bfloat16(1)),
    "window_size": (3, [1, 0], (1,), (1.0, 0), (True, None), (-1, 0), (None, np.int8(-1)), {1: 2}),
    "q_offset": (True, 1.5, "3", [0], np.array(0), 2**60 + 1, np.zeros((7, 2), int), np.bool_(1)),
    "seqused_k": (3, [3], np.ones(1), np.ones((2, 2), int), np.full(1, -1)),
    "mask": (True, np.ones((1,) * 5, bool), np.ones(1, int), np.ones(1000, bool)),
    "bias": (1.0, np.ones((1,) * 5, np.float32), np.ones(1), np.ones(1000, np.float32)),
    "alibi_slopes": (0.5, np.ones((1, 1, 1), np.float32), np.ones(1000, np.float32)),
    "softcap": ("50", True, 0, -1.0, NAN, INF, HUGE, 1j, np.timedelta64(1, "s")),
    "sinks": (0.0, [0.0], np.ones((1, 1), np.float32), np.ones(1000, np.float32)),
    "dropout_p": (1.0, -0.1, NAN, "0.1", None, True, HUGE, np.float32(1)),
    "seed": (1.5, "1", True, -1, 2**64, [1], np.bool_(True), np.int8(-1), np.timedelta64(1, "s")),
    "rotary": ((), TABLE, (TABLE,), (None, None), (TABLE, None), (1, 2), (full(9, 999),) * 2),
    "score_mod": (1, "score", lambda score, b, h, i, j: True),
    "mask_mod": (3, "causal", lambda b, h, i, j: 1.0, lambda b, h, i, j: np.ones((1, 1, 1), bool)),
    "workspace": (1024, "w"),
}
OTHER_TYPES: dict[str, Callable[[np.ndarray], Any]] = {
    "None": lambda a: None,
    "list": lambda a: a.tolist(),
    "tuple": tuple,
    "number": lambda a: 1.0,
    "scalar": lambda a: np.float32(1),
    "dict": lambda a: {"a": a},
    "function": lambda a: lambda: a,
    "masked": np.ma.array,
    "memoryview": lambda a: memoryview(b"1234"),
    "int": lambda a: np.zeros(a.shape, int),
    "float64": lambda a: a.astype(np.float64),
    "complex": lambda a: a.astype(np.complex64),
    "object": lambda a: a.astype(object),
    "swapped": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "fewer axes": lambda a: np.zeros(a.shape[1:], a.dtype),
    "more axes": lambda a: a[None],
    "no axes": lambda a: np.zeros((), a.dtype),
    "no dim": lambda a: a[..., :0],
    "much dim": lambda a: np.zeros((*a.shape[:-1], 257), a.dtype),
    "matrix": lambda a: np.zeros((2, 2), a.dtype).view(np.matrix),
}


@st.composite
def wrong_calls(draw: st.DrawFn) -> tuple[Call, str]:
    """A random valid call, wrong in one way."""
    problem = draw(attention_problems(head_dims=((8, 8), (6, 4)), largest=7))
    q, k, v = problem.arrays()
    options = problem.options()
    out = np.full((problem.B, problem.Sq, problem.H, problem.Dv), SENTINEL, q.dtype)
    lse = full(problem.B, problem.H, problem.Sq)
    call = Call(cupyattn.attention, {"q": q, "k": k, "v": v}, **options)
    if draw(st.booleans()):
        dout, dlse = problem.gradients()
        arrays = {"dout": dout, **call.arrays, "out": out, "lse": lse}
        call = Call(cupyattn.attention_backward, arrays, **options, dlse=dlse)
    else:
        call.options |= {"out": (out, lse), "return_lse": True}

    kind = draw(st.sampled_from(("option", "type", "extent", "order")))
    name = draw(st.sampled_from(tuple(call.arrays)))
    array = call.arrays[name]
    if kind == "option":
        name = draw(st.sampled_from(tuple(WRONG_OPTIONS)))
        value = draw(st.sampled_from(WRONG_OPTIONS[name]))
        call.options[name] = value
        if name == "dropout_p":
            call.options["seed"] = 1
        # What functions return is seen only where there are scores.
        assume(not callable(value) or problem.Sq * problem.Sk)
        assume(not callable(value) or options.keys().isdisjoint({"seqused_k", "window_size"}))
    elif kind == "type":
        assume(array.size)  # an array that is empty already may lose its last axis
        call.arrays[name] = OTHER_TYPES[draw(st.sampled_from(tuple(OTHER_TYPES)))](array)
    elif kind == "extent":
        # One more in an axis that another array has too.
        name = draw(st.sampled_from([name for name in call.arrays if name != "q"]))
        axis = draw(st.integers(0, {"v": 2}.get(name, call.arrays[name].ndim - 1)))
        shape = list(call.arrays[name].shape)
        shape[axis] += 1
        call.arrays[name] = np.zeros(shape, call.arrays[name].dtype)
    else:
        assume(array.size and array.shape[-1] > 1)
        call.arrays[name] = array[..., ::-1]
    return call, f"{kind} {name}"


@given(wrong_calls())
def test_no_wrong_call_passes_or_fails_in_another_way(drawn: tuple[Call, str]):
    call, _ = drawn
    call.refused()


ODDITIES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.fractions(),
    st.decimals(),
    st.lists(st.integers(-2, 9), max_size=3),
    st.tuples(st.one_of(st.none(), st.integers(), st.floats()), st.none()),
    st.tuples(hnp.from_dtype(np.dtype(np.int8)), hnp.from_dtype(np.dtype(np.uint16))),
    hnp.scalar_dtypes().flatmap(hnp.from_dtype),
    hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=2, max_side=5)),
    st.sampled_from((Fraction(1, 2), object(), Ellipsis, NotImplemented)),
)
OPTIONS = (*WRONG_OPTIONS, "implementation", "return_lse", "out")
BACKWARD_OPTIONS = (*WRONG_OPTIONS, "dlse", "deterministic", "grads", "accumulate")


@given(st.data())
def test_anything_at_all_as_an_option(data: st.DataObject):
    """Whatever it is, the call runs or says in three parts what is wrong with it."""
    call, names = data.draw(st.sampled_from(((forward, OPTIONS), (backward, BACKWARD_OPTIONS))))
    call = call()
    call.options[data.draw(st.sampled_from(names))] = data.draw(ODDITIES)
    call.options.setdefault("seed", 1)
    before = [array.tobytes() for array in call.arrays.values()]
    try:
        call.run()
    except Exception as failure:
        assert_three_parts(failure)
    assert [array.tobytes() for array in call.arrays.values()] == before

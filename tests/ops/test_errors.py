"""Wrong calls raise the right exception: what was passed, what is allowed, how to fix it.

The tables of bad_input have a row for each fault. On a GPU the same rows run on CuPy arrays, except
those that only NumPy has. No wrong call changes `out`, and no message is long.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.bad_input.call import (
    HUGE,
    INF,
    NAN,
    PLACED,
    Call,
    Row,
    assert_three_parts,
    backward,
    forward,
    full,
    normal,
    softmax,
    softmax_backward,
)
from support.devices import SENTINEL
from support.strategies import attention_problems
from support.values import (
    MASK,
    NO_FLOATS,
    ONLY_IN_NUMPY,
    TABLE,
    array_rows,
    backward_rows,
    forward_rows,
    numpy_backward_rows,
    numpy_forward_rows,
    numpy_option_rows,
    option_rows,
    read_only,
    shape_rows,
    softmax_backward_rows,
    softmax_rows,
)

import cupyattn
from cupyattn import AttentionGrads, emulator


class Unexportable:
    """An array of another library that cannot be exported just now."""

    @property
    def __dlpack_device__(self) -> Any:
        raise RuntimeError("not just now")

    __cuda_array_interface__ = __dlpack__ = __dlpack_device__


def params(make: Callable[[], Call], rows: Iterator[Row], numpy_rows: Any = ()) -> Iterator[Any]:
    """Every row on NumPy arrays; the first ones on CuPy arrays too."""
    for library, id, *row in (
        *((library, *row) for row in rows for library in ("numpy", "cupy")),
        *(("numpy", *row) for row in numpy_rows),
    ):
        marks = (pytest.mark.gpu,) if library == "cupy" else ()
        yield pytest.param(library, make, *row, id=f"{library} {make.__name__} {id}", marks=marks)


@pytest.mark.parametrize(
    ("library", "make", "changes", "kind", "passed", "allowed"),
    [
        *params(forward, array_rows(NO_FLOATS, "q", "k", "v"), array_rows(ONLY_IN_NUMPY, "q", "v")),
        *params(forward, shape_rows()),
        *params(forward, option_rows(), numpy_option_rows()),
        *params(forward, forward_rows(), numpy_forward_rows()),
        *params(backward, array_rows(NO_FLOATS, "q", "k", "v"), array_rows(ONLY_IN_NUMPY, "k")),
        *params(backward, shape_rows()),
        *params(backward, option_rows(), numpy_option_rows()),
        *params(backward, backward_rows(), numpy_backward_rows()),
        *params(softmax, softmax_rows(), array_rows(ONLY_IN_NUMPY, "x")),
        *params(softmax_backward, softmax_backward_rows(), array_rows(ONLY_IN_NUMPY, "dout")),
    ],
)
def test_bad_input(library, make, changes, kind, passed, allowed):
    call = make()
    call.change({name: change for name, change in changes.items() if name != PLACED})
    call.place(library)
    changes.get(PLACED, lambda call: None)(call)
    failure = call.refused()
    assert type(failure) is kind, repr(failure)
    said, *middle, _ = str(failure).split("; ")
    assert passed in said
    assert allowed in "; ".join(middle)


@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize(
    ("valid", "equal_but_wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": False}, {"causal": 0}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}),
        ({"window_size": (1, 0)}, {"window_size": (True, False)}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"seed": 1}, {"seed": 1.0}),
        ({"seed": 1}, {"seed": True}),
        ({"q_offset": 1}, {"q_offset": True}),
    ],
    ids=str,
)
def test_what_was_called_before_makes_no_difference(make, valid, equal_but_wrong):
    """1 == 1.0 == True, also as keys of the caches of checked calls."""
    first, then = make(), make()
    first.change(valid)
    first.run()
    then.change(equal_but_wrong)
    assert type(then.refused()) is TypeError


def test_rotary_tables_reach_every_key_even_without_queries():
    arrays = {"q": normal(2, 0, 4, 8), "k": normal(2, 5, 2, 8), "v": normal(2, 5, 2, 6)}
    call = Call(cupyattn.attention, arrays, rotary=(TABLE[:4], TABLE[:4]))
    assert type(call.refused()) is ValueError


def test_a_mask_or_bias_that_does_not_broadcast_is_shown_by_its_name():
    for name, array in (("mask", MASK[:, :2]), ("bias", MASK[:, :2].astype(np.float32))):
        call = forward()
        call.change({name: array})
        assert f"{name}[:, None, None, :]" in str(call.refused()).split("; ")[-1]


def test_a_tuple_as_out_is_told_of_return_lse():
    call = forward()
    call.change({"return_lse": False})
    assert str(call.refused()).split("; ")[-1].startswith("pass return_lse=True")


def fix_of(make: Callable[[], Call], changes: dict[str, Any]) -> str:
    """The last part of the error that a changed call brings."""
    call = make()
    call.change(changes)
    return str(call.refused()).split("; ")[-1]


def masked(function: Callable[..., Any]) -> Callable[[], Call]:
    """Softmax or one of its family, over scores that `MASK` hides some of."""
    return lambda: Call(function, {"x": np.zeros(MASK.shape, np.float32)})


@pytest.mark.parametrize(
    "make",
    [forward, backward, *map(masked, (cupyattn.softmax, cupyattn.log_softmax, cupyattn.logsumexp))],
)
def test_a_mask_that_is_added_is_sent_to_bias(make):
    """astype('bool') would turn the 0 of the keys to attend into False, and -inf into True."""
    added = np.where(MASK, np.float32(0), np.float32(-np.inf))
    finite = np.maximum(added, -10_000)
    dtypes = (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)
    for mask in (*map(added.astype, dtypes), finite.astype(int)):
        fix = fix_of(make, {"mask": mask})
        assert "as bias=" in fix
        assert "mask != 0" in fix
        assert "astype" not in fix
    followed = make()
    followed.options = {"bias": added, **({"grads": None} if make is backward else {})}
    followed.run()


@pytest.mark.parametrize("make", [forward, backward])
def test_a_bias_that_is_true_and_false_is_sent_to_mask(make):
    """astype('float32') would add 1 to the scores of the keys to attend, and hide none."""
    assert "as mask=" in fix_of(make, {"bias": MASK})


def test_a_list_of_q_and_k_is_sent_to_a_tuple():
    cos, sin = cupyattn.rope_tables(4, 8)
    x = np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(TypeError, match=r"x has type list; .* pass a tuple \(q, k\)"):
        cupyattn.rope([x, x], cos, sin)


@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_a_list_for_a_number_is_not_told_to_convert_it(make, name):
    """float([1.0]) would raise."""
    assert fix_of(make, {name: [1.0]}) == "pass one number"
    assert fix_of(make, {name: "1.0"}) == "convert it with float(...)"


@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize(
    ("name", "values", "shape"),
    [
        ("seqused_k", (3, [3, 5], np.int64(3)), "int32 array of shape (B,)"),
        ("sinks", (0.0, [0.0]), "float array of shape (H,)"),
        ("alibi_slopes", (0.5, [0.5]), "float array of shape (H,) or (B, H)"),
    ],
)
def test_a_number_for_an_array_is_told_the_shape(make, name, values, shape):
    """numpy.asarray of it would be refused too, for having no axes."""
    for value in values:
        fix = fix_of(make, {name: value})
        assert shape in fix
        assert "asarray" not in fix
    followed = forward()
    followed.options = {"seqused_k": np.full(2, 3, "int32")}
    followed.run()


@pytest.mark.parametrize("make", [forward, backward])
def test_text_for_a_switch_is_not_told_to_convert_it(make):
    """bool("False") is True."""
    for value in ("False", b"0", [False], None):
        assert fix_of(make, {"causal": value}) == "pass one of these"
    assert fix_of(make, {"causal": 0}) == "convert it with bool(causal)"


@pytest.mark.parametrize("missing", [(0,), (0, 2)], ids=["batch", "batch and heads"])
def test_missing_axes_are_added_where_they_belong(missing):
    """Followed for one array after the other, the call runs."""
    arrays = {name: np.zeros((1, 3, 1, 8), np.float32).squeeze(missing) for name in "qkv"}
    for name in arrays:
        fix = str(Call(cupyattn.attention, arrays).refused()).split("; ")[-1]
        example = re.search(rf"{name}\[.*?\]", fix)
        arrays[name] = eval(example[0], dict(arrays))
    assert Call(cupyattn.attention, arrays).run().shape == (1, 3, 1, 8)


def test_no_axes_are_added_where_it_is_not_known_which():
    assert fix_of(forward, {"q": lambda a: a[0, 0, 0]}) == "reshape it"
    assert fix_of(forward, {"q": lambda a: a[None]}) == "reshape it"


def test_a_sink_has_the_digits_of_its_dtype():
    for dtype in (np.float32, ml_dtypes.bfloat16):
        sinks = np.full(4, 3e38, dtype)
        call = forward()
        call.change({"sinks": sinks})
        assert f"up to {sinks[0]!s};" in str(call.refused())
        assert len(str(sinks[0])) < 12


def in_fortran_order(*shape: int) -> np.ndarray:
    return np.asfortranarray(full(*shape))


@pytest.mark.parametrize("change", [read_only, in_fortran_order])
def test_nobody_would_see_a_copy_of_a_result(change):
    """The fix is an array made before the call, not one made in it."""
    dq, out = change(2, 3, 4, 8), change(2, 3, 4, 6)
    for make, changes, name in (
        (forward, {"out": (out, full(2, 4, 3))}, "out"),
        (forward, {"out": (full(2, 3, 4, 6), change(2, 4, 3))}, "lse"),
        (backward, {"grads": AttentionGrads(dq, None, None, None, None)}, "grads.dq"),
        (softmax, {"out": change(2, 3, 8)}, "out"),
        (softmax_backward, {"grads": change(2, 3, 8)}, "grads"),
    ):
        fix = fix_of(make, changes)
        assert fix.startswith("make a writable, C-contiguous array before the call")
        assert f"pass it as {name}" in fix
    for make in (backward, softmax_backward):  # where out is read, a copy will do
        fix = fix_of(make, {"out": lambda a: np.asfortranarray(a)})
        assert fix == "pass a contiguous copy, ascontiguousarray(out)"


@pytest.mark.parametrize("axis", [-1.0, True, "0", None, (0,), np.array([1, 2]), np.array(-1.0)])
def test_what_is_no_axis(axis):
    for make in (softmax, softmax_backward):
        call = make()
        call.change({"axis": axis})
        failure = call.refused()
        assert type(failure) is TypeError
        assert str(failure).startswith("axis has type ")


@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize("array", [np.ndarray, Unexportable()], ids=["class", "raising"])
def test_what_only_looks_like_an_array(make, array):
    """In every place that takes one."""
    failures = []
    for name in ("seqused_k", "mask", "bias", "alibi_slopes", "sinks", "q_offset", "workspace"):
        call = make()
        call.change({name: array})
        failures.append(call.refused())
    for name in make().arrays:
        call = make()
        call.arrays[name] = array
        failures.append(call.refused())
    assert {type(failure) for failure in failures} == {TypeError}
    if isinstance(array, Unexportable):
        assert all("not just now" in str(failure) for failure in failures)


@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize(
    ("name", "array"),
    [("seqused_k", [-1, 5]), ("seqused_k", [0, 6]), ("q_offset", [0, 2**61])],
    ids=str,
)
def test_the_emulator_looks_at_values_too(make, name, array):
    """As every call on NumPy arrays; the kernels would take the nearer end of the range."""
    call = make()
    call.change({name: np.array(array)})
    with cupyattn.backend("emulator"):
        failure = call.refused()
    assert type(failure) is ValueError
    assert f"{name} has values from {array[0]} to {array[1]}" in str(failure)


@pytest.mark.parametrize("make", [forward, backward])
def test_an_exception_in_mask_mod_is_the_callers(make):
    def mask_mod(b, h, i, j):
        raise KeyError("mine")

    call = make()
    call.change({"mask_mod": mask_mod})
    before = call.contents()
    with pytest.raises(KeyError, match="mine"):
        call.run()
    assert call.contents() == before


@pytest.mark.gpu
@pytest.mark.parametrize("make", [forward, backward, softmax, softmax_backward])
def test_numpy_and_cupy_arrays_mixed(make):
    """Any one array on the other side, outputs too."""
    names = [*make().arrays, *({"out", "grads"} & set(make().options))]
    for name in names:
        call, other = make(), make()
        call.place("cupy")
        source = other.arrays if name in other.arrays else other.options
        (call.arrays if name in call.arrays else call.options)[name] = source[name]
        failure = call.refused()
        assert type(failure) is TypeError
        assert "all arrays of a call are NumPy, or all are CuPy" in str(failure)
    for option, value in (("mask", MASK), ("rotary", (TABLE, TABLE)), ("workspace", TABLE)):
        if make in (forward, backward):
            call = make()
            call.place("cupy")
            call.change({option: value})
            assert "numpy" in str(call.refused()).split("; ")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [forward, backward, softmax, softmax_backward])
def test_arrays_on_two_devices(make):
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    call = make()
    call.place("cupy")
    first = next(iter(call.arrays))
    with cupy.cuda.Device(1):
        call.arrays[first] = cupy.zeros(call.arrays[first].shape, np.float32)
    failure = call.refused()
    assert type(failure) is ValueError
    assert f"{first} on device 1" in str(failure)


NOTHING = emulator.load(
    ".version 7.5\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n"
)
LONG = {
    "list": [0.5] * 100_000,
    "text": "x" * 1_000_000,
    "bytes": bytes(1_000_000),
    "tuple": tuple(range(10_000)),
    "nested": [[[0.5] * 1000] * 100] * 10,
    "texts": ["x" * 1_000_000] * 100,
    "integer": 10**5000,  # Python refuses to write it
    "pair": (10**5000, -1),
    "type": type("x" * 1_000_000, (), {})(),
}


@pytest.mark.parametrize("make", [forward, backward, softmax])
@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_a_message_is_short_however_long_the_value(make, value):
    parameters = inspect.signature(make().function).parameters.values()
    for name in (p.name for p in parameters if p.kind is p.KEYWORD_ONLY):
        call = make()
        call.change({name: value})
        assert len(str(call.refused())) < 1000, name
    call = make()
    first = next(iter(call.arrays))
    call.arrays[first] = value
    assert len(str(call.refused())) < 1000


@pytest.mark.parametrize("value", [v for v in LONG.values() if isinstance(v, str | bytes | list)])
def test_names_of_backends_are_short_in_messages(value):
    with pytest.raises(ValueError, match="; ") as failure, cupyattn.backend(value):
        pass
    assert len(str(failure.value)) < 1000


@pytest.mark.parametrize("value", [LONG["list"], LONG["text"], LONG["bytes"]])
def test_messages_of_the_emulator_are_short_too(value):
    for use in (
        lambda: emulator.Checks(max_steps=value),
        lambda: emulator.Checks(races=value),
        lambda: emulator.launch(NOTHING, "nothing", value, 32, []),
        lambda: emulator.launch(NOTHING, str(value), 1, 32, []),
        lambda: NOTHING.symbol(str(value)),
    ):
        with pytest.raises(emulator.LaunchError) as failure:
            use()
        assert len(str(failure.value)) < 300


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
    "much dim": lambda a: np.zeros((*a.shape[:-1], 513), a.dtype),
    "matrix": lambda a: np.zeros((2, 2), a.dtype).view(np.matrix),
}


@st.composite
def wrong_calls(draw: st.DrawFn) -> tuple[Call, str]:
    """A random valid call, wrong in one way."""
    problem = draw(attention_problems(head_dims=((8, 8), (6, 4)), largest=7))
    q, k, v = problem.arrays()
    options = problem.keywords()
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
    """For any argument the call runs, or its error has three parts."""
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


def test_functions_over_keys_name_the_largest_head_dim():
    q, k, lse = (np.zeros(shape, np.float16) for shape in ((8, 2, 513), (8, 1, 513), (2, 8)))
    pool, cuts = np.zeros((1, 16, 1, 513), np.float16), np.array([0, 8], np.int32)
    lengths, ends, table = (cuts, cuts, 8, 8), np.array([8], np.int32), np.zeros((1, 1), np.int32)
    calls: tuple[Callable[[], object], ...] = (
        lambda: cupyattn.attention_varlen(q, k, k, *lengths),
        lambda: cupyattn.attention_varlen_backward(q, q, k, k, q, lse, *lengths),
        lambda: cupyattn.paged_attention(q[None], pool, pool, table, ends),
        lambda: cupyattn.append_kv(pool, pool, k, k, np.arange(8, dtype=np.int32)),
        lambda: cupyattn.PagedKVCache(1, 1, 16, 1, 513, dtype="float16", xp=np),
    )
    for call in calls:
        with pytest.raises(ValueError, match="1 to 512"):
            call()

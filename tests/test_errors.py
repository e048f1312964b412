"""Bad input: the right exception, what was passed, what is allowed, how to fix it; out untouched.

The tables of bad_input have a row for each fault. On a GPU the same rows run on CuPy arrays, but
for those that only NumPy has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from bad_input.arrays import NO_FLOATS, ONLY_IN_NUMPY, array_rows, shape_rows
from bad_input.call import Call, backward, forward, normal, softmax, softmax_backward
from bad_input.options import MASK, TABLE, numpy_option_rows, option_rows
from bad_input.outputs import (
    backward_rows,
    forward_rows,
    numpy_backward_rows,
    numpy_forward_rows,
    softmax_backward_rows,
    softmax_rows,
)
from bad_input.row import PLACED, Row

import cupyattn


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
    names = [*make().arrays, *({"out", "dx", "grads"} & set(make().options))]
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

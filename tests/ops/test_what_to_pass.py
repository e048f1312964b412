"""Errors for an argument that is no array: following their advice works, and loses nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.bad_input.call import Call
from support.bad_input.every_function import every_function

import cupyattn

EXAMPLE = re.compile(r"numpy\.\w+\(.*\)")
CALLS = list(every_function())
OF_ONE_OR_ALL = {"dloss", "seed", "temperature", "top_k"}
"""Numbers are what these may be, or are as an array."""
UPDATED = {
    "append_kv": {"k_cache", "v_cache", "k_scales", "v_scales", "q"},
    "copy_blocks": {"k_cache", "v_cache", "k_scales", "v_scales"},
    "add_to": {"total"},
    "adamw_step": {"param", "m", "v"},
    "adamw_step_8bit": {"param", "m", "v", "m_scales", "v_scales"},
}


def places(value: Any, *trail: Any) -> Iterator[tuple[Any, ...]]:
    """The ways to the arrays of a call: an argument, and where in a tuple."""
    if isinstance(value, np.ndarray):
        yield trail
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from places(item, *trail, name)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from places(item, *trail, i)


def changed(value: Any, trail: tuple[Any, ...], change: Any) -> Any:
    if not trail:
        return change(value)
    if isinstance(value, dict):
        return {**value, trail[0]: changed(value[trail[0]], trail[1:], change)}
    items = list(value)
    items[trail[0]] = changed(items[trail[0]], trail[1:], change)
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def is_written(call: Call, name: str) -> bool:
    function = call.function.__name__
    if name in UPDATED.get(function, ()):
        return True
    if function.endswith("_backward"):
        return name in ("grads", "dlogits")
    return name == "out"


def given(call: Call) -> dict[str, Any]:
    return {**call.arrays, **call.options}


def cases(*, written: bool) -> Iterator[tuple[Call, tuple[Any, ...]]]:
    """Every array of every call, by the way to it."""
    for call in CALLS:
        for trail in places(given(call)):
            name = trail[0]
            if name in ("workspace", *OF_ONE_OR_ALL):
                continue
            if is_written(call, name) == written:
                yield call, trail


def run(call: Call, trail: tuple[Any, ...], change: Any) -> None:
    """Call with one array replaced."""
    arguments = changed(given(call), trail, change)
    arrays = [arguments.pop(name) for name in call.arrays]
    call.function(*arrays, **arguments)


def error_of(call: Call, trail: tuple[Any, ...], change: Any) -> list[str]:
    """The parts of the error that a call with one array replaced brings."""
    with pytest.raises(TypeError) as refused:
        run(call, trail, change)
    return str(refused.value).split("; ")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.function.__name__)
def test_the_calls_themselves_are_right(call):
    """And where they take `grads` or a workspace, its kind is reported."""
    call.run()
    if hasattr(grads := call.options.get("grads"), "_fields"):
        passed, allowed, _ = error_of(call, ("grads",), tuple)
        kind, fields = type(grads).__name__, ", ".join(grads._fields)
        assert passed == "grads has type tuple"
        assert re.fullmatch(f"it must be an? {kind} of {fields}: arrays or None", allowed)
        assert ("an " in allowed) == (kind in ("AttentionGrads", "RMSNormGrads"))
    if "workspace" in call.options:
        *_, fix = error_of(call, ("workspace",), np.ndarray.tolist)
        assert fix == "pass an array of 'uint8', or none"


def test_every_function_is_here():
    functions = {name for name in cupyattn.__all__ if inspect.isfunction(getattr(cupyattn, name))}
    without_arrays = {"backend", "block_mask", "device_info", "explain", "rope_tables"}
    without_arrays |= {"vjp", "value_and_grad", "grad", "checkpoint", "stop_gradient"}
    called = {call.function.__name__ for call in CALLS}
    assert called == functions - without_arrays


def test_a_copy_of_a_result_would_be_lost():
    for call, trail in cases(written=True):
        for change in (np.ndarray.tolist, lambda array: 1.0):
            passed, *_, fix = error_of(call, trail, change)
            name = passed.split(" has type ")[0]
            assert fix.startswith("make a writable, C-contiguous array before the call"), fix
            assert f"pass it as {name} and read that" in fix


def test_a_number_is_told_the_shape():
    """numpy.asarray of it would have no axes, and be refused too."""
    for call, trail in cases(written=False):
        for number in (1, 1.0):
            passed, *_, fix = error_of(call, trail, lambda array, number=number: number)
            assert "shape" in fix, (call.function, trail)
            assert "asarray" not in fix
            if example := EXAMPLE.search(fix):
                name = passed.split(" has type ")[0].rpartition("'s ")[2]
                text = example[0].replace(f", {name},", f", {number},")
                run(call, trail, lambda array, text=text: made(text, array))


def made(example: str, array: np.ndarray) -> np.ndarray:
    """Make the array that an error describes; the letters are the documentation's extents."""
    extents = {"B": 1, "S": 3, "length": 3, "shape": array.shape, "dtype": array.dtype}
    return eval(example, {"numpy": np, **extents})


def test_a_masked_array_to_be_written_is_told_where_its_items_are():
    """.filled would be a copy, and lost."""
    for call, trail in cases(written=True):
        *_, fix = error_of(call, trail, np.ma.array)
        assert fix.startswith("pass its .data, "), (call.function, trail)
        assert "filled" not in fix
        run(call, trail, lambda array: np.ma.array(array).data)


def test_a_masked_array_to_be_read_is_told_to_fill_it():
    for call, trail in cases(written=False):
        *_, fix, more = error_of(call, trail, np.ma.array)
        assert re.fullmatch(r"pass \S+\.filled\(\.\.\.\) of a value that you choose", fix)
        assert "mask=" in more, (call.function, trail)


@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_sequence_of_arrays_is_told_to_unpack_it(sequence):
    """numpy.asarray of arrays of several shapes would raise."""
    arrays = sequence([np.ones(3, np.float32), np.ones((2, 3), np.float32)])
    with pytest.raises(TypeError, match=r"arrays\[0\] has type .*; unpack it, as in glob"):
        cupyattn.global_norm(arrays)
    assert cupyattn.global_norm(*arrays) == 3.0
    with pytest.raises(TypeError, match=r"numpy\.asarray\(arrays\[0\]\)"):
        cupyattn.global_norm(sequence([3.0, 4.0]))


class Capsule:
    """An array of another library in the CPU's memory: DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class Convertible(Capsule):
    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self.array


@pytest.mark.parametrize("kind", [Capsule, Convertible])
def test_another_librarys_array_is_told_what_numpy_makes_of_it(kind):
    """numpy.asarray of the one with DLPack alone would be an array of one object."""
    x = kind(np.ones((2, 3), np.float32))
    with pytest.raises(TypeError) as refused:
        cupyattn.softmax(x)
    fix = str(refused.value).split("; ")[-1]
    made = eval(EXAMPLE.search(fix)[0].split(" or ")[0], {"numpy": np, "x": x})
    assert cupyattn.softmax(made).shape == (2, 3)


def test_what_is_no_number_at_all_is_told_by_its_kind():
    """NumPy calls one letter str32, for its bits."""
    x = np.ones((2, 3), np.float32)
    for dtype, name in (("U1", "str"), ("S5", "bytes")):
        with pytest.raises(TypeError, match=f"mask has dtype {name};"):
            cupyattn.softmax(x, mask=np.full((2, 3), "x", dtype))

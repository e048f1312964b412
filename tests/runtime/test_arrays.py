"""Arrays that a call accepts, and their descriptions."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.processes import environment
from support.recording_device import Recorder, device_array, launched

from cupyattn.ops.attention import api as forward
from cupyattn.runtime import arrays
from cupyattn.runtime.arrays import (
    Layout,
    Operands,
    address,
    adopt,
    contiguous,
    exports_memory,
    layouts_of,
    starts_of,
)
from cupyattn.runtime.records import Record, record_of, values_of


def array_on_device(device_id: int = 0, dtype: Any = np.float32) -> Any:
    """A CuPy array at an address without memory; its items are never read."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.memory.UnownedMemory(2**40, 4096, None, device_id=device_id)
    return cupy.ndarray((2, 3), dtype, memptr=cupy.cuda.memory.MemoryPointer(memory, 0))


def adopted(given: dict[str, Any], fixes: dict[str, str] | None = None) -> Operands[Record[Any]]:
    """Adopt arrays that errors call by these names."""
    return adopt(record_of(*given)(*given.values()), fixes or {})


def layout_of(array: Any) -> Layout:
    """The layout of an adopted array."""
    operands = adopted({"x": array})
    return values_of(layouts_of(type(operands.arrays), operands.description))[0]


def first_of(given: dict[str, Any]) -> Any:
    """Adopt arrays and return the first."""
    return values_of(adopted(given).arrays)[0]


class Foreign:
    """An array of another library with the given protocol."""

    def __init__(self, **protocol: Any) -> None:
        for name, value in protocol.items():
            setattr(self, f"__{name}__", value)


INTERFACE = {"shape": (2, 3), "typestr": "<f4", "data": (2**40, False), "version": 3}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in INTERFACE.items() if name != key}


def test_adopt_does_not_copy_arrays():
    given_arrays = {"q": np.zeros((2, 3)), "k": None, "v": np.empty((0,), bool)[::-1]}
    operands = adopted(given_arrays)
    assert operands.device_id is None
    pairs = zip(values_of(operands.arrays), given_arrays.values(), strict=True)
    assert all(array is given for array, given in pairs)
    assert operands.places == [address(given_arrays["q"]), 0, address(given_arrays["v"])]


def test_equal_descriptions_mean_equal_layouts_and_alignment():
    """The description has everything that checks and plans use, and nothing else."""
    memory = np.zeros(64, np.uint8)
    start = -memory.ctypes.data % 16
    x = memory[start : start + 32].view(np.float64).reshape(2, 2)
    kind, description = record_of("x"), adopted({"x": x}).description
    assert description == (((2, 2), (16, 8), np.dtype(np.float64), 0),)
    assert values_of(starts_of(kind, description)) == (0,)
    assert values_of(layouts_of(kind, description)) == (Layout(x.shape, x.strides, x.dtype),)
    same = memory[start + 16 : start + 48].view(np.float64).reshape(2, 2)
    assert {description: 1}[adopted({"x": same}).description]
    shifted = memory[start + 8 : start + 40].view(np.float64).reshape(2, 2)
    assert values_of(starts_of(kind, adopted({"x": shifted}).description)) == (8,)
    for other in (shifted, x.T, x[:1], x.view("i8"), None):
        assert adopted({"x": other}).description != description


def test_adopt_sees_a_changed_array():
    """Shape, strides and memory of an array object may change between two calls."""
    x = np.zeros(6)
    before = adopted({"x": x})
    x.resize((2, 3), refcheck=False)
    assert adopted({"x": x}).description[0][:2] == ((2, 3), (24, 8))
    x.resize((200, 300), refcheck=False)
    after = adopted({"x": x})
    assert after.places == [x.ctypes.data]
    assert before.description != after.description


def test_adopt_takes_subclasses_without_a_copy():
    class Mine(np.ndarray):
        pass

    mine = np.zeros(4).view(Mine)
    operands = adopted({"q": np.zeros(3), "k": mine})
    assert np.shares_memory(values_of(operands.arrays)[1], mine)
    assert operands.device_id is None


def test_adopt_takes_device_arrays_and_their_device():
    array = array_on_device(device_id=3)
    for _ in range(2):  # the first one brings CuPy's kind of array to light
        operands = adopted({"q": array, "k": array})
        assert operands.device_id == 3
        assert values_of(operands.arrays) == (array, array)
        assert operands.places == [2**40, 2**40]


def test_array_within_starts_at_its_offset():
    x = array_on_device()
    part = arrays.array_within(x, 8, (2, 2), np.dtype(np.int16))
    assert (part.shape, part.dtype, part.strides) == ((2, 2), np.int16, (4, 2))
    assert address(part) == address(x) + 8


def test_adopt_without_arrays_has_no_device():
    none = record_of("q")(None)
    assert adopt(none) == Operands(None, none, [0], (None,))


@pytest.mark.parametrize("device_type", [2, 13])
def test_adopt_imports_dlpack_of_cuda_devices(monkeypatch, device_type: int):
    array = array_on_device()
    monkeypatch.setattr(
        arrays, "load_cupy", lambda: SimpleNamespace(from_dlpack=lambda given: array)
    )
    assert first_of({"q": Foreign(dlpack_device=lambda: (device_type, 0))}) is array


def test_adopt_imports_the_cuda_array_interface(monkeypatch):
    array = array_on_device()
    monkeypatch.setattr(arrays, "load_cupy", lambda: SimpleNamespace(asarray=lambda given: array))
    assert first_of({"q": Foreign(cuda_array_interface=INTERFACE)}) is array


def test_bfloat16_of_another_library_keeps_its_dtype(monkeypatch):
    """DLPack supports bfloat16, the CUDA array interface does not."""
    array = array_on_device(dtype=pytest.importorskip("ml_dtypes").bfloat16)
    library = SimpleNamespace(
        from_dlpack=lambda given: array, asarray=lambda given: array.view(np.dtype("V2"))
    )
    monkeypatch.setattr(arrays, "load_cupy", lambda: library)
    both = Foreign(cuda_array_interface={"typestr": "<V2"}, dlpack_device=lambda: (2, 0))
    assert first_of({"q": both}).dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("value", "described"),
    [
        ([1.0, 2.0], "builtins.list"),
        (3.0, "builtins.float"),
        (np.float32(3), "numpy.float32"),
        ("q", "builtins.str"),
        (object(), "builtins.object"),
        (Foreign(dlpack_device=lambda: (1, 0)), "Foreign"),  # kDLCPU, as a CPU tensor has
        (memoryview(b"1234"), "builtins.memoryview"),
    ],
)
def test_adopt_refuses_other_objects(value: Any, described: str):
    with pytest.raises(TypeError) as failure:
        adopted({"k": np.zeros(3), "q": value})
    passed, allowed, fix = str(failure.value).split("; ")
    assert passed.startswith("q has type ")
    assert described in passed
    assert "numpy.ndarray, cupy.ndarray" in allowed
    number = isinstance(value, float | np.generic)  # an array of it would have no axes
    assert ("numpy.full(shape, q, dtype)" if number else "numpy.asarray(q)") in fix


@pytest.mark.parametrize("name", ["q", "mask"])
def test_masked_array_error_keeps_the_mask(name: str):
    with pytest.raises(TypeError) as failure:
        adopted({name: np.ma.zeros(3)})
    passed, _, fix = str(failure.value).split("; ", 2)
    assert passed == f"{name} has type numpy.ma.MaskedArray"
    assert f"{name}.filled(" in fix
    assert ".data" not in fix
    assert "what a function is to leave out, say with mask= where it takes one (True = keep" in fix
    assert "attention" not in fix
    assert "asarray" not in fix


@pytest.mark.parametrize("kind", [np.ndarray, np.float32, Foreign, list])
def test_array_class_is_refused(kind: type):
    """The class np.ndarray has all attributes of an array."""
    with pytest.raises(
        TypeError, match=rf"q is the class \S+\.{kind.__name__} itself; .*; pass an"
    ):
        adopted({"q": kind})
    assert not exports_memory(kind)


def test_fix_of_the_caller_replaces_the_default():
    for value in (3, [3, 5]):
        with pytest.raises(TypeError, match=r"; make one$"):
            adopted({"n": value}, {"n": "make one"})
    for value, fix in ((np.ma.zeros(3), "filled"), (np.ndarray, "pass an array")):
        with pytest.raises(TypeError, match=fix):
            adopted({"n": value}, {"n": "make one"})


class Raising:
    """An array of another library whose export fails."""

    def __init__(self, failure: Exception, *names: str) -> None:
        self.failure, self.names = failure, names

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["names"]:
            raise self.__dict__["failure"]
        raise AttributeError(name)


def test_exports_memory():
    assert exports_memory(np.zeros(3))
    assert exports_memory(Foreign(cuda_array_interface=None))
    assert exports_memory(Raising(RuntimeError("no"), "__dlpack__"))
    for value in (3, None, [1], "q", np.float32(1)):
        assert not exports_memory(value)


GRADIENT = BufferError("Can't export tensors that require gradient, use tensor.detach()")
BROKEN = {
    "None": (Foreign(cuda_array_interface=None), "TypeError"),
    "a list": (Foreign(cuda_array_interface=[1]), "TypeError"),
    "empty": (Foreign(cuda_array_interface={}), "KeyError: 'version'"),
    "version 4": (Foreign(cuda_array_interface=INTERFACE | {"version": 4}), "version 4"),
    "version text": (Foreign(cuda_array_interface=INTERFACE | {"version": "3"}), "version '3'"),
    "no shape": (Foreign(cuda_array_interface=without("shape")), "KeyError: 'shape'"),
    "no typestr": (Foreign(cuda_array_interface=without("typestr")), "KeyError: 'typestr'"),
    "no data": (Foreign(cuda_array_interface=without("data")), "KeyError: 'data'"),
    "no pointer": (Foreign(cuda_array_interface=INTERFACE | {"data": None}), "TypeError"),
    "null": (Foreign(cuda_array_interface=INTERFACE | {"data": (0, False)}), "null pointer"),
    "dtype": (Foreign(cuda_array_interface=INTERFACE | {"typestr": "<f99"}), "'<f99'"),
    "shape": (Foreign(cuda_array_interface=INTERFACE | {"shape": (-1, 3)}), "negative"),
    "masked": (Foreign(cuda_array_interface=INTERFACE | {"mask": 1}), "masked arrays"),
    "raises": (Raising(RuntimeError("not now"), "__cuda_array_interface__"), "not now"),
    "requires grad": (Raising(GRADIENT, "__dlpack_device__"), r"use tensor.detach\(\)"),
    "no device": (Foreign(dlpack_device=lambda: None), "TypeError"),
    "device of one": (Foreign(dlpack_device=lambda: (2,)), "ValueError"),
    "device text": (Foreign(dlpack_device=lambda: ("cuda", 0)), "ValueError"),
    "device no function": (Foreign(dlpack_device=(2, 0)), "TypeError"),
    "device raises": (Foreign(dlpack_device=lambda: 1 / 0), "ZeroDivisionError"),
}


@pytest.mark.parametrize(("array", "cause"), BROKEN.values(), ids=BROKEN)
def test_failed_export_error_has_the_cause(array: Any, cause: str):
    pytest.importorskip("cupy")
    with pytest.raises(TypeError) as failure:
        adopted({"k": array, "q": np.zeros(3)})
    passed, allowed, fix = str(failure.value).split("; ")
    assert re.match(rf"k has type \S+, whose __\w+__ cannot be used \(.*{cause}.*\)$", passed)
    assert "numpy.ndarray, cupy.ndarray" in allowed
    assert fix.startswith("pass one of these")
    assert failure.value.__cause__ is not None


BROKEN_CAPSULES = {
    "none": {},
    "None": {"dlpack": lambda **options: None},
    "text": {"dlpack": lambda **options: "capsule"},
    "of no function": {"dlpack": 3},
    "raises": {"dlpack": lambda **options: 1 / 0},
}


@pytest.mark.gpu
@pytest.mark.parametrize("protocol", BROKEN_CAPSULES.values(), ids=BROKEN_CAPSULES)
def test_broken_capsules(protocol: dict[str, Any]):
    with pytest.raises(TypeError, match=r"q has type .*Foreign, whose __dlpack__ cannot be used "):
        adopted({"q": Foreign(dlpack_device=lambda: (2, 0), **protocol)})


@pytest.mark.gpu
def test_memory_of_the_cpu_is_refused():
    """A kernel that reads it would break every later call of the process."""
    host = np.zeros((2, 3), np.float32)
    interface = INTERFACE | {"data": (host.ctypes.data, False)}
    with pytest.raises(TypeError, match="__cuda_array_interface__ cannot be used"):
        adopted({"q": Foreign(cuda_array_interface=interface)})


@pytest.mark.parametrize(
    "array",
    [Foreign(cuda_array_interface=INTERFACE), Foreign(dlpack_device=lambda: (2, 0))],
    ids=["interface", "dlpack"],
)
def test_a_cuda_array_where_there_is_no_gpu(array: Any):
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.is_available():
        pytest.skip("tells what happens without a GPU")
    with pytest.raises(TypeError, match=r"q has type .*Foreign with __.*no GPU.*; .*; pass NumPy"):
        adopted({"q": array})


def test_a_cuda_array_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        TypeError, match=r"q is a CUDA array, and CuPy did not .*; .*; .*pip install"
    ):
        adopted({"q": Foreign(cuda_array_interface=INTERFACE)})


def test_adopt_refuses_a_mixture_of_libraries():
    with pytest.raises(TypeError, match=r"q is cupy, bias is numpy; .*all are CuPy; .*asnumpy"):
        adopted({"q": array_on_device(), "bias": np.zeros(3)})


def test_adopt_refuses_two_devices():
    with pytest.raises(ValueError, match=r"q on device 0, k on device 1; .*one device; .*Device"):
        adopted({"q": array_on_device(0), "k": array_on_device(1)})


def test_numpy_users_need_no_cupy():
    """The NumPy path works without CuPy, and does not import an installed CuPy."""
    program = """
import sys
{block}
import numpy as np, cupyattn
q = np.ones((1, 2, 2, 4), np.float32)
out, lse = cupyattn.attention(q, q, q, causal=True, return_lse=True, out=None)
cupyattn.attention_backward(out, q, q, q, out, lse, causal=True)
cupyattn.softmax_backward(q, cupyattn.softmax(q, out=np.empty_like(q)))
assert {loaded}
"""
    for block, loaded in (
        ("", "not any(m.partition('.')[0] in ('cupy', 'cupy_backends') for m in sys.modules)"),
        ("sys.modules['cupy'] = sys.modules['cupy_backends'] = None", "cupyattn.device_info()"),
    ):
        code = program.format(block=block, loaded=loaded)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
        )
        assert done.returncode == 0, done.stderr


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[1:],
    "columns": lambda x: x[..., :2],
    "every other row": lambda x: x[::2],
    "backwards": lambda x: x[:, ::-1],
    "transposed": lambda x: x.T,
    "one row": lambda x: x[:1],
    "one column": lambda x: x[..., :1],
    "a new axis": lambda x: x[:, None],
    "a broadcast row": lambda x: device_array(x.shape, x.dtype, strides=(0, 12, 4)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_description_has_the_layout(name):
    x = VIEWS[name](device_array((4, 5, 3), np.float32))
    layout = layout_of(x)
    if x.flags.c_contiguous:  # axes of one item may have any strides then
        assert layout == contiguous(x.shape, x.dtype)
    else:
        assert layout == Layout(x.shape, x.strides, x.dtype)


def test_an_empty_array_is_described_too():
    x = device_array((4, 0, 3), np.float32)
    assert layout_of(x) == contiguous(x.shape, x.dtype)


def test_different_layouts_have_different_descriptions():
    x = device_array((4, 4, 4), np.float32)
    described = [adopted({"x": view(x)}).description for view in VIEWS.values()]
    described.append(adopted({"x": x.view(np.int32)}).description)
    shifted = device_array((4, 4, 4), np.float32, address=x.data.ptr + 4)
    described.append(adopted({"x": shifted}).description)
    assert len({*described}) == len(described)


def test_a_shape_that_was_set_in_place_is_seen():
    x = device_array((4, 6), np.float32)
    before = adopted({"x": x}).description
    x.shape = (6, 4)
    assert layout_of(x) == contiguous((6, 4), x.dtype)
    assert adopted({"x": x}).description != before


def test_kernels_get_the_strides_of_each_call(monkeypatch):
    """Alternate calls of one shape with different strides."""
    recorder = Recorder()
    monkeypatch.setattr(forward, "device_of", lambda operands: recorder)
    k, v = device_array((2, 5, 4, 8)), device_array((2, 5, 4, 8))
    dense, packed = device_array((2, 3, 4, 8)), device_array((2, 3, 3, 4, 8))[:, :, 1]
    for _ in range(2):
        for q in (dense, packed):
            _, params, _ = launched(recorder, q, k, v)
            assert params["q"].tolist() == tuple(stride // 2 for stride in q.strides[:-1])

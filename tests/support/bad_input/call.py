"""A valid call of each public function, a change to it, and the error that it has to give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.devices import SENTINEL, GpuArrays, placed

import cupyattn
from cupyattn import AttentionGrads, MaskMod, ScoreMod

FAULTS = (TypeError, ValueError, NotImplementedError)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


def full(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.full(shape, SENTINEL, dtype)


class Call:
    """A valid call: its arrays by name, and its options."""

    def __init__(self, function: Callable[..., Any], arrays: dict[str, Any], **options: Any):
        self.function = function
        self.arrays = arrays
        self.options = options

    def change(self, changes: dict[str, Any]) -> None:
        """Arrays by functions of them, options to values."""
        for name, change in changes.items():
            if name in self.arrays:
                self.arrays[name] = change(self.arrays[name])
            else:
                self.options[name] = change

    def place(self, library: str) -> None:
        """Move every array, with its strides, to where the call is to run."""
        if library == "cupy":
            self.arrays = {name: _moved(array) for name, array in self.arrays.items()}
            self.options = {name: _moved(option) for name, option in self.options.items()}

    def contents(self) -> list[bytes]:
        return [_bytes(array) for array in _arrays_in((self.arrays, self.options))]

    def run(self) -> Any:
        return self.function(*self.arrays.values(), **self.options)

    def refused(self) -> Exception:
        """Run it: it has to fail in the documented way and to leave all memory as it was."""
        before = self.contents()
        with pytest.raises(FAULTS) as failure:
            self.run()
        assert self.contents() == before, "a call that failed has written"
        assert_three_parts(failure.value)
        return failure.value


def assert_three_parts(failure: Exception) -> None:
    assert type(failure) in FAULTS, f"not one of ours: {failure!r}"
    parts = str(failure).split("; ")
    assert len(parts) >= 3, f"not three parts: {failure!r}"
    assert all(parts), failure


def _moved(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return GpuArrays().put(value)
    if isinstance(value, AttentionGrads):
        return AttentionGrads(*map(_moved, value))
    if isinstance(value, ScoreMod | MaskMod):
        return placed(GpuArrays(), value)
    return tuple(map(_moved, value)) if type(value) is tuple else value


def _arrays_in(value: Any) -> Iterator[Any]:
    if isinstance(value, np.ndarray) or type(value).__module__.startswith("cupy."):
        yield value
    elif isinstance(value, dict):
        yield from _arrays_in(tuple(value.values()))
    elif isinstance(value, tuple):
        for item in {id(item): item for item in value}.values():  # of a million, mostly one
            yield from _arrays_in(item)


def _bytes(array: Any) -> bytes:
    return (array if isinstance(array, np.ndarray) else GpuArrays().get(array)).tobytes()


def forward() -> Call:
    """B = 2, Sq = 3, Sk = 5, H = 4, G = 2, D = 8, Dv = 6."""
    arrays = {"q": normal(2, 3, 4, 8), "k": normal(2, 5, 2, 8), "v": normal(2, 5, 2, 6)}
    out = (full(2, 3, 4, 6), full(2, 4, 3))
    return Call(cupyattn.attention, arrays, return_lse=True, out=out, implementation="tiled")


def backward() -> Call:
    arrays = {"dout": normal(2, 3, 4, 6), **forward().arrays}
    arrays |= {"out": normal(2, 3, 4, 6), "lse": normal(2, 4, 3)}
    grads = AttentionGrads(full(2, 3, 4, 8), full(2, 5, 2, 8), full(2, 5, 2, 6), None, None)
    return Call(cupyattn.attention_backward, arrays, grads=grads, implementation="naive")


def softmax() -> Call:
    return Call(cupyattn.softmax, {"x": normal(2, 3, 8)}, out=full(2, 3, 8))


def softmax_backward() -> Call:
    arrays = {"dout": normal(2, 3, 8), "out": normal(2, 3, 8)}
    return Call(cupyattn.softmax_backward, arrays, grads=full(2, 3, 8))


HUGE = 10**400  # an int that no float holds
NAN, INF = float("nan"), float("inf")
ARRAYS = "numpy.ndarray, cupy.ndarray"
FLOATS = "float16, float32, bfloat16"
BOOL = "True or False"
PLACED = "when placed"  # a change of the whole call, made where it is to run
Row = tuple[str, dict[str, Any], type[Exception], str, str]


def of(name: str, kind: type[Exception], passed: str, allowed: str, *values: Any) -> Iterator[Row]:
    """One row for each bad value of an option; {} in `passed` is replaced by the value."""
    for value in values:
        id = f"array {value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)
        yield f"{name} {id[:30]}", {name: value}, kind, passed.replace("{}", str(value)), allowed


def shaped(name: str, allowed: str, *shapes: tuple[int, ...], dtype: Any = "f4") -> Iterator[Row]:
    """One row for each bad shape of an option that is an array."""
    for shape in shapes:
        value = np.ones(shape, dtype)
        yield f"{name} {shape}", {name: value}, ValueError, f"{name} has shape {shape}", allowed

"""Tensors in safetensors files, and slices of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.checkpoints.contents import Tensor, damaged
from cupyattn.models.extras import extra
from cupyattn.runtime.arrays import dtype_of
from cupyattn.runtime.errors import error
from cupyattn.runtime.reading import open_regular, parsed

_FLOATS = ("F32", "F16", "BF16", "F64")
_BYTES = ("F8_E4M3", "F8_E8M0")
"""Dtypes that safetensors does not give to NumPy: they are read as bytes, uint8."""


class Stored(NamedTuple):
    """A tensor of any dtype in a file.

    `what` is the file and the tensor's name, for errors. `kind` is the dtype as safetensors names
    it. ``items(index)`` reads a slice, or a tuple of slices; numbers of 8 bits as uint8.
    """

    what: str
    shape: tuple[int, ...]
    kind: str
    items: Callable[[Any], np.ndarray]

    def require(self, kinds: tuple[str, ...], shape: tuple[int, ...] | None = None) -> Stored:
        """Return the tensor if it has one of the dtypes, and the shape; else raise."""
        if self.kind not in kinds:
            raise damaged(self.what, f"it is of {self.kind}, not {' or '.join(kinds)}")
        if shape is not None and self.shape != shape:
            raise damaged(self.what, f"it is {self.shape}, not {shape}")
        return self

    def as_floats(self) -> Tensor:
        """Return a tensor that is not part of a quantised one."""

        def read(start: int, stop: int) -> np.ndarray:
            return self._floats(slice(start, stop))

        def read_columns(start: int, stop: int) -> np.ndarray:
            return self._floats((slice(None), slice(start, stop)))

        return Tensor(self.shape, read, read_columns)

    def _floats(self, index: object) -> np.ndarray:
        if self.kind not in _FLOATS:
            raise error(
                NotImplementedError,
                f"{self.what} is of {self.kind}",
                f"weights must be {', '.join(_FLOATS)}, or quantised as the quantization_config of "
                "config.json describes",
                "load the model from before it was quantised, or a GGUF file of it",
            )
        return self.items(index)


def read_metadata(file: Path) -> dict[str, str]:
    """Return the metadata in the header of a file."""
    safetensors = extra("safetensors", "reads the weights")
    try:
        return safetensors.safe_open(file, framework="numpy").metadata() or {}
    except safetensors.SafetensorError as failure:
        raise _no_safetensors(file, failure) from failure


def read_safetensors(file: Path) -> dict[str, Stored]:
    """Return the tensors of a file by name, without reading their items."""
    dtype_of("bfloat16")  # NumPy has to know it before safetensors gives it any
    safetensors = extra("safetensors", "reads the weights")
    try:
        opened = safetensors.safe_open(file, framework="numpy")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as failure:
        raise _no_safetensors(file, failure) from failure
    found = {
        name: Stored(
            f"{file}: {name}", tuple(part.get_shape()), str(part.get_dtype()), partial(_items, part)
        )
        for name, part in slices.items()
    }
    if any(tensor.kind in _BYTES for tensor in found.values()):
        found |= _as_bytes(file, found)
    return found


def _as_bytes(file: Path, found: dict[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of `_BYTES`; safetensors has already checked the file's header."""
    with open_regular(file, damaged) as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = parsed(opened.read(size), str(file), damaged)
        content = np.memmap(opened, np.uint8, mode="r", offset=8 + size)

    def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
        start, stop = header[name]["data_offsets"]
        return np.asarray(content[start:stop]).reshape(shape)

    return {
        name: tensor._replace(items=array(name, tensor.shape).__getitem__)
        for name, tensor in found.items()
        if tensor.kind in _BYTES
    }


def _no_safetensors(file: Path, failure: Exception) -> ValueError:
    return damaged(str(file), f"no safetensors ({failure})")


def _items(part: Any, index: object) -> np.ndarray:
    return part[index]

"""Files of arrays as the package safetensors reads them, written as they come from a device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cupyattn.models.checkpoints.whole_files import write_whole
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error

DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8",
}  # fmt: skip
_AT_ONCE = 1 << 24
"""Bytes that are on their way from a GPU to the file."""


def write_tensors(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a file that is whole or not there.

    Parameters
    ----------
    path : path
        Its folder is made if need be.
    arrays : mapping of arrays
        NumPy or CuPy, of any strides.
    metadata : mapping of str
        What the header has beside them.

    Raises
    ------
    OSError
        If it cannot be written: what was there before is as it was.
    """
    write_whole({path: partial(store, arrays=arrays, metadata=metadata)})


def store(file: BinaryIO, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write the header's length, the header, and the arrays, as the format has them."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        places = [end, end + array.nbytes]
        dtype = DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": places}
        end = places[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for array in arrays.values():
        for part in bytes_of(array):
            file.write(part)


def bytes_of(array: Array) -> Iterator[bytes]:
    """Yield the bytes of an array in C order, some rows at a time."""
    for part in _parts_of(array):
        yield (part if isinstance(part, np.ndarray) else part.get()).tobytes()


def require_finite(arrays: Mapping[str, Array]) -> None:
    """Raise ValueError for a number that no model computes with, before anything is written."""
    for name, array in arrays.items():
        for part in _parts_of(array):
            if not bool((abs(part.astype(np.float32)) < np.inf).all()):
                dtype = array.dtype.name
                raise error(
                    ValueError,
                    f"{name} has numbers that {dtype} does not hold",
                    "what is written is finite, in float16 up to 65,504",
                    "merge with --dtype float32 or bfloat16, or train anew with it"
                    if dtype == "float16"
                    else "train anew with a smaller learning rate",
                )


def _parts_of(array: Array) -> Iterator[Array]:
    rows = array if array.ndim else array.reshape(1)
    step = max(_AT_ONCE // max(rows.nbytes // max(len(rows), 1), 1), 1)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]

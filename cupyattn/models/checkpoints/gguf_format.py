"""The GGUF format: metadata and where tensors are, checked against the size of the file.

The specification is ggml's docs/gguf.md. The package gguf has a reader too, which takes seconds for
the tokens of a vocabulary; here it only dequantises.
"""

from __future__ import annotations

import math
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupyattn.models.checkpoints.contents import damaged
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.gguf_blocks import kept_blocks
from cupyattn.models.checkpoints.tensors import AnyTensor, Tensor
from cupyattn.models.extras import extra
from cupyattn.runtime.errors import error, shown, size_text
from cupyattn.runtime.reading import open_regular

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_PLAIN = ("F32", "F16")
_LEAST_STRING = 8  # bytes: its length
_MOST_METADATA = 64 << 20
"""Bytes before the tensors: with 260,000 tokens and their merges there are some 16 MB."""


class GGUFFile(NamedTuple):
    """The contents of a GGUF file.

    Attributes
    ----------
    metadata : dict
        Numbers, strings and lists by their keys.
    tensors : dict from str to Tensor or QuantisedTensor
        Their shapes as NumPy has them: the axis that is contiguous comes last.
    """

    metadata: dict[str, Any]
    tensors: dict[str, AnyTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Read the metadata of a file, and where its tensors are; it stays mapped into memory.

    Raises
    ------
    ValueError
        For a file that is damaged, cut short or no GGUF.
    NotImplementedError
        For a version, or a type of tensors, that is unknown.
    """
    with open_regular(path, damaged) as file:
        is_empty = not os.fstat(file.fileno()).st_size
        content = np.empty(0, np.uint8) if is_empty else np.memmap(file, np.uint8, mode="r")
    cursor = _Cursor(str(path), content)
    if cursor.take(4) != _MAGIC:
        raise damaged(str(path), "no GGUF file: it does not begin with these letters")
    (version,) = cursor.numbers("I", 1)
    if version not in _VERSIONS:
        raise error(
            NotImplementedError,
            f"{path}: GGUF of version {version}",
            f"versions {' and '.join(map(str, _VERSIONS))} are read, in little-endian order",
            "convert the model again",
        )
    count, keys = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.string()
        if key in metadata:
            raise damaged(str(path), f"{shown(key)} a second time at byte {cursor.at}")
        metadata[key] = cursor.value(*cursor.numbers("I", 1))
    infos = [_Info.read(cursor) for _ in range(count)]
    alignment = Fields(metadata, str(path)).integer("general.alignment", 32)
    begin = -(-cursor.at // alignment) * alignment
    tensors: dict[str, AnyTensor] = {}
    end, before = begin, "the list of tensors"
    for info in sorted(infos, key=lambda each: each.offset):
        start = begin + info.offset
        if info.offset % alignment or start < end or info.name in tensors:
            raise damaged(str(path), f"{info.name} at byte {start}, and {before} ends at {end}")
        tensors[info.name], size = info.tensor(path, content, start)
        end, before = start + size, info.name
    return GGUFFile(metadata, tensors)


class _Cursor:
    """A place in a file, from which values are read one behind the other."""

    def __init__(self, where: str, content: np.ndarray) -> None:
        self.where = where
        self.at = 0
        self._content = content.data

    def take(self, size: int) -> bytes:
        self._require(size)
        self.at += size
        return bytes(self._content[self.at - size : self.at])

    def _require(self, size: int) -> None:
        if not 0 <= size <= len(self._content) - self.at:
            raise damaged(
                self.where, f"cut short: {size} bytes at {self.at} of {len(self._content)}"
            )
        if self.at + size > _MOST_METADATA:
            limit = size_text(_MOST_METADATA)
            raise damaged(
                self.where,
                f"{size} bytes at {self.at} of what comes before the tensors, of which "
                f"at most {limit} are read",
            )

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(struct.calcsize(f"<{kind}") * count))

    def string(self) -> str:
        (size,) = self.numbers("Q", 1)
        return self.take(size).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], 1)[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise damaged(
                self.where, f"a value of the type {kind} at {self.at}, which there is none of"
            )
        (inner,) = self.numbers("I", 1)
        (count,) = self.numbers("Q", 1)
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count))
        if inner == _ARRAY:  # models have none, and empty ones take memory out of proportion
            raise damaged(self.where, f"a list of lists at byte {self.at}")
        self._require(_LEAST_STRING * count)
        return [self.value(inner) for _ in range(count)]


class _Info(NamedTuple):
    """A tensor as the file lists it."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, cursor: _Cursor) -> _Info:
        name = cursor.string()
        (axes,) = cursor.numbers("I", 1)
        if not 1 <= axes <= 4:
            raise damaged(cursor.where, f"the tensor {name} has {axes} axes")
        shape = cursor.numbers("Q", axes)[::-1]
        return cls(name, shape, *cursor.numbers("I", 1), *cursor.numbers("Q", 1))

    def tensor(self, path: Path, content: np.ndarray, start: int) -> tuple[AnyTensor, int]:
        """Return the tensor, whose bytes begin at `start` within the file, and their number."""
        quants = extra("gguf.quants", "dequantises weights")
        types = extra("gguf.constants", "dequantises weights")
        try:
            kind = types.GGMLQuantizationType(self.kind)
            block, size = types.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            kind, block, size = None, 1, 0
        if kind is None or (kind.name not in _PLAIN and kind not in quants._type_traits):
            known = (*_PLAIN, *sorted(each.name for each in quants._type_traits))
            raise error(
                NotImplementedError,
                f"{path}: {self.name} is of {kind.name if kind else f'type {self.kind}'}",
                f"the package gguf dequantises {', '.join(known)}",
                "take a file of one of these types, or a newer gguf",
            )
        *rows, columns = self.shape
        width = columns // block * size
        total = math.prod(rows) * width
        if columns % block or min(self.shape) < 1 or start + total > len(content):
            raise damaged(
                str(path),
                f"{self.name} {self.shape} of {kind.name} does not lie in its {len(content)} bytes",
            )
        stored = content[start : start + total].reshape(*rows, width)
        if len(rows) == 1 and (kept := kept_blocks(kind.name, stored, columns)) is not None:
            return kept, total
        if not rows:
            read = partial(_numbers, quants.dequantize, stored, kind, block, size)
            return Tensor(self.shape, read), total
        return Tensor(self.shape, partial(_rows, quants.dequantize, stored, kind)), total


def _rows(dequantize: Any, stored: np.ndarray, kind: Any, start: int, stop: int) -> np.ndarray:
    return dequantize(stored[start:stop], kind)


def _numbers(
    dequantize: Any, stored: np.ndarray, kind: Any, block: int, size: int, start: int, stop: int
) -> np.ndarray:
    """Dequantise the blocks, of `size` bytes each, that hold the numbers asked for."""
    first, end = start // block, -(-stop // block)
    found = dequantize(stored[first * size : end * size], kind)
    return found[start - first * block : stop - first * block]

"""The memory of a paged KV cache: the arrays of its blocks, on the device and on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np

from cupyattn.runtime.arrays import Array, CudaArray, address, dtype_of
from cupyattn.runtime.errors import error, shown

MOST_PITCH = 2**31 - 1
"""Bytes from one row to the next that a strided copy of CUDA may have."""


class CacheFormat(NamedTuple):
    """How keys and values are kept."""

    name: str
    item: str
    """The dtype of the arrays' items."""
    packed: int = 1
    """Numbers in an item."""
    scaled: bool = False
    """Whether each token and head has a float32 scale."""


FORMATS = {
    each.name: each
    for each in (
        CacheFormat("float16", "float16"),
        CacheFormat("float32", "float32"),
        CacheFormat("bfloat16", "bfloat16"),
        CacheFormat("int8", "int8", scaled=True),
        CacheFormat("int4", "uint8", packed=2, scaled=True),
    )
}


def as_format(dtype: Any) -> CacheFormat:
    """Return the storage format of a cache, or raise for an unknown one."""
    name = dtype
    if not isinstance(dtype, str):
        try:
            name = np.dtype(dtype).name if dtype is not None else None
        except (TypeError, ValueError):
            name = None
    if name not in FORMATS:
        raise error(
            TypeError,
            f"got dtype = {shown(dtype)}",
            f"allowed are {', '.join(map(repr, FORMATS))}",
            "pass one of these names; 'int4' is two numbers in a byte of uint8",
        )
    return FORMATS[name]


def require_library(xp: ModuleType) -> None:
    """Refuse an xp that is neither NumPy nor CuPy."""
    if getattr(xp, "__name__", None) not in ("numpy", "cupy"):
        raise error(
            TypeError,
            f"got xp = {shown(xp)}",
            "it is the module numpy or the module cupy",
            "import cupy, and pass xp=cupy for a cache on the GPU",
        )


class Storage:
    """Keys, values and scales by name, with axes (layer, block, slot, ...) on both sides.

    The format of keys may be another one than that of values.

    In memory the slots of a head lie side by side: a step of decoding then reads whole sectors of
    the scales of integers, of which it wants one head's at a time. On an H200 that is 1 to 18 %
    faster (2026-11-22, `benchmark decode --cache float int8 int4` with either layout). The blocks
    of the host are pinned where the device is a GPU: its copies then reach them in the order of the
    stream, and nothing waits.
    """

    def __init__(
        self,
        form: CacheFormat,
        num_layers: int,
        num_blocks: int,
        num_host_blocks: int,
        slots: tuple[int, int, int],
        xp: ModuleType,
        of_keys: CacheFormat,
    ) -> None:
        block_size, heads, head_dim = slots
        on_gpu = xp.__name__ != "numpy"
        of_block: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        for name, each in (("k", of_keys), ("v", form)):
            of_block[name] = (heads, block_size, head_dim // each.packed), dtype_of(each.item)
            if each.scaled:
                of_block[f"{name}_scales"] = (heads, block_size), np.dtype(np.float32)
        self._xp = xp
        self._on_gpu = on_gpu
        self.device: dict[str, Array] = {}
        self.host: dict[str, Array] = {}
        for name, (shape, dtype) in of_block.items():
            self.device[name] = xp.zeros((num_layers, num_blocks, *shape), dtype).swapaxes(2, 3)
            pages = (num_layers, num_host_blocks, *shape)
            host = _pinned(xp, pages, dtype) if on_gpu else np.zeros(pages, dtype)
            self.host[name] = host.swapaxes(2, 3)

    @property
    def nbytes(self) -> int:
        """The size of the device's arrays."""
        return sum(array.nbytes for array in self.device.values())

    def to_host(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the device to blocks of the host."""
        self._move(copies, self.device, self.host)

    def from_host(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the host to blocks of the device."""
        self._move(copies, self.host, self.device)

    def _move(
        self, copies: Iterable[tuple[int, int]], source: dict[str, Array], target: dict[str, Array]
    ) -> None:
        if not self._on_gpu:
            for src, dst in copies:
                for name, array in target.items():
                    array[:, dst] = source[name][:, src]
            return
        with cast("CudaArray", self.device["k"]).device:
            stream = self._xp.cuda.get_current_stream().ptr
            for src, dst in copies:
                for name, array in target.items():
                    self._copy_block(source[name], src, array, dst, stream)

    def _copy_block(self, source: Array, src: int, target: Array, dst: int, stream: int) -> None:
        """Queue the copy of a block in every layer: the layers are the rows of a strided copy."""
        runtime = self._xp.cuda.runtime
        num_layers, width = source.shape[0], source.strides[1]
        steps = (target.strides[0], source.strides[0])
        # A pool of more than 2 GiB a layer is copied one layer at a time: such a copy has no pitch.
        rows, pitches = (num_layers, steps) if max(steps) <= MOST_PITCH else (1, (width, width))
        for layer in range(0, num_layers, rows):
            runtime.memcpy2DAsync(
                address(target[layer, dst]),
                pitches[0],
                address(source[layer, src]),
                pitches[1],
                width,
                rows,
                runtime.memcpyDefault,
                stream,
            )


def _pinned(xp: ModuleType, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return host memory that a GPU's copies reach without the driver's detour."""
    items = math.prod(shape)
    if not items:
        return np.zeros(shape, dtype)
    # Not from CuPy's pool, which would keep it for the process.
    memory = xp.cuda.PinnedMemoryPointer(xp.cuda.PinnedMemory(items * dtype.itemsize), 0)
    return np.frombuffer(memory, np.uint8, items * dtype.itemsize).view(dtype).reshape(shape)

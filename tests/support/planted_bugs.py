"""Bugs planted in a copy of the CUDA sources: what a bug is, and what runs the kernels with it.

Fixture `start_with` runs a recorded launch from such a copy. The attention launch that the tests
plant their bugs in is recorded here, with the error of its results.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cupyattn import reference
from cupyattn.cli.recorder import Launch, attention_launch
from cupyattn.emulator import Checks, KernelFault
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.attention.teaching.forward import TILED_TILE_K
from cupyattn.kernels.device.emulated import EmulatedDevice, EmulatedKernel
from cupyattn.kernels.source import source_digest, source_root
from cupyattn.kernels.spec import Specialisation
from cupyattn.ops.attention.options import AttentionOptions

FORWARD_CUH, ROWS_CUH = (
    "attention/tensor_core/forward.cuh",
    "attention/tensor_core/resident_rows.cuh",
)
PRODUCTS_CUH, EPILOGUE_CUH = (
    "attention/tensor_core/products.cuh",
    "attention/tensor_core/epilogue.cuh",
)
KEY_FEED_CUH = "attention/tensor_core/key_feed.cuh"
F32_CUH, F32_FEED_CUH = "attention/float32/forward.cuh", "attention/float32/forward_feed.cuh"
F32_PRODUCTS_CUH = "attention/float32/forward_products.cuh"
F32_KEYS_CUH = "attention/float32/dense_keys.cuh"
F32_EPILOGUE_CUH = "attention/float32/epilogue.cuh"
FEED_CUH, REDUCE_CUH = (
    "attention/tensor_core/tile_feed.cuh",
    "common/reduce.cuh",
)


class Bug(NamedTuple):
    """Text of a file below cuda_src, which must be there once, and what takes its place."""

    file: str
    right: str
    wrong: str


def without_barrier(file: str, comment: str, barrier: str = "__syncthreads();") -> Bug:
    """The barrier with that comment is gone."""
    return Bug(file, f"{barrier}  // {comment}", f"// {comment}")


@contextmanager
def found_by(fault: type[KernelFault]) -> Iterator[None]:
    """Expect that a kernel with a bug stops with this very fault, and says at which line."""
    with pytest.raises(fault) as found:
        yield
    assert type(found.value) is fault
    assert found.value.line > 0


def plant(folder: Path, *bugs: Bug) -> None:
    """Copy the CUDA sources to the folder, with the bugs in them."""
    shutil.copytree(source_root(), folder, dirs_exist_ok=True)
    for bug in bugs:
        text = (source_root() / bug.file).read_text()
        assert text.count(bug.right) == 1, f"{bug.file} has changed: plant the bug anew"
        (folder / bug.file).write_text(text.replace(bug.right, bug.wrong))


class PlantedDevice(EmulatedDevice):
    """The emulator, with kernels from another folder of sources, where those differ."""

    def __init__(self, folder: Path, checks: Checks) -> None:
        super().__init__(checks)
        self.folder = folder

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array of NaN: memory of a run before could hold what a bug does not write."""
        array = super().empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)
        return array

    def load(self, specialisation: Specialisation) -> EmulatedKernel:
        spec = specialisation.spec
        source = self.folder / spec.source
        if source_digest(source) == source_digest(source_root() / spec.source):
            return super().load(specialisation)  # which other tests have translated already
        planted = replace(spec, source=str(source))
        return super().load(replace(specialisation, spec=planted))


def planted_device(
    patch: pytest.MonkeyPatch, folder: Path, *bugs: Bug, modules: Iterable[str] = ("forward",)
) -> PlantedDevice:
    """Plant the bugs, and let these modules of `cupyattn.functional.attention` run there."""
    plant(folder, *bugs)
    device = PlantedDevice(folder, Checks.all())
    for name in modules:
        module = sys.modules[f"cupyattn.functional.attention.{name}"]
        patch.setattr(module, "device_of", lambda _: device)
    return device


def normal(*shape: int, dtype: str = "float16") -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def attention_recorded(kernel: str) -> Launch:
    """Causal, several key tiles with a ragged end, two query heads on one key-value head.

    Scores rise from tile to tile, so that maxima do.
    """
    implementation, dtype = ("flash", "float32") if kernel == "flash f32" else (kernel, "float16")
    shapes = (1, 100, 2, 24), (1, 100, 1, 24), (1, 100, 1, 24)
    q, k, v = (normal(*shape, dtype=dtype) for shape in shapes)
    k[:, 64:] *= 16
    options = AttentionOptions(causal=True, implementation=implementation)
    return attention_launch(TURING, q, k, v, options)


def error_ratio(recorded: Launch) -> float:
    """The largest error of what an attention launch has written, over its bound."""
    q, k, v, out, lse = recorded.arguments[:5]
    exact = reference.attention(q, k, v, causal=True)
    bound = reference.attention_bound(q, k, v, dtype=q.dtype, tile_k=TILED_TILE_K, causal=True)
    results = zip((out, lse), exact, bound, strict=True)
    return max(reference.error_ratio(*each) for each in results)

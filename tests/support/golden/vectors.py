"""The file of golden vectors: outputs of the cases on a GPU, and how close results have to be.

Hardware need not be exact where the PTX ISA 8.8 says how far it may be off, in the notes of each
instruction. The emulator rounds the float64 result to nearest, so it may differ from hardware by
that and half a unit in the last place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).resolve().parent / "recorded.npz"

_METADATA = "metadata"


def save(path: Path, outputs: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
    """Write outputs and metadata, compressed.

    Arrays are kept as their bytes, all first bytes before all second ones: that compresses better
    than whole numbers, of which most have zeros on top.
    """
    described = {name: [array.dtype.str, list(array.shape)] for name, array in outputs.items()}
    planes = {
        name: np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T
        for name, array in outputs.items()
    }
    everything = json.dumps({**metadata, "arrays": described}, indent=1).encode()
    np.savez_compressed(
        path,
        allow_pickle=False,
        **{_METADATA: np.frombuffer(everything, np.uint8)},
        **{name: np.ascontiguousarray(plane).reshape(-1) for name, plane in planes.items()},
    )


def load(path: Path = FILE) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the outputs by name (``case/output``), and the metadata."""
    with np.load(path, allow_pickle=False) as file:
        metadata = json.loads(file[_METADATA].tobytes())
        outputs = {}
        for name, (dtype, shape) in metadata.pop("arrays").items():
            planes = file[name].reshape(np.dtype(dtype).itemsize, -1)
            outputs[name] = np.ascontiguousarray(planes.T).view(dtype).reshape(shape)
    return outputs, metadata


# Relative errors over the whole range.
_RELATIVE = {
    "rsqrt.approx.f32": 2.0**-22.9,
    "rsqrt.approx.ftz.f32": 2.0**-22.9,
    "sqrt.approx.f32": 2.0**-23,
    "sqrt.approx.ftz.f32": 2.0**-23,
    "tanh.approx.f32": 2.0**-11,
    "ex2.approx.f16": 2.0**-9.9,
    "ex2.approx.f16x2": 2.0**-9.9,
}
# In units in the last place of the result.
_UNITS = {"ex2.approx": 2, "rcp.approx": 1, "div.approx": 2, "div.full": 2}
_ABSOLUTE = {"tanh.approx.f16": 2.0**-10.987, "tanh.approx.f16x2": 2.0**-10.987}


def unit_in_last_place(x: np.ndarray) -> np.ndarray:
    """Return the distance of float32 (or float16) numbers around finite `x`, as float64."""
    info = np.finfo(x.dtype)
    _, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(1.0, np.maximum(exponent - 1, info.minexp) - info.nmant)


def is_exact(opcode: str) -> bool:
    """Tell whether hardware must give the correctly rounded result."""
    return ".approx" not in opcode and ".full" not in opcode


def allowed_error(opcode: str, operand: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the largest distance of a hardware result from a correctly rounded one.

    Parameters
    ----------
    opcode : str
        Of an ``.approx`` or ``.full`` instruction.
    operand : array
        Its first operand.
    exact : array
        Correctly rounded results.
    """
    largest = np.finfo(exact.dtype).max
    exact = np.where(np.isnan(exact), exact.dtype.type(0), np.clip(exact, -largest, largest))
    size = np.abs(exact).astype(np.float64)
    last_place = unit_in_last_place(exact)
    root = ".".join(opcode.split(".")[:2])
    if opcode in _RELATIVE:
        error = _RELATIVE[opcode] * size
    elif opcode in _ABSOLUTE:
        error = np.full(size.shape, _ABSOLUTE[opcode])
    elif root in _UNITS:
        error = _UNITS[root] * last_place
    elif root == "lg2.approx":  # absolute near 1, where the result is near 0
        error = np.where((operand > 0.5) & (operand < 2), 2.0**-22, 2.0**-22 * size)
    elif root in ("sin.approx", "cos.approx"):  # nothing is promised beyond 100 pi
        angle = np.abs(operand.astype(np.float64))
        far = np.where(angle <= 100 * np.pi, 2.0**-14.7, np.inf)
        error = np.where(angle <= 2 * np.pi, 2.0**-20.5, far)
    else:
        raise KeyError(f"no error is known of {opcode}; find it in the PTX ISA and add it")
    if exact.dtype == np.float16:  # an H200 errs by a unit where results are subnormal
        error = np.maximum(error, last_place)
    return error + last_place / 2

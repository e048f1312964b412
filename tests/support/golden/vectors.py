"""The file of golden vectors: outputs of the cases on a GPU."""

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

"""Write models and safetensors files: a file is complete or absent, whenever the process stops."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from cupyattn import QuantizedWeight, dequantize
from cupyattn.models.checkpoints.config_writing import config_json
from cupyattn.models.checkpoints.contents import HUGGING_FACE, Checkpoint, places
from cupyattn.models.checkpoints.hugging_face import read_object
from cupyattn.models.config import Config
from cupyattn.models.tokenizer import Tokenizer, write_tokenizer
from cupyattn.models.weights import (
    PRODUCTS,
    Layer,
    Product,
    Weights,
    empty,
    named_arrays,
    unscaled,
)
from cupyattn.runtime.annotations import Json
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error
from cupyattn.runtime.value_checks import on_host

_PARTIAL, _BEFORE = ".partial", ".before"


def write_whole(files: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """Write files to temporary names, sync all to the disk, and only then rename them.

    On an OSError or an interrupt, older files are as they were. Folders are made if need be.
    """
    *firsts, _ = files
    partials: list[Path] = []
    replaced: list[Path] = []
    before: dict[Path, Path] = {}
    try:
        for path, write in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            partials.append(path.with_suffix(_PARTIAL))
            with partials[-1].open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for path in firsts:  # these are restored if the last cannot be replaced
            if path.exists():
                before[path] = path.with_suffix(_BEFORE)
                _keep(path, before[path])
        for partial, path in zip(partials, files, strict=True):
            os.replace(partial, path)
            replaced.append(path)
    except BaseException:
        for path in replaced:
            if path in before:
                os.replace(before.pop(path), path)
            else:
                path.unlink()
        raise
    finally:
        for left in (*partials, *before.values()):
            left.unlink(missing_ok=True)
    for folder in {path.parent for path in files}:
        _sync_folder(folder)


def _keep(path: Path, copy: Path) -> None:
    copy.unlink(missing_ok=True)
    try:
        os.link(path, copy)
    except OSError:  # not every file system has links
        shutil.copy2(path, copy)


def _sync_folder(folder: Path) -> None:
    """Bring the new names to the disk too, where folders can be opened (not on Windows)."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8",
}  # fmt: skip
_AT_ONCE = 1 << 24
"""Bytes per copy from a GPU to the file."""


def write_tensors(path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file of NumPy or CuPy arrays; it is complete or absent."""
    write_whole({path: partial(store, arrays=arrays, metadata=metadata)})


def store(file: BinaryIO, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write the header's length, the header, and the arrays, as the format has them."""
    header: Json = {"__metadata__": dict(metadata)}
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
        yield on_host(part).tobytes()


def require_finite(arrays: Mapping[str, Array]) -> None:
    """Raise ValueError for infinities and NaN, before anything is written."""
    for name, array in arrays.items():
        for part in _parts_of(array):
            if not bool((abs(part.astype(np.float32)) < np.inf).all()):
                dtype = array.dtype.name
                raise error(
                    ValueError,
                    f"{name} has numbers that {dtype} does not hold",
                    "weights in files must be finite, in float16 up to 65,504",
                    "merge with --dtype float32 or bfloat16, or train anew with it"
                    if dtype == "float16"
                    else "train anew with a smaller learning rate",
                )


def _parts_of(array: Array) -> Iterator[Array]:
    rows = array if array.ndim else array.reshape(1)
    step = max(_AT_ONCE // max(rows.nbytes // max(len(rows), 1), 1), 1)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
_OF_A_TRAINING = (".training", "losses.jsonl", "losses.png")


def source_of(checkpoint: Checkpoint) -> Path | None:
    """Return the folder whose config and tokenizer go with new weights; None for a GGUF file.

    Raises NotImplementedError if they cannot be made from what the file contains.
    """
    folder = Path(checkpoint.where)
    if folder.is_dir():
        return folder
    config_json(checkpoint.config, checkpoint.where)
    return None


def written_bytes(config: Config, dtype: str) -> int:
    """Return the size of the weights that `write_folder` writes."""
    return sum(array.nbytes for _, array in named_arrays(empty(config, dtype, np)))


def write_folder(
    weights: Weights,
    config: Config,
    source: Path | None,
    folder: Path,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write weights, and copy all other files from the folder that the model came from.

    Weights of a float16 model are written without their powers of two. Without a `source`, the
    config and the tokenizer become files. Quantised weights are decoded. The config comes last: a
    folder that has one is complete.
    """
    naming = HUGGING_FACE[config.architecture]
    dtype = weights.embedding.dtype.name
    weights = unscaled(weights, config)
    layers = tuple([_decoded(layer, dtype) for layer in weights.layers])
    named = places(naming, config, weights._replace(layers=layers), {}).filled
    tensors = {name: place.targets["all"] for name, place in named.items()}
    require_finite(tensors)
    saved: Any = {} if source else {**config_json(config, str(folder)), "torch_dtype": dtype}
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / _WEIGHTS, tensors, {"format": "pt"})
    if source is None:
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder)
    else:
        saved = _copied(source, folder, dtype)
        if "text_config" in saved:  # of text and images: the text model is written
            saved = {**config_json(config, str(folder)), "torch_dtype": dtype}
        if not config.tied:  # adapters may have made a head of a model whose embedding was it
            saved["tie_word_embeddings"] = False
    text = (json.dumps(saved, indent=2) + "\n").encode()
    write_whole({folder / _CONFIG: lambda file: file.write(text)})


def _decoded(layer: Layer, dtype: str) -> Layer:
    for name in PRODUCTS:
        weight, bias, *_ = getattr(layer, name)
        if isinstance(weight, QuantizedWeight):
            decoded: Any = Product(dequantize(weight, dtype=dtype), bias)
            layer = layer._replace(**{name: decoded})
    return layer


def _copied(source: Path, folder: Path, dtype: str) -> Json:
    """Copy the files that are neither weights nor the config; return the config to write."""
    files = () if source.samefile(folder) else source.iterdir()
    for file in files:
        left_out = file.name == _CONFIG or file.name.endswith((*_OF_WEIGHTS, *_OF_A_TRAINING))
        if file.is_file() and not left_out:
            shutil.copy2(file, folder / file.name)
    saved = read_object(source / _CONFIG)
    saved.pop("quantization_config", None)  # they are floats
    for name in ("torch_dtype", "dtype"):
        if name in saved:
            saved[name] = dtype
    return saved

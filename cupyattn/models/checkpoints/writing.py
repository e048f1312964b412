"""A model as a folder that `open_folder` reads, and transformers too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from cupyattn.models.checkpoints.hugging_face import read_object
from cupyattn.models.checkpoints.names import HUGGING_FACE, places
from cupyattn.models.checkpoints.safetensors_writer import require_finite, write_tensors
from cupyattn.models.checkpoints.whole_files import write_whole
from cupyattn.models.config import Config
from cupyattn.models.weights import Weights
from cupyattn.runtime.errors import error

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
_OF_A_TRAINING = (".training", "losses.jsonl", "losses.png")


def require_source(source: Path) -> None:
    """Raise NotImplementedError unless there is a config to go with weights that are written."""
    if not (source / _CONFIG).is_file():
        raise error(
            NotImplementedError,
            f"{source} is no folder with config.json",
            "weights are written beside the config and the tokenizer that they came with",
            "train a model in a folder as transformers writes it, or adapters of this one",
        )


def write_folder(weights: Weights, config: Config, source: Path, folder: Path) -> None:
    """Write weights, and copy all other files from the folder that the model came from.

    The config comes last: a folder that has one is complete.

    Raises
    ------
    OSError
        If they cannot be written.
    ValueError
        For weights that are not finite.
    NotImplementedError
        If that is no folder as transformers writes it.
    """
    require_source(source)
    naming = HUGGING_FACE[config.architecture]
    named = places(naming, config, weights, {}).filled
    tensors = {name: place.targets["all"] for name, place in named.items()}
    require_finite(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / _WEIGHTS, tensors, {"format": "pt"})
    files = () if source.samefile(folder) else source.iterdir()
    for file in files:
        left_out = file.name == _CONFIG or file.name.endswith((*_OF_WEIGHTS, *_OF_A_TRAINING))
        if file.is_file() and not left_out:
            shutil.copy2(file, folder / file.name)
    saved = read_object(source / _CONFIG)
    saved.pop("quantization_config", None)  # they are floats
    dtype = weights.embedding.dtype.name
    for name in ("torch_dtype", "dtype"):
        if name in saved:
            saved[name] = dtype
    text = (json.dumps(saved, indent=2) + "\n").encode()
    write_whole({folder / _CONFIG: lambda file: file.write(text)})

"""A model as a folder that `open_folder` reads, and transformers too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from cupyattn.errors import error
from cupyattn.models.checkpoints.names import HUGGING_FACE, places
from cupyattn.models.checkpoints.safetensors_writer import write_tensors
from cupyattn.models.config import Config
from cupyattn.models.weights import Weights

_WEIGHTS = "model.safetensors"
_OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
_OF_A_TRAINING = ("losses.jsonl", "losses.png")


def require_source(source: Path) -> None:
    """Raise NotImplementedError unless there is a config to go with weights that are written."""
    if not (source / "config.json").is_file():
        raise error(
            NotImplementedError,
            f"{source} is no folder with config.json",
            "weights are written beside the config and the tokenizer that they came with",
            "train a model in a folder as transformers writes it, or adapters of this one",
        )


def write_folder(weights: Weights, config: Config, source: Path, folder: Path) -> None:
    """Write weights, and copy all other files from the folder that the model came from.

    Raises
    ------
    OSError
        If they cannot be written.
    NotImplementedError
        If that is no folder as transformers writes it.
    """
    require_source(source)
    folder.mkdir(parents=True, exist_ok=True)
    files = () if source.samefile(folder) else source.iterdir()
    for file in files:
        if file.is_file() and not file.name.endswith((*_OF_WEIGHTS, *_OF_A_TRAINING)):
            shutil.copy2(file, folder / file.name)
    naming = HUGGING_FACE[config.architecture]
    named = places(naming, config, weights, {}).filled
    tensors = {name: place.targets["all"] for name, place in named.items()}
    write_tensors(folder / _WEIGHTS, tensors, {"format": "pt"})
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    saved.pop("quantization_config", None)  # they are floats
    dtype = weights.embedding.dtype.name
    for name in ("torch_dtype", "dtype"):
        if name in saved:
            saved[name] = dtype
    (folder / "config.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")

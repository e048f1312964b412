"""A model's folder as transformers writes it: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from cupyattn.models.checkpoints.contents import Checkpoint, damaged
from cupyattn.models.checkpoints.fields import Fields
from cupyattn.models.checkpoints.hugging_face_config import config_of
from cupyattn.models.checkpoints.names import HUGGING_FACE
from cupyattn.models.checkpoints.quantization_config import unpacking_of
from cupyattn.models.checkpoints.safetensors_files import Stored, read_safetensors
from cupyattn.models.tokenizer import tokenizer_of_folder
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.reading import read_json

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST_BYTES = 16 << 20
"""Largest JSON file: the index of a model of 671 billion weights has 9 MB."""


def open_folder(folder: Path) -> Checkpoint:
    """Read a folder's config and the names in its files; of the weights nothing yet."""
    files = _files(folder)
    generation = folder / "generation_config.json"
    fields = _fields(folder / "config.json")
    unpack = unpacking_of(fields)
    config = config_of(
        fields, _fields(generation) if generation.exists() else Fields({}, str(generation))
    )
    stored: dict[str, Stored] = {}
    for file in files:
        for name, tensor in read_safetensors(file).items():
            if name in stored:
                raise damaged(str(file), f"the tensor {name} is in another file of the folder too")
            stored[name] = tensor
    return Checkpoint(
        str(folder),
        config,
        HUGGING_FACE[config.architecture],
        unpack(stored),
        partial(tokenizer_of_folder, folder),
    )


def _fields(path: Path) -> Fields:
    return Fields(read_object(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no file, or it is damaged, too large or nested too deeply.
    """
    try:
        given = read_json(path, _MOST_BYTES, damaged)
    except FileNotFoundError:
        raise error(
            FileNotFoundError,
            f"{path.parent} has no {path.name}",
            "a model's folder has config.json, safetensors and mostly tokenizer.json, as "
            "transformers writes them; or pass a GGUF file itself",
            "download or convert the model into that folder",
        ) from None
    if not isinstance(given, dict):
        raise damaged(str(path), "no JSON object")
    return given


def _files(folder: Path) -> list[Path]:
    if (folder / _ONE).is_file():
        return [folder / _ONE]
    if (folder / _INDEX).is_file():
        shards = read_object(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise damaged(str(folder / _INDEX), "it has no weight_map")
        names = sorted({str(name) for name in shards.values()})
        for name in names:
            if Path(name).name != name:
                raise damaged(str(folder / _INDEX), f"{shown(name)} is no file of the folder")
            if not os.path.isfile(folder / name):  # False as well for a name that is too long
                raise damaged(str(folder), f"{name} is missing, which {_INDEX} names")
        return [folder / name for name in names]
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise error(
            ValueError,
            f"{folder} has {pickled[0]}, and no safetensors",
            "weights are read from safetensors: a pickle can run any program, and is never opened",
            "take the model's safetensors, or where you trust the file convert it with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    raise error(
        FileNotFoundError,
        f"{folder} has neither {_ONE} nor {_INDEX}",
        "a model's folder holds its weights in safetensors, under the one name or the other",
        "download or convert the model into that folder",
    )

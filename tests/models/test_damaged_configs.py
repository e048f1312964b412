"""Whatever a value of a config becomes: a model, or an error of ours that names the file."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.search import Search
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.models.checkpoints import gguf_format, gguf_model, hugging_face

pytest.importorskip("safetensors")

FOLDER = Path(__file__).parent / "checkpoints"
NAMES = sorted(path.name for path in FOLDER.iterdir())
BAD = [None, "", "x", [], {}, [[]], -1, 0, 1.5, True, float("inf"), float("nan"), 10**400]
GGUF = {"gpt2": "gpt2", "llama": "llama", "qwen2": "qwen2", "phi": "phi2"}
OF_ROPE = (
    "attention_factor", "beta_fast", "beta_slow", "mscale", "partial_rotary_factor", "truncate",
    "type",
)  # fmt: skip
STRIDE = 1 if Search.deep else 11  # no divisor of the number of values: each key has another one


class Recording(dict):
    """Notes which keys were asked for."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def paths_of(given: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in given.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in paths_of(value))


def with_value(given: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = inner = copy.deepcopy(given)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def raw_error(load, path: Path) -> str | None:
    """Return what is wrong with an error, if one arises."""
    try:
        load()
    except Exception as failure:
        text = str(failure)
        ours = type(failure) in (ValueError, TypeError, NotImplementedError)
        if not (ours and text.count("; ") >= 2 and str(path) in text):
            return f"{type(failure).__name__}: {text}"
    return None


def raw_errors(given, asked, path: Path, load) -> list[str]:
    """Load with every value in the place of every key that there is, or that is asked for."""
    rope = [("rope_parameters", key) for key in OF_ROPE if "rope_parameters" in given]
    places = sorted({*paths_of(given), *((key,) for key in asked), *rope})
    assert len(places) > 15
    cases = [(place, value) for place in places for value in BAD][::STRIDE]
    found = []
    for place, value in cases:
        raw = raw_error(partial(load, with_value(given, place, value)), path)
        if raw is not None:
            found.append(f"{place} = {str(value)[:9]}: {raw}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_values_of_config_json(monkeypatch, name):
    folder = FOLDER / name
    path = folder / "config.json"
    given = json.loads(path.read_text())
    real, asked = hugging_face.read_object, Recording(given)

    def load(config):
        monkeypatch.setattr(
            hugging_face, "read_object", lambda file: config if file == path else real(file)
        )
        return models.load(folder, xp=np)

    load(asked)
    assert raw_errors(given, asked.asked, folder, load) == []


@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:9])
def test_values_of_generation_config_json(monkeypatch, value):
    real = hugging_face.read_object
    path = FOLDER / "llama3" / "generation_config.json"
    given = {"eos_token_id": value}
    monkeypatch.setattr(
        hugging_face, "read_object", lambda file: given if file == path else real(file)
    )
    assert path.is_file()
    assert raw_error(lambda: models.load(path.parent, xp=np), path) is None


@pytest.mark.parametrize("name", GGUF)
def test_values_of_gguf_metadata(tmp_path, monkeypatch, name):
    pytest.importorskip("gguf")
    from support.gguf_files import write_gguf

    model = models.random(TINY[name], dtype="float32", xp=np)
    ids = {"tokenizer.ggml.eos_token_id": 2}
    path = write_gguf(tmp_path / "m.gguf", model, GGUF[name], metadata=ids)
    file = gguf_format.read_gguf(path)
    asked = Recording(file.metadata)

    def load(metadata):
        monkeypatch.setattr(gguf_model, "read_gguf", lambda path: file._replace(metadata=metadata))
        return models.load(path, xp=np)

    for scaling in ("yarn", "linear"):
        asked[f"{GGUF[name]}.rope.scaling.type"] = scaling
        load(asked)
    assert raw_errors(dict(asked), asked.asked, path, load) == []

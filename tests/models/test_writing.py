"""Folders that are written are read again as what they were."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.tiny_models import LLAMA

from cupyattn import models
from cupyattn.models.checkpoints import safetensors_writer
from cupyattn.models.checkpoints.whole_files import write_whole
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.weights import named_arrays

pytest.importorskip("safetensors")

FOLDERS = ("gpt2", "llama3", "phi", "qwen2")


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_model_is_read_as_it_was_written(name, dtype, request, tmp_path):
    source = request.path.parent / "checkpoints" / name
    model = models.load(source, dtype=dtype, xp=np)
    write_folder(model.weights, model.config, source, tmp_path / "new")
    again = models.load(tmp_path / "new", dtype=dtype, xp=np)
    assert again.config == model.config
    for (key, array), (_, found) in zip(
        named_arrays(model.weights), named_arrays(again.weights), strict=True
    ):
        assert_array_equal(array, found, err_msg=key)
    assert not (tmp_path / "new" / "model.safetensors.index.json").exists()
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert {config[key] for key in ("torch_dtype", "dtype") if key in config} <= {dtype}


@pytest.mark.parametrize("fails", ["weights", "the tokenizer", "the config"])
def test_a_folder_with_a_config_is_complete(fails, request, tmp_path, monkeypatch):
    source = tmp_path / "model"
    shutil.copytree(request.path.parent / "checkpoints" / "qwen2", source)
    (source / "tokenizer_config.json").write_text("{}")
    model = models.load(source, dtype="float32", xp=np)
    new = tmp_path / "new"

    def no_room(*_, **__):
        raise OSError(28, "No space left on device")

    def synced(number, sync=os.fsync):
        return no_room() if (new / "tokenizer_config.json").exists() else sync(number)

    with monkeypatch.context() as patch:
        if fails == "weights":
            patch.setattr(safetensors_writer, "store", no_room)
        elif fails == "the tokenizer":
            patch.setattr(shutil, "copy2", no_room)
        else:
            patch.setattr(os, "fsync", synced)
        with pytest.raises(OSError, match="No space left"):
            write_folder(model.weights, model.config, source, new)
    assert not (new / "config.json").exists()
    write_folder(model.weights, model.config, source, new)
    assert models.load(new, dtype="float32", xp=np).config == model.config
    assert (new / "tokenizer_config.json").exists()


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("fails_at", ["two.txt", "three.txt"])
def test_files_are_replaced_together_or_not_at_all(older, links, fails_at, tmp_path, monkeypatch):
    files = [tmp_path / "new" / f"{name}.txt" for name in ("one", "two", "three")]
    replace = os.replace

    def refuses(old, new):
        if os.path.basename(new) == fails_at:
            raise PermissionError(13, "Permission denied")
        replace(old, new)

    def no_links(*_):
        raise OSError(95, "Operation not supported")

    def all_of(text):
        return {path: lambda file: file.write(text) for path in files}

    if older:
        write_whole(all_of(b"older"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuses)
        if not links:
            patch.setattr(os, "link", no_links)
        with pytest.raises(PermissionError):
            write_whole(all_of(b"newer"))
    found = {path: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert found == (dict.fromkeys(files, b"older") if older else {})
    write_whole(all_of(b"newer"))
    assert {path.read_bytes() for path in files} == {b"newer"}
    assert len(list((tmp_path / "new").iterdir())) == len(files)


def test_weights_need_a_config(tmp_path):
    model = models.random(LLAMA, dtype="float32", xp=np)
    with pytest.raises(NotImplementedError, match=r"is no folder with config.json; .*adapters of"):
        write_folder(model.weights, model.config, tmp_path, tmp_path / "new")

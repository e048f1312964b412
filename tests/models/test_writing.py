"""Folders that are written are read again as what they were."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.tiny_models import LLAMA

from cupyattn import models
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


def test_weights_need_a_config(tmp_path):
    model = models.random(LLAMA, dtype="float32", xp=np)
    with pytest.raises(NotImplementedError, match=r"is no folder with config.json; .*adapters of"):
        write_folder(model.weights, model.config, tmp_path, tmp_path / "new")

"""``python -m cupyattn merge``: a model of its own that computes what the adapted one does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.finetuning import CONFIG, finetune, model_and_data

from cupyattn import models
from cupyattn.cli import main
from cupyattn.models.checkpoints import safetensors_writer
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.training import LoraAdapters

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

folder = pytest.fixture(autouse=True)(model_and_data)


def told(capsys):
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_merged_model_is_the_adapted_one(quantize, capsys):
    beside = ["--quantize", quantize] if quantize else []
    finetune(*beside)
    capsys.readouterr()
    assert main(["merge", "model", "finetuned", "--out", "merged", *beside, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["generate"] == "python -m cupyattn generate merged ..."
    assert result["dtype"] == "float32"
    merged, base = models.load("merged"), models.load("model", quantize=quantize)
    ids = [[256, *b"Zorblax is a fish.", 257]]
    adapted = LoraAdapters.load(base, "finetuned").model.logits(ids)
    np.testing.assert_allclose(merged.logits(ids), adapted, rtol=0, atol=1e-4)
    assert np.abs(base.logits(ids) - adapted).max() > 0.1
    assert main(["generate", "merged", "Zorblax", "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize("kind", [[], ["--dtype", "float16"]])
def test_adapters_of_another_model_are_told(kind, folder, capsys):
    """Of the same shapes: by the weights, or in another dtype by the name."""
    finetune("--steps", "1")
    shutil.copytree("model", "other")
    weights = models.random(CONFIG, dtype="float32", xp=np, seed=4).weights
    write_folder(weights, CONFIG, folder, Path("other"))
    with pytest.warns(UserWarning, match="adapters of 'model' beside 'other'"):
        assert main(["merge", "other", "finetuned", "--out", "merged", *kind]) == 0
    generate = ["generate", "other", "x", "--adapters", "finetuned", "--max-new-tokens", "1"]
    with pytest.warns(UserWarning, match="adapters of 'model' beside 'other'"):
        assert main([*generate, *kind]) == 0


def test_another_dtype(capsys):
    finetune("--steps", "1")
    assert main(["merge", "model", "finetuned", "--out", "half", "--dtype", "float16"]) == 0
    assert "python -m cupyattn generate half ..." in capsys.readouterr().out
    assert json.loads(Path("half/config.json").read_text())["torch_dtype"] == "float16"
    assert models.load("half", dtype="float16").weights.embedding.dtype == np.float16


def test_weights_that_float16_does_not_hold_are_not_written(capsys):
    adapters = LoraAdapters(models.load("model"), rank=2)
    for name, array in adapters.arrays.items():
        array[...] = 3e5 if "1.mlp.up_proj.lora_B" in name else array
    adapters.save("large")
    capsys.readouterr()
    assert main(["merge", "model", "large", "--out", "merged", "--dtype", "float16"]) == 1
    message = told(capsys)
    assert "model.layers.1.mlp.up_proj.weight has numbers that float16 does not hold" in message
    assert "merge with --dtype float32 or bfloat16" in message
    assert not Path("merged").exists()
    assert main(["merge", "model", "large", "--out", "merged", "--dtype", "bfloat16"]) == 0


def test_a_folder_that_cannot_be_written(capsys, monkeypatch, tmp_path):
    def no_room(*_, **__):
        raise OSError(28, "No space left on device")

    finetune("--steps", "1")
    (tmp_path / "a file").write_text("")
    assert main(["merge", "model", "finetuned", "--out", "a file"]) == 1
    assert re.search(r"--out a file could not be written .*exists.*; .*pass another", told(capsys))
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_writer, "store", no_room)
        assert main(["merge", "model", "finetuned", "--out", "merged"]) == 1
    message = told(capsys)
    assert "--out merged could not be written ([Errno 28] No space left on device); " in message
    assert main(["merge", "model", "finetuned", "--out", "merged"]) == 0


def test_what_is_refused(capsys):
    finetune("--steps", "1")
    before = Path("model/model.safetensors").read_bytes()
    assert main(["merge", "model", "finetuned", "--out", "model"]) == 1
    assert "--out model has a config.json: it is a model already; " in told(capsys)
    assert Path("model/model.safetensors").read_bytes() == before
    assert main(["merge", "model", "nowhere", "--out", "merged"]) == 1
    assert "nowhere has no adapter_config.json" in told(capsys)
    assert main(["merge", "model.gguf", "finetuned", "--out", "merged"]) == 1
    assert "model.gguf is no folder with config.json" in told(capsys)
    assert not Path("merged").exists()

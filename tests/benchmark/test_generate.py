"""``python -m cupyattn.benchmark generate``: what it calls, counts and prints."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.tiny_models import TINY

import cupyattn
from cupyattn import models
from cupyattn.benchmark import generate as command
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.generate import T4_GB_PER_S, DecodeCall, own, parts_of, summary, timed
from cupyattn.benchmark.other_models import PromptSize, TimedRun


def tiny(name):
    return models.random(TINY[name], dtype="float32", xp=np, seed=3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi", "gemma4"])
def test_the_parts_are_the_calls_of_a_step(name, monkeypatch):
    """Function by function, with the shapes of the step itself."""
    model = tiny(name)
    generator = models.Generator(model, num_blocks=8, max_batch=2)
    cache = generator.cache
    sequences = [cache.allocator.add([1] * 20) for _ in range(2)]
    calls = []

    def noting(module, function):
        def noted(*arrays, **options):
            shapes = [getattr(each, "shape", None) for each in arrays]
            given = {key: value for key, value in options.items() if isinstance(value, str)}
            calls.append((function.__name__, shapes, "residual" in options, given))
            return function(*arrays, **options)

        monkeypatch.setattr(module, function.__name__, noted)

    for module in (models.weights, models.forward):
        for each in ("linear", "layer_norm", "rms_norm", "embedding"):
            if hasattr(module, each):
                noting(module, getattr(module, each))
    for each in (cupyattn.embedding, cupyattn.sample):
        noting(cupyattn, each)
    for each in (type(cache).append, type(cache).attend):
        noting(type(cache), each)
    for part in parts_of(model, cache, cache.step_tables(sequences), 20):
        part.call()
    found = [(name, shapes, residual) for name, shapes, residual, _ in calls]
    calls.clear()
    for _ in range(2):
        generator.submit([1] * 19, max_new_tokens=2)
    generator.step()
    calls.clear()
    generator.step()
    wanted = [(name, shapes, residual) for name, shapes, residual, _ in calls]
    packed = {(2, 1, heads.num_heads, dim): (2, heads.num_heads, dim)
              for heads in model.config.heads for dim in [heads.head_dim]}  # fmt: skip
    simple = [
        (name, [packed.get(shape, shape) for shape in shapes], residual)
        for name, shapes, residual in found
    ]
    assert simple == wanted


def test_a_t4_is_latency_and_bytes():
    part = DecodeCall("head", 320_000_000, lambda: None)
    (row, _) = summary([part], [[200e-6, 200e-6]], 3200.0)
    assert row["t4_s"] == pytest.approx(100e-6 + 320e6 / T4_GB_PER_S / 1e9)
    (row, _) = summary([part, part], [[1e-4, 2e-4], [3e-4, 4e-4]], 3200.0)
    assert row["seconds"] == pytest.approx([4e-4, 6e-4]), "of all that have the name"
    assert row["calls"] == 2


def test_runs_are_timed_and_repeated():
    size = PromptSize(2, 5, 4)
    model = tiny("gpt2")
    result = timed(own(model, size), size, model.config.vocab_size, 2)
    assert result["tokens_per_s"] > 0
    seen = []

    def generate(prompts, new):
        seen.append(prompts)
        return TimedRun(0.5, 2.0, [[len(seen)] * new] * 2, 2)

    result = timed(generate, size, 61, 3)
    assert (result["first_s"], result["tokens_per_s"]) == ([0.5] * 3, 3.0)
    assert result["step_s"] == pytest.approx([2 / 3.0] * 3)
    assert len(seen) == 4 and seen[-1] != seen[-2]


@pytest.fixture
def generating(a_gpu, monkeypatch):
    """The command as on a GPU, but for the models, and a peer that is wrong."""
    model = tiny("phi")
    monkeypatch.setattr(models, "random", lambda name, **options: model)
    wrong = [TimedRun(0.1, 0.2, [[0] * 4], 1), TimedRun(0.1, 0.2, [[0] * 4] * 2, 2)]
    monkeypatch.setattr(
        command, "baseline", lambda name, model, folder: lambda ids, new: wrong[len(ids) - 1]
    )

    def timer(parts, xp, runs):
        for part in parts:
            part.call()
        return [[2e-6] * runs] * len(parts)

    monkeypatch.setattr(command, "time_parts", timer)
    return a_gpu


SMALL = ("generate", "--model", "phi-2", "--prompt", "5", "--new-tokens", "4", "--runs", "1")


def test_text_and_json(generating, capsys, tmp_path):
    object.__setattr__(generating, "baselines", ("static",))
    file = tmp_path / "generate.json"
    assert main([*SMALL, "--batch", "1", "2", "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "t4_s is MODELLED" in printed
    result = json.loads(file.read_text(encoding="utf-8"))
    tokens = [row for row in result["rows"] if row["operation"] == "new token"]
    assert [(row["implementation"], row["batch"]) for row in tokens] == [
        ("cupyattn", 1), ("transformers static", 1), ("cupyattn", 2), ("transformers static", 2),
    ]  # fmt: skip
    assert tokens[1]["also"]["tokens_per_s"] == pytest.approx(15)
    assert tokens[1]["times"]["p50_s"] == pytest.approx(1 / 15)
    assert tokens[1]["times"]["calls_per_sample"] == 3, "steps behind the first token"
    parts = [row for row in result["rows"] if row["batch"] == 1 and "t4_s" in row.get("also", {})]
    names = [row["operation"] for row in parts]
    assert names[:4] == ["embedding", "norm", "qkv and up", "activation"]
    total = sum(row["times"]["p50_s"] for row in parts[:-1])
    assert names[-1] == "step: all parts"
    assert parts[-1]["times"]["p50_s"] == pytest.approx(total)
    assert parts[-1]["also"]["t4_tokens_per_s"] == pytest.approx(1 / parts[-1]["also"]["t4_s"])


def test_without_a_gpu_a_step_is_modelled_by_its_bytes(no_gpu, capsys, tmp_path):
    """The bytes are those of the weights without the embedding, and of keys and values."""
    file = tmp_path / "generate.json"
    words = ("--model", "gpt2", "--batch", "2", "--prompt", "100", "--new-tokens", "56")
    assert main(["generate", *words, "--json", str(file)]) == 0
    assert capsys.readouterr().out.startswith("Generating, MODELLED and not measured, for a T4")
    result = json.loads(file.read_text())
    assert (result["modelled"], result["machine"]) == (True, "T4")
    *parts, step = result["rows"]
    assert step["operation"] == "step: all parts"
    assert step["bytes"] == sum(row["bytes"] for row in parts)
    assert step["times"]["p50_s"] == pytest.approx(step["bytes"] / 320e9)
    assert step["also"]["tokens_per_s"] == pytest.approx(2 / step["times"]["p50_s"])
    cache = 2 * 128 * 12 * 2 * 768 * 2
    assert step["bytes"] == pytest.approx(2 * 124.4e6 + cache, rel=0.02)

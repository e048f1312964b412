"""Patterns of module names: what they match, and those that would backtrack without end."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from support.tiny_models import TINY

from cupyattn import models
from cupyattn.models.training import module_patterns
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.lora_options import LoraOptions

pytest.importorskip("regex")

MODULES = [
    f"model.layers.{layer}.{part}"
    for layer in (0, 1, 10)
    for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]
# The branches of each group are alike: of 40 groups there are 2^40 ways to fail.
ENDLESS = "(a|a)" * 40
LONG_NAME = "a" * 40 + "b"


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("q_proj", 3),
        ("proj", 0),
        ("self_attn.q_proj", 3),
        (r"layers\.1\.mlp\.\w+", 1),
        ("q_proj|v_proj", 6),
        (r"model\.layers\.\d+\.mlp\.down_proj", 3),
        (r"(?!q).*proj", 9),  # the parts before the last ones may be any of the name's
        (r"(?!down)\w+_proj", 6),
        (r".*\.(?:1|10)\.self_attn\.[qv]_proj", 4),
        (r"(?P<of>[qv])_proj", 6),
    ],
)
def test_patterns_match_whole_last_parts(pattern, count):
    options = LoraOptions(rank_pattern={pattern: 3}).checked()
    assert sum(options.rank_of(module) == 3 for module in MODULES) == count
    assert options.idle(MODULES) == ([] if count else [pattern])


@pytest.mark.parametrize("target", [r"(?i).*Q_PROJ", r"^(?!.*(?:mlp|v_proj)).*\.\d+\..*$"])
def test_a_target_matches_whole_names(target):
    options = LoraOptions(targets=target).checked()
    assert [options.targeted(module) for module in MODULES] == [True, False, False] * 3
    assert not LoraOptions(targets="q_proj").checked().targeted(MODULES[0])


@pytest.mark.parametrize("pattern", ["(?i)q_proj", "a{99999999999999999999}", "(" * 5000, "[", 5])
def test_what_is_no_pattern_is_a_value_error(pattern):
    with pytest.raises(ValueError, match="the pattern"):
        LoraOptions(rank_pattern={pattern: 8}).checked()


@pytest.mark.parametrize("pattern", ["a{99999999}", "(?:(?:a|b){999}){999,}"])
def test_a_pattern_that_is_large_once_compiled_is_refused(pattern):
    began = time.monotonic()
    with pytest.raises(ValueError, match="it repeats more than 1000 times"):
        LoraOptions(rank_pattern={pattern: 8}).checked()
    assert time.monotonic() - began < 1
    LoraOptions(rank_pattern={r"layers\.\d{1,2}\.\w{4}": 8}).checked()


@pytest.mark.parametrize(
    "options",
    [
        {"targets": ENDLESS},
        {"rank_pattern": {ENDLESS: 8}},
        {"alpha_pattern": {ENDLESS + str(end): 8 for end in range(50)}},
    ],
    ids=["targets", "rank", "fifty of alpha"],
)
def test_a_pattern_that_backtracks_is_stopped(monkeypatch, options):
    monkeypatch.setattr(module_patterns, "SECONDS", 0.2)
    module_patterns.matcher.cache_clear()
    found = LoraOptions(**options).checked()
    names = [LONG_NAME + str(end) for end in range(100)]
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"the pattern .* takes more than 0\.2 s"):
        found.require_found(names)
    with pytest.raises(ValueError, match="takes more than"):
        found.idle(names) if "targets" not in options else found.targeted(names[0])
    assert time.monotonic() - began < 5
    module_patterns.matcher.cache_clear()


def test_adapters_with_a_pattern_that_backtracks_are_refused(monkeypatch, tmp_path):
    pytest.importorskip("safetensors")
    monkeypatch.setattr(module_patterns, "SECONDS", 0.2)
    model = models.random(TINY["llama"], dtype="float32", xp=np)
    LoraAdapters(model, rank=2).save(tmp_path)
    path = tmp_path / "adapter_config.json"
    given = json.loads(path.read_text())
    endless = "(?:.|.)" * 20 + "[^a-z0-9_.]"
    path.write_text(json.dumps({**given, "rank_pattern": {endless: 2}}))
    with pytest.raises(ValueError, match=r"adapter_config\.json: the pattern .* takes more than"):
        LoraAdapters.load(model, tmp_path)
    path.write_text(json.dumps({**given, "target_modules": endless}))
    with pytest.raises(ValueError, match=rf"{tmp_path.name}: .* the pattern .* takes more than"):
        LoraAdapters.load(model, tmp_path)


def test_hundreds_of_patterns_match_quickly():
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(300)]
    options = LoraOptions(rank_pattern=dict.fromkeys(names, 3)).checked()
    began = time.monotonic()
    assert [options.rank_of(name) for name in names] == [3] * 300
    assert time.monotonic() - began < 5

"""Choices among candidate configurations: recording, storage for a device, use."""

from __future__ import annotations

import json

import pytest

from cupyattn import backend, device_info
from cupyattn.cli import main
from cupyattn.runtime import tuning as choices
from cupyattn.runtime.tuning import (
    TUNED_VARIABLE,
    USUAL,
    Asked,
    Choices,
    choices_for,
    file_of,
    keep,
    read,
)

ROWS = {"a": 1, "b": 2, "c": 3}
DEVICE = ("A Device (8 GB)", "sm_75")
pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture(autouse=True)
def not_set(monkeypatch):
    monkeypatch.delenv(TUNED_VARIABLE, raising=False)


def pick(among, chosen, usual="a"):
    return Choices({"kernel 1 2": chosen}).pick("kernel", (1, 2), among, usual=usual)


def test_usual_candidate_without_a_choice():
    assert USUAL.pick("kernel", (1, 2), ROWS, usual="b") == 2
    assert pick(ROWS, "c") == 3
    assert Choices({"kernel 1 3": "c"}).pick("kernel", (1, 2), ROWS, usual="a") == 1


def test_inadmissible_choice_is_ignored():
    assert pick({"a": 1, "b": 2}, "c", usual="b") == 2


def test_questions_are_recorded_once_with_the_usual_candidate_first():
    asked = Asked({"kernel 2": "c"})
    assert [asked.pick("kernel", (n,), ROWS, usual="b") for n in (1, 2, 1)] == [2, 3, 2]
    assert asked.questions == [("kernel 1", ("b", "a", "c")), ("kernel 2", ("b", "a", "c"))]


@pytest.mark.nvrtc
def test_stored_choices_are_used_if_enabled(monkeypatch):
    assert read(*DEVICE) is None
    path = keep(*DEVICE, {"kernel 1 2": "c"}, date="2026-11-23")
    assert path == file_of(*DEVICE)
    assert path.name == "tuned-a-device-8-gb-sm_75.json"
    assert choices_for(*DEVICE) is USUAL
    monkeypatch.setenv(TUNED_VARIABLE, "1")
    assert choices_for(*DEVICE).chosen == {"kernel 1 2": "c"}
    assert choices_for("Another", "sm_75") is USUAL
    assert choices_for(DEVICE[0], "sm_80") is USUAL


@pytest.mark.nvrtc
def test_later_choices_are_added_to_earlier_ones():
    keep(*DEVICE, {"one": "a", "two": "a"}, date="2026-11-22")
    keep(*DEVICE, {"two": "b"}, date="2026-11-23")
    kept = read(*DEVICE)
    assert (kept["chosen"], kept["date"]) == ({"one": "a", "two": "b"}, "2026-11-23")


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"made_from": 1, "chosen": {}}', "damaged", "[" * 100_000,
        {"made_from": "other kernels"}, {"chosen": {"one": ["a"]}}, {"chosen": [1]},
    ],
)  # fmt: skip
def test_damaged_or_outdated_choices_are_not_used(content, monkeypatch):
    path = keep(*DEVICE, {"one": "a"})
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text("utf-8")), **content})
    path.write_text(content, encoding="utf-8")
    monkeypatch.setenv(TUNED_VARIABLE, "1")
    assert read(*DEVICE) is None
    assert choices_for(*DEVICE) is USUAL


@pytest.mark.nvrtc
def test_choices_are_not_used_without_a_compiler(monkeypatch):
    keep(*DEVICE, {"one": "a"})

    def missing():
        raise RuntimeError("no NVRTC")

    monkeypatch.setattr(choices, "_made_from", missing)
    assert read(*DEVICE) is None


def test_digest_covers_configurations_and_cuda_sources():
    names = {name for name, _ in choices._sources()}
    assert names >= {"ops/norms/kernels.py", "ops/linear/tiles.py", "common/rows.cuh"}
    assert any(name.startswith("ops/attention/kernels/") for name in names)


@pytest.mark.nvrtc
def test_digest_depends_on_the_compiler(monkeypatch):
    before = choices._made_from.__wrapped__()
    assert choices._made_from.__wrapped__() == before
    monkeypatch.setattr(choices, "nvrtc_version", lambda: (99, 0))
    assert choices._made_from.__wrapped__() != before


@pytest.mark.parametrize("text", ["2", "yes", "-1"])
def test_another_value_is_refused(monkeypatch, text):
    monkeypatch.setenv(TUNED_VARIABLE, text)
    for use in (device_info, lambda: backend("emulator").__enter__()):
        with pytest.raises(ValueError, match=r"^CUPYATTN_TUNED='.*'; it is 1 to .*; set .*=0 or"):
            use()


@pytest.mark.parametrize(("text", "says"), [("1", "CUPYATTN_TUNED 1"), ("0", "not set")])
def test_device_info_reports_tuning(monkeypatch, capsys, text, says):
    monkeypatch.setenv(TUNED_VARIABLE, text)
    assert device_info()["uses_tuned"] is (text == "1")
    assert main(["info"]) == 0
    assert says in " ".join(capsys.readouterr().out.split())

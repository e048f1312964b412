"""Outcomes of bugs in the softmax's backward: one of each kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.recording_device import device_array
from support.search import Search, deep

from cupyattn import ScoreMod, attention
from cupyattn.registry import KERNELS
from cupyattn.runtime.source import source_root
from mutation.__main__ import too_few_caught
from mutation.bugs import Bug
from mutation.coverage import ROOT, Coverage, folders_of_tests, measure, most_new_first
from mutation.planted import makes_a_difference
from mutation.plugin import NOTES, noting
from mutation.trial import (
    CAUGHT,
    NOT_COMPILED,
    NOT_TRIED,
    SURVIVED,
    UNFINISHED,
    WITHOUT_EFFECT,
    Outcome,
    run,
    screen,
)

pytestmark = pytest.mark.nvrtc

FILE = "softmax/backward.cu"
MODULE = "tests/softmax/test_kernels.py"
OF_NUMBERS = f"{MODULE}::test_row_lengths_around_the_tables_limits[128-float16-1]"
OF_STRIDES = f"{MODULE}::test_outer_axes_of_any_strides"


def bug_in(text: str, wrong: str) -> Bug:
    """In the one line of the file that holds the text."""
    lines = (source_root() / FILE).read_text(encoding="utf-8").splitlines()
    ((number, line),) = [(n, line) for n, line in enumerate(lines, 1) if text in line]
    return Bug(FILE, number, "", line, line.replace(text, wrong))


WRONG_SIGN = bug_in("row_sum += batch_r.sum();", "row_sum -= batch_r.sum();")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("coverage") / "coverage.json"
    measure([OF_NUMBERS, OF_STRIDES], file, jobs=2 if Search.deep else 1)
    return file


@pytest.fixture(scope="module")
def measured(file: Path) -> Coverage:
    return Coverage.read(file, KERNELS)


def test_coverage_says_what_loads_a_file(measured: Coverage):
    assert set(measured.tests_of(FILE)) == {OF_NUMBERS, OF_STRIDES}
    assert measured.tests_of("attention/params.cuh") == []
    assert {kernel.entry for kernel in measured.kernels_with(FILE)} == {"softmax_backward"}
    assert FILE in measured.all_files()


def test_coverage_of_one_kernel(file: Path):
    forward = Coverage.read(file, ["softmax_forward"])
    assert FILE not in forward.all_files()
    entries = {kernel.entry for kernel in forward.kernels_with("common/rows.cuh")}
    assert entries == {"softmax_forward"}


def test_every_kernel_has_folders_of_tests():
    folders = {entry: folders_of_tests(kernel.source) for entry, kernel in KERNELS.items()}
    assert all((ROOT / folder).is_dir() for each in folders.values() for folder in each)
    assert folders["append_kv"] == {"tests/cache", "tests/ops"}
    assert folders["attention_decode"] == folders["attention_forward"]
    assert folders["column_sums"] == {"tests/ops"}


@pytest.mark.parametrize(
    ("bug", "result"),
    [
        (WRONG_SIGN, ""),
        (bug_in("row_sum = 0.f;", "row_sum = 0.f ;"), WITHOUT_EFFECT),
        (bug_in("row_sum = 0.f;", "row_sum = ;"), NOT_COMPILED),
    ],
    ids=["a bug", "without effect", "no C++"],
)
def test_what_has_no_effect_is_sorted_out(
    measured: Coverage, tmp_path: Path, bug: Bug, result: str
):
    assert screen(bug, measured.kernels_with(FILE), tmp_path).result == result


def test_kernels_with_expressions_of_a_user_are_compared_too(recorder, monkeypatch, tmp_path):
    """Their expressions are noted: without them no bug of an attention kernel compiles."""
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    notes = {"seconds": 0.0, "draws": False, "failed": False, "kernels": []}
    monkeypatch.setitem(NOTES, test, notes)
    monkeypatch.setattr(type(recorder), "load", noting(type(recorder).load))
    q = device_array((1, 8, 2, 64))
    attention(q, q, q, score_mod=ScoreMod("score + 1.f"))
    file = tmp_path / "coverage.json"
    file.write_text(json.dumps({test: notes}))
    kernels = Coverage.read(file, KERNELS).kernels_with("attention/modifiers.cuh")
    assert [kernel.entry for kernel in kernels] == ["attention_forward"]
    assert makes_a_difference(source_root(), kernels) is False


@pytest.mark.parametrize(
    ("test", "seconds", "result"),
    [
        (OF_NUMBERS, 300, CAUGHT),
        (OF_NUMBERS, 0.01, UNFINISHED),
        (OF_NUMBERS, 0, NOT_TRIED),
        *deep((OF_STRIDES, 300, SURVIVED)),
    ],
    ids=["caught", "unfinished", "not tried", "survived"],
)
def test_a_bug_is_caught_by_a_test_that_minds_it(
    tmp_path: Path, test: str, seconds: float, result: str
):
    """A test that compares views with copies does not mind a wrong sign in both."""
    outcome = run(WRONG_SIGN, [test], tmp_path, seconds)
    assert (outcome.result, outcome.by) == (result, test if result == CAUGHT else "")


@pytest.mark.parametrize(
    ("caught", "least", "too_few"),
    [(49, 1.0, True), (49, 0.98, False), (48, 0.98, True), (50, 1.0, False), (0, 0.98, True)],
)
def test_a_share_of_survivors_is_allowed(caught: int, least: float, too_few: bool):
    survived = [Outcome(WRONG_SIGN, SURVIVED)] * (50 - caught)
    found = [*survived, *[Outcome(WRONG_SIGN, CAUGHT)] * caught, Outcome(WRONG_SIGN, UNFINISHED)]
    assert too_few_caught(found, least) is too_few


def test_what_brings_most_that_is_new_for_its_cost_comes_first():
    features = {"a": {1, 2}, "b": {1, 2, 3}, "c": {4}, "d": {4}}
    costs = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.5}
    assert most_new_first(features, costs) == ["b", "d", "a", "c"]

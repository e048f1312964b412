"""What the suite promises of itself: options that meet, quick tests, runs without xdist."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.search import NOT_QUICK, QUICK
from support.strategies import EITHER_HALF, OPTION_SETS, OPTIONS, SCORE_OPTIONS, AttentionProblem

import cupyattn
from cupyattn.runtime.source import source_root

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> str:
    """Run pytest in a process of its own, and return what it says."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_two_score_options_meet_and_part():
    for pair in itertools.combinations(SCORE_OPTIONS, 2):
        found = {tuple(name in options for name in pair) for options in OPTION_SETS}
        assert found == set(itertools.product((False, True), repeat=2)), pair


@pytest.mark.parametrize(("plain", "others"), EITHER_HALF, ids=["first", "second"])
def test_each_score_option_stands_in_either_half(plain, others):
    assert set().union(*plain) == set(SCORE_OPTIONS)
    assert all(options in (*plain, *others) for options in OPTION_SETS)


def test_option_sets_hold_score_options_only():
    assert set().union(*OPTION_SETS) == set(SCORE_OPTIONS) < set(OPTIONS)


def test_quick_tests_exist():
    for beginning in (*QUICK, *NOT_QUICK):
        file, _, test = beginning.partition("::")
        found = list((ROOT / "tests").glob(f"{file}*"))
        assert found, beginning
        name = test.partition("[")[0]
        assert not test or any(f"def {name}" in path.read_text("utf-8") for path in found)


def test_every_test_stands_where_pytest_looks():
    """A test in a file of another name would never run."""
    outside = [
        f"{path.relative_to(ROOT)}: {test}"
        for path in (ROOT / "tests").rglob("*.py")
        if not path.name.startswith("test_")
        for test in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text("utf-8"), re.M)
    ]
    assert not outside, "move them into a test_*.py"


@pytest.mark.parametrize("view", ["contiguous", "padded", "strided"])
def test_views_of_options_hold_what_is_drawn(view: str):
    drawn = (
        *(("mask", (2, 1, 5, 7)), ("bias", (((4, 1, 7)), "float16")), ("sinks", "float32")),
        *(("alibi_slopes", ((2, 4), "float32", -1)), ("seqused_k", (3, 6)), ("q_offset", (2, 1))),
    )
    sizes = {"B": 2, "Sq": 5, "Sk": 7, "H": 4, "G": 2, "D": 8, "Dv": 8}
    plain, other = (
        AttentionProblem(**sizes, drawn=drawn, option_view=each).options()
        for each in ("contiguous", view)
    )
    for name, array in plain.items():
        assert (other[name] == array).all()
        assert other[name].strides == array.strides or view != "contiguous"
    assert other["bias"].strides[0] < 0 or view != "strided"


def test_a_run_without_xdist_says_where_kernels_run_and_how_long_it_takes():
    one_file = ("-o", "testpaths=tests/project/test_names.py")  # to import all takes seconds
    said = run("-p", "no:xdist", *one_file, "-m", "quick")
    assert "kernels run on" in said or "kernels for" in said or "no NVRTC" in said
    assert "expect" in said or "compute capability" in said
    assert " passed" in said


@pytest.mark.deep
def test_a_run_in_one_process():
    pytest.importorskip("xdist")
    assert " passed" in run("-n", "0", "-q", "tests/project/test_names.py")


def test_names_of_tests_are_the_same_in_every_process(request: pytest.FixtureRequest):
    """Workers of pytest-xdist compare them: no name of this run may hold an address."""
    names = [item.nodeid for item in request.session.items]
    assert not [name for name in names if re.search(r" at 0x[0-9a-f]+", name)]


PACKAGE = Path(cupyattn.__file__).parent
TESTS = Path(__file__).resolve().parent.parent
MOST_LINES = 600


def test_files_fit_on_a_few_screens():
    """A longer file has parts that can be separate."""
    folders = (PACKAGE, source_root(), TESTS)
    sources = [
        path for folder in folders for kind in ("*.py", "*.cu*") for path in folder.rglob(kind)
    ]
    assert len(sources) > 700
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    too_long = {str(path): count for path, count in lines.items() if count > MOST_LINES}
    assert not too_long

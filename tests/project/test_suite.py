"""Promises of the suite: options that meet, quick tests, runs without xdist.

pytest collects every test with only what ``pip install ".[test]"`` brings to each platform.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Event, Thread
from time import sleep

import pytest
from support.processes import environment, gpu_turn, worker_turn
from support.search import NOT_QUICK, QUICK, deep
from support.strategies import EITHER_HALF, OPTION_SETS, OPTIONS, SCORE_OPTIONS

import cupyattn
from cupyattn.runtime.source import source_root
from cupyattn.testing import AttentionCase

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


def test_a_worker_that_measures_is_alone_on_a_gpu(tmp_path):
    """It waits for tests that run, and those that come after it wait for it."""
    pytest.importorskip("fcntl")
    order: list[str] = []
    may_end, both_run = Event(), Barrier(2)

    def turn(name: str, alone: bool) -> None:
        with gpu_turn(alone=alone, files=tmp_path / "gpu"):
            order.append(f"{name} begins")
            if name in ("first", "second"):
                both_run.wait(20)
                may_end.wait(20)
            order.append(f"{name} ends")

    def started(name: str, alone: bool) -> Thread:
        thread = Thread(target=turn, args=(name, alone))
        thread.start()
        return thread

    threads = [started("first", False), started("second", False)]
    while len(order) < 2:
        sleep(0.01)
    threads.append(started("alone", True))
    sleep(0.1)  # until it waits
    threads.append(started("last", False))
    sleep(0.1)
    assert len(order) == 2
    may_end.set()
    for thread in threads:
        thread.join(20)
    assert order[4:] == ["alone begins", "alone ends", "last begins", "last ends"]
    assert not both_run.broken


def test_processes_that_a_test_starts_are_in_its_turn(tmp_path):
    """A worker that waits to be alone keeps the queue, and would keep them from beginning."""
    pytest.importorskip("fcntl")
    files = tmp_path / "gpu"
    nested = f"""
import pathlib, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from support.processes import worker_turn
with worker_turn(alone=True, files=pathlib.Path({str(files)!r})):
    print("has begun")
"""
    with worker_turn(alone=False, files=files):
        command = [sys.executable, "-c", nested]
        said = subprocess.check_output(command, text=True, env=environment(), timeout=60)
        assert said == "has begun\n"
    with worker_turn(alone=True, files=files):
        pass


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
        AttentionCase(**sizes, options=drawn, option_view=each).keywords()
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


# Wheels of cupy and mpi4py exist for some platforms, and no extra installs torch.
OPTIONAL = ("mpi4py", "cupy", "torch")
IMPORTED_BY_SOME = ("tests/support", "tests/distributed", "tests/ops/test_reference.py")
WITHOUT = """
import sys
from importlib.machinery import PathFinder

import pytest

find_spec, absent = PathFinder.find_spec, sys.argv[1].split(",")


def unless_absent(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in absent else find_spec(name, path, target)


PathFinder.find_spec = classmethod(unless_absent)
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.parametrize(
    ("absent", "folders"),
    [(OPTIONAL, IMPORTED_BY_SOME), *deep(*(((name,), ()) for name in OPTIONAL))],
)
def test_tests_are_collected_without_optional_packages(
    absent: tuple[str, ...], folders: tuple[str, ...]
):
    command = [sys.executable, "-c", WITHOUT, ",".join(absent), *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/distributed/test_processes.py::" in done.stdout


def imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    """Names of the packages that a module imports as soon as it is imported itself."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
            yield str(statement.module).partition(".")[0]
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) != "TYPE_CHECKING":
            yield from imported_at_once([*statement.body, *statement.orelse])
        elif isinstance(statement, (ast.With, ast.Try, ast.ClassDef)):
            yield from imported_at_once(statement.body)


def installed_everywhere() -> set[str]:
    """Packages that the project and its extra `test` require on every platform."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    required = re.findall(r'"([\w-]+)(?:\[\w+\])?[<>=][^;"]*"', text)
    return {name.replace("-", "_") for name in required}


def test_modules_import_only_packages_that_every_platform_has():
    own = {"cupyattn", "mutation", *(path.name for path in (ROOT / "tests").iterdir())}
    known = own | installed_everywhere() | set(sys.stdlib_module_names)
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("tests", "cupyattn")
        for path in (ROOT / folder).rglob("*.py")
        if path.stem != "calibration"  # imported after importorskip only
        for name in imported_at_once(ast.parse(path.read_text(encoding="utf-8")).body)
        if name not in known
    }
    assert not unknown, "import them inside of functions, or after pytest.importorskip"

"""pytest collects every test with only what ``pip install ".[test]"`` brings to each platform."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.search import deep

ROOT = Path(__file__).resolve().parent.parent.parent
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
        for name in imported_at_once(ast.parse(path.read_text(encoding="utf-8")).body)
        if name not in known
    }
    assert not unknown, "import them inside of functions, or after pytest.importorskip"

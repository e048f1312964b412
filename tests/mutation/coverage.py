"""Which kernels each test loads, and hence which tests to run for a file of cuda_src."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cupyattn.runtime.source import read_unit, source_root

ROOT = Path(__file__).resolve().parent.parent.parent
# Nobody reads what an assertion compared. To have it said takes a second of the two until the first
# test runs, for each bug anew (2026-11-24).
PYTEST = [
    *(sys.executable, "-m", "pytest", "-q", "--assert=plain"),
    *("-p", "no:cacheprovider", "-p", "no:xdist"),
]
# Tests that look for a line of the sources by its text: they would fail because it has changed.
LEFT_OUT = ("test_memory_access", "test_newer_targets")
FEW_EXAMPLES = 4

_Key = TypeVar("_Key", bound=Hashable)


class Kernel(NamedTuple):
    """A specialisation, as the source sees it."""

    entry: str
    source: str
    defines: tuple[tuple[str, int | str], ...]
    headers: tuple[tuple[str, str], ...] = ()
    """Name and text of a user's modifiers."""


class Load(NamedTuple):
    """The kernels that a test loads, its duration, and whether it draws examples."""

    kernels: tuple[Kernel, ...]
    seconds: float
    draws: bool


class Coverage:
    """The kernels that each test loads."""

    def __init__(self, loads: Mapping[str, Load]) -> None:
        self.loads = dict(loads)
        sources = {kernel.source for load in loads.values() for kernel in load.kernels}
        root = source_root()
        self.files = {
            source: {path.relative_to(root).as_posix() for path in read_unit(root / source).files}
            for source in sources
        }

    @classmethod
    def read(cls, file: Path, entries: Collection[str]) -> Coverage:
        """Read what `measure` has written of some kernels."""
        loads = {}
        for test, notes in json.loads(file.read_text()).items():
            kernels = tuple(
                Kernel(entry, source, tuple(map(tuple, defines)), tuple(map(tuple, headers)))
                for entry, source, defines, headers in notes["kernels"]
                if entry in entries
            )
            loads[test] = Load(kernels, notes["seconds"], notes["draws"])
        return cls(loads)

    def all_files(self) -> list[str]:
        """The files of all kernels."""
        return sorted(set().union(*self.files.values()))

    def kernels_with(self, file: str) -> list[Kernel]:
        """Specialisations with a file in them, the most different ones first."""
        features = {
            kernel: set(kernel.defines) | {kernel.entry}
            for load in self.loads.values()
            for kernel in load.kernels
            if file in self.files[kernel.source]
        }
        return most_new_first(features, dict.fromkeys(features, 1.0))

    def tests_of(self, file: str) -> list[str]:
        """Tests that load a kernel with a file in it: what brings most new kernels soonest first.

        What a test draws is not always the same, so it counts as soon as a test beside it does.
        """
        features = {}
        for test, load in self.loads.items():
            own = [kernel for kernel in load.kernels if file in self.files[kernel.source]]
            features[test] = {item for each in own for item in (each.entry, *each.defines)}
        modules = {test.split("::")[0] for test, found in features.items() if found}
        chosen = {
            test: found
            for test, found in features.items()
            if found or (self.loads[test].draws and test.split("::")[0] in modules)
        }
        seconds = {test: 0.2 + self.loads[test].seconds for test in chosen}
        return most_new_first(chosen, seconds)


def folders_of_tests(source: str) -> set[str]:
    """Return the folders with the tests of a kernel, by its source: its family's, and tests/ops.

    tests/ops tests what several families have in common.
    """
    family = source.partition("/")[0]
    return {"tests/ops"} if family == "common" else {f"tests/{family}", "tests/ops"}


def most_new_first(features: Mapping[_Key, set], costs: Mapping[_Key, float]) -> list[_Key]:
    """Order by how much is new in each for its cost; what brings nothing new by its cost alone."""
    left, seen, order = dict(features), set(), []
    while left:
        best = max(left, key=lambda key: (len(left[key] - seen) / costs[key], -costs[key]))
        seen |= left.pop(best)
        order.append(best)
    return order


def of_this_checkout(**more: str) -> dict[str, str]:
    """The environment of a run of pytest on this checkout, reproducible."""
    folders = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "CI": "1", "PYTHONPATH": os.pathsep.join(folders), **more}


def measure(tests: list[str], file: Path, jobs: int) -> None:
    """Run the tests on few examples, and note in a file what each loads."""
    listed = subprocess.run(
        [*PYTEST, "--collect-only", *tests],
        cwd=ROOT,
        env=of_this_checkout(),
        capture_output=True,
        text=True,
    )
    names = [
        line
        for line in listed.stdout.splitlines()
        if "::" in line and not any(part in line for part in LEFT_OUT)
    ]
    if not names:
        raise SystemExit(f"pytest found no tests in {tests}:\n{listed.stdout}{listed.stderr}")
    parts = []
    for number in range(jobs):
        notes, arguments = file.with_suffix(f".{number}.json"), file.with_suffix(f".{number}.txt")
        arguments.write_text("\n".join(names[number::jobs]))
        command = [*PYTEST, "-p", "mutation.plugin", f"--examples={FEW_EXAMPLES}", f"@{arguments}"]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=of_this_checkout(MUTATION_NOTES=str(notes)),
            stdout=subprocess.DEVNULL,
        )
        parts.append((process, notes))
    found: dict[str, dict[str, Any]] = {}
    for process, notes in parts:
        process.wait()
        found |= json.loads(notes.read_text())
    if failing := [test for test, notes in found.items() if notes["failed"]]:
        print(f"left out, since they fail without a bug: {', '.join(failing)}", file=sys.stderr)
    file.write_text(json.dumps({test: found[test] for test in found if test not in failing}))

"""One bug against the tests that load its file."""

from __future__ import annotations

import math
import re
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from mutation.bugs import Bug
from mutation.coverage import PYTEST, ROOT, Kernel, of_this_checkout
from mutation.planted import makes_a_difference, planted

CAUGHT, SURVIVED, UNFINISHED = "caught", "survived", "unfinished"
WITHOUT_EFFECT, NOT_COMPILED, NOT_TRIED = "without effect", "does not compile", "not tried"


class Outcome(NamedTuple):
    """The outcome of a bug: one of the words above, and the test that caught it."""

    bug: Bug
    result: str
    by: str = ""


def screen(bug: Bug, kernels: list[Kernel], work: Path) -> Outcome:
    """Sort out what compiles to the same code, or not at all; the rest is for `run`."""
    with planted(bug, work) as folder:
        differs = makes_a_difference(folder, kernels)
    if differs is None:
        return Outcome(bug, NOT_COMPILED)
    return Outcome(bug, "" if differs else WITHOUT_EFFECT)


def attempt(
    bug: Bug, kernels: list[Kernel], tests: list[str], work: Path, seconds: float, until: float
) -> Outcome:
    """Screen a bug, and run what has an effect."""
    outcome = screen(bug, kernels, work) if time.time() < until else Outcome(bug, NOT_TRIED)
    return outcome if outcome.result else run(bug, tests, work, seconds, until)


def run(bug: Bug, tests: list[str], work: Path, seconds: float, until: float = math.inf) -> Outcome:
    """Run the tests to the first failure, for some seconds at most, and not beyond a time."""
    seconds = min(seconds, until - time.time())
    if seconds <= 0:
        return Outcome(bug, NOT_TRIED)
    with planted(bug, work) as folder:
        arguments = folder.with_suffix(".txt")
        arguments.write_text("\n".join(tests))
        environment = of_this_checkout(
            MUTATION_SOURCES=str(folder), PYTHONDONTWRITEBYTECODE="1", OPENBLAS_NUM_THREADS="1"
        )
        command = [*PYTEST, "-x", "--tb=no", "-p", "mutation.plugin", f"@{arguments}"]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return Outcome(bug, UNFINISHED)
    if done.returncode == 0:
        return Outcome(bug, SURVIVED)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return Outcome(bug, CAUGHT, failed[1])
    if done.returncode < 0:  # a signal: the kernel took the process with it
        return Outcome(bug, CAUGHT, f"signal {-done.returncode}")
    raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")

"""The command: draw bugs, try each, say what became of them."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from pathlib import Path

from cupyattn.registry import KERNELS
from cupyattn.runtime.source import source_root
from mutation.bugs import draw
from mutation.coverage import Coverage, folders_of_tests, measure
from mutation.trial import (
    CAUGHT,
    NOT_COMPILED,
    SURVIVED,
    UNFINISHED,
    WITHOUT_EFFECT,
    Outcome,
    attempt,
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m mutation",
        description="Plant small bugs in a copy of the CUDA sources, one at a time, and run the "
        "tests that load the file, on a GPU if there is one, otherwise on the emulator.",
        epilog="Read the survivors: a bug may have no effect but on speed. Exit code 1 if one "
        "survived, or more than --least allows.",
    )
    made.add_argument("--count", type=int, default=60, help="bugs with an effect (default: 60)")
    made.add_argument("--seed", type=int, default=1, help="of the drawing (default: 1)")
    made.add_argument("--kernel", help="only kernels with this in their name")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    made.add_argument("--seconds", type=float, default=600, help="for each bug (default: 600)")
    made.add_argument("--within", type=float, default=float("inf"), help="seconds for all of it")
    made.add_argument(
        "--least", type=float, default=1.0, metavar="SHARE",
        help="of those that were caught or survived, how many have to be caught (default: 1)",
    )  # fmt: skip
    made.add_argument("--work", type=Path, help="a folder to keep; what is measured is reused")
    made.add_argument("--tests", nargs="+", help="default: the folders of the kernels' families")
    return made


def outcomes(arguments: argparse.Namespace, work: Path) -> list[Outcome]:
    """Draw and try until as many bugs with an effect as were asked for are tried."""
    until = time.time() + arguments.within
    entries = [entry for entry in KERNELS if (arguments.kernel or "") in entry]
    if not entries:
        raise SystemExit(f"no kernel has {arguments.kernel!r} in its name; there are {[*KERNELS]}")
    measured = work / "coverage.json"
    if not measured.exists():
        folders = set().union(*(folders_of_tests(KERNELS[entry].source) for entry in entries))
        measure(arguments.tests or sorted(folders), measured, arguments.jobs)
    coverage = Coverage.read(measured, entries)
    files = coverage.all_files()
    if not files:
        raise SystemExit(f"no test in {measured} loads any of {entries}")
    texts = {file: (source_root() / file).read_text(encoding="utf-8") for file in files}
    drawn = draw(texts, random.Random(arguments.seed))
    kernels = {file: coverage.kernels_with(file) for file in files}
    tests = {file: coverage.tests_of(file) for file in files}
    found: list[Outcome] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:

        def tried(number: int) -> set[Future[Outcome]]:
            limits = (arguments.seconds, until)
            return {
                pool.submit(attempt, bug, kernels[bug.file], tests[bug.file], work, *limits)
                for bug in islice(drawn, number)
            }

        trials = tried(arguments.count)
        while trials:
            done, trials = wait(trials, return_when=FIRST_COMPLETED)
            for outcome in (future.result() for future in done):
                found.append(outcome)
                if outcome.result in (WITHOUT_EFFECT, NOT_COMPILED):
                    trials |= tried(1)
                    continue
                bug = outcome.bug
                print(f"{outcome.result} {bug.file}:{bug.line} {bug.kind} {outcome.by}", flush=True)
            (work / "outcomes.json").write_text(json.dumps(found, indent=1))
    return found


def report(found: list[Outcome]) -> None:
    """Say how many of each, of each kernel's files; and the survivors as differences of text."""
    counts = Counter(outcome.result for outcome in found)
    effective = sum(counts[result] for result in (CAUGHT, SURVIVED, UNFINISHED))
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    if effective:
        print(f"{counts[CAUGHT] / effective:.1%} of {effective} with an effect on the code caught")
    for outcome in found:
        if outcome.result in (SURVIVED, UNFINISHED):
            bug = outcome.bug
            print(f"{outcome.result}: {bug.file}:{bug.line} ({bug.kind})")
            print(f"  - {bug.right.strip()}\n  + {bug.wrong.strip()}")


def main() -> int:
    arguments = parser().parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        found = outcomes(arguments, work)
    report(found)
    print(f"seed {arguments.seed}, {time.monotonic() - start:.0f} s")
    return int(too_few_caught(found, arguments.least))


def too_few_caught(found: list[Outcome], least: float) -> bool:
    """Whether fewer than this share of the bugs that were caught or survived were caught."""
    counts = Counter(outcome.result for outcome in found)
    return counts[CAUGHT] < least * (counts[CAUGHT] + counts[SURVIVED])


if __name__ == "__main__":
    sys.exit(main())

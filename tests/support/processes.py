"""Processes: the command line in one of its own, and workers of pytest that share a GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import cupyattn

SHARED_GPU = Path(tempfile.gettempdir()) / f"cupyattn-tests-{getattr(os, 'getuid', int)()}"
"""The beginning of the names of the files by which workers take turns."""


def environment() -> dict[str, str]:
    """The process's, in which the same cupyattn is found from any folder."""
    return {**os.environ, "PYTHONPATH": str(Path(cupyattn.__file__).parent.parent)}


def run(*arguments: str, launcher: tuple[str, ...] = ("-m", "cupyattn"), **options):
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True,
        text=True,
        env=environment() | options.pop("env", {}),
        timeout=300,
        **options,
    )


@contextlib.contextmanager
def gpu_turn(*, alone: bool, files: Path = SHARED_GPU) -> Iterator[None]:
    """Run a test while other workers run theirs on the GPU, or alone while they wait.

    A worker that waits to be alone keeps the queue, so that no other one begins a test before it.
    The system frees the locks of a worker that has died.
    """
    import fcntl

    with _opened(files, "queue") as queue, _opened(files, "gpu") as gpu:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(gpu, fcntl.LOCK_UN)


_IN_TURN = "CUPYATTN_TESTS_IN_TURN"


@contextlib.contextmanager
def worker_turn(*, alone: bool, files: Path = SHARED_GPU) -> Iterator[None]:
    """Take `gpu_turn`, also for the processes that a test starts: they run within its turn.

    One that queued on its own would wait for a worker that waits for this one.
    """
    if _IN_TURN in os.environ:
        yield
        return
    with gpu_turn(alone=alone, files=files):
        os.environ[_IN_TURN] = "1"
        try:
            yield
        finally:
            del os.environ[_IN_TURN]


def _opened(files: Path, name: str) -> BinaryIO:
    return files.with_name(f"{files.name}-{name}.lock").open("ab")

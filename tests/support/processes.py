"""The command line in a process of its own, as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cupyattn


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

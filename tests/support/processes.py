"""The command line in a process of its own, as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cupyattn

WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = None; import runpy; sys.argv[0] = 'cupyattn'; "
    "runpy.run_module('cupyattn', run_name='__main__', alter_sys=False)"
)


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


def run_in_terminal(
    *arguments: str, launcher: tuple[str, ...] = ("-m", "cupyattn"), columns: int = 150
) -> str:
    """Run with stdout and stderr on a pseudo-terminal; returns what a person would see."""
    pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *launcher, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment() | {"TERM": "xterm-256color", "COLUMNS": str(columns), "NO_COLOR": ""},
    )
    os.close(theirs)
    shown = bytearray()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        try:
            while chunk := screen.read(4096):
                shown += chunk
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            pass
    assert process.wait() == 0
    return shown.decode()

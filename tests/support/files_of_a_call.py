"""Print the package's files and functions that one call executes, the first time and the second.

Run from the repository's root: ``PYTHONPATH=.:tests python -m support.files_of_a_call [FUNCTION]``.

A call runs on the emulator. The count ends at the device (`cupyattn.runtime.device`): compiling and
loading a kernel, and what executes it, are not a path of the function. Each function is called in a
process of its own, because a first call fills caches that others share.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np

import cupyattn

ROOT = Path(__file__).parents[2]
PACKAGE = f"{ROOT / 'cupyattn'}{os.sep}"
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "attention": ((1, 16, 1, 64),) * 3,
    "rms_norm": ((4, 64), (64,)),
    "gelu": ((4, 64),),
}
"""The public functions that are counted, with the shapes of their float16 arrays."""


class Executed(NamedTuple):
    """Qualified names of the functions that a call executed, by their files in the package."""

    functions: dict[str, list[str]]

    def __str__(self) -> str:
        lines = [f"  {file}: {', '.join(names)}" for file, names in sorted(self.functions.items())]
        count = sum(map(len, self.functions.values()))
        return "\n".join([f"{len(lines)} files, {count} functions", *lines])


def executed_by(call: Callable[[], object]) -> Executed:
    """Make a call and note the package's functions that run, down to the device."""
    functions: dict[str, dict[str, None]] = {}
    below: list[FrameType] = []  # the frame in which the device was entered

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "return" and below and below[0] is frame:
            below.clear()
        if event != "call" or below or not file.startswith(PACKAGE):
            return
        file = file[len(PACKAGE) :]
        if file.startswith(os.path.join("runtime", "device")):
            below.append(frame)
        elif frame.f_code.co_name != "<module>":
            functions.setdefault(file, {})[frame.f_code.co_qualname] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Executed({file: list(names) for file, names in functions.items()})


def first_and_second(name: str) -> list[Executed]:
    """Count a function's first and second call with equal shapes; nothing was called before."""
    function = getattr(cupyattn, name)
    arrays = [np.ones(shape, np.float16) for shape in SHAPES[name]]
    with cupyattn.backend("emulator", checks=False):
        return [executed_by(lambda: function(*arrays)) for _ in range(2)]


def in_new_process(name: str) -> list[Executed]:
    """Count a function's calls in a process that has called nothing else."""
    command = [sys.executable, "-m", "support.files_of_a_call", "--json", name]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [Executed(functions) for functions in json.loads(done.stdout)]


def main(arguments: list[str]) -> None:
    """Print the counts of the named functions, by default of all."""
    if arguments[:1] == ["--json"]:
        print(json.dumps([executed.functions for executed in first_and_second(arguments[1])]))
        return
    for name in arguments or SHAPES:
        for which, executed in zip(("first", "second"), in_new_process(name), strict=True):
            print(f"{name}, {which} call: {executed}")


if __name__ == "__main__":
    main(sys.argv[1:])

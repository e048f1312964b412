"""A copy of the CUDA sources with one bug in it, and whether the bug changes the code at all."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cupyattn.runtime.arch import TURING
from cupyattn.runtime.compile import CompilationError, compile_ptx
from cupyattn.runtime.source import source_root
from cupyattn.runtime.spec import KernelSpec, Specialisation
from mutation.bugs import Bug
from mutation.coverage import Kernel

MOST_COMPARED = 12


@contextmanager
def planted(bug: Bug, place: Path) -> Iterator[Path]:
    """A copy of the sources with the bug; each process has one for all its bugs."""
    folder = place / str(os.getpid())
    if not folder.exists():
        shutil.copytree(source_root(), folder)
    right = (source_root() / bug.file).read_text(encoding="utf-8")
    (folder / bug.file).write_text(bug.plant(right), encoding="utf-8")
    try:
        yield folder
    finally:
        (folder / bug.file).write_text(right, encoding="utf-8")


def makes_a_difference(folder: Path, kernels: list[Kernel]) -> bool | None:
    """Whether some kernel's code is another one in this folder; None if one does not compile."""
    for kernel in kernels[:MOST_COMPARED]:
        try:
            if instructions(folder, kernel) != instructions(source_root(), kernel):
                return True
        except CompilationError:
            return None
    return False


def instructions(folder: Path, kernel: Kernel) -> str:
    """The PTX of a kernel, but for where its lines stood, and constants that it does not read."""
    defines = dict(kernel.defines)
    spec = KernelSpec(kernel.entry, str(folder / kernel.source), (), kernel.headers)
    specialisation = Specialisation(
        spec, kernel.defines, int(defines["THREADS"]), int(defines["SHARED_BYTES"])
    )
    ptx = compile_ptx(specialisation, TURING).code.decode()
    code = re.sub(r"//.*", "", ptx.partition("\t.section")[0])
    code = re.sub(r"^\s*\.(?:loc|file)\b.*$", "", code, flags=re.MULTILINE)
    names = Counter(re.findall(r"\w+", code))
    return re.sub(
        r"^\.global .*?(\w+)(?:\[\d+\])?(?: = .*)?;$",
        lambda constant: constant[0] if names[constant[1]] > 1 else "",
        code,
        flags=re.MULTILINE,
    )

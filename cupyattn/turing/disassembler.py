"""nvdisasm, NVIDIA's disassembler: found and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from cupyattn.runtime.errors import error, explaining

WHEEL = "nvidia-cuda-nvdisasm"
_TOOL = "nvdisasm"
_TOOLKITS = ("CUDA_PATH", "CUDA_HOME")


class DisassemblerError(RuntimeError):
    """nvdisasm is not there, or failed."""


def disassemble(cubin: bytes) -> str:
    """List the code of a cubin, with the encoding of each instruction.

    Raises
    ------
    DisassemblerError
        If there is no nvdisasm, or it cannot read the code.
    OSError
        If there is no place for a temporary file, from which nvdisasm reads.
    """
    fix = "set TMPDIR to a folder that can be written"
    told = explaining("machine code cannot be listed", "nvdisasm reads a temporary file", fix)
    with told, TemporaryDirectory(prefix="cupyattn-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return _run("--print-code", "--print-instruction-encoding", str(file))


@lru_cache(maxsize=1)
def disassembler_version() -> str:
    """Return the version of nvdisasm.

    Raises
    ------
    DisassemblerError
        If there is none.
    """
    found = re.search(r"\bV(\d+(?:\.\d+)+)", _run("--version"))
    return found[1] if found else "unknown"


def _run(*arguments: str) -> str:
    command = [str(_find()), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        message = (finished.stderr or finished.stdout).strip()
        raise DisassemblerError(f"{' '.join(command)} failed:\n{message}")
    return finished.stdout


@lru_cache(maxsize=1)
def _find() -> Path:
    """Return the tool of the wheel, otherwise of PATH, otherwise of an installed toolkit."""
    toolkits = [Path(os.environ[name]) / "bin" for name in _TOOLKITS if os.environ.get(name)]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, toolkits)])
    found = _in_wheel() or shutil.which(_TOOL, path=path)
    if found is None:
        raise error(
            DisassemblerError,
            f"there is no {_TOOL} here",
            "the model of Turing reads machine code that NVIDIA's disassembler lists",
            f"pip install {WHEEL} (the same wheel for every version of CUDA), or put the bin "
            "folder of a CUDA toolkit on PATH",
        )
    return Path(found)


def _in_wheel() -> str | None:
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    tools = (str(file.locate()) for file in files if file.stem == _TOOL and "bin" in file.parts)
    return next((tool for tool in tools if os.access(tool, os.X_OK)), None)

"""Turing machine code, listed by nvdisasm: instructions and their control words.

Each instruction is 128 bits, of which 105 to 121 control when the hardware issues it and the next
one may issue (Jia et al., arXiv:1804.06826, section 2.1, for Volta, whose encoding Turing has).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from cupyattn.runtime.errors import error, explaining

SCOREBOARDS = 6
NO_SCOREBOARD = 7

_SECTION = re.compile(r"\.text\.(\S+):")
_LABEL = re.compile(r"(\S+):")
_INSTRUCTION = re.compile(
    r"\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+"
    r"(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>\S+)\s*(?P<operands>.*?)\s*;"
    r"\s*/\* 0x[0-9a-f]{16} \*/"
)
_UPPER_HALF = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\(([^)]+)\)")


@dataclass(frozen=True)
class Control:
    """When an instruction may issue, and which ones wait for it.

    Attributes
    ----------
    stall : int
        Cycles until the warp's next instruction may issue.
    write_scoreboard, read_scoreboard : int
        The scoreboard that is free again when the result is there, and when the operands have been
        read; NO_SCOREBOARD for none.
    waits_for : tuple of int
        Scoreboards that must be free before this instruction issues.
    """

    stall: int = 0
    write_scoreboard: int = NO_SCOREBOARD
    read_scoreboard: int = NO_SCOREBOARD
    waits_for: tuple[int, ...] = ()

    @classmethod
    def decode(cls, upper_half: int) -> Control:
        """Read the fields from bits 64 to 127 of an instruction.

        Examples
        --------
        >>> Control.decode(0x002E680000000200)
        Control(stall=4, write_scoreboard=1, read_scoreboard=7, waits_for=(1,))
        """
        mask = upper_half >> 52 & 63
        return cls(
            stall=upper_half >> 41 & 15,
            write_scoreboard=upper_half >> 46 & 7,
            read_scoreboard=upper_half >> 49 & 7,
            waits_for=tuple(board for board in range(SCOREBOARDS) if mask >> board & 1),
        )


@dataclass(frozen=True)
class SassInstruction:
    """One instruction of a kernel.

    Attributes
    ----------
    address : int
        Of its first byte, from the beginning of the kernel.
    opcode : str
        With its modifiers: "HMMA.1688.F32".
    operands : str
        As they are listed.
    predicate : str or None
        "P0" or "!P0" where it executes only then.
    target : int or None
        Address that a branch jumps to; None for anything but a BRA.
    control : Control
    """

    address: int
    opcode: str
    operands: str = ""
    predicate: str | None = None
    target: int | None = None
    control: Control = Control()

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """The parts of the opcode after its name."""
        return tuple(self.opcode.split(".")[1:])

    @property
    def is_unconditional(self) -> bool:
        """Whether a branch is always taken: no predicate before it, none among its operands."""
        return self.predicate is None and self.operands.startswith("`")


def parse_listing(listing: str) -> dict[str, list[SassInstruction]]:
    """Read the output of ``nvdisasm --print-code --print-instruction-encoding``.

    Returns
    -------
    dict
        The instructions of each kernel, by its name.
    """
    kernels: dict[str, list[SassInstruction]] = {}
    for name, lines in _sections(listing).items():
        labels, found = _read_lines(lines)
        kernels[name] = [
            SassInstruction(
                address=int(match["address"], 16),
                opcode=match["opcode"],
                operands=match["operands"],
                predicate=match["predicate"],
                target=_target(match, labels),
                control=Control.decode(upper_half),
            )
            for match, upper_half in found
        ]
    return kernels


def _sections(listing: str) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listing.splitlines():
        if section := _SECTION.fullmatch(line.strip()):
            lines = sections.setdefault(section[1], [])
        lines.append(line)
    return sections


def _read_lines(lines: list[str]) -> tuple[dict[str, int], list[tuple[re.Match[str], int]]]:
    """Return the address of each label, and the instructions with their upper halves."""
    labels: dict[str, int] = {}
    found: list[tuple[re.Match[str], int]] = []
    waiting: list[str] = []  # labels of the instruction that comes next
    for number, line in enumerate(lines):
        if label := _LABEL.fullmatch(line.strip()):
            waiting.append(label[1])
        elif match := _INSTRUCTION.match(line):
            upper_half = _UPPER_HALF.match(lines[number + 1])
            if upper_half is None:
                raise ValueError(f"no second half of the encoding follows {line.strip()!r}")
            labels.update(dict.fromkeys(waiting, int(match["address"], 16)))
            waiting.clear()
            found.append((match, int(upper_half[1], 16)))
    return labels, found


def _target(match: re.Match[str], labels: dict[str, int]) -> int | None:
    if match["opcode"].partition(".")[0] != "BRA":
        return None
    label = _TARGET.search(match["operands"])
    return labels.get(label[1]) if label else None


WHEEL = "nvidia-cuda-nvdisasm"
_TOOL = "nvdisasm"
_TOOLKITS = ("CUDA_PATH", "CUDA_HOME")


class DisassemblerError(RuntimeError):
    """nvdisasm is not there, or failed."""


def disassemble(cubin: bytes) -> str:
    """List the code of a cubin, with the encoding of each instruction.

    Raises DisassemblerError if there is no nvdisasm, or it cannot read the code; OSError if there
    is no place for a temporary file, from which nvdisasm reads.
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

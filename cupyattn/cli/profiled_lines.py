"""Profile of a kernel by source line, and the lines that cost the most."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from cupyattn.emulator import Report
from cupyattn.emulator.report import Access, LineReport
from cupyattn.runtime.source import source_root

# Cycles for which one warp instruction keeps a pipe of a Turing SM busy: 32 lanes over the results
# per cycle and SM of the CUDA C++ Programming Guide, "Throughput of Native Arithmetic
# Instructions", column 7.5 (half: two results a lane). tensor: m16n8k8 has 1,024 multiply-adds, an
# SM's tensor cores do 512 a cycle (Turing whitepaper). xu: conversions are counted as if all took
# this pipe, but for those of float16 into float32, which an HADD2 does. control: a slot of one of
# the four schedulers. Shared and global memory are counted in passes and sectors; most moves vanish
# in the assembler.
_CYCLES = {
    "fma": 0.5,
    "alu": 0.5,
    "half": 0.5,
    "xu": 2.0,
    "double": 16.0,
    "shuffle": 1.0,
    "tensor": 2.0,
    "control": 0.25,
    "local": 1.0,
    "atomic": 1.0,
}
_CYCLES_PER_SECTOR = 0.5  # L1 to registers: 64 bytes a cycle (Jia et al., arXiv:1903.07486)

_ASM = re.compile(r'\basm\b[^"]*"\s*([a-z][\w.:]*)')


def figures(report: Report) -> dict[str, Any]:
    """Return the totals of a report, and its lines."""
    lines = [_line(line) for line in report.lines]
    return {
        "busy_cycles": sum(line["busy_cycles"] for line in lines),
        "instructions": report.instruction_mix,
        "bytes": report.bytes_moved,
        "bank_conflict_ways": report.bank_conflict_ways,
        "sector_efficiency": report.sector_efficiency,
        "diverged_steps": report.diverged_steps,
        "atomic_updates": report.atomic_updates,
        "lines": lines,
    }


def busy_cycles(line: LineReport) -> float:
    """Return for how many cycles a line keeps the pipes of one Turing SM busy.

    Each pipe at its full throughput, all of them added up, shared memory by its passes (bank
    conflicts included) and global memory by its sectors: a ranking, not a duration.
    """
    arithmetic = sum(_CYCLES.get(pipe, 0.0) * n for pipe, n in line.instructions.items())
    passes = sum(access.wavefronts for access in line.accesses)
    sectors = sum(access.sectors for access in line.accesses)
    return arithmetic + passes + _CYCLES_PER_SECTOR * sectors


def _line(line: LineReport) -> dict[str, Any]:
    file, source = source_of(line.file)
    return {
        "file": file,
        "line": line.line,
        "source": source[line.line - 1].strip() if 0 < line.line <= len(source) else "",
        "instruction": instruction_at(source, line.line),
        "busy_cycles": busy_cycles(line),
        "instructions": dict(line.instructions.most_common()),
        "diverged_steps": line.diverged_steps,
        "accesses": [_access(access) for access in line.access_totals()],
    }


def _access(access: Access) -> dict[str, Any]:
    described = {
        "instruction": access.instruction.opcode,
        "space": access.space,
        "write": access.write,
        "requests": access.requests,
        "bytes": access.bytes,
    }
    if access.space == "shared":
        return {**described, "ways": access.ways, "worst_ways": access.worst}
    return {
        **described,
        "sectors_per_request": access.sectors_per_request,
        "efficiency": access.efficiency,
    }


@cache
def source_of(file: str) -> tuple[str, tuple[str, ...]]:
    """Return a file's name below the CUDA sources, and its lines if it is there.

    The end of the path counts: compiled code names the files below a folder that is not there.
    """
    parts = PurePosixPath(posixpath.normpath(Path(file).as_posix())).parts
    for length in range(1, len(parts)):
        name = "/".join(parts[-length:])
        path = source_root() / name
        if path.is_file():
            return name, tuple(path.read_text(encoding="utf-8").splitlines())
    return "/".join(parts[-2:]), ()


def instruction_at(source: tuple[str, ...], line: int) -> str | None:
    """Return the PTX instruction of the asm statement that a line belongs to, if there is one.

    Compilers place inline assembly at any line of its statement, operands included.

    Examples
    --------
    >>> source = ('asm("rcp.approx.ftz.f32 %0, %1;"', '    : "=f"(y) : "f"(x));', "return y;")
    >>> instruction_at(source, 2), instruction_at(source, 3)
    ('rcp.approx.ftz.f32', None)
    """
    if not 0 < line <= len(source):
        return None
    first, last = line - 1, line - 1
    while first > 0 and not _ends(source[first - 1]):
        first -= 1
    while last < len(source) - 1 and not _ends(source[last]):
        last += 1
    found = _ASM.search("\n".join(source[first : last + 1]))
    return found[1] if found else None


def _ends(line: str) -> bool:
    return line.rstrip().endswith((";", "{", "}"))

"""Compilation of CUDA sources to machine code or PTX, with a disk cache.

CuPy's own compiler is not used: it appends an ``-arch`` after the caller's (NVRTC obeys the last),
and its cache misses changes in included files.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cupyattn.runtime import kernel_cache as cache
from cupyattn.runtime.arch import Arch
from cupyattn.runtime.fork import no_fork
from cupyattn.runtime.nvrtc import SourceRejectedError, load_nvrtc, toolkit_headers
from cupyattn.runtime.source import Unit, read_unit, source_digest, source_root
from cupyattn.runtime.spec import Specialisation

# -ftz: Turing's special-function unit flushes subnormals; doing so everywhere keeps it at one
# instruction. -lineinfo: profilers and the sanitizer name lines of the .cu file.
_OPTIONS = ("-std=c++17", "-ftz=true", "-lineinfo")

Headers = tuple[tuple[str, str], ...]

_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_locks_guard = threading.Lock()


class CompilationError(RuntimeError):
    """NVRTC rejected a kernel: an error in this library, or in an expression of the user's.

    Attributes
    ----------
    log : str
        The compiler's messages.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}:\n{log}")
        self.log = log


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel as ptxas reports them: per thread, and shared memory per CTA."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    `resources` is None for PTX, which has not been through ptxas. `path` is its file, None if it is
    only in memory.
    """

    code: bytes = field(repr=False)
    path: Path | None
    resources: Resources | None
    was_cached: bool


def compile_cubin(specialisation: Specialisation, arch: Arch) -> Artifact:
    """Return the machine code for `arch`, from the cache if it is there."""
    return _compile(specialisation, arch.real)


def compile_ptx(specialisation: Specialisation, arch: Arch) -> Artifact:
    """Return the PTX for `arch`, from the cache if it is there."""
    return _compile(specialisation, arch.virtual)


def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC, as (major, minor)."""
    return load_nvrtc().version


def _compile(specialisation: Specialisation, target: str) -> Artifact:
    source = source_root() / specialisation.spec.source
    options = (
        f"-arch={target}",
        *_OPTIONS,
        *(f"-D{name}={value}" for name, value in specialisation.defines.items()),
    )
    headers = specialisation.spec.headers
    is_ptx = target.startswith("compute_")
    ending = "ptx" if is_ptx else "cubin"
    key = _cache_key(source_digest(source), options, headers)
    with no_fork():
        with _locks_guard:
            lock = _locks[key]
        with lock:  # one compilation per key at a time; other keys compile concurrently
            found = _find(f"{specialisation.spec.entry}-{key}.{ending}")
            if found is not None:
                return found
            unit = read_unit(source)
            code, log = _run_nvrtc(unit, options, headers, is_ptx=is_ptx)
            resources = None if is_ptx else parse_ptxas_log(log)
            # A new key: a file may have changed since the lookup.
            name = f"{specialisation.spec.entry}-{_cache_key(unit.digest, options, headers)}"
            facts = None if resources is None else asdict(resources)
            path = cache.keep(f"{name}.{ending}", code, facts)
            return Artifact(code, path, resources, was_cached=False)


def _find(name: str) -> Artifact | None:
    entry = cache.find(name)
    if entry is None:
        return None
    try:
        resources = None if entry.facts is None else Resources(**entry.facts)
    except TypeError:  # written by another version of the library, with other fields
        return None
    return Artifact(entry.code, entry.path, resources, was_cached=True)


def _cache_key(digest: str, options: tuple[str, ...], headers: Headers) -> str:
    texts = (part for header in headers for part in header)
    parts = (*options, f"nvrtc {nvrtc_version()}", digest, *texts)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _run_nvrtc(
    unit: Unit, options: tuple[str, ...], headers: Headers, *, is_ptx: bool
) -> tuple[bytes, str]:
    nvrtc = load_nvrtc()
    report = [] if is_ptx else ["--ptxas-options=-v"]
    if nvrtc.version >= (12, 9):
        if report:  # with a driver NVRTC has its own cache, and a hit has no log
            report.append("--no-cache")
        # Leaves out textures and dynamic parallelism: 3 of 26 ms less before our first line.
        report.append("--minimal")
    (name, text), *included = unit.texts.items()
    given = [*included, *((header, text.encode()) for header, text in headers)]
    files = [(os.fsencode(each), contents) for each, contents in given]
    includes = f"-I{toolkit_headers()}"
    try:
        return nvrtc.compile(
            os.fsencode(name), text, files, [*options, includes, *report], ptx=is_ptx
        )
    except SourceRejectedError as rejected:
        log = unit.with_paths(str(rejected))
        raise CompilationError(f"NVRTC rejected {unit.source.name} {options}", log) from rejected


def parse_ptxas_log(log: str) -> Resources:
    """Parse the resources that ``ptxas -v`` prints for a module of one entry.

    Raises
    ------
    ValueError
        If the log has none, for example because NVRTC changed its wording.
    """
    registers = re.search(r"Used (\d+) registers", log)
    memory = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    if registers is None or memory is None:
        raise ValueError(f"no resources in the log of ptxas:\n{log}")
    shared = re.search(r"(\d+) bytes smem", log)
    stack, stores, loads = (int(number) for number in memory.groups())
    return Resources(
        registers=int(registers[1]),
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        stack_bytes=stack,
        static_shared_bytes=int(shared[1]) if shared else 0,
    )

"""Compilation of CUDA sources to machine code or PTX, with a disk cache: the only caller of NVRTC.

CuPy's own compiler is not used: it appends an ``-arch`` after the caller's (NVRTC obeys the last),
and its cache misses changes in included files.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from cupyattn.runtime import kernel_cache as cache
from cupyattn.runtime.arch import Arch
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.fork import no_fork
from cupyattn.runtime.source import Unit, read_unit, source_digest, source_root
from cupyattn.runtime.spec import Specialisation

# -ftz: Turing's special-function unit flushes subnormals; doing so everywhere keeps it at one
# instruction. -lineinfo: profilers and the sanitizer name lines of the .cu file.
_OPTIONS = ("-std=c++17", "-ftz=true", "-lineinfo")

Headers = tuple[tuple[str, str], ...]

_TOOLKITS = ("CUDA_PATH", "CUDA_HOME")

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


@lru_cache(maxsize=1)
def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC, as (major, minor)."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


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
    nvrtc = _nvrtc()
    report = [] if is_ptx else ["--ptxas-options=-v"]
    if nvrtc_version() >= (12, 9):
        if report:  # with a driver NVRTC has its own cache, and a hit has no log
            report.append("--no-cache")
        # Leaves out textures and dynamic parallelism: 3 of 26 ms less before our first line.
        report.append("--minimal")
    (name, text), *included = unit.texts.items()
    given = [*included, *((header, text.encode()) for header, text in headers)]
    names, texts = [os.fsencode(each) for each, _ in given], [each for _, each in given]
    program = nvrtc.createProgram(text.decode(), name, texts, names)
    try:
        try:
            nvrtc.compileProgram(program, [*options, f"-I{_toolkit_headers()}", *report])
        except nvrtc.NVRTCError as error:
            log = unit.with_paths(nvrtc.getProgramLog(program))
            raise CompilationError(f"NVRTC rejected {unit.source.name} {options}", log) from error
        code = nvrtc.getPTX(program) if is_ptx else nvrtc.getCUBIN(program)
        log = nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)
    if is_ptx:
        return (code.encode() if isinstance(code, str) else code).rstrip(b"\0"), log
    # CuPy drops the last byte as if it ended a C string. It is the high byte of the last program
    # header's alignment, hence 0. Drivers load the file without it, nvdisasm does not.
    return code + b"\0", log


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


@lru_cache(maxsize=1)
def _nvrtc() -> ModuleType:
    with suppress(ImportError):  # the import of NVRTC below fails too, with our error
        load_cupy()
    try:
        with no_fork():
            from cupy_backends.cuda.libs import nvrtc

            nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise RuntimeError(
            "compiling a kernel needs CuPy and NVRTC, and one of them did not load "
            f"({error}); install them with 'pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12' "
            "(or cupy-cuda13x[ctk] for CUDA 13)"
        ) from error
    return nvrtc


@lru_cache(maxsize=1)
def _toolkit_headers() -> Path:
    """Return the folder of cuda_fp16.h, from the runtime wheel or an installed toolkit."""
    try:
        with no_fork():
            from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
    except ImportError:
        found = None
    folders = [
        found,
        *(Path(os.environ[name]) / "include" for name in _TOOLKITS if os.environ.get(name)),
    ]
    for folder in folders:
        if folder and (Path(folder) / "cuda_fp16.h").is_file():
            return Path(folder)
    raise RuntimeError(
        "cuda_fp16.h was not found; install the CUDA headers with "
        "'pip install nvidia-cuda-runtime-cu12', or point CUDA_PATH at a CUDA toolkit"
    )

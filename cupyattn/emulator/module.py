"""Loaded PTX: its kernels, its global variables, and translated kernels kept as bytes.

Translating a kernel takes a tenth of a second, reading a translation a hundredth. `translation_key`
depends on the version of Python, on the emulator's sources and on the PTX. A translation has a code
object, as files in ``__pycache__`` do: read it only from a folder that others cannot write.
"""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import threading
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import numpy as np

from cupyattn.emulator.codegen.compile import compile_kernel, executable
from cupyattn.emulator.errors import LaunchError, PTXSyntaxError, UnsupportedPTXError
from cupyattn.emulator.program import MemoryLayout, Program
from cupyattn.emulator.ptx.architecture import SHARED_BYTES
from cupyattn.emulator.ptx.calls import expand_calls
from cupyattn.emulator.ptx.model import Function, Parameter, Statement, Variable
from cupyattn.emulator.ptx.parser import parse_module


class Translations(Protocol):
    """A store of translated kernels that outlives the process."""

    def find(self, key: str) -> bytes | None:
        """Return the translation of a key; None if it is missing or damaged."""

    def keep(self, key: str, translation: bytes) -> None:
        """Store a translation."""


@lru_cache(maxsize=1)
def _emulator_digest() -> bytes:
    """Hash the emulator's sources and the version of Python's code objects."""
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


def translation_key(ptx_digest: bytes, entry: str) -> str:
    """Return the file name of a kernel's translation."""
    text = b"\0".join((_emulator_digest(), ptx_digest, entry.encode()))
    return f"{entry}-{hashlib.sha256(text).hexdigest()[:32]}"


@dataclass
class Translation:
    """A kernel's program, and the variables of its module that its functions declare."""

    program: Program
    variables: list[Variable]

    def to_bytes(self) -> bytes:
        """Return everything but the entry's header, which is read from the PTX."""
        program = self.program
        locations = list(dict.fromkeys((x.location, x.callers) for x in program.instructions))
        place = {location: i for i, location in enumerate(locations)}
        parts = (
            program.code,
            [(name, x.dtype.str, x.tobytes()) for name, x in program.constants.items()],
            locations,
            [(x.opcode, str(x), place[x.location, x.callers]) for x in program.instructions],
            program.packed_source,
            [(block.start, block.stop) for block in program.blocks],
            vars(program.layout),
            program.shared_granule,
            program.partial_warp_barriers,
            [astuple(variable) for variable in self.variables],
        )
        return zlib.compress(marshal.dumps(parts), 1)

    @staticmethod
    def from_bytes(data: bytes, header: Function) -> Translation:
        """Read what `to_bytes` has written.

        Raises
        ------
        ValueError, TypeError, EOFError
            The bytes are something else.
        """
        try:
            (code, constants, locations, instructions, packed_source, blocks, layout, granule,
             partial, variables) = marshal.loads(zlib.decompress(data))  # fmt: skip
        except zlib.error as error:
            raise ValueError(f"this is no translation: {error}") from error
        values = {name: np.frombuffer(b, dtype).reshape(()) for name, dtype, b in constants}
        program = Program(
            header,
            [Statement(opcode, text, *locations[at]) for opcode, text, at in instructions],
            executable(code, values),
            code,
            values,
            packed_source,
            [range(first, last) for first, last in blocks],
            MemoryLayout.restored(layout),
            granule,
            partial,
        )
        return Translation(program, [Variable(*each) for each in variables])


@dataclass(frozen=True)
class Entry:
    """The public description of a kernel: its name, parameters and thread limits."""

    name: str
    parameters: tuple[Parameter, ...]
    max_threads: tuple[int, ...] | None
    required_threads: tuple[int, ...] | None


class Module:
    """Parsed PTX; kernels are compiled to Python when first launched. Safe to share by threads.

    Attributes
    ----------
    target : int
        Compute capability that the PTX was made for, 75 for ``sm_75``.
    entries : dict of str to Entry
        The kernels.
    sources : dict
        Source text by file name, for messages.
    """

    def __init__(
        self,
        ptx: str,
        sources: Mapping[str, str] | None = None,
        *,
        translations: Translations | None = None,
    ) -> None:
        if not isinstance(ptx, str):
            raise PTXSyntaxError(
                f"ptx has type {type(ptx).__name__}; allowed: PTX as text (str); decode bytes with "
                ".decode(), read a file with Path.read_text()"
            )
        if sources is not None and not isinstance(sources, Mapping):
            raise LaunchError(
                f"sources has type {type(sources).__name__}; allowed: a mapping of file "
                "names to their text, or None"
            )
        self.sources = dict(sources or {})
        self._digest = hashlib.sha256(ptx.encode()).digest()
        self._translations = translations
        self._module = parse_module(ptx)
        if self._module.target not in SHARED_BYTES:
            known = ", ".join(f"sm_{target}" for target in SHARED_BYTES)
            raise UnsupportedPTXError(
                f"the PTX is for sm_{self._module.target} (.target); the emulator runs that for "
                f"{known}: compile with -arch=compute_75"
            )
        self._programs: dict[str, Program] = {}
        self._variables = dict(self._module.variables)
        self._lock = threading.RLock()
        _MODULES.add(self)
        self.target = self._module.target
        self.entries = {
            f.name: Entry(f.name, tuple(f.parameters), f.max_threads, f.required_threads)
            for f in self._module.headers.values()
            if f.is_entry
        }
        self._globals: dict[str, np.ndarray] = {}

    def program(self, entry: str) -> Program:
        """Return the compiled kernel `entry`.

        Raises
        ------
        LaunchError
            The module has no such kernel.
        UnsupportedPTXError
            The kernel needs something that the emulator does not have.
        """
        if entry not in self.entries:
            raise LaunchError(
                f"no kernel {entry!r:.60} in the module; it has {sorted(self.entries)}; "
                'declare it extern "C" __global__, without which its name is mangled'
            )
        with self._lock:
            if entry not in self._programs:
                found = self._kept(entry) or self._translate(entry)
                self._variables.update({each.name: each for each in found.variables})
                self._programs[entry] = found.program
            return self._programs[entry]

    def _kept(self, entry: str) -> Translation | None:
        """Return the translation that an earlier process made, None if there is none."""
        if self._translations is None:
            return None
        kept = self._translations.find(translation_key(self._digest, entry))
        if kept is None:
            return None
        try:
            found = Translation.from_bytes(kept, self._module.headers[entry])
        except (ValueError, TypeError, EOFError):  # damaged
            return None
        self._module.forget(entry)
        return found

    def _translate(self, entry: str) -> Translation:
        function = expand_calls(self._module, self._module.function(entry))
        program = compile_kernel(function, self._module.variables, self.target)
        variables = [v for each in self._module.parsed.values() for v in each.variables.values()]
        self._module.forget(entry)  # a parse tree is ten times as large as its program
        made = Translation(program, [v for v in variables if v.space in ("global", "const")])
        if self._translations is not None:
            self._translations.keep(translation_key(self._digest, entry), made.to_bytes())
        return made

    def symbol(self, name: str) -> np.ndarray:
        """Return the memory of a ``__device__`` or ``__constant__`` variable as bytes.

        It lives as long as the module; writes to it are seen by the next launch.
        """
        with self._lock:
            if name not in self._globals:
                self._globals[name] = self._make_symbol(name)
            return self._globals[name]

    def _make_symbol(self, name: str) -> np.ndarray:
        variable = self._variables.get(name)
        if variable is None or variable.space not in ("global", "const"):
            raise LaunchError(f"the module has no __device__ or __constant__ variable {name!r:.60}")
        if variable.fault:
            raise UnsupportedPTXError(f"the initial value of {name}: {variable.fault}")
        padded = np.zeros(variable.size + 256, np.uint8)
        skip = -padded.ctypes.data % 256
        memory = padded[skip : skip + variable.size]
        if variable.initial:
            memory[:] = np.frombuffer(variable.initial[: variable.size], np.uint8)
        return memory

    def is_const(self, name: str) -> bool:
        """Tell whether a module variable is in constant memory."""
        variable = self._variables.get(name)
        return variable is not None and variable.space == "const"


_MODULES: WeakSet[Module] = WeakSet()


def _free_locks() -> None:
    """Give every module another lock: in a forked child, the thread that held it is gone."""
    for module in tuple(_MODULES):
        module._lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_free_locks)


def load(
    ptx: str,
    sources: Mapping[str, str] | None = None,
    *,
    translations: Translations | None = None,
) -> Module:
    """Parse PTX.

    Parameters
    ----------
    ptx : str
        PTX for compute capability 7.5 or another from 7.0 on. Instructions that are newer than the
        ``.target`` says are refused, as a GPU's assembler would.
    sources : mapping, optional
        Text of the source files by the name that the PTX gives them (``.file``), so that messages
        can quote the line. Files that lie on the disk under an absolute name are found without.
    translations : object with ``find(key)`` and ``keep(key, bytes)``, optional
        A store of translated kernels that outlives the process.

    Returns
    -------
    Module
        To be kept and launched many times.

    Raises
    ------
    PTXSyntaxError
        The text is no PTX, is cut short, or defines a function twice.
    UnsupportedPTXError
        The target is older than sm_70, or unknown, or addresses do not have 64 bits.
    """
    return Module(ptx, sources, translations=translations)

"""The parser's results: modules, functions, variables and instructions, their types and names.

A register is stored by width (``.s32``, ``.u32`` and ``.b32`` alike as ``u4``); only ``.f32`` and
``.f64`` registers are stored as floats. An instruction then views the operand as its own type.

Messages show the C++ names: ``_ZZ6kernelPfE4tile`` is the shared variable `tile`.
"""

import re
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache

from cupyattn.emulator.errors import PTXSyntaxError

Location = tuple[str, int]  # (file, line)

_BARRIERS = ("bar", "barrier")
_EXCHANGES = ("shfl", "vote", "match")
_WAITS = frozenset((*_BARRIERS, *_EXCHANGES))

# The instruction that `body` adds after one whose result exists only once the lanes have met.
RECEIPT = {"bar": "bar_result", "barrier": "bar_result"} | dict.fromkeys(_EXCHANGES, "sync_result")


@lru_cache(maxsize=4096)
def _parts(opcode: str) -> tuple[str, ...]:
    """Return an opcode split at its dots: one tuple for thousands of instructions."""
    return tuple(opcode.split("."))


class Statement:
    """The part of an instruction that is kept after parsing, for messages and reports.

    Attributes
    ----------
    opcode : str
        With all its modifiers, e.g. ``"ld.global.v4.u32"``.
    location : Location
        Source file and line.
    callers : tuple of Location
        Where the function with that line is inlined, and that one's caller, and so on.
    """

    __slots__ = ("_text", "callers", "location", "opcode")

    def __init__(
        self, opcode: str, text: str, location: Location, callers: tuple[Location, ...] = ()
    ) -> None:
        self.opcode = opcode
        self.location = location
        self.callers = callers
        self._text = text

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode split at the dots."""
        return _parts(self.opcode)

    @property
    def root(self) -> str:
        """The first part of the opcode: ``"ld"`` of ``"ld.global.u32"``."""
        return self.parts[0]

    def __str__(self) -> str:
        return self._text


class Instruction:
    """One PTX instruction.

    Attributes
    ----------
    opcode : str
        With all its modifiers, e.g. ``"ld.global.v4.u32"``.
    parts : tuple of str
        The opcode split at the dots.
    root : str
        The first of them: ``"ld"`` of ``"ld.global.u32"``.
    operands : list of str
        As written, destinations first; vectors and addresses keep their brackets.
    guard : (str, bool) or None
        Predicate register, and whether it is negated (``@!%p1``).
    location : Location
        Source file and line.
    callers : tuple of Location
        See `Statement`.
    site : int
        Index in the function's instruction list, -1 before it is placed.
    """

    __slots__ = ("callers", "guard", "location", "opcode", "operands", "parts", "root", "site")

    def __init__(
        self,
        opcode: str,
        operands: list[str],
        guard: tuple[str, bool] | None = None,
        location: Location = ("", 0),
        callers: tuple[Location, ...] = (),
    ) -> None:
        self.become(opcode)
        self.operands = operands
        self.guard = guard
        self.location = location
        self.callers = callers
        self.site = -1

    def become(self, opcode: str) -> None:
        """Take another opcode."""
        self.opcode = opcode
        self.parts = _parts(opcode)
        self.root = self.parts[0]

    @property
    def waits(self) -> bool:
        """Whether lanes may have to wait here for others: barriers, and warp exchanges."""
        return self.root in _WAITS

    @property
    def result_comes_after(self) -> bool:
        """Whether the next instruction writes the first operand, once the lanes have met."""
        return self.root in _EXCHANGES or (self.root in _BARRIERS and "red" in self.parts)

    def __str__(self) -> str:
        guard = f"@{'!' if self.guard[1] else ''}{self.guard[0]} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)};"

    @property
    def statement(self) -> Statement:
        """The part of the instruction that messages and reports need."""
        return Statement(sys.intern(self.opcode), str(self), self.location, self.callers)


@dataclass
class Variable:
    """A named piece of memory in the shared, local, global or const state space.

    `initial` holds the initial bytes, `size` is 0 for ``extern .shared x[]``, and `fault` says why
    an initialiser could not be read (raised only if a kernel uses the variable).
    """

    name: str
    space: str
    alignment: int
    size: int
    initial: bytes | None = None
    fault: str = ""


@dataclass(frozen=True)
class Parameter:
    """A parameter; `offset` is its place in the parameter buffer of an entry, all in bytes.

    `in_register`: declared ``.reg``, as device functions may, instead of ``.param``.
    """

    name: str
    type: str
    offset: int
    size: int
    alignment: int
    is_array: bool
    in_register: bool = False


@dataclass
class Function:
    """A ``.entry`` or ``.func``: declarations and the list of instructions.

    `labels` maps a label to the index of the instruction it precedes.
    """

    name: str
    is_entry: bool
    parameters: list[Parameter]
    results: list[Parameter] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_tables: dict[str, list[str]] = field(default_factory=dict)
    max_threads: tuple[int, ...] | None = None
    required_threads: tuple[int, ...] | None = None

    @property
    def header(self) -> "Function":
        """The function without its body."""
        return replace(
            self, registers={}, variables={}, instructions=[], labels={}, branch_tables={}
        )

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameter buffer."""
        return max((p.offset + p.size for p in self.parameters), default=0)


SIZE = {
    "pred": 1,
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
}


def unsigned(size: int) -> str:
    """Return the unsigned dtype of `size` bytes."""
    return f"u{size}"


_REGISTER_DTYPES = {ptx_type: unsigned(size) for ptx_type, size in SIZE.items()}
_REGISTER_DTYPES |= {"pred": "b1", "f32": "f4", "f64": "f8"}


def size_of(ptx_type: str) -> int:
    """Return the bytes of a type; `PTXSyntaxError` if there is no such type."""
    if ptx_type not in SIZE:
        raise PTXSyntaxError(f"unknown PTX type .{ptx_type}; known: {', '.join(sorted(SIZE))}")
    return SIZE[ptx_type]


def register_dtype(ptx_type: str) -> str:
    """Return the dtype in which a register of `ptx_type` is stored."""
    return _REGISTER_DTYPES.get(ptx_type) or unsigned(size_of(ptx_type))


def operand_dtype(ptx_type: str) -> str:
    """Return the dtype that an instruction of `ptx_type` computes in.

    16-bit floats and packed pairs are returned as raw bits; the float operations on them convert.
    """
    if ptx_type[0] == "s":
        return f"i{size_of(ptx_type)}"
    return register_dtype(ptx_type)


_LOCAL = re.compile(r"E(\d+)")
_NESTED = re.compile(r"_Z(?:N|L)*(?=\d)")
_NUMBERED = re.compile(r"(?:_\d+_?)?")  # which of several variables of one name


def _source_name(text: str) -> str:
    """Return the name that `text` starts with, as ``4tile`` does, or nothing."""
    match = re.match(r"(\d+)", text)
    if not match:
        return ""
    start, length = match.end(), int(match.group())
    return text[start : start + length] if len(text) >= start + length else ""


def readable(name: str) -> str:
    """Return the C++ name of a mangled variable or function, without its types.

    A variable inside a function is named without the function. What is not mangled, or in a way
    that is not known (Itanium C++ ABI, "Mangling"), is returned as it is.

    Examples
    --------
    >>> readable("_ZZ6kernelPfE4tile"), readable("_ZN4math5tableE"), readable("_Z6kernelPf")
    ('tile', 'math::table', 'kernel')
    """
    if name.startswith("_ZZ"):
        for match in _LOCAL.finditer(name):
            found = _source_name(name[match.start() + 1 :])
            rest = name[match.end() + len(found) :]
            if found and _NUMBERED.fullmatch(rest):
                return found
        return name
    prefix = _NESTED.match(name)
    if not prefix:
        return name
    parts, rest = [], name[prefix.end() :]
    while found := _source_name(rest):
        parts.append(found)
        rest = rest[len(str(len(found))) + len(found) :]
        if "N" not in prefix.group():
            break
    return "::".join(parts) or name

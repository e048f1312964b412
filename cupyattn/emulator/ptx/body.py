"""The body of a function: variables, labels and instructions, with nested scopes resolved.

Inline assembly opens scopes with their own registers (``{.reg .f16 low, high; ...}``); such names
are made unique, so that every name means one thing in its function.
"""

import re
import struct
from collections.abc import Callable
from functools import lru_cache

from cupyattn.emulator.errors import PTXSyntaxError
from cupyattn.emulator.ptx.model import RECEIPT, Function, Instruction, Location, Variable, size_of

_VARIABLE = re.compile(
    r"\.(shared|local|global|const|param)\s+(?:\.align\s+(\d+)\s+)?(?:\.v(\d)\s+)?\.(\w+)\s+"
    r"([\w$%]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)


def parse_variable(text: str) -> Variable | None:
    """Parse a variable declaration, or return None if `text` is none."""
    match = _VARIABLE.search(text)
    if not match:
        return None
    space, alignment, vector, ptx_type, name, dimensions, initial = match.groups()
    size = size_of(ptx_type) * int(vector or 1)
    for extent in re.findall(r"\[(\d*)\]", dimensions):
        size *= int(extent or 0)
    variable = Variable(name, space, int(alignment or size_of(ptx_type)), size)
    if initial:
        try:
            data = b"".join(_initial_bytes(v, size_of(ptx_type)) for v in _initial_values(initial))
            variable.initial = data.ljust(size, b"\0")
        except PTXSyntaxError as error:
            variable.fault = str(error)
    return variable


def _initial_values(text: str) -> list[str]:
    values = [v.strip() for v in text.replace("{", " ").replace("}", " ").split(",")]
    return [v for v in values if v]


def _initial_bytes(value: str, size: int) -> bytes:
    try:
        if value[:2] in ("0f", "0F", "0d", "0D"):
            return int(value[2:], 16).to_bytes(size, "little")
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][+-]?\d+)?", value):
            return struct.pack("<f" if size == 4 else "<d", float(value))
        number = int(value.rstrip("U"), 0)
    except (ValueError, OverflowError):
        raise PTXSyntaxError(f"initial value {value!r}: only numbers are understood") from None
    return (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")


_TOKEN = re.compile(
    r"\s*(?:(?P<loc>\.loc\b[^\n]*)|(?P<label>[\w$]+)\s*:(?!:)|(?P<open>\{)|(?P<close>\})"
    r"|(?P<statement>[^;]*);|(?P<end>\Z))"
)
_LOC = re.compile(r"\.loc\s+(\d+\s+(\d+)\s+\d+)(?:.*inlined_at\s+(\d+\s+\d+\s+\d+))?")
_REGISTER = re.compile(r"(%?[\w$]+)(?:<(\d+)>)?$")
_INSTRUCTION = re.compile(r"(?:@(!?)\s*(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_NAME = re.compile(r"[%\w$]+")
_LEAVES = ("ret", "exit", "bra", "brx")  # nothing runs on after these
_MOST_REGISTERS = 1 << 20  # compilers number thousands; a damaged number must not fill the memory
_TOOLKIT_HEADER = re.compile(
    r"(?:^|/)(?:cuda_|sm_|device_|vector_|math_)\w+\.(?:h|hpp)$|/crt/|/nv/"
)


def split_operands(text: str) -> list[str]:
    """Split at the commas that are outside of brackets."""
    if "{" not in text and "(" not in text:  # alone, an address has none inside
        return [part.strip() for part in text.split(",")] if text else []
    operands: list[str] = []
    depth = start = 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            operands.append(text[start:i].strip())
            start = i + 1
    operands.append(text[start:].strip())
    return operands


def rename(text: str, mapping: Callable[[str], str]) -> str:
    """Apply `mapping` to every name in an operand."""
    return _NAME.sub(lambda m: mapping(m.group()), text)


class _Scopes:
    """Names declared in nested braces, each mapped to a name that is unique in the function.

    Labels are renamed when their scope closes: a branch may come before its label.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.stack: list[dict[str, str]] = []
        self.labels: list[tuple[dict[str, str], int, int]] = []  # names, where the scope began
        self.count = 0
        self.numbers: list[int] = []
        self.visible: dict[str, str] = {}

    def open(self) -> None:
        self.count += 1
        self.numbers.append(self.count)
        self.stack.append({})
        function = self.function
        self.labels.append(({}, len(function.instructions), len(function.branch_tables)))

    def close(self) -> None:
        if not self.stack:
            raise PTXSyntaxError("a '}' that closes nothing")
        self.stack.pop()
        self.numbers.pop()
        self.visible = {k: v for scope in self.stack for k, v in scope.items()}
        names, instructions, tables = self.labels.pop()
        if not names:
            return
        for instruction in self.function.instructions[instructions:]:
            if instruction.root in ("bra", "brx"):
                instruction.operands = [names.get(o, o) for o in instruction.operands]
        for targets in list(self.function.branch_tables.values())[tables:]:
            targets[:] = [names.get(target, target) for target in targets]

    def declare(self, name: str) -> str:
        if not self.stack:
            return name
        unique = f"{name}$scope{self.numbers[-1]}"
        self.stack[-1][name] = self.visible[name] = unique
        return unique

    def declare_label(self, name: str) -> str:
        if not self.stack:
            return name
        return self.labels[-1][0].setdefault(name, f"{name}$scope{self.numbers[-1]}")

    def resolve(self, text: str) -> str:
        if not self.visible:
            return text
        return rename(text, lambda name: self.visible.get(name, name))


@lru_cache(maxsize=1024)
def _is_of_the_toolkit(path: str) -> bool:
    return _TOOLKIT_HEADER.search(path) is not None


class _Lines:
    """Source lines from ``.loc``; a line of an inlined function says where that is called.

    The caller's own line has come before, with the caller of its function.

    Attributes
    ----------
    here : Location
        The innermost line that is not in a header of the CUDA toolkit.
    callers : tuple of Location
        Where it is inlined, innermost first.
    """

    def __init__(self, files: dict[int, str]) -> None:
        self.files = files
        self.here: Location = (files.get(1, ""), 0)
        self.callers: tuple[Location, ...] = ()
        self._chains: dict[str, tuple[Location, ...]] = {}  # by file, line and column

    def read(self, text: str) -> None:
        """Go on to the line of a ``.loc``; line 0 is none."""
        match = _LOC.match(text)
        if not match or match[2] == "0":
            return
        place, _, caller = match.groups()
        outer = self._chain(caller) if caller else ()
        self._chains[place] = chain = (self._located(place), *outer)
        own = [line for line in chain if not _is_of_the_toolkit(line[0])]
        self.here, *callers = own or chain
        self.callers = tuple(callers)

    def _chain(self, place: str) -> tuple[Location, ...]:
        return self._chains.get(place) or (self._located(place),)

    def _located(self, place: str) -> Location:
        file, line, _ = place.split()
        return self.files.get(int(file), ""), int(line)


def _declare_registers(text: str, function: Function, scopes: _Scopes) -> None:
    match = re.match(r"\.reg\s*(?:\.v\d\s*)?\.(\w+)\s+(.*)$", text, re.S)
    if not match:
        raise PTXSyntaxError(f"cannot read the declaration {text!r}")
    for item in match.group(2).split(","):
        found = _REGISTER.match(item.strip())
        if not found:
            raise PTXSyntaxError(f"cannot read the register {item!r} in {text!r}")
        name, count = found.groups()
        if count and int(count) > _MOST_REGISTERS:
            raise PTXSyntaxError(
                f"{text!r} declares {count} registers; at most {_MOST_REGISTERS} are read"
            )
        names = [name] if count is None else [f"{name}{i}" for i in range(int(count))]
        for register in names:
            function.registers[scopes.declare(register)] = match.group(1)


def _parse_instruction(text: str, scopes: _Scopes, lines: _Lines) -> Instruction:
    match = _INSTRUCTION.match(text)
    if not match:
        raise PTXSyntaxError("{}:{}: cannot read {!r}".format(*lines.here, text))
    negated, predicate, opcode, rest = match.groups()
    operands = split_operands(scopes.resolve(" ".join(rest.split())))
    guard = (scopes.resolve(predicate), negated == "!") if predicate else None
    return Instruction(opcode, operands, guard, lines.here, lines.callers)


def _place(instruction: Instruction, function: Function) -> None:
    """Append an instruction; one at which lanes wait gets its guard as a branch around it."""
    place = function.instructions
    if not instruction.waits:
        place.append(instruction)
        return
    after, guard = f"$after{len(place)}", instruction.guard
    lines = instruction.location, instruction.callers
    if guard:
        place.append(Instruction("bra", [after], (guard[0], not guard[1]), *lines))
        instruction.guard = None
    place.append(instruction)
    if instruction.result_comes_after:
        opcode = f"{RECEIPT[instruction.root]}.{instruction.opcode}"
        place.append(Instruction(opcode, instruction.operands[:1], None, *lines))
    if guard:
        function.labels[after] = len(place)


def parse_body(header: Function, text: str, files: dict[int, str]) -> Function:
    """Fill in the declarations and instructions of `header` from the text between its braces."""
    function = header
    scopes = _Scopes(function)
    lines = _Lines(files)
    position = 0
    last_label = ""
    while match := _TOKEN.match(text, position):
        position = match.end()
        kind = match.lastgroup
        if kind == "end":
            last = function.instructions[-1:]
            if not last or last[0].guard or last[0].root not in _LEAVES:
                function.instructions.append(Instruction("ret", [], None, lines.here))
            return function
        if kind == "loc":
            lines.read(match["loc"])
        elif kind == "label":
            last_label = scopes.declare_label(match["label"])
            function.labels[last_label] = len(function.instructions)
        elif kind == "open":
            scopes.open()
        elif kind == "close":
            scopes.close()
        else:
            statement = match["statement"].strip()
            if statement.startswith(".reg"):
                _declare_registers(statement, function, scopes)
            elif statement.startswith(".branchtargets"):
                targets = split_operands(statement[len(".branchtargets") :].strip())
                function.branch_tables[last_label] = targets
            elif not statement or statement.startswith(
                (".pragma", ".callprototype", ".calltargets")
            ):
                continue
            elif statement.startswith("."):
                variable = parse_variable(statement)
                if variable is None:
                    raise PTXSyntaxError("{}:{}: cannot read {!r}".format(*lines.here, statement))
                if variable.space == "param":  # the argument area of a call
                    variable.space = "local"
                variable.name = scopes.declare(variable.name)
                function.variables[variable.name] = variable
            else:
                _place(_parse_instruction(statement, scopes, lines), function)
    raise PTXSyntaxError(f"{function.name}: cannot read {text[position : position + 80]!r}")

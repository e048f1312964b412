"""PTX text -> `PTXModule`. Covers what NVRTC and nvcc emit, inline assembly included.

Bodies are parsed when first asked for: a module may hold many entries of which one is launched.
"""

import re
from dataclasses import dataclass, field

from cupyattn.emulator.errors import PTXSyntaxError, UnsupportedPTXError
from cupyattn.emulator.ptx.body import parse_body, parse_variable
from cupyattn.emulator.ptx.model import Function, Parameter, Variable, size_of

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"[^\n]*$', re.M)
_LINE_DIRECTIVE = re.compile(r"^\s*\.(?:version|target|address_size|loc)\b[^\n]*$", re.M)
_ADDRESS_SIZE = re.compile(r"^\s*\.address_size\s+(\d+)", re.M)
_TARGET = re.compile(r"^\s*\.target\s+sm_(\d+)", re.M)
_FUNCTION = re.compile(r"\.(entry|func)\b\s*(\([^)]*\))?\s*([\w$]+)\s*(\(.*?\))?(.*)$", re.S)
_PARAMETER = re.compile(
    r"\.(param|reg)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\b(?:\s+\.(?:global|shared|local|const))?(?:\s+\.align\s+\d+)?\s+)?"
    r"([\w$%]+)(?:\[(\d*)\])?$"
)


@dataclass
class PTXModule:
    """A parsed module: what it declares, and the text of the bodies still to parse."""

    target: int
    files: dict[int, str]
    variables: dict[str, Variable]
    headers: dict[str, Function]
    bodies: dict[str, str]
    parsed: dict[str, Function] = field(default_factory=dict)

    def function(self, name: str) -> Function:
        """Return the function `name` with its body (the caller holds the module's lock)."""
        if name not in self.parsed:
            if name not in self.bodies:
                raise PTXSyntaxError(
                    f"{name} has no body in this module; link it in, or make it __device__ inline"
                )
            self.parsed[name] = parse_body(self.headers[name], self.bodies[name], self.files)
        return self.parsed[name]

    def forget(self, name: str) -> None:
        """Drop the body of the entry `name`, and all others once no entry has one."""
        self.bodies.pop(name)
        if not any(self.headers[other].is_entry for other in self.bodies):
            self.bodies.clear()
        for parsed in self.parsed.keys() - self.bodies.keys():
            self.headers[parsed] = self.parsed.pop(parsed).header


def _strip_comments(text: str) -> str:
    return _COMMENT.sub(lambda m: m.group() if m.group()[0] == '"' else " ", text)


def _parse_parameters(text: str | None) -> list[Parameter]:
    parameters = []
    offset = 0
    for item in (text or "()").strip()[1:-1].split(","):
        item = " ".join(item.split())
        if not item:
            continue
        match = _PARAMETER.match(item)
        if not match:
            raise PTXSyntaxError(f"cannot read the parameter {item!r}")
        space, alignment, ptx_type, name, count = match.groups()
        align = int(alignment or size_of(ptx_type))
        offset = -(-offset // align) * align
        size = size_of(ptx_type) * (int(count) if count else 1)
        parameters.append(
            Parameter(name, ptx_type, offset, size, align, count is not None, space == "reg")
        )
        offset += size
    return parameters


def _parse_header(text: str) -> Function:
    match = _FUNCTION.search(text)
    if not match:
        raise PTXSyntaxError(f"cannot read the function header {text.strip()[:200]!r}")
    kind, results, name, parameters, rest = match.groups()
    function = Function(
        name, kind == "entry", _parse_parameters(parameters), _parse_parameters(results)
    )
    for directive, field_name in (("maxntid", "max_threads"), ("reqntid", "required_threads")):
        found = re.search(rf"\.{directive}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", rest)
        if found:
            setattr(function, field_name, tuple(int(g or 1) for g in found.groups()))
    return function


def _matching_brace(text: str, start: int) -> int:
    """Return the index after the brace that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.end()
    raise _cut_short("a '{' is never closed")


def _cut_short(what: str) -> PTXSyntaxError:
    return PTXSyntaxError(
        f"{what}: the PTX text is cut short (pass all that nvrtcGetPTX or nvcc -ptx gave)"
    )


def parse_module(text: str) -> PTXModule:
    """Parse the declarations of a PTX module, leaving the bodies for later.

    Parameters
    ----------
    text : str
        PTX, as from ``nvrtcGetPTX`` or ``nvcc -ptx``.

    Raises
    ------
    PTXSyntaxError
        The text is no PTX, is cut short, or defines a function twice.
    UnsupportedPTXError
        The PTX is for addresses of other than 64 bits.
    """
    text = _strip_comments(text.rstrip("\0"))
    files = {int(n): path for n, path in _FILE.findall(text)}
    target = _TARGET.search(text)
    if not target:
        raise PTXSyntaxError(
            "no '.target sm_XX' line: this is not PTX (compile with -arch=compute_75, read the "
            "PTX and not the cubin)"
        )
    address_size = _ADDRESS_SIZE.search(text)
    if address_size and address_size.group(1) != "64":
        raise UnsupportedPTXError(
            f"the PTX is for addresses of {address_size.group(1)} bits (.address_size); the "
            "emulator runs that for 64: compile without -m32"
        )
    text = _FILE.sub("", text)
    module = PTXModule(int(target.group(1)), files, {}, {}, {})
    position = 0
    boundary = re.compile(r"[;{]")
    while match := boundary.search(text, position):
        head = _LINE_DIRECTIVE.sub("", text[position : match.start()])
        position = match.end()
        if match.group() == "{":
            end = _matching_brace(text, match.start())
            if ".entry" in head or ".func" in head:
                function = _parse_header(head)
                if function.name in module.bodies:
                    raise PTXSyntaxError(
                        f"{function.name} has two bodies; a module may define a name once: give "
                        "one of them another name, or load two modules"
                    )
                module.headers[function.name] = function
                module.bodies[function.name] = text[match.end() : end - 1]
                position = end
                continue
            if ".section" in head:
                position = end
                continue
            position = text.find(";", end) + 1  # a variable with a braced initialiser
            if not position:
                raise _cut_short(f"no ';' after {text[match.start() : end].strip()[-60:]!r}")
            head += text[match.start() : position - 1]
        if ".entry" in head or ".func" in head:
            function = _parse_header(head)
            module.headers.setdefault(function.name, function)
        elif variable := parse_variable(head):
            module.variables[variable.name] = variable
    if rest := _LINE_DIRECTIVE.sub("", text[position:]).strip():
        raise _cut_short(f"no ';' and no body after {rest[-60:]!r}")
    return module

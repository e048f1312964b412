"""Device function calls, expanded in place: an entry becomes one function without ``call``.

A formal parameter becomes the caller's argument variable, which lives in local memory; one that is
a register is copied, for a callee may change it and a result may be an argument too. ``ret``
becomes a branch to after the call. Names of the callee are made unique per call site.
"""

from dataclasses import replace

from cupyattn.emulator.errors import PTXSyntaxError, UnsupportedPTXError
from cupyattn.emulator.ptx.body import rename, split_operands
from cupyattn.emulator.ptx.model import Function, Instruction, Parameter, size_of
from cupyattn.emulator.ptx.parser import PTXModule

_KNOWN_EXTERNAL = {
    "vprintf": "printf: take it out of the kernel, or write to an array instead",
    "__assertfail": "a device-side assert: compile with -DNDEBUG",
    "malloc": "device-side malloc",
    "free": "device-side free",
}


def _place(instruction: Instruction) -> str:
    file, line = instruction.location
    return f"{file}:{line}"


def _unsupported(instruction: Instruction, what: str) -> UnsupportedPTXError:
    return UnsupportedPTXError(f"{_place(instruction)}: {what} is not supported [{instruction}]")


def _move(formal: Parameter, to: str, of: str, call: Instruction) -> Instruction:
    kind = formal.type
    if kind not in ("pred", "f32", "f64"):
        kind = f"b{8 * size_of(kind)}"
    return Instruction(f"mov.{kind}", [to, of], None, call.location)


def _names(operand: str) -> list[str]:
    return [name for name in split_operands(operand.strip()[1:-1].strip()) if name]


def _call_operands(call: Instruction) -> tuple[list[str], str, list[str]]:
    operands = list(call.operands)
    results = _names(operands.pop(0)) if operands and operands[0].startswith("(") else []
    if not operands:
        raise PTXSyntaxError(f"{_place(call)}: a call without a function [{call}]")
    name = operands.pop(0)
    arguments = _names(operands[0]) if operands and operands[0].startswith("(") else []
    return results, name, arguments


class _Expansion:
    def __init__(self, module: PTXModule, entry: Function) -> None:
        self.module = module
        self.result = replace(
            entry,
            registers=dict(entry.registers),
            variables=dict(entry.variables),
            instructions=[],
            labels={},
            branch_tables={},
        )
        self.calls = 0

    def place(
        self, function: Function, mapping: dict[str, str], end: str | None, stack: tuple[str, ...]
    ) -> None:
        """Append the instructions of `function`, its names translated by `mapping`."""

        def new(name: str) -> str:
            return mapping.get(name, name)

        labels: dict[int, list[str]] = {}
        for label, index in function.labels.items():
            labels.setdefault(index, []).append(new(label))
        self.result.branch_tables.update(
            {new(k): [new(t) for t in targets] for k, targets in function.branch_tables.items()}
        )
        for index, original in enumerate(function.instructions):
            for label in labels.get(index, ()):
                self.result.labels[label] = len(self.result.instructions)
            instruction = original
            if mapping:  # of a callee, which may be called again
                instruction = Instruction(
                    original.opcode,
                    [rename(o, new) for o in original.operands],
                    (new(original.guard[0]), original.guard[1]) if original.guard else None,
                    original.location,
                    original.callers,
                )
            if instruction.root == "call":
                self.call(instruction, stack)
                continue
            if instruction.root == "ret" and end is not None:
                instruction.become("bra")
                instruction.operands = [end]
            elif instruction.root in ("ld", "st") and "param" in instruction.parts:
                if len(instruction.operands) < 2:
                    raise _unsupported(instruction, "a load or store with one operand")
                address = instruction.operands[instruction.root == "ld"]
                symbol = address.strip("[] ").split("+")[0].strip()
                if end is not None or symbol in self.result.variables:
                    instruction.become(instruction.opcode.replace(".param", ".local"))
            self.result.instructions.append(instruction)
        for label in labels.get(len(function.instructions), ()):
            self.result.labels[label] = len(self.result.instructions)

    def call(self, call: Instruction, stack: tuple[str, ...]) -> None:
        results, name, arguments = _call_operands(call)
        if name in _KNOWN_EXTERNAL and name not in self.module.bodies:
            raise _unsupported(call, _KNOWN_EXTERNAL[name])
        if name not in self.module.headers:
            raise _unsupported(call, f"the indirect call through {name}")
        if name in stack:
            raise _unsupported(call, f"recursion ({name} calls itself)")
        callee = self.module.function(name)
        self.calls += 1
        suffix = f"$call{self.calls}"
        mapping = {n: n + suffix for n in (*callee.registers, *callee.labels, *callee.variables)}
        if len(arguments) != len(callee.parameters) or len(results) != len(callee.results):
            raise PTXSyntaxError(
                f"{_place(call)}: {name} takes {len(callee.parameters)} arguments and returns "
                f"{len(callee.results)} values, the call has {len(arguments)} and {len(results)} "
                f"[{call}]"
            )
        copied_in, copied_out = [], []
        passed = (*zip(callee.parameters, arguments, strict=True),)
        returned = (*zip(callee.results, results, strict=True),)
        for formal, actual in (*passed, *returned):
            mapping[formal.name] = own = formal.name + suffix if formal.in_register else actual
            if formal.in_register:
                self.result.registers[own] = formal.type
        for formal, actual in passed:
            if formal.in_register:
                copied_in.append(_move(formal, mapping[formal.name], actual, call))
        for formal, actual in returned:
            if formal.in_register:
                copied_out.append(_move(formal, actual, mapping[formal.name], call))
        self.result.registers.update({n + suffix: t for n, t in callee.registers.items()})
        for variable in callee.variables.values():
            if variable.space == "shared":  # one per block, however often the function is called
                mapping[variable.name] = variable.name
                self.result.variables[variable.name] = variable
            else:
                unique = variable.name + suffix
                self.result.variables[unique] = replace(variable, name=unique)
        end = f"$end{suffix}"
        if call.guard:
            guard = (call.guard[0], not call.guard[1])
            self.result.instructions.append(Instruction("bra", [end], guard, call.location))
        returns = f"$return{suffix}"
        self.result.instructions += copied_in
        self.place(callee, mapping, returns, (*stack, name))
        self.result.labels[returns] = len(self.result.instructions)
        self.result.instructions += copied_out
        self.result.labels[end] = len(self.result.instructions)


def expand_calls(module: PTXModule, entry: Function) -> Function:
    """Return `entry` with every call replaced by the body of its callee, and sites numbered.

    Raises
    ------
    UnsupportedPTXError
        Recursion, a call through a pointer, printf, assert, or malloc.
    """
    expansion = _Expansion(module, entry)
    expansion.place(entry, {}, None, (entry.name,))
    for site, instruction in enumerate(expansion.result.instructions):
        instruction.site = site
    return expansion.result

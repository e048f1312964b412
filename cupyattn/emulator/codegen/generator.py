"""`CodeGenerator`: what the lowerings write Python statements with, one basic block at a time.

Generated code may use the names of `RUNTIME_NAMES`.

`clean_registers` finds the float32 registers that can never hold a subnormal number. ``.ftz``
instructions treat subnormal inputs as zeros. An input that another ``.ftz`` instruction made is
known to be flushed already, which saves most of the work.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from cupyattn.emulator.codegen.control_flow import ControlFlow
from cupyattn.emulator.errors import UnsupportedPTXError
from cupyattn.emulator.machine import floating, integer, stacks
from cupyattn.emulator.machine.lanes import EXITED, Array, Mask
from cupyattn.emulator.machine.warp_sync import warp_bits
from cupyattn.emulator.program import MemoryLayout
from cupyattn.emulator.ptx.model import Function, Instruction, Variable, register_dtype

_FLOAT_LITERAL = re.compile(r"0[fF][0-9a-fA-F]{8}")
_COPIES = {"mov": (1,), "selp": (1, 2), "max": (1, 2), "min": (1, 2), "neg": (1,), "abs": (1,)}


def _is_clean_literal(operand: str) -> bool:
    if not _FLOAT_LITERAL.fullmatch(operand):
        return False
    bits = int(operand[2:], 16) & 0x7FFFFFFF
    return bits == 0 or bits >= 0x00800000


@lru_cache(maxsize=4096)
def _sources_that_matter(parts: tuple[str, ...], operands: int) -> tuple[int, ...] | None:
    """Return which operands must be clean for the result to be, () for none, None if it is not."""
    root = parts[0]
    if root == "cvt":
        from_type = parts[-1]
        if "f32" not in parts[-2:-1]:
            return None
        if from_type == "f16" or from_type[0] in "us" or "ftz" in parts:
            return ()
        return None
    if parts[-1] != "f32":
        return None
    if "ftz" in parts and root not in ("setp", "set"):
        return ()
    copied = _COPIES.get(root)
    if copied and copied[-1] >= operands:
        return None  # the lowering reports what is wrong
    return copied


def clean_registers(function: Function) -> set[str]:
    """Return the float32 registers whose every definition flushes subnormals, as a fixed point."""
    clean = {r for r, kind in function.registers.items() if kind == "f32"}
    copies = []  # registers, and what they are copied of
    for x in function.instructions:
        if not x.operands or x.root in ("st", "red"):
            continue
        matter = _sources_that_matter(x.parts, len(x.operands))
        if matter == ():
            continue
        for register in x.operands[0].strip("{}").replace("|", ",").split(","):
            register = register.strip()
            if matter is None:
                clean.discard(register)
            elif register in clean:
                sources = [x.operands[i] for i in matter if not _is_clean_literal(x.operands[i])]
                copies.append((register, sources))
    changed = True
    while changed:
        changed = False
        for register, sources in copies:
            if register in clean and not clean.issuperset(sources):
                clean.discard(register)
                changed = True
    return clean


_AXES = "xyz"

# What a register holds before it is written: a NaN as a float of any size, a large odd number as an
# integer. That spoils a result that needs it, where a zero may be right by chance. To refuse such
# reads is no way: 60 of 297 right kernels have them on some path, and nothing comes of them.
_UNWRITTEN = b"\xff\x7f" * 4


def _guarded(predicate: Array, mask: Mask, shape: tuple[int, int]) -> Array:
    """Return the mask of the lanes that run and whose predicate is true."""
    if mask is None:
        return np.broadcast_to(predicate, shape)
    return mask & predicate


def _merged(merge: Mask, value: Array, before: Array) -> Array:
    """Return a value for the lanes that run, for others what was there before.

    A function: written out in each statement, a kernel would be a fifth longer to compile.
    """
    return value if merge is None else np.where(merge, value, before)


def _pack(parts: tuple[Array, ...], dtype: np.dtype, width: int) -> Array:
    """Return the concatenation of `parts`, `width` bits each, the first one lowest."""
    result = np.asarray(parts[0]).astype(dtype)
    for i, part in enumerate(parts[1:], 1):
        result = result | (np.asarray(part).astype(dtype) << dtype.type(width * i))
    return result


def _active_mask(mask: Mask, shape: tuple[int, int]) -> Array:
    """Return the lanes that run, one uint32 per warp (``activemask``)."""
    return np.repeat(warp_bits(True if mask is None else mask, shape), 32).reshape(shape)


def _namespace() -> dict[str, object]:
    names: dict[str, object] = {"np": np, "where": np.where, "guarded": _guarded, "pack": _pack}
    names.update(active_mask=_active_mask, merged=_merged)
    for module in (floating, integer, stacks):
        functions = inspect.getmembers(module, inspect.isfunction)
        names.update((name, x) for name, x in functions if x.__module__ == module.__name__)
    for dtype in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"):
        names[dtype] = np.dtype(dtype)
        names[f"UNWRITTEN_{dtype}"] = np.frombuffer(_UNWRITTEN, dtype, 1).reshape(())
    names["EXITED"] = EXITED
    names["b1"] = np.dtype(bool)
    names["UNWRITTEN_b1"] = np.asarray(True)
    return names


@dataclass(frozen=True)
class _RuntimeNames:
    namespace: dict[str, object] = field(default_factory=_namespace)
    special_registers: frozenset[str] = frozenset(
        [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in _AXES]
        + [f"%lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")]
        + ["%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid"]
        + ["%dynamic_smem_size", "%total_smem_size"]
    )
    prologue: tuple[str, ...] = (
        "shape = batch.lanes.shape",
        "report = batch.report",
        "schedule = batch.scheduler",
        "positions = schedule.positions",
        "barriers = schedule.barriers",
        "global_memory = batch.global_",
        "shared_memory = batch.shared",
        "local_memory = batch.local",
        "parameters = batch.parameters",
        "generic_memory = batch.generic",
        "atomics = batch.atomics",
        "warp_sync = schedule.warp_sync",
        "matrix = batch.matrix",
        "copies = batch.copies",
    )


RUNTIME_NAMES = _RuntimeNames()


_NO_WORD = re.compile(r"\W")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_HEX_FLOAT = re.compile(r"0(?:[fF]([0-9a-fA-F]{8})|[dD]([0-9a-fA-F]{16}))$")
_SYMBOL = re.compile(r"([\w$%]+)\s*(?:\+\s*(-?\d+))?$")
_ADDRESS = re.compile(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?(?:0x)?[0-9a-fA-F]+))?\s*\]$")

Lowering = Callable[["CodeGenerator", Instruction], None]


class CodeGenerator:
    """Writes the Python source of one kernel.

    Attributes
    ----------
    stored : dict
        The dtype that each register is stored in.
    guard : str
        Name of the mask of a guarded instruction while it is lowered, "" without a guard.
    mask : str
        Name of the mask of the lanes that execute the current instruction.
    """

    def __init__(
        self, function: Function, module_variables: dict[str, Variable], target: int
    ) -> None:
        self.function = function
        self.flow = ControlFlow(function)
        self.layout = MemoryLayout(function, module_variables, target)
        self.constants: dict[tuple[str, str], tuple[str, np.ndarray]] = {}
        self.prologue: dict[str, str] = {}
        self.out: list[str] = []
        self.names = self._register_names()
        self.stored = {name: register_dtype(kind) for name, kind in function.registers.items()}
        self.clean = clean_registers(function)
        self.block = 0
        self.guard = ""
        self.mask = "mask"
        self._derived: dict[str, dict[str, str]] = {}
        self._held: dict[str, str] = {}  # local registers that are other expressions
        self._temporaries = 0

    def start_block(self, number: int) -> None:
        """Begin to write basic block `number`."""
        self.out = []
        self.block = number
        self.guard, self.mask = "", "mask"
        self._derived = {}
        self._held = {}
        self._temporaries = 0

    def _register_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        taken: set[str] = set()
        for register in self.function.registers:
            name = base = "v_" + _NO_WORD.sub("_", register.lstrip("%"))
            while name in taken:
                name = f"{base}_{len(taken)}"
            taken.add(name)
            names[register] = name
        return names

    # ------------------------------------------------------------------ what lowerings use
    def line(self, text: str) -> None:
        """Write one statement."""
        self.out.append(text)

    def unsupported(self, instruction: Instruction, why: str = "") -> UnsupportedPTXError:
        """Return the error for an instruction that the emulator does not run."""
        file, number = instruction.location
        return UnsupportedPTXError(
            f"{self.function.name}: PTX instruction not supported{': ' + why if why else ''} "
            f"[{instruction}]{f' at {file}:{number}' if number else ''}"
        )

    def placing(self, instruction: Instruction) -> _Placing:
        """Add the instruction's place to errors inside that do not have it."""
        return _Placing(self, instruction)

    def is_register(self, operand: str) -> bool:
        """Tell whether `operand` names a register."""
        return operand in self.function.registers

    def constant(self, value: int | float | bytes, dtype: str) -> str:
        """Return the name of a 0-d array that holds `value` (bytes: its bit pattern)."""
        key = (repr(value), dtype)
        if key not in self.constants:
            kind = np.dtype(dtype)
            if dtype == "b1":
                array = np.asarray(bool(value))
            elif isinstance(value, bytes):
                array = np.frombuffer(value, dtype)[0]
            elif kind.kind == "f":
                array = np.asarray(value, kind)
            else:
                bits = int(value) & ((1 << 8 * kind.itemsize) - 1)
                array = np.asarray(bits, f"u{kind.itemsize}").view(kind)
            self.constants[key] = (f"C{len(self.constants)}", np.asarray(array))
        return self.constants[key][0]

    def value(self, operand: str, dtype: str) -> str:
        """Return an expression for `operand`, seen as `dtype`."""
        operand = operand.strip()
        if not operand:
            raise UnsupportedPTXError("an operand is missing")
        if operand in self.function.registers:
            return self._register_value(operand, dtype)
        if operand[0] == "!":
            return f"~{self.value(operand[1:], 'b1')}"
        if match := _HEX_FLOAT.match(operand):
            bits = bytes.fromhex(match.group(1) or match.group(2))[::-1]
            size = len(bits)
            if dtype[0] == "f" and int(dtype[1]) != size:
                return self.constant(float(np.frombuffer(bits, f"f{size}")[0]), dtype)
            return self.constant(bits, dtype)
        if _INTEGER.match(operand):
            number = (
                int(operand.rstrip("U"), 0) if "x" in operand.lower() else int(operand.rstrip("U"))
            )
            if dtype[0] == "f":
                size = int(dtype[1])
                return self.constant(
                    (number & ((1 << 8 * size) - 1)).to_bytes(size, "little"), dtype
                )
            return self.constant(number, dtype)
        if re.match(r"-?\d+\.\d*(?:[eE][+-]?\d+)?$", operand) and dtype[0] == "f":
            return self.constant(float(operand), dtype)
        if operand == "WARP_SZ":
            return self.constant(32, dtype)
        if operand[0] == "%" and operand in RUNTIME_NAMES.special_registers:
            name = "s_" + operand[1:].replace(".", "_")
            self.prologue[name] = f"batch.special[{operand!r}]"
            return name if dtype == "u4" else f"{name}.astype({dtype})"
        return self._symbol(operand, dtype)

    def _register_value(self, register: str, dtype: str) -> str:
        stored = self.stored[register]
        name = self.current(register)
        self._check_predicate(register, stored, dtype)
        if stored == dtype:
            return name
        if stored[0] == "f" and stored[1] != dtype[1]:
            raise UnsupportedPTXError(
                f"{register} is a float of {8 * int(stored[1])} bits, which does not fit"
            )
        if stored[1] == dtype[1]:
            return f"{name}.view({dtype})"
        narrowed = f"{name}.astype({stored[0]}{dtype[1]})"
        return narrowed if stored[0] == dtype[0] else f"{narrowed}.view({dtype})"

    @staticmethod
    def _check_predicate(register: str, stored: str, dtype: str) -> None:
        if (stored == "b1") != (dtype == "b1"):
            raise UnsupportedPTXError(
                f"{register} is {'a' if stored == 'b1' else 'no'} predicate, which does not fit"
            )

    def temporary(self) -> str:
        """Return a name that nothing else in this block has."""
        self._temporaries += 1
        return f"_s{self._temporaries}"

    def current(self, register: str) -> str:
        """Return the expression of what a register holds."""
        return self._held.get(register) or self.names[register]

    def hold(self, register: str, expression: str) -> None:
        """Let a register hold `expression`, of the register's dtype, in the rest of this block."""
        if self.flow.is_local(register, self.block):  # nothing else looks at its variable
            self._derived.pop(register, None)
            self._held[register] = expression
        else:
            self.assign(register, expression, self.stored[register])

    def _symbol(self, operand: str, dtype: str) -> str:
        match = _SYMBOL.match(operand)
        if match:
            name, offset = match.group(1), int(match.group(2) or 0)
            if name in self.layout.offsets:
                return self.constant(self.layout.offsets[name] + offset, dtype)
            if name in self.layout.module_symbols:
                variable = "g_" + re.sub(r"\W", "_", name)
                self.layout.used_symbols.add(name)
                self.prologue[variable] = f"batch.launch.symbol_address({name!r})"
                return f"({variable}+{self.constant(offset, 'u8')})" if offset else variable
        raise UnsupportedPTXError(
            f"the operand {operand!r} is no register, number, special register or variable that "
            "the emulator knows"
        )

    def derived(self, operand: str, what: str, expression: str) -> str:
        """Return the name of a variable that holds `expression`, computed from `operand` alone.

        Within a block it is computed once (per `what`) until the register is written again.
        """
        if not self.is_register(operand):
            return expression
        known = self._derived.setdefault(operand, {})
        if what not in known:
            known[what] = f"{what}_{self.names[operand]}"
            self.line(f"{known[what]} = {expression}")
        return known[what]

    def address(self, operand: str) -> str:
        """Return an expression for the address in ``[register+offset]``."""
        match = _ADDRESS.match(operand)
        if not match:
            raise UnsupportedPTXError(f"cannot read the address {operand}")
        base, offset = match.group(1), int(match.group(2) or "0", 0)
        if self.is_register(base):
            stored = self.stored[base]
            if stored not in ("u4", "u8"):
                raise UnsupportedPTXError(f"the address {base} is no register of 32 or 64 bits")
            name = self.current(base)
            return f"({name}+{self.constant(offset, stored)})" if offset else name
        if _INTEGER.match(base):
            return self.constant(int(base, 0) + offset, "u8")
        return self._symbol(f"{base}+{offset}", "u8")

    def assign(self, register: str, expression: str, dtype: str) -> None:
        """Write `expression`, of `dtype`, to a register; lanes that do not run keep its value."""
        if register == "_":
            return
        if register not in self.function.registers:
            raise UnsupportedPTXError(f"the target {register!r} is no register")
        self._derived.pop(register, None)
        stored = self.stored[register]
        self._check_predicate(register, stored, dtype)
        name, before = self.names[register], self.current(register)
        self._held.pop(register, None)
        if stored != dtype:
            if stored[1] == dtype[1]:
                expression = f"({expression}).view({stored})"
            elif dtype[0] == "f":
                raise UnsupportedPTXError(
                    f"{register} has {8 * int(stored[1])} bits, which a float of "
                    f"{8 * int(dtype[1])} bits does not fit"
                )
            else:
                wide = f"{dtype[0]}{stored[1]}"
                expression = f"({expression}).astype({wide}).view({stored})"
        if self.guard:
            self.line(f"{name} = where({self.guard}, {expression}, {before})")
        elif self.flow.is_local(register, self.block):
            self.line(f"{name} = {expression}")
        else:
            self.line(f"{name} = merged(merge, {expression}, {name})")

    def jump(self, target: int | None) -> None:
        """Write the transition to block `target`, None for the end of the kernel."""
        if target is None:
            self.line("block, mask, merge = schedule.exit(mask, merge)")
        else:
            self.line(f"block, mask, merge = schedule.goto({target}, mask, merge)")


class _Placing:
    """See `CodeGenerator.placing`; a class, since this surrounds every instruction."""

    __slots__ = ("gen", "instruction")

    def __init__(self, gen: CodeGenerator, instruction: Instruction) -> None:
        self.gen = gen
        self.instruction = instruction

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UnsupportedPTXError):
            if str(self.instruction) not in str(error):
                raise self.gen.unsupported(self.instruction, str(error)) from None
        elif isinstance(error, IndexError | KeyError | ValueError):
            raise self.gen.unsupported(self.instruction, f"cannot read it ({error})") from error

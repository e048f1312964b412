"""Loads, stores, ``cp.async``, atomics, address conversions, ``mov`` and ``ldmatrix``."""

from __future__ import annotations

import re

from cupyattn.emulator.codegen.generator import CodeGenerator, Lowering
from cupyattn.emulator.machine.memory import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from cupyattn.emulator.ptx.model import SIZE, Instruction, operand_dtype, unsigned

_MEMORY = {
    "global": "global_memory",
    "const": "global_memory",
    "shared": "shared_memory",
    "shared::cta": "shared_memory",
    "local": "local_memory",
    "param": "parameters",
}
_ATOMIC_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def _memory(gen: CodeGenerator, x: Instruction) -> str:
    for part in x.parts:
        if part in _MEMORY:
            return _MEMORY[part]
        if part == "shared::cluster":
            raise gen.unsupported(x, "clusters")
    return "generic_memory"


def _elements(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _check_width(gen: CodeGenerator, x: Instruction, width: int) -> None:
    if width > 16 or "async" in x.parts or "bulk" in x.parts:
        raise gen.unsupported(x, "more than 16 bytes at once" if width > 16 else "")


def _load(gen: CodeGenerator, x: Instruction) -> None:
    kind = x.parts[-1]
    size, dtype = SIZE[kind], operand_dtype(kind)
    targets = _elements(x.operands[0])
    memory = _memory(gen, x)
    _check_width(gen, x, size * len(targets))
    fixed = re.match(r"\[([\w$]+)(?:\+(\d+))?\]$", x.operands[1])
    if memory == "parameters" and fixed and fixed.group(1) in gen.layout.offsets:
        first = gen.layout.offsets[fixed.group(1)] + int(fixed.group(2) or 0)
        if first + size * len(targets) <= gen.function.parameter_bytes:  # else `load` complains
            for i, target in enumerate(targets):
                name = f"p_{first + i * size}_{size}"
                gen.prologue[name] = f"parameters.constant({first + i * size}, {size})"
                gen.assign(target, name if dtype[0] == "u" else f"{name}.view({dtype})", dtype)
            return
    address = gen.address(x.operands[1])
    gen.line(f"_v = {memory}.load({address}, {size}, {len(targets)}, {gen.mask}, {x.site})")
    for i, target in enumerate(targets):
        value = "_v" if len(targets) == 1 else f"_v[{i}]"
        gen.assign(target, value if dtype[0] == "u" else f"{value}.view({dtype})", dtype)


def _store(gen: CodeGenerator, x: Instruction) -> None:
    size = SIZE[x.parts[-1]]
    elements = _elements(x.operands[1])
    _check_width(gen, x, size * len(elements))
    values = "".join(gen.value(v, unsigned(size)) + ", " for v in elements)
    address = gen.address(x.operands[0])
    gen.line(f"{_memory(gen, x)}.store({address}, {size}, ({values}), {gen.mask}, {x.site})")


_COPY = re.compile(
    r"cp\.async\.(ca|cg)\.shared(::cta)?\.global(\.L2::cache_hint)?(\.L2::(64|128|256)B)?"
)


def _async_copy(gen: CodeGenerator, x: Instruction) -> None:
    if x.opcode == "cp.async.commit_group":
        gen.line(f"copies.commit({gen.mask})")
    elif x.opcode == "cp.async.wait_all":
        gen.line(f"copies.wait(None, {gen.mask})")
    elif x.opcode == "cp.async.wait_group":
        gen.line(f"copies.wait({int(x.operands[0], 0)}, {gen.mask})")
    else:
        _start_copy(gen, x)


def _start_copy(gen: CodeGenerator, x: Instruction) -> None:
    match = _COPY.fullmatch(x.opcode)
    if not match:
        raise gen.unsupported(x)
    target, source, size, *others = x.operands
    if size not in (("16",) if match.group(1) == "cg" else ("4", "8", "16")):
        raise gen.unsupported(x, ".ca copies 4, 8 or 16 bytes, .cg 16")
    if match.group(3):
        others.pop()  # a cache policy, which has no effect
    count = "None"
    if others and gen.stored.get(others[0].lstrip("!")) == "b1":  # whether to ignore the source
        zero, whole = gen.constant(0, "u4"), gen.constant(int(size), "u4")
        count = f"where({gen.value(others[0], 'b1')}, {zero}, {whole})"
    elif others:
        count = gen.value(others[0], "u4")
    gen.line(
        f"copies.start({gen.address(target)}, {gen.address(source)}, {size}, {count}, {gen.mask}, "
        f"{x.site})"
    )


def _atomic(gen: CodeGenerator, x: Instruction) -> None:
    kind = x.parts[-1]
    operation = next((p for p in x.parts[1:] if p in _ATOMIC_OPERATIONS), "")
    if (
        not operation
        or "async" in x.parts
        or kind in ("bf16", "bf16x2")
        or any(p in ("v2", "v4") for p in x.parts)
    ):
        raise gen.unsupported(x)
    operands = list(x.operands)
    target = operands.pop(0) if x.root == "atom" else "_"
    wants_old = target != "_" and gen.flow.use_count[target] > 0
    dtype = {"f16": "f2", "f16x2": "2f2"}.get(kind, operand_dtype(kind))
    raw = unsigned(SIZE[kind])
    values = "".join(gen.value(v, raw) + ", " for v in operands[1:])
    common = (
        f"{operation!r}, {dtype!r}, {gen.address(operands[0])}, ({values}), {gen.mask}, {x.site}"
    )
    memory = _memory(gen, x)
    if memory == "generic_memory":
        gen.line(f"_v = generic_memory.atomic({common}, {wants_old})")
    else:
        gen.line(f"_v = atomics.update({memory}, {common}, {wants_old})")
    if wants_old:
        gen.assign(target, "_v", raw)


def _convert_address(gen: CodeGenerator, x: Instruction) -> None:
    dtype = unsigned(SIZE[x.parts[-1]])
    value = gen.value(x.operands[1], dtype)
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
    space = x.parts[2] if x.parts[1] == "to" else x.parts[1]
    if space in window and dtype == "u8":
        sign = "-" if x.parts[1] == "to" else "+"
        value = f"({value}{sign}{gen.constant(window[space], 'u8')})"
    elif space not in ("global", "const", "shared", "local"):
        raise gen.unsupported(x, f"addresses of .{space}")
    gen.assign(x.operands[0], value, dtype)


def _is_space(gen: CodeGenerator, x: Instruction) -> None:
    value = gen.value(x.operands[1], "u8")
    size = gen.constant(WINDOW_BYTES, "u8")
    inside = {
        name: f"(({value}-{gen.constant(start, 'u8')})<{size})"
        for name, start in (("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW))
    }
    inside["global"] = f"~({inside['shared']}|{inside['local']})"
    if x.parts[1] not in inside:
        raise gen.unsupported(x)
    gen.assign(x.operands[0], inside[x.parts[1]], "b1")


def _move(gen: CodeGenerator, x: Instruction) -> None:
    kind = x.parts[-1]
    target, source = x.operands
    if kind == "pred":
        gen.assign(target, gen.value(source, "b1"), "b1")
        return
    size = SIZE[kind]
    whole = unsigned(size)
    if target.startswith("{"):
        targets = _elements(target)
        part = unsigned(size // len(targets))
        value = gen.value(source, whole)
        for i, name in enumerate(targets):
            shifted = value if i == 0 else f"({value}>>{gen.constant(8 * int(part[1]) * i, whole)})"
            gen.assign(name, f"{shifted}.astype({part})", part)
        return
    if source.startswith("{"):
        parts = _elements(source)
        part = unsigned(size // len(parts))
        values = ", ".join(gen.value(name, part) for name in parts)
        gen.assign(target, f"pack(({values}), {whole}, {8 * int(part[1])})", whole)
        return
    dtype = {"f32": "f4", "f64": "f8"}.get(kind, whole)
    gen.assign(target, gen.value(source, dtype), dtype)


def _load_matrix(gen: CodeGenerator, x: Instruction) -> None:
    if "m8n8" not in x.parts or x.parts[-1] != "b16":
        raise gen.unsupported(x)
    targets = _elements(x.operands[0])
    gen.line(
        f"_v = matrix.load({gen.address(x.operands[1])}, {len(targets)}, {'trans' in x.parts}, "
        f"{gen.mask}, {x.site})"
    )
    for i, target in enumerate(targets):
        gen.assign(target, f"_v[{i}]", "u4")


LOWERINGS: dict[str, Lowering] = {
    "ld": _load,
    "ldu": _load,
    "st": _store,
    "cp": _async_copy,
    "atom": _atomic,
    "red": _atomic,
    "cvta": _convert_address,
    "isspacep": _is_space,
    "mov": _move,
    "ldmatrix": _load_matrix,
}

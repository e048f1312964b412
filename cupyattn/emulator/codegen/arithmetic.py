"""Integer and logic instructions, comparisons and selection."""

from __future__ import annotations

import re

from cupyattn.emulator.codegen import float_arithmetic
from cupyattn.emulator.codegen.float_arithmetic import FLOAT_TYPES, float_operand
from cupyattn.emulator.codegen.generator import CodeGenerator, Lowering
from cupyattn.emulator.ptx.model import SIZE, Instruction, operand_dtype, unsigned

_COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
_INTEGER_MODIFIERS = frozenset(["lo", "hi", "wide", "sat", "cc"])
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_PRMT_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


def _dispatch(gen: CodeGenerator, x: Instruction) -> None:
    """Send an opcode that exists for floats, predicates and integers to where it belongs."""
    kind = x.parts[-1]
    if kind in FLOAT_TYPES:
        float_arithmetic.lower(gen, x)
    elif kind == "pred":
        _predicate_logic(gen, x)
    else:
        _integer(gen, x)


def _predicate_logic(gen: CodeGenerator, x: Instruction) -> None:
    operands = [gen.value(o, "b1") for o in x.operands[1:]]
    if x.root == "not":
        gen.assign(x.operands[0], f"~({operands[0]})", "b1")
    elif x.root in _LOGIC:
        gen.assign(x.operands[0], f"({operands[0]}) {_LOGIC[x.root]} ({operands[1]})", "b1")
    else:
        raise gen.unsupported(x)


def _integer(gen: CodeGenerator, x: Instruction) -> None:
    kind = x.parts[-1]
    if kind not in SIZE or not set(x.parts[1:-1]) <= _INTEGER_MODIFIERS:
        raise gen.unsupported(x)
    raw, dtype = unsigned(SIZE[kind]), operand_dtype(kind)
    target, a = x.operands[0], x.operands[1]
    b = x.operands[2] if len(x.operands) > 2 else ""

    def v(operand: str, as_dtype: str) -> str:
        return gen.value(operand, as_dtype)

    root = x.root
    if root in ("add", "sub"):
        if "sat" in x.parts:
            name = "add_saturated" if root == "add" else "subtract_saturated"
            gen.assign(target, f"{name}({v(a, 'i4')}, {v(b, 'i4')})", "i4")
        elif "cc" in x.parts:
            raise gen.unsupported(x, "the carry flag")
        else:
            gen.assign(target, f"{v(a, raw)} {'+' if root == 'add' else '-'} {v(b, raw)}", raw)
    elif root in _LOGIC:
        gen.assign(target, f"{v(a, raw)} {_LOGIC[root]} {v(b, raw)}", raw)
    elif root == "not":
        gen.assign(target, f"~{v(a, raw)}", raw)
    elif root == "cnot":
        gen.assign(target, f"({v(a, raw)} == 0).astype({raw})", raw)
    elif root == "neg":
        gen.assign(target, f"np.negative({v(a, dtype)})", dtype)
    elif root == "abs":
        gen.assign(target, f"np.abs({v(a, dtype)})", dtype)
    elif root in ("min", "max"):
        gen.assign(target, f"np.{root}imum({v(a, dtype)}, {v(b, dtype)})", dtype)
    elif root in ("div", "rem"):
        name = "divide" if root == "div" else "remainder"
        gen.assign(target, f"{name}({v(a, dtype)}, {v(b, dtype)})", dtype)
    elif root in ("mul", "mad", "mul24", "mad24"):
        _multiply(gen, x, dtype, raw)
    else:
        raise gen.unsupported(x)


def _multiply(gen: CodeGenerator, x: Instruction, dtype: str, raw: str) -> None:
    a, b = x.operands[1:3]
    result = raw
    if "cc" in x.parts or ("sat" in x.parts):
        raise gen.unsupported(x)
    if "24" in x.root:
        value = f"multiply_24({gen.value(a, dtype)}, {gen.value(b, dtype)}, {'hi' in x.parts})"
        result = dtype
    elif "wide" in x.parts:
        if dtype[1] == "8":
            raise gen.unsupported(x, ".wide of 64 bits (16 and 32 exist)")
        result = f"{dtype[0]}{2 * int(dtype[1])}"
        value = f"np.multiply({gen.value(a, dtype)}, {gen.value(b, dtype)}, dtype={result})"
    elif "hi" in x.parts:
        value = f"multiply_high({gen.value(a, dtype)}, {gen.value(b, dtype)})"
        result = dtype
    else:
        value = f"{gen.value(a, raw)} * {gen.value(b, raw)}"
    if x.root.startswith("mad"):
        value = f"{value} + {gen.value(x.operands[3], result)}"
    gen.assign(x.operands[0], value, result)


def _shift(gen: CodeGenerator, x: Instruction) -> None:
    kind = x.parts[-1]
    raw = unsigned(SIZE[kind])
    dtype = operand_dtype(kind) if x.root == "shr" else raw
    value, amount = gen.value(x.operands[1], dtype), x.operands[2]
    if re.fullmatch(r"\d+", amount) and int(amount) < 8 * SIZE[kind]:
        sign = "<<" if x.root == "shl" else ">>"
        gen.assign(x.operands[0], f"{value} {sign} {gen.constant(int(amount), dtype)}", dtype)
        return
    name = "shift_left" if x.root == "shl" else "shift_right"
    gen.assign(x.operands[0], f"{name}({value}, {gen.value(amount, 'u4')})", dtype)


def _bits(gen: CodeGenerator, x: Instruction) -> None:
    kind = x.parts[-1]
    raw, dtype = unsigned(SIZE[kind]), operand_dtype(kind)
    o = x.operands

    def v(i: int, as_dtype: str) -> str:
        return gen.value(o[i], as_dtype)

    root = x.root
    if root == "shf":
        left, clamp = x.parts[1] == "l", x.parts[2] == "clamp"
        value = f"funnel_shift({v(1, 'u4')}, {v(2, 'u4')}, {v(3, 'u4')}, {left}, {clamp})"
    elif root == "lop3":
        value = f"logic3({v(1, 'u4')}, {v(2, 'u4')}, {v(3, 'u4')}, {int(o[4], 0)})"
    elif root == "bfe":
        value, raw = f"bit_field_extract({v(1, dtype)}, {v(2, 'u4')}, {v(3, 'u4')})", dtype
    elif root == "bfi":
        value = f"bit_field_insert({v(1, raw)}, {v(2, raw)}, {v(3, 'u4')}, {v(4, 'u4')})"
    elif root == "brev":
        value = f"reverse_bits({v(1, raw)})"
    elif root == "popc":
        value, raw = f"popcount({v(1, raw)})", "u4"
    elif root == "clz":
        value, raw = f"count_leading_zeros({v(1, raw)})", "u4"
    else:  # bfind
        value, raw = f"find_msb({v(1, dtype)}, {'shiftamt' in x.parts})", "u4"
    gen.assign(o[0], value, raw)


def fixed_permutation(gen: CodeGenerator, sources: tuple[str, str], selector: int) -> str:
    """Return shifts and masks for a ``prmt`` of two expressions, bytes moved together."""
    masks: dict[tuple[int, int], int] = {}
    for i in range(4):
        source, byte = divmod(selector >> (4 * i) & 7, 4)
        shift = 8 * (byte - i)
        masks[source, shift] = masks.get((source, shift), 0) | 0xFF << (8 * i)
    terms = []
    for (source, shift), mask in masks.items():
        value = sources[source]
        if shift:
            sign = ">>" if shift > 0 else "<<"
            value = f"({value} {sign} {gen.constant(abs(shift), 'u4')})"
        kept = 0xFFFFFFFF >> shift if shift > 0 else 0xFFFFFFFF << -shift & 0xFFFFFFFF
        if mask != kept:
            value = f"({value} & {gen.constant(mask, 'u4')})"
        terms.append(value)
    return " | ".join(terms)


def fixed_selector(x: Instruction) -> int | None:
    """Return the selector of a ``prmt`` that only moves bytes, all lanes alike; otherwise None."""
    if x.parts[-1] in _PRMT_MODES or not re.fullmatch(r"0x[0-7]{1,4}|[0-9]+", x.operands[3]):
        return None
    selector = int(x.operands[3], 0)
    return selector if selector < 0x8000 and not selector & 0x8888 else None


def _permute(gen: CodeGenerator, x: Instruction) -> None:
    a, b, c = (gen.value(o, "u4") for o in x.operands[1:4])
    selector = fixed_selector(x)
    if selector is not None:
        gen.assign(x.operands[0], fixed_permutation(gen, (a, b), selector), "u4")
        return
    mode = x.parts[-1] if x.parts[-1] in _PRMT_MODES else ""
    gen.assign(x.operands[0], f"permute_bytes({a}, {b}, {c}, {mode!r})", "u4")


def _dot(gen: CodeGenerator, x: Instruction) -> None:
    a, b, c = (gen.value(o, "u4") for o in x.operands[1:4])
    signs = f"{x.parts[-2][0] == 's'}, {x.parts[-1][0] == 's'}"
    if x.root == "dp4a":
        gen.assign(x.operands[0], f"dot_bytes({a}, {b}, {c}, {signs})", "u4")
    else:
        gen.assign(x.operands[0], f"dot_halves({a}, {b}, {c}, {signs}, {x.parts[1] == 'hi'})", "u4")


def _comparison(
    gen: CodeGenerator, x: Instruction, operator: str, kind: str, a: str, b: str
) -> str:
    """Return the expression that compares two operands of type `kind`."""
    if kind not in FLOAT_TYPES:
        dtype = operand_dtype(kind)
        return f"({gen.value(a, dtype)} {_COMPARISONS[operator]} {gen.value(b, dtype)})"
    left, right = float_operand(gen, x, a, kind), float_operand(gen, x, b, kind)
    if operator == "num":
        return f"(({left} == {left}) & ({right} == {right}))"
    if operator == "nan":
        return f"(({left} != {left}) | ({right} != {right}))"
    if operator == "ne":  # ordered: false if one is NaN, unlike NumPy's
        return f"(({left} < {right}) | ({left} > {right}))"
    if operator == "neu":
        return f"({left} != {right})"
    if operator.endswith("u"):  # unordered: true if one is NaN
        opposite = {"equ": "", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}[operator]
        if opposite:
            return f"~({left} {opposite} {right})"
        return f"~(({left} < {right}) | ({left} > {right}))"
    return f"({left} {_COMPARISONS[operator]} {right})"


def _set_predicate(gen: CodeGenerator, x: Instruction) -> None:
    kind = x.parts[-1]
    compared = _comparison(gen, x, x.parts[1], kind, x.operands[1], x.operands[2])
    targets = [name.strip() for name in x.operands[0].split("|")]
    if kind in ("f16x2", "bf16x2"):
        gen.line(f"_c = {compared}")
        values = ["_c[..., 0]", "_c[..., 1]"]
    else:
        values = [compared, f"~{compared}"]
    if x.parts[2] in _LOGIC:
        other = gen.value(x.operands[3], "b1")
        values = [f"({value}) {_LOGIC[x.parts[2]]} ({other})" for value in values]
    # the second may not see the first's target change
    for i, _ in enumerate(targets):
        gen.line(f"_p{i} = {values[i]}")
    for i, target in enumerate(targets):
        gen.assign(target, f"_p{i}", "b1")


def _set(gen: CodeGenerator, x: Instruction) -> None:
    to, of = x.parts[-2:]
    compared = _comparison(gen, x, x.parts[1], of, x.operands[1], x.operands[2])
    if x.parts[2] in _LOGIC:
        compared = f"({compared}) {_LOGIC[x.parts[2]]} ({gen.value(x.operands[3], 'b1')})"
    if of == "bf16x2":
        raise gen.unsupported(x, "set of bf16x2")
    if of == "f16x2":
        yes = "1" if to == "f16x2" else "65535"
        value = f"np.where({compared}, u2.type({yes}), u2.type(0))"
        if to == "f16x2":
            gen.assign(x.operands[0], f"pack_halves(({compared}).astype(f2))", "u4")
        else:
            gen.assign(x.operands[0], f"pack_halves({value}.view(f2))", "u4")
    elif to == "f32":
        gen.assign(x.operands[0], f"({compared}).astype(f4)", "f4")
    elif to == "f16":
        gen.assign(x.operands[0], f"({compared}).astype(f2).view(u2)", "u2")
    elif to in ("u32", "s32"):
        gen.assign(x.operands[0], f"np.negative(({compared}).astype(i4))", "i4")
    elif to in ("u16", "s16"):
        gen.assign(x.operands[0], f"np.negative(({compared}).astype(i2))", "i2")
    else:
        raise gen.unsupported(x)


def _select(gen: CodeGenerator, x: Instruction) -> None:
    kind = x.parts[-1]
    dtype = {"f32": "f4", "f64": "f8"}.get(kind, unsigned(SIZE[kind]))
    a, b = (gen.value(o, dtype) for o in x.operands[1:3])
    gen.assign(x.operands[0], f"where({gen.value(x.operands[3], 'b1')}, {a}, {b})", dtype)


def _select_by_sign(gen: CodeGenerator, x: Instruction) -> None:
    kind = x.parts[1 if "ftz" not in x.parts else 2]
    dtype = {"f32": "f4", "f64": "f8"}.get(kind, unsigned(SIZE[kind]))
    a, b = (gen.value(o, dtype) for o in x.operands[1:3])
    c = gen.value(x.operands[3], "f4" if x.parts[-1] == "f32" else "i4")
    gen.assign(x.operands[0], f"where({c} >= 0, {a}, {b})", dtype)


LOWERINGS: dict[str, Lowering] = {
    **dict.fromkeys(
        ("add", "sub", "mul", "mad", "mul24", "mad24", "div", "rem", "min", "max", "neg", "abs"),
        _dispatch,
    ),
    **dict.fromkeys(("and", "or", "xor", "not", "cnot"), _dispatch),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("shf", "lop3", "bfe", "bfi", "brev", "popc", "clz", "bfind"), _bits),
    "prmt": _permute,
    **dict.fromkeys(("dp4a", "dp2a"), _dot),
    "setp": _set_predicate,
    "set": _set,
    "selp": _select,
    "slct": _select_by_sign,
    **float_arithmetic.LOWERINGS,
}

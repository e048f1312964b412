"""Floating-point instructions of f32, f64, f16, f16x2, bf16 and bf16x2."""

from __future__ import annotations

from cupyattn.emulator.codegen.generator import CodeGenerator, Lowering
from cupyattn.emulator.ptx.model import Instruction

FLOAT_TYPES = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
_MODIFIERS = frozenset(
    ["rn", "rz", "rm", "rp", "ftz", "sat", "relu", "NaN", "approx", "full", "xorsign", "abs"]
)
_DIRECTED = ("rz", "rm", "rp")
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_OF_BFLOATS = ("add", "sub", "mul", "fma", "min", "max", "neg", "abs", "ex2", "tanh")
_FUNCTIONS = {
    "ex2": "np.exp2",
    "lg2": "np.log2",
    "rcp": "reciprocal",
    "rsqrt": "reciprocal_sqrt",
    "sqrt": "np.sqrt",
    "sin": "np.sin",
    "cos": "np.cos",
    "tanh": "np.tanh",
}


def float_operand(gen: CodeGenerator, x: Instruction, operand: str, kind: str) -> str:
    """Return an expression for an operand as NumPy floats, flushed if the instruction says so."""
    if kind == "bf16x2":
        return f"unpack_bfloats({gen.value(operand, 'u4')})"
    if kind == "bf16":
        return f"bfloat_to_float({gen.value(operand, 'u2')})"
    if kind == "f16x2":
        return f"unpack_halves({gen.value(operand, 'u4')})"
    if kind == "f16":
        return f"{gen.value(operand, 'u2')}.view(f2)"
    value = gen.value(operand, "f4" if kind == "f32" else "f8")
    if kind == "f32" and "ftz" in x.parts and may_be_subnormal(gen, operand):
        return gen.derived(operand, "flushed", f"flush({value})")
    return value


def _wide(gen: CodeGenerator, operand: str, value: str) -> str:
    """Return an expression for a float32 operand (`value`, perhaps flushed) as float64."""
    if gen.is_register(operand):
        what = "flushed_wide" if value.startswith("flushed") else "wide"
        return gen.derived(operand, what, f"{value}.astype(f8)")
    return f"{value}.astype(f8)"


def may_be_subnormal(gen: CodeGenerator, operand: str) -> bool:
    """Tell whether a float32 operand may be subnormal."""
    if operand in gen.function.registers:
        return operand not in gen.clean
    if operand[:2] in ("0f", "0F"):
        return 0 < int(operand[2:], 16) & 0x7FFFFFFF < 0x00800000
    return True


def _directed(gen: CodeGenerator, x: Instruction, mode: str, operands: list[str]) -> str:
    """Return an expression for a float32 result rounded towards zero, down or up, and flushed."""
    a, how = operands[0], f"{mode!r}, {'ftz' in x.parts}"
    if x.root == "sub":
        return f"add_directed({a}, -({operands[1]}), {how})"
    if x.root == "rcp":
        return f"divide_directed({gen.constant(1.0, 'f4')}, {a}, {how})"
    name = {
        "add": "add_directed",
        "mul": "multiply_directed",
        "div": "divide_directed",
        "sqrt": "sqrt_directed",
        "fma": "fma_directed",
        "mad": "fma_directed",
    }.get(x.root)
    if name is None:
        raise gen.unsupported(x)
    return f"{name}({', '.join(operands)}, {how})"


def _bfloat_expression(gen: CodeGenerator, root: str, operands: list[str]) -> str:
    """Return an expression for a sum or product of bfloat16: all are an ``fma``, rounded once."""
    if root == "fma":
        a, b, c = operands
    elif root == "mul":
        (a, b), c = operands, gen.constant(-0.0, "f4")
    else:
        (a, c), b = operands, gen.constant(1.0, "f4")
        c = f"np.negative({c})" if root == "sub" else c
    return f"fma_bfloat({a}, {b}, {c})"


def _float_expression(gen: CodeGenerator, x: Instruction, kind: str) -> tuple[str, bool]:
    """Return the expression of the result, and whether it is flushed already."""
    flushes = kind == "f32" and "ftz" in x.parts
    root = x.root
    operands = [float_operand(gen, x, o, kind) for o in x.operands[1:]]
    mode = next((p for p in x.parts if p in _DIRECTED), "")
    if mode and "approx" not in x.parts:
        if kind != "f32":
            raise gen.unsupported(x, f"rounding .{mode} of {kind}")
        return _directed(gen, x, mode, operands), flushes
    if root in ("fma", "mad") and kind == "f32":
        # factors as float64, in which their product is exact; often they are used again
        a, b = (_wide(gen, o, v) for o, v in zip(x.operands[1:3], operands[:2], strict=True))
        name = "fma_single_ftz" if flushes else "fma_single"
        return f"{name}({a}, {b}, {operands[2]})", flushes
    if kind.startswith("bf16") and root in ("add", "sub", "mul", "fma"):
        return _bfloat_expression(gen, root, operands), False
    if root in ("fma", "mad"):
        name = "fma_double" if kind == "f64" else "fma_half"
        return f"{name}({', '.join(operands)})", flushes
    if root == "div" and "approx" in x.parts:
        return f"divide_approximately({', '.join(operands)})", False
    if flushes and root in ("mul", "div") and "full" not in x.parts:
        name = "multiply_flushed" if root == "mul" else "divide_flushed"
        return f"{name}({', '.join(operands)})", True
    if root in _OPERATORS:
        return f"{operands[0]} {_OPERATORS[root]} {operands[1]}", False
    if root in ("min", "max"):
        if "xorsign" in x.parts or len(operands) > 2:
            raise gen.unsupported(x)
        nan = ", True" if "NaN" in x.parts else ""
        if not flushes:
            return f"{root}imum({operands[0]}, {operands[1]}{nan})", False
        # flushing is monotonic: the result instead of the operands, if at all
        a, b = (gen.value(o, "f4") for o in x.operands[1:])
        clean = not any(may_be_subnormal(gen, o) for o in x.operands[1:])
        return f"{root}imum({a}, {b}{nan})", clean
    if root == "neg":
        return f"np.negative({operands[0]})", flushes
    if root == "abs":
        return f"np.abs({operands[0]})", flushes
    if root in _FUNCTIONS:
        function = _FUNCTIONS[root]
        if kind == "f32" and "approx" in x.parts and root != "sqrt":
            return f"through_double({function}, {operands[0]})", False
        if kind.startswith("bf16"):
            return f"through_double({function}, {operands[0]})", False
        if kind in ("f16", "f16x2"):
            return f"{function}({operands[0]}.astype(f8)).astype(f2)", False
        if root == "rcp":
            return (
                f"np.divide({gen.constant(1.0, 'f4' if kind == 'f32' else 'f8')}, {operands[0]})",
                False,
            )
        return f"{function}({operands[0]})", False
    raise gen.unsupported(x)


def lower(gen: CodeGenerator, x: Instruction) -> None:
    """Write a floating-point instruction."""
    kind = x.parts[-1]
    if unknown := [part for part in x.parts[1:-1] if part not in _MODIFIERS]:
        raise gen.unsupported(x, f".{unknown[0]}")
    if kind.startswith("bf16") and (x.root not in _OF_BFLOATS or "sat" in x.parts):
        raise gen.unsupported(x, f"{x.root} of bfloat16")
    expression, flushed = _float_expression(gen, x, kind)
    if "ftz" in x.parts and kind == "f32" and not flushed:
        expression = f"flush({expression})"
    elif "ftz" in x.parts and "16" in kind and x.root not in ("ex2",):
        raise gen.unsupported(x, f".ftz of {kind}")
    if "relu" in x.parts:
        expression = f"relu({expression})"
    if "sat" in x.parts:
        expression = f"saturate({expression})"
    target = x.operands[0]
    if kind == "f16x2":
        gen.assign(target, f"pack_halves({expression})", "u4")
    elif kind == "bf16x2":
        gen.assign(target, f"pack_bfloats({expression})", "u4")
    elif kind == "bf16":
        gen.assign(target, f"float_to_bfloat({expression}, 'rn')", "u2")
    elif kind == "f16":
        gen.assign(target, f"({expression}).astype(f2, copy=False).view(u2)", "u2")
    else:
        gen.assign(target, expression, "f4" if kind == "f32" else "f8")


def _copy_sign(gen: CodeGenerator, x: Instruction) -> None:
    """``copysign d, a, b``: the sign of a on the magnitude of b."""
    dtype = "f4" if x.parts[-1] == "f32" else "f8"
    sign, magnitude = (gen.value(o, dtype) for o in x.operands[1:3])
    gen.assign(x.operands[0], f"np.copysign({magnitude}, {sign})", dtype)


def _test_property(gen: CodeGenerator, x: Instruction) -> None:
    dtype = "f4" if x.parts[-1] == "f32" else "f8"
    value = gen.value(x.operands[1], dtype)
    gen.assign(x.operands[0], f"testp({value}, {x.parts[1]!r})", "b1")


LOWERINGS: dict[str, Lowering] = {
    **dict.fromkeys(("fma", *_FUNCTIONS), lower),
    "copysign": _copy_sign,
    "testp": _test_property,
}

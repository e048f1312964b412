"""Instructions on values that all threads share: registers are then scalars instead of arrays."""

import numpy as np
import pytest
from support.ptx import apply

RNG = np.random.default_rng(6)

INTEGER = [
    "add.u32",
    "sub.s32",
    "add.sat.s32",
    "mul.lo.s32",
    "mul.hi.u32",
    "mul.hi.s32",
    "mul24.lo.s32",
    "div.s32",
    "rem.u32",
    "min.s32",
    "and.b32",
    "shl.b32",
    "shr.s32",
    "shr.u32",
]
WIDE = ["add.u64", "mul.hi.u64", "mul.hi.s64", "div.s64", "rem.u64", "max.s64", "xor.b64"]
UNARY = [
    "not.b32",
    "neg.s32",
    "abs.s32",
    "cnot.b32",
    "popc.b32",
    "clz.b32",
    "brev.b32",
    "bfind.s32",
    "bfind.shiftamt.u32",
]
TERNARY = [
    "lop3.b32",
    "prmt.b32",
    "shf.l.wrap.b32",
    "shf.r.clamp.b32",
    "bfe.s32",
    "bfe.u32",
    "dp4a.s32.u32",
    "mad.lo.s32",
]
FLOAT = [
    f"{name}{mode}{ftz}.f32" for name in ("add", "mul", "div", "fma") for mode in (".rn", ".rm")
    for ftz in ("", ".ftz")
] + ["sub.f32", "min.f32", "max.ftz.f32", "copysign.f32"]  # fmt: skip
FUNCTIONS = [
    "ex2.approx.ftz.f32", "lg2.approx.f32", "rcp.rn.f32", "rcp.approx.ftz.f32", "rsqrt.approx.f32",
    "sqrt.rz.f32", "sqrt.rn.ftz.f32", "tanh.approx.f32", "sin.approx.f32", "neg.f32", "abs.ftz.f32",
    "cvt.rni.f32.f32", "cvt.ftz.sat.f32.f32", "cvt.rp.f32.f32",
]  # fmt: skip
CONVERSIONS = [
    ("cvt.rzi.s32.f32", "b32", "f32"), ("cvt.rni.u64.f32", "b64", "f32"),
    ("cvt.rn.f32.s32", "f32", "b32"), ("cvt.rz.f32.u64", "f32", "b64"),
    ("cvt.rn.f16.f32", "b16", "f32"), ("cvt.rz.f16.f32", "b16", "f32"),
    ("cvt.f32.f16", "f32", "b16"), ("cvt.f64.f32", "f64", "f32"), ("cvt.rm.f32.f64", "f32", "f64"),
    ("cvt.s64.s32", "b64", "b32"), ("cvt.u16.u32", "b16", "b32"), ("cvt.sat.s8.s32", "b32", "b32"),
    ("cvt.rn.bf16.f32", "b16", "f32"), ("cvt.f32.bf16", "f32", "b16"), ("neg.f16", "b16", "b16"),
    ("sqrt.rn.f64", "f64", "f64"), ("neg.f16x2", "b32", "b32"), ("ex2.approx.f16x2", "b32", "b32"),
    ("testp.normal.f32", "pred", "f32"),
]  # fmt: skip
HALF = ["add.f16x2", "mul.f16", "fma.rn.f16", "fma.rn.f16x2", "max.f16", "min.f16x2"]
CASES: list[tuple[str, str, tuple[str, ...]]] = [
    *((name, "b32", ("b32", "b32")) for name in INTEGER),
    *((name, "b64", ("b64", "b64")) for name in WIDE),
    *((name, "b32", ("b32",)) for name in UNARY),
    *((f"{name} $d, $0, $1, $2, 0x96" if "lop3" in name else name, "b32", ("b32",) * 3)
      for name in TERNARY),
    ("bfi.b32", "b32", ("b32",) * 4),
    ("mad.wide.s32", "b64", ("b32", "b32", "b64")),
    *((name, "f32", ("f32",) * (3 if "fma" in name else 2)) for name in FLOAT),
    *((name, "f32", ("f32",)) for name in FUNCTIONS),
    *((name, result, (operand,)) for name, result, operand in CONVERSIONS),
    *((name, "b32" if "x2" in name else "b16",
       ("b32" if "x2" in name else "b16",) * (3 if "fma" in name else 2)) for name in HALF),
    ("fma.rn.f64", "f64", ("f64",) * 3),
    ("setp.lt.s32", "pred", ("b32", "b32")),
    ("setp.gtu.ftz.f32", "pred", ("f32", "f32")),
    ("setp.neu.f16", "pred", ("b16", "b16")),
    ("set.ge.f16x2.f16x2", "b32", ("b32", "b32")),
    ("selp.b32", "b32", ("b32", "b32", "pred")),
    ("and.pred", "pred", ("pred", "pred")),
    ("not.pred", "pred", ("pred",)),
]  # fmt: skip


def values(kind: str, count: int) -> np.ndarray:
    if kind == "pred":
        return RNG.integers(0, 2, count)
    if kind in ("f32", "f64"):
        return (RNG.standard_normal(count) * 4).astype(f"f{int(kind[1:]) // 8}")
    size = int(kind[1:]) // 8
    return np.frombuffer(RNG.bytes(size * count), f"u{size}")


@pytest.mark.parametrize(("name", "result", "kinds"), CASES)
def test_scalars_behave_as_arrays(name: str, result: str, kinds: tuple[str, ...]) -> None:
    operands = [(kind, values(kind, 3)) for kind in kinds]
    operation = name
    if "$" not in name:
        operation = f"{name} $d, " + ", ".join(f"${i}" for i in range(len(kinds)))
    dtype = "u4" if result == "pred" else f"u{int(result[1:]) // 8}"
    arrays = apply(operation, result, dtype, *operands, target=80)
    for i in range(3):
        one = [(kind, v[i : i + 1]) for kind, v in operands]
        scalar = apply(operation, result, dtype, *one, uniform=True, target=80)
        assert scalar[0] == arrays[i], (name, [v for _, v in one])

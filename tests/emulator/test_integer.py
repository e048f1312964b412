"""Integer and bit instructions against Python's integers; operands that all threads share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.ptx import apply

RNG = np.random.default_rng(1)
EDGES = [0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def numbers(bits: int, count: int = 200) -> np.ndarray:
    edges = [*EDGES, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << bits) - 1, (1 << bits) - 2]
    edges = [e & ((1 << bits) - 1) for e in edges]
    random = [int(x) >> int(RNG.integers(bits)) for x in RNG.integers(0, 2**63, count)]
    random += [int.from_bytes(RNG.bytes(bits // 8), "little") for _ in range(count)]
    values = edges + [r & ((1 << bits) - 1) for r in random]
    return np.array(values, f"u{bits // 8}")


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def clamp(value: int, bits: int) -> int:
    return max(-(1 << (bits - 1)), min((1 << (bits - 1)) - 1, value))


def popcount(a: int) -> int:
    return bin(a).count("1")


BINARY: list[tuple[str, int, bool, int, Callable[[int, int], int]]] = [
    # instruction, operand bits, signed, result bits, what it means
    ("add.s32", 32, False, 32, lambda a, b: a + b),
    ("add.u64", 64, False, 64, lambda a, b: a + b),
    ("add.s16", 16, False, 16, lambda a, b: a + b),
    ("sub.s32", 32, False, 32, lambda a, b: a - b),
    ("sub.s64", 64, False, 64, lambda a, b: a - b),
    ("add.sat.s32", 32, True, 32, lambda a, b: clamp(a + b, 32)),
    ("sub.sat.s32", 32, True, 32, lambda a, b: clamp(a - b, 32)),
    ("mul.lo.s32", 32, True, 32, lambda a, b: a * b),
    ("mul.lo.u64", 64, False, 64, lambda a, b: a * b),
    ("mul.hi.u32", 32, False, 32, lambda a, b: a * b >> 32),
    ("mul.hi.s32", 32, True, 32, lambda a, b: a * b >> 32),
    ("mul.hi.u64", 64, False, 64, lambda a, b: a * b >> 64),
    ("mul.hi.s64", 64, True, 64, lambda a, b: a * b >> 64),
    ("mul.wide.u16", 16, False, 32, lambda a, b: a * b),
    ("mul.wide.u32", 32, False, 64, lambda a, b: a * b),
    ("mul.wide.s32", 32, True, 64, lambda a, b: a * b),
    ("mul24.lo.u32", 32, False, 32, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ("mul24.hi.s32", 32, True, 32,
     lambda a, b: signed(a & 0xFFFFFF, 24) * signed(b & 0xFFFFFF, 24) >> 16),
    ("div.u32", 32, False, 32, lambda a, b: a // b if b else -1),
    ("div.s32", 32, True, 32, lambda a, b: truncated(a, b) if b else -1),
    ("div.s64", 64, True, 64, lambda a, b: truncated(a, b) if b else -1),
    ("rem.u32", 32, False, 32, lambda a, b: a % b if b else a),
    ("rem.s32", 32, True, 32, lambda a, b: a - truncated(a, b) * b if b else a),
    ("rem.u64", 64, False, 64, lambda a, b: a % b if b else a),
    ("min.s32", 32, True, 32, min),
    ("min.u32", 32, False, 32, min),
    ("max.s64", 64, True, 64, max),
    ("max.u16", 16, False, 16, max),
    ("and.b32", 32, False, 32, lambda a, b: a & b),
    ("or.b64", 64, False, 64, lambda a, b: a | b),
    ("xor.b16", 16, False, 16, lambda a, b: a ^ b),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bits", "is_signed", "out", "meaning"), BINARY)
def test_binary(
    name: str, bits: int, is_signed: bool, out: int, meaning: Callable[..., int]
) -> None:
    a, b = numbers(bits), numbers(bits)
    RNG.shuffle(b)
    got = apply(f"{name} $d, $0, $1", f"b{out}", f"u{out // 8}", (f"b{bits}", a), (f"b{bits}", b))
    read = (lambda v: signed(int(v), bits)) if is_signed else int
    want = [meaning(read(x), read(y)) & ((1 << out) - 1) for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(got, np.array(want, got.dtype))


UNARY: list[tuple[str, int, int, Callable[[int], int]]] = [
    ("not.b32", 32, 32, lambda a: ~a),
    ("neg.s32", 32, 32, lambda a: -a),
    ("neg.s64", 64, 64, lambda a: -a),
    ("abs.s32", 32, 32, lambda a: abs(signed(a, 32))),
    ("cnot.b32", 32, 32, lambda a: int(a == 0)),
    ("popc.b32", 32, 32, popcount),
    ("popc.b64", 64, 32, popcount),
    ("clz.b32", 32, 32, lambda a: 32 - a.bit_length()),
    ("clz.b64", 64, 32, lambda a: 64 - a.bit_length()),
    ("brev.b32", 32, 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("brev.b64", 64, 64, lambda a: int(f"{a:064b}"[::-1], 2)),
    ("bfind.u32", 32, 32, lambda a: a.bit_length() - 1),
    ("bfind.u64", 64, 32, lambda a: a.bit_length() - 1),
    ("bfind.shiftamt.u32", 32, 32, lambda a: 32 - a.bit_length() if a else -1),
    ("bfind.s32", 32, 32,
     lambda a: (a if a < 1 << 31 else a ^ 0xFFFFFFFF).bit_length() - 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bits", "out", "meaning"), UNARY)
def test_unary(name: str, bits: int, out: int, meaning: Callable[[int], int]) -> None:
    a = numbers(bits)
    got = apply(f"{name} $d, $0", f"b{out}", f"u{out // 8}", (f"b{bits}", a))
    want = [meaning(int(x)) & ((1 << out) - 1) for x in a]
    np.testing.assert_array_equal(got, np.array(want, got.dtype))


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts(bits: int) -> None:
    a = numbers(bits)
    n = np.resize(np.array([0, 1, 7, bits - 1, bits, bits + 1, 200, 2**31], np.uint32), a.size)
    ones = (1 << bits) - 1
    cases: list[tuple[str, Callable[[int, int], int]]] = [
        (f"shl.b{bits}", lambda x, s: x << min(s, 64)),
        (f"shr.u{bits}", lambda x, s: x >> min(s, 64)),
        (f"shr.s{bits}", lambda x, s: signed(x, bits) >> min(s, 64)),
    ]
    for name, meaning in cases:
        got = apply(f"{name} $d, $0, $1", f"b{bits}", f"u{bits // 8}", (f"b{bits}", a), ("b32", n))
        want = [meaning(int(x), int(s)) & ones for x, s in zip(a, n, strict=True)]
        np.testing.assert_array_equal(got, np.array(want, got.dtype), err_msg=name)


@pytest.mark.parametrize("mode", ["l.wrap", "l.clamp", "r.wrap", "r.clamp"])
def test_funnel_shift(mode: str) -> None:
    low, high = numbers(32), numbers(32)[::-1]
    n = np.resize(np.array([0, 1, 5, 31, 32, 33, 63, 70], np.uint32), low.size)
    got = apply(f"shf.{mode}.b32 $d, $0, $1, $2", "b32", "u4",
                ("b32", low), ("b32", high), ("b32", n))  # fmt: skip

    def meaning(lo: int, hi: int, s: int) -> int:
        s = min(s, 32) if "clamp" in mode else s % 32
        value = hi << 32 | lo
        return (value << s) >> 32 if mode[0] == "l" else value >> s

    want = [
        meaning(int(x), int(y), int(s)) & 0xFFFFFFFF for x, y, s in zip(low, high, n, strict=True)
    ]
    np.testing.assert_array_equal(got, np.array(want, "u4"))


@pytest.mark.parametrize("table", [0x00, 0x1B, 0x80, 0x96, 0xE8, 0xFF])
def test_lop3(table: int) -> None:
    a, b, c = numbers(32), numbers(32)[::-1], numbers(32)
    got = apply(f"lop3.b32 $d, $0, $1, $2, {table:#x}", "b32", "u4",
                ("b32", a), ("b32", b), ("b32", c))  # fmt: skip
    want = np.zeros(a.size, "u4")
    for bit in range(32):
        key = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
        want |= (np.uint32(table) >> key & 1).astype("u4") << np.uint32(bit)
    np.testing.assert_array_equal(got, want)


def test_prmt_general() -> None:
    a, b, s = numbers(32), numbers(32)[::-1], numbers(32)
    got = apply("prmt.b32 $d, $0, $1, $2", "b32", "u4", ("b32", a), ("b32", b), ("b32", s))
    for x, y, select, result in zip(a, b, s, got, strict=True):
        source = int(x).to_bytes(4, "little") + int(y).to_bytes(4, "little")
        for i in range(4):
            pick = int(select) >> (4 * i) & 15
            byte = source[pick & 7]
            want = (0xFF if byte & 0x80 else 0) if pick & 8 else byte
            assert int(result) >> (8 * i) & 255 == want


@pytest.mark.parametrize(
    "selector", [0x5410, 0x7632, 0x3210, 0x0123, 0x7777, 0x3175, 0x0040, 0xBA98]
)
def test_prmt_fixed(selector: int) -> None:
    a, b = numbers(32), numbers(32)[::-1]
    selectors = np.full(a.size, selector, "u4")
    want = apply("prmt.b32 $d, $0, $1, $2", "b32", "u4", ("b32", a), ("b32", b), ("b32", selectors))
    got = apply(f"prmt.b32 $d, $0, $1, {selector:#x}", "b32", "u4", ("b32", a), ("b32", b))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("mode", "picks"),
    [  # PTX ISA, table "prmt modes": bytes of d from most to least significant, selector 0..3
        ("f4e", ["3210", "4321", "5432", "6543"]),
        ("b4e", ["5670", "6701", "7012", "0123"]),
        ("rc8", ["0000", "1111", "2222", "3333"]),
        ("ecl", ["3210", "3211", "3222", "3333"]),
        ("ecr", ["0000", "1110", "2210", "3210"]),
        ("rc16", ["1010", "3232", "1010", "3232"]),
    ],
)
def test_prmt_modes(mode: str, picks: list[str]) -> None:
    a, b = np.uint32(0x33221100), np.uint32(0x77665544)
    got = apply(f"prmt.b32.{mode} $d, $0, $1, $2", "b32", "u4",
                ("b32", np.full(4, a)), ("b32", np.full(4, b)),
                ("b32", np.arange(4, dtype="u4")))  # fmt: skip
    want = [int("".join(digit * 2 for digit in pick), 16) for pick in picks]
    np.testing.assert_array_equal(got, np.array(want, "u4"))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind: str) -> None:
    bits = int(kind[1:])
    a = numbers(bits)
    position = RNG.integers(0, bits + 8, a.size).astype("u4")
    length = RNG.integers(0, bits + 8, a.size).astype("u4")
    got = apply(f"bfe.{kind} $d, $0, $1, $2", f"b{bits}", f"u{bits // 8}",
                (f"b{bits}", a), ("b32", position), ("b32", length))  # fmt: skip
    for x, p, n, result in zip(
        a.tolist(), position.tolist(), length.tolist(), got.tolist(), strict=True
    ):
        sign = 0
        if kind[0] == "s" and n:
            sign = x >> min(p + n - 1, bits - 1) & 1
        want = sum((x >> (p + i) & 1 if i < n and p + i < bits else sign) << i for i in range(bits))
        assert result == want, (hex(x), p, n)
    if kind[0] == "u":
        b = numbers(bits)[::-1]
        got = apply(f"bfi.b{bits} $d, $0, $1, $2, $3", f"b{bits}", f"u{bits // 8}",
                    (f"b{bits}", a), (f"b{bits}", b), ("b32", position),
                    ("b32", length))  # fmt: skip
        for x, y, p, n, result in zip(
            a.tolist(), b.tolist(), position.tolist(), length.tolist(), got.tolist(), strict=True
        ):
            mask = sum(1 << (p + i) for i in range(n) if p + i < bits)
            assert result == (y & ~mask) | ((x << p) & mask), (hex(x), p, n)


@pytest.mark.parametrize("signs", ["u32.u32", "s32.s32", "u32.s32"])
def test_dot_products(signs: str) -> None:
    a, b, c = numbers(32), numbers(32)[::-1], numbers(32)
    fa, fb = (("i" if s[0] == "s" else "u") for s in signs.split("."))
    x = np.ascontiguousarray(a).view(f"{fa}1").reshape(-1, 4).astype("i8")
    y = np.ascontiguousarray(b).view(f"{fb}1").reshape(-1, 4).astype("i8")
    got = apply(f"dp4a.{signs} $d, $0, $1, $2", "b32", "u4", ("b32", a), ("b32", b), ("b32", c))
    np.testing.assert_array_equal(got, ((x * y).sum(1) + c.astype("i8")).astype("u4"))
    halves = np.ascontiguousarray(a).view(f"{fa}2").reshape(-1, 2).astype("i8")
    got = apply(f"dp2a.hi.{signs} $d, $0, $1, $2", "b32", "u4", ("b32", a), ("b32", b), ("b32", c))
    np.testing.assert_array_equal(got, ((halves * y[:, 2:]).sum(1) + c.astype("i8")).astype("u4"))


def test_mad() -> None:
    a, b, c = numbers(32), numbers(32)[::-1], numbers(32)
    wide = np.roll(numbers(64), 3)[: a.size]
    got = apply("mad.lo.s32 $d, $0, $1, $2", "b32", "u4", ("b32", a), ("b32", b), ("b32", c))
    np.testing.assert_array_equal(got, a * b + c)
    got = apply("mad.wide.u32 $d, $0, $1, $2", "b64", "u8", ("b32", a), ("b32", b), ("b64", wide))
    np.testing.assert_array_equal(got, a.astype("u8") * b + wide)


@pytest.mark.parametrize("operator", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s16"])
def test_comparisons(operator: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = numbers(bits), numbers(bits)
    b[::3] = a[::3]
    got = apply(
        f"setp.{operator}.{kind} $d, $0, $1", "pred", "u4", (f"b{bits}", a), (f"b{bits}", b)
    )
    view = f"{'i' if kind[0] == 's' else 'u'}{bits // 8}"
    compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
               "gt": np.greater, "ge": np.greater_equal}[operator]  # fmt: skip
    np.testing.assert_array_equal(got != 0, compare(a.view(view), b.view(view)))


def test_predicates_and_selection() -> None:
    p, q = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    for name, want in (("and", p & q), ("or", p | q), ("xor", p ^ q)):
        got = apply(f"{name}.pred $d, $0, $1", "pred", "u4", ("pred", p), ("pred", q))
        np.testing.assert_array_equal(got, want)
    got = apply("not.pred $d, $0", "pred", "u4", ("pred", p))
    np.testing.assert_array_equal(got, 1 - p)
    a, b = np.arange(4, dtype="u4"), np.arange(10, 14, dtype="u4")
    got = apply("selp.b32 $d, $0, $1, $2", "b32", "u4", ("b32", a), ("b32", b), ("pred", p))
    np.testing.assert_array_equal(got, np.where(p, a, b))
    got = apply("slct.b32.s32 $d, $0, $1, $2", "b32", "u4", ("b32", a), ("b32", b),
                ("b32", np.array([-1, 0, 5, -7], "i4").view("u4")))  # fmt: skip
    np.testing.assert_array_equal(got, [10, 1, 2, 13])
    # both targets and a combining predicate, one target being its own input
    got = apply("setp.lt.and.u32 $2|$d, $0, $1, $2", "pred", "u4",
                ("b32", a), ("b32", np.full(4, 2, "u4")), ("pred", q))  # fmt: skip
    np.testing.assert_array_equal(got, [0, 0, 0, 1])


UNIFORM_RNG = np.random.default_rng(6)
TERNARY = [
    "lop3.b32", "prmt.b32", "shf.l.wrap.b32", "shf.r.clamp.b32", "bfe.s32", "bfe.u32",
    "dp4a.s32.u32", "mad.lo.s32",
]  # fmt: skip
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
    *((name, f"b{out}", (f"b{bits}",) * 2) for name, bits, _, out, _ in BINARY),
    *((name, f"b{out}", (f"b{bits}",)) for name, bits, out, _ in UNARY),
    *((name, "b32", ("b32", "b32")) for name in ("shl.b32", "shr.s32", "shr.u32")),
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
        return UNIFORM_RNG.integers(0, 2, count)
    if kind in ("f32", "f64"):
        return (UNIFORM_RNG.standard_normal(count) * 4).astype(f"f{int(kind[1:]) // 8}")
    size = int(kind[1:]) // 8
    return np.frombuffer(UNIFORM_RNG.bytes(size * count), f"u{size}")


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

"""Tensor-core instructions against the fragment tables of the PTX ISA, element by element."""

import re
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.ptx import compile_module, kernel_text
from support.search import examples

from cupyattn import emulator
from cupyattn.emulator import UnsupportedPTXError, WarpSyncError

RNG = np.random.default_rng(4)
LANES = range(32)

# PTX ISA, "Matrix fragments for mma.m16n8k8" and "... mma.m16n8k16", g = lane // 4, t = lane % 4:
# position (row, column) of half i of the A, B and of element i of the C fragment.


def a_position(lane: int, i: int) -> tuple[int, int]:
    group, thread = divmod(lane, 4)
    register, half = divmod(i, 2)
    return group + 8 * (register & 1), 2 * thread + half + 8 * (register >> 1)


def b_position(lane: int, i: int) -> tuple[int, int]:
    group, thread = divmod(lane, 4)
    register, half = divmod(i, 2)
    return 2 * thread + half + 8 * register, group


def c_position(lane: int, i: int) -> tuple[int, int]:
    group, thread = divmod(lane, 4)
    return group + 8 * (i // 2), 2 * thread + i % 2


def fragments(matrix: np.ndarray, position: object, count: int) -> np.ndarray:
    """Return (32, count): what each lane holds."""
    return np.array([[matrix[position(lane, i)] for i in range(count)] for lane in LANES])  # type: ignore[operator]


def _vector(prefix: str, start: int, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{start + i}" for i in range(count)) + "}"


def _load(array: str, kind: str, prefix: str, start: int, count: int) -> str:
    lines = [f"ld.param.u64 %rd1, [{array}]; mul.wide.u32 %rd2, %r60, {4 * count}; "
             "add.s64 %rd3, %rd1, %rd2;"]  # fmt: skip
    lines += [f"ld.global.{kind} %{prefix}{start + i}, [%rd3+{4 * i}];" for i in range(count)]
    return "\n".join(lines)


def mma_kernel(k: int, accumulator: str, chain: int = 1, kind: str = "f16") -> str:
    a, b = k // 4, k // 8
    c = 4 if accumulator == "f32" else 2
    stored, prefix = ("f32", "f") if accumulator == "f32" else ("b32", "r")
    body = ["mov.u32 %r60, %tid.x;", _load("a", "b32", "r", 0, a), _load("b", "b32", "r", 10, b),
            _load("c", stored, prefix, 20, c)]  # fmt: skip
    types = f"{accumulator}.{kind}.{kind}.{accumulator}"
    d = _vector(prefix, 20, c)
    body += [
        f"mma.sync.aligned.m16n8k{k}.row.col.{types} {d}, {_vector('r', 0, a)}, "
        f"{_vector('r', 10, b)}, {d};"
    ] * chain
    body.append(
        f"ld.param.u64 %rd1, [c]; mul.wide.u32 %rd2, %r60, {4 * c}; add.s64 %rd3, %rd1, %rd2;"
    )
    body += [f"st.global.{stored} [%rd3+{4 * i}], %{prefix}{20 + i};" for i in range(c)]
    parameters = ".param .u64 a, .param .u64 b, .param .u64 c"
    newer = k == 16 or kind == "bf16"
    return kernel_text("\n".join(body), parameters, target=80 if newer else 75)


@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize(("kind", "accumulator"), [("f16", "f32"), ("f16", "f16"), ("bf16", "f32")])
@pytest.mark.parametrize("chain", [1, 3])
def test_mma(k: int, kind: str, accumulator: str, chain: int) -> None:
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    a, b = (RNG.standard_normal(shape).astype(dtype) for shape in ((16, k), (k, 8)))
    c = RNG.standard_normal((16, 8)).astype("f4" if accumulator == "f32" else "f2")
    in_c = np.ascontiguousarray(fragments(c, c_position, 4))
    emulator.run(
        mma_kernel(k, accumulator, chain, kind), "k", 1, 32,
        [
            fragments(a, a_position, k // 2).view("u2"),
            fragments(b, b_position, k // 4).view("u2"),
            in_c,
        ],
    )  # fmt: skip
    want = c.astype("f8")
    for _ in range(chain):
        want = a.astype("f8") @ b.astype("f8") + want
        if accumulator == "f16":
            want = want.astype("f2").astype("f8")
    tolerance = 1e-5 if accumulator == "f32" else 2e-2
    np.testing.assert_allclose(
        in_c.astype("f8"), fragments(want, c_position, 4), rtol=tolerance, atol=tolerance
    )


def test_mma_of_a_unit_matrix_moves_bits_exactly() -> None:
    # A = identity on top: D[:8] = B, which pins each element of B and D to its lane
    a = np.eye(16, 8, dtype="f2")
    b = np.arange(64, dtype="f2").reshape(8, 8)
    c = np.zeros((16, 8), "f4")
    out = np.ascontiguousarray(fragments(c, c_position, 4))
    emulator.run(mma_kernel(8, "f32"), "k", 1, 32,
                 [fragments(a, a_position, 4), fragments(b, b_position, 2), out])  # fmt: skip
    for lane in LANES:
        for i in range(4):
            row, column = c_position(lane, i)
            assert out[lane, i] == (b[row, column] if row < 8 else 0)


LDMATRIX = """
  .shared .align 16 .b8 s[1024];
  mov.u32 %r60, %tid.x;
  ld.param.u64 %rd1, [x]; mul.wide.u32 %rd2, %r60, 16; add.s64 %rd3, %rd1, %rd2;
  mov.u32 %r1, s; shl.b32 %r2, %r60, 4; add.s32 %r3, %r1, %r2;
  ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%rd3]; st.shared.v4.u32 [%r3], {%r4, %r5, %r6, %r7};
  bar.warp.sync -1;
  ld.param.u64 %rd4, [rows]; mul.wide.u32 %rd5, %r60, 4; add.s64 %rd6, %rd4, %rd5;
  ld.global.u32 %r8, [%rd6]; shl.b32 %r9, %r8, 4; add.s32 %r10, %r1, %r9;
  LDM {REGS}, [%r10];
  ld.param.u64 %rd7, [out]; mul.wide.u32 %rd8, %r60, SIZE; add.s64 %rd9, %rd7, %rd8;
"""


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("target", [75, 80])
def test_ldmatrix(count: int, transposed: bool, target: int) -> None:
    trans = ".trans" if transposed else ""
    body = LDMATRIX.replace("LDM", f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16")
    body = body.replace("{REGS}", _vector("r", 20, count)).replace("SIZE", str(4 * count))
    body += "\n".join(f"st.global.u32 [%rd9+{4 * i}], %r{20 + i};" for i in range(count))
    text = kernel_text(body, ".param .u64 x, .param .u64 rows, .param .u64 out", target)
    x = RNG.integers(0, 65536, (32, 8)).astype("u2")  # 32 rows of 16 bytes
    rows = RNG.permutation(32).astype("u4")
    out = np.zeros((32, count), "u4")
    emulator.run(text, "k", 1, 32, [x, rows, out])
    got = out.view("u2").reshape(32, count, 2)
    for i in range(count):
        matrix = x[rows[8 * i : 8 * i + 8]]  # row r from the address of lane 8 i + r
        if transposed:
            matrix = matrix.T
        for lane in LANES:
            row, column = lane // 4, 2 * (lane % 4)
            assert got[lane, i].tolist() == matrix[row, column : column + 2].tolist()


def test_movmatrix() -> None:
    body = """
      mov.u32 %r60, %tid.x; ld.param.u64 %rd1, [x]; mul.wide.u32 %rd2, %r60, 4;
      add.s64 %rd3, %rd1, %rd2; ld.global.u32 %r1, [%rd3];
      movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1; st.global.u32 [%rd3], %r2;
    """
    x = RNG.integers(0, 65536, (8, 8)).astype("u2")
    want = x.T.copy()
    emulator.run(kernel_text(body, ".param .u64 x"), "k", 1, 32, [x])
    np.testing.assert_array_equal(x, want)


def test_a_result_may_be_an_operand() -> None:
    """The bits of one product's float32 sums as the float16 operands of the next."""
    mma = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
    body = ["mov.u32 %r60, %tid.x;", _load("a", "b32", "r", 0, 2), _load("b", "b32", "r", 10, 1)]
    body += [f"mov.b32 %r{20 + i}, 0;" for i in range(4)]
    d = _vector("r", 20, 4)
    body += [
        f"{mma} {d}, {{%r0, %r1}}, {{%r10}}, {d};",
        f"{mma} {d}, {{%r20, %r22}}, {{%r10}}, {d};",
    ]
    body += ["ld.param.u64 %rd1, [d]; mul.wide.u32 %rd2, %r60, 16; add.s64 %rd3, %rd1, %rd2;"]
    body += [f"st.global.u32 [%rd3+{4 * i}], %r{20 + i};" for i in range(4)]
    text = kernel_text("\n".join(body), ".param .u64 a, .param .u64 b, .param .u64 d")
    a, b = RNG.standard_normal((16, 8)).astype("f2"), RNG.standard_normal((8, 8)).astype("f2")
    out = np.zeros((32, 4), "f4")
    emulator.run(text, "k", 1, 32, [fragments(a, a_position, 4), fragments(b, b_position, 2), out])
    first = (a.astype("f4") @ b.astype("f4")).astype("f4")
    lanes = np.ascontiguousarray(fragments(first, c_position, 4)).astype("f4")
    halves = np.ascontiguousarray(lanes[:, [0, 2]]).view("f2").astype("f8")  # registers 0 and 2
    second = np.zeros((16, 8))
    for lane in LANES:
        for i in range(4):
            second[a_position(lane, i)] = halves[lane, i]
    finite = np.isfinite(second).all(1)
    want = second[finite] @ b.astype("f8") + first[finite]
    got = np.zeros((16, 8))
    for lane in LANES:
        for i in range(4):
            got[c_position(lane, i)] = out[lane, i]
    assert finite.sum() > 4
    np.testing.assert_allclose(got[finite], want, rtol=1e-2, atol=np.abs(want).max() * 1e-3)


def test_fusion_keeps_the_meaning() -> None:
    """Products whose operands and accumulators depend on each other in every way."""
    mma = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
    setup = ["mov.u32 %r60, %tid.x;", _load("a", "b32", "r", 0, 4), _load("b", "b32", "r", 10, 3)]
    setup += [f"mov.f32 %f{i}, 0f00000000;" for i in range(16)]
    a0, a1 = "{%r0, %r1}", "{%r2, %r3}"
    f = [_vector("f", 4 * i, 4) for i in range(4)]
    body = [
        f"{mma} {f[0]}, {a0}, {{%r10}}, {f[0]};",  # two chains over the same A
        f"{mma} {f[1]}, {a0}, {{%r11}}, {f[1]};",
        f"{mma} {f[0]}, {a1}, {{%r11}}, {f[0]};",
        f"{mma} {f[1]}, {a1}, {{%r12}}, {f[1]};",
        f"{mma} {f[2]}, {a0}, {{%r12}}, {f[0]};",  # starts from a result still held back
        "mov.b32 %r11, %r10;",  # overwrites an operand
        f"{mma} {f[3]}, {a1}, {{%r11}}, {f[3]};",
        "add.f32 %f0, %f0, %f12;",  # needs a result
        f"{mma} {f[0]}, {a0}, {{%r11}}, {f[1]};",  # replaces what another chain read
        f"{mma} {f[1]}, {a1}, {{%r10}}, {f[2]};",
    ]
    store = ["ld.param.u64 %rd1, [d]; mul.wide.u32 %rd2, %r60, 64; add.s64 %rd3, %rd1, %rd2;"]
    store += [f"st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(16)]
    text = kernel_text(
        "\n".join(setup + body + store), ".param .u64 a, .param .u64 b, .param .u64 d"
    )
    a = RNG.standard_normal((2, 16, 8)).astype("f2")
    b = RNG.standard_normal((3, 8, 8)).astype("f2")
    d = np.zeros((32, 16), "f4")
    emulator.run(text, "k", 1, 32, [
        np.concatenate([fragments(m, a_position, 4) for m in a], 1),
        np.concatenate([fragments(m, b_position, 2) for m in b], 1), d,
    ])  # fmt: skip
    left, right = a.astype("f8"), b.astype("f8")
    d0 = left[0] @ right[0] + left[1] @ right[1]
    d1 = left[0] @ right[1] + left[1] @ right[2]
    d2 = left[0] @ right[2] + d0
    d3 = left[1] @ right[0]
    want = [left[0] @ right[0] + d1, left[1] @ right[0] + d2, d2, d3]
    for i, matrix in enumerate(want):
        got = d[:, 4 * i : 4 * i + 4]
        np.testing.assert_allclose(got, fragments(matrix, c_position, 4), rtol=1e-5, atol=1e-5)


# Integers: PTX ISA, "Matrix fragments for mma.m8n8k16", "... mma.m8n8k32", "... mma.m16n8k16" and
# "... mma.m16n8k32".

RANGES = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7), "u4": (0, 15)}
INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class Integers:
    """Chains of `steps` products of every A (`rows`, 8 x k) with every B (`columns`, k x 8).

    An instruction takes `halves` of A one below the other, and `parts` of A and B side by side.
    """

    a: str
    b: str
    saturates: bool = False
    rows: int = 1
    columns: int = 1
    steps: int = 1
    warps: int = 1  # of each block
    blocks: int = 1
    halves: int = 1
    parts: int = 1

    @property
    def bits(self) -> int:
        return int(self.a[1:])

    @property
    def k(self) -> int:
        return 128 // self.bits

    @property
    def opcode(self) -> str:
        limited = ".satfinite" if self.saturates else ""
        shape = f"m{8 * self.halves}n8k{self.parts * self.k}"
        return f"mma.sync.aligned.{shape}.row.col{limited}.s32.{self.a}.{self.b}.s32"

    def text(self) -> str:
        """Return a kernel: the registers of a lane lie together in a, b and c."""
        n, steps, chains = self.rows + self.columns, self.steps, self.rows * self.columns
        names = iter(range(1000))
        a, b = ([f"%w{next(names)}" for _ in range(count * steps)]
                for count in (self.rows, self.columns))  # fmt: skip
        c = [f"%w{next(names)}" for _ in range(2 * chains)]
        body = [
            f".reg .b32 %w<{n * steps + 2 * chains}>;",
            "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;",
            "mad.lo.u32 %r60, %r1, %r2, %r3;",
        ]
        for array, registers in (("a", a), ("b", b), ("c", c)):
            body.append(self._address(array, len(registers)))
            body += [f"ld.global.u32 {x}, [%rd3+{4 * i}];" for i, x in enumerate(registers)]
        for step in range(0, steps, self.parts):
            for row in range(0, self.rows, self.halves):
                for column in range(self.columns):
                    below, beside = range(row, row + self.halves), range(step, step + self.parts)
                    d = [x for i in below for x in c[2 * (i * self.columns + column) :][:2]]
                    left = [a[i * steps + k] for k in beside for i in below]
                    right = [b[column * steps + k] for k in beside]
                    operands = [f"{{{', '.join(x)}}}" for x in (d, left, right, d)]
                    body.append(f"{self.opcode} {', '.join(operands)};")
        body += [f"st.global.u32 [%rd3+{4 * i}], {x};" for i, x in enumerate(c)]
        target = 80 if self.halves > 1 else 75
        return kernel_text("\n".join(body), ".param .u64 a, .param .u64 b, .param .u64 c", target)

    @staticmethod
    def _address(array: str, count: int) -> str:
        return f"ld.param.u64 %rd1, [{array}]; mul.wide.u32 %rd2, %r60, {4 * count}; " \
               "add.s64 %rd3, %rd1, %rd2;"  # fmt: skip

    def packed(self, matrices: np.ndarray) -> np.ndarray:
        """Return (lanes, count) registers of matrices (count, warps, 8, k).

        Item i of thread t of group g is column (k / 4) t + i of row g, lowest bits first.
        """
        count, warps = matrices.shape[:2]
        items = self.k // 4
        word = np.zeros((count, warps, 32), np.uint32)
        for lane in LANES:
            group, thread = divmod(lane, 4)
            for i in range(items):
                value = matrices[:, :, group, items * thread + i] & ((1 << self.bits) - 1)
                word[:, :, lane] |= (value << (self.bits * i)).astype(np.uint32)
        return np.ascontiguousarray(word.reshape(count, -1).T)

    def check(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        """Compare a run with int64 products.

        A is (rows, steps, warps, 8, k), B (columns, steps, warps, 8, k), transposed, and C (rows,
        columns, warps, 8, 8).
        """
        out = np.zeros((32 * a.shape[2], 2 * self.rows * self.columns), np.int32)
        for lane in range(len(out)):
            warp, (group, thread) = lane // 32, divmod(lane % 32, 4)
            out[lane] = c[:, :, warp, group, 2 * thread : 2 * thread + 2].ravel()
        flat = [x.reshape(-1, *x.shape[2:]) for x in (a, b)]
        arguments = [*map(self.packed, flat), out.view(np.uint32)]
        emulator.run(self.text(), "k", self.blocks, 32 * self.warps, arguments)
        want = c.astype(np.int64)
        for step in range(self.steps):
            left, right = a[:, None, step], b[None, :, step].swapaxes(-1, -2)
            want = want + left @ right
            if self.saturates and (step + 1) % self.parts == 0:
                want = want.clip(INT32.min, INT32.max)
        want = want.astype(np.int32)  # wrapped
        for lane in range(len(out)):
            warp, (group, thread) = lane // 32, divmod(lane % 32, 4)
            expected = want[:, :, warp, group, 2 * thread : 2 * thread + 2]
            np.testing.assert_array_equal(out[lane], expected.ravel(), str(lane))


def integers(problem: Integers, seed: int, extreme: bool) -> tuple[np.ndarray, ...]:
    """Return operands: all of the range, or only its ends with C next to the limits of int32."""
    rng = np.random.default_rng(seed)
    warps = problem.warps * problem.blocks

    def draw(kind: str, *shape: int) -> np.ndarray:
        low, high = RANGES[kind]
        if extreme:
            return rng.choice(np.array([low, high]), shape)
        return rng.integers(low, high + 1, shape)

    a = draw(problem.a, problem.rows, problem.steps, warps, 8, problem.k)
    b = draw(problem.b, problem.columns, problem.steps, warps, 8, problem.k)
    shape = (problem.rows, problem.columns, warps, 8, 8)
    c = rng.integers(INT32.min, INT32.max + 1, shape)
    if extreme:
        near = rng.integers(0, 1 << 20, shape)
        c = np.where(rng.random(shape) < 0.5, INT32.min + near, INT32.max - near)
    return a, b, c


kinds = st.sampled_from(
    [(a, b) for bits in (8, 4) for a in (f"s{bits}", f"u{bits}") for b in (f"s{bits}", f"u{bits}")]
)
small = st.integers(1, 3)
products = st.builds(
    lambda kind, *others: Integers(*kind, *others),
    *(kinds, st.booleans(), small, small, small, small, st.integers(1, 2)),
)


def tall(problem: Integers, parts: int) -> Integers:
    """Return the same with instructions of 16 rows and 16 or 32 columns, which 8 bits have."""
    if problem.bits != 8:
        return problem
    rows, steps = 2 * problem.rows, parts * problem.steps
    return replace(problem, rows=rows, steps=steps, halves=2, parts=parts)


products |= st.builds(tall, products, st.integers(1, 2))


@given(products, st.integers(0, 1 << 30), st.booleans())
@example(Integers("s8", "u8", True, rows=2, columns=3, steps=2, warps=2, blocks=2), 0, True)
@example(Integers("s8", "s8", rows=2, columns=2, warps=3, blocks=7), 2, False)  # many at once
@example(Integers("u4", "s4", False, rows=3, columns=2, steps=2), 1, True)
@example(tall(Integers("u8", "s8", True, rows=2, columns=3, steps=2, warps=2), 2), 3, True)
@example(tall(Integers("s8", "s8", rows=2, columns=3, steps=3, warps=2, blocks=9), 2), 4, False)
@example(tall(Integers("s8", "u8", rows=1, columns=2, steps=2), 1), 5, False)
@examples(20, deep=300)
def test_integer_mma(problem: Integers, seed: int, extreme: bool) -> None:
    problem.check(*integers(problem, seed, extreme))


@pytest.mark.parametrize("saturates", [False, True])
@pytest.mark.parametrize(
    ("kind", "a", "b", "start"),
    [
        ("s8", -128, -128, INT32.max - 16 * 2**14 + 1),  # the first product is one too many
        ("s8", -128, 127, INT32.min),
        ("u8", 255, 255, INT32.max - 5),
        ("s4", -8, 7, INT32.min + 32 * 56 - 1),
        ("u4", 15, 15, INT32.max),
    ],
)
def test_sums_that_overflow_int32(kind: str, a: int, b: int, start: int, saturates: bool) -> None:
    """Two products, then one of the other sign where there is one: limits hold step by step."""
    problem = Integers(kind, kind, saturates, steps=3)
    shape = (1, 3, 1, 8, problem.k)
    left, right, c = np.full(shape, a), np.full(shape, b), np.full((1, 1, 1, 8, 8), start)
    if kind[0] == "s":
        right[:, 2] = -1 - b
    problem.check(left, right, c)


@pytest.mark.parametrize("kind", ["s8", "u8", "s4", "u4"])
def test_long_chains_of_integers_are_exact(kind: str) -> None:
    """Sums of odd numbers far above 2^24, which float32 would round."""
    problem = Integers(kind, kind, steps=70)
    high = RANGES[kind][1]
    a, b = np.full((2, 1, 70, 1, 8, problem.k), high)
    a[..., 0] -= 1
    problem.check(a, b, np.zeros((1, 1, 1, 8, 8), int))


def test_a_chain_whose_sum_exceeds_int32_wraps() -> None:
    text = Integers("u8", "u8").text()
    (product,) = (line for line in text.splitlines() if line.startswith("mma"))
    a = b = np.full(32, 0xFFFFFFFF, "u4")
    c = np.zeros((32, 2), "u4")
    emulator.run(text.replace(product, f"{product}\n" * 2100), "k", 1, 32, [a, b, c])
    assert (c == 2100 * 16 * 255 * 255).all()  # above 2^31


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_guarded_integer_mma(parts: int) -> None:
    """A guarded product is written on its own."""
    problem = tall(Integers("s8", "s8"), parts) if parts else Integers("s8", "s8")
    text = problem.text()
    guarded = text.replace(problem.opcode, f"@%p1 {problem.opcode}")
    guarded = guarded.replace("mov.u32 %r1, %ctaid.x;", "mov.u32 %r1, %ctaid.x; "
                              "setp.eq.u32 %p1, %r1, 1;")  # fmt: skip
    lane = np.arange(64, dtype=np.uint32).reshape(64, 1)
    a, b = (lane * np.arange(1, n + 1, dtype=np.uint32) for n in (problem.rows * problem.steps,
                                                                  problem.steps))  # fmt: skip
    c = np.repeat(lane, 2 * problem.rows, 1)
    plain = c.copy()
    emulator.run(text, "k", 2, 32, [a, b, plain])
    emulator.run(guarded, "k", 2, 32, [a, b, c])  # block 1 alone
    np.testing.assert_array_equal(c[32:], plain[32:])
    assert (c[:32] == np.arange(32)[:, None]).all() and (c[32:] != np.arange(32, 64)[:, None]).any()


def test_integer_products_are_one_operation() -> None:
    source = emulator.load(Integers("s8", "u8", rows=3, columns=4, steps=2).text())
    assert source.program("k").source.count("matrix.multiply_integers(") == 1
    newer = emulator.load(tall(Integers("s8", "u8", rows=3, columns=4, steps=2), 2).text())
    assert newer.program("k").source.count("matrix.multiply_integers(") == 1
    limited = emulator.load(Integers("s8", "u8", True, rows=3, columns=4, steps=2).text())
    assert limited.program("k").source.count("matrix.multiply_integers(") == 2  # each step's limits


def test_wrappers_of_int8_products() -> None:
    x, y = (RNG.integers(-128, 128, (rows, 64)).astype("i1") for rows in (16, 8))
    module = compile_module("integer_mma.cu")
    for steps in (1, 4):
        out = np.zeros((2, 16, 8), "i4")
        arguments = [x, y, out[0], out[1], np.int32(steps), np.int32(32)]
        emulator.launch(module, "product_s8", 1, 32, arguments)
        want = x[:, : 16 * steps].astype("i8") @ y[:, : 16 * steps].T.astype("i8")
        np.testing.assert_array_equal(out, [want, want])


def test_integer_mma_needs_whole_warps() -> None:
    problem = Integers("u4", "u4")
    text = problem.text().replace(
        problem.opcode, f"setp.gt.u32 %p1, %r3, 20; @%p1 bra END;\n{problem.opcode}"
    )
    text = text.replace("  ret;", "END:\n  ret;")
    with pytest.raises(WarpSyncError, match="needs all 32 lanes"):
        emulator.run(text, "k", 1, 32, [np.zeros(64, "u4")] * 3)


def test_unwritten_integer_fragments_spoil_sums() -> None:
    problem = Integers("s8", "s8")
    text = re.sub(r"ld\.global\.u32 %w0,.*", "", problem.text())  # A
    c = np.zeros((32, 2), "u4")
    emulator.run(text, "k", 1, 32, [np.zeros(32, "u4"), np.full(32, 0x01010101, "u4"), c])
    assert c.all()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("s8.s8", "s8.s4", "m16n8k16, m16n8k32 and m8n8k16 of s8 and u8"),
        ("m8n8k16", "m8n8k32", "m8n8k32 of s4 and u4"),
        ("m8n8k16", "m16n8k16", "needs sm_80"),
        ("m8n8k16", "m16n8k32", "needs sm_80"),
        ("row.col", "row.row", "only"),
        (".s32.s8", ".satfinite.satfinite.s32.s8", "only"),
        ("row.col.s32.s8.s8.s32", "row.col.s32.b1.b1.s32.xor.popc", "only"),
        ("{%w0}", "{%w0, %w1}", "m8n8k16 takes fragments of 2, 1, 1 and 2 registers"),
        ("{%w2, %w3}, {%w0}", "{%w2}, {%w0}", "2, 1, 1 and 2 registers"),
        (".target sm_75", ".target sm_70", "needs sm_75"),
    ],
)
def test_integer_forms_that_are_refused(old: str, new: str, message: str) -> None:
    text = Integers("s8", "s8").text()
    assert old in text
    with pytest.raises(UnsupportedPTXError, match=message):
        emulator.run(text.replace(old, new), "k", 1, 32, [np.zeros(64, "u4")] * 3)

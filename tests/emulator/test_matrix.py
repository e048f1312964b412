"""Tensor-core instructions against the fragment tables of the PTX ISA, element by element."""

import numpy as np
import pytest
from support.ptx import kernel_text

from cupyattn import emulator

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


def mma_kernel(k: int, accumulator: str, chain: int = 1) -> str:
    a, b = k // 4, k // 8
    c = 4 if accumulator == "f32" else 2
    kind, prefix = ("f32", "f") if accumulator == "f32" else ("b32", "r")
    body = ["mov.u32 %r60, %tid.x;", _load("a", "b32", "r", 0, a), _load("b", "b32", "r", 10, b),
            _load("c", kind, prefix, 20, c)]  # fmt: skip
    types = f"{accumulator}.f16.f16.{accumulator}"
    d = _vector(prefix, 20, c)
    body += [
        f"mma.sync.aligned.m16n8k{k}.row.col.{types} {d}, {_vector('r', 0, a)}, "
        f"{_vector('r', 10, b)}, {d};"
    ] * chain
    body.append(
        f"ld.param.u64 %rd1, [c]; mul.wide.u32 %rd2, %r60, {4 * c}; add.s64 %rd3, %rd1, %rd2;"
    )
    body += [f"st.global.{kind} [%rd3+{4 * i}], %{prefix}{20 + i};" for i in range(c)]
    parameters = ".param .u64 a, .param .u64 b, .param .u64 c"
    return kernel_text("\n".join(body), parameters, target=80 if k == 16 else 75)


@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize("accumulator", ["f32", "f16"])
@pytest.mark.parametrize("chain", [1, 3])
def test_mma(k: int, accumulator: str, chain: int) -> None:
    a, b = RNG.standard_normal((16, k)).astype("f2"), RNG.standard_normal((k, 8)).astype("f2")
    c = RNG.standard_normal((16, 8)).astype("f4" if accumulator == "f32" else "f2")
    in_c = np.ascontiguousarray(fragments(c, c_position, 4))
    emulator.run(
        mma_kernel(k, accumulator, chain), "k", 1, 32,
        [fragments(a, a_position, k // 2), fragments(b, b_position, k // 4), in_c],
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
def test_ldmatrix(count: int, transposed: bool) -> None:
    trans = ".trans" if transposed else ""
    body = LDMATRIX.replace("LDM", f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16")
    body = body.replace("{REGS}", _vector("r", 20, count)).replace("SIZE", str(4 * count))
    body += "\n".join(f"st.global.u32 [%rd9+{4 * i}], %r{20 + i};" for i in range(count))
    text = kernel_text(body, ".param .u64 x, .param .u64 rows, .param .u64 out")
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

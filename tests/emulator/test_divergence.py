"""Random control flow: every thread must do what it would do alone, however the lanes diverge."""

import random

import numpy as np
import pytest
from support.ptx import kernel_text
from support.search import mostly_deep

from cupyattn import emulator

THREADS, BLOCKS, FUEL = 48, 3, 40
MASK = 0xFFFFFFFF
UNWRITTEN = 0x7FFF7FFF  # what a register of the emulator begins with

# One basic block: an operation on two of four registers, then a branch on their values. The last
# register is not part of the result, so that it is dead in places, and nothing writes it before.
OPERATIONS = {
    "add.u32": lambda a, b: a + b,
    "xor.b32": lambda a, b: a ^ b,
    "mul.lo.u32": lambda a, b: a * b,
    "sub.u32": lambda a, b: a - b,
}


def make_program(rng: random.Random, size: int) -> list[tuple]:
    """Return blocks (operation, d, a, b, guarded, tested, modulus, two targets); size = leave."""
    return [
        (
            rng.choice(list(OPERATIONS)),
            rng.randrange(4), rng.randrange(4), rng.randrange(4), rng.random() < 0.3,
            rng.randrange(4), rng.randrange(2, 5), rng.randrange(size + 1), rng.randrange(size + 1),
        )
        for _ in range(size)
    ]  # fmt: skip


def to_ptx(program: list[tuple]) -> str:
    lines = [
        "mov.u32 %r10, %tid.x; mov.u32 %r11, %ctaid.x; mov.u32 %r12, %ntid.x;",
        "mad.lo.s32 %r13, %r11, %r12, %r10; ld.param.u64 %rd1, [x]; mul.wide.u32 %rd2, %r13, 16;",
        "add.s64 %rd3, %rd1, %rd2; ld.global.v2.u32 {%r0, %r1}, [%rd3]; mov.u32 %r2, %r13;",
        f"mov.u32 %r9, {FUEL};",
    ]
    for number, (name, d, a, b, guarded, tested, modulus, yes, no) in enumerate(program):
        lines += [
            f"B{number}:",
            "sub.u32 %r9, %r9, 1; setp.eq.u32 %p1, %r9, 0; @%p1 bra LEAVE;",
            "setp.lt.u32 %p2, %r0, %r1;",
            f"{'@%p2 ' if guarded else ''}{name} %r{d}, %r{a}, %r{b};",
            f"rem.u32 %r8, %r{tested}, {modulus}; setp.eq.u32 %p3, %r8, 0;",
            f"@%p3 bra {'LEAVE' if yes == len(program) else f'B{yes}'};",
            f"bra {'LEAVE' if no == len(program) else f'B{no}'};",
        ]
    lines += ["LEAVE:", "st.global.v4.u32 [%rd3], {%r0, %r1, %r2, %r9};"]
    return kernel_text("\n".join(lines), ".param .u64 x")


def run_alone(program: list[tuple], r: list[int]) -> list[int]:
    block, fuel = 0, FUEL
    while block < len(program):
        name, d, a, b, guarded, tested, modulus, yes, no = program[block]
        fuel -= 1
        if fuel == 0:
            break
        if not guarded or r[0] < r[1]:
            r[d] = OPERATIONS[name](r[a], r[b]) & MASK
        block = yes if r[tested] % modulus == 0 else no
    return [*r[:3], fuel]


def test_a_temporary_of_one_side_does_not_touch_the_other_side() -> None:
    text = kernel_text(
        """
        mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16; @!%p1 bra B;
        mov.u32 %r5, 7; bra A;
      B:
        mov.u32 %r5, 9; add.u32 %r6, %r5, 1; bra JOIN;
      A:
        add.u32 %r6, %r5, 1;
      JOIN:
        ld.param.u64 %rd1, [x]; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
        st.global.u32 [%rd3], %r6;
        """,
        ".param .u64 x",
    )
    x = np.zeros(32, "u4")
    emulator.run(text, "k", 1, 32, [x])
    assert x.tolist() == [8] * 16 + [10] * 16


@pytest.mark.parametrize("seed", mostly_deep(range(40), range(13)))
def test_random_control_flow(seed: int) -> None:
    rng = random.Random(seed)
    program = make_program(rng, rng.randrange(2, 12))
    count = THREADS * BLOCKS
    x = np.random.default_rng(seed).integers(0, 50, (count, 4)).astype("u4")
    want = [run_alone(program, [int(x[i, 0]), int(x[i, 1]), i, UNWRITTEN]) for i in range(count)]
    emulator.run(to_ptx(program), "k", BLOCKS, THREADS, [x])
    np.testing.assert_array_equal(x, np.array(want, "u4"))


def straight_line(rng: random.Random, length: int) -> list[str]:
    """Return float instructions with ``@`` where a guard may be."""
    names = [f"%f{i}" for i in range(8)]
    kinds = ["fma.rn.ftz.f32"] * 6 + ["fma.rn.f32", "add.ftz.f32", "mov.f32", "mul.f32"]
    lines = []
    for _ in range(length):
        kind = rng.choice(kinds)
        count = 3 if kind.startswith("fma") else 1 if kind.startswith("mov") else 2
        operands = [rng.choice([*names, "0f3F800001"]) for _ in range(count)]
        if count == 3 and rng.random() < 0.7:
            operands[2] = rng.choice(names[4:])
        lines.append(f"@{kind} {rng.choice(names[3:])}, {', '.join(operands)};")
    return lines


@pytest.mark.parametrize("seed", mostly_deep(range(20), range(6)))
def test_fused_fma_is_the_same_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    lines = straight_line(rng, 120)
    load = ["mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 32; ld.param.u64 %rd2, [x];"
            "add.s64 %rd3, %rd1, %rd2; setp.lt.u32 %p1, %r0, 999;"]  # fmt: skip
    load += [f"ld.global.f32 %f{i}, [%rd3+{4 * i}];" for i in range(8)]
    store = [f"st.global.f32 [%rd3+{4 * i}], %f{i};" for i in range(8)]
    values = np.random.default_rng(seed).standard_normal((32, 8)).astype("f4")
    values[::5] *= np.float32(2.0**-70)  # products of these are subnormal
    results = []
    for guard in ("", "@%p1 "):  # guarded instructions are not fused
        body = [line.replace("@", guard) for line in lines]
        x = values.copy()
        text = kernel_text("\n".join(load + body + store), ".param .u64 x")
        emulator.run(text, "k", 1, 32, [x])
        results.append(x.view("u4"))
    np.testing.assert_array_equal(results[0], results[1])

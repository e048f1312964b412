"""Shuffles, votes and matches wait for the lanes that their masks name, as on Volta and later."""

from __future__ import annotations

import random
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ptx import compile_module, compile_text, kernel_text, run_on_the_gpu
from support.search import mostly_deep

from cupyattn import emulator
from cupyattn.emulator import BarrierError, Checks, WarpSyncError

THREADS, BLOCKS, FUEL, MEETINGS = 48, 2, 12, 5
BITS = 0xFFFFFFFF
EXCHANGES = {
    "ballot": "vote.sync.ballot.b32 %r8, %p1, %r14;",
    "any": "vote.sync.any.pred %p3, %p1, %r14; selp.u32 %r8, 7, 3, %p3;",
    "idx": "shfl.sync.idx.b32 %r8, %r{a}, %r7, 31, %r14;",
    "match": "and.b32 %r8, %r{a}, 3; match.any.sync.b32 %r8, %r8, %r14;",
}
OPERATIONS = {
    "add.u32": lambda a, b: a + b,
    "xor.b32": lambda a, b: a ^ b,
    "mul.lo.u32": lambda a, b: a * b,
}


def make_program(rng: random.Random) -> list[dict[str, Any]]:
    size = rng.randrange(2, 9)
    return [
        {
            "operation": rng.choice(list(OPERATIONS)),
            "d": rng.randrange(4), "a": rng.randrange(4), "b": rng.randrange(4),
            "meets": rng.random() < 0.5, "guarded": rng.random() < 0.3,
            "tested": rng.randrange(4), "modulus": rng.randrange(2, 5),
            "targets": (rng.randrange(size + 1), rng.randrange(size + 1)),
        }
        for _ in range(size)
    ]  # fmt: skip


def exchange_text(kind: str, a: int, span: int, literal: bool) -> str:
    """Return the exchange of register a, whose result is in %r8, and the count of exchanges."""
    text = EXCHANGES[kind].format(a=a)
    if literal:
        text = text.replace("%r14", "-1")
    return (
        f"and.b32 %r6, %r{a}, 1; setp.eq.u32 %p1, %r6, 1; and.b32 %r7, %r{a}, {span - 1}; "
        f"and.b32 %r5, %r15, {32 - span}; or.b32 %r7, %r7, %r5;\n{text}\nsub.u32 %r4, %r4, 1;"
    )


def to_ptx(program: list[dict[str, Any]], kind: str, group: int, one_instruction: bool) -> str:
    span = min(group, 16)  # from which shuffles read: the second warp has 16 threads
    literal = group == 32
    lines = [
        "mov.u32 %r10, %tid.x; mov.u32 %r11, %ctaid.x; mov.u32 %r12, %ntid.x;",
        "mad.lo.s32 %r13, %r11, %r12, %r10; ld.param.u64 %rd1, [x]; mul.wide.u32 %rd2, %r13, 16;",
        "add.s64 %rd3, %rd1, %rd2; ld.global.v2.u32 {%r0, %r1}, [%rd3]; mov.u32 %r2, %r13;",
        "mov.u32 %r3, 0;",
        f"mov.u32 %r9, {FUEL}; mov.u32 %r4, {MEETINGS}; and.b32 %r15, %r10, 31;",
        f"and.b32 %r14, %r15, {32 - group}; mov.u32 %r5, {(1 << group) - 1}; "
        "shl.b32 %r14, %r5, %r14;",
    ]

    def meeting(number: int, a: int, d: int) -> None:
        if one_instruction:
            lines.append(f"mov.u32 %r16, %r{a}; mov.u32 %r17, {number}; bra MEET; BACK{number}:")
        else:
            lines.append(exchange_text(kind, a, span, literal))
        lines.append(f"xor.b32 %r{d}, %r{d}, %r8;")

    for number, x in enumerate(program):
        targets = ["LEAVE" if t == len(program) else f"B{t}" for t in x["targets"]]
        lines += [
            f"B{number}:",
            "sub.u32 %r9, %r9, 1; setp.eq.u32 %p4, %r9, 0; @%p4 bra LEAVE;",
            f"{x['operation']} %r{x['d']}, %r{x['a']}, %r{x['b']};",
        ]
        if x["meets"]:
            lines.append("setp.eq.u32 %p4, %r4, 0; @%p4 bra LEAVE;")
            if x["guarded"]:
                lines.append(f"setp.lt.u32 %p2, %r0, %r1; @%p2 bra SKIP{number};")
            meeting(number, x["a"], x["d"])
            lines.append(f"SKIP{number}:")
        lines += [
            f"rem.u32 %r8, %r{x['tested']}, {x['modulus']}; setp.eq.u32 %p4, %r8, 0;",
            f"@%p4 bra {targets[0]}; bra {targets[1]};",
        ]
    if one_instruction:
        lines += ["MEET:", exchange_text(kind, 16, span, literal)]
        for number, x in enumerate(program):
            if x["meets"]:
                lines.append(f"setp.eq.u32 %p4, %r17, {number}; @%p4 bra BACK{number};")
        lines.append(f"bra BACK{len(program)};")
    lines.append("LEAVE: setp.eq.u32 %p4, %r4, 0; @%p4 bra DONE;")
    meeting(len(program), 0, 1)
    lines += ["bra LEAVE;", "DONE: st.global.v4.u32 [%rd3], {%r0, %r1, %r2, %r9};"]
    return kernel_text("\n".join(lines), ".param .u64 x")


Lane = Generator[int, int, list[int]]


def trace(program: list[dict[str, Any]], r: list[int]) -> Lane:
    """Yield what a thread brings to each exchange; receive the result."""
    block, fuel, left = 0, FUEL, MEETINGS
    while block < len(program):
        x = program[block]
        fuel -= 1
        if fuel == 0:
            break
        r[x["d"]] = OPERATIONS[x["operation"]](r[x["a"]], r[x["b"]]) & BITS
        if x["meets"]:
            if left == 0:
                break
            if not (x["guarded"] and r[0] < r[1]):
                r[x["d"]] ^= yield r[x["a"]]
                left -= 1
        block = x["targets"][r[x["tested"]] % x["modulus"] != 0]
    while left:
        r[1] ^= yield r[0]
        left -= 1
    return [*r[:3], fuel]


def exchange(kind: str, values: dict[int, int], lane: int, span: int) -> int:
    """Return what `lane` gets from a group whose lanes bring `values`."""
    if kind == "ballot":
        return sum(1 << j for j, v in values.items() if v & 1)
    if kind == "any":
        return 7 if any(v & 1 for v in values.values()) else 3
    if kind == "idx":
        return values.get(values[lane] & (span - 1) | lane & (32 - span), 0)
    return sum(1 << j for j, v in values.items() if v & 3 == values[lane] & 3)


def run_group(lanes: dict[int, Lane], kind: str, span: int) -> dict[int, list[int]]:
    """Run the threads of a group: an exchange happens when all that have not ended are there."""
    done: dict[int, list[int]] = {}
    sent: dict[int, int | None] = dict.fromkeys(lanes)
    while len(done) < len(lanes):
        values: dict[int, int] = {}
        for lane, thread in lanes.items():
            if lane not in done:
                try:
                    values[lane] = thread.send(sent[lane])  # type: ignore[arg-type]
                except StopIteration as end:
                    done[lane] = end.value
        sent = {lane: exchange(kind, values, lane, span) for lane in values}
    return done


def make_problem(kind: str, seed: int, one_instruction: bool) -> tuple[str, np.ndarray, np.ndarray]:
    """Return a kernel, its argument, and what the argument must be when it has run."""
    rng = random.Random(seed)
    program, group = make_program(rng), rng.choice([32, 32, 16, 4])
    count = THREADS * BLOCKS
    x = np.random.default_rng(seed).integers(0, 50, (count, 4)).astype("u4")
    want = np.zeros((count, 4), "u4")
    for first in range(0, count, THREADS):
        for start in range(0, THREADS, group):
            threads = range(first + start, first + min(start + group, THREADS))
            lanes = {
                (i - first) % 32: trace(program, [int(x[i, 0]), int(x[i, 1]), i, 0])
                for i in threads
            }
            results = run_group(lanes, kind, min(group, 16))
            for i in threads:
                want[i] = results[(i - first) % 32]
    return to_ptx(program, kind, group, one_instruction), x, want


GPU_SEEDS = 12


WRITTEN = pytest.mark.parametrize("one_instruction", [False, True], ids=["several", "one"])


@WRITTEN
@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("seed", mostly_deep(range(15), range(5)))
def test_random_programs(kind: str, seed: int, one_instruction: bool) -> None:
    text, x, want = make_problem(kind, seed, one_instruction)
    emulator.run(text, "k", BLOCKS, THREADS, [x])
    np.testing.assert_array_equal(x, want)


@pytest.mark.gpu
@WRITTEN
@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("seed", range(GPU_SEEDS))
def test_random_programs_on_the_gpu(
    kind: str, seed: int, one_instruction: bool, tmp_path: Path
) -> None:
    text, x, want = make_problem(kind, seed, one_instruction)
    got = run_on_the_gpu(text, BLOCKS, THREADS, x, tmp_path)
    np.testing.assert_array_equal(got, want)


START = """
  mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [x]; mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2; setp.lt.u32 %p1, %r1, 16; setp.ne.u32 %p2, %r1, 99;
"""


def text_of(body: str) -> str:
    return kernel_text(START + body + "st.global.u32 [%rd3], %r4;", ".param .u64 x")


def run(body: str, threads: int = 32, checks: Checks | None = None) -> np.ndarray:
    x = np.zeros(threads, "u4")
    emulator.run(text_of(body), "k", 1, threads, [x], checks=checks)
    return x


def two_places(upper: str, lower: str) -> str:
    """Return code in which lanes 0 to 15 run `lower` and the others `upper`."""
    return f"@%p1 bra LOW; {upper} bra JOIN; LOW: {lower} JOIN: "


# PTX ISA: the lanes must execute the same opcode with the same mask, not the same instruction.
# Those that have ended do not count.
HALF = "mov.u32 %r2, 0xFFFF; @%p1 bra GO; mov.u32 %r2, 0xFFFF0000; GO: "
SWAP = "shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r2, %r2, %r3; st.shared.u32 [%r2], %r1; "
LEGAL = {
    "ballot of two instructions": (
        two_places(
            "vote.sync.ballot.b32 %r4, %p2, -1;",
            "vote.sync.ballot.b32 %r4, %p1, -1; add.u32 %r4, %r4, 1;",
        ),
        [0] * 16 + [BITS] * 16,
    ),
    "all of two instructions": (
        "mov.u32 %r4, 7; "
        + two_places("vote.sync.all.pred %p3, %p2, -1;", "vote.sync.all.pred %p3, %p1, -1;")
        + "@%p3 mov.u32 %r4, 9;",
        [9] * 32,
    ),
    "shuffles of two instructions": (
        two_places(
            "shfl.sync.idx.b32 %r4, %r1, 3, 31, -1;",
            "add.u32 %r2, %r1, 100; shfl.sync.idx.b32 %r4, %r2, 20, 31, -1;",
        ),
        [20] * 16 + [103] * 16,
    ),
    "butterfly of two instructions": (
        two_places(
            "shfl.sync.bfly.b32 %r4, %r1, 16, 31, -1;",
            "mul.lo.u32 %r2, %r1, 3; shfl.sync.bfly.b32 %r4, %r2, 16, 31, -1;",
        ),
        [*range(16, 32), *range(0, 48, 3)],
    ),
    "match of two instructions": (
        two_places(
            "and.b32 %r2, %r1, 1; match.any.sync.b32 %r4, %r2, -1;",
            "mov.u32 %r2, 1; match.any.sync.b32 %r4, %r2, -1;",
        ),
        [0xAAAAFFFF] * 16 + [0x55550000, 0xAAAAFFFF] * 8,
    ),
    "__syncwarp of two instructions": (
        ".shared .align 4 .u32 s[32]; "
        + SWAP
        + two_places("bar.warp.sync -1;", "mul.lo.u32 %r5, %r1, 3; bar.warp.sync -1;")
        + "xor.b32 %r2, %r2, 64; ld.shared.u32 %r4, [%r2];",
        np.arange(32) ^ 16,
    ),
    "ballot of two groups": (
        HALF + "vote.sync.ballot.b32 %r4, %p2, %r2;",
        [0xFFFF] * 16 + [0xFFFF0000] * 16,
    ),
    "shuffle of two groups": (
        HALF + "shfl.sync.bfly.b32 %r4, %r1, 15, 31, %r2;",
        np.arange(32) ^ 15,
    ),
    "guarded ballot": (
        "@%p1 vote.sync.ballot.b32 %r4, %p2, 0xFFFF; @!%p1 mov.u32 %r4, 5;",
        [0xFFFF] * 16 + [5] * 16,
    ),
    "guarded shuffle": (
        "mov.u32 %r4, 3; @%p1 shfl.sync.down.b32 %r4, %r1, 1, 15, 0xFFFF;",
        [*range(1, 16), 15, *[3] * 16],
    ),
    "lanes that had ended": (
        "@%p1 exit; vote.sync.ballot.b32 %r4, %p2, -1;",
        [0] * 16 + [0xFFFF0000] * 16,
    ),
}


@pytest.mark.parametrize(("body", "want"), LEGAL.values(), ids=LEGAL)
@pytest.mark.parametrize("checks", [Checks(), Checks.none()], ids=["checked", "unchecked"])
def test_meetings(body: str, want: list[int], checks: Checks) -> None:
    np.testing.assert_array_equal(run(body, checks=checks), want)


@pytest.mark.gpu
@pytest.mark.parametrize(("body", "want"), LEGAL.values(), ids=LEGAL)
def test_meetings_on_the_gpu(body: str, want: list[int], tmp_path: Path) -> None:
    got = run_on_the_gpu(text_of(body), 1, 32, np.zeros(32, "u4"), tmp_path)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("checks", [Checks(), Checks.none()])
@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (
            "mov.u32 %r2, 0x1FFFF; @%p1 bra GO; mov.u32 %r2, -1; "
            "GO: vote.sync.any.pred %p3, %p1, %r2;",
            WarpSyncError,
            r"lane \d+ passes the mask 0x.* must pass the same mask",
        ),
        (
            "@%p1 bra LOW; vote.sync.all.pred %p3, %p1, -1; bra JOIN; "
            "LOW: vote.sync.any.pred %p3, %p1, -1; JOIN:",
            WarpSyncError,
            r"vote.sync.a.* names lanes that never come.*waits at .*vote.sync",
        ),
        (
            "@%p1 bra LOW; bar.sync 0; bra JOIN; LOW: bar.warp.sync -1; JOIN:",
            BarrierError,
            r"bar.warp.sync whose mask 0xffffffff.*lanes \[16, .*waits at .*bar.sync",
        ),
    ],
)
def test_lanes_that_wait_elsewhere_are_a_deadlock(
    body: str, kind: type[Exception], message: str, checks: Checks
) -> None:
    with pytest.raises(kind, match=message):
        run(body, checks=checks)


def test_lanes_that_end_without_coming() -> None:
    body = "mov.u32 %r4, 0; @%p1 bra END; vote.sync.ballot.b32 %r4, %p2, -1; END:"
    with pytest.raises(WarpSyncError, match=r"ended without reaching it\): lanes \[0, 1, 2"):
        run(body)
    x = run(body, checks=Checks.none())  # PTX ISA: those that have not ended go on
    np.testing.assert_array_equal(x, [0] * 16 + [0xFFFF0000] * 16)
    narrow = "mov.u32 %r2, -1; @%p1 bra GO; mov.u32 %r2, 0xFFFF0000; GO: "
    with pytest.raises(
        WarpSyncError, match=r"mask 0xffffffff .*without reaching it\): lanes \[16,"
    ):
        run(narrow + "vote.sync.any.pred %p3, %p1, %r2;")  # the upper half meets by itself


def test_guarded_barriers() -> None:
    x = run("mov.u32 %r4, 3; @%p2 bar.sync 0; @%p1 barrier.sync 1, 64; @!%p1 barrier.sync 1, 64;",
            64)  # fmt: skip
    np.testing.assert_array_equal(x, np.full(64, 3))


def continues_problem() -> tuple[np.ndarray, list[int]]:
    """Return the first argument of kernel ``continues``, and its result for 6 rounds."""
    x = np.random.default_rng(5).integers(1, 4, (40, 64)).astype("i4")
    want = []
    for lane in range(64):
        others = range(lane // 32 * 32, lane // 32 * 32 + 32)
        total = 0
        for round_ in range(6):
            votes = ([v for v in x[:, j] if v != 3][round_] == 2 for j in others)
            total = (3 * total + sum(1 << k for k, vote in enumerate(votes) if vote)) & BITS
        want.append(total)
    return x, want


@pytest.mark.nvrtc
@pytest.mark.parametrize("checks", [Checks(), Checks.none()])
def test_continue_before_a_ballot(checks: Checks) -> None:
    # lanes that skip the ballot come back to it by the end of the loop, while the others wait
    x, want = continues_problem()
    out = np.zeros(64, "u4")
    module = compile_module("warp_sync.cu")
    emulator.launch(module, "continues", 1, 64, [x, np.int32(6), out], checks=checks)
    np.testing.assert_array_equal(out, want)


@pytest.mark.gpu
@pytest.mark.nvrtc
def test_continue_before_a_ballot_on_the_gpu(tmp_path: Path) -> None:
    import cupy

    x, want = continues_problem()
    out = cupy.zeros(64, "u4")
    (tmp_path / "k.ptx").write_text(compile_text("warp_sync.cu"))
    module = cupy.RawModule(path=str(tmp_path / "k.ptx"))
    module.get_function("continues")((1,), (64,), (cupy.asarray(x), np.int32(6), out))
    np.testing.assert_array_equal(cupy.asnumpy(out), want)

"""Random programs whose lanes meet at shuffles, votes and matches, and what they must compute.

A random program is a list of basic blocks: an operation on four registers, an exchange with the
other lanes of a group of 32, 16 or 4 (perhaps guarded, perhaps none), and a branch to any block.
Every thread takes part in MEETINGS exchanges, whichever instructions it finds them at, and those it
has not found by the end of its way in a loop at the end: so all masks are right, and the result
does not depend on who runs first. Each program is written in two ways: with an instruction per
exchange, so that lanes meet from different ones, and with one instruction for all of them, to which
lanes come from different places and at different times.
"""

import random
from collections.abc import Generator
from typing import Any

import numpy as np
from support.ptx import kernel_text

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


Place = int
Lane = Generator[tuple[Place, int], int, list[int]]


def walk(program: list[dict[str, Any]], r: list[int]) -> Lane:
    """Yield the place of each exchange of a thread, and what it brings; receive the result."""
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
                r[x["d"]] ^= yield block, r[x["a"]]
                left -= 1
        block = x["targets"][r[x["tested"]] % x["modulus"] != 0]
    while left:
        r[1] ^= yield len(program), r[0]
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


def run_group(lanes: dict[int, Lane], kind: str, span: int, apart: bool) -> dict[int, list[int]]:
    """Run the threads of a group: an exchange happens when all that have not ended are there.

    With `apart` (what no GPU does), those at different places get nothing from each other.
    """
    done: dict[int, list[int]] = {}
    sent: dict[int, int | None] = dict.fromkeys(lanes)
    while len(done) < len(lanes):
        values: dict[Place, dict[int, int]] = {}
        for lane, thread in lanes.items():
            if lane not in done:
                try:
                    place, value = thread.send(sent[lane])  # type: ignore[arg-type]
                    values.setdefault(place if apart else 0, {})[lane] = value
                except StopIteration as end:
                    done[lane] = end.value
        sent = {
            lane: exchange(kind, those, lane, span) for those in values.values() for lane in those
        }
    return done


def make_problem(
    kind: str, seed: int, one_instruction: bool = False, apart: bool = False
) -> tuple[str, np.ndarray, np.ndarray]:
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
                (i - first) % 32: walk(program, [int(x[i, 0]), int(x[i, 1]), i, 0]) for i in threads
            }
            results = run_group(lanes, kind, min(group, 16), apart)
            for i in threads:
                want[i] = results[(i - first) % 32]
    return to_ptx(program, kind, group, one_instruction), x, want

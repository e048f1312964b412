"""Shuffles, votes and matches wait for the lanes that their masks name, as on Volta and later."""

from pathlib import Path

import numpy as np
import pytest
from support.ptx import compile_module, compile_text, kernel_text
from support.warp_programs import BITS, BLOCKS, EXCHANGES, THREADS, make_problem

from cupyattn import emulator
from cupyattn.emulator import BarrierError, Checks, WarpSyncError
from cupyattn.emulator.codegen.control_flow import ControlFlow
from cupyattn.emulator.ptx.parser import parse_module

GPU_SEEDS = 12


def run_on_the_gpu(text: str, blocks: int, threads: int, x: np.ndarray, path: Path) -> np.ndarray:
    """Return `x`, the argument of kernel k, as a GPU leaves it."""
    import cupy

    (path / "k.ptx").write_text(text)
    array = cupy.asarray(x)
    module = cupy.RawModule(path=str(path / "k.ptx"))
    module.get_function("k")((blocks,), (threads,), (array,))
    result: np.ndarray = cupy.asnumpy(array)
    return result


WRITTEN = pytest.mark.parametrize("one_instruction", [False, True], ids=["several", "one"])


@WRITTEN
@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("seed", range(15))
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


@WRITTEN
@pytest.mark.parametrize("kind", EXCHANGES)
@pytest.mark.parametrize("seed", range(GPU_SEEDS))
def test_the_random_programs_set_what_they_read(
    kind: str, seed: int, one_instruction: bool
) -> None:
    # a register that nothing has written is a pattern on the emulator, and anything on a GPU
    text, _, _ = make_problem(kind, seed, one_instruction)
    flow = ControlFlow(parse_module(text).function("k"))
    assert flow.live_in[0] == 0


@pytest.mark.parametrize("kind", EXCHANGES)
def test_the_random_programs_tell_where_lanes_meet(kind: str) -> None:
    differ = []
    for seed in range(GPU_SEEDS):
        together, apart = (make_problem(kind, seed, apart=apart)[2] for apart in (False, True))
        differ.append((together != apart).any())
    assert sum(differ) >= 3  # of them fail if lanes at different instructions cannot exchange


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
    """Return the first argument of kernel ``continues``, and its result for 6 turns."""
    x = np.random.default_rng(5).integers(1, 4, (40, 64)).astype("i4")
    want = []
    for lane in range(64):
        others = range(lane // 32 * 32, lane // 32 * 32 + 32)
        total = 0
        for turn in range(6):
            votes = ([v for v in x[:, j] if v != 3][turn] == 2 for j in others)
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

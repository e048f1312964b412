"""``cp.async``: what arrives when, and every misuse with its line."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.ptx import compile_module, kernel_text, line_of
from support.search import Search, examples

from cupyattn import emulator
from cupyattn.emulator import (
    Argument,
    Checks,
    KernelFault,
    MisalignedAccessError,
    OutOfBoundsError,
    SharedMemoryRaceError,
    UninitializedReadError,
    UnsupportedPTXError,
)
from cupyattn.runtime.arch import arch_of

FILE = "faults.cu"
X = np.arange(2048, dtype=np.uint32).reshape(512, 4) + 1000
ON_ITS_WAY = "while a copy to it is on its way, which {} has started and not waited for"


def run(kernel: str, *args: Any, y: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """Run a kernel of 64 threads on X; return what it stores, 16 bytes a thread unless given."""
    y = np.zeros((64, 4), np.uint32) if y is None else y
    module = compile_module(FILE, arch_of(80))
    source = options.pop("source", X)
    emulator.launch(module, kernel, 1, 64, [source, y, *map(np.int32, args)], **options)
    return y


def fault(kind: type[KernelFault], marker: str, kernel: str, *args: Any, **options: Any) -> str:
    """Run a kernel that must fail with `kind` at the line with `marker`; return the message."""
    with pytest.raises(kind) as caught:
        run(kernel, *args, **options)
    assert type(caught.value) is kind
    assert caught.value.line == line_of(FILE, f"// {marker}"), caught.value
    return str(caught.value)


@pytest.mark.nvrtc
class TestFaults:
    @pytest.mark.parametrize("other", [0, 1, 32])
    def test_read_before_the_wait(self, other: int) -> None:
        want = X[np.arange(64) ^ other]
        assert (run("copy_without_wait", other, 1, 1, 0) == want).all()
        for barrier in (0, 1):
            text = fault(SharedMemoryRaceError, "EARLY", "copy_without_wait", other, 0, barrier, 0)
            lane = (
                f"lane {other % 32} of warp {other // 32} of the block"
                if other
                else "the thread itself"
            )
            assert f"reads byte {16 * other} (in `s`" in text and ON_ITS_WAY.format(lane) in text
            assert f"at {FILE}:{line_of(FILE, '// COPY')}: COPY(" in text

    def test_own_copies_need_no_barrier_and_those_of_others_do(self) -> None:
        assert (run("copy_without_wait", 0, 1, 0, 0) == X[:64]).all()
        for other, relation in ((32, "no barrier"), (1, "no bar.warp.sync")):
            text = fault(SharedMemoryRaceError, "EARLY", "copy_without_wait", other, 1, 0, 0)
            assert "written by lane" in text and f"and {relation}" in text

    def test_a_barrier_before_the_wait_orders_nothing(self) -> None:
        assert (run("copy_without_wait", 0, 0, 1, 1) == X[:64]).all()
        fault(SharedMemoryRaceError, "EARLY", "copy_without_wait", 32, 0, 1, 1)

    def test_without_checks_a_copy_arrives_at_its_wait(self) -> None:
        none = Checks.none()
        assert (run("copy_without_wait", 32, 0, 1, 0, checks=none) == 7).all()
        assert (run("copy_without_wait", 32, 1, 1, 0, checks=none) == X[np.arange(64) ^ 32]).all()

    @pytest.mark.parametrize("kernel", ["copy_over_read", "copy_over_store"])
    def test_copy_over_what_others_use(self, kernel: str) -> None:
        run(kernel, 1)
        marker, how = (
            ("COPY_WAR", "read") if kernel == "copy_over_read" else ("COPY_WAW", "written")
        )
        assert f"{how} by lane 0 of warp 1" in fault(SharedMemoryRaceError, marker, kernel, 0)

    @pytest.mark.parametrize("atomic", [0, 1])
    def test_store_to_bytes_on_their_way(self, atomic: int) -> None:
        out = run("store_over_copy", 1, atomic)
        assert (out[:, 0] == (X[:64, 0] + 1 if atomic else 5)).all() and (
            out[:, 1:] == X[:64, 1:]
        ).all()
        marker = ("STORE", "ATOMIC")[atomic] + "_OVER_COPY"
        text = fault(SharedMemoryRaceError, marker, "store_over_copy", 0, atomic)
        assert "the thread writes byte 0" in text and ON_ITS_WAY.format("the thread itself") in text

    def test_two_copies_to_one_place(self) -> None:
        assert (run("two_copies", 1, 64) == X[64:128]).all()
        assert (run("two_copies", 0, 0) == X[:64]).all()  # equal bytes, in any order
        text = fault(SharedMemoryRaceError, "TWO_COPIES", "two_copies", 0, 64)
        assert "the thread copies to byte 0" in text
        assert (run("copies_to_one_place", 0) == X[np.arange(64) // 2]).all()
        text = fault(SharedMemoryRaceError, "ONE_PLACE", "copies_to_one_place", 64)
        assert "different values to one address" in text

    @pytest.mark.parametrize("twice", [0, 1])
    def test_an_equal_copy_stays_on_its_way(self, twice: int) -> None:
        """Two threads copy the same bytes to one place, by one instruction or by two."""
        y = np.zeros(64, np.uint32)
        run("copy_of_two", 1, twice, y=y)
        assert (y[::2] == X[:32, 0]).all()
        text = fault(SharedMemoryRaceError, "OF_TWO", "copy_of_two", 0, twice, y=y)
        assert ON_ITS_WAY.format("lane 1 of warp 0 of the block") in text

    def test_rows_of_ldmatrix_on_their_way(self) -> None:
        out = run("matrix_of_copies", 1, y=np.zeros(64, np.uint32))
        want = np.concatenate([X[:8].ravel(), X[32:40].ravel()])
        assert (out == want).all()
        fault(SharedMemoryRaceError, "ROWS", "matrix_of_copies", 0, y=out)

    def test_bounds(self) -> None:
        def bounds(kind: type[KernelFault], *args: int, rows: int = 64) -> str:
            source = Argument(X[:rows], "x", const=True)
            return fault(
                kind, "COPY_BOUNDS", "copy_bounds", *args, source=source, shared_bytes=1024
            )

        source = Argument(X[:64], "x")
        assert (run("copy_bounds", 0, 16, 0, source=source, shared_bytes=1024) == X[:64]).all()
        text = bounds(OutOfBoundsError, 0, 16, 0, rows=63)
        assert "16-byte load from global memory" in text and "thread (63, 0, 0)" in text
        assert "0 bytes past the end of `x`" in text
        # only the bytes that are read must be there
        short = X.ravel()[: 4 * 63 + 2]
        out = run("copy_bounds", 0, 8, 0, source=short, shared_bytes=1024)
        assert (out[:, :2] == X[:64, :2]).all() and not out[:, 2:].any()
        text = fault(OutOfBoundsError, "COPY_BOUNDS", "copy_bounds", 0, 12, 0, source=short,
                     shared_bytes=1024)  # fmt: skip
        assert "4-byte load" in text
        assert not run("copy_bounds", 1 << 20, 0, 0, source=short, shared_bytes=1024).any()
        text = bounds(OutOfBoundsError, 0, 16, 16)
        assert "16-byte store to shared memory (1024 bytes) at offset 1024" in text
        assert "8 bytes off a multiple of 16" in bounds(MisalignedAccessError, 8, 16, 0)
        assert "misaligned 16-byte access to global" in bounds(MisalignedAccessError, 8, 4, 0)
        assert "16-byte access to shared memory" in bounds(MisalignedAccessError, 0, 16, 4)
        text = bounds(KernelFault, 0, 17, 0)
        assert "cp.async of 16 bytes with a source of 17; allowed: 0 to 16" in text

    @pytest.mark.parametrize("bytes_", range(17))
    def test_the_rest_is_zeros(self, bytes_: int) -> None:
        out = run("copy_bounds", 0, bytes_, 0, shared_bytes=1024).view(np.uint8)
        want = X[:64].copy().view(np.uint8)
        want[:, bytes_:] = 0
        assert (out == want).all()

    def test_threads_may_end_before_their_copies(self) -> None:
        assert run("copy_and_leave", y=np.zeros(64, np.uint32)).all()

    @given(st.integers(0, 7), st.integers(0, 2), st.booleans(), st.booleans())
    @example(3, 1, True, True)
    @examples(25, deep=100)
    def test_pipeline(self, tiles: int, most: int, barrier: bool, late: bool) -> None:
        """Right only with a wait for enough groups, then a barrier, then the next copy."""
        args = tiles, most, barrier, late
        arrived = most <= 1 if late else most <= 2
        if not tiles or (arrived and barrier and (late or tiles <= 3)):
            want = X[: 64 * tiles].reshape(-1, 64, 4)[:, np.arange(64) ^ 32].sum(0)
            assert (run("copy_pipeline", *args) == want).all()
        elif not barrier or not arrived:
            fault(SharedMemoryRaceError, "TILE", "copy_pipeline", *args)
        else:
            text = fault(SharedMemoryRaceError, "BEFORE_BARRIER", "copy_pipeline", *args)
            assert "read by lane" in text


COPY = "cp.async.ca.shared.global"


class Program:
    """Random copies, commits, waits, loads and stores of threads on 64 bytes of their own each.

    It is executed twice: by the emulator, and here, thread by thread.
    """

    def __init__(self, seed: int) -> None:
        self.random = choose = random.Random(seed)
        self.threads = choose.choice((32, 48, 64))
        self.blocks = choose.choice((1, 3))
        self.steps = [self.step() for _ in range(choose.randrange(3, 30))]
        self.steps += [("read", slot, 0, 0, None, 0) for slot in range(4)]
        if choose.random() < 0.6:
            self._add_waits()
        self.reads = sum(step[0] == "read" for step in self.steps)

    def step(self) -> tuple[str, int, int, int, int | None, int]:
        """Return what to do: slot or groups, offset in bytes, size, count, and who does it."""
        choose = self.random
        who = choose.choice((0, 0, 0, 1, 2, 3))  # all; or of each thread by a bit of its number
        what = choose.choice(("copy",) * 5 + ("commit",) * 3 + ("wait",) * 3 + ("read", "store"))
        if what == "copy":
            size = choose.choice((4, 8, 16))
            count = choose.choice((None, 0, size, choose.randrange(size + 1)))
            return what, choose.randrange(4), size * choose.randrange(16 // size), size, count, who
        if what == "wait":
            return what, choose.randrange(-1, 3), 0, 0, None, who
        return what, choose.randrange(4), 0, 0, None, who

    def _add_waits(self) -> None:
        """Wait before a slot is used to which a copy may be on its way, most times."""
        steps, used = list(self.steps), set[int]()
        self.steps = []
        for step in steps:
            if step[0] in ("copy", "read", "store"):
                if step[1] in used and self.random.random() < 0.97:
                    self.steps.append(("wait", -1, 0, 0, None, 0))
                    used.clear()
                if step[0] == "copy":
                    used.add(step[1])
            self.steps.append(step)

    def text(self) -> str:
        """Return the kernel; line i + 1 is step i."""
        body = [
            f".shared .align 16 .b8 s[{64 * self.threads}];",
            "ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; mov.u32 %r1, %tid.x;",
            "mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1;",
            f"mul.wide.u32 %rd3, %r4, {16 * len(self.steps)}; add.s64 %rd4, %rd1, %rd3;",
            f"mul.wide.u32 %rd5, %r4, {16 * self.reads}; add.s64 %rd6, %rd2, %rd5;",
            "shl.b32 %r5, %r1, 6; mov.u32 %r6, s; add.u32 %r7, %r5, %r6; mov.u32 %r8, 9;",
        ]
        body += [f"st.shared.u32 [%r7+{at}], %r8;" for at in range(0, 64, 4)]
        for bit in (1, 2, 3):
            body += [f"shr.u32 %r9, %r4, {2 * bit - 2}; and.b32 %r9, %r9, 1;"]
            body += [f"setp.ne.u32 %p{bit}, %r9, 0;"]
        reads = 0
        for i, (what, slot, offset, size, count, who) in enumerate(self.steps):
            guard, after = f"@%p{who} " if who else "", ""
            if who == 3:  # a branch instead
                guard, after = f"@!%p3 bra L{i};\n", f"\nL{i}:"
            place = f"[%r7+{16 * slot + offset}]"
            if what == "copy":
                counted = "" if count is None else f", {count}"
                text = f"{COPY} {place}, [%rd4+{16 * i}], {size}{counted};"
            elif what == "commit":
                text = "cp.async.commit_group;"
            elif what == "wait":
                text = f"cp.async.wait_{'all' if slot < 0 else f'group {slot}'};"
            elif what == "store":
                text = f"st.shared.v4.u32 {place}, {{%r1, %r1, %r1, {i}}};"
            else:
                text = f"ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, {place};"
                if who != 3:
                    text += f"\n{guard}"
                text += f"st.global.v4.u32 [%rd6+{16 * reads}], {{%r10, %r11, %r12, %r13}};"
                reads += 1
            body += [f".loc 1 {i + 1} 1", f"{guard}{text}{after}"]
        return kernel_text("\n".join(body), ".param .u64 x, .param .u64 y", target=80)

    def by_itself(self, x: np.ndarray) -> tuple[np.ndarray, int, bool]:
        """Return the loads, the first line at fault (0: none), and whether copies overlap."""
        lanes = self.threads * self.blocks
        y = np.zeros((lanes, self.reads, 16), np.uint8)
        faulty, overlap = len(self.steps) + 1, False
        for lane in range(lanes):
            memory = np.full(16, 9, np.uint32).view(np.uint8)
            coming: list[tuple[int, int, np.ndarray]] = []  # group, place, bytes
            committed = reads = 0
            for i, (what, slot, offset, size, count, who) in enumerate(self.steps):
                reads += what == "read"
                if who and not lane >> (2 * who - 2) & 1:
                    continue
                if what == "commit":
                    committed += 1
                elif what == "wait":
                    still = []
                    for group, at, found in coming:
                        if slot >= 0 and group >= committed - slot:
                            still.append((group, at, found))
                        else:
                            memory[at : at + len(found)] = found
                    coming = still
                else:
                    at = 16 * slot + offset
                    mine = x[lane, i, : size or 16].copy()
                    if what == "copy":
                        mine[size if count is None else count :] = 0
                    for _, there, found in coming:
                        low, high = max(at, there), min(at + len(mine), there + len(found))
                        if low < high:
                            same = what == "copy" and np.array_equal(
                                mine[low - at : high - at], found[low - there : high - there]
                            )
                            overlap |= what == "copy" and not same
                            faulty = faulty if same else min(faulty, i + 1)
                    if what == "copy":
                        coming.append((committed, at, mine))
                    elif what == "store":
                        thread = lane % self.threads
                        memory[at : at + 16] = np.array([thread] * 3 + [i], np.uint32).view(
                            np.uint8
                        )
                    else:
                        y[lane, reads - 1] = memory[at : at + 16]
        return y.view(np.uint32), faulty if faulty <= len(self.steps) else 0, overlap


def check(seed: int) -> tuple[int, bool]:
    """Compare the runs of a program without checks, and see that the checks find its fault."""
    program = Program(seed)
    lanes = program.threads * program.blocks
    shape = (lanes, len(program.steps), 4)
    x = np.random.default_rng(seed).integers(1, 1 << 32, shape, np.uint32)
    want, line, overlap = program.by_itself(x.view(np.uint8))
    text = program.text()

    def result(checks: Checks) -> np.ndarray:
        y = np.zeros((lanes, program.reads, 4), np.uint32)
        emulator.run(text, "k", program.blocks, program.threads, [x, y], checks=checks)
        return y

    if not overlap:
        for checks in (Checks.none(), Checks.fast(), Checks(races=False)):
            np.testing.assert_array_equal(result(checks), want)
    if not line:
        np.testing.assert_array_equal(result(Checks()), want)
        return line, overlap
    with pytest.raises(SharedMemoryRaceError, match="while a copy to it is on its way") as caught:
        result(Checks())
    assert caught.value.line == line, caught.value
    return line, overlap


@pytest.mark.parametrize("part", range(8))
def test_random_programs(part: int) -> None:
    count = 200 if Search.deep else 4
    found = [check(1000 * part + seed) for seed in range(count)]
    if Search.deep:
        assert 50 < sum(line > 0 for line, _ in found) < 150
        assert sum(overlap for _, overlap in found) < 100


class Crossing:
    """Random steps that all 64 threads take, each on the slot of thread number `tid ^ flip`.

    So two steps of equal flips are of one thread, and with a flip of 1 between them of one warp.
    """

    FLIPS = (0, 0, 1, 32)

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        kinds = ("copy",) * 3 + ("read",) * 2 + ("store", "commit", "barrier", "barrier", "warp")
        self.steps: list[tuple[str, int]] = [("store", 0), ("barrier", 0)]
        order = choose.choice((0.3, 0.6, 0.9))  # else most programs are at fault at once
        for _ in range(choose.randrange(4, 16)):
            kind = choose.choice(kinds)
            self.steps.append((kind, choose.choice(self.FLIPS)))
            if choose.random() < order:
                self.steps += [("wait", choose.choice((-1, -1, 0, 1))), ("barrier", 0)]

    def text(self) -> str:
        """Return the kernel; line i + 1 is step i."""
        body = [
            ".shared .align 16 .b8 s[1024]; mov.u32 %r1, %tid.x; mov.u32 %r6, s;",
            "ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; mul.wide.u32 %rd3, %r1, 16;",
            "add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;",
        ]
        simple = {"commit": "cp.async.commit_group;", "barrier": "bar.sync 0;",
                  "warp": "bar.warp.sync -1;"}  # fmt: skip
        for i, (kind, flip) in enumerate(self.steps):
            body.append(f".loc 1 {i + 1} 1")
            if kind == "wait":
                body.append(f"cp.async.wait_{'all' if flip < 0 else f'group {flip}'};")
            if kind in simple:
                body.append(simple[kind])
            if kind not in ("copy", "read", "store"):
                continue
            body.append(f"xor.b32 %r2, %r1, {flip}; shl.b32 %r2, %r2, 4; add.u32 %r2, %r2, %r6;")
            if kind == "copy":
                body.append(f"cp.async.cg.shared.global [%r2], [%rd1+{1024 * i}], 16;")
            elif kind == "store":
                body.append(f"mov.u32 %r3, {i}; st.shared.v4.u32 [%r2], {{%r1, %r1, %r1, %r3}};")
            else:
                body.append("ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2];")
                body.append(f"st.global.v4.u32 [%rd2+{1024 * i}], {{%r10, %r11, %r12, %r13}};")
        return kernel_text("\n".join(body), ".param .u64 x, .param .u64 y", target=80)

    def arrivals(self) -> list[int]:
        """Return the step at which each has happened: itself, of a copy its wait or one too far."""
        found, committed, pending = list(range(len(self.steps))), 0, dict[int, int]()
        for i, (kind, number) in enumerate(self.steps):
            committed += kind == "commit"
            if kind == "copy":
                pending[i], found[i] = committed, len(self.steps)
            if kind == "wait":
                for step, group in list(pending.items()):
                    if number < 0 or group < committed - number:
                        found[step] = i
                        del pending[step]
        return found

    def fault(self) -> tuple[int, bool]:
        """Return the first line that races with an earlier one, and whether with a copy on its way.

        No line: 0.
        """
        arrived, steps = self.arrivals(), self.steps
        blocks = np.cumsum([kind == "barrier" for kind, _ in steps])
        warps = np.cumsum([kind in ("barrier", "warp") for kind, _ in steps])
        for j, (kind, flip) in enumerate(steps):
            if kind not in ("copy", "read", "store"):
                continue
            races = []
            for i, (earlier, other) in enumerate(steps[:j]):
                if earlier not in ("copy", "read", "store") or kind == earlier == "read":
                    continue
                end = arrived[i]
                epochs = blocks if (flip ^ other) & 32 else warps
                ordered = end < j and (flip == other or epochs[end] < epochs[j])
                if not ordered:
                    races.append(end > j)
            if races:
                return j + 1, any(races)
        return 0, False

    def loads(self, x: np.ndarray) -> np.ndarray:
        """Return what the steps load, where no line is at fault."""
        thread = np.arange(64, dtype=np.uint32)
        memory, y = np.zeros((64, 4), np.uint32), np.zeros_like(x)
        arrived = self.arrivals()
        for i, (kind, flip) in enumerate(self.steps):
            for step in (k for k in range(i) if arrived[k] == i and self.steps[k][0] == "copy"):
                memory[thread ^ self.steps[step][1]] = x[step]
            if kind == "store":
                memory[thread ^ flip] = np.stack([thread] * 3 + [np.full_like(thread, i)], 1)
            elif kind == "read":
                y[i] = memory[thread ^ flip]
        return y


def check_crossing(seed: int) -> int:
    """See that the checks find just the races of a program; return the line."""
    program = Crossing(seed)
    x = np.random.default_rng(seed).integers(1, 1 << 32, (len(program.steps), 64, 4), np.uint32)
    y = np.zeros_like(x)
    line, on_its_way = program.fault()
    if not line:
        emulator.run(program.text(), "k", 1, 64, [x, y])
        np.testing.assert_array_equal(y, program.loads(x))
        return line
    with pytest.raises(SharedMemoryRaceError) as caught:
        emulator.run(program.text(), "k", 1, 64, [x, y])
    assert caught.value.line == line, (program.steps, caught.value)
    assert ("while a copy to it is on its way" in str(caught.value)) == on_its_way
    return line


@pytest.mark.parametrize("part", range(4))
def test_random_accesses_to_copies_of_others(part: int) -> None:
    count = 300 if Search.deep else 15
    lines = [check_crossing(1000 * part + seed) for seed in range(count)]
    if Search.deep:
        assert 0.1 * count < sum(line == 0 for line in lines) < 0.9 * count


OPERANDS = "[%r1], [%rd1]"


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (f"cp.async.cg.shared.global {OPERANDS}, 8", "ca copies 4, 8 or 16 bytes, .cg 16"),
        (f"{COPY} {OPERANDS}, 12", "ca copies 4, 8 or 16 bytes, .cg 16"),
        (f"cp.async.ca.global.shared {OPERANDS}, 16", "not supported"),
        (f"cp.async.ca.shared::cluster.global {OPERANDS}, 16", "not supported"),
        ("cp.async.wait_group %r1", "not supported"),
        ("cp.async.mbarrier.arrive.shared.b64 [%r1]", "not supported"),
        ("cp.async.bulk.commit_group", "needs sm_90, and the PTX is for sm_80"),
    ],
)
def test_forms_that_are_refused(instruction: str, message: str) -> None:
    with pytest.raises(UnsupportedPTXError, match=message):
        emulator.load(kernel_text(f"{instruction};", target=80)).program("k")


@pytest.mark.parametrize(
    "form",
    [
        "cp.async.ca.shared::cta.global.L2::64B [%r1], [%rd1], 16;",
        "cp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16, 16;",
        "cp.async.cg.shared.global.L2::256B [%r1], [%rd1], 16, %r8;",
        "cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd1], 16, %rd9;",
        "cp.async.ca.shared.global.L2::cache_hint.L2::128B [%r1], [%rd1], 16, %r8, %rd9;",
        "cp.async.ca.shared.global [%r1], [%rd1], 16, %p2;",
    ],
)
def test_forms(form: str) -> None:
    body = (
        ".shared .align 16 .b8 s[16]; ld.param.u64 %rd1, [p0]; mov.u32 %r1, s; mov.u32 %r8, 16;"
        f"setp.eq.u32 %p2, %r8, 0; mov.u64 %rd9, 0; {form} cp.async.wait_all;"
        "ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r1]; add.u32 %r4, %r4, 1;"
        "st.global.v4.u32 [%rd1], {%r4, %r5, %r6, %r7};"
    )
    x = np.array([1, 2, 3, 4], np.uint32)
    emulator.run(kernel_text(body, target=80), "k", 1, 1, [x])
    assert x.tolist() == [2, 2, 3, 4]


def test_a_source_may_be_ignored() -> None:
    body = (
        ".shared .align 16 .b8 s[512]; mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p0];"
        "mul.wide.u32 %rd2, %r1, 16; add.s64 %rd3, %rd1, %rd2; shl.b32 %r2, %r1, 4;"
        "mov.u32 %r3, s; add.u32 %r3, %r3, %r2; setp.ge.u32 %p1, %r1, 5;"
        "cp.async.ca.shared.global [%r3], [%rd3], 16, %p1; cp.async.wait_all;"
        "ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r3]; add.u32 %r4, %r4, %r5;"
        "@!%p1 st.global.u32 [%rd3], %r4; setp.ne.u32 %p2, %r4, 0; and.pred %p2, %p1, %p2;"
        "@%p2 trap;"
    )
    x = X[:5].copy()  # the other 27 threads have no source
    emulator.run(kernel_text(body, target=80), "k", 1, 32, [x])
    assert (x[:, 0] == X[:5, 0] + X[:5, 1]).all()


def test_unwritten_shared_memory_is_written_once_the_copy_arrives() -> None:
    def read(wait: str, checks: Checks) -> None:
        body = (
            ".shared .align 16 .b8 s[16]; ld.param.u64 %rd1, [p0]; mov.u32 %r1, s;"
            f"{COPY} [%r1], [%rd1], 8; {wait} ld.shared.u32 %r2, [%r1+4];"
        )
        emulator.run(kernel_text(body, target=80), "k", 1, 1, [X.copy()], checks=checks)

    for checks in (Checks(), Checks(races=False)):
        read("cp.async.wait_all;", checks)
    with pytest.raises(UninitializedReadError, match="byte 4"):
        read("", Checks(races=False))


def test_report_counts_both_spaces() -> None:
    report = emulator.Report()
    run("copy_without_wait", 32, 1, 1, 0, report=report)
    copies = [a for a in report.accesses if a.instruction.root == "cp"]
    assert [(a.space, a.write, a.bytes) for a in copies] == [
        ("global", False, 1024),
        ("shared", True, 1024),
    ]
    assert all(a.requests == 2 for a in copies)
    assert copies[0].efficiency == copies[1].ways == 1
    assert "cp.async.cg.shared.global" in str(report)

"""Each fault of a kernel is found, with its line: memory, barriers, races, traps, endless loops."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.ptx import compile_module, kernel_text, line_of

from cupyattn import emulator
from cupyattn.emulator import (
    Argument,
    BarrierError,
    Checks,
    ConstWriteError,
    KernelFault,
    KernelTrap,
    MisalignedAccessError,
    OutOfBoundsError,
    SharedMemoryRaceError,
    UninitializedReadError,
    WarpSyncError,
)
from cupyattn.emulator.machine import races
from cupyattn.emulator.machine.lanes import Lanes
from cupyattn.emulator.machine.memory import SlicedBuffer
from cupyattn.emulator.machine.races import SharedMemoryTracker

pytestmark = pytest.mark.nvrtc
FILE = "faults.cu"
BITS = 0xFFFFFFFF


def run(kernel: str, *args: Any, block: int = 64, grid: int = 1, **options: Any) -> None:
    emulator.launch(compile_module(FILE), kernel, grid, block, args, **options)


def fault(
    kind: type[KernelFault], marker: str, kernel: str, *args: Any, **options: Any
) -> KernelFault:
    """Run a kernel that must fail with `kind` at the line with `marker`."""
    with pytest.raises(kind) as caught:
        run(kernel, *args, **options)
    error = caught.value
    assert type(error) is kind
    assert error.line == line_of(FILE, f"// {marker}"), error
    assert error.block is not None and error.thread is not None
    assert f"{FILE}:{error.line}" in str(error)
    return error


def zeros(count: int = 64, dtype: str = "f4") -> np.ndarray:
    return np.zeros(count, dtype)


class TestBounds:
    def test_load(self) -> None:
        x, y = zeros(128), zeros()
        run("load_shifted", x, y, np.int32(0), grid=2)
        error = fault(OutOfBoundsError, "LOAD", "load_shifted", Argument(x, "x", const=True), y,
                      np.int32(3), grid=2)  # fmt: skip
        assert error.block == (1, 0, 0) and error.thread == (61, 0, 0)
        assert "`x` (float32 (128,), 512 bytes)" in str(error)
        assert "0 bytes past the end" in str(error) and "2 more threads" in str(error)
        error = fault(OutOfBoundsError, "LOAD", "load_shifted", x, y, np.int32(-5))
        assert "20 bytes before the start of `argument 0`" in str(error)

    def test_an_array_without_elements_has_its_name(self) -> None:
        error = fault(OutOfBoundsError, "LOAD", "load_shifted", Argument(zeros(0), "x"), zeros(),
                      np.int32(2))  # fmt: skip
        assert "8 bytes past the end of `x` (float32 (0,), 0 bytes)" in str(error)

    def test_far_overrun_does_not_land_in_another_argument(self) -> None:
        pool = zeros(4096)
        fault(
            OutOfBoundsError, "STORE", "store_shifted", pool[:64], pool[1024:2048], np.int32(-1024)
        )

    def test_store_leaves_memory_alone(self) -> None:
        y = zeros(80)
        error = fault(OutOfBoundsError, "STORE", "store_shifted", zeros(), Argument(y[:64], "y"),
                      np.int32(16))  # fmt: skip
        assert "out-of-bounds 4-byte store" in str(error)
        assert not y.any()

    def test_atomic(self) -> None:
        y = zeros(80)
        run("add_shifted", Argument(y[:64], "y"), np.int32(0))
        error = fault(OutOfBoundsError, "ADD", "add_shifted", Argument(y[:64], "y"), np.int32(16))
        assert error.thread == (48, 0, 0) and not y[64:].any()
        fault(ConstWriteError, "ADD", "add_shifted", Argument(y, "y", const=True), np.int32(0))

    def test_null_pointer(self) -> None:
        error = fault(OutOfBoundsError, "LOAD", "load_shifted", None, zeros(), np.int32(0))
        assert "a null pointer" in str(error)

    def test_between_the_elements_of_a_view(self) -> None:
        pool = np.zeros((64, 2), "f4")
        error = fault(OutOfBoundsError, "STORE", "store_shifted", zeros(),
                      Argument(pool[:, 0], "y"), np.int32(0))  # fmt: skip
        assert "between the elements of the strided view" in str(error)
        run("store_shifted", zeros() + 1, Argument(pool[:, 0], "y", exact=False), np.int32(0))
        assert pool.ravel()[:64].all() and not pool.ravel()[64:].any()

    def test_shared(self) -> None:
        run("shared_overrun", zeros(), np.int32(0), shared_bytes=256)
        error = fault(OutOfBoundsError, "OVERRUN", "shared_overrun", zeros(), np.int32(2),
                      shared_bytes=256)  # fmt: skip
        assert error.thread == (62, 0, 0)
        assert "shared memory (256 bytes) at offset 256: 0 bytes past its end" in str(error)
        error = fault(OutOfBoundsError, "OVERRUN", "shared_overrun", zeros(), np.int32(-1),
                      shared_bytes=256)  # fmt: skip
        assert "4 bytes before its start" in str(error)

    def test_local(self) -> None:
        run("local_overrun", zeros(), np.int32(0), block=8)
        fault(OutOfBoundsError, "LOCAL", "local_overrun", zeros(), np.int32(1), block=8)

    def test_without_the_check_arguments_are_still_the_limit(self) -> None:
        with pytest.raises(OutOfBoundsError):
            run("store_shifted", zeros(), zeros(), np.int32(16), checks=Checks.none())


def test_parameters_end() -> None:
    text = kernel_text(".loc 1 5 1\nld.param.u64 %rd1, [p0+8];") + '.file 1 "a/b.cu"'
    with pytest.raises(OutOfBoundsError, match=r"parameter memory \(8 bytes\).*b\.cu:5"):
        emulator.run(text, "k", 1, 1, [None])


def test_misaligned() -> None:
    x, y = zeros(512), zeros(256)
    run("load_vector", x, y, np.int32(4))
    error = fault(MisalignedAccessError, "VECTOR", "load_vector", x, y, np.int32(1))
    assert "misaligned 16-byte access to global memory" in str(error)
    assert "4 bytes off" in str(error) or "bytes off a multiple of 16" in str(error)


def test_const_write() -> None:
    y = zeros()
    error = fault(ConstWriteError, "STORE", "store_shifted", zeros(),
                  Argument(y, "weights", const=True), np.int32(0))  # fmt: skip
    assert "`weights`" in str(error) and not y.any()
    y.setflags(write=False)
    fault(ConstWriteError, "STORE", "store_shifted", zeros(), y, np.int32(0))
    y.setflags(write=True)
    run("store_shifted", zeros() + 1, Argument(y, const=True), np.int32(0), checks=Checks.none())
    assert y.all()


def test_unwritten_shared_memory() -> None:
    run("unwritten", zeros(), np.int32(64))
    error = fault(UninitializedReadError, "UNWRITTEN", "unwritten", zeros(), np.int32(60))
    assert error.thread == (60, 0, 0) and "byte 240" in str(error)
    run("unwritten", zeros(), np.int32(60), checks=Checks.fast())


def test_unwritten_registers_spoil_results() -> None:
    y, z = zeros(), zeros(dtype="i4")
    run("sums_of_unwritten", zeros(), zeros(dtype="i4"), y, z, np.int32(3))
    assert np.isnan(y).all() and (z == 0x7FFF7FFF).all()


def test_trap() -> None:
    run("fails", zeros(), np.int32(0))
    error = fault(KernelTrap, "TRAP", "fails", zeros(), np.int32(1))
    assert error.thread == (5, 0, 0)


def test_endless_loop() -> None:
    error = fault(KernelFault, "ENDLESS", "endless", zeros(), checks=Checks(max_steps=1000))
    assert "1000 basic blocks ran without an end: an endless loop" in str(error)
    assert (error.block, error.thread) == ((0, 0, 0), (0, 0, 0))
    run("endless", zeros() + 1)


def test_endless_loop_of_some_threads() -> None:
    """The first of those that are in it."""
    error = fault(KernelFault, "SPIN", "spins_from", zeros(), np.int32(40), grid=3,
                  checks=Checks(max_steps=1000))  # fmt: skip
    assert (error.block, error.thread) == ((0, 0, 0), (40, 0, 0))
    run("spins_from", zeros(), np.int32(64), grid=3)


def test_messages_quote_the_source() -> None:
    error = fault(OutOfBoundsError, "LOAD", "load_shifted", zeros(), zeros(), np.int32(3))
    assert "(int)(blockIdx.x * blockDim.x + threadIdx.x) + shift]" in str(error)
    assert "[ld.global" in str(error)
    text = kernel_text(".loc 1 2 1\nld.global.u32 %r1, [0];", "") + '.file 1 "a/b.cu"'
    module = emulator.load(text, {"a/b.cu": "first\n  second line\n"})
    with pytest.raises(OutOfBoundsError, match=r"b\.cu:2: second line \[ld\.global"):
        emulator.launch(module, "k", 1, 1, [])


class TestBarriers:
    def test_divergent(self) -> None:
        run("divergent_barrier", zeros(), np.int32(64))
        run("divergent_barrier", zeros(), np.int32(0))
        error = fault(BarrierError, "SECOND_BARRIER", "divergent_barrier", zeros(), np.int32(32))
        assert f"faults.cu:{line_of(FILE, '// FIRST_BARRIER')}" in str(error)
        y = zeros()
        run("divergent_barrier", y, np.int32(32), checks=Checks.none())
        np.testing.assert_array_equal(y, np.where(np.arange(64) < 32, 3, 7))

    def test_missed(self) -> None:
        run("missed_barrier", zeros(), np.int32(64))
        error = fault(BarrierError, "MISSED", "missed_barrier", zeros(), np.int32(40))
        assert error.thread == (40, 0, 0) and "ended (returned) without reaching it" in str(error)
        y = zeros()
        run("missed_barrier", y, np.int32(40), checks=Checks.none())
        assert y[:40].all()

    def test_in_branch(self) -> None:
        run("barrier_in_branch", zeros(), np.int32(64))
        run("barrier_in_branch", zeros(), np.int32(0))
        fault(BarrierError, "BRANCH_BARRIER", "barrier_in_branch", zeros(), np.int32(32))

    def test_deadlock_is_always_an_error(self) -> None:
        run("barrier_deadlock", zeros(), np.int32(64))
        for checks in (Checks(), Checks.none()):
            error = fault(BarrierError, "DEADLOCK", "barrier_deadlock", zeros(), np.int32(32),
                          checks=checks)  # fmt: skip
            assert "deadlock" in str(error)

    def test_operands(self) -> None:
        run("barrier_operands", zeros(), np.int32(15), np.int32(64))
        for operands, message in (
            ((16, 64), "barrier 16; a block has the barriers 0 to 15"),
            ((3, 48), "a barrier of 48 threads; allowed: a positive multiple of 32"),
            ((3, 0), "a barrier of 0 threads"),
        ):
            error = fault(BarrierError, "OPERANDS", "barrier_operands", zeros(),
                          *map(np.int32, operands), checks=Checks.none())  # fmt: skip
            assert message in str(error)

    def test_arrivals_that_nobody_completes(self) -> None:
        run("arrives_in_vain", zeros(), np.int32(3), np.int32(1))
        for grid in (1, 2):
            error = fault(BarrierError, "ARRIVAL", "arrives_in_vain", zeros(), np.int32(3),
                          np.int32(0), grid=grid)  # fmt: skip
            assert error.thread == (0, 0, 0)
            assert "barrier 3 is never completed: 32 threads arrived at it" in str(error)
            assert "it needs 64" in str(error)
        y = zeros()
        run("arrives_in_vain", y, np.int32(3), np.int32(0), checks=Checks(barriers=False))
        assert (y == 3).all()

    def test_arrivals_alone_complete_a_barrier(self) -> None:
        y = zeros()
        run("arrives_alone", y)
        np.testing.assert_array_equal(y, np.arange(64) ^ 32)

    def test_warp_barrier(self) -> None:
        y = zeros(16)
        run("warp_barrier_absent", y, np.uint32(0xFFFF), block=16)
        fault(
            BarrierError,
            "SYNCWARP",
            "warp_barrier_absent",
            zeros(32),
            np.uint32(0xFFFFFFFF),
            block=32,
        )


class TestWarpInstructions:
    def test_shuffle(self) -> None:
        y = zeros(32, "u4")
        run("shuffle_absent", y, np.uint32(0xAAAAAAAA), block=32)
        np.testing.assert_array_equal(y[1::2], 3 * (np.arange(1, 32, 2) ^ 2))
        error = fault(
            WarpSyncError, "SHUFFLE", "shuffle_absent", y, np.uint32(0xFFFFFFFF), block=32
        )
        assert "lanes [0, 2, 4" in str(error)
        run("shuffle_absent", y, np.uint32(0xFFFFFFFF), block=32, checks=Checks.none())

    def test_shuffle_with_threads_that_returned(self) -> None:
        run("shuffle_returned", zeros(32, "u4"), np.int32(32), block=32)
        fault(
            WarpSyncError, "RETURNED", "shuffle_returned", zeros(32, "u4"), np.int32(16), block=32
        )
        fault(
            WarpSyncError, "RETURNED", "shuffle_returned", zeros(48, "u4"), np.int32(48), block=40
        )

    def test_vote(self) -> None:
        y = zeros(32, "u4")
        run("vote_absent", y, np.uint32(0xFF), block=32)
        assert (y[:8] == 0xAA).all()
        fault(WarpSyncError, "VOTE", "vote_absent", y, np.uint32(0x1FF), block=32)

    def test_match(self) -> None:
        y = zeros(32, "u4")
        run("match_absent", y, np.uint32(0xFF), block=32)
        assert (y[:8] == [0x55, 0xAA] * 4).all()
        fault(WarpSyncError, "MATCH", "match_absent", y, np.uint32(0x1FF), block=32)

    def test_mask_names_the_caller(self) -> None:
        y = zeros(32, "u4")
        run("mask_without_caller", y, np.uint32(0xFFFF), block=32)
        error = fault(
            WarpSyncError, "OWN_BIT", "mask_without_caller", y, np.uint32(0xFFDF), block=32
        )
        assert error.thread == (5, 0, 0) and "lane 5 with the mask 0x0000ffdf" in str(error)
        run("barrier_without_caller", y, np.uint32(BITS), block=32)
        error = fault(
            WarpSyncError, "OWN_BARRIER_BIT", "barrier_without_caller", y, np.uint32(0xFFFFFFFE),
            block=32,
        )  # fmt: skip
        assert error.thread == (0, 0, 0) and "does not name that lane itself" in str(error)

    def test_shuffle_from_a_lane_that_the_mask_does_not_name(self) -> None:
        y = zeros(64, "u4")
        run("shuffle_outside_mask", y, np.int32(8))
        np.testing.assert_array_equal(y, np.arange(64) ^ 8)
        error = fault(WarpSyncError, "OUTSIDE_MASK", "shuffle_outside_mask", y, np.int32(16))
        assert error.thread == (0, 0, 0)
        assert "lane 0 reads the value of lane 16, which its mask 0x0000ffff" in str(error)

    def test_masks_are_equal(self) -> None:
        y = zeros(32, "u4")
        run("unequal_masks", y, np.uint32(BITS), block=32)
        assert (y == 0xAAAAAAAA).all()
        error = fault(WarpSyncError, "UNEQUAL", "unequal_masks", y, np.uint32(0xFF), block=32)
        assert error.thread == (0, 0, 0)
        assert "lane 3 passes the mask 0x000000ff" in str(error)

    def test_mma(self) -> None:
        run("divergent_mma", zeros(), np.int32(32))
        error = fault(WarpSyncError, "MMA", "divergent_mma", zeros(), np.int32(48))
        assert "all 32 lanes" in str(error)

    def test_ldmatrix_addresses(self) -> None:
        y = zeros(32, "u4")
        run("ldmatrix_addresses", y, np.int32(0), np.int32(0), block=32)
        np.testing.assert_array_equal(y, np.arange(32))
        fault(MisalignedAccessError, "ADDRESSES", "ldmatrix_addresses", y, np.int32(4), np.int32(0),
              block=32)  # fmt: skip
        error = fault(MisalignedAccessError, "ADDRESSES", "ldmatrix_addresses", y, np.int32(0),
                      np.int32(8), block=32)  # fmt: skip
        assert "does not use" in str(error) and error.thread == (8, 0, 0)
        fault(OutOfBoundsError, "ADDRESSES", "ldmatrix_addresses", y, np.int32(160), np.int32(0),
              block=32)  # fmt: skip
        run("ldmatrix_addresses", y, np.int32(0), np.int32(1 << 20), block=32)


@pytest.mark.parametrize("clocks", ["warps", "lanes"])
@pytest.mark.parametrize(
    ("kernel", "marker", "block"),
    [
        ("race_between_warps", "RAW", 64),
        ("race_in_warp", "WARP_RAW", 32),
        ("race_after_read", "WAR", 64),
        ("race_of_writes", "WAW", 64),
        ("race_of_warp_writes", "WARP_WAW", 64),
        ("race_before_ldmatrix", "LDMATRIX", 32),
        ("race_with_atomic", "ATOMIC", 64),
        ("named_barriers", "NAMED", 128),
        ("race_after_read_of_equal", "WAR_EQUAL", 64),
        ("race_after_other_write", "WAR_LATER", 64),
        ("race_after_many_reads", "WAR_MANY_READS", 64),
        ("race_past_half_a_warp", "HALF_RAW", 64),
        ("rows_of_half_warps", "HALF_LDMATRIX", 32),
    ],
)
def test_races(
    kernel: str, marker: str, block: int, clocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compile_module(FILE).program(kernel)
    if clocks == "lanes":  # slower, and right for every kernel
        monkeypatch.setattr(program, "partial_warp_barriers", True)
    integers = ("race_before_ldmatrix", "race_with_atomic", "rows_of_half_warps")
    dtype = "u4" if kernel in integers else "f4"
    run(kernel, zeros(128, dtype), np.int32(1), block=block, grid=3)
    error = fault(SharedMemoryRaceError, marker, kernel, zeros(128, dtype), np.int32(0),
                  block=block, grid=3)  # fmt: skip
    assert "race" in str(error)
    run(kernel, zeros(128, dtype), np.int32(0), block=block, grid=3, checks=Checks.fast())


def test_race_messages_name_the_other_side() -> None:
    error = fault(SharedMemoryRaceError, "RAW", "race_between_warps", zeros(), np.int32(0))
    pattern = r"reads byte 128 \(in `s`, 256 bytes at 0\), written by lane 0 of warp 1 .*no barrier"
    assert re.search(pattern, str(error))
    error = fault(SharedMemoryRaceError, "WARP_RAW", "race_in_warp", zeros(), np.int32(0), block=32)
    assert "no bar.warp.sync (__syncwarp) lies between" in str(error)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_barriers_of_other_blocks_order_nothing(block: int) -> None:
    run("race_of_one_block", zeros(), np.int32(-1), np.int32(-1), grid=3)
    for read, write, marker in ((block, -1, "ONE_RAW"), (-1, block, "ONE_WAR")):
        error = fault(SharedMemoryRaceError, marker, "race_of_one_block", zeros(), np.int32(read),
                      np.int32(write), grid=3)  # fmt: skip
        assert error.block == (block, 0, 0)


def test_own_data_needs_no_barrier() -> None:
    y = zeros()
    run("own_data", y, np.int32(0))
    np.testing.assert_array_equal(y, np.arange(64) + 1)
    fault(SharedMemoryRaceError, "OWN", "own_data", y, np.int32(1))
    fault(SharedMemoryRaceError, "OWN", "own_data", y, np.int32(32))


@pytest.mark.parametrize("writer", [0, 7, 31])
def test_race_with_many_readers_in_one_warp(writer: int) -> None:
    fault(SharedMemoryRaceError, "WAR_MANY", "race_of_three_readers", zeros(32), np.int32(writer),
          block=32)  # fmt: skip


@pytest.mark.parametrize("writer", [0, 33, 95])
def test_race_with_many_readers(writer: int) -> None:
    fault(SharedMemoryRaceError, "WAR_MANY", "race_of_three_readers", zeros(96), np.int32(writer),
          block=96)  # fmt: skip
    run("race_of_three_readers", zeros(96), np.int32(-1), block=96)


@pytest.mark.parametrize(
    ("kernel", "marker", "right", "wrong"),
    [
        ("race_of_half_a_warp", "HALF_WAR", (0, 5, 15), (16, 31)),
        ("chain_of_half_warps", "CHAIN", (0, 8, 23), (24,)),
    ],
)
def test_a_warp_barrier_orders_the_lanes_that_it_names(
    kernel: str, marker: str, right: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    for lane in right:
        run(kernel, zeros(), np.int32(lane), block=32)
    for lane in wrong:
        error = fault(
            SharedMemoryRaceError, marker, kernel, zeros(), np.int32(lane), block=32, grid=2
        )
        assert error.thread == (lane, 0, 0) and "(__syncwarp) of both lies between" in str(error)


def test_producer_consumer() -> None:
    y = zeros(32)
    run("producer_consumer", y, np.int32(3), np.int32(1))
    np.testing.assert_array_equal(y, 3 + 3 * (np.arange(32) ^ 1))
    run("producer_consumer", y, np.int32(1), np.int32(0))  # one round needs no way back
    fault(
        SharedMemoryRaceError, "PRODUCE", "producer_consumer", zeros(32), np.int32(3), np.int32(0)
    )


BLOCKS, THREADS, WORDS = 3, 64, 64
LANES = np.arange(BLOCKS * THREADS).reshape(BLOCKS, THREADS)


class Model:
    """All accesses by word; what a lane knows of the others, by lane."""

    def __init__(self) -> None:
        self.now = np.ones(LANES.size, int)
        self.knows = np.zeros((LANES.size, LANES.size), int)
        self.accesses: list[tuple[int, int, int, str]] = []

    def meet(self, lanes: np.ndarray) -> None:
        known = self.knows[lanes].max(0)
        known[lanes] = self.now[lanes]
        self.knows[lanes] = known
        self.now[lanes] += 1

    def races(self, kind: str, lanes: np.ndarray, words: np.ndarray) -> bool:
        for lane, word in zip(lanes, words, strict=True):
            for other, when, place, did in self.accesses:
                harmless = kind == did == "read" or kind == did == "atomic"
                apart = other == lane or place != word or other // THREADS != lane // THREADS
                if not harmless and not apart and when > self.knows[lane, other]:
                    return True
        new = zip(lanes, words, strict=True)
        self.accesses += [(lane, self.now[lane], word, kind) for lane, word in new]
        return False


def tracker(half_warps: bool) -> tuple[SharedMemoryTracker, SlicedBuffer]:
    program: Any = SimpleNamespace(
        shared_granule=4, partial_warp_barriers=half_warps, name="random",
        instructions=[SimpleNamespace(location=("", 0))],
    )  # fmt: skip
    lanes = Lanes(program, {}, (BLOCKS, 1, 1), (THREADS, 1, 1), 0, BLOCKS)
    storage = SlicedBuffer(4 * WORDS, (BLOCKS, 1))
    checks = Checks(uninitialized=False)
    return SharedMemoryTracker(lanes, checks, storage), storage


@pytest.mark.parametrize("half_warps", [False, True])
@given(seed=st.integers(0, 2**32), most_logged=st.sampled_from([1, 4, 512]))
@example(seed=4550158, most_logged=1)  # an atomic update over the thread's own store
@example(seed=101417, most_logged=512)  # a store after atomic updates of two threads, one ordered
@example(seed=107167, most_logged=512)  # a load after such
def test_the_first_race_is_found(half_warps, seed, most_logged):
    rng = np.random.default_rng(seed)
    found, storage = tracker(half_warps)
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(races, "_MOST_LOGGED", most_logged)
        for _ in range(60):
            if not step(rng, found, storage, model):
                return


def step(rng: Any, found: SharedMemoryTracker, storage: SlicedBuffer, model: Model) -> bool:
    """Let one random instruction run; False if it races."""
    kind = rng.choice(["read", "read", "write", "atomic", "blocks", "all", "warps"])
    chosen = np.zeros(LANES.shape, bool)
    chosen.flat[rng.choice(LANES.size, rng.integers(1, 5), replace=False)] = True
    if kind == "all" or kind == "blocks":
        blocks = rng.random(BLOCKS) < 0.5 if kind == "blocks" else np.ones(BLOCKS, bool)
        found.history.sync_blocks(None if kind == "all" else blocks)
        for block in np.flatnonzero(blocks):
            model.meet(LANES[block])
    elif kind == "warps":
        warps = np.repeat(rng.random((BLOCKS, THREADS // 32)) < 0.5, 32, 1)
        found.clocks.sync_warps(warps, np.uint32(0xFFFFFFFF))
        for warp in LANES[warps].reshape(-1, 32):
            model.meet(warp)
    else:
        lanes = np.flatnonzero(chosen)
        words = rng.permutation(8)[: lanes.size]  # few: they meet
        index = words + lanes // THREADS * WORDS
        racing = model.races(kind, lanes, words)
        try:
            if kind == "read":
                found.read(index, 4, chosen, 0)
            elif kind == "atomic":
                found.atomic(index, 4, chosen, 0)
            else:
                values = rng.integers(1, 2**31, lanes.size).astype(np.uint32)
                found.write(index, values, chosen, 0)
                storage.views[4][index] = values
        except SharedMemoryRaceError:
            assert racing, f"{kind} of {words} by {lanes} races with nothing"
            return False
        assert not racing, f"{kind} of {words} by {lanes} races, and nobody said so"
    return True

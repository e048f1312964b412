"""Races in shared memory: each is found, with its line, and what is ordered passes."""

import re

import numpy as np
import pytest
from support.faults import FILE, fault, run, zeros
from support.ptx import compile_module

from cupyattn.emulator import Checks, SharedMemoryRaceError

pytestmark = pytest.mark.nvrtc


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

"""Barriers and warp instructions that some threads miss, or come to with wrong operands."""

import numpy as np
import pytest
from support.faults import BITS, FILE, fault, run, zeros
from support.ptx import line_of

from cupyattn.emulator import (
    BarrierError,
    Checks,
    MisalignedAccessError,
    OutOfBoundsError,
    WarpSyncError,
)

pytestmark = pytest.mark.nvrtc


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

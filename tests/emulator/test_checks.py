"""Faults of memory, traps and endless loops: each is found, with its line, and nothing else is."""

import numpy as np
import pytest
from support.faults import fault, run, zeros
from support.ptx import kernel_text

from cupyattn import emulator
from cupyattn.emulator import (
    Argument,
    Checks,
    ConstWriteError,
    KernelFault,
    KernelTrap,
    MisalignedAccessError,
    OutOfBoundsError,
    UninitializedReadError,
)

pytestmark = pytest.mark.nvrtc


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

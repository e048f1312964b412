"""What each architecture has room for, and how many CTAs one of its multiprocessors holds."""

from __future__ import annotations

import pytest

from cupyattn.kernels.arch import ARCHS, TURING, arch_of

# CUDA C++ Programming Guide, technical specifications per compute capability: threads, CTAs,
# registers and KiB of shared memory of an SM, KiB of a CTA.
LIMITS = {
    75: (1024, 16, 65_536, 64, 64),
    80: (2048, 32, 65_536, 164, 163),
    86: (1536, 16, 65_536, 100, 99),
    89: (1536, 24, 65_536, 100, 99),
    90: (2048, 32, 65_536, 228, 227),
    100: (2048, 32, 65_536, 228, 227),
    120: (1536, 24, 65_536, 100, 99),
}


@pytest.mark.parametrize("number", LIMITS)
def test_limits_of_architectures(number):
    arch = arch_of(number)
    shared, shared_cta = arch.shared_bytes_per_sm // 1024, arch.shared_bytes_per_cta // 1024
    actual = (arch.threads_per_sm, arch.ctas_per_sm, arch.registers_per_sm, shared, shared_cta)
    assert actual == LIMITS[number]
    assert (arch.real, arch.virtual) == (f"sm_{number}", f"compute_{number}")


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "ctas"),
    [
        (128, 32, 0, 8),  # 1,024 threads
        (32, 32, 0, 16),  # 16 CTAs
        (256, 128, 0, 2),  # registers: 65,536 exactly
        (256, 129, 0, 1),  # 129 is 136 of them
        (1024, 64, 0, 1),
        (1024, 65, 0, 0),  # not one
        (128, 256, 0, 0),  # more than a thread can have
        (128, 32, 65_536, 1),
        (128, 32, 65_537, 0),
        (128, 32, 21_760, 3),
        (128, 32, 21_761, 2),  # 3 times 22,016 are 66,048
        (64, 200, 0, 4),  # a quarter of the registers is two warps' and a rest: not 10 but 8 warps
        (33, 168, 0, 6),  # 33 threads are two warps, of 5,376 registers each
    ],
)
def test_ctas_that_a_turing_sm_holds(threads, registers, shared, ctas):
    assert TURING.resident_ctas(threads, registers, shared) == ctas


def test_newer_sms_keep_a_kilobyte_of_every_cta():
    a100 = arch_of(80)
    assert a100.resident_ctas(128, 32, 163 * 1024) == 1
    assert a100.resident_ctas(128, 32, 163 * 1024 + 1) == 0
    assert a100.resident_ctas(128, 32, 81 * 1024) == 2
    assert a100.resident_ctas(128, 32, 81 * 1024 + 128) == 1


def test_an_unknown_architecture_is_named():
    with pytest.raises(ValueError, match=r"13\.0 \(sm_130\); known are 75, 80.*; .*CUPYATTN_ARCH"):
        arch_of(130)
    assert all(arch_of(number) is arch for number, arch in ARCHS.items())

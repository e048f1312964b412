"""The CUDA device: the architecture of compilation, and loading each kernel once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.testing import assert_allclose

from cupyattn import attention, backend, device_info
from cupyattn.runtime.arch import ARCHS, TURING, arch_of, arch_override
from cupyattn.runtime.device import cuda as device_module


@pytest.mark.parametrize(
    ("capability", "override", "number"),
    [(75, "", 75), (90, "", 90), (90, "75", 75), (90, " 80 ", 80), (75, "75", 75)],
)
def test_the_architecture_that_is_compiled_for(monkeypatch, capability, override, number):
    monkeypatch.setenv("CUPYATTN_ARCH", override)
    assert device_module._arch_for(capability).number == number


@pytest.mark.parametrize(
    ("capability", "override", "kind", "message"),
    [
        (70, "", RuntimeError, r"capability 7\.0; 7\.5 \(Turing\).*; .*NumPy arrays"),
        (90, "turing", ValueError, r"CUPYATTN_ARCH='turing'; "),
        (75, "90", ValueError, r"CUPYATTN_ARCH=90 on .*7\.5; .*not above the device's own; set"),
        (130, "", ValueError, r"sm_130.*CUPYATTN_ARCH=75"),
    ],
)
def test_impossible_architectures_are_refused(monkeypatch, capability, override, kind, message):
    monkeypatch.setenv("CUPYATTN_ARCH", override)
    with pytest.raises(kind, match=message):
        device_module._arch_for(capability)


ARABIC = "\u0667\u0665"  # digits to str.isdigit and int, but no way to write an architecture
NO_ARCHITECTURES = ("abc", "74", "76", "7.5", "sm_75", "-75", "075", "0", "9" * 5000, ARABIC)


@pytest.mark.parametrize("text", NO_ARCHITECTURES, ids=lambda text: text[:9])
def test_unknown_architecture_variable_is_refused_without_a_gpu(monkeypatch, text):
    monkeypatch.setenv("CUPYATTN_ARCH", text)
    message = r"^CUPYATTN_ARCH='.{1,80}'; .*known are 75, 80.*; set CUPYATTN_ARCH=75 .*or unset it$"
    for use in (
        arch_override,
        device_info,
        lambda: device_module._arch_for(90),
        lambda: backend("emulator").__enter__(),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_what_is_not_set_or_known_is_no_fault(monkeypatch):
    for text, expected in ((None, None), (" ", None), (" 80 ", arch_of(80)), ("121", arch_of(121))):
        monkeypatch.delenv("CUPYATTN_ARCH", raising=False)
        if text is not None:
            monkeypatch.setenv("CUPYATTN_ARCH", text)
        assert arch_override() is expected
        assert device_info()["arch_override"] == (expected and str(expected.number))
        with backend("emulator"):
            pass


@pytest.mark.gpu
def test_threads_on_streams_of_their_own_load_a_kernel_once():
    """All threads make the first call at the same time."""
    import cupy

    q, v = cupy.ones((1, 3, 1, 233), np.float32), cupy.ones((1, 3, 1, 191), np.float32)
    cupy.cuda.Device().synchronize()
    before = len(device_module.cuda_device(0).loaded)
    barrier, results = threading.Barrier(8), {}

    def run(number: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            barrier.wait()
            out = attention(q, q, v, implementation="naive")
            stream.synchronize()
            results[number] = cupy.asnumpy(out)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(device_module.cuda_device(0).loaded) == before + 1
    assert sorted(results) == list(range(8))
    for result in results.values():
        assert_allclose(result, 1, rtol=1e-6)


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

"""The CUDA device: which architecture it compiles for, and that it loads a kernel once."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.processes import run

from cupyattn import attention, backend, device_info
from cupyattn.kernels.arch import arch_of
from cupyattn.kernels.device import cuda as device_module
from cupyattn.kernels.target import arch_override


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
def test_architectures_that_cannot_be(monkeypatch, capability, override, kind, message):
    monkeypatch.setenv("CUPYATTN_ARCH", override)
    with pytest.raises(kind, match=message):
        device_module._arch_for(capability)


ARABIC = "\u0667\u0665"  # digits to str.isdigit and int, but no way to write an architecture
NO_ARCHITECTURES = ("abc", "74", "76", "7.5", "sm_75", "-75", "075", "0", "9" * 5000, ARABIC)


@pytest.mark.parametrize("text", NO_ARCHITECTURES, ids=lambda text: text[:9])
def test_what_names_no_architecture_is_refused_without_a_gpu_too(monkeypatch, text):
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


@pytest.mark.nvrtc
@pytest.mark.parametrize("command", ["info", "demo", "compile", "profile attention"])
def test_commands_refuse_it(command):
    ran = run(*command.split(), "--json", env={"CUPYATTN_ARCH": "abc"})
    assert ran.returncode == 1
    assert json.loads(ran.stdout)["error"].startswith("CUPYATTN_ARCH='abc'; ")


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
    """All of them meet its first call together."""
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

"""The CUDA device: which architecture it compiles for, and that it loads a kernel once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.testing import assert_allclose

from cupyattn import attention
from cupyattn.kernels import cuda_device as device_module


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
        (90, "turing", ValueError, r"CUPYATTN_ARCH='turing'.*9\.0; .*such as 75.*; set"),
        (90, "7.5", ValueError, r"CUPYATTN_ARCH='7\.5'"),
        (75, "90", ValueError, r"not above the device's own"),
        (90, "76", ValueError, r"sm_76.*known are 75"),
        (90, "70", ValueError, r"sm_70.*known are 75"),
        (130, "", ValueError, r"sm_130.*CUPYATTN_ARCH=75"),
    ],
)
def test_architectures_that_cannot_be(monkeypatch, capability, override, kind, message):
    monkeypatch.setenv("CUPYATTN_ARCH", override)
    with pytest.raises(kind, match=message):
        device_module._arch_for(capability)


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

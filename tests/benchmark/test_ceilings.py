"""The ceilings that rows are held against: what measures them, and which is whose."""

from __future__ import annotations

import json
import math
import types

import numpy as np
import pytest
from support.fake_gpu import CEILINGS

from cupyattn.benchmark import timer as ceilings
from cupyattn.benchmark.__main__ import main
from cupyattn.emulator import Checks, Report
from cupyattn.kernels.configs.linear import fma_rate
from cupyattn.kernels.device.emulated import EmulatedDevice
from cupyattn.kernels.launch import launch


@pytest.mark.nvrtc
def test_ceilings_launch_the_kernels_that_measure(monkeypatch):
    """Of few bytes, a millisecond each; the emulator runs the reading, but has no clock for mma."""
    launches = []

    def queued(call):
        call()
        return [1e-3]

    class Array(np.ndarray):
        data = property(
            lambda array: types.SimpleNamespace(copy_from_device_async=lambda other, count: None)
        )

    def launched(device, specialisation, grid, arguments):
        launches.append((specialisation.spec.entry, specialisation.macros, grid))
        if specialisation.spec.entry == "read_weight":
            launch(device, specialisation, grid, [np.asarray(arguments[0]), *arguments[1:]])

    cupy = types.SimpleNamespace(
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Array),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
    )
    report = Report()
    device = EmulatedDevice(Checks.fast(), report)
    for name, value in (
        ("load_cupy", lambda: cupy), ("_TIMER", types.SimpleNamespace(queued=queued)),
        ("_BYTES", 2**16), ("launch", launched),
    ):  # fmt: skip
        monkeypatch.setattr(ceilings, name, value)
    found = ceilings.measured_ceilings(device)
    assert found["copy_gb_per_s"] == pytest.approx(2 * 2**16 / 1e-3 / 1e9)
    assert found["read_gb_per_s"] == pytest.approx(2**16 / 1e-3 / 1e9)
    sectors = sum(each.sectors for each in report.accesses if each.space == "global")
    assert sectors * 32 == 2**16
    _, mma, fma = launches
    for (entry, macros, grid), name, flops in (
        (mma, "mma", 4 * 2 * 16 * 8 * 8), (fma, "fma", fma_rate.THREADS * 2),
    ):  # fmt: skip
        assert entry == f"{name}_rate"
        flops *= grid * dict(macros)["ROUNDS"] * dict(macros)["IN_FLIGHT"]
        assert found[f"{name}_tflops"] == pytest.approx(flops / 1e-3 / 1e12)
    device.tensor_cores = False
    without = ceilings.measured_ceilings(device)
    assert without["mma_tflops"] is None
    assert without["fma_tflops"] == found["fma_tflops"]


@pytest.mark.nvrtc
def test_every_thread_makes_its_multiply_adds():
    """Each chain of 20 is 1 - 2 ** -20."""
    sums = np.full(2 * fma_rate.THREADS, np.nan, np.float32)
    launch(EmulatedDevice(Checks.all(), Report()), fma_rate.fma_rate(20), 2, (sums, 0.5))
    assert (sums == fma_rate.IN_FLIGHT * (1 - 2.0**-20)).all()


@pytest.mark.gpu
def test_ceilings_of_a_gpu():
    from cupyattn.kernels.device.cuda import cuda_device

    found = ceilings.measured_ceilings(cuda_device(0))
    assert 0.5 < found["read_gb_per_s"] / found["copy_gb_per_s"] < 2
    assert 0 < found["fma_tflops"] < (found["mma_tflops"] or math.inf)


def test_shares_above_a_ceiling_are_explained(a_gpu, capsys):
    explained = "A share above 1 means bytes that a cache held"
    words = (
        "decode",
        "--cache-operations",
        "--tokens",
        "20",
        "--cache",
        "float",
        "--head-dim",
        "8",
    )
    for seconds, told in ((1.0, False), (1e-12, True)):
        a_gpu.times.seconds += [seconds] * 3
        assert main(words) == 0
        assert (explained in " ".join(capsys.readouterr().out.split())) is told


TINY = ("--head-dim", "8", "--options", "none")
ATTENTION = ("--seqlen", "16", "--batch", "1", "--width", "16", *TINY)


@pytest.mark.parametrize(("dtype", "ceiling"), [("float16", "mma"), ("float32", "fma")])
@pytest.mark.parametrize("words", [
    ("attention", *ATTENTION), ("attention_backward", *ATTENTION),
    ("linear", "--kind", "large", "backward", "--size", "8", "16", "24"),
    ("attention", "--block-mask", "--seqlen", "32", "--documents", "2", "--heads", "1",
     "--head-dim", "8"),
    ("attention", "--training-step", "--seqlen", "16", "--batch", "1", "--heads", "1",
     "--head-dim", "8"),
    ("varlen", "--length", "16", "--tokens", "32", "--heads", "1", "--kv-heads", "1",
     "--head-dim", "8"),
    ("decode", "--prefill", "--context", "32", "--queries", "8", "--batch", "1", "--heads", "1",
     "--kv-heads", "1", "--head-dim", "8", "--block-size", "16"),
])  # fmt: skip
def test_products_are_held_against_their_own_arithmetic(words, dtype, ceiling, a_gpu, tmp_path):
    file = tmp_path / "run.json"
    assert main([*words, "--dtype", dtype, "--json", str(file)]) == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert rows
    for row in rows:
        assert row["of_ceiling"] == pytest.approx(row["tflops"] / CEILINGS[f"{ceiling}_tflops"])

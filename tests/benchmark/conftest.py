"""Commands print for one width, whatever terminal the tests run in; and run as on a GPU."""

from __future__ import annotations

import pytest
from support import fake_gpu

from cupyattn.benchmark.frame import benchmark as frame


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")


@pytest.fixture
def a_gpu(monkeypatch):
    """Benchmarks as on a GPU, but for kernels, times and what they ran on: returns the gauge."""
    gauge = fake_gpu.gauge()
    monkeypatch.setattr(frame, "device_count", lambda: 1)

    def measured(self, arguments):
        found = frame.rows_until_failure(self.rows(arguments, gauge))
        about = {**fake_gpu.HEADER, "clocks": None, "ceilings": fake_gpu.CEILINGS}
        return about, found

    monkeypatch.setattr(frame.Benchmark, "_measured", measured)
    return gauge


@pytest.fixture
def no_gpu(monkeypatch):
    """None, wherever the tests run."""
    monkeypatch.setattr(frame, "device_count", lambda: 0)

"""Commands print for one width, whatever terminal the tests run in; and run as on a GPU."""

from __future__ import annotations

import pytest
from support import fake_gpu

from cupyattn.benchmark import command as driver


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")


@pytest.fixture
def a_gpu(monkeypatch):
    """Benchmarks as on a GPU, but for kernels, times and what they ran on: returns the harness."""
    harness = fake_gpu.harness()
    monkeypatch.setattr(driver, "device_count", lambda: 1)

    def measured(self, arguments):
        found = driver.rows_until_failure(self.harness_rows(arguments, harness))
        about = {**fake_gpu.HEADER, "ceilings": fake_gpu.CEILINGS}
        return about, found

    monkeypatch.setattr(driver.Benchmark, "_measured", measured)
    return harness


@pytest.fixture
def no_gpu(monkeypatch):
    """None, wherever the tests run."""
    monkeypatch.setattr(driver, "device_count", lambda: 0)

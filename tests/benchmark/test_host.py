"""``python -m cupyattn.benchmark host``: how it times, and what it needs."""

from __future__ import annotations

import json

import pytest
from support.processes import run

from cupyattn.benchmark.host import NO_GPU, microseconds_per_call
from cupyattn.functional.device_info import device_count


def test_host_batches_are_timed_without_waiting():
    events = []
    times = microseconds_per_call(
        lambda: events.append("call"), lambda: events.append("wait"), calls=3, batches=2
    )
    assert events == ["call", "call", "call", "wait"] * 3  # one batch to warm up
    assert len(times) == 2
    assert all(time > 0 for time in times)


@pytest.mark.skipif(device_count() > 0, reason="tells what happens without a GPU")
def test_host_needs_a_gpu():
    result = run("host", launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == NO_GPU
    assert result.stdout == ""
    assert "no CUDA device" in result.stderr


@pytest.mark.gpu
def test_host_on_a_gpu():
    arguments = ("host", "--calls", "20", "--batches", "3", "--json")
    result = run(*arguments, launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == 0, result.stderr
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    assert {"attention", "attention, out=", "softmax", "softmax, out="} <= set(rows)
    assert all(0 < row["fastest_us"] <= row["median_us"] for row in rows.values())

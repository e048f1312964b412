"""``python -m cupyattn.benchmark host``: how it times, and what it needs."""

from __future__ import annotations

import json

import pytest
from support.processes import run

from cupyattn.benchmark.host import microseconds_per_call


def test_host_batches_are_timed_without_waiting():
    events = []
    times = microseconds_per_call(
        lambda: events.append("call"), lambda: events.append("wait"), calls=3, batches=2
    )
    assert events == ["call", "call", "call", "wait"] * 3  # one batch to warm up
    assert len(times) == 2
    assert all(time > 0 for time in times)


@pytest.mark.gpu
def test_host_on_a_gpu(tmp_path):
    file = tmp_path / "host.json"
    arguments = ("host", "--batch", "20", "--calls", "60", "--json", str(file))
    result = run(*arguments, launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == 0, result.stderr
    rows = {row["call"]: row for row in json.loads(file.read_text())["rows"]}
    assert {"attention", "attention, out=", "rms_norm", "linear, out=", "rope"} <= set(rows)
    assert {row["times"]["calls_per_sample"] for row in rows.values()} == {20}
    assert all(0 < row["times"]["min_s"] <= row["times"]["p50_s"] for row in rows.values())

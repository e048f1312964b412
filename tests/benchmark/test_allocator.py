"""``python -m cupyattn.benchmark allocator``: its trace wastes little and leaks nothing."""

from __future__ import annotations

import json

import pytest
from support.search import deep

from cupyattn.benchmark import allocator
from cupyattn.benchmark.__main__ import main


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A pool and prompts of a tenth, so that the trace is as crowded as the benchmark's."""
    monkeypatch.setattr(allocator, "POOL_TOKENS", 12_000)
    monkeypatch.setattr(allocator, "MAX_BATCH", 32)
    monkeypatch.setattr(allocator, "OUTPUT", (60.0, 0.8))
    monkeypatch.setattr(allocator, "SYSTEM_PROMPTS", (30, 150))


@pytest.mark.parametrize("block_size", [1, 5, 16, 64, *deep(2, 3, 7, 128, 256)])
def test_no_block_leaks_at_any_size(block_size):
    trace = allocator.run_trace(block_size, 60)
    assert trace.leaked_blocks == 0
    assert trace.found_tokens > 0 or block_size > 150  # the longest system prompt
    assert trace.steps > 60


def test_little_is_wasted_at_block_size_16():
    trace = allocator.run_trace(16, 120)
    assert 0 < trace.waste < allocator.WASTE_GOAL
    assert trace.worst_waste >= trace.waste


def test_the_trace_comes_to_preemption(monkeypatch):
    monkeypatch.setattr(allocator, "POOL_TOKENS", 4_600)  # the longest fits, just
    monkeypatch.setattr(allocator, "WATERMARK", 0)
    trace = allocator.run_trace(16, 60)
    assert trace.preempted > 0
    assert trace.leaked_blocks == 0


def test_a_pair_and_a_table_are_quick():
    """A quarter of the goals: other processes share the machine."""
    assert allocator.pairs_per_second(20_000) > allocator.PAIRS_GOAL / 4
    assert allocator.table_milliseconds(256) < allocator.TABLE_GOAL_MS * 4


@pytest.mark.parametrize("to_file", [False, True])
def test_json(to_file, tmp_path, capsys):
    file = tmp_path / "result.json"
    words = ("--requests", "5", "--block-size", "16", "2", "--json")
    assert main(["allocator", *words, *[str(file)] * to_file]) == 0
    printed = capsys.readouterr().out
    assert ("Block ids" in printed) == to_file
    result = json.loads(file.read_text() if to_file else printed)
    assert all(result[name] for name in ("date", "cpu", "os", "python", "version"))
    assert [trace["block_size"] for trace in result["traces"]] == [16, 2]
    assert result["pairs_per_second"] > 0

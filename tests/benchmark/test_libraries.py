"""Peers: what their names are, and what is said of a library that is not there."""

from __future__ import annotations

import sys
import types

import pytest

from cupyattn.benchmark import libraries
from cupyattn.benchmark.__main__ import BENCHMARKS, main


def test_every_benchmark_has_peers_of_the_one_list():
    named = {name for benchmark in BENCHMARKS for name in benchmark.baselines}
    assert named == set(libraries.BASELINES), "and none is on the list for nobody"


def test_one_list_for_every_command(a_gpu):
    """One that a benchmark has not is no error: `all` tells every one the same."""
    words = ["--tokens", "20", "--cache", "float", "--head-dim", "8"]
    assert main(["decode", "--cache-operations", *words, "--peers", "eager,peft"]) == 0


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match=r"without PyTorch; .*; pip install torch"):
        libraries.load_torch()


def test_torch_without_a_gpu(monkeypatch):
    cpu = types.SimpleNamespace(is_available=lambda: False)
    torch = types.SimpleNamespace(__version__="2.11.0+cpu", cuda=cpu)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(RuntimeError, match=r"2\.11\.0\+cpu sees no GPU"):
        libraries.load_torch()

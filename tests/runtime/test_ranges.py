"""NVTX ranges around calls: there where they are asked for, and nothing at all otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import cupyattn
from cupyattn.runtime import cupy_library, ranges
from cupyattn.runtime.ranges import ranged

ROOT = Path(cupyattn.__file__).parent.parent


def doubled(x, /, *, fail=False):
    """Return twice x."""
    if fail:
        raise ValueError("no")
    return 2 * x


@pytest.fixture
def ranges_of(monkeypatch):
    """A replacement of NVTX that records the beginnings and ends of ranges."""
    noted = []
    nvtx = types.SimpleNamespace(
        RangePush=lambda text: noted.append(text), RangePop=lambda: noted.append("end")
    )
    monkeypatch.setattr(ranges, "loaded_nvtx", lambda: nvtx)
    monkeypatch.setenv("CUPYATTN_NVTX", "1")
    return noted


@pytest.mark.parametrize("value", [None, "", "0"])
def test_ranges_are_off_by_default(monkeypatch, value):
    monkeypatch.delenv("CUPYATTN_NVTX", raising=False)
    if value is not None:
        monkeypatch.setenv("CUPYATTN_NVTX", value)
    assert ranged(doubled) is doubled


def test_a_call_is_a_range(ranges_of):
    function = ranged(doubled)
    assert function(np.ones((2, 3), np.float16)).sum() == 12
    assert function(2) == 4
    assert ranges_of == ["doubled (2, 3) float16", "end", "doubled", "end"]
    assert function.__doc__ == doubled.__doc__


def test_a_range_ends_where_a_call_fails(ranges_of):
    with pytest.raises(ValueError, match="no"):
        ranged(doubled)(np.ones(1), fail=True)
    assert ranges_of[-1] == "end"


def test_no_ranges_without_cupy(monkeypatch):
    monkeypatch.setenv("CUPYATTN_NVTX", "1")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert cupy_library.loaded_nvtx() is None
    assert ranged(doubled)(2) == 4


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("CUPYATTN_NVTX", "yes")
    with pytest.raises(ValueError, match=r"CUPYATTN_NVTX='yes'; it is 1 to have NVTX ranges"):
        ranged(doubled)


SCRIPT = """
import json, sys, types
noted = []
nvtx = types.ModuleType("cupy.cuda.nvtx")
nvtx.RangePush, nvtx.RangePop = noted.append, lambda: noted.append("end")
import numpy as np, cupyattn
x = np.ones((2, 8), np.float32)
cupyattn.gelu(x)
cuda = types.ModuleType("cupy.cuda"); cuda.nvtx = nvtx
cupy = types.ModuleType("cupy"); cupy.cuda = cuda; cupy.ndarray = type("ndarray", (), {})
sys.modules |= {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nvtx": nvtx}
cupyattn.softmax(x)
out, pullback = cupyattn.vjp(lambda x: cupyattn.silu(x), x)
pullback(out)
print(json.dumps(noted))
"""


def test_public_functions_and_the_backwards_of_vjp_are_ranges():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUPYATTN_NVTX": "1"}
    words = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    noted = json.loads(result.stdout)
    assert noted[:2] == ["softmax (2, 8) float32", "end"], "none before CuPy was there"
    assert "silu (2, 8) float32" in noted
    assert "silu_backward (2, 8) float32" in noted
    assert noted.count("end") * 2 == len(noted)


def test_ranges_wait_for_another_thread_that_imports_cupy(tmp_path):
    """Two threads, which import a package and its submodule, lock what the other one needs."""
    package = tmp_path / "cupy" / "cuda"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text(
        "import time\nstarted.set()\ntime.sleep(0.3)\nfrom cupy.cuda import name\n"
    )
    (package / "__init__.py").write_text("import cupy\nname = 1\n")
    (package / "nvtx.py").write_text("")
    script = (
        "import builtins, sys, threading, time\n"
        "from cupyattn.runtime.cupy_library import loaded_nvtx\n"
        "builtins.started = threading.Event()\n"
        "failures = []\n"
        "threading.excepthook = lambda raised: failures.append(raised.exc_value)\n"
        "thread = threading.Thread(target=lambda: __import__('cupy'))\n"
        "thread.start()\n"
        "started.wait()\n"
        "print(loaded_nvtx().__name__)\n"
        "thread.join()\n"
        "print(failures)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["cupy.cuda.nvtx", "[]"], done.stderr

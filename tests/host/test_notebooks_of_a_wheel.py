"""The first notebook as on Colab: the wheel lies beside it, and a checkout is nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.readme import ROOT

NOTEBOOK = ROOT / "notebooks" / "01_first_attention.ipynb"
CELLS = """
import json, sys, types
from IPython.core.interactiveshell import InteractiveShell

sys.modules["google.colab"] = types.ModuleType("google.colab")
shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
shell.run_cell("print(cupyattn.__file__)")
"""
ENVIRONMENT = {
    # No network: the notebook's own line finds the wheel, and what that needs is there already, if
    # not in the system's packages, then in those of this environment, which stand for the user's.
    **{"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_IGNORE_INSTALLED": "1"},
    "PYTHONUSERBASE": sys.prefix,
    "MPLBACKEND": "agg",
}


def run(*command: str | Path, **options) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    given = {"capture_output": True, "text": True, "timeout": 300, "env": outside | ENVIRONMENT}
    done = subprocess.run(command, **given, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.deep
@pytest.mark.nvrtc
@pytest.mark.skipif(os.name == "nt", reason="the user's packages lie elsewhere on Windows")
def test_the_first_notebook_runs_beside_a_wheel(built, tmp_path):
    for needed in ("IPython", "matplotlib", "pip"):
        pytest.importorskip(needed, reason="needs pip install '.[notebooks]'")
    venv, folder = tmp_path / "venv", tmp_path / "colab"
    run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", venv)
    folder.mkdir()
    (wheel,) = built.glob("*.whl")
    for file in (wheel, NOTEBOOK):
        shutil.copy(file, folder)
    said = run(venv / "bin" / "python", "-c", CELLS, NOTEBOOK.name, cwd=folder)
    assert Path(said.splitlines()[-1]).is_relative_to(venv)

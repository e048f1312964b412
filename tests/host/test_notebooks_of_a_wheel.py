"""The first notebook as on Colab: the wheel lies beside it, and a checkout is nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
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
    # No network: the notebook's own line finds the wheel, and what that needs is there already.
    **{"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_IGNORE_INSTALLED": "1"},
    "MPLBACKEND": "agg",
}


def run(*command: str | Path, **options) -> str:
    # IPython would put the packages of an activated environment before its own.
    others = {"PYTHONPATH", "VIRTUAL_ENV"}
    outside = {name: value for name, value in os.environ.items() if name not in others}
    given = {"capture_output": True, "text": True, "timeout": 300, "env": outside | ENVIRONMENT}
    done = subprocess.run(command, **given, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def packages_but_ours(user: Path) -> None:
    """What this environment has beside cupyattn, as packages of the user's in a folder."""
    there = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(user)}))
    there.mkdir(parents=True)
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if "cupyattn" not in package.name:  # its own and an editable install's
            (there / package.name).symlink_to(package)


@pytest.mark.deep
@pytest.mark.nvrtc
@pytest.mark.skipif(os.name == "nt", reason="links want rights on Windows")
def test_the_first_notebook_runs_beside_a_wheel(built, tmp_path, monkeypatch):
    for needed in ("IPython", "matplotlib", "pip"):
        pytest.importorskip(needed, reason="needs pip install '.[notebooks]'")
    venv, folder, user = (tmp_path / name for name in ("venv", "colab", "user"))
    run(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", venv)
    packages_but_ours(user)
    monkeypatch.setenv("PYTHONUSERBASE", str(user))
    folder.mkdir()
    (wheel,) = built.glob("*.whl")
    for file in (wheel, NOTEBOOK):
        shutil.copy(file, folder)
    said = run(venv / "bin" / "python", "-c", CELLS, NOTEBOOK.name, cwd=folder)
    assert Path(said.splitlines()[-1]).is_relative_to(venv)

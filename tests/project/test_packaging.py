"""Packages that are built from the repository: wheel, sdist, editable install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from support.readme import ROOT

import cupyattn

CUDA_SOURCES = {
    path.relative_to(ROOT / "cuda_src").as_posix(): path.read_bytes()
    for path in (ROOT / "cuda_src").rglob("*.cu*")
}


def run(*arguments: str, **options) -> str:
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def import_from(folder: Path) -> tuple[Path, Path]:
    """Return where a process finds the package and its CUDA sources, with this folder first."""
    script = (
        "import sys, site; others = list(sys.path); site.addsitedir(sys.argv[1]); "
        "sys.path.sort(key=others.__contains__); import cupyattn; "
        "from cupyattn.runtime.source import source_root; "
        "print(cupyattn.__file__, source_root(), sep='\\n')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = run("-c", script, str(folder), cwd=folder.parent, env=environment)
    package, sources = found.splitlines()
    return Path(package), Path(sources)


def test_there_are_cuda_sources():
    """The comparisons below would pass for two empty sets."""
    assert "attention/teaching/tiled.cu" in CUDA_SOURCES
    assert "common/config.cuh" in CUDA_SOURCES


def test_wheel_holds_the_package_and_the_cuda_sources(wheel):
    names = set(wheel.namelist())
    packed = {
        name.removeprefix("cupyattn/_cuda_src/"): wheel.read(name)
        for name in names
        if name.startswith("cupyattn/_cuda_src/")
    }
    assert packed == CUDA_SOURCES
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cupyattn").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "cupyattn/py.typed" in names
    metadata = f"cupyattn-{cupyattn.__version__}.dist-info/"
    assert {name.partition("/")[0] + "/" for name in names} == {"cupyattn/", metadata}
    assert f"{metadata}licenses/LICENSE" in names


def test_wheel_metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == cupyattn.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(re.match(r"[\w-]+", line)[0] for line in required) == [
        "ml-dtypes",
        "numpy",
        "rich",
    ]
    for line in metadata.get_all("Requires-Dist"):  # there are no CUDA wheels for macOS
        if re.match("cupy-|cuda-|nvidia-", line):
            assert "sys_platform ==" in line
    (script,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    assert "cupyattn = cupyattn.__main__:console" in wheel.read(script).decode()


def test_sdist_holds_everything_to_build_and_test(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"cuda_src/{name}" for name in CUDA_SOURCES} <= names
    assert {"README.md", "LICENSE", "pyproject.toml", "cupyattn/py.typed"} <= names
    assert {
        ".github/CONTRIBUTING.md",
        ".github/figures/attention.json",
        ".github/speed-light.svg",
    } <= names
    for folder in ("tests", "notebooks", "cupyattn"):
        for suffix in (".py", ".cu", ".ipynb"):
            files = {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob(f"*{suffix}")}
            hidden = {name for name in files if "/." in name}
            assert files - hidden <= names


def test_installed_wheel_finds_its_sources(wheel, tmp_path):
    wheel.extractall(tmp_path)
    package, sources = import_from(tmp_path)
    assert package == tmp_path / "cupyattn" / "__init__.py"
    assert sources == tmp_path / "cupyattn" / "_cuda_src"


@pytest.mark.deep
def test_editable_install_finds_the_checkout(tmp_path):
    pytest.importorskip("hatchling", reason="needs hatchling (pip install '.[test]')")
    hook = "import sys, hatchling.build as backend; backend.build_editable(sys.argv[1])"
    run("-c", hook, str(tmp_path), cwd=ROOT)
    (path,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(path).extractall(tmp_path)
    package, sources = import_from(tmp_path)
    assert package == ROOT / "cupyattn" / "__init__.py"
    assert sources == ROOT / "cuda_src"


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


def run_outside(*command: str | Path, **options) -> str:
    # IPython would put the packages of an activated environment before its own.
    others = {"PYTHONPATH", "VIRTUAL_ENV"}
    outside = {name: value for name, value in os.environ.items() if name not in others}
    given = {"capture_output": True, "text": True, "timeout": 300, "env": outside | ENVIRONMENT}
    done = subprocess.run(command, **given, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def packages_but_ours(user: Path) -> None:
    """Return a folder with this environment's packages other than cupyattn."""
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
    run_outside(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", venv)
    packages_but_ours(user)
    monkeypatch.setenv("PYTHONUSERBASE", str(user))
    folder.mkdir()
    (wheel,) = built.glob("*.whl")
    for file in (wheel, NOTEBOOK):
        shutil.copy(file, folder)
    said = run_outside(venv / "bin" / "python", "-c", CELLS, NOTEBOOK.name, cwd=folder)
    assert Path(said.splitlines()[-1]).is_relative_to(venv)

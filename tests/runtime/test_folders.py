"""The cache folder, its replacements, and CuPy's folder next to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.permissions import read_only
from support.processes import environment, run
from support.search import deep

from cupyattn import backend, softmax
from cupyattn.runtime import cupy_library, folders
from cupyattn.runtime import kernel_cache as cache
from cupyattn.runtime.device import emulated

nvrtc = pytest.mark.nvrtc
VARIABLES = ("CUPYATTN_CACHE_DIR", "XDG_CACHE_HOME", "CUPY_CACHE_DIR")


@pytest.fixture
def nothing_set(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names a folder, and nothing is cached."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch takes back what the test sets
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/cupyattn"),
        ("linux", {"XDG_CACHE_HOME": "", "HOME": "{tmp}"}, ".cache/cupyattn"),
        ("darwin", {"HOME": "{tmp}"}, "Library/Caches/cupyattn"),
        ("win32", {"LOCALAPPDATA": "{tmp}/local", "HOME": "{tmp}"}, "local/cupyattn"),
        ("linux", {"CUPYATTN_CACHE_DIR": "~/mine", "HOME": "{tmp}"}, "mine"),
    ],
)
def test_where_the_cache_is(nothing_set, tmp_path, monkeypatch, platform, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    monkeypatch.setattr(folders.sys, "platform", platform)
    directory = folders.cache_directory()
    assert directory == tmp_path / expected
    assert directory.is_dir()


@pytest.mark.parametrize("name", ["CUPYATTN_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_relative_folder_stays_where_it_was(nothing_set, tmp_path, monkeypatch, name):
    """The cache folder does not change with the working directory."""
    monkeypatch.setattr(folders.sys, "platform", "linux")
    monkeypatch.setenv(name, "relative")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    cache.keep_if_possible("first", b"")
    monkeypatch.chdir("other")
    cache.keep_if_possible("second", b"")
    assert not (tmp_path / "other" / "relative").exists()
    assert {"first", "second"} <= {path.name for path in (tmp_path / "relative").rglob("*")}


def test_a_user_without_a_home_has_a_cache_for_the_process(nothing_set, monkeypatch):
    """In a container with an unknown user id compiled kernels stay in memory."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(folders.Path, "home", staticmethod(homeless))
    message = r"^the folder of compiled kernels cannot be written \(.*home.*\); what is .*; "
    with pytest.warns(UserWarning, match=rf"{message}set CUPYATTN_CACHE_DIR to .* be written$"):
        assert folders.cache_directory() is None
    folders.tell_unused(OSError("no space"))  # a second warning would be an error


@nvrtc
def test_read_only_home_gives_one_warning(nothing_set, tmp_path, monkeypatch):
    """The warning has the user's line, which called the library."""
    emulated._module.cache_clear()
    (tmp_path / "cupyattn").mkdir()
    x = np.ones((2, 4), np.float32)
    with read_only(tmp_path) as home, backend("emulator"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        with pytest.warns(UserWarning, match="is lost when") as caught:
            softmax(x)
        softmax(x, causal=True)
    (warning,) = caught
    assert warning.filename == __file__


@pytest.mark.parametrize("below", ["", "below", "below/it"])
def test_unusable_named_folder_gives_one_warning(nothing_set, tmp_path, monkeypatch, below):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(file / below))
    message = r"CUPYATTN_CACHE_DIR='.*file.*; .*; set .*, or unset it"
    with pytest.warns(UserWarning, match=message) as caught:
        assert folders.cache_directory() is None
    assert caught[0].filename == __file__
    folders.tell_unused(OSError("no space"))  # a second warning would be an error


def test_a_forked_child_leaves_the_temporary_folder_to_its_parent(nothing_set, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    folders._remove(folder, os.getpid() + 1)
    assert folder.is_dir()
    folders._remove(folder, os.getpid())
    assert not folder.exists()


# --- CuPy's folder


def test_cupy_uses_its_default_folder_if_writable(nothing_set, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cupy_library._set_cache_folder()
    assert "CUPY_CACHE_DIR" not in os.environ
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "named"))
    cupy_library._set_cache_folder()
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "named")


@pytest.mark.parametrize("set_to", [None, ""])
def test_cupy_gets_a_folder_next_to_ours(nothing_set, tmp_path, monkeypatch, set_to):
    home = tmp_path / "file"
    home.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if set_to is not None:
        monkeypatch.setenv("CUPY_CACHE_DIR", set_to)
    cupy_library._set_cache_folder()
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "xdg" / "cupyattn" / "cupy")
    assert (tmp_path / "xdg" / "cupyattn" / "cupy").is_dir()


def test_cupy_gets_a_folder_if_home_is_read_only(nothing_set, tmp_path, monkeypatch):
    """Otherwise CuPy would fail at the first compilation of a kernel of its own."""
    made = tmp_path / "home" / ".cupy" / "kernel_cache"
    made.mkdir(parents=True)
    with read_only(tmp_path / "home") as home:
        monkeypatch.setenv("HOME", str(home))
        with pytest.warns(UserWarning, match="is lost when"):
            cupy_library._set_cache_folder()
        assert os.environ["CUPY_CACHE_DIR"] == str(folders.temporary_directory() / "cupy")


def test_error_if_cupy_has_no_folder(nothing_set, tmp_path, monkeypatch):
    def no_place(**options: str) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(folders.tempfile, "mkdtemp", no_place)
    message = r"^there is no folder .*No usable.*; .*; set CUPY_CACHE_DIR, .* or TMPDIR to "
    with (
        pytest.warns(UserWarning, match="cannot be written"),
        pytest.raises(RuntimeError, match=message),
    ):
        cupy_library._set_cache_folder()


@pytest.mark.skipif(os.name == "nt", reason="permissions are POSIX")
@pytest.mark.parametrize("opened", ["ours", "ours/cupy"])
def test_cupy_gets_no_folder_that_others_can_write(nothing_set, tmp_path, monkeypatch, opened):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "ours"))
    (tmp_path / "ours" / "cupy").mkdir(parents=True)
    (tmp_path / opened).chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cupy_library._set_cache_folder()
    assert os.environ["CUPY_CACHE_DIR"] == str(folders.temporary_directory() / "cupy")


def test_cupy_gets_a_folder_where_there_is_no_home(nothing_set, tmp_path, monkeypatch):
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cupy_library.Path, "expanduser", homeless)
    cupy_library._set_cache_folder()
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "cupyattn" / "cupy")


def homes(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "file"
    file.touch()
    return {"a file": str(file), "missing": "/proc/nonexistent/home", "read-only": "/proc/1"}


IMPORT_CUPY = """
import cupyattn, os
info = cupyattn.device_info()
if info["cupy"]:
    import cupy
    from cupy.cuda._compiler_cache import DiskKernelCacheBackend
    DiskKernelCacheBackend().save("name", b"cubin", "source")
print(info["cache"]["folder"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="paths below /proc are Linux's")
@pytest.mark.parametrize("home", ["a file", *deep("missing", "read-only")])
def test_notebooks_run_without_a_home(tmp_path, home):
    """Notebooks query the devices first, then import CuPy, which writes into its folder."""
    variables = environment() | {"HOME": homes(tmp_path)[home]}
    for name in VARIABLES:
        variables.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_CUPY], capture_output=True, text=True, env=variables
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Warning: ") == 1, done.stderr
    assert "<string>:3: UserWarning: the folder of compiled kernels cannot be" in done.stderr
    assert done.stdout.strip() == "None", "compiled kernels stay in memory"


@nvrtc
@pytest.mark.skipif(sys.platform != "linux", reason="paths below /proc are Linux's")
@pytest.mark.parametrize("home", ["a file", *deep("missing")])
@pytest.mark.parametrize(
    "command", [("info",), *deep((("demo", "--seqlen", "8", "--head-dim", "8"),))]
)
def test_commands_run_without_a_home(tmp_path, home, command):
    variables = {
        "HOME": homes(tmp_path)[home],
        "CUPYATTN_CACHE_DIR": str(folders.cache_directory()),
    }
    launcher = ("-m", "cupyattn", *command)
    done = run("--json", launcher=launcher, env=variables | {"CUPY_CACHE_DIR": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["command"] == command[0]
    assert not done.stderr


@nvrtc
@pytest.mark.parametrize("command", ["info", *deep("demo")])
def test_unusable_cupy_folder_is_named_in_the_error(tmp_path, command):
    (tmp_path / "file").touch()
    done = run(
        "--json",
        launcher=("-m", "cupyattn", command),
        env={"CUPY_CACHE_DIR": str(tmp_path / "file" / "below")},
    )
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error.startswith("CUPY_CACHE_DIR=")
    assert error.endswith("set CUPY_CACHE_DIR to a folder that can be written, or unset it")
    assert "Traceback" not in done.stderr


@nvrtc
def test_unusable_folder_gives_one_warning_per_process(tmp_path):
    (tmp_path / "file").touch()
    done = run(
        launcher=("-m", "cupyattn", "info"), env={"CUPYATTN_CACHE_DIR": str(tmp_path / "file")}
    )
    assert done.returncode == 0
    assert done.stderr.count("UserWarning") == 1
    assert "set CUPYATTN_CACHE_DIR to a folder that can be written" in done.stderr

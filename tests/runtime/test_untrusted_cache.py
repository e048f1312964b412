"""Compiled kernels that somebody else could have written: none is run, whatever its record says."""

from __future__ import annotations

import json
import marshal
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.permissions import NOBODY, give_away

from cupyattn import backend, softmax
from cupyattn.benchmark import ceiling_kernels
from cupyattn.runtime import folders
from cupyattn.runtime import folders as trust
from cupyattn.runtime import kernel_cache as cache
from cupyattn.runtime import tuning as choices
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.compile import compile_cubin, compile_ptx
from cupyattn.runtime.device import emulated

nvrtc = pytest.mark.nvrtc
pytestmark = pytest.mark.skipif(os.name == "nt", reason="owners and modes are POSIX")
SMALL = ceiling_kernels.fma_rate()  # compiles fastest
COMPILERS = [compile_cubin, compile_ptx]


@pytest.fixture
def forget(empty_cache):
    """Clear the modules that this process has loaded, before and after the test."""
    emulated._module.cache_clear()
    yield
    emulated._module.cache_clear()


def plant(folder: Path, name: str, code: bytes, facts: cache.Facts) -> None:
    """Write code with a valid record, as an attacker would."""
    record = {"code_bytes": len(code), "resources": facts, "digest": cache._digest(code, facts)}
    for path, content in ((name, code), (f"{name}.json", json.dumps(record).encode())):
        (folder / path).write_bytes(content)


def harmful(translation: bytes, mark: Path) -> bytes:
    """A translation that writes a file when it is loaded."""
    parts = list(marshal.loads(zlib.decompress(translation)))
    parts[0] = compile(f"open({str(mark)!r}, 'w').close()", "planted", "exec")
    return zlib.compress(marshal.dumps(tuple(parts)))


def open_folder(folder: Path) -> None:
    folder.chmod(0o777)


def open_parent(folder: Path) -> None:
    folder.parent.chmod(0o777)


def open_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o666)


def give_away_files(folder: Path) -> None:
    for path in folder.iterdir():
        give_away(path)


def give_away_with_files(folder: Path) -> None:
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777)
        give_away(path)


def link_files(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    for path in [*folder.iterdir()]:
        path.symlink_to(path.rename(folder.parent / "elsewhere" / path.name))


FOLDERS = [open_folder, open_parent, give_away_with_files]
FILES = [open_files, give_away_files, link_files]


@nvrtc
@pytest.mark.parametrize("spoil", [*FOLDERS, *FILES])
def test_a_planted_translation_is_not_run(empty_cache, forget, tmp_path, spoil):
    x, mark = np.arange(8, dtype=np.float32).reshape(2, 4), tmp_path / "it ran"
    with backend("emulator"):
        expected = softmax(x)
    emulated._module.cache_clear()
    (kept,) = empty_cache.glob("*.translation")
    plant(empty_cache, kept.name, harmful(kept.read_bytes(), mark), None)
    spoil(empty_cache)
    folders.cache_directory.cache_clear()
    with (
        backend("emulator"),
        pytest.warns(UserWarning, match="that only this user and root can write"),
    ):
        np.testing.assert_array_equal(softmax(x), expected)
    assert not mark.exists()
    tmp_path.chmod(0o755)


@nvrtc
def test_a_planted_translation_would_run(empty_cache, forget, tmp_path):
    """This shows that the other tests can fail."""
    x, mark = np.zeros((2, 4), np.float32), tmp_path / "it ran"
    with backend("emulator"):
        softmax(x)
        emulated._module.cache_clear()
        (kept,) = empty_cache.glob("*.translation")
        plant(empty_cache, kept.name, harmful(kept.read_bytes(), mark), None)
        with pytest.raises(Exception, match=r".*"):
            softmax(x)
    assert mark.exists()


@nvrtc
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("spoil", FOLDERS)
def test_code_in_a_folder_that_is_not_trusted_is_compiled_into_memory(
    empty_cache, compilations, compiler, spoil
):
    first = compiler(SMALL, TURING)
    facts = json.loads((empty_cache / f"{first.path.name}.json").read_bytes())["resources"]
    plant(empty_cache, first.path.name, b"planted", facts)
    spoil(empty_cache)
    folders.cache_directory.cache_clear()
    message = (
        r"CUPYATTN_CACHE_DIR='.*' is not used: .*; what is compiled now stays in memory and is "
        r"lost when this process ends; (run 'chmod go-w .*'|change the owner of .*), or set CUPYATT"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        again = compiler(SMALL, TURING)
    assert compiler(SMALL, TURING) == replace(again, was_cached=True), "without a second warning"
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert (again.was_cached, again.path, again.code) == (False, None, first.code)
    assert len(compilations) == 2
    assert (empty_cache / first.path.name).read_bytes() == b"planted", "nothing is written there"
    empty_cache.parent.chmod(0o755)


@nvrtc
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("spoil", FILES)
def test_code_in_a_file_that_is_not_trusted_is_compiled_anew(empty_cache, compiler, spoil):
    first = compiler(SMALL, TURING)
    facts = json.loads((empty_cache / f"{first.path.name}.json").read_bytes())["resources"]
    plant(empty_cache, first.path.name, b"planted", facts)
    spoil(empty_cache)
    with pytest.warns(
        UserWarning, match=r"file of the folder of compiled .* not read: .*"
    ) as caught:
        again = compiler(SMALL, TURING)
    assert len(caught) == 1
    assert again == first, "and in its place"
    assert compiler(SMALL, TURING).was_cached


@nvrtc
def test_a_folder_that_is_opened_later_is_not_used_from_then_on(empty_cache):
    first = compile_ptx(SMALL, TURING)
    plant(empty_cache, first.path.name, b"planted", None)
    empty_cache.chmod(0o777)
    with pytest.warns(UserWarning, match="is not used: anyone can write") as caught:
        assert compile_ptx(SMALL, TURING).code == first.code
    assert len(caught) == 1


@nvrtc
def test_cache_filled_by_root_is_read(empty_cache, monkeypatch):
    """Another user reads the folder, but cannot write to it."""
    first = compile_ptx(SMALL, TURING)
    if os.geteuid() != 0:
        pytest.skip("only root can write root's files")
    monkeypatch.setattr(trust.os, "geteuid", lambda: NOBODY)
    assert compile_ptx(SMALL, TURING) == replace(first, was_cached=True)


@nvrtc
def test_tuned_choices_that_others_can_write_are_not_read(empty_cache):
    path = choices.keep("a device", "sm_75", {"kernel 1": "row"})
    assert choices.read("a device", "sm_75")["chosen"] == {"kernel 1": "row"}
    path.chmod(0o666)
    with pytest.warns(UserWarning, match=r"not read: anyone can write .*tuned"):
        assert choices.read("a device", "sm_75") is None
    empty_cache.chmod(0o777)
    folders.cache_directory.cache_clear()
    with (
        pytest.warns(UserWarning, match="is not used"),
        pytest.raises(RuntimeError, match=r"no folder to keep choices in; .*; set CUPYATTN_CACHE"),
    ):
        choices.keep("a device", "sm_75", {})


@nvrtc
def test_a_second_call_looks_at_no_file(empty_cache, forget, monkeypatch):
    x = np.ones((2, 4), np.float32)

    def looked(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a file was looked at: {arguments}")

    with backend("emulator"):
        softmax(x)
        with monkeypatch.context() as patch:
            for name in ("stat", "lstat", "fstat", "open", "readlink", "listdir", "scandir"):
                patch.setattr(os, name, looked)
            softmax(x)


# --- Windows: the user's profile, or a folder that the user names


@pytest.mark.parametrize(
    ("variables", "is_used"),
    [
        ({"LOCALAPPDATA": "{tmp}/home/AppData/Local"}, True),
        ({"LOCALAPPDATA": "{tmp}/home/../elsewhere"}, False),
        ({"LOCALAPPDATA": "{tmp}/elsewhere"}, False),
        ({"CUPYATTN_CACHE_DIR": "{tmp}/elsewhere"}, True),
    ],
)
def test_on_windows_the_profile_or_a_named_folder_is_used(
    empty_cache, tmp_path, monkeypatch, variables, is_used
):
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere").chmod(0o777)  # these bits mean nothing there
    monkeypatch.delenv("CUPYATTN_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    monkeypatch.setattr(folders.sys, "platform", "win32")
    if is_used:
        assert folders.cache_directory() is not None
        return
    with pytest.warns(UserWarning, match=r"is not in the profile folder .*set CUPYATTN_CACHE_DIR="):
        assert folders.cache_directory() is None

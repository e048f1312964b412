"""The compiler's disk cache where files are damaged, or folders cannot be written."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
from support.read_only import read_only

from cupyattn import folders
from cupyattn.kernels import cache
from cupyattn.kernels.arch import arch_of
from cupyattn.kernels.compile import compile_cubin, compile_ptx
from cupyattn.kernels.configs.linear import fma_rate, mma_rate

nvrtc = pytest.mark.nvrtc
TURING = arch_of(75)
# The two that compile fastest, in a quarter of the next one's time.
SMALL, OTHER = fma_rate.fma_rate(), mma_rate.mma_rate()


@nvrtc
@pytest.mark.parametrize("compiler", [compile_cubin, compile_ptx])
@pytest.mark.parametrize("suffix", ["", ".json"])
@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b'{"code_bytes": 1, "resources": 2}', b"[" * 100_000]
)
def test_a_damaged_file_is_made_anew(empty_cache, compiler, suffix, content):
    """Cleaners of cache folders take files one at a time, and a full disk cuts them short."""
    first = compiler(SMALL, TURING)
    code = first.path.read_bytes()
    damaged = first.path.with_name(first.path.name + suffix)
    damaged.unlink() if content is None else damaged.write_bytes(content)
    again = compiler(SMALL, TURING)
    assert not again.was_cached
    assert again.path.read_bytes() == code
    assert again.resources == first.resources
    assert compiler(SMALL, TURING).was_cached


@nvrtc
def test_a_folder_that_was_cleaned_away_is_made_anew(empty_cache):
    compile_cubin(SMALL, TURING)
    shutil.rmtree(empty_cache)
    assert compile_cubin(SMALL, TURING).path.is_file()


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "kernel.cubin"
    cache.write_atomically(path, b"first")
    cache.write_atomically(path, b"second")
    assert path.read_bytes() == b"second"

    def interrupted(*paths: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.write_atomically(path, b"third")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path], "the unfinished file has to go"


def test_a_file_that_windows_holds_open_stays_as_it_is(tmp_path, monkeypatch):
    """What is there will do if it is the same; otherwise the caller has to find another place."""

    def held(*paths: Any) -> None:
        raise PermissionError("another process has it open")

    monkeypatch.setattr(cache.os, "replace", held)
    path = tmp_path / "kernel.cubin"
    with pytest.raises(PermissionError):
        cache.write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"damaged")
    with pytest.raises(PermissionError):
        cache.write_atomically(path, b"new")
    path.write_bytes(b"new")
    cache.write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]


@nvrtc
@pytest.mark.parametrize("compiler", [compile_cubin, compile_ptx])
@pytest.mark.parametrize("damage", ["zeros", "one bit", "another kernel's", "another's record"])
def test_files_of_the_right_size_are_not_trusted(empty_cache, compilations, compiler, damage):
    first, other = compiler(SMALL, TURING), compiler(OTHER, TURING)
    code = first.path.read_bytes()
    record = first.path.with_name(first.path.name + ".json")
    if damage == "zeros":
        first.path.write_bytes(bytes(len(code)))
    elif damage == "one bit":
        first.path.write_bytes(code[:1000] + bytes([code[1000] ^ 1]) + code[1001:])
    elif damage == "another kernel's":
        first.path.write_bytes(other.path.read_bytes())
    else:
        record.write_bytes(other.path.with_name(other.path.name + ".json").read_bytes())
    again = compiler(SMALL, TURING)
    assert not again.was_cached
    assert again.path.read_bytes() == code
    assert again.resources == first.resources
    assert compiler(SMALL, TURING).was_cached
    assert len(compilations) == 3


@nvrtc
def test_resources_that_were_changed_are_not_trusted(empty_cache):
    first = compile_cubin(SMALL, TURING)
    record = first.path.with_name(first.path.name + ".json")
    fields = json.loads(record.read_text())
    fields["resources"]["registers"] += 1
    record.write_text(json.dumps(fields))
    again = compile_cubin(SMALL, TURING)
    assert not again.was_cached
    assert again.resources == first.resources


@nvrtc
def test_resources_of_another_version_are_compiled_anew(empty_cache):
    """Its record is sound, but lacks what this version asks for."""
    first = compile_cubin(SMALL, TURING)
    facts = {"registers": 1, "colours": 2}
    assert cache.keep(first.path.name, first.path.read_bytes(), facts) == first.path
    again = compile_cubin(SMALL, TURING)
    assert not again.was_cached
    assert again.resources == first.resources


@nvrtc
def test_a_warmed_folder_that_can_only_be_read_is_read(empty_cache, compilations, monkeypatch):
    """New kernels stay in memory, and the user is warned once."""
    warmed = compile_cubin(SMALL, TURING)
    with read_only(empty_cache) as folder:
        monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(folder))
        folders.cache_directory.cache_clear()
        found = compile_cubin(SMALL, TURING)
        assert found.was_cached
        assert found.path == folder / warmed.path.name
        assert found.resources == warmed.resources
        with pytest.warns(UserWarning, match=r"cannot be written .*denied.*; set CUPYATTN_CACHE"):
            new = compile_cubin(OTHER, TURING)
        assert not new.was_cached
        assert new.path is None
        assert compile_cubin(OTHER, TURING) == replace(new, was_cached=True)
        compile_ptx(SMALL, TURING)  # no second warning, which would be an error
        assert len(compilations) == 3


@nvrtc
def test_a_damaged_file_in_a_folder_that_can_only_be_read(empty_cache, monkeypatch):
    warmed = compile_cubin(SMALL, TURING)
    code = warmed.path.read_bytes()
    warmed.path.write_bytes(bytes(len(code)))
    with read_only(empty_cache) as folder:
        monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(folder))
        folders.cache_directory.cache_clear()
        with pytest.warns(UserWarning, match="cannot be written"):
            again = compile_cubin(SMALL, TURING)
        assert again.code == code
        assert compile_cubin(SMALL, TURING).was_cached


@nvrtc
def test_a_full_disk_costs_no_kernel(empty_cache, monkeypatch):
    """A full folder for temporary files does no harm either: nothing is written there."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "write_private", full)
    monkeypatch.setattr(folders.tempfile, "mkdtemp", full)
    with pytest.warns(UserWarning, match="No space left on device.* stays in memory"):
        artifact = compile_cubin(SMALL, TURING)
    assert artifact.code.startswith(b"\x7fELF")
    assert compile_cubin(SMALL, TURING) == replace(artifact, was_cached=True)


@nvrtc
def test_a_folder_that_cannot_be_is_passed_by(empty_cache, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(file / "below"))
    with pytest.warns(UserWarning, match="CUPYATTN_CACHE_DIR"):
        artifact = compile_cubin(SMALL, TURING)
    assert artifact.path is None
    assert compile_cubin(SMALL, TURING).was_cached, "this process goes on with what is in memory"

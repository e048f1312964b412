"""The compiler's disk cache: keys, concurrency, damaged files, read-only folders."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.permissions import read_only
from support.processes import environment
from support.search import deep

from cupyattn.benchmark import ceiling_kernels
from cupyattn.ops.softmax import kernels as softmax
from cupyattn.runtime import compile, folders, source
from cupyattn.runtime import kernel_cache as cache
from cupyattn.runtime.arch import arch_of
from cupyattn.runtime.compile import compile_cubin, compile_ptx
from cupyattn.runtime.device import tensor_cores
from cupyattn.runtime.spec import Specialisation

nvrtc = pytest.mark.nvrtc
TURING = arch_of(75)
SMALL = softmax.FORWARD.specialise(75, "float32", 100, 1)  # compiles in a tenth of a second
OTHER = softmax.BACKWARD.specialise(75, "float32", 100, 1)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the CUDA sources that may be changed."""
    copy = tmp_path / "sources"
    shutil.copytree(source.source_root(), copy)
    for module in (compile, source):
        monkeypatch.setattr(module, "source_root", lambda: copy)
    return copy


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


@nvrtc
def test_second_compilation_is_cached(empty_cache, compilations):
    first, second = (compile_cubin(SMALL, TURING) for _ in range(2))
    assert (first.was_cached, second.was_cached) == (False, True)
    assert first.path == second.path
    assert first.resources == second.resources
    assert first.path.parent == empty_cache
    assert len(compilations) == 1


@nvrtc
def test_no_unfinished_file_stays(empty_cache):
    compile_cubin(SMALL, TURING)
    compile_ptx(SMALL, TURING)
    assert {path.suffix for path in empty_cache.iterdir()} == {".cubin", ".json", ".ptx"}


@nvrtc
def test_every_option_makes_another_key(empty_cache):
    paths = [
        compile_cubin(SMALL, TURING).path,
        compile_cubin(SMALL, arch_of(80)).path,
        compile_ptx(SMALL, TURING).path,
        compile_cubin(softmax.FORWARD.specialise(75, "float32", 100, 4), TURING).path,
        compile_cubin(softmax.FORWARD.specialise(75, "float16", 100, 1), TURING).path,
        compile_cubin(softmax.BACKWARD.specialise(75, "float32", 100, 1), TURING).path,
    ]
    assert len(set(paths)) == len(paths)


@nvrtc
def test_another_compiler_makes_another_key(empty_cache, monkeypatch):
    old = compile_cubin(SMALL, TURING)
    monkeypatch.setattr(compile, "nvrtc_version", lambda: (99, 9))
    new = compile_cubin(SMALL, TURING)
    assert new.path != old.path
    assert not new.was_cached


@nvrtc
def test_the_text_of_includes_is_part_of_the_key(empty_cache, sources, compilations):
    """The key has the source and all direct and indirect includes, and nothing else."""
    first = compile_cubin(SMALL, TURING)
    append(sources / "common" / "philox.cuh", "// softmax does not include this\n")
    append(sources / "attention" / "teaching" / "tiled.cu", "// nor this\n")
    assert compile_cubin(SMALL, TURING).path == first.path
    seen = {first.path}
    for changed in (
        "softmax/forward.cu",
        "common/rows.cuh",
        "common/reduce.cuh",
        "common/config.cuh",  # by way of numeric.cuh
    ):
        append(sources / changed, "// changed\n")
        artifact = compile_cubin(SMALL, TURING)
        assert not artifact.was_cached, changed
        assert artifact.path not in seen
        seen.add(artifact.path)
    assert len(compilations) == 5


def test_a_digest_is_remembered_until_another_text_is_read(tmp_path, sources, monkeypatch):
    monkeypatch.setattr(source, "_SETTLED", -1.0)
    file = tmp_path / "own.cu"
    file.write_text('#include "common/rows.cuh"\n', encoding="utf-8")
    seen = [source.source_digest(file)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", None)  # it is not even read
        assert source.source_digest(file) == seen[0]
    append(sources / "common" / "config.cuh", "// changed\n")
    seen.append(source.source_digest(file))
    (tmp_path / "common").mkdir()  # which the compiler takes first
    (tmp_path / "common" / "rows.cuh").write_text("// another\n", encoding="utf-8")
    seen.append(source.source_digest(file))
    assert len({*seen}) == 3


def test_recently_changed_file_is_read_again(sources, monkeypatch):
    """A second change within one clock tick does not change the time stamp."""
    file = sources / "softmax" / "forward.cu"
    now = time.time_ns()
    monkeypatch.setattr(source, "_stamp", lambda path: (now, now, 1))
    first = source.source_digest(file)
    append(file, "// changed\n")
    assert source.source_digest(file) != first


@nvrtc
def test_a_checkout_may_move(empty_cache, sources, compilations, monkeypatch):
    first = compile_cubin(SMALL, TURING)
    moved = sources.rename(sources.parent / "elsewhere")
    for module in (compile, source):
        monkeypatch.setattr(module, "source_root", lambda: moved)
    assert compile_cubin(SMALL, TURING).path == first.path
    assert len(compilations) == 1


PROCESS = """
import sys
from cupyattn.runtime import nvrtc
if "{nvrtc}" == "gone":
    def gone(*args, **options):
        raise SystemExit("NVRTC was called")
    nvrtc.Nvrtc.compile = gone
from cupyattn.runtime.arch import arch_of
from cupyattn.runtime.compile import compile_cubin, compile_ptx
from cupyattn.ops.softmax import kernels as softmax
for compiler in (compile_cubin, compile_ptx):
    artifact = compiler(softmax.FORWARD.specialise(75, "float32", 100, 1), arch_of(75))
    print(artifact.path.name, artifact.was_cached, artifact.resources)
"""


@nvrtc
def test_a_second_process_compiles_nothing(empty_cache):
    def process(nvrtc: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROCESS.format(nvrtc=nvrtc)]
        return subprocess.run(command, capture_output=True, text=True, env=environment())

    first = process("there")
    assert first.returncode == 0, first.stderr
    second = process("gone")
    assert second.returncode == 0, second.stderr
    assert "False" in first.stdout
    assert second.stdout == first.stdout.replace("False", "True")


@nvrtc
def test_threads_compile_one_key_once(empty_cache, compilations):
    """Two keys are compiled concurrently, in two compilations."""
    wanted = [SMALL, softmax.BACKWARD.specialise(75, "float32", 100, 1)] * 6
    barrier, artifacts = threading.Barrier(len(wanted)), []

    def run(specialisation: Specialisation) -> None:
        barrier.wait()
        artifacts.append(compile_cubin(specialisation, TURING))

    threads = [threading.Thread(target=run, args=(specialisation,)) for specialisation in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(artifacts) == len(wanted)
    assert len(compilations) == 2
    assert sum(not artifact.was_cached for artifact in artifacts) == 2
    assert len({artifact.path for artifact in artifacts}) == 2


@nvrtc
def test_processes_that_compile_one_key_at_once_all_get_it(empty_cache):
    """Each process compiles it, and none sees a half-written file."""
    command = [sys.executable, "-c", PROCESS.format(nvrtc="there")]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        for _ in range(2)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 2
    assert len({text.replace("True", "False") for text in printed}) == 1
    assert compile_cubin(SMALL, TURING).was_cached
    assert not list(empty_cache.glob("*.part"))


def test_includes_are_found_beside_the_file_or_below_the_root(sources, tmp_path):
    """The result matches the compiler. Comments and the toolkit's headers do not count."""
    kernel = tmp_path / "kernel.cu"
    kernel.write_text(
        '#include <cuda_fp16.h>\n  #  include "near.cuh"\n#include "common/reduce.cuh"\n'
    )
    (tmp_path / "near.cuh").write_text('#include "kernel.cu"\n')  # round in a circle
    names = {path.name for path in source.read_unit(kernel).files}
    common = {"reduce.cuh", "barrier.cuh", "numeric.cuh", "config.cuh"}
    assert names == {"kernel.cu", "near.cuh", *common}
    before = source.source_digest(kernel)
    append(tmp_path / "near.cuh", "// changed\n")
    assert source.source_digest(kernel) != before


# The two that compile fastest, in a quarter of the next one's time.
FASTEST, NEXT_FASTEST = ceiling_kernels.fma_rate(), tensor_cores.mma_rate()


@nvrtc
@pytest.mark.parametrize("compiler", [compile_cubin, *deep(compile_ptx)])
@pytest.mark.parametrize("suffix", ["", ".json"])
@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b'{"code_bytes": 1, "resources": 2}', b"[" * 100_000]
)
def test_damaged_file_is_recompiled(empty_cache, compiler, suffix, content):
    """Cache cleaners delete single files, and a full disk truncates them."""
    first = compiler(FASTEST, TURING)
    code = first.path.read_bytes()
    damaged = first.path.with_name(first.path.name + suffix)
    damaged.unlink() if content is None else damaged.write_bytes(content)
    again = compiler(FASTEST, TURING)
    assert not again.was_cached
    assert again.path.read_bytes() == code
    assert again.resources == first.resources
    assert compiler(FASTEST, TURING).was_cached


@nvrtc
def test_a_folder_that_was_cleaned_away_is_made_anew(empty_cache):
    compile_cubin(FASTEST, TURING)
    shutil.rmtree(empty_cache)
    assert compile_cubin(FASTEST, TURING).path.is_file()


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
    """An existing file with the same content is fine; otherwise this raises."""

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
@pytest.mark.parametrize("compiler", [compile_cubin, *deep(compile_ptx)])
@pytest.mark.parametrize("damage", ["zeros", "one bit", "another kernel's", "another's record"])
def test_files_of_the_right_size_are_not_trusted(empty_cache, compilations, compiler, damage):
    first, other = compiler(FASTEST, TURING), compiler(NEXT_FASTEST, TURING)
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
    again = compiler(FASTEST, TURING)
    assert not again.was_cached
    assert again.path.read_bytes() == code
    assert again.resources == first.resources
    assert compiler(FASTEST, TURING).was_cached
    assert len(compilations) == 3


@nvrtc
def test_resources_that_were_changed_are_not_trusted(empty_cache):
    first = compile_cubin(FASTEST, TURING)
    record = first.path.with_name(first.path.name + ".json")
    fields = json.loads(record.read_text())
    fields["resources"]["registers"] += 1
    record.write_text(json.dumps(fields))
    again = compile_cubin(FASTEST, TURING)
    assert not again.was_cached
    assert again.resources == first.resources


@nvrtc
def test_resources_of_another_version_are_compiled_anew(empty_cache):
    """The record is valid but lacks fields of this version."""
    first = compile_cubin(FASTEST, TURING)
    facts = {"registers": 1, "colours": 2}
    assert cache.keep(first.path.name, first.path.read_bytes(), facts) == first.path
    again = compile_cubin(FASTEST, TURING)
    assert not again.was_cached
    assert again.resources == first.resources


@nvrtc
def test_a_warmed_folder_that_can_only_be_read_is_read(empty_cache, compilations, monkeypatch):
    """New kernels stay in memory, with one warning."""
    warmed = compile_cubin(FASTEST, TURING)
    with read_only(empty_cache) as folder:
        monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(folder))
        folders.cache_directory.cache_clear()
        found = compile_cubin(FASTEST, TURING)
        assert found.was_cached
        assert found.path == folder / warmed.path.name
        assert found.resources == warmed.resources
        with pytest.warns(UserWarning, match=r"cannot be written .*denied.*; set CUPYATTN_CACHE"):
            new = compile_cubin(NEXT_FASTEST, TURING)
        assert not new.was_cached
        assert new.path is None
        assert compile_cubin(NEXT_FASTEST, TURING) == replace(new, was_cached=True)
        compile_ptx(FASTEST, TURING)  # no second warning, which would be an error
        assert len(compilations) == 3


@nvrtc
def test_a_damaged_file_in_a_folder_that_can_only_be_read(empty_cache, monkeypatch):
    warmed = compile_cubin(FASTEST, TURING)
    code = warmed.path.read_bytes()
    warmed.path.write_bytes(bytes(len(code)))
    with read_only(empty_cache) as folder:
        monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(folder))
        folders.cache_directory.cache_clear()
        with pytest.warns(UserWarning, match="cannot be written"):
            again = compile_cubin(FASTEST, TURING)
        assert again.code == code
        assert compile_cubin(FASTEST, TURING).was_cached


@nvrtc
def test_a_full_disk_costs_no_kernel(empty_cache, monkeypatch):
    """No temporary files are left either."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "write_private", full)
    monkeypatch.setattr(folders.tempfile, "mkdtemp", full)
    with pytest.warns(UserWarning, match="No space left on device.* stays in memory"):
        artifact = compile_cubin(FASTEST, TURING)
    assert artifact.code.startswith(b"\x7fELF")
    assert compile_cubin(FASTEST, TURING) == replace(artifact, was_cached=True)

"""The compiler's disk cache: what makes a key, who compiles, what becomes of damaged files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from processes import environment

from cupyattn.kernels import cache, compile, source
from cupyattn.kernels.arch import arch_of
from cupyattn.kernels.compile import compile_cubin, compile_ptx
from cupyattn.kernels.configs import softmax
from cupyattn.kernels.spec import Specialisation

nvrtc = pytest.mark.nvrtc
TURING = arch_of(75)
SMALL = softmax.forward("float32", 100, 1)  # compiles in less than a tenth of a second


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the CUDA sources that may be changed."""
    copy = tmp_path / "sources"
    shutil.copytree(source.source_root(), copy)
    for module in (compile, source):
        monkeypatch.setattr(module, "source_root", lambda: copy)
    return copy


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that NVRTC was given meanwhile."""
    given: list[Path] = []
    run = compile._run_nvrtc

    def counted(source: Path, *args: Any, **kwargs: Any) -> Any:
        given.append(source)
        return run(source, *args, **kwargs)

    monkeypatch.setattr(compile, "_run_nvrtc", counted)
    return given


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


@nvrtc
def test_the_second_time_it_is_found(empty_cache, compilations):
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
    assert sorted(path.suffix for path in empty_cache.iterdir()) == [
        ".cubin",
        ".json",
        ".json",
        ".ptx",
    ]


@nvrtc
def test_every_option_makes_another_key(empty_cache):
    paths = [
        compile_cubin(SMALL, TURING).path,
        compile_cubin(SMALL, arch_of(80)).path,
        compile_ptx(SMALL, TURING).path,
        compile_cubin(softmax.forward("float32", 100, 4), TURING).path,
        compile_cubin(softmax.forward("float16", 100, 1), TURING).path,
        compile_cubin(softmax.backward("float32", 100, 1), TURING).path,
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
    """Of the source and all that it includes, through other includes too; of nothing else."""
    first = compile_cubin(SMALL, TURING)
    append(sources / "common" / "philox.cuh", "// softmax does not include this\n")
    append(sources / "attention" / "tiled.cu", "// nor this\n")
    assert compile_cubin(SMALL, TURING).path == first.path
    seen = {first.path}
    for changed in (
        "fused/softmax_forward.cu",
        "fused/rows.cuh",
        "common/reduce.cuh",
        "common/config.cuh",  # by way of numeric.cuh
    ):
        append(sources / changed, "// changed\n")
        artifact = compile_cubin(SMALL, TURING)
        assert not artifact.was_cached, changed
        assert artifact.path not in seen
        seen.add(artifact.path)
    assert len(compilations) == 5


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
from cupy_backends.cuda.libs import nvrtc
if "{nvrtc}" == "gone":
    def gone(*args):
        raise SystemExit("NVRTC was called")
    nvrtc.createProgram = nvrtc.compileProgram = gone
from cupyattn.kernels.arch import arch_of
from cupyattn.kernels.compile import compile_cubin, compile_ptx
from cupyattn.kernels.configs import softmax
for compiler in (compile_cubin, compile_ptx):
    artifact = compiler(softmax.forward("float32", 100, 1), arch_of(75))
    print(artifact.path.name, artifact.was_cached, artifact.resources)
"""


@nvrtc
def test_a_second_process_compiles_nothing(empty_cache):
    def process(nvrtc: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROCESS.format(nvrtc=nvrtc)]
        return subprocess.run(command, capture_output=True, text=True, env=environment())

    unable = process("gone")
    assert "NVRTC was called" in unable.stderr, "an empty cache needs NVRTC"
    first = process("there")
    assert first.returncode == 0, first.stderr
    second = process("gone")
    assert second.returncode == 0, second.stderr
    assert "False" in first.stdout
    assert second.stdout == first.stdout.replace("False", "True")


@nvrtc
def test_threads_compile_one_key_once(empty_cache, compilations):
    """And two keys side by side, twice in all."""
    wanted = [SMALL, softmax.backward("float32", 100, 1)] * 6
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
@pytest.mark.parametrize("compiler", [compile_cubin, compile_ptx])
@pytest.mark.parametrize("suffix", ["", ".json"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"code_bytes": 1, "resources": 2}'])
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
    """The key names the content, so what is there will do; if nothing is, it is an error."""

    def held(*paths: Any) -> None:
        raise PermissionError("another process has it open")

    monkeypatch.setattr(cache.os, "replace", held)
    path = tmp_path / "kernel.cubin"
    with pytest.raises(PermissionError):
        cache.write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"there already")
    cache.write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"there already"


@nvrtc
def test_a_folder_that_cannot_be_written_is_passed_by(tmp_path, monkeypatch, empty_cache):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(file / "below"))
    artifact = compile_cubin(SMALL, TURING)
    assert artifact.path.is_file()
    assert tmp_path not in artifact.path.parents
    assert compile_cubin(SMALL, TURING).was_cached, "this process goes on with the same folder"
    shutil.rmtree(artifact.path.parent)


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/cupyattn"),
        ("linux", {"XDG_CACHE_HOME": "", "HOME": "{tmp}"}, ".cache/cupyattn"),
        ("darwin", {"HOME": "{tmp}"}, "Library/Caches/cupyattn"),
        ("win32", {"LOCALAPPDATA": "{tmp}/local"}, "local/cupyattn"),
        ("linux", {"CUPYATTN_CACHE_DIR": "~/mine", "HOME": "{tmp}"}, "mine"),
    ],
)
def test_where_the_cache_is(tmp_path, monkeypatch, platform, variables, expected):
    monkeypatch.delenv("CUPYATTN_CACHE_DIR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    monkeypatch.setattr(cache.sys, "platform", platform)
    directory = cache.cache_directory.__wrapped__()
    assert directory == tmp_path / expected
    assert directory.is_dir()


def test_a_user_without_a_home_has_a_cache_for_the_process(monkeypatch):
    """As in a container whose user id no one has heard of."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("CUPYATTN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache.Path, "home", staticmethod(homeless))
    directory = cache.cache_directory.__wrapped__()
    assert directory.is_dir()
    directory.rmdir()


def test_include_closures():
    root = source.source_root()
    closure = source.include_closure(root / "fused" / "softmax_forward.cu")
    names = {path.relative_to(root).as_posix() for path in closure}
    assert {"fused/softmax_forward.cu", "fused/rows.cuh", "common/config.cuh"} <= names
    assert not any("philox" in name or "tile" in name for name in names)
    assert list(closure) == sorted(closure)


def test_includes_are_found_beside_the_file_or_below_the_root(sources, tmp_path):
    """As the compiler finds them; commented ones and the toolkit's do not count."""
    kernel = tmp_path / "kernel.cu"
    kernel.write_text(
        '#include <cuda_fp16.h>\n  #  include "near.cuh"\n#include "common/reduce.cuh"\n'
    )
    (tmp_path / "near.cuh").write_text('#include "kernel.cu"\n')  # round in a circle
    names = {path.name for path in source.include_closure(kernel)}
    assert names == {"kernel.cu", "near.cuh", "reduce.cuh", "numeric.cuh", "config.cuh"}
    before = source.source_digest(kernel)
    append(tmp_path / "near.cuh", "// changed\n")
    assert source.source_digest(kernel) != before

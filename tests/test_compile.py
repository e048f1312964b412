"""The compiler and its disk cache: what makes a key, who compiles, what a failure says."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import environment

from cupyattn.kernels import cache, compile, configs, source
from cupyattn.kernels.arch import arch_of
from cupyattn.kernels.compile import CompilationError, compile_cubin, compile_ptx
from cupyattn.kernels.configs import attention, softmax
from cupyattn.kernels.registry import KERNELS
from cupyattn.kernels.spec import KernelSpec, Specialisation
from cupyattn.kernels.target import target_of

nvrtc = pytest.mark.nvrtc
TURING = arch_of(75)
SMALL = softmax.forward("float32", 100, 1)  # compiles in less than a tenth of a second


def with_macros(specialisation: Specialisation, **values: Any) -> Specialisation:
    """The same with other values; None leaves the macro out."""
    macros = {**dict(specialisation.macros), **values}
    kept = tuple((name, value) for name, value in macros.items() if value is not None)
    return replace(specialisation, macros=kept)


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


# What is compiled --------------------------------------------------------------------------------


@nvrtc
def test_ptx_is_for_turing(empty_cache):
    """A figure called Turing must not be another architecture's."""
    artifact = compile_ptx(SMALL, TURING)
    ptx = artifact.path.read_bytes()
    assert artifact.path.suffix == ".ptx"
    assert artifact.resources is None
    assert b"\0" not in ptx
    assert [line for line in ptx.splitlines() if line.startswith(b".target")] == [b".target sm_75"]
    assert b".visible .entry softmax_forward(" in ptx


@nvrtc
def test_cubins_are_for_their_architecture(empty_cache):
    contents = set()
    for number in (75, 80, 90):
        artifact = compile_cubin(SMALL, arch_of(number))
        assert artifact.resources is not None
        assert artifact.resources.registers > 0
        contents.add(artifact.path.read_bytes())
    assert len(contents) == 3
    for content in contents:
        assert content.startswith(b"\x7fELF")
        assert b"softmax_forward" in content


@nvrtc
@pytest.mark.parametrize("entry", KERNELS)
def test_sources_have_no_defaults(empty_cache, entry):
    """Whichever macro is missing, the compiler names it or the source says where it comes from."""
    whole = next(s for s in configs.catalogue() if s.spec.entry == entry)
    for name in whole.spec.macros:
        with pytest.raises(CompilationError) as failure:
            compile_cubin(with_macros(whole, **{name: None}), TURING)
        log = str(failure.value)
        assert name in log
        assert "come from a launch-configuration table" in log or name.endswith("PARAMS_BYTES")


@nvrtc
@pytest.mark.parametrize(
    ("specialisation", "name", "message"),
    [
        (attention.tiled("float16", 64, 64, 8), "SHARED_BYTES", "the table counts other shared"),
        (attention.naive("float16", 64, 64), "SHARED_BYTES", "the table counts other shared"),
        (attention.tiled("float16", 64, 64, 8), "PARAMS_BYTES", "describes another struct"),
        (attention.naive("float16", 64, 64), "PARAMS_BYTES", "describes another struct"),
        (SMALL, "PARAMS_BYTES", "describes another struct"),
        (softmax.backward("float32", 100, 1), "PARAMS_BYTES", "describes another struct"),
    ],
    ids=lambda value: value.spec.entry if isinstance(value, Specialisation) else value,
)
def test_table_and_source_cannot_drift(empty_cache, specialisation, name, message):
    """Sixteen bytes more, or fewer, than the source counts."""
    for change in (16, -16):
        macros = {name: dict(specialisation.macros)[name] + change}
        with pytest.raises(CompilationError, match=message):
            compile_cubin(with_macros(specialisation, **macros), TURING)


@nvrtc
@pytest.mark.parametrize(
    ("specialisation", "macros", "message"),
    [
        (attention.tiled("float16", 64, 64, 8), {"VEC": 4}, "single items or 16 bytes"),
        (attention.naive("float16", 64, 64), {"THREADS": 100}, "whole warps"),
        (attention.naive("float16", 64, 64), {"HEAD_DIM": 257}, "head dims are 1 to 256"),
        (SMALL, {"THREADS": 100}, "whole warps"),
        (SMALL, {"LANES": 64}, "a part of a warp or to the whole CTA"),
    ],
)
def test_tiles_that_cannot_be_are_refused(empty_cache, specialisation, macros, message):
    with pytest.raises(CompilationError, match=message):
        compile_cubin(with_macros(specialisation, **macros), TURING)


@nvrtc
def test_a_failure_names_the_file_the_options_and_the_log(empty_cache, tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text('extern "C" __global__ void broken() { no_such_function(); }')
    spec = KernelSpec("broken", str(broken), parameters=(), macros=("N",))
    specialisation = spec.specialise(threads=32, shared_bytes=0, N=3)
    with pytest.raises(CompilationError) as failure:
        compile_cubin(specialisation, TURING)
    for part in ("broken.cu", "-arch=sm_75", "-DN=3", "no_such_function", "error"):
        assert part in str(failure.value)
    assert list(empty_cache.iterdir()) == [], "nothing of it may stay"
    broken.write_text('extern "C" __global__ void broken() {}')
    assert not compile_cubin(specialisation, TURING).was_cached


# The cache ---------------------------------------------------------------------------------------


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
def test_subnormals_are_flushed(empty_cache):
    """As the error bounds take it that they are."""
    ptx = compile_ptx(SMALL, TURING).path.read_text()
    assert "mul.ftz.f32" in ptx
    assert "mul.f32" not in ptx


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


# Sources, logs, and what may be missing ----------------------------------------------------------


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


def test_ptxas_logs():
    log = (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'softmax_forward' for 'sm_75'\n"
        "ptxas info    : Function properties for softmax_forward\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 71 registers, used 1 barriers, 16 bytes cumulative stack size, "
        "32 bytes smem, 488 bytes cmem[0]\n"
    )
    expected = compile.Resources(
        registers=71,
        spill_store_bytes=8,
        spill_load_bytes=12,
        stack_bytes=16,
        static_shared_bytes=32,
    )
    assert compile.parse_ptxas_log(log) == expected
    without = log.replace("32 bytes smem, ", "")
    assert compile.parse_ptxas_log(without) == replace(expected, static_shared_bytes=0)
    for useless in ("", "ptxas info : 0 bytes gmem", log.replace("Used", "Took")):
        with pytest.raises(ValueError, match="no resource figures"):
            compile.parse_ptxas_log(useless)


def test_without_nvrtc_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['cupy_backends'] = None\n"
        "from cupyattn.kernels.compile import nvrtc_version\n"
        "nvrtc_version()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert "RuntimeError: compiling a kernel needs CuPy and NVRTC" in done.stderr
    assert "pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12" in done.stderr


def test_headers_come_from_the_wheel_or_the_toolkit(tmp_path, monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder")
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    find = compile._toolkit_headers.__wrapped__
    with pytest.raises(RuntimeError, match=r"cuda_fp16\.h was not found; install .*CUDA_PATH"):
        find()
    include = tmp_path / "include"
    include.mkdir()
    (include / "cuda_fp16.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find() == include


@nvrtc
@pytest.mark.parametrize(
    "header", sorted(path.name for path in (source.source_root() / "common").glob("*.cuh"))
)
def test_each_primitive_can_be_included_alone(header, tmp_path):
    path = tmp_path / "alone.cu"
    path.write_text(f'#include "common/{header}"\nextern "C" __global__ void alone() {{}}\n')
    spec = KernelSpec(entry="alone", source=str(path), parameters=(), macros=())
    compile_ptx(spec.specialise(threads=32, shared_bytes=0), TURING)


@nvrtc
@pytest.mark.parametrize("number", [75, 80, 90, 120])
def test_code_says_what_it_is_for(number):
    """The library's figures name the target that stands in the code, not the one asked for."""
    machine_code = compile_cubin(SMALL, arch_of(number)).path.read_bytes()
    ptx = compile_ptx(SMALL, arch_of(number)).path.read_bytes()
    assert (target_of(machine_code), target_of(ptx)) == (f"sm_{number}", f"compute_{number}")


def test_what_is_no_code_has_no_target():
    with pytest.raises(ValueError, match="neither a cubin nor PTX"):
        target_of(b"#include")

"""The compiler: options, targets, error messages and missing tools."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from support.processes import environment
from support.search import Search

from cupyattn.ops.attention.kernels.teaching import backward as naive_backward
from cupyattn.ops.attention.kernels.teaching import forward as teaching
from cupyattn.ops.softmax import kernels as softmax
from cupyattn.registry import KERNELS, catalogue
from cupyattn.runtime import compile, source
from cupyattn.runtime import nvrtc as nvrtc_library
from cupyattn.runtime.arch import arch_of, target_of
from cupyattn.runtime.compile import CompilationError, compile_cubin, compile_ptx
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.spec import KernelSpec, Specialisation

nvrtc = pytest.mark.nvrtc
TURING = arch_of(75)
SMALL = softmax.FORWARD.specialise(75, "float32", 100, 1)  # compiles in a tenth of a second


def with_macros(specialisation: Specialisation, **values: Any) -> Specialisation:
    """Return the specialisation with other macros; None removes one."""
    defines = {**specialisation.defines, **values}
    changed = replace(specialisation)
    changed.__dict__["defines"] = {
        name: value for name, value in defines.items() if value is not None
    }
    return changed


@cache
def required_macros(spec: KernelSpec) -> set[str]:
    """The macros without which the source, or a file that it includes, stops the compiler."""
    root = source.source_root() / spec.source
    texts = [path.read_text(encoding="utf-8") for path in source.read_unit(root).files]
    return {name for text in texts for name in re.findall(r"!defined\((\w+)\)", text)}


def test_source_requires_exactly_the_macros_of_the_configuration():
    """The macros that a source requires are in the configuration, or are derived from it."""
    for specialisation in catalogue():
        required = required_macros(specialisation.spec)
        own = {name for name, _ in specialisation.macros}
        assert required <= set(specialisation.defines), specialisation.label
        assert own <= required, (specialisation.label, own - required)


def test_bfloat16_is_defined_if_a_macro_or_an_expression_names_it():
    of_expression = KernelSpec("entry", "source.cu", (), (("names", "bfloat16* bias;"),))
    for named in (
        softmax.FORWARD.specialise(75, "bfloat16", 100, 1),
        of_expression.specialise(threads=32),
    ):
        assert named.defines["BFLOAT16"] == 1
    assert "BFLOAT16" not in SMALL.defines


@nvrtc
def test_ptx_is_for_turing(empty_cache):
    """A metric for Turing must not be that of another architecture."""
    artifact = compile_ptx(SMALL, TURING)
    ptx = artifact.code
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
        contents.add(artifact.code)
    assert len(contents) == 3
    for content in contents:
        assert content.startswith(b"\x7fELF")
        assert b"softmax_forward" in content


@nvrtc
@pytest.mark.parametrize("entry", KERNELS)
def test_sources_have_no_defaults(empty_cache, entry):
    """For any missing macro, the compiler names it or the source says where it comes from."""
    arch, whole = next(
        (arch_of(number), each)
        for number in (TURING.number, NATIVE_ARCH)
        for each in catalogue(number)
        if each.spec.entry == entry
    )
    names = sorted(required_macros(whole.spec))
    for name in names if Search.deep else names[len(entry) % len(names) :][:1]:
        with pytest.raises(CompilationError) as failure:
            compile_cubin(with_macros(whole, **{name: None}), arch)
        log = str(failure.value)
        assert name in log
        assert "from a launch-configuration table" in log or name.endswith("PARAMS_BYTES")


@nvrtc
@pytest.mark.parametrize(
    ("specialisation", "name", "message"),
    [
        (
            teaching.tiled(75, "float16", 64, 64),
            "SHARED_BYTES",
            "the table counts other shared",
        ),
        (
            teaching.naive("float16", 64, 64),
            "SHARED_BYTES",
            "the table counts other shared",
        ),
        (
            teaching.tiled(75, "float16", 64, 64),
            "TEACHING_PARAMS_BYTES",
            "describes another struct",
        ),
        (teaching.naive("float16", 64, 64), "TEACHING_PARAMS_BYTES", "describes another struct"),
        (
            naive_backward.naive("float16", 64, 64),
            "TEACHING_BACKWARD_PARAMS_BYTES",
            "describes another struct",
        ),
        (SMALL, "ROWS_PARAMS_BYTES", "describes another struct"),
        (softmax.BACKWARD.specialise(75, "float32", 100, 1), "ROWS_PARAMS_BYTES", "another struct"),
    ],
    ids=lambda value: value.spec.entry if isinstance(value, Specialisation) else value,
)
def test_wrong_shared_memory_size_does_not_compile(empty_cache, specialisation, name, message):
    """Shared memory differs by 16 bytes from the size that the source computes."""
    for change in (16, -16):
        macros = {name: specialisation.defines[name] + change}
        with pytest.raises(CompilationError, match=message):
            compile_cubin(with_macros(specialisation, **macros), TURING)


@nvrtc
@pytest.mark.parametrize(
    ("specialisation", "macros", "message"),
    [
        (teaching.tiled(75, "float16", 64, 64), {"HEAD_DIM_V": 0}, "head dims are 1 to 256"),
        (teaching.naive("float16", 64, 64), {"THREADS": 100}, "halve the number of threads"),
        (teaching.naive("float16", 64, 64), {"HEAD_DIM": 513}, "head dims are 1 to 512"),
        (SMALL, {"THREADS": 100}, "whole warps"),
        (SMALL, {"LANES": 64}, "of several rows in a CTA, each of many warps"),
    ],
)
def test_impossible_tiles_do_not_compile(empty_cache, specialisation, macros, message):
    with pytest.raises(CompilationError, match=message):
        compile_cubin(with_macros(specialisation, **macros), TURING)


@nvrtc
def test_a_failure_names_the_file_the_options_and_the_log(empty_cache, tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text('extern "C" __global__ void broken() { no_such_function(); }')
    spec = KernelSpec("broken", str(broken), parameters=())
    specialisation = spec.specialise(threads=32, N=3)
    with pytest.raises(CompilationError) as failure:
        compile_cubin(specialisation, TURING)
    for part in ("broken.cu", "-arch=sm_75", "-DN=3", "no_such_function", "error"):
        assert part in str(failure.value)
    assert list(empty_cache.iterdir()) == [], "nothing of it may stay"
    broken.write_text('extern "C" __global__ void broken() {}')
    assert not compile_cubin(specialisation, TURING).was_cached


@nvrtc
def test_subnormals_are_flushed(empty_cache):
    """The error bounds assume that subnormals are flushed."""
    ptx = compile_ptx(SMALL, TURING).code.decode()
    assert "mul.ftz.f32" in ptx
    assert "mul.f32" not in ptx


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
        with pytest.raises(ValueError, match="no resources in the log"):
            compile.parse_ptxas_log(useless)


def test_without_nvrtc_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['cuda.pathfinder'] = None\n"
        "from cupyattn.runtime.compile import nvrtc_version\n"
        "nvrtc_version()"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert "RuntimeError: compiling a kernel needs NVRTC" in done.stderr
    assert "pip install 'cupyattn[emulator]'" in done.stderr


def test_missing_headers_say_what_to_install(tmp_path, monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder")
    find = nvrtc_library.toolkit_headers.__wrapped__
    for found in (None, str(tmp_path)):
        monkeypatch.setattr(
            pathfinder, "find_nvidia_header_directory", lambda name, found=found: found
        )
        with pytest.raises(RuntimeError, match=r"cuda_fp16\.h was not found; install NVRTC and"):
            find()
    (tmp_path / "cuda_fp16.h").touch()
    assert find() == tmp_path


@nvrtc
def test_a_failure_of_nvrtc_is_named():
    with pytest.raises(RuntimeError, match=r"of NVRTC failed: .*INVALID_OPTION"):
        nvrtc_library.load_nvrtc().compile(b"a.cu", b"", [], ["--no-such-option"], ptx=True)


@nvrtc
@pytest.mark.parametrize(
    "header", sorted(path.name for path in (source.source_root() / "common").glob("*.cuh"))
)
def test_each_primitive_can_be_included_alone(header, tmp_path):
    path = tmp_path / "alone.cu"
    path.write_text(f'#include "common/{header}"\nextern "C" __global__ void alone() {{}}\n')
    spec = KernelSpec(entry="alone", source=str(path), parameters=())
    compile_ptx(spec.specialise(threads=32), TURING)


@nvrtc
@pytest.mark.parametrize("number", [75, 80, 90, 120])
def test_target_of_code(number):
    """The library's metrics name the target in the code, not the requested one."""
    machine_code = compile_cubin(SMALL, arch_of(number)).code
    ptx = compile_ptx(SMALL, arch_of(number)).code
    assert (target_of(machine_code), target_of(ptx)) == (f"sm_{number}", f"compute_{number}")


def test_other_bytes_have_no_target():
    with pytest.raises(ValueError, match="neither a cubin nor PTX"):
        target_of(b"#include")

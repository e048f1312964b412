"""Includes of a source: a change recompiles the kernel, and folders do not matter."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.processes import environment
from support.readme import ROOT

from cupyattn import Kernel, backend
from cupyattn.emulator import Report
from cupyattn.registry import KERNELS
from cupyattn.runtime import source
from cupyattn.runtime import source as includes
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.compile import CompilationError, compile_cubin, compile_ptx
from cupyattn.runtime.device import emulated
from cupyattn.runtime.source import read_unit, source_root, texts_named_in
from cupyattn.runtime.spec import KernelSpec

nvrtc = pytest.mark.nvrtc
KERNEL = """
extern "C" __global__ void probe(int* y) {
  y[threadIdx.x] = VALUE;  // STORE
}
"""


def run(folder: Path, text: str, **macros: str) -> int:
    """Compile a text in a folder as a user's kernel; return the kernel's result."""
    (folder / "probe.cu").write_bytes(text.encode())
    y = np.zeros(32, np.int32)
    with backend("emulator"):
        Kernel(folder / "probe.cu", outputs=["y"], threads=32, macros=macros)(1, y)
    return int(y[0])


FOLLOWED = {
    "plain": '#include "e.h"',
    "comment between": '#include/**/"e.h"',
    "comment before": '/* why\n */ # /**/ include /* so */ "e.h" // it is',
    "continued line": '#include \\\n "e.h"',
    "continued word": '#inc\\\nlude "e.\\\r\nh"',
    "digraph": '%:include "e.h"',
    "angle brackets": "#include <e.h>",
    "absolute path": '#include "{folder}/e.h"',
    "absolute path in angle brackets": "#include <{folder}/e.h>",
    "by way of a folder": '#include "below/../e.h"',
    "by way of another": '#include "below/other.h"',
    "after a raw string": 'constexpr char text[] = R"x(/* " )" )x";\n#include "e.h"',
    "after a raw string with a backslash": '__device__ const char text[] = R"x( )\\\nx" /* )x";\n'
    '#include "{folder}/e.h"\n/* */',
    "after an apostrophe": '#pragma mark it\'s below/*.h\n#include "{folder}/e.h"\n/* */',
    "after skipped quotes": '#if 0\n" /*\n#endif\n#include "{folder}/e.h"\n/* */',
    "after quotes": 'constexpr int n = 1\'000, c = \'"\';\n#include "e.h"\n// "',
}


@nvrtc
@pytest.mark.parametrize("form", FOLLOWED)
def test_changed_header_is_recompiled(empty_cache, tmp_path, form):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "other.h").write_text("#include <e.h>\n")  # next to the source
    text = FOLLOWED[form].format(folder=tmp_path) + KERNEL
    for value in (7, 8):
        (tmp_path / "e.h").write_text(f"#pragma once\n#define VALUE {value}\n")
        assert run(tmp_path, text) == value


@nvrtc
def test_new_header_with_higher_priority_is_compiled(empty_cache, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "other.h").write_text('#include "e.h"\n')
    (tmp_path / "e.h").write_text("#define VALUE 7\n")
    text = '#include "below/other.h"' + KERNEL
    assert run(tmp_path, text) == 7
    (tmp_path / "below" / "e.h").write_text("#define VALUE 8\n")
    assert run(tmp_path, text) == 8


REFUSED = {
    "a macro as the name": ('#define HEADER "e.h"\n#include HEADER', 2),
    "an option as the name": ("\n\n#include HEADER", 3),
    "include_next": ('// \\\n\n#include_next "e.h"', 3),
    "include_next of a path": ("#include_next <{folder}/e.h>", 1),
    "a continued macro": ("#include \\\n HEADER", 1),
    "a question": ('#if __has_include("e.h")\n#endif', 1),
}


@nvrtc
@pytest.mark.parametrize("form", REFUSED)
def test_a_line_that_does_not_name_its_file_is_refused(empty_cache, tmp_path, form):
    text, line = REFUSED[form]
    (tmp_path / "e.h").write_text("#define VALUE 7\n")
    message = rf"probe\.cu, line {line}, is '(#include|#if __has).*'; .*; write the name there"
    with pytest.raises(ValueError, match=message):
        run(tmp_path, text.format(folder=tmp_path) + KERNEL, HEADER='"e.h"')


def test_other_text_is_no_include():
    text = b"""
        // #include "a"
        /* #include "b"
        #include "c" */
        const char* s = "#include <d>"; #include "e"
        const char* r = R"(
        #include "f"
        )";
        // goes on \\
        #include "g"
        int x; /*
        */ #include "h"
        #define include(x) #x
        ##include "i"
        #includes "j"
    """
    assert includes.includes_in(text) == ()


def test_names_stay_in_their_lines():
    text = b'a\n#include "b\\\nc" // d\n#include<e>\n'
    first, second = includes.includes_in(text)
    assert (first.name, second.name) == (b"bc", b"e")
    given = includes.with_names(text, {first: b"/x/bc", second: b"/x/e"})
    assert given == b'a\n#include "/x/bc"\\\n // d\n#include"/x/e"\n'


def test_every_include_of_the_library_is_found():
    """The parser finds the same as a search for lines in the library's own style."""
    for path in source_root().rglob("*.cu*"):
        text = path.read_bytes()
        expected = re.findall(rb'^#include ["<](.*)[">]', text, re.MULTILINE)
        assert [each.name for each in includes.includes_in(text)] == expected


@nvrtc
def test_toolkit_headers_are_left_to_the_compiler(empty_cache, tmp_path):
    """This holds for names in quotes too. Headers in untaken branches need not exist."""
    text = '#include "cuda_fp16.h"\n#if 0\n#include "nowhere.h"\n#endif\n'
    assert run(tmp_path, f"{text}#define VALUE int(__half2float(__float2half(3.f))){KERNEL}") == 3


@nvrtc
def test_the_compiler_finds_no_file_that_the_key_lacks(empty_cache, tmp_path, monkeypatch):
    """This includes the working directory of the process."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "e.h").write_text("#define VALUE 7\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(CompilationError, match=r"could not open|cannot open") as failure:
        run(tmp_path, '#include "e.h"' + KERNEL)
    assert f"{tmp_path}/probe.cu(1): " in failure.value.log, "the path, as the user knows it"


@nvrtc
def test_a_file_that_changes_during_a_compilation_is_not_kept_as_it_was(
    empty_cache, tmp_path, monkeypatch
):
    (tmp_path / "e.h").write_text("#define VALUE 7\n")
    real = source.source_digest

    def then_changed(path: Path) -> str:
        digest = real(path)
        (tmp_path / "e.h").write_text("#define VALUE 8\n")
        return digest

    monkeypatch.setattr("cupyattn.runtime.compile.source_digest", then_changed)
    assert run(tmp_path, '#include "e.h"' + KERNEL) == 8
    monkeypatch.setattr("cupyattn.runtime.compile.source_digest", real)
    (tmp_path / "e.h").write_text("#define VALUE 7\n")
    assert run(tmp_path, '#include "e.h"' + KERNEL) == 7


# --- Names that do not depend on where files lie


def spec_in(folder: Path) -> KernelSpec:
    """A kernel in a folder, with a header of its own and one of the library's."""
    folder.mkdir()
    (folder / "e.h").write_text("#define VALUE 7\n")
    text = f'#include "e.h"\n#include "common/reduce.cuh"\n{KERNEL}'
    (folder / "probe.cu").write_text(text)
    return KernelSpec("probe", str(folder / "probe.cu"), parameters=())


@nvrtc
@pytest.mark.parametrize("compiler", [compile_ptx, compile_cubin])
def test_compiled_code_names_no_folder(empty_cache, tmp_path, monkeypatch, compiler):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first = compiler(spec_in(tmp_path / "one").specialise(threads=32), TURING)
    for folder in (tmp_path, source_root()):
        assert os.fsencode(folder) not in first.code
    assert b"/cupyattn/kernel" in first.code
    shutil.rmtree(empty_cache)
    monkeypatch.chdir(tmp_path)
    second = compiler(spec_in(tmp_path / "two").specialise(threads=32), TURING)
    assert not second.was_cached
    assert second.code == first.code
    assert second.path == first.path


@nvrtc
def test_messages_quote_the_sources_in_use(empty_cache, tmp_path):
    """The cached PTX was compiled from a folder that no longer exists."""
    ptx = compile_ptx(spec_in(tmp_path / "one").specialise(threads=32), TURING).code.decode()
    shutil.rmtree(tmp_path / "one")
    spec = spec_in(tmp_path / "two")
    specialisation = spec.specialise(threads=32)
    assert compile_ptx(specialisation, TURING).was_cached
    texts = texts_named_in(ptx, Path(spec.source))
    assert texts["/cupyattn/kernel/probe.cu"] == Path(spec.source).read_text()
    kernel = emulated.EmulatedDevice(emulated.emulator.Checks.all()).load(specialisation)
    with pytest.raises(emulated.emulator.KernelFault, match=r"probe\.cu:5: y\[.*// STORE"):
        emulated.emulator.launch(kernel._module, "probe", 1, 32, [np.zeros(1, np.int32)])


def test_files_have_names_of_their_own(tmp_path):
    """A copy of the CUDA sources has their names; files that it lacks are the library's."""
    root = source_root()
    kernel = KERNELS["softmax_forward"].source
    names = set(read_unit(root / kernel).files.values())
    assert {f"/cupyattn/cuda_src/{kernel}", "/cupyattn/cuda_src/common/rows.cuh"} <= names
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    assert source.source_digest(copy / kernel) == source.source_digest(root / kernel)
    (copy / "own.cu").write_text('#include "common/mma.cuh"\n#include "common/rows.cuh"\n')
    (copy / "common" / "mma.cuh").unlink()
    names = set(read_unit(copy / "own.cu").files.values())
    assert {"/cupyattn/library/common/mma.cuh", "/cupyattn/cuda_src/common/rows.cuh"} <= names
    assert len(names) == len(read_unit(copy / "own.cu").files)


TESTED = ("cuda_src", "cupyattn", "pyproject.toml", "tests/support", "tests/conftest.py")
CHECKS = ("tests/emulator/test_checks.py", "tests/emulator/kernels")


@nvrtc
@pytest.mark.deep
def test_the_emulators_checks_pass_from_two_folders_with_one_cache(empty_cache, tmp_path):
    """Clone, test, delete, clone to another folder, test."""
    without, compiled = shutil.ignore_patterns("__pycache__"), []
    for name in ("one", "two"):
        folder = tmp_path / name
        for each in (*TESTED, *CHECKS):
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / each).is_dir():
                shutil.copytree(ROOT / each, folder / each, ignore=without)
            else:
                shutil.copy(ROOT / each, folder / each)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, CHECKS[0]],
            cwd=folder,
            capture_output=True,
            text=True,
            env=environment() | {"PYTHONPATH": str(folder)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout
        assert "skipped" not in done.stdout
        compiled.append({path.name for path in empty_cache.glob("*.ptx")})
        shutil.rmtree(folder)
    assert compiled[0]
    assert compiled[1] == compiled[0], "the second run compiles nothing"


@nvrtc
def test_a_report_names_lines_of_the_sources(empty_cache, tmp_path):
    spec, report = spec_in(tmp_path / "one"), Report()
    y = np.zeros(32, np.int32)
    with backend("emulator", report=report):
        Kernel(spec.source, outputs=["y"], threads=32)(1, y)
    assert {line.file for line in report.lines} == {"/cupyattn/kernel/probe.cu"}

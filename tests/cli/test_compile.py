"""``python -m cupyattn compile``: what it builds, what it reports, when it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.processes import environment, run
from support.search import Search

from cupyattn.cli import INTERRUPTED, compile, configurations, main
from cupyattn.cli.configurations import compiled_kernel
from cupyattn.ops.softmax import kernels as softmax
from cupyattn.registry import catalogue
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import KernelSpec, Specialisation


def first_of_each_kernel(specialisations: Iterable[Specialisation]) -> list[Specialisation]:
    """Return one specialisation of each kernel."""
    found: dict[str, Specialisation] = {}
    for each in specialisations:
        found.setdefault(each.spec.entry, each)
    return [*found.values()]


def asked(capsys, *arguments: str) -> dict:
    assert main(["compile", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.nvrtc
def test_compile_for_turing(monkeypatch, capsys):
    rows = first_of_each_kernel(catalogue())[:: 1 if Search.deep else 40]
    monkeypatch.setattr(configurations, "catalogue", lambda _: iter(rows))
    report = asked(capsys, "--arch", "75")
    assert report["ok"] is True
    assert report["arch"] == "sm_75"
    assert report["failures"] == []
    listed = [(kernel["kernel"], tuple(kernel["macros"].items())) for kernel in report["kernels"]]
    assert listed == [(each.spec.entry, each.macros) for each in rows]
    for kernel in report["kernels"]:
        assert 0 < kernel["registers"] <= TURING.registers_per_thread
        assert kernel["shared_bytes"] <= TURING.shared_bytes_per_cta
        assert kernel["ctas_per_sm"] >= 1


def test_the_whole_catalogue_is_compiled(uncompiled, capsys):
    """Whether each row compiles and fits is what the gates find out."""
    listed = [(kernel["kernel"], kernel["macros"]) for kernel in asked(capsys)["kernels"]]
    assert listed == [(each.spec.entry, dict(each.macros)) for each in catalogue()]


@pytest.mark.nvrtc
def test_compile_finds_what_it_compiled(empty_cache, monkeypatch, capsys):
    rows = [softmax.FORWARD.specialise(75, "float32", length, 1) for length in (100, 1000)]
    monkeypatch.setattr(configurations, "catalogue", lambda _: iter(rows))
    assert main(["compile", "--jobs", "2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [kernel["cached"] for kernel in first["kernels"]] == [False, False]
    assert len(list(empty_cache.glob("*.cubin"))) == 2
    assert main(["compile", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert [kernel["cached"] for kernel in second["kernels"]] == [True, True]
    assert main(["compile"]) == 0
    printed = capsys.readouterr().out
    assert "in the cache before: 2. " in printed
    assert "every kernel compiles and fits" in printed


def kernel_of(source: str, folder: Path, shared_bytes: int = 0):
    path = folder / "kernel.cu"
    path.write_text(source)
    return KernelSpec("kernel", str(path), ()).specialise(threads=32, shared_bytes=shared_bytes)


@pytest.mark.nvrtc
def test_compile_fails_for_a_kernel_that_does_not_compile(
    empty_cache, tmp_path, monkeypatch, capsys
):
    rows = [kernel_of("#error out of order\n", tmp_path)]
    monkeypatch.setattr(configurations, "catalogue", lambda _: iter(rows))
    assert main(["compile", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["kernels"] == []
    assert "out of order" in report["failures"][0]["error"]
    assert main(["compile"]) == 1
    assert "did not compile: kernel" in capsys.readouterr().out


@pytest.mark.nvrtc
@pytest.mark.parametrize(("shared_bytes", "code"), [(65_536, 0), (65_537, 1)])
def test_compile_fails_for_a_kernel_that_does_not_fit(
    empty_cache, tmp_path, monkeypatch, capsys, shared_bytes, code
):
    source = 'extern "C" __global__ void kernel() {}\n'
    rows = [kernel_of(source, tmp_path, shared_bytes)]
    monkeypatch.setattr(configurations, "catalogue", lambda _: iter(rows))
    assert main(["compile"]) == code
    assert ("does not fit on an SM" in capsys.readouterr().out) == bool(code)


@pytest.mark.nvrtc
def test_compile_marks_spills_without_failing(monkeypatch, capsys):
    def spilling(specialisation, arch):
        return compiled_kernel(specialisation, arch) | {"spill_store_bytes": 12}

    rows = [softmax.FORWARD.specialise(75, "float32", 100, 1)]
    monkeypatch.setattr(configurations, "catalogue", lambda _: iter(rows))
    monkeypatch.setattr(compile, "compiled_kernel", spilling)
    assert main(["compile"]) == 0
    assert "  spilling registers to memory: 1\n" in capsys.readouterr().out


def test_compile_without_a_compiler(monkeypatch, capsys):
    def absent():
        raise RuntimeError("NVRTC is not here")

    monkeypatch.setattr(compile, "nvrtc_version", absent)
    assert main(["compile", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "command": "compile",
        "ok": False,
        "error": "NVRTC is not here",
    }
    assert "NVRTC is not here" in printed.err


def test_kernels_and_head_dims_that_are_asked_for(uncompiled, capsys):
    result = asked(capsys, "--kernel", "attention_forward", "--kernel", "attention_backward_delta")
    kernels = {"attention_forward", "attention_backward_delta"}
    assert {each["kernel"] for each in result["kernels"]} == kernels
    few = asked(capsys, "--kernel", *kernels, "--head-dim", "64", "96")["kernels"]
    dims = {(each["kernel"], each["macros"]["HEAD_DIM_V"]) for each in few}
    assert dims == {(kernel, dim) for kernel in kernels for dim in (64, 96)}
    rows = [each for each in catalogue() if configurations.head_dim_of(each) == 80]
    assert len(asked(capsys, "--head-dim", "80")["kernels"]) == len(rows) > 0


def test_rows_are_those_of_the_architecture(uncompiled, monkeypatch, capsys):
    asked_for = []

    def spy(number):
        asked_for.append(number)
        return catalogue(number)

    monkeypatch.setattr(configurations, "catalogue", spy)
    kernel = ("--kernel", "attention_forward")
    turing, newer = (asked(capsys, *kernel, "--arch", number)["kernels"] for number in ("75", "90"))
    assert asked_for == [75, 90]
    assert [each["macros"] for each in turing] != [each["macros"] for each in newer]


def test_it_says_what_it_found_none_of(uncompiled, capsys):
    arguments = ("--kernel", "softmax_forward", "attention_forward", "--head-dim", "64", "72")
    assert asked(capsys, *arguments)["without_rows"] == [
        "softmax_forward has no row of head dim 64 or 72",
        "no row has head dim 72: it is compiled at its first call",
    ]
    assert main(["compile", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "  softmax_forward has no row of head dim 64 or 72\n" in printed
    assert asked(capsys, "--head-dim", "64")["without_rows"] == []


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("attention_forward", "head dims 40, 64, 80"),
        ("softmax_forward", "every head dim in one; leave --head-dim out"),
    ],
)
def test_nothing_found_is_an_error(kernel, says, uncompiled, capsys):
    assert main(["compile", "--kernel", kernel, "--head-dim", "72"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"compile: --head-dim 72; there are configurations of {kernel} for {says}" in printed.err


# --- Ctrl-C


def test_ctrl_c_waits_for_no_compilation(monkeypatch):
    """The first of three rows is compiled, the second is under way, the third never begins."""
    begun, let_go = [], threading.Event()

    def compiled(row, arch):
        begun.append(row)
        if row > 0:
            let_go.wait(60)
        return {}

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(compile, "compiled_kernel", compiled)
    try:
        with pytest.raises(KeyboardInterrupt):
            compile._compile_side_by_side([0, 1, 2], TURING, 1, interrupt)
    finally:
        let_go.set()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(5)
    assert 2 not in begun


def test_ctrl_c_while_threads_start(monkeypatch):
    begun = []

    class Interrupted(threading.Thread):
        def start(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(compile, "compiled_kernel", lambda row, arch: begun.append(row))
    monkeypatch.setattr(compile, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        compile._compile_side_by_side([0, 1, 2], TURING, 2, lambda: None)
    assert begun == []


def with_ctrl_c() -> None:
    """Undo what a shell does to commands in the background, which then are deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.nvrtc
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_compile_stops_at_ctrl_c(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "cupyattn", "compile", "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {"CUPYATTN_CACHE_DIR": str(tmp_path)},
        preexec_fn=with_ctrl_c,
    )
    with process:
        give_up = time.monotonic() + 60
        while not list(tmp_path.glob("*.cubin")) and process.poll() is None:
            assert time.monotonic() < give_up, "nothing was compiled"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert errors.splitlines()[-1] == "interrupted"
    files = [path.name for path in tmp_path.iterdir()]
    assert not [name for name in files if name.endswith(".part")]
    assert len(files) < len(list(catalogue())) // 2


END_WHILE_A_THREAD_WRITES = """
import pathlib, sys, threading, time
from cupyattn.runtime.kernel_cache import end_process, write_atomically

def write():
    for number in range(10**9):
        write_atomically(pathlib.Path(sys.argv[1]) / str(number % 3), bytes(1_000_000))

threading.Thread(target=write).start()
time.sleep(0.2)
end_process(130)
"""


def test_a_process_that_ends_at_once_leaves_no_half_written_file(tmp_path):
    for attempt in range(5 if Search.deep else 2):
        folder = tmp_path / str(attempt)
        result = run(str(folder), launcher=("-c", END_WHILE_A_THREAD_WRITES))
        assert result.returncode == 130, result.stderr
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert sizes
        assert set(sizes) <= {"0", "1", "2"}
        assert set(sizes.values()) == {1_000_000}


FORK_WHILE_A_THREAD_WRITES = """
import os, pathlib, sys, threading
from cupyattn.runtime.kernel_cache import write_atomically

folder, stop = pathlib.Path(sys.argv[1]), threading.Event()

def write():
    while not stop.is_set():
        write_atomically(folder / "parent", bytes(1_000_000))

thread = threading.Thread(target=write)
thread.start()
for _ in range(20):
    child = os.fork()
    if not child:
        write_atomically(folder / "child", b"written")
        os._exit(0)
    os.waitpid(child, 0)
stop.set()
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_child_forked_while_a_thread_writes_can_write(tmp_path):
    launcher = ("-W", "ignore", "-c", FORK_WHILE_A_THREAD_WRITES)
    result = run(str(tmp_path), launcher=launcher)  # ends, which it would not if a child hung
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "child").read_bytes() == b"written"

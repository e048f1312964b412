"""The output of commands: terminals wide and narrow, pipes, with rich and without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import chain, repeat

import pytest
from support.processes import environment, run
from support.search import deep

import cupyattn.runtime.progress as progress_module
from cupyattn.cli import compile, demo, info, main, profile, terminal, turing
from cupyattn.cli.configurations import rows_of
from cupyattn.cli.terminal import RichTerminal, Terminal
from cupyattn.runtime.progress import progress
from cupyattn.turing import KernelFigures, LoopFigures, Utilisation

WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = None; import runpy; sys.argv[0] = 'cupyattn'; "
    "runpy.run_module('cupyattn', run_name='__main__', alter_sys=False)"
)


def run_in_terminal(
    *arguments: str, launcher: tuple[str, ...] = ("-m", "cupyattn"), columns: int = 150
) -> str:
    """Run with stdout and stderr on a pseudo-terminal; returns what a person would see."""
    pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *launcher, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment() | {"TERM": "xterm-256color", "COLUMNS": str(columns), "NO_COLOR": ""},
    )
    os.close(theirs)
    shown = bytearray()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        try:
            while chunk := screen.read(4096):
                shown += chunk
        except OSError:  # Linux reports the end of a pseudo-terminal as an error
            pass
    assert process.wait() == 0
    return shown.decode()


WIDTH = 80
# Rows with the longest names of all, of a kernel that is compiled soon.
LONG_NAMES = ("compile", "--kernel", "attention_backward_f32_dbias")
LONG_NAME = "  float16, D 512, 1 lanes, BIAS=float16, MASK,"
RICH, PLAIN = ("-m", "cupyattn"), ("-c", WITHOUT_RICH)
TERMINALS = [Terminal, pytest.param(RichTerminal, id="rich")]


@pytest.fixture(params=TERMINALS)
def shown(request, monkeypatch, capsys):
    """Run a command at 80 columns; gives its result, and the lines that it prints."""
    if request.param is RichTerminal:
        pytest.importorskip("rich")

    def shown(command, *arguments: str):
        main([command.__name__.rpartition(".")[-1], *arguments, "--json"])
        result = json.loads(capsys.readouterr().out)
        monkeypatch.setenv("COLUMNS", str(WIDTH))
        command.show(result, request.param())
        return result, capsys.readouterr().out.splitlines()

    return shown


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


# --- 80 columns


@pytest.mark.nvrtc
def test_demo_at_80_columns(shown):
    result, lines = shown(demo, "--seqlen", "16")
    assert max(map(len, lines)) <= WIDTH
    for ran in result["runs"]:
        assert sum(line.startswith(f"  {ran['implementation']} ") for line in lines) >= 3
        if ran["launch"]:
            assert f"HEAD_DIM={ran['launch']['macros']['HEAD_DIM']}" in words(lines)


def test_compile_at_80_columns(shown, uncompiled):
    kernels = ("attention_forward", "attention_backward_f32_dkdv", "softmax_forward")
    result, lines = shown(compile, "--kernel", *kernels)
    assert max(map(len, lines)) <= WIDTH
    for kernel in result["kernels"]:
        assert kernel["row"] in words(lines)
    figures = re.compile(r" +\d+ +\d+ +\d+ +\d+ +\d+  (cached|\d+\.\d\d s)$")
    assert sum(bool(figures.search(line)) for line in lines) == len(result["kernels"])


def test_turing_at_80_columns(shown, monkeypatch):
    played = Utilisation(0.625, 0.5, 0.75)
    loop = LoopFigures(0, 9, "tensor", 8, 1038, 4, {}, 0, 1200, {"lsu": 640.0}, 512.0, 5e5, played)
    figures = KernelFigures(255, 32_768, 2, (loop,))
    monkeypatch.setattr(turing, "analyse", lambda *_, **__: figures)
    monkeypatch.setattr(turing, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(turing, "disassembler_version", lambda: "13.5.37")
    result, lines = shown(turing)
    assert max(map(len, lines)) <= WIDTH
    rates = re.compile(r" +0\.625 +\d+\.\d( TOPS)? +\d+\+-\d+$")
    rows = [line for line in lines if rates.search(line)]
    assert len(rows) == len(result["rows"])
    for row, line in zip(result["rows"], rows, strict=True):
        names = row["row"], turing.shorter(row["row"])  # the long ones of a kernel
        assert line.startswith(tuple(f"  {name}  " for name in names)), "a row is one line"
    assert any(line.startswith("  Left out at 80 columns: range") for line in lines)


@pytest.mark.nvrtc
def test_profile_at_80_columns(shown):
    result, lines = shown(profile, "attention", "--seqlen", "16", "--all-lines")
    assert max(map(len, lines)) <= WIDTH
    for line in result["kernels"][0]["lines"]:
        assert words([line["instruction"] or line["source"]]) in words(lines)
        assert f" {line['file']}:{line['line']}: " in words(lines)


def test_info_at_80_columns(shown):
    result, lines = shown(info)
    assert {line.split()[0] for line in lines if line} >= set(result["kernels"])
    folder = result["cache"]["folder"]
    assert all(len(line) <= WIDTH or folder in line for line in lines)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("launcher", "columns"),
    [(PLAIN, 50), *deep((RICH, 80), (RICH, 50), (PLAIN, 80))],
    ids=["plain-50", "rich-80", "rich-50", "plain-80"],
)
def test_on_a_narrow_terminal(launcher, columns):
    shown = run_in_terminal(*LONG_NAMES, launcher=launcher, columns=columns)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()
    assert any(line.startswith(LONG_NAME) for line in lines)
    assert all(len(line) <= columns for line in lines if "compiling" not in line)
    total = len(rows_of([LONG_NAMES[-1]], None))
    assert launcher is RICH or f"\rcompiling for sm_75 {total}/{total}" in shown


@pytest.mark.nvrtc
def test_in_a_pipe_the_width_is_that_of_the_environment(monkeypatch, capsys):
    def printed(columns: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", columns)
        assert main(LONG_NAMES) == 0
        return capsys.readouterr().out.splitlines()

    narrow, wide = printed("80"), printed("200")
    assert any(line.startswith(LONG_NAME) and line.endswith("cached") for line in wide)
    assert max(map(len, narrow)) <= 80 < max(map(len, wide))


# --- layout


def test_a_table_that_fits(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "15")
    Terminal().table(("name", "bytes"), [("[a]", 5), ("bb", 1234)])
    assert capsys.readouterr().out == (
        "  name  bytes\n"
        "  [a]       5\n"
        "  bb     1234\n"
    )  # fmt: skip


def test_a_table_that_does_not_fit_cuts_nothing():
    columns = ("row", "bytes", "threads", "time")
    rows = [("a name of several words", 5, 1024, "1.5 s"), ("short", 123456, 32, "")]
    heading, lines, _ = terminal.folded_table(columns, rows, 18)
    assert heading == ["  row", "     bytes", "    threads  time"]
    assert lines == [
        *("  a name of", "  several words", "         5", "       1024  1.5 s"),
        *("  short", "    123456", "         32"),
    ]
    assert terminal.folded_table(columns, rows, 200)[1][0].split("  ")[1] == rows[0][0]


NAMED = [
    ("softmax", 768, "cupyattn", "5.0 us", "0.90"),
    ("softmax", 768, "torch eager", "6.0 us", ""),
    ("rms_norm", 768, "cupyattn", "7.0 us", "0.80"),
    ("rms_norm", 768, "torch eager", "8.0 us", "0.70"),
]


@pytest.mark.parametrize("width", range(14, 60))
def test_columns_that_name_a_row_stay_together(width):
    """They are in the row's line, or the first are once above the rows that share them."""
    columns = ("operation", "width", "ran", "median time", "of ceiling")
    heading, lines, _ = terminal.folded_table(columns, NAMED, width, names=3)
    assert sorted(words(heading).split()) == sorted(" ".join(columns).split())
    assert max(map(len, heading + lines)) <= width
    whole = [[str(cell) for cell in row] for row in NAMED]
    shared = [[whole[0], whole[1][k:], whole[2], whole[3][k:]] for k in range(3)]
    found = words(lines)
    assert found in [" ".join(cell for row in rows for cell in row if cell) for rows in shared]


def test_rows_below_their_names():
    columns = ("operation", "width", "ran", "median time", "of ceiling")
    heading, lines, _ = terminal.folded_table(columns, NAMED, 36, names=3)
    assert heading == [
        "  operation  width",
        "                 median  of",
        "    ran          time    ceiling",
    ]
    assert lines[:5] == [
        "  softmax      768",
        "    cupyattn     5.0 us  0.90",
        "    torch eager  6.0 us",
        "  rms_norm     768",
        "    cupyattn     7.0 us  0.80",
    ]
    _, lines, _ = terminal.folded_table(columns, NAMED, 30, names=3)
    assert lines[:2] == ["  softmax      768  cupyattn", "    5.0 us  0.90"]
    assert lines[2:5] == ["  softmax      768  torch", "  eager", "    6.0 us"], "nothing is cut"


def test_spare_columns_are_left_out_before_a_row_gets_two_lines():
    columns = ("operation", "width", "ran", "median time", "of ceiling")
    _, lines, left_out = terminal.folded_table(columns, NAMED, 45, names=3, spare=("of ceiling",))
    assert left_out == ["of ceiling"] and len(lines) == len(NAMED)
    _, lines, left_out = terminal.folded_table(columns, NAMED, 60, names=3, spare=("of ceiling",))
    assert left_out == [] and len(lines) == len(NAMED)


@pytest.mark.parametrize("width", [1, 10, 40])
def test_nothing_is_lost_however_narrow(width):
    text = "  - a path: /home/somebody/with-a-long-name/.cache and more\n\nthe  end"
    lines = terminal.paragraphs(text, width)
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert all(line.startswith("  ") for line in lines[: lines.index("")])
    facts = terminal.folded_facts({"name": text}, width)
    assert " ".join(" ".join(facts).split()) == f"name {' '.join(text.split())}"


def test_a_verbatim_text_is_not_folded(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    Terminal().verbatim("kernel.cu(3): error: expected a ;\n                    ^")
    assert capsys.readouterr().out.splitlines() == [
        "kernel.cu(3): error: expected a ;",
        "                    ^",
    ]


# --- progress


def test_progress_in_a_pipe_says_now_and_then_how_far_it_is(monkeypatch, capsys):
    now = iter((0.0, 2.0, 4.9, 5.0, 9.9, 11.0))
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(now))
    with progress("modelling", 9) as step:
        for _ in range(5):
            step()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "modelling 3/9 ETA 0:00:09\nmodelling 5/9 ETA 0:00:09\n"


def test_the_time_left_is_estimated_without_the_first_step_and_from_where_it_began(
    monkeypatch, capsys
):
    now = iter((0.0, 100.0, 130.0, 160.0, 190.0))
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(now))
    with progress("training", 1000, 996) as step:
        for _ in range(4):
            step("loss 0.5")
    assert capsys.readouterr().err.splitlines() == [
        "training 997/1000 ETA 0:05:00 loss 0.5",
        "training 998/1000 ETA 0:01:00 loss 0.5",
        "training 999/1000 ETA 0:00:30 loss 0.5",
        "training 1000/1000 loss 0.5",
    ]


def test_the_bar_of_rich_shows_the_time_left(monkeypatch, capsys):
    pytest.importorskip("rich")
    now = chain((0.0,), repeat(3700.0))
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress("training", 3) as step:
        step("loss 0.5")
    assert "ETA 2:03:20 loss 0.5" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", ["pipe", "rich", "dumb"])
def test_stages_are_shown_on_stderr(terminal, monkeypatch, capsys):
    if terminal != "pipe":
        pytest.importorskip("rich")
        monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "dumb" if terminal == "dumb" else "xterm")
    with progress_module.stages() as say:
        say("compiling a [kernel]")
    with progress_module.stages(shown=False) as say:
        say("hidden")
    printed = capsys.readouterr()
    assert printed.out == "" and "hidden" not in printed.err
    assert "compiling a [kernel]" in printed.err
    assert (printed.err == "compiling a [kernel]\n") == (terminal != "rich")


def test_progress_tells_of_a_step_and_goes_on_from_one(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.0)
    with progress("training", 9, 6) as step:
        step("loss 0.5")
        step()
    assert capsys.readouterr().err == "training 7/9 loss 0.5\ntraining 8/9\n"
    monkeypatch.setattr(progress_module, "has_rich", lambda: False)
    monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: True)
    with progress("training", 9, 6) as step:
        step("loss 0.5")
    assert capsys.readouterr().err == "\rtraining 7/9 loss 0.5\n"


def test_progress_without_stderr_prints_nothing(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(sys, "stderr", None)
    with progress("training", 2) as step:
        step("loss 0.5")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("missing", [["stderr"], ["stdout"], ["stdin", "stdout", "stderr"]])
def test_commands_run_without_streams(monkeypatch, missing):
    for name in missing:
        monkeypatch.setattr(sys, name, None)
    assert main(["info"]) == main(["info", "--json"]) == 0
    assert [getattr(sys, name) for name in missing] == [None] * len(missing)


@pytest.mark.nvrtc
def test_turing_in_a_pipe_is_not_silent(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(turing, "kernel_row", lambda *_, **__: {"kernel": "k", "row": "r"})
    monkeypatch.setattr(turing, "disassembler_version", lambda: "13.5.37")
    assert main(["turing", "--kernel", "attention_naive", "--json"]) == 0
    assert re.fullmatch(r"(modelling \d/3( ETA \d:\d\d:\d\d)?\n){3}", capsys.readouterr().err)


# --- pipes and rich


@pytest.mark.skipif(os.name != "posix", reason="broken pipes are POSIX")
def test_a_reader_that_stops_early_is_no_error():
    ours, theirs = os.pipe()
    os.close(ours)
    result = subprocess.run(
        [sys.executable, "-m", "cupyattn", "info"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    os.close(theirs)
    assert result.returncode == 1
    assert result.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize(
    ("unbuffered", "options"), [("", ["--json"]), *deep(("1", []))], ids=["at the end", "at once"]
)
def test_a_full_disk_is_told_in_a_line(unbuffered, options):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "cupyattn", "info", *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert result.returncode == 1
    assert re.fullmatch(
        r"python -m cupyattn: the output cannot be written \(.*No space left.*\)\n", result.stderr
    )


def test_another_error_of_the_system_keeps_its_traceback(monkeypatch):
    """It is no fault of what is printed."""

    def fails(_):
        raise OSError("mine")

    monkeypatch.setattr(info, "run", fails)
    with pytest.raises(OSError, match="mine"):
        main(["info"])


INTERRUPTED_IMPORT = """
import runpy, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "cupyattn.cli.compile":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
sys.argv = ["cupyattn", "info"]
runpy.run_module("cupyattn", run_name="__main__")
"""


def test_ctrl_c_while_modules_are_imported():
    result = run(launcher=("-c", INTERRUPTED_IMPORT))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_output_is_plain_without_rich(empty_cache, capsys):
    shown = run_in_terminal("info", launcher=PLAIN)
    assert main(["info"]) == 0
    assert shown.replace("\r\n", "\n") == capsys.readouterr().out


def test_rich_on_a_terminal():
    pytest.importorskip("rich")
    shown = run_in_terminal("info")
    assert "\x1b[1m" in shown  # bold headings
    assert "attention_tiled" in shown


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_turns_off_bold(no_color, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    RichTerminal().title("Kernels")
    assert capsys.readouterr().out == ("Kernels\n" if no_color else "\x1b[1mKernels\x1b[0m\n")

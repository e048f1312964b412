"""``python -m cupyattn.benchmark profiles``: what is profiled, read, written, said and printed."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from support.fake_gpu import HEADER

import cupyattn
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.frame import gpu_command
from cupyattn.benchmark.profiles import command, driver, metrics, taking
from cupyattn.benchmark.profiles.binding import binding
from cupyattn.benchmark.profiles.calls import (
    CHANGED,
    WITHOUT_PROFILE,
    YOUNGER,
    ProfiledCall,
    profiled_calls,
)
from cupyattn.cli.recorder import LaunchRecorder
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.registry import KERNELS

# Of the shape of ncu's: words of its own, a line of units, thousands with commas, no such counter.
NUMBERS = {
    "gpu__time_duration.sum": ("ns", "12,345"),
    "launch__registers_per_thread": ("register/thread", "40"),
    "launch__shared_mem_per_block_static": ("byte/block", "1,024"),
    "launch__shared_mem_per_block_dynamic": ("byte/block", "512"),
    "dram__bytes.sum": ("byte", "1,000,000"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("", "25"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", "100"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "81.25"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("", "n/a"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "6"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "2"),
}
BEFORE = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream")


def printed(*kernels: str) -> str:
    rows = [
        (*BEFORE, *NUMBERS),
        ("",) * len(BEFORE) + tuple(unit for unit, _ in NUMBERS.values()),
        *(
            (str(at), "7", "python3", "here", kernel, "1", "7", *(n for _, n in NUMBERS.values()))
            for at, kernel in enumerate(kernels)
        ),
    ]
    table = ["".join(f'"{cell}",' for cell in row).rstrip(",") for row in rows]
    said = ["==PROF== Connected to process 7 (/usr/bin/python3)"]
    return "\n".join([*said, *table, "==PROF== Disconnected from process 7"]) + "\n"


def launch(kernel: str) -> dict:
    return {"kernel": kernel, "row": "D 64", "call": "a call", "ctas": 132, "threads": 128}


DRIVEN = {**HEADER, "multiprocessors": 132, "launches": [launch("rope"), launch("embedding")]}


def test_the_table_of_ncu_is_read():
    first, second = metrics.parse(printed("rope", "embedding").splitlines())
    assert (first.kernel, second.kernel) == ("rope", "embedding")
    assert first.numbers["dram__bytes.sum"] == 1e6
    assert first.numbers["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"] is None
    with pytest.raises(ValueError, match="Kernel Name"):
        metrics.parse(["==ERROR== No kernels were profiled."])


def test_a_row_has_what_was_measured_and_what_was_launched():
    row, _ = metrics.rows_of(
        metrics.parse(printed("rope", "embedding").splitlines()), DRIVEN["launches"]
    )
    assert row.items() >= launch("rope").items()
    assert (row["microseconds"], row["registers"], row["shared_bytes"]) == (12.345, 40, 1536)
    assert (row["dram_bytes"], row["bank_conflicts"], row["dram"]) == (10**6, 0.25, 0.812)
    assert row["pipes"]["tensor"] is None
    assert row["l2"] is None, "what is not in the table"
    assert row["stalls"] == {"long_scoreboard": 0.75, "selected": 0.25}


def test_other_launches_than_were_made_are_refused():
    measured = metrics.parse(printed("embedding", "rope").splitlines())
    with pytest.raises(ValueError, match="others than"):
        list(metrics.rows_of(measured, DRIVEN["launches"]))
    with pytest.raises(ValueError, match="1 kernels were launched and 2 measured"):
        list(metrics.rows_of(measured, DRIVEN["launches"][:1]))


# --- what is launched


@pytest.fixture
def device(monkeypatch):
    """What NumPy arrays run on: a GPU with the size of an H200, which starts nothing."""
    recorder = LaunchRecorder(TURING)
    recorder.multiprocessors, recorder.l2_bytes = 132, 50 * 2**20
    backend = importlib.import_module("cupyattn.functional.backend")
    monkeypatch.setattr(backend, "_device", lambda *choice: recorder)
    return recorder


class Profiler:
    """Says which launches were made while it was on."""

    def __init__(self, device: LaunchRecorder) -> None:
        self.device = device
        self.seen: list[str] = []

    @contextmanager
    def __call__(self):
        before = len(self.device.launches)
        yield
        self.seen += [each.specialisation.spec.entry for each in self.device.launches[before:]]


def watched(device, calls, wanted):
    profiler = Profiler(device)
    with cupyattn.backend("emulator"), driver.FirstLaunches(profiler, wanted) as first:
        for call in calls:
            first.watch(call, np)
    return first, profiler


def normed(xp):
    x, weight = xp.ones((4, 64), np.float16), xp.ones(64, np.float16)
    _, pullback = cupyattn.vjp(cupyattn.rms_norm, x, weight)
    return lambda: pullback(x)


def test_the_first_launch_of_each_kernel_is_profiled(device):
    calls = [ProfiledCall("one", normed), ProfiledCall("another", normed)]
    first, profiler = watched(device, calls, {"norm_backward", "column_sums", "rope"})
    assert profiler.seen == ["norm_backward", "column_sums"], "nothing of the arrays' making"
    assert [each["kernel"] for each in first.launches] == profiler.seen
    assert {each["call"] for each in first.launches} == {"one"}
    assert first.launches[0]["threads"] > 0
    assert first.wanted == {"rope"}


RECORD = json.loads(command.RECORD.read_text("utf-8"))
ROWS = {row["kernel"]: row for row in RECORD["rows"]}


def require_today(launches):
    """A profile is of the launch that its call makes today, unless it is said not to be."""
    for found in launches:
        kernel = found["kernel"]
        if kernel in ROWS:
            recorded = {name: ROWS[kernel][name] for name in found}
            assert (recorded == found) is (kernel not in CHANGED), (
                f"profiled as {recorded}, now launched as {found}: take profiles anew, or name the "
                "kernel in CHANGED"
            )


@pytest.mark.parametrize(
    "kernel", ["attention_backward_dkdv_paired", "attention_decode", "linear_thin"]
)
def test_a_profile_fits_the_launch_of_today(device, kernel):
    row = ROWS[kernel]
    calls = [call for call in profiled_calls() if call.name == row["call"]]
    first, _ = watched(device, calls, {kernel})
    assert len(first.launches) == 1
    require_today(first.launches)


@pytest.mark.deep
def test_the_calls_launch_every_kernel(device):
    first, _ = watched(device, profiled_calls(), KERNELS)
    assert {*WITHOUT_PROFILE} - {*YOUNGER} <= first.wanted <= {*WITHOUT_PROFILE}
    require_today(first.launches)


def test_what_is_launched_otherwise_is_told(monkeypatch, capsys):
    monkeypatch.setattr(command, "CHANGED", ("rope",))
    assert main(["profiles", "--kernel", "rope", "adamw"]) == 0
    assert "launched otherwise today: rope" in capsys.readouterr().out
    assert main(["profiles", "--kernel", "adamw"]) == 0
    assert "launched otherwise" not in capsys.readouterr().out


# --- taking


@pytest.fixture
def ncu(monkeypatch, tmp_path):
    """A program that does to the files what ncu and the driver would; returns how it is made."""

    def make(table: str, driven: dict | None = DRIVEN, code: int = 0) -> None:
        program = tmp_path / "ncu.py"
        program.write_text(
            "import json, pathlib, sys\n"
            "if '--version' in sys.argv: sys.exit(print('NVIDIA ...\\nVersion 2025.3.1.0') or 0)\n"
            "assert sys.argv[sys.argv.index('--profile-from-start') + 1] == 'off'\n"
            "log = pathlib.Path(sys.argv[sys.argv.index('--log-file') + 1])\n"
            f"log.write_text({table!r})\n"
            f"driven = {json.dumps(json.dumps(driven))}\n"
            "if driven != 'null': log.with_name('launches.json').write_text(driven)\n"
            f"sys.exit({code})\n"
        )
        run = taking.subprocess.run
        monkeypatch.setattr(taking.shutil, "which", lambda name: str(program))
        monkeypatch.setattr(taking, "_compile", lambda: None)
        monkeypatch.setattr(
            taking.subprocess, "run", lambda words, **how: run([sys.executable, *words], **how)
        )

    return make


def test_profiles_are_taken(ncu, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYATTN_ARCH", "75")
    ncu(printed("rope", "embedding"))
    result = taking.take([], tmp_path)
    assert result["ncu"] == "2025.3.1.0"
    assert result["invocation"].startswith("CUPYATTN_ARCH=75 python -m cupyattn.benchmark profiles")
    assert [row["kernel"] for row in result["rows"]] == ["rope", "embedding"]
    assert result["device"] == HEADER["device"]
    assert "launches" not in result


def test_without_leave_to_read_counters_it_says_what_to_do(ncu, tmp_path):
    ncu("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", None, 1)
    with pytest.raises(RuntimeError, match="NVreg_RestrictProfilingToAdminUsers=0"):
        taking.take([], tmp_path)


def test_what_ncu_says_is_passed_on(ncu, tmp_path):
    ncu("==ERROR== Failed to find metric\n", None, 9)
    with pytest.raises(RuntimeError, match=r"ended with 9[^~]*Failed to find metric"):
        taking.take([], tmp_path)


def test_without_ncu_it_says_where_it_is_from(monkeypatch, tmp_path):
    monkeypatch.setattr(taking.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="Nsight Compute, which is in the CUDA toolkit"):
        taking.take([], tmp_path)


@pytest.mark.parametrize("code", [0, 1])
def test_all_is_compiled_before_by_several_processes(monkeypatch, code):
    script = f"import sys; print('no room', file=sys.stderr); sys.exit({code})"
    monkeypatch.setattr(taking, "_DRIVER", (sys.executable, "-c", script))
    monkeypatch.setattr(taking.os, "cpu_count", lambda: 2)
    if not code:
        taking._compile()
        return
    with pytest.raises(RuntimeError, match="a call fails without ncu: no room"):
        taking._compile()


# --- the record, and the command


def test_every_kernel_has_a_profile_or_a_reason():
    assert ROWS.keys().isdisjoint(WITHOUT_PROFILE)
    assert {*ROWS, *WITHOUT_PROFILE} == set(KERNELS)
    assert len(ROWS) == len(RECORD["rows"])
    assert {row["call"] for row in RECORD["rows"]} <= {call.name for call in profiled_calls()}


def test_the_record_is_of_the_turing_code_and_whole():
    assert RECORD["invocation"].startswith("CUPYATTN_ARCH=75 ")
    assert RECORD["code"] == ["compute_75"]
    assert json.loads(taking.written(RECORD)) == RECORD
    assert taking.written(RECORD) == command.RECORD.read_text("utf-8"), "a row a line"
    for row in RECORD["rows"]:
        assert row["microseconds"] > 0
        assert 0 < row["occupancy"] <= row["occupancy_limit"] + 0.01 <= 1.01
        assert row["stalls"].keys() <= metrics.STALLS.keys()
        assert 0.5 < sum(row["stalls"].values()) < 1.01


def test_what_binds_is_as_the_kernels_are_known():
    """A copy of rows waits for memory; one CTA is few; a textbook's kernel for its loads."""
    bound = {kernel: binding(row, RECORD["multiprocessors"])[0] for kernel, row in ROWS.items()}
    assert bound["adamw"] == bound["gated_backward"] == "memory"
    assert bound["attention_naive"] == "L1 and shared memory"
    assert bound["loss_reduction"].startswith("few CTAs")


def test_the_record_is_shown(capsys):
    assert main(["profiles"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Every kernel on {RECORD['device']}, {RECORD['date']}" in text
    row = ROWS["adamw"]
    assert f"adamw {row['microseconds']:.1f} {row['registers']}" in text
    assert f"memory, {100 * row['dram']:.0f} %" in text
    assert f"of {len(ROWS)}: memory" in text
    assert "Turing cards have fewer GB/s" in text


@pytest.mark.parametrize(
    "content", ["", "[]", '{"command": "attention", "rows": []}', "[" * 100_000]
)
def test_files_that_hold_no_profiles(content, capsys, tmp_path):
    file = tmp_path / "some.json"
    file.write_text(content)
    assert main(["profiles", str(file)]) == 1
    assert f"{file} holds" in capsys.readouterr().err


def test_some_kernels_of_a_file_are_shown(capsys, tmp_path):
    file = tmp_path / "profiles.json"
    of_turing = {**RECORD, "compute_capability": "7.5"}
    of_turing["rows"] = [{**ROWS["rope"], "registers": None}, ROWS["adamw"]]
    file.write_text(json.dumps(of_turing))
    assert main(["profiles", str(file), "--kernel", "rope"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"rope {ROWS['rope']['microseconds']:.1f} - 0" in text
    assert "1 of 1: memory" in text
    assert "adamw" not in text
    assert "Turing cards" not in text


def test_what_is_no_record_is_refused(capsys, tmp_path):
    assert main(["profiles", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_what_is_taken_is_written_and_shown(ncu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_command, "device_count", lambda: 1)
    ncu(printed("rope", "embedding"))
    out = tmp_path / "out.json"
    words = ("--take", "--out", str(out), "--keep", str(tmp_path / "kept"))
    assert main(["profiles", *words]) == 0
    assert "rope 12.3 40 1536" in " ".join(capsys.readouterr().out.split())
    assert [row["kernel"] for row in json.loads(out.read_text("utf-8"))["rows"]] == [
        "rope",
        "embedding",
    ]
    assert (tmp_path / "kept" / "ncu.csv").exists()

"""``python -m cupyattn.benchmark profiles``: taking, reading, writing and printing profiles."""

from __future__ import annotations

import json
import sys
import types

import pytest
from support.fake_gpu import HEADER

from cupyattn.benchmark import command as driver
from cupyattn.benchmark import profiles
from cupyattn.benchmark.__main__ import main
from cupyattn.benchmark.profiles import binding

# Of the shape of ncu's: words of its own, a line of units, thousands with commas, no such counter.
NUMBERS = {
    "launch__grid_size": ("", "132"),
    "gpu__time_duration.sum": ("ns", "12,345"),
    "launch__registers_per_thread": ("register/thread", "40"),
    "launch__shared_mem_per_block_static": ("byte/block", "1,024"),
    "launch__shared_mem_per_block_dynamic": ("byte/block", "512"),
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


MACHINE = {"command": "layers", **HEADER, "rows": []}


def test_the_first_launch_of_each_kernel_is_a_row():
    row, other = profiles.parse(printed("rope", "embedding", "rope").splitlines())
    assert (row["kernel"], other["kernel"]) == ("rope", "embedding")
    assert (row["microseconds"], row["registers"], row["shared_bytes"]) == (12.345, 40, 1536)
    assert (row["ctas"], row["bank_conflicts"], row["dram"]) == (132, 0.25, 0.812)
    assert row["pipes"]["tensor"] is None
    assert row["l2"] is None, "what is not in the table"
    assert row["stalls"] == {"long_scoreboard": 0.75, "selected": 0.25}
    with pytest.raises(ValueError, match="Kernel Name"):
        profiles.parse(["==ERROR== No kernels were profiled."])


# --- taking


@pytest.fixture
def ncu(monkeypatch, tmp_path):
    """A program that does to the files what ncu and its process would; returns how it is made."""

    def make(table: str, machine: dict | None = MACHINE, code: int = 0) -> None:
        program = tmp_path / "ncu.py"
        program.write_text(
            "import json, pathlib, sys\n"
            "if '--version' in sys.argv: sys.exit(print('NVIDIA ...\\nVersion 2025.3.1.0') or 0)\n"
            "assert sys.argv[sys.argv.index('--kernel-id') + 1].endswith('embedding)$:1')\n"
            "assert sys.argv[sys.argv.index('cupyattn.benchmark') + 1] == 'layers'\n"
            "log = pathlib.Path(sys.argv[sys.argv.index('--log-file') + 1])\n"
            f"log.write_text({table!r})\n"
            f"machine = {json.dumps(json.dumps(machine))}\n"
            "if machine != 'null': log.with_name('machine.json').write_text(machine)\n"
            f"sys.exit({code})\n"
        )
        run = profiles.subprocess.run
        device = types.SimpleNamespace(multiprocessors=132)
        monkeypatch.setattr(profiles, "cuda_device", lambda ordinal: device)
        monkeypatch.setattr(profiles.shutil, "which", lambda name: str(program))
        monkeypatch.setattr(
            profiles.subprocess, "run", lambda words, **how: run([sys.executable, *words], **how)
        )

    return make


TWO = ["rope", "embedding"]


def test_profiles_are_taken(ncu, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYATTN_ARCH", "75")
    ncu(printed(*TWO))
    result = profiles.take(["layers"], TWO, tmp_path)
    assert (result["command"], result["ncu"]) == ("profiles", "2025.3.1.0")
    assert result["invocation"].startswith("CUPYATTN_ARCH=75 python -m cupyattn.benchmark")
    assert [row["kernel"] for row in result["rows"]] == TWO
    assert result["device"] == HEADER["device"]


@pytest.mark.parametrize(
    ("table", "code", "said"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - no permission\n",
            1,
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        ("==ERROR== Failed to find metric\n", 9, r"ended with 9[^~]*Failed to find metric"),
    ],
)
def test_what_ncu_cannot_do_is_reported(ncu, tmp_path, table, code, said):
    ncu(table, None, code)
    with pytest.raises(RuntimeError, match=said):
        profiles.take(["layers"], TWO, tmp_path)


def test_without_ncu_it_says_where_it_is_from(monkeypatch, tmp_path):
    monkeypatch.setattr(profiles.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="Nsight Compute, which is in the CUDA toolkit"):
        profiles.take(["layers"], [], tmp_path)


# --- the record, and the command


RECORD = json.loads(profiles.RECORD.read_text("utf-8"))
ROWS = {row["kernel"]: row for row in RECORD["rows"]}


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
    assert "Turing devices have fewer GB/s" in text


@pytest.mark.parametrize(
    "content", ["", "[]", '{"command": "attention", "rows": []}', "[" * 100_000]
)
def test_files_that_hold_no_profiles(content, capsys, tmp_path):
    file = tmp_path / "some.json"
    file.write_text(content)
    assert main(["profiles", str(file)]) == 1
    assert str(file) in capsys.readouterr().err


def test_what_is_taken_is_written_and_shown(ncu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    ncu(printed(*TWO))
    out = tmp_path / "out.json"
    assert main(["profiles", "--kernel", *TWO, "--out", str(out), "--take", "layers"]) == 0
    assert "rope 12.3 40 1536" in " ".join(capsys.readouterr().out.split())
    assert [row["kernel"] for row in json.loads(out.read_text("utf-8"))["rows"]] == TWO

"""Profiles taken on the GPU at hand: Nsight Compute around the calls, and what it printed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupyattn.benchmark.profiles.metrics import METRICS, parse, rows_of
from cupyattn.errors import error
from cupyattn.kernels.target import ARCH_VARIABLE, arch_override
from cupyattn.progress import progress

_DRIVER = (sys.executable, "-m", "cupyattn.benchmark.profiles.driver")
_TABLE, _LAUNCHES = "ncu.csv", "launches.json"
_NOT_PERMITTED = "ERR_NVGPUCTRPERM"
_MOST_PROCESSES = 12


def take(kernels: Sequence[str], folder: Path) -> dict[str, Any]:
    """Profile kernels, or all, and leave in a folder what ncu printed and what was launched.

    Raises
    ------
    RuntimeError
        If ncu is not there, may not read the GPU's counters or fails otherwise.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise error(
            RuntimeError,
            "there is no ncu, the command line of Nsight Compute, on the PATH",
            "profiles are taken by it alone",
            "install Nsight Compute, which is in the CUDA toolkit, and put its folder on the PATH",
        )
    _compile()
    table, launches = folder / _TABLE, folder / _LAUNCHES
    process = subprocess.run(
        [ncu, *_options(table), *_DRIVER, str(launches), *kernels],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    printed = table.read_text(encoding="utf-8") if table.exists() else ""
    if _NOT_PERMITTED in printed + process.stdout + process.stderr:
        raise error(
            RuntimeError,
            f"the driver lets ncu read no counters ({_NOT_PERMITTED})",
            "counters are for administrators, unless the machine's say otherwise",
            "run it as root (in a container with --cap-add=SYS_ADMIN), or have the module nvidia "
            "loaded with NVreg_RestrictProfilingToAdminUsers=0",
        )
    if process.returncode or not launches.exists():
        raise error(
            RuntimeError,
            f"ncu ended with {process.returncode}: {_end_of(printed, process)}",
            "it profiles every call, and writes a table",
            "look at its words",
        )
    return result_of(printed, json.loads(launches.read_text(encoding="utf-8")), _version(ncu))


def written(result: dict[str, Any]) -> str:
    """Return a record as JSON, a row on each line."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in result["rows"])
    head = json.dumps({**result, "rows": []}, indent=1)
    return f"{head.removesuffix('[]' + chr(10) + '}')}[\n{rows}\n ]\n}}\n"


def result_of(printed: str, driven: dict[str, Any], ncu: str) -> dict[str, Any]:
    """Make the record of what ncu printed and the driver wrote."""
    rows = list(rows_of(parse(printed.splitlines()), driven.pop("launches")))
    override = arch_override()
    words = "python -m cupyattn.benchmark profiles --take --out FILE"
    arch = "" if override is None else f"{ARCH_VARIABLE}={override.number} "
    return {"command": "profiles", "invocation": arch + words, "ncu": ncu, **driven, "rows": rows}


def _options(table: Path) -> list[str]:
    """Return ncu's: the clocks of a call as users make it, with caches that are empty before."""
    return [
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)),
        *("--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all"),
        *("--metrics", ",".join(METRICS)),
    ]


def _compile() -> None:
    """Have every kernel in the caches of this library and of the driver, by several processes."""
    count = min(os.cpu_count() or 1, _MOST_PROCESSES)
    processes = [
        subprocess.Popen(
            [*_DRIVER, "--warm", str(part), str(count)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(count)
    ]
    said = []
    with progress("compiling", count) as step:
        for process in processes:
            said.append(process.communicate()[1])
            step()
    for process, words in zip(processes, said, strict=True):
        if process.returncode:
            raise error(
                RuntimeError,
                f"a call fails without ncu: {words.strip()[-500:]}",
                "all calls run on the GPU at hand",
                "mend that first",
            )


def _end_of(printed: str, process: subprocess.CompletedProcess[str]) -> str:
    lines = [*printed.splitlines(), *process.stdout.splitlines(), *process.stderr.splitlines()]
    return "\n".join(line for line in lines if not line.startswith('"'))[-2000:]


def _version(ncu: str) -> str:
    words = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False)
    return words.stdout.strip().splitlines()[-1].removeprefix("Version ").partition(" ")[0]

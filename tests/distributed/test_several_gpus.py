"""Rings over the GPUs of one host: threads and processes, NCCL and peer copies. Needs two."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.devices import dtype_of
from support.ring import ring_ratios
from support.ring_process import OPTIONS, TIMEOUT, arrays

from cupyattn.distributed import (
    Group,
    RankFailedError,
    ring_attention,
    ring_attention_backward,
    run,
    shard,
    unshard,
)
from cupyattn.distributed.nccl import nccl_is_there
from cupyattn.runtime.device.cuda import device_count

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device_count() < 2, reason="fewer than two GPUs")]
RANKS = min(device_count(), 4)
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
TRANSPORTS = [
    pytest.param("nccl", marks=pytest.mark.skipif(not nccl_is_there(), reason="no NCCL")),
    "peer",
]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "causal": ("zigzag", "float16", {"causal": True}),
    "float32": ("zigzag", "float32", {"causal": True}),
    "bfloat16": ("striped", "bfloat16", {"causal": True}),
    "window": ("contiguous", "float16", {"window_size": (100, 10)}),
    "all keys": ("zigzag", "float16", {"softcap": 3.0}),
    "dropout": ("zigzag", "float16", {"causal": True, "dropout_p": 0.2, "seed": 1}),
}


def results(whole: dict[str, np.ndarray], placement: str, transport: str, options: Any) -> Any:
    """The joined out, lse, dq, dk and dv of all ranks."""

    def of_rank(group: Group) -> Any:
        import cupy

        q, k, v, dout = (
            cupy.asarray(shard(x, group.rank, group.size, placement=placement))
            for x in whole.values()
        )
        given = {"group": group, "placement": placement, **options}
        for _ in range(3):  # buffers of one call are those of the next
            out, lse = ring_attention(q, k, v, return_lse=True, **given)
            grads = ring_attention_backward(dout, q, k, v, out, lse, **given)
        return [cupy.asnumpy(x) for x in (out, lse, grads.dq, grads.dk, grads.dv)]

    return together(run(of_rank, devices=range(RANKS), transport=transport, timeout=60), placement)


def together(ranks: list[Any], placement: str) -> list[np.ndarray]:
    return [
        unshard(list(part), placement=placement, axis=2 if number == 1 else 1)
        for number, part in enumerate(zip(*ranks, strict=True))
    ]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CASES)
def test_within_bounds_of_one_device(name, transport):
    placement, dtype, options = CASES[name]
    whole = {key: x.astype(dtype_of(dtype)) for key, x in arrays().items()}
    found = results(whole, placement, transport, options)
    ratios = ring_ratios(whole, found, RANKS, placement, dtype, **options)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_raises_is_named(transport):
    def of_rank(group: Group) -> None:
        import cupy

        x = cupy.zeros((1, 64, 2, 64), np.float16)
        ring_attention(x, x, x, group=group)
        if group.rank == 1:
            raise ZeroDivisionError("planted")
        ring_attention(x, x, x, group=group)
        cupy.cuda.get_current_stream().synchronize()

    begun = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 failed: ZeroDivisionError"):
        run(of_rank, devices=range(RANKS), transport=transport, timeout=30)
    assert time.monotonic() - begun < 25


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_never_comes_is_no_hang(transport):
    def of_rank(group: Group) -> None:
        import cupy

        x = cupy.zeros((1, 64, 2, 64), np.float16)
        ring_attention(x, x, x, group=group)
        cupy.cuda.get_current_stream().synchronize()
        if group.rank == 1:
            time.sleep(12)
            return
        ring_attention(x, x, x, group=group)
        cupy.cuda.get_current_stream().synchronize()

    begun = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 did not come: rank \d waited 6 s"):
        run(of_rank, devices=range(RANKS), transport=transport, timeout=6)
    assert time.monotonic() - begun < 40


def test_arrays_on_another_rank_s_device_are_refused():
    def of_rank(group: Group) -> None:
        import cupy

        with cupy.cuda.Device(0):
            x = cupy.zeros((1, 4, 1, 8), np.float16)
        ring_attention(x, x, x, group=group)

    with pytest.raises(RankFailedError, match=r"rank 1 failed: ValueError: arrays that are on dev"):
        run(of_rank, devices=range(2), transport="peer", timeout=20)


def start(folder: Path, what: str, launcher: list[str] | None = None) -> list[Any]:
    """Start the ranks as processes; return (exit code, output) of each."""
    command = [sys.executable, "-m", "support.ring_process", str(folder), what]
    path = os.pathsep.join([".", "tests", os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    if launcher is not None:
        given = [(command, environment)]
        command[:0] = launcher
    else:
        given = [
            (command, {**environment, "CUPYATTN_RANK": str(rank), "CUPYATTN_SIZE": str(RANKS)})
            for rank in range(RANKS)
        ]
    processes = [
        subprocess.Popen(call, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for call, env in given
    ]
    ended = []
    for process in processes:
        try:
            said, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            said += "\nHUNG"
        ended.append((process.returncode, said))
    return ended


def require_right(folder: Path, ended: list[Any]) -> None:
    assert all(code == 0 for code, _ in ended), ended
    shards = []
    for rank in range(RANKS):
        with np.load(folder / f"rank-{rank}.npz") as held:
            shards.append([held[name] for name in held.files])
    found = together(shards, "zigzag")
    ratios = ring_ratios(arrays(), found, RANKS, "zigzag", "float16", **OPTIONS)
    assert max(ratios.values()) <= 1, ratios


NEEDS_NCCL = pytest.mark.skipif(not nccl_is_there(), reason="no NCCL")


@NEEDS_NCCL
def test_a_process_for_each_gpu(tmp_path):
    require_right(tmp_path, start(tmp_path, "right"))


@NEEDS_NCCL
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec")
def test_mpiexec_starts_the_processes(tmp_path):
    launcher = [str(MPIEXEC), "-n", str(RANKS)]
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "Open MPI" in version_of(launcher[0]):
        launcher.append("--allow-run-as-root")
    require_right(tmp_path, start(tmp_path, "right", launcher))


def version_of(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return said.stdout + said.stderr + ("Open MPI" if "OpenRTE" in said.stdout else "")


@NEEDS_NCCL
@pytest.mark.parametrize("library", ["cupyx", "nccl4py"])
def test_communicators_of_other_libraries(tmp_path, library):
    if library == "nccl4py" and find_spec("nccl") is None:
        pytest.skip("no nccl4py")
    require_right(tmp_path, start(tmp_path, library))


@NEEDS_NCCL
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("fails", "rank {last} failed: ValueError: planted"),
        ("killed", "rank {last} has ended: its process is gone"),
        ("late", f"waited {TIMEOUT} s for rank"),
    ],
)
def test_a_process_that_fails_ends_the_others(tmp_path, what, says):
    """The others' own errors name it, and nothing hangs."""
    begun = time.monotonic()
    ended = start(tmp_path, what)
    assert time.monotonic() - begun < 110
    for code, said in ended[:-1]:
        assert code != 0
        assert "RankFailedError" in said
        assert says.format(last=RANKS - 1) in said, said
        assert "HUNG" not in said


def test_readme_s_two_gpus():
    names: dict[str, Any] = {}
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(next(block for block in blocks if "rng = " in block), names)
    names.update(H=4, D=32)
    exec(next(block for block in blocks if "import distributed" in block), names)
    np.testing.assert_allclose(names["two_gpus"](), names["out"], atol=1e-5)

"""One rank of a ring as a process of its own: what tests with several GPUs start.

``python -m support.ring_process FOLDER WHAT``, with the rank in the environment as launchers set
it. Each rank writes its shards of the results to the folder.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.distributed import (
    Group,
    launched_group,
    ring_attention,
    ring_attention_backward,
    shard,
)
from cupyattn.distributed.nccl import load_nccl
from cupyattn.distributed.processes import launched

TOKENS, OPTIONS = 512, {"causal": True}
TIMEOUT = 10
"""Seconds that ranks wait for one that is late; NCCL may take some to join them."""
_PORT = 13477


def arrays() -> dict[str, np.ndarray]:
    """Whole q, k, v and dout, the same in every process."""
    rng = np.random.default_rng(0)
    heads = {"q": 4, "k": 2, "v": 2, "dout": 4}
    return {
        name: rng.standard_normal((1, TOKENS, count, 64)).astype(np.float16)
        for name, count in heads.items()
    }


def main(folder: Path, what: str) -> None:
    """Join the others, and compute."""
    rank, size, _ = launched()
    load_nccl()  # before another library makes a communicator of it: multicast stays off
    meet(folder, rank, size)
    if what == "cupyx":
        import cupy
        from cupyx.distributed import NCCLBackend

        cupy.cuda.Device(rank).use()
        backend = NCCLBackend(size, rank, port=_PORT)
        try:
            compute(folder, Group(backend, size=size, timeout=60))
        finally:
            if rank == 0:  # otherwise its store keeps the process from ending
                backend.stop()
        return
    if what == "nccl4py":
        import cupy
        from nccl import core

        from cupyattn.distributed.processes import shared_id

        cupy.cuda.Device(rank).use()
        identity = core.UniqueId.from_bytes(shared_id(folder, rank, size, 60))
        compute(folder, Group(core.Communicator.init(size, rank, identity), timeout=60))
        return
    with launched_group(folder, timeout=TIMEOUT if what == "late" else 60) as group:
        if what == "fails" and rank == size - 1:
            raise ValueError("planted")
        if what == "killed" and rank == size - 1:
            os._exit(9)
        if what == "late" and rank == size - 1:
            time.sleep(3 * TIMEOUT)
        compute(folder, group)


def meet(folder: Path, rank: int, size: int) -> None:
    """Wait until all have imported what they need: how long that takes is not what is tested."""
    (folder / f"imported-{rank}").touch()
    while not all((folder / f"imported-{other}").exists() for other in range(size)):
        time.sleep(0.05)


def compute(folder: Path, group: Group) -> None:
    """Compute one rank's share, forward and backward, and write it."""
    import cupy

    q, k, v, dout = (cupy.asarray(shard(x, group.rank, group.size)) for x in arrays().values())
    options: dict[str, Any] = {"group": group, **OPTIONS}
    for _ in range(2):
        out, lse = ring_attention(q, k, v, return_lse=True, **options)
        grads = ring_attention_backward(dout, q, k, v, out, lse, **options)
    results = (out, lse, grads.dq, grads.dk, grads.dv)
    np.savez(folder / f"rank-{group.rank}.npz", *map(cupy.asnumpy, results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""What a kernel's profile says of the thing that it is bound by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyattn.benchmark.profiles.metrics import STALLS

BUSY = 0.6
"""Of its peak: what is busier has little left to give, as Nsight Compute sees it too."""

_UNITS = {"l2": "the L2 cache", "l1": "L1 and shared memory", "issue": "issued instructions"}
_PIPES = {
    "tensor": "tensor cores",
    "fma": "float32 products",
    "alu": "integers and comparisons",
    "xu": "special functions",
    "lsu": "loads and stores",
}
_NO_WAITING = {"selected", "not_selected"}


def binding(row: Mapping[str, Any], multiprocessors: int) -> tuple[str, float]:
    """Return what binds a kernel, for people, and how much of its peak or of its warps' time.

    Memory, if it is busy: all that it moves passes the caches too. Otherwise what is busiest. Where
    nothing is, warps wait, and where few are there, more would wait less.

    Examples
    --------
    >>> row = {"ctas": 512, "occupancy": 0.5, "occupancy_limit": 0.5, "pipes": {"fma": 0.5}}
    >>> row |= {"dram": 0.7, "l2": 0.8, "l1": 0.2, "issue": 0.4, "stalls": {"long_scoreboard": 0.7}}
    >>> binding(row, 40)
    ('memory', 0.7)
    >>> binding({**row, "dram": 0.5}, 40)
    ('the L2 cache', 0.8)
    >>> binding({**row, "dram": 0.5, "l2": 0.5}, 40)
    ('waits for global memory', 0.7)
    >>> binding({**row, "dram": 0.1, "l2": 0.1, "ctas": 1}, 40)
    ('few CTAs, waits for global memory', 0.7)
    """
    if (row["dram"] or 0) >= BUSY:
        return "memory", row["dram"]
    shares = {text: row[name] or 0.0 for name, text in _UNITS.items()}
    shares |= {_PIPES[name]: share or 0.0 for name, share in row["pipes"].items()}
    busiest = max(shares, key=shares.__getitem__)
    waits = [(name, share) for name, share in row["stalls"].items() if name not in _NO_WAITING]
    if shares[busiest] >= BUSY or not waits:
        return busiest, shares[busiest]
    name, share = waits[0]
    there, most = (row[name] or 0.0 for name in ("occupancy", "occupancy_limit"))
    few = row["ctas"] < multiprocessors or 2 * there < most
    return f"{'few CTAs, ' if few else ''}waits for {STALLS[name]}", share

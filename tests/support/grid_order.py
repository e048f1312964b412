"""How long the CTAs of a grid take, as multiprocessors take them: a simulation, no measurement.

`python -m support.grid_order`, with PYTHONPATH=.:tests, prints how much faster a causal call is
than a plain one, with one head after the other and with as many interleaved as the rule says
(in parentheses). A CTA takes as long as it has keys, or query rows, to read, and a fixed time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.attention.choice import interleaving
from cupyattn.ops.attention.kernels.tensor_core import backward_dkdv
from cupyattn.ops.attention.kernels.tensor_core import forward as forward_rows
from cupyattn.runtime.device.traits import DeviceTraits

DEVICES = {
    "T4": DeviceTraits(75, 40),
    "RTX 2080 Ti": DeviceTraits(75, 68, l2_bytes=5632 * 2**10),
    "H200": DeviceTraits(90, 132, l2_bytes=50 * 2**20),
}
HEAD_DIMS = (64, 80, 128, 192, 256)
FIXED = 64
"""The time of a CTA before and after its loop, in steps of the loop."""


class Grid(NamedTuple):
    """A CTA for every `rows` of `length`, which reads `length` in steps of `step`."""

    length: int
    rows: int
    step: int
    heads: int
    slots: int
    """CTAs that the device takes at once."""

    @classmethod
    def of(cls, traits: DeviceTraits, head_dim: int, length: int, heads: int, kind: str) -> Grid:
        """The grid of the forward, or of the first kernel of a backward in one pass."""
        if kind == "forward":
            row = forward_rows.flash_row(75, head_dim, head_dim)
            sizes = row.tile_q, row.tile_k
        else:
            row = backward_dkdv.dkdv_row(75, head_dim, head_dim, one_pass=True)
            sizes = row.tile_keys, row.tile_q
        return cls(length, *sizes, heads, traits.multiprocessors * row.ctas_per_sm)

    def seconds(self, together: int, *, causal: bool) -> float:
        """Return its time, in steps of a CTA's loop."""
        return finish(self.ctas(together, causal=causal), self.slots)

    def ctas(self, together: int, *, causal: bool) -> list[int]:
        """Return the time of each CTA, in the order of the grid: the longest of a head first."""
        tiles = [
            -(-(last if causal else self.length) // self.step) * self.step + FIXED
            for last in reversed(
                [min(first + self.rows, self.length) for first in range(0, self.length, self.rows)]
            )
        ]
        each = [tile for tile in tiles for _ in range(together)]
        return each * (self.heads // together)


def finish(ctas: Iterable[int], slots: int) -> float:
    """Return when the last CTA ends: each starts when the first of those running ends."""
    busy = [0.0] * slots
    for each in ctas:
        heapq.heapreplace(busy, busy[0] + each)
    return max(busy)


def causal_problem(length: int, heads: int, head_dim: int, **changed: int) -> Any:
    """Return the traits that the rule reads, of a causal call of one sequence."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "sq": length, "sk": length}
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    window, dtype = (None, 0), np.dtype(np.float16)
    layouts = SimpleNamespace(bias=None, mask=None, block_mask=None)
    known = {"window": window, "dtype": dtype, "layouts": layouts, "packed": False}
    return SimpleNamespace(**{**known, **sizes, **dims, **changed})


def main() -> None:
    """Print a line for each device, kernel and head dim."""
    for name, traits in DEVICES.items():
        for kind in ("forward", "backward"):
            for head_dim in HEAD_DIMS:
                cells = []
                for length, heads in ((2048, 32), (4096, 32), (1024, 64)):
                    problem = causal_problem(length, heads, head_dim)
                    grid = Grid.of(traits, head_dim, length, heads, kind)
                    together = interleaving(problem, traits, backward=kind == "backward").kv_heads
                    plain = grid.seconds(1, causal=False)
                    before, now = (plain / grid.seconds(n, causal=True) for n in (1, together))
                    cells.append(f"{heads} x {length}: {before:.2f} -> {now:.2f} ({together})")
                print(f"{name:12} {kind:8} D {head_dim:3}  " + "   ".join(cells))


if __name__ == "__main__":
    main()

"""Attention problems with rotary embedding, in each form that kernels tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.devices import KERNELS, dtype_of, placed
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import Rotary

CHUNK = 8
"""Items of float16 in a vector: the tensor-core kernel rotates whole ones itself."""


@dataclass(frozen=True)
class RotaryProblem(AttentionProblem):
    """A problem whose rotary option, if it was drawn, is a `Rotary` of this kind."""

    interleaved: bool = False
    table: str = "float32"
    spare: int = 0
    """Columns of NaN after those of each table: from 1 on rows are aligned to items only."""

    def _option(self, name: str, value: Any) -> dict[str, Any]:
        option = super()._option(name, value)
        if name != "rotary":
            return option
        return {name: Rotary(*map(self._table, option[name]), self.interleaved)}

    def _table(self, table: np.ndarray) -> np.ndarray:
        columns = table.shape[1]
        wide = np.full((len(table), columns + self.spare), np.nan, dtype_of(self.table))
        wide[:, :columns] = table
        return wide[:, :columns]

    def turned(self) -> tuple[np.ndarray, np.ndarray]:
        """Rotated q and k, by `rope` on the device."""
        q, k, _ = self.arrays()
        options = self.options()
        used = options.get("seqused_k", np.full(self.B, self.Sk))
        offset = np.broadcast_to(options.get("q_offset", used - self.Sq), (self.B,))
        turned = []
        for x, first in ((q, offset), (k, np.zeros_like(offset))):
            positions = np.arange(x.shape[1]) + np.asarray(first)[:, None]
            with KERNELS.running():
                result = cupyattn.rope(
                    KERNELS.put(x), *placed(KERNELS, tuple(options["rotary"][:2])),
                    positions=KERNELS.put(positions), interleaved=self.interleaved,
                )  # fmt: skip
            turned.append(KERNELS.get(result))
        return turned[0], turned[1]

"""The options of a ring's calls, and which of them ranks have to pass alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn import BlockMask, MaskMod, ScoreMod
from cupyattn.distributed.agreement import fingerprint
from cupyattn.distributed.scores import with_four_axes
from cupyattn.runtime.arrays import Array

ARRAYS = ("seqused_k", "mask", "bias", "alibi_slopes", "sinks")
"""The options that are arrays, apart from tables and from what expressions name."""
OF_ROWS = ("mask", "bias")
"""Those of which each rank has the rows of its own queries."""


@dataclass(frozen=True)
class RingOptions:
    """The options of a ring's calls, as `attention` takes them."""

    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    seqused_k: Array | None = None
    mask: Array | None = None
    bias: Array | None = None
    alibi_slopes: Array | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout_p: float = 0.0
    seed: int | None = None
    rotary: Any = None
    score_mod: ScoreMod | Callable[..., Any] | None = None
    mask_mod: MaskMod | BlockMask | Callable[..., Any] | None = None

    @property
    def arrays(self) -> dict[str, Array]:
        """Those that were given, by name."""
        given = {name: getattr(self, name) for name in ARRAYS}
        return {name: array for name, array in given.items() if array is not None}

    @property
    def expressions(self) -> dict[str, Any]:
        """score_mod and mask_mod that were given, by name; of a block mask its mask_mod."""
        mask_mod = self.mask_mod.mask_mod if isinstance(self.mask_mod, BlockMask) else self.mask_mod
        given = {"score_mod": self.score_mod, "mask_mod": mask_mod}
        return {name: option for name, option in given.items() if option is not None}

    @property
    def uses_positions(self) -> bool:
        """Whether more depends on where queries and keys stand than what is seen."""
        names = (*OF_ROWS, "seqused_k", "alibi_slopes")
        given = any(getattr(self, name) is not None for name in names)
        return self.dropout_p > 0 or given or bool(self.expressions)

    def of_no_tokens(self) -> dict[str, Any]:
        """Return what a call of no tokens takes: it checks what does not depend on them."""
        return {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "window_size": self.window_size,
            "mask": _of_no_scores(self.mask),
            "bias": _of_no_scores(self.bias),
            "alibi_slopes": self.alibi_slopes,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "dropout_p": self.dropout_p,
            "seed": self.seed,
            "rotary": self.rotary,
        }

    def description(self, *, longest: int, each_time: bool) -> list[str]:
        """Say what all ranks have to pass alike, without what was left out.

        NumPy arrays are told by what is in them, of tables as many rows as sequences have, and
        those of a GPU by shape. The seed, which changes from call to call, is told where every call
        is compared: elsewhere whoever says something new waits for the other ranks.
        """
        said = ["causal=True"] if self.causal else []
        said += [f"window_size={self.window_size}"] if self.window_size is not None else []
        numbers = {
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "dropout_p": self.dropout_p or None,
        }
        said += [f"{name}={float(x)}" for name, x in numbers.items() if x is not None]
        if self.dropout_p and each_time:
            said.append(f"seed={self.seed}")
        said += [
            f"{name} {_told(array, values=name not in OF_ROWS)}"
            for name, array in self.arrays.items()
        ]
        if self.rotary is not None:
            cos, sin, interleaved = (*self.rotary, False)[:3]
            tables = " and ".join(_told(table[:longest]) for table in (cos, sin))
            said.append(f"rotary {tables}{' interleaved' if interleaved else ''}")
        for name, given in self.expressions.items():
            if isinstance(given, ScoreMod | MaskMod):
                named = [f" {x} {_told(array)}" for x, array in given.arrays.items()]
                said.append(f"{name} {given.expression}; {given.gradient}{''.join(named)}")
            else:
                said.append(f"{name} is a function")
        return said


def _told(array: Array, *, values: bool = True) -> str:
    content = f" {fingerprint(array)}" if values and isinstance(array, np.ndarray) else ""
    return f"{array.dtype} {array.shape}{content}"


def _of_no_scores(array: Array | None) -> Array | None:
    if array is None:
        return None
    scores = with_four_axes(array)
    rows, columns = (slice(0 if extent != 1 else None) for extent in scores.shape[-2:])
    return scores[..., rows, columns]

"""Expressions for score_mod and mask_mod that say what built-in options say, and those options.

The reference has bounds for the options; kernels with the expressions have to keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.devices import KERNELS
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import MaskMod, ScoreMod, reference
from cupyattn.ops.attention.kernels.tensor_core.forward_rows import flash_row
from cupyattn.runtime.rounding import round_into

Put = Callable[[np.ndarray], Any]
CAP = 2.0


def by_the_reference(dout: np.ndarray, *arrays: np.ndarray, **options: Any) -> tuple[Any, ...]:
    """out, lse and the gradients: kernels would be compiled for the options that are compared."""
    with cupyattn.backend("reference"):
        results = cupyattn.attention(*arrays, **options, return_lse=True)
        return (*results, cupyattn.attention_backward(dout, *arrays, *results, **options))


class Case:
    """A problem whose scores expressions change, and the options that change them alike."""

    def __init__(self, dtype: str, head_dim: int, *, Sq: int = 37, Sk: int = 133) -> None:  # noqa: N803
        self.problem = AttentionProblem(
            B=2, Sq=Sq, Sk=Sk, H=2, G=1, D=head_dim, Dv=head_dim, dtype=dtype, drawn=()
        )
        rng = np.random.default_rng(Sq)
        # Views with gaps, backwards, and without axes.
        self.slopes = rng.random((2, 6)).astype(np.float16)[::-1, 1::3]
        self.by_distance = rng.standard_normal((2, 2, Sq + Sk), np.float32)[:, 1]
        self.documents = np.sort(rng.integers(0, 4, (2, max(Sq, Sk))))[:, ::-1]
        self.seen = rng.random((1, 2, Sq, Sk)) > 0.3
        self.offset = Sk - Sq

    def score_mod(self, put: Put = np.asarray) -> ScoreMod:
        """softcap, bias and ALiBi in one."""
        return ScoreMod(
            "cap * tanhf(score / cap) + by_distance[h][q_idx - k_idx + keys[0] - 1]\n"
            "  - slopes[b][h] * abs(q_idx + offset - k_idx)",
            gradient="grad * (1 - tanhf(score / cap) * tanhf(score / cap))",
            cap=put(np.array(CAP, np.float32)),
            by_distance=put(self.by_distance),
            keys=put(np.array([self.problem.Sk])),
            slopes=put(self.slopes),
            offset=put(np.array(self.offset, np.int32)),
        )

    def score_options(self) -> dict[str, Any]:
        """The built-in options that `score_mod` stands for."""
        i, j = np.arange(self.problem.Sq)[:, None], np.arange(self.problem.Sk)
        bias = self.by_distance[:, i - j + self.problem.Sk - 1]
        return {"softcap": CAP, "bias": bias, "alibi_slopes": self.slopes}

    def mask_mod(self, put: Put = np.asarray) -> MaskMod:
        """A mask of documents, and one of bools."""
        return MaskMod(
            "documents[b][q_idx] == documents[b][k_idx] && seen[0][h][q_idx][k_idx]",
            documents=put(self.documents),
            seen=put(self.seen),
        )

    def mask_options(self) -> dict[str, Any]:
        """The mask that `mask_mod` stands for."""
        rows = self.documents[:, : self.problem.Sq, None]
        same = rows == self.documents[:, None, : self.problem.Sk]
        return {"mask": same[:, None] & self.seen}

    def forward_ratios(
        self, own: dict[str, Any], alike: dict[str, Any], side: Any = KERNELS
    ) -> dict[str, float]:
        """Errors over bounds of out and lse."""
        arrays = self.problem.arrays()
        found = cupyattn.attention(*map(side.put, arrays), **own, return_lse=True)
        bounds = reference.attention_bound(
            *arrays,
            dtype=self.problem.dtype,
            tile_k=min(16, flash_row(75, self.problem.D, self.problem.D).tile_k),
            **alike,
        )
        exact = reference.attention(*arrays, **alike)
        return {
            name: reference.error_ratio(side.get(each), *expected)
            for name, each, *expected in zip(("out", "lse"), found, exact, bounds, strict=True)
        }

    def backward_ratios(
        self, own: dict[str, Any], alike: dict[str, Any], side: Any = KERNELS, **more: Any
    ) -> dict[str, float]:
        """Errors over bounds of dq, dk and dv."""
        dout, _ = self.problem.gradients()
        arrays = self.problem.arrays()
        out, lse = reference.attention(*arrays, **alike)
        given = (dout, *arrays, round_into(None, out, dout.dtype), lse.astype(np.float32))
        grads = cupyattn.attention_backward(*map(side.put, given), **own, **more)
        exact = reference.attention_backward(*given, **alike)
        bounds = reference.attention_backward_bound(*given, dtype=self.problem.dtype, **alike)
        return {
            name: reference.error_ratio(
                side.get(getattr(grads, name)), getattr(exact, name), getattr(bounds, name)
            )
            for name in ("dq", "dk", "dv")
        }

"""Packed sequences whose scores the user's expressions change, and options that do the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.block_masks import blocks_of
from support.devices import KERNELS
from support.modifiers import CAP
from support.strategies import AttentionProblem
from support.varlen import VarlenProblem

from cupyattn import MaskMod, ScoreMod


@dataclass(frozen=True)
class PackedExpressions(VarlenProblem):
    """Expressions that name the sequence, positions within it, and rows of packed arrays.

    The arrays that they index by a row of q or k end with the last one.
    """

    put: Any = KERNELS.put

    @property
    def rng(self) -> np.random.Generator:
        """The same each time."""
        return np.random.default_rng(self.dense.seed)

    @property
    def slopes(self) -> np.ndarray:
        """Of each sequence and head; a view."""
        return self.rng.random((self.dense.B, 2 * self.dense.H)).astype(np.float16)[:, ::2]

    @property
    def by_distance(self) -> np.ndarray:
        """A term for each head and distance."""
        return self.rng.standard_normal((self.dense.H, sum(self.longest)), np.float32)

    @property
    def offsets(self) -> np.ndarray:
        """Where the queries of each sequence stand."""
        return np.arange(self.dense.B) * 3 - 1

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each row of q and of k, in packed order."""
        totals = (sum(self.queries), sum(self.keys))
        q, k = (self.rng.integers(0, 3, total) for total in totals)
        return q, k

    def expressions(self) -> dict[str, Any]:
        """Both, with their gradient."""
        rows, keys = self.bounds
        of_q, of_k = self.documents()
        arrays = {
            "cap": np.array(CAP, np.float32), "by_distance": self.by_distance,
            "keys": np.array([self.longest[1]]), "slopes": self.slopes, "offsets": self.offsets,
        }  # fmt: skip
        masks = {"rows": rows, "keys": keys, "of_q": of_q, "of_k": of_k}
        return {
            "score_mod": ScoreMod(
                "cap * tanhf(score / cap) + by_distance[h][q_idx - k_idx + keys[0] - 1]\n"
                "  - slopes[b][h] * abs(q_idx + offsets[b] - k_idx)",
                gradient="grad * (1 - tanhf(score / cap) * tanhf(score / cap))",
                **{name: self.put(x) for name, x in arrays.items()},
            ),
            "mask_mod": MaskMod(
                "of_q[rows[b] + q_idx] == of_k[keys[b] + k_idx]",
                **{name: self.put(x) for name, x in masks.items()},
            ),
        }

    def given(self) -> dict[str, Any]:
        return {**self.expressions(), "q_offset": self.offsets}

    def options(self) -> dict[str, Any]:
        i, j = np.arange(self.longest[0])[:, None], np.arange(self.longest[1])
        mask = np.zeros((self.dense.B, 1, *self.longest), bool)
        of_q, of_k = self.documents()
        for b, (rows, keys) in enumerate(zip(*self.bounds, strict=True)):
            if b < self.dense.B:
                own = of_q[rows : rows + self.queries[b]], of_k[keys : keys + self.keys[b]]
                mask[b, 0, : len(own[0]), : len(own[1])] = own[0][:, None] == own[1]
        return {
            "softcap": CAP,
            "bias": self.by_distance[:, i - j + self.longest[1] - 1],
            "alibi_slopes": self.slopes,
            "q_offset": self.offsets,
            "mask": mask,
        }


@dataclass(frozen=True)
class PackedBlocks(VarlenProblem):
    """A block mask for the longest lengths, and bools in its place."""

    seen: np.ndarray = None  # type: ignore[assignment]
    causal: bool = False

    def given(self) -> dict[str, Any]:
        return {"mask_mod": blocks_of(self.seen), "causal": self.causal}

    def options(self) -> dict[str, Any]:
        window = {"window_size": (None, 0)} if self.causal else {}
        return {"mask": self.seen, **window}


def ragged(dtype: str, head_dim: int, seed: int = 0, **lengths: int) -> AttentionProblem:
    """The dense problem of the longest of three sequences."""
    return AttentionProblem(
        B=3, H=4, G=2, D=head_dim, Dv=head_dim, dtype=dtype, drawn=(), seed=seed, **lengths
    )

"""Masks of tiles, and expressions for score_mod and mask_mod with the options that they equal.

A mask of tiles (empty, mixed or full) is a MaskMod and an array of bools. Sequences may be packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.devices import KERNELS
from support.varlen import VarlenProblem

import cupyattn
from cupyattn import BlockMask, MaskMod, ScoreMod, block_mask, reference
from cupyattn.ops.attention.kernels.tensor_core.forward import flash_row
from cupyattn.runtime.outputs import round_into
from cupyattn.testing import AttentionCase

Put = Callable[[np.ndarray], Any]
CAP = 2.0


def by_the_reference(dout: np.ndarray, *arrays: np.ndarray, **options: Any) -> tuple[Any, ...]:
    """out, lse and the gradients: kernels would be compiled for the options that are compared."""
    with cupyattn.backend("reference"):
        results = cupyattn.attention(*arrays, **options, return_lse=True)
        return (*results, cupyattn.attention_backward(dout, *arrays, *results, **options))


class Expression:
    """A problem whose scores expressions change, and the options that change them alike."""

    def __init__(self, dtype: str, head_dim: int, *, Sq: int = 37, Sk: int = 133) -> None:  # noqa: N803
        self.problem = AttentionCase(
            B=2, Sq=Sq, Sk=Sk, H=2, G=1, D=head_dim, Dv=head_dim, dtype=dtype, options=()
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
        """The built-in options with the effect of `score_mod`."""
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
        """The mask with the effect of `mask_mod`."""
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
            native=side.device.traits.native,
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
        bounds = reference.attention_backward_bound(
            *given, dtype=self.problem.dtype, native=side.device.traits.native, **alike
        )
        return {
            name: reference.error_ratio(
                side.get(getattr(grads, name)), getattr(exact, name), getattr(bounds, name)
            )
            for name in ("dq", "dk", "dv")
        }


def arrays(dtype: str, sq: int, sk: int, head_dim: int = 8, heads: int = 2) -> list[np.ndarray]:
    """dout, q, k and v."""
    rng = np.random.default_rng(1)
    lengths = (sq, sq, sk, sk)
    return [rng.standard_normal((1, n, heads, head_dim)).astype(dtype) for n in lengths]


def masked_tiles(
    shape: tuple[int, int, int, int], tile: int, seed: int, *, full: float = 0.3
) -> np.ndarray:
    """Bools (B, H, Sq, Sk) in tiles of that many queries and keys; some rows see no key."""
    rng = np.random.default_rng(seed)
    batch, heads, sq, sk = shape
    states = rng.random((batch, heads, -(-sq // tile), -(-sk // tile)))
    share = np.repeat(np.repeat(states, tile, 2), tile, 3)[:, :, :sq, :sk]
    mixed = (share < full + 0.25) & (rng.random(shape) > 0.4)
    seen = (share < full) | mixed
    seen[:, :, rng.random(sq) > 0.95] = False
    return seen


def mask_of(seen: np.ndarray) -> MaskMod:
    """The mask as an expression; B and H of 1 broadcast."""
    batch, heads = (axis > 1 for axis in seen.shape[:2])
    return MaskMod(
        "seen[each[0] ? b : 0][each[1] ? h : 0][q_idx][k_idx]",
        seen=KERNELS.put(seen),
        each=KERNELS.put(np.array([batch, heads], np.int32)),
    )


def blocks_of(seen: np.ndarray, **options: Any) -> BlockMask:
    """Return the mask as an expression, with the block mask of its tiles."""
    batch, heads, sq, sk = seen.shape
    return block_mask(mask_of(seen), sq, sk, B=batch, H=heads, **options)


@dataclass(frozen=True)
class PackedBlocks(VarlenProblem):
    """A block mask for the longest lengths, and bools in its place."""

    seen: np.ndarray = None  # type: ignore[assignment]
    causal: bool = False

    def given(self) -> dict[str, Any]:
        return {"mask_mod": blocks_of(self.seen), "causal": self.causal}

    def keywords(self) -> dict[str, Any]:
        window = {"window_size": (None, 0)} if self.causal else {}
        return {"mask": self.seen, **window}


def ragged(dtype: str, head_dim: int, seed: int = 0, **lengths: int) -> AttentionCase:
    """The dense problem of the longest of three sequences."""
    return AttentionCase(
        B=3, H=4, G=2, D=head_dim, Dv=head_dim, dtype=dtype, options=(), seed=seed, **lengths
    )

"""Masks of tiles that are empty, mixed or full, as a MaskMod and as an array of bools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.devices import KERNELS
from support.strategies import AttentionProblem

import cupyattn
from cupyattn import AttentionGrads, BlockMask, MaskMod, block_mask, reference
from cupyattn.runtime.rounding import round_into


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
        python=lambda b, h, i, j, seen, each: seen[b * each[0], h * each[1], i, j],
        seen=KERNELS.put(seen),
        each=KERNELS.put(np.array([batch, heads], np.int32)),
    )


def blocks_of(seen: np.ndarray, **options: Any) -> BlockMask:
    """The same with its tiles."""
    batch, heads, sq, sk = seen.shape
    return block_mask(mask_of(seen), sq, sk, B=batch, H=heads, **options)


@dataclass(frozen=True)
class Case:
    """A problem, and bools that hide scores of it beside its options."""

    problem: AttentionProblem
    seen: np.ndarray
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def own(self) -> dict[str, Any]:
        """What a call takes of the block mask."""
        placed = {n: KERNELS.put(x) if isinstance(x, np.ndarray) else x for n, x in self.options}
        return {"mask_mod": blocks_of(self.seen), **placed}

    @property
    def alike(self) -> dict[str, Any]:
        """What the reference takes in its place."""
        return {"mask": self.seen, **dict(self.options)}

    def forward_ratios(self) -> dict[str, float]:
        """Errors over bounds of out and lse."""
        arrays = self.problem.arrays()
        found = cupyattn.attention(*map(KERNELS.put, arrays), **self.own, return_lse=True)
        bounds = reference.attention_bound(
            *arrays, dtype=self.problem.dtype, tile_k=16, **self.alike
        )
        exact = reference.attention(*arrays, **self.alike)
        return {
            name: reference.error_ratio(KERNELS.get(each), *expected)
            for name, each, *expected in zip(("out", "lse"), found, exact, bounds, strict=True)
        }

    def backward_inputs(self) -> tuple[np.ndarray, ...]:
        """dout, q, k, v, and the reference's out and lse."""
        dout, _ = self.problem.gradients()
        arrays = self.problem.arrays()
        out, lse = reference.attention(*arrays, **self.alike)
        return (dout, *arrays, round_into(None, out, dout.dtype), lse.astype(np.float32))

    def run_backward(self, **more: Any) -> AttentionGrads:
        """With other options too, or others in place of its own."""
        given = map(KERNELS.put, self.backward_inputs())
        return cupyattn.attention_backward(*given, **{**self.own, **more})

    def backward_ratios(self, **more: Any) -> dict[str, float]:
        """Errors over bounds of all gradients."""
        grads, given = self.run_backward(**more), self.backward_inputs()
        exact = reference.attention_backward(*given, **self.alike)
        bounds = reference.attention_backward_bound(*given, dtype=self.problem.dtype, **self.alike)
        return {
            name: reference.error_ratio(
                KERNELS.get(grad), getattr(exact, name), getattr(bounds, name)
            )
            for name, grad in grads._asdict().items()
            if grad is not None
        }

"""A random problem, what the reference makes of it, and how far a result is from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn import reference
from cupyattn.ops.attention.kernels.teaching.forward import TILED_TILE_K
from cupyattn.ops.attention.kernels.tensor_core.forward_rows import flash_row
from cupyattn.runtime.arch import Arch


@dataclass(frozen=True)
class Problem:
    """The demo's problem: causal self-attention of standard normal q, k and v."""

    batch: int = 2
    seqlen: int = 2048
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float16"
    seed: int = 0

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Make q, k and v."""
        import ml_dtypes  # noqa: F401 (gives NumPy the name bfloat16)

        rng = np.random.default_rng(self.seed)
        q, k, v = (
            rng.standard_normal((self.batch, self.seqlen, heads, self.head_dim), dtype=np.float32)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        return q.astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype)


@dataclass(frozen=True)
class Expected:
    """The reference's results in float64 and how far a right kernel may be from them."""

    out: np.ndarray
    lse: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray

    @classmethod
    def of(cls, arch: Arch, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Expected:
        """Compute them for causal attention by the kernels of an architecture."""
        tile_k = min(TILED_TILE_K, flash_row(arch.number, q.shape[-1], v.shape[-1]).tile_k)
        bounds = reference.attention_bound(q, k, v, dtype=q.dtype, tile_k=tile_k, causal=True)
        return cls(*reference.attention(q, k, v, causal=True), *bounds)

    def errors(self, out: np.ndarray, lse: np.ndarray) -> dict[str, Any]:
        """Compare a result with them."""
        return {
            "out": compare(out, self.out, self.out_bound),
            "lse": compare(lse, self.lse, self.lse_bound),
        }


def compare(actual: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> dict[str, Any]:
    """Find the largest error, the bound at its place, and the largest error / bound.

    Returns
    -------
    dict
        ``max_error``, ``bound`` and ``max_ratio``, None where they are not finite, and
        ``within_bound``.

    Examples
    --------
    >>> compare(np.array([1.0, 2.5]), np.array([1.25, 2.5]), np.array([0.5, 0.1]))
    {'max_error': 0.25, 'bound': 0.5, 'max_ratio': 0.5, 'within_bound': True}
    """
    with np.errstate(invalid="ignore"):
        errors = np.where(actual == exact, 0.0, np.abs(actual.astype(np.float64) - exact))
    worst = np.unravel_index(np.argmax(np.where(np.isnan(errors), np.inf, errors)), errors.shape)
    ratio = reference.error_ratio(actual, exact, bound)
    return {
        "max_error": _finite(errors[worst]),
        "bound": _finite(bound[worst]),
        "max_ratio": _finite(ratio),
        "within_bound": ratio <= 1.0,
    }


def _finite(number: Any) -> float | None:
    return float(number) if np.isfinite(number) else None

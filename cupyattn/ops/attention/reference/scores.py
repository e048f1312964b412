"""The scores of attention, one block of queries at a time.

`ScoreBlocks` visits every (batch element, query head, block of queries) and gives each block's
scaled, capped, biased and masked scores with the pieces their derivative needs. Forward, backward
and the error bounds share this loop: what an option means is written here and nowhere else in the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from cupyattn.ops.rope.reference import rotate, table_rows
from cupyattn.runtime.philox import kept_fields
from cupyattn.runtime.precision import TINY32, U32, Float64, Precision, precision_of

# Scores computed at a time. Every float64 intermediate of a block then takes 2 MiB, which a core's
# caches hold.
SCORES_PER_BLOCK = 2**18


@dataclass(frozen=True)
class ScoreBlock:
    """The scores of some queries of one head against the keys that they may see.

    Attributes
    ----------
    b, h, g : int
        Batch element, query head, key-value head.
    rows, keys : slice
        The queries and keys of this block. Keys outside the slice are hidden from all of its
        queries.
    q : (rows, D), k : (keys, D)
        Rotated, if there is rotary embedding.
    v : (keys, Dv)
    capped : (rows, keys)
        softmax_scale * q k^T, after the softcap.
    slope : (rows, keys) or None
        Derivative of the softcap, 1 - tanh(.)**2; None without one.
    bias, alibi : (rows, keys) or None
        What was added to `capped`.
    scores : (rows, keys)
        The scores that enter the softmax; -inf where the query does not see the key.
    kept : (rows, keys) or None
        Dropout's factor of each probability, 0 or 1 / (1 - p); None without dropout.
    unmodified : (rows, keys)
        The scores before score_mod and the masks.
    """

    b: int
    h: int
    g: int
    rows: slice
    keys: slice
    q: Float64
    k: Float64
    v: Float64
    capped: Float64
    slope: Float64 | None
    bias: Float64 | None
    alibi: Float64 | None
    scores: Float64
    kept: Float64 | None
    unmodified: Float64

    @property
    def at(self) -> tuple[int, int, slice]:
        """Index of the block's rows in a (B, H, Sq) array."""
        return self.b, self.h, self.rows

    @property
    def hidden(self) -> NDArray[np.bool_]:
        """Where the query does not see the key."""
        return np.isneginf(self.scores)

    def rows_of(self, x: NDArray[Any]) -> Float64:
        """Take the block's rows (rows, D) of a (B, Sq, H, D) array."""
        return np.asarray(x[self.b, self.rows, self.h], dtype=np.float64)


@dataclass(eq=False)
class ScoreBlocks:
    """Iterates over the `ScoreBlock`s of an attention problem, one (batch, kv head) after another.

    The arguments are those of `cupyattn.attention`, validated by the caller.

    Parameters
    ----------
    q : (B, Sq, H, D), k : (B, Sk, G, D), v : (B, Sk, G, Dv)
        H is a multiple of G.
    causal : bool
        Query i sees keys j <= i + q_offset.
    softmax_scale : float, optional
        Default D ** -0.5.
    window_size : (left, right), optional
        Query i sees keys i + q_offset - left <= j <= i + q_offset + right; None is unbounded.
    q_offset : int or (B,) ints, optional
        Default: the last query is at the last key in use, Sk - Sq or seqused_k - Sq.
    seqused_k : (B,) ints, optional
        Keys (and columns of bias and mask) from there on are not read.
    mask : bool, optional
        Broadcasts to (B, H, Sq, Sk); True = attend.
    bias : float, optional
        Broadcasts to (B, H, Sq, Sk); added after the softcap.
    alibi_slopes : (H,) or (B, H), optional
        Adds -slope * |i + q_offset - j|.
    softcap : float, optional
        softcap * tanh(score / softcap).
    sinks : (H,), optional
        One more logit per head that joins the softmax denominator. Not a score: the caller adds it.
    dropout_p, seed : float, int
        See `attention_keep`.
    rotary : (cos, sin) or (cos, sin, interleaved), optional
        Tables (P, R/2). Query i is rotated by row i + q_offset, key j by row j.
    score_mod : callable, optional
        score_mod(score, b, h, i, j): what becomes of a score, after bias and ALiBi.
    score_mod_gradient : callable, optional
        score_mod_gradient(score, gradient, b, h, i, j): from the gradient of what score_mod returns
        to that of the score.
    mask_mod : callable, optional
        mask_mod(b, h, i, j) of integer arrays that broadcast to the block; True = attend.
    first_batch : int
        What dropout, score_mod and mask_mod take the first batch element for.
    dropout_start : (b, i, j)
        What dropout takes the first batch element, query and key for, besides first_batch.
    """

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    _: KW_ONLY
    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int | None, int | None] | None = None
    q_offset: ArrayLike | None = None
    seqused_k: ArrayLike | None = None
    mask: NDArray[np.bool_] | None = None
    bias: NDArray[Any] | None = None
    alibi_slopes: ArrayLike | None = None
    softcap: float | None = None
    sinks: ArrayLike | None = None
    dropout_p: float = 0.0
    seed: int | None = None
    rotary: tuple[Any, ...] | None = None
    score_mod: Callable[..., Any] | None = None
    score_mod_gradient: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    first_batch: int = 0
    dropout_start: tuple[int, int, int] = (0, 0, 0)
    scale: float = field(init=False)
    offsets: NDArray[np.int64] = field(init=False)
    used: NDArray[np.int64] = field(init=False)
    left: int | None = field(init=False, default=None)
    right: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        batch, sq, _, head_dim = self.q.shape
        sk = self.k.shape[1]
        self.scale = head_dim**-0.5 if self.softmax_scale is None else float(self.softmax_scale)
        used = sk if self.seqused_k is None else self.seqused_k
        self.used = np.broadcast_to(np.asarray(used, dtype=np.int64), (batch,))
        offset = self.used - sq if self.q_offset is None else self.q_offset
        self.offsets = np.broadcast_to(np.asarray(offset, dtype=np.int64), (batch,))
        if self.window_size is not None:
            self.left, self.right = self.window_size
        if self.causal:
            self.right = 0 if self.right is None else min(self.right, 0)

    @property
    def full_shape(self) -> tuple[int, int, int, int]:
        """(B, H, Sq, Sk), which mask and bias broadcast to."""
        batch, sq, heads, _ = self.q.shape
        return batch, heads, sq, self.k.shape[1]

    def sink(self, h: int) -> float | None:
        """Look up the sink of head h, if there are sinks."""
        return None if self.sinks is None else float(np.asarray(self.sinks, dtype=np.float64)[h])

    def __iter__(self) -> Iterator[ScoreBlock]:
        batch, heads, sq, _ = self.full_shape
        kv_heads = self.k.shape[2]
        for b in range(batch):
            used = int(self.used[b])
            rows_per_block = max(1, SCORES_PER_BLOCK // max(1, used))
            for g in range(kv_heads):
                k = self._rotated(self.k[b, :used, g], b)
                v = np.asarray(self.v[b, :used, g], dtype=np.float64)
                for h in range(g * heads // kv_heads, (g + 1) * heads // kv_heads):
                    for start in range(0, sq, rows_per_block):
                        rows = slice(start, min(start + rows_per_block, sq))
                        yield self._block(b, h, g, rows, k, v)

    @property
    def interleaved(self) -> bool:
        """Whether rotary pairs features 2m and 2m + 1, not m and m + R/2."""
        return self.rotary is not None and len(self.rotary) == 3 and self.rotary[2]

    def angles(self, b: int, queries: NDArray[np.int64] | None = None) -> tuple[Float64, Float64]:
        """Return cos and sin (rows, R/2) of queries, or of the keys in use.

        Queries that causal and window_size leave no key need no position, and are not rotated.
        """
        assert self.rotary is not None
        used = int(self.used[b])
        positions = np.arange(used) if queries is None else queries + self.offsets[b]
        rotated = np.full(positions.shape, used > 0)
        if queries is not None and self.left is not None:
            rotated &= positions - self.left < used
        if queries is not None and self.right is not None:
            rotated &= positions + self.right >= 0
        shape = len(positions), self.rotary[0].shape[1]
        cos, sin = np.ones(shape), np.zeros(shape)
        for angles, table in zip((cos, sin), self.rotary[:2], strict=True):
            angles[rotated] = table_rows(table, positions[rotated])
        return cos, sin

    def _rotated(
        self, x: NDArray[Any], b: int, queries: NDArray[np.int64] | None = None
    ) -> Float64:
        if self.rotary is None:
            return np.asarray(x, dtype=np.float64)
        return rotate(x, *self.angles(b, queries), interleaved=self.interleaved)

    def _block(self, b: int, h: int, g: int, rows: slice, k: Float64, v: Float64) -> ScoreBlock:
        i = np.arange(rows.start, rows.stop)
        positions = i + self.offsets[b]
        keys = self._keys(b, positions)
        j = np.arange(keys.start, keys.stop)
        distance = j - positions[:, None]
        q, k, v = self._rotated(self.q[b, rows, h], b, i), k[keys], v[keys]

        capped, slope = self.scale * (q @ k.T), None
        if self.softcap:
            tanh = np.tanh(capped / self.softcap)
            capped, slope = self.softcap * tanh, 1.0 - tanh * tanh
        scores, bias, alibi = capped, None, None
        if self.bias is not None:
            bias = np.broadcast_to(self.bias, self.full_shape)[b, h, rows, keys].astype(np.float64)
            scores = scores + bias
        if self.alibi_slopes is not None:
            slopes = np.broadcast_to(np.asarray(self.alibi_slopes, np.float64), self.full_shape[:2])
            alibi = -slopes[b, h] * np.abs(distance)
            scores = scores + alibi
        unmodified = scores
        if self.score_mod is not None:
            scores = self.score_mod(scores, *self._indices(b, h, rows, keys))
        scores = np.where(self._visible(b, h, rows, keys, distance), scores, -np.inf)

        kept = None
        if self.dropout_p:
            assert self.seed is not None
            first_b, first_i, first_j = self.dropout_start
            place = b + self.first_batch + first_b, h, i + first_i, j + first_j
            keep = attention_keep(self.seed, self.dropout_p, *place)
            kept = keep / (1.0 - self.dropout_p)
        return ScoreBlock(
            b, h, g, rows, keys, q, k, v, capped, slope, bias, alibi, scores, kept, unmodified
        )

    def _keys(self, b: int, positions: NDArray[np.int64]) -> slice:
        """Find the keys that causal and window_size leave to any of these queries."""
        start, stop = 0, int(self.used[b])
        if self.left is not None:
            start = min(max(start, int(positions[0]) - self.left), stop)
        if self.right is not None:
            stop = max(min(stop, int(positions[-1]) + self.right + 1), start)
        return slice(start, stop)

    def _visible(
        self, b: int, h: int, rows: slice, keys: slice, distance: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        visible = np.ones(distance.shape, dtype=np.bool_)
        if self.left is not None:
            visible &= distance >= -self.left
        if self.right is not None:
            visible &= distance <= self.right
        if self.mask is not None:
            visible &= np.broadcast_to(self.mask, self.full_shape)[b, h, rows, keys]
        if self.mask_mod is not None:
            visible &= self.mask_mod(*self._indices(b, h, rows, keys))
        return visible

    def _indices(self, b: int, h: int, rows: slice, keys: slice) -> tuple[NDArray[np.int64], ...]:
        """Return the indices of a block's scores, as the user's functions take them."""
        i, j = np.arange(rows.start, rows.stop), np.arange(keys.start, keys.stop)
        return np.asarray(b + self.first_batch), np.asarray(h), i[:, None], j[None, :]

    def before_score_mod(self, block: ScoreBlock, ds: Float64) -> Float64:
        """Turn gradients of scores that enter the softmax into those of what score_mod is given."""
        if self.score_mod is None:
            return ds
        assert self.score_mod_gradient is not None
        at = self._indices(block.b, block.h, block.rows, block.keys)
        gradient = self.score_mod_gradient(block.unmodified, ds, *at)
        return np.where(block.hidden, 0.0, gradient)


def normalised(scores: Float64, sink: float | None = None) -> tuple[Float64, Float64]:
    """Softmax of each row with the sink as one more entry, and the log-sum-exp of both.

    A row with neither key nor sink has probabilities 0 and log-sum-exp -inf.
    """
    m = np.max(scores, axis=-1, initial=-np.inf if sink is None else sink)
    m = np.where(np.isneginf(m), 0.0, m)
    p = np.exp(scores - m[:, None])
    total = p.sum(axis=-1)
    if sink is not None:
        total += np.exp(sink - m)
    with np.errstate(divide="ignore"):
        lse = m + np.log(total)
    return p / np.where(total == 0, 1.0, total)[:, None], lse


def probabilities(scores: Float64, lse: Float64) -> Float64:
    """exp(scores - lse); exactly 0 for a score of -inf, whatever lse is, and for a lse of -inf.

    At most 1: a lse that was rounded to float32 may lie below its largest score.
    """
    lse = np.where(np.isneginf(lse), np.inf, lse)
    p = np.where(np.isneginf(scores), 0.0, np.exp(np.minimum(scores - lse[:, None], 0.0)))
    return p


_MOST_HALF_SUM = (
    256  # of a row's P: 4 kLargestSum in cuda_src/attention/tensor_core/output_sums.cuh
)


@dataclass(frozen=True)
class WeightPrecision(Precision):
    """The precision of an attention kernel, and the range of the P that it keeps."""

    exponent_shift: float = 0.0
    flush: float = TINY32
    """Relative to the largest of its row, the P that may be lost."""
    half_sums: int = 0
    """Keys that are summed in float16; 0 where sums are float32."""
    steps: int = 1
    """Softmaxes of these keys: each but the first may rescale, and round, the P before it."""

    @classmethod
    def of(
        cls,
        dtype: DTypeLike,
        *,
        float32_weights: bool,
        native: bool = False,
        half_sums: int = 0,
        steps: int = 1,
    ) -> WeightPrecision:
        """Return the precision for a dtype; with `float32_weights`, P is kept in float32.

        `native` kernels, of sm_80 or later, have P of bfloat16 where q, k and v are.
        """
        kernel = precision_of(dtype)
        if float32_weights:
            return cls(U32, TINY32, kernel.u_out, kernel.tiny_out)
        if kernel == precision_of("float16"):
            flush = 2.0**-14 / _stored_unit(half_sums) if half_sums else 2.0**-23
            shift = 112 * float(np.log(2))
            sums = {"half_sums": half_sums, "steps": steps}
            return cls(**vars(kernel), exponent_shift=shift, flush=flush, **sums)
        if native and kernel == precision_of("bfloat16"):
            return cls(kernel.u_out, TINY32, kernel.u_out, kernel.tiny_out)
        return cls(**vars(kernel))

    @property
    def u_sums(self) -> float:
        """Error of the float16 sums of a tile, relative to the absolute values of their terms."""
        roundings = -(-self.half_sums // 8) + self.steps - 1
        return float(np.expm1(roundings * 2.0**-11))

    def tiny_sums(self, keys: int) -> float:
        """Return what subnormal sums of a row of so many keys lose, relative to its largest P."""
        if not self.half_sums:
            return 0.0
        steps = -(-self.half_sums // 8) * -(-keys // self.half_sums)
        return steps * 2.0**-25 / _stored_unit(self.half_sums)

    def flushed(self, p: Float64) -> Float64:
        """Return the most that each probability (rows, keys) may lose to the flush.

        With float16 sums only those lose anything that are below it; exp(1) pays for scores that
        err by 1/2 each. (It is so large that losses of all keys would make a useless bound.)
        """
        if not self.half_sums:
            return np.full(p.shape, self.flush)
        limit = np.e * self.flush * p.max(axis=-1, keepdims=True, initial=0.0)
        return np.where(p <= limit, np.minimum(np.e * p, limit), 0.0)


def _stored_unit(half_sums: int) -> float:
    """Return what P = 1 is stored as for float16 sums of so many keys: a power of two."""
    return float(2.0 ** np.floor(np.log2(_MOST_HALF_SUM / half_sums)))


def attention_keep(
    seed: int, p: float, b: int, h: int, i: ArrayLike, j: ArrayLike
) -> NDArray[np.bool_]:
    """Return which scores of one head dropout keeps.

    The key is the seed; the counter is (4 (j // 32) + (j % 8) // 2, i, h, b). The four words are
    eight 16-bit fields, low half first. Score j uses field 2 ((j % 32) // 8) + j % 2 and is kept
    if the field is at least round(65536 p). So one counter is enough for the eight scores that a
    thread of a tensor-core kernel holds in 32 keys.

    Parameters
    ----------
    seed : int in [0, 2**64)
    p : float in [0, 1)
        Probability of dropping a score.
    b, h : int
        Batch element and query head.
    i : (M,) ints
        Queries.
    j : (N,) ints
        Keys.

    Returns
    -------
    (M, N) bool
        True where the score is kept.
    """
    i, j = np.asarray(i), np.asarray(j)
    counters, counter_of_key = np.unique(4 * (j // 32) + j % 8 // 2, return_inverse=True)
    kept = kept_fields(seed, p, (counters, i[:, None], h, b))
    # NumPy puts the key axis first because a slice is between the two index arrays.
    return kept[2 * (j % 32 // 8) + j % 2, :, counter_of_key].T

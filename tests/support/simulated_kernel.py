"""A right float32 kernel in NumPy, to test error bounds with; in float64 it equals the reference.

It does what the kernels do, in their order of operations: base-2 exponentials, online softmax over
tiles of keys, P and dS rounded to what a tensor core reads, sums over tiles in the working
precision, one rounding at the store.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from support.devices import dtype_of
from support.strategies import AttentionProblem

from cupyattn.ops.attention.reference.dense import AttentionGrads
from cupyattn.reference import attention_keep

TILE = 16
SMALLEST = 2.0**-126  # below it, float32 results are flushed
# A float16 kernel holds P in units of 2**-103 (forward) or 2**-98 (backward): packing it then needs
# no conversion.
FORWARD_UNIT, BACKWARD_UNIT = -103, -98


def precise_tanh(x):
    with np.errstate(over="ignore"):
        return 1 - 2 / (1 + np.exp(2 * x))


class Head(NamedTuple):
    """What a kernel holds of one head: rotated q and k, v, base-2 scores, derivative's factors."""

    q: Any
    k: Any
    v: Any
    scores: Any
    slope: Any
    kept: Any


@dataclass
class SimulatedKernel:
    """Forward and backward of one problem. The fields from p_dtype on are for planting bugs."""

    problem: AttentionProblem
    options: dict[str, Any]
    work: type = np.float32
    p_dtype: Any = None
    rescale: bool = True
    subtract_delta: bool = True
    heads_summed: int | None = None
    tanh: Callable[[Any], Any] = precise_tanh
    arrays: tuple[Any, Any, Any] = field(init=False)

    def __post_init__(self):
        self.arrays = self.problem.arrays()
        self.tensor_cores = self.problem.dtype == "float16" and self.work is np.float32
        if self.p_dtype is None:
            self.p_dtype = np.float16 if self.tensor_cores else self.work
        self.group = self.problem.H // self.problem.G
        self.out_dtype = dtype_of(self.problem.dtype) if self.work is np.float32 else self.work

    def read(self, x):
        """Round to what a tensor core reads."""
        return x.astype(self.p_dtype).astype(self.work)

    def exp2(self, x):
        p = np.exp2(x, dtype=self.work)
        return np.where(p < SMALLEST, self.work(0), p) if self.work is np.float32 else p

    def positions(self, b):
        used = np.asarray(self.options.get("seqused_k", self.problem.Sk))
        offset = self.options.get("q_offset", used - self.problem.Sq)
        return np.arange(self.problem.Sq) + int(np.broadcast_to(offset, self.problem.B)[b])

    def rotated(self, x, positions, back=False):
        """Rotate, and round as kernels do: the result, and backwards what is rotated."""
        if "rotary" not in self.options:
            return x
        x = self.rounded(x) if back else x
        cos, sin = (self.angles(table, positions) for table in self.options["rotary"])
        half, sin = cos.shape[1], -sin if back else sin
        a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
        turned = np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=1)
        return turned if back else self.rounded(turned)

    def angles(self, table, positions):
        """Rows of a table; 0 where there is none: a query there sees no key."""
        found = np.zeros((len(positions), table.shape[1]), self.work)
        there = (positions >= 0) & (positions < len(table))
        found[there] = table[positions[there]]
        return found

    def rounded(self, x):
        return x.astype(self.out_dtype).astype(self.work)

    def visible(self, b, h, used):
        options, p = self.options, self.problem
        j, position = np.arange(p.Sk), self.positions(b)[:, None]
        left, right = options.get("window_size", (None, None))
        visible = np.broadcast_to(options.get("mask", True), (p.B, p.H, p.Sq, p.Sk))[b, h]
        visible = visible & (j < used)
        if options.get("causal"):
            visible &= j <= position
        if left is not None:
            visible &= j >= position - left
        if right is not None:
            visible &= j <= position + right
        if "mask_mod" in options:
            visible &= options["mask_mod"](b, h, np.arange(p.Sq)[:, None], j)
        return visible

    def head(self, b, h):
        options, p, work = self.options, self.problem, self.work
        q, k, v = self.arrays
        g = h // self.group
        used = int(options["seqused_k"][b]) if "seqused_k" in options else p.Sk
        q, k, v = (x.astype(work) for x in (q[b, :, h], k[b, :, g], v[b, :, g]))
        k[used:] = v[used:] = 0
        q = self.rotated(q, self.positions(b))
        k[:used] = self.rotated(k[:used], np.arange(used))
        s, slope = (q @ k.T) * self.scale, np.ones((p.Sq, p.Sk), work)
        if "softcap" in options:
            cap = work(options["softcap"])
            tanh = self.tanh(s / cap)
            s, slope = cap * tanh, 1 - tanh * tanh
        if "bias" in options:
            bias = np.broadcast_to(options["bias"], (p.B, p.H, p.Sq, p.Sk))
            s = s + bias[b, h].astype(work)
        if "alibi_slopes" in options:
            distance = np.abs(np.arange(p.Sk) - self.positions(b)[:, None]).astype(work)
            s = s - work(np.broadcast_to(options["alibi_slopes"], (p.B, p.H))[b, h]) * distance
        scores = np.where(self.visible(b, h, used), s * work(np.log2(np.e)), work(-np.inf))
        kept = np.ones((p.Sq, p.Sk), work)
        if "dropout_p" in options:
            p_drop = options["dropout_p"]
            keep = attention_keep(options["seed"], p_drop, b, h, np.arange(p.Sq), np.arange(p.Sk))
            kept = keep * work(1 / (1 - p_drop))
        return Head(q, k, v, scores, slope, kept)

    @property
    def scale(self):
        return self.work(self.options.get("softmax_scale", self.problem.D**-0.5))

    def sink(self, h):
        return self.work(self.options["sinks"][h]) * self.work(np.log2(np.e))

    def forward(self):
        p, work = self.problem, self.work
        unit = work(FORWARD_UNIT if self.tensor_cores else 0)
        pack = work(2) ** (112 if self.tensor_cores else 0)
        out = np.zeros((p.B, p.Sq, p.H, p.Dv), self.out_dtype)
        lse = np.zeros((p.B, p.H, p.Sq), work)
        for b, h in np.ndindex(p.B, p.H):
            head = self.head(b, h)
            m, total = np.full(p.Sq, work(-1e30)), np.zeros(p.Sq, work)
            acc = np.zeros((p.Sq, p.Dv), work)
            if "sinks" in self.options:
                m[:], total[:] = self.sink(h) - unit, self.exp2(unit)
            for start in range(0, p.Sk, TILE):
                tile = slice(start, start + TILE)
                s = head.scores[:, tile]
                old, m = m, np.maximum(m, s.max(axis=1) - unit)
                if self.rescale:
                    factor = self.exp2(old - m)
                    total, acc = total * factor, acc * factor[:, None]
                weights = self.exp2(s - m[:, None])
                total = total + weights.sum(axis=1)
                acc = acc + self.read(weights * pack * head.kept[:, tile]) @ head.v[tile]
            no_key = total == 0
            total[no_key] = 1
            out[b, :, h] = acc / (total * pack)[:, None]
            lse[b, h] = np.where(no_key, -np.inf, (m + np.log2(total)) * work(np.log(2)))
        return out, lse

    def backward(self, dout, out, lse, dlse):
        p, work = self.problem, self.work
        unit = work(BACKWARD_UNIT if self.tensor_cores else 0)
        pack = work(2) ** (112 if self.tensor_cores else 0)
        dq, dk, dv = (np.zeros(x.shape, work) for x in self.arrays)
        dbias, dsinks = np.zeros((p.B, p.H, p.Sq, p.Sk), work), np.zeros(p.H, work)
        for b, h in np.ndindex(p.B, p.H):
            head, group = self.head(b, h), (b, slice(None), h // self.group)
            g, row_lse = dout[b, :, h].astype(work), lse[b, h].astype(work)
            delta = (g * out[b, :, h].astype(work)).sum(axis=1) - dlse[b, h].astype(work)
            if not self.subtract_delta:
                delta *= 0
            log2_lse = np.where(np.isinf(row_lse), work(np.inf), row_lse * work(np.log2(np.e)))
            weights = self.exp2(head.scores - (log2_lse - unit)[:, None])
            dp = (g @ head.v.T) * head.kept
            ds = weights * ((dp - delta[:, None]) * work(2) ** -unit)
            dbias[b, h] = ds
            if "sinks" in self.options:
                dsinks[h] -= self.exp2(self.sink(h) - log2_lse) @ delta
            weights = self.read(weights * pack * head.kept) * (work(2) ** -unit / pack)
            ds = self.read(ds * head.slope)
            dq[b, :, h] = self.rotated(ds @ head.k * self.scale, self.positions(b), back=True)
            if self.heads_summed is not None and h % self.group >= self.heads_summed:
                continue
            for start in range(0, p.Sq, TILE):
                tile = slice(start, start + TILE)
                dv[group] += weights[tile].T @ g[tile]
                dk[group] += ds[tile].T @ head.q[tile] * self.scale
        for b, kv_head in np.ndindex(p.B, p.G):
            dk[b, :, kv_head] = self.keys_rotated_back(dk[b, :, kv_head], b)
        return AttentionGrads(
            *(x.astype(self.out_dtype) for x in (dq, dk, dv)),
            self.summed_to_bias(dbias) if "bias" in self.options else None,
            dsinks if "sinks" in self.options else None,
        )

    def keys_rotated_back(self, dk, b):
        used = int(self.options["seqused_k"][b]) if "seqused_k" in self.options else len(dk)
        return np.concatenate([self.rotated(dk[:used], np.arange(used), back=True), dk[used:]])

    def summed_to_bias(self, dbias):
        bias = self.options["bias"]
        padded = (1,) * (4 - bias.ndim) + bias.shape
        axes = tuple(axis for axis in range(4) if padded[axis] == 1)
        total = dbias.sum(axis=axes, keepdims=True).reshape(bias.shape)
        return total.astype(bias.dtype if self.work is np.float32 else self.work)

"""The error bounds against simulated float32 kernels: right ones stay within, mistakes do not.

The simulation of kernels of 16 bits rounds P and dS to their dtype, as tensor cores have it; that
of float32 keeps float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from support.devices import DTYPES, dtype_of
from support.search import examples
from support.strategies import attention_problems

from cupyattn.ops.attention.reference.dense import AttentionGrads
from cupyattn.reference import (
    attention,
    attention_backward,
    attention_backward_bound,
    attention_bound,
    attention_keep,
    error_ratio,
    softmax,
    softmax_backward,
    softmax_backward_bound,
    softmax_bound,
)
from cupyattn.testing import AttentionCase, softmax_cases

TILE = 16
SMALLEST = 2.0**-126  # below it, float32 results are flushed
# A float16 kernel holds P in units of 2**-103 (forward) or 2**-98 (backward): packing it then needs
# no conversion.
FORWARD_UNIT, BACKWARD_UNIT = -103, -98


def precise_tanh(x):
    with np.errstate(over="ignore"):
        return 1 - 2 / (1 + np.exp(2 * x))


class Head(NamedTuple):
    """Values of one head in a kernel: rotated q and k, v, base-2 scores, derivative factors."""

    q: Any
    k: Any
    v: Any
    scores: Any
    slope: Any
    kept: Any


@dataclass
class SimulatedKernel:
    """A right float32 kernel in NumPy; in float64 it equals the reference.

    It does what the kernels do, in their order of operations: base-2 exponentials, online softmax
    over tiles of keys, P and dS rounded to what a tensor core reads, sums over tiles in the working
    precision, one rounding at the store. The fields from p_dtype on are for planting bugs.
    """

    problem: AttentionCase
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
        self.out_dtype = dtype_of(self.problem.dtype) if self.work is np.float32 else self.work
        self.shifts = self.out_dtype == np.float16
        if self.p_dtype is None:
            self.p_dtype = self.out_dtype
        self.group = self.problem.H // self.problem.G

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
        unit = work(FORWARD_UNIT if self.shifts else 0)
        pack = work(2) ** (112 if self.shifts else 0)
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
        unit = work(BACKWARD_UNIT if self.shifts else 0)
        pack = work(2) ** (112 if self.shifts else 0)
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


def forward_ratios(problem, kernel):
    """Largest error / bound of the kernel's out and lse."""
    arrays, options = problem.arrays(), problem.keywords()
    exact = attention(*arrays, **options)
    limits = {"dtype": problem.dtype, "native": problem.dtype == "bfloat16"}
    bounds = attention_bound(*arrays, tile_k=TILE, **limits, **options)
    return dict(zip(("out", "lse"), map(error_ratio, kernel.forward(), exact, bounds), strict=True))


def backward_ratios(problem, kernel, ignore_dlse=False):
    """Largest error / bound of each of the kernel's gradients, from a rounded out and lse."""
    arrays, options = problem.arrays(), problem.keywords()
    dout, dlse = problem.gradients()
    out, lse = attention(*arrays, **options)
    results = out.astype(dtype_of(problem.dtype)), lse.astype(np.float32)
    exact = attention_backward(dout, *arrays, *results, dlse=dlse, **options)
    limits = {"dtype": problem.dtype, "native": problem.dtype == "bfloat16"}
    bounds = attention_backward_bound(dout, *arrays, *results, dlse=dlse, **limits, **options)
    actual = kernel.backward(dout, *results, 0 * dlse if ignore_dlse else dlse)
    return {
        name: error_ratio(*triple)
        for name, *triple in zip(exact._fields, actual, exact, bounds, strict=True)
        if triple[1] is not None
    }


def check_within(ratios):
    assert all(ratio <= 1 for ratio in ratios.values()), ratios


@examples(20, deep=60)
@given(attention_problems(head_dims=((8, 8), (4, 6)), largest=40, spreads=(1.0,)))
def test_in_float64_the_simulation_is_the_reference(problem):
    q, k, v = problem.arrays()
    dout, dlse = problem.gradients()
    options = problem.keywords()
    kernel = SimulatedKernel(problem, options, work=np.float64)
    out, lse = attention(q, k, v, **options)
    grads = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    for simulated, exact in zip(
        (*kernel.forward(), *kernel.backward(dout, out, lse, dlse)), (out, lse, *grads), strict=True
    ):
        assert (simulated is None) == (exact is None)
        if exact is not None:
            np.testing.assert_allclose(simulated, exact, rtol=1e-9, atol=1e-10)


@examples(40, deep=200)
@given(attention_problems(dtypes=DTYPES))
def test_right_kernels_stay_within_their_bounds(problem):
    kernel = SimulatedKernel(problem, problem.keywords())
    check_within(forward_ratios(problem, kernel))
    check_within(backward_ratios(problem, kernel))


# (Sq, options). Mostly long enough for sums to matter; the worst case of a sum over queries of sums
# over features, dsinks, is far from the usual one when both are long.
USUAL = (
    (60, ()),
    (60, (("causal", True), ("softcap", 15.0))),
    (60, (("bias", ((4, 60, 150), "float32")),)),
    (60, (("dropout_p", 0.1), ("alibi_slopes", ((4,), "float32", 1)), ("window_size", (90, 30)))),
    (8, (("sinks", "float32"),)),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_bounds_are_near_the_errors_of_right_kernels(dtype, spread):
    """No result's largest error is beyond its bound, or below a 500th of it."""
    largest = {}
    for seed, (sq, drawn) in enumerate(USUAL):
        problem = AttentionCase(
            1, sq, 150, 4, 2, 64, 64, dtype, spread=spread, seed=seed, options=drawn
        )
        kernel = SimulatedKernel(problem, problem.keywords())
        for ratios in (forward_ratios(problem, kernel), backward_ratios(problem, kernel)):
            for name, ratio in ratios.items():
                largest[name] = max(largest.get(name, 0.0), ratio)
    assert largest.keys() == {"out", "lse", "dq", "dk", "dv", "dbias", "dsinks"}
    for name, ratio in largest.items():
        assert 1 / 500 < ratio <= 1, (name, ratio)


def shifted_mask(kernel):
    offset = kernel.options.get("q_offset", kernel.problem.Sk - kernel.problem.Sq)
    kernel.options["q_offset"] = offset + 1


def dropped_tail_key(kernel):
    kernel.options.setdefault("q_offset", kernel.problem.Sk - kernel.problem.Sq)
    kernel.options["seqused_k"] = np.full(kernel.problem.B, kernel.problem.Sk - 1)


def missing_rescale(kernel):
    kernel.rescale = False


def wrong_scale(kernel):
    kernel.options["softmax_scale"] = kernel.problem.D**-0.5 * 1.01


def coarse_p(kernel):
    """P, and in the backward dS, with three to thirteen bits less than the kernel's dtype."""
    coarser = {"float16": ml_dtypes.bfloat16, "bfloat16": ml_dtypes.float8_e4m3fn}
    kernel.p_dtype = coarser.get(np.dtype(kernel.p_dtype).name, np.float16)


def coarse_tanh(kernel):
    """tanh.approx: a relative error of 2**-11."""
    kernel.tanh = lambda x: precise_tanh(x) * np.float32(1 + 2.0**-11)


def ignored(name):
    def plant(kernel):
        neutral = {"bias": np.zeros_like, "sinks": lambda x: np.full_like(x, -np.inf)}
        value = kernel.options.pop(name)
        if name in neutral:
            kernel.options[name] = neutral[name](value)

    plant.__name__ = f"ignored_{name}"
    return plant


def other_seed(kernel):
    kernel.options["seed"] += 1


def missing_dropout_scale(kernel):
    replace_of_head(kernel, lambda head: {"kept": head.kept != 0})


def other_kv_head(kernel):
    q, k, v = kernel.arrays
    kernel.arrays = q, k[:, :, ::-1], v


def next_slope(kernel):
    kernel.options["alibi_slopes"] = np.roll(kernel.options["alibi_slopes"], 1)


def late_softcap_slope(kernel):
    """The backward forgets that the softcap has a slope."""
    replace_of_head(kernel, lambda head: {"slope": np.ones_like(head.slope)})


def dropped_delta(kernel):
    kernel.subtract_delta = False


def one_head_of_the_group(kernel):
    kernel.heads_summed = 1


def replace_of_head(kernel, change):
    head = kernel.head
    kernel.head = lambda b, h: head(b, h)._replace(**change(head(b, h)))


CAUSAL = ("causal", True)
DROPOUT = ("dropout_p", 0.2)
SOFTCAP = ("softcap", 50.0)
SINKS = ("sinks", "float32")
ALIBI = ("alibi_slopes", ((4,), "float32", 1))
BIAS = ("bias", ((2, 4, 50, 70), "float32"))

# The bug, and the options that let it show.
BUGS_OF_BOTH = (
    (shifted_mask, CAUSAL),
    (shifted_mask, ("window_size", (20, 9))),
    (dropped_tail_key,),
    (wrong_scale,),
    (coarse_p,),
    (coarse_tanh, SOFTCAP),
    (ignored("softcap"), SOFTCAP),
    (ignored("sinks"), SINKS),
    (ignored("bias"), BIAS),
    (ignored("rotary"), ("rotary", (70, 8))),
    (other_seed, DROPOUT),
    (missing_dropout_scale, DROPOUT),
    (other_kv_head,),
    (next_slope, ALIBI),
)
FORWARD_BUGS = (*BUGS_OF_BOTH, (missing_rescale,), (missing_rescale, CAUSAL))
BACKWARD_BUGS = (
    *BUGS_OF_BOTH,
    (dropped_delta,),
    (one_head_of_the_group,),
    (late_softcap_slope, SOFTCAP),
)


def with_bug(dtype, bug, *drawn):
    problem = AttentionCase(2, 50, 70, 4, 2, 64, 64, dtype, seed=3, options=drawn)
    right, wrong = (SimulatedKernel(problem, problem.keywords()) for _ in range(2))
    bug(wrong)
    return problem, right, wrong


def name_of(case):
    return "-".join([case[0].__name__, *(name for name, _ in case[1:])])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", FORWARD_BUGS, ids=name_of)
def test_forward_bugs_are_rejected(dtype, case):
    problem, right, wrong = with_bug(dtype, *case)
    check_within(forward_ratios(problem, right))
    assert max(forward_ratios(problem, wrong).values()) > 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", BACKWARD_BUGS, ids=name_of)
def test_backward_bugs_are_rejected(dtype, case):
    problem, right, wrong = with_bug(dtype, *case)
    check_within(backward_ratios(problem, right))
    with np.errstate(over="ignore", invalid="ignore"):  # a wrong P may be beyond float16
        assert max(backward_ratios(problem, wrong).values()) > 1


def test_coarse_weights_of_bfloat16_are_rejected():
    problem, right, wrong = with_bug("bfloat16", coarse_p)
    check_within(forward_ratios(problem, right) | backward_ratios(problem, right))
    assert forward_ratios(problem, wrong)["out"] > 1
    with np.errstate(over="ignore", invalid="ignore"):
        assert max(backward_ratios(problem, wrong).values()) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_dlse_is_rejected(dtype):
    problem, right, _ = with_bug(dtype, lambda kernel: None)
    assert backward_ratios(problem, right, ignore_dlse=True)["dq"] > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bug_in_one_element_is_rejected(dtype):
    """Each bound is of an element: one out of all that is off by twice its bound is found."""
    problem = AttentionCase(1, 5, 6, 2, 1, 8, 8, dtype)
    arrays = problem.arrays()
    out, lse = attention(*arrays)
    out_bound, lse_bound = attention_bound(*arrays, dtype=dtype, tile_k=TILE)
    for exact, bound in ((out, out_bound), (lse, lse_bound)):
        assert (bound > 0).all()
        actual = exact.copy()
        index = tuple(n // 2 for n in exact.shape)
        actual[index] += 2 * bound[index]
        assert error_ratio(actual, exact, bound) == pytest.approx(2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("least", [-1e4, -65504.0, -3e38])
def test_masks_written_as_a_large_bias_do_not_blunt_the_bound(dtype, least):
    problem = AttentionCase(1, 20, 40, 2, 1, 64, 64, dtype)
    q, k, v = problem.arrays()
    bias = np.where(np.arange(40) < 30, 0, least).astype(np.float32)
    dout, dlse = problem.gradients()
    out, lse = attention(q, k, v, bias=bias, sinks=[-np.inf, -1e30])
    out_bound, lse_bound = attention_bound(
        q, k, v, dtype=dtype, tile_k=TILE, bias=bias, sinks=[-np.inf, -1e30]
    )
    plain_out, plain_lse = attention_bound(q, k, v, dtype=dtype, tile_k=TILE, seqused_k=[30])
    assert (out_bound <= 1.1 * plain_out).all()
    assert (lse_bound <= 1.5 * plain_lse).all()
    given_results = out.astype(dtype), lse.astype(np.float32)
    grads = [
        attention_backward_bound(dout, q, k, v, *given_results, dtype=dtype, dlse=dlse, **options)
        for options in ({"bias": bias, "sinks": [-np.inf, -1e30]}, {"seqused_k": [30]})
    ]
    for bound, plain in zip(grads[0][:3], grads[1][:3], strict=True):
        assert (bound[:, :20] <= 1.1 * plain[:, :20]).all()
    assert np.isfinite(grads[0].dbias).all()
    assert np.isfinite(grads[0].dsinks).all()


@examples(20, deep=60)
@given(softmax_cases(dtypes=DTYPES))
def test_softmax_stays_within_its_bounds(problem):
    (x,), dout = problem.arrays(), problem.dout()
    m = x.astype(np.float32).max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(x.astype(np.float32) - np.where(np.isinf(m), 0, m))
    total = p.sum(axis=-1, keepdims=True)
    out = (p / np.where(total == 0, 1, total)).astype(x.dtype)
    assert error_ratio(out, softmax(x), softmax_bound(x, dtype=problem.dtype)) <= 1

    g, y = dout.astype(np.float32), out.astype(np.float32)
    dx = (y * (g - (g * y).sum(axis=-1, keepdims=True))).astype(x.dtype)
    bound = softmax_backward_bound(dout, out, dtype=problem.dtype)
    assert error_ratio(dx, softmax_backward(dout, out), bound) <= 1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_softmax_bugs_are_rejected(dtype):
    rng = np.random.default_rng(0)
    x, dout = (rng.standard_normal((50, 300)).astype(dtype) for _ in range(2))
    exact, bound = softmax(x), softmax_bound(x, dtype=dtype)
    no_tail = softmax(np.where(np.arange(300) == 299, -np.inf, x.astype(np.float64)))
    assert error_ratio(no_tail, exact, bound) > 1
    coarser = np.float16 if dtype == "float32" else ml_dtypes.bfloat16
    assert error_ratio(exact.astype(coarser), exact, bound) > 1
    out = exact.astype(dtype)
    exact, bound = softmax_backward(dout, out), softmax_backward_bound(dout, out, dtype=dtype)
    assert error_ratio(out * dout, exact, bound) > 1


def test_a_key_that_is_nan_and_hidden_leaves_the_bound():
    q, k, v = AttentionCase(1, 3, 5, 1, 1, 8, 8, "float16").arrays()
    k[:, 2] = np.nan
    seen = np.arange(5) != 2
    hidden = attention_bound(q, k, v, dtype="float16", tile_k=TILE, mask=seen[None])
    without = attention_bound(q, k[:, seen], v[:, seen], dtype="float16", tile_k=TILE)
    for bound, right in zip(hidden, without, strict=True):
        np.testing.assert_allclose(bound, right, rtol=1e-12)


def test_rows_without_keys_have_to_be_exact():
    problem = AttentionCase(1, 3, 2, 2, 1, 8, 8, options=(CAUSAL,))
    arrays = problem.arrays()
    _, lse = attention(*arrays, causal=True)
    out_bound, lse_bound = attention_bound(*arrays, dtype="float32", tile_k=TILE, causal=True)
    assert (out_bound[0, 0] <= 2.0**-126).all()
    assert error_ratio(np.where(np.isinf(lse), -1e30, lse), lse, lse_bound) == np.inf
    assert error_ratio(lse, lse, lse_bound) == 0


def test_error_ratio_of_special_values():
    nan, inf = np.nan, np.inf
    assert error_ratio([nan, inf, 1.0], [nan, inf, 1.0], [nan, nan, 0.0]) == 0
    for wrong in ([0.0, inf, 1.0], [nan, -inf, 1.0], [nan, nan, 1.0], [nan, inf, nan]):
        assert error_ratio(wrong, [nan, inf, 1.0], [1.0, 1.0, 1.0]) == inf
    assert error_ratio([2.0], [1.0], [0.0]) == inf
    assert error_ratio([], [], []) == 0
    with pytest.raises(ValueError, match="pass arrays of one shape"):
        error_ratio([1.0, 1.0], [1.0], [1.0])


def test_unknown_dtype():
    q = np.ones((1, 1, 1, 1))
    with pytest.raises(ValueError, match="no error bounds for dtype 'float64'"):
        attention_bound(q, q, q, dtype=q.dtype, tile_k=8)

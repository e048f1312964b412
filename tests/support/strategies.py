"""Hypothesis strategies of the problems that the reference and every kernel are tested on.

Hypothesis draws shapes, flags and a seed, and shrinks those; NumPy's generator fills the arrays
from the seed. Head dims, dtypes and option names come from lists, because each of their
combinations is a specialisation of a kernel to compile; lengths and data are free.

The lists of attention's options are here only, and few combinations of several lists in which any
two values of different lists meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.devices import dtype_of
from support.search import Search

from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.tables import pairs

RUN_TIME_OPTIONS = ("causal", "softmax_scale", "window_size", "q_offset", "seqused_k")
"""Arguments of every kernel but the teaching ones: they cost no compilation."""

SCORE_OPTIONS = ("mask", "bias", "alibi_slopes", "softcap", "sinks", "dropout_p")
"""Compiled into the flash kernels: each combination is a specialisation."""

REFERENCE_OPTIONS = ("rotary", "mask_mod")
"""Options that no kernel has; here a Python function takes the place of mask_mod."""

OPTIONS = (*RUN_TIME_OPTIONS, *SCORE_OPTIONS, *REFERENCE_OPTIONS)

OptionSet = dict[str, str]
"""Score options by name; for those that are arrays of numbers, which dtype: the problem's own
("own") or "float32"."""

OPTION_SETS: tuple[OptionSet, ...] = (
    {},
    {"mask": "", "bias": "own", "alibi_slopes": "float32", "dropout_p": ""},
    {"mask": "", "alibi_slopes": "own", "softcap": "", "dropout_p": ""},
    {"mask": "", "softcap": "", "sinks": "own"},
    {"bias": "float32", "alibi_slopes": "float32", "sinks": "float32"},
    {"bias": "own", "softcap": "", "sinks": "float32", "dropout_p": ""},
)
"""Of every two score options: both, either alone, and neither are in some set."""

ALL_AT_ONCE: tuple[OptionSet, ...] = (
    {"mask": "", "bias": "own", "alibi_slopes": "float32", "softcap": "", "sinks": "own",
     "dropout_p": ""},
    {"mask": "", "bias": "float32", "alibi_slopes": "own", "softcap": "", "sinks": "float32",
     "dropout_p": ""},
)  # fmt: skip
"""Every score option, compiled into one specialisation; the two differ in the dtypes of arrays."""

EITHER_HALF = tuple(((every,), OPTION_SETS) for every in ALL_AT_ONCE)
"""Arguments of `search.wider`: all options at once, and the sets of ``--deep``."""


def every_option(
    dtype: str, heads: int, sq: int, sk: int, bias: tuple[tuple[int, ...], str] | None = None
) -> tuple[tuple[str, Any], ...]:
    """Draw all of the first set of `ALL_AT_ONCE`, for kernels that searches compile anyway.

    Their arrays have to be strided, as those of the searches are.
    """
    return (
        *(("mask", (sq, sk)), ("bias", bias or ((sq, sk), dtype)), ("softcap", 15.0)),
        *(("alibi_slopes", ((heads,), "float32", 1)), ("sinks", dtype), ("dropout_p", 0.1)),
    )


def attention_kernels(
    head_dims: Sequence[Any],
    dtypes: Sequence[str],
    option_sets: Sequence[Any],
    views: Sequence[str],
    option_views: Sequence[str],
) -> list[tuple[Any, ...]]:
    """Which specialisations a search draws from: one of each list, of views all of one load.

    A GPU, and a search of as many examples as were asked for, go through all combinations.
    """
    loads = _groups(views, "sliced"), _groups(option_views, "padded")
    combine = itertools.product if device_count() or Search.examples else pairs
    return list(combine(head_dims, dtypes, option_sets, *loads))


def _groups(views: Sequence[str], other: str) -> list[tuple[str, ...]]:
    """The views but one, and that one, which needs another load: those that there are."""
    groups = (tuple(v for v in views if (v == other) == is_other) for is_other in (False, True))
    return [group for group in groups if group]


TILE = 64
LENGTHS = (0, 1, 7, 13, 31, 32, 33, 53, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257, 293, 300)
"""Around the tiles that kernels have, and primes."""
TWO_TILES = 2 * TILE + 2
LONGEST = 300
"""Past two tiles of every kernel: only there do options cut tiles between others."""
HEAD_DIMS = ((8, 8), (64, 64), (40, 24))  # (D, Dv)
VIEWS = ("contiguous", "packed", "transposed", "sliced", "reversed", "broadcast")
OPTION_VIEWS = ("contiguous", "padded", "strided")
_EVERYTHING = Search.deep or device_count() > 0
FRUGAL: dict[str, Any] = {
    "views": VIEWS if _EVERYTHING else tuple(view for view in VIEWS if view != "sliced"),
    "option_views": OPTION_VIEWS if _EVERYTHING else ("strided",),
    "crowd": 3 if _EVERYTHING else 2,
}
"""Arguments of `attention_problems` for kernels on the emulator: arrays that one specialisation
serves, and fewer CTAs. Rows of single items and scores of four keys are specialisations of their
own; each has tests of its own, and with ``--deep`` every test has both."""

Array = NDArray[Any]


def lay_out(x: Array, view: str) -> Array:
    """x (B, S, H, D) in an array of the strides of a kind of view.

    Memory around the values holds NaN. "broadcast" repeats batch element 0 with stride 0, and is
    read-only.
    """
    batch, length, heads, dim = x.shape
    if view == "contiguous":
        return np.ascontiguousarray(x)
    if view == "packed":  # qkv[:, :, 1] of one (B, S, 3, H, D) array
        result = np.full((batch, length, 3, heads, dim), np.nan, x.dtype)[:, :, 1]
    elif view == "transposed":
        result = np.full((batch, heads, length, dim), np.nan, x.dtype).transpose(0, 2, 1, 3)
    elif view == "sliced":  # rows that are aligned to an item only
        result = np.full((batch, length, heads, dim + 3), np.nan, x.dtype)[..., 1 : dim + 1]
    elif view == "reversed":
        result = np.full(x.shape, np.nan, x.dtype)[:, ::-1]
    else:
        return np.broadcast_to(x[:1].copy(), x.shape)
    result[...] = x
    return result


def lay_out_option(x: Array, view: str) -> Array:
    """x, an option's array, in an array of the strides of a kind of view.

    "padded" rows start at multiples of eight items, so that kernels may read several at once.
    Memory around the values holds what must not be read: NaN, far positions, the mask's opposite.
    """
    if view == "contiguous" or x.ndim == 0:
        return x
    length = x.shape[-1]
    if view == "padded":
        shape, items = (*x.shape[:-1], length + 8 + -length % 8), (..., slice(length))
    else:
        shape, items = (*x.shape[:-1], 2 * length), (..., slice(None, None, 2))
    if x.dtype == bool:
        memory = np.resize(~x, shape) if x.size else np.zeros(shape, bool)
    else:
        memory = np.full(shape, np.nan if x.dtype.kind not in "iu" else 2**20).astype(x.dtype)
    result = memory[items] if view == "padded" else memory[items][::-1]
    result[...] = x
    return result


def not_a_multiple_of_three(b: Array, h: Array, i: Array, j: Array) -> Array:
    """A mask_mod with no structure that a kernel could take for another mask."""
    return (i + 2 * j + h + b) % 3 != 0


@dataclass(frozen=True)
class AttentionProblem:
    """One attention problem. Its fields determine its arrays: a failing example can be pasted.

    Letters: B batch, Sq/Sk query/key length, H query heads, G key-value heads, D head dim, Dv value
    head dim. `drawn` holds the options as drawn: numbers as they are, arrays by what describes
    them; arrays among them lie in memory as `option_view` says. q has standard normal entries times
    `spread`.
    """

    B: int
    Sq: int
    Sk: int
    H: int
    G: int
    D: int
    Dv: int
    dtype: str = "float32"
    view: str = "contiguous"
    spread: float = 1.0
    seed: int = 0
    drawn: tuple[tuple[str, Any], ...] = ()
    option_view: str = "contiguous"

    def normal(self, name: str, shape: Sequence[int], dtype: str | None = None) -> Array:
        """Standard normal numbers that depend on the seed and the array's name."""
        rng = np.random.default_rng([self.seed, *name.encode()])
        return rng.standard_normal(tuple(shape)).astype(dtype_of(dtype or self.dtype))

    def arrays(self) -> tuple[Array, Array, Array]:
        """q, k, v in the problem's view kind; keys that seqused_k excludes hold NaN."""
        q = self.normal("q", (self.B, self.Sq, self.H, self.D), "float64") * self.spread
        q = q.astype(dtype_of(self.dtype))
        k = self.normal("k", (self.B, self.Sk, self.G, self.D))
        v = self.normal("v", (self.B, self.Sk, self.G, self.Dv))
        used = dict(self.drawn).get("seqused_k", (self.Sk,) * self.B)
        for b in range(self.B):
            first_unused = max(used) if self.view == "broadcast" else used[b]
            k[b, first_unused:] = v[b, first_unused:] = np.nan
        q, k, v = (lay_out(x, self.view) for x in (q, k, v))
        return q, k, v

    def gradients(self) -> tuple[Array, Array]:
        """dout (B, Sq, H, Dv) in the problem's dtype and view kind, and dlse (B, H, Sq) float32."""
        dout = lay_out(self.normal("dout", (self.B, self.Sq, self.H, self.Dv)), self.view)
        return dout, self.normal("dlse", (self.B, self.H, self.Sq), "float32")

    def options(self) -> dict[str, Any]:
        """Keyword arguments of attention."""
        options: dict[str, Any] = {}
        for name, value in self.drawn:
            options |= self._option(name, value)
        return {
            name: lay_out_option(value, self.option_view)
            if isinstance(value, np.ndarray)
            else value
            for name, value in options.items()
        }

    def _option(self, name: str, value: Any) -> dict[str, Any]:
        if name == "mask":
            return {name: self.normal(name, value) > -1}
        if name == "bias":
            shape, dtype = value
            bias = self.normal(name, shape, dtype)
            bias[self.normal("bias -inf", shape) < -1.5] = -np.inf
            return {name: bias}
        if name == "alibi_slopes":
            shape, dtype, sign = value
            slopes = sign * 2.0 ** (-8 * np.arange(1, self.H + 1) / self.H)
            return {name: np.broadcast_to(slopes, shape).astype(dtype_of(dtype))}
        if name == "sinks":
            return {name: self.normal(name, (self.H,), value)}
        if name == "rotary":
            positions = np.arange(value[0], dtype=np.float64)
            frequencies = 10000.0 ** (-2 * np.arange(value[1]) / (2 * value[1]))
            angles = positions[:, None] * frequencies
            return {name: (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))}
        if name == "dropout_p":
            return {name: value, "seed": (self.seed << 31) + 12345}
        if isinstance(value, tuple) and name in ("q_offset", "seqused_k"):
            return {name: np.array(value, dtype=np.int32)}
        return {name: value}


@dataclass(frozen=True)
class SoftmaxProblem:
    """Rows of a softmax: a fraction of the entries, and all of some rows, are -inf if `masked`."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    spread: float = 1.0
    masked: bool = False
    seed: int = 0

    def x(self) -> Array:
        """The input."""
        rng = np.random.default_rng(self.seed)
        x = rng.standard_normal(self.shape) * self.spread
        if self.masked:
            x[rng.random(self.shape) < 0.3] = -np.inf
            x[rng.random(self.shape[:-1]) < 0.2] = -np.inf
        return x.astype(dtype_of(self.dtype))

    def dout(self) -> Array:
        """The gradient of the output."""
        rng = np.random.default_rng([self.seed, 1])
        return rng.standard_normal(self.shape).astype(dtype_of(self.dtype))


def lengths(largest: int = TWO_TILES, least: int = 0) -> st.SearchStrategy[int]:
    """Sequence lengths: tile edges and primes more often than the rest."""
    edges = [length for length in LENGTHS if least <= length <= largest]
    return st.one_of(st.sampled_from(edges), st.integers(max(1, least), largest))


def window_sides(longest: int) -> st.SearchStrategy[int | None]:
    """Keys on one side of a window: none, any, or as many as end it between tiles or within one."""
    beside_tiles = st.builds(
        lambda tiles, step: max(16 * tiles + step, 0),
        st.integers(0, longest // 16 + 1),
        st.sampled_from((-1, 0, 1)),
    )
    return st.one_of(st.none(), st.integers(0, longest + 1), beside_tiles)


@st.composite
def _drawn_options(
    draw: st.DrawFn, chosen: set[str], dtypes: OptionSet, sizes: dict[str, int], dtype: str
) -> tuple[tuple[str, Any], ...]:
    """The chosen options, each as (name, what describes it)."""
    batch, sq, sk, heads = (sizes[letter] for letter in ("B", "Sq", "Sk", "H"))
    if sizes["D"] < 2:  # no pair to rotate
        chosen -= {"rotary"}
    from_0 = "rotary" in chosen and "causal" not in chosen  # tables begin at position 0
    lowest_offset = 0 if from_0 else -sq - 1
    if from_0 and (sk < sq or "seqused_k" in chosen):
        chosen |= {"q_offset"}
    offsets = st.integers(lowest_offset, sk + 1)
    broadcast = st.tuples(*(st.sampled_from(sorted({1, n})) for n in (batch, heads, sq, sk)))
    broadcast = st.builds(lambda shape, first: shape[first:], broadcast, st.integers(0, 2))

    def dtype_of_option(name: str) -> st.SearchStrategy[str]:
        if name in dtypes:
            return st.just(dtype if dtypes[name] == "own" else dtypes[name])
        return st.sampled_from(sorted({dtype, "float32"}))

    side = window_sides(max(sq, sk))
    slopes = st.sampled_from(((heads,), (batch, heads)))
    values = {
        "causal": st.just(True),
        "softmax_scale": st.sampled_from((0.0625, 0.3, 1.0, 0.0, -0.3)),
        "window_size": st.tuples(side, side),
        "q_offset": st.one_of(
            st.just(max(0, lowest_offset)), offsets, st.tuples(*[offsets] * batch)
        ),
        "seqused_k": st.tuples(*[st.integers(0, sk)] * batch),
        "mask": broadcast,
        "bias": st.tuples(broadcast, dtype_of_option("bias")),
        "alibi_slopes": st.tuples(
            slopes, dtype_of_option("alibi_slopes"), st.sampled_from((1, -1))
        ),
        "softcap": st.sampled_from((2.0, 15.0, 50.0)),
        "sinks": dtype_of_option("sinks"),
        "dropout_p": st.sampled_from((0.1, 0.5)),
        "mask_mod": st.just(not_a_multiple_of_three),
    }
    drawn = {name: draw(values[name]) for name in OPTIONS if name in chosen - {"rotary"}}
    if "rotary" in chosen:
        offset = drawn.get("q_offset", sk - sq)
        positions = max(sk, sq + (max(offset) if isinstance(offset, tuple) else offset), 1)
        pairs = draw(st.integers(1, sizes["D"] // 2))
        drawn["rotary"] = (positions, pairs)
    return tuple(drawn.items())


@st.composite
def attention_problems(
    draw: st.DrawFn,
    *,
    head_dims: Sequence[tuple[int, int]] = HEAD_DIMS,
    dtypes: Sequence[str] = ("float16", "float32"),
    options: Iterable[str] = OPTIONS,
    option_sets: Sequence[OptionSet] = ({},),
    views: Sequence[str] = VIEWS,
    option_views: Sequence[str] = OPTION_VIEWS,
    largest: int = TWO_TILES,
    queries: tuple[int, int] | None = None,
    least_keys: int = 0,
    spreads: Sequence[float] = (1.0, 8.0),
    crowd: int = 3,
) -> AttentionProblem:
    """Attention problems: G <= 2, B and H / G <= `crowd` (less of long ones), lengths <= `largest`.

    Parameters
    ----------
    head_dims : pairs (D, Dv)
    dtypes, views, option_views, spreads
        Lists to draw from.
    queries, least_keys
        The fewest and most queries, and the fewest keys, where they are not any.
    options : names from OPTIONS
        What may be drawn ("dropout_p" brings a seed); each problem has a subset of them,
    option_sets
        and all of one of these sets. For a kernel it is they that name the options that are
        compiled into it: subsets would be a specialisation each.
    """
    names = set(options)
    if unknown := names.union(*option_sets) - set(OPTIONS):
        raise ValueError(f"unknown options {sorted(unknown)}; the strategies have {OPTIONS}")
    kernels = attention_kernels(head_dims, dtypes, option_sets, views, option_views)
    (head_dim, value_dim), dtype, of_set, views, option_views = draw(st.sampled_from(kernels))
    kv_heads = draw(st.integers(1, 2))
    sizes = {
        "B": draw(st.integers(1, crowd)),
        "Sq": draw(lengths(largest) if queries is None else st.integers(*queries)),
        "Sk": draw(lengths(largest, least_keys)),
        "H": kv_heads * draw(st.integers(1, crowd)),
        "G": kv_heads,
        "D": head_dim,
        "Dv": value_dim,
    }
    if max(sizes["Sq"], sizes["Sk"]) > TWO_TILES:
        sizes |= {"B": min(sizes["B"], 2), "H": min(sizes["H"] // kv_heads, 2), "G": 1}
    if "rotary" in names and "q_offset" not in names:
        sizes["Sq"] = min(sizes["Sq"], sizes["Sk"])
    chosen = draw(st.sets(st.sampled_from(sorted(names)))) if names else set()
    return AttentionProblem(
        **sizes,
        dtype=dtype,
        view=draw(st.sampled_from(views)),
        spread=draw(st.sampled_from(tuple(spreads))),
        seed=draw(st.integers(0, 2**32 - 1)),
        drawn=draw(_drawn_options(chosen | of_set.keys(), of_set, sizes, dtype)),
        option_view=draw(st.sampled_from(option_views)),
    )


@st.composite
def softmax_problems(draw: st.DrawFn, *, dtypes: Sequence[str]) -> SoftmaxProblem:
    """Draw softmax problems: up to two leading axes, and often row lengths around powers of two."""
    row_lengths = (0, 1, 2, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025)
    leading = draw(st.lists(st.integers(0, 4), min_size=0, max_size=2))
    row = draw(st.one_of(st.sampled_from(row_lengths), st.integers(0, 300)))
    return SoftmaxProblem(
        shape=(*leading, row),
        dtype=draw(st.sampled_from(tuple(dtypes))),
        spread=draw(st.sampled_from((1.0, 8.0))),
        masked=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )

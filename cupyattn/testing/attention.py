"""Test cases of attention, dense and packed, and the strategies that draw them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cupyattn.runtime.arrays import dtype_of
from cupyattn.testing.arrays import (
    SEEDS,
    NumpyArray,
    PastableCase,
    lay_out,
    lay_out_option,
    lengths,
    normal,
)

OPTIONS = (
    *("causal", "softmax_scale", "window_size", "q_offset", "seqused_k", "mask", "bias"),
    *("alibi_slopes", "softcap", "sinks", "dropout_p", "rotary"),
)
VIEWS = ("contiguous", "packed", "transposed", "sliced", "reversed", "broadcast")
OPTION_VIEWS = ("contiguous", "padded", "strided")
HEAD_DIMS = ((8, 8), (64, 64), (40, 24))  # (D, Dv)
TWO_TILES = 130

DrawnOptions = tuple[tuple[str, Any], ...]


def not_a_multiple_of_three(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Return a mask with no structure that a kernel could take for another mask."""
    return (i + 2 * j + h + b) % 3 != 0


@dataclass(frozen=True, repr=False)
class AttentionCase(PastableCase):
    """A call of `cupyattn.attention`. The fields determine the arrays.

    Parameters
    ----------
    B, Sq, Sk, H, G, D, Dv : int
        Batch, queries, keys, query heads, key-value heads, head dim, head dim of values.
    dtype : str
        "float16", "bfloat16", "float32" or "float64".
    view : str
        The strides of q, k and v, as of `lay_out`.
    spread : float
        The standard deviation of q: a large one gives weights that are almost 0 or 1.
    seed : int
        What the numbers in the arrays depend on.
    options : tuple of (name, value)
        Options of the call. Numbers are as `cupyattn.attention` takes them, and so is window_size.
        Arrays are described: q_offset and seqused_k by their items, mask by its shape, bias by
        (shape, dtype), alibi_slopes by (shape, dtype, 1 or -1), sinks by their dtype, rotary by
        (positions, rotated pairs). dropout_p brings a seed.
    option_view : str
        The strides of arrays among the options: "contiguous", "padded" (rows start at multiples of
        eight items) or "strided" (every second item, and the first axis is reversed).

    Examples
    --------
    >>> case = AttentionCase(
    ...     B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=8, dtype="float16", view="transposed",
    ...     options=(("causal", True), ("bias", ((4, 1, 7), "float32"))),
    ... )
    >>> [array.shape for array in case.arrays()]
    [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)]
    >>> options = case.keywords()
    >>> options["causal"], options["bias"].shape
    (True, (4, 1, 7))
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
    options: DrawnOptions = ()
    option_view: str = "contiguous"

    def normal(self, name: str, shape: Sequence[int], dtype: str | None = None) -> NumpyArray:
        """Return standard normal numbers that depend on the seed and the array's name."""
        return normal(self.seed, name, shape, dtype or self.dtype)

    def arrays(self) -> tuple[NumpyArray, NumpyArray, NumpyArray]:
        """Return q, k and v. Keys and values that seqused_k excludes are NaN."""
        q = self.normal("q", (self.B, self.Sq, self.H, self.D), "float64") * self.spread
        q = q.astype(dtype_of(self.dtype))
        k = self.normal("k", (self.B, self.Sk, self.G, self.D))
        v = self.normal("v", (self.B, self.Sk, self.G, self.Dv))
        used = dict(self.options).get("seqused_k", (self.Sk,) * self.B)
        for b in range(self.B):
            first_unused = max(used) if self.view == "broadcast" else used[b]
            k[b, first_unused:] = v[b, first_unused:] = np.nan
        q, k, v = (lay_out(x, self.view) for x in (q, k, v))
        return q, k, v

    def gradients(self) -> tuple[NumpyArray, NumpyArray]:
        """Return dout (B, Sq, H, Dv) with the case's dtype and view, and dlse (B, H, Sq)."""
        dout = lay_out(self.normal("dout", (self.B, self.Sq, self.H, self.Dv)), self.view)
        return dout, self.normal("dlse", (self.B, self.H, self.Sq), "float32")

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments of `cupyattn.attention`."""
        made: dict[str, Any] = {}
        for name, value in self.options:
            made |= self._option(name, value)
        return {
            name: lay_out_option(value, self.option_view)
            if isinstance(value, np.ndarray)
            else value
            for name, value in made.items()
        }

    def _option(self, name: str, value: Any) -> dict[str, Any]:
        if name == "mask":
            return {name: self.normal(name, value, "float32") > -1}
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
        if name == "mask_mod":
            return {name: not_a_multiple_of_three}
        if isinstance(value, tuple) and name in ("q_offset", "seqused_k"):
            return {name: np.array(value, dtype=np.int32)}
        return {name: value}


@dataclass(frozen=True, repr=False)
class PackedCase(PastableCase):
    """A call of `cupyattn.attention_varlen`. The fields determine the arrays.

    q, k and v are slices of wider arrays.

    Parameters
    ----------
    dense : AttentionCase
        The call of which each sequence has the first queries and keys. Its Sq and Sk are
        max_seqlen_q and max_seqlen_k.
    queries, keys : tuple of int
        The lengths of each sequence, one for each item of the batch.
    spare : int
        Rows of NaN after the last sequence.

    Examples
    --------
    >>> dense = AttentionCase(B=2, Sq=5, Sk=7, H=4, G=2, D=8, Dv=8)
    >>> case = PackedCase(dense, queries=(5, 1), keys=(7, 3))
    >>> q, k, v, cu_seqlens_q, cu_seqlens_k = case.arrays()
    >>> q.shape, cu_seqlens_k, case.keywords()
    ((6, 4, 8), array([ 0,  7, 10], dtype=int32), {'max_seqlen_q': 5, 'max_seqlen_k': 7})
    """

    dense: AttentionCase
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    spare: int = 0

    @property
    def bounds(self) -> tuple[NumpyArray, ...]:
        """cu_seqlens_q and cu_seqlens_k."""
        return tuple(
            np.cumsum((0, *lengths), dtype=np.int32) for lengths in (self.queries, self.keys)
        )

    @property
    def longest(self) -> tuple[int, int]:
        """max_seqlen_q and max_seqlen_k."""
        return self.dense.Sq, self.dense.Sk

    def packed(self, array: NumpyArray, lengths: tuple[int, ...]) -> NumpyArray:
        """Return the rows of a batch (B, longest, ...) one after the other, in every second row."""
        rows = [array[b, :length] for b, length in enumerate(lengths)]
        rows.append(np.full((self.spare, *array.shape[2:]), np.nan, array.dtype))
        packed = np.concatenate(rows)
        wide = np.full((len(packed), 2, *array.shape[2:]), np.nan, array.dtype)
        wide[:, 1] = packed
        return wide[:, 1]

    def arrays(self) -> tuple[Any, ...]:
        """Return q, k, v, cu_seqlens_q and cu_seqlens_k."""
        q, k, v = self.dense.arrays()
        lengths = self.queries, self.keys, self.keys
        packed = (self.packed(*each) for each in zip((q, k, v), lengths, strict=True))
        return *packed, *self.bounds

    def gradients(self) -> tuple[NumpyArray, NumpyArray]:
        """Return dout (total, H, Dv) and dlse (H, total)."""
        dout, dlse = self.dense.gradients()
        rows = self.packed(np.swapaxes(dlse, 1, 2), self.queries)
        return self.packed(dout, self.queries), np.ascontiguousarray(np.swapaxes(rows, 0, 1))

    def keywords(self) -> dict[str, Any]:
        """Return the dense options, max_seqlen_q and max_seqlen_k, as keyword arguments.

        No sequence uses more keys than it has.
        """
        longest = {"max_seqlen_q": self.dense.Sq, "max_seqlen_k": self.dense.Sk}
        options = {**self.dense.keywords(), **longest}
        if "seqused_k" in options:
            options["seqused_k"] = np.minimum(options["seqused_k"], self.keys).astype(np.int32)
        return options


def window_sides(longest: int) -> st.SearchStrategy[int | None]:
    """Draw one side of a window: none, any, or one that ends between tiles or next to an edge."""
    beside_tiles = st.builds(
        lambda tiles, step: max(16 * tiles + step, 0),
        st.integers(0, longest // 16 + 1),
        st.sampled_from((-1, 0, 1)),
    )
    return st.one_of(st.none(), st.integers(0, longest + 1), beside_tiles)


@st.composite
def _drawn_options(
    draw: st.DrawFn,
    chosen: set[str],
    dtypes: Mapping[str, str],
    sizes: dict[str, int],
    dtype: str,
) -> DrawnOptions:
    """Draw the chosen options, each as (name, what describes it)."""
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
        if dtypes.get(name):
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
        "mask_mod": st.just(True),
    }
    drawn = {name: draw(value) for name, value in values.items() if name in chosen}
    if "rotary" in chosen:
        offset: Any = drawn.get("q_offset", sk - sq)
        positions = max(sk, sq + (max(offset) if isinstance(offset, tuple) else offset), 1)
        pairs = draw(st.integers(1, sizes["D"] // 2))
        drawn["rotary"] = (positions, pairs)
    return tuple(drawn.items())


@st.composite
def attention_cases(
    draw: st.DrawFn,
    *,
    head_dims: Sequence[tuple[int, int]] = HEAD_DIMS,
    dtypes: Sequence[str] = ("float16", "float32"),
    options: Iterable[str] = OPTIONS,
    required: Mapping[str, str] = MappingProxyType({}),
    views: Sequence[str] = VIEWS,
    option_views: Sequence[str] = OPTION_VIEWS,
    largest: int = TWO_TILES,
    queries: tuple[int, int] | None = None,
    least_keys: int = 0,
    spreads: Sequence[float] = (1.0, 8.0),
    crowd: int = 3,
) -> AttentionCase:
    """Draw calls of `cupyattn.attention`.

    Lengths are often next to the edges of tiles, or 0. A case has one or two key-value heads.

    Parameters
    ----------
    head_dims : sequence of (D, Dv)
        Head dims to draw from, each 1 to 512.
    dtypes, views, option_views, spreads : sequences
        Values to draw from; `AttentionCase` has their meaning.
    options : iterable of str
        Names of options of `cupyattn.attention`. Each case has a subset of them. The default is all
        but score_mod and mask_mod. "mask_mod" hides each third key by a Python function, which only
        NumPy arrays outside of the emulator can take.
    required : mapping of str to str
        Options that each case has, with the dtype of those that are arrays of floats: "own" for the
        dtype of q, "float32", or "" for any. A kernel is compiled for the set of its options: with
        a few sets as `required`, and options such as causal and window_size that cost no
        compilation as `options`, many examples share a kernel.
    largest : int
        The longest sequence.
    queries : (int, int), optional
        The fewest and the most queries, where they do not go up to `largest`.
    least_keys : int
        The fewest keys.
    crowd : int
        The most sequences, and the most query heads for each key-value head.

    Returns
    -------
    hypothesis strategy of AttentionCase

    Raises
    ------
    ValueError
        For an unknown option, when the first case is drawn.
    """
    names = set(options)
    if unknown := names.union(required) - {*OPTIONS, "mask_mod"}:
        raise ValueError(f"unknown options {sorted(unknown)}; the strategies have {OPTIONS}")
    head_dim, value_dim = draw(st.sampled_from(tuple(head_dims)))
    dtype, kv_heads = draw(st.sampled_from(tuple(dtypes))), draw(st.integers(1, 2))
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
    return AttentionCase(
        **sizes,
        dtype=dtype,
        view=draw(st.sampled_from(tuple(views))),
        spread=draw(st.sampled_from(tuple(spreads))),
        seed=draw(SEEDS),
        options=draw(_drawn_options(chosen | required.keys(), required, sizes, dtype)),
        option_view=draw(st.sampled_from(tuple(option_views))),
    )


@st.composite
def packed_cases(draw: st.DrawFn, **options: Any) -> PackedCase:
    """Draw calls of `cupyattn.attention_varlen`.

    Sequences have any lengths; some have no queries, or no keys.

    Parameters
    ----------
    **options
        Parameters of `attention_cases`; q, k and v have one view.

    Returns
    -------
    hypothesis strategy of PackedCase
    """
    return draw(packed(attention_cases(**{**options, "views": ("contiguous",)})))


@st.composite
def packed(draw: st.DrawFn, cases: st.SearchStrategy[AttentionCase]) -> PackedCase:
    """Draw a dense call, and the lengths of sequences that are packed in its place."""
    dense = draw(cases)
    names = {name for name, _ in dense.options}
    from_0 = "rotary" in names and not names & {"causal", "q_offset"}  # tables begin at position 0
    queries = tuple(draw(_length(0, dense.Sq)) for _ in range(dense.B))
    keys = tuple(draw(_length(least if from_0 else 0, dense.Sk)) for least in queries)
    return PackedCase(dense, queries, keys, spare=draw(st.sampled_from((0, 3))))


def _length(least: int, longest: int) -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from((least, longest)), st.integers(least, longest))

"""What a call of attention asks for: shapes and options, checked once per description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.arrays import Layout, LayoutKey, Span, layouts_of, span
from cupyattn.errors import error
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.ops.attention_options import (
    AttentionOptions,
    checked_dropout_p,
    checked_q_offset,
    checked_softcap,
    checked_softmax_scale,
    checked_window,
    require_valid_choices,
)
from cupyattn.ops.checks import (
    FLOATS,
    INTEGERS,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
)

LSE_DTYPE = np.dtype(np.float32)
_CACHED_PROBLEMS = 4096


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """A valid call of attention; letters as in the public API.

    Two calls of one description share one object, so it stands for the description in caches.
    """

    batch: int
    sq: int
    sk: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: np.dtype
    layouts: dict[str, Layout]
    softmax_scale: float
    q_offset: int
    """Where `layouts` has no q_offset array."""
    window: tuple[int | None, int | None]
    """Keys to the left and right that a query sees, causality included; None is unbounded."""
    softcap: float | None
    dropout_p: float
    mask_mod: Callable[..., Any] | None
    implementation: str
    spans: dict[str, Span]
    """The bytes that the items of each array lie in, from its first item."""

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(B, Sq, H, Dv)."""
        return (self.batch, self.sq, self.heads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, H, Sq)."""
        return (self.batch, self.heads, self.sq)

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(B, H, Sq, Sk), to which mask and bias broadcast."""
        return (self.batch, self.heads, self.sq, self.sk)


FORWARD_RESULTS = ("out", "lse")
BACKWARD_RESULTS = ("dq", "dk", "dv", "dbias", "dsinks")
SHOWN_AS = {name: f"grads.{name}" for name in BACKWARD_RESULTS}
"""The names of backward's results in errors: as the caller gives them."""


def forward_problem(key: LayoutKey, options: AttentionOptions) -> AttentionProblem:
    """Check the description of a forward call, or find that it was checked before.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    return _remembered(_cached_forward_problem, key, options)


def backward_problem(key: LayoutKey, options: AttentionOptions) -> AttentionProblem:
    """Check the description of a backward call, or find that it was checked before.

    Raises
    ------
    TypeError, ValueError
        As the public functions document.
    """
    return _remembered(_cached_backward_problem, key, options)


def _remembered(check: Any, key: LayoutKey, options: AttentionOptions) -> AttentionProblem:
    # The options go one by one, because a typed cache tells True from 1 and 1 from 1.0.
    window = options.window_size
    sides = (*map(type, window),) if isinstance(window, tuple) else None
    if options.mask_mod is not None:  # the cache would keep it, and the arrays that it closes over
        return check.__wrapped__(key, sides, *options)
    try:
        return check(key, sides, *options)
    except (TypeError, ValueError) as failure:
        if "hash" not in str(failure):
            raise
    return check.__wrapped__(key, sides, *options)  # an option of a wrong type: its check says so


@lru_cache(maxsize=_CACHED_PROBLEMS, typed=True)
def _cached_forward_problem(key: LayoutKey, _: Any, *options: Any) -> AttentionProblem:
    layouts = layouts_of(key)
    require_arrays(layouts, ("q", "k", "v"))
    problem = _problem(layouts, AttentionOptions(*options))
    results = {"out": (problem.out_shape, problem.dtype), "lse": (problem.lse_shape, LSE_DTYPE)}
    for name in FORWARD_RESULTS:
        if name in problem.layouts:
            require_output(name, problem.layouts[name], *results[name])
    return problem


@lru_cache(maxsize=_CACHED_PROBLEMS, typed=True)
def _cached_backward_problem(key: LayoutKey, _: Any, *options: Any) -> AttentionProblem:
    layouts = layouts_of(key)
    require_arrays(layouts, ("dout", "q", "k", "v", "out", "lse"))
    problem = _problem(layouts, AttentionOptions(*options))
    for name in ("dout", "out"):
        require_dtype(name, layouts[name], (problem.dtype.name,))
        require_shape(name, layouts[name], problem.out_shape, "(B, Sq, H, Dv)")
        require_contiguous_rows(name, layouts[name])
    for name in ("lse", "dlse"):
        if name in layouts:
            require_dtype(name, layouts[name], (LSE_DTYPE.name,))
            require_shape(name, layouts[name], problem.lse_shape, "(B, H, Sq)")
            require_contiguous_rows(name, layouts[name])
    for name in BACKWARD_RESULTS:
        if name in layouts:
            of = layouts.get(name[1:])
            if of is None:
                raise error(
                    ValueError,
                    f"{SHOWN_AS[name]} was given",
                    f"this call has no {name[1:]}",
                    "leave None there",
                )
            require_output(SHOWN_AS[name], layouts[name], of.shape, of.dtype)
    return problem


def _problem(layouts: dict[str, Layout], options: AttentionOptions) -> AttentionProblem:
    q, k, v = layouts["q"], layouts["k"], layouts["v"]
    for name, layout in (("q", q), ("k", k), ("v", v)):
        require_dtype(name, layout, FLOATS)
        require_rank(
            name, layout, f"B {'Sq H' if name == 'q' else 'Sk G'} {'Dv' if name == 'v' else 'D'}"
        )
        require_contiguous_rows(name, layout)
    require_same_dtype(layouts, ("q", "k", "v"))
    batch, sq, heads, head_dim = q.shape
    _, sk, kv_heads, head_dim_v = v.shape
    _require_matching_heads(q, k, v)
    require_valid_choices(options)
    softmax_scale = checked_softmax_scale(options.softmax_scale, head_dim)

    problem = AttentionProblem(
        batch=batch,
        sq=sq,
        sk=sk,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=q.dtype,
        layouts=layouts,
        softmax_scale=softmax_scale,
        q_offset=checked_q_offset(options.q_offset, sq, sk),
        window=checked_window(options.window_size, options.causal),
        softcap=checked_softcap(options.softcap, softmax_scale),
        dropout_p=checked_dropout_p(options.dropout_p, options.seed),
        mask_mod=options.mask_mod,
        implementation=options.implementation,
        spans={name: span(layout) for name, layout in layouts.items()},
    )
    _require_valid_option_arrays(problem)
    return problem


def _require_matching_heads(q: Layout, k: Layout, v: Layout) -> None:
    batch, _, heads, head_dim = q.shape
    _, sk, kv_heads, _ = k.shape
    require_shape("k", k, (batch, sk, kv_heads, head_dim), "(B, Sk, G, D) with q's B and D")
    require_shape("v", v, (batch, sk, kv_heads, v.shape[3]), "(B, Sk, G, Dv) with k's B, Sk and G")
    if (kv_heads == 0 and heads) or (kv_heads and heads % kv_heads):
        raise error(
            ValueError,
            f"q has H = {heads} heads, k and v have G = {kv_heads}",
            "H is a multiple of G (grouped-query attention), or equal to it",
            "check the head axis: arrays are (batch, length, heads, head dim)",
        )
    for letter, extent in (("D", head_dim), ("Dv", v.shape[3])):
        if not 1 <= extent <= MAX_HEAD_DIM:
            raise error(
                ValueError,
                f"{letter} = {extent}",
                f"head dims are 1 to {MAX_HEAD_DIM}",
                "split the head, or check that the last axis is the head dim",
            )


def _require_valid_option_arrays(problem: AttentionProblem) -> None:
    """Check the arrays among the options against the shapes of q, k and v."""
    layouts = problem.layouts
    batch, heads = problem.batch, problem.heads
    for name in ("q_offset", "seqused_k"):
        if name in layouts:
            require_dtype(name, layouts[name], INTEGERS)
            require_shape(name, layouts[name], (batch,), "(B,)")
            require_whole_item_strides(name, layouts[name])
    if "mask" in layouts:
        require_dtype("mask", layouts["mask"], ("bool",))
    if "bias" in layouts:
        require_dtype("bias", layouts["bias"], FLOATS)
    for name in ("mask", "bias"):
        if name in layouts:
            _require_broadcastable(name, layouts[name], problem.scores_shape)
    if "alibi_slopes" in layouts:
        require_dtype("alibi_slopes", layouts["alibi_slopes"], FLOATS)
        if len(layouts["alibi_slopes"].shape) != 2:
            require_shape("alibi_slopes", layouts["alibi_slopes"], (heads,), "(H,) or (B, H)")
        else:
            require_shape("alibi_slopes", layouts["alibi_slopes"], (batch, heads), "(H,) or (B, H)")
    if "sinks" in layouts:
        require_dtype("sinks", layouts["sinks"], FLOATS)
        require_shape("sinks", layouts["sinks"], (heads,), "(H,)")
    for name in ("bias", "alibi_slopes", "sinks"):
        if name in layouts:
            require_whole_item_strides(name, layouts[name])
    if "cos" in layouts:
        _require_rotary_tables(layouts["cos"], layouts["sin"], problem.head_dim)


def _require_broadcastable(name: str, layout: Layout, scores_shape: tuple[int, ...]) -> None:
    try:
        fits = np.broadcast_shapes(layout.shape, scores_shape) == scores_shape
    except ValueError:
        fits = False
    if not fits:
        raise error(
            ValueError,
            f"{name} has shape {layout.shape}",
            f"it broadcasts to the scores, (B, H, Sq, Sk) = {scores_shape}",
            f"give it axes of 1 where it does not vary: {name}[:, None, None, :] if it is (B, Sk)",
        )


def _require_rotary_tables(cos: Layout, sin: Layout, head_dim: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        require_dtype(f"rotary's {name}", table, FLOATS)
        require_rank(f"rotary's {name}", table, "positions R/2")
    require_shape("rotary's sin", sin, cos.shape, "(positions, R/2) like cos")
    if 2 * cos.shape[1] > head_dim:
        raise error(
            ValueError,
            f"rotary tables of {cos.shape[1]} columns rotate {2 * cos.shape[1]} features",
            f"at most D = {head_dim} features can be rotated",
            "make tables of at most D / 2 columns",
        )

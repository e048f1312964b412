"""Whole arrays, what ranks make of their parts, and what one device makes of all."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from support.dtypes import dtype_of

from cupyattn import (
    AttentionGrads,
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
)
from cupyattn.distributed import ring_attention, ring_attention_backward, run, shard, unshard
from cupyattn.distributed.placement import Placement

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # of float64: sums of up to 300 terms in other orders


class Case(NamedTuple):
    """Whole arrays, and how ranks hold them."""

    ranks: int
    placement: str
    arrays: dict[str, Any]
    options: dict[str, Any]
    cu_seqlens: Any = None

    def __repr__(self) -> str:
        shapes = {name: array.shape for name, array in self.arrays.items()}
        return f"Case({self.ranks}, {self.placement}, {shapes}, {self.options}, {self.cu_seqlens})"

    @property
    def packed(self) -> dict[str, Any]:
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}

    def options_of(self, rank: int) -> dict[str, Any]:
        """What a rank is given: of masks and biases the rows of its queries."""
        cut = {
            name: shard(x, rank, self.ranks, placement=self.placement, axis=-2)
            for name, x in self.options.items()
            if name in ("mask", "bias") and x.ndim > 1 and x.shape[-2] > 1
        }
        return {**self.options, **cut}

    def shard(self, name: str, rank: int) -> Any:
        """A rank's part of an array."""
        axis = None
        if name in ("lse", "dlse"):
            axis = 2 if self.cu_seqlens is None else 1
        x = self.arrays[name]
        return shard(x, rank, self.ranks, placement=self.placement, axis=axis, **self.packed)

    def unshard(self, shards: Any, *, of_rows: bool = False) -> Any:
        axis = None
        if of_rows:
            axis = 2 if self.cu_seqlens is None else 1
        return unshard(list(shards), placement=self.placement, axis=axis, **self.packed)


def case(
    ranks: int,
    placement: str,
    size: int = 3,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 6),
    dtype: str = "float64",
    batch: int = 2,
    draw: int = 0,
    sizes: tuple[int, ...] | None = None,
    **options: Any,
) -> Case:
    """Draw the arrays: `size` tokens a piece, or packed sequences of `sizes` a piece."""
    rng = np.random.default_rng(draw)
    unit = Placement(placement, ranks).pieces * ranks
    h, g = heads
    d, dv = dims
    bounds = None
    if sizes is None:
        lead: tuple[int, ...] = (batch, size * unit)
    else:
        bounds = np.concatenate([[0], np.cumsum(np.array(sizes) * unit)])
        lead = (int(bounds[-1]),)
    shapes = {"q": (*lead, h, d), "k": (*lead, g, d), "v": (*lead, g, dv), "dout": (*lead, h, dv)}
    arrays = {
        name: rng.standard_normal(shape).astype(dtype_of(dtype)) for name, shape in shapes.items()
    }
    exact = "float64" if dtype == "float64" else "float32"
    arrays["dlse"] = rng.standard_normal((*lead[:-1], h, lead[-1])).astype(exact)
    return Case(ranks, placement, arrays, options, bounds)


def one_device(case: Case) -> tuple[Any, Any, AttentionGrads]:
    """The results of one call, on all tokens."""
    arrays, options = case.arrays, case.options
    inputs = [arrays[name] for name in "qkv"]
    options = {**options, "q_offset": 0}
    lengths: list[Any] = []
    forward, backward = attention, attention_backward
    if case.cu_seqlens is not None:
        longest = int(np.diff(case.cu_seqlens).max(initial=0))
        lengths = [case.cu_seqlens, case.cu_seqlens, longest, longest]
        forward, backward = attention_varlen, attention_varlen_backward
    out, lse = forward(*inputs, *lengths, return_lse=True, **options)
    grads = backward(arrays["dout"], *inputs, out, lse, *lengths, dlse=arrays["dlse"], **options)
    return out, lse, grads


def ring(case: Case, group: Any) -> tuple[Any, Any, AttentionGrads]:
    """What one rank computes."""
    q, k, v, dout, dlse = (case.shard(name, group.rank) for name in ("q", "k", "v", "dout", "dlse"))
    given = {"group": group, "placement": case.placement, **case.packed}
    given |= case.options_of(group.rank)
    out, lse = ring_attention(q, k, v, return_lse=True, **given)
    grads = ring_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **given)
    return out, lse, grads


def on_ranks(case: Case) -> tuple[Any, Any, AttentionGrads]:
    """The results of all ranks, put together."""
    return whole(case, run(lambda group: ring(case, group), case.ranks, timeout=60))


def whole(case: Case, results: list[Any]) -> tuple[Any, Any, AttentionGrads]:
    """Put together what ranks computed: out, lse and gradients of each."""
    outs, lses, grads = zip(*results, strict=True)
    of_tokens = {
        name: case.unshard([getattr(g, name) for g in grads]) for name in ("dq", "dk", "dv")
    }
    of_all = {"dsinks": grads[0].dsinks, "dbias": grads[0].dbias}
    for each in grads[1:]:  # the gradient of sinks is that of all ranks, on each
        np.testing.assert_array_equal(each.dsinks, grads[0].dsinks)
    bias = case.options.get("bias")
    if bias is not None and bias.ndim > 1 and bias.shape[-2] > 1:
        of_rows = [each.dbias for each in grads]
        of_all["dbias"] = unshard(of_rows, placement=case.placement, axis=-2)
    else:  # so is that of a bias that is the same for all queries
        for each in grads[1:]:
            np.testing.assert_array_equal(each.dbias, grads[0].dbias)
    return (
        case.unshard(outs),
        case.unshard(lses, of_rows=True),
        AttentionGrads(**of_tokens, **of_all),
    )


def assert_same(case: Case) -> None:
    """Everything is what one device gives."""
    out, lse, grads = on_ranks(case)
    expected_out, expected_lse, expected = one_device(case)
    np.testing.assert_allclose(out, expected_out, **CLOSE)
    np.testing.assert_allclose(lse, expected_lse, **CLOSE)
    for name in AttentionGrads._fields:
        if getattr(expected, name) is not None:
            np.testing.assert_allclose(
                getattr(grads, name), getattr(expected, name), **CLOSE, err_msg=name
            )
